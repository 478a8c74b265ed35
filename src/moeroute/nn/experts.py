"""The experts: two products with an activation between them, over rows that are grouped by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moeroute import check
from moeroute.dispatch import Backend
from moeroute.dtypes import FLOATS
from moeroute.nn.checks import INITIAL_STD, check_backend, check_dtype, check_factory, check_positive, check_tokens
from moeroute.ops.activations.op import ACTIVATIONS, Activation, activate
from moeroute.ops.experts import by_ends, check_sizes, grouped_linear
from moeroute.ops.recomputed import activated_linear, spread_linear
from moeroute.ops.router_product import BLOCK
from moeroute.plan import RoutingPlan

Recompute = Literal["activation", "permute", "both"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


def check_experts(operator: str, activation: Activation, interleaved: bool, bias: bool, recompute: object) -> None:
    """The options that `Experts` and `MoE` have in common."""
    check.one_of(operator, "activation", activation, ACTIVATIONS)
    check.flag(operator, "interleaved", interleaved)
    check.flag(operator, "bias", bias)
    if interleaved and activation == "relu2":
        raise check.wrong_value(operator, "interleaved", "False with activation='relu2', which has no gate", True)
    if recompute is not None:
        check.one_of(operator, "recompute", recompute, RECOMPUTE)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), the dense MLP of the experts' kind; for the shared expert.

    Fewer than 64 tokens are multiplied together with zeros, so that a token's bits do not depend on its batch.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive("nn.SwiGLU", hidden_size=hidden_size, intermediate_size=intermediate_size)
        check_factory("nn.SwiGLU", device, dtype)
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up_proj.weight, std=INITIAL_STD)
        nn.init.normal_(self.down_proj.weight, std=INITIAL_STD)

    def forward(self, x: Tensor) -> Tensor:
        if type(self.gate_up_proj) is nn.Linear:  # what replaced it (quantised, adapted) has weights of its own kind
            weight = self.gate_up_proj.weight
            check_tokens("nn.SwiGLU", "x", x, "[..., H]", weight)
            check_dtype("nn.SwiGLU", "x", x, weight)
        rows = x.reshape(-1, x.shape[-1])
        count = rows.shape[0]
        if 0 < count < BLOCK:  # products of few rows give a row other bits
            rows = F.pad(rows, (0, 0, 0, BLOCK - count))
        result: Tensor = self.down_proj(activate(self.gate_up_proj(rows)))
        return result[:count].reshape(*x.shape[:-1], result.shape[-1])


class Experts(nn.Module):
    """The experts, each down(act(gate(x)) * up(x)), over rows that are grouped by expert.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: I, of each expert.
        activation: see `activate`. "relu2" has no gate: each expert is down(relu(up(x)) ** 2).
        interleaved: gate and up are the even and the odd rows of ``gate_up_proj``, as in gpt-oss, not its halves.
        bias: of both products.
        recompute: what backward computes again instead of keeping it. "activation": the activation's result [R, I],
            for one more pass of it. "permute" and "both" are the layer's, which has the tokens.
        device: of the parameters.
        dtype: of the parameters.
        backend: of the activation.

    Parameters, with the names and the order of Hugging Face's expert modules:

    - ``gate_up_proj`` [E, 2 * intermediate, hidden]: gate, then up; for "relu2" [E, intermediate, hidden]
    - ``down_proj`` [E, hidden, intermediate]
    - ``gate_up_proj_bias`` [E, 2 * intermediate] and ``down_proj_bias`` [E, hidden], or None

    Weights start as normal(0, 0.02), the Hugging Face default, biases as 0.
    """

    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = "swiglu",
        interleaved: bool = False,
        bias: bool = False,
        recompute: Recompute | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        operator = "nn.Experts"
        sizes = {"num_experts": num_experts, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
        check_positive(operator, **sizes)
        check_factory(operator, device, dtype)
        check_backend(operator, backend)
        check_experts(operator, activation, interleaved, bias, recompute)
        self.activation: Activation = activation
        self.interleaved = interleaved
        self.recompute = recompute
        self.backend = backend

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        width = intermediate_size if activation == "relu2" else 2 * intermediate_size
        self.gate_up_proj = parameter(width, hidden_size)
        self.down_proj = parameter(hidden_size, intermediate_size)
        self.register_parameter("gate_up_proj_bias", parameter(width) if bias else None)
        self.register_parameter("down_proj_bias", parameter(hidden_size) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up_proj, std=INITIAL_STD)
        nn.init.normal_(self.down_proj, std=INITIAL_STD)
        for bias in (self.gate_up_proj_bias, self.down_proj_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, rows: Tensor, rows_per_expert: Tensor | Sequence[int]) -> Tensor:
        """[R, hidden] to [R, hidden]; rows beyond ``sum(rows_per_expert)`` come out as 0."""
        operator = "nn.Experts"
        check.tensor(operator, "rows", rows)
        if rows.ndim != 2 or rows.shape[1] != self.down_proj.shape[1]:
            raise check.wrong_shape(operator, "rows", f"[R, H] with H = {self.down_proj.shape[1]}", rows)
        if rows.dtype in FLOATS:
            check_dtype(operator, "rows", rows, self.gate_up_proj)
        sizes = self._fetched(check_sizes(operator, "rows_per_expert", rows_per_expert, rows.shape[0]), rows)
        return self._second(grouped_linear(rows, self.gate_up_proj, sizes, self.gate_up_proj_bias), sizes)

    def of_tokens(self, tokens: Tensor, plan: RoutingPlan, slot_weights: Tensor | None = None) -> Tensor:
        """``forward(permute(tokens, plan, weights), plan.rows_per_expert)``; keeps the tokens, not their rows."""
        assert plan.rows_per_expert is not None  # noqa: S101 - for the type checker
        sizes = self._fetched(plan.rows_per_expert, tokens)
        weight, bias = self.gate_up_proj, self.gate_up_proj_bias
        return self._second(spread_linear(tokens, slot_weights, plan, weight, sizes, bias, backend=self.backend), sizes)

    def _second(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """The activation and the second product."""
        options = {"activation": self.activation, "interleaved": self.interleaved, "backend": self.backend}
        if self.recompute in ("activation", "both"):
            return activated_linear(rows, self.down_proj, sizes, self.down_proj_bias, **options)  # type: ignore[arg-type]
        return grouped_linear(activate(rows, **options), self.down_proj, sizes, self.down_proj_bias)  # type: ignore[arg-type]

    def _fetched(self, sizes: Tensor, rows: Tensor) -> Tensor:
        """Sizes on the CPU where a product reads them there: once, not in each of the products."""
        if not sizes.is_meta and not by_ends(sizes, rows, *self.gate_up_proj.shape[1:], self.down_proj.shape[2]):
            return sizes.cpu()
        return sizes

    def extra_repr(self) -> str:
        num_experts, hidden_size, intermediate_size = self.down_proj.shape
        words = f"{num_experts}, {hidden_size}, {intermediate_size}"
        words += "" if self.activation == "swiglu" else f", activation={self.activation!r}"
        return words + "".join(
            f", {name}"
            for name, value in (
                ("interleaved=True", self.interleaved),
                ("bias=True", self.gate_up_proj_bias is not None),
                (f"recompute={self.recompute!r}", self.recompute),
            )
            if value
        )
