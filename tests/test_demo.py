"""The demo, small: its parts end to end, Ctrl-C, a kill and a resume, and what its comparison stands on."""

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

from moeroute import memory, report
from moeroute.conformance import measured
from moeroute.nn import MoE

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from demo import bits, charts, data, measures, model, processes, runs, screen, speed, training, turns
from demo import run as demo
from demo.__main__ import main

EXAMPLES = Path(demo.__file__).parents[1]
SMALL = model.Model(layers=2, width=32, heads=2, experts=4, k=2, intermediate=16, context=32, batch=4)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "Model", functools.partial(model.Model, **dataclasses.asdict(SMALL)))


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
    assert demo.run(steps=3, seed=5, dtype=dtype, threads=1, out=out, parts=["training"]) == 0
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
        # Saved after step 1, killed after step 2, which the new process repeats, with one thread to the last digit.
        assert run["repeated"] == [[2, run["losses"][1]]]
        assert run["weights"][0] == run["weights"][1]
        assert run["weights"][0][0] == 2
        # Every token takes k experts in every layer of every step.
        load = torch.tensor(run["load"])
        torch.testing.assert_close(load.sum(-1), torch.full((3, SMALL.layers), SMALL.tokens * SMALL.k))
    torch.testing.assert_close(ours["losses"], plain["losses"], rtol=0, atol=1e-4 if dtype == "float32" else 2e-2)
    shown = capfd.readouterr().out
    for words in (
        "tokens/s",
        "routing, share of a step",
        "peak memory",
        "compiler",
        "recycled",
        "Both trained alike",
        str(out.resolve()),
    ):
        assert words in shown.replace("\n", ""), words


INTERRUPTED = """
import functools, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
from demo import run as demo
demo.Model = functools.partial(demo.Model, **{model!r})
sys.exit(demo.run(steps=100000, threads=1, out={out!r}, parts=["training"]))
"""


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_interrupt(tmp_path: Path) -> None:
    script = INTERRUPTED.format(model=dataclasses.asdict(SMALL), out=str(tmp_path))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
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
        elif do == "finish":
            yield {"event": "validation", "step": 2, "loss": 5.0}
            yield {"event": "memory", "parts": {}}
            yield {"event": "end"}

    def close(self) -> None:
        pass


def test_interrupt_while_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(heard: dict[str, runs.Run]) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(turns, "Process", Pretender)
    monkeypatch.setattr(charts, "loss", interrupt)
    (tmp_path / "loss.png").write_bytes(b"old")
    assert demo.run(steps=9, out=tmp_path, parts=["training"]) == 130
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
    assert f"moeroute demo needs {' and '.join(missing)}: pip install '.[demo]' in a clone" in shown
    assert not names(tmp_path)


def test_training_process_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert demo.run(steps=1, out=tmp_path, parts=["training"]) == 1
    shown = capfd.readouterr().out
    assert "failed with status 1" in shown
    assert "Nothing was saved." in shown


def test_a_killed_training_process_saves_what_was_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def end(process: Pretender) -> None:
        raise processes.Ended("A training process was killed by SIGKILL (out of memory?)")

    monkeypatch.setattr(Pretender, "last", end)
    monkeypatch.setattr(turns, "Process", Pretender)
    assert demo.run(steps=9, out=tmp_path, parts=["training"]) == 1
    assert names(tmp_path) == ["expert_load.png", "loss.png", "results.json"]
    shown = capfd.readouterr().out.replace("\n", " ")
    assert "killed by SIGKILL (out of memory?), after 2 steps of moeroute" in shown


