"""The judge: how functions are called, what it looks at beside values, its errors, and what it prints."""

import json
import os
import shutil
import subprocess
import sys
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

import broken_kernels as broken
import moeroute
from moeroute import cli
from moeroute.conformance import Judgement, cases, judge, large, pages, tables, targets
from moeroute.interop import megatron, transformer_engine

ROWS = "T=23 E=12 K=3 H=331 ids"


def words_of(judgement: Judgement) -> str:
    return "\n".join(sentence for verdict in judgement.failed for sentence in verdict.words)


# ---------------------------------------------------------------------------- how functions are called


def test_index_tensors_by_name_or_a_plan() -> None:
    def by_plan(tokens: Tensor, plan: moeroute.RoutingPlan) -> Tensor:
        return moeroute.permute(tokens, plan)

    def by_slots(tokens: Tensor, slot_of_row: Tensor, topk: int, num_tokens: int) -> tuple[Tensor]:
        assert tokens.shape[0] == num_tokens
        return (broken.permute(tokens, torch.where(slot_of_row < 0, -1, slot_of_row // topk)),)

    def into_out(tokens: Tensor, token_of_row: Tensor, out: Tensor) -> None:
        out.copy_(broken.permute(tokens, token_of_row))

    def anything(**arguments: Any) -> Tensor:
        return moeroute.permute(**arguments)

    for function in (by_plan, by_slots, into_out, anything, moeroute.permute):
        judgement = judge(permute=function, only="permute edge T=5", far=False)
        assert judgement.passed, words_of(judgement)
        assert len(judgement.verdicts) == 16
    # A plan of a map has no topk: such cases are not asked.
    judgement = judge(permute=by_slots, only="T=9 E=5 K=2 H=2048", far=False)
    assert {f"wants {'topk'}", "has no parameter weights"} <= judgement.left_out["permute"].keys()


def test_results_by_name_and_missing_ones() -> None:
    def gate(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        found = moeroute.gating_topk(logits, k)
        return found.weights, found.expert_ids

    def named(logits: Tensor, k: int) -> dict[str, Tensor]:
        found = moeroute.gating_topk(logits, k)
        return {"expert_ids": found.expert_ids.long(), "weights": found.weights}

    for function in (gate, named):
        judgement = judge(gating_topk=function, only="edge softmax")
        assert judgement.passed, words_of(judgement)
        assert judgement.verdicts[0].remarks == ("not returned, not judged: scores",)


def test_a_plan_as_a_mapping_or_a_plan() -> None:
    good = judge(plan_from_expert_ids=broken.plan_from_expert_ids, only="T=37 E=12 K=3")
    assert good.passed, words_of(good)
    whole = judge(plan_from_routing_map=moeroute.plan_from_routing_map, only="T=37 E=12 K=3 capacity")
    assert whole.passed, words_of(whole)


def test_autograd_of_somebody_elses_functions() -> None:
    def unpermute(rows: Tensor, row_of_slot: Tensor, weights: Tensor) -> Tensor:
        """Padding, weights and sums by torch."""
        index = row_of_slot.long()
        slots = (
            torch.where((index >= 0)[:, None], rows[index.clamp(min=0)].float(), 0.0) * weights.reshape(-1, 1).float()
        )
        return slots.reshape(*weights.shape, -1).sum(1).to(rows.dtype)

    def half(rows: Tensor, row_of_slot: Tensor, weights: Tensor) -> Tensor:
        return unpermute(rows, row_of_slot, weights) * 0.5 + unpermute(rows, row_of_slot, weights).detach() * 0.5

    only = "edge T=5 E=4 K=2 H=7 "
    good = judge(unpermute=unpermute, only=only, arithmetic="tolerance", autograd=True, far=False)
    assert {verdict.operator for verdict in good.verdicts} == {"unpermute", "unpermute_backward"}
    bad = judge(unpermute=half, only=only, arithmetic="tolerance", autograd=True, far=False)
    (verdict,) = [verdict for verdict in bad.failed if verdict.operator == "unpermute_backward"]
    assert "grad_weights: gradient of a weight" in "\n".join(verdict.words)
    assert good.passed, words_of(good)


@pytest.mark.parametrize(
    ("signature", "functions"),
    [
        ("megatron", {"permute": megatron.permute, "unpermute": megatron.unpermute}),
        ("transformer_engine", {"moe_permute": transformer_engine.moe_permute}),
    ],
)
def test_signatures_of_hosts(signature: Any, functions: Any) -> None:
    options: dict[str, Any] = {
        name: lambda generation="0.16", f=f, **a: f(
            **a, **({"generation": generation} if f is megatron.permute else {})
        )
        for name, f in functions.items()
    }
    judgement = judge(signature=signature, **options)
    assert judgement.passed, words_of(judgement)


def test_a_hosts_function_that_is_wrong() -> None:
    def permute(tokens: Tensor, routing_map: Tensor, probs: Tensor | None = None, num_out_tokens: int = 0) -> Any:
        rows, row_probs, index = megatron.permute(tokens, routing_map, probs, num_out_tokens, generation="0.16")
        assert rows is not None
        return rows.roll(1, 0), row_probs, index

    judgement = judge(signature="megatron", permute=permute, only="float32")
    assert "rows: off by one row: row 0 and every other one holds what belongs in the row before" in words_of(judgement)


# ---------------------------------------------------------------------------- beside values


def test_another_batch_is_seen() -> None:
    def unpermute(rows: Tensor, plan: moeroute.RoutingPlan) -> Tensor:
        return broken.summed(rows, plan, backwards=plan.num_tokens > 20)

    judgement = judge(unpermute=unpermute, only=f"{ROWS} float32", far=False)
    assert "depends on the other tokens of the batch" in words_of(judgement)


def test_what_raises_is_a_verdict() -> None:
    def permute(tokens: Tensor, token_of_row: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")

    judgement = judge(permute=permute, only="permute edge T=5 E=4 K=2 H=1 ", far=False)
    assert words_of(judgement) == "RuntimeError: CUDA error: an illegal memory access"


def test_shapes_and_dtypes_are_words() -> None:
    def short(tokens: Tensor, token_of_row: Tensor) -> Tensor:
        return tokens[token_of_row[token_of_row >= 0].long()]

    assert "there is no room for padding rows" in words_of(
        judge(permute=short, only=f"permute {ROWS} float32", far=False)
    )

    def wide(tokens: Tensor, token_of_row: Tensor) -> Tensor:
        return broken.permute(tokens, token_of_row).float()

    text = words_of(judge(permute=wide, only=f"permute {ROWS} bfloat16", far=False))
    assert text == "rows: dtype float32 instead of bfloat16"


def test_tolerance_forgives_rounding_only() -> None:
    def unpermute(rows: Tensor, plan: moeroute.RoutingPlan, weights: Tensor | None = None) -> Tensor:
        return broken.summed(rows, plan, weights, inner=torch.float64)

    only = "unpermute T=23 E=12 K=3 H=331 ids float32"
    assert not judge(unpermute=unpermute, only=only, far=False).passed
    forgiven = judge(unpermute=unpermute, only=only, arithmetic="tolerance", far=False)
    assert forgiven.passed, words_of(forgiven)
    assert any(verdict.worst_ulps for verdict in forgiven.verdicts)
    assert not judge(unpermute=broken.ignored_minus_one, only=only, arithmetic="tolerance", far=False).passed


def test_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a small size; the words at 2^31 elements are those of a row behind them."""
    functions: dict[str, Any] = {"permute": moeroute.permute, "unpermute": moeroute.unpermute}
    monkeypatch.setattr(large, "free_bytes", lambda device: 2**30)
    found = judge(only="permute large", far=False, large=True, **functions)
    assert [verdict.remarks[0][:26] for verdict in found.verdicts] == ["not run: needs 10 GiB, 1 a"] * 2
    monkeypatch.setattr(large, "SIZES", (2500, 8, 16))
    found = judge(only="permute large", far=False, large=True, **functions)
    assert [verdict.passed for verdict in found.verdicts] == [True, True]
    assert not found.verdicts[0].remarks

    def permute(tokens: Tensor, token_of_row: Tensor) -> Tensor:
        rows = broken.permute(tokens, token_of_row)
        rows[-5000:] = rows[:5000]
        return rows

    (verdict,) = judge(permute=permute, only="permute large", far=False, large=True).failed
    assert verdict.words == ["below 2^31 elements: row 15000 is wrong, at element 240000"]


# ---------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give at least one function by its operator's name, such as permute=f"),
        ({"permutate": broken.permute}, "there are no cases of 'permutate' with the signature 'moeroute'; they are of:"),
        ({"permute": 3}, "permute must be a function"),
        ({"permute": broken.permute, "arithmetic": "close"}, "arithmetic must be one of 'bits', 'tolerance'"),
        ({"permute": broken.permute, "checks": ("speed",)}, "checks must be one of 'values'"),
        ({"permute": broken.permute, "only": "no such case"}, "no case's name contains 'no such case'"),
        ({"permute": lambda x, y: x}, r"no case of permute fits the parameters \(x, y\)"),
        ({"permute": lambda tokens: tokens}, "takes neither `plan` nor a tensor of it"),
        ({"permute": lambda *rest: rest}, "the parameters of .* have no names: wrap it in a def that names them"),
    ],
)  # fmt: skip
def test_errors_help(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        judge(far=False, **options)


# ---------------------------------------------------------------------------- what is printed and written


@pytest.fixture(scope="module")
def judgement() -> Judgement:
    functions: dict[str, Any] = {
        "permute": broken.uninitialised_padding, "unpermute": broken.bfloat16_sum,
        "plan_from_expert_ids": broken.counts_before_capacity,
    }  # fmt: skip
    return judge(only="K=3", name="<somebody's>", far=False, checks=("values",), **functions)


def test_the_table_on_a_terminal(judgement: Judgement) -> None:
    text = str(judgement)
    assert "operator" in text.splitlines()[0]
    assert "errors / ours: largest, mean, RMS" in text
    assert "values: tokens_per_expert: counts before the capacity" in text
    assert "not asked: " in text
    assert text.splitlines()[-1].startswith("<somebody's>, arithmetic='bits': ")
    assert dict((name, count) for name, count, _ in tables.tags(judgement))["no row"] > 5


def test_json_and_junit(judgement: Judgement) -> None:
    found = json.loads(tables.as_json(judgement))
    assert found["passed"] is False
    assert len(found["verdicts"]) == len(judgement.verdicts)
    wrong = next(v for v in found["verdicts"] if v["operator"] == "unpermute" and not v["passed"])
    assert wrong["ratios"].keys() == {"max_re_ratio", "avg_re_ratio", "root_mean_squared_ratio"}
    assert sum(wrong["ulps"].values()) > 0
    lines = [(v.operator, v.case, [*v.words, "\x00control"], 0.5) for v in judgement.failed]
    suite = ElementTree.fromstring(tables.junit("name", lines))
    assert suite.attrib["failures"] == str(len(lines)) == suite.attrib["tests"]
    assert len(suite.findall("testcase/failure")) == len(lines)


class Page(HTMLParser):
    """Checks that tags close in order, and keeps what is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loaded += [str(value) for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect",):
            assert self.open.pop() == tag


def test_the_page(judgement: Judgement) -> None:
    text = pages.html(judgement)
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.loaded == [], "the page is self-contained"
    assert "script" not in page.seen
    assert page.seen.count("section") == len(judgement.failed)
    assert "&lt;somebody&#x27;s&gt;" in text
    assert "<somebody" not in text
    drawings = ["<svg" + part.partition("</svg>")[0] + "</svg>" for part in text.split("<svg")[1:]]
    assert len(drawings) > 3
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert len(root) > 1
    assert "padding that is not zero" in text


# Put at the page's beginning: nothing may be loaded, and what the browser made of the page is told to the page around.
PROBE = """<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"><script>
const found = {errors: []};
window.addEventListener("error", event => found.errors.push(String(event.message)), true);
document.addEventListener("securitypolicyviolation", event => found.errors.push("wanted " + event.blockedURI));
window.addEventListener("load", () => {
  const boxes = name => Array.from(document.querySelectorAll(name), node => {
    const box = node.getBoundingClientRect();
    return [box.x, box.y, box.width, box.height];
  });
  for (const name of ["table", "section", "svg", "svg rect", "svg text", "figcaption", "td"]) found[name] = boxes(name);
  found.window = window.innerWidth;
  found.room = document.documentElement.clientWidth;
  found.content = document.documentElement.scrollWidth;
  found.loaded = performance.getEntriesByType("resource").map(entry => entry.name);
  const line = document.createElement("pre");
  line.id = "found";
  line.textContent = JSON.stringify(found);
  window.parent.document.body.append(line);
});
</script>"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def browser() -> str:
    """The program that MOEROUTE_TEST_BROWSER names, else one of the family of Chromium that is installed."""
    if named := os.environ.get("MOEROUTE_TEST_BROWSER"):
        return named
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)} on PATH, MOEROUTE_TEST_BROWSER not set")
    return found


def looked_at(browser: str, page: str, width: int, folder: Path) -> dict[str, Any]:
    """What PROBE finds where the page is shown in this width: in a frame, since windows have a least width."""
    file = folder / "around.html"
    assert page.count('<meta charset="utf-8">') == 1
    probed = page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">{PROBE}')
    frame = f'<iframe style="border: none" width="{width}" height="900" srcdoc="{escape(probed)}"></iframe>'
    file.write_text(f'<!DOCTYPE html><meta charset="utf-8"><title>around</title>{frame}', encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    _, mark, rest = done.stdout.partition('<pre id="found">')
    assert mark, done.stderr
    found: dict[str, Any] = json.loads(unescape(rest.partition("</pre>")[0]))
    assert found["window"] == width
    return found


@pytest.mark.parametrize("width", (1280, 390), ids=("desk", "telephone"))
def test_the_page_in_a_browser(judgement: Judgement, browser: str, width: int, tmp_path: Path) -> None:
    """Every table and picture takes room inside its section, letters can be read, nothing is loaded or goes wrong."""
    found = looked_at(browser, pages.html(judgement), width, tmp_path)
    assert found["errors"] == found["loaded"] == []
    assert found["content"] == found["room"] > width - 30, "the page is not wider than the window"
    assert len(found["table"]) == 2
    assert len(found["section"]) == len(judgement.failed) > 40
    histograms = [verdict.apart for verdict in judgement.failed if verdict.apart.keys() - {"0"}]
    squares = [verdict.rows for verdict in judgement.failed if verdict.rows]
    assert len(found["svg"]) == len(found["figcaption"]) == len(histograms) + len(squares) > 40
    assert len(found["svg rect"]) == sum(map(len, histograms)) + sum(len(rows[:512]) for rows in squares)
    assert len(found["svg text"]) == 2 * sum(map(len, histograms))
    for name in ("table", "section", "svg", "svg rect", "svg text", "figcaption", "td"):
        for box in found[name]:
            assert box[2] > 0, f"{name}: no width"
            assert box[3] > 0, f"{name}: no height"
    for x, y, _, height in found["svg"]:
        assert any(s[0] < x and s[1] < y and y + height < s[1] + s[3] for s in found["section"])
    assert min(box[3] for box in found["svg text"]) > 9, "letters of a pixel or five cannot be read"


@pytest.mark.parametrize(
    ("added", "error"),
    [
        ('<img src="https://example.invalid/picture.png">', "wanted https://example.invalid/picture.png"),
        ("<script>nobody()</script>", "Uncaught ReferenceError: nobody is not defined"),
    ],
)
def test_the_browser_sees_what_goes_wrong(
    judgement: Judgement, browser: str, added: str, error: str, tmp_path: Path
) -> None:
    page = pages.html(judgement).replace("<h1", f"{added}<h1", 1)
    assert error in looked_at(browser, page, 1280, tmp_path)["errors"]


def test_pictures() -> None:
    assert pages.histogram_picture({"0": 5}) == ""
    assert pages.rows_picture("") == ""
    drawing = ElementTree.fromstring(pages.rows_picture(".~#0" * 40))
    assert len(drawing.findall("{*}rect")) == 160
    bars = ElementTree.fromstring(pages.histogram_picture({"0": 90, "1": 9, "more": 1}))
    assert [rect.attrib["height"] for rect in bars.findall("{*}rect")] == ["60", "6", "1"]


# ---------------------------------------------------------------------------- the command


MODULE = """
import torch
calls = 0
def permute(tokens, token_of_row):
    rows = tokens[token_of_row.long().clamp(min=0)]
    rows[token_of_row < 0] = {padding}
    return rows
"""


@pytest.mark.parametrize("padding", (0, 1))
def test_a_target(
    padding: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"kernels_{padding}.py").write_text(MODULE.format(padding=padding))
    monkeypatch.chdir(tmp_path)
    command = ["verify", "--target", f"kernels_{padding}", "--only", "permute edge", "--json", "a.json"]
    assert cli.main([*command, "--junit", "a.xml", "--html", "a.html"]) == padding
    printed = capsys.readouterr().out
    assert (f"kernels_{padding}, arithmetic='bits': 3 of 19 cases passed" in printed) == bool(padding)
    assert json.loads(Path("a.json").read_text())["passed"] is not bool(padding)
    assert Path("a.html").read_text().startswith("<!DOCTYPE html>")
    assert ElementTree.parse("a.xml").getroot().attrib["failures"] == str(16 * padding)
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module", "cannot import no_such_module: .* \\(is its folder in PYTHONPATH\\?\\)"),
        ("json", "json has no function of the signature 'moeroute'; it would have one of: activate"),
        ("json:nothing", "json:nothing: there is no nothing"),
    ],
)
def test_targets_that_are_none(target: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        cli.main(["verify", "--target", target])


def test_signatures_are_seen_from_names() -> None:
    assert targets.load("moeroute")[1] == "moeroute"
    assert targets.load("moeroute.interop.megatron")[1] == "megatron"
    assert targets.load("moeroute.interop.transformer_engine")[1] == "transformer_engine"
    assert targets.load("moeroute.interop.torch_npu")[1] == "torch_npu"
    functions, _ = targets.load("moeroute.interop:megatron")
    assert "permute" in functions
    assert targets._signature_of(SimpleNamespace(permute=broken.permute)) == "moeroute"
    own = {case.operator for case in cases() if "." in case.operator}
    assert {name.partition(".")[0] for name in own} == set(targets.SIGNATURES) - {"moeroute"}


def test_verify_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, xml_file = tmp_path / "v.json", tmp_path / "v.xml"
    command = ["verify", "--backend", "reference", "--only", "plan_from_segments"]
    assert cli.main([*command, "--json", str(json_file), "--junit", str(xml_file)]) == 0
    assert "2 checks of reference: same bits as the reference" in capsys.readouterr().out
    assert [one["passed"] for one in json.loads(json_file.read_text())["cases"]] == [True, True]
    assert ElementTree.parse(xml_file).getroot().attrib["tests"] == "2"
