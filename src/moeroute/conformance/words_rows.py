"""What is wrong with copies of rows, with weighted sums of rows, and with dot products of rows.

Hypotheses are computed: what would stand there if the weights were ignored, if -1 were the last row, if the sum were
kept in bfloat16, ...? The first that explains what does stand there is what is said.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from moeroute.conformance import exact_plans
from moeroute.conformance.compare import different, ulps
from moeroute.conformance.scene import Scene
from moeroute.plan import RoutingPlan

MOST = 4
HALVES = (torch.bfloat16, torch.float16)


def explain(scene: Scene, name: str, actual: Tensor, right: Tensor) -> list[str]:
    """Sentences about one result; none where nothing particular is known."""
    plan = scene.plan
    if plan is None:
        return last_columns(actual, right)
    if name in ("rows", "grad_rows") and scene.source is not None:
        return of_copies(scene, plan, scene.source, actual, right)
    if name in ("tokens", "grad_tokens") and scene.rows is not None:
        return of_sums(scene, plan, scene.rows, actual, right)
    if name in ("grad_weights", "dots") and scene.rows is not None:
        return of_dots(scene, plan, scene.rows, actual, right)
    if name in ("row_weights", "quantized", "scales", "row_probs"):
        return of_padding(plan, actual, right)
    return last_columns(actual, right)


def more(count: int) -> list[str]:
    """How many sentences were left out."""
    return [f"... and {count - MOST} more"] if count > MOST else []


def constant_factor(actual: Tensor, right: Tensor) -> str:
    """ ", each 2 times what it should be" where that is so."""
    a, r = actual.double().flatten(), right.double().flatten()
    sane = a.isfinite() & r.isfinite() & (r.abs() > 1e-6)
    quotients = (a / r)[sane]
    if quotients.numel() < 2:
        return ""
    middle = float(quotients.median())
    close = (quotients - middle).abs() <= 1e-2 * abs(middle)
    return f", each {middle:.4g} times what it should be" if bool(close.all()) and abs(middle - 1) > 1e-2 else ""


def last_columns(actual: Tensor, right: Tensor) -> list[str]:
    """Whether only the end of every row is wrong: the mask of the last tile."""
    if actual.ndim != 2 or actual.shape[1] < 2:
        return []
    wrong = different(actual, right)
    columns = wrong.any(0).nonzero().flatten()
    if not len(columns) or int(columns[0]) == 0 or len(columns) * 2 > actual.shape[1]:
        return []
    first, width = int(columns[0]), actual.shape[1]
    if not bool(wrong[:, first:].any(0).all()) or int(wrong.any(1).sum()) * 2 < actual.shape[0]:
        return []
    row = int(wrong[:, first].nonzero()[0])
    columns_are = f"only the columns from {first} on, the last {width - first} of {width}, are"
    if _close(actual[:, first:], right[:, first:]):
        return [f"{columns_are} rounded otherwise: a sum in another order in the tail of a vector loop?"]
    return [
        f"{columns_are} wrong: the mask of the last tile "
        f"(row {row}, column {first}: {actual[row, first].item()!r} instead of {right[row, first].item()!r})"
    ]


def _close(actual: Tensor, right: Tensor) -> bool:
    """Whether all differences are small beside the largest element."""
    if not actual.dtype.is_floating_point:
        return False
    a, r = actual.double(), right.double()
    sane = a.isfinite() & r.isfinite()
    if not bool((sane | (a.isnan() & r.isnan()) | (a == r)).all()) or not bool(sane.any()):
        return False
    share = 2.0**-7 if actual.dtype in HALVES else 2.0**-20
    return bool(((a - r).abs()[sane] <= share * r.abs()[sane].max()).all())


def of_padding(plan: RoutingPlan, actual: Tensor, right: Tensor) -> list[str]:
    """Padding rows that are not 0, where those are all that is wrong."""
    wrong = different(actual, right)
    rows = (wrong if wrong.ndim == 1 else wrong.any(1)).nonzero().flatten().tolist()
    if len(rows) and all(int(plan.slot_of_row[r]) < 0 for r in rows):
        return [f"padding row {r} is not zero" for r in rows[:MOST]] + more(len(rows))
    return last_columns(actual, right)


# ---------------------------------------------------------------------------- copies


def of_copies(scene: Scene, plan: RoutingPlan, source: Tensor, actual: Tensor, right: Tensor) -> list[str]:
    """Rows that must be copies of tokens, weighted or not."""
    wrong = different(actual, right).any(1).nonzero().flatten().tolist()
    if found := last_columns(actual, right):
        return found
    shift = _shifted(actual, right)
    if shift:
        return [f"off by one row: row {wrong[0]} and every other one holds what belongs {shift}"]
    if scene.weights is not None and (found := _wrong_weights(scene, plan, source, actual, wrong)):
        return found
    of_bytes: dict[bytes, int] = {}
    for row in range(right.shape[0] - 1, -1, -1):
        of_bytes[_bytes(right[row])] = row
    tokens = {_bytes(source[t]): t for t in range(source.shape[0] - 1, -1, -1)}
    slots, owners = plan.slot_of_row.tolist(), scene.tokens
    if found := _exchanged(scene, plan, actual, right, wrong):
        return found
    sentences = []
    for row in wrong[:MOST]:
        stands = _bytes(actual[row])
        padding = slots[row] < 0
        other = of_bytes.get(stands)
        if padding and bool(actual[row].isnan().all() if actual.is_floating_point() else False):
            sentences.append(f"padding row {row}{scene.expert_of_row(row)} is not zero: it was never written")
            continue
        if stands in tokens and scene.weights is None:
            what = f"holds token {tokens[stands]}'s values"
        elif other is not None and slots[other] >= 0:
            what = f"holds what belongs in row {other} (token {owners[slots[other]]})"
        elif not bool((actual[row] != 0).any()):
            what = "is zero"
        elif actual.is_floating_point() and bool(actual[row].isnan().all()):
            what = "is all NaN (never written?)"
        elif padding:
            what = f"begins with {actual[row].flatten()[0].item()!r}"
        else:
            count = int(different(actual[row], right[row]).sum())
            what = f"differs in {count} of {right.shape[1]} elements{_by(actual[row], right[row])}"
        if padding:
            sentences.append(f"padding row {row}{scene.expert_of_row(row)} is not zero: it {what}")
        elif what.startswith("differs"):
            sentences.append(f"row {row} ({scene.slot(slots[row])}) {what}")
        else:
            sentences.append(f"row {row} {what} instead of token {owners[slots[row]]}'s")
    return sentences + more(len(wrong))


def _weight_at(weights: Tensor, slots: list[int], row: int) -> float:
    return float(weights[slots[row]])


def _bytes(row: Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes()


def _by(actual: Tensor, right: Tensor) -> str:
    if not actual.is_floating_point():
        return ""
    worst = int(ulps(actual, right).max())
    return f", by up to {worst} ulps" if 0 < worst < 1000 else constant_factor(actual, right)


def _shifted(actual: Tensor, right: Tensor) -> str:
    if actual.shape[0] < 3:
        return ""
    for shift, where in ((1, "in the row before"), (-1, "in the row behind")):
        rolled = right.roll(shift, 0)
        inner = slice(1, None) if shift == 1 else slice(None, -1)
        if not bool(different(actual[inner], rolled[inner]).any()) and bool(
            different(right[inner], rolled[inner]).any()
        ):
            return where
    return ""


def _exchanged(scene: Scene, plan: RoutingPlan, actual: Tensor, right: Tensor, wrong: list[int]) -> list[str]:
    if len(wrong) < 2 or plan.rows_per_expert is None:
        return []
    experts = exact_plans.experts_of_rows(plan)
    place = {_bytes(right[row]): row for row in wrong}
    stands = {row: place.get(_bytes(actual[row])) for row in wrong}
    if any(other is None or experts[other] != experts[row] for row, other in stands.items()):
        return []
    if len(set(stands.values())) != len(wrong):
        return []
    row = wrong[0]
    return [
        f"rows of a tie exchanged: row {row} holds what belongs in row {stands[row]}, both of expert {experts[row]}; "
        f"rows of one expert stay in the order of their slots ({len(wrong)} rows)"
    ]


def _wrong_weights(scene: Scene, plan: RoutingPlan, source: Tensor, actual: Tensor, wrong: list[int]) -> list[str]:
    """Hypotheses about the weight by which each wrong row was multiplied."""
    assert scene.weights is not None  # noqa: S101 - asked for before
    slots, owners, weights = plan.slot_of_row.tolist(), scene.tokens, scene.weights
    rows = [row for row in wrong if slots[row] >= 0 and owners[slots[row]] >= 0]
    if len(rows) < len(wrong) or not rows:
        return []

    def all_have(weight_of: Callable[[int], float]) -> bool:
        for row in rows:
            weight = torch.tensor(weight_of(row))
            made = (weight * source[owners[slots[row]]].float()).to(actual.dtype)
            if bool(different(made, actual[row]).any()):
                return False
        return True

    count, first = len(weights), rows[0]
    title = "gradient not scaled" if scene.case.operator.endswith("backward") else "weights ignored"
    if all_have(lambda row: 1.0):
        return [f"{title}: row {first} ({scene.slot(slots[first])}) is not multiplied by its weight"]
    for shift, words in ((1, "behind"), (-1, "before")):
        if all_have(partial(_weight_at, weights.roll(-shift), slots)):
            other = (slots[first] + shift) % count
            return [
                f"weights of the wrong slot: row {first} of {scene.slot(slots[first])} is multiplied by the weight of "
                f"slot {other}, the one {words}"
            ]
    if all_have(lambda row: float(weights[row % count])):
        return [
            f"weights of the wrong slot: row {first} is multiplied by the weight of slot {first}, as if rows were slots"
        ]
    return []


# ---------------------------------------------------------------------------- sums


def of_sums(scene: Scene, plan: RoutingPlan, rows: Tensor, actual: Tensor, right: Tensor) -> list[str]:
    """Tokens that must be sums of rows."""
    if found := last_columns(actual, right):
        return found
    wrong = different(actual, right)
    for words, made in _sums(scene, plan, rows, actual.dtype):
        if _explains(made, actual, right, wrong):
            token = int(wrong.any(1).nonzero()[0])
            return [f"{words} ({_where(scene, plan, token, actual, right)})"]
    tokens = wrong.any(1).nonzero().flatten().tolist()
    if int(ulps(actual, right).max()) <= (2 if actual.dtype in HALVES else 64):
        worst = int(ulps(actual, right).max())
        return [
            f"sum in another order: {'1 ulp' if worst == 1 else f'up to {worst} ulps'} in {int(wrong.sum())} elements "
            f"of {len(tokens)} tokens ({_where(scene, plan, tokens[0], actual, right)})"
        ]
    known = {_bytes(right[t]): t for t in range(right.shape[0])}
    sentences = []
    for token in tokens[:MOST]:
        other = known.get(_bytes(actual[token]))
        if other is not None and other != token:
            sentences.append(f"token {token} holds token {other}'s sum")
        else:
            sentences.append(_where(scene, plan, token, actual, right))
    return sentences + more(len(tokens))


def _where(scene: Scene, plan: RoutingPlan, token: int, actual: Tensor, right: Tensor) -> str:
    column = int(different(actual[token], right[token]).nonzero()[0])
    slots = exact_plans.slots_of(plan, token)
    rows = [int(plan.row_of_slot[s]) for s in slots]
    return (
        f"token {token}, rows {rows}, element {column}: {actual[token, column].item():.9g} instead of "
        f"{right[token, column].item():.9g}"
    )


def _explains(made: Tensor, actual: Tensor, right: Tensor, wrong: Tensor) -> bool:
    """Whether a hypothesis gives what stands there: nearly all that is wrong, and hardly anything else."""
    agrees = ~different(made, actual)
    return int((agrees & wrong).sum()) >= 0.98 * int(wrong.sum()) and int(agrees.sum()) >= 0.98 * agrees.numel()


Term = tuple[int, int, float]  # slot, row, weight


def _terms(scene: Scene, plan: RoutingPlan, token: int) -> list[Term]:
    weights = scene.weights
    found = []
    for slot in exact_plans.slots_of(plan, token):
        weight = 1.0 if weights is None else float(weights[slot])
        found.append((slot, int(plan.row_of_slot[slot]), weight))
    return found


def _added(
    rows: Tensor, terms: list[list[Term]], weighted: bool, dtype: torch.dtype, inner: torch.dtype, product: torch.dtype
) -> Tensor:
    """Each token's terms in their order; sums kept in `inner`, products rounded to `product`."""
    found = torch.zeros(len(terms), rows.shape[1], dtype=dtype)
    for token, mine in enumerate(terms):
        total = torch.zeros(rows.shape[1], dtype=inner)
        for _, row, weight in mine:
            if 0 <= row < rows.shape[0] and not (weighted and weight == 0.0):
                wide = torch.float64 if inner is torch.float64 else torch.float32
                value = rows[row].to(wide)
                value = torch.tensor(weight, dtype=wide) * value if weighted else value
                total = (total.to(wide) + value.to(product).to(wide)).to(inner)
        found[token] = total.to(dtype)
    return found


