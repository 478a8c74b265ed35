"""The Triton backend in the interpreter: the same bits in every mode, who is refused, and no synchronisation.

The operators' own tests run on it too, through the `backend` fixture.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moeroute
from moeroute import dispatch
from moeroute.conformance import cases
from moeroute.conformance.verification import verified
from moeroute.dispatch import Backend

pytest.importorskip("triton", reason="the package triton is not installed")

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
CASES = tuple(case for case in cases() if not case.through.startswith("moeroute"))
GROUPS = sorted({case.operator for case in CASES})


@pytest.mark.parametrize("group", GROUPS)
def test_every_mode_gives_the_bits_of_the_reference(subtests: pytest.Subtests, group: str) -> None:
    chosen = [case for case in CASES if case.operator == group]
    assert chosen
    for case in chosen:
        with subtests.test(case.name):
            assert [outcome.words for outcome in verified(case, [("triton", CPU)])] == [()]


def test_the_checks_cover_every_public_operator() -> None:
    operators = {name for name in vars(moeroute) if callable(getattr(moeroute, name)) and name[0].islower()}
    elsewhere = {
        "balance_statistics", "capacity_from_factor", "empty_cache", "load_balancing_loss",
        "load_balancing_loss_from_counts", "look_up_expert_ids", "memory_stats", "normalize_scores", "router_z_loss",
        "set_memory_pool", "sinkhorn", "update_expert_bias",
    }  # fmt: skip
    assert operators - elsewhere == set(GROUPS) - {"activate", "activate_backward"}


# ---------------------------------------------------------------------------- no synchronisation


@pytest.fixture
def read_back(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a kernel launch or a caller reads back from a tensor: on a device each is a synchronisation."""
    found: list[str] = []
    # What the interpreter itself needs is read through `numpy` and `data_ptr`.
    for name in ("item", "tolist", "__bool__", "__int__", "__index__", "nonzero", "cpu", "__float__"):
        original = getattr(Tensor, name)

        def watched(
            self: Tensor, *rest: object, _original: object = original, _name: str = name, **more: object
        ) -> object:
            found.append(_name)
            return _original(self, *rest, **more)  # type: ignore[operator]

        monkeypatch.setattr(Tensor, name, watched)
    return found


def test_the_path_reads_nothing_back(read_back: list[str]) -> None:
    logits = torch.randn(19, 12, requires_grad=True)
    tokens = torch.randn(19, 40, requires_grad=True)
    gating = moeroute.gating_topk(logits, 3, backend="triton")
    plan = moeroute.plan_from_expert_ids(gating.expert_ids, 12, num_rows=57, backend="triton")
    rows = moeroute.permute(tokens, plan, backend="triton")
    moeroute.unpermute(rows, plan, gating.weights, backend="triton").backward(torch.ones(19, 40))
    assert read_back == []


@pytest.mark.parametrize(
    "options, times",
    [
        ({}, 1),
        ({"num_rows": 50}, 0),
        ({"capacity": 4, "pad_to_capacity": True}, 0),
        ({"num_rows": 50, "align": 4, "expert_range": (2, 9)}, 0),
        ({"num_rows": 50, "capacity": 3, "drop": "weight", "weights": torch.rand(19, 3)}, 0),
    ],
)
def test_a_plan_reads_one_size_back_or_none(read_back: list[str], options: dict[str, Any], times: int) -> None:
    ids = torch.randint(-1, 12, (19, 3))
    moeroute.plan_from_expert_ids(ids, 12, **options, backend="triton")
    assert len(read_back) == times, read_back


@pytest.mark.parametrize(
    "options, times", [({}, 1), ({"topk": 3, "num_rows": 50}, 0), ({"capacity": 4, "fill": True}, 0)]
)
def test_a_map_reads_one_size_back_or_none(read_back: list[str], options: dict[str, Any], times: int) -> None:
    moeroute.plan_from_routing_map(torch.rand(19, 12) < 0.3, **options, backend="triton")
    assert len(read_back) == times, read_back


# ---------------------------------------------------------------------------- who is refused


