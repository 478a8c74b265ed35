"""Inputs that broke other people's routing.

Each number, B01 to B166, is a public report by somebody who does this work. Its small input is a test here, named
after it, or one of those that ELSEWHERE names. None is left out: what happened on several ranks is played by
several ranks in one process, and where a report took gigabytes the memory is mapped but hardly touched.
"""

import ast
import ctypes
import functools
import inspect
import itertools
import mmap
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moeroute
from moeroute import backend as backends
from moeroute import memory
from moeroute.nn import grouped_linear
from moeroute.testing import assert_close_to_exact, assert_same_bits

ALL = (
    1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29, 31, 32, 34, 35, 37, 38, 40, 41,
    43, 44, 46, 47, 49, 50, 52, 53, 55, 56, 58, 59, 61, 62, 64, 65, 67, 68, 70, 71, 73, 74, 76, 77, 79, 80, 82,
    83, 85, 86, 88, 89, 91, 92, 94, 95, 97, 98, 100, 101, 103, 104, 106, 107, 109, 110, 112, 113, 115, 116,
    118, 119, 121, 122, 124, 125, 127, 128, 130, 131, 133, 134, 136, 137, 139, 140, 142, 143, 145, 146, 148,
    149, 151, 152, 154, 155, 157, 158, 160, 161, 163, 164, 166
)  # fmt: skip

# Reports whose very input is a test of the part that it concerns.
ELSEWHERE = {
    "B01": ["test_permutation.py::test_large_offsets"],
    "B08": ["test_gating.py::test_b08_masked_groups_never_win"],
    "B10": ["test_gating.py::test_b10_rows_of_nan_and_infinities"],
    "B11": ["test_gating.py::test_b11_no_perturbation_breaks_ties"],
    "B13": ["test_gating.py::test_b13_softmax_before_and_after"],
    "B16": [
        "test_gating.py::test_b16_one_expert_before_softmax_still_learns",
        "test_nn.py::test_top_1_with_constant_weights_warns",
    ],
    "B17": ["test_gating.py::test_b17_normalised_or_not"],
    "B19": ["test_planning.py::test_defaults_with_a_capacity", "test_planning.py::test_bad_input"],
    "B20": ["test_planning.py::test_all_options_crossed"],
    "B22": ["test_planning.py::test_b22_capacity_above_the_number_of_tokens"],
    "B28": ["test_planning.py::test_alignment", "test_permutation.py::test_padding_rows_are_zero_and_never_read"],
    "B31": [
        "test_gating.py::test_a_row_alone_and_in_a_batch_and_threads",
        "test_gating.py::test_a_row_in_a_very_large_batch",
    ],
    "B32": ["test_planning.py::test_b32_b146_many_experts", "test_gating.py::test_b32_many_experts"],
    "B34": ["test_planning.py::test_b34_experts_no_multiple_of_anything"],
    "B37": ["test_torch.py::test_fifty_runs_give_the_same_bits"],
    "B40": [
        "test_gating.py::test_b40_recomputation_chooses_the_same_experts",
        "test_torch.py::test_checkpoints_recompute_the_same_bits",
    ],
    "B41": ["test_nn.py::test_checkpointing_counts_once"],
    "B43": ["test_gating.py::test_b43_b103_all_weights_underflow"],
    "B44": ["test_gating.py::test_b44_eps_beside_a_tiny_sum"],
    "B47": ["test_permutation.py::test_strided_and_expanded_gradients"],
    "B56": ["test_gating.py::test_b56_b148_any_k"],
    "B59": [
        "test_planning.py::test_b59_no_token_and_nothing_but_empty_slots",
        "test_permutation.py::test_empty_sizes",
    ],
    "B61": ["test_gating.py::test_b61_b62_ties"],
    "B62": ["test_gating.py::test_b61_b62_ties"],
    "B65": ["test_permutation.py::test_gradients_are_right_and_in_their_inputs_dtype"],
    "B68": ["test_planning.py::test_b68_counts_have_every_expert"],
    "B71": ["test_permutation.py::test_gradients_only_where_needed_and_rows_kept_only_for_weights"],
    "B73": ["test_permutation.py::test_any_hidden_size_and_alignment"],
    "B74": ["test_permutation.py::test_any_hidden_size_and_alignment"],
    "B77": [
        "test_gating.py::test_b77_bias_keeps_its_precision",
        "test_balance.py::test_bias_keeps_small_steps",
        "test_nn.py::test_expert_bias_stays_float32",
    ],
    "B79": ["test_balance.py::test_counts_beyond_half_precision_are_exact"],
    "B80": ["test_balance.py::test_balanced_routing_gives_one_for_any_k"],
    "B82": [
        "test_planning.py::test_b82_padding_does_not_count",
        "test_balance.py::test_loss_sees_what_the_router_wanted",
    ],
    "B85": ["test_torch.py::test_opcheck", "test_planning.py::test_opcheck"],
    "B86": ["test_torch.py::test_strides_of_fake_and_real_outputs_agree"],
    "B88": ["test_planning.py::test_b88_the_same_stable_bijection_every_time"],
    "B89": ["test_torch.py::test_python_threads"],
    "B91": ["test_permutation.py::test_gradients_only_where_needed_and_rows_kept_only_for_weights"],
    "B98": ["test_planning.py::test_b98_capacity_is_exact", "test_nn.py::test_capacity_factor_is_exact"],
    "B100": [
        "test_planning.py::test_b100_padding_tokens_take_no_capacity",
        "test_nn.py::test_padding_takes_no_rows_and_no_capacity",
    ],
    "B101": ["test_gating.py::test_b101_scaling_once_and_always"],
    "B103": ["test_gating.py::test_b43_b103_all_weights_underflow"],
    "B104": ["test_gating.py::test_b104_groups_under_softmax"],
    "B107": ["test_planning.py::test_b107_ids_above_256_do_not_collide"],
    "B109": ["test_planning.py::test_b109_out_of_range_id"],
    "B112": [
        "test_torch.py::test_import_is_light",
        "test_torch.py::test_after_fork",
        "test_torch.py::test_data_loader_workers",
    ],
    "B116": ["test_planning.py::test_alignment"],
    "B118": ["test_nn.py::test_input_is_unchanged", "test_permutation.py::test_inputs_are_unchanged"],
    "B119": ["test_gating.py::test_b119_signs_of_nan"],
    "B121": ["test_permutation.py::test_no_index_of_a_hand_made_plan_reads_out_of_bounds"],
    "B122": ["test_permutation.py::test_sum_is_float32_and_rounded_once"],
    "B130": [
        "test_torch.py::test_nothing_is_kept_without_backward",
        "test_permutation.py::test_gradients_only_where_needed_and_rows_kept_only_for_weights",
    ],
    "B131": [
        "test_planning.py::test_b131_every_integer_dtype",
        "test_planning.py::test_b131_bytes_of_a_map",
        "test_gating.py::test_integer_dtypes_of_given_ids",
    ],
    "B134": ["test_torch.py::test_compile_without_graph_break", "test_planning.py::test_compile_without_a_break"],
    "B136": ["test_balance.py::test_memory_is_linear"],
    "B137": ["test_planning.py::test_b137_rows_beyond_the_given_number_are_cut"],
    "B139": [
        "test_planning.py::test_b139_more_slots_than_a_float_counts",
        "test_planning.py::test_b139_k_above_512",
    ],
    "B143": [
        "test_planning.py::test_b143_mask_of_tokens",
        "test_balance.py::test_padding_mask_masks_tokens_not_experts",
    ],
    "B145": ["test_gating.py::test_b145_every_row_is_visited"],
    "B146": ["test_gating.py::test_b146_sizes_around_the_blocks", "test_planning.py::test_b32_b146_many_experts"],
    "B148": ["test_gating.py::test_b56_b148_any_k"],
    "B149": ["test_gating.py::test_b149_small_k_in_groups"],
    "B151": ["test_gating.py::test_b151_offsets_beyond_int32"],
    "B152": ["test_gating.py::test_b152_nothing_is_read_or_written_beyond_the_end"],
    "B154": ["test_balance.py::test_shards_add_up"],
    "B158": ["test_gating.py::test_b158_scores_in_float32_whatever_comes"],
    "B164": ["test_nn.py::test_rows_beyond_the_segments_are_never_read"],
    "B166": [
        "test_nn.py::test_a_token_does_not_depend_on_its_neighbours",
        "test_permutation.py::test_bits_do_not_depend_on_threads_or_batch",
    ],
}