def test_steps_are_cut_to_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for seconds, steps in ((0.1, runs.STEPS), (0.5, 95), (60.0, turns.TURN)):
        both = {name: runs.Run(name, warm={"step_seconds": seconds}) for name in runs.NAMES}
        assert turns.steps_that_fit(both, 95.0) == steps
    monkeypatch.setattr(turns, "Process", Pretender)
    monkeypatch.setattr(demo, "SECONDS", 0.0)
    monkeypatch.setattr(demo, "TRAINING_SECONDS", 0.0)
    assert demo.run(out=tmp_path / "cut", parts=["training"]) == 0
    shown = capfd.readouterr().out
    assert f"This machine is slow for 300 steps in two minutes: {turns.TURN} steps instead" in shown
    # Fast while it was measured, then slow: both runs end at the same step.
    monkeypatch.setattr(turns, "steps_that_fit", lambda heard, seconds: 30)
    assert demo.run(out=tmp_path / "slower", parts=["training"]) == 0
    assert f"no time for more than {turns.TURN} of 30 steps" in capfd.readouterr().out
    # Steps that were asked for are kept.
    assert demo.run(steps=30, out=tmp_path / "asked", parts=["training"]) == 0
    assert "time" not in capfd.readouterr().out.split("loss, first step")[0]


