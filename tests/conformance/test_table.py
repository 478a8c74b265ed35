"""The table: what it covers, that its inputs and digests are what they were, and that they are confirmed independently."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moeroute
from moeroute.conformance import calls, cases, digests
from moeroute.conformance.case import Case, digest, expected_digests, inputs_digest
from moeroute.conformance.exact import refusals
from moeroute.conformance.generator import Stream
from moeroute.conformance.verification import one_thread, run, verified

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in cases()}
OPERATORS = sorted({case.operator for case in cases()})


def some(operator: str, count: int = 6) -> list[Case]:
    """A few cases of an operator, the same ones every time."""
    mine = [case for case in cases() if case.operator == operator]
    return mine[:: max(len(mine) // count, 1)]


def test_the_digests_are_of_these_cases() -> None:
    assert list(expected_digests()) == sorted(BY_NAME)
    assert len(BY_NAME) >= 1600
    for name, found in expected_digests().items():
        assert len(found) > 1, name
        assert all(re.fullmatch("[0-9a-f]{64}", one) for one in found.values())


def test_every_public_operator_has_cases_in_every_dtype() -> None:
    elsewhere = {
        "balance_statistics", "capacity_from_factor", "empty_cache", "load_balancing_loss",
        "load_balancing_loss_from_counts", "look_up_expert_ids", "memory_stats", "router_z_loss", "set_memory_pool",
        "sinkhorn", "update_expert_bias",
    }  # fmt: skip
    public = {name for name in moeroute.__all__ if name[0].islower()} - elsewhere
    own = {case.operator for case in cases() if "." not in case.operator}
    assert own == public | {"activate", "activate_backward"}
    for operator in ("gating_topk", "permute", "unpermute", "permute_backward", "unpermute_backward", "combine"):
        names = [case.name for case in cases() if case.operator == operator]
        for dtype in ("float32", "float16", "bfloat16"):
            assert any(re.search(rf"\b{dtype}\b", name) for name in names), (operator, dtype)
    tags = Counter(tag for case in cases() for tag in case.tags)
    for tag in (
        "ties",
        "nan",
        "inf",
        "no row",
        "no expert",
        "empty experts",
        "odd hidden",
        "padding",
        "capacity",
        "size",
    ):
        assert tags[tag] >= 4, tag


@pytest.mark.parametrize("operator", OPERATORS)
def test_nothing_changed(subtests: pytest.Subtests, operator: str) -> None:
    """Inputs and reference results have the digests that are shipped, and the exact computation confirms them."""
    with one_thread():
        made, refused = digests.made(some(operator))
    assert refused == []
    for name, found in made.items():
        with subtests.test(name):
            assert found == expected_digests()[name]


def test_other_seeds_give_other_inputs() -> None:
    case = BY_NAME["permute T=23 E=12 K=3 H=331 ids float32"]
    assert inputs_digest(case.arguments()) == inputs_digest(case.arguments())
    assert inputs_digest(case.arguments(1)) != inputs_digest(case.arguments())
    outcomes = run([("cpu", CPU)], "permute T=23 E=12 K=3 H=331 ids float32", seed=3)
    assert len(outcomes) > 3
    assert all(outcome.passed for outcome in outcomes)


def test_hardly_any_result_is_all_nan() -> None:
    """A case whose sums are all NaN would show nothing."""
    empty = []
    for case in cases()[::7]:
        for name, value in case.run(case.arguments(), None).items():
            if value.dtype.is_floating_point and value.numel() and bool(value.isnan().all()):
                empty.append((case.name, name))
    assert empty == []


@pytest.mark.parametrize(
    ("name", "label", "first"),
    [("example", "a", 14610607763178083087), ("example", "b", 17576072535504348925)],
)
def test_the_generator_does_not_change(name: str, label: str, first: int) -> None:
    """Element i is SplitMix64's function of the key and i, computed here with Python's integers."""
    import hashlib

    mask = 2**64 - 1
    key = int.from_bytes(hashlib.sha256(f"{name}/{label}".encode()).digest()[:8], "little")
    found = Stream(name).words(label, 5).tolist()
    for i, word in enumerate(found, 1):
        x = (key + i * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        assert word == x ^ (x >> 31)
    assert found[0] == first


def test_numbers_are_made_exactly_of_bits() -> None:
    draw = Stream("numbers")
    uniform, normal = draw.uniform("u", 4000).double(), draw.normal("n", 4000).double()
    assert bool((uniform * 2**24 == (uniform * 2**24).round()).all())
    assert bool((normal * 2**21 == (normal * 2**21).round()).all())
    assert 0 <= float(uniform.min()) < 0.01 < 0.99 < float(uniform.max()) < 1
    assert abs(float(normal.mean())) < 0.06
    assert abs(float(normal.std()) - 1.155) < 0.03
    assert sorted(draw.permutation("p", 50).tolist()) == list(range(50))
    chosen = draw.distinct("d", 30, 9, 4)
    assert all(len(set(row)) == 4 for row in chosen.tolist())
    assert torch.equal(draw.uniform("u", 10), draw.uniform("u", 4000)[:10])


def test_digests_see_bits_but_not_the_kind_of_a_nan() -> None:
    nans = torch.tensor([0x7FC00000, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert len({digest(nan) for nan in nans.split(1)}) == 1
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.zeros(2, 3)) != digest(torch.zeros(3, 2))
    assert digest(torch.zeros(2)) != digest(torch.zeros(2, dtype=torch.int32))
    assert digest(torch.zeros(3, 2).t()) == digest(torch.zeros(2, 3))


# ---------------------------------------------------------------------------- the exact computation can say no


def one_off(value: Tensor) -> Tensor:
    """The largest finite element, by 1 or by 40 ulps."""
    damaged = value.clone().contiguous()
    flat = damaged.view(-1)
    if not damaged.dtype.is_floating_point:
        flat[len(flat) // 2] = not bool(flat[len(flat) // 2]) if flat.dtype is torch.bool else flat[len(flat) // 2] + 1
        return damaged
    place = torch.where(flat.isfinite(), flat, 0).abs().argmax()
    flat[place] = flat[place] * (1 - 3e-2) + (flat[place] == 0)  # not upwards: the largest number would overflow
    return damaged


def shifted(value: Tensor) -> Tensor:
    return value.roll(1, 0)


@pytest.mark.parametrize("damage", [one_off, shifted])
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_exact_computation_refuses_wrong_results(operator: str, damage: Callable[[Tensor], Tensor]) -> None:
    for case in some(operator, 2):
        arguments = case.arguments()
        results = case.run(case.arguments(), None)
        assert refusals(case, arguments, results) == []
        seen = 0
        for name, value in results.items():
            if value.numel() < 2 or value.unique().numel() < 2 or value.ndim == 0:
                continue
            wrong = damage(value)
            if torch.equal(torch.nan_to_num(wrong.float()), torch.nan_to_num(value.float())):
                continue
            seen += 1
            assert refusals(case, arguments, {**results, name: wrong}), f"{case.name}: {name}"
        assert seen or case.operator == "plan_from_chunks" or "edge" in case.name, case.name


# ---------------------------------------------------------------------------- verification


def test_a_backend_that_differs_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["permute_backward T=23 E=12 K=3 H=331 ids float32"]
    right = moeroute.permute_backward

    def wrong(*arguments: Any, **options: Any) -> Tensor:
        return right(*arguments, **options) * 1.5

    monkeypatch.setattr(
        moeroute,
        "permute_backward",
        lambda *a, backend, **o: (right if backend == "reference" else wrong)(*a, **o, backend=backend),
    )
    (outcome,) = verified(case, [("cpu", CPU)])
    assert "grad_tokens: token 0" in outcome.words[0]
    monkeypatch.setattr(moeroute, "permute_backward", lambda *a, **o: 1 / 0)
    (outcome,) = verified(case, [("cpu", CPU)])
    assert outcome.words == ("ZeroDivisionError: division by zero",)


def test_other_inputs_than_the_digests_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "normal", lambda self, label, *shape: torch.ones(shape))
    (outcome,) = verified(BY_NAME["permute T=23 E=12 K=3 H=331 ids float32"], [("cpu", CPU)])
    assert "the inputs are not those of the digests" in outcome.words[0]


def test_the_calls_are_those_of_the_table() -> None:
    own = {name for name, value in vars(calls).items() if getattr(value, "__module__", "") == calls.__name__}
    assert own == {case.operator for case in cases() if case.through in ("autograd", "calls")}
