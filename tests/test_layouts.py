"""Every tensor argument of every public function, in many layouts and every dtype that it admits.

The result is that of a contiguous copy with the same values, to the bit: how a tensor lies in memory is
nobody's business. The copy is made by torch, so the expectation has nothing to do with the layout.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import moeroute
from moeroute import nn
from moeroute.dispatch import Backend
from moeroute.ops.activations.op import activate
from moeroute.testing import assert_same_bits

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)
INTEGERS = (
    torch.int32, torch.int64, torch.int8, torch.int16, torch.uint8, torch.uint16, torch.uint32, torch.uint64
)  # fmt: skip
MAPS = (torch.bool, torch.int8, torch.uint8, torch.int32)
COPIED = (*FLOATS, torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)

# ---------------------------------------------------------------------------- layouts


def transposed(tensor: Tensor) -> Tensor:
    reverse = tuple(reversed(range(tensor.dim())))
    return tensor.permute(reverse).contiguous().permute(reverse)


def strided(tensor: Tensor) -> Tensor:
    """Every other element of every dimension."""
    wide = torch.zeros([2 * size + 1 for size in tensor.shape], dtype=tensor.dtype)
    return wide[tuple(slice(1, 2 * size + 1, 2) for size in tensor.shape)].copy_(tensor)


def columns(tensor: Tensor) -> Tensor:
    """Columns of a wider table, which begin in the middle of a row."""
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 4, dtype=tensor.dtype)
    return wide[..., 3:-1].copy_(tensor)


def expanded_rows(tensor: Tensor) -> Tensor:
    return tensor[:1].expand_as(tensor) if tensor.shape[0] else tensor


def expanded_columns(tensor: Tensor) -> Tensor:
    return tensor[..., :1].expand_as(tensor) if tensor.shape[-1] else tensor


def overlapping(tensor: Tensor) -> Tensor:
    """A step in any dimension is a step to the next element."""
    if tensor.numel() == 0:
        return tensor
    return tensor.contiguous().reshape(-1).as_strided(tensor.shape, (1,) * tensor.dim())


def offset(tensor: Tensor) -> Tensor:
    """One element behind the beginning of its memory."""
    memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


def unaligned(tensor: Tensor) -> Tensor:
    """At an address that is no multiple of anything."""
    if tensor.numel() == 0:
        return tensor
    memory = bytearray(tensor.numel() * tensor.element_size() + 1)
    whole = torch.frombuffer(memory, dtype=tensor.dtype, offset=1, count=tensor.numel())
    return whole.view(tensor.shape).copy_(tensor)


def negated(tensor: Tensor) -> Tensor:
    """Torch negates it when it is read."""
    try:
        return torch._neg_view(tensor.neg())
    except (NotImplementedError, RuntimeError):
        return tensor  # there is no negative of this dtype


def unusual_strides(tensor: Tensor) -> Tensor:
    """A dimension of size 0 or 1 may have any stride."""
    strides = [7 if size <= 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.contiguous().as_strided(tensor.shape, strides)


LAYOUTS = (
    transposed, strided, columns, expanded_rows, expanded_columns, overlapping, offset, unaligned, negated,
    unusual_strides,
)  # fmt: skip

# ---------------------------------------------------------------------------- the functions

SIZES = {"small": (5, 2, 6, 67), "large": (70, 3, 70, 4), "one": (1, 1, 1, 1), "none": (0, 2, 4, 3)}

# A function, its arguments, and the dtypes of those that admit others than their own.
Call = tuple[Callable[..., Any], dict[str, Any], dict[str, tuple[torch.dtype, ...]]]


def with_plan(function: Callable[..., Any], make_plan: Callable[..., Any]) -> Callable[..., Any]:
    """The plan and what a verb makes of it, so that a plan is not only looked at."""

    def call(backend: Backend, given: tuple[Any, ...], **arguments: Any) -> Any:
        keywords = {} if make_plan is moeroute.RoutingPlan else {"backend": backend}
        plan = make_plan(**arguments, **keywords)
        return plan, plan.token_of_row, function(*given, plan, backend=backend)

    return call


def calls(sizes: str) -> dict[str, Call]:
    T, K, E, H = SIZES[sizes]
    generator = torch.Generator().manual_seed(7)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    ids = torch.randint(0, E, (T, K), generator=generator, dtype=torch.int32)
    chosen = torch.rand(T, E, generator=generator) < 0.4
    plan = moeroute.plan_from_expert_ids(ids, E, backend="reference")
    map_plan = moeroute.plan_from_routing_map(chosen, backend="reference")
    scores = torch.rand(T, E, generator=generator)
    tokens, weights, all_weights = floats(T, H), floats(T, K), floats(T, E)
    rows, map_rows = floats(plan.num_rows, H), floats(map_plan.num_rows, H)
    slots, map_slots = floats(plan.num_slots), floats(map_plan.num_slots)
    entries = torch.randint(0, max(T, 1), (T * K,), generator=generator, dtype=torch.int32)
    offsets = torch.arange(0, T * K + 1, K, dtype=torch.int32)
    mask = torch.rand(T, generator=generator) < 0.3
    any_ids: dict[str, tuple[torch.dtype, ...]] = {"expert_ids": INTEGERS}
    gating = moeroute.gating_topk
    backward = moeroute.gating_topk_backward
    from_ids, from_map = moeroute.plan_from_expert_ids, moeroute.plan_from_routing_map
    from_rows, from_tokens = moeroute.plan_from_row_of_slot, moeroute.plan_from_token_ids
    permute = with_plan(moeroute.permute, moeroute.RoutingPlan)
    fields = {
        "row_of_slot": plan.row_of_slot, "slot_of_row": plan.slot_of_row, "num_tokens": T, "num_rows": plan.num_rows,
        "num_experts": E, "tokens_per_expert": plan.tokens_per_expert, "rows_per_expert": plan.rows_per_expert,
    }  # fmt: skip
    table: dict[str, Call] = {}
    for score in ("softmax", "sigmoid", "sqrtsoftplus", "topk_softmax", "topk_sigmoid", "none"):
        common: dict[str, Any] = {"score": score, "renormalize": True}
        table |= {
            f"gating_topk {score}": (
                gating, {"logits": floats(T, E), "k": 1, "bias": floats(E), **common}, {"logits": FLOATS}
            ),
            f"gating_topk {score}, given": (
                gating, {"logits": floats(T, E), "k": K, "expert_ids": ids, **common},
                {"logits": FLOATS, "expert_ids": INTEGERS},
            ),
            f"gating_topk_backward {score}": (
                backward,
                {"scores": scores, "grad_weights": weights, "expert_ids": ids, "grad_scores": floats(T, E), **common},
                {"grad_weights": FLOATS, "expert_ids": INTEGERS},
            ),
        }  # fmt: skip
    return {
        **table,
        "gating_topk bias": (gating,
            {"logits": floats(T, E), "k": 1, "bias": floats(E)}, {"bias": (*FLOATS, torch.float64)}),
        "plan_from_expert_ids": (with_plan(moeroute.permute, from_ids),
            {"given": (tokens,), "expert_ids": ids, "num_experts": E}, any_ids),
        "plan_from_expert_ids, any": (from_ids, {"expert_ids": ids, "num_experts": None}, any_ids),
        "plan_from_expert_ids, weights": (from_ids,
            {"expert_ids": ids, "num_experts": E, "capacity": 1, "drop": "weight", "weights": weights},
            {**any_ids, "weights": FLOATS}),
        "plan_from_routing_map": (with_plan(moeroute.permute, from_map),
            {"given": (tokens,), "routing_map": chosen}, {"routing_map": MAPS}),
        "plan_from_routing_map, table": (from_map,
            {"routing_map": chosen, "topk": K, "capacity": 2, "drop": "weight", "weights": all_weights},
            {"routing_map": MAPS, "weights": FLOATS}),
        "plan_from_routing_map, fill": (from_map,
            {"routing_map": chosen, "fill": True, "capacity": 2, "drop": "weight", "weights": all_weights},
            {"routing_map": MAPS, "weights": FLOATS}),
        "plan_from_row_of_slot": (with_plan(moeroute.permute, from_rows),
            {"given": (tokens,), "row_of_slot": plan.row_of_slot.reshape(T, K), "num_tokens": T,
             "num_rows": plan.num_rows, "expert_of_slot": ids},
            {"row_of_slot": (torch.int32, torch.int64), "expert_of_slot": INTEGERS}),
        "plan_from_token_ids": (with_plan(moeroute.permute, from_tokens),
            {"given": (tokens,), "token_ids": entries, "num_tokens": T, "rows": torch.arange(T * K).flip(0)},
            {"token_ids": INTEGERS, "rows": INTEGERS}),
        "plan_from_segments": (moeroute.plan_from_segments,
            {"lengths": torch.randint(0, 3, (2, E), generator=generator), "num_tokens": T}, {"lengths": INTEGERS}),
        "plan_from_row_id_map": (moeroute.plan_from_row_id_map,
            {"row_id_map": moeroute.row_id_map(map_plan), "num_rows": map_plan.num_rows + 4,
             "pad_offsets": torch.arange(E)}, {"row_id_map": INTEGERS[:4], "pad_offsets": INTEGERS}),
        "row_id_map": (moeroute.row_id_map, {"plan": map_plan}, {}),
        "plan_from_chunks": (moeroute.plan_from_chunks,
            {"lengths": torch.tensor([1, 0, 2, 1]), "order": torch.tensor([2, 3, 0, 1]), "num_tokens": T},
            {"lengths": INTEGERS, "order": INTEGERS}),
        "RoutingPlan": (permute, {"given": (tokens,), **fields, "topk": K, "expert_of_slot": None}, {}),
        "RoutingPlan, offsets": (with_plan(moeroute.slot_weights, moeroute.RoutingPlan),
            {"given": (all_weights,), **fields, "slot_offsets": offsets, "expert_of_slot": ids.reshape(-1)}, {}),
        "spread": (moeroute.spread, {"x": tokens, "plan": plan}, {"x": COPIED}),
        "spread, weights": (moeroute.spread, {"x": tokens, "plan": plan, "weights": slots},
            {"x": FLOATS, "weights": FLOATS}),
        "combine": (moeroute.combine, {"rows": rows, "plan": plan}, {"rows": FLOATS}),
        "combine, weights": (moeroute.combine, {"rows": rows, "plan": plan, "weights": slots},
            {"rows": FLOATS, "weights": FLOATS}),
        "combine, bias": (moeroute.combine,
            {"rows": map_rows, "plan": map_plan, "weights": map_slots, "init": floats(T, H), "bias": floats(E, H)},
            {"weights": FLOATS}),
        "row_dots": (moeroute.row_dots, {"rows": rows, "x": tokens, "plan": plan}, {}),
        "row_dots, bias": (moeroute.row_dots,
            {"rows": map_rows, "x": tokens, "plan": map_plan, "bias": floats(E, H)}, {}),
        "dynamic_quantize": (moeroute.dynamic_quantize,
            {"rows": rows, "smooth": floats(H)}, {"rows": FLOATS}),
        "dynamic_quantize, experts": (moeroute.dynamic_quantize,
            {"rows": tokens, "smooth": floats(E, H), "expert_of_row": torch.arange(T, dtype=torch.int32) % (E + 1)},
            {"rows": FLOATS}),
        "activate": (activate, {"x": floats(T, 2 * H)}, {"x": FLOATS}),
        "activate, pairs": (activate, {"x": floats(T, 2 * H), "activation": "swiglu_clamped", "interleaved": True},
            {"x": FLOATS}),
        "quantize": (moeroute.quantize, {"rows": rows, "scale": floats(1) * 40, "offset": floats(1)}, {"rows": FLOATS}),
        "quantize, spread": (moeroute.quantize,
            {"rows": tokens, "scale": floats(1) * 40, "offset": floats(1), "plan": plan}, {"rows": FLOATS}),
        "spread_quantized": (moeroute.spread_quantized, {"x": tokens, "plan": plan, "smooth": floats(E, H)},
            {"x": FLOATS}),
        "spread_quantized, experts": (moeroute.spread_quantized,
            {"x": tokens, "plan": map_plan, "smooth": floats(E, H), "expert_of_row": map_plan.expert_of_row},
            {"x": FLOATS}),
        "slot_weights": (moeroute.slot_weights, {"weights": weights, "plan": plan}, {"weights": FLOATS}),
        "slot_weights, map": (moeroute.slot_weights, {"weights": all_weights, "plan": map_plan}, {"weights": FLOATS}),
        "dense_weights": (moeroute.dense_weights, {"weights": weights, "expert_ids": ids, "num_experts": E},
            {"weights": FLOATS, **any_ids}),
        "routing_map_from_ids": (moeroute.routing_map_from_ids,
            {"expert_ids": ids, "num_experts": E, "bits": True}, any_ids),
        "routing_map_of": (with_plan(lambda plan, backend: moeroute.routing_map_of(plan, backend=backend), from_map),
            {"given": (), "routing_map": chosen}, {"routing_map": MAPS}),
        "permute_weights": (moeroute.permute_weights, {"weights": weights, "plan": plan}, {"weights": FLOATS}),
        "permute_weights, map": (moeroute.permute_weights,
            {"weights": all_weights, "plan": map_plan}, {"weights": FLOATS}),
        "permute_weights_backward": (moeroute.permute_weights_backward,
            {"grad": floats(plan.num_rows), "plan": plan}, {"grad": FLOATS}),
        "permute_weights_backward, map": (moeroute.permute_weights_backward,
            {"grad": floats(map_plan.num_rows), "plan": map_plan}, {"grad": FLOATS}),
        "permute": (moeroute.permute, {"tokens": tokens, "plan": plan}, {"tokens": COPIED}),
        "permute, weights": (moeroute.permute, {"tokens": tokens, "plan": plan, "weights": weights},
            {"tokens": FLOATS, "weights": FLOATS}),
        "permute, map": (moeroute.permute, {"tokens": tokens, "plan": map_plan, "weights": all_weights},
            {"tokens": FLOATS, "weights": FLOATS}),
        "unpermute": (moeroute.unpermute, {"rows": rows, "plan": plan, "weights": weights},
            {"rows": FLOATS, "weights": FLOATS}),
        "unpermute, map": (moeroute.unpermute, {"rows": map_rows, "plan": map_plan, "weights": all_weights},
            {"rows": FLOATS, "weights": FLOATS}),
        "permute_backward": (moeroute.permute_backward, {"grad_rows": rows, "plan": plan, "weights": weights},
            {"grad_rows": FLOATS, "weights": FLOATS}),
        "unpermute_backward": (moeroute.unpermute_backward,
            {"grad_tokens": tokens, "rows": rows, "plan": plan, "weights": weights}, {"weights": FLOATS}),
        "unpermute_backward, map": (moeroute.unpermute_backward,
            {"grad_tokens": tokens, "rows": map_rows, "plan": map_plan, "weights": all_weights}, {"weights": FLOATS}),
        "balance_statistics": (moeroute.balance_statistics,
            {"scores": scores, "expert_ids": ids, "padding_mask": mask}, {"scores": FLOATS, "expert_ids": INTEGERS}),
        "load_balancing_loss": (moeroute.load_balancing_loss,
            {"scores": scores, "expert_ids": ids, "padding_mask": mask}, {"scores": FLOATS, "expert_ids": INTEGERS}),
        "load_balancing_loss, sequences": (moeroute.load_balancing_loss,
            {"scores": scores, "expert_ids": ids, "sequence_ids": torch.arange(T) % 2, "num_sequences": 2},
            {"scores": FLOATS, "expert_ids": INTEGERS, "sequence_ids": INTEGERS}),
        "load_balancing_loss_from_counts": (moeroute.load_balancing_loss_from_counts,
            {"scores": scores, "tokens_per_expert": plan.tokens_per_expert, "num_experts": E, "topk": K,
             "num_tokens": T, "padding_mask": mask},
            {"scores": FLOATS, "tokens_per_expert": (*INTEGERS, *FLOATS)}),
        "look_up_expert_ids": (moeroute.look_up_expert_ids,
            {"keys": torch.arange(T) - 1, "table": ids}, {"keys": INTEGERS, "table": INTEGERS}),
        "sinkhorn": (moeroute.sinkhorn, {"scores": scores}, {"scores": FLOATS}),
        "normalize_scores": (moeroute.normalize_scores,
            {"scores": scores, "padding_mask": mask}, {"scores": FLOATS}),
        "router_z_loss": (moeroute.router_z_loss,
            {"logits": floats(T, E), "padding_mask": mask}, {"logits": FLOATS}),
        "update_expert_bias": (moeroute.update_expert_bias,
            {"bias": floats(E), "tokens_per_expert": plan.tokens_per_expert},
            {"bias": (torch.float32, torch.float64), "tokens_per_expert": INTEGERS}),
        "grouped_linear": (nn.grouped_linear,
            {"rows": rows, "weight": floats(E, 3, H), "sizes": plan.rows_per_expert}, {}),
    }  # fmt: skip


NO_BACKEND = (
    "look_up_expert_ids",
    "sinkhorn",
    "load_balancing_loss, sequences",
    "load_balancing_loss_from_counts",
    "normalize_scores",
    "balance_statistics",
    "load_balancing_loss",
    "router_z_loss",
    "update_expert_bias",
    "grouped_linear",
)
# torch computes these, whose sums and products may have another order for other strides.
BY_TORCH = {
    "sinkhorn",
    "balance_statistics",
    "load_balancing_loss",
    "load_balancing_loss, sequences",
    "load_balancing_loss_from_counts",
    "router_z_loss",
    "grouped_linear",
}


def in_layout(tensor: Tensor, layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in this layout, and its contiguous copy."""
    if tensor.dtype.is_floating_point and not dtype.is_floating_point and not dtype.is_complex:
        tensor = (tensor * 10).int()
    found = layout(tensor.to(dtype))
    copy = torch.empty(found.shape, dtype=dtype)
    copy.copy_(found)
    return found, copy


