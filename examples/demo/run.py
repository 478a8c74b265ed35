"""The demo from the first hash to the last picture."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from demo import charts, screen
from demo.bits import Line
from demo.model import DTYPES, Model
from demo.processes import Ended, reports
from demo.runs import NAMES, Run, progress_made, verdict
from demo.speed import Bar, in_order, measure
from demo.turns import train_both
from moeroute import check, report

if TYPE_CHECKING:
    from rich.console import Console

PACKAGES = ("rich", "matplotlib")
PARTS = ("bits", "speed", "training")
SECONDS = 110.0  # for everything; steps are cut to keep it
RESERVE = 15.0  # of it for resuming, held-out losses, sample text and charts
TRAINING_SECONDS = 60.0  # of it for the steps at least, however long the other parts took on a busy machine
LAYER = {"tokens": 256, "width": 128, "experts": 60, "k": 8}  # of the hashes


@dataclasses.dataclass
class Story:
    """What has been found so far."""

    lines: list[Line] = dataclasses.field(default_factory=list)
    bars: list[Bar] = dataclasses.field(default_factory=list)
    runs: dict[str, Run] = dataclasses.field(default_factory=lambda: {name: Run(name) for name in NAMES})


def run(
    steps: int | None = None,
    seed: int = 0,
    dtype: str | torch.dtype = "float32",
    threads: int | None = None,
    out: str | Path = "out",
    parts: Sequence[str] = PARTS,
) -> int:
    """Shows the parts, prints tables and writes the charts. Returns an exit status: 0, 1, or 130 (Ctrl-C).

    Args:
        steps: of each training; None means 300, or as many as fit into two minutes; a given number is kept.
        seed: of weights, batches and sample.
        dtype: float32 or bfloat16, or the name of one (weights and activations; the optimizer keeps float32 weights).
        threads: of each training process; None leaves it to torch.
        out: folder for ``bits.png``, ``speed.png``, ``loss.png``, ``expert_load.png``, ``sample.txt`` and
            ``results.json``.
        parts: of bits, speed and training, those to show.
    """
    if steps is not None:
        check.integer("demo", "steps", steps, minimum=1)
    check.integer("demo", "seed", seed, minimum=0, maximum=2**63 - 1)
    dtype = check.one_of("demo", "dtype", str(dtype).removeprefix("torch."), tuple(DTYPES))
    if threads is not None:
        check.integer("demo", "threads", threads, minimum=1)
    for part in parts:
        check.one_of("demo", "parts", part, PARTS)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(f"moeroute demo needs {' and '.join(missing)}: pip install '.[demo]' in a clone\n")
        return 1
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise check.wrong_value("demo", "out", "a folder that can be written", f"{folder} ({error})") from error

    from rich.console import Console

    console = Console(highlight=False)
    story = Story()
    order: dict[str, Any] = {"seed": seed, "dtype": dtype, "threads": threads, "model": dataclasses.asdict(Model())}
    begun = time.perf_counter()
    status = 0
    try:
        _tell(console, story, order, parts, steps, begun)
    except KeyboardInterrupt:
        console.print(f"\n[bold]Interrupted[/] after {progress_made(story.runs)}.", soft_wrap=True)
        status = 130
    except Ended as error:
        console.print(f"\n[bold red]{error}[/], after {progress_made(story.runs)}.", soft_wrap=True)
        status = 1
    saved: list[str] = []
    try:
        _save(folder, story, order, saved)
    except KeyboardInterrupt:
        console.print("\n[bold]Interrupted[/] while saving.")
        status = 130
    if status == 0:
        if "training" in parts:
            screen.print_training(console, story.runs, Model(**order["model"]), dtype)
            screen.print_sample(console, story.runs["moeroute"])
        console.print(f"All of it: {time.perf_counter() - begun:.0f} s.")
    screen.say_saved(console, folder, saved)
    return status


def _tell(
    console: Console, story: Story, order: dict[str, Any], parts: Sequence[str], steps: int | None, begun: float
) -> None:
    if "bits" in parts:
        with screen.progress(console) as progress:
            task = progress.add_task("hashes", total=None, state="")
            setting = json.dumps({**LAYER, "seed": order["seed"]})
            for values in reports("The process that hashes", "demo.bits", setting, TRITON_INTERPRET="1"):
                story.lines.append(Line(*values))
                progress.update(task, state=f"{story.lines[-1].side}: {story.lines[-1].way}")
            progress.remove_task(task)
        screen.print_bits(console, story.lines)
    if "speed" in parts:
        with screen.progress(console) as progress:
            task = progress.add_task("speed", total=None, state="")
            for bar in measure():
                story.bars.append(bar)
                progress.update(task, state=bar.name)
            progress.remove_task(task)
        story.bars = in_order(story.bars)
        screen.print_speed(console, story.bars)
    if "training" in parts:
        left = SECONDS - RESERVE - (time.perf_counter() - begun)
        train_both(console, story.runs, order, steps, max(left, TRAINING_SECONDS))


def _save(folder: Path, story: Story, order: dict[str, Any], saved: list[str]) -> None:
    """Everything that there is so far; `saved` gets the name of each file that is complete."""
    ours = story.runs["moeroute"]

    def save(name: str, content: Callable[[], bytes]) -> None:
        report.write(folder / name, content())
        saved.append(name)

    if story.lines or story.bars or ours.losses:
        save("results.json", lambda: _results(story, order))
    if story.lines:
        save("bits.png", lambda: charts.bits(story.lines))
    if story.bars:
        save("speed.png", lambda: charts.speed(story.bars))
    if ours.losses:
        save("loss.png", lambda: charts.loss(story.runs))
        save("expert_load.png", lambda: charts.load(ours))
    if ours.sample:
        save("sample.txt", ours.sample.encode)


def _results(story: Story, order: dict[str, Any]) -> bytes:
    runs = story.runs
    results: dict[str, Any] = {
        "setting": order,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "bits": [line._asdict() for line in story.lines],
        "speed": [bar._asdict() for bar in story.bars],
        "runs": {name: dataclasses.asdict(run) for name, run in runs.items() if run.losses},
    }
    if all(run.complete for run in runs.values()):
        results["alike"], results["verdict"] = verdict(runs, order["dtype"])
    return json.dumps(results).encode()
