"""The router: logits of the tokens, and the choice of experts by `gating_topk`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moeroute import check
from moeroute.dispatch import Backend
from moeroute.dtypes import FLOATS, INTEGERS
from moeroute.nn.checks import HALVES, INITIAL_STD, check_backend, check_factory, check_positive, check_tokens
from moeroute.ops.gating.op import Gating, GroupScore, Score, gating_topk
from moeroute.ops.hash_routing import look_up_expert_ids
from moeroute.ops.router_product import router_product


class Router(nn.Module):
    """Logits in float32, whatever the dtype of tokens and weight and whatever autocast says; then the choice.

    ``torch.set_float32_matmul_precision`` does not reach them either, as no token is to change its experts for
    it: where it would cut the factors of the product, this one is computed in float64 and rounded once. On
    devices that are slow in float64, tokens and weights in bfloat16 avoid that, as there is nothing to cut.

    The options are those of `gating_topk`. With ``expert_bias=True`` the module has a buffer
    ``expert_bias`` [E], which counts for the selection only and starts at 0. It is float32 and stays so
    under ``.bfloat16()``, ``.half()``, ``.to(dtype)`` and ``load_state_dict(assign=True)``, since steps of 1e-3
    vanish in a half type. (What casts buffers in place, as FSDP1's ``buffer_dtype`` does, rounds it once; the
    next forward makes it float32 again.) After a step:

    >>> import torch, moeroute
    >>> from moeroute.nn import MoE
    >>> layer = MoE(16, 32, num_experts=8, k=2, score="sigmoid", expert_bias=True).bfloat16()
    >>> output, routing = layer(torch.randn(10, 16, dtype=torch.bfloat16), return_routing=True)
    >>> bias = layer.router.expert_bias
    >>> counts = routing.statistics().tokens_per_expert
    >>> bias.copy_(moeroute.update_expert_bias(bias, counts, rate=1e-3)).dtype
    torch.float32

    ``weight`` [E, hidden] starts as normal(0, 0.02). Beside the options of `gating_topk`:

    - ``bias=True``: a parameter ``bias`` [E], added to the logits; starts as 0
    - ``jitter``: in training, logits are those of the tokens times numbers drawn from 1 - jitter to 1 + jitter, one for
      each element; the experts get the tokens as they are
    - ``router_dtype``: None multiplies in float32. torch.float64: in float64, rounded once; torch.bfloat16 or
      torch.float16: in float32, then rounded to it, as models do whose gate has the dtype of its weights
    - ``hash_table`` [N, k], integers: the experts of each key, -1 for none. ``forward`` takes ``keys`` [T] (the input
      ids of the tokens, as a rule), and the logits only weigh the experts. A buffer; it is saved with the weights
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        k: int,
        *,
        score: Score = "softmax",
        expert_bias: bool = False,
        num_groups: int = 1,
        topk_groups: int | None = None,
        group_score: GroupScore | int = "max",
        renormalize: bool | None = None,
        scaling_factor: float = 1.0,
        eps: float = 1e-20,
        bias: bool = False,
        jitter: float = 0.0,
        router_dtype: torch.dtype | None = None,
        hash_table: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        check_positive("nn.Router", hidden_size=hidden_size, num_experts=num_experts)
        check_factory("nn.Router", device, dtype)
        check_backend("nn.Router", backend)
        check.flag("nn.Router", "expert_bias", expert_bias)
        check.flag("nn.Router", "bias", bias)
        check_router("nn.Router", k, jitter, router_dtype, hash_table)
        self.k = k
        self.score = score
        self.num_groups = num_groups
        self.topk_groups = topk_groups
        self.group_score = group_score
        self.renormalize = renormalize
        self.scaling_factor = scaling_factor
        self.eps = eps
        self.jitter = jitter
        self.router_dtype = router_dtype
        self.backend = backend
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if bias else None
        self.expert_bias: Tensor | None
        zeros = torch.zeros(num_experts, device=device, dtype=torch.float32) if expert_bias else None
        self.register_buffer("expert_bias", zeros)
        self.hash_table: Tensor | None
        self.register_buffer("hash_table", None if hash_table is None else hash_table.to(self.weight.device))
        # No tokens: the operator looks at the options only.
        self._choose(torch.empty(0, num_experts, dtype=torch.float32, device="cpu"), None, None, "reference")
        self._warn_of_constant_weights()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.expert_bias is not None:
            nn.init.zeros_(self.expert_bias)

    def forward(
        self, tokens: Tensor, expert_ids: Tensor | None = None, keys: Tensor | None = None
    ) -> tuple[Gating, Tensor]:
        """[T, hidden] to the choice and the float32 logits [T, E].

        With ``expert_ids`` [T, K] these are used (replay); else, with a ``hash_table``, those of the ``keys`` [T].
        """
        check_tokens("nn.Router", "tokens", tokens, "[T, H]", self.weight)
        if tokens.ndim != 2:
            raise check.wrong_shape("nn.Router", "tokens", f"[T, H] with H = {self.weight.shape[1]}", tokens)
        expert_ids = self._given_ids(tokens, expert_ids, keys)
        self._widen_bias()
        logits = self._logits(tokens)
        return self._choose(logits, self.expert_bias, expert_ids, self.backend), logits

    def _given_ids(self, tokens: Tensor, expert_ids: Tensor | None, keys: Tensor | None) -> Tensor | None:
        """The experts that are not to be selected: given, or looked up."""
        operator, num_tokens = "nn.Router", tokens.shape[0]
        if keys is not None and self.hash_table is None:
            raise check.wrong_value(operator, "keys", "None, as the router has no hash_table", "a tensor")
        if expert_ids is not None:
            check.tensor(operator, "expert_ids", expert_ids)
            if expert_ids.ndim != 2 or expert_ids.shape[0] != num_tokens or expert_ids.shape[1] < 1:
                wanted = f"[T, K] with T = {num_tokens}, as tokens, and K >= 1"
                raise check.wrong_shape(operator, "expert_ids", wanted, expert_ids)
            return expert_ids
        if self.hash_table is None:
            return None
        if keys is None:
            raise check.wrong_value(operator, "keys", "given, or expert_ids, as the router has a hash_table", None)
        check.tensor(operator, "keys", keys)
        if keys.ndim != 1 or keys.shape[0] != num_tokens:
            raise check.wrong_shape(operator, "keys", f"[T] with T = {num_tokens}, as tokens", keys)
        return look_up_expert_ids(keys, self.hash_table)

    def _logits(self, tokens: Tensor) -> Tensor:
        weight, bias, dtype = self.weight, self.bias, self.router_dtype
        if self.training and self.jitter:
            tokens = tokens * torch.empty_like(tokens).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        if dtype is torch.float64 and weight.dtype is not torch.float64:
            logits = router_product(tokens.double(), weight.double())
            return (logits if bias is None else logits + bias.double()).float()
        logits = router_product(tokens, weight)
        if bias is not None:
            logits = logits + bias.to(logits.dtype)
        return logits.to(dtype).to(logits.dtype) if dtype in HALVES else logits

    def probabilities(self, gating: Gating, logits: Tensor) -> Tensor:
        """[T, E] for the balance loss, rows that sum to 1: softmax, or the scores divided by their sum."""
        if not isinstance(gating, Gating):
            raise check.wrong_type("nn.Router", "gating", "a moeroute.Gating", gating)
        check.tensor("nn.Router", "logits", logits)
        if logits.shape != gating.scores.shape:
            wanted = f"{list(gating.scores.shape)}, as gating.scores"
            raise check.wrong_shape("nn.Router", "logits", wanted, logits)
        if not logits.is_floating_point():
            raise check.wrong_dtype("nn.Router", "logits", "of a floating-point dtype", logits)
        if self.score == "softmax":
            return gating.scores
        if self.score in ("topk_softmax", "none"):
            return logits.softmax(dim=-1)
        scores = logits.sigmoid() if self.score == "topk_sigmoid" else gating.scores
        return scores / (scores.sum(dim=-1, keepdim=True) + self.eps)

    def extra_repr(self) -> str:
        num_experts, hidden_size = self.weight.shape
        bias = self.expert_bias is not None
        return f"{hidden_size}, {num_experts}, k={self.k}, score={self.score!r}, expert_bias={bias}"

    def _choose(
        self, logits: Tensor, bias: Tensor | None, expert_ids: Tensor | None, backend: Backend | None
    ) -> Gating:
        return gating_topk(
            logits,
            self.k if expert_ids is None else expert_ids.shape[-1],
            score=self.score,
            bias=bias,
            num_groups=self.num_groups,
            topk_groups=self.topk_groups,
            group_score=self.group_score,
            renormalize=self.renormalize,
            scaling_factor=self.scaling_factor,
            eps=self.eps,
            expert_ids=expert_ids,
            backend=backend,
        )

    def _warn_of_constant_weights(self) -> None:
        renormalize = self.renormalize
        if renormalize is None:
            renormalize = self.score in ("sigmoid", "sqrtsoftplus")
        if self.k == 1 and (self.score == "topk_softmax" or renormalize):
            how = "score='topk_softmax'" if self.score == "topk_softmax" else "renormalize=True"
            warnings.warn(
                f"moeroute.nn.Router: with k=1 and {how} the weight is the constant 1, so the router gets no"
                " gradient from the output; use score='softmax' with renormalize=False",
                stacklevel=3,
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        before = self.expert_bias
        super()._apply(fn, recurse)
        after = self.expert_bias
        if before is not None and after is not None and after.dtype in HALVES:
            # From the old values: the new ones are rounded already.
            self.expert_bias = before.to(after.device)
        return self

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        self._widen_bias()  # assign=True takes what it is given

    def _widen_bias(self) -> None:
        if self.expert_bias is not None and self.expert_bias.dtype in HALVES:
            self.expert_bias = self.expert_bias.float()


def check_router(operator: str, k: int, jitter: float, router_dtype: Any, hash_table: Any) -> None:
    """The options that `Router` and `MoE` have in common."""
    check.number(operator, "jitter", jitter)
    if not 0 <= jitter < 1:
        raise check.wrong_value(operator, "jitter", "at least 0 and below 1", jitter)
    if router_dtype is not None:
        check.float_dtype(operator, "router_dtype", router_dtype, FLOATS)
    if hash_table is not None:
        check.tensor(operator, "hash_table", hash_table)
        if hash_table.ndim != 2 or hash_table.shape[1] != k:
            raise check.wrong_shape(operator, "hash_table", f"[N, k] with k = {k}", hash_table)
        if hash_table.dtype not in INTEGERS:
            raise check.wrong_dtype(operator, "hash_table", "of an integer dtype", hash_table)
