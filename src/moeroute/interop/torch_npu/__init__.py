"""torch_npu without an NPU: the functions of a Mixture-of-Experts layer for Ascend, on any device of torch.

Names, arguments, results, gradients and errors are torch_npu's; docs/interop_ascend.md lists what there is. `install`
puts them where a program looks for them:

    from moeroute.interop import torch_npu

    torch_npu.install()
    import torch_npu  # this package's from here on

A script that is not touched runs by ``python -m moeroute.interop.torch_npu script.py``, tests by
``pytest -p moeroute.interop.torch_npu.plugin``.
"""

from moeroute.interop.torch_npu.activation import (
    npu_clipped_swiglu as npu_clipped_swiglu,
    npu_rms_norm as npu_rms_norm,
    npu_rms_norm_backward as npu_rms_norm_backward,
    npu_rotary_mul as npu_rotary_mul,
    npu_rotary_mul_backward as npu_rotary_mul_backward,
    npu_swiglu as npu_swiglu,
    npu_swiglu_backward as npu_swiglu_backward,
)
from moeroute.interop.torch_npu.formats import (
    get_npu_format as get_npu_format,
    npu_format_cast as npu_format_cast,
    npu_format_cast_ as npu_format_cast_,
)
from moeroute.interop.torch_npu.gating import (
    npu_moe_gating_top_k as npu_moe_gating_top_k,
    npu_moe_gating_top_k_backward as npu_moe_gating_top_k_backward,
    npu_moe_gating_top_k_softmax as npu_moe_gating_top_k_softmax,
    npu_moe_gating_top_k_softmax_v2 as npu_moe_gating_top_k_softmax_v2,
)
from moeroute.interop.torch_npu.grouped_matmul import (
    npu_grouped_matmul as npu_grouped_matmul,
    npu_grouped_matmul_add as npu_grouped_matmul_add,
    npu_grouped_matmul_add_ as npu_grouped_matmul_add_,
)
from moeroute.interop.torch_npu.install import install as install, uninstall as uninstall
from moeroute.interop.torch_npu.mx import (
    npu_dynamic_mx_quant as npu_dynamic_mx_quant,
    npu_grouped_dynamic_mx_quant as npu_grouped_dynamic_mx_quant,
)
from moeroute.interop.torch_npu.permutation import (
    _npu_moe_token_unpermute as _npu_moe_token_unpermute,
    _npu_moe_token_unpermute_with_routing_map as _npu_moe_token_unpermute_with_routing_map,
    npu_moe_token_permute as npu_moe_token_permute,
    npu_moe_token_permute_grad as npu_moe_token_permute_grad,
    npu_moe_token_permute_grad_v2 as npu_moe_token_permute_grad_v2,
    npu_moe_token_permute_with_routing_map as npu_moe_token_permute_with_routing_map,
    npu_moe_token_permute_with_routing_map_grad as npu_moe_token_permute_with_routing_map_grad,
    npu_moe_token_unpermute as npu_moe_token_unpermute,
    npu_moe_token_unpermute_grad as npu_moe_token_unpermute_grad,
    npu_moe_token_unpermute_grad_v2 as npu_moe_token_unpermute_grad_v2,
    npu_moe_token_unpermute_with_routing_map as npu_moe_token_unpermute_with_routing_map,
    npu_moe_token_unpermute_with_routing_map_grad as npu_moe_token_unpermute_with_routing_map_grad,
)
from moeroute.interop.torch_npu.process_groups import register_group as register_group
from moeroute.interop.torch_npu.quantization import (
    npu_dequant_swiglu_quant as npu_dequant_swiglu_quant,
    npu_dynamic_quant as npu_dynamic_quant,
    npu_quantize as npu_quantize,
    npu_swiglu_quant as npu_swiglu_quant,
)
from moeroute.interop.torch_npu.quantized_products import (
    npu_grouped_matmul_finalize_routing as npu_grouped_matmul_finalize_routing,
    npu_grouped_matmul_swiglu_quant as npu_grouped_matmul_swiglu_quant,
    npu_grouped_matmul_swiglu_quant_v2 as npu_grouped_matmul_swiglu_quant_v2,
)
from moeroute.interop.torch_npu.ranks import (
    npu_moe_distribute_dispatch as npu_moe_distribute_dispatch,
    npu_moe_distribute_dispatch_v2 as npu_moe_distribute_dispatch_v2,
)
from moeroute.interop.torch_npu.ranks_combine import (
    npu_moe_distribute_combine as npu_moe_distribute_combine,
    npu_moe_distribute_combine_v2 as npu_moe_distribute_combine_v2,
)
from moeroute.interop.torch_npu.ranks_gmm import (
    npu_alltoallv_gmm as npu_alltoallv_gmm,
    npu_gmm_alltoallv as npu_gmm_alltoallv,
)
from moeroute.interop.torch_npu.routing import (
    npu_moe_compute_expert_tokens as npu_moe_compute_expert_tokens,
    npu_moe_finalize_routing as npu_moe_finalize_routing,
    npu_moe_init_routing as npu_moe_init_routing,
    npu_moe_init_routing_quant as npu_moe_init_routing_quant,
    npu_moe_init_routing_v2 as npu_moe_init_routing_v2,
    npu_moe_re_routing as npu_moe_re_routing,
    npu_moe_update_expert as npu_moe_update_expert,
)
