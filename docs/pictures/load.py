"""Draws load.svg: the share of each of four experts while a small layer learns, without and with a balance loss."""

import torch
from torch import Tensor

from drawing import BLUE, GREY, ORANGE, TEAL, chart, save
from moeroute.nn import MoE

STEPS, EXPERTS = 80, 4


def shares(coefficient: float) -> Tensor:
    """[steps, E] of a layer that learns inputs of which most look alike."""
    torch.manual_seed(0)
    layer = MoE(16, 32, EXPERTS, k=1)
    x = torch.randn(16) + 0.5 * torch.randn(256, 16)
    target = torch.randn(256, 16)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    found = []
    for _ in range(STEPS):
        output, routing = layer(x, return_routing=True)
        statistics = routing.statistics()
        found.append(statistics.tokens_per_expert / 256)
        loss = (output - target).square().mean() + coefficient * statistics.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.stack(found)


def main() -> None:
    """Two charts beside each other, with the same axes."""
    torch.set_num_threads(1)
    figure, charts = chart(8.0, 2.8, columns=2)
    for axes, coefficient in zip(charts, (0.0, 1e-1), strict=True):
        axes.set_title("no balance loss" if coefficient == 0 else f"{coefficient:g} · balance loss", fontsize=11)
        for expert, (share, colour) in enumerate(zip(shares(coefficient).T, (BLUE, ORANGE, TEAL, GREY), strict=True)):
            axes.plot([round(v, 2) for v in share.tolist()], color=colour, linewidth=1.5, label=f"expert {expert}")
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("step")
    charts[0].set_ylabel("share of the tokens")
    charts[1].legend(frameon=False, fontsize=9)
    save(figure, "load")


if __name__ == "__main__":
    main()
