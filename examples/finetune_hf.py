"""Fine-tune a Hugging Face model with the layers of this package in the place of its own, and give it back.

    python examples/finetune_hf.py        # needs transformers 5.24

Every Mixture-of-Experts block of the model becomes a `moeroute.nn.MoE` with the same weights and, within rounding, the
same outputs. It is trained with a balance loss and a summary of each step, and the weights then go back under the
model's own names, so that what is saved is a checkpoint of the model as any other. The model is tiny and random; a real
one goes through the same lines.
"""

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moeroute.nn import MoE, Routing

BALANCE, STEPS = 1e-2, 20


class Block(nn.Module):
    """A layer as the model calls its block; the routing of a call goes to whoever collects it."""

    def __init__(self, layer: MoE, routings: list[Routing]) -> None:
        super().__init__()
        self.layer = layer
        self.routings = routings

    def forward(self, hidden_states: Tensor) -> Tensor:
        output, routing = self.layer(hidden_states, return_routing=True)
        self.routings.append(routing)
        return output


def tiny_model() -> Any:
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def exchange(model: Any, routings: list[Routing]) -> dict[str, Block]:
    """Put our layers into the model; returns them by the names of the blocks."""
    config, blocks = model.config, {}
    names = [name for name, module in model.named_modules() if type(module).__name__ == "Qwen3MoeSparseMoeBlock"]
    for name in names:
        layer = MoE(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            config.num_experts_per_tok,
            renormalize=config.norm_topk_prob,
            recompute="activation",
        )
        layer.load_huggingface(model.state_dict(), f"{name}.")
        blocks[name] = Block(layer, routings)
    for name, block in blocks.items():
        model.set_submodule(name, block)
    return blocks


def main() -> dict[str, float]:
    """Print a line for some of the steps; returns the first and last loss and the largest differences of logits."""
    torch.manual_seed(0)
    model = tiny_model()
    ids = torch.randint(2, 64, (4, 1)) + torch.arange(24)  # sequences to be learned: each next id is one more
    ids = ids % 62 + 2
    routings: list[Routing] = []
    with torch.no_grad():
        before = model(ids).logits
        blocks = exchange(model, routings)
        exchanged = (model(ids).logits - before).abs().max().item()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        routings.clear()
        logits = model(ids).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        balance = torch.stack([routing.statistics().loss() for routing in routings]).mean()
        optimizer.zero_grad()
        (loss + BALANCE * balance).backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 5 == 0 or step == STEPS - 1:
            summary = routings[0].summary()
            print(
                f"step {step:2}   loss {loss.item():.4f}   balance {balance.item():.4f}   busiest expert "
                f"{summary.imbalance:.2f} times the mean   experts without tokens {summary.dead_experts}"
            )

    state = {name: value for name, value in model.state_dict().items() if ".layer." not in name}
    for name, block in blocks.items():
        state |= block.layer.huggingface_state_dict("qwen3_moe", f"{name}.")
    theirs = tiny_model()
    theirs.load_state_dict(state)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        theirs.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        given_back = (loaded(ids).logits - model(ids).logits).abs().max().item()
    print(f"logits differ by {exchanged:.1e} after the exchange, by {given_back:.1e} in the model loaded again")
    return {"first": losses[0], "last": losses[-1], "exchanged": exchanged, "given back": given_back}


if __name__ == "__main__":
    main()
