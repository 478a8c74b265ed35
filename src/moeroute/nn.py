"""A Mixture-of-Experts layer for training: router, routing by this package's operators, SwiGLU experts.

>>> import torch
>>> from moeroute.nn import MoE, SwiGLU
>>> _ = torch.manual_seed(0)
>>> layer = MoE(hidden_size=16, intermediate_size=32, num_experts=8, k=2, shared_expert=SwiGLU(16, 32))
>>> x = torch.randn(4, 5, 16)
>>> output, routing = layer(x, return_routing=True)
>>> output.shape, routing.gating.weights.shape, int(routing.plan.tokens_per_expert.sum())
(torch.Size([4, 5, 16]), torch.Size([20, 2]), 40)
>>> loss = output.square().mean() + 1e-2 * routing.statistics().loss() + 1e-3 * routing.z_loss()
>>> loss.backward()

The layer keeps no counters and no "last" anything: what a step wants to know about its routing comes
back as a value. So recomputation (activation checkpointing) cannot count a token twice, and two
threads cannot mix up their batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, Literal, NamedTuple, get_args, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moeroute import check, dispatch
from moeroute.dispatch import Backend
from moeroute.dtypes import FLOATS, LARGEST
from moeroute.ops.activations.op import activate as activate
from moeroute.ops.balance import BalanceStatistics, balance_statistics, router_z_loss
from moeroute.ops.experts import autocast_is_on, by_ends, check_sizes
from moeroute.ops.experts import grouped_linear as grouped_linear
from moeroute.ops.gating.op import Gating, GroupScore, Score, gating_topk
from moeroute.ops.planning.common import DropOfIds
from moeroute.ops.planning.op import capacity_from_ratio, plan_from_expert_ids
from moeroute.ops.router_product import router_product
from moeroute.permutation import permute, unpermute
from moeroute.plan import RoutingPlan

INITIAL_STD = 0.02
HALVES = (torch.float16, torch.bfloat16)


def _check_sizes(operator: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        check.integer(operator, name, size, minimum=1)
        check.integer(operator, name, size, maximum=LARGEST)


def _check_factory(operator: str, device: Any, dtype: Any) -> None:
    """Where parameters are to live, and their dtype."""
    if dtype is not None:
        check.float_dtype(operator, "dtype", dtype, FLOATS)
    if device is None:
        return
    if not isinstance(device, torch.device | str | int) or isinstance(device, bool):
        raise check.wrong_type(operator, "device", "a torch.device, a str, an int or None", device)
    try:
        torch.device(device)
    except (RuntimeError, ValueError) as error:
        raise check.wrong_value(operator, "device", "one that torch knows", repr(device)) from error


def _check_backend(operator: str, backend: Any) -> None:
    """A name, and only that: the layer may yet move to another device."""
    if backend is not None:
        check.one_of(operator, "backend", backend, dispatch.NAMES)


def _check_dtype(operator: str, argument: str, tokens: Tensor, weight: Tensor) -> None:
    """That of the weight, where autocast does not bring them together."""
    if tokens.dtype is not weight.dtype and (
        torch.float64 in (tokens.dtype, weight.dtype) or not autocast_is_on(tokens.device.type)
    ):
        raise check.wrong_dtype(operator, argument, f"{weight.dtype}, as the layer's weights", tokens)


def _check_tokens(operator: str, argument: str, tokens: Any, wanted: str, weight: Tensor) -> None:
    """A dense floating tensor on the weight's device, as wide as the weight [.., H]."""
    check.tensor(operator, argument, tokens)
    if tokens.dtype not in FLOATS:
        raise check.wrong_dtype(operator, argument, "float16, bfloat16, float32 or float64", tokens)
    if tokens.ndim == 0 or tokens.shape[-1] != weight.shape[1]:
        raise check.wrong_shape(operator, argument, f"{wanted} with H = {weight.shape[1]}", tokens)
    check.same_device(operator, "the layer's weights", weight, argument, tokens)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), the dense MLP of the experts' kind; for the shared expert."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes("nn.SwiGLU", hidden_size=hidden_size, intermediate_size=intermediate_size)
        _check_factory("nn.SwiGLU", device, dtype)
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up_proj.weight, std=INITIAL_STD)
        nn.init.normal_(self.down_proj.weight, std=INITIAL_STD)

    def forward(self, x: Tensor) -> Tensor:
        if type(self.gate_up_proj) is nn.Linear:  # what replaced it (quantised, adapted) has weights of its own kind
            weight = self.gate_up_proj.weight
            _check_tokens("nn.SwiGLU", "x", x, "[..., H]", weight)
            _check_dtype("nn.SwiGLU", "x", x, weight)
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        result: Tensor = self.down_proj(F.silu(gate) * up)
        return result


