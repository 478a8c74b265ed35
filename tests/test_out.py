"""`out=` beside autograd: what a graph saved must not change under it without a word.

Kernels write by address, of which autograd knows nothing, so each way that takes `out` must raise the version
counter, as torch's own operators do: backward then raises instead of using the new values. An inference tensor
has no counter, so that torch refuses it outside inference mode; so do we.
"""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moeroute
from aclnn_calls import GOOD, SIXTEEN_MIB, run
from moeroute import aclnn, check
from moeroute.aclnn.signatures import SIGNATURES
from moeroute.dispatch import Backend
from moeroute.testing import assert_same_bits

T, K, E, H = 4, 2, 5, 6
LOGITS = torch.linspace(-1, 1, T * E).reshape(T, E).cos()
GATING = moeroute.gating_topk(LOGITS, K, score="sigmoid", backend="reference")
IDS = GATING.expert_ids
MAP = torch.zeros(T, E, dtype=torch.bool).scatter_(1, IDS.long(), True)
PLAN = moeroute.plan_from_expert_ids(IDS, E, backend="reference")
MAP_PLAN = moeroute.plan_from_routing_map(MAP, backend="reference")
R = S = T * K
TOKENS, ROWS = torch.linspace(0, 9, T * H).reshape(T, H).sin(), torch.linspace(0, 5, R * H).reshape(R, H).cos()
WEIGHTS, ALL_WEIGHTS, SLOTS = GATING.weights, GATING.scores, torch.linspace(1, 2, S)

FLOAT, INT, BYTE = torch.float32, torch.int32, torch.int8
Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


def one(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., None]:
    return lambda outs, **backend: function(*arguments, out=outs[0], **options, **backend)


def many(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., None]:
    return lambda outs, **backend: function(*arguments, out=outs, **options, **backend)


BACKWARD = {"score": "sigmoid", "renormalize": True}
SLOT_TABLE: Shapes = ((INT, (S,)),)