@functools.cache
def functions_of(file: Path) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]


def test_every_report_is_a_test_here_or_elsewhere() -> None:
    here = {
        f"B{number}"
        for name in functions_of(Path(__file__))
        if (numbers := re.match(r"test((?:_b\d+)+)_", name))
        for number in re.findall(r"\d+", numbers[1])
    }
    assert here | set(ELSEWHERE) == {f"B{number:02}" for number in ALL}
    assert here.isdisjoint(ELSEWHERE)


def test_the_tests_elsewhere_exist() -> None:
    folder = Path(__file__).parent
    for name in itertools.chain(*ELSEWHERE.values()):
        file, function = name.split("::")
        assert function in functions_of(folder / file), name


# ---------------------------------------------------------------------------- helpers


def plan_of(ids: list[list[int]], num_experts: int, **options: Any) -> moeroute.RoutingPlan:
    return moeroute.plan_from_expert_ids(torch.tensor(ids), num_experts, **options)


def leaf(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def whole_numbers(*shape: int, seed: int, most: int = 3) -> Tensor:
    """Small integers as float32: their sums and products are exact in any order."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def mapped(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros whose pages cost memory only once they are written."""
    try:
        return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype)
    except OSError as error:
        pytest.skip(f"no address space: {error}")


# ---------------------------------------------------------------------------- slots without an expert


def test_b02_minus_one_among_the_experts(backend: str) -> None:
    """-1 was sorted as the smallest number, and what came first was taken for real tokens."""
    plan = plan_of([[2, -1], [-1, 0], [3, 2]], 4, backend=backend)
    tokens, weights = leaf([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]]), torch.ones(3, 2, requires_grad=True)
    rows = moeroute.permute(tokens, plan, backend=backend)
    assert rows.tolist() == [[2, 2], [1, 1], [4, 4], [4, 4]]
    assert plan.tokens_per_expert is not None
    assert plan.tokens_per_expert.tolist() == [1, 0, 2, 1]
    assert moeroute.unpermute(rows, plan, backend=backend).tolist() == [[1, 1], [2, 2], [8, 8]]
    framed = torch.full((6, 2), torch.nan)  # what row -1 would be
    framed[1:5] = rows.detach()
    assert moeroute.unpermute(framed[1:5], plan, backend=backend).tolist() == [[1, 1], [2, 2], [8, 8]]
    output = moeroute.unpermute(rows, plan, weights, backend=backend)
    assert output.tolist() == [[1, 1], [2, 2], [8, 8]]
    output.sum().backward()
    assert_same_bits(weights.grad, torch.tensor([[2.0, 0.0], [0.0, 4.0], [8.0, 8.0]]))
    assert_same_bits(tokens.grad, torch.tensor([[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]]))


def test_b04_tokens_with_two_one_and_no_experts(backend: str) -> None:
    """The number of experts per token was read off the first one."""
    routing_map = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0]], dtype=torch.bool)
    plan = moeroute.plan_from_routing_map(routing_map, backend=backend)
    rows = moeroute.permute(torch.tensor([[10.0], [20.0], [30.0]]), plan, backend=backend)
    assert rows.flatten().tolist() == [10, 10, 20]
    assert_same_bits(moeroute.unpermute(rows, plan, backend=backend), torch.tensor([[20.0], [20.0], [0.0]]))


def test_b25_dead_rows_of_nan(backend: str) -> None:
    """The tail of the buffer was never written, and 0 * NaN got into outputs and gradients."""
    plan = plan_of([[0, 1], [1, -1], [0, 1]], 2, num_rows=8, backend=backend)  # e0: t0, t2; e1: t0, t1, t2
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0], *[[torch.nan]] * 3], requires_grad=True)
    weights = leaf([[1.0, 0.5], [0.25, 0.0], [1.0, 2.0]])
    output = moeroute.unpermute(rows, plan, weights, backend=backend)
    assert output.flatten().tolist() == [1 + 2, 2, 2 + 32]
    output.backward(torch.tensor([[1.0], [10.0], [100.0]]))
    assert_same_bits(rows.grad, torch.tensor([[1.0], [100.0], [0.5], [2.5], [200.0], [0.0], [0.0], [0.0]]))
    assert_same_bits(weights.grad, torch.tensor([[1.0, 4.0], [80.0, 0.0], [200.0, 1600.0]]))


def test_b26_marked_slots_beside_rows_of_nan(backend: str) -> None:
    """The gradient of a slot's weight on another rank was <gradient, uninitialised row>."""
    plan = plan_of([[0, 2], [2, 1]], 2, num_rows=4, backend=backend)  # 2 marks an expert elsewhere
    rows = torch.tensor([[3.0, 1.0], [5.0, 1.0], [torch.nan] * 2, [torch.nan] * 2], requires_grad=True)
    weights = leaf([[0.5, 0.5], [0.5, 0.5]])
    output = moeroute.unpermute(rows, plan, weights, backend=backend)
    assert output.tolist() == [[1.5, 0.5], [2.5, 0.5]]
    output.sum().backward()
    assert_same_bits(weights.grad, torch.tensor([[4.0, 0.0], [0.0, 6.0]]))
    assert_same_bits(rows.grad, torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]))


