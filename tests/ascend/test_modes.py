"""The routing functions under torch.compile without a graph break, in inference mode and without gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moeroute.interop import torch_npu

X, IDS = torch.randn(6, 8), torch.randint(0, 4, (6, 2))
WEIGHTS, LOGITS = torch.rand(6, 2), torch.randn(6, 4)


def there_and_back(x: Tensor) -> Tensor:
    rows, index = torch_npu.npu_moe_token_permute(x, IDS)
    return torch_npu.npu_moe_token_unpermute(rows * 2, index, probs=WEIGHTS)


CALLS: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "permute and unpermute": (there_and_back, X),
    "gating": (lambda x: torch_npu.npu_moe_gating_top_k(x, 2, renorm=1)[:2], LOGITS),
    "softmax gating": (lambda x: torch_npu.npu_moe_gating_top_k_softmax(x, None, 2), LOGITS),
    "init routing": (lambda x: torch_npu.npu_moe_init_routing_v2(x, IDS, expert_num=4, quant_mode=1), X),
    "swiglu": (torch_npu.npu_swiglu, X),
    "norm": (lambda x: torch_npu.npu_rms_norm(x, torch.ones(8))[0], X),
}


def as_list(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


@pytest.mark.parametrize("name", CALLS)
def test_compile_without_a_break(name: str) -> None:
    call, x = CALLS[name]
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    for one, other in zip(as_list(found), as_list(call(x)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CALLS)
def test_without_gradients(name: str, mode: Callable[[], Any]) -> None:
    call, x = CALLS[name]
    wanted = call(x)
    with mode():
        found = call(x.clone().requires_grad_())
    for one, other in zip(as_list(found), as_list(wanted), strict=True):
        assert not one.requires_grad
        assert torch.equal(one, other)
