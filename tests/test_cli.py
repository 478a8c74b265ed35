"""The command line, as a person uses it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moeroute
from moeroute import cli


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "moeroute",
        "torch",
        "numba",
        "devices",
        "backend reference",
        "backend cpu",
        "threads",
        "kernel cache",
    ):
        assert f"\n{line} " in f"\n{printed}", line
    assert moeroute.__version__ in printed


def test_info_says_why_a_backend_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = {"cpu": "the package numba is not installed"}
    monkeypatch.setattr("moeroute.dispatch.unavailable", reasons.get)
    assert cli.main(["info"]) == 0
    assert "not available: the package numba is not installed" in capsys.readouterr().out


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--only", "plan_from_segments"]) == 0
    assert "same bits as the reference" in capsys.readouterr().out


def test_verify_warns_where_denormals_are_flushed(capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        cli.main(["verify", "--only", "plan_from_segments"])
    finally:
        torch.set_flush_denormal(False)
    assert "warning: denormal numbers are flushed to zero" in capsys.readouterr().out


def test_bench_writes_what_it_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moeroute", "bench", "--only", "S=16384 E=64", "--seconds", "0.01"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=True)
    assert "plan_from_expert_ids" in done.stdout
    found = json.loads((tmp_path / "bench.json").read_text())
    assert {line["mode"] for line in found["lines"]} <= {"called", "tuned", "kernel"}
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--only", "nothing of the sort"], "no case's name contains 'nothing of the sort'"),
        (["bench", "--threads", "0"], "must be at least 1; got 0"),
        (["verify", "--device", "nowhere"], "must be a device that is there, as cpu or cuda:0; got nowhere"),
        (["verify", "--only", "nothing of it"], "no check's name contains 'nothing of it'"),
        (["verify", "--backend", "tpu"], "invalid choice: 'tpu'"),
        (["dance"], "invalid choice: 'dance'"),
        ([], "the following arguments are required: command"),
    ],
)
def test_mistakes_are_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code != 0
    assert message in capsys.readouterr().err + str(raised.value.code)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        SystemExit, match=r"moeroute bench needs rich and matplotlib: pip install '\.\[bench\]' in a clone"
    ):
        cli.main(["bench"])
