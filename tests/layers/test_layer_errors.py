"""What the layers refuse, and how they show themselves."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moeroute.nn import Experts, MoE, Router, SwiGLU, grouped_linear
from small_layers import make_input, make_layer


def test_a_dtype_that_is_not_the_layers_is_named() -> None:
    """The layer and what it was given, and not the weight of some product inside."""
    x = torch.zeros(4, 8)
    for module, argument, arguments in (
        (MoE(8, 16, 4, 2, dtype=torch.float32), "x", ()),
        (Experts(4, 8, 16, dtype=torch.float32), "rows", ([1, 1, 1, 1],)),
        (SwiGLU(8, 16, dtype=torch.float32), "x", ()),
    ):
        name = f"nn.{type(module).__name__}"
        for dtype in (torch.bfloat16, torch.float64):
            wanted = f"moeroute.{name}: {argument} must be torch.float32, as the layer's weights; got {dtype}"
            with pytest.raises(TypeError, match=f"^{re.escape(wanted)}$"):
                module(x.to(dtype), *arguments)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert module(x.bfloat16(), *arguments).dtype is torch.bfloat16
            with pytest.raises(TypeError, match=r"got torch\.float64"):
                module(x.double(), *arguments)
    layer = MoE(8, 16, 4, 2, dtype=torch.bfloat16)
    layer.router.float()  # a router of its own dtype is nobody's mistake
    assert layer(x.bfloat16()).dtype is torch.bfloat16


ROWS, WEIGHT = torch.randn(4, 3), torch.randn(2, 5, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: grouped_linear([1.0], WEIGHT, [1, 1]), TypeError, "grouped_linear: rows must be a torch.Tensor; got list"),  # type: ignore[arg-type]
        (lambda: grouped_linear(ROWS, 3, [1, 1]), TypeError, "weight must be a torch.Tensor; got int"),  # type: ignore[arg-type]
        (lambda: grouped_linear(ROWS.int(), WEIGHT, [1, 1]), TypeError, "rows must be float16, bfloat16, float32 or float64; got torch.int32"),
        (lambda: grouped_linear(ROWS[0], WEIGHT, [1, 1]), ValueError, r"rows must be \[R, I\]; got shape \[3\]"),
        (lambda: grouped_linear(ROWS, WEIGHT[0], [1, 1]), ValueError, r"weight must be \[E, O, I\] with I = 3, as rows; got shape \[5, 3\]"),
        (lambda: grouped_linear(ROWS, WEIGHT[..., :2], [1, 1]), ValueError, "weight must be .* I = 3"),
        (lambda: grouped_linear(ROWS, WEIGHT.double(), [1, 1]), TypeError, "weight must be torch.float32, as rows; got torch.float64"),
        (lambda: grouped_linear(ROWS, WEIGHT.to("meta"), [1, 1]), ValueError, "weight must be on cpu, as rows; got meta"),
        (lambda: grouped_linear(ROWS, WEIGHT, [1, 1], 3), TypeError, "bias must be a torch.Tensor; got int"),  # type: ignore[arg-type]
        (lambda: grouped_linear(ROWS, WEIGHT, [1, 1], torch.zeros(5)), ValueError, r"bias must be \[E, O\] = \[2, 5\], as weight; got shape \[5\]"),
        (lambda: grouped_linear(ROWS, WEIGHT, [1, 1], torch.zeros(2, 5).half()), TypeError, "bias must be torch.float32, as rows; got torch.float16"),
        (lambda: grouped_linear(ROWS, WEIGHT, [1, 1], torch.zeros(2, 5, device="meta")), ValueError, "bias must be on cpu, as rows; got meta"),
        (lambda: grouped_linear(ROWS, WEIGHT, [1]), ValueError, r"sizes must be \[E\] with E = 2, as weight; got shape \[1\]"),
        (lambda: grouped_linear(ROWS, WEIGHT, [1.0, 2.0]), TypeError, "sizes must be an int; got float"),  # type: ignore[list-item]
        (lambda: grouped_linear(ROWS, WEIGHT, torch.tensor([1.0, 2.0])), TypeError, "sizes must be torch.int64"),
        (lambda: grouped_linear(ROWS, WEIGHT, [-1, 2]), ValueError, r"sizes must be at least 0 each and no more than the 4 rows in all; got \[-1, 2\]"),
        (lambda: grouped_linear(ROWS, WEIGHT, [3, 2]), ValueError, r"sizes must be .*; got \[3, 2\]"),
        (lambda: grouped_linear(ROWS, WEIGHT, None), TypeError, "nn.grouped_linear: sizes must be an int64 tensor or a sequence of ints; got NoneType"),  # type: ignore[arg-type]
        (lambda: grouped_linear(ROWS, WEIGHT, 3), TypeError, "sizes must be an int64 tensor or a sequence of ints; got int"),  # type: ignore[arg-type]
        (lambda: grouped_linear(ROWS, WEIGHT, [10**30, 0]), ValueError, "sizes must be .* no more than the 4 rows"),
        (lambda: grouped_linear(ROWS, WEIGHT, torch.tensor([3, 2])), ValueError, r"sizes must be .*; got \[3, 2\]"),
        (lambda: grouped_linear(ROWS, WEIGHT, torch.tensor([-1, 2])), ValueError, r"sizes must be .*; got \[-1, 2\]"),
        (lambda: grouped_linear(ROWS, WEIGHT, torch.tensor([1, 2]).to("meta")), ValueError, "sizes must be on cpu or the CPU; got meta"),
        (lambda: MoE(8, 8, 4, 2, backend="nope"), ValueError, "nn.MoE: backend must be one of 'reference', 'cpu', .*; got 'nope'"),  # type: ignore[arg-type]
        (lambda: Router(8, 4, 2, backend="nope"), ValueError, "nn.Router: backend must be one of"),  # type: ignore[arg-type]
        (lambda: MoE(8, 8, 4, 2, shared_expert=3), TypeError, "shared_expert must be a torch.nn.Module or None; got int"),  # type: ignore[arg-type]
        (lambda: MoE(8, 8, 4, 2, dtype=torch.int32), TypeError, "nn.MoE: dtype must be one of .*; got torch.int32"),
        (lambda: MoE(8, 8, 4, 2, device="nowhere"), ValueError, "nn.MoE: device must be one that torch knows; got 'nowhere'"),
        (lambda: MoE(8, 8, 10**30, 2), ValueError, "num_experts must be at most 2147483647"),
        (lambda: MoE(0, 8, 4, 2), ValueError, "hidden_size must be at least 1; got 0"),
        (lambda: MoE(8, 0, 4, 2), ValueError, "intermediate_size must be at least 1; got 0"),
        (lambda: MoE(8, 8, 0, 2), ValueError, "num_experts must be at least 1; got 0"),
        (lambda: MoE(8, 8, 4, 5), ValueError, "k must be"),
        (lambda: MoE(8, 8, 4, 2, score="tanh"), ValueError, "score must be"),  # type: ignore[arg-type]
        (lambda: MoE(8, 8, 4, 2, num_groups=3), ValueError, "num_groups must"),
        (lambda: MoE(8, 8, 4, 2, eps=float("nan")), ValueError, "eps must be"),
        (lambda: MoE(8, 8, 4, 2, drop="last"), ValueError, "nn.MoE: drop must be one of 'position', 'weight', 'choice'; got 'last'"),  # type: ignore[arg-type]
        (lambda: MoE(8, 8, 4, 2, align=0), ValueError, "align must be at least 1; got 0"),
        (lambda: MoE(8, 8, 4, 2, capacity_factor=-1.0), ValueError, "capacity_factor must be at least 0; got -1.0"),
        (lambda: MoE(8, 8, 4, 2, capacity_factor="1"), TypeError, "capacity_factor must be a float; got str"),  # type: ignore[arg-type]
        (lambda: Router(0, 4, 2), ValueError, "nn.Router: hidden_size must be at least 1"),
        (lambda: Experts(0, 4, 2), ValueError, "nn.Experts: num_experts must be at least 1"),
        (lambda: LAYER(3), TypeError, "nn.MoE: x must be a torch.Tensor; got int"),
        (lambda: LAYER(X.int()), TypeError, "x must be float16, bfloat16, float32 or float64; got torch.int32"),
        (lambda: LAYER(X[..., :2]), ValueError, r"x must be \[..., H\] with H = 6; got shape \[2, 3, 2\]"),
        (lambda: LAYER(torch.tensor(1.0)), ValueError, r"x must be \[..., H\] with H = 6; got shape \[\]"),
        (lambda: LAYER(X.to("meta")), ValueError, "x must be on cpu"),
        (lambda: LAYER(X, padding_mask=[True]), TypeError, "padding_mask must be a torch.Tensor"),
        (lambda: LAYER(X, padding_mask=torch.zeros(2, 3)), TypeError, "padding_mask must be torch.bool, True = padding; got torch.float32"),
        (lambda: LAYER(X, padding_mask=torch.zeros(6, dtype=torch.bool)), ValueError, r"padding_mask must be \[2, 3\], as x without H; got shape \[6\]"),
        (lambda: LAYER(X, expert_ids=[0]), TypeError, "expert_ids must be a torch.Tensor"),
        (lambda: LAYER(X, expert_ids=torch.zeros(6, 2, dtype=torch.int32)), ValueError, r"expert_ids must be \[2, 3, K\] with K >= 1, as x; got shape \[6, 2\]"),
        (lambda: LAYER(X, expert_ids=torch.zeros(2, 3, 2)), TypeError, "expert_ids must be"),
        (lambda: LAYER(X, expert_ids=torch.zeros(2, 3, 0, dtype=torch.int32)), ValueError, r"expert_ids must be \[2, 3, K\] with K >= 1, as x; got shape \[2, 3, 0\]"),
        (lambda: LAYER(X, expert_ids=torch.zeros(2, 3, 2, dtype=torch.int32, device="meta")), ValueError, "expert_ids must be on cpu, as x; got meta"),
        (lambda: LAYER(X, return_routing=1), TypeError, "return_routing must be a bool; got int"),
        (lambda: LAYER.router(X), ValueError, r"nn.Router: tokens must be \[T, H\] with H = 6; got shape \[2, 3, 6\]"),
        (lambda: LAYER.router(X[0], torch.zeros(2, 2, dtype=torch.int32)), ValueError, r"nn.Router: expert_ids must be \[T, K\] with T = 3"),
        (lambda: SwiGLU(6, 3)(X.double()), TypeError, "nn.SwiGLU: x must be torch.float32, as the layer's weights; got torch.float64"),
        (lambda: LAYER(X.bfloat16()), TypeError, "nn.MoE: x must be torch.float32, as the layer's weights; got torch.bfloat16"),
    ],
)  # fmt: skip
def test_bad_input(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


LAYER: MoE = make_layer()
X: Tensor = make_input(2, 3)


def test_repr() -> None:
    text = repr(make_layer(score="sigmoid", expert_bias=True))
    for part in ("Router(6, 4, k=2, score='sigmoid', expert_bias=True)", "Experts(4, 6, 5)"):
        assert part in text, text
    assert next(iter(itertools.islice(make_layer().named_children(), 1)))[0] == "router"
