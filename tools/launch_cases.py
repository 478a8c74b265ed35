"""The inputs with which every launcher of the Triton kernels is called, to see which specialisations it chooses.

Each choice of an argument meets each choice of every other argument of the same function.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeroute.plan import PlanTensors
from specialisations import Case

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def pairs(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Few combinations in which each choice of an axis meets each choice of every other axis."""
    names = list(axes)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(axes[names[a]]))
        for j in range(len(axes[names[b]]))
    }
    found = []
    while missing:
        chosen = dict(min(missing))
        for axis, name in enumerate(names):
            if axis not in chosen:
                gain = [
                    sum(tuple(sorted(((axis, choice), other))) in missing for other in chosen.items())
                    for choice in range(len(axes[name]))
                ]
                chosen[axis] = gain.index(max(gain))
        missing -= set(itertools.combinations(sorted(chosen.items()), 2))
        found.append({name: axes[name][chosen[axis]] for axis, name in enumerate(names)})
    return found


def over(function: Callable[..., Any], **axes: Sequence[Any]) -> Iterator[Case]:
    """Cases that call a function with few combinations of its arguments, by `pairs`."""
    for chosen in pairs(**axes):
        words = ", ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in chosen.items())
        yield f"{function.__name__}({words})", partial(function, **chosen)


LAYOUTS = ("side by side", "apart", "askew", "vast")


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str = "side by side") -> Tensor:
    """`apart`: rows at an odd distance. `askew`: not on a 16-byte boundary. `vast`: beyond 2 GiB, never touched."""
    if layout == "apart":
        return torch.empty((rows, columns + 1), dtype=dtype)[:, :columns]
    if layout == "askew":
        return torch.empty(rows * columns + 1, dtype=dtype)[1:].view(rows, columns)
    if layout == "vast":
        distance = (2**31 // dtype.itemsize // (rows - 1) // 16 + 1) * 16
        return torch.empty_strided((rows, columns), (distance, 1), dtype=dtype)
    return torch.empty((rows, columns), dtype=dtype)


def vector(size: int, dtype: torch.dtype, layout: str = "side by side") -> Tensor:
    """`askew`: not on a 16-byte boundary."""
    return torch.zeros(size + 1, dtype=dtype)[1:] if layout == "askew" else torch.zeros(size, dtype=dtype)


TOKENS = 16
HIDDEN = (7168, 2049, 512, 144, 64, 1)
EXPERTS = 16
SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "topk_softmax", "topk_sigmoid", "none")
integers = partial(vector, dtype=torch.int32)


def plan_tensors(slots: int, ragged: bool = False, experts: bool = True, tokens: int = TOKENS) -> PlanTensors:
    """A plan with as many rows as slots."""
    offsets = integers(tokens + 1) if ragged else None
    return PlanTensors(integers(slots), integers(slots), offsets, integers(slots) if experts else None, tokens)


