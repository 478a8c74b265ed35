"""The operators of `torch.ops.moeroute`, called directly and with nonsense, and plans whose tensors were resized.

A registered operator stands in exported graphs, where no verb has looked at its arguments; and a plan is checked
when it is made, while its tensors can be resized later. Whatever comes: our error, or the result of the reference,
which is plain torch and cannot leave its tensors.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import moeroute
from moeroute.dispatch import Backend
from moeroute.ops.register import LIBRARY
from moeroute.testing import assert_same_bits

T, K, E, H = 3, 2, 4, 5
S = R = T * K
IDS = torch.tensor([[1, 3], [0, 1], [2, 3]], dtype=torch.int32)
MAP = torch.zeros(T, E, dtype=torch.bool).scatter_(1, IDS.long(), True)
PLAN = moeroute.plan_from_expert_ids(IDS, E, backend="reference")
MAP_PLAN = moeroute.plan_from_routing_map(MAP, backend="reference")
PLANS, RAGGED = PLAN.tensors._asdict(), MAP_PLAN.tensors._asdict()
TABLE = {**PLANS, "expert_of_slot": MAP_PLAN.expert_of_slot}
TOKENS, ROWS = torch.linspace(0, 9, T * H).reshape(T, H).sin(), torch.linspace(0, 5, R * H).reshape(R, H).cos()
SLOTS, WEIGHTS = torch.linspace(1, 2, S), torch.linspace(0.1, 1, T * K).reshape(T, K)
LOGITS = torch.linspace(-1, 1, T * E).reshape(T, E).cos()
EXPERTS = torch.tensor([0, 1, -1, 3, 2, 1], dtype=torch.int32)
EXPERT_OF_SLOT = MAP_PLAN.expert_of_slot
CHOICE = {
    "k": K, "score": "sigmoid", "num_groups": 2, "topk_groups": 1, "group_best": 1, "renormalize": True,
    "scaling_factor": 1.0, "eps": 1e-20, "weights_dtype": torch.float32,
}  # fmt: skip
SEGMENTS = {"first_expert": 0, "last_expert": E}
NOTHING_GIVEN = {"capacity": None, "segment": None, "align": 1, "num_rows": None, "check": False}

# Operators without an index of their own: plain torch, which cannot leave its tensors.
UNINDEXED = {"block_product", "exchange", "router_product", "normalize_scores", "sinkhorn"}

# A good call of every operator; some with all that is optional and without.
GOOD: dict[str, dict[str, Any]] = {
    "spread": {"x": TOKENS, "weights": None, **PLANS},
    "spread, weights": {"x": TOKENS, "weights": SLOTS, **RAGGED},
    "combine": {"rows": ROWS, "weights": None, **PLANS},
    "combine, weights": {"rows": ROWS, "weights": SLOTS, **RAGGED},
    "row_dots": {"rows": ROWS, "x": TOKENS, **PLANS, "dtype": torch.float32},
    "row_dots, ragged": {"rows": ROWS, "x": TOKENS, **RAGGED, "dtype": torch.float32},
    "spread_dots": {"x": TOKENS, "rows": ROWS, "weights": SLOTS, **PLANS},
    "spread_dots, ragged": {"x": TOKENS, "rows": ROWS, "weights": SLOTS, **RAGGED},
    "dynamic_quantize": {"rows": ROWS, "smooth": None, "expert_of_row": None},
    "dynamic_quantize, factors": {"rows": ROWS, "smooth": ROWS[:1], "expert_of_row": None},
    "dynamic_quantize, experts": {"rows": ROWS, "smooth": ROWS[:E], "expert_of_row": EXPERTS},
    "quantize": {"rows": ROWS, "scale": torch.tensor([20.0]), "offset": torch.tensor([0.5])},
    "spread_static": {"x": TOKENS, "scale": torch.tensor([20.0]), "offset": torch.tensor([0.5]), **PLANS},
    "spread_static, ragged": {"x": TOKENS, "scale": torch.tensor([20.0]), "offset": torch.tensor([0.5]), **RAGGED},
    "spread_quantized": {"x": TOKENS, "smooth": None, "expert_of_row": None, **PLANS},
    "spread_quantized, ragged": {"x": TOKENS, "smooth": ROWS[:E], "expert_of_row": EXPERTS, **RAGGED},
    "activate": {"x": ROWS[:, :4], "activation": "geglu", "interleaved": True},
    "activate, relu2": {"x": ROWS, "activation": "relu2", "interleaved": False},
    "activate_backward": {
        "grad": ROWS[:, :2], "x": ROWS[:, :4], "activation": "swiglu", "interleaved": False, "again": True},
    "activated_linear": {
        "x": ROWS[:, :4], "weight": torch.ones(E, 3, 2), "sizes": torch.tensor([1, 2, 0, 3]), "bias": torch.ones(E, 3),
        "activation": "swiglu", "interleaved": False},
    "spread_linear": {
        "x": TOKENS, "slot_weights": SLOTS, **PLANS, "weight": torch.ones(E, 2, H), "sizes": torch.tensor([1, 2, 0, 3]),
        "bias": None},
    "take": {"values": SLOTS, "index": PLAN.slot_of_row, "inverse": PLAN.row_of_slot},
    "slot_weights": {"weights": LOGITS, **RAGGED},
    "slot_weights, table": {"weights": LOGITS, **TABLE},
    "slot_weights_backward": {
        "grad": SLOTS, **RAGGED, "num_experts": E, "accumulate": True},
    "slot_weights_backward, table": {
        "grad": SLOTS, **TABLE, "num_experts": E, "accumulate": False},
    "routing_map": {**RAGGED, "num_experts": E, "bits": False},
    "routing_map, table": {**TABLE, "num_experts": E, "bits": True},
    "gating_topk": {"logits": LOGITS, "bias": torch.zeros(E), "expert_ids": None, **CHOICE},
    "gating_topk, given": {"logits": LOGITS, "bias": None, "expert_ids": IDS, **CHOICE},
    "gating_topk_backward": {
        "scores": LOGITS.sigmoid(), "grad_weights": WEIGHTS, "expert_ids": IDS, "grad_scores": LOGITS,
        "score": "sigmoid", "renormalize": True, "scaling_factor": 1.0, "eps": 1e-20, "out_dtype": torch.float32},
    "plan_expert_ids": {"expert_ids": IDS, "weights": None, "num_experts": E, **SEGMENTS, **NOTHING_GIVEN, "by_choice": False},
    "plan_expert_ids, all": {
        "expert_ids": IDS, "weights": WEIGHTS, "num_experts": E, **SEGMENTS, "capacity": 2, "segment": 3, "align": 3,
        "num_rows": 8, "by_choice": False, "check": True},
    "plan_expert_ids, by choice": {
        "expert_ids": IDS, "weights": WEIGHTS, "num_experts": E, **SEGMENTS, **NOTHING_GIVEN, "capacity": 1,
        "by_choice": True},
    "plan_any_ids": {"expert_ids": IDS, "num_rows": None, "check": False},
    "plan_routing_map": {
        "routing_map": MAP, "weights": None, **SEGMENTS, "topk": None, "fill": False, **NOTHING_GIVEN,
        "num_slots": None},
    "plan_routing_map, table": {
        "routing_map": MAP, "weights": LOGITS, **SEGMENTS, "topk": K, "fill": False, **NOTHING_GIVEN, "capacity": 1,
        "num_slots": None},
    "plan_routing_map, fill": {
        "routing_map": MAP, "weights": LOGITS, **SEGMENTS, "topk": None, "fill": True, "capacity": 2, "segment": 2,
        "align": 1, "num_rows": 8, "num_slots": None, "check": False},
    "plan_routing_map, aligned": {
        "routing_map": MAP.int(), "weights": None, **SEGMENTS, "topk": None, "fill": True, **NOTHING_GIVEN, "align": 4,
        "num_slots": 5},
    "plan_row_of_slot": {
        "row_of_slot": PLAN.row_of_slot, "expert_of_slot": EXPERT_OF_SLOT, "num_rows": R, "first_row": 1},
    "plan_token_ids": {
        "token_ids": PLAN.token_of_row, "rows": torch.arange(R), "num_tokens": T, "num_rows": R, "num_experts": 2},
    "plan_row_id_map": {
        "row_id_map": torch.tensor([[1, 0, 1], [-1, -1, 0]]), "pad_offsets": torch.tensor([1]), "num_rows": 3},
    "row_id_map": {
        "row_of_slot": MAP_PLAN.row_of_slot, "slot_of_row": MAP_PLAN.slot_of_row,
        "slot_offsets": MAP_PLAN.slot_offsets, "expert_of_slot": MAP_PLAN.expert_of_slot, "num_tokens": T,
        "num_experts": E},
    "plan_chunks": {"lengths": torch.tensor([[1, 1], [1, 0]]), "order": None, "num_tokens": T},
    "plan_chunks, ordered": {
        "lengths": torch.tensor([[1], [2], [0]]), "order": torch.tensor([2, 0, 1]), "num_tokens": T},
    "grouped_linear": {
        "rows": ROWS, "weight": torch.ones(E, 2, H), "sizes": torch.tensor([1, 2, 0, 3]), "bias": torch.ones(E, 2)},
    "grouped_outer": {"left": ROWS, "right": ROWS[:, :3], "sizes": torch.tensor([1, 2, 0, 3])},
}  # fmt: skip

TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "shorter": lambda t: t[:-1],
    "much longer": lambda t: t.repeat(1000, *(1,) * (t.dim() - 1)),
    "twice as long": lambda t: torch.cat([t, t]),
    "empty": lambda t: t[:0],
    "narrower": lambda t: t[..., :-1],
    "wider": lambda t: torch.cat([t, t], dim=-1),
    "flat": lambda t: t.reshape(-1),
    "a number": lambda t: t.reshape(-1)[0],
    "one rank more": lambda t: t[None],
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "far out": lambda t: torch.full_like(t, 10**6) if t.dtype in (torch.int32, torch.int64) else t,
    "negative": lambda t: torch.full_like(t, -(10**6)) if t.dtype in (torch.int32, torch.int64) else t,
    "int64": Tensor.long,
    "int8": lambda t: t.to(torch.int8),
    "bool": Tensor.bool,
    "float32": Tensor.float,
    "float64": Tensor.double,
    "bfloat16": Tensor.bfloat16,
    "complex64": lambda t: t.to(torch.complex64),
    "sparse": lambda t: t.to_sparse(),
    "on meta": lambda t: t.to("meta"),
}
INTEGERS = (-1, 0, 1, 2, 5, 7, 1000, 2**31, 2**40, -(2**40))
NUMBERS = (float("nan"), float("inf"), 1e300)
STRINGS = ("nonsense", "", "softmax", "topk_softmax")
DTYPES = (torch.int32, torch.float64, torch.bool, torch.bfloat16)


def call(name: str, arguments: dict[str, Any], backend: Backend) -> Any:
    operator = getattr(torch.ops.moeroute, name.partition(",")[0])
    if "backend" in str(operator.default._schema):
        arguments = {**arguments, "backend": backend}
    return operator.default(**arguments)


def nonsense(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    arguments = GOOD[name]
    for argument, value in arguments.items():
        others: Iterator[tuple[str, Any]]
        if isinstance(value, Tensor):
            others = ((what, change(value)) for what, change in TENSORS.items())
        elif isinstance(value, bool):
            others = iter([(str(not value), not value)])
        elif isinstance(value, int) or (value is None and argument in ("capacity", "segment", "num_rows", "topk")):
            others = ((str(number), number) for number in INTEGERS)
        elif isinstance(value, float):
            others = ((str(number), number) for number in NUMBERS)
        elif isinstance(value, str):
            others = ((repr(text), text) for text in STRINGS)
        elif isinstance(value, torch.dtype):
            others = ((str(dtype), dtype) for dtype in DTYPES)
        else:
            continue
        for what, other in others:
            yield f"{argument} is {what}", {**arguments, argument: other}
        if value is not None and argument in ("weights", "bias", "slot_offsets", "capacity", "segment", "num_rows"):
            yield f"{argument} is None", {**arguments, argument: None}


def outcome(name: str, arguments: dict[str, Any], backend: Backend, where: str) -> Any:
    try:
        return call(name, arguments, backend)
    except (ValueError, TypeError) as error:
        assert str(error).startswith("moeroute."), f"{where}: {error}"
        return str(error)
    except RuntimeError as error:  # the dispatcher's own, of what no operator of torch takes
        where_from = (
            "trying to run this operator with meta Tensors",
            "Expected a value of type",
            "expected at most",
            "is missing value",
            "but expected",
            "required dim",
        )
        assert any(text in str(error) for text in where_from), f"{where}: {error}"
        return "refused"


def test_every_operator_has_a_good_call() -> None:
    defined = {name.removeprefix("moeroute::").partition(".")[0] for name in LIBRARY._op_defs}
    own = {name for name in defined if not name.endswith("_traced")} - UNINDEXED
    assert own == {name.partition(",")[0] for name in GOOD}


@pytest.mark.parametrize("name", GOOD)
def test_nonsense(name: str) -> None:
    """The CPU's kernels, which take addresses, say and do what the reference does."""
    assert_same_bits(call(name, GOOD[name], "cpu"), call(name, GOOD[name], "reference"))
    before = copy.deepcopy(GOOD[name])
    for what, arguments in nonsense(name):
        where = f"{name}: {what}"
        found, expected = (outcome(name, arguments, backend, where) for backend in ("cpu", "reference"))
        if isinstance(found, str) or isinstance(expected, str):
            if "float64" not in what:  # which the CPU's kernels do not take
                assert found == expected, where
        elif "on meta" in what:  # then the results are too, with nothing in them
            assert {t.device.type for t in (found if isinstance(found, tuple) else (found,))} == {"meta"}, where
        else:
            assert_same_bits(found, expected, where)
    assert_same_bits(tuple(GOOD[name].values()), tuple(before.values()), f"{name} changed what it was given")