class Experts(nn.Module):
    """The experts, each down(silu(gate(x)) * up(x)), over rows that are grouped by expert.

    Parameters, with the names and the order of Hugging Face's expert modules:

    - ``gate_up_proj`` [E, 2 * intermediate, hidden]: gate, then up
    - ``down_proj`` [E, hidden, intermediate]

    Both start as normal(0, 0.02), the Hugging Face default.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"num_experts": num_experts, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
        _check_sizes("nn.Experts", **sizes)
        _check_factory("nn.Experts", device, dtype)
        shape = num_experts, 2 * intermediate_size, hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        shape = num_experts, hidden_size, intermediate_size
        self.down_proj = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up_proj, std=INITIAL_STD)
        nn.init.normal_(self.down_proj, std=INITIAL_STD)

    def forward(self, rows: Tensor, rows_per_expert: Tensor | Sequence[int]) -> Tensor:
        """[R, hidden] to [R, hidden]; rows beyond ``sum(rows_per_expert)`` come out as 0."""
        operator = "nn.Experts"
        check.tensor(operator, "rows", rows)
        if rows.ndim != 2 or rows.shape[1] != self.down_proj.shape[1]:
            raise check.wrong_shape(operator, "rows", f"[R, H] with H = {self.down_proj.shape[1]}", rows)
        if rows.dtype in FLOATS:
            _check_dtype(operator, "rows", rows, self.gate_up_proj)
        rows_per_expert = check_sizes(operator, "rows_per_expert", rows_per_expert, rows.shape[0])
        if not rows_per_expert.is_meta and not by_ends(rows_per_expert, rows, *self.down_proj.shape[1:]):
            rows_per_expert = rows_per_expert.cpu()  # once, not in each of the products
        gate, up = grouped_linear(rows, self.gate_up_proj, rows_per_expert).chunk(2, dim=-1)
        return grouped_linear(F.silu(gate) * up, self.down_proj, rows_per_expert)

    def extra_repr(self) -> str:
        num_experts, hidden_size, intermediate_size = self.down_proj.shape
        return f"{num_experts}, {hidden_size}, {intermediate_size}"


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

    ``weight`` [E, hidden] starts as normal(0, 0.02).
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        _check_sizes("nn.Router", hidden_size=hidden_size, num_experts=num_experts)
        _check_factory("nn.Router", device, dtype)
        _check_backend("nn.Router", backend)
        check.flag("nn.Router", "expert_bias", expert_bias)
        self.k = k
        self.score = score
        self.num_groups = num_groups
        self.topk_groups = topk_groups
        self.group_score = group_score
        self.renormalize = renormalize
        self.scaling_factor = scaling_factor
        self.eps = eps
        self.backend = backend
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.expert_bias: Tensor | None
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32) if expert_bias else None
        self.register_buffer("expert_bias", bias)
        # No tokens: the operator looks at the options only.
        self._choose(torch.empty(0, num_experts, dtype=torch.float32, device="cpu"), None, None, "reference")
        self._warn_of_constant_weights()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)
        if self.expert_bias is not None:
            nn.init.zeros_(self.expert_bias)

    def forward(self, tokens: Tensor, expert_ids: Tensor | None = None) -> tuple[Gating, Tensor]:
        """[T, hidden] to the choice and the float32 logits [T, E]; with ``expert_ids`` these are used (replay)."""
        _check_tokens("nn.Router", "tokens", tokens, "[T, H]", self.weight)
        if tokens.ndim != 2:
            raise check.wrong_shape("nn.Router", "tokens", f"[T, H] with H = {self.weight.shape[1]}", tokens)
        if expert_ids is not None:
            check.tensor("nn.Router", "expert_ids", expert_ids)
            if expert_ids.ndim != 2 or expert_ids.shape[0] != tokens.shape[0] or expert_ids.shape[1] < 1:
                wanted = f"[T, K] with T = {tokens.shape[0]}, as tokens, and K >= 1"
                raise check.wrong_shape("nn.Router", "expert_ids", wanted, expert_ids)
        self._widen_bias()
        logits = router_product(tokens, self.weight)
        return self._choose(logits, self.expert_bias, expert_ids, self.backend), logits

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


class Routing(NamedTuple):
    """What a forward pass decided; plain values, nothing of it is kept in the layer.

    - ``gating``: weights [T, K], expert_ids [T, K] (padding tokens included), scores [T, E]
    - ``plan``: where each slot's copy went, after padding tokens and slots over capacity were left out
    - ``logits``: float32 [T, E]
    - ``probabilities``: [T, E], rows that sum to 1, for the balance loss
    - ``padding_mask``: [T] bool or None, as given
    """

    gating: Gating
    plan: RoutingPlan
    logits: Tensor
    probabilities: Tensor
    padding_mask: Tensor | None

    def statistics(self) -> BalanceStatistics:
        """What the router wanted, before capacity and without padding; ``.loss()`` is the balance loss."""
        return balance_statistics(self.probabilities, self.gating.expert_ids, padding_mask=self.padding_mask)

    def z_loss(self) -> Tensor:
        """`router_z_loss` of the logits."""
        return router_z_loss(self.logits, padding_mask=self.padding_mask)


class MoE(nn.Module):
    """Router, `num_experts` SwiGLU experts of which each token takes `k`, and maybe a shared expert.

    Args:
        hidden_size: H.
        intermediate_size: of each expert.
        num_experts: E.
        k: experts per token.
        score: see `gating_topk`.
        expert_bias: see `Router`.
        num_groups: see `gating_topk`.
        topk_groups: see `gating_topk`.
        group_score: see `gating_topk`.
        renormalize: see `gating_topk`.
        scaling_factor: see `gating_topk`.
        eps: see `gating_topk`.
        capacity_factor: an expert takes at most ceil(T * k * factor / num_experts) slots of a call with T tokens
            (padding included); those over it are dropped, their share of the output is 0. None: no limit.
        drop: which slots are dropped: "position" (the last tokens), "weight" (the smallest weights) or "choice" (the
            last choices of the tokens, of those the last tokens, as GShard: no second choice takes the place of a
            first one).
        align: rows of each expert are padded with zeros to a multiple of it.
        shared_expert: a module [T, hidden] -> [T, hidden] whose output is added, `SwiGLU` for instance.
        device: of the parameters (not of ``shared_expert``, which comes built).
        dtype: of the parameters.
        backend: of the routing operators.

    Weights start as normal(0, 0.02), the Hugging Face default. The rows per expert are read
    back once a call. Without ``capacity_factor``, ``align`` and ``padding_mask`` nothing else is.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
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
        capacity_factor: float | None = None,
        drop: DropOfIds = "position",
        align: int = 1,
        shared_expert: nn.Module | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        if capacity_factor is not None:
            check.number("nn.MoE", "capacity_factor", capacity_factor)
            if capacity_factor < 0:
                raise check.wrong_value("nn.MoE", "capacity_factor", "at least 0", capacity_factor)
        check.one_of("nn.MoE", "drop", drop, get_args(DropOfIds))
        _check_sizes("nn.MoE", align=align)
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_experts": num_experts}
        _check_sizes("nn.MoE", **sizes)
        _check_factory("nn.MoE", device, dtype)
        _check_backend("nn.MoE", backend)
        if shared_expert is not None and not isinstance(shared_expert, nn.Module):
            raise check.wrong_type("nn.MoE", "shared_expert", "a torch.nn.Module or None", shared_expert)
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor
        # A factor of num_experts is no limit any more; a larger one could overflow.
        self._capacity_ratio = Fraction(str(min(capacity_factor or 0, num_experts))).as_integer_ratio()
        self.drop = drop
        self.align = align
        self.backend = backend
        self.router = Router(
            hidden_size,
            num_experts,
            k,
            score=score,
            expert_bias=expert_bias,
            num_groups=num_groups,
            topk_groups=topk_groups,
            group_score=group_score,
            renormalize=renormalize,
            scaling_factor=scaling_factor,
            eps=eps,
            device=device,
            dtype=dtype,
            backend=backend,
        )
        self.experts = Experts(num_experts, hidden_size, intermediate_size, device=device, dtype=dtype)
        self.shared_expert = shared_expert

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        padding_mask: Tensor | None = ...,
        expert_ids: Tensor | None = ...,
        return_routing: Literal[False] = ...,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        x: Tensor,
        *,
        padding_mask: Tensor | None = ...,
        expert_ids: Tensor | None = ...,
        return_routing: Literal[True],
    ) -> tuple[Tensor, Routing]: ...
    def forward(
        self,
        x: Tensor,
        *,
        padding_mask: Tensor | None = None,
        expert_ids: Tensor | None = None,
        return_routing: bool = False,
    ) -> Tensor | tuple[Tensor, Routing]:
        """[..., hidden] to [..., hidden].

        Args:
            x: [..., hidden]; never changed.
            padding_mask: [...] bool, True = padding: such a token takes no row and no capacity. The layer sees 0
                in its place and gives it 0, so whatever it holds, a NaN included, reaches no gradient.
            expert_ids: [..., K], experts to use instead of a selection (replay).
            return_routing: return ``(output, routing)`` with a `Routing`. Under activation checkpointing
                use ``use_reentrant=False``: the reentrant kind cuts the gradients of whatever is not a
                plain tensor (or compute the losses inside the checkpointed function).

        Under autocast the output has autocast's dtype, as that of `torch.nn.Linear`.
        """
        padding_mask, expert_ids = self._check(x, padding_mask, expert_ids)
        check.flag("nn.MoE", "return_routing", return_routing)
        tokens = x.reshape(-1, x.shape[-1])
        if padding_mask is not None:
            # In the products of the weights' gradients 0 times a NaN would be a NaN.
            tokens = tokens.masked_fill(padding_mask[:, None], 0)
        gating, logits = self.router(tokens, expert_ids)
        live_ids = gating.expert_ids
        if padding_mask is not None:
            # Before the plan, so that padding takes no capacity.
            live_ids = live_ids.masked_fill(padding_mask[:, None], -1)
        plan = plan_from_expert_ids(
            live_ids,
            self.num_experts,
            capacity=self._capacity(live_ids),
            drop=self.drop,
            weights=gating.weights if self.drop == "weight" else None,
            align=self.align,
            num_rows=self._num_rows(live_ids, padding_mask),
            backend=self.backend,
        )
        rows = permute(tokens, plan, backend=self.backend)
        shared = partial(self._shared, tokens, padding_mask)
        if getattr(self.experts, "exchange", None) is None:
            rows = self.experts(rows, plan.rows_per_expert)
            output = unpermute(rows, plan, gating.weights, backend=self.backend)
            added = shared()
        else:  # moeroute.expert_parallel: the shared expert runs while rows travel
            facts = {"topk": live_ids.shape[1], "align": self.align}
            rows, added = self.experts(rows, plan.rows_per_expert, facts, shared)
            output = unpermute(rows, plan, gating.weights, backend=self.backend)
        if added is not None:
            output = output + added
        output = output.reshape(x.shape)
        if not return_routing:
            return output
        probabilities = self.router.probabilities(gating, logits)
        return output, Routing(gating, plan, logits, probabilities, padding_mask)

    def _shared(self, tokens: Tensor, padding_mask: Tensor | None) -> Tensor | None:
        """[T, hidden], what the shared expert adds; None without one."""
        if self.shared_expert is None:
            return None
        shared: Tensor = self.shared_expert(tokens)
        return shared if padding_mask is None else shared.masked_fill(padding_mask[:, None], 0)

    def _capacity(self, expert_ids: Tensor) -> int | None:
        if self.capacity_factor is None:
            return None
        num_tokens, k = expert_ids.shape
        # Not capacity_from_factor itself: a float attribute is symbolic under torch.compile(dynamic=True).
        return capacity_from_ratio(num_tokens, k, self.num_experts, *self._capacity_ratio)

    def _num_rows(self, expert_ids: Tensor, padding_mask: Tensor | None) -> int | None:
        if expert_ids.is_meta or (padding_mask is None and self.capacity_factor is None and self.align == 1):
            return expert_ids.shape[0] * expert_ids.shape[1]
        return None  # the plan reads the number of live slots

    def _check(
        self, x: Tensor, padding_mask: Tensor | None, expert_ids: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The arguments, checked, in [T] and [T, K]."""
        operator = "nn.MoE"
        _check_tokens(operator, "x", x, "[..., H]", self.router.weight)
        if type(self.experts) is Experts:  # what replaced them (quantised, adapted) has weights of its own kind
            _check_dtype(operator, "x", x, self.experts.gate_up_proj)
        leading = list(x.shape[:-1])
        if padding_mask is not None:
            check.tensor(operator, "padding_mask", padding_mask)
            if padding_mask.dtype != torch.bool:
                raise check.wrong_dtype(operator, "padding_mask", "torch.bool, True = padding", padding_mask)
            if list(padding_mask.shape) != leading:
                raise check.wrong_shape(operator, "padding_mask", f"{leading}, as x without H", padding_mask)
            check.same_device(operator, "x", x, "padding_mask", padding_mask)
            padding_mask = padding_mask.reshape(-1)
        if expert_ids is not None:
            check.tensor(operator, "expert_ids", expert_ids)
            if expert_ids.ndim == 0 or list(expert_ids.shape[:-1]) != leading or expert_ids.shape[-1] < 1:
                wanted = "[" + ", ".join(map(str, [*leading, "K"])) + "] with K >= 1, as x"
                raise check.wrong_shape(operator, "expert_ids", wanted, expert_ids)
            check.same_device(operator, "x", x, "expert_ids", expert_ids)
            expert_ids = expert_ids.reshape(-1, expert_ids.shape[-1])
        return padding_mask, expert_ids
