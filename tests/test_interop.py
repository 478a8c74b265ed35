"""The modules for other hosts, as far as no host is needed; tests/hosts has the rest."""

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import moeroute
from moeroute import dispatch
from moeroute.interop import huggingface, megatron, transformer_engine

PACKAGE = Path(moeroute.__file__).parent / "interop"
FILES = sorted(PACKAGE.glob("*.py"))  # torch_npu, a folder, has what stands between the routing functions too
# torch functions that compute nothing on elements, and the questions that are asked of torch.
HARMLESS = {
    "distributed.all_reduce",
    "autocast",
    "amp.is_autocast_available",
    "is_autocast_enabled",
    "get_autocast_dtype",
}


def test_a_host_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"^moeroute.interop.huggingface.register: transformers must be 5\.24\.x; got none that is installed$"):  # fmt: skip
        huggingface.register()


@pytest.mark.parametrize("absent", ["megatron", "megatron.core"])
def test_megatron_is_absent(monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, absent, None)
    megatron._installed_generation.cache_clear()
    tokens, routing_map = torch.ones(1, 2), torch.ones(1, 2).bool()
    wanted = r"megatron.core.transformer.moe.moe_utils must be 0\.16\.x, or its main branch of 2026 \(permute with align_size\); got none that is installed$"
    for call in (lambda: megatron.permute(tokens, routing_map), megatron.patch):
        with pytest.raises(ImportError, match=wanted):
            call()
    assert len(megatron.permute(tokens, routing_map, generation="0.16")) == 3  # which asks for no host


def test_no_host_is_imported_before_it_is_needed() -> None:
    code = """
import sys, moeroute
moeroute.interop.huggingface, moeroute.interop.megatron, moeroute.interop.transformer_engine
print(*sorted(sys.modules))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "moeroute.interop.hosts" in done.stdout.split()
    assert not {"transformers", "megatron", "transformer_engine"} & set(done.stdout.split())


def arithmetic_of(tree: ast.AST) -> list[str]:
    """Operators between values, and calls of torch other than the harmless ones."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.AugAssign):
            if not isinstance(node.op, ast.BitOr) and ast.unparse(node) not in NUMBERS:  # | joins types and tables
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if (
                name.startswith(("torch.", "F.", "nn.functional.")) and name.removeprefix("torch.") not in HARMLESS
            ) or (isinstance(node.func, ast.Attribute) and node.func.attr in METHODS):
                found.append(name)
    return found


# Of Python's, and a scalar loss times its coefficient.
NUMBERS = {
    "1 / gate.top_k",
    "topk // group_topk",
    "int(num_out_tokens) // routing_map.shape[1]",
    "router_z_loss(logits, padding_mask=padding_mask) * z_loss_coeff",
}
METHODS = {
    "add", "add_", "mul", "mul_", "div", "sub", "sum", "mean", "matmul", "mm", "bmm", "pow", "exp", "softmax", "sigmoid",
    "masked_fill", "masked_fill_", "index_select", "gather", "scatter", "scatter_add", "index_add_", "topk", "sort",
    "argsort", "cumsum", "where", "clamp", "float", "square", "norm", "max", "min",
}  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_interop_does_no_arithmetic(file: Path) -> None:
    assert not arithmetic_of(ast.parse(file.read_text()))


def test_the_look_for_arithmetic_finds_it() -> None:
    code = (
        "y = x + 1\ny *= 2\ntorch.cat([x])\nx.sum()\nF.silu(x)\nx.to(d).transpose(0, 1)\ntorch.is_autocast_enabled(d)"
    )
    assert sorted(arithmetic_of(ast.parse(code))) == ["F.silu", "torch.cat", "x + 1", "x.sum", "y *= 2"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_of_hugging_face_wait_for_no_gpu_in_bfloat16(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without data cannot be read; what comes to the CPU is seen."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "_chosen", {})
    arrived: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                    arrived.append(str(func))
            return result

    flags = {
        "num_experts": 4,
        "has_gate": False,
        "has_bias": True,
        "is_transposed": True,
        "has_post_expert_norm": False,
    }
    with FakeTensorMode(), torch.no_grad():
        hidden = torch.empty(10, 16, device="cuda", dtype=dtype)
        experts: Any = SimpleNamespace(
            **flags,
            act_fn=torch.nn.functional.relu,
            up_proj=hidden.new_empty(4, 16, 24),
            up_proj_bias=hidden.new_empty(4, 24),
            down_proj=hidden.new_empty(4, 24, 16),
            down_proj_bias=hidden.new_empty(4, 16),
        )
        ids = torch.empty(10, 2, device="cuda", dtype=torch.int64)
        weights = torch.empty(10, 2, device="cuda")
        with Watch():
            output = huggingface.experts_forward(experts, hidden, ids, weights)
    assert (output.shape, output.dtype) == ((10, 16), dtype)
    assert bool(arrived) == (dtype == torch.float32)  # where the loop over the experts needs the rows of each


ONE = torch.tensor(1.0)
# Tensors with fewer axes than the functions read, which Python would say in its own words.
TOO_FLAT: dict[str, Callable[[], Any]] = {
    "megatron.unpermute: restore_shape": lambda: megatron.unpermute(torch.ones(2, 3), torch.tensor([0, 1]), ()),
    "megatron.unpermute: permuted_tokens": lambda: megatron.unpermute(ONE, torch.tensor([0, 1]), (2, 3)),
    "megatron.unpermute: routing_map": lambda: megatron.unpermute(
        torch.ones(2, 3), torch.tensor([0, 1]), (2, 3), torch.ones(2, 1), ONE, drop_and_pad=True
    ),
    "megatron.sort_chunks_by_idxs: input": lambda: megatron.sort_chunks_by_idxs(ONE, torch.ones(1), torch.ones(1)),
    "transformer_engine.moe_unpermute: inp": lambda: transformer_engine.moe_unpermute(ONE, torch.ones(1)),
    "transformer_engine.moe_unpermute: row_id_map": lambda: transformer_engine.moe_unpermute(
        torch.ones(2, 3), ONE, map_type="index"
    ),
    "transformer_engine.moe_unpermute: merging_probs": lambda: transformer_engine.moe_unpermute(
        torch.ones(2, 3), torch.ones(2), ONE, map_type="index"
    ),
    "transformer_engine.moe_sort_chunks_by_index: inp": lambda: transformer_engine.moe_sort_chunks_by_index(
        ONE, torch.ones(1), torch.ones(1)
    ),
    "transformer_engine.moe_sort_chunks_by_index_with_probs: inp": (
        lambda: transformer_engine.moe_sort_chunks_by_index_with_probs(ONE, ONE, torch.ones(1), torch.ones(1))
    ),
    "transformer_engine.fused_topk_with_score_function: logits": (
        lambda: transformer_engine.fused_topk_with_score_function(ONE, 1, False, None, None, None, "sigmoid", None)
    ),
    "transformer_engine.fused_compute_score_for_moe_aux_loss: logits": (
        lambda: transformer_engine.fused_compute_score_for_moe_aux_loss(ONE, 1, "sigmoid")
    ),
}


@pytest.mark.parametrize("what", TOO_FLAT)
def test_tensors_with_too_few_axes(what: str) -> None:
    with pytest.raises(ValueError, match=rf"^moeroute.interop.{what} must be .*; got "):
        TOO_FLAT[what]()