def test_b29_ids_and_a_map_of_three_experts_of_five(backend: str) -> None:
    """Only numbers of experts that are powers of two compiled; slots of -1 must get no gradient."""
    weights = leaf([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [1.0, 1.0, 1.0]])
    plan = plan_of([[0, 4, -1], [2, 1, 3], [-1, -1, -1]], 5, backend=backend)
    rows = moeroute.permute_weights(weights, plan, backend=backend)
    assert_same_bits(rows.detach(), torch.tensor([0.5, 0.4, 0.4, 0.2, 0.3]))
    rows.sum().backward()
    assert_same_bits(weights.grad, torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    dense = torch.tensor([[0.5, 0, 0, 0, 0.3], [0, 0.4, 0.4, 0.2, 0], [0, 0, 0, 0, 0]], requires_grad=True)
    by_map = moeroute.plan_from_routing_map(dense > 0, backend=backend)
    assert_same_bits(moeroute.permute_weights(dense, by_map, backend=backend), rows)
    moeroute.permute_weights(dense, by_map, backend=backend).sum().backward()
    assert_same_bits(dense.grad, (dense > 0).float())


def test_b76_the_same_expert_twice(backend: str) -> None:
    """Scattered into a table of tokens and experts, one of the two weights was lost."""
    tokens, weights = torch.tensor([[10.0]]), leaf([[0.6, 0.4]])
    plan = plan_of([[1, 1]], 3, backend=backend)
    rows = moeroute.permute(tokens, plan, backend=backend)
    assert rows.tolist() == [[10], [10]]
    output = moeroute.unpermute(rows, plan, weights, backend=backend)
    torch.testing.assert_close(output, torch.tensor([[10.0]]))
    output.sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [[10, 10]]
    dense = leaf([[0.0, 1.0, 0.0]])
    once = moeroute.plan_from_routing_map(dense > 0, backend=backend)
    output = moeroute.unpermute(moeroute.permute(tokens, once, backend=backend), once, dense, backend=backend)
    assert output.tolist() == [[10]]
    output.sum().backward()
    assert_same_bits(dense.grad, torch.tensor([[0.0, 10.0, 0.0]]))
    # A table of weights under two slots of one expert: each takes it, and their gradients add up.
    twice = moeroute.plan_from_row_of_slot(
        torch.tensor([[0, 1]]), 1, 2, expert_of_slot=torch.tensor([[1, 1]]), backend=backend
    )
    dense = leaf([[0.0, 0.5, 0.0]])
    output = moeroute.unpermute(rows, twice, dense, backend=backend)
    assert output.tolist() == [[10]]
    output.sum().backward()
    assert_same_bits(dense.grad, torch.tensor([[0.0, 20.0, 0.0]]))


def test_b115_tokens_without_a_row_in_recycled_memory(backend: str) -> None:
    """The result was left uninitialised where a token has nothing on this rank."""
    hidden = 2**17  # large enough for the pool
    for _ in range(3):  # blocks that held something else before
        memory.empty((6, hidden), torch.float32).fill_(torch.nan)
    torch.utils.deterministic.fill_uninitialized_memory = False
    chosen = torch.zeros(6, 2, dtype=torch.bool)
    chosen[1, 0] = chosen[4, 1] = True
    plan = moeroute.plan_from_routing_map(chosen, backend=backend)
    output = moeroute.unpermute(torch.ones(2, hidden), plan, backend=backend)
    assert_same_bits(output, chosen.any(1)[:, None].float().expand(6, hidden).contiguous())


def test_b124_the_tail_of_an_index_is_not_slot_zero(backend: str) -> None:
    """An unwritten tail of the index, full of zeros, overwrote the gradient of the first weight."""
    plan = plan_of([[0, 1], [1, 0], [1, 1], [0, 1]], 1, num_rows=8, backend=backend)
    rows = torch.tensor([[1.0], [2.0], [3.0], *[[torch.nan]] * 5], requires_grad=True)
    weights = leaf([[0.3, 0.0], [0.0, 0.7], [0.0, 0.0], [0.2, 0.0]])
    output = moeroute.unpermute(rows, plan, weights, backend=backend)
    output.backward(torch.tensor([[10.0], [20.0], [30.0], [40.0]]))
    assert_same_bits(weights.grad, torch.tensor([[10.0, 0.0], [0.0, 40.0], [0.0, 0.0], [120.0, 0.0]]))


def test_b125_a_padded_token_gets_no_gradient(backend: str) -> None:
    """-1 was used as the index of a histogram."""
    plan = plan_of([[-1, -1], [1, 0]], 2, backend=backend)
    tokens, weights = torch.ones(2, 3, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    rows = moeroute.permute(tokens, plan, backend=backend)
    moeroute.unpermute(rows, plan, weights, backend=backend).sum().backward()
    assert_same_bits(tokens.grad, torch.tensor([[0.0] * 3, [2.0] * 3]))
    assert_same_bits(weights.grad, torch.tensor([[0.0, 0.0], [3.0, 3.0]]))


# ---------------------------------------------------------------------------- order and arithmetic


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_b07_the_gradient_sums_the_rows_of_a_token(backend: str, dtype: torch.dtype) -> None:
    """Gradients were far off, in float32 as in bfloat16: another order of slots, not rounding."""
    if dtype is torch.float64:
        backend = "reference"
    plan = plan_of([[2, 0], [1, 0]], 3)  # rows: e0 of t0, e0 of t1, e1 of t1, e2 of t0
    tokens = torch.zeros(2, 1, dtype=dtype, requires_grad=True)
    moeroute.permute(tokens, plan, backend=backend).backward(torch.tensor([[1], [2], [4], [8]], dtype=dtype))
    assert_same_bits(tokens.grad, torch.tensor([[9], [6]], dtype=dtype))
    # Eight numbers of near exponents: their float32 sum is exact, and one rounding follows.
    eight = (torch.rand(8, 500, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    one_token = plan_of([list(range(8))], 8)
    total = moeroute.permute_backward(eight, one_token, backend=backend)
    if dtype in (torch.bfloat16, torch.float16):
        assert_same_bits(total, eight.double().sum(0, keepdim=True).to(dtype))
    else:
        assert_close_to_exact(total, eight.double().sum(0, keepdim=True))


def test_b38_eight_equal_experts_are_one(backend: str) -> None:
    """Summed in the low precision, equal experts did not equal the dense layer."""
    tokens = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    plan = plan_of([list(range(8))] * 16, 8, backend=backend)
    rows = moeroute.permute(tokens, plan, backend=backend)
    assert_same_bits(moeroute.unpermute(rows, plan, torch.full((16, 8), 0.125), backend=backend), tokens)


def test_b58_weights_are_applied_once(backend: str) -> None:
    """Of two ways to combine, one weighs the rows itself: results were weighted twice or never."""
    plan = plan_of([[0, 1]], 2, backend=backend)
    results = []
    for before in (False, True):
        rows, weights = leaf([[1.0], [10.0]]), leaf([[0.25, 0.75]])
        if before:
            weighted = rows * moeroute.permute_weights(weights, plan, backend=backend)[:, None]
            output = moeroute.unpermute(weighted, plan, backend=backend)
        else:
            output = moeroute.unpermute(rows, plan, weights, backend=backend)
        assert output.item() == 7.75
        output.sum().backward()
        results.append((rows.grad, weights.grad))
    assert_same_bits(*results)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_b94_three_ways_through_the_experts(backend: str, dtype: torch.dtype) -> None:
    """Two dispatchers gave different losses, and nobody compared them."""
    if dtype is torch.float64:
        backend = "reference"
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(64, 8, generator=generator).topk(4).indices
    start = torch.randn(64, 32, generator=generator, dtype=dtype)
    share = torch.rand(64, 4, generator=generator, dtype=dtype)

    def outcome(way: str) -> tuple[Tensor, ...]:
        tokens, weights = start.clone().requires_grad_(), share.clone().requires_grad_()
        if way == "map":
            dense = torch.zeros(64, 8, dtype=dtype).scatter(1, ids, weights)
            plan = moeroute.plan_from_routing_map(dense.detach() > 0, backend=backend)
            rows = moeroute.permute(tokens, plan, backend=backend).tanh()
            output = moeroute.unpermute(rows, plan, dense, backend=backend)
        else:
            plan = moeroute.plan_from_expert_ids(ids, 8, backend=backend)
            rows = moeroute.permute(tokens, plan, backend=backend).tanh()
            if way == "after":
                output = moeroute.unpermute(rows, plan, weights, backend=backend)
            else:
                rows = rows * moeroute.permute_weights(weights, plan, backend=backend)[:, None]
                output = moeroute.unpermute(rows, plan, backend=backend)
        output.square().sum().backward()
        assert tokens.grad is not None
        assert weights.grad is not None
        return output.detach(), tokens.grad, weights.grad

    exact = 1e-12 if dtype is torch.float64 else 1e-6
    after, before, by_map = (outcome(way) for way in ("after", "before", "map"))
    assert_same_bits(before[0], after[0])
    for other in (before, by_map):
        for got, wanted in zip(other, after, strict=True):
            torch.testing.assert_close(got, wanted, rtol=exact, atol=exact * float(wanted.abs().max()))


def test_b113_small_values_are_compared_as_strictly_as_large_ones(backend: str) -> None:
    """With values of 1e-5 and a tolerance of 1e-2 a wrong kernel passed."""
    tokens = (torch.arange(40)[:, None] * 128 + torch.arange(128)) % 251
    plan = moeroute.plan_from_expert_ids(torch.arange(120).reshape(40, 3) * 7 % 11, 11, backend=backend)
    index = plan.token_of_row.long()
    for dtype in (torch.int32, torch.float32, torch.bfloat16):
        moved = moeroute.permute(tokens.to(dtype), plan, backend=backend)
        assert_same_bits(moved, tokens.to(dtype)[index])
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 1e-5):
        rows = torch.randn(120, 128, generator=generator) * scale
        weights = torch.rand(40, 3, generator=generator)
        terms = rows[plan.row_of_slot.long()].reshape(40, 3, 128).double() * weights.double()[..., None]
        error = (moeroute.unpermute(rows, plan, weights, backend=backend).double() - terms.sum(1)).abs()
        assert bool((error <= 3 * 2.0**-23 * terms.abs().sum(1)).all())


def test_b140_no_weights_does_not_mean_one_expert(backend: str) -> None:
    """Without weights the number of experts per token was taken to be 1, and four rows came back."""
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]])  # e0: t0, t1; e1: t0, t1
    plan = moeroute.plan_from_row_of_slot(torch.tensor([0, 2, 1, 3]), 2, 4, backend=backend)
    assert moeroute.unpermute(rows, plan, backend=backend).tolist() == [[5], [10]]
    plan = moeroute.plan_from_routing_map(torch.ones(2, 2, dtype=torch.bool), backend=backend)
    assert moeroute.unpermute(rows, plan, backend=backend).tolist() == [[5], [10]]
    with pytest.raises(TypeError, match="num_tokens"):
        moeroute.plan_from_row_of_slot(torch.tensor([0, 2, 1, 3]))  # type: ignore[call-arg]