# Every way that takes `out`, and the tensors that it wants.
WAYS: dict[str, tuple[Callable[..., None], Shapes]] = {
    "gating_topk": (
        many(moeroute.gating_topk, LOGITS, K, score="sigmoid"), ((FLOAT, (T, K)), (INT, (T, K)), (FLOAT, (T, E)))),
    "gating_topk, given": (
        many(moeroute.gating_topk, LOGITS, K, expert_ids=IDS), ((FLOAT, (T, K)), (INT, (T, K)), (FLOAT, (T, E)))),
    "gating_topk_backward": (
        one(moeroute.gating_topk_backward, GATING.scores, WEIGHTS, IDS, **BACKWARD), ((FLOAT, (T, E)),)),
    "plan_from_expert_ids": (one(moeroute.plan_from_expert_ids, IDS, E), SLOT_TABLE),
    "plan_from_expert_ids, any": (one(moeroute.plan_from_expert_ids, IDS, None), SLOT_TABLE),
    "plan_from_routing_map": (one(moeroute.plan_from_routing_map, MAP), SLOT_TABLE),
    "plan_from_routing_map, table": (one(moeroute.plan_from_routing_map, MAP, topk=K), SLOT_TABLE),
    "plan_from_routing_map, fill": (
        one(moeroute.plan_from_routing_map, MAP, fill=True, capacity=1), ((INT, (E,)),)),
    "plan_from_row_of_slot": (one(moeroute.plan_from_row_of_slot, PLAN.row_of_slot, T, R), SLOT_TABLE),
    "plan_from_token_ids": (one(moeroute.plan_from_token_ids, PLAN.token_of_row, T), SLOT_TABLE),
    "plan_from_segments": (one(moeroute.plan_from_segments, torch.tensor([[2, 1], [1, 0]]), T), ((INT, (T,)),)),
    "plan_from_row_id_map": (
        one(moeroute.plan_from_row_id_map, moeroute.row_id_map(PLAN, backend="reference"), R), ((INT, (R,)),)),
    "row_id_map": (one(moeroute.row_id_map, PLAN), ((INT, (T, 2 * E + 1)),)),
    "plan_from_chunks": (
        one(moeroute.plan_from_chunks, torch.tensor([2, 1]), torch.tensor([1, 0]), T), ((INT, (T,)),)),
    "spread": (one(moeroute.spread, TOKENS, PLAN), ((FLOAT, (R, H)),)),
    "spread, weights": (one(moeroute.spread, TOKENS, PLAN, SLOTS), ((FLOAT, (R, H)),)),
    "combine": (one(moeroute.combine, ROWS, PLAN), ((FLOAT, (T, H)),)),
    "combine, weights": (one(moeroute.combine, ROWS, PLAN, SLOTS), ((FLOAT, (T, H)),)),
    "combine, init": (one(moeroute.combine, ROWS, PLAN, init=TOKENS), ((FLOAT, (T, H)),)),
    "row_dots": (one(moeroute.row_dots, ROWS, TOKENS, PLAN), ((FLOAT, (S,)),)),
    "row_dots, bfloat16": (
        one(moeroute.row_dots, ROWS, TOKENS, PLAN, dtype=torch.bfloat16), ((torch.bfloat16, (S,)),)),
    "dynamic_quantize": (many(moeroute.dynamic_quantize, ROWS), ((BYTE, (R, H)), (FLOAT, (R,)))),
    "quantize": (one(moeroute.quantize, ROWS, torch.tensor(2.0), torch.tensor(1.0)), ((BYTE, (R, H)),)),
    "quantize, spread": (
        one(moeroute.quantize, TOKENS, torch.tensor(2.0), torch.tensor(1.0), plan=PLAN), ((BYTE, (R, H)),)),
    "spread_quantized": (many(moeroute.spread_quantized, TOKENS, PLAN), ((BYTE, (R, H)), (FLOAT, (R,)))),
    "slot_weights": (one(moeroute.slot_weights, WEIGHTS, PLAN), ((FLOAT, (S,)),)),
    "slot_weights, map": (one(moeroute.slot_weights, ALL_WEIGHTS, MAP_PLAN), ((FLOAT, (S,)),)),
    "permute_weights": (one(moeroute.permute_weights, WEIGHTS, PLAN), ((FLOAT, (R,)),)),
    "permute_weights, map": (one(moeroute.permute_weights, ALL_WEIGHTS, MAP_PLAN), ((FLOAT, (R,)),)),
    "permute_weights_backward": (one(moeroute.permute_weights_backward, SLOTS, PLAN), ((FLOAT, (T, K)),)),
    "permute_weights_backward, map": (one(moeroute.permute_weights_backward, SLOTS, MAP_PLAN), ((FLOAT, (T, E)),)),
    "permute_weights_backward, map, bfloat16": (
        one(moeroute.permute_weights_backward, SLOTS.bfloat16(), MAP_PLAN), ((torch.bfloat16, (T, E)),)),
    "permute_backward": (one(moeroute.permute_backward, ROWS, PLAN, WEIGHTS), ((FLOAT, (T, H)),)),
    "unpermute_backward": (
        many(moeroute.unpermute_backward, TOKENS, ROWS, PLAN, WEIGHTS), ((FLOAT, (R, H)), (FLOAT, (T, K)))),
    "unpermute_backward, map": (
        many(moeroute.unpermute_backward, TOKENS, ROWS, MAP_PLAN, ALL_WEIGHTS), ((FLOAT, (R, H)), (FLOAT, (T, E)))),
}  # fmt: skip

# A buffer of this shape. A kernel writes into the first two, the others get a copy, but for gating.
BUFFERS: dict[str, Callable[..., Tensor]] = {
    "whole": lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    "rows apart": lambda shape, dtype: torch.zeros(shape[0] * 2, *shape[1:], dtype=dtype)[::2],
    "columns apart": lambda shape, dtype: torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2],
}