def test_verdict_can_be_no() -> None:
    def made(name: str, losses: list[float], weights: str = "same") -> runs.Run:
        validation = [(len(losses), losses[-1])]
        return runs.Run(name, ready={"initial_weights": weights}, losses=losses, validation=validation)

    ours = made("moeroute", [5.5, 3.0])
    alike, numbers = runs.verdict({"moeroute": ours, "plain": made("plain", [5.5, 3.02])}, "float32")
    assert alike
    assert "0.0200 (0.66%) at the end" in numbers
    for other in (made("plain", [5.5, 3.04]), made("plain", [5.6, 3.0]), made("plain", [5.5, 3.0], "other")):
        alike, _ = runs.verdict({"moeroute": ours, "plain": other}, "float32")
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--steps", "0"], "must be at least 1; got 0"), (["--dtype", "int8"], "invalid choice: 'int8'")],
)
def test_mistakes_are_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_out_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="demo: out must be a folder that can be written"):
        demo.run(steps=1, out=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


# ---------------------------------------------------------------------------- what the comparison stands on


def test_plain_layer_is_the_same_function() -> None:
    torch.manual_seed(0)
    ours = MoE(32, 16, 4, 2, score="softmax", renormalize=True)
    plain = model.PlainMoE(32, 16, 4, 2)
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
    ours, plain = (model.build_model(SMALL, run, torch.float32, seed=3) for run in ("moeroute", "plain"))
    assert model.fingerprint(ours) == model.fingerprint(plain)
    assert model.fingerprint(ours) != model.fingerprint(model.build_model(SMALL, "plain", torch.float32, seed=4))
    kinds = [type(block.get_submodule("moe")) for network in (ours, plain) for block in network.blocks]
    assert kinds == [MoE, MoE, model.PlainMoE, model.PlainMoE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_lowers_the_loss(dtype: torch.dtype) -> None:
    corpus = data.load_corpus()
    network = model.build_model(SMALL, "moeroute", dtype, seed=0)
    trainer = training.Trainer(network, SMALL, 30)
    generator = torch.Generator().manual_seed(0)
    losses = [trainer.step(*data.draw_batch(corpus.train, SMALL.batch, SMALL.context, generator))[0] for _ in range(30)]
    assert all(parameter.dtype == dtype for parameter in network.parameters())
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]


def test_corpus() -> None:
    corpus = data.load_corpus()
    again = data.load_corpus()
    torch.testing.assert_close(corpus.train, again.train, rtol=0, atol=0)
    text = bytes(corpus.train.numpy()) + bytes(corpus.held_out.numpy())
    assert b"Beautiful is better than ugly." in text
    assert b"import os" in text
    assert 0 < corpus.held_out.shape[0] < corpus.train.shape[0] / 4
    text_in, following = data.draw_batch(corpus.train, SMALL.batch, SMALL.context, torch.Generator().manual_seed(0))
    assert text_in.shape == following.shape == (SMALL.batch, SMALL.context)
    torch.testing.assert_close(text_in[:, 1:], following[:, :-1])


def test_routing_timer_counts_what_lies_outside_the_experts() -> None:
    layer = MoE(32, 16, 4, 2)
    reference = [
        p.clone() for p in torch.autograd.grad(layer(torch.ones(6, 32)).square().sum(), list(layer.parameters()))
    ]
    timer = measures.RoutingTimer()
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
    assert screen.printable("a\tb\x1b[31m\n\x00é") == "a   b\N{REPLACEMENT CHARACTER}[31m\n\N{REPLACEMENT CHARACTER}é"


# ---------------------------------------------------------------------------- the same bits


def test_bits_are_those_of_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All of moeroute's ways agree; plain PyTorch is shown as it was measured, whatever that is."""
    monkeypatch.setattr(demo, "LAYER", {"tokens": 24, "width": 16, "experts": 12, "k": 3})
    assert demo.run(seed=1, out=tmp_path, parts=["bits"]) == 0
    assert names(tmp_path) == ["bits.png", "results.json"]
    pixels(tmp_path / "bits.png")
    lines = [bits.Line(**line) for line in json.loads((tmp_path / "results.json").read_text())["bits"]]
    ours = [line for line in lines if line.side == bits.MOEROUTE]
    assert len(ours) == 6
    assert len({(line.output, line.gradient) for line in ours if line.output is not None}) == 1
    shown = capfd.readouterr().out
    for line in lines:
        assert line.way in shown
        assert line.output is None or line.output in shown
    assert "the same bits in all" in shown
    assert "tokens[index]" in shown


def test_hashed_layers_are_the_same_function() -> None:
    """Against float64 mathematics written out; the three texts differ by rounding alone."""
    generator = torch.Generator().manual_seed(0)
    layer = bits.Layer.make(16, 12, 3, generator)
    tokens = torch.randn(9, 16, generator=generator)
    router, experts, x = layer.router.double(), layer.experts.double(), tokens.double()
    weights, ids = (x @ router.t()).sigmoid().topk(3)
    rows = torch.einsum("tkoh,th->tko", experts[ids], x)
    exact = (rows * rows.sigmoid() * (weights / weights.sum(-1, keepdim=True))[..., None]).sum(1)
    for function in (bits.with_moeroute, bits.with_index_add, bits.with_sum):
        torch.testing.assert_close(function(layer, tokens).double(), exact, rtol=1e-5, atol=1e-5)


def test_one_lost_bit_is_another_hash() -> None:
    tokens = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    first = bits.compute(lambda x: 2 * x, tokens, 1)
    assert first == bits.compute(lambda x: 2 * x, tokens, 1, alone=True)
    changed = tokens.clone()
    changed.view(torch.int32)[2, 3] += 1
    output, gradient = bits.compute(lambda x: 2 * x, changed, 1)
    assert output != first[0]
    assert gradient != first[1]


def test_words_follow_the_hashes() -> None:
    same = [bits.Line(bits.PLAIN, "one", "a", "b"), bits.Line(bits.PLAIN, "two", "a", "b")]
    assert screen.say_bits(same, bits.PLAIN) == "plain PyTorch: 2 ways, the same bits in all"
    others = [*same, bits.Line(bits.PLAIN, "three", "a", "c"), bits.Line(bits.PLAIN, "four", None, None, "no")]
    assert screen.say_bits(others, bits.PLAIN) == "plain PyTorch: 3 ways, the same output, 2 different gradients"


# ---------------------------------------------------------------------------- speed, and killed and resumed


def test_speed_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The bars are those of the benchmark's lines, and its cases exist."""
    assert set(speed.CASES) <= {case.name for case in measured.CASES}
    lines = [{"case": name, "ours_s": 2e-3, "times": 3.25} for name in reversed(speed.CASES)]
    lines[0]["roof"] = 0.875
    monkeypatch.setattr(speed, "reports", lambda what, module, mode, *rest: lines if mode == "called" else [])
    assert demo.run(out=tmp_path, parts=["speed"]) == 0
    assert names(tmp_path) == ["results.json", "speed.png"]
    pixels(tmp_path / "speed.png")
    found = json.loads((tmp_path / "results.json").read_text())["speed"]
    assert [bar["name"] for bar in found] == list(speed.CASES.values())
    shown = capfd.readouterr().out
    assert "2,000 µs" in shown
    assert "3.2" in shown
    assert "88%" in shown


def test_resumed_training_is_judged_by_its_digits() -> None:
    run = runs.Run("plain", losses=[5.0, 4.0, 3.0])
    assert run.hear({"event": "step", "step": 2, "loss": 4.0}) == "repeated step"
    run.hear({"event": "step", "step": 3, "loss": 3.0000000000000004})
    assert (run.same_again(), len(run.repeated), len(run.losses)) == (1, 2, 3)
    for digest, same in (("a", False), ("a", True)):
        run.hear({"event": "weights", "step": 3, "fingerprint": digest})
        assert run.same_weights() is same
    run.weights[1] = (3, "b")
    assert not run.same_weights()


def test_a_step_that_differs_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    ours = runs.Run("moeroute", losses=[5.0, 4.0, 3.0], repeated=[(2, 4.0), (3, 3.0)], weights=[(3, "a"), (3, "a")])
    plain = runs.Run("plain", losses=[5.0, 4.0, 3.0], repeated=[(2, 4.25), (3, 3.0)], weights=[(3, "a"), (3, "b")])
    screen.print_resumed(Console(), [ours, plain])
    shown = " ".join(capsys.readouterr().out.split())
    assert "loss of step 2, before the kill 4.0 4.0" in shown
    assert "the same step, by the new process 4.0 4.25" in shown
    assert "2 of 2 1 of 2" in shown
    assert "same bits different" in shown


@pytest.mark.parametrize("steps", range(1, 12))
def test_checkpoints_lie_before_the_kill(steps: int) -> None:
    saved, killed = turns.checkpoints(steps)
    assert (saved, killed) == (0, 0) if steps < 3 else 0 < saved < killed < steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_trainer_goes_on_with_the_same_bits(dtype: torch.dtype) -> None:
    corpus = data.load_corpus()
    trainers = [training.Trainer(model.build_model(SMALL, "moeroute", dtype, seed), SMALL, 9) for seed in (0, 1)]
    batches = [
        data.draw_batch(corpus.train, SMALL.batch, SMALL.context, torch.Generator().manual_seed(i)) for i in range(4)
    ]
    for batch in batches[:2]:
        trainers[0].step(*batch)
    file = io.BytesIO()
    torch.save(trainers[0].state(), file)
    file.seek(0)
    trainers[1].load(torch.load(file))
    for batch in batches[2:]:
        assert trainers[0].step(*batch) == trainers[1].step(*batch)
    first, second = (model.fingerprint(trainer.network) for trainer in trainers)
    assert first == second


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_is_split_into_parts_that_add_up() -> None:
    measures.Memory().training_starts()  # what earlier tests have left goes first
    earlier = memory.empty((100 << 20,), torch.uint8).fill_(1)  # was there before, and counts nowhere else
    measured = measures.Memory()
    measured.kernels_are_loaded()
    measured.training_starts()
    held = torch.ones(40_000_000, dtype=torch.uint8)
    measured.step_ends()
    parts = measured.parts(model_bytes=1000)
    assert list(parts) == list(screen.MEMORY)
    assert parts["model"] == 1000
    assert parts["before"] > earlier.nbytes
    assert 0.9 * held.nbytes < parts["rest"] < 3 * held.nbytes
    assert sum(size for part, size in parts.items() if part != "peak") == parts["peak"]