@pytest.mark.parametrize("name", [name for name in GOOD if not name.startswith("grouped")])
def test_backends_of_nonsense(name: str) -> None:
    nonsense: tuple[Any, ...] = ("nonsense", "")
    for backend in nonsense:
        with pytest.raises(ValueError, match=r"moeroute.* backend must be one of"):
            call(name, GOOD[name], backend)


def test_tokens_and_choices_by_the_million() -> None:
    """No kernel may believe a number that no tensor has."""
    ops = torch.ops.moeroute
    with pytest.raises(ValueError, match=r"combine: row_of_slot must be \[T \* K\] with T = 1000000"):
        ops.combine(ROWS, None, *PLAN.tensors[:4], 10**6, "cpu")
    with pytest.raises(ValueError, match=r"combine: slot_offsets must be of shape \[1000001\]"):
        ops.combine(ROWS, None, *MAP_PLAN.tensors[:4], 10**6, "cpu")
    for k, ids in itertools.product((100_000,), (None, IDS)):
        with pytest.raises(ValueError, match=r"gating_topk: (k must be in 1\.\.2|expert_ids must be \[T, K\])"):
            ops.gating_topk(*({**GOOD["gating_topk"], "k": k, "expert_ids": ids}.values()), "cpu")


def test_nonsense_in_triton_says_the_same() -> None:
    if moeroute.dispatch.unavailable("triton") is not None:
        pytest.skip("no triton")
    for name in GOOD:
        for i, (what, arguments) in enumerate(nonsense(name)):
            expected = outcome(name, arguments, "reference", what)
            if isinstance(expected, str) and "float64" not in what and i % 7 == 0:
                assert outcome(name, arguments, "triton", what) == expected, f"{name}: {what}"