def permutation_cases() -> Iterator[Case]:
    """Calls of the launchers in rows/on_triton.py and weights/on_triton.py."""
    from moeroute.ops.rows import on_triton
    from moeroute.ops.weights import on_triton as on_triton_weights

    def combine(
        dtype: torch.dtype, weights: torch.dtype | None, hidden: int, topk: int, starts: int, layout: str, bias: bool,
        ragged: bool, out: str | None,
    ) -> None:  # fmt: skip
        slots = TOKENS * topk
        on_triton.combine(
            matrix(slots, hidden, dtype, layout), None if weights is None else vector(slots, weights),
            plan_tensors(slots, ragged),
            init=matrix(TOKENS, hidden, dtype, layout) if starts else None,
            init_more=matrix(TOKENS, hidden, dtype, layout) if starts > 1 else None,
            bias=matrix(EXPERTS, hidden, dtype) if bias else None,
            out=None if out is None else matrix(TOKENS, hidden, dtype, out),
        )  # fmt: skip

    yield from over(
        combine, dtype=FLOATS, weights=(None, *FLOATS), hidden=HIDDEN, topk=(1, 2, 4, 8), starts=(0, 1, 2),
        layout=LAYOUTS, bias=(False, True), ragged=(False, True), out=(None, *LAYOUTS),
    )  # fmt: skip

    def spread(
        dtype: torch.dtype, weights: torch.dtype | None, hidden: int, topk: int, layout: str, ragged: bool,
        out: str | None,
    ) -> None:  # fmt: skip
        slots = TOKENS * topk
        on_triton.spread(
            matrix(TOKENS, hidden, dtype, layout), None if weights is None else vector(slots, weights),
            plan_tensors(slots, ragged),
            out=None if out is None else matrix(slots, hidden, dtype, out),
        )  # fmt: skip

    axes = {"hidden": HIDDEN, "topk": (1, 2, 4, 8), "layout": LAYOUTS, "ragged": (False, True), "out": (None, *LAYOUTS)}
    yield from over(spread, dtype=FLOATS, weights=(None, *FLOATS), **axes)
    yield from over(spread, dtype=(torch.uint8, torch.int64, torch.complex64), weights=(None,), **axes)

    def row_dots(
        dtype: torch.dtype, dots: torch.dtype, hidden: int, topk: int, layout: str, ragged: bool, bias: bool
    ) -> None:
        slots = TOKENS * topk
        on_triton.row_dots(
            matrix(slots, hidden, dtype, layout), matrix(TOKENS, hidden, dtype, layout),
            plan_tensors(slots, ragged), dots, bias=matrix(EXPERTS, hidden, dtype) if bias else None,
        )  # fmt: skip

    yield from over(
        row_dots, dtype=FLOATS, dots=FLOATS, hidden=HIDDEN, topk=(1, 8), layout=LAYOUTS, ragged=(False, True),
        bias=(False, True),
    )  # fmt: skip

    def spread_dots(
        dtype: torch.dtype, weights: torch.dtype, hidden: int, topk: int, layout: str, ragged: bool, out: str | None
    ) -> None:
        slots = TOKENS * topk
        on_triton.spread_dots(
            matrix(TOKENS, hidden, dtype, layout), matrix(slots, hidden, dtype, layout), vector(slots, weights),
            plan_tensors(slots, ragged),
            out=(None, None) if out is None else (matrix(slots, hidden, dtype, out), vector(slots, weights)),
        )  # fmt: skip

    yield from over(
        spread_dots, dtype=FLOATS, weights=FLOATS, hidden=HIDDEN, topk=(1, 8), layout=LAYOUTS, ragged=(False, True),
        out=(None, *LAYOUTS),
    )  # fmt: skip

    def take(dtype: torch.dtype, size: int, layout: str) -> None:
        on_triton_weights.take(vector(size, dtype, layout), integers(size))

    yield from over(
        take, dtype=(*FLOATS, torch.uint8, torch.int64), size=(1, 16, 5000), layout=("side by side", "askew")
    )

    def slot_weights(dtype: torch.dtype, experts: int, topk: int, ragged: bool, layout: str) -> None:
        on_triton_weights.slot_weights(
            matrix(TOKENS, experts, dtype, layout), plan_tensors(TOKENS * topk, ragged)
        )  # fmt: skip

    experts = (1, 8, 60, 256, 8192)
    yield from over(
        slot_weights, dtype=FLOATS, experts=experts, topk=(1, 8), ragged=(False, True), layout=("side by side", "askew")
    )

    def slot_weights_backward(
        dtype: torch.dtype, experts: int, topk: int, ragged: bool, accumulate: bool, out: str | None
    ) -> None:
        on_triton_weights.slot_weights_backward(
            vector(TOKENS * topk, dtype), plan_tensors(TOKENS * topk, ragged), experts, accumulate,
            out=None if out is None else matrix(TOKENS, experts, dtype, out),
        )  # fmt: skip

    yield from over(
        slot_weights_backward, dtype=FLOATS, experts=experts, topk=(1, 8), ragged=(False, True),
        accumulate=(False, True), out=(None, "askew"),
    )  # fmt: skip

    def routing_map(experts: int, topk: int, ragged: bool, bits: bool) -> None:
        on_triton_weights.routing_map(plan_tensors(TOKENS * topk, ragged), experts, bits)

    yield from over(routing_map, experts=experts, topk=(1, 8), ragged=(False, True), bits=(False, True))


