"""Every public function with drawn inputs, and how often each was called: `properties` and `lies` of torture_kinds.py.

    moeroute.*, nn.*                 DRAWN below: sizes, dtypes and options drawn together, results compared bit by bit
    megatron.*, transformer_engine.*, torch_npu.*   the table of cases with other inputs, and drawn arguments
    aclnn.*                          both phases of every operator, from a valid call of the tests

A function that is public and in none of them is an error: `need_all`.
"""

import inspect
import random
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import moeroute
from aclnn_calls import GOOD
from moeroute import aclnn, nn
from moeroute.conformance.case import PLAN_FIELDS
from moeroute.dispatch import Backend
from moeroute.interop import megatron, torch_npu, transformer_engine
from moeroute.interop.torch_npu.arguments import FUNCTIONS
from moeroute.plan import RoutingPlan
from moeroute.testing import assert_same_bits
from test_bad_input import CALLS, NEVER, NOT_DENSE, ODD, SOMETIMES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODULES: dict[str, types.ModuleType] = {
    "": moeroute,
    "nn": nn,
    "megatron": megatron,
    "transformer_engine": transformer_engine,
    "torch_npu": torch_npu,
    "aclnn": aclnn,
}
# Public, and of this process or of several, so that a drawn call says nothing: the tests have them.
LEFT_OUT = {
    **dict.fromkeys(
        ("megatron.patch", "megatron.Patch", "megatron.ours", "torch_npu.install", "torch_npu.uninstall"),
        "changes modules",
    ),
    "torch_npu.register_group": "needs ranks",
    "aclnn.Executor": "made by a first phase",
}
called: Counter[str] = Counter()


def public() -> list[str]:
    """Every public function and class, with the name of its module."""
    found = list(moeroute.__all__)
    for name, module in MODULES.items():
        if name:
            found += [
                f"{name}.{word}"
                for word, value in vars(module).items()
                if (inspect.isfunction(value) or inspect.isclass(value))
                and not word.startswith("_")
                and (value.__module__ == module.__name__ or (hasattr(module, "__path__") and _ours(value)))
            ]
    return sorted(set(found) - LEFT_OUT.keys())


def _ours(value: Any) -> bool:
    return str(value.__module__).startswith("moeroute.")


def need_all(names: list[str]) -> None:
    """An error that lists those that were never called."""
    if missing := [name for name in names if not called[name]]:
        raise AssertionError(f"never called: {', '.join(missing)}")


