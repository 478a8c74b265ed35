"""torch_npu's init, finalize and re-routing against loops in NumPy written from the operators' definitions."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moeroute.interop.torch_npu import routing as npu
from moeroute.interop.torch_npu.arguments import FUNCTIONS

Array = npt.NDArray[Any]
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
N, K, H, E = 6, 3, 8, 5


def drawn(seed: int, dtype: torch.dtype, index: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    """x [N, H] and ids [N, K], -1 and E among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, H, generator=generator).to(dtype)
    return x, torch.randint(-1, E + 1, (N, K), generator=generator).to(index)


class Routed:
    """Init routing by the book: a stable sort of the slots by expert, those below the range last."""

    def __init__(self, ids: Tensor, first: int, last: int) -> None:
        flat = ids.flatten().numpy().astype(np.int64)
        keys = np.where(flat < first, np.iinfo(np.int64).max, flat)
        self.order = np.argsort(keys, kind="stable")
        self.valid = int(((flat >= first) & (flat < last)).sum())
        self.experts = flat[self.order[: self.valid]]
        self.counts = np.array([(flat == e).sum() for e in range(first, last)])
        self.first = first

    def numbers(self) -> Array:
        found = np.full(len(self.order), -1)
        found[self.order[: self.valid]] = np.arange(self.valid)
        return found

    def dropped(self, num_experts: int, capacity: int) -> Array:
        """The slot of each place [E * C], -1 where there is none."""
        places = np.full((num_experts, capacity), -1)
        filled = [0] * num_experts
        for slot, expert in zip(self.order[: self.valid], self.experts, strict=True):
            if filled[expert] < capacity:
                places[expert, filled[expert]] = slot
                filled[expert] += 1
        return places.reshape(-1)


