"""`judge`: somebody else's functions on the cases of the table.

function, case -> targets.bound -> guards -> values, runs, batch, guards, inputs, memory -> Verdict -> Judgement
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moeroute import check
from moeroute.conformance import large as large_cases
from moeroute.conformance.case import Case, Results, named
from moeroute.conformance.compare import NOT_A_DISTANCE, Errors, Ratios, different, histogram, ulps
from moeroute.conformance.exact import truths
from moeroute.conformance.guards import NANS, OTHER, Guards, fresh_memory_poisoned, poison
from moeroute.conformance.halves import first_half
from moeroute.conformance.table import cases
from moeroute.conformance.targets import (
    SIGNATURES,
    Functions,
    NotAsked,
    Signature,
    bound,
    operators,
    parameters_of,
    with_autograd,
)
from moeroute.conformance.tolerance import settled
from moeroute.conformance.verification import one_thread, subnormals_kept
from moeroute.conformance.words import explain

Arithmetic = Literal["bits", "tolerance"]
# What is looked at: the results; whether further runs, another batch around the tokens, other memory around the inputs
# and other contents of fresh memory change them; whether something is written outside the outputs.
Check = Literal["values", "runs", "batch", "guards", "inputs", "memory"]
CHECKS: tuple[Check, ...] = get_args(Check)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one check found: a sentence for each thing that is wrong."""

    check: str
    words: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One case. `apart` counts elements by their distance in ulps; `rows` is a letter for each row of a wrong result:
    "." right, "~" other bits by few ulps, "#" wrong, "0" a wrong padding row."""

    case: str
    operator: str
    tags: frozenset[str]
    findings: tuple[Finding, ...] = ()
    remarks: tuple[str, ...] = ()
    worst_ulps: int = 0
    apart: dict[str, int] = dataclasses.field(default_factory=dict)
    ratios: Ratios | None = None
    rows: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    @property
    def words(self) -> list[str]:
        """Every sentence."""
        return [sentence for finding in self.findings for sentence in finding.words]


@dataclasses.dataclass(frozen=True)
class Judgement:
    """All verdicts; `left_out` says for each operator why cases were not asked, and how many."""

    target: str
    arithmetic: Arithmetic
    device: str
    verdicts: tuple[Verdict, ...]
    left_out: dict[str, dict[str, int]]

    @property
    def passed(self) -> bool:
        """Whether every case passed."""
        return all(verdict.passed for verdict in self.verdicts)

    @property
    def failed(self) -> list[Verdict]:
        """The cases that did not pass."""
        return [verdict for verdict in self.verdicts if not verdict.passed]

    def __str__(self) -> str:
        """A table of the operators, then what is wrong in words."""
        from moeroute.conformance.tables import text

        return text(self)


def judge(
    *,
    arithmetic: Arithmetic = "bits",
    signature: Signature = "moeroute",
    device: torch.device | str = "cpu",
    only: str = "",
    checks: tuple[Check, ...] = CHECKS,
    runs: int = 2,
    autograd: bool = False,
    far: bool = True,
    large: bool = False,
    tell: Callable[[int, int], None] = lambda done, of: None,
    name: str = "",
    **functions: Callable[..., Any],
) -> Judgement:
    """Judge functions by the cases of the table.

    Args:
        arithmetic: "bits": every result has the bits of docs/arithmetic.md. "tolerance": sums and elementary functions
            may round otherwise, by twice what float32 arithmetic in any order can differ from the exact value; copies,
            integers and choices are compared exactly.
        signature: whose parameters the functions have: "moeroute" (by the names of this package, with a `plan` or the
            index tensors of one), "megatron", "transformer_engine" or "torch_npu".
        device: where the inputs are.
        only: cases whose name contains this.
        checks: a part of "values", "runs", "batch", "guards", "inputs", "memory".
        runs: how often a case is run again, to see the same bits.
        autograd: judge torch's gradients of `permute` and `unpermute` too.
        far: rows that lie more than 2^31 elements apart, in memory that is hardly there; on the CPU only. A function
            that refuses strided rows is not asked.
        large: real tensors of more than 2^31 elements, where the memory allows: 11 GiB are asked for.
        tell: called as cases are done, with how many of how many.
        name: what the report calls the functions.
        functions: the functions by the operators' names: `permute=f, unpermute=g`. Parameters have the names of this
            package's function; results come as a tensor, a tuple in its order (the last ones may be missing), a mapping
            by name, or a RoutingPlan.

    Returns:
        The verdict on every case, to be printed, or written by `moeroute.conformance.pages.html`.

    Raises:
        ValueError: an unknown operator or option, or a function whose parameters fit no case.
        TypeError: something that is no function.

    >>> import torch
    >>> from moeroute.conformance import judge
    >>> def permute(tokens, token_of_row):
    ...     return tokens[token_of_row.long()]  # -1, a padding row, is the last token here
    >>> judgement = judge(permute=permute, only="edge T=5 E=4 K=2 H=1 ")
    >>> print(judgement.verdicts[0].words[0])
    rows: padding row 2 of expert 0 is not zero: it holds token 4's values
    """
    check.one_of("judge", "arithmetic", arithmetic, get_args(Arithmetic))
    check.one_of("judge", "signature", signature, SIGNATURES)
    for one in checks:
        check.one_of("judge", "checks", one, CHECKS)
    known = operators(signature)
    for operator, function in functions.items():
        if operator not in known:
            raise ValueError(
                f"judge: there are no cases of {operator!r} with the signature {signature!r}; "
                f"they are of: {', '.join(known)}"
            )
        if not callable(function):
            raise check.wrong_type("judge", operator, "a function", function)
    if not functions:
        raise ValueError("judge: give at least one function by its operator's name, such as permute=f")
    if autograd:
        functions = with_autograd(functions)
    bench = _Bench(arithmetic, torch.device(device), checks, runs)
    verdicts, left_out = _all(bench, functions, known, only, tell)
    if far and torch.device(device).type == "cpu" and signature == "moeroute":
        verdicts += large_cases.far(functions, only)
    if large and signature == "moeroute":
        verdicts += large_cases.large(functions, bench.device)
    if not verdicts and not left_out:
        raise ValueError(f"judge: no case's name contains {only!r}")
    return Judgement(name or ", ".join(functions), arithmetic, str(device), tuple(verdicts), left_out)


def _all(
    bench: "_Bench",
    functions: Functions,
    known: dict[str, str],
    only: str,
    tell: Callable[[int, int], None],
) -> tuple[list[Verdict], dict[str, dict[str, int]]]:
    by_operator = {known[operator]: function for operator, function in functions.items()}
    wanted = [case for case in cases() if case.operator in by_operator and only in case.name]
    verdicts: list[Verdict] = []
    left_out: dict[str, dict[str, int]] = {}
    for done, case in enumerate(wanted, 1):
        function = by_operator[case.operator]
        if case.through == "autograd" and not function.__qualname__.startswith("_permute_gradient"):
            reason = "goes through autograd"
        else:
            try:
                verdicts.append(bench.verdict(case, function))
                reason = ""
            except NotAsked as error:
                reason = str(error)
        if reason:
            reasons = left_out.setdefault(case.operator, {})
            reasons[reason] = reasons.get(reason, 0) + 1
        tell(done, len(wanted))
    for operator, reasons in left_out.items():
        if operator not in {verdict.operator for verdict in verdicts}:
            parameters = ", ".join(parameters_of(by_operator[operator]) or ())
            raise ValueError(
                f"judge: no case of {operator} fits the parameters ({parameters}): it {'; '.join(reasons)}. Name them "
                f"as moeroute.{operator} does; instead of `plan` its tensors may be named one by one"
            )
    return verdicts, left_out


@dataclasses.dataclass(frozen=True)
class _Bench:
    """How one case is judged."""

    arithmetic: Arithmetic
    device: torch.device
    checks: tuple[Check, ...]
    runs: int

    def verdict(self, case: Case, function: Callable[..., Any]) -> Verdict:
        """Raises NotAsked where the function has no parameter for something in the case."""
        start = time.perf_counter()
        with subnormals_kept(), one_thread():
            arguments = case.arguments()
            bound(function, case, arguments)
            right = case.run(case.arguments(), None if case.through.startswith("moeroute") else "reference")
        return self.against(case, function, arguments, right, start)

    def against(
        self, case: Case, function: Callable[..., Any], arguments: dict[str, Any], right: Results, start: float
    ) -> Verdict:
        """The verdict, given what must come."""
        found: list[Finding] = []
        try:
            first, complaints = self.call(case, function, arguments, right, NANS, poisoned="memory" in self.checks)
        except Exception as error:  # whatever somebody else's function raises is its verdict
            raised = (f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",)
            return Verdict(case.name, case.operator, case.tags, (Finding("error", raised),), seconds=_since(start))
        for kind in ("guards", "inputs"):
            words = tuple(sentence for name, sentence in complaints if name == kind)
            if words and kind in self.checks:
                found.append(Finding(kind, words))
        shown = {name: value for name, value in first.items() if name in right}
        if not shown:
            text = f"no result that can be compared: {sorted(first)} where {sorted(right)} are expected"
            found.append(Finding("values", (text,)))
        elif "values" in self.checks:
            compared = shown if self.arithmetic == "bits" else settled(case, arguments, shown, right)
            if words := tuple(explain(case, arguments, compared, right)):
                found.insert(0, Finding("values", words))
        found += self._again(case, function, arguments, right, first)
        if "batch" in self.checks:
            found += self._in_another_batch(case, function, arguments, first)
        missing = [name for name in right if name not in first and not case.is_plan]
        remarks = (f"not returned, not judged: {', '.join(missing)}",) if missing else ()
        return measured(case, arguments, shown, right, found, remarks, start)

    def call(
        self,
        case: Case,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        right: Results,
        fill: int,
        poisoned: bool = False,
    ) -> tuple[Results, list[tuple[str, str]]]:
        """The results by name, copied to the CPU, and what was written that must not be."""
        guards = Guards(fill, self.device)
        given = bound(function, case, guards.arguments(arguments))
        outputs = None
        if "out" in (parameters_of(function) or {}) and not case.is_plan:
            parts = [guards.tensor(f"out[{i}]", poison(value), True) for i, value in enumerate(right.values())]
            outputs = given["out"] = parts[0] if len(parts) == 1 else tuple(parts)
        if poisoned:
            with fresh_memory_poisoned():
                result = function(**given)
        else:
            result = function(**given)
        results = named(result if outputs is None else outputs, case.result_names or tuple(right))
        return {name: value.detach().cpu().clone() for name, value in results.items()}, list(guards.complaints())

    def _again(
        self, case: Case, function: Callable[..., Any], arguments: dict[str, Any], right: Results, first: Results
    ) -> list[Finding]:
        """Further runs, with other memory around the inputs and in what is fresh."""
        poisoned = "memory" in self.checks
        if "runs" in self.checks:
            for _ in range(self.runs):
                again, _ = self.call(case, function, arguments, right, NANS, poisoned)
                if words := _apart(case, arguments, again, first):
                    return [Finding("runs", (f"two runs differ (the order of atomics?): {words}",))]
        if "guards" in self.checks:
            again, _ = self.call(case, function, arguments, right, OTHER, poisoned)
            if words := _apart(case, arguments, again, first):
                return [
                    Finding(
                        "guards", (f"reads outside its inputs: the result depends on the memory around them: {words}",)
                    )
                ]
        if poisoned:
            again, _ = self.call(case, function, arguments, right, NANS, False)
            if words := _apart(case, arguments, again, first):
                return [Finding("memory", (f"uninitialised memory shows in the result: {words}",))]
        return []

    def _in_another_batch(
        self, case: Case, function: Callable[..., Any], arguments: dict[str, Any], first: Results
    ) -> list[Finding]:
        """The first half of the tokens alone."""
        half = first_half(case, arguments)
        if half is None:
            return []
        try:
            given = bound(function, case, Guards(NANS, self.device).arguments(half.arguments))
            parameters = parameters_of(function) or {}
            if "out" in parameters and parameters["out"].default is parameters["out"].empty:
                return []
            alone = named(function(**given), case.result_names)
        except NotAsked:
            return []
        except Exception as error:  # the same as above
            return [
                Finding("batch", (f"fails for the first {half.count} tokens alone: {type(error).__name__}: {error}",))
            ]
        for name in half.results:
            if name in alone and name in first:
                part, whole = alone[name].detach().cpu()[: half.count], first[name][: half.count]
                if part.shape != whole.shape or bool(different(part, whole).any()):
                    token = 0 if part.shape != whole.shape else int(different(part, whole).nonzero()[0][0])
                    words = f"{name}: token {token} depends on the other tokens of the batch"
                    return [Finding("batch", (words,))]
        return []


def _since(start: float) -> float:
    return time.perf_counter() - start


def _apart(case: Case, arguments: dict[str, Any], again: Results, first: Results) -> str:
    """In words how a further run differs; empty where it does not."""
    words = explain(case, arguments, again, first)
    return words[0] if words else ""


def measured(
    case: Case,
    arguments: dict[str, Any],
    shown: Results,
    right: Results,
    found: list[Finding],
    remarks: tuple[str, ...],
    start: float,
) -> Verdict:
    """The verdict with ulps, their histogram, errors against float64 and a picture of the rows."""
    worst, ratios, rows = 0, None, ""
    apart: dict[str, int] = {}
    exact = truths(case, arguments, right)
    for name, value in shown.items():
        expected = right[name]
        if value.shape != expected.shape or value.dtype != expected.dtype:
            continue
        if not rows and bool(different(value, expected).any()) and value.ndim:
            rows = _picture(case, arguments, name, value, expected)
        if not expected.dtype.is_floating_point:
            continue
        distance = ulps(value, expected)
        if not apart or int(distance.max() if distance.numel() else 0) > worst:
            worst, apart = int(distance.max()) if distance.numel() else 0, histogram(distance)
        if bool(exact[name].bound.any()):
            both = Ratios(Errors.of(value, exact[name].value), Errors.of(expected, exact[name].value))
            if ratios is None or both.quotients() > ratios.quotients():
                ratios = both
    worst = min(worst, NOT_A_DISTANCE)
    return Verdict(
        case.name, case.operator, case.tags, tuple(found), remarks, worst, apart, ratios, rows, _since(start)
    )


def _picture(case: Case, arguments: dict[str, Any], name: str, value: Tensor, expected: Tensor) -> str:
    wrong = different(value, expected).reshape(len(value), -1)
    plan = arguments.get("plan")
    padding = plan.slot_of_row if name in ("rows", "grad_rows", "quantized") and plan is not None else None
    close = torch.zeros(len(value), dtype=torch.bool)
    if value.dtype.is_floating_point and wrong.shape[1]:
        close = ulps(value, expected).reshape(len(value), -1).amax(1) <= 64
    letters = []
    for row in range(len(value)):
        if not bool(wrong[row].any()):
            letters.append(".")
        elif padding is not None and int(padding[row]) < 0:
            letters.append("0")
        else:
            letters.append("~" if bool(close[row]) else "#")
    return "".join(letters)