def test_b142_the_gradient_of_permute_fifty_times(backend: str) -> None:
    """Atomic additions came in another order each time."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(512, 16, generator=generator).topk(8).indices
    plan = moeroute.plan_from_expert_ids(ids, 16, backend=backend)
    grad = torch.randn(4096, 512, generator=generator).bfloat16()
    first = moeroute.permute_backward(grad, plan, backend=backend)
    for _ in range(49 if backend == "cpu" else 4):  # the others are slow, and run in one thread or have no atomics
        assert_same_bits(moeroute.permute_backward(grad, plan, backend=backend), first)


def test_b157_weights_keep_their_precision_beside_bfloat16_rows(backend: str) -> None:
    """The weights were narrowed to the rows' dtype before they were used."""
    plan = plan_of([[0, 1]], 2, backend=backend)
    rows = torch.tensor([[1.0], [-1.0]], dtype=torch.bfloat16)
    output = moeroute.unpermute(rows, plan, torch.tensor([[0.5009765625, 0.5]]), backend=backend)
    assert output.item() == 0.0009765625


# ---------------------------------------------------------------------------- gradients


def test_b46_an_expanded_gradient(backend: str) -> None:
    """sum() hands back one element of stride 0, and the kernel read on behind it."""
    plan = plan_of([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0], [2, 1]], 3, backend=backend)
    data, share = whole_numbers(12, 8, seed=0), torch.rand(6, 2, generator=torch.Generator().manual_seed(0))
    results = []
    for expanded in (True, False):
        rows, weights = data.clone().requires_grad_(), share.clone().requires_grad_()
        output = moeroute.unpermute(rows, plan, weights, backend=backend)
        (output.sum() if expanded else (output * torch.ones(6, 8)).sum()).backward()
        results.append((rows.grad, weights.grad))
    assert_same_bits(*results)
    at = plan.row_of_slot.long()
    assert_same_bits(results[0][1], data.sum(1)[at].reshape(6, 2))
    of_row = share.flatten()[plan.slot_of_row.long()]
    assert_same_bits(results[0][0], of_row[:, None].expand(12, 8).contiguous())


def test_b49_the_gradient_of_the_weights_is_there(backend: str) -> None:
    """It was None, and a loose tolerance let it pass."""
    plan = plan_of([[0, 1], [0, 1]], 2, backend=backend)  # rows: y00, y10, y01, y11
    rows = torch.tensor([[1.0, 0, 0], [0, 0, 3.0], [0, 2.0, 0], [1.0, 1.0, 1.0]], requires_grad=True)
    weights = torch.ones(2, 2, requires_grad=True)
    moeroute.unpermute(rows, plan, weights, backend=backend).backward(torch.tensor([[1.0, 1, 1], [2, 0, 1]]))
    assert_same_bits(weights.grad, torch.tensor([[1.0, 2.0], [3.0, 3.0]]))


def test_b50_second_derivatives_with_a_weight_of_zero() -> None:
    """A gradient rebuilt by a division by the weight was right once, and wrong the second time or for 0."""
    plan = plan_of([[0, 1], [1, 0]], 2)
    tokens = torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = leaf([[0.7, 0.0], [0.2, 0.5]], torch.float64)

    def loss(tokens: Tensor, weights: Tensor) -> Tensor:
        rows = moeroute.permute(tokens, plan).tanh()
        return moeroute.unpermute(rows, plan, weights).square().sum()

    torch.autograd.gradcheck(loss, (tokens, weights))
    torch.autograd.gradgradcheck(loss, (tokens, weights))


