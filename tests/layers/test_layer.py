"""The layer against a loop over single tokens in float64, every gradient by name."""

from functools import partial

import pytest
import torch
from torch import Tensor

from moeroute.nn import MoE, Routing, SwiGLU
from moeroute.ops.balance import load_balancing_loss, router_z_loss
from moeroute.ops.gating.op import Score
from moeroute.ops.planning.common import DropOfIds
from small_layers import EXPERTS, HIDDEN, INTERMEDIATE, K, assert_near, make_input, make_layer, naive_layer

SCORES = [
    ("softmax", False),
    ("softmax", True),
    ("topk_softmax", False),
    ("sigmoid", False),
    ("sigmoid", True),
    ("sqrtsoftplus", True),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("score", "renormalize"), SCORES)
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_against_a_loop_over_tokens(score: Score, renormalize: bool, shared: bool, dtype: torch.dtype) -> None:
    layer = make_layer(
        dtype,
        score=score,
        renormalize=renormalize,
        scaling_factor=1.5,
        shared_expert=SwiGLU(HIDDEN, 3) if shared else None,
    )
    x = make_input(3, 4, dtype=dtype).requires_grad_()
    output, routing = layer(x, return_routing=True)
    assert output.shape == x.shape
    assert output.dtype == dtype
    assert routing.logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)

    wide = {name: weight.detach().double().requires_grad_() for name, weight in layer.named_parameters()}
    wide_x = x.detach().double().requires_grad_()
    tokens = wide_x.reshape(-1, HIDDEN)
    ids = routing.gating.expert_ids
    logits = tokens @ wide["router.weight"].T
    torch.testing.assert_close(ids.long().sort().values, logits.topk(K).indices.sort().values)  # scores are monotone
    expected = naive_layer(wide, tokens, ids, score, renormalize, 1.5).reshape(x.shape)
    assert_near(output, expected, dtype, "output")

    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype)
    names = ["x", *wide]
    got = torch.autograd.grad(output, [x, *layer.parameters()], grad)
    exact = torch.autograd.grad(expected, [wide_x, *wide.values()], grad.double())
    for name, actual, wanted in zip(names, got, exact, strict=True):
        assert_near(actual, wanted, dtype, f"gradient of {name}")


def test_losses_of_the_routing() -> None:
    for score in ("softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"):
        layer = make_layer(torch.float64, score=score)
        x = make_input(9, dtype=torch.float64)
        mask = torch.arange(9) >= 7
        _, routing = layer(x, padding_mask=mask, return_routing=True)
        logits = x @ layer.router.weight.T
        if score == "sigmoid":
            probabilities = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        elif score == "sqrtsoftplus":
            root = logits.exp().log1p().sqrt()
            probabilities = root / root.sum(-1, keepdim=True)
        else:
            probabilities = logits.softmax(-1)
        ids = logits.topk(K).indices
        torch.testing.assert_close(
            routing.statistics().loss(),
            load_balancing_loss(probabilities[:7], ids[:7]),
            msg=partial("{}: {}".format, score),
        )
        torch.testing.assert_close(routing.z_loss(), router_z_loss(logits[:7]))
        got = torch.autograd.grad(routing.statistics().loss() + routing.z_loss(), layer.router.weight)
        wanted = torch.autograd.grad(
            load_balancing_loss(probabilities[:7], ids[:7]) + router_z_loss(logits[:7]), layer.router.weight
        )
        torch.testing.assert_close(got, wanted, msg=partial("{}: {}".format, score))


