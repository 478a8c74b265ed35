"""Draws routing.svg: four tokens, their slots and the rows of three experts, from a real plan."""

import torch

import moeroute
from drawing import BLUE, GREY, INK, ORANGE, TEAL, canvas, save

EXPERTS = (BLUE, ORANGE, TEAL)
IDS = torch.tensor([[2, 0], [0, 1], [1, 2], [2, 0]])


def main() -> None:
    """Three lines of boxes, and an arrow from each slot to its row."""
    plan = moeroute.plan_from_expert_ids(IDS, num_experts=3)
    figure, axes = canvas(8.0, 3.6)
    axes.set_xlim(-1.6, 8.6)
    axes.set_ylim(-1.1, 4.0)
    for label, y in (("tokens", 3.4), ("slots", 2.3), ("rows", 0.3)):
        axes.text(-0.75, y, label, ha="right", va="center", color=INK, fontsize=11)
    for token in range(4):
        box(axes, 2 * token, 3.1, 1.75, f"token {token}", GREY)
        for choice in range(2):
            axes.plot([2 * token + 0.87, 2 * token + choice + 0.4], [3.1, 2.6], color=GREY, linewidth=1)
    for slot, (expert, row) in enumerate(zip(IDS.flatten().tolist(), plan.row_of_slot.tolist(), strict=True)):
        box(axes, slot, 2.0, 0.8, f"{slot}", EXPERTS[expert])
        axes.annotate(
            "", (row + 0.4, 0.62), (slot + 0.4, 1.98), arrowprops={"arrowstyle": "->", "color": EXPERTS[expert]}
        )
    assert plan.rows_per_expert is not None
    first = 0
    for expert, count in enumerate(plan.rows_per_expert.tolist()):
        axes.plot([first + 0.05, first + count - 0.25], [-0.25, -0.25], color=EXPERTS[expert], linewidth=3)
        axes.text(first + count / 2 - 0.1, -0.7, f"expert {expert}", ha="center", color=INK, fontsize=11)
        for row in range(first, first + count):
            box(axes, row, 0.0, 0.8, f"t{plan.token_of_row[row].item()}", EXPERTS[expert])
        first += count
    save(figure, "routing")


def box(axes: object, x: float, y: float, width: float, text: str, colour: str) -> None:
    """A filled box with a word in it."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, 0.6, facecolor=colour, edgecolor="none"))  # type: ignore[attr-defined]
    axes.text(x + width / 2, y + 0.28, text, ha="center", va="center", color="white", fontsize=11)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
