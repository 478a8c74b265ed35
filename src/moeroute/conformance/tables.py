"""What the command line and a `Judgement` print, JSON, and JUnit's XML."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from moeroute.conformance.judging import Judgement, Verdict

NO_PARAMETER = "has no parameter "
MOST = 40  # failed cases that are printed


def operators(judgement: "Judgement") -> list[tuple[str, int, int, int, int, "Verdict | None"]]:
    """For each operator: cases, passed, not asked, the worst ulps, and the verdict with the largest ratio of errors."""
    names = list(dict.fromkeys([*(v.operator for v in judgement.verdicts), *judgement.left_out]))
    found = []
    for name in names:
        mine = [verdict for verdict in judgement.verdicts if verdict.operator == name]
        compared = [verdict for verdict in mine if verdict.ratios is not None]
        largest = max(compared, key=lambda v: v.ratios.quotients() if v.ratios else (0.0,), default=None)
        left = sum(judgement.left_out.get(name, {}).values())
        worst = max((verdict.worst_ulps for verdict in mine), default=0)
        found.append((name, len(mine), sum(v.passed for v in mine), left, worst, largest))
    return found


def tags(judgement: "Judgement") -> list[tuple[str, int, int]]:
    """For each kind of edge ("nan", "ties", "no row", ...): cases, and how many passed."""
    names = sorted({tag for verdict in judgement.verdicts for tag in verdict.tags})
    rows = [(name, [v for v in judgement.verdicts if name in v.tags]) for name in names]
    return [(name, len(mine), sum(v.passed for v in mine)) for name, mine in rows]


def left_out(judgement: "Judgement") -> list[str]:
    """A line for each operator and kind of reason why cases were not asked."""
    lines = []
    for operator, reasons in judgement.left_out.items():
        unknown = {r.removeprefix(NO_PARAMETER): n for r, n in reasons.items() if r.startswith(NO_PARAMETER)}
        if unknown:
            names = sorted({name for found in unknown for name in found.split(", ")})
            lines.append(f"{sum(unknown.values())} cases of {operator}: it {NO_PARAMETER}{' or '.join(names)}")
        others = ((reason, count) for reason, count in reasons.items() if not reason.startswith(NO_PARAMETER))
        lines += [f"{count} cases of {operator}: it {reason}" for reason, count in others]
    return lines


def distance(ulps: int) -> str:
    """The worst distance, in words."""
    return "NaN" if ulps >= 2**62 else f"{ulps:,}"


def text(judgement: "Judgement") -> str:
    """A table of the operators, then what is wrong in words."""
    heading = ("operator", "cases", "passed", "not asked", "worst ulps", "errors / ours: largest, mean, RMS")
    rows = [heading]
    for name, count, passed, left, worst, largest in operators(judgement):
        quotients = largest.ratios.quotients() if largest is not None and largest.ratios is not None else ()
        ratios = ", ".join(f"{q:.3g}" for q in quotients)
        rows.append((name, str(count), str(passed), str(left), distance(worst), ratios))
    widths = [max(len(row[i]) for row in rows) for i in range(len(heading))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"not asked: {line}" for line in left_out(judgement)]
    for verdict in judgement.failed[:MOST]:
        lines.append(f"\n{verdict.case}")
        lines += [f"    {finding.check}: {sentence}" for finding in verdict.findings for sentence in finding.words]
    if len(judgement.failed) > MOST:
        lines.append(f"\n... and {len(judgement.failed) - MOST} more cases")
    good, count = len(judgement.verdicts) - len(judgement.failed), len(judgement.verdicts)
    lines.append(f"\n{judgement.target}, arithmetic={judgement.arithmetic!r}: {good} of {count} cases passed")
    return "\n".join(lines)


def as_json(judgement: "Judgement") -> str:
    """Everything, as JSON."""
    verdicts: list[dict[str, Any]] = []
    for verdict in judgement.verdicts:
        one: dict[str, Any] = {
            "case": verdict.case,
            "operator": verdict.operator,
            "tags": sorted(verdict.tags),
            "passed": verdict.passed,
            "findings": [{"check": f.check, "words": list(f.words)} for f in verdict.findings],
            "remarks": list(verdict.remarks),
            "worst_ulps": verdict.worst_ulps,
            "ulps": verdict.apart,
            "seconds": round(verdict.seconds, 6),
        }
        if verdict.ratios is not None:
            names = ("max_re_ratio", "avg_re_ratio", "root_mean_squared_ratio")
            one["ratios"] = {
                n: str(q) if q > 1e308 else q for n, q in zip(names, verdict.ratios.quotients(), strict=True)
            }
        verdicts.append(one)
    about = {
        "target": judgement.target,
        "arithmetic": judgement.arithmetic,
        "device": judgement.device,
        "passed": judgement.passed,
        "not_asked": judgement.left_out,
        "verdicts": verdicts,
    }
    return json.dumps(about, indent=1) + "\n"


def junit(name: str, results: Sequence[tuple[str, str, Sequence[str], float]]) -> str:
    """JUnit's XML of (group, case, what is wrong, seconds)."""
    failures = sum(bool(words) for _, _, words, _ in results)
    suite = ElementTree.Element(
        "testsuite",
        name=name,
        tests=str(len(results)),
        failures=str(failures),
        errors="0",
        time=f"{sum(seconds for *_, seconds in results):.3f}",
    )
    for group, case, words, seconds in results:
        one = ElementTree.SubElement(suite, "testcase", classname=group, name=case, time=f"{seconds:.6f}")
        if words:
            ElementTree.SubElement(one, "failure", message=printable(words[0])).text = printable("\n".join(words))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def printable(words: str) -> str:
    """Without the control characters that XML cannot hold."""
    return "".join(letter if letter >= " " or letter in "\n\t" else "?" for letter in words)