def _sums(scene: Scene, plan: RoutingPlan, rows: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What stands there under each hypothesis."""
    weighted = scene.weights is not None
    terms = [_terms(scene, plan, token) for token in range(plan.num_tokens)]
    full, count = torch.float32, plan.num_rows
    slots = plan.num_slots

    def made(changed: Callable[[list[Term]], list[Term]], weights: bool = weighted) -> Tensor:
        return _added(rows, [changed(mine) for mine in terms], weights, dtype, full, full)

    if count and bool((plan.row_of_slot < 0).any()):
        last = [(-1, "the last row"), (0, "row 0")]
        for row, name in last:
            target = row % count
            yield (
                f"ignored -1: slots without a row add {name} ({target})",
                made(partial(_to_row, target)),
            )
    if weighted:
        yield "weights ignored", made(lambda mine: mine, False)
        flat = scene.weights
        assert flat is not None  # noqa: S101 - weighted
        for shift, words in ((1, "behind"), (-1, "before")):
            yield (
                f"weights of the wrong slot: each row is multiplied by the weight of the slot {words}",
                made(partial(_weighed, flat.roll(-shift))),
            )
        yield (
            "weights of the wrong slot: each row is multiplied by the weight of the slot with the row's number",
            made(lambda mine: [(s, r, float(flat[r % slots])) for s, r, w in mine]),
        )
        yield (
            "weights of the wrong slot: a token's weights are read backwards",
            made(lambda mine: [(s, r, mine[-1 - i][2]) for i, (s, r, _) in enumerate(mine)]),
        )
    for shift, words in ((-1, "before"), (1, "behind")):
        yield (
            f"off by one row: each slot adds the row {words} its own",
            made(partial(_next_row, shift, count)),
        )
    yield "the last slot of every token is missing", made(lambda mine: mine[:-1])
    yield "the first slot of every token is missing", made(lambda mine: mine[1:])
    for inner in HALVES:
        name = str(inner)[6:]
        yield f"accumulated in {name}", _added(rows, terms, weighted, dtype, inner, full)
        if weighted:
            yield f"products rounded to {name}, then summed", _added(rows, terms, weighted, dtype, full, inner)
            yield f"accumulated in {name}", _added(rows, terms, weighted, dtype, inner, inner)
    wide = torch.float64
    if weighted:
        yield "fused multiply-add instead of a rounded product and a rounded sum", _fused(rows, terms, dtype)
    yield "summed in float64", _added(rows, terms, weighted, dtype, wide, wide)
    yield "sum in another order: slots descending", made(lambda mine: mine[::-1])
    yield "sum in another order: by row instead of by slot", made(lambda mine: sorted(mine, key=lambda term: term[1]))


def _to_row(row: int, terms: list[Term]) -> list[Term]:
    return [(s, row if r < 0 else r, w) for s, r, w in terms]


def _next_row(shift: int, count: int, terms: list[Term]) -> list[Term]:
    return [(s, (r + shift) % count if r >= 0 else r, w) for s, r, w in terms]


def _weighed(weights: Tensor, terms: list[Term]) -> list[Term]:
    return [(s, r, float(weights[s])) for s, r, _ in terms]


def _fused(rows: Tensor, terms: list[list[Term]], dtype: torch.dtype) -> Tensor:
    """acc + w * y with one rounding, by float64, which holds the product exactly."""
    found = torch.zeros(len(terms), rows.shape[1], dtype=dtype)
    for token, mine in enumerate(terms):
        total = torch.zeros(rows.shape[1])
        for _, row, weight in mine:
            if 0 <= row < rows.shape[0] and weight != 0.0:
                total = (total.double() + rows[row].double() * torch.tensor(weight, dtype=torch.float64)).float()
        found[token] = total.to(dtype)
    return found


# ---------------------------------------------------------------------------- dot products


def of_dots(scene: Scene, plan: RoutingPlan, rows: Tensor, actual: Tensor, right: Tensor) -> list[str]:
    """Gradients of weights: for each slot the product of its row with the token's gradient."""
    other = scene.arguments.get("grad_tokens", scene.arguments.get("x"))
    if not isinstance(other, Tensor):
        return []
    narrow = rows.dtype if rows.dtype in HALVES else torch.bfloat16
    wrong = different(actual, right)
    title = "gradient of a weight" if scene.case.operator.endswith("backward") else "dot product"
    place = tuple(int(i) for i in wrong.nonzero()[0])
    first = f"{_owner(scene, plan, place)}: {actual[place].item():.9g} instead of {right[place].item():.9g}"
    name = str(narrow)[6:]
    if actual.dtype is torch.float32 and _only(actual, narrow) and not _only(right, narrow):
        return [f"{title} accumulated in {name}: every value is a {name} number ({first})"]
    for words, made in _dots(scene, plan, rows, other, narrow):
        shaped = _placed(made, plan, actual)
        if shaped is not None and _explains(shaped.to(actual.dtype), actual, right, wrong):
            return [f"{title} {words} ({first})"]
    worst = int(ulps(actual, right).max())
    if worst <= (4 if actual.dtype in HALVES else 4096):
        amount = "1 ulp" if worst == 1 else f"up to {worst} ulps"
        return [f"{title}: sum in another order: {amount} in {int(wrong.sum())} elements ({first})"]
    return [f"{title}: {int(wrong.sum())} of {wrong.numel()} differ{constant_factor(actual, right)} ({first})"]


def _only(values: Tensor, dtype: torch.dtype) -> bool:
    return not bool(different(values.to(dtype).to(values.dtype), values).any())


def _owner(scene: Scene, plan: RoutingPlan, place: tuple[int, ...]) -> str:
    if len(place) == 1:
        return scene.slot(place[0])
    if plan.expert_of_slot is not None:
        return f"token {place[0]}, expert {place[1]}"
    return scene.slot(place[0] * (plan.topk or 1) + place[1])


def _placed(of_slots: Tensor, plan: RoutingPlan, like: Tensor) -> Tensor | None:
    if plan.expert_of_slot is None or like.ndim == 1:
        return of_slots.reshape(like.shape) if of_slots.numel() == like.numel() else None
    found = torch.zeros(like.shape, dtype=of_slots.dtype)
    tokens = exact_plans.tokens_of_slots(plan)
    for slot, (token, expert) in enumerate(zip(tokens, plan.expert_of_slot.tolist(), strict=True)):
        if token >= 0 and expert >= 0:
            found[token, expert] = of_slots[slot]
    return found


def _dots(
    scene: Scene, plan: RoutingPlan, rows: Tensor, other: Tensor, narrow: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    tokens = torch.tensor(scene.tokens, dtype=torch.int64).clamp(min=0)
    row, count = plan.row_of_slot.long(), max(plan.num_rows, 1)
    live = (row >= 0) & (row < plan.num_rows)
    left, right = rows.float()[row.clamp(0, count - 1)], other.float()[tokens]
    products = left * right
    zero = torch.zeros(())
    name = str(narrow)[6:]
    for inner, words in (
        (narrow, f"accumulated in {name}"),
        (torch.float32, "sum in another order: element by element"),
    ):
        total = torch.zeros(len(row), dtype=inner)
        for column in range(products.shape[1]):
            total = total + products[:, column].to(inner)
        yield words, torch.where(live, total, zero.to(inner))
    yield f"accumulated in {name}: products rounded to it", torch.where(live, products.to(narrow).float().sum(1), zero)
    yield (
        "ignored -1: slots without a row have the last row's",
        products_of(rows, right, torch.where(live, row, count - 1)),
    )
    for shift, words in ((-1, "before"), (1, "behind")):
        at = (row + shift) % count
        yield (
            f"of the row {words} the slot's own: off by one row",
            torch.where(live, products_of(rows, right, at), zero),
        )


def products_of(rows: Tensor, right: Tensor, row: Tensor) -> Tensor:
    """The dot products of these rows, as torch sums them."""
    return (rows.float()[row] * right).sum(1)
