"""Expert parallelism on paper: bytes, traffic and imbalance for any number of ranks, without a process or a weight.

`plan(Layout(...))` takes the rows that every rank sends to every expert, drawn or recorded, and counts. What it counts
is what `moeroute.expert_parallel` does: see `Plan` for the formulas, and the tests for the comparison with real runs.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moeroute import check
from moeroute.dtypes import FLOATS, LARGEST
from moeroute.nn.experts import RECOMPUTE

HEADER = 8  # numbers before the counts, in the message of sizes
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of the layers and of the group.

    Args:
        tokens: of each rank, in a step.
        hidden: H.
        intermediate: I, of each expert.
        experts: E.
        topk: K.
        ranks: W.
        dtype: of weights, rows and gradients: "bfloat16", for instance.
        layers: expert layers of the model.
        recompute: "", or what backward makes again, as in `nn.MoE`: "activation", silu(gate) * up; "permute", the rows,
            which a single rank gathers again, while rows that came from other ranks are kept; or "both".
        capacity: None, or rows that each rank sends to each expert, see `expert_parallel.ExpertExchange`.
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int
    ranks: int
    dtype: str = "bfloat16"
    layers: int = 1
    recompute: str = ""
    capacity: int | None = None

    def __post_init__(self) -> None:
        operator = "scale.Layout"
        for name in ("hidden", "intermediate", "experts", "topk", "ranks", "layers"):
            check.integer(operator, name, getattr(self, name), 1, LARGEST)
        check.integer(operator, "tokens", self.tokens, 0, LARGEST)
        if self.topk > self.experts:
            raise check.wrong_value(operator, "topk", f"at most {self.experts}, as experts", self.topk)
        check.one_of(operator, "dtype", self.dtype, tuple(DTYPES))
        check.one_of(operator, "recompute", self.recompute, ("", *RECOMPUTE))
        if self.capacity is not None:
            check.integer(operator, "capacity", self.capacity, 0, LARGEST)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return DTYPES[self.dtype].itemsize

    @property
    def chunk(self) -> int:
        """Experts of a rank: ceil(E / W), fewer on the last ones."""
        return -(-self.experts // self.ranks)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step of all layers costs. R: rows that a rank receives for its experts, S: rows that it sends, its own
    included in both; b: bytes of a number.

    Bytes of a rank, for each layer but the transient ones; tokens [T, H] are the model's and not counted:

    - ``weights``, ``gradients``: 3 H I b for each of its experts
    - ``saved``: R (H + 3 I) b for the experts' gradients and S H b for the gate's. ``recompute="activation"`` takes
      R I b off, ``"permute"`` R H b, though only with one rank and no capacity, and ``"both"`` the sum
    - ``transient``: the most that one layer holds beside what is saved: in forward (R + S) H b, the rows that were sent
      and those that come back, 0 with one rank; where backward begins S H b; inside it max(H + I, 2 I) R b - S H b, or
      (H + 3 I) R b - S H b where it makes the activation again

    Traffic of a step, as bytes that a rank sends to others: rows travel four times a layer (dispatch and combine,
    forward and backward), and the numbers of rows once, unless there is a capacity.
    """

    layout: Layout
    sent: Counts  # [W] S
    received: Counts  # [W] R
    leaving: Counts  # [W] of S, those that go to other ranks
    arriving: Counts  # [W] of R, those that come from other ranks
    loads: Counts  # [E] rows of each expert
    dropped: int

    @property
    def weights(self) -> Counts:
        """[W] bytes; as many again are gradients."""
        layout = self.layout
        owned = np.clip(layout.experts - layout.chunk * np.arange(layout.ranks), 0, layout.chunk)
        return owned * 3 * layout.hidden * layout.intermediate * layout.itemsize * layout.layers

    @property
    def saved(self) -> Counts:
        """[W] bytes that forward keeps for backward."""
        layout = self.layout
        width = 2 * layout.intermediate
        if not self._activation_again:
            width += layout.intermediate
        if layout.recompute not in ("permute", "both") or not self._alone:
            width += layout.hidden
        return (self.received * width + self.sent * layout.hidden) * layout.itemsize * layout.layers

    @property
    def transient(self) -> Counts:
        """[W] bytes at the peak of one layer, beside what is saved."""
        layout = self.layout
        hidden, intermediate = layout.hidden, layout.intermediate
        width = hidden + 3 * intermediate if self._activation_again else max(hidden + intermediate, 2 * intermediate)
        sent = self.sent * hidden
        forward = 0 * sent if self._alone else sent + self.received * hidden
        return np.maximum(np.maximum(forward, sent), self.received * width - sent) * layout.itemsize

    @property
    def _activation_again(self) -> bool:
        """Whether backward makes the activation again."""
        return self.layout.recompute in ("activation", "both")

    @property
    def _alone(self) -> bool:
        """Whether rows do not travel."""
        return self.layout.ranks == 1 and self.layout.capacity is None

    @property
    def memory(self) -> Counts:
        """[W] bytes at the peak of a step."""
        return 2 * self.weights + self.saved + self.transient

    @property
    def traffic(self) -> Counts:
        """[W] bytes that a rank sends to others in a step."""
        layout = self.layout
        rows = 2 * (self.leaving + self.arriving) * layout.hidden * layout.itemsize
        sizes = np.zeros(layout.ranks, dtype=np.int64)
        if layout.capacity is None:
            owned = np.clip(layout.experts - layout.chunk * np.arange(layout.ranks), 0, layout.chunk)
            sizes = ((HEADER + owned).sum() - (HEADER + owned)) * 8
        return (rows + sizes) * layout.layers

    def summary(self) -> dict[str, Any]:
        """The figures of a report; plain numbers."""
        fullest = int(self.memory.argmax())
        mean_rows, mean_load = float(self.received.mean()), float(self.loads.mean())
        total = int(self.loads.sum()) + self.dropped
        return {
            "layout": dataclasses.asdict(self.layout),
            "experts_of_a_rank": self.layout.chunk,
            "ranks_without_experts": int((self.weights == 0).sum()),
            "rows_received": {"largest": int(self.received.max()), "mean": mean_rows},
            "imbalance_of_ranks": float(self.received.max()) / mean_rows if mean_rows else 1.0,
            "imbalance_of_experts": float(self.loads.max()) / mean_load if mean_load else 1.0,
            "experts_without_rows": int((self.loads == 0).sum()),
            "dropped_share": self.dropped / total if total else 0.0,
            "traffic_bytes": {"largest": int(self.traffic.max()), "all_ranks": int(self.traffic.sum())},
            "fullest_rank": {
                "rank": fullest,
                "weights": int(self.weights[fullest]),
                "gradients": int(self.weights[fullest]),
                "saved": int(self.saved[fullest]),
                "transient": int(self.transient[fullest]),
                "all": int(self.memory[fullest]),
            },
        }


