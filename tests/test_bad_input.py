"""Every argument of every public function, given what it is not: our error, or a result; never somebody else's words.

The other files say what each function wants in particular. Here are the inputs that are wrong everywhere.
"""

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import moeroute
from moeroute import nn

T, K, E, H, S, R = 4, 2, 5, 6, 8, 8

LOGITS = torch.linspace(-1, 1, T * E).reshape(T, E)
GATING = moeroute.gating_topk(LOGITS, K, score="sigmoid", backend="reference")
IDS = GATING.expert_ids
PLAN = moeroute.plan_from_expert_ids(IDS, E, backend="reference")
MAP = torch.zeros(T, E, dtype=torch.bool).scatter_(1, IDS.long(), True)
MAP_PLAN = moeroute.plan_from_routing_map(MAP, backend="reference")
LINES = moeroute.row_id_map(MAP_PLAN, backend="reference")
TOKENS, ROWS, BIAS = torch.ones(T, H), torch.ones(R, H), torch.ones(E, H)
WEIGHTS, ALL_WEIGHTS, SLOTS = torch.ones(T, K), torch.ones(T, E), torch.ones(S)
MASK = torch.tensor([False, True, False, False])
LAYER = nn.MoE(H, 8, E, K, score="sigmoid")


def ints(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32)