def gathered(values: Tensor, slots: Array, topk: int) -> Tensor:
    """The token of each slot, zeros for -1."""
    rows = values[torch.from_numpy(np.maximum(slots, 0) // topk)]
    return torch.where(torch.from_numpy(slots < 0).view(-1, *[1] * (values.ndim - 1)), torch.zeros_like(rows), rows)


def int8_of(values: Array) -> Array:
    return np.clip(np.rint(values), -128, 127)


RANGES: tuple[list[int], ...] = ([], [0, E], [1, 4], [3, E], [0, 1])


@given(
    st.integers(0, 2**31),
    st.sampled_from((*FLOATS, torch.int8)),
    st.sampled_from((torch.int32, torch.int64)),
    st.sampled_from(RANGES),
    st.sampled_from((-1, 0, 4, 17, 100)),
    st.sampled_from((0, 1, 2)),
    st.sampled_from((0, 1)),
    st.sampled_from(("none", "token", "block")),
)
def test_dropless_without_quantisation(
    seed: int,
    dtype: torch.dtype,
    index: torch.dtype,
    active_range: list[int],
    active_num: int,
    count_type: int,
    row_idx_type: int,
    scaled: str,
) -> None:
    x, ids = drawn(seed, torch.float32, index)
    x = (x * 10).to(dtype)
    scale = {"none": None, "token": torch.rand(N), "block": torch.rand(N, 1, 2).to(torch.float8_e4m3fn)}[scaled]
    rows, numbers, counts, scales = npu.npu_moe_init_routing_v2(
        x,
        ids,
        scale=scale,
        active_num=active_num,
        expert_num=E,
        expert_tokens_num_type=count_type,
        active_expert_range=active_range,
        row_idx_type=row_idx_type,
    )
    first, last = active_range or (0, E)
    model = Routed(ids, first, last)
    length = N * K if active_num <= 0 else min(active_num, N * K)
    slots = np.full(length, -1)
    slots[: min(length, model.valid)] = model.order[: min(length, model.valid)]
    assert rows.dtype is dtype
    assert torch.equal(rows, gathered(x, slots, K))
    assert numbers.dtype is torch.int32
    assert np.array_equal(numbers.numpy(), model.order if row_idx_type else model.numbers())
    wanted = model.counts.cumsum() if count_type == 0 else model.counts
    if count_type == 2:
        pairs = [(first + i, count) for i, count in enumerate(model.counts) if count]
        wanted = np.array(pairs + [(0, 0)] * (E - len(pairs)))
    assert counts.dtype is torch.int64
    assert np.array_equal(counts.numpy(), wanted)
    if scale is None:
        assert torch.equal(scales, torch.zeros(length))
    else:
        assert scales.dtype is scale.dtype
        assert torch.equal(scales.float(), gathered(scale.float(), slots, K))


@given(
    st.integers(0, 2**31),
    st.sampled_from(FLOATS),
    st.integers(1, 4),
    st.sampled_from((-1, 0, 1)),
    st.booleans(),
)
def test_drop_and_pad(seed: int, dtype: torch.dtype, capacity: int, quant_mode: int, scaled: bool) -> None:
    x, ids = drawn(seed, dtype)
    scale = None
    if quant_mode == 0:
        scale = torch.tensor([3.0])
    elif scaled:
        scale = torch.rand(N) if quant_mode == -1 else torch.rand(E, H)
    rows, numbers, counts, scales = npu.npu_moe_init_routing_v2(
        x,
        ids,
        scale=scale,
        expert_capacity=capacity,
        expert_num=E,
        drop_pad_mode=1,
        expert_tokens_num_type=1,
        quant_mode=quant_mode,
    )
    model = Routed(ids, 0, E)
    slots = model.dropped(E, capacity)
    places = np.full(N * K, -1)
    places[slots[slots >= 0]] = np.flatnonzero(slots >= 0)
    assert np.array_equal(numbers.numpy(), places)
    assert np.array_equal(counts.numpy(), model.counts)  # before the capacity
    flat = rows.view(E * capacity, H)
    tokens = gathered(x.float(), slots, K).numpy()
    if quant_mode == -1:
        assert torch.equal(flat, gathered(x, slots, K))
        assert torch.equal(scales, torch.zeros(E * capacity) if scale is None else gathered(scale, slots, K))
    elif quant_mode == 0:
        assert np.array_equal(flat.numpy(), int8_of(tokens * np.float32(3)))
        assert torch.equal(scales, torch.zeros(E * capacity))
    else:
        factors = np.ones((E, H), np.float32) if scale is None else scale.numpy()
        check_dynamic(flat, scales, tokens * np.repeat(factors, capacity, 0), slots >= 0)


def check_dynamic(rows: Tensor, scales: Tensor, values: Array, used: Array) -> None:
    """int8 rows and their scales, by the definition; rows without a slot and rows of zeros are 0 with scale 0."""
    wanted = np.abs(values).max(1) / np.float32(127)
    np.testing.assert_array_equal(scales.numpy(), np.where(used, wanted, 0).astype(np.float32))
    safe = np.where(wanted > 0, wanted, 1)[:, None].astype(np.float32)
    expected = np.where(used[:, None], int8_of(values / safe), 0)
    # A quotient that float32 rounds to a half may go either way in NumPy's division and the kernel's: none is seen.
    np.testing.assert_array_equal(rows.numpy(), expected)


@given(st.integers(0, 2**31), st.sampled_from(FLOATS), st.sampled_from(RANGES), st.sampled_from(("none", "one", "all")))
def test_dynamic_int8(seed: int, dtype: torch.dtype, active_range: list[int], factors: str) -> None:
    x, ids = drawn(seed, dtype)
    x[0] = 0
    first, last = active_range or (0, E)
    scale = {"none": None, "one": torch.rand(1, H), "all": torch.rand(last - first, H)}[factors]
    rows, _, _, scales = npu.npu_moe_init_routing_v2(
        x, ids, scale=scale, expert_num=E, active_expert_range=active_range, quant_mode=1
    )
    model = Routed(ids, first, last)
    slots = np.full(N * K, -1)
    slots[: model.valid] = model.order[: model.valid]
    values = gathered(x.float(), slots, K).numpy()
    if scale is not None:
        by_row = np.zeros(N * K, np.int64)
        if len(scale) > 1 or factors == "all":
            by_row[: model.valid] = model.experts - first
        values = values * scale.numpy()[by_row]
    check_dynamic(rows, scales, values, slots >= 0)


@pytest.mark.parametrize("offset", [None, 0.75])
@pytest.mark.parametrize("dtype", FLOATS)
def test_static_int8(dtype: torch.dtype, offset: float | None) -> None:
    x, ids = drawn(3, dtype)
    shift = None if offset is None else torch.tensor([offset])
    rows, _, _, scales = npu.npu_moe_init_routing_v2(
        x * 30, ids, scale=torch.tensor([2.5]), offset=shift, expert_num=E, quant_mode=0
    )
    model = Routed(ids, 0, E)
    tokens = (x * 30).float().numpy()[model.order[: model.valid] // K]
    wanted = int8_of(tokens * np.float32(2.5) + np.float32(offset or 0))
    assert np.array_equal(rows[: model.valid].numpy(), wanted)
    assert not rows[model.valid :].any()
    assert torch.equal(scales, torch.zeros(N * K))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dynamic_int4(dtype: torch.dtype, scaled: bool) -> None:
    x, ids = drawn(4, dtype)
    x[1] = 0
    scale = torch.rand(1, H) if scaled else None
    rows, _, _, scales = npu.npu_moe_init_routing_v2(x, ids, scale=scale, expert_num=E, quant_mode=13)
    model = Routed(ids, 0, E)
    tokens = x.float().numpy()[model.order[: model.valid] // K]
    if scale is not None:
        tokens = tokens * scale.numpy()
    wanted = np.abs(tokens).max(1) / np.float32(7)
    np.testing.assert_array_equal(scales[: model.valid].numpy(), wanted)
    numbers = np.clip(np.rint(tokens / np.where(wanted > 0, wanted, 1)[:, None]), -8, 7).astype(np.int64) & 15
    assert rows.dtype is torch.uint8
    np.testing.assert_array_equal(rows[: model.valid].numpy(), numbers[:, 0::2] + 16 * numbers[:, 1::2])
    assert not rows[model.valid :].any()


def test_one_expert_a_token_of_an_all_to_all() -> None:
    """ids [n, 1] with the scales of int8 rows, count type and active_num at their defaults."""
    x = torch.arange(8, dtype=torch.int8).view(4, 2)
    rows, numbers, counts, scales = npu.npu_moe_init_routing_v2(
        x, torch.tensor([[1], [0], [1], [0]]), scale=torch.tensor([0.1, 0.2, 0.3, 0.4]), expert_num=2,
        expert_tokens_num_flag=True,
    )  # fmt: skip
    assert rows.tolist() == [[2, 3], [6, 7], [0, 1], [4, 5]]
    assert numbers.tolist() == [2, 0, 3, 1]
    assert counts.tolist() == [2, 4]
    assert torch.equal(scales, torch.tensor([0.2, 0.4, 0.1, 0.3]))


def test_no_tokens() -> None:
    for mode in (-1, 1, 13):
        rows, numbers, counts, scales = npu.npu_moe_init_routing_v2(
            torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.int32), expert_num=3, quant_mode=mode
        )
        assert rows.shape == (0, 2 if mode == 13 else 4)
        assert numbers.shape == scales.shape == (0,)
        assert counts.tolist() == [0, 0, 0]


# ---------------------------------------------------------------------------- older forms


@pytest.mark.parametrize("active_num", [0, 2, N, 100])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("by_column", [True, False])
def test_first_init_routing(dtype: torch.dtype, active_num: int, by_column: bool) -> None:
    """Slots are numbered by column, or in any other way: a number means the token number % N all the same."""
    x, ids = drawn(5, dtype)
    row_idx = torch.arange(N * K, dtype=torch.int32).view(K, N).t().contiguous()
    if not by_column:
        shuffled = torch.randperm(N * K, generator=torch.Generator().manual_seed(7))
        row_idx = row_idx.flatten()[shuffled].view(N, K)
    rows, numbers, experts = npu.npu_moe_init_routing(x, row_idx, ids, active_num)
    order = np.argsort(ids.flatten().numpy(), kind="stable")
    source = row_idx.flatten().numpy()[order]
    wanted = np.empty(N * K, np.int64)
    wanted[source] = np.arange(N * K)
    length = min(active_num, N) * K
    assert torch.equal(rows, x[torch.from_numpy(source[:length] % N).long()])
    assert np.array_equal(numbers.numpy(), wanted)
    assert np.array_equal(experts.numpy(), ids.flatten().numpy()[order])
    assert numbers.dtype is experts.dtype is torch.int32


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("quant_mode", [0, 1])
@pytest.mark.parametrize("drop", [False, True])
def test_init_routing_quant(drop: bool, quant_mode: int, mode: int, flag: bool) -> None:
    x, ids = drawn(6, torch.float32)
    capacity = 2
    found = npu.npu_moe_init_routing_quant(
        x,
        ids,
        scale=torch.tensor([4.0]) if quant_mode == 0 else torch.ones(E, H),
        offset=torch.tensor([1.0]) if quant_mode == 0 else None,
        active_num=7,
        expert_capacity=capacity,
        expert_num=E,
        drop_pad_mode=int(drop),
        expert_tokens_num_mode=mode,
        expert_tokens_before_capacity_flag=flag,
        quant_mode=quant_mode,
    )
    rows, numbers, counts, before, scales = found
    model = Routed(ids, 0, E)
    slots = model.dropped(E, capacity) if drop else model.order[:7]
    assert rows.dtype is torch.int8
    assert rows.shape == ((E, capacity, H) if drop else (7, H))
    tokens = gathered(x, slots, K).numpy()
    if quant_mode:
        assert scales is not None
        check_dynamic(rows.view(-1, H), scales, tokens, slots >= 0)
    else:
        assert scales is None
        half = tokens.astype(np.float16) * np.float16(4) + np.float16(1)
        expected = np.where(slots[:, None] >= 0, int8_of(half.astype(np.float32)), 0)
        assert np.array_equal(rows.view(-1, H).numpy(), expected)
    if drop or mode == 0:
        assert counts is None
    else:
        assert counts is not None
        assert counts.dtype is torch.int32
        assert np.array_equal(counts.numpy(), model.counts.cumsum() if mode == 1 else model.counts)
    if drop and flag:
        assert before is not None
        assert np.array_equal(before.numpy(), model.counts)
    else:
        assert before is None
    assert numbers.dtype is torch.int32


@given(
    st.integers(0, 2**31),
    st.sampled_from(FLOATS),
    st.sampled_from((0, 1, 2, 3)),
    st.booleans(),
    st.booleans(),
    st.sampled_from(("none", "first", "second", "both")),
    st.sampled_from((None, torch.float32, torch.bfloat16)),
)
def test_finalize_routing(
    seed: int,
    dtype: torch.dtype,
    drop_pad_mode: int,
    padded: bool,
    biased: bool,
    skips: str,
    scales_dtype: torch.dtype | None,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    topk = 1 if scales_dtype is None else K
    rows = values(E, 3, H) if padded else values(N * topk, H)
    flat = rows.view(-1, H)
    index = torch.randint(-1, len(flat), (N * topk,), generator=generator, dtype=torch.int32)
    skip1 = values(N, H) if skips in ("first", "both") else None
    skip2 = values(N, H) if skips in ("second", "both") else None
    bias = values(E, H) if biased else None
    experts = torch.randint(0, E, (N, topk), generator=generator, dtype=torch.int32) if biased else None
    scales = None if scales_dtype is None else torch.rand(N, topk, generator=generator).to(scales_dtype)
    out = npu.npu_moe_finalize_routing(rows, skip1, skip2, bias, scales, index, experts, drop_pad_mode, topk)
    expected = torch.zeros(N, H, dtype=torch.float64)
    for skip in (skip1, skip2):
        if skip is not None:
            expected += skip
    for t in range(N):
        for j in range(topk):
            row = int(index[t * topk + j if drop_pad_mode in (2, 3) else j * N + t])
            if row >= 0:
                term = flat[row].double()
                if bias is not None and experts is not None:
                    term = term + bias[experts[t, j]].double()
                expected[t] += term * (1 if scales is None else float(scales[t, j]))
    bound = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}[dtype]
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound)


def test_init_and_finalize_are_inverse_by_row() -> None:
    x, ids = drawn(7, torch.float32)
    rows, numbers, _, _ = npu.npu_moe_init_routing_v2(x, ids, expert_num=E)
    out = npu.npu_moe_finalize_routing(rows, None, None, None, torch.ones(N, K), numbers, None, 2)
    count = ((ids >= 0) & (ids < E)).sum(1, keepdim=True)
    torch.testing.assert_close(out, x * count)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_compute_expert_tokens(dtype: torch.dtype) -> None:
    ids = torch.tensor([0, 0, 2, 2, 2, 5], dtype=dtype)
    found = npu.npu_moe_compute_expert_tokens(ids, 5)
    assert found.dtype is dtype
    assert found.tolist() == [2, 2, 5, 5, 5]


@pytest.mark.parametrize("scales", ["none", "rows", "blocks"])
@pytest.mark.parametrize("idx_type", [0, 1])
@pytest.mark.parametrize("num_type", [0, 1])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_re_routing(index: torch.dtype, num_type: int, idx_type: int, scales: str) -> None:
    sizes = torch.tensor([[2, 0, 1], [1, 3, 0]], dtype=index)
    tokens = torch.arange(14, dtype=torch.int8).view(7, 2)
    given_scales = {"none": None, "rows": torch.rand(7), "blocks": torch.rand(7, 4)}[scales]
    rows, moved, idx, counts = npu.npu_moe_re_routing(
        tokens, sizes, per_token_scales=given_scales, expert_token_num_type=num_type, idx_type=idx_type
    )
    source = torch.tensor([0, 1, 3, 4, 5, 6, 2])  # written out: expert 0 of both ranks, expert 1, expert 2
    assert torch.equal(rows, tokens[source])
    assert torch.equal(moved, torch.ones(7) if given_scales is None else given_scales[source])
    assert idx.dtype is torch.int32
    assert torch.equal(idx.long(), torch.argsort(source) if idx_type else source)
    assert counts.dtype is index
    assert counts.tolist() == ([3, 6, 7] if num_type == 0 else [3, 3, 1])


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_update_expert(index: torch.dtype) -> None:
    table = torch.tensor([[1, 4, -1, -1], [3, 0, 2, 5], [2, 1, 3, -1]], dtype=index)
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 1]], dtype=index)
    found, mask = npu.npu_moe_update_expert(ids, table, local_rank_id=5, world_size=8)
    place = {1: 5 // 8, 3: 5 // 3, 2: 5 // 4}  # rank // ceil(world / count)
    wanted = [[int(table[e, 1 + place[int(table[e, 0])]]) for e in row] for row in ids.tolist()]
    assert found.tolist() == wanted
    assert found.dtype is index
    assert mask.all()
    turns, mask = npu.npu_moe_update_expert(
        ids,
        table,
        expert_scales=torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.9, 0.1], [0.2, 0.8]]),
        pruning_threshold=torch.tensor([0.5, 0.2]),
        active_mask=torch.tensor([True, True, True, False]),
        balance_mode=1,
    )
    wanted = [[int(table[e, 1 + t % int(table[e, 0])]) for e in row] for t, row in enumerate(ids.tolist())]
    assert turns.tolist() == wanted
    assert mask.tolist() == [[True, True], [True, True], [True, False], [False, False]]


