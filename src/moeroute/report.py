"""Tables, progress and charts of the command line, by rich and matplotlib; files are written whole."""

import os
import tempfile
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeroute.bench import Summary
    from moeroute.npu import Result as NamedResult
    from moeroute.peers import Result


def write(path: Path, content: bytes) -> None:
    """All of the file or nothing: written beside, then moved into place."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def png(figure: Any) -> bytes:
    """A matplotlib figure as the bytes of a PNG."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def progress(cases: int, modes: Sequence[str], work: Callable[[Callable[[str, int], None]], Any]) -> Any:
    """Run `work(tell)` under a progress bar; `tell(mode, lines so far)` moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=cases * len(modes))
        return work(lambda mode, count: bar.update(task, description=mode, completed=count))


def _number(line: dict[str, Any] | None, key: str, form: str) -> str:
    return "–" if line is None or key not in line else form.format(line[key])


def print_bench(summaries: Sequence["Summary"], lines: Sequence[dict[str, Any]], about: dict[str, Any]) -> None:
    """Print a benchmark's table and its extra lines."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{about['processor']}, {about['threads']} threads, torch {about['torch']}, {about['date']}")
    table.add_column("case", no_wrap=True)
    for heading in ("kernel", "GB/s", "of the roof", "torch, kernel", "torch, as called", "torch, tuned"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bounds")
    for summary in summaries:
        kernel, called, tuned = (summary.by_mode.get(mode) for mode in ("kernel", "called", "tuned"))
        microseconds = "–" if kernel is None else f"{kernel['ours_s'] * 1e6:,.0f} µs"
        table.add_row(
            summary.case.name,
            microseconds,
            _number(kernel, "GB/s", "{:.1f}"),
            _number(kernel, "roof", "{:.2f}"),
            *(
                _number(line, "times", "× {:.2f}" if summary.case.operator == "one token" else "× {:.1f}")
                for line in (kernel, called, tuned)
            ),
            "[green]hold[/]" if not summary.missed else "[red]" + "; ".join(summary.missed) + "[/]",
        )
    console = Console(width=max(Console().width, 150))
    console.print(table)
    console.print(
        "× n: the torch composition takes n times as long. kernel: both sides into recycled memory; as called: fresh "
        "results and the defaults of a new process; tuned: as called, torch with huge pages. Roof: a copy_ of as many "
        "bytes. one token: gating, plan, permute and unpermute beside one index_select of 8 rows.",
        soft_wrap=True,
    )
    for line in lines:
        if line["case"] == "memory" and "besides_bytes" in line:
            console.print(
                f"permute + unpermute, forward and backward, (1024, 8, 7168) bfloat16: "
                f"{line['inputs_outputs_gradients_bytes'] / 2**20:.0f} MiB of inputs, outputs and gradients, "
                f"{line['besides_bytes'] / 2**20:.1f} MiB besides ({line['besides_share']:.1%}, bound 5%)"
            )


def print_peers(results: Sequence["Result"], about: dict[str, Any]) -> None:
    """Print the table of `bench --peers`: a row a side."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{about['processor']}, {about['threads']} threads, torch {about['torch']}, {about['date']}")
    table.add_column("case", no_wrap=True)
    table.add_column("side")
    for heading in ("time", "of ours", "peak memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bounds")
    for result in results:
        for name, seconds in result.seconds.items():
            ours = name == "moeroute"
            memory = f"{result.bytes[name] / 2**20:,.0f} MiB" if result.bytes.get(name) else "–"
            verdict = "; ".join(
                f"[{'green' if ratio >= least else 'red'}]{what} {ratio:.2f} (at least {least:g})[/]"
                for what, least in result.case.bounds.items()
                if ours and (ratio := result.ratios.get(what)) is not None
            )
            times = f"× {seconds / result.seconds['moeroute']:.2f}"
            table.add_row(result.case.name if ours else "", name, f"{seconds * 1e3:,.1f} ms", times, memory, verdict)
        for name, reason in result.not_run.items():
            table.add_row("", name, "–", "–", "–", reason)
    Console(width=max(Console().width, 150)).print(table)


def print_npu(results: Sequence["NamedResult"], about: dict[str, Any]) -> None:
    """Print the table of `bench --npu`."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{about['processor']}, {about['threads']} threads, torch {about['torch']}, {about['date']}")
    table.add_column("function", no_wrap=True)
    for heading in ("time", "core verbs", "slower by", "of the roof"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bounds")
    for result in results:
        roof = result.ratios.get("roof")
        table.add_row(
            result.case.name,
            f"{result.named * 1e6:,.0f} µs",
            f"{result.core * 1e6:,.0f} µs",
            f"{result.named / result.core - 1:+.1%}",
            "–" if roof is None else f"{roof:.2f}",
            "[green]hold[/]" if not result.missed else "[red]" + "; ".join(result.missed) + "[/]",
        )
    Console(width=max(Console().width, 150)).print(table)


def bench_chart(path: Path, summaries: Sequence["Summary"], about: dict[str, Any]) -> None:
    """How many times as long the torch composition takes, a bar for each way to measure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    shown = [summary for summary in summaries if summary.case.operator != "one token"]
    modes = (("kernel", "kernel", "#33658a"), ("called", "as called", "#f6ae2d"), ("tuned", "tuned", "#86bbd8"))
    figure = Figure(figsize=(10, 1.6 + 0.42 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for offset, (mode, label, colour) in enumerate(modes):
        values = [summary.by_mode.get(mode, {}).get("times", 0.0) for summary in shown]
        places = [i + (offset - 1) * 0.27 for i in range(len(shown))]
        axes.barh(places, values, height=0.25, label=label, color=colour)
    axes.set_yticks(range(len(shown)), [summary.case.name for summary in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axes.set_xlabel("time of the torch composition / time of moeroute (more is faster)")
    axes.set_title(f"{about['processor']}, {about['threads']} threads, torch {about['torch']}", fontsize=10)
    axes.legend(loc="lower right")
    write(path, png(figure))
