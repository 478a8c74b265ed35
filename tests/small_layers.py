"""Small layers, and the loop over single tokens that says what they must give."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moeroute.nn import MoE

HIDDEN, INTERMEDIATE, EXPERTS, K = 6, 5, 4, 2
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def make_layer(dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> MoE:
    """A small layer whose weights are large enough to matter."""
    torch.manual_seed(seed)
    layer = MoE(HIDDEN, INTERMEDIATE, EXPERTS, **{"k": K, **options}).to(torch.float64)
    for weight in layer.parameters():
        nn.init.normal_(weight, std=0.7)
    return layer.to(dtype)


def make_input(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def naive_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (gate_up @ x).chunk(2)
    return down @ (gate * torch.sigmoid(gate) * up)


def naive_layer(
    weights: dict[str, Tensor],
    x: Tensor,
    expert_ids: Tensor,
    score: str,
    renormalize: bool,
    scaling_factor: float = 1.0,
) -> Tensor:
    """One token after the other, in the dtype of the weights; expert_ids [T, K] from elsewhere, -1 skipped."""
    outputs = []
    for t in range(x.shape[0]):
        logits = weights["router.weight"] @ x[t]
        chosen = [int(e) for e in expert_ids[t] if e >= 0]
        if score == "softmax":
            scores = logits.exp() / logits.exp().sum()
        elif score == "topk_softmax":
            scores = logits.exp() / sum(logits[e].exp() for e in chosen)
        elif score == "sigmoid":
            scores = 1 / (1 + (-logits).exp())
        else:
            scores = (1 + logits.exp()).log().sqrt()
        total = sum(scores[e] for e in chosen) if renormalize else 1.0
        output = torch.zeros_like(x[t])
        for e in chosen:
            row = naive_mlp(x[t], weights["experts.gate_up_proj"][e], weights["experts.down_proj"][e])
            output = output + scaling_factor * scores[e] / total * row
        if "shared_expert.gate_up_proj.weight" in weights:
            shared = weights["shared_expert.gate_up_proj.weight"], weights["shared_expert.down_proj.weight"]
            output = output + naive_mlp(x[t], *shared)
        outputs.append(output)
    return torch.stack(outputs)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    """Relative to the largest expected value; small ones beside it are differences of large ones."""
    scale = float(expected.detach().abs().max())
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        actual.double() / scale, expected / scale, rtol=0, atol=tolerance, msg=lambda m: f"{what}: {m}"
    )


class Watch(TorchDispatchMode):
    """Storage sizes of what operators return, in bytes; views and in-place results are not new."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            a.untyped_storage().data_ptr()
            for a in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(a, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.fresh.append(tensor.untyped_storage().nbytes())
        return result
