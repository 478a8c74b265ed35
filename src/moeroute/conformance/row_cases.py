"""Cases of rows and weights: permute, unpermute, their gradients and relatives, in every dtype and kind of plan."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from moeroute.conformance import exact_plans
from moeroute.conformance.case import Case
from moeroute.conformance.gating_cases import DTYPES, short
from moeroute.conformance.generator import Stream
from moeroute.plan import RoutingPlan

Options = dict[str, Any]
Sizes = tuple[int, int, int, int]  # tokens, experts, slots of a token, hidden size
PLANS = ("ids", "map", "table", "fill", "shared rows")
KNOWS_EXPERTS = ("map", "table", "fill")


def plan_of(which: str, sizes: Sizes) -> RoutingPlan:
    """ids: with empty slots, padded to 4; map; table: [T, K] slots of a map; fill: drop and pad; shared rows."""
    return exact_plans.as_plan(_fields(which, sizes[:3]))


@cache
def _fields(which: str, sizes: tuple[int, int, int]) -> exact_plans.Fields:
    num_tokens, experts, topk = sizes
    draw = Stream(f"plan T={num_tokens} E={experts} K={topk}")
    if which == "ids":
        return exact_plans.plan_from_expert_ids(ids_of((*sizes, 0)), experts, align=4)
    if which == "shared rows":
        rows = draw.integers("shared", -1, num_tokens, num_tokens, topk)
        return exact_plans.plan_from_row_of_slot(rows, num_tokens, num_tokens)
    chosen = draw.chance("map", topk / experts, num_tokens, experts)
    options: dict[str, Options] = {"map": {}, "table": {"topk": topk}, "fill": {"capacity": topk, "fill": True}}
    return exact_plans.plan_from_routing_map(chosen, **options[which])


def ids_of(sizes: Sizes) -> Tensor:
    """int64 [T, K], different experts for a token; one slot in ten is empty."""
    num_tokens, experts, topk, _ = sizes
    draw = Stream(f"plan T={num_tokens} E={experts} K={topk}")
    ids = draw.distinct("ids", num_tokens, experts, topk)
    ids[draw.chance("empty", 0.1, num_tokens, topk)] = -1
    return ids


class _Rows:
    """The tensors of the row operators' cases at one size, kind of plan and dtype."""

    def __init__(self, sizes: Sizes, which: str, dtype: torch.dtype) -> None:
        self.sizes, self.which, self.dtype = sizes, which, dtype

    @property
    def plan(self) -> RoutingPlan:
        return plan_of(self.which, self.sizes)

    def tokens(self, draw: Stream) -> Tensor:
        return draw.odd("tokens", draw.normal("tokens", self.sizes[0], self.sizes[3])).to(self.dtype)

    def rows(self, draw: Stream) -> Tensor:
        """A view whose rows are far apart; what lies between them is NaN."""
        count, hidden = self.plan.num_rows, self.sizes[3]
        wide = torch.full((count, 2 * hidden), torch.nan, dtype=self.dtype)
        wide[:, :hidden] = draw.odd("rows", draw.normal("rows", count, hidden))
        return wide[:, :hidden]

    def grad(self, draw: Stream) -> Tensor:
        """[T, H], a view whose elements are far apart."""
        grad = draw.odd("grad", draw.normal("grad", self.sizes[0], self.sizes[3])).to(self.dtype)
        return grad.t().contiguous().t()

    def slots(self, draw: Stream) -> Tensor:
        return draw.normal("slots", self.plan.num_slots)

    def bias(self, draw: Stream) -> Tensor:
        return draw.normal("bias", self.sizes[1], self.sizes[3]).to(self.dtype)

    def weights(self, kind: torch.dtype, draw: Stream) -> Tensor:
        """[T, E] or [T, K]; one in ten is 0."""
        shape = (self.sizes[0], self.sizes[1 if self.which in KNOWS_EXPERTS else 2])
        weights = draw.normal("weights", *shape).double() if kind is torch.float64 else draw.normal("weights", *shape)
        if kind is torch.float64:
            weights = weights + draw.normal("low bits", *shape).double() * 2.0**-30
        weights[draw.chance("zero", 0.1, *shape)] = 0.0
        return weights.to(kind)