# ---------------------------------------------------------------------------- plans that were resized

USES: dict[str, Callable[[moeroute.RoutingPlan, Backend], Any]] = {
    "spread": lambda plan, backend: moeroute.spread(TOKENS, plan, backend=backend),
    "spread, out": lambda plan, backend: moeroute.spread(TOKENS, plan, out=torch.zeros(R, H), backend=backend),
    "combine": lambda plan, backend: moeroute.combine(ROWS, plan, backend=backend),
    "combine, init": lambda plan, backend: moeroute.combine(ROWS, plan, init=TOKENS, backend=backend),
    "row_dots": lambda plan, backend: moeroute.row_dots(ROWS, TOKENS, plan, backend=backend),
    "quantize": lambda plan, backend: moeroute.quantize(
        TOKENS, torch.tensor(2.0), torch.tensor(1.0), plan=plan, backend=backend
    ),
    "spread_quantized": lambda plan, backend: moeroute.spread_quantized(TOKENS, plan, backend=backend),
    "permute": lambda plan, backend: moeroute.permute(TOKENS, plan, backend=backend),
    "unpermute": lambda plan, backend: moeroute.unpermute(ROWS, plan, backend=backend),
    "permute, weights": lambda plan, backend: moeroute.permute(TOKENS, plan, weights_of(plan), backend=backend),
    "unpermute, weights": lambda plan, backend: moeroute.unpermute(ROWS, plan, weights_of(plan), backend=backend),
    "permute_backward": lambda plan, backend: moeroute.permute_backward(ROWS, plan, backend=backend),
    "unpermute_backward": lambda plan, backend: moeroute.unpermute_backward(
        TOKENS, ROWS, plan, weights_of(plan), backend=backend
    ),
    "slot_weights": lambda plan, backend: moeroute.slot_weights(weights_of(plan), plan, backend=backend),
    "routing_map_of": lambda plan, backend: moeroute.routing_map_of(plan, backend=backend),
    "permute_weights": lambda plan, backend: moeroute.permute_weights(weights_of(plan), plan, backend=backend),
    "permute_weights_backward": lambda plan, backend: moeroute.permute_weights_backward(SLOTS, plan, backend=backend),
}


