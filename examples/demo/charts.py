"""The demo's pictures, as the bytes of a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from demo.bits import MOEROUTE, PLAIN, Line
from demo.runs import NAMES, Run
from demo.screen import say_bits
from demo.speed import Bar
from moeroute import report

OURS, THEIRS = "#2a6f97", "#e07a1f"
# The first hash of a side has the first colour, each other one the next.
CELLS = {
    MOEROUTE: ("#bcd9ec", "#f4b6c2"),
    PLAIN: ("#f8d9b8", "#f9e2a0", "#f3b7a0", "#d9c8ec", "#cfe8d5", "#e3e3e3"),
}


def bits(lines: Sequence[Line]) -> bytes:
    """A row for each way to compute the layer; equal hashes have equal colours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.36 * (len(lines) + 2)), dpi=120, layout="constrained")
    axes = figure.subplots()
    height = 0.0
    for side in (MOEROUTE, PLAIN):
        axes.text(0, height, say_bits(lines, side), weight="bold", va="center")
        height += 1
        seen: tuple[list[str], list[str]] = ([], [])
        for line in (line for line in lines if line.side == side):
            axes.text(0.2, height, line.way, va="center")
            if line.output is None or line.gradient is None:
                axes.text(4.6, height, f"not here: {line.reason}", va="center", color="gray")
            else:
                _cell(axes, 4.5, height, line.output, seen[0], CELLS[side])
                _cell(axes, 6.8, height, line.gradient, seen[1], CELLS[side])
            height += 1
        height += 0.4
    axes.text(5.6, 0, "output", ha="center", va="center", color="gray")
    axes.text(7.9, 0, "gradient", ha="center", va="center", color="gray")
    axes.set_xlim(-0.1, 9.1)
    axes.set_ylim(height - 0.6, -0.8)
    axes.axis("off")
    axes.set_title("The same layer computed in several ways: hashes of all bits", loc="left")
    return report.png(figure)


def _cell(axes: Any, left: float, middle: float, value: str, seen: list[str], colours: Sequence[str]) -> None:
    from matplotlib.patches import Rectangle

    if value not in seen:
        seen.append(value)
    colour = colours[min(seen.index(value), len(colours) - 1)]
    axes.add_patch(Rectangle((left, middle - 0.44), 2.2, 0.88, facecolor=colour))
    axes.text(left + 1.1, middle, value, family="monospace", ha="center", va="center")


def speed(bars: Sequence[Bar]) -> bytes:
    """Left against torch's operators, right against a copy of as many bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.45 * len(bars)), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(bars))
    shown = left.barh(places, [bar.times for bar in bars], color=OURS, height=0.65)
    left.bar_label(shown, [f" {bar.times:.1f} ×" for bar in bars])
    left.axvline(1.0, color=THEIRS, linewidth=2)
    figure.suptitle("The operators' speed, both sides into recycled memory")
    left.set_title("times as fast as the torch composition (orange)", fontsize=10)
    left.set_yticks(places, [bar.name for bar in bars])
    left.set_xlim(0, max(bar.times for bar in bars) * 1.18)
    left.invert_yaxis()
    roofs = [100 * (bar.roof or 0.0) for bar in bars]
    right.barh(places, roofs, color=OURS, height=0.65)
    for place, roof in zip(places, roofs, strict=True):
        words, colour = (f"{roof:.0f} %", "white") if roof else ("moves little memory", "gray")
        right.text(3, place, words, color=colour, va="center")
    right.axvline(100.0, color=THEIRS, linewidth=2)
    right.set_title("% of the memory's speed (a copy: orange)", fontsize=10)
    right.set_xlim(0, max(120.0, max(roofs) * 1.18))
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(left=False)
    return report.png(figure)


def loss(runs: dict[str, Run]) -> bytes:
    """Both trainings; below, the steps that were repeated after the kill, against their first time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), dpi=120, layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=(2, 1))
    styles = {"moeroute": (OURS, "-", 2.2), "plain": (THEIRS, "--", 1.3)}
    for name, run in runs.items():
        if run.losses:
            color, line, width = styles[name]
            steps = range(1, len(run.losses) + 1)
            top.plot(steps, run.losses, color=color, linestyle=line, linewidth=width, label=NAMES[name])
            if run.validation:
                marker = "o" if name == "moeroute" else "x"
                label = f"{NAMES[name]}, held-out text"
                top.plot(*zip(*run.validation, strict=True), marker, color=color, label=label, zorder=3)
    ours = runs["moeroute"]
    if ours.repeated:
        first, last = ours.repeated[0][0], ours.repeated[-1][0]
        top.axvspan(first - 0.5, last + 0.5, color="0.9", label=f"killed after step {last}, steps repeated")
    top.set_ylabel("loss (nats per byte)")
    top.set_xlabel("step")
    top.set_title("Same model, same batches, two ways to route")
    top.legend()
    top.grid(alpha=0.3)
    _repeated(bottom, runs)
    return report.png(figure)


def _repeated(axes: Any, runs: dict[str, Run]) -> None:
    """|loss - loss before the kill| of each repeated step. Zero has a place of its own below the logarithmic scale."""
    least = 1e-8
    for name, run in runs.items():
        if run.repeated:
            steps = [step for step, _ in run.repeated]
            apart = [abs(loss - run.losses[step - 1]) for step, loss in run.repeated]
            colour, marker = (OURS, "o") if name == "moeroute" else (THEIRS, "x")
            words = f"{NAMES[name]}: {run.same_again()} of {len(steps)} the same to the last digit"
            axes.plot(steps, apart, marker, linestyle="-", color=colour, label=words, clip_on=False, linewidth=1)
    if axes.lines:
        axes.set_yscale("symlog", linthresh=least, linscale=0.5)
        axes.set_ylim(0, max(1e-6, 100 * axes.dataLim.y1))
        axes.legend(loc="upper left")
    else:
        axes.text(0.5, 0.5, "nothing was repeated yet", transform=axes.transAxes, ha="center", va="center")
    axes.set_title("Killed and resumed: how far a repeated step's loss is from its first time")
    axes.set_ylabel("|difference|")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)


def load(run: Run) -> bytes:
    """The share of each expert over the steps, a band for each layer."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    counts = torch.tensor(run.load, dtype=torch.float32)  # [steps, layers, experts]
    share = counts / counts.mean(dim=-1, keepdim=True)
    steps, layers, experts = share.shape
    figure = Figure(figsize=(9, 1.2 + 1.7 * layers), dpi=120, layout="constrained")
    axes = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    norm = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=max(2.0, float(share.quantile(0.995))))
    for layer, axis in enumerate(axes):
        image = axis.imshow(
            share[:, layer].T.numpy(),
            aspect="auto",
            interpolation="nearest",
            cmap="RdBu_r",
            norm=norm,
            extent=(0.5, steps + 0.5, experts - 0.5, -0.5),
        )
        axis.set_ylabel(f"layer {layer}\nexpert")
        axis.set_yticks(range(0, experts, max(1, experts // 4)))
    axes[0].set_title("Load of the experts over training (moeroute)")
    axes[-1].set_xlabel("step")
    bar = figure.colorbar(image, ax=list(axes), extend="max")
    bar.set_label("slots of the expert / equal share (1 = balanced)")
    return report.png(figure)
