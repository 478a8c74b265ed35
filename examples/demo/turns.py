"""The two trainings, each in a process of its own; they take turns, and each is killed once and resumes.

Turns of some steps, so that a busy moment of the machine meets both. A process of its own, so that neither finds the
other's memory. The processes do not see Ctrl-C: this one ends them and keeps what it has heard so far.

    train_both  -- commands -->   python -m demo.training ORDER
                <-- reports --    (a JSON object a line, both ways)
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from demo import screen
from demo.model import Model
from demo.processes import ended, start, stop
from demo.runs import NAMES, STEPS, Run

if TYPE_CHECKING:
    from rich.console import Console

TURN = 5  # steps of one run before the other's turn
REPEATED = 20  # steps between the last checkpoint and the kill, done again by the process that resumes
SAMPLE = 300  # bytes of generated text


class Process:
    """A training process, and the conversation with it."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._process = start("demo.training", json.dumps(order))

    def ask(self, do: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Gives a command and yields the reports until it is done."""
        commands, answers = self._process.stdin, self._process.stdout
        assert commands is not None  # pipes were asked for
        assert answers is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            commands.write(json.dumps({"do": do, **arguments}) + "\n")
            commands.flush()
        for line in answers:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "done":
                return
            yield event
        raise ended("A training process", self._process.wait())

    def close(self) -> None:
        """SIGKILL, whatever it is doing."""
        stop(self._process)


def train_both(
    console: Console, runs: dict[str, Run], order: dict[str, Any], asked: int | None, seconds: float
) -> None:
    """Trains as many steps as were asked for, or as fit into the time; `runs` hears all reports."""
    begun = time.perf_counter()
    model = Model(**order["model"])
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        processes = {name: Process({**order, "run": name}) for name in runs}

        def close() -> None:
            for process in processes.values():
                process.close()

        stack.callback(close)
        progress = stack.enter_context(screen.progress(console))
        tasks = {name: progress.add_task(NAMES[name], total=None, state="starts, compiles") for name in runs}

        def ask(name: str, do: str, **arguments: Any) -> None:
            run = runs[name]
            for event in processes[name].ask(do, **arguments):
                if run.hear(event) == "step":
                    screen.say_step(console, run, model)
                    state = f"loss {run.losses[-1]:.3f}  {run.tokens_per_second(model, last=20):,.0f} tokens/s"
                    progress.update(tasks[name], completed=len(run.losses), state=state)

        for name in runs:
            ask(name, "warm_up")
        left = seconds - (time.perf_counter() - begun)
        steps = asked or steps_that_fit(runs, left)
        for name in runs:
            ask(name, "begin", steps=steps)
            progress.reset(tasks[name], total=steps)
        screen.say_setting(console, runs["moeroute"], model, order["dtype"], cut=asked is None and steps < STEPS)

        saved_at, killed_at = checkpoints(steps)
        done, turn_seconds = 0, 0.0
        for until in sorted({*range(TURN, steps, TURN), steps, saved_at, killed_at} - {0}):
            started = time.perf_counter()
            if asked is None and done and started - begun + turn_seconds > seconds:
                console.print(f"The machine got slower: no time for more than {done} of {steps} steps.")
                break
            for name in runs:
                ask(name, "train", until=until)
            turn_seconds = time.perf_counter() - started
            if until == saved_at:
                for name in runs:
                    ask(name, "save", file=f"{folder}/{name}.pt")
            if until == killed_at:
                for name in runs:
                    ask(name, "tell_weights")
                    processes[name].close()
                    processes[name] = Process({**order, "run": name})
                screen.say_killed(console, saved_at, killed_at)
                for name in runs:
                    ask(name, "resume", file=f"{folder}/{name}.pt", steps=steps)
                    ask(name, "train", until=until)
                    ask(name, "tell_weights")
            done = until
        for name in runs:
            ask(name, "finish", sample=0 if name == "plain" else SAMPLE)


def steps_that_fit(runs: dict[str, Run], seconds: float) -> int:
    return max(TURN, min(STEPS, int(seconds / sum(run.warm["step_seconds"] for run in runs.values()))))


def checkpoints(steps: int) -> tuple[int, int]:
    """The steps after which the runs are saved, and killed; 0, 0 where there are too few."""
    repeated = min(REPEATED, steps // 3)
    return (steps // 3, steps // 3 + repeated) if repeated else (0, 0)