def test_b50_the_gradient_of_a_zero_weight(backend: str) -> None:
    plan = plan_of([[0, 1]], 2, backend=backend)
    rows, weights = leaf([[3.0, 4.0], [5.0, 6.0]]), leaf([[1.0, 0.0]])
    moeroute.unpermute(rows, plan, weights, backend=backend).backward(torch.tensor([[1.0, 10.0]]))
    assert_same_bits(weights.grad, torch.tensor([[43.0, 65.0]]))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_b155_the_derivative_of_a_gradient(backend: str, dtype: torch.dtype) -> None:
    """Kept intermediates made the second derivative silently wrong."""
    if dtype is torch.float64:
        backend = "reference"
    plan = plan_of([[0, 1], [1, 0], [0, 0]], 2, backend=backend)  # e0: s0, s3, s4, s5; e1: s1, s2
    rows = whole_numbers(6, 2, seed=1).to(dtype).requires_grad_()
    weights = whole_numbers(3, 2, seed=2).to(dtype).requires_grad_()
    seed, along = whole_numbers(3, 2, seed=3).to(dtype), whole_numbers(6, 2, seed=4).to(dtype)
    output = moeroute.unpermute(rows, plan, weights, backend=backend)
    (grad_rows,) = torch.autograd.grad(output, rows, seed, create_graph=True)
    # The row of slot s has the gradient w[s] * seed[token]: in w[s], along `along`, that is <along, seed>.
    (second,) = torch.autograd.grad(grad_rows, weights, along)
    of_slot = along[[0, 4, 5, 1, 2, 3]].reshape(3, 2, 2)
    assert_same_bits(second, (of_slot * seed[:, None]).sum(-1))