def test_kinds_of_the_balance_loss() -> None:
    layer, x = make_layer(), make_input(12)
    mask = torch.arange(12) % 5 == 3
    _, routing = layer(x, padding_mask=mask, return_routing=True)
    of_each = [
        load_balancing_loss(routing.probabilities[part], routing.gating.expert_ids[part], padding_mask=mask[part])
        for part in (slice(0, 4), slice(4, 8), slice(8, 12))
    ]
    torch.testing.assert_close(routing.balance_loss("sequence", num_sequences=3), torch.stack(of_each).mean())
    torch.testing.assert_close(routing.balance_loss(), routing.statistics().loss())
    torch.testing.assert_close(routing.balance_loss("global_batch"), routing.balance_loss("micro_batch"))
    for options, wanted in (
        ({"num_sequences": 5}, "a divisor of T = 12"),
        ({}, "an int"),
        ({"num_sequences": 0}, "at least 1"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"nn.Routing.balance_loss: num_sequences must be {wanted}"):
            routing.balance_loss("sequence", **options)
    with pytest.raises(ValueError, match="kind must be one of 'micro_batch', 'sequence', 'global_batch'; got 'batch'"):
        routing.balance_loss("batch")


def test_second_derivatives_of_the_layer() -> None:
    layer = make_layer(torch.float64)
    x = make_input(5, dtype=torch.float64).requires_grad_()
    torch.autograd.gradcheck(layer, (x,))
    torch.autograd.gradgradcheck(layer, (x,))


def test_forward_mode_of_the_layer() -> None:
    layer = make_layer(torch.float64)
    x, direction = make_input(5, dtype=torch.float64), make_input(5, dtype=torch.float64, seed=9)
    tangent = torch.func.jvp(layer, (x,), (direction,))[1]
    jacobian = torch.autograd.functional.jacobian(layer, x)
    torch.testing.assert_close(tangent, torch.einsum("thuk,uk->th", jacobian, direction))


def test_input_is_unchanged() -> None:
    # B118: noise or scaling written into the hidden states.
    layer = make_layer().train()
    x = make_input(7)
    before = x.clone()
    layer(x)
    torch.testing.assert_close(x, before, rtol=0, atol=0)


def test_identical_experts_equal_a_dense_mlp() -> None:
    # B38: eight equal experts, weights 1/8 each. The sum of eight exact eighths rounds once: the same bits.
    torch.manual_seed(0)
    layer = MoE(64, 32, num_experts=8, k=8).bfloat16()
    dense = SwiGLU(64, 32).bfloat16()
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.experts.gate_up_proj.copy_(dense.gate_up_proj.weight.expand(8, -1, -1))
        layer.experts.down_proj.copy_(dense.down_proj.weight.expand(8, -1, -1))
        x = torch.randn(16, 64, dtype=torch.bfloat16)
        torch.testing.assert_close(layer(x), dense(x), rtol=0, atol=0)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    # B166, for the part that is routing: experts that are no matrix product, 64-aligned segments.
    layer = make_layer(align=64, k=3)
    layer.experts.forward = lambda rows, rows_per_expert: rows * 3  # type: ignore[method-assign]
    shared = make_input(1)
    first = layer(torch.cat((shared, make_input(3, seed=2))))
    second = layer(torch.cat((make_input(70, seed=3), shared)))
    alone, routing = layer(shared, return_routing=True)
    torch.testing.assert_close(first[0], alone[0], rtol=0, atol=0)
    torch.testing.assert_close(second[-1], alone[0], rtol=0, atol=0)
    assert all(rows in (0, 64) for rows in routing.plan.rows_per_expert.tolist())


def test_aligned_segments_train_alike() -> None:
    x = make_input(9, dtype=torch.float64)
    results = []
    for align in (1, 4):
        layer = make_layer(torch.float64, align=align)
        output = layer(x)
        output.square().sum().backward()
        results.append([output, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 3), (2, 3, 4)], ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    layer = make_layer()
    x = make_input(*shape).requires_grad_()
    output = layer(x)
    assert output.shape == x.shape
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_padding_takes_no_rows_and_no_capacity() -> None:
    # B100: four tokens to one expert with capacity 1; tokens 0 and 2 are padding. B82: the loss counts before drops.
    layer = MoE(HIDDEN, INTERMEDIATE, num_experts=2, k=1, capacity_factor=0.5)
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, HIDDEN))
    x = torch.ones(4, HIDDEN)
    mask = torch.tensor([True, False, True, False])
    output, routing = layer(x, padding_mask=mask, return_routing=True)
    torch.testing.assert_close(routing.plan.tokens_per_expert, torch.tensor([1, 0]))
    torch.testing.assert_close(routing.plan.row_of_slot, torch.tensor([-1, 0, -1, -1], dtype=torch.int32))
    assert routing.plan.num_rows == 1
    torch.testing.assert_close(routing.statistics().tokens_per_expert, torch.tensor([2, 0]))
    assert [bool(row.any()) for row in output] == [False, True, False, False]


def test_padding_mask_of_a_batch() -> None:
    layer = make_layer(shared_expert=SwiGLU(HIDDEN, 3))
    x = make_input(2, 3)
    mask = torch.tensor([[False, False, True], [False, True, True]])
    output = layer(x, padding_mask=mask)
    torch.testing.assert_close(output[~mask], layer(x[~mask]))
    torch.testing.assert_close(output[mask], torch.zeros(3, HIDDEN))  # the shared expert's share is cut too


def test_capacity_factor_is_exact() -> None:
    # B98: 100 * 1.1 / 10 is 11 rows, not 12.
    layer = MoE(HIDDEN, INTERMEDIATE, num_experts=10, k=1, capacity_factor=1.1)
    with torch.no_grad():
        layer.router.weight.zero_()  # a tie: all to expert 0
    for drop in ("position", "weight", "choice"):
        layer.drop = drop
        _, routing = layer(make_input(100), return_routing=True)
        torch.testing.assert_close(routing.plan.tokens_per_expert[:2], torch.tensor([11, 0]))


