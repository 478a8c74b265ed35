"""The operators' speed: a few cases of `moeroute bench`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from demo.processes import reports

# Cases by their names in `moeroute bench`, and what the demo calls them.
CASES = {
    "gating_topk bfloat16 T=4096 K=8 E=256": "gating_topk",
    "plan_from_expert_ids int32 S=1048576 E=256": "plan",
    "spread bfloat16 T=1024 K=8 H=7168": "permute",
    "combine weighted bfloat16 T=1024 K=8 H=7168": "unpermute",
    "combine bfloat16 T=1024 K=8 H=7168": "permute backward",
    "unpermute_backward bfloat16 T=1024 K=8 H=7168": "unpermute backward",
}
SECONDS = 0.5  # for each case, after a check that both sides give the same result


class Bar(NamedTuple):
    name: str
    seconds: float
    times: float  # torch's time, divided by ours
    roof: float | None  # the time of a copy of as many bytes, divided by ours; None where no memory is streamed


def in_order(bars: list[Bar]) -> list[Bar]:
    """Along the data path."""
    names = list(CASES.values())
    return sorted(bars, key=lambda bar: names.index(bar.name))


def measure() -> Iterator[Bar]:
    """One after the other, in the benchmark's order."""
    for mode in ("kernel", "called"):  # without glibc nothing recycles torch's memory, so "kernel" has no lines
        found = False
        for line in reports("The benchmark", "moeroute.bench", mode, str(SECONDS), *CASES):
            found = True
            yield Bar(CASES[line["case"]], line["ours_s"], line["times"], line.get("roof"))
        if found:
            return