# A function and arguments that it takes: all of them, with and without `out`, since those are two ways.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "gating_topk": (moeroute.gating_topk, {
        "logits": LOGITS, "k": K, "score": "sigmoid", "bias": torch.zeros(E), "num_groups": 1, "topk_groups": 1,
        "group_score": "max", "renormalize": True, "scaling_factor": 1.0, "eps": 1e-20, "weights_dtype": torch.float32,
        "backend": None}),
    "gating_topk, replay": (moeroute.gating_topk, {"logits": LOGITS, "k": K, "expert_ids": IDS}),
    "gating_topk, out": (moeroute.gating_topk, {
        "logits": LOGITS, "k": K, "out": (torch.zeros(T, K), ints(T * K).reshape(T, K), torch.zeros(T, E))}),
    "gating_topk_backward": (moeroute.gating_topk_backward, {
        "scores": GATING.scores, "grad_weights": WEIGHTS, "expert_ids": IDS, "score": "sigmoid", "renormalize": True,
        "scaling_factor": 1.0, "eps": 1e-20, "grad_scores": torch.ones(T, E), "out_dtype": None, "backend": None}),
    "gating_topk_backward, out": (moeroute.gating_topk_backward, {
        "scores": GATING.scores, "grad_weights": WEIGHTS, "expert_ids": IDS, "score": "sigmoid", "renormalize": True,
        "grad_scores": torch.ones(T, E), "out": torch.zeros(T, E)}),
    "plan_from_expert_ids": (moeroute.plan_from_expert_ids, {
        "expert_ids": IDS, "num_experts": E, "expert_range": None, "capacity": None, "drop": "position",
        "pad_to_capacity": False, "align": 1, "num_rows": None, "check": False, "backend": None}),
    "plan_from_expert_ids, all": (moeroute.plan_from_expert_ids, {
        "expert_ids": IDS, "num_experts": E, "expert_range": (0, 3), "capacity": 2, "drop": "weight",
        "weights": WEIGHTS, "pad_to_capacity": True, "align": 2, "num_rows": R, "check": True, "out": ints(S)}),
    "plan_from_expert_ids, any": (moeroute.plan_from_expert_ids, {
        "expert_ids": IDS, "num_experts": None, "num_rows": None, "out": ints(S)}),
    "plan_from_routing_map": (moeroute.plan_from_routing_map, {
        "routing_map": MAP, "topk": None, "fill": False, "expert_range": None, "capacity": None, "drop": "position",
        "pad_to_capacity": False, "align": 1, "num_rows": None, "num_slots": None, "check": False, "backend": None}),
    "plan_from_routing_map, aligned": (moeroute.plan_from_routing_map, {
        "routing_map": MAP.int(), "fill": True, "align": 4, "num_rows": 20, "num_slots": 9}),
    "plan_from_routing_map, all": (moeroute.plan_from_routing_map, {
        "routing_map": MAP, "topk": K, "capacity": 2, "drop": "weight", "weights": ALL_WEIGHTS, "num_rows": R,
        "check": True, "out": ints(S)}),
    "plan_from_row_of_slot": (moeroute.plan_from_row_of_slot, {
        "row_of_slot": PLAN.row_of_slot, "num_tokens": T, "num_rows": R, "first_row": 0, "expert_of_slot": IDS,
        "backend": None}),
    "plan_from_row_of_slot, out": (moeroute.plan_from_row_of_slot, {
        "row_of_slot": PLAN.row_of_slot, "num_tokens": T, "num_rows": R, "expert_of_slot": IDS, "out": ints(S)}),
    "plan_from_token_ids": (moeroute.plan_from_token_ids, {
        "token_ids": PLAN.token_of_row, "num_tokens": T, "rows": torch.arange(R), "num_rows": R, "num_experts": 4,
        "backend": None}),
    "plan_from_token_ids, out": (moeroute.plan_from_token_ids, {
        "token_ids": PLAN.token_of_row, "num_tokens": T, "rows": torch.arange(R), "out": ints(S)}),
    "plan_from_segments": (moeroute.plan_from_segments, {
        "lengths": torch.tensor([[2, 1], [1, 2]]), "num_tokens": 6, "backend": None}),
    "plan_from_segments, out": (moeroute.plan_from_segments, {
        "lengths": torch.tensor([[2, 1], [1, 2]]), "num_tokens": 6, "out": ints(6)}),
    "plan_from_chunks": (moeroute.plan_from_chunks, {
        "lengths": torch.tensor([2, 1, 3]), "order": torch.tensor([2, 0, 1]), "num_tokens": 6, "backend": None}),
    "plan_from_chunks, out": (moeroute.plan_from_chunks, {
        "lengths": torch.tensor([2, 1, 3]), "order": torch.tensor([2, 0, 1]), "num_tokens": 6, "out": ints(6)}),
    "plan_from_row_id_map": (moeroute.plan_from_row_id_map, {
        "row_id_map": LINES, "num_rows": R, "pad_offsets": torch.zeros(E, dtype=torch.int32), "backend": None}),
    "plan_from_row_id_map, out": (moeroute.plan_from_row_id_map, {
        "row_id_map": LINES, "num_rows": R, "pad_offsets": None, "out": ints(R)}),
    "row_id_map": (moeroute.row_id_map, {"plan": MAP_PLAN, "backend": None}),
    "row_id_map, out": (moeroute.row_id_map, {"plan": PLAN, "out": torch.empty(T, 2 * E + 1, dtype=torch.int32)}),
    "RoutingPlan": (moeroute.RoutingPlan, {
        "row_of_slot": PLAN.row_of_slot, "slot_of_row": PLAN.slot_of_row, "num_tokens": T, "num_rows": R,
        "num_experts": E, "topk": K, "expert_of_slot": IDS.reshape(-1), "tokens_per_expert": PLAN.tokens_per_expert,
        "rows_per_expert": PLAN.rows_per_expert}),
    "RoutingPlan, offsets": (moeroute.RoutingPlan, {
        "row_of_slot": PLAN.row_of_slot, "slot_of_row": PLAN.slot_of_row, "num_tokens": T, "num_rows": R,
        "slot_offsets": MAP_PLAN.slot_offsets}),
    "capacity_from_factor": (moeroute.capacity_from_factor, {
        "num_tokens": 4, "topk": 2, "num_experts": 5, "factor": 1.5, "minimum": 0, "align": 1}),
    "spread": (moeroute.spread, {"x": TOKENS, "plan": PLAN, "weights": SLOTS, "backend": None}),
    "spread, out": (moeroute.spread, {"x": TOKENS, "plan": PLAN, "weights": SLOTS, "out": torch.zeros(R, H)}),
    "combine": (moeroute.combine, {"rows": ROWS, "plan": PLAN, "weights": SLOTS, "backend": None}),
    "combine, all": (moeroute.combine, {
        "rows": ROWS, "plan": MAP_PLAN, "weights": SLOTS, "init": torch.ones(T, H), "bias": BIAS,
        "out": torch.zeros(T, H)}),
    "combine, pair": (moeroute.combine, {"rows": ROWS, "plan": PLAN, "init": (torch.ones(T, H), torch.ones(T, H))}),
    "row_dots": (moeroute.row_dots, {
        "rows": ROWS, "x": TOKENS, "plan": PLAN, "dtype": torch.float32, "backend": None}),
    "row_dots, all": (moeroute.row_dots, {
        "rows": ROWS, "x": TOKENS, "plan": MAP_PLAN, "bias": BIAS, "out": torch.zeros(S)}),
    "dynamic_quantize": (moeroute.dynamic_quantize, {
        "rows": ROWS, "smooth": BIAS, "expert_of_row": ints(R), "backend": None}),
    "dynamic_quantize, out": (moeroute.dynamic_quantize, {
        "rows": ROWS, "smooth": torch.ones(H), "out": (torch.zeros(R, H, dtype=torch.int8), torch.zeros(R))}),
    "quantize": (moeroute.quantize, {
        "rows": ROWS, "scale": torch.ones(1), "offset": torch.zeros(1), "backend": None}),
    "quantize, out": (moeroute.quantize, {
        "rows": ROWS, "scale": torch.ones(1), "offset": torch.zeros(1), "out": torch.zeros(R, H, dtype=torch.int8)}),
    "quantize, spread": (moeroute.quantize, {
        "rows": TOKENS, "scale": torch.ones(1), "offset": torch.zeros(1), "plan": MAP_PLAN,
        "out": torch.zeros(R, H, dtype=torch.int8)}),
    "spread_quantized": (moeroute.spread_quantized, {"x": TOKENS, "plan": PLAN, "smooth": BIAS, "backend": None}),
    "spread_quantized, all": (moeroute.spread_quantized, {
        "x": TOKENS, "plan": MAP_PLAN, "smooth": BIAS, "expert_of_row": ints(R),
        "out": (torch.zeros(R, H, dtype=torch.int8), torch.zeros(R))}),
    "slot_weights": (moeroute.slot_weights, {"weights": WEIGHTS, "plan": PLAN, "backend": None}),
    "slot_weights, map": (moeroute.slot_weights, {"weights": ALL_WEIGHTS, "plan": MAP_PLAN, "out": torch.zeros(S)}),
    "dense_weights": (moeroute.dense_weights, {
        "weights": WEIGHTS, "expert_ids": IDS, "num_experts": E, "backend": None}),
    "routing_map_from_ids": (moeroute.routing_map_from_ids, {
        "expert_ids": IDS, "num_experts": E, "bits": True, "backend": None}),
    "routing_map_of": (moeroute.routing_map_of, {"plan": PLAN, "backend": None}),
    "routing_map_of, map": (moeroute.routing_map_of, {"plan": MAP_PLAN}),
    "permute_weights": (moeroute.permute_weights, {"weights": WEIGHTS, "plan": PLAN, "backend": None}),
    "permute_weights, map": (moeroute.permute_weights, {
        "weights": ALL_WEIGHTS, "plan": MAP_PLAN, "out": torch.zeros(R)}),
    "permute_weights_backward": (moeroute.permute_weights_backward, {
        "grad": torch.ones(R), "plan": PLAN, "out": torch.zeros(T, K), "backend": None}),
    "permute_weights_backward, map": (moeroute.permute_weights_backward, {
        "grad": torch.ones(R), "plan": MAP_PLAN, "num_experts": E, "accumulate": False}),
    "permute": (moeroute.permute, {"tokens": TOKENS, "plan": PLAN, "backend": None}),
    "permute, map": (moeroute.permute, {"tokens": TOKENS, "plan": MAP_PLAN, "weights": ALL_WEIGHTS}),
    "unpermute": (moeroute.unpermute, {"rows": ROWS, "plan": PLAN, "weights": WEIGHTS, "backend": None}),
    "unpermute, map": (moeroute.unpermute, {"rows": ROWS, "plan": MAP_PLAN, "weights": ALL_WEIGHTS}),
    "permute_backward": (moeroute.permute_backward, {
        "grad_rows": ROWS, "plan": PLAN, "weights": WEIGHTS, "out": torch.zeros(T, H), "backend": None}),
    "unpermute_backward": (moeroute.unpermute_backward, {
        "grad_tokens": TOKENS, "rows": ROWS, "plan": PLAN, "weights": WEIGHTS, "accumulate": True,
        "out": (torch.zeros(R, H), torch.zeros(T, K)), "backend": None}),
    "unpermute_backward, map": (moeroute.unpermute_backward, {
        "grad_tokens": TOKENS, "rows": ROWS, "plan": MAP_PLAN, "weights": ALL_WEIGHTS}),
    "balance_statistics": (moeroute.balance_statistics, {
        "scores": GATING.scores, "expert_ids": IDS, "padding_mask": MASK}),
    "load_balancing_loss": (moeroute.load_balancing_loss, {
        "scores": GATING.scores, "expert_ids": IDS, "padding_mask": MASK}),
    "balance_statistics, sequences": (moeroute.balance_statistics, {
        "scores": GATING.scores, "expert_ids": IDS, "sequence_ids": torch.zeros(T, dtype=torch.int32),
        "num_sequences": 2}),
    "load_balancing_loss_from_counts": (moeroute.load_balancing_loss_from_counts, {
        "scores": GATING.scores, "tokens_per_expert": PLAN.tokens_per_expert, "num_experts": E, "topk": K,
        "num_tokens": T, "coefficient": 1.0, "padding_mask": MASK}),
    "look_up_expert_ids": (moeroute.look_up_expert_ids, {"keys": IDS[:, 0], "table": IDS}),
    "sinkhorn": (moeroute.sinkhorn, {"scores": LOGITS, "tolerance": 1e-4}),
    "normalize_scores": (moeroute.normalize_scores, {"scores": GATING.scores, "eps": 1e-20, "padding_mask": MASK}),
    "router_z_loss": (moeroute.router_z_loss, {"logits": LOGITS, "padding_mask": MASK}),
    "update_expert_bias": (moeroute.update_expert_bias, {
        "bias": torch.zeros(E), "tokens_per_expert": PLAN.tokens_per_expert, "rate": 1e-3}),
    "nn.grouped_linear": (nn.grouped_linear, {
        "rows": ROWS, "weight": torch.ones(E, 3, H), "sizes": PLAN.rows_per_expert}),
    "nn.SwiGLU": (nn.SwiGLU, {"hidden_size": H, "intermediate_size": 8, "device": None, "dtype": None}),
    "nn.SwiGLU, forward": (nn.SwiGLU(H, 8), {"x": TOKENS}),
    "nn.Experts": (nn.Experts, {
        "num_experts": E, "hidden_size": H, "intermediate_size": 8, "device": None, "dtype": None}),
    "nn.Experts, forward": (LAYER.experts, {"rows": ROWS, "rows_per_expert": PLAN.rows_per_expert}),
    "nn.Router": (nn.Router, {
        "hidden_size": H, "num_experts": E, "k": K, "score": "sigmoid", "expert_bias": True, "num_groups": 1,
        "topk_groups": None, "group_score": "max", "renormalize": None, "scaling_factor": 1.0, "eps": 1e-20,
        "device": None, "dtype": None, "backend": None}),
    "nn.Router, forward": (LAYER.router, {"tokens": TOKENS, "expert_ids": IDS}),
    "nn.Router, probabilities": (LAYER.router.probabilities, {"gating": GATING, "logits": LOGITS}),
    "nn.MoE": (nn.MoE, {
        "hidden_size": H, "intermediate_size": 8, "num_experts": E, "k": K, "score": "sigmoid", "expert_bias": False,
        "num_groups": 1, "topk_groups": None, "group_score": "max", "renormalize": None, "scaling_factor": 1.0,
        "eps": 1e-20, "capacity_factor": 1.5, "drop": "position", "align": 1, "shared_expert": None, "device": None,
        "dtype": None, "backend": None}),
    "nn.MoE, forward": (LAYER, {"x": TOKENS, "padding_mask": MASK, "expert_ids": IDS, "return_routing": False}),
    "set_memory_pool": (moeroute.set_memory_pool, {"enabled": True, "max_idle_bytes": "largest"}),
}  # fmt: skip

