"""Cases as files: what is written, what is judged, and what is not believed."""

import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeroute import cli
from moeroute.conformance import files
from moeroute.conformance.files import Refused

ONLY = "permute edge T=5 E=4 K=2 H=7 bfloat16"  # permute and unpermute
FORMATS = ("npz", "bin", "safetensors")


@pytest.fixture(params=FORMATS)
def format(request: pytest.FixtureRequest) -> Any:
    if request.param == "safetensors":
        pytest.importorskip("safetensors")
    return request.param


def answer(folder: Path, change: Any = lambda path: None) -> None:
    """The expected results as a program's own."""
    for path in list(folder.iterdir()):
        if ".expected" in path.name:
            target = folder / path.name.replace(".expected", ".results")
            (shutil.copytree if path.is_dir() else shutil.copy)(path, target)
            change(target)


def test_a_program_that_is_right(format: Any, tmp_path: Path) -> None:
    assert files.export(tmp_path, format, ONLY) == 2
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["format"] == format
    by_operator = {line["operator"]: line for line in manifest["cases"]}
    permute = by_operator["permute"]
    assert permute["aclnn"] == "aclnnMoeTokenPermute"
    assert {"name": "tokens", "dtype": "bfloat16", "shape": [5, 7]} in permute["inputs"]
    assert {"plan.row_of_slot", "plan.slot_of_row"} <= {tensor["name"] for tensor in permute["inputs"]}
    assert permute["options"]["plan.topk"] == 2
    assert [tensor["name"] for tensor in permute["expected"]] == ["rows"]
    for line in manifest["cases"]:
        assert (tmp_path / line["files"]["inputs"]).exists()
    with pytest.raises(Refused, match="has no results: write them as the manifest"):
        files.compare(tmp_path)
    answer(tmp_path)
    judgement = files.compare(tmp_path)
    assert judgement.passed, str(judgement)
    assert len(judgement.verdicts) == 2


def test_every_case_can_be_written_and_read(tmp_path: Path) -> None:
    names = (
        "gating_topk T=19 E=12",
        "plan_from_routing_map T=37",
        "quantize T=23",
        "combine T=9",
        "torch_npu",
        "activate",
    )
    for i, name in enumerate(names):
        folder = tmp_path / str(i)
        assert files.export(folder, "npz", name) > 3
        answer(folder)
        assert files.compare(folder).passed
    manifest = json.loads((tmp_path / "4" / "manifest.json").read_text())
    assert {line["aclnn"] for line in manifest["cases"]} >= {"aclnnMoeTokenPermute", "aclnnMoeGatingTopK"}


def test_numpy_alone_can_answer(tmp_path: Path) -> None:
    """As a program in another language would: bits of bfloat16 as uint16, indices from the plan."""
    files.export(tmp_path, "npz", "permute edge T=5 E=4 K=2 H=7 ")
    for line in json.loads((tmp_path / "manifest.json").read_text())["cases"]:
        if line["operator"] != "permute":
            continue
        with np.load(tmp_path / line["files"]["inputs"], allow_pickle=False) as inputs:
            slots = inputs["plan.slot_of_row"]
            rows = inputs["tokens"][np.maximum(slots, 0) // line["options"]["plan.topk"]]
        rows[slots < 0] = 0
        np.savez(tmp_path / line["files"]["results"], rows=rows)
    judgement = files.compare(tmp_path)
    assert judgement.passed
    assert [verdict.operator for verdict in judgement.verdicts] == ["permute"]
    assert judgement.left_out == {"unpermute": {"has no results": 1}}


def test_wrong_results_are_explained(tmp_path: Path) -> None:
    files.export(tmp_path, "bin", ONLY)

    def shift(path: Path) -> None:
        for file in path.iterdir():
            values = np.fromfile(file, np.uint16).reshape(-1, 7)
            np.roll(values, 1, 0).tofile(file)

    answer(tmp_path, shift)
    text = str(files.compare(tmp_path))
    assert "rows: off by one row" in text
    assert "tokens: token 0" in text


# ---------------------------------------------------------------------------- nothing is believed


class Evil:
    """Unpickled, it would make a file."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("evil-was-here",))


def npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def bomb() -> bytes:
    """A small archive that unpacks to 100 MB."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rows.npy", b"\0" * 100_000_000)
    return buffer.getvalue()