class _Counting:
    """A module whose functions count their calls."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, word: str) -> Any:
        called[f"{self._name}.{word}".lstrip(".")] += 1
        return getattr(MODULES[self._name], word)


m, n = _Counting(""), _Counting("nn")

# ---------------------------------------------------------------------------- comparison


def parts(value: Any) -> Iterator[Any]:
    """The tensors and numbers of a result."""
    if isinstance(value, RoutingPlan):
        yield from parts([getattr(value, field) for field in PLAN_FIELDS])
    elif isinstance(value, dict):
        yield from parts(list(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from parts(part)
    elif value is not None:
        yield value


def same(a: Any, b: Any, what: str = "") -> None:
    """Equal bits in all parts, any NaN equal to any other."""
    assert_same_bits(list(parts(a)), list(parts(b)), what)


# ---------------------------------------------------------------------------- what is drawn


def numbers(*shape: int, dtype: torch.dtype = torch.float32, finite: bool = False) -> Tensor:
    """Numbers of many sizes, now and then a NaN or an infinity."""
    values = torch.randn(shape) * 10.0 ** random.randint(-3, 3)
    if values.numel() and not finite and random.random() < 0.2:
        values.view(-1)[random.randrange(values.numel())] = random.choice([float("nan"), float("inf"), float("-inf")])
    return values.to(dtype)


def whole(low: int, high: int, *shape: int) -> Tensor:
    """int32 in low..high-1."""
    return torch.randint(low, max(high, low + 1), shape, dtype=torch.int32)


class Inputs:
    """Sizes, and tensors and plans of these sizes."""

    def __init__(self) -> None:
        self.experts = random.choice([1, 2, 3, 8, 64, 257])
        self.k = random.randint(1, min(self.experts, 9))
        self.tokens = random.choice([0, 1, 2, 7, 33, 200])
        self.hidden = random.choice([0, 1, 5, 64, 129, 1024])
        self.dtype = random.choice(DTYPES)
        self.score: Any = random.choice(["softmax", "sigmoid", "sqrtsoftplus", "topk_softmax", "topk_sigmoid", "none"])
        self.renormalize = random.choice([None, False, True])
        self.x = numbers(self.tokens, self.hidden, dtype=self.dtype)
        self.logits = numbers(self.tokens, self.experts, dtype=random.choice(DTYPES))
        self.ids = torch.rand(self.tokens, self.experts).topk(self.k).indices.int()
        self.all_ids = self.ids.clone()
        self.ids[torch.rand(self.tokens, self.k) < random.choice([0.0, 0.3])] = -1
        self.map = torch.zeros(self.tokens, self.experts, dtype=torch.bool).scatter_(1, self.all_ids.long(), True)
        self.weights = numbers(self.tokens, self.k, dtype=random.choice(DTYPES))
        self.bias = numbers(self.experts) if random.random() < 0.5 else None
        self.all_weights = numbers(self.tokens, self.experts)
        self.mask = torch.rand(self.tokens) < 0.3
        self.plan_options: dict[str, Any] = random.choice(
            [{}, {"align": 4}, {"capacity": 3}, {"capacity": 5, "pad_to_capacity": True}, {"expert_range": (0, 1)}]
        )
        self.plan = moeroute.plan_from_expert_ids(self.ids, self.experts, **self.plan_options)
        self.map_plan = moeroute.plan_from_routing_map(self.map)
        self.rows = numbers(self.plan.num_rows, self.hidden, dtype=self.dtype)
        self.slots = numbers(self.plan.num_slots)
        self.lengths = whole(0, 6, random.randint(1, 5), random.randint(1, 4))
        self.order = torch.randperm(self.lengths.numel())
        self.scores = torch.rand(self.tokens, self.experts) + 0.01
        self.flat_plan = moeroute.plan_from_expert_ids(self.all_ids, self.experts)
        self.flat_rows = numbers(self.flat_plan.num_rows, 8, finite=True)


def _gate(d: Inputs, backend: Backend) -> Any:
    options: dict[str, Any] = {"score": d.score, "renormalize": d.renormalize, "backend": backend}
    return m.gating_topk(d.logits, d.k, bias=d.bias, **options)


def _whole_path(d: Inputs, backend: Backend) -> Any:
    tokens, logits = d.x.clone().requires_grad_(), d.logits.clone().requires_grad_()
    gating = m.gating_topk(logits, d.k, score=d.score, backend=backend)
    plan = m.plan_from_expert_ids(gating.expert_ids, d.experts, backend=backend)
    rows = m.permute(tokens, plan, backend=backend)
    output = m.unpermute(rows, plan, gating.weights, backend=backend)
    same(plan.row_of_slot.sort().values, torch.arange(plan.num_rows, dtype=torch.int32), "a permutation")
    return [gating, plan, rows, output, torch.autograd.grad(output.float().sum(), [tokens, logits])]


def _gate_backward(d: Inputs, backend: Backend) -> Any:
    found = moeroute.gating_topk(d.logits, d.k, score=d.score, backend="reference")
    options: dict[str, Any] = {"score": d.score, "renormalize": d.renormalize, "backend": backend}
    return m.gating_topk_backward(found.scores, d.weights.float(), found.expert_ids, **options)


def _layer(d: Inputs, backend: Backend) -> Any:
    torch.manual_seed(d.tokens)
    layer = n.MoE(8, 4, d.experts, d.k, shared_expert=n.SwiGLU(8, 4), backend=backend)
    x = d.flat_rows[: d.tokens].clone().requires_grad_()
    _, routing = layer(x, return_routing=True)
    if not isinstance(routing, n.Routing) or not isinstance(routing.summary(), n.RoutingSummary):
        raise AssertionError("no routing")
    record = n.RoutingRecord()
    record.append("layer", routing)
    if record.layers != ["layer"]:
        raise AssertionError(record)
    return [routing.gating, routing.plan, routing.z_loss()] if d.tokens else []


def _statistics(d: Inputs, _: Backend) -> Any:
    found = m.balance_statistics(d.scores, d.ids, padding_mask=d.mask)
    return [m.BalanceStatistics(*found), found.loss(), m.load_balancing_loss(d.scores, d.ids, padding_mask=d.mask)]


def _pool(d: Inputs, _: Backend) -> Any:
    m.set_memory_pool(d.k % 2 == 0, max_idle_bytes=random.choice(["largest", 0, 1 << 22]))
    m.empty_cache()
    m.set_memory_pool(True, max_idle_bytes="largest")
    return sorted(m.memory_stats())


def _map_weights(d: Inputs) -> Tensor:
    return d.all_weights.masked_fill(~d.map, 0)


DRAWN: dict[str, Callable[[Inputs, Backend], Any]] = {
    "whole path": _whole_path,
    "gating_topk": _gate,
    "gating_topk, made again": lambda d, b: m.Gating(*_gate(d, b)),
    "gating_topk_backward": _gate_backward,
    "plan_from_expert_ids": lambda d, b: m.plan_from_expert_ids(d.ids, d.experts, backend=b, **d.plan_options),
    "plan_from_routing_map": lambda d, b: m.plan_from_routing_map(d.map, backend=b, **d.plan_options),
    "plan_from_row_of_slot": lambda d, b: m.plan_from_row_of_slot(
        d.plan.row_of_slot, d.tokens, d.plan.num_rows, backend=b
    ),
    "plan_from_token_ids": lambda d, b: m.plan_from_token_ids(
        d.flat_plan.token_of_row, d.tokens, num_rows=d.flat_plan.num_rows, backend=b
    ),
    "plan_from_segments": lambda d, b: m.plan_from_segments(d.lengths, int(d.lengths.sum()), backend=b),
    "plan_from_chunks": lambda d, b: m.plan_from_chunks(
        d.lengths.reshape(-1), d.order, int(d.lengths.sum()), backend=b
    ),
    "plan_from_row_id_map": lambda d, b: m.plan_from_row_id_map(
        m.row_id_map(d.map_plan, backend=b), d.map_plan.num_rows, backend=b
    ),
    "RoutingPlan": lambda d, b: m.RoutingPlan(
        d.plan.row_of_slot, d.plan.slot_of_row, d.tokens, d.plan.num_rows, topk=d.k
    ),
    "capacity_from_factor": lambda d, b: m.capacity_from_factor(d.tokens, d.k, d.experts, random.Random(d.k).random()),
    "spread": lambda d, b: m.spread(d.x, d.plan, d.slots, backend=b),
    "combine": lambda d, b: m.combine(d.rows, d.plan, d.slots, backend=b),
    "row_dots": lambda d, b: m.row_dots(d.rows, d.x, d.plan, backend=b),
    "dynamic_quantize": lambda d, b: m.dynamic_quantize(d.rows, backend=b),
    "quantize": lambda d, b: m.quantize(d.rows, torch.ones(1), torch.zeros(1), backend=b),
    "spread_quantized": lambda d, b: m.spread_quantized(d.x, d.plan, backend=b),
    "slot_weights": lambda d, b: m.slot_weights(d.all_weights, d.map_plan, backend=b),
    "dense_weights": lambda d, b: m.dense_weights(d.weights, d.ids, d.experts, backend=b),
    "routing_map_from_ids": lambda d, b: m.routing_map_from_ids(d.ids, d.experts, bits=d.k % 2 == 0, backend=b),
    "routing_map_of": lambda d, b: m.routing_map_of(d.map_plan, backend=b),
    "permute": lambda d, b: m.permute(d.x, d.plan, d.weights, backend=b),
    "unpermute": lambda d, b: m.unpermute(d.rows, d.plan, d.weights, backend=b),
    "permute_backward": lambda d, b: m.permute_backward(d.rows, d.plan, backend=b),
    "unpermute_backward": lambda d, b: m.unpermute_backward(d.x, d.rows, d.plan, d.weights, backend=b),
    "permute_weights": lambda d, b: m.permute_weights(_map_weights(d), d.map_plan, backend=b),
    "permute_weights_backward": lambda d, b: m.permute_weights_backward(torch.ones(d.plan.num_rows), d.plan, backend=b),
    "balance_statistics": _statistics,
    "load_balancing_loss_from_counts": lambda d, b: m.load_balancing_loss_from_counts(
        d.scores,
        d.flat_plan.tokens_per_expert,
        num_experts=d.experts,
        topk=d.k,
        num_tokens=d.tokens + 1,
        coefficient=0.1,
    ),
    "router_z_loss": lambda d, b: m.router_z_loss(d.logits, padding_mask=d.mask),
    "normalize_scores": lambda d, b: m.normalize_scores(d.scores, padding_mask=d.mask),
    "sinkhorn": lambda d, b: m.sinkhorn(d.scores, tolerance=1e-2),
    "look_up_expert_ids": lambda d, b: (
        m.look_up_expert_ids(whole(0, 1, d.tokens), d.all_ids[:1].repeat(3, 1)) if d.tokens else None
    ),
    "update_expert_bias": lambda d, b: m.update_expert_bias(
        torch.zeros(d.experts), d.flat_plan.tokens_per_expert, rate=1e-3
    ),
    "memory": _pool,
    "nn.activate": lambda d, b: n.activate(numbers_of(d, 2 * d.k), backend=b),
    "nn.grouped_linear": lambda d, b: n.grouped_linear(
        d.flat_rows, torch.ones(d.experts, 3, 8), d.flat_plan.rows_per_expert
    ),
    "nn.Experts": lambda d, b: n.Experts(d.experts, 8, 4)(d.flat_rows, d.flat_plan.rows_per_expert).shape,
    "nn.Router": lambda d, b: n.Router(8, d.experts, d.k, backend=b)(d.flat_rows)[0].weights.shape,
    "nn.MoE": _layer,
}


def numbers_of(d: Inputs, width: int) -> Tensor:
    """The same numbers at each call."""
    return torch.randn(d.tokens, width, generator=torch.Generator().manual_seed(d.experts)).to(d.dtype)


def compare(name: str, drawn: Inputs) -> None:
    """The same bits from both backends."""
    a, b = DRAWN[name](drawn, "cpu"), DRAWN[name](drawn, "reference")
    same(a, b, f"{name}: T={drawn.tokens} E={drawn.experts} K={drawn.k} H={drawn.hidden} {drawn.dtype} {drawn.score}")


# ---------------------------------------------------------------------------- lies

OURS = (ValueError, TypeError, RuntimeError, NotImplementedError)
WORDS = (*NEVER, *SOMETIMES)


def odd(value: Any) -> Any:
    """Something else in the place of an argument: another tensor where it is one, or any word."""
    if isinstance(value, Tensor) and random.random() < 0.7:
        change = random.choice([*NOT_DENSE.values(), *ODD.values()])
        try:
            return change(value)
        except (RuntimeError, ValueError, IndexError):
            return value
    return random.choice(WORDS)


def lie(name: str) -> None:
    """One of CALLS with one to three arguments that are something else: a result or an error of ours."""
    function, arguments = CALLS[name]
    changed = dict(arguments)
    for argument in random.sample(list(arguments), min(len(arguments), random.randint(1, 3))):
        changed[argument] = odd(arguments[argument])
    called[name.partition(",")[0]] += 1
    try:
        with torch.no_grad():
            function(**changed)
    except (ValueError, TypeError) as error:
        if not str(error).startswith("moeroute."):
            raise AssertionError(f"{name} {_shown(changed)}: {error}") from error
    except Exception as error:
        raise AssertionError(f"{name} {_shown(changed)}: {type(error).__name__}: {error}") from error
    finally:
        if name == "set_memory_pool":
            moeroute.set_memory_pool(True, max_idle_bytes="largest")


def lie_to_aclnn(name: str) -> None:
    """Both phases of an operator with up to two odd tensors or numbers: a status, never an exception."""
    values = list(GOOD[name]().values())
    for place in random.sample(range(len(values)), random.randint(0, 2)):
        value = values[place]
        if isinstance(value, Tensor):
            others = [None, value.double(), value[:0], value.reshape(-1), value.t() if value.ndim == 2 else value]
            values[place] = random.choice(others)
        elif isinstance(value, bool):
            values[place] = not value
        elif isinstance(value, int):
            values[place] = random.choice([0, -1, 1, 7, 2**62, -(2**63)])
    called[f"aclnn.aclnn{name}GetWorkspaceSize"] += 1
    status, size, executor = getattr(aclnn, f"aclnn{name}GetWorkspaceSize")(*values)
    if type(status) is not int or (status == 0) != (executor is not None):
        raise AssertionError(f"aclnn{name}: {status}, {executor}")
    called[f"aclnn.aclnn{name}"] += 1
    status = getattr(aclnn, f"aclnn{name}")(None, random.choice([0, size, 1 << 40]), executor, None)
    if type(status) is not int:
        raise AssertionError(f"aclnn{name}: {status}")
    called["aclnn.aclGetRecentErrMsg"] += 1
    if status and not aclnn.aclGetRecentErrMsg():
        raise AssertionError(f"aclnn{name}: {status} without a message")
    called["aclnn.set_chip"] += 1
    aclnn.set_chip(aclnn.set_chip(random.choice(["A2", "A3", "950", "310P"])))
    called["aclnn.set_ub_bytes"] += 1
    aclnn.set_ub_bytes(aclnn.set_ub_bytes(1 << 17))


def hosts_functions() -> dict[str, Callable[..., Any]]:
    """The functions under other libraries' names."""
    found: dict[str, Callable[..., Any]] = {f"torch_npu.{name}": value for name, value in FUNCTIONS.items()}
    for name in public():
        module, _, word = name.rpartition(".")
        if module in ("megatron", "transformer_engine", "torch_npu") and inspect.isfunction(
            getattr(MODULES[module], word)
        ):
            found[name] = getattr(MODULES[module], word)
    return found