def test_b64_b67_autocast_is_left_to_the_caller(backend: str) -> None:
    """Under autocast float32 met bfloat16, or the scores were narrowed."""
    ids = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]]
    tokens = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = torch.full((6, 2), 0.5, dtype=torch.bfloat16, requires_grad=True)
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    plain = moeroute.gating_topk(logits, 2, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = plan_of(ids, 4, backend=backend)
        assert_same_bits(moeroute.gating_topk(logits, 2, backend=backend), plain)
        rows = moeroute.permute(tokens, plan, backend=backend)
        assert rows.dtype is torch.float32
        output = moeroute.unpermute(rows, plan, weights, backend=backend)
        assert output.dtype is torch.float32
        half = moeroute.unpermute(rows.bfloat16(), plan, weights.float(), backend=backend)
        assert half.dtype is torch.bfloat16
        (output.sum() + half.float().sum()).backward()
    assert tokens.grad is not None
    assert weights.grad is not None
    assert (tokens.grad.dtype, weights.grad.dtype) == (torch.float32, torch.bfloat16)


# ---------------------------------------------------------------------------- nothing to do


def test_b14_no_tokens_and_a_backward(backend: str) -> None:
    """The branch for an empty input returned another number of gradients."""

    def step(num_tokens: int) -> list[Tensor]:
        tokens = torch.zeros(num_tokens, 16, requires_grad=True)
        weights = torch.zeros(num_tokens, 4, requires_grad=True)
        routing_map = torch.zeros(num_tokens, 4, dtype=torch.bool)
        results = []
        for options in ({}, {"topk": 2}, {"fill": True, "capacity": num_tokens}):
            plan = moeroute.plan_from_routing_map(routing_map, backend=backend, **options)
            rows = moeroute.permute(tokens, plan, backend=backend)
            weighted = moeroute.permute(tokens, plan, weights, backend=backend)
            results += [rows, weighted, moeroute.permute_weights(weights, plan, backend=backend)]
            results += [moeroute.unpermute(rows, plan, w, backend=backend) for w in (None, weights)]
        torch.stack([r.sum() for r in results]).sum().backward()
        assert tokens.grad is not None
        assert tokens.grad.shape == (num_tokens, 16)
        return [*results, tokens.grad, *([] if weights.grad is None else [weights.grad])]

    empty, some = step(0), step(3)
    assert [(t.dtype, t.ndim, t.shape[1:]) for t in empty] == [(t.dtype, t.ndim, t.shape[1:]) for t in some]


def test_b106_nothing_and_then_something(backend: str) -> None:
    """A launch over an empty grid failed, and so did everything after it."""
    for num_tokens in (0, 4, 0, 4):
        logits = torch.arange(num_tokens * 3.0).reshape(num_tokens, 3)
        gating = moeroute.gating_topk(logits, 2, backend=backend)
        grad = moeroute.gating_topk_backward(
            gating.scores, gating.weights, gating.expert_ids, score="softmax", renormalize=False, backend=backend
        )
        plan = moeroute.plan_from_expert_ids(gating.expert_ids, 3, backend=backend)
        rows = moeroute.permute(torch.ones(num_tokens, 5), plan, backend=backend)
        output = moeroute.unpermute(rows, plan, backend=backend)
        assert grad.shape == logits.shape
        assert_same_bits(
            gating.expert_ids, torch.tensor([[2, 1]], dtype=torch.int32).expand(num_tokens, 2).contiguous()
        )
        assert_same_bits(output, torch.full((num_tokens, 5), 2.0))


def test_b110_only_the_expert_with_rows_gets_a_gradient() -> None:
    """Experts without rows, first, last or all but one, hung the backward pass."""
    rows = whole_numbers(5, 3, seed=0)
    for used, sizes in enumerate(([5, 0, 0, 0], [0, 5, 0, 0], [0, 0, 5, 0], [0, 0, 0, 5])):
        weight = torch.ones(4, 2, 3, requires_grad=True)
        grouped_linear(rows, weight, sizes).sum().backward()
        expected = torch.zeros(4, 2, 3)
        expected[used] = rows.sum(0)
        assert_same_bits(weight.grad, expected)


# ---------------------------------------------------------------------------- padding and plans


def test_b53_a_plan_fits_its_own_rows_only(backend: str) -> None:
    """permute padded the experts' rows, unpermute took them for unpadded ones."""
    ids = [[0], [0], [0], [1], [1], [2], [2], [2], [2]]
    plans = {align: plan_of(ids, 3, align=align, backend=backend) for align in (1, 4, 16)}
    tokens = torch.arange(18.0).reshape(9, 2)
    for align, plan in plans.items():
        rows = moeroute.permute(tokens, plan, backend=backend)
        assert_same_bits(moeroute.unpermute(rows, plan, backend=backend), tokens)
        for other, wrong in plans.items():
            if other != align:
                with pytest.raises(ValueError, match=rf"rows must be \[R, H\] with R = {wrong.num_rows}, as the plan"):
                    moeroute.unpermute(rows, wrong, backend=backend)


def test_b127_padded_segments_in_bfloat16(backend: str) -> None:
    """The padding was left out, and a matrix product refused the stride."""
    plan = plan_of([[0]] * 5 + [[2]] * 3, 3, align=16, backend=backend)
    assert plan.num_rows == 32
    assert plan.rows_per_expert is not None
    assert all(end % 16 == 0 for end in plan.rows_per_expert.cumsum(0).tolist())
    tokens = torch.randn(8, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = moeroute.permute(tokens, plan, backend=backend)
    assert_same_bits(rows[5:16], torch.zeros(11, 24, dtype=torch.bfloat16))
    assert_same_bits(rows[19:], torch.zeros(13, 24, dtype=torch.bfloat16))
    assert_same_bits(moeroute.unpermute(rows, plan, backend=backend), tokens)


def test_b83_counts_are_integers(backend: str) -> None:
    """Counts came as the bits of floats: 1098907648 is 16.0."""
    plan = moeroute.plan_from_expert_ids(torch.arange(16).reshape(8, 2) % 4, 4, backend=backend)
    counts = plan.tokens_per_expert
    assert counts is not None
    assert counts.dtype is torch.int64
    assert counts.tolist() == [4, 4, 4, 4]


def test_b95_a_row_for_each_expert_of_a_received_token(backend: str) -> None:
    """What came from other ranks was not grouped by expert, and was taken as if it were."""
    routing_map = torch.tensor([[1, 1], [0, 1], [1, 0]], dtype=torch.bool)
    plan = moeroute.plan_from_routing_map(routing_map, backend=backend)
    received = torch.tensor([[1.0], [2.0], [4.0]])
    rows = moeroute.permute(received, plan, backend=backend)
    assert rows.flatten().tolist() == [1, 4, 1, 2]
    assert plan.tokens_per_expert is not None
    assert plan.tokens_per_expert.tolist() == [2, 2]
    assert moeroute.unpermute(rows, plan, backend=backend).flatten().tolist() == [2, 2, 4]


# ---------------------------------------------------------------------------- several ranks in one process


def exchange(
    sent: list[Tensor], counts: Tensor, experts_per_rank: int, backend: str
) -> Iterator[tuple[Tensor, moeroute.RoutingPlan]]:
    """For each rank what all the others send it, rank by rank, and the plan that groups it by expert.

    `counts` is [ranks, E]: how many rows of each expert each rank has, in this order, in `sent`.
    """
    ranks = len(sent)
    chunks = [rows.split(counts[rank].tolist()) for rank, rows in enumerate(sent)]
    for rank in range(ranks):
        mine = range(rank * experts_per_rank, (rank + 1) * experts_per_rank)
        received = torch.cat([chunks[source][e] for source in range(ranks) for e in mine])
        lengths = counts[:, mine.start : mine.stop]
        yield received, moeroute.plan_from_segments(lengths, received.shape[0], backend=backend)


def test_b23_what_is_sent_is_what_is_received(backend: str) -> None:
    """Each rank took a capacity from its own counts, and the exchange waited for rows that never came."""
    ids = [[[0], [0], [0]], [[0], [1], [2], [3]]]
    plans = [plan_of(i, 4, backend=backend) for i in ids]
    counts = torch.stack([p.tokens_per_expert for p in plans if p.tokens_per_expert is not None])
    assert counts.tolist() == [[3, 0, 0, 0], [1, 1, 1, 1]]
    tokens = [torch.arange(3.0)[:, None], torch.arange(10.0, 14.0)[:, None]]
    sent = [moeroute.permute(t, p, backend=backend) for t, p in zip(tokens, plans, strict=True)]
    (first, plan_0), (second, plan_1) = exchange(sent, counts, 2, backend)
    assert [len(first), len(second)] == counts.reshape(2, 2, 2).sum((0, 2)).tolist() == [5, 2]
    assert moeroute.permute(first, plan_0, backend=backend).flatten().tolist() == [0, 1, 2, 10, 11]
    assert moeroute.permute(second, plan_1, backend=backend).flatten().tolist() == [12, 13]
    # With padding all ranks need one capacity: it is the caller's.
    padded = [plan_of(i, 4, capacity=3, pad_to_capacity=True, backend=backend) for i in ids]
    assert [p.num_rows for p in padded] == [12, 12]


@pytest.mark.parametrize("ids", [[[0, 2], [3, 1], [0, 1]], [[0, 2], [3, 0], [1, 1]]], ids=["B35", "B133"])
def test_b35_b133_the_ranks_partial_outputs_add_up(backend: str, ids: list[list[int]]) -> None:
    """Experts of other ranks were taken for expert 0, or their rows for valid ones."""
    tokens = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(3, 2, generator=torch.Generator().manual_seed(1))

    def output(expert_range: tuple[int, int] | None) -> Tensor:
        plan = plan_of(ids, 4, expert_range=expert_range, backend=backend)
        rows = moeroute.permute(tokens, plan, backend=backend)
        if expert_range == (2, 4):
            assert plan.tokens_per_expert is not None
            assert plan.tokens_per_expert.tolist() == [1, 1]
            assert_same_bits(rows, tokens[:2])
        return moeroute.unpermute(rows, plan, weights, backend=backend)

    parts = [output((0, 2)), output((2, 4))]
    assert_same_bits(parts[1][2], torch.zeros(5))  # token 2 has no expert on that rank
    assert_same_bits(parts[1][0], weights[0, 1] * tokens[0])
    assert_same_bits(parts[1][1], weights[1, 0] * tokens[1])
    assert_same_bits(parts[0] + parts[1], output(None))  # two terms a token: no other order


def test_b55_b92_b128_nothing_is_scaled_by_the_number_of_ranks(backend: str) -> None:
    """Gradients of experts were as many times too large as there were ranks."""
    ranks, num_experts, per_rank, hidden = 2, 4, 2, 3
    ids = [[[0, 3], [1, 2], [3, 3], [-1, 0]], [[2, 1], [0, 2], [1, -1]]]
    start = [whole_numbers(len(i), hidden, seed=rank) for rank, i in enumerate(ids)]
    shares = [whole_numbers(len(i), 2, seed=9 + rank) / 4 for rank, i in enumerate(ids)]
    matrices = whole_numbers(num_experts, hidden, hidden, seed=5)

    def leaves() -> tuple[list[Tensor], list[Tensor], Tensor]:
        tokens = [t.clone().requires_grad_() for t in start]
        return tokens, [w.clone().requires_grad_() for w in shares], matrices.clone().requires_grad_()

    # All on one rank.
    tokens, weights, experts = leaves()
    plan = plan_of(ids[0] + ids[1], num_experts, backend=backend)
    rows = moeroute.permute(torch.cat(tokens), plan, backend=backend)
    assert plan.tokens_per_expert is not None
    rows = grouped_linear(rows, experts, plan.tokens_per_expert)
    whole = moeroute.unpermute(rows, plan, torch.cat(weights), backend=backend)
    whole.square().sum().backward()
    expected = [whole.detach(), experts.grad, *(t.grad for t in tokens), *(w.grad for w in weights)]

    # Tokens and experts on two.
    tokens, weights, experts = leaves()
    plans = [plan_of(i, num_experts, backend=backend) for i in ids]
    counts = torch.stack([p.tokens_per_expert for p in plans if p.tokens_per_expert is not None])
    sent = [moeroute.permute(t, p, backend=backend) for t, p in zip(tokens, plans, strict=True)]
    back: list[list[Tensor]] = [[] for _ in range(ranks)]
    for rank, (received, grouping) in enumerate(exchange(sent, counts, per_rank, backend)):
        mine = slice(rank * per_rank, (rank + 1) * per_rank)
        assert grouping.tokens_per_expert is not None
        grouped = moeroute.permute(received, grouping, backend=backend)
        grouped = grouped_linear(grouped, experts[mine], grouping.tokens_per_expert)
        returned = moeroute.unpermute(grouped, grouping, backend=backend)
        for source, chunk in enumerate(returned.split(counts[:, mine].sum(1).tolist())):
            back[source].append(chunk)
    outputs = [
        moeroute.unpermute(torch.cat(b), p, w, backend=backend) for b, p, w in zip(back, plans, weights, strict=True)
    ]
    sum(o.square().sum() for o in outputs).backward()  # type: ignore[union-attr]
    actual = [torch.cat(outputs).detach(), experts.grad, *(t.grad for t in tokens), *(w.grad for w in weights)]
    # Whole numbers, so that no sum is rounded. -0 and +0 are one number.
    assert_same_bits([a + 0.0 for a in actual if a is not None], [e + 0.0 for e in expected if e is not None])


def test_b161_the_smaller_rank_is_padded_to_the_common_capacity(backend: str) -> None:
    """Ranks with different numbers of tokens had different capacities, and hung."""
    assert [moeroute.capacity_from_factor(t, 1, 2, 1) for t in (5, 3)] == [3, 2]
    for ids in ([[0], [0], [0], [0], [1]], [[1], [0], [1]]):
        plan = plan_of(ids, 2, capacity=3, pad_to_capacity=True, backend=backend)
        tokens = torch.arange(1.0, len(ids) + 1)[:, None]
        rows = moeroute.permute(tokens, plan, backend=backend)
        assert rows.shape == (6, 1)
        free = plan_of(ids, 2, capacity=3, backend=backend)
        assert_same_bits(
            moeroute.unpermute(rows, plan, backend=backend),
            moeroute.unpermute(moeroute.permute(tokens, free, backend=backend), free, backend=backend),
        )


def test_b163_the_ranks_gradients_add_up_in_dirty_memory(backend: str) -> None:
    """NaN from reused memory came in at the second step, and the sum over the ranks was missing."""
    ids = [[0, 1], [1, 0]]
    start, share, seed = (
        whole_numbers(2, 3, seed=1),
        torch.tensor([[0.5, 0.25], [1.0, 2.0]]),
        whole_numbers(2, 3, seed=2),
    )

    def grads(expert_range: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
        tokens, weights = start.clone().requires_grad_(), share.clone().requires_grad_()
        plan = plan_of(ids, 2, expert_range=expert_range, num_rows=4, backend=backend)
        rows = moeroute.permute(tokens, plan, backend=backend) * 3
        rows = torch.where((plan.slot_of_row >= 0)[:, None], rows, torch.nan)  # what a dirty buffer holds
        moeroute.unpermute(rows, plan, weights, backend=backend).backward(seed)
        assert tokens.grad is not None
        assert weights.grad is not None
        return tokens.grad, weights.grad

    alone = grads(None)
    for _ in range(2):
        first, second = grads((0, 1)), grads((1, 2))
        assert_same_bits([a + b for a, b in zip(first, second, strict=True)], [g + 0.0 for g in alone])


# ---------------------------------------------------------------------------- sizes


def test_b05_rows_far_behind_two_billion_elements() -> None:
    """An int32 row number times the hidden size wrapped in the backward pass only.

    At the report's size, 304,000 rows of 7,168: 4.4 GB of addresses, of which 24 rows are ever touched. (The
    reference would copy the rows; its offsets are torch's.)
    """
    num_rows, hidden = 38_000 * 8, 7168
    rows = mapped(num_rows * hidden, torch.bfloat16).view(num_rows, hidden)
    at = torch.linspace(299_594, num_rows - 1, 24).long().flip(0)
    assert int(at.min()) * hidden > 2**31
    values = whole_numbers(24, hidden, seed=0).bfloat16()
    rows[at] = values
    plan = moeroute.plan_from_row_of_slot(at.reshape(3, 8), 3, num_rows)
    assert_same_bits(moeroute.permute_backward(rows, plan, backend="cpu"), values.reshape(3, 8, hidden).sum(1))
    weights = torch.full((3, 8), 0.5)
    halved = moeroute.unpermute(rows, plan, weights, backend="cpu")
    assert_same_bits(halved, values.reshape(3, 8, hidden).sum(1) / 2)
    grad = whole_numbers(3, hidden, seed=1).bfloat16()
    dots = moeroute.row_dots(rows, grad, plan, backend="cpu")
    assert_same_bits(dots, (values.float() * grad.float().repeat_interleave(8, 0)).sum(1))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_b05_every_row_operator_reads_and_writes_there(backend: str, dtype: torch.dtype) -> None:
    """The same products of row number and stride with four rows, 2^30 elements apart."""
    hidden, step = 70, 2**30 + 64

    def apart() -> Tensor:
        return mapped(2 * step + hidden, dtype).as_strided((3, hidden), (step, 1))

    plan = plan_of([[2], [1], [0]], 3, backend=backend)
    x, rows = whole_numbers(3, hidden, seed=0).to(dtype), whole_numbers(3, hidden, seed=1).to(dtype)
    weights = torch.tensor([[0.5], [2.0], [4.0]])
    far_x, far_rows = apart().copy_(x), apart().copy_(rows)
    slots, dots = weights.flatten(), (x * rows.flip(0)).float().sum(1)
    for out in (None, apart()):
        assert_same_bits(moeroute.spread(far_x, plan, out=out, backend=backend), x.flip(0))
        scaled = moeroute.spread(far_x, plan, slots, out=out, backend=backend)
        assert_same_bits(scaled, (x * weights).flip(0).to(dtype))
        assert_same_bits(moeroute.combine(far_rows, plan, out=out, backend=backend) + 0.0, rows.flip(0) + 0.0)
        combined = moeroute.combine(far_rows, plan, slots, init=far_x, out=out, backend=backend)
        assert_same_bits(combined, (x + rows.flip(0) * weights).to(dtype))
        pair = None if out is None else (out, torch.empty(3, 1))
        both = moeroute.unpermute_backward(far_x, far_rows, plan, weights, out=pair, backend=backend)
        assert_same_bits(both, ((x * weights).flip(0).to(dtype), dots[:, None]))
    assert_same_bits(moeroute.row_dots(far_rows, far_x, plan, backend=backend), dots)


def guarded(tensor: Tensor) -> Tensor:
    """A copy that ends where a page begins that nobody may touch."""
    size = -(-max(tensor.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    block = mmap.mmap(-1, size + mmap.PAGESIZE)
    behind = ctypes.addressof(ctypes.c_char.from_buffer(block)) + size
    protect = ctypes.CDLL(None).mprotect
    assert protect(ctypes.c_void_p(behind), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = torch.frombuffer(block, dtype=tensor.dtype, offset=size - tensor.nbytes, count=tensor.numel())
    return copy.view(tensor.shape).copy_(tensor)


@pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE"), reason="guard pages need mprotect")
@pytest.mark.parametrize("hidden", (1, 3, 63, 64, 65, 257))
def test_b52_nothing_behind_the_last_element_is_touched(backend: str, hidden: int) -> None:
    """Weights of the wrong length were read beyond their end. Every tensor here ends at a forbidden page."""
    generator = torch.Generator().manual_seed(hidden)
    made = plan_of([[2, 0, -1], [1, 0, 2], [0, 2, 1]], 3)
    fields = {name: getattr(made, name) for name in ("row_of_slot", "slot_of_row")}
    plan = moeroute.RoutingPlan(
        **{name: guarded(value) for name, value in fields.items()}, num_tokens=3, num_rows=made.num_rows, topk=3
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, rows = (
            torch.randn(3, hidden, generator=generator).to(dtype),
            torch.randn(8, hidden, generator=generator).to(dtype),
        )
        weights = torch.rand(3, 3, generator=generator).to(dtype)
        far_x, far_rows, far_weights = guarded(x), guarded(rows), guarded(weights)
        out_x, out_rows, out_weights = guarded(x), guarded(rows), guarded(weights)
        for w, far in ((None, None), (weights.flatten(), far_weights.flatten())):
            assert_same_bits(
                moeroute.spread(far_x, plan, far, out=out_rows, backend=backend),
                moeroute.spread(x, made, w, backend="reference"),
            )
            assert_same_bits(
                moeroute.combine(far_rows, plan, far, out=out_x, backend=backend),
                moeroute.combine(rows, made, w, backend="reference"),
            )
        assert_same_bits(
            moeroute.unpermute_backward(
                far_x, far_rows, plan, far_weights, out=(out_rows, out_weights), backend=backend
            ),
            moeroute.unpermute_backward(x, rows, made, weights, backend="reference"),
        )


@pytest.mark.parametrize("shape", ((2, 2), (3, 3), (3, 0), (0, 2), (6,)), ids=str)
def test_b52_weights_of_another_shape(shape: tuple[int, ...]) -> None:
    plan = plan_of([[0, 1], [1, 2], [2, 0]], 3)
    message = rf"weights must be \[T, K\] with T = 3 and K = 2, as the plan; got shape {re.escape(str(list(shape)))}"
    calls: list[Callable[[Tensor], Any]] = [
        lambda w: moeroute.permute(torch.ones(3, 4), plan, w),
        lambda w: moeroute.unpermute(torch.ones(6, 4), plan, w),
        lambda w: moeroute.permute_weights(w, plan),
        lambda w: moeroute.unpermute_backward(torch.ones(3, 4), torch.ones(6, 4), plan, w),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call(torch.ones(shape))


def test_b52_a_map_of_more_than_two_billion_entries() -> None:
    """Token times number of experts wrapped. 2.1 GB of zeros, of which a few pages are written.

    (The reference makes a list of the true entries with torch's own nonzero.)
    """
    num_tokens, num_experts = 2**23 + 1, 256
    routing_map = mapped(num_tokens * num_experts, torch.bool).view(num_tokens, num_experts)
    for token, expert in ((0, 3), (5, 255), (num_tokens - 2, 3), (num_tokens - 1, 0), (num_tokens - 1, 255)):
        routing_map[token, expert] = True
    plan = moeroute.plan_from_routing_map(routing_map, backend="cpu")
    counts = torch.zeros(256, dtype=torch.int64)
    counts[0], counts[3], counts[255] = 1, 2, 2
    assert_same_bits(plan.tokens_per_expert, counts)
    assert plan.token_of_row.tolist() == [num_tokens - 1, 0, num_tokens - 2, 5, num_tokens - 1]
    assert plan.row_of_slot.tolist() == [1, 3, 2, 0, 4]


def test_b160_a_million_tokens(backend: str) -> None:
    """A sort was written for no more than 64 thousand."""
    num_tokens = 2**17 + 1 if backend == "triton" else 2**20 + 1  # each block of which the interpreter takes in turn
    ids = (torch.arange(num_tokens) * 7919 % 256).to(torch.int32)
    plan = moeroute.plan_from_expert_ids(ids, 256, backend=backend)
    assert_same_bits(plan.tokens_per_expert, torch.bincount(ids, minlength=256))
    tokens = torch.arange(num_tokens, dtype=torch.int32)[:, None]
    rows = moeroute.permute(tokens, plan, backend=backend)
    assert_same_bits(rows.flatten(), torch.argsort(ids, stable=True).int())
    assert_same_bits(moeroute.unpermute(rows.float(), plan, backend=backend), tokens.float())


@contextmanager
def at_most(allowed: int) -> Iterator[None]:
    """Peak resident memory may grow by so many bytes; the system counts, so that nothing escapes."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def peak() -> int:
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    memory.empty_cache()
    try:
        reset.write_text("5")
    except OSError:
        pytest.skip("the system does not tell the peak of resident memory")
    before = peak()
    yield
    grown = peak() - before
    assert grown <= allowed, f"{grown / 2**20:.1f} MiB, allowed {allowed / 2**20:.1f}"


def test_b70_no_second_copy_of_the_rows() -> None:
    """Combining allocated two buffers of the size of all rows, or a float32 copy of them."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    mib = 2**20
    ids = torch.rand(4096, 16, generator=torch.Generator().manual_seed(0)).topk(8).indices
    plan = moeroute.plan_from_expert_ids(ids, 16)
    tokens = torch.ones(4096, 1024, dtype=torch.bfloat16)
    weights = torch.rand(4096, 8)
    rows = moeroute.permute(tokens, plan)  # kernels and threads are there from here on
    moeroute.unpermute_backward(tokens, rows, plan, weights)
    moeroute.unpermute(rows, plan, weights)
    assert rows.nbytes == 64 * mib
    with at_most(64 * mib + 4 * mib):
        kept = moeroute.permute(tokens, plan)
    with at_most(8 * mib + 4 * mib):
        kept = moeroute.unpermute(rows, plan, weights)
    with at_most(8 * mib + 4 * mib):
        kept = moeroute.unpermute(rows, plan)
    with at_most(64 * mib + 4 * mib):
        kept = moeroute.unpermute_backward(tokens, rows, plan, weights)[0]
    del kept


# ---------------------------------------------------------------------------- backends


def test_b97_no_call_leaks_to_another_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fallback was chosen, and one path still called what the device cannot do."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("another backend was called")

    others = [
        backends.module(room, name)
        for name in backends.NAMES
        if name != backend and backends.unavailable(name) is None
        for room in ("gating", "planning", "permutation")
    ]
    tokens = torch.randn(5, 8, requires_grad=True)
    logits = torch.randn(5, 4, requires_grad=True)
    routing_map = torch.tensor([[1, 0, 1, 0]] * 5, dtype=torch.bool)
    with monkeypatch.context() as patched:
        for module in others:
            for name, function in inspect.getmembers(module, inspect.isfunction):
                if function.__module__ == module.__name__:
                    patched.setattr(module, name, refuse)
        gating = moeroute.gating_topk(logits, 2, score="sigmoid", backend=backend)
        plan = moeroute.plan_from_expert_ids(gating.expert_ids, 4, backend=backend)
        rows = moeroute.permute(tokens, plan, backend=backend)
        output = moeroute.unpermute(rows, plan, gating.weights, backend=backend)
        dense = moeroute.plan_from_routing_map(routing_map, backend=backend)
        weighted = moeroute.permute(tokens, dense, gating.scores, backend=backend)
        output = output + moeroute.unpermute(weighted, dense, backend=backend)
        grads = torch.autograd.grad(output.square().sum(), (tokens, logits), create_graph=True)
        torch.autograd.grad(grads[0].sum(), tokens)  # the row operators' second derivatives too
    for grad in grads:
        assert bool(grad.isfinite().all())
