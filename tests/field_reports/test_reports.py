"""Inputs that broke other people's routing.

Each number, B01 to B166 and N01 to N38, is a public report by somebody who does this work. Its small input is a test in this folder,
named after it, or one of those that ELSEWHERE names. None is left out: what happened on several ranks is played by
several ranks in one process, and where a report took gigabytes the memory is mapped but hardly touched.
"""

import ast
import functools
import itertools
import re
from pathlib import Path

ALL = (
    1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29, 31, 32, 34, 35, 37, 38, 40, 41,
    43, 44, 46, 47, 49, 50, 52, 53, 55, 56, 58, 59, 61, 62, 64, 65, 67, 68, 70, 71, 73, 74, 76, 77, 79, 80, 82,
    83, 85, 86, 88, 89, 91, 92, 94, 95, 97, 98, 100, 101, 103, 104, 106, 107, 109, 110, 112, 113, 115, 116,
    118, 119, 121, 122, 124, 125, 127, 128, 130, 131, 133, 134, 136, 137, 139, 140, 142, 143, 145, 146, 148,
    149, 151, 152, 154, 155, 157, 158, 160, 161, 163, 164, 166
)  # fmt: skip
SECOND = (1, 2, 4, 5, 7, 8, 10, 11, 14, 16, 17, 19, 20, 22, 25, 26, 28, 31, 32, 34, 35, 37, 38)