def row_cases(num_tokens: int, experts: int, topk: int, hidden: int) -> Iterator[Case]:
    """Every row operator at one size."""
    sizes = (num_tokens, experts, topk, hidden)
    size = f"T={num_tokens} E={experts} K={topk} H={hidden}"
    for which in PLANS:
        for dtype in DTYPES:
            at = _Rows(sizes, which, dtype)
            tags = (
                {"no row", "nan", "inf"}
                | ({"odd hidden"} if hidden % 16 else set())
                | (
                    {"shared rows"}
                    if which == "shared rows"
                    else {"padding"}
                    if which in ("ids", "table", "fill")
                    else set()
                )
            )
            yield from _of_plan(at, f"{size} {which} {short(dtype)}", f"rows {size} {which} {short(dtype)}", tags)
    for dtype in DTYPES:
        yield Case(
            f"dense_weights {size} {short(dtype)}", "dense_weights", partial(_dense, sizes, dtype), frozenset({"nan"})
        )
    for which in (*KNOWS_EXPERTS, "ids"):
        yield Case(f"routing_map_of {size} {which}", "routing_map_of", partial(_map_of, sizes, which))
    for bits in (False, True):
        yield Case(f"routing_map_from_ids {size} bits={bits}", "routing_map_from_ids", partial(_bits, sizes, bits))
    for integer in (torch.int8, torch.int16, torch.int32, torch.int64):
        yield Case(f"permute {size} {short(integer)}", "permute", partial(_integers, sizes, integer))


def _of_plan(at: _Rows, name: str, stream: str, tags: set[str]) -> Iterator[Case]:
    """All that one plan and dtype have. The tensors of one name are the same in all of them."""
    known = at.which in KNOWS_EXPERTS

    def case(operator: str, make: Callable[[Stream], Options], more: str = "", through: str = "") -> Case:
        title = f"{operator}{' through autograd' if through else ''} {name}{', ' + more if more else ''}"
        return Case(title, operator, make, frozenset(tags), through, stream)

    yield case("permute", lambda draw: {"tokens": at.tokens(draw), "plan": at.plan})
    yield case("permute_backward", lambda draw: {"grad_rows": at.rows(draw), "plan": at.plan})
    yield case(
        "permute_backward",
        lambda draw: {"grad_rows": at.rows(draw), "tokens": at.tokens(draw), "plan": at.plan},
        through="autograd",
    )
    yield case("unpermute", lambda draw: {"rows": at.rows(draw), "plan": at.plan})
    for kind in (*DTYPES, torch.float64):
        yield from _weighted(at, kind, case)
    yield case("spread", lambda draw: {"x": at.tokens(draw), "plan": at.plan, "weights": at.slots(draw)})
    yield case(
        "combine",
        lambda draw: {"rows": at.rows(draw), "plan": at.plan, "weights": at.slots(draw), "init": at.grad(draw)},
        "init",
    )
    yield case("row_dots", lambda draw: {"rows": at.rows(draw), "x": at.grad(draw), "plan": at.plan})
    if known:
        yield case(
            "combine",
            lambda draw: {
                "rows": at.rows(draw),
                "plan": at.plan,
                "weights": at.slots(draw),
                "init": (at.grad(draw), at.tokens(draw)),
                "bias": at.bias(draw),
            },
            "init of two, bias",
        )
        yield case(
            "row_dots",
            lambda draw: {"rows": at.rows(draw), "x": at.grad(draw), "plan": at.plan, "bias": at.bias(draw)},
            "bias",
        )
    yield from _quantized(at, case)


def _weighted(at: _Rows, kind: torch.dtype, case: Callable[..., Case]) -> Iterator[Case]:
    more = f"weights {short(kind)}"

    def with_weights(draw: Stream, **others: Tensor) -> Options:
        return {**others, "plan": at.plan, "weights": at.weights(kind, draw)}

    def backward(draw: Stream) -> Options:
        return {"grad_tokens": at.grad(draw), "rows": at.rows(draw), **with_weights(draw)}

    yield case("permute", lambda draw: with_weights(draw, tokens=at.tokens(draw)), more)
    yield case("unpermute", lambda draw: with_weights(draw, rows=at.rows(draw)), more)
    yield case("unpermute_backward", backward, more)
    if kind is torch.float64:
        return
    if kind is torch.float32:
        yield case("unpermute_backward", backward, more, "autograd")
    yield case("permute_weights", with_weights, more)
    yield case("slot_weights", with_weights, more)
    yield case(
        "permute_weights_backward",
        lambda draw: {"grad": draw.normal("row gradients", at.plan.num_rows).to(kind), "plan": at.plan},
        more,
    )