def weights_of(plan: moeroute.RoutingPlan) -> Tensor:
    return WEIGHTS if plan.expert_of_slot is None else LOGITS


@pytest.mark.parametrize("size", (0, 1, 5, 7, 4096))
@pytest.mark.parametrize("use", USES)
def test_a_resized_plan_is_refused(use: str, size: int, backend: Backend) -> None:
    for kind, fields in (
        ("ids", ("row_of_slot", "slot_of_row")),
        ("map", ("row_of_slot", "slot_of_row", "slot_offsets", "expert_of_slot")),
    ):
        for field in fields:
            plan = moeroute.plan_from_expert_ids(IDS, E) if kind == "ids" else moeroute.plan_from_routing_map(MAP)
            USES[use](plan, "reference")
            getattr(plan, field).resize_(size)
            with pytest.raises(ValueError, match=r"must be .*; got shape"):
                USES[use](plan, backend)
            leaf = TOKENS.clone().requires_grad_()
            with pytest.raises(ValueError, match=r"must be .*; got shape"):
                moeroute.permute(leaf, plan, backend=backend)


def test_a_plan_that_is_resized_between_forward_and_backward() -> None:
    plan = moeroute.plan_from_routing_map(MAP)
    tokens = TOKENS.clone().requires_grad_()
    result = moeroute.permute(tokens, plan)
    plan.row_of_slot.resize_(4096)
    with pytest.raises((RuntimeError, ValueError), match=r"inplace operation|must be"):
        result.sum().backward()
