"""Draws capacity.svg: which slots of three experts a capacity of two keeps, by each order of dropping."""

import torch

import moeroute
from drawing import BLUE, GREY, INK, ORANGE, TEAL, canvas, save
from routing import box

IDS = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 2], [1, 0]])
WEIGHTS = torch.tensor([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1], [0.9, 0.1]])
EXPERTS = (BLUE, ORANGE, TEAL)


def main() -> None:
    """A line for each order; a slot that is dropped is grey."""
    orders = {"position": {}, "weight": {"drop": "weight", "weights": WEIGHTS}, "choice": {"drop": "choice"}}
    figure, axes = canvas(8.0, 2.8)
    axes.set_xlim(-1.8, 10.2)
    axes.set_ylim(-0.6, 4.0)
    for token in range(5):
        axes.text(2 * token + 0.9, 3.5, f"token {token}", ha="center", color=INK, fontsize=11)
    for line, (name, options) in enumerate(orders.items()):
        y = 2.5 - 1.1 * line
        plan = moeroute.plan_from_expert_ids(IDS, num_experts=3, capacity=2, **options)  # type: ignore[arg-type]
        axes.text(-0.25, y + 0.28, name, ha="right", va="center", color=INK, fontsize=11)
        for slot, (expert, row) in enumerate(zip(IDS.flatten().tolist(), plan.row_of_slot.tolist(), strict=True)):
            box(axes, slot, y, 0.8, f"e{expert}", EXPERTS[expert] if row >= 0 else GREY + "66")
    axes.text(-0.25, -0.45, "grey: dropped", ha="right", color=INK, fontsize=10)
    save(figure, "capacity")


if __name__ == "__main__":
    main()
