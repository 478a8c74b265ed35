"""Arguments that torch_npu's schemas mark as optional (`int?`, `Tensor?`, ...): None is the same as leaving them out."""

from typing import Any

import pytest
import torch

from moeroute.interop.torch_npu.arguments import FUNCTIONS
from moeroute.interop.torch_npu.schemas import publish_all
from moeroute.testing import assert_same_bits

OPTIONAL = {
    "npu_alltoallv_gmm": "send_counts_tensor recv_counts_tensor mm_x mm_weight comm_mode",
    "npu_clipped_swiglu": "group_index",
    "npu_dequant_swiglu_quant": "weight_scale activation_scale bias quant_scale quant_offset group_index dst_type "
    "round_mode activate_dim",
    "npu_dynamic_mx_quant": "scale_alg",
    "npu_dynamic_quant": "smooth_scales group_index dst_type",
    "npu_format_cast": "customize_dtype input_dtype",
    "npu_format_cast_": "customize_dtype input_dtype",
    "npu_gmm_alltoallv": "send_counts_tensor recv_counts_tensor mm_x mm_weight comm_mode",
    "npu_grouped_dynamic_mx_quant": "scale_alg dst_type_max",
    "npu_grouped_matmul": "bias scale offset antiquant_scale antiquant_offset per_token_scale group_list "
    "activation_input activation_quant_scale activation_quant_offset split_item group_type group_list_type act_type "
    "tuning_config output_dtype x_dtype weight_dtype scale_dtype per_token_scale_dtype",
    "npu_grouped_matmul_finalize_routing": "scale bias offset pertoken_scale shared_input logit row_index dtype "
    "shared_input_weight shared_input_offset output_bs group_list_type tuning_config x_dtype w_dtype scale_dtype "
    "pertoken_scale_dtype",
    "npu_grouped_matmul_swiglu_quant": "bias offset",
    "npu_grouped_matmul_swiglu_quant_v2": "smooth_scale weight_assist_matrix bias dequant_mode dequant_dtype "
    "quant_mode quant_dtype group_list_type tuning_config x_dtype weight_dtype weight_scale_dtype x_scale_dtype",
    "npu_moe_distribute_combine": "tp_send_counts x_active_mask activation_scale weight_scale group_list expand_scales "
    "shared_expert_x",
    "npu_moe_distribute_combine_v2": "tp_send_counts x_active_mask expand_scales shared_expert_x elastic_info ori_x "
    "const_expert_alpha_1 const_expert_alpha_2 const_expert_v performance_info",
    "npu_moe_distribute_dispatch": "scales x_active_mask expert_scales",
    "npu_moe_distribute_dispatch_v2": "scales x_active_mask expert_scales elastic_info performance_info y_dtype "
    "x_dtype scales_dtype",
    "npu_moe_finalize_routing": "skip1 skip2 bias scales export_for_source_row drop_pad_mode k",
    "npu_moe_gating_top_k": "bias input_ids tid2eid",
    "npu_moe_gating_top_k_softmax": "finished",
    "npu_moe_gating_top_k_softmax_v2": "finished renorm output_softmax",
    "npu_moe_init_routing_quant": "scale offset",
    "npu_moe_init_routing_v2": "scale offset x_dtype",
    "npu_moe_re_routing": "per_token_scales tokens_dtype",
    "npu_moe_token_permute": "num_out_tokens",
    "npu_moe_token_permute_with_routing_map": "probs num_out_tokens",
    "npu_moe_token_permute_with_routing_map_grad": "probs_grad",
    "npu_moe_token_unpermute": "probs restore_shape",
    "_npu_moe_token_unpermute": "probs restore_shape",
    "npu_moe_token_unpermute_grad": "probs restore_shape",
    "npu_moe_token_unpermute_grad_v2": "probs restore_shape permuted_tokens",
    "npu_moe_token_unpermute_with_routing_map": "probs routing_map",
    "_npu_moe_token_unpermute_with_routing_map": "probs routing_map",
    "npu_moe_token_unpermute_with_routing_map_grad": "routing_map permuted_tokens probs restore_shape",
    "npu_moe_update_expert": "expert_scales pruning_threshold active_mask",
    "npu_quantize": "zero_points",
    "npu_rotary_mul": "rotate",
    "npu_swiglu_quant": "smooth_scales offsets group_index dst_type",
}

drawn = torch.Generator().manual_seed(0)


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=drawn)


def int8(*shape: int) -> torch.Tensor:
    return torch.randint(-99, 99, shape, dtype=torch.int8, generator=drawn)