def activation_cases() -> Iterator[Case]:
    """Calls of the launchers in activations/on_triton.py."""
    from moeroute.ops.activations import on_triton

    def activate(dtype: torch.dtype, kind: str, width: int, interleaved: bool, layout: str) -> None:
        on_triton.activate(matrix(TOKENS, width * (1 if kind == "relu2" else 2), dtype, layout), kind, interleaved)

    def activate_backward(
        dtype: torch.dtype, kind: str, width: int, interleaved: bool, again: bool, layout: str
    ) -> None:
        on_triton.activate_backward(
            matrix(TOKENS, width, dtype, layout), matrix(TOKENS, width * (1 if kind == "relu2" else 2), dtype, layout),
            kind, interleaved, again,
        )  # fmt: skip

    axes = {
        "dtype": FLOATS, "kind": tuple(on_triton.KINDS), "width": HIDDEN, "interleaved": (False, True),
        "layout": LAYOUTS,
    }  # fmt: skip
    yield from over(activate, **axes)
    yield from over(activate_backward, again=(False, True), **axes)


def quantization_cases() -> Iterator[Case]:
    """Calls of the launchers in quantization/on_triton.py."""
    from moeroute.ops.quantization import on_triton

    def factors(kind: str, hidden: int, rows: int) -> tuple[Tensor | None, Tensor | None]:
        smooth = None if kind == "none" else matrix(EXPERTS if kind == "by expert" else 1, hidden, torch.float32)
        return smooth, integers(rows) if kind == "by expert" else None

    kinds = ("none", "one", "by expert")

    def dynamic_quantize(dtype: torch.dtype, hidden: int, kind: str, layout: str, out: str | None) -> None:
        on_triton.dynamic_quantize(
            matrix(TOKENS, hidden, dtype, layout), *factors(kind, hidden, TOKENS),
            out=(None if out is None else matrix(TOKENS, hidden, torch.int8, out), None),
        )  # fmt: skip

    axes = {"dtype": FLOATS, "hidden": HIDDEN, "layout": LAYOUTS, "out": (None, *LAYOUTS)}
    yield from over(dynamic_quantize, kind=kinds, **axes)

    def quantize(dtype: torch.dtype, hidden: int, layout: str, out: str | None) -> None:
        on_triton.quantize(
            matrix(TOKENS, hidden, dtype, layout), vector(1, torch.float32), vector(1, torch.float32),
            out=None if out is None else matrix(TOKENS, hidden, torch.int8, out),
        )  # fmt: skip

    yield from over(quantize, **axes)

    def spread_static(dtype: torch.dtype, hidden: int, topk: int, layout: str, ragged: bool, out: str | None) -> None:
        slots = TOKENS * topk
        on_triton.spread_static(
            matrix(TOKENS, hidden, dtype, layout), vector(1, torch.float32), vector(1, torch.float32),
            plan_tensors(slots, ragged), out=None if out is None else matrix(slots, hidden, torch.int8, out),
        )  # fmt: skip

    yield from over(spread_static, topk=(1, 8), ragged=(False, True), **axes)

    def spread_quantized(
        dtype: torch.dtype, hidden: int, kind: str, topk: int, layout: str, ragged: bool, out: str | None
    ) -> None:
        slots = TOKENS * topk
        on_triton.spread_quantized(
            matrix(TOKENS, hidden, dtype, layout), *factors(kind, hidden, slots), plan_tensors(slots, ragged),
            out=(None if out is None else matrix(slots, hidden, torch.int8, out), None),
        )  # fmt: skip

    yield from over(spread_quantized, kind=kinds, topk=(1, 8), ragged=(False, True), **axes)


