"""arithmetic="tolerance": results that may round otherwise, but not choose or copy otherwise."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moeroute.conformance.case import Case, Results
from moeroute.conformance.exact import truths
from moeroute.conformance.exact_gating import scores_of

ALLOWED = 2.0  # times what float32 arithmetic in any order may be off


def settled(case: Case, arguments: Mapping[str, Any], actual: Results, right: Results) -> Results:
    """The results, the right values in place of those within the tolerance: what still differs is wrong."""
    given = dict(arguments)
    found = dict(actual)
    chosen = actual.get("expert_ids")
    if case.operator == "gating_topk" and "expert_ids" not in given and chosen is not None:
        ids, other = _choices(given, chosen, right)
        found["expert_ids"] = ids
        if bool(other.any()):  # near ties that fell the other way: their weights are those of what was chosen
            given["expert_ids"] = torch.where(ids == right["expert_ids"], chosen.to(torch.int32), ids)
    expected = truths(case, given, {**right, **{n: v for n, v in actual.items() if n == "scores"}})
    for name, value in found.items():
        truth = expected.get(name)
        if truth is None or not truth.dtype.is_floating_point or value.shape != right[name].shape:
            continue
        wrong = dataclasses.replace(truth, bound=truth.bound * ALLOWED).wrong(value)
        if not isinstance(wrong, str):
            found[name] = torch.where(wrong, value, right[name])
    return found


def _choices(arguments: Mapping[str, Any], chosen: Tensor, right: Results) -> tuple[Tensor, Tensor]:
    """Ids with the right ones in place of near ties, and which tokens have those."""
    exact, loose = scores_of(arguments["logits"], arguments["score"])
    bias = arguments.get("bias")
    values = exact if bias is None else exact + bias.double()
    slack = (loose + 8) * 2.0**-24 * values.abs().clamp(min=1e-30) * 2
    ids = chosen.to(torch.int64)
    inside = (ids >= 0) & (ids < values.shape[1])
    wanted = right["expert_ids"].long()
    mine, theirs = values.gather(1, ids.clamp(0, values.shape[1] - 1)), values.gather(1, wanted)
    near = inside & ((mine - theirs).abs() <= slack.gather(1, wanted)) & (mine != theirs)
    return torch.where(near, wanted, ids).to(torch.int32), near.any(1)