def compare(name: str, call: Call, changed: dict[str, tuple[Tensor, Tensor]], backend: Backend, where: str) -> None:
    function, arguments, _ = call
    keywords = {} if name in NO_BACKEND else {"backend": backend}
    found = function(**{**arguments, **{key: pair[0] for key, pair in changed.items()}}, **keywords)
    expected = function(**{**arguments, **{key: pair[1] for key, pair in changed.items()}}, **keywords)
    if name in BY_TORCH:
        found, expected = (x if isinstance(x, tuple) else (x,) for x in (found, expected))
        for a, e in zip(found, expected, strict=True):
            torch.testing.assert_close(a, e, equal_nan=True, msg=lambda text: f"{where}: {text}")
    else:
        assert_same_bits(found, expected, where)


def variants(call: Call) -> Iterator[tuple[str, Tensor, tuple[torch.dtype, ...]]]:
    _, arguments, dtypes = call
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value, dtypes.get(name, (value.dtype,))


NAMES = tuple(calls("one"))


def test_the_table_has_every_public_function_of_tensors() -> None:
    public = {name for name, value in vars(moeroute).items() if callable(value) and not name.startswith("_")}
    others = {
        "Gating", "BalanceStatistics", "capacity_from_factor", "empty_cache", "memory_stats", "set_memory_pool"
    }  # fmt: skip
    assert public - others == {name.split()[0].rstrip(",") for name in NAMES} - {"grouped_linear", "activate"}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_one_argument_at_a_time(name: str, sizes: str) -> None:
    """Every dtype in every layout at one size; at the others each dtype and each layout at least once."""
    call = calls(sizes)[name]
    for argument, value, dtypes in variants(call):
        pairs = list(itertools.product(dtypes, LAYOUTS))
        if sizes != "small":
            pairs = pairs[:: len(LAYOUTS) + 1] + [(dtypes[0], layout) for layout in LAYOUTS]
        for dtype, layout in pairs:
            where = f"{argument} {dtype} {layout.__name__}"
            compare(name, call, {argument: in_layout(value, layout, dtype)}, "cpu", where)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_BACKEND])