def lie_as_a_host(name: str, function: Callable[..., Any]) -> bool:
    """Arguments of the declared types and nothing else in common; whether there was a result."""
    given: dict[str, Any] = {}
    hints = typing.get_type_hints(inspect.unwrap(function))
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty or random.random() < 0.3:
            given[parameter.name] = _of_type(hints.get(parameter.name, Any))
    by_place = [
        given.pop(p.name)
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.POSITIONAL_ONLY and p.name in given
    ]
    called[name] += 1
    try:
        with torch.no_grad():
            function(*by_place, **given)
    except (*OURS, ImportError):
        return False
    except Exception as error:
        raise AssertionError(f"{name} {_shown(given)}: {type(error).__name__}: {error}") from error
    return True


def _of_type(hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return random.choice(arguments)
    if origin in (typing.Union, types.UnionType):
        return _of_type(random.choice(arguments))
    if hint is Tensor:
        shape = random.choice([(4,), (4, 2), (4, 8), (8, 8), (2, 4, 8), (0,), (0, 8), ()])
        dtype = random.choice([*DTYPES, torch.int32, torch.int64, torch.bool, torch.int8])
        return torch.randint(0, 4, shape).to(dtype)
    if origin in (list, tuple) or hint in (list, tuple):
        return [_of_type(arguments[0] if arguments else int) for _ in range(random.randint(0, 3))]
    if hint in (int, float, bool, str):
        options: dict[Any, list[Any]] = {
            int: [0, 1, 2, 4, 8, -1, 2**40], float: [0.0, 1.0, -1.0, float("nan")],
            bool: [True, False], str: ["", "nonsense", "softmax", "mask"],
        }  # fmt: skip
        return random.choice(options[hint])
    return None


def _shown(arguments: dict[str, Any]) -> str:
    return str(
        {
            name: f"{value.dtype}{list(value.shape) if not value.is_nested else 'nested'}"
            if isinstance(value, Tensor)
            else repr(value)[:60]
            for name, value in arguments.items()
        }
    )[:900]
