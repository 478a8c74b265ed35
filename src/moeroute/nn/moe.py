"""The layer: router, permute, experts, unpermute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Literal, get_args, overload

import torch
from torch import Tensor, nn

from moeroute import check
from moeroute.dispatch import Backend
from moeroute.nn import huggingface
from moeroute.nn.checks import (
    INITIAL_STD,
    check_backend,
    check_dtype,
    check_factory,
    check_positive,
    check_tokens,
)
from moeroute.nn.experts import Experts, Recompute, check_experts
from moeroute.nn.router import Router, check_router
from moeroute.nn.routing import Routing
from moeroute.ops.activations.op import Activation
from moeroute.ops.experts import autocast_is_on
from moeroute.ops.gating.op import GroupScore, Score
from moeroute.ops.planning.common import DropOfIds
from moeroute.ops.planning.op import capacity_from_ratio, plan_from_expert_ids
from moeroute.permutation import permute, unpermute
from moeroute.plan import RoutingPlan

WeightsOn = Literal["output", "input"]


class MoE(nn.Module):
    """Router, `num_experts` experts of which each token takes `k`, and maybe a shared expert.

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
        capacity_minimum: an expert takes at least so many slots, whatever the factor gives.
        drop: which slots are dropped: "position" (the last tokens), "weight" (the smallest weights) or "choice" (the
            last choices of the tokens, of those the last tokens, as GShard: no second choice takes the place of a
            first one).
        align: rows of each expert are padded with zeros to a multiple of it.
        shared_expert: a module [T, hidden] -> [T, hidden] whose output is added, `SwiGLU` for instance.
        shared_expert_gate: the shared expert's output is multiplied by the sigmoid of one more product of each token,
            ``shared_expert_gate.weight`` [1, hidden], as in Qwen's models.
        activation: see `Experts`.
        interleaved: see `Experts`.
        bias: of the experts' products, see `Experts`, and of the router, see `Router`.
        weights_on: "output" adds up the experts' outputs times their weights; "input" multiplies what goes into an
            expert by its weight and adds up its outputs as they are (Llama 4).
        jitter: see `Router`.
        router_dtype: see `Router`.
        hash_table: see `Router`; ``forward`` then takes ``keys``.
        recompute: what backward computes again instead of keeping it: "activation", the result of the activation
            [R, intermediate]; "permute", the rows [R, hidden], gathered again; or "both". Outputs and gradients have
            the same bits. Experts that are wrapped or replaced get rows, so that "permute" changes nothing there.
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
        capacity_minimum: int = 0,
        drop: DropOfIds = "position",
        align: int = 1,
        shared_expert: nn.Module | None = None,
        shared_expert_gate: bool = False,
        activation: Activation = "swiglu",
        interleaved: bool = False,
        bias: bool = False,
        weights_on: WeightsOn = "output",
        jitter: float = 0.0,
        router_dtype: torch.dtype | None = None,
        hash_table: Tensor | None = None,
        recompute: Recompute | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        if capacity_factor is not None:
            check.number("nn.MoE", "capacity_factor", capacity_factor)
            if capacity_factor < 0:
                raise check.wrong_value("nn.MoE", "capacity_factor", "at least 0", capacity_factor)
        check.integer("nn.MoE", "capacity_minimum", capacity_minimum, minimum=0)
        check.one_of("nn.MoE", "drop", drop, get_args(DropOfIds))
        check.one_of("nn.MoE", "weights_on", weights_on, get_args(WeightsOn))
        check_experts("nn.MoE", activation, interleaved, bias, recompute)
        check_router("nn.MoE", k, jitter, router_dtype, hash_table)
        check.flag("nn.MoE", "shared_expert_gate", shared_expert_gate)
        check_positive("nn.MoE", align=align)
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_experts": num_experts}
        check_positive("nn.MoE", **sizes)
        check_factory("nn.MoE", device, dtype)
        check_backend("nn.MoE", backend)
        if shared_expert is not None and not isinstance(shared_expert, nn.Module):
            raise check.wrong_type("nn.MoE", "shared_expert", "a torch.nn.Module or None", shared_expert)
        if shared_expert_gate and shared_expert is None:
            raise check.wrong_value("nn.MoE", "shared_expert_gate", "False without a shared_expert", True)
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor
        # A factor of num_experts is no limit any more; a larger one could overflow.
        self._capacity_ratio = Fraction(str(min(capacity_factor or 0, num_experts))).as_integer_ratio()
        self.capacity_minimum = capacity_minimum
        self.drop = drop
        self.align = align
        self.weights_on: WeightsOn = weights_on
        self.recompute = recompute
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
            bias=bias,
            jitter=jitter,
            router_dtype=router_dtype,
            hash_table=hash_table,
            device=device,
            dtype=dtype,
            backend=backend,
        )
        self.experts = Experts(
            num_experts,
            hidden_size,
            intermediate_size,
            activation=activation,
            interleaved=interleaved,
            bias=bias,
            recompute=recompute,
            device=device,
            dtype=dtype,
            backend=backend,
        )
        self.shared_expert = shared_expert
        self.shared_expert_gate: nn.Linear | None = None
        if shared_expert_gate:
            self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False, device=device, dtype=dtype)
            nn.init.normal_(self.shared_expert_gate.weight, std=INITIAL_STD)

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        padding_mask: Tensor | None = ...,
        expert_ids: Tensor | None = ...,
        keys: Tensor | None = ...,
        return_routing: Literal[False] = ...,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        x: Tensor,
        *,
        padding_mask: Tensor | None = ...,
        expert_ids: Tensor | None = ...,
        keys: Tensor | None = ...,
        return_routing: Literal[True],
    ) -> tuple[Tensor, Routing]: ...
    def forward(
        self,
        x: Tensor,
        *,
        padding_mask: Tensor | None = None,
        expert_ids: Tensor | None = None,
        keys: Tensor | None = None,
        return_routing: bool = False,
    ) -> Tensor | tuple[Tensor, Routing]:
        """[..., hidden] to [..., hidden].

        Args:
            x: [..., hidden]; never changed.
            padding_mask: [...] bool, True = padding: such a token takes no row and no capacity. The layer sees 0
                in its place and gives it 0, so whatever it holds, a NaN included, reaches no gradient.
            expert_ids: [..., K], experts to use instead of a selection (replay).
            keys: [...], any integer dtype, for a layer with a ``hash_table``: what each token is looked up by, its
                input id as a rule.
            return_routing: return ``(output, routing)`` with a `Routing`. Under activation checkpointing
                use ``use_reentrant=False``: the reentrant kind cuts the gradients of whatever is not a
                plain tensor (or compute the losses inside the checkpointed function).

        Under autocast the output has autocast's dtype, as that of `torch.nn.Linear`.
        """
        padding_mask, expert_ids, keys = self._check(x, padding_mask, expert_ids, keys)
        check.flag("nn.MoE", "return_routing", return_routing)
        tokens = x.reshape(-1, x.shape[-1])
        if padding_mask is not None:
            # In the products of the weights' gradients 0 times a NaN would be a NaN.
            tokens = tokens.masked_fill(padding_mask[:, None], 0)
        if keys is None:
            gating, logits = self.router(tokens, expert_ids)
        else:
            gating, logits = self.router(tokens, expert_ids, keys)
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
        output, added = self._routed(tokens, plan, gating.weights, partial(self._shared, tokens, padding_mask))
        if added is not None:
            output = output + added
        output = output.reshape(x.shape)
        if not return_routing:
            return output
        probabilities = self.router.probabilities(gating, logits)
        return output, Routing(gating, plan, logits, probabilities, padding_mask)

    def load_huggingface(self, state_dict: Mapping[str, Tensor], prefix: str = "") -> None:
        """Load the weights of a Mixture-of-Experts block of a Hugging Face model.

        Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V3, gpt-oss, and models whose blocks have the same names: one tensor for
        all experts, as in the modules of transformers 5, or one for each, as in most checkpoints. Values are copied;
        gate and up go into the layer's own order, interleaved or not.

        Args:
            state_dict: of the model, or of the block.
            prefix: of the block's names, "model.layers.3.mlp." for instance.

        Raises:
            ValueError: a weight of the layer that is not there, one of the block that the layer has no place for, or
                one of another shape. The layer is unchanged then.
        """
        self.load_state_dict(huggingface.weights_of_layer(self, state_dict, prefix))

    def huggingface_state_dict(
        self, family: huggingface.Family, prefix: str = "", *, each_expert: bool = False
    ) -> dict[str, Tensor]:
        """The layer's weights under the names that a Hugging Face model has for its block.

        Args:
            family: "mixtral", "qwen3_moe", "deepseek_v3" or "gpt_oss".
            prefix: in front of every name.
            each_expert: a tensor for each expert, as in the checkpoints of all but gpt-oss; else one for all of them,
                as in the modules of transformers 5.

        Returns:
            Names and tensors; they share the layer's memory where the orders agree.
        """
        return huggingface.weights_of_block(self, family, prefix, each_expert)

    def _shared(self, tokens: Tensor, padding_mask: Tensor | None) -> Tensor | None:
        """[T, hidden], what the shared expert adds; None without one."""
        if self.shared_expert is None:
            return None
        shared: Tensor = self.shared_expert(tokens)
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(tokens)) * shared
        return shared if padding_mask is None else shared.masked_fill(padding_mask[:, None], 0)

    def _routed(
        self, tokens: Tensor, plan: RoutingPlan, weights: Tensor, shared: Callable[[], Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """The sum over the experts of each token, [T, H], and what the shared expert adds."""
        on_input = self.weights_on == "input"
        ours = type(self.experts) is Experts
        if ours and autocast_is_on(tokens.device.type) and tokens.dtype is not torch.float64:
            # The products' dtype already here: one cast of T rows, not of T * k.
            tokens = tokens.to(torch.get_autocast_dtype(tokens.device.type))
        if ours and self.recompute in ("permute", "both") and not _wrapped(self.experts):
            slots = weights.reshape(-1) if on_input else None
            rows, added = self.experts.of_tokens(tokens, plan, slots), shared()
        else:
            rows = permute(tokens, plan, weights if on_input else None, backend=self.backend)
            if getattr(self.experts, "exchange", None) is None:
                rows, added = self.experts(rows, plan.rows_per_expert), shared()
            else:  # moeroute.expert_parallel: the shared expert runs while rows travel
                facts = {"topk": weights.shape[1], "align": self.align}
                rows, added = self.experts(rows, plan.rows_per_expert, facts, shared)
        return unpermute(rows, plan, None if on_input else weights, backend=self.backend), added

    def _capacity(self, expert_ids: Tensor) -> int | None:
        if self.capacity_factor is None:
            return None
        num_tokens, k = expert_ids.shape
        # Not capacity_from_factor itself: a float attribute is symbolic under torch.compile(dynamic=True).
        return max(capacity_from_ratio(num_tokens, k, self.num_experts, *self._capacity_ratio), self.capacity_minimum)

    def _num_rows(self, expert_ids: Tensor, padding_mask: Tensor | None) -> int | None:
        if expert_ids.is_meta or (padding_mask is None and self.capacity_factor is None and self.align == 1):
            return expert_ids.shape[0] * expert_ids.shape[1]
        return None  # the plan reads the number of live slots

    def _check(
        self, x: Tensor, padding_mask: Tensor | None, expert_ids: Tensor | None, keys: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The arguments, checked, in [T], [T, K] and [T]."""
        operator = "nn.MoE"
        check_tokens(operator, "x", x, "[..., H]", self.router.weight)
        if type(self.experts) is Experts:  # what replaced them (quantised, adapted) has weights of its own kind
            check_dtype(operator, "x", x, self.experts.gate_up_proj)
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
        if keys is not None:
            check.tensor(operator, "keys", keys)
            if list(keys.shape) != leading:
                raise check.wrong_shape(operator, "keys", f"{leading}, as x without H", keys)
            check.same_device(operator, "x", x, "keys", keys)
            keys = keys.reshape(-1)
        return padding_mask, expert_ids, keys


def _wrapped(module: nn.Module) -> bool:
    """Whether a call of the module is more than its class's forward."""
    return "forward" in vars(module) or bool(module._forward_hooks) or bool(module._forward_pre_hooks)