IDS = torch.tensor([[1, 0], [1, 2], [0, 2]], dtype=torch.int32)
MAP = torch.tensor([[True, True, False], [False, True, True], [True, False, True]])
ORDER = torch.tensor([2, 0, 3, 4, 1, 5], dtype=torch.int32)
TWO_SIZES = torch.tensor([4, 2])  # as ends they would descend
TWO_ENDS = torch.tensor([4, 6])
HERE: dict[str, Any] = {"group_ep": "ep", "ep_world_size": 1, "ep_rank_id": 0, "moe_expert_num": 3}
COUNTS: dict[str, Any] = {"hcom": "ep", "ep_world_size": 1, "send_counts": [4, 2], "recv_counts": [4, 2]}
TO_EXPERTS = {"x": floats(3, 4), "expert_ids": IDS, **HERE}
INT8_PRODUCT = {"x": int8(6, 8), "weight_scale": floats(2, 12), "x_scale": floats(6), "group_list": TWO_ENDS}
BACK = {
    "expanded_permuted_rows": floats(6, 4),
    "skip1": None,
    "skip2": None,
    "bias": None,
    "scales": None,
    "expanded_src_to_dst_row": ORDER,
    "export_for_source_row": None,
}
TO_TOKENS = {"x": int8(6, 8), "w": int8(2, 8, 4), "group_list": TWO_SIZES}


def combining(name: str) -> dict[str, Any]:
    """What a combine takes of its dispatch."""
    dispatched: Any = FUNCTIONS[name.replace("combine", "dispatch")](**TO_EXPERTS)
    index = "assist_info_for_combine" if name.endswith("v2") else "expand_idx"
    received = {"expand_x": dispatched[0], index: dispatched[2], "ep_send_counts": dispatched[4]}
    return received | {"expert_ids": IDS, "expert_scales": floats(3, 2), **HERE}


