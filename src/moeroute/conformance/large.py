"""Offsets above 2^31: rows that lie far apart in memory that is hardly there, and tensors that are really so large."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import moeroute
from moeroute.conformance.case import Case, named
from moeroute.conformance.compare import different
from moeroute.conformance.exact_plans import as_plan, plan_from_expert_ids
from moeroute.conformance.generator import Stream
from moeroute.conformance.guards import far_rows, free_bytes
from moeroute.conformance.targets import Functions, NotAsked, bound
from moeroute.conformance.words import explain

if TYPE_CHECKING:
    from moeroute.conformance.judging import Verdict

SIZES = (37_500, 8, 7168)  # tokens, slots of a token, hidden size: 2,150,400,000 elements
APART = 2**28 + 16  # elements from row to row
WHY = "offsets above 2^31 (kept in 32 bits?)"
TAGS = frozenset({"large"})


def far(functions: Functions, only: str = "") -> list["Verdict"]:
    """permute and unpermute on twenty rows with 2^28 elements from one to the next, where `only` is in the name."""
    found = []
    draw = Stream("far rows")
    plan = as_plan(plan_from_expert_ids(draw.distinct("ids", 20, 4, 1), 4))
    for operator, name in (("permute", "tokens"), ("unpermute", "rows")):
        case = Case(f"{operator} far: rows 2^28 elements apart, bfloat16", operator, lambda draw: {}, TAGS)
        if operator not in functions or only not in case.name:
            continue
        near = draw.normal(name, 20, 40).to(torch.bfloat16)
        values = far_rows(near, APART)
        if values is None:
            continue
        verdict = _on_far_rows(case, functions[operator], {name: values, "plan": plan}, {name: near, "plan": plan})
        found += [] if verdict is None else [verdict]
    return found


def _on_far_rows(
    case: Case, function: Callable[..., Any], far_arguments: dict[str, Any], near_arguments: dict[str, Any]
) -> "Verdict | None":
    from moeroute.conformance.judging import Finding, Verdict

    start = time.perf_counter()
    right = case.run(near_arguments, "reference")
    try:
        results = named(function(**bound(function, case, far_arguments)), case.result_names)
    except (NotAsked, ValueError, TypeError, NotImplementedError):  # takes no strided rows, which it may
        return None
    except Exception as error:  # an index that overflowed, most likely
        words = [f"{type(error).__name__}: {error}"]
    else:
        words = explain(case, near_arguments, {n: v.detach() for n, v in results.items() if n in right}, right)
    findings = (Finding("values", tuple(f"{WHY}: {sentence}" for sentence in words)),) if words else ()
    return Verdict(case.name, case.operator, TAGS, findings, seconds=time.perf_counter() - start)


def large(functions: Functions, device: torch.device) -> list["Verdict"]:
    """permute and unpermute on [R, 7168] bfloat16 with more than 2^31 elements; looked at in pieces."""
    from moeroute.conformance.judging import Finding, Verdict

    num_tokens, topk, hidden = SIZES
    needed = int(num_tokens * topk * hidden * 2 * 1.3) * 2
    free = free_bytes(device)
    found = []
    for operator in ("permute", "unpermute"):
        if operator not in functions:
            continue
        case = Case(f"{operator} large: {num_tokens * topk} rows of {hidden} bfloat16", operator, lambda draw: {}, TAGS)
        if free < needed:
            text = f"not run: needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free"
            found.append(Verdict(case.name, operator, TAGS, remarks=(text,)))
            continue
        start = time.perf_counter()
        words = list(_on_large(case, functions[operator], device, num_tokens, topk, hidden))
        findings = (Finding("values", tuple(words[:4])),) if words else ()
        found.append(Verdict(case.name, operator, TAGS, findings, seconds=time.perf_counter() - start))
    return found


def _on_large(
    case: Case, function: Callable[..., Any], device: torch.device, num_tokens: int, topk: int, hidden: int
) -> Iterator[str]:
    ids = Stream("large").distinct("ids", num_tokens, 64, topk).to(device)
    plan = moeroute.plan_from_expert_ids(ids, 64, num_rows=num_tokens * topk)
    tokens = (torch.arange(num_tokens, device=device) % 251 - 125)[:, None].to(torch.bfloat16).repeat(1, hidden)
    tokens[:, -1] = 1
    token_of_row = plan.token_of_row.long()
    given: dict[str, Any] = {"tokens": tokens}
    if case.operator == "unpermute":
        rows = torch.empty(plan.num_rows, hidden, dtype=torch.bfloat16, device=device)
        for first in range(0, plan.num_rows, 8192):
            rows[first : first + 8192] = tokens[token_of_row[first : first + 8192]]
        given = {"rows": rows}
    result = named(function(**bound(function, case, {**given, "plan": plan})), case.result_names)
    found: Tensor = next(iter(result.values()))
    for first in range(0, len(found), 8192):
        part = slice(first, first + 8192)
        right = tokens[token_of_row[part]] if case.operator == "permute" else (tokens[part].float() * topk).bfloat16()
        wrong = different(found[part].cpu(), right.cpu()).any(1).nonzero().flatten()
        if len(wrong):
            row = first + int(wrong[0])
            elements = row * hidden
            yield f"{WHY if elements >= 2**31 else 'below 2^31 elements'}: row {row} is wrong, at element {elements}"
            return