@pytest.mark.parametrize(
    ("drop", "kept"),
    [
        ("position", [[True, True], [False, False], [False, True]]),
        ("weight", [[False, False], [True, False], [True, True]]),
        ("choice", [[True, False], [True, False], [False, True]]),
    ],
)
def test_which_slots_are_dropped(drop: DropOfIds, kept: list[list[bool]]) -> None:
    """One place an expert, of three tokens: expert 0 is wanted three times, expert 1 twice."""
    layer = MoE(HIDDEN, INTERMEDIATE, num_experts=3, k=2, capacity_factor=0.5, drop=drop, renormalize=True)
    logits = torch.tensor([[1.0, 0.5, -9.0], [0.5, 1.5, -9.0], [3.0, -9.0, 1.0]])
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, :3] = logits.t()
    x = torch.zeros(3, HIDDEN)
    x[:, :3] = torch.eye(3)
    output, routing = layer(x, return_routing=True)
    assert routing.gating.expert_ids.tolist() == [[0, 1], [1, 0], [0, 2]]
    assert (routing.plan.row_of_slot.view(3, 2) >= 0).tolist() == kept
    ids = routing.gating.expert_ids.masked_fill(~torch.tensor(kept), -1)
    weights = torch.where(torch.tensor(kept), routing.gating.weights, 0.0)
    layer.capacity_factor = None
    replayed = torch.stack(
        [
            sum((w * _expert(layer, int(e), row) for w, e in zip(ws, es, strict=True) if e >= 0), torch.zeros(HIDDEN))
            for row, ws, es in zip(x, weights, ids, strict=True)
        ]
    )
    assert_near(output, replayed.double(), torch.float32, "output")


def _expert(layer: MoE, expert: int, row: Tensor) -> Tensor:
    gate, up = (layer.experts.gate_up_proj[expert] @ row).chunk(2)
    return layer.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)


def test_replay() -> None:
    layer = make_layer(torch.float64, renormalize=True)
    x = make_input(2, 3, dtype=torch.float64)
    expert_ids = torch.tensor([[[0, 1, 3], [2, -1, 0], [1, 2, 4]], [[3, 2, 1], [0, 3, -1], [1, 0, 2]]])
    output, routing = layer(x, expert_ids=expert_ids, return_routing=True)
    ids = torch.where(expert_ids < EXPERTS, expert_ids, -1).reshape(-1, 3)
    torch.testing.assert_close(routing.gating.expert_ids, ids.int())
    wide = {name: weight.detach().double().requires_grad_() for name, weight in layer.named_parameters()}
    expected = naive_layer(wide, x.reshape(-1, HIDDEN), ids, "softmax", True).reshape(x.shape)
    torch.testing.assert_close(output, expected)
    got = torch.autograd.grad(output.sum(), [*layer.parameters()])
    exact = torch.autograd.grad(expected.sum(), [*wide.values()])
    for name, actual, wanted in zip(wide, got, exact, strict=True):
        torch.testing.assert_close(actual, wanted, msg=partial("{}: {}".format, name))


@pytest.mark.parametrize("score", ("softmax", "sigmoid", "topk_softmax"))
@pytest.mark.parametrize("value", (float("nan"), float("inf"), 3.0))
def test_padding_reaches_no_gradient(score: Score, value: float) -> None:
    """Whatever a padding token holds, and whatever comes back at its place: every gradient is as without it."""
    layer = make_layer(score=score, shared_expert=SwiGLU(HIDDEN, 3), expert_bias=True)
    x, mask = make_input(5), torch.tensor([False, True, False, False, True])
    live = x[~mask].clone().requires_grad_()
    x[mask] = value
    x.requires_grad_()
    upstream = make_input(5, seed=2)

    def loss_of(output: Tensor, routing: Routing, upstream: Tensor) -> Tensor:
        return (output * upstream).sum() + routing.statistics().loss() + routing.z_loss()

    output, routing = layer(live, return_routing=True)
    loss_of(output, routing, upstream[~mask]).backward()
    expected = {name: weight.grad for name, weight in layer.named_parameters()}
    layer.zero_grad()
    output, routing = layer(x, padding_mask=mask, return_routing=True)
    assert output[mask].tolist() == torch.zeros(2, HIDDEN).tolist()
    loss_of(output, routing, upstream).backward()
    for name, weight in layer.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], msg=partial("{}: {}".format, name))
    assert x.grad is not None
    assert live.grad is not None
    torch.testing.assert_close(x.grad[~mask], live.grad)
    assert not bool(x.grad[mask].any())


def test_a_large_capacity_factor_is_no_limit() -> None:
    x = make_input(7)
    for factor in (float(EXPERTS), 1e30, 10**30):
        output, routing = make_layer(capacity_factor=factor)(x, return_routing=True)
        torch.testing.assert_close(output, make_layer()(x))
        assert routing.plan.num_rows == 7 * K


def test_shapes_on_meta() -> None:
    layer = MoE(HIDDEN, INTERMEDIATE, EXPERTS, K, capacity_factor=1.0, align=4, device="meta")
    x = torch.empty(2, 3, HIDDEN, device="meta")
    output, routing = layer(x, padding_mask=torch.empty(2, 3, dtype=torch.bool, device="meta"), return_routing=True)
    assert output.shape == x.shape
    assert output.is_meta
    assert routing.gating.weights.shape == (6, K)
    output.sum().backward()
