"""The table of cases: every operator, mode, dtype and edge, once, for tests, `moeroute verify` and the judge.

    gating_cases, plan_cases, row_cases, activation_cases, peer_cases, measured -> cases()

A name is unique and never changes its meaning: digests go by it. New cases get new names.
"""

from functools import cache

from moeroute.conformance.activation_cases import activation_cases
from moeroute.conformance.case import Case
from moeroute.conformance.gating_cases import gating_cases
from moeroute.conformance.measured import small_cases
from moeroute.conformance.peer_cases import peer_cases
from moeroute.conformance.plan_cases import plan_cases
from moeroute.conformance.row_cases import row_cases, row_edges


@cache
def cases() -> tuple[Case, ...]:
    """All cases, in the order of the data path."""
    found = (
        *gating_cases(19),
        *plan_cases(37, 12, 3),
        *plan_cases(300, 130, 6),
        *row_cases(23, 12, 3, 331),
        *row_cases(9, 5, 2, 2048),
        *row_edges(),
        *activation_cases(7, 75),
        *activation_cases(5, 128),
        *peer_cases(),
        *small_cases(),
    )
    names = [case.name for case in found]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise AssertionError(f"two cases of one name: {twice[:3]}")
    return found


def chosen(only: str = "") -> tuple[Case, ...]:
    """The cases whose name contains `only`."""
    return tuple(case for case in cases() if only in case.name)
