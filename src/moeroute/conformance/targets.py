"""Somebody else's functions: which there are, and how one is called with a case's arguments.

A function gets arguments by the names of its parameters. Beside those of this package's function it may name a plan's
tensors one by one (`row_of_slot`, `token_of_row`, `tokens_per_expert`, ...) instead of `plan`, and `out`. A case that
has something the function does not take (weights, a capacity) is left out.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

import moeroute
from moeroute.conformance.case import PLAN_FIELDS, Case
from moeroute.conformance.peer_cases import OURS_ONLY
from moeroute.conformance.table import cases
from moeroute.plan import RoutingPlan

Signature = Literal["moeroute", "megatron", "transformer_engine", "torch_npu"]
SIGNATURES: tuple[Signature, ...] = get_args(Signature)
DERIVED = (*PLAN_FIELDS, "num_slots", "token_of_slot", "token_of_row", "expert_of_row", "expert_ends", "pad_offsets")
Functions = dict[str, Callable[..., Any]]


class NotAsked(Exception):
    """A case that the function has no parameters for; the message says which are missing."""


def operators(signature: Signature) -> dict[str, str]:
    """The names of functions that a signature has, and the operator of the table that each is."""
    found = sorted({case.operator for case in cases()})
    if signature == "moeroute":
        return {name: name for name in found if "." not in name}
    return {name.partition(".")[2]: name for name in found if name.startswith(f"{signature}.")}


def load(target: str, signature: Signature | None = None) -> tuple[Functions, Signature]:
    """The functions of `package.module` (or `package.module:name` of an object in it) that the table has cases for."""
    module, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"cannot import {module}: {error} (is its folder in PYTHONPATH?)") from error
    for part in attribute.split(".") if attribute else ():
        if not hasattr(found, part):
            raise ValueError(f"{target}: there is no {part}")
        found = getattr(found, part)
    chosen = signature or _signature_of(found)
    functions = {name: getattr(found, name) for name in operators(chosen) if callable(getattr(found, name, None))}
    if not functions:
        known = ", ".join(operators(chosen))
        raise ValueError(f"{target} has no function of the signature {chosen!r}; it would have one of: {known}")
    return functions, chosen


def _signature_of(found: Any) -> Signature:
    if any(name.startswith("npu_moe_") for name in dir(found)):
        return "torch_npu"
    if hasattr(found, "moe_permute"):
        return "transformer_engine"
    permute = getattr(found, "permute", None)
    if callable(permute) and "routing_map" in (parameters_of(permute) or {}):
        return "megatron"
    return "moeroute"


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """The parameters by name; None where Python cannot tell them."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def bound(function: Callable[..., Any], case: Case, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments for this function; NotAsked where it has no parameter for something that the case has."""
    parameters = parameters_of(function)
    if parameters is None:
        raise ValueError(f"{case.operator}: Python cannot tell the parameters of {function!r}: wrap it in a def")
    kinds = [parameter.kind for parameter in parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise ValueError(
            f"{case.operator}: the parameters of {function!r} have no names: wrap it in a def that names them"
        )
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    names = {name for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    given = {name: value for name, value in arguments.items() if value is not None and name not in OURS_ONLY}
    found = {}
    plan = given.get("plan")
    if isinstance(plan, RoutingPlan) and "plan" not in names and not takes_any:
        del given["plan"]
        wanted = [name for name in DERIVED if name in names and name not in given]
        if not wanted:
            raise NotAsked("takes neither `plan` nor a tensor of it")
        found = {name: value for name in wanted if (value := getattr(plan, name)) is not None}
    if case.is_plan and isinstance(ids := given.get("expert_ids"), Tensor):
        found |= {n: v for n, v in (("num_tokens", ids.shape[0]), ("topk", ids.shape[1])) if n in names}
    if not takes_any:  # what a case has at its default need not be said
        defaults = _defaults(case.operator)
        given = {n: v for n, v in given.items() if n in names or n not in defaults or not _same(v, defaults[n])}
    if (extra := given.keys() - names) and not takes_any:
        raise NotAsked(f"has no parameter {', '.join(sorted(extra))}")
    found |= given
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD and name not in found and name != "out"
    ]
    if missing:
        raise NotAsked(f"wants {', '.join(missing)}")
    return found


def _defaults(operator: str) -> dict[str, Any]:
    """The defaults of this package's function."""
    parameters = parameters_of(getattr(moeroute, operator, None) or (lambda: None)) or {}
    return {name: p.default for name, p in parameters.items() if p.default is not p.empty}


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def with_autograd(functions: Functions) -> Functions:
    """The functions, and gradients of `permute` and `unpermute` by torch's autograd where there are none."""
    found = dict(functions)
    if "permute" in found:
        found.setdefault("permute_backward", _permute_gradient(functions["permute"]))
    if "unpermute" in found:
        found.setdefault("unpermute_backward", _unpermute_gradient(functions["unpermute"]))
    return found


def _called(function: Callable[..., Any], operator: str, **arguments: Any) -> Tensor:
    case = next(case for case in cases() if case.operator == operator)
    result = function(**bound(function, case, arguments))
    found: Tensor = result[0] if isinstance(result, tuple | list) else result
    return found


def _permute_gradient(permute: Callable[..., Any]) -> Callable[..., Any]:
    def permute_backward(grad_rows: Tensor, tokens: Tensor, plan: RoutingPlan) -> Tensor:
        leaf = tokens.detach().requires_grad_()
        return torch.autograd.grad(_called(permute, "permute", tokens=leaf, plan=plan), leaf, grad_rows)[0]

    return permute_backward


def _unpermute_gradient(unpermute: Callable[..., Any]) -> Callable[..., Any]:
    def unpermute_backward(grad_tokens: Tensor, rows: Tensor, plan: RoutingPlan, weights: Tensor) -> tuple[Tensor, ...]:
        leaves = rows.detach().requires_grad_(), weights.detach().requires_grad_()
        found = _called(unpermute, "unpermute", rows=leaves[0], plan=plan, weights=leaves[1])
        return torch.autograd.grad(found, leaves, grad_tokens)

    return unpermute_backward
