"""One table of cases for tests, `moeroute verify` and the judge of other people's functions.

    table.py    every operator, mode, dtype and edge; inputs from generator.py, which is the same everywhere
    exact.py    what must come out, by loops and in float64; confirms the digests of digests.json
    words.py    what is wrong, where something is
    judging.py  `judge`: somebody else's functions on the same cases
    files.py    the cases as files, for C++, CUDA and other languages

docs/judge.md shows how to use it.
"""

from moeroute.conformance.case import Case
from moeroute.conformance.judging import Judgement, Verdict, judge
from moeroute.conformance.table import cases

__all__ = ["Case", "Judgement", "Verdict", "cases", "judge"]
