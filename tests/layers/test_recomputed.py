"""Products that make their operand again in the backward pass: the bits of the two steps they stand for."""

import itertools

import pytest
import torch
from torch import Tensor

import moeroute
from moeroute.nn import MoE, activate, grouped_linear
from moeroute.ops.activations.op import ACTIVATIONS, Activation
from moeroute.ops.recomputed import activated_linear, spread_linear
from moeroute.testing import assert_same_bits

SIZES = torch.tensor([2, 0, 3])
IDS = torch.tensor([[0, 2], [2, -1], [0, 2], [-1, -1]])
PLAN = moeroute.plan_from_expert_ids(IDS, 3, align=2)


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_activated_linear(activation: Activation, transposed: bool, dtype: torch.dtype) -> None:
    width = 8 if activation == "relu2" else 16
    x, bias = leaf(6, width, dtype=dtype), leaf(3, 5, dtype=dtype)
    stored = leaf(3, 8, 5, dtype=dtype) if transposed else leaf(3, 5, 8, dtype=dtype)
    weight = stored.transpose(1, 2) if transposed else stored
    grad = leaf(6, 5, dtype=dtype, seed=3).detach()
    interleaved = activation == "geglu"
    for needed in ([x, stored, bias], [stored], [x], [bias]):
        steps = grouped_linear(activate(x, activation, interleaved=interleaved), weight, SIZES, bias)
        fused = activated_linear(x, weight, SIZES, bias, activation=activation, interleaved=interleaved)
        assert_same_bits(fused, steps, "output")
        wanted, found = (torch.autograd.grad(y, needed, grad) for y in (steps, fused))
        assert_same_bits(found, wanted, "gradients")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
def test_spread_linear(weighted: bool, dtype: torch.dtype) -> None:
    x, weight, bias = leaf(4, 6, dtype=dtype), leaf(3, 5, 6, dtype=dtype), leaf(3, 5, dtype=dtype)
    slots = leaf(PLAN.num_slots, dtype=dtype, seed=2) if weighted else None
    sizes = PLAN.rows_per_expert
    assert sizes is not None
    grad = leaf(PLAN.num_rows, 5, dtype=dtype, seed=3).detach()
    sets = [[x, weight, bias], [weight], [x]]
    for needed in [*sets, [slots], [x, slots, weight]] if slots is not None else sets:
        steps = grouped_linear(moeroute.spread(x, PLAN, slots), weight, sizes, bias)
        fused = spread_linear(x, slots, PLAN, weight, sizes, bias)
        assert_same_bits(fused, steps, "output")
        wanted, found = (torch.autograd.grad(y, needed, grad) for y in (steps, fused))
        assert_same_bits(found, wanted, "gradients")


def test_every_order_of_derivative() -> None:
    sizes = PLAN.rows_per_expert
    assert sizes is not None
    x, slots = leaf(4, 3, dtype=torch.float64), leaf(PLAN.num_slots, dtype=torch.float64)
    weight, bias = leaf(3, 4, 3, dtype=torch.float64), leaf(3, 4, dtype=torch.float64)

    def spreading(x: Tensor, slots: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return spread_linear(x, slots, PLAN, weight, sizes, bias)

    torch.autograd.gradcheck(spreading, (x, slots, weight, bias), check_forward_ad=True)
    torch.autograd.gradgradcheck(spreading, (x, slots, weight, bias))
    rows, weight = leaf(6, 4, dtype=torch.float64), leaf(3, 3, 2, dtype=torch.float64)
    bias = leaf(3, 3, dtype=torch.float64)

    def activating(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return activated_linear(x, weight, SIZES, bias, activation="geglu")

    torch.autograd.gradcheck(activating, (rows, weight, bias), check_forward_ad=True)
    torch.autograd.gradgradcheck(activating, (rows, weight, bias))


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_what_is_kept(autocast: bool) -> None:
    """The operands that can be made again are not among the tensors that autograd keeps."""
    kept: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    sizes = PLAN.rows_per_expert
    assert sizes is not None
    x, rows = leaf(4, 6), leaf(6, 16)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        spread_linear(x, None, PLAN, leaf(3, 5, 6), sizes)
        activated_linear(rows, leaf(3, 5, 8), SIZES)
    assert (4, 6) in kept
    assert (6, 16) in kept
    assert (PLAN.num_rows, 6) not in kept
    assert (6, 8) not in kept


def test_opcheck() -> None:
    sizes = PLAN.rows_per_expert
    ops = torch.ops.moeroute
    for activation, interleaved in itertools.product(("swiglu", "relu2"), (False, True)):
        arguments = (
            leaf(6, 8),
            leaf(3, 5, 8 if activation == "relu2" else 4),
            SIZES,
            None,
            activation,
            interleaved,
            None,
        )
        torch.library.opcheck(ops.activated_linear, arguments)
    for slots in (None, leaf(PLAN.num_slots)):
        arguments = (leaf(4, 6), slots, *PLAN.tensors, leaf(3, 5, 6), sizes, leaf(3, 5), None)  # type: ignore[assignment]
        torch.library.opcheck(ops.spread_linear, arguments)


def test_what_a_layer_keeps() -> None:
    """The elements that autograd keeps of [R, ...], as docs/layer.md has them: each mode drops what it is to drop."""
    hidden, intermediate, tokens = 24, 40, 50
    rows = tokens * 2
    wanted = {
        None: 2 * hidden + 3 * intermediate,
        "activation": 2 * hidden + 2 * intermediate,
        "permute": hidden + 3 * intermediate,
        "both": hidden + 2 * intermediate,
    }
    for recompute, width in wanted.items():
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            if tensor.ndim == 2 and tensor.shape[0] == rows:
                kept[tensor.data_ptr()] = tensor.numel()
            return tensor

        layer = MoE(hidden, intermediate, 4, 2, recompute=recompute)  # type: ignore[arg-type]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = layer(leaf(tokens, hidden))
        assert sum(kept.values()) == rows * width, recompute
        output.sum().backward()