def gating_cases() -> Iterator[Case]:
    """Calls of the launchers in gating/on_triton.py."""
    from moeroute.ops.gating import on_triton

    def gating_topk(
        experts: int, groups: int, k: int, score: str, dtype: torch.dtype, bias: torch.dtype | None,
        given: torch.dtype | None, weights: torch.dtype, group_best: int, renormalize: bool, layout: str, out: bool,
    ) -> None:  # fmt: skip
        groups = groups if experts % groups == 0 else 1
        kept = max(groups // 2, 1)
        if given is None:
            k = min(k, experts // groups * kept)
        on_triton.gating_topk(
            matrix(TOKENS, experts, dtype, layout), None if bias is None else vector(experts, bias),
            None if given is None else matrix(TOKENS, k, given, layout), k, score, groups, kept, group_best,
            renormalize, 1.0, 1e-20, weights,
            out=(matrix(TOKENS, k, weights, layout), matrix(TOKENS, k, torch.int32, layout),
             matrix(TOKENS, experts, torch.float32, layout)) if out else None,
        )  # fmt: skip

    many = (1, 8, 60, 128, 256, 384, 1024, 2048, 4096, 8192, 12288)
    layouts = ("side by side", "apart", "askew")
    yield from over(
        gating_topk, experts=many, groups=(1, 4, 8, 32), k=(1, 6, 8, 32, 40), score=SCORES, dtype=FLOATS,
        bias=(None, *FLOATS), given=(None, torch.int32, None, torch.int64, torch.uint8, torch.uint64), weights=FLOATS,
        group_best=(1, 2), renormalize=(False, True), layout=layouts, out=(False, True),
    )  # fmt: skip

    def gating_topk_backward(
        experts: int, k: int, score: str, grad: torch.dtype, ids: torch.dtype, used: bool, renormalize: bool,
        dtype: torch.dtype, layout: str, out: bool,
    ) -> None:  # fmt: skip
        on_triton.gating_topk_backward(
            matrix(TOKENS, experts, torch.float32, layout), matrix(TOKENS, k, grad, layout),
            matrix(TOKENS, k, ids, layout), matrix(TOKENS, experts, torch.float32, layout) if used else None, score,
            renormalize, 1.0, 1e-20, dtype, out=matrix(TOKENS, experts, dtype, layout) if out else None,
        )  # fmt: skip

    yield from over(
        gating_topk_backward, experts=many, k=(1, 8, 40), score=SCORES, grad=FLOATS,
        ids=(torch.int32, torch.int64, torch.uint64), used=(False, True),
        renormalize=(False, True), dtype=FLOATS, layout=layouts, out=(False, True),
    )  # fmt: skip


def planning_cases() -> Iterator[Case]:
    """Calls of the launchers in planning, maps and indices."""
    from moeroute.ops.indices import on_triton as on_triton_indices
    from moeroute.ops.maps import on_triton as on_triton_maps
    from moeroute.ops.planning import on_triton

    ids_dtypes = (torch.int32, torch.int64, torch.int8, torch.uint8, torch.int16)
    straight = ("side by side", "askew")
    buffers = (None, *straight)

    def buffer(size: int, layout: str | None) -> Tensor | None:
        return None if layout is None else integers(size, layout=layout)

    def plan_expert_ids(
        ids: torch.dtype, slots: int, experts: int, weights: torch.dtype | None, capacity: int | None,
        segment: int | None, align: int, num_rows: int | None, layout: str, out: str | None,
    ) -> None:  # fmt: skip
        on_triton.plan_expert_ids(
            vector(slots, ids, layout), None if weights is None else vector(slots, weights, layout), 0, experts,
            capacity, segment, align, num_rows, out=buffer(slots, out),
        )  # fmt: skip

    yield from over(
        plan_expert_ids, ids=ids_dtypes, slots=(16, 40, 5000, 131072), experts=(1, 8, 256, 1000, 4096, 9000),
        weights=(None, *FLOATS), capacity=(8, None), segment=(None, 8), align=(1, 8), num_rows=(512, None, 100000),
        layout=straight, out=buffers,
    )  # fmt: skip

    def plan_any_ids(ids: torch.dtype, slots: int, num_rows: int | None, layout: str, out: str | None) -> None:
        on_triton.plan_any_ids(vector(slots, ids, layout), num_rows, out=buffer(slots, out))

    yield from over(plan_any_ids, ids=ids_dtypes, slots=(16, 5000), num_rows=(None, 512), layout=straight, out=buffers)

    def plan_routing_map(
        dtype: torch.dtype, experts: int, weights: torch.dtype | None, topk: int | None, fill: bool, capacity: int,
        segment: int | None, align: int, num_rows: int | None, layout: str,
    ) -> None:  # fmt: skip
        on_triton_maps.plan_routing_map(
            matrix(TOKENS, experts, dtype, layout),
            None if weights is None else matrix(TOKENS, experts, weights, layout),
            0, experts, None if fill else topk, fill, capacity, segment, align, num_rows, None,
        )  # fmt: skip

    yield from over(
        plan_routing_map, dtype=(torch.bool, torch.int8, torch.uint8), experts=(8, 60, 256, 4096),
        weights=(None, *FLOATS), topk=(None, 1, 8), fill=(False, True), capacity=(8,), segment=(None, 8),
        align=(1, 8), num_rows=(512, None), layout=straight,
    )  # fmt: skip

    def plan_row_of_slot(
        ids: torch.dtype, experts: torch.dtype | None, slots: int, layout: str, out: str | None
    ) -> None:
        on_triton_indices.plan_row_of_slot(
            vector(slots, ids, layout), None if experts is None else vector(slots, experts, layout), 512, 0,
            out=buffer(slots, out),
        )  # fmt: skip

    yield from over(
        plan_row_of_slot, ids=ids_dtypes, experts=(None, *ids_dtypes), slots=(16, 5000), layout=straight, out=buffers
    )

    def plan_token_ids(
        ids: torch.dtype, rows: torch.dtype | None, slots: int, experts: int | None, layout: str, out: str | None
    ) -> None:
        on_triton_indices.plan_token_ids(
            vector(slots, ids, layout), None if rows is None else vector(slots, rows, layout), TOKENS, 512, experts,
            out=buffer(slots, out),
        )  # fmt: skip

    yield from over(
        plan_token_ids, ids=ids_dtypes, rows=(None, *ids_dtypes), slots=(16, 5000), experts=(None, 1, 8),
        layout=straight, out=buffers,
    )  # fmt: skip

    def plan_row_id_map(dtype: torch.dtype, pad: bool, experts: int, layout: str, out: str | None) -> None:
        on_triton_indices.plan_row_id_map(
            matrix(TOKENS, 2 * experts + 1, dtype, layout), integers(experts).long() if pad else None, 512,
            out=buffer(512, out),
        )  # fmt: skip

    yield from over(
        plan_row_id_map, dtype=(torch.int32, torch.int64), pad=(False, True), experts=(1, 8, 256), layout=straight,
        out=buffers,
    )  # fmt: skip

    def row_id_map(experts: int, topk: int, ragged: bool, out: str | None) -> None:
        into = None if out is None else matrix(TOKENS, 2 * experts + 1, torch.int32, out)
        on_triton_indices.row_id_map(plan_tensors(TOKENS * topk, ragged), experts, out=into)

    yield from over(row_id_map, experts=(1, 8, 256), topk=(1, 8), ragged=(False, True), out=buffers)

    def plan_chunks(
        lengths: torch.dtype, order: torch.dtype | None, ranks: int, experts: int, layout: str, out: str | None
    ) -> None:
        on_triton_indices.plan_chunks(
            matrix(ranks, experts, lengths, layout), None if order is None else vector(ranks * experts, order, layout),
            5000, out=buffer(5000, out),
        )  # fmt: skip

    yield from over(
        plan_chunks, lengths=(torch.int64, torch.int32), order=(None, torch.int64, torch.int32), ranks=(1, 8),
        experts=(1, 32, 256), layout=straight, out=buffers,
    )  # fmt: skip


def cases() -> Iterator[Case]:
    """Calls of all launchers."""
    yield from gating_cases()
    yield from planning_cases()
    yield from permutation_cases()
    yield from quantization_cases()
    yield from activation_cases()
