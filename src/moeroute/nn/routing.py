"""What a forward pass decided, as values: `Routing`, its summary, and a record of many for a replay."""

from __future__ import annotations

from os import PathLike
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from moeroute import check
from moeroute.ops.balance import BalanceKind, BalanceStatistics, balance_statistics, loss_of_kind, router_z_loss
from moeroute.ops.gating.op import Gating
from moeroute.plan import RoutingPlan

FORMAT = "moeroute.RoutingRecord 1"


class RoutingSummary(NamedTuple):
    """A few numbers on one forward pass, for logs. Padding tokens count in none.

    - ``tokens``: T, without padding
    - ``largest_load``: slots that chose the busiest expert, before capacity
    - ``mean_load``: slots for each expert, on average
    - ``imbalance``: the one divided by the other, 1 where all loads are equal; 0 without slots
    - ``dropped_share``: of the slots that chose an expert, those without a row (over capacity), from 0 to 1
    - ``dead_experts``: experts that nobody chose
    """

    tokens: int
    largest_load: int
    mean_load: float
    imbalance: float
    dropped_share: float
    dead_experts: int


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

    def statistics(self, group: Any = None) -> BalanceStatistics:
        """What the router wanted, before capacity and without padding; ``.loss()`` is the balance loss.

        ``group`` as in `balance_statistics`.
        """
        ids, mask = self.gating.expert_ids, self.padding_mask
        return balance_statistics(self.probabilities, ids, padding_mask=mask, group=group)

    def balance_loss(
        self, kind: BalanceKind = "micro_batch", *, num_sequences: int | None = None, group: Any = None
    ) -> Tensor:
        """The balance loss of this call's tokens, of each sequence, or of the tokens of all ranks.

        Padding counts in none of them.

        Args:
            kind: "micro_batch": of this call. "sequence": the mean over sequences of the loss of each. "global_batch":
                this rank's share of the loss of all ranks' tokens; the shares add up to it, and gradients are to be
                added up too.
            num_sequences: with "sequence": the tokens are so many sequences of one length, one after the other.
            group: with "global_batch": see `balance_statistics`; None: this rank's tokens only.

        Returns:
            A float32 scalar.
        """
        return loss_of_kind(kind, self.probabilities, self.gating.expert_ids, self.padding_mask, num_sequences, group)

    def z_loss(self) -> Tensor:
        """`router_z_loss` of the logits."""
        return router_z_loss(self.logits, padding_mask=self.padding_mask)

    def summary(self) -> RoutingSummary:
        """Largest and mean load, the share of dropped slots, dead experts. Reads three numbers back: one wait."""
        num_tokens, num_experts = self.gating.expert_ids.shape[0], self.logits.shape[1]
        load = self.statistics().tokens_per_expert
        rows = self.plan.row_of_slot
        padding = torch.zeros_like(load[0]) if self.padding_mask is None else self.padding_mask.sum()
        numbers = torch.stack([load.max(), load.sum(), (load == 0).sum(), (rows >= 0).sum(), padding])
        largest, slots, dead, kept, padded = numbers.tolist()
        mean = slots / num_experts
        return RoutingSummary(
            tokens=num_tokens - padded,
            largest_load=largest,
            mean_load=mean,
            imbalance=largest / mean if slots else 0.0,
            dropped_share=(slots - kept) / slots if slots else 0.0,
            dead_experts=dead,
        )