# The first call that leaves the argument out is taken.
CALLS: dict[str, list[dict[str, Any]]] = {
    "npu_alltoallv_gmm": [{"gmm_x": floats(6, 4), "gmm_weight": floats(2, 4, 3), **COUNTS}],
    "npu_clipped_swiglu": [{"x": floats(3, 4)}],
    "npu_dequant_swiglu_quant": [{"x": floats(3, 4)}],
    "npu_dynamic_mx_quant": [{"input": floats(2, 64), "dst_type": 24}],
    "npu_dynamic_quant": [{"input": floats(3, 4)}],
    "npu_format_cast": [{"self": floats(2), "acl_format": 29}],
    "npu_format_cast_": [{"self": floats(2), "acl_format": 29}],
    "npu_gmm_alltoallv": [{"gmm_x": floats(6, 4), "gmm_weight": floats(2, 4, 3), **COUNTS}],
    "npu_grouped_dynamic_mx_quant": [{"x": floats(6, 3), "group_index": TWO_ENDS}],
    "npu_grouped_matmul": [
        {"x": [floats(6, 4)], "weight": [floats(4, 3), floats(4, 3)], "group_list": [4, 6]},
        {"x": [floats(6, 4), floats(2, 4)], "weight": [floats(4, 3), floats(4, 2)], "group_type": -1},
    ],
    "npu_grouped_matmul_finalize_routing": [
        TO_TOKENS
        | {"scale": floats(2, 4), "row_index": torch.tensor([0, 1, 2, 2, 1, 5]), "shared_input": floats(2, 4)},
        TO_TOKENS | {"scale": floats(2, 4), "row_index": torch.tensor([0, 1, 2, 2, 1, 5])},
    ],
    "npu_grouped_matmul_swiglu_quant": [INT8_PRODUCT | {"weight": int8(2, 8, 12)}],
    "npu_grouped_matmul_swiglu_quant_v2": [
        INT8_PRODUCT | {"weight": [int8(2, 8, 12)], "weight_scale": [INT8_PRODUCT["weight_scale"]]}
    ],
    "npu_moe_distribute_combine": [combining("npu_moe_distribute_combine")],
    "npu_moe_distribute_combine_v2": [combining("npu_moe_distribute_combine_v2")],
    "npu_moe_distribute_dispatch": [TO_EXPERTS],
    "npu_moe_distribute_dispatch_v2": [TO_EXPERTS],
    "npu_moe_finalize_routing": [BACK | {"k": 2}, BACK],
    "npu_moe_gating_top_k": [{"x": floats(3, 4), "k": 2}],
    "npu_moe_gating_top_k_softmax": [{"x": floats(3, 4), "k": 2}],
    "npu_moe_gating_top_k_softmax_v2": [{"x": floats(3, 4), "k": 2}],
    "npu_moe_init_routing_quant": [{"x": floats(3, 4), "expert_idx": IDS, "expert_num": 3}],
    "npu_moe_init_routing_v2": [{"x": floats(3, 4), "expert_idx": IDS, "expert_num": 3}],
    "npu_moe_re_routing": [
        {"tokens": floats(6, 4), "expert_token_num_per_rank": torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)}
    ],
    "npu_moe_token_permute": [{"tokens": floats(3, 4), "indices": IDS}],
    "npu_moe_token_permute_with_routing_map": [{"tokens": floats(3, 4), "routing_map": MAP}],
    "npu_moe_token_permute_with_routing_map_grad": [
        {
            "permuted_token_out_grad": floats(6, 4),
            "probs_grad": None,
            "sorted_indices": ORDER,
            "routing_map": MAP,
            "experts_num": 3,
            "tokens_num": 3,
            "drop_and_pad": False,
        }
    ],
    "npu_moe_token_unpermute": [{"permuted_tokens": floats(6, 4), "sorted_indices": ORDER}],
    "_npu_moe_token_unpermute": [{"permuted_tokens": floats(6, 4), "sorted_indices": ORDER}],
    "npu_moe_token_unpermute_grad": [
        {"permuted_tokens": floats(6, 4), "grad_unpermuted_tokens": floats(6, 4), "sorted_indices": ORDER}
    ],
    "npu_moe_token_unpermute_grad_v2": [
        {
            "grad_unpermuted_tokens": floats(6, 4),
            "sorted_indices": ORDER,
            "permuted_tokens_size_0": 6,
            "permuted_tokens_dtype": 6,
        }
    ],
    "npu_moe_token_unpermute_with_routing_map": [
        {"permuted_tokens": floats(6, 4), "sorted_indices": ORDER, "restore_shape": [3, 4]}
    ],
    "_npu_moe_token_unpermute_with_routing_map": [
        {"permuted_tokens": floats(6, 4), "sorted_indices": ORDER, "restore_shape": [3, 4]}
    ],
    "npu_moe_token_unpermute_with_routing_map_grad": [
        {
            "unpermuted_tokens_grad": floats(3, 4),
            "out_index": ORDER,
            "permuted_token_id": ORDER,
            "routing_map": None,
            "permuted_tokens": None,
            "probs": None,
            "drop_and_pad": False,
        }
    ],
    "npu_moe_update_expert": [
        {"expert_ids": IDS, "eplb_table": torch.tensor([[1, 2, -1], [2, 0, 3], [1, 1, -1]]), "balance_mode": 1}
    ],
    "npu_quantize": [{"self": floats(3, 4), "scales": floats(4), "zero_points": None, "dtype": 1}],
    "npu_rotary_mul": [{"self": floats(3, 4), "r1": floats(3, 4), "r2": floats(3, 4)}],
    "npu_swiglu_quant": [{"x": floats(3, 4), "quant_mode": 1}],
}
NEEDED = {("npu_grouped_matmul_finalize_routing", "scale"), ("npu_grouped_matmul_finalize_routing", "row_index")}
ARGUMENTS = [(name, argument) for name, arguments in OPTIONAL.items() for argument in arguments.split()]


def function_of(name: str, way: str) -> Any:
    publish_all()
    return FUNCTIONS[name] if way == "function" else getattr(torch.ops.npu, name)


@pytest.mark.parametrize("way", ["function", "operator"])
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_none_is_the_default(name: str, argument: str, way: str) -> None:
    function = function_of(name, way)
    if (name, argument) in NEEDED:
        given = {key: value for key, value in CALLS[name][0].items() if key != argument}
        for none in ({}, {argument: None}):
            with pytest.raises(RuntimeError, match=rf"{name}: {argument} must be a tensor; got None"):
                function(**given, **none)
        return
    given = next(call for call in CALLS[name] if call.get(argument) is None)
    assert_same_bits(function(**(given | {argument: None})), function(**given))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_other_argument_is_optional(name: str) -> None:
    """The schemas say of the same arguments that they may be None."""
    publish_all()
    operator = getattr(torch.ops.npu, name)
    for overload in operator.overloads():
        arguments = getattr(operator, overload)._schema.arguments
        optional = {a.name for a in arguments if isinstance(a.type, torch.OptionalType)}
        assert optional == set(OPTIONAL.get(name, "").split())