# Tensors that have no strides; no function takes one.
NOT_DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "COO": lambda t: t.to_sparse(),
    "CSR": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor([t[0], t[0]]),
    "jagged": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
}
# Tensors that some functions take.
ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "meta": lambda t: t.to("meta"),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8),
    "conjugated": lambda t: torch.complex(t.float(), t.float()).conj(),
    "negated": lambda t: torch._neg_view(t.neg()),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "float64": Tensor.double,
    "bool": Tensor.bool,
    "uint64": lambda t: t.to(torch.uint64),
    "int64": Tensor.long,
    "scalar": lambda t: t.reshape(-1)[0],
    "one rank more": lambda t: t[None],
    "flat": lambda t: t.reshape(-1),
    "shorter": lambda t: t[:-1],
    "narrower": lambda t: t[..., :-1],
    "empty": lambda t: t[:0],
    "expanded": lambda t: t.reshape(-1)[0].expand(t.shape),
    "with gradient": lambda t: t.clone().requires_grad_(),
}
# What no argument is.
NEVER: tuple[Any, ...] = (
    object(), {}, b"x", "nonsense", 1 + 2j, Ellipsis, [[1], [2, 3]], np.array([1, 2]), np.array([[1, 2], [3, 4]]),
    np.bool_(True), np.float32(0.5), float("nan"), ("a", "b"), (np.int64(0), np.int64(2)), (0.0, 2.0), (0, 10**30),
    torch.complex64, slice(0, 2),
)  # fmt: skip
# What some arguments may be.
SOMETIMES: tuple[Any, ...] = (
    None, True, False, np.int64(2), 2.0, -1, 0, 10**30, float("inf"), 1e300, 1e39, "", "softmax", "float32", [], [1, 2],
    (1, 2), (2, 1), (-1, 3), (None, None), range(2), torch.float32, torch.int32, torch.float8_e4m3fn,
    torch.tensor(2), torch.tensor(2.0), torch.tensor([1, 2]), (torch.zeros(2), torch.zeros(2)), torch.zeros,
)  # fmt: skip