class RoutingRecord:
    """The experts that layers chose, call by call, to be chosen again: router replay.

    A value that the caller fills and hands on; no layer keeps it.

    >>> import torch
    >>> from moeroute.nn import MoE, RoutingRecord
    >>> layer, x = MoE(16, 32, num_experts=8, k=2), torch.randn(3, 16)
    >>> record = RoutingRecord()
    >>> output, routing = layer(x, return_routing=True)
    >>> record.append("layer 0", routing)
    >>> ids = record.expert_ids("layer 0", call=0, batch=x.shape[:-1])
    >>> bool((layer(x, expert_ids=ids) == output).all())
    True

    Slots of padding tokens are kept as -1, an empty slot. ``save`` writes tensors, strings and integers only, so that
    ``torch.load(weights_only=True)`` reads the file.
    """

    def __init__(self) -> None:
        self._calls: dict[str, list[Tensor]] = {}

    def append(self, layer: str, routing: Routing, batch: tuple[int, ...] | torch.Size | None = None) -> None:
        """Add one call of a layer.

        Args:
            layer: any name.
            routing: what the call returned.
            batch: the shape of its input without the hidden size; None is [T].
        """
        operator = "nn.RoutingRecord.append"
        _check_name(operator, layer)
        if not isinstance(routing, Routing):
            raise check.wrong_type(operator, "routing", "a moeroute.nn.Routing", routing)
        ids = routing.gating.expert_ids.detach()
        shape = tuple(ids.shape[:1]) if batch is None else _batch(operator, batch)
        if torch.Size(shape).numel() != ids.shape[0]:
            raise check.wrong_value(operator, "batch", f"a shape of {ids.shape[0]} tokens, as routing", list(shape))
        if routing.padding_mask is not None:
            ids = ids.masked_fill(routing.padding_mask[:, None], -1)
        self._calls.setdefault(layer, []).append(ids.to("cpu", torch.int32).reshape(*shape, ids.shape[1]).clone())

    def expert_ids(self, layer: str, call: int, batch: tuple[int, ...] | torch.Size) -> Tensor:
        """The experts [*batch, K] of a layer's call, for ``layer(x, expert_ids=...)``; int32, on the CPU.

        Args:
            layer: the name given to `append`.
            call: 0 for the layer's first one.
            batch: the shape of the input without the hidden size, ``x.shape[:-1]``.

        Raises:
            ValueError: a layer or call that was not recorded, or one with another batch.
        """
        operator = "nn.RoutingRecord.expert_ids"
        _check_name(operator, layer)
        if layer not in self._calls:
            raise check.wrong_value(operator, "layer", "one of " + ", ".join(map(repr, self._calls)), repr(layer))
        calls = self._calls[layer]
        check.integer(operator, "call", call)
        if not 0 <= call < len(calls):
            wanted = f"below {len(calls)}, the recorded calls of {layer!r}"
            raise check.wrong_value(operator, "call", wanted, call)
        found, shape = calls[call], _batch(operator, batch)
        if tuple(found.shape[:-1]) != shape:
            wanted = f"{list(found.shape[:-1])}, as call {call} of {layer!r}"
            raise check.wrong_value(operator, "batch", wanted, list(shape))
        return found.clone()

    @property
    def layers(self) -> list[str]:
        """The names, in the order in which they came."""
        return list(self._calls)

    def num_calls(self, layer: str) -> int:
        """Recorded calls of a layer; 0 for a name that never came."""
        return len(self._calls.get(layer, ()))

    def save(self, file: str | PathLike[str] | BinaryIO) -> None:
        """Write the record with `torch.save`."""
        torch.save({"format": FORMAT, "calls": self._calls}, file)

    @classmethod
    def load(cls, file: str | PathLike[str] | BinaryIO) -> RoutingRecord:
        """Read what `save` wrote; nothing in the file is executed.

        Raises:
            ValueError: a file that is no record.
        """
        found = torch.load(file, weights_only=True, map_location="cpu")
        record = cls()
        record._calls = _checked(found)
        return record

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutingRecord) or self.layers != other.layers:
            return False
        return all(
            len(mine) == len(theirs)
            and all(a.shape == b.shape and bool((a == b).all()) for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in zip(self._calls.values(), other._calls.values(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        calls = ", ".join(f"{layer!r}: {len(ids)}" for layer, ids in self._calls.items())
        return f"RoutingRecord({{{calls}}})"


def _check_name(operator: str, layer: Any) -> None:
    if not isinstance(layer, str):
        raise check.wrong_type(operator, "layer", "a str", layer)


def _batch(operator: str, batch: Any) -> tuple[int, ...]:
    if not isinstance(batch, tuple | list):
        raise check.wrong_type(operator, "batch", "a shape", batch)
    return tuple(check.integer(operator, "batch", size, minimum=0) for size in batch)


def _checked(found: Any) -> dict[str, list[Tensor]]:
    """What a file held, looked at: it may be anybody's."""
    operator = "nn.RoutingRecord.load"
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("calls"), dict):
        raise check.wrong_value(operator, "file", f"one that RoutingRecord.save wrote ({FORMAT!r})", "another")
    for layer, calls in found["calls"].items():
        whole = isinstance(layer, str) and isinstance(calls, list)
        if not whole or not all(isinstance(c, Tensor) and c.dtype is torch.int32 and c.ndim >= 1 for c in calls):
            raise check.wrong_value(operator, "file", "int32 expert ids by layer and call", f"another at {layer!r}")
    calls_of: dict[str, list[Tensor]] = found["calls"]
    return calls_of