# Reports whose very input is a test of the part that it concerns.
ELSEWHERE = {
    "B01": ["test_permutation_layouts.py::test_large_offsets"],
    "B08": ["test_gating_reports.py::test_b08_masked_groups_never_win"],
    "B10": ["test_gating_reports.py::test_b10_rows_of_nan_and_infinities"],
    "B11": ["test_gating_reports.py::test_b11_no_perturbation_breaks_ties"],
    "B13": ["test_gating_reports.py::test_b13_softmax_before_and_after"],
    "B16": [
        "test_gating_reports.py::test_b16_one_expert_before_softmax_still_learns",
        "test_layer_torch.py::test_top_1_with_constant_weights_warns",
    ],
    "B17": ["test_gating_reports.py::test_b17_normalised_or_not"],
    "B19": ["test_plan_options.py::test_defaults_with_a_capacity", "test_plan_errors.py::test_bad_input"],
    "B20": ["test_plan_options.py::test_all_options_crossed"],
    "B22": ["test_plan_reports.py::test_b22_capacity_above_the_number_of_tokens"],
    "B28": ["test_plan_reports.py::test_alignment", "test_permutation.py::test_padding_rows_are_zero_and_never_read"],
    "B31": [
        "test_gating.py::test_a_row_alone_and_in_a_batch_and_threads",
        "test_gating.py::test_a_row_in_a_very_large_batch",
    ],
    "B32": ["test_plan_reports.py::test_b32_b146_many_experts", "test_gating_reports.py::test_b32_many_experts"],
    "B34": ["test_plan_reports.py::test_b34_experts_no_multiple_of_anything"],
    "B37": ["test_torch.py::test_fifty_runs_give_the_same_bits"],
    "B40": [
        "test_gating_reports.py::test_b40_recomputation_chooses_the_same_experts",
        "test_torch.py::test_checkpoints_recompute_the_same_bits",
    ],
    "B41": ["test_layer_torch.py::test_checkpointing_counts_once"],
    "B43": ["test_gating_reports.py::test_b43_b103_all_weights_underflow"],
    "B44": ["test_gating_reports.py::test_b44_eps_beside_a_tiny_sum"],
    "B47": ["test_permutation_layouts.py::test_strided_and_expanded_gradients"],
    "B56": ["test_gating_reports.py::test_b56_b148_any_k"],
    "B59": [
        "test_plan_reports.py::test_b59_no_token_and_nothing_but_empty_slots",
        "test_permutation_layouts.py::test_empty_sizes",
    ],
    "B61": ["test_gating_reports.py::test_b61_b62_ties"],
    "B62": ["test_gating_reports.py::test_b61_b62_ties"],
    "B65": ["test_permutation.py::test_gradients_are_right_and_in_their_inputs_dtype"],
    "B68": ["test_plan_reports.py::test_b68_counts_have_every_expert"],
    "B71": ["test_permutation_layouts.py::test_gradients_only_where_needed_and_rows_kept_only_for_weights"],
    "B73": ["test_permutation_layouts.py::test_any_hidden_size_and_alignment"],
    "B74": ["test_permutation_layouts.py::test_any_hidden_size_and_alignment"],
    "B77": [
        "test_gating_reports.py::test_b77_bias_keeps_its_precision",
        "test_balance.py::test_bias_keeps_small_steps",
        "test_layer_torch.py::test_expert_bias_stays_float32",
    ],
    "B79": ["test_balance.py::test_counts_beyond_half_precision_are_exact"],
    "B80": ["test_balance.py::test_balanced_routing_gives_one_for_any_k"],
    "B82": [
        "test_plan_reports.py::test_b82_padding_does_not_count",
        "test_balance.py::test_loss_sees_what_the_router_wanted",
    ],
    "B85": ["test_torch.py::test_opcheck", "test_plan_torch.py::test_opcheck"],
    "B86": ["test_torch.py::test_strides_of_fake_and_real_outputs_agree"],
    "B88": ["test_plan_reports.py::test_b88_the_same_stable_bijection_every_time"],
    "B89": ["test_torch.py::test_python_threads"],
    "B91": ["test_permutation_layouts.py::test_gradients_only_where_needed_and_rows_kept_only_for_weights"],
    "B98": ["test_plan_reports.py::test_b98_capacity_is_exact", "test_layer.py::test_capacity_factor_is_exact"],
    "B100": [
        "test_plan_reports.py::test_b100_padding_tokens_take_no_capacity",
        "test_layer.py::test_padding_takes_no_rows_and_no_capacity",
    ],
    "B101": ["test_gating_reports.py::test_b101_scaling_once_and_always"],
    "B103": ["test_gating_reports.py::test_b43_b103_all_weights_underflow"],
    "B104": ["test_gating_reports.py::test_b104_groups_under_softmax"],
    "B107": ["test_plan_reports.py::test_b107_ids_above_256_do_not_collide"],
    "B109": ["test_plan_reports.py::test_b109_out_of_range_id"],
    "B112": [
        "test_torch.py::test_import_is_light",
        "test_torch.py::test_after_fork",
        "test_torch.py::test_data_loader_workers",
    ],
    "B116": ["test_plan_reports.py::test_alignment"],
    "B118": ["test_layer.py::test_input_is_unchanged", "test_permutation_layouts.py::test_inputs_are_unchanged"],
    "B119": ["test_gating_reports.py::test_b119_signs_of_nan"],
    "B121": ["test_permutation_errors.py::test_no_index_of_a_hand_made_plan_reads_out_of_bounds"],
    "B122": ["test_permutation.py::test_sum_is_float32_and_rounded_once"],
    "B130": [
        "test_torch.py::test_nothing_is_kept_without_backward",
        "test_permutation_layouts.py::test_gradients_only_where_needed_and_rows_kept_only_for_weights",
    ],
    "B131": [
        "test_plan_reports.py::test_b131_every_integer_dtype",
        "test_plan_reports.py::test_b131_bytes_of_a_map",
        "test_gating.py::test_integer_dtypes_of_given_ids",
    ],
    "B134": ["test_torch.py::test_compile_without_graph_break", "test_plan_torch.py::test_compile_without_a_break"],
    "B136": ["test_balance.py::test_memory_is_linear"],
    "B137": ["test_plan_reports.py::test_b137_rows_beyond_the_given_number_are_cut"],
    "B139": [
        "test_plan_reports.py::test_b139_more_slots_than_a_float_counts",
        "test_plan_reports.py::test_b139_k_above_512",
    ],
    "B143": [
        "test_plan_reports.py::test_b143_mask_of_tokens",
        "test_balance.py::test_padding_mask_masks_tokens_not_experts",
    ],
    "B145": ["test_gating_reports.py::test_b145_every_row_is_visited"],
    "B146": [
        "test_gating_reports.py::test_b146_sizes_around_the_blocks",
        "test_plan_reports.py::test_b32_b146_many_experts",
    ],
    "B148": ["test_gating_reports.py::test_b56_b148_any_k"],
    "B149": ["test_gating_reports.py::test_b149_small_k_in_groups"],
    "B151": ["test_gating_reports.py::test_b151_offsets_beyond_int32"],
    "B152": ["test_gating_reports.py::test_b152_nothing_is_read_or_written_beyond_the_end"],
    "B154": ["test_balance.py::test_shards_add_up"],
    "B158": ["test_gating_reports.py::test_b158_scores_in_float32_whatever_comes"],
    "B164": ["test_grouped_linear.py::test_rows_beyond_the_segments_are_never_read"],
    "B166": [
        "test_layer.py::test_a_token_does_not_depend_on_its_neighbours",
        "test_permutation.py::test_bits_do_not_depend_on_threads_or_batch",
    ],
    "N01": ["test_out.py::test_what_autograd_saved_is_missed"],
    "N02": ["test_torch.py::test_a_trace_answers_other_inputs"],
    "N04": ["test_library_host.py::test_ctrl_c_is_the_programs"],
    "N05": [
        "test_layer_torch.py::test_layer_under_torch_func",
        "test_grouped_linear.py::test_grouped_linear_under_torch_func",
    ],
    "N07": ["test_runtime.py::test_a_threading_layer_that_is_not_installed"],
    "N08": ["test_runtime.py::test_numba_that_compiles_nothing"],
    "N10": ["test_layer_torch.py::test_expert_bias_stays_float32_whoever_changes_it"],
    "N11": ["test_library_host.py::test_the_environment_of_the_program_is_not_ours"],
    "N37": ["test_torch.py::test_without_a_cache_folder_kernels_run_and_info_says_so"],
}


@functools.cache
def functions_of(file: Path) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]


def test_every_report_is_a_test_here_or_elsewhere() -> None:
    here = {
        number.upper()
        for file in Path(__file__).parent.glob("*.py")
        for name in functions_of(file)
        if (numbers := re.match(r"test((?:_[bn]\d+)+)_", name))
        for number in re.findall(r"[bn]\d+", numbers[1])
    }
    assert here | set(ELSEWHERE) == {f"B{number:02}" for number in ALL} | {f"N{number:02}" for number in SECOND}
    assert here.isdisjoint(ELSEWHERE)


def test_the_tests_elsewhere_exist() -> None:
    functions: dict[str, set[str]] = {}
    for path in Path(__file__).parents[1].rglob("*.py"):
        functions.setdefault(path.name, set()).update(functions_of(path))
    for name in itertools.chain(*ELSEWHERE.values()):
        file, function = name.split("::")
        assert function in functions[file], name