def _quantized(at: _Rows, case: Callable[..., Case]) -> Iterator[Case]:
    """Rows as int8: without factors, with one set of them, with one for each expert."""
    experts, hidden = at.sizes[1], at.sizes[3]

    def factors(words: str, draw: Stream) -> Options:
        if words == "":
            return {}
        if words == "factors":
            return {"smooth": draw.normal("factors", hidden)}
        smooth = draw.odd("smooth", draw.normal("smooth", experts, hidden))
        rows = draw.integers("expert of row", -1, experts + 1, at.plan.num_rows).int()
        return {"smooth": smooth, "expert_of_row": rows}

    for words in ("", "factors", "factors by expert"):
        yield case("dynamic_quantize", lambda draw, w=words: {"rows": at.rows(draw), **factors(w, draw)}, words)
        yield case(
            "spread_quantized", lambda draw, w=words: {"x": at.tokens(draw), "plan": at.plan, **factors(w, draw)}, words
        )
    scale, offset = 47.0, 0.5
    static = {"scale": scale, "offset": offset}
    yield case(
        "quantize",
        lambda draw: {"rows": at.rows(draw), **{n: torch.tensor([v]) for n, v in static.items()}},
    )
    yield case(
        "quantize",
        lambda draw: {"rows": at.tokens(draw), **{n: torch.tensor([v]) for n, v in static.items()}, "plan": at.plan},
        "spread",
    )


def row_edges() -> Iterator[Case]:
    """Hidden sizes around those of tiles and vectors, single elements, and plans without rows."""
    for hidden in (1, 2, 7, 8, 63, 64, 65, 127, 129, 255, 256, 257, 511, 513, 1023, 1025):
        sizes = (5, 4, 2, hidden)
        at = _Rows(sizes, "ids", torch.bfloat16)
        name = f"edge T=5 E=4 K=2 H={hidden} bfloat16"
        tags = frozenset({"odd hidden" if hidden % 16 else "size", "no row"})

        def made(at: _Rows, names: tuple[str, ...], draw: Stream) -> Options:
            every = {"tokens": at.tokens, "rows": at.rows, "grad_tokens": at.grad}
            found: Options = {name: every[name](draw) for name in names} | {"plan": at.plan}
            return found if names == ("tokens",) else {**found, "weights": at.weights(torch.float32, draw)}

        yield Case(f"permute {name}", "permute", partial(made, at, ("tokens",)), tags)
        yield Case(f"unpermute {name}", "unpermute", partial(made, at, ("rows",)), tags)
        yield Case(f"unpermute_backward {name}", "unpermute_backward", partial(made, at, ("grad_tokens", "rows")), tags)
    for which, ids in (("one expert", [[1, 1]] * 6), ("nothing", [[-1, -1]] * 6), ("no token", [])):
        expert_ids = torch.tensor(ids, dtype=torch.int64).reshape(-1, 2)
        yield Case(
            f"permute edge {which}", "permute", partial(_small, expert_ids, "tokens"), frozenset({"empty experts"})
        )
        yield Case(
            f"unpermute edge {which}", "unpermute", partial(_small, expert_ids, "rows"), frozenset({"empty experts"})
        )


def _small(expert_ids: Tensor, name: str, draw: Stream) -> Options:
    plan = exact_plans.as_plan(exact_plans.plan_from_expert_ids(expert_ids, 4))
    count = plan.num_tokens if name == "tokens" else plan.num_rows
    return {name: draw.normal("values", count, 40), "plan": plan}


def _dense(sizes: Sizes, dtype: torch.dtype, draw: Stream) -> Options:
    weights = draw.odd("weights", draw.normal("weights", sizes[0], sizes[2])).to(dtype)
    ids = draw.integers("ids", -1, sizes[1] + 1, sizes[0], sizes[2])
    return {"weights": weights, "expert_ids": ids, "num_experts": sizes[1]}


def _map_of(sizes: Sizes, which: str, draw: Stream) -> Options:
    return {"plan": plan_of(which, sizes)}


def _bits(sizes: Sizes, bits: bool, draw: Stream) -> Options:
    return {"expert_ids": ids_of(sizes), "num_experts": sizes[1], "bits": bits}


def _integers(sizes: Sizes, dtype: torch.dtype, draw: Stream) -> Options:
    integers = draw.integers("tokens", -(2**31), 2**31 - 1, sizes[0], sizes[3])
    return {"tokens": integers.to(dtype), "plan": plan_of("map", sizes)}
