"""Calls that are no function of the package itself: gradients through torch's autograd, and activations."""

from typing import Any

import torch
from torch import Tensor

import moeroute
from moeroute.dispatch import Backend
from moeroute.ops.activations import op as activations


def gating_topk_backward(
    logits: Tensor, k: int, grad_weights: Tensor, grad_scores: Tensor, backend: Backend | None = None, **options: Any
) -> Tensor:
    """The gradient of the logits where the weights and the scores are both used."""
    leaf = logits.detach().requires_grad_()
    found = moeroute.gating_topk(leaf, k, **options, backend=backend)
    return torch.autograd.grad((found.weights, found.scores), leaf, (grad_weights, grad_scores))[0]


def permute_backward(
    grad_rows: Tensor, tokens: Tensor, plan: moeroute.RoutingPlan, backend: Backend | None = None
) -> Tensor:
    """The gradient of the tokens."""
    leaf = tokens.detach().requires_grad_()
    return torch.autograd.grad(moeroute.permute(leaf, plan, backend=backend), leaf, grad_rows)[0]


def unpermute_backward(
    grad_tokens: Tensor, rows: Tensor, plan: moeroute.RoutingPlan, weights: Tensor, backend: Backend | None = None
) -> tuple[Tensor, ...]:
    """The gradients of the rows and of the weights."""
    leaves = rows.detach().requires_grad_(), weights.detach().requires_grad_()
    return torch.autograd.grad(moeroute.unpermute(leaves[0], plan, leaves[1], backend=backend), leaves, grad_tokens)


def activate(
    x: Tensor, activation: activations.Activation, interleaved: bool, backend: Backend | None = None
) -> Tensor:
    """The activation of experts."""
    return activations.activate(x, activation, interleaved=interleaved, backend=backend)


def activate_backward(
    grad: Tensor, x: Tensor, activation: activations.Activation, interleaved: bool, backend: Backend | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, and the activation made again."""
    return activations.activate_backward(grad, x, activation, interleaved, True, backend)
