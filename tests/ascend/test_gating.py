"""torch_npu's gating against float64 torch written out here, and its gradient against autograd of that."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moeroute.interop.torch_npu import gating as npu

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 2e-6}


def norm_of(x: Tensor, norm_type: int) -> Tensor:
    if norm_type == 0:
        return x.softmax(-1)
    return x.sigmoid() if norm_type == 1 else F.softplus(x).sqrt()


def weights_of(norm: Tensor, ids: Tensor, renorm: bool, factor: float, eps: float) -> Tensor:
    chosen = norm.gather(1, ids)
    if renorm:
        chosen = chosen / (chosen.sum(1, keepdim=True) + eps)
    return chosen * factor


def chosen_by_hand(norm: Tensor, bias: Tensor | None, k: int, groups: int, kept: int, mode: int) -> Tensor:
    """By Python's sort, which is stable: the larger first, of equals the smaller id."""
    values = norm if bias is None else norm + bias
    found = []
    for row in values.tolist():
        size = len(row) // groups
        members = [range(g * size, (g + 1) * size) for g in range(groups)]
        worth = [sum(sorted((row[e] for e in group), reverse=True)[: mode + 1]) for group in members]
        best = sorted(range(groups), key=lambda g: -worth[g])[:kept]
        inside = [e for e in range(len(row)) if e // size in best]
        found.append(sorted(inside, key=lambda e: -row[e])[:k])
    return torch.tensor(found)


@given(
    st.integers(0, 2**31),
    st.sampled_from(FLOATS),
    st.sampled_from((0, 1, 2)),
    st.sampled_from((0, 1)),
    st.sampled_from(((1, 1, 0), (4, 2, 0), (4, 2, 1), (2, 1, 1))),
    st.booleans(),
    st.booleans(),
    st.sampled_from((1.0, 2.5)),
)
def test_gating_top_k(
    seed: int,
    dtype: torch.dtype,
    norm_type: int,
    renorm: int,
    groups: tuple[int, int, int],
    with_bias: bool,
    out_flag: bool,
    factor: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Values far enough from each other that float32 and float64 choose alike.
    x = torch.stack([torch.randperm(16, generator=generator) for _ in range(7)]).sub(8).div(4).to(dtype)
    x.requires_grad_()
    bias = (torch.rand(16, generator=generator) - 0.5).to(dtype) if with_bias else None
    count, kept, mode = groups
    y, ids, out = npu.npu_moe_gating_top_k(
        x,
        3,
        bias=bias,
        k_group=kept,
        group_count=count,
        group_select_mode=mode,
        renorm=renorm,
        norm_type=norm_type,
        out_flag=out_flag,
        routed_scaling_factor=factor,
        eps=1e-9,
    )
    wide = x.detach().double().requires_grad_()
    norm = norm_of(wide, norm_type)
    wanted = chosen_by_hand(norm.detach(), None if bias is None else bias.double(), 3, count, kept, mode)
    assert ids.dtype is torch.int32
    assert y.dtype is dtype
    assert torch.equal(ids.long(), wanted)
    expected = weights_of(norm, ids.long(), bool(renorm or norm_type), factor, 1e-9)
    bound = TOLERANCE[dtype] * factor
    torch.testing.assert_close(y.detach().double(), expected.detach(), rtol=bound, atol=bound)
    assert out.dtype is torch.float32
    assert not out.requires_grad
    if out_flag:
        torch.testing.assert_close(out.double(), norm.detach(), rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(out, torch.zeros(7, 16))
    grad = torch.randn(y.shape, generator=generator).to(dtype)
    (wanted_grad,) = torch.autograd.grad(expected, wide, grad.double())
    (found,) = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(found.double(), wanted_grad, rtol=4 * bound, atol=4 * bound)
    by_function = npu.npu_moe_gating_top_k_backward(
        norm.detach().float(),
        grad,
        ids,
        renorm=renorm,
        norm_type=norm_type,
        routed_scaling_factor=factor,
        eps=1e-9,
    )
    assert by_function.dtype is dtype
    torch.testing.assert_close(by_function.double(), wanted_grad, rtol=4 * bound, atol=4 * bound)


def test_a_bias_chooses_and_never_weighs() -> None:
    y, ids, out = npu.npu_moe_gating_top_k(
        torch.tensor([[0.0, 1.0, 2.0, 3.0]]), 2, bias=torch.tensor([9.0, 0, 0, 0]), norm_type=0, out_flag=True
    )
    assert ids.tolist() == [[0, 3]]
    assert torch.equal(y, out[:, [0, 3]])


def test_ties_go_to_the_smaller_expert() -> None:
    _, ids, _ = npu.npu_moe_gating_top_k(torch.zeros(2, 6), 3, norm_type=1)
    assert ids.tolist() == [[0, 1, 2]] * 2
    _, ids, _ = npu.npu_moe_gating_top_k(torch.zeros(1, 6), 2, norm_type=1, group_count=3, k_group=1)
    assert ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("norm_type", [0, 1, 2])
def test_hash_routing(index: torch.dtype, norm_type: int) -> None:
    table = torch.tensor([[3, 1], [0, 2], [2, 3]], dtype=index)
    x = torch.randn(4, 5, requires_grad=True)
    input_ids = torch.tensor([2, 0, 0, 1], dtype=index)
    y, ids, _ = npu.npu_moe_gating_top_k(x, 2, input_ids=input_ids, tid2eid=table, norm_type=norm_type)
    assert torch.equal(ids.long(), table.long()[input_ids.long()])
    wide = x.detach().double().requires_grad_()
    expected = weights_of(norm_of(wide, norm_type), ids.long(), bool(norm_type), 1.0, 1e-20)
    torch.testing.assert_close(y.detach().double(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), x)[0].double(), torch.autograd.grad(expected.sum(), wide)[0], rtol=1e-5, atol=1e-6
    )


# ---------------------------------------------------------------------------- softmax gating


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (0, 8)], ids=["rows", "batch", "none"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to(dtype)
    finished = torch.rand(shape[:-1]) < 0.4
    y, ids, numbers = npu.npu_moe_gating_top_k_softmax(x, finished, 3)
    rounded = x.float().softmax(-1).to(dtype)
    torch.testing.assert_close(y.float(), rounded.float().topk(3).values, rtol=TOLERANCE[dtype], atol=1e-6)
    assert torch.equal(ids[finished], torch.full_like(ids[finished], 8))
    going = ~finished
    torch.testing.assert_close(rounded[going].gather(1, ids[going].long()), y[going], rtol=TOLERANCE[dtype], atol=1e-6)
    count = y[..., 0].numel()
    assert torch.equal(numbers.reshape(count, 3), torch.arange(3 * count, dtype=torch.int32).view(3, count).t())
    assert (y.dtype, ids.dtype, numbers.dtype) == (dtype, torch.int32, torch.int32)


def test_the_softmax_is_rounded_before_it_is_compared() -> None:
    """In float16 both probabilities are 0.5: the first expert wins, although the second's logit is larger."""
    x = torch.tensor([[0.0, 2.0**-13]]).half()
    assert x[0, 1] > x[0, 0]
    assert npu.npu_moe_gating_top_k_softmax(x, None, 1)[1].tolist() == [[0]]
    assert npu.npu_moe_gating_top_k_softmax(x.float(), None, 1)[1].tolist() == [[1]]
    assert npu.npu_moe_gating_top_k_softmax_v2(x, k=1)[1].tolist() == [[1]]


@pytest.mark.parametrize("output_softmax", [False, True])
@pytest.mark.parametrize("renorm", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax_v2(dtype: torch.dtype, renorm: int, output_softmax: bool) -> None:
    x = torch.randn(2, 3, 8).to(dtype)
    x.requires_grad_()
    finished = torch.tensor([[False, True, False], [False, False, True]])
    y, ids, softmax = npu.npu_moe_gating_top_k_softmax_v2(
        x, k=3, finished=finished, renorm=renorm, output_softmax=output_softmax
    )
    wide = x.detach().double()
    if renorm:
        expected = wide.topk(3).values.softmax(-1)
    else:
        expected = wide.softmax(-1).topk(3).values
    torch.testing.assert_close(
        y.double(), expected, rtol=TOLERANCE[dtype], atol=1e-3 if dtype != torch.float32 else 1e-6
    )
    assert (ids[finished] == 8).all()
    assert (ids[~finished] < 8).all()
    assert not y.requires_grad
    if output_softmax and not renorm:
        torch.testing.assert_close(softmax.double(), wide.softmax(-1), rtol=1e-6, atol=1e-7)
    else:
        assert softmax.shape == (0,)
    assert softmax.dtype is torch.float32


# ---------------------------------------------------------------------------- bad input

X = torch.zeros(3, 4)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "three axes": (dict(x=X[None]), r"x must be of shape \[\*, \*\]; got shape \[1, 3, 4\]"),
    "k of too many": (dict(k=5), "k must be"),
    "a bias of another dtype": (
        dict(bias=torch.zeros(4).half()),
        "bias must be torch.float32, as x; got torch.float16",
    ),
    "a bias of another size": (dict(bias=torch.zeros(3)), r"bias must be of shape \[4\]"),
    "ids alone": (dict(input_ids=torch.zeros(3).int()), "must be both provided or both omitted: tid2eid must be given"),
    "a table alone": (dict(tid2eid=torch.zeros(3, 2).int()), "must be both provided or both omitted: input_ids"),
    "an unknown norm": (dict(norm_type=3), r"norm_type must be in 0..2; got 3"),
    "an unknown renorm": (dict(renorm=2), r"renorm must be in 0..1; got 2"),
    "an unknown group mode": (dict(group_select_mode=2), r"group_select_mode must be in 0..1; got 2"),
    "groups of unequal size": (dict(group_count=3), "num_groups must"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    changes, message = BAD[case]
    arguments: dict[str, Any] = {"x": X, "k": 2, **changes}
    with pytest.raises(RuntimeError, match=f"^npu_moe_gating_top_k: .*{message}"):
        npu.npu_moe_gating_top_k(**arguments)


def test_bad_softmax() -> None:
    with pytest.raises(RuntimeError, match="renorm must be 0 or 1"):
        npu.npu_moe_gating_top_k_softmax_v2(X, k=2, renorm=2)
    with pytest.raises(RuntimeError, match=r"x must be .* of two or three dimensions"):
        npu.npu_moe_gating_top_k_softmax(X[0])
    with pytest.raises(RuntimeError, match=r"finished must be torch\.bool; got torch.int32"):
        npu.npu_moe_gating_top_k_softmax(X, torch.zeros(3).int())