def plan(layout: Layout, counts: Counts | None = None, *, skew: float = 0.0, seed: int = 0) -> Plan:
    """Count what a routing costs.

    Args:
        layout: sizes.
        counts: int64 [W, E]: the slots that each rank sends to each expert. None: drawn.
        skew: of a drawn routing: expert e is chosen in proportion to 1 / (e + 1) ** skew, in an order that is drawn;
            0: all alike. Slots are drawn one by one, so that a token may have an expert twice.
        seed: of the draw.

    Returns:
        A `Plan`.

    Raises:
        ValueError: counts of another shape, or negative ones.

    >>> sizes = Layout(tokens=4, hidden=8, intermediate=4, experts=4, topk=1, ranks=3, dtype="float32")
    >>> found = plan(sizes, np.array([[4, 0, 0, 0], [0, 2, 2, 0], [1, 1, 1, 1]]))
    >>> found.received.tolist(), found.leaving.tolist(), found.arriving.tolist()
    ([8, 4, 0], [0, 2, 4], [4, 2, 0])
    >>> found.weights.tolist()  # two experts, two, none: 3 * 8 * 4 numbers of 4 bytes each
    [768, 768, 0]
    """
    operator = "scale.plan"
    shape = (layout.ranks, layout.experts)
    if counts is None:
        counts = drawn(layout, skew, seed)
    if counts.shape != shape or counts.dtype.kind not in "iu" or (counts < 0).any():
        wanted = f"of integers of at least 0 and shape {list(shape)}"
        raise check.wrong_value(operator, "counts", wanted, f"{counts.dtype} {list(counts.shape)}")
    counts = counts.astype(np.int64)
    if layout.capacity is not None:
        dropped = int(np.maximum(counts - layout.capacity, 0).sum())
        loads = np.minimum(counts, layout.capacity).sum(axis=0)
        counts = np.full(shape, layout.capacity, dtype=np.int64)  # the buffers have room for all
    else:
        dropped, loads = 0, counts.sum(axis=0)
    starts = np.minimum(layout.chunk * np.arange(layout.ranks + 1), layout.experts)
    sums = np.concatenate([np.zeros((layout.ranks, 1), dtype=np.int64), counts.cumsum(axis=1)], axis=1)
    to = sums[:, starts[1:]] - sums[:, starts[:-1]]  # [W, W]
    own = np.diagonal(to)
    sent, received = to.sum(axis=1), to.sum(axis=0)
    return Plan(layout, sent, received, sent - own, received - own, loads, dropped)


def drawn(layout: Layout, skew: float, seed: int) -> Counts:
    """[W, E] slots, drawn; see `plan`."""
    check.number("scale.plan", "skew", skew)
    generator = np.random.default_rng(check.integer("scale.plan", "seed", seed, 0))
    chances = (np.arange(layout.experts) + 1.0) ** -skew
    chances = generator.permutation(chances / chances.sum())
    return generator.multinomial(layout.tokens * layout.topk, chances, size=layout.ranks)


def recorded(layout: Layout, path: Path) -> Counts:
    """[W, E] slots of a file: `.npy`, or `.pt` of `torch.save`, with integers.

    Either counts [W, E], or expert ids [W * tokens, K], the ranks one after the other; ids outside [0, E) are empty
    slots.
    """
    operator = "scale.recorded"
    values = np.load(path) if path.suffix == ".npy" else torch.load(path, weights_only=True).numpy()
    if values.ndim != 2 or values.dtype.kind not in "iu":
        wanted = "a table of integers"
        raise check.wrong_value(operator, "routing", wanted, f"{values.dtype} {list(values.shape)} in {path}")
    if values.shape == (layout.ranks, layout.experts):
        return values.astype(np.int64)
    if values.shape[0] != layout.ranks * layout.tokens:
        wanted = (
            f"[W, E] = {[layout.ranks, layout.experts]} or [W * tokens, K] with {layout.ranks * layout.tokens} rows"
        )
        raise check.wrong_value(operator, "routing", wanted, f"shape {list(values.shape)} in {path}")
    ids = values.reshape(layout.ranks, -1).astype(np.int64)
    ids = np.where((ids >= 0) & (ids < layout.experts), ids, layout.experts)
    places = np.arange(layout.ranks)[:, None] * (layout.experts + 1) + ids
    counts = np.bincount(places.ravel(), minlength=layout.ranks * (layout.experts + 1))
    return counts.reshape(layout.ranks, -1)[:, : layout.experts].astype(np.int64)
