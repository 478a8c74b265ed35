"""What the demo shows on the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo.bits import MOEROUTE, PLAIN, Line
from demo.model import Model
from demo.runs import NAMES, STEPS, Run, verdict
from demo.speed import Bar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

# The first hash of a column is green; each other one has a colour of its own.
COLOURS = ("green", "red", "yellow", "magenta", "cyan", "blue")
BAR = 12  # characters of the longest bar


def progress(console: Console) -> Progress:
    """Bars, where the terminal can draw them."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:>13}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(compact=True),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _table(title: str, *columns: str) -> Table:
    """The first column is text, the others are numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


# ---------------------------------------------------------------------------- the same bits


def print_bits(console: Console, lines: Sequence[Line]) -> None:
    from rich.text import Text

    table = _table("The same layer, hashed", "computed by", "output", "gradient")
    for side in (MOEROUTE, PLAIN):
        table.add_row(Text(side, "bold"), "", "")
        seen: tuple[list[str], list[str]] = ([], [])
        for line in lines:
            if line.side != side:
                continue
            if line.output is None or line.gradient is None:
                table.add_row(f"  {line.way}", Text(f"not here: {line.reason}", "dim"), "")
                continue
            cells = [_coloured(value, column) for value, column in zip((line.output, line.gradient), seen, strict=True)]
            table.add_row(f"  {line.way}", *cells)
    console.print(table)
    console.print(
        f"{say_bits(lines, MOEROUTE)}.\n{say_bits(lines, PLAIN)}.\n"
        "In plain PyTorch, threads add up the gradient of tokens\\[index] in the order in which they arrive, sigmoid"
        " rounds differently in the remainder of a vector, and each way to sum has its own order. Router and experts"
        " compute token by token on both sides, so that only routing is compared.\n",
        soft_wrap=True,
    )


def _coloured(value: str, seen: list[str]) -> Any:
    from rich.text import Text

    if value not in seen:
        seen.append(value)
    return Text(value, COLOURS[min(seen.index(value), len(COLOURS) - 1)])


def say_bits(lines: Sequence[Line], side: str) -> str:
    hashed = [line for line in lines if line.side == side and line.output is not None]
    outputs, gradients = ({line[column] for line in hashed} for column in (2, 3))
    if len(outputs) == len(gradients) == 1:
        return f"{side}: {len(hashed)} ways, the same bits in all"
    counts = (
        "the same output" if len(outputs) == 1 else f"{len(outputs)} different outputs",
        "the same gradient" if len(gradients) == 1 else f"{len(gradients)} different gradients",
    )
    return f"{side}: {len(hashed)} ways, {', '.join(counts)}"


# ---------------------------------------------------------------------------- speed


def print_speed(console: Console, bars: Sequence[Bar]) -> None:
    table = _table("The operators' speed, both sides into recycled memory", "", "time")
    for heading in ("× torch's speed", "of the memory's speed"):
        table.add_column(heading, justify="left", no_wrap=True)
    most = max(bar.times for bar in bars)
    for bar in bars:
        roof = "" if bar.roof is None else f"{_bar(bar.roof)} {bar.roof:.0%}"
        table.add_row(bar.name, f"{bar.seconds * 1e6:,.0f} µs", f"{_bar(bar.times / most)} {bar.times:.1f}", roof)
    console.print(table)
    console.print(
        "torch: the usual composition of its operators, which gives the same result. The memory's speed: a copy of as"
        " many bytes, half read and half written, measured in turns with the operator; one that mostly writes, or"
        " mostly reads, can exceed it.\n",
        soft_wrap=True,
    )


def _bar(share: float) -> str:
    eighths = round(max(0.0, min(1.2, share)) * BAR * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


# ---------------------------------------------------------------------------- training


def say_setting(console: Console, run: Run, model: Model, dtype: str, cut: bool) -> None:
    ready = run.ready
    console.print(
        f"[bold]A language model learns real text[/]: {model.layers} layers of width {model.width}, {model.experts}"
        f" experts of which a token takes {model.k}; {ready['parameters'] / 1e6:.1f} M parameters in {dtype},"
        f" {ready['threads']} threads.\n"
        f"{ready['train_bytes'] / 1e6:.1f} MB of the standard library's text to learn,"
        f" {ready['held_out_bytes'] / 1e6:.1f} MB held out; {model.tokens} bytes a step.\n"
        f"First step, kernels compiled or loaded: {run.warm['first_seconds']:.1f} s.",
        soft_wrap=True,
    )
    if cut:
        console.print(
            f"This machine is slow for {STEPS} steps in two minutes: {ready['steps']} steps instead"
            " (--steps to insist).",
            soft_wrap=True,
        )


def say_step(console: Console, run: Run, model: Model) -> None:
    """A line now and then where no progress bar can be drawn."""
    step, steps = len(run.losses), run.ready["steps"]
    if not console.is_terminal and (step in (1, steps) or step % max(1, steps // 10) == 0):
        speed = f"{run.tokens_per_second(model, last=20):,.0f} tokens/s"
        console.print(f"{NAMES[run.name]:>13}  step {step}/{steps}  loss {run.losses[-1]:.3f}  {speed}")


def say_killed(console: Console, saved_at: int, killed_at: int) -> None:
    console.print(f"Both processes killed after step {killed_at}; new ones resume from step {saved_at}.")


def print_training(console: Console, runs: dict[str, Run], model: Model, dtype: str) -> None:
    both = list(runs.values())
    steps = len(both[0].losses)
    print_resumed(console, both)
    table = _table(f"{steps} steps of {model.tokens} bytes, {dtype}", "", *(NAMES[run.name] for run in both))

    def row(name: str, value: Callable[[Run], str]) -> None:
        table.add_row(name, *(value(run) for run in both))

    row("loss, first step (nats per byte)", lambda r: f"{r.losses[0]:.6f}")
    row(f"loss, mean of the last {max(1, steps // 10)} steps", lambda r: f"{r.final_loss():.4f}")
    row("loss on held-out text", lambda r: f"{r.validation[-1][1]:.4f}")
    row("tokens/s (median step)", lambda r: f"{r.tokens_per_second(model):,.0f}")
    row("routing, ms a step", lambda r: f"{statistics.median(r.routing_seconds) * 1e3:.1f}")
    row("routing, share of a step", lambda r: f"{r.routing_share():.1%}")
    table.add_section()
    for part, name in MEMORY.items():
        if all(part in run.memory for run in both) or part == "peak":
            row(name, lambda r, part=part: _megabytes(r.memory.get(part)))  # type: ignore[misc]
    console.print(table)
    console.print(
        "Routing is everything in the layers but the experts: router, selection, plan, permute, unpermute,"
        " forward and backward. The experts are the same code on both sides and use the recycled blocks.\n",
        soft_wrap=True,
    )
    alike, numbers = verdict(runs, dtype)
    words = "[bold green]Both trained alike[/]" if alike else "[bold red]They did not train alike[/]"
    console.print(f"{words}: {numbers}.\n", soft_wrap=True)


MEMORY = {
    "peak": "peak memory of the process",
    "before": "  Python, torch and the text",
    "compiler": "  compiler: Numba, LLVM and the kernels",
    "model": "  model: weights, gradients, optimizer",
    "pool": "  recycled blocks",
    "rest": "  activations and torch's own",
}


def print_resumed(console: Console, both: Sequence[Run]) -> None:
    """A repeated step with all its digits, the first that differs if one does; how many were the same again."""
    from rich.text import Text

    if not all(run.repeated for run in both):
        return
    first, last = both[0].repeated[0][0], both[0].repeated[-1][0]
    table = _table(f"Killed after step {last}, resumed from the checkpoint of step {first - 1}", "")
    for run in both:
        table.add_column(NAMES[run.name], justify="right", no_wrap=True)
    shown = min((step for run in both for step, loss in run.repeated if loss != run.losses[step - 1]), default=last)
    table.add_row(f"loss of step {shown}, before the kill", *(repr(run.losses[shown - 1]) for run in both))
    table.add_row("the same step, by the new process", *(repr(run.repeated[shown - first][1]) for run in both))

    def say(good: bool, words: str) -> Text:
        return Text(words, "green" if good else "red")

    counts = ((run.same_again(), len(run.repeated)) for run in both)
    table.add_row("steps with the same loss again", *(say(n == of, f"{n} of {of}") for n, of in counts))
    weights = (run.same_weights() for run in both)
    table.add_row("weights after it", *(say(same, "same bits" if same else "different") for same in weights))
    console.print(table)


def print_sample(console: Console, run: Run) -> None:
    from rich.panel import Panel
    from rich.text import Text

    text = Text(printable(run.sample.strip()))
    console.print(Panel(text, title="Text written by the moeroute model", title_align="left"))


def printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs(4))


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:,.0f} MB"


def say_saved(console: Console, folder: Path, saved: Sequence[str]) -> None:
    if saved:
        console.print(f"Saved in {folder.resolve()}: {', '.join(saved)}", soft_wrap=True)
    else:
        console.print("Nothing was saved.")