# ---------------------------------------------------------------------------- bad input

X, IDS = torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int32)
V2: dict[str, Any] = {"x": X, "expert_idx": IDS, "expert_num": 4}
QUANT: dict[str, Any] = {"x": X, "expert_idx": IDS}
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "x of one axis": ("npu_moe_init_routing_v2", V2 | {"x": X[0]}, r"x must be of shape \[\*, \*\]"),
    "ids of one axis": ("npu_moe_init_routing_v2", V2 | {"expert_idx": IDS[0]}, r"expert_idx must be of shape \[2, \*\]"),
    "no experts": ("npu_moe_init_routing_v2", V2 | {"expert_num": -1}, "expert_num must be in 1.."),
    "drop mode": ("npu_moe_init_routing_v2", V2 | {"drop_pad_mode": 2}, "drop_pad_mode must be one of 0, 1; got 2"),
    "count type": ("npu_moe_init_routing_v2", V2 | {"expert_tokens_num_type": 3}, "expert_tokens_num_type must be one"),
    "row type": ("npu_moe_init_routing_v2", V2 | {"row_idx_type": 2}, "row_idx_type must be one of 0, 1; got 2"),
    "range": ("npu_moe_init_routing_v2", V2 | {"active_expert_range": [2, 5]}, r"0 <= lo < hi <= 4; got \[2, 5\]"),
    "half a range": ("npu_moe_init_routing_v2", V2 | {"active_expert_range": [2]}, r"empty or \(lo, hi\); got \[2\]"),
    "capacity": ("npu_moe_init_routing_v2", V2 | {"drop_pad_mode": 1}, "expert_capacity must be in 1.."),
    "unknown quantisation": ("npu_moe_init_routing_v2", V2 | {"quant_mode": 99}, "quant_mode must be one of .* got 99"),
    "static without scale": ("npu_moe_init_routing_v2", V2 | {"quant_mode": 0}, "scale must be given with quant_mode 0"),
    "int8 again": ("npu_moe_init_routing_v2", V2 | {"x": X.to(torch.int8), "quant_mode": 1}, "x must be float16"),
    "scale of others": ("npu_moe_init_routing_v2", V2 | {"scale": torch.ones(3)}, r"scale must be \[N, ...\] with N = 2"),
    "factors of others": (
        "npu_moe_init_routing_v2",
        V2 | {"quant_mode": 1, "scale": torch.ones(3, 4)},
        r"scale must be \[1, H\] or \[4, H\]; got \[3, 4\]",
    ),
    "int4 by type": ("npu_moe_init_routing_v2", V2 | {"quant_mode": 1, "x_dtype": 285}, "quant_mode=13"),
    "float ids": ("npu_moe_init_routing_v2", V2 | {"expert_idx": IDS.float()}, "expert_ids must be"),
    "odd H of int4": (
        "npu_moe_init_routing_v2",
        V2 | {"x": torch.zeros(2, 3), "quant_mode": 13},
        "H of x must be even",
    ),
    "int64 ids": (
        "npu_moe_init_routing",
        {"x": X, "row_idx": IDS, "expert_idx": IDS.long(), "active_num": 2},
        r"expert_idx must be torch\.int32; got torch\.int64",
    ),
    "quantisation of quant": ("npu_moe_init_routing_quant", QUANT | {"quant_mode": -1}, "quant_mode must be one of 0, 1"),
    "bias without experts": (
        "npu_moe_finalize_routing",
        {
            "expanded_permuted_rows": X, "skip1": None, "skip2": None, "bias": X, "scales": None,
            "expanded_src_to_dst_row": torch.zeros(2).int(), "export_for_source_row": None,
        },
        "export_for_source_row must be given with bias",
    ),
    "rows of others": (
        "npu_moe_re_routing",
        {"tokens": X, "expert_token_num_per_rank": torch.ones(2, 3).int()},
        "expert_token_num_per_rank must be counts of A = 2 rows, as tokens; got 6 rows in all",
    ),
    "no ranks": ("npu_moe_update_expert", {"expert_ids": IDS, "eplb_table": IDS}, "world_size must be at least 1"),
    "a mask alone": (
        "npu_moe_update_expert",
        {"expert_ids": IDS, "eplb_table": IDS, "balance_mode": 1, "expert_scales": torch.ones(2, 3)},
        "pruning_threshold must be given",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    name, arguments, message = BAD[case]
    with pytest.raises(RuntimeError, match=message) as caught:
        FUNCTIONS[name](**arguments)
    assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize("quant_mode", [6, 7, 8, 9])
def test_quantisations_that_are_not_built(quant_mode: int) -> None:
    message = rf"^npu_moe_init_routing_v2: quant_mode={quant_mode} \((HiFloat8|MXFP4)\) is not available on a CPU$"
    with pytest.raises(NotImplementedError, match=message):
        npu.npu_moe_init_routing_v2(**V2, quant_mode=quant_mode)
