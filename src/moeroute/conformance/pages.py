"""The judge's report as one HTML file: no scripts, nothing from elsewhere, small SVG pictures."""

from html import escape
from typing import TYPE_CHECKING

from moeroute.conformance.tables import distance, left_out, operators, printable, tags

if TYPE_CHECKING:
    from moeroute.conformance.judging import Judgement, Verdict

MOST = 200  # failed cases that are shown
COLOURS = {".": "#7fb685", "~": "#f2c14e", "#": "#c8553d", "0": "#5c4d7d"}
LEGEND = {".": "right", "~": "other bits, few ulps", "#": "wrong", "0": "padding that is not zero"}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; }
td:first-child, th:first-child { text-align: left; }
.bad { color: #a3320b; font-weight: 600; }
.good { color: #2d6a4f; }
section { border: 1px solid #ddd; border-radius: 6px; padding: .4rem 1rem; margin: 1rem 0; }
h3 { font-size: 1rem; margin: .4rem 0; overflow-wrap: anywhere; }
th { vertical-align: bottom; }
th[colspan] { text-align: center; border-bottom: none; }
.second th { text-align: right; }
ul { padding-left: 1.4rem; }
li { overflow-wrap: anywhere; }
figure { margin: .5rem 0; }
figcaption { font-size: .85rem; color: #555; }
svg { max-width: 100%; height: auto; display: block; margin: .2rem 0 .5rem; }
.scroll { overflow-x: auto; }
.scroll svg { max-width: none; }
"""


def html(judgement: "Judgement") -> str:
    """The whole page."""
    good, count = len(judgement.verdicts) - len(judgement.failed), len(judgement.verdicts)
    title = f"{judgement.target}: {good} of {count} cases passed"
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>",
        f'<h1 class="{"good" if judgement.passed else "bad"}">{_text(title)}</h1>',
        f"<p>arithmetic: {_text(judgement.arithmetic)}; device: {_text(judgement.device)}</p>",
        _operators(judgement),
        _tags(judgement),
        _left_out(judgement),
    ]
    failed = judgement.failed
    if failed:
        legend = ", ".join(
            f'<span style="color:{COLOURS[letter]}">&#9632;</span> {words}' for letter, words in LEGEND.items()
        )
        parts.append(f"<h2>What is wrong</h2><p>In the pictures of rows: {legend}.</p>")
        parts += [_case(verdict) for verdict in failed[:MOST]]
    if len(failed) > MOST:
        parts.append(f"<p>... and {len(failed) - MOST} more cases</p>")
    return "\n".join([*parts, "</body></html>\n"])


def _text(words: str) -> str:
    return escape(printable(words))


def _operators(judgement: "Judgement") -> str:
    head = "".join(
        f'<th rowspan="2">{name}</th>' for name in ("operator", "cases", "passed", "not asked", "worst ulps")
    )
    head += '<th colspan="3">errors / ours</th></tr><tr class="second">'
    head += "".join(f"<th>{name}</th>" for name in ("largest", "mean", "RMS"))
    rows = []
    for name, count, passed, left, worst, largest in operators(judgement):
        quotients = largest.ratios.quotients() if largest is not None and largest.ratios is not None else None
        ratios = ("–", "–", "–") if quotients is None else tuple(f"{q:.3g}" for q in quotients)
        kind = "good" if passed == count else "bad"
        cells = (_text(name), str(count), f'<span class="{kind}">{passed}</span>', str(left), distance(worst), *ratios)
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _tags(judgement: "Judgement") -> str:
    rows = "".join(
        f"<tr><td>{_text(name)}</td><td>{count}</td><td>{passed}</td></tr>" for name, count, passed in tags(judgement)
    )
    return f"<table><thead><tr><th>edge</th><th>cases</th><th>passed</th></tr></thead><tbody>{rows}</tbody></table>"


def _left_out(judgement: "Judgement") -> str:
    lines = [f"<li>{_text(line)}</li>" for line in left_out(judgement)]
    return f"<p>Not asked:</p><ul>{''.join(lines)}</ul>" if lines else ""


def _case(verdict: "Verdict") -> str:
    items = "".join(
        f"<li>{_text(finding.check)}: {_text(sentence)}</li>"
        for finding in verdict.findings
        for sentence in finding.words
    )
    remarks = "".join(f"<li>{_text(remark)}</li>" for remark in verdict.remarks)
    ratios = ""
    if verdict.ratios is not None:
        largest, mean, rms = verdict.ratios.quotients()
        ratios = (
            f"<p>errors against float64, divided by ours: largest {largest:.3g}, mean {mean:.3g}, RMS {rms:.3g}</p>"
        )
    pictures = ""
    if histogram := histogram_picture(verdict.apart):
        pictures += _figure("elements by their distance in ulps", f'<div class="scroll">{histogram}</div>')
    if squares := rows_picture(verdict.rows):
        pictures += _figure("rows", squares)
    return f"<section><h3>{_text(verdict.case)}</h3><ul>{items}{remarks}</ul>{ratios}{pictures}</section>"


def _figure(caption: str, picture: str) -> str:
    return f"<figure><figcaption>{caption}</figcaption>{picture}</figure>"


def histogram_picture(apart: dict[str, int]) -> str:
    """Elements by their distance in ulps, a bar for each class."""
    if not apart or apart.keys() == {"0"}:
        return ""
    most, step = max(apart.values()), 70
    bars = []
    for i, (name, count) in enumerate(apart.items()):
        height = max(round(60 * count / most), 1)
        colour = COLOURS["."] if name == "0" else COLOURS["#"] if name in ("more", "NaN") else COLOURS["~"]
        x = i * step
        bars.append(
            f'<rect x="{x + 8}" y="{75 - height}" width="{step - 16}" height="{height}" fill="{colour}"/>'
            f'<text x="{x + step // 2}" y="{70 - height}" font-size="10" text-anchor="middle">{count}</text>'
            f'<text x="{x + step // 2}" y="88" font-size="10" text-anchor="middle">{_text(name)}</text>'
        )
    width = step * len(apart)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} 92" width="{width}" height="92">'
        f"<title>elements by ulps</title>{''.join(bars)}</svg>"
    )


def rows_picture(rows: str, most: int = 512, across: int = 64) -> str:
    """A square for each row of the result, sixty-four beside each other."""
    if not rows:
        return ""
    shown, size = rows[:most], 10
    squares = "".join(
        f'<rect x="{i % across * size}" y="{i // across * size}" width="{size - 1}" height="{size - 1}" '
        f'fill="{COLOURS[letter]}"><title>row {i}: {LEGEND[letter]}</title></rect>'
        for i, letter in enumerate(shown)
    )
    width, height = min(len(shown), across) * size, -(-len(shown) // across) * size
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><title>rows</title>{squares}</svg>'
    )