def lying_header() -> bytes:
    """The header of an array of 2^60 elements."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<u2", "fortran_order": False, "shape": (2**60,)})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("rows.npy", header.getvalue())
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npz(rows=np.array([Evil()], dtype=object)), "rows: shape [1] instead of [16, 7]"),
        (npz(rows=np.array([[Evil()] * 7] * 16, dtype=object)), "rows: dtype object instead of uint16"),
        (pickle.dumps(Evil()), "BadZipFile: File is not a zip file"),
        (bomb(), "rows: 100,000,000 bytes where 4,320 are enough"),
        (lying_header(), "rows: shape [1152921504606846976] instead of [16, 7]"),
        (npz(rows=np.zeros((16, 7), np.float32)), "rows: dtype float32 instead of uint16"),
        (npz(rows=np.asfortranarray(np.zeros((16, 7), np.uint16))), "rows: in Fortran order, where C order is expected"),
        (npz(other=np.zeros(3)), "not written, not judged: rows"),
        (b"\0" * 2_000_000, "has 2,000,000 bytes; the results of this case have less than"),
        (b"", "BadZipFile"),
    ],
    ids=["pickle, another shape", "pickle", "a pickle as the file", "zip bomb", "lying header", "dtype", "Fortran order",
         "another name", "a large file", "an empty file"],
)  # fmt: skip
def test_bad_archives(content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cases"
    files.export(folder, "npz", "permute edge T=5 E=4 K=2 H=7 ")
    manifest = json.loads((folder / "manifest.json").read_text())
    line = next(line for line in manifest["cases"] if line["operator"] == "permute")
    (folder / line["files"]["results"]).write_bytes(content)
    (verdict,) = files.compare(folder).verdicts
    said = "\n".join([*verdict.words, *verdict.remarks])
    assert message in said
    assert not (tmp_path / "evil-was-here").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no manifest: JSONDecodeError"),
        ("[" * 100_000, "is no manifest: RecursionError"),
        ("{}", "is no manifest: KeyError: 'format'"),
        ('{"format": "pickle", "cases": []}', "is no manifest: format 'pickle'"),
        ('{"format": "npz", "cases": [{"name": "../../secret"}]}', "has no case '../../secret': export again"),
        ('{"format": "npz", "cases": [{"name": 3}]}', "is no manifest"),
        ('{"format": "npz", "cases": []}', "has no results"),
    ],
)
def test_bad_manifests(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(Refused, match=str(tmp_path)) as refused:
        files.compare(tmp_path)
    assert message in str(refused.value)


def test_sizes_of_raw_files(tmp_path: Path) -> None:
    files.export(tmp_path, "bin", "permute edge T=5 E=4 K=2 H=7 ")
    answer(tmp_path, lambda path: [file.write_bytes(file.read_bytes() + b"\0") for file in path.iterdir()])
    judgement = files.compare(tmp_path)
    assert not judgement.passed
    assert "bytes instead of" in judgement.failed[0].words[0]


@pytest.mark.parametrize(
    "header", [b"\xff" * 8, (2**40).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"{}", b"{"]
)
def test_bad_safetensors(header: bytes, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    files.export(tmp_path, "safetensors", "permute edge T=5 E=4 K=2 H=7 ")
    answer(tmp_path, lambda path: path.write_bytes(header))
    for verdict in files.compare(tmp_path).verdicts:
        assert verdict.words or verdict.remarks


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path / "cases")
    assert cli.main(["cases", "export", folder, "--format", "bin", "--only", ONLY]) == 0
    assert "written: 2 cases and manifest.json" in capsys.readouterr().out
    answer(Path(folder))
    report, lines = tmp_path / "r.html", tmp_path / "r.json"
    assert cli.main(["cases", "compare", folder, "--html", str(report), "--json", str(lines)]) == 0
    assert "2 of 2 cases passed" in capsys.readouterr().out
    assert json.loads(lines.read_text())["passed"] is True
    assert report.read_text().startswith("<!DOCTYPE html>")
    for arguments, message in (
        (["compare", str(tmp_path / "nowhere")], "is not there: moeroute cases export makes it"),
        (["export", folder, "--only", "no such case"], "no case's name contains 'no such case'"),
    ):
        with pytest.raises(SystemExit, match=message):
            cli.main(["cases", *arguments])
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(SystemExit, match=r"needs the package: pip install '\.\[cases\]' in a clone"):
        cli.main(["cases", "export", folder, "--format", "safetensors"])


def test_bfloat16_is_its_bits() -> None:
    array = files._as_array(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    assert array.dtype == np.uint16
    assert array.tolist() == [0x3F80, 0xC000]
