"""Router replay: a model that was sampled from is trained with the very experts that it chose while sampling.

    python examples/router_replay.py

The sampler and the trainer round differently, here bfloat16 beside float32, as an inference engine beside a training
framework. Some tokens are close to a tie: the trainer's own router sends them to other experts, and the probabilities
of the two differ by much more than rounding. The sampler records its choices; the trainer replays them. The weights of
the experts are still the trainer's, and its router gets gradients.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from moeroute.nn import MoE, RoutingRecord

HIDDEN, EXPERTS, LAYERS, BATCH = 64, 16, 4, (8, 64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.moe = MoE(HIDDEN, 2 * HIDDEN, EXPERTS, k=4, renormalize=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.15)

    def forward(
        self, x: Tensor, record: RoutingRecord, *, replay: bool = False, call: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The output, and the share of slots that the routers of this model choose as the record says."""
        agreed = torch.zeros(())
        for number, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            name, tokens = f"blocks.{number}", block.norm(x)
            ids = record.expert_ids(name, call, x.shape[:-1]) if replay else None
            output, routing = block.moe(tokens, expert_ids=ids, return_routing=True)
            if replay:
                own = block.moe.router(tokens.reshape(-1, HIDDEN))[0].expert_ids
                chosen = routing.gating.expert_ids
                agreed = agreed + (own[:, :, None] == chosen[:, None, :]).any(2).float().mean() / LAYERS
            else:
                record.append(name, routing, x.shape[:-1])
            x = x + output
        return x, agreed


def main() -> dict[str, float]:
    """Print, and return, how far the trainer is from the sampler, with and without the record."""
    torch.manual_seed(0)
    trainer = Model()
    sampler = Model()
    sampler.load_state_dict(trainer.state_dict())
    sampler.bfloat16().eval()
    x = torch.randn(*BATCH, HIDDEN)

    record = RoutingRecord()
    with torch.no_grad():
        sampled = sampler(x.bfloat16(), record)[0].float()
    with tempfile.TemporaryDirectory() as folder:  # as between two processes
        path = Path(folder) / "routing.pt"
        record.save(path)
        record = RoutingRecord.load(path)

    free, _ = trainer(x, RoutingRecord())
    replayed, agreed = trainer(x, record, replay=True)
    replayed.square().mean().backward()
    gradients = [p.grad for name, p in trainer.named_parameters() if name.endswith("router.weight")]
    assert all(g is not None and bool(g.isfinite().all()) and bool(g.any()) for g in gradients)

    found = {
        "same experts": agreed.item(),
        "difference, own choice": (free - sampled).abs().max().item(),
        "difference, replay": (replayed - sampled).abs().max().item(),
    }
    for name, value in found.items():
        print(f"{name:24} {value:.4f}")
    return found


if __name__ == "__main__":
    main()