@pytest.fixture
def fresh_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that backend.py found out earlier."""
    for name in ("_chosen", "_implementations"):
        monkeypatch.setattr(dispatch, name, {})
    monkeypatch.setattr(dispatch, "_reasons", {name: None for name in ("reference", "cpu")})


def permute_on(backend: Backend) -> None:
    plan = moeroute.plan_from_row_of_slot(torch.tensor([0, 1]), 2, 2, backend="reference")
    moeroute.permute(torch.ones(2, 3), plan, backend=backend)


def test_a_cpu_tensor_outside_the_interpreter_is_refused() -> None:
    program = "import torch, moeroute; moeroute.gating_topk(torch.ones(2, 4), 1, backend='triton')"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    if torch.cuda.is_available():
        assert "gating_topk: backend must be one that serves these tensors; got 'triton' for a CPU tensor" in last
    else:
        assert "gating_topk: backend must be one that is available; got 'triton': there is no NVIDIA, AMD" in last
    assert "TRITON_INTERPRET=1" in last


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch, fresh_answers: None) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"'triton': the package triton is not installed \(pip install '\.\[triton\]' in a clone"
    ):
        permute_on("triton")


def test_an_old_triton_is_named(monkeypatch: pytest.MonkeyPatch, fresh_answers: None) -> None:
    monkeypatch.setattr("triton.__version__", "3.1.0")
    with pytest.raises(ValueError, match=r"'triton': triton 3\.1\.0 is older than 3\.2"):
        permute_on("triton")


def test_an_interpreter_that_writes_out_of_bounds_is_refused(
    monkeypatch: pytest.MonkeyPatch, fresh_answers: None
) -> None:
    monkeypatch.setattr("triton.__version__", "3.5.1")
    with pytest.raises(
        ValueError, match=r"the interpreter of triton 3\.5\.1 writes beyond the ends of tensors; it needs 3\.6"
    ):
        permute_on("triton")


@pytest.mark.parametrize(
    "device, message",
    [
        ("cuda:0", "'triton' for cuda:0 of capability 7.5, older than 8.0; use 'reference'"),
        ("mps", "'triton' for mps, which is no NVIDIA, AMD or Ascend device; use 'reference'"),
    ],
)
def test_a_device_that_it_cannot_serve_is_named(
    monkeypatch: pytest.MonkeyPatch, fresh_answers: None, device: str, message: str
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr("torch.version.hip", None)
    with pytest.raises(ValueError, match=message):
        dispatch.choose("moeroute.permute", "triton", torch.device(device))
    # Unasked, such a device gets the reference.
    assert dispatch.choose("moeroute.permute", None, torch.device(device)) == "reference"


def test_devices_get_triton_unasked(monkeypatch: pytest.MonkeyPatch, fresh_answers: None) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("torch.version.hip", None)
    device = torch.device("cuda:0")
    assert dispatch.choose("moeroute.permute", None, device, torch.bfloat16) == "triton"
    assert dispatch.choose("moeroute.permute", None, device, torch.float64) == "reference"
    with pytest.raises(ValueError, match=r"backend must be 'reference' for torch\.float64; got 'triton'"):
        dispatch.choose("moeroute.permute", "triton", device, torch.float64)
    with pytest.raises(ValueError, match="backend must be one that serves cuda:0; got 'cpu'"):
        dispatch.choose("moeroute.permute", "cpu", device)


# ---------------------------------------------------------------------------- the check for machines with a GPU


def test_the_gpu_check_can_be_rehearsed(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--rehearse", "--out", str(tmp_path)]
    steps = ["speed", "runs", "large", "sync"]
    done = subprocess.run([*command, "--only", *steps], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {line["operator"] for line in found["speed"]["lines"]} == {
        "spread", "combine", "combine weighted", "unpermute_backward",
    }  # fmt: skip
    assert found["sync"]["skipped"] == "needs a CUDA or ROCm device"
    assert found["about"]["device"] == "Triton's interpreter"
    assert (tmp_path / "gpu_check.png").read_bytes().startswith(b"\x89PNG")