def test_all_arguments_at_once(name: str, backend: Backend) -> None:
    """Each in a layout and a dtype of its own; few cases, since Triton's interpreter takes its time."""
    call = calls("small")[name]
    for turn in range(2 if backend == "triton" else len(LAYOUTS)):
        changed = {}
        for i, (argument, value, dtypes) in enumerate(variants(call)):
            layout = LAYOUTS[(3 * turn + 7 * i + NAMES.index(name)) % len(LAYOUTS)]
            changed[argument] = in_layout(value, layout, dtypes[(turn + i) % len(dtypes)])
        compare(name, call, changed, backend, f"turn {turn}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_gradients_that_come_in(layout: Callable[[Tensor], Tensor], backend: Backend) -> None:
    """A gradient is often a view: that of a sum is expanded, that of a product transposed."""
    if backend == "triton" and layout not in (transposed, expanded_rows):
        pytest.skip("the interpreter takes its time")
    T, K, E, H = SIZES["small"]
    logits = torch.linspace(-1, 1, T * E).reshape(T, E).cos().requires_grad_()
    tokens = torch.linspace(0, 9, T * H).reshape(T, H).sin().requires_grad_()
    gating = moeroute.gating_topk(logits, K, score="sigmoid", backend=backend)
    plan = moeroute.plan_from_expert_ids(gating.expert_ids, E, backend=backend)
    rows = moeroute.permute(tokens, plan, gating.weights, backend=backend)
    output = moeroute.unpermute(rows, plan, gating.weights, backend=backend)
    results = {"weights": gating.weights, "scores": gating.scores, "rows": rows, "output": output}
    for name, result in results.items():
        pair = in_layout(torch.linspace(-2, 2, result.numel()).reshape(result.shape), layout, torch.float32)
        inputs = (logits,) if name in ("weights", "scores") else (logits, tokens)
        found, expected = (torch.autograd.grad(result, inputs, grad, retain_graph=True) for grad in pair)
        assert_same_bits(found, expected, name)
