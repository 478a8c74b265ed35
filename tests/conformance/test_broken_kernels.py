"""Twelve kernels with the mistakes that kernels have: each is caught, and the sentence names the mistake."""

from collections.abc import Callable
from typing import Any

import pytest

import broken_kernels as broken
from moeroute.conformance import Judgement, judge

SMALL = "edge"
ROWS = "T=23 E=12 K=3 H=331 ids"

# What is judged, by which cases, and what the first sentences say.
MISTAKES: dict[str, tuple[dict[str, Callable[..., Any]], str, str, str]] = {
    "off by one row": ({"permute": broken.off_by_one_row}, f"{ROWS} bfloat16", "values", r"rows: off by one row"),
    "wrong tie": (
        {"plan_from_expert_ids": broken.wrong_tie}, "T=37 E=12 K=3", "values",
        r"row_of_slot: rows of a tie exchanged: slot \d+ \(token \d+, expert \d+\) has row \d+, which belongs to slot",
    ),
    "wrong tie of scores": (
        {"gating_topk": broken.wrong_tie_of_scores}, "edge softmax ties", "values",
        r"expert_ids: token 0, choice 0: expert 39 instead of 0: a tie \(both 0\.025\) goes to the smaller id",
    ),
    "bfloat16 accumulation": (
        {"unpermute": broken.bfloat16_sum}, f"{ROWS} bfloat16", "values", r"tokens: accumulated in bfloat16 \(token \d+,"
    ),
    "bfloat16 gradient of a weight": (
        {"unpermute_backward": broken.bfloat16_gradient_of_a_weight}, f"{ROWS} bfloat16, weights float32", "values",
        r"grad_weights: gradient of a weight accumulated in bfloat16",
    ),
    "ignored -1": (
        {"unpermute": broken.ignored_minus_one}, f"{ROWS} float32", "values",
        r"tokens: ignored -1: slots without a row add the last row \(\d+\)",
    ),
    "order of atomics": (
        {"unpermute": broken.order_of_atomics}, f"{ROWS} float32", "runs",
        r"two runs differ \(the order of atomics\?\): tokens: sum in another order: slots descending",
    ),
    "uninitialised padding": (
        {"permute": broken.uninitialised_padding}, f"{ROWS} float32", "values",
        r"rows: padding row \d+ of expert \d+ is not zero: it was never written",
    ),
    "mask ignored in the last tile": (
        {"permute": broken.last_tile_unmasked}, f"{ROWS} float16", "values",
        r"rows: only the columns from 320 on, the last 11 of 331, are wrong: the mask of the last tile",
    ),
    "weights of the wrong slot": (
        {"unpermute": broken.weights_of_the_wrong_slot}, f"{ROWS} float32, weights float32", "values",
        r"tokens: weights of the wrong slot: each row is multiplied by the weight of the slot with the row's number",
    ),
    "counts before capacity": (
        {"plan_from_expert_ids": broken.counts_before_capacity}, "T=37 E=12 K=3 capacity=9", "values",
        r"tokens_per_expert: counts before the capacity of 9: expert \d+ has \d+ instead of 9",
    ),
    "gradient not scaled": (
        {"unpermute_backward": broken.gradient_not_scaled}, f"{ROWS} float32, weights float32", "values",
        r"grad_rows: gradient not scaled: row \d+ \(slot \d+ \(token \d+, expert \d+\)\) is not multiplied by its weight",
    ),
    "input changed in place": (
        {"unpermute": broken.in_place}, f"{ROWS} float32, weights float32", "inputs",
        r"changes its input `rows`: \d+ of \d+ elements, the first at \[\d+, \d+\]",
    ),
    "write behind the end": (
        {"permute": broken.writes_behind}, f"{ROWS} float32", "guards", r"writes behind the end of `out\[0\]`: up to 1 element"
    ),
    "read behind the end": (
        {"permute": broken.reads_behind}, f"{ROWS} float32", "guards",
        r"reads outside its inputs: the result depends on the memory around them: rows: padding row",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_caught_and_named(mistake: str) -> None:
    functions, only, kind, words = MISTAKES[mistake]
    arithmetic = "tolerance" if mistake == "wrong tie of scores" else "bits"
    judgement = judge(**functions, only=only, arithmetic=arithmetic, far=False)  # type: ignore[arg-type]
    said = [
        sentence for verdict in judgement.failed for f in verdict.findings if f.check == kind for sentence in f.words
    ]
    import re

    assert any(re.match(words, sentence) for sentence in said), said or judgement.failed[:1]
    assert mistake.split()[0] not in ("in",)


def test_offsets_of_32_bits_are_caught_and_named() -> None:
    only = "permute far"
    right, wrong = (judge(permute=f, only=only) for f in (broken.permute, broken.int32_offsets))
    (far,) = right.verdicts
    assert far.passed
    (far,) = wrong.verdicts
    assert far.words[0].startswith("offsets above 2^31 (kept in 32 bits?): rows: row ")
    assert " is zero instead of token " in far.words[0]
    near = judge(permute=broken.int32_offsets, only="permute edge T=5", far=False)
    assert near.passed, "elsewhere the offsets are small"


def test_right_functions_pass() -> None:
    found = judge(permute=broken.permute, unpermute=broken.unpermute, far=False, only="T=5 E=4")
    assert found.passed, str(found)
    assert {verdict.operator for verdict in found.verdicts} == {"permute", "unpermute"}


def words_of(judgement: Judgement) -> list[str]:
    return [sentence for verdict in judgement.failed for sentence in verdict.words]