def tensors_of(value: Any) -> Iterator[tuple[Tensor, Callable[[Any], Any]]]:
    """The tensors of an argument, each with what puts another in its place."""
    if isinstance(value, Tensor):
        yield value, lambda other: other
    elif isinstance(value, tuple) and not isinstance(value, moeroute.Gating):
        for i, part in enumerate(value):
            if isinstance(part, Tensor):
                yield part, lambda other, i=i: (*value[:i], other, *value[i + 1 :])  # type: ignore[misc]


def odd_values(value: Any) -> Iterator[tuple[str, Any, bool]]:
    """What it is, the value, and whether it must be refused."""
    for part, put in tensors_of(value):
        for table, refused in ((NOT_DENSE, True), (ODD, False)):
            for name, change in table.items():
                try:
                    changed = change(part)
                except (RuntimeError, ValueError, IndexError):
                    continue  # there is no such tensor
                yield name, put(changed), refused
        yield "an array", put(part.detach().numpy()), True
    for values, refused in ((NEVER, True), (SOMETIMES, False)):
        for other in values:
            yield repr(other), other, refused


@pytest.fixture(autouse=True)
def usual_pool() -> Iterator[None]:
    yield
    moeroute.set_memory_pool(True, max_idle_bytes="largest")


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_of_every_function(name: str) -> None:
    """Ours, with the function's name and the argument's, or a result; and nothing is written before an error."""
    function, arguments = CALLS[name]
    operators = [name.partition(",")[0]]
    if operators == ["nn.MoE"]:
        operators += ["nn.Router"]
    if operators[0].startswith("nn."):
        operators += ["gating_topk"]  # the options are passed on
    buffers = [part for part, _ in tensors_of(arguments.get("out"))]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # nested, CSR and quantized tensors are announced as unfinished
        function(**arguments)
        for argument in arguments:
            for what, value, refused in odd_values(arguments[argument]):
                case = f"{name}: {argument} is {what}"
                for buffer in buffers:
                    buffer.fill_(7)
                try:
                    function(**{**arguments, argument: value})
                except (ValueError, TypeError) as error:
                    text = str(error)
                    ours = text.startswith("moeroute.") and " must be " in text and "; got " in text
                    assert ours, f"{case}: {text}"
                    if refused:
                        assert any(text.startswith(f"moeroute.{o}: {argument}") for o in operators), f"{case}: {text}"
                    for buffer in buffers:
                        assert bool((buffer == 7).all()), f"{case}: it was written"
                except Exception as error:
                    raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
                else:
                    assert not refused, f"{case} was taken"


