"""torch_npu's permute and unpermute against loops over slots, and their gradients against float64 autograd."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moeroute.interop.torch_npu import permutation as npu
from moeroute.interop.torch_npu.arguments import FUNCTIONS

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-13}


def close(actual: Tensor, wanted: Tensor) -> None:
    """Of one shape, and as near as the dtype allows to what float64 gives."""
    bound = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=bound, atol=bound)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values in other strides."""
    if layout == "transposed":
        return tensor.t().contiguous().t()
    if layout == "strided":
        return tensor.repeat_interleave(2, -1)[..., ::2]
    if layout == "offset":
        return torch.cat((tensor.new_zeros(1, *tensor.shape[1:]), tensor))[1:]
    return tensor


LAYOUTS = ("contiguous", "transposed", "strided", "offset")


@st.composite
def slots(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """tokens [N, H] float64 and indices [N, K]."""
    num_tokens, topk, experts = draw(st.integers(0, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    hidden = draw(st.sampled_from((1, 3, 8, 70)))
    tokens = torch.randn(num_tokens, hidden, generator=generator, dtype=torch.float64)
    return tokens, torch.randint(-1, experts, (num_tokens, topk), generator=generator)


def inverse(order: Tensor) -> Tensor:
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order))
    return found


@given(
    slots(),
    st.sampled_from(FLOATS),
    st.sampled_from((torch.int32, torch.int64)),
    st.sampled_from((None, 0, 3, 1000, -2)),
    st.sampled_from(LAYOUTS),
)
def test_permute_by_index(
    case: tuple[Tensor, Tensor], dtype: torch.dtype, index: torch.dtype, wanted: int | None, layout: str
) -> None:
    tokens, indices = case[0].to(dtype), case[1].to(index)
    order = torch.argsort(indices.flatten(), stable=True)
    num_rows = min(wanted, len(order)) if wanted and wanted > 0 else max(len(order) + (wanted or 0), 0)
    leaf = laid_out(tokens, layout).requires_grad_()
    rows, sorted_indices = npu.npu_moe_token_permute(leaf, laid_out(indices, layout), wanted)
    topk = indices.shape[1]
    assert rows.dtype is dtype
    assert torch.equal(rows.detach(), tokens[order[:num_rows] // topk])
    assert sorted_indices.dtype is torch.int32
    assert torch.equal(sorted_indices.long(), inverse(order))
    grad = torch.randn(rows.shape, dtype=torch.float64)
    expected = torch.zeros(tokens.shape, dtype=torch.float64).index_add_(0, order[:num_rows] // topk, grad)
    grad = grad.to(dtype)
    (found,) = torch.autograd.grad(rows, leaf, grad)
    close(found, expected)
    by_function = npu.npu_moe_token_permute_grad(tokens, grad, indices, sorted_indices)
    by_size = npu.npu_moe_token_permute_grad_v2(grad, sorted_indices, len(tokens), dtype, topk)
    assert torch.equal(by_function, found)
    assert torch.equal(by_size, found)


def test_permute_of_one_expert_a_token_and_of_int8() -> None:
    tokens = torch.arange(6, dtype=torch.int8).view(3, 2)
    rows, sorted_indices = npu.npu_moe_token_permute(tokens, torch.tensor([2, 0, 1]))
    assert rows.tolist() == [[2, 3], [4, 5], [0, 1]]
    assert sorted_indices.tolist() == [2, 0, 1]


@given(
    slots(),
    st.sampled_from(FLOATS),
    st.sampled_from((None, torch.float32, torch.bfloat16, torch.float64)),
    st.sampled_from((torch.int32, torch.int64)),
    st.integers(0, 2),
)
def test_unpermute_by_index(
    case: tuple[Tensor, Tensor], dtype: torch.dtype, probs_dtype: torch.dtype | None, index: torch.dtype, missing: int
) -> None:
    tokens, indices = case
    topk = 1 if probs_dtype is None else indices.shape[1]
    indices = indices[:, :topk]
    num_rows = max(indices.numel() - missing, 0)
    sorted_indices = inverse(torch.argsort(indices.flatten(), stable=True)).to(index)
    rows = torch.randn(num_rows, tokens.shape[1], dtype=torch.float64).to(dtype).requires_grad_()
    probs = None
    if probs_dtype is not None:
        probs = torch.rand(indices.shape, dtype=torch.float64).to(probs_dtype).requires_grad_()
    out = npu.npu_moe_token_unpermute(rows, sorted_indices, probs, restore_shape=[1, 1])

    wide = rows.detach().double().requires_grad_()
    weights = None if probs is None else probs.detach().double().requires_grad_()
    table = torch.cat((wide, wide.new_zeros(indices.numel() - num_rows, tokens.shape[1])))[sorted_indices.long()]
    if weights is not None:
        table = table * weights.reshape(-1, 1)
    expected = table.view(len(indices), topk, tokens.shape[1]).sum(1)
    assert out.dtype is dtype
    close(out.detach(), expected.detach())

    grad = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
    leaves = [wide] if weights is None else [wide, weights]
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    mine: list[Tensor] = [rows] if probs is None else [rows, probs]
    found = torch.autograd.grad(out, mine, grad)
    for mine_grad, wanted_grad, leaf in zip(found, wanted, mine, strict=True):
        assert mine_grad.dtype is leaf.dtype
        bound = max(TOLERANCE[dtype], TOLERANCE[leaf.dtype]) * (1 + tokens.shape[1] ** 0.5)
        torch.testing.assert_close(mine_grad.double(), wanted_grad, rtol=bound, atol=bound)

    pair = npu._npu_moe_token_unpermute(rows, sorted_indices, probs)
    assert torch.equal(pair[0], out)
    assert pair[1] is (None if probs is None else rows)
    given_rows = None if probs is None else rows
    first = npu.npu_moe_token_unpermute_grad(rows, grad, sorted_indices, probs)
    second = npu.npu_moe_token_unpermute_grad_v2(
        grad, sorted_indices, num_rows, dtype, probs, permuted_tokens=given_rows
    )
    for by_function in (first, second):
        assert torch.equal(by_function[0], found[0])
        if probs is None:
            assert by_function[1] is None
        else:
            assert by_function[1] is not None
            assert torch.equal(by_function[1], found[1])


def test_unpermute_keeps_the_rows_for_backward_only_with_probs() -> None:
    rows = torch.randn(4, 2, requires_grad=True)
    index = torch.arange(4, dtype=torch.int32)
    for probs, kept in ((None, 0), (torch.rand(2, 2, requires_grad=True), 1)):
        saved: list[int] = []

        def pack(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            npu.npu_moe_token_unpermute(rows, index, probs)
        assert saved.count(rows.data_ptr()) == kept


def test_negative_positions_of_a_serving_layer() -> None:
    """Row numbers of init routing through torch.abs: -1 becomes row 1, of weight 0; the row may hold anything."""
    rows = torch.tensor([[1.0], [float("nan")]])
    out = npu.npu_moe_token_unpermute(rows, torch.tensor([0, -1]).abs(), probs=torch.tensor([[2.0, 0.0]]))
    assert out.tolist() == [[2.0]]


# ---------------------------------------------------------------------------- by routing map


@st.composite
def maps(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """tokens [N, H], a map [N, E] with K experts a token, and K."""
    num_tokens, experts = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    topk = draw(st.integers(1, experts))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    chosen = torch.rand(num_tokens, experts, generator=generator).topk(topk).indices
    routing_map = torch.zeros(num_tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
    return torch.randn(num_tokens, 5, generator=generator, dtype=torch.float64), routing_map, topk


def pairs_of(routing_map: Tensor, capacity: int | None) -> list[tuple[int, int]]:
    """(token, expert) of each row; with a capacity every expert's unmarked tokens follow its marked ones."""
    rows = []
    for expert in range(routing_map.shape[1]):
        marked = [token for token in range(len(routing_map)) if routing_map[token, expert]]
        if capacity is not None:
            marked = (marked + [token for token in range(len(routing_map)) if token not in marked])[:capacity]
        rows += [(token, expert) for token in marked]
    return rows


@given(
    maps(),
    st.sampled_from(FLOATS),
    st.sampled_from((None, torch.float32, torch.bfloat16)),
    st.sampled_from((torch.bool, torch.int8)),
    st.sampled_from((None, 0, 1, 2)),
    st.sampled_from(LAYOUTS),
)
def test_routing_map_there_and_back(
    case: tuple[Tensor, Tensor, int],
    dtype: torch.dtype,
    probs_dtype: torch.dtype | None,
    map_dtype: torch.dtype,
    capacity: int | None,
    layout: str,
) -> None:
    wide, routing_map, topk = case
    (num_tokens, num_experts), drop = routing_map.shape, capacity is not None
    if capacity is not None:
        capacity = min(capacity, num_tokens)
    pairs = pairs_of(routing_map, capacity)
    tokens_of_row = torch.tensor([token for token, _ in pairs], dtype=torch.long)
    experts_of_row = torch.tensor([expert for _, expert in pairs], dtype=torch.long)
    tokens = laid_out(wide.to(dtype), layout).requires_grad_()
    probs = None
    if probs_dtype is not None:
        probs = laid_out(torch.rand(routing_map.shape).to(probs_dtype), layout).requires_grad_()
    given_map = laid_out(routing_map.to(map_dtype), layout)
    rows, row_probs, sorted_indices = npu.npu_moe_token_permute_with_routing_map(
        tokens,
        given_map,
        probs=probs,
        num_out_tokens=num_tokens * topk if capacity is None else num_experts * capacity,
        drop_and_pad=drop,
    )
    assert torch.equal(rows.detach(), tokens.detach()[tokens_of_row])
    if probs is None:
        assert row_probs is None
    else:
        assert row_probs is not None
        assert torch.equal(row_probs.detach(), probs.detach()[tokens_of_row, experts_of_row])
    assert sorted_indices.dtype is torch.int32
    by_token = torch.argsort(tokens_of_row, stable=True)
    assert torch.equal(sorted_indices.long(), tokens_of_row if drop else by_token)

    # The gradients of permute.
    grad = torch.randn(rows.shape).to(dtype)
    expected = torch.zeros(wide.shape, dtype=torch.float64).index_add_(0, tokens_of_row, grad.double())
    outputs, grads = [rows], [grad]
    probs_grad = None
    if row_probs is not None and probs is not None:
        probs_grad = torch.randn(row_probs.shape).to(probs.dtype)
        outputs, grads = [rows, row_probs], [grad, probs_grad]
    if rows.numel():
        found = torch.autograd.grad(outputs, [tokens] if probs is None else [tokens, probs], grads)
        close(found[0], expected)
        column = None if probs_grad is None else probs_grad[:, None]  # as MindSpeed gives it
        by_function = npu.npu_moe_token_permute_with_routing_map_grad(
            grad, column, sorted_indices, given_map, num_experts, num_tokens, drop
        )
        assert torch.equal(by_function[0], found[0])
        if probs is not None:
            assert by_function[1] is not None
            assert torch.equal(by_function[1], found[1])

    # The way back.
    back = rows.detach().requires_grad_()
    out, index, ids, slot_probs = npu._npu_moe_token_unpermute_with_routing_map(
        back, sorted_indices, list(wide.shape), probs=probs, routing_map=given_map, drop_and_pad=drop
    )
    wide_rows = back.detach().double().requires_grad_()
    wide_probs = None if probs is None else probs.detach().double().requires_grad_()
    terms = wide_rows if wide_probs is None else wide_rows * wide_probs[tokens_of_row, experts_of_row][:, None]
    whole = torch.zeros(wide.shape, dtype=torch.float64).index_add(0, tokens_of_row, terms)
    close(out.detach(), whole.detach())
    if drop:
        assert torch.equal(ids.long(), tokens_of_row[by_token])
        assert torch.equal(index.long(), by_token)
    else:
        assert torch.equal(ids, sorted_indices)
        assert torch.equal(index, sorted_indices)
    if probs is not None:
        assert slot_probs is not None
        in_rows = probs.detach()[tokens_of_row, experts_of_row]
        assert torch.equal(slot_probs, in_rows if drop else in_rows[by_token])
    alone = npu.npu_moe_token_unpermute_with_routing_map(
        back, sorted_indices, list(wide.shape), probs=probs, routing_map=given_map, drop_and_pad=drop
    )
    assert torch.equal(alone, out)
    if not rows.numel():
        return
    grad = torch.randn(out.shape).to(dtype)
    leaves = [wide_rows] if wide_probs is None else [wide_rows, wide_probs]
    wanted = torch.autograd.grad(whole, leaves, grad.double())
    by_autograd = torch.autograd.grad(out, [back] if probs is None else [back, probs], grad)
    by_function = npu.npu_moe_token_unpermute_with_routing_map_grad(
        grad, index, ids, given_map, back, probs, drop, list(wide.shape)
    )
    assert all(found is None or found.dtype is dtype for found in by_function)
    bound = 4 * max(TOLERANCE[dtype], 0 if probs is None else TOLERANCE[probs.dtype])
    for one, other, expected in zip(by_autograd, by_function, wanted, strict=False):
        assert other is not None
        torch.testing.assert_close(one.double(), expected, rtol=bound, atol=bound)
        torch.testing.assert_close(other.double(), expected, rtol=bound, atol=bound)


def test_a_ragged_map_with_skipped_slots() -> None:
    """-1 in sorted_indices skips a slot; without one a map that is not K a token is refused."""
    routing_map = torch.tensor([[True, True], [False, True]])
    rows = torch.tensor([[1.0], [2.0], [3.0], [9.0]])
    probs = torch.tensor([[0.5, 0.25], [7.0, 2.0]])
    out = npu.npu_moe_token_unpermute_with_routing_map(
        rows, torch.tensor([0, 1, 2, -1]), [2, 1], probs=probs, routing_map=routing_map
    )
    assert out.tolist() == [[1.0], [6.0]]
    with pytest.raises(RuntimeError, match="routing_map must be of K = 2 experts for each token"):
        npu.npu_moe_token_unpermute_with_routing_map(
            rows, torch.tensor([0, 1, 2, 3]), [2, 1], probs=probs, routing_map=routing_map
        )


def test_a_map_with_other_numbers_of_marks() -> None:
    tokens = torch.arange(3.0)[:, None]
    routing_map = torch.tensor([[True, True], [False, True], [True, True]])
    rows, _, index = npu.npu_moe_token_permute_with_routing_map(tokens, routing_map, num_out_tokens=3)
    assert rows.flatten().tolist() == [0, 2, 0]  # the first three of the expert-major pairs
    assert index.tolist() == [0, 2, 1]
    with pytest.raises(RuntimeError, match=r"routing_map must be a map of at least M = 6 marks.*got 5 marks"):
        npu.npu_moe_token_permute_with_routing_map(tokens, routing_map, num_out_tokens=6)


def test_second_derivatives() -> None:
    rows = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(2, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([3, 0, 2, 5])
    inputs = (rows, index, probs)
    assert torch.autograd.gradcheck(npu.npu_moe_token_unpermute, inputs)
    assert torch.autograd.gradgradcheck(npu.npu_moe_token_unpermute, inputs)
    tokens = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1, 0], [0, 2]])
    assert torch.autograd.gradgradcheck(lambda t: npu.npu_moe_token_permute(t, ids)[0], tokens)


# ---------------------------------------------------------------------------- bad input

ROWS, IDS, INDEX = torch.zeros(4, 2), torch.zeros(2, 2, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
MAP = torch.ones(2, 2, dtype=torch.bool)
BAD = {
    "padded permute": ("npu_moe_token_permute", (ROWS[:2], IDS, None, True), "padded_mode must be False; got True"),
    "tokens of one axis": ("npu_moe_token_permute", (ROWS[0], IDS), r"tokens must be of shape \[\*, \*\]"),
    "other number of tokens": ("npu_moe_token_permute", (ROWS, IDS), r"indices must be .* N = 4"),
    "float indices": ("npu_moe_token_permute", (ROWS[:2], IDS.float()), "expert_ids must be .* integer"),
    "padded unpermute": ("npu_moe_token_unpermute", (ROWS, INDEX, None, True), "padded_mode must be False"),
    "other number of slots": ("npu_moe_token_unpermute", (ROWS, INDEX, torch.zeros(3, 2)), r"N \* K = 6, as probs"),
    "int rows": ("npu_moe_token_unpermute", (ROWS.int(), INDEX), "rows must be float"),
    "a slice of slots": ("npu_moe_token_permute_grad_v2", (ROWS, INDEX, 3, torch.float32, 2), r"N \* K = 3 \* 2"),
    "rows left out": (
        "npu_moe_token_unpermute_grad_v2",
        (ROWS[:2], INDEX, 4, torch.float32, torch.zeros(2, 2)),
        "permuted_tokens must be given with probs",
    ),
    "unknown type": ("npu_moe_token_permute_grad_v2", (ROWS, INDEX, 2, 999, 2), "tokens_dtype must be a torch.dtype"),
    "tokens without columns": (
        "npu_moe_token_permute_grad",
        (torch.tensor(1.0), ROWS, INDEX, INDEX),
        r"tokens must be of shape \[\*, \*\]",
    ),
    "rows without columns": (
        "npu_moe_token_unpermute_grad",
        (torch.tensor(1.0), ROWS, INDEX),
        r"permuted_tokens must be of shape",
    ),
    "an index that is a number": (
        "npu_moe_token_unpermute_with_routing_map_grad",
        (ROWS, torch.tensor(1), INDEX, None, None, None),
        r"out_index must be of shape \[\*\]; got shape \[\]",
    ),
    "probs that are a number": (
        "npu_moe_token_unpermute_with_routing_map_grad",
        (ROWS, INDEX, INDEX, None, ROWS, torch.tensor(1.0)),
        r"probs must be of shape \[\*, \*\]",
    ),
    "float map": ("npu_moe_token_permute_with_routing_map", (ROWS[:2], MAP.float()), "routing_map must be bool"),
    "other tokens than the map": ("npu_moe_token_permute_with_routing_map", (ROWS, MAP), "N = 2, as routing_map"),
    "other restore_shape": (
        "npu_moe_token_unpermute_with_routing_map",
        (ROWS, INDEX, [2, 3]),
        r"restore_shape must be \(N, H\) with H = 2; got \[2, 3\]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    name, arguments, message = BAD[case]
    with pytest.raises(RuntimeError, match=message) as caught:
        FUNCTIONS[name](*arguments)
    assert str(caught.value).startswith(f"{name}: ")


def test_probs_without_a_map() -> None:
    with pytest.raises(RuntimeError, match="routing_map must be given with probs"):
        npu.npu_moe_token_unpermute_with_routing_map(ROWS, INDEX, [2, 2], probs=torch.zeros(2, 2))


def test_numbers_of_hifloat8_are_not_built() -> None:
    message = r"^npu_moe_token_permute_grad_v2: tokens_dtype=290 \(HiFloat8\) is not available on a CPU$"
    with pytest.raises(NotImplementedError, match=message):
        npu.npu_moe_token_permute_grad_v2(ROWS, INDEX, 2, 290, 2)


def test_the_worked_example() -> None:
    """Expert ids of three tokens, written out."""
    tokens = torch.tensor([[10.0], [20.0], [30.0]])
    rows, sorted_indices = npu.npu_moe_token_permute(tokens, torch.tensor([[1, 2], [0, 1], [0, 2]]))
    assert rows.flatten().tolist() == [20, 30, 10, 20, 10, 30]
    assert np.array_equal(sorted_indices.numpy(), [2, 4, 0, 3, 1, 5])
