"""Train the small Qwen3-MoE for Ascend, and the same model in plain torch beside it.

On a machine without an NPU, from the repository's root:

    python -m moeroute.interop.torch_npu examples/ascend/train.py --steps 60 --out out/ascend

Writes loss.csv (step, ascend, plain) and, where matplotlib is installed, loss.png, and prints the largest relative
difference of the two losses.
"""

import argparse
import copy
import csv
import pydoc_data.topics
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_npu  # noqa: F401 - as every script for Ascend begins
from plain import in_plain_torch
from qwen3_moe import Config, Qwen3MoE
from torch import Tensor

DEVICE = "npu:0"


def corpus() -> Tensor:
    """Bytes of real text: the chapters of Python's own language reference."""
    topics = pydoc_data.topics.topics
    return torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def losses_of(model: Qwen3MoE, text: Tensor, steps: int, batch: int, context: int) -> list[float]:
    """The loss of every step, with batches and order that depend on the step alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - context - 1, (batch,), generator=generator).tolist()
        pieces = torch.stack([text[start : start + context + 1] for start in starts]).long().to(DEVICE)
        logits = model(pieces[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def draw(ascend_losses: list[float], plain_losses: list[float], path: Path) -> None:
    """Both curves; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per byte)", title="A small Qwen3-MoE on a CPU")
    axes.plot(ascend_losses, linewidth=4, alpha=0.4, label="written for torch_npu")
    axes.plot(plain_losses, linewidth=1, color="black", label="plain torch")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Both models, the table and the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("out/ascend"))
    arguments = parser.parse_args()
    torch.npu.set_device(0)
    torch.npu.manual_seed(0)
    model = Qwen3MoE(Config()).to(DEVICE)
    plain = in_plain_torch(copy.deepcopy(model))
    text = corpus()
    sizes = arguments.steps, arguments.batch, arguments.context
    ascend_losses, plain_losses = losses_of(model, text, *sizes), losses_of(plain, text, *sizes)
    torch.npu.synchronize()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with open(arguments.out / "loss.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "ascend", "plain"))
        for step, (one, other) in enumerate(zip(ascend_losses, plain_losses, strict=True)):
            writer.writerow((step, f"{one:.7f}", f"{other:.7f}"))
            if step % 10 == 0 or step == arguments.steps - 1:
                print(f"step {step:4d}   torch_npu {one:.5f}   plain torch {other:.5f}")
    draw(ascend_losses, plain_losses, arguments.out / "loss.png")
    worst = max(abs(one - other) / other for one, other in zip(ascend_losses, plain_losses, strict=True))
    print(f"largest relative difference of the losses: {worst:.1e}")


if __name__ == "__main__":
    main()