def with_gradients(value: Any) -> Any:
    return value.clone().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("backend", (5, b"cpu", np.bool_(True), ("cpu",), ["cpu"]))
@pytest.mark.parametrize(
    "name", [name for name, (_, given) in CALLS.items() if "backend" in given and "nn." not in name]
)
def test_a_backend_that_is_no_word_where_gradients_are_recorded(name: str, backend: Any) -> None:
    """The registered operator's way: torch would speak of C++ types."""
    function, arguments = CALLS[name]
    recorded = {
        argument: with_gradients(value) for argument, value in arguments.items() if argument not in ("out", "init")
    }
    with pytest.raises((TypeError, ValueError), match=r"^moeroute\.\w+: backend must be .*; got "):
        function(**{**recorded, "backend": backend})


def test_the_table_has_every_public_function() -> None:
    public = {name for name, value in vars(moeroute).items() if callable(value) and not name.startswith("_")}
    without_arguments = {"Gating", "BalanceStatistics", "empty_cache", "memory_stats"}  # the first two are results
    assert public - without_arguments <= {name.partition(",")[0] for name in CALLS}


def on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, moeroute.RoutingPlan):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return moeroute.RoutingPlan(**{name: on_meta(field) for name, field in fields.items()})
    if isinstance(value, torch.nn.Module):
        return copy.deepcopy(value).to("meta")
    if isinstance(value, moeroute.Gating):
        return moeroute.Gating(*map(on_meta, value))
    return value


def shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, moeroute.RoutingPlan):
        return [shapes(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [shapes(part) for part in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("name", [name for name in CALLS if name != "set_memory_pool"])
def test_meta_tensors_give_shapes(name: str, grad: bool) -> None:
    """Where no size depends on data; else the error says what must be given. `out` there has no memory."""
    function, arguments = CALLS[name]
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        return
    method = getattr(function, "__self__", None)
    with torch.set_grad_enabled(grad):
        expected = shapes(function(**{**arguments, "out": None} if "out" in arguments else arguments))
        if isinstance(function, torch.nn.Module):
            function = on_meta(function)
        elif isinstance(method, torch.nn.Module):
            function = getattr(on_meta(method), function.__name__)
        moved = {argument: on_meta(value) for argument, value in arguments.items()}
        if isinstance(moved.get("init"), tuple):
            moved["init"] = tuple(map(on_meta, moved["init"]))
        if moved.get("out") is not None:
            out = moved["out"]
            moved["out"] = tuple(map(on_meta, out)) if isinstance(out, tuple) else on_meta(out)
            with pytest.raises(ValueError, match=r"out(\[0\])? must be a tensor that has memory; got one on meta"):
                function(**{**moved, "num_rows": R} if "num_rows" in moved else moved)
            moved["out"] = None
        if moved.get("num_rows", R) is None:
            if name == "plan_from_routing_map":
                with pytest.raises(ValueError, match=r"topk \(or num_slots\) must be given for tensors on meta"):
                    function(**moved)
                return
            with pytest.raises(ValueError, match="num_rows must be given for tensors on meta"):
                function(**moved)
            return
        assert shapes(function(**moved)) == expected
