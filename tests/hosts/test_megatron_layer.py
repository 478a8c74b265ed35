"""Megatron-Core's router and alltoall dispatcher under `patch()`, in one process on a CPU, against themselves."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hosts.megatron_host import MoEAlltoAllTokenDispatcher, TopKRouter, TransformerConfig, moe_utils, parallel_state
from moeroute.interop import megatron

EXPERTS, HIDDEN = 8, 16


class Stream:
    """What the dispatcher asks of torch.cuda where there is none."""

    def wait_stream(self, other: "Stream") -> None: ...

    def record_event(self) -> "Stream":
        return self

    def synchronize(self) -> None: ...


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # torch exports it all the same
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "current_stream", Stream)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # the host forgets to, without TE
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


MODES: dict[str, dict[str, Any]] = {
    "dropless": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2, "moe_z_loss_coeff": 1e-3},
    "sequences": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-2},
    "sigmoid": {
        "moe_router_score_function": "sigmoid", "moe_router_num_groups": 4, "moe_router_group_topk": 2,
        "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5, "moe_router_topk": 4,
    },
    "padded_map": {},
    "capacity": {"moe_expert_capacity_factor": 0.8},
    "drop_and_pad": {"moe_expert_capacity_factor": 0.8, "moe_pad_expert_input_to_capacity": True},
    "large_capacity": {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
}  # fmt: skip


def layer(mode: str, dtype: torch.dtype, patched: bool) -> list[Tensor]:
    """Output and gradients of router, dispatch, an experts' function and combine."""
    torch.manual_seed(0)
    common = {
        "num_layers": 1, "hidden_size": HIDDEN, "moe_ffn_hidden_size": 4 * HIDDEN, "num_attention_heads": 2, "num_moe_experts": EXPERTS,
        "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False,
        "use_cpu_initialization": True, "params_dtype": dtype, "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none", "init_method_std": 1.0, "cuda_graph_scope": [],
    }  # fmt: skip
    config = TransformerConfig(**common | MODES[mode])
    config.moe_router_padding_for_quantization = mode == "padded_map"  # which asks for fp8, and that for a GPU
    groups = moe_utils.get_default_pg_collection()
    with megatron.patch() if patched else contextlib.nullcontext():
        router = TopKRouter(config, pg_collection=groups)
        dispatcher = MoEAlltoAllTokenDispatcher(EXPERTS, list(range(EXPERTS)), config, pg_collection=groups)
        hidden = torch.randn(24, 3, HIDDEN).to(dtype).requires_grad_()
        probs, routing_map = router(hidden)
        rows, row_probs = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(hidden, routing_map, probs))
        rows, counts, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        assert rows.shape[0] == int(counts.sum())
        scale = torch.repeat_interleave(torch.arange(1.0, EXPERTS + 1), counts.long(), output_size=rows.shape[0])
        rows = (rows.float() * scale[:, None]).tanh() * row_probs[:, None]
        rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows.to(dtype)))
        output = dispatcher.combine_postprocess(rows)
        output.float().square().sum().backward()
    assert hidden.grad is not None
    found = [output, hidden.grad, router.weight.grad, probs]
    return found if router.local_tokens_per_expert is None else [*found, router.local_tokens_per_expert]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_router_and_dispatcher(mode: str, dtype: torch.dtype) -> None:
    expected, actual = layer(mode, dtype, patched=False), layer(mode, dtype, patched=True)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
