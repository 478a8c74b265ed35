"""`moeroute plan`: its arguments, its table, its JSON file and its chart."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from moeroute import report, scale
from moeroute.nn.experts import RECOMPUTE


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moeroute plan`."""
    sizes = (
        ("tokens", "of each rank, in a step"),
        ("hidden", "H"),
        ("intermediate", "I, of each expert"),
        ("experts", "E"),
        ("topk", "K"),
        ("ranks", "W, of the expert-parallel group"),
    )
    for name, about in sizes:
        parser.add_argument(f"--{name}", type=int, required=True, help=about)
    parser.add_argument("--layers", type=int, default=1, help="expert layers (default: 1)")
    parser.add_argument("--dtype", choices=tuple(scale.DTYPES), default="bfloat16", help="default: bfloat16")
    again = "what backward makes again; permute changes something with one rank only (default: nothing)"
    parser.add_argument("--recompute", choices=RECOMPUTE, default="", help=again)
    parser.add_argument("--capacity", type=int, help="rows that each rank sends to each expert")
    parser.add_argument("--skew", type=float, default=0.0, help="of the drawn routing: 0 (default) none, 1 Zipf's law")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn routing (default: 0)")
    parser.add_argument("--routing", type=Path, help="recorded: .npy or .pt, counts [W, E] or ids [W * tokens, K]")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for JSON and chart (default: out)")


def run(chosen: argparse.Namespace) -> int:
    """Print the table, write plan.json and plan.png; the exit status."""
    names = ("tokens", "hidden", "intermediate", "experts", "topk", "ranks", "dtype", "layers", "recompute", "capacity")
    try:
        layout = scale.Layout(**{name: getattr(chosen, name) for name in names})
        counts = None if chosen.routing is None else scale.recorded(layout, chosen.routing)
        found = scale.plan(layout, counts, skew=chosen.skew, seed=chosen.seed)
    except (ValueError, TypeError, OSError) as error:
        raise SystemExit(f"moeroute plan: {error}") from error
    summary = found.summary()
    summary["routing"] = str(chosen.routing) if chosen.routing else f"drawn, skew {chosen.skew:g}, seed {chosen.seed}"
    _table(summary)
    chosen.out.mkdir(parents=True, exist_ok=True)
    report.write(chosen.out / "plan.json", json.dumps(summary, indent=1).encode())
    _chart(chosen.out / "plan.png", found)
    return 0


def _table(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows, traffic, fullest = (summary[name] for name in ("rows_received", "traffic_bytes", "fullest_rank"))
    table = Table(title=f"routing: {summary['routing']}", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name, value in (
        ("experts of a rank", f"{summary['experts_of_a_rank']}"),
        ("ranks without experts", f"{summary['ranks_without_experts']}"),
        ("rows received by a rank: largest, mean", f"{rows['largest']:,}, {rows['mean']:,.1f}"),
        ("largest rank / mean", f"{summary['imbalance_of_ranks']:.2f}"),
        ("largest expert / mean", f"{summary['imbalance_of_experts']:.2f}"),
        ("experts without rows", f"{summary['experts_without_rows']}"),
        ("slots dropped", f"{summary['dropped_share']:.1%}"),
        ("sent in a step: largest rank", _bytes(traffic["largest"])),
        ("sent in a step: all ranks", _bytes(traffic["all_ranks"])),
        (f"memory of the fullest rank ({fullest['rank']})", _bytes(fullest["all"])),
        *((f"  {part}", _bytes(fullest[part])) for part in ("weights", "gradients", "saved", "transient")),
    ):
        table.add_row(name, value)
    Console(width=max(Console().width, 80)).print(table)


def _bytes(number: int) -> str:
    value, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{number:,} B" if unit == "B" else f"{value:,.2f} {unit}"


def _chart(path: Path, found: scale.Plan) -> None:
    """Rows and memory of the ranks, the fullest first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    order = np.arange(found.layout.ranks)
    left.plot(order, np.sort(found.received)[::-1], color="#33658a", label="rows received")
    left.axhline(float(found.received.mean()), color="black", linewidth=0.8, label="mean")
    left.set_ylabel("rows in one layer")
    by_memory = np.argsort(-found.memory, kind="stable")
    parts = {"weights": found.weights, "gradients": found.weights, "saved": found.saved, "transient": found.transient}
    right.stackplot(order, *(part[by_memory] / 2**30 for part in parts.values()), labels=list(parts))
    right.set_ylabel("GiB")
    for axes in (left, right):
        axes.set_xlabel("ranks, the fullest first")
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower left", fontsize=8)
    sizes = found.layout
    figure.suptitle(
        f"{sizes.ranks} ranks, E = {sizes.experts}, K = {sizes.topk}, {sizes.tokens} tokens each", fontsize=10
    )
    report.write(path, report.png(figure))
