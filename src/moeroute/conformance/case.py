"""A case: an operator, its inputs by name, what it must return, and the digests of that.

case -> problem (arguments made from the generator) -> results (named tensors) -> SHA-256 of each
"""

import dataclasses
import hashlib
import importlib.resources
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

import moeroute
from moeroute.conformance.generator import Stream
from moeroute.dispatch import Backend
from moeroute.plan import RoutingPlan

Results = dict[str, Tensor]
DIGESTS = "digests.json"
PLAN_FIELDS = tuple(field.name for field in dataclasses.fields(RoutingPlan))
# The names of an operator's results, in the order in which it returns them. A plan's are its fields.
RESULTS: dict[str, tuple[str, ...]] = {
    "gating_topk": ("weights", "expert_ids", "scores"),
    "gating_topk_backward": ("grad_logits",),
    "permute": ("rows",),
    "unpermute": ("tokens",),
    "permute_backward": ("grad_tokens",),
    "unpermute_backward": ("grad_rows", "grad_weights"),
    "permute_weights": ("row_weights",),
    "permute_weights_backward": ("grad_weights",),
    "slot_weights": ("slot_weights",),
    "dense_weights": ("matrix",),
    "normalize_scores": ("normalized",),
    "routing_map_of": ("routing_map",),
    "routing_map_from_ids": ("routing_map",),
    "row_id_map": ("row_id_map",),
    "spread": ("rows",),
    "combine": ("tokens",),
    "row_dots": ("dots",),
    "dynamic_quantize": ("quantized", "scales"),
    "spread_quantized": ("quantized", "scales"),
    "quantize": ("quantized",),
    "activate": ("activated",),
    "activate_backward": ("grad_x", "activated"),
    "megatron.permute": ("rows", "row_probs", "sorted_indices", "pad_offsets", "padded_counts"),
    "megatron.unpermute": ("tokens",),
    "megatron.sort_chunks_by_idxs": ("rows", "row_probs"),
    "megatron.topk_routing_with_score_function": ("probs", "routing_map"),
    "transformer_engine.moe_permute": ("rows", "row_id_map"),
    "transformer_engine.moe_permute_with_probs": ("rows", "row_probs", "row_id_map"),
    "transformer_engine.moe_sort_chunks_by_index": ("rows",),
    "torch_npu.npu_moe_token_permute": ("rows", "sorted_indices"),
    "torch_npu.npu_moe_token_unpermute": ("tokens",),
    "torch_npu.npu_moe_token_permute_with_routing_map": ("rows", "row_probs", "sorted_indices"),
    "torch_npu.npu_moe_gating_top_k": ("weights", "expert_ids", "scores"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: `function(**arguments)`, where the arguments are made from the stream of the case's name.

    `tags` name what is special in it: "ties", "nan", "no row" (an index of -1), "empty experts", "odd hidden", ...
    `through` is "" for a function of `moeroute`, else the module that has it (`moeroute.interop.megatron`), or
    "autograd" for a gradient that comes through `torch.autograd` of the forward function, or "calls" for another
    function of calls.py.
    """

    name: str
    operator: str
    make: Callable[[Stream], dict[str, Any]] = dataclasses.field(repr=False)
    tags: frozenset[str] = frozenset()
    through: str = ""
    stream: str = ""

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        """The arguments by name, new ones at each call. Tensors are on the CPU; seed 0 is what the digests are of."""
        return self.make(Stream(self.stream or self.name, seed))

    def run(self, arguments: Mapping[str, Any], backend: Backend | None = None) -> Results:
        """What this package's function returns for these arguments."""
        if self.through in ("autograd", "calls"):
            from moeroute.conformance import calls

            found = getattr(calls, self.operator)(**arguments, backend=backend)
        elif self.through:
            found = getattr(importlib.import_module(self.through), self.operator.rpartition(".")[2])(**arguments)
        else:
            found = getattr(moeroute, self.operator)(**arguments, backend=backend)
        return named(found, self.result_names)

    @property
    def result_names(self) -> tuple[str, ...]:
        """The results' names, in their order; empty for a plan, whose fields name them, and where none are known."""
        return RESULTS.get(self.operator, ())

    @property
    def is_plan(self) -> bool:
        """Whether the operator makes a plan."""
        return self.operator.startswith("plan_from")


def named(found: Any, names: tuple[str, ...] = ()) -> Results:
    """Results by name: of a tensor, a tuple (None is left out), a plan, or a mapping.

    >>> list(named((torch.zeros(1), None, torch.ones(1)), ("a", "b", "c")))
    ['a', 'c']
    """
    if isinstance(found, RoutingPlan):
        fields = {name: getattr(found, name) for name in PLAN_FIELDS}
        return {name: _as_tensor(value) for name, value in fields.items() if value is not None}
    if isinstance(found, Mapping):
        return {str(name): _as_tensor(value) for name, value in found.items() if value is not None}
    parts = list(_flat(found))
    labels = [*names, *(f"result {i}" for i in range(len(names), len(parts)))]
    return {
        label: _as_tensor(part) for label, part in zip(labels[: len(parts)], parts, strict=True) if part is not None
    }


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for part in value:
            yield from _flat(part)
    else:
        yield value


def _as_tensor(value: Any) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.int64)


def moved(value: Any, device: torch.device | str) -> Any:
    """Tensors, and what holds them, on a device."""
    if isinstance(value, Tensor | RoutingPlan):
        return value.to(device)
    if isinstance(value, tuple | list):
        return tuple(moved(part, device) for part in value)
    if isinstance(value, dict):
        return {name: moved(part, device) for name, part in value.items()}
    return value


def each_tensor(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the arguments with its name; those of a plan as "plan.row_of_slot"."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, RoutingPlan):
            yield from each_tensor({f"{name}.{field}": getattr(value, field) for field in PLAN_FIELDS})
        elif isinstance(value, tuple | list):
            yield from each_tensor({f"{name}.{i}": part for i, part in enumerate(value)})


# ---------------------------------------------------------------------------- digests

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def canonical(tensor: Tensor) -> Tensor:
    """The same numbers, contiguous on the CPU; every NaN is the positive quiet one without a payload."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype.is_floating_point:
        nan = tensor.isnan()
        if bool(nan.any()):
            tensor = torch.where(nan, torch.full_like(tensor, torch.nan), tensor)
    return tensor


def digest(tensor: Tensor) -> str:
    """SHA-256 over the dtype, the shape and the little-endian bytes; every NaN counts as the same.

    >>> digest(torch.tensor([1.0, float("nan")]))[:16]
    'e9e19ec69302100c'
    """
    tensor = canonical(tensor)
    found = hashlib.sha256(f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n".encode())
    values = tensor.view(_BITS[tensor.element_size()]).numpy()
    found.update(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())
    return found.hexdigest()


def digests_of(results: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of each result."""
    return {name: digest(value) for name, value in results.items()}


def inputs_digest(arguments: Mapping[str, Any]) -> str:
    """One digest of all arguments, in the order of their names."""
    found = hashlib.sha256()
    for name, value in sorted({**dict(each_tensor(arguments)), **_plain(arguments)}.items()):
        found.update(f"{name}={digest(value) if isinstance(value, Tensor) else value}\n".encode())
    return found.hexdigest()


def _plain(arguments: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: str(value)
        for name, value in arguments.items()
        if not isinstance(value, Tensor | RoutingPlan) and not any(isinstance(part, Tensor) for part in _flat(value))
    }


@cache
def expected_digests() -> dict[str, dict[str, str]]:
    """What the package ships: for each case the digest of its inputs ("inputs") and of every result."""
    text = importlib.resources.files("moeroute.conformance").joinpath(DIGESTS).read_text()
    found: dict[str, dict[str, str]] = json.loads(text)
    return found
