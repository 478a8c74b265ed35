"""What the pictures share: colours, a bare canvas, and a file that is the same in every run."""

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams.update({"svg.hashsalt": "moeroute", "svg.fonttype": "none", "font.family": "sans-serif"})

import matplotlib.pyplot as plt  # noqa: E402  # the settings come first

BLUE, ORANGE, TEAL, GREY, INK = "#3a5fcd", "#c8621b", "#16806f", "#7a7f87", "#33373d"


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """A figure without axes, inches wide and high."""
    figure, axes = plt.subplots(figsize=(width, height))
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return figure, axes


def chart(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    """A figure with axes that have no box."""
    figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained")
    for each in axes if columns > 1 else [axes]:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, name: str) -> None:
    """Write NAME.svg beside the script, or into the folder of --out. White ground, for dark pages too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    file = parser.parse_args().out / f"{name}.svg"
    figure.savefig(file, format="svg", metadata={"Date": None}, facecolor="white")
    file.write_text("\n".join(line.rstrip() for line in file.read_text().splitlines()) + "\n")