def made(shapes: Shapes, buffer: str = "whole") -> tuple[Tensor, ...]:
    return tuple(BUFFERS[buffer](shape, dtype) for dtype, shape in shapes)


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("name", WAYS)
def test_what_autograd_saved_is_missed(name: str, buffer: str, backend: Backend) -> None:
    if buffer != "whole" and backend == "triton":
        pytest.skip("the interpreter takes its time")
    if buffer == "columns apart" and name.startswith("gating"):
        pytest.skip("refused")
    call, shapes = WAYS[name]
    outs = made(shapes, buffer)
    for out in outs:
        versions = [other._version for other in outs]
        leaf = torch.ones(out.shape, requires_grad=True)
        if out.dtype is not INT:
            result = (leaf * out).sum()
        else:
            result = leaf.reshape(-1).index_select(0, out if out.dim() == 1 else out[0]).sum()
        with torch.no_grad():
            call(outs, backend=backend)
        assert all(other._version > before for other, before in zip(outs, versions, strict=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()


@pytest.mark.parametrize("name", WAYS)
def test_views_share_the_counter(name: str) -> None:
    """The base of `out`, and other views of it, were changed too."""
    call, shapes = WAYS[name]
    outs = made(shapes)
    bases = [out.detach() for out in outs]
    versions = [base._version for base in bases]
    call(outs)
    assert all(base._version > before for base, before in zip(bases, versions, strict=True))


@pytest.mark.parametrize("name", WAYS)
def test_inference_tensors(name: str, backend: Backend) -> None:
    """Refused outside inference mode, before anything is written; inside they are written like others."""
    call, shapes = WAYS[name]
    with torch.inference_mode():
        outs = made(shapes)
    for i in range(len(outs)):
        mixed = [out if j == i else torch.zeros(out.shape, dtype=out.dtype) for j, out in enumerate(outs)]
        with torch.no_grad(), pytest.raises(ValueError, match=r"out.* must be no inference tensor outside"):
            call(tuple(mixed), backend=backend)
        assert all(bool((out == 0).all()) for out in mixed)
    with torch.inference_mode():
        call(outs, backend=backend)
    usual = made(shapes)
    call(usual, backend=backend)
    assert_same_bits(outs, usual)
    with torch.inference_mode():  # and usual tensors there
        call(usual, backend=backend)


def test_the_table_has_every_function_with_out() -> None:
    public = {
        name: value for name, value in vars(moeroute).items() if inspect.isfunction(value) and not name.startswith("_")
    }
    with_out = {name for name, value in public.items() if "out" in inspect.signature(value).parameters}
    assert with_out == {name.partition(",")[0] for name in WAYS}


@pytest.mark.parametrize("name", GOOD)
def test_aclnn_outputs(name: str) -> None:
    arguments = GOOD[name]()
    outs = {
        parameter.name: arguments[parameter.name]
        for parameter in SIGNATURES[name].parameters
        if "out" in parameter.kind and arguments[parameter.name] is not None
    }
    versions = {argument: out._version for argument, out in outs.items()}
    run(name, *arguments.values(), workspace=16 * 2**20 if name in SIXTEEN_MIB else 0)
    for argument, out in outs.items():
        assert out._version > versions[argument], f"{argument} was written in secret"
    for argument, out in outs.items():
        with torch.inference_mode():
            inference = torch.zeros(out.shape, dtype=out.dtype)
        first = getattr(aclnn, f"aclnn{name}GetWorkspaceSize")
        status = first(**{**arguments, argument: inference})[0]
        assert status == 161002
        assert f"{argument} must be no inference tensor" in aclnn.aclGetRecentErrMsg()


# ---------------------------------------------------------------------------- elements that share memory


def elements_meet(tensor: Tensor) -> bool:
    """By counting: fewer places than elements."""
    places = itertools.product(*map(range, tensor.shape))
    addresses = {sum(i * stride for i, stride in zip(place, tensor.stride(), strict=True)) for place in places}
    return len(addresses) < tensor.numel()


def test_up_to_two_dimensions_the_answer_is_exact() -> None:
    memory = torch.zeros(256)
    for rank in (1, 2):
        for shape in itertools.product(range(6), repeat=rank):
            for strides in itertools.product(range(8), repeat=rank):
                view = memory.as_strided(shape, strides)
                assert check.overlaps_itself(view) == elements_meet(view), f"{shape} {strides}"
                thick = memory.as_strided((*shape, 1), (*strides, 3))  # a third dimension of size 1 changes nothing
                assert check.overlaps_itself(thick) == elements_meet(view), f"{shape} {strides}"


def test_with_more_dimensions_no_overlap_is_missed() -> None:
    memory = torch.zeros(256)
    for shape in ((2, 2, 2), (2, 3, 4), (3, 1, 2, 2)):
        for strides in itertools.product(range(7), repeat=len(shape)):
            view = memory.as_strided(shape, strides)
            assert check.overlaps_itself(view) or not elements_meet(view), f"{shape} {strides}"
    whole = torch.zeros(4, 5, 6, 7)
    for order in itertools.permutations(range(4)):
        for step in (1, 2, 3):
            assert not check.overlaps_itself(whole.permute(order)[1:, ::step, :2, ::step]), f"{order} {step}"


@pytest.mark.parametrize("name", WAYS)
def test_outputs_whose_elements_meet(name: str) -> None:
    call, shapes = WAYS[name]
    for i, (dtype, shape) in enumerate(shapes):
        outs = list(made(shapes))
        strides = (1, 1) if len(shape) == 2 else (0,)
        outs[i] = torch.zeros(64, dtype=dtype).as_strided(shape, strides)
        with pytest.raises(ValueError, match=r"out.* must be a tensor whose elements do not overlap; got strides"):
            call(tuple(outs))
        assert all(bool((out == 0).all()) for out in outs)
