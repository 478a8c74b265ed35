"""The demo, small: both runs end to end, Ctrl-C, and the parts on which its comparison stands."""

import dataclasses
import functools
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeroute import demo, report
from moeroute.nn import MoE

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

SMALL = demo.Model(layers=2, width=32, heads=2, experts=4, k=2, intermediate=16, context=32, batch=4)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors, and a machine that may be busy."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "Model", functools.partial(demo.Model, **dataclasses.asdict(SMALL)))


def pixels(path: Path) -> Any:
    """A PNG that decodes as a whole and is not one colour."""
    from matplotlib.image import imread

    image = imread(io.BytesIO(path.read_bytes()), format="png")
    assert image.shape[0] > 200
    assert image.shape[1] > 400
    assert image[..., :3].std() > 0.01
    return image


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


FILES = ["expert_load.png", "loss.png", "results.json", "sample.txt"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("small")
def test_both_runs(dtype: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a" / "out"
    assert demo.run(steps=3, seed=5, dtype=dtype, threads=1, out=out) == 0
    assert names(out) == FILES
    for chart in ("loss.png", "expert_load.png"):
        pixels(out / chart)
    results = json.loads((out / "results.json").read_text())
    assert results["alike"] is True
    ours, plain = results["runs"]["moeroute"], results["runs"]["plain"]
    assert ours["ready"]["initial_weights"] == plain["ready"]["initial_weights"]
    for run in (ours, plain):
        assert run["complete"]
        assert len(run["losses"]) == len(run["seconds"]) == len(run["routing_seconds"]) == 3
        assert all(0 < routing < step for routing, step in zip(run["routing_seconds"], run["seconds"], strict=True))
        assert run["ready"]["threads"] == 1
        assert run["validation"][-1][0] == 3
        # Every token takes k experts in every layer of every step.
        load = torch.tensor(run["load"])
        torch.testing.assert_close(load.sum(-1), torch.full((3, SMALL.layers), SMALL.tokens * SMALL.k))
    torch.testing.assert_close(ours["losses"], plain["losses"], rtol=0, atol=1e-4 if dtype == "float32" else 2e-2)
    shown = capfd.readouterr().out
    for words in ("tokens/s", "routing, share of a step", "peak memory", "Both trained alike", str(out.resolve())):
        assert words in shown.replace("\n", ""), words


INTERRUPTED = """
import functools, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
from moeroute import demo, report
demo.Model = functools.partial(demo.Model, **{model!r})
sys.exit(demo.run(steps=100000, threads=1, out={out!r}))
"""


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_interrupt(tmp_path: Path) -> None:
    script = INTERRUPTED.format(model=dataclasses.asdict(SMALL), out=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "step 1/100000" in line:
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        workers = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Interrupted after" in shown
    assert "steps of moeroute" in shown
    assert f"Saved in {tmp_path.resolve()}: results.json, loss.png, expert_load.png" in shown
    assert names(tmp_path) == ["expert_load.png", "loss.png", "results.json"]
    pixels(tmp_path / "loss.png")
    pixels(tmp_path / "expert_load.png")
    run = json.loads((tmp_path / "results.json").read_text())["runs"]["moeroute"]
    assert len(run["losses"]) >= 1
    assert not run["complete"]
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


@pytest.mark.parametrize("before", [None, b"old"])
def test_files_are_written_whole(before: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "chart.png"
    if before is not None:
        target.write_bytes(before)

    def interrupt(*paths: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        report.write(target, b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if before is None else [before])
    monkeypatch.undo()
    report.write(target, b"new")
    assert target.read_bytes() == b"new"
    assert names(tmp_path) == ["chart.png"]


class Pretender:
    """A training process that reports two steps; `last` is called in place of the third."""

    last: Any = None

    def __init__(self, order: dict[str, Any]) -> None:
        pass

    def ask(self, do: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        if do == "warm_up":
            yield {"event": "warm", "step_seconds": 0.1, "first_seconds": 0.1}
        elif do == "begin":
            ready = {"parameters": 1, "threads": 1, "train_bytes": 1, "held_out_bytes": 1, "initial_weights": ""}
            yield {"event": "ready", "steps": arguments["steps"], **ready}
        elif do == "train":
            for step in (1, 2):
                counts = {"load": [[3, 1]] * 4, "seconds": 1.0, "routing_seconds": 0.1}
                yield {"event": "step", "step": step, "loss": 5.0, **counts}
            if self.last is not None:
                self.last()
        else:
            yield {"event": "validation", "step": 2, "loss": 5.0}
            yield {"event": "memory", "peak_bytes": None, "training_bytes": None}
            yield {"event": "end"}

    def close(self) -> None:
        pass


def test_interrupt_while_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(runs: dict[str, demo.Run]) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_Process", Pretender)
    monkeypatch.setattr(demo, "_loss_chart", interrupt)
    (tmp_path / "loss.png").write_bytes(b"old")
    assert demo.run(steps=9, out=tmp_path) == 130
    assert names(tmp_path) == ["loss.png", "results.json"]
    assert (tmp_path / "loss.png").read_bytes() == b"old"
    shown = capfd.readouterr().out
    assert "Interrupted while saving" in shown.replace("\n", " ")
    assert "results.json" in shown


@pytest.mark.parametrize("missing", [["rich"], ["matplotlib"], ["rich", "matplotlib"]])
def test_missing_package(
    missing: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    assert demo.run(steps=1, out=tmp_path) == 1
    shown = capsys.readouterr().err
    assert f"moeroute demo needs {' and '.join(missing)}: pip install 'moeroute[demo]'" in shown
    assert not names(tmp_path)


def test_training_process_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert demo.run(steps=1, out=tmp_path) == 1
    shown = capfd.readouterr().out
    assert "failed with status 1" in shown
    assert "Nothing was saved." in shown


def test_a_killed_training_process_saves_what_was_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def end(process: Pretender) -> None:
        raise demo._Ended("A training process was killed by SIGKILL (out of memory?)")

    monkeypatch.setattr(Pretender, "last", end)
    monkeypatch.setattr(demo, "_Process", Pretender)
    assert demo.run(steps=9, out=tmp_path) == 1
    assert names(tmp_path) == ["expert_load.png", "loss.png", "results.json"]
    shown = capfd.readouterr().out.replace("\n", " ")
    assert "killed by SIGKILL (out of memory?), after 2 steps of moeroute" in shown


def test_steps_are_cut_to_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for seconds, steps in ((0.1, demo.STEPS), (0.5, 95), (60.0, demo.TURN)):
        runs = {name: demo.Run(name, warm={"step_seconds": seconds}) for name in demo.NAMES}
        assert demo._steps_that_fit(runs, 95.0) == steps
    monkeypatch.setattr(demo, "_Process", Pretender)
    monkeypatch.setattr(demo, "SECONDS", 0.0)
    assert demo.run(out=tmp_path / "cut") == 0
    shown = capfd.readouterr().out
    assert f"This machine is slow for 300 steps in two minutes: {demo.TURN} steps instead" in shown
    # Fast while it was measured, then slow: both runs end at the same step.
    monkeypatch.setattr(demo, "_steps_that_fit", lambda runs, seconds: 30)
    assert demo.run(out=tmp_path / "slower") == 0
    assert f"no time for more than {demo.TURN} of 30 steps" in capfd.readouterr().out
    # Steps that were asked for are kept.
    assert demo.run(steps=30, out=tmp_path / "asked") == 0
    assert "time" not in capfd.readouterr().out.split("loss, first step")[0]


def test_verdict_can_be_no() -> None:
    def made(name: str, losses: list[float], weights: str = "same") -> demo.Run:
        validation = [(len(losses), losses[-1])]
        return demo.Run(name, ready={"initial_weights": weights}, losses=losses, validation=validation)

    ours = made("moeroute", [5.5, 3.0])
    alike, numbers = demo._verdict({"moeroute": ours, "plain": made("plain", [5.5, 3.02])}, "float32")
    assert alike
    assert "0.0200 (0.66%) at the end" in numbers
    for other in (made("plain", [5.5, 3.04]), made("plain", [5.6, 3.0]), made("plain", [5.5, 3.0], "other")):
        alike, _ = demo._verdict({"moeroute": ours, "plain": other}, "float32")
        assert not alike


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": 0}, ValueError, "demo: steps must be at least 1; got 0"),
        ({"steps": 1.5}, TypeError, "steps must be an int; got float"),
        ({"seed": -1}, ValueError, "seed must be in"),
        ({"dtype": "float64"}, ValueError, "dtype must be one of 'float32', 'bfloat16'; got 'float64'"),
        ({"threads": 0}, ValueError, "threads must be at least 1; got 0"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        demo.run(**{"out": tmp_path / "out", **options})
    assert not (tmp_path / "out").exists()


def test_out_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="demo: out must be a folder that can be written"):
        demo.run(steps=1, out=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


# ---------------------------------------------------------------------------- what the comparison stands on


def test_plain_layer_is_the_same_function() -> None:
    torch.manual_seed(0)
    ours = MoE(32, 16, 4, 2, score="softmax", renormalize=True)
    plain = demo.PlainMoE(32, 16, 4, 2)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 9, 32)
    results = []
    for layer in (ours, plain):
        leaf = x.clone().requires_grad_()
        output, routing = layer(leaf, return_routing=True)
        loss = output.square().sum() + routing.statistics().loss() + routing.z_loss()
        gradients = torch.autograd.grad(loss, [leaf, *layer.parameters()])
        results.append((output, routing.statistics().tokens_per_expert, gradients))
    torch.testing.assert_close(results[0], results[1])


def test_both_models_start_alike() -> None:
    ours, plain = (demo.build_model(SMALL, run, torch.float32, seed=3) for run in ("moeroute", "plain"))
    assert demo._fingerprint(ours) == demo._fingerprint(plain)
    assert demo._fingerprint(ours) != demo._fingerprint(demo.build_model(SMALL, "plain", torch.float32, seed=4))
    kinds = [type(block.get_submodule("moe")) for model in (ours, plain) for block in model.blocks]
    assert kinds == [MoE, MoE, demo.PlainMoE, demo.PlainMoE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_lowers_the_loss(dtype: torch.dtype) -> None:
    corpus = demo.load_corpus()
    network = demo.build_model(SMALL, "moeroute", dtype, seed=0)
    trainer = demo.Trainer(network, SMALL, 30)
    generator = torch.Generator().manual_seed(0)
    losses = [trainer.step(*demo.draw_batch(corpus.train, SMALL, generator))[0] for _ in range(30)]
    assert all(parameter.dtype == dtype for parameter in network.parameters())
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]


def test_corpus() -> None:
    corpus = demo.load_corpus()
    again = demo.load_corpus()
    torch.testing.assert_close(corpus.train, again.train, rtol=0, atol=0)
    text = bytes(corpus.train.numpy()) + bytes(corpus.held_out.numpy())
    assert b"Beautiful is better than ugly." in text
    assert b"import os" in text
    assert 0 < corpus.held_out.shape[0] < corpus.train.shape[0] / 4
    text_in, following = demo.draw_batch(corpus.train, SMALL, torch.Generator().manual_seed(0))
    assert text_in.shape == following.shape == (SMALL.batch, SMALL.context)
    torch.testing.assert_close(text_in[:, 1:], following[:, :-1])


def test_routing_timer_counts_what_lies_outside_the_experts() -> None:
    layer = MoE(32, 16, 4, 2)
    reference = [
        p.clone() for p in torch.autograd.grad(layer(torch.ones(6, 32)).square().sum(), list(layer.parameters()))
    ]
    timer = demo.RoutingTimer()
    timer.watch(layer)
    routing, experts = layer.router.forward, layer.experts.forward

    def slow(function: Any, seconds: float, seconds_back: float) -> Any:
        class Wait(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                time.sleep(seconds)
                return x.view_as(x)

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                time.sleep(seconds_back)
                return grad

        return lambda x, *rest: function(Wait.apply(x), *rest)

    for router_wait, expert_wait, expected in (((0.06, 0.1), (0.0, 0.0), 0.16), ((0.0, 0.0), (0.4, 0.4), 0.0)):
        layer.router.forward = slow(routing, *router_wait)  # type: ignore[method-assign]
        layer.experts.forward = slow(experts, *expert_wait)  # type: ignore[method-assign]
        timer.take()
        x = torch.ones(6, 32).requires_grad_()
        _, *gradients = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
        assert expected <= timer.take() < expected + 0.3
        torch.testing.assert_close(gradients, reference, rtol=0, atol=0)


def test_sample_text_is_made_printable() -> None:
    assert demo._printable("a\tb\x1b[31m\n\x00é") == "a   b\N{REPLACEMENT CHARACTER}[31m\n\N{REPLACEMENT CHARACTER}é"
