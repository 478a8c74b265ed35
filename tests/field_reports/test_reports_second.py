"""Reports of the second round, N01 and later: routing, layers, saving and tools around them."""

import copy
import dataclasses
import functools
import io
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import moeroute
from moeroute.dispatch import Backend
from moeroute.nn import MoE
from moeroute.ops.gating.op import Score
from moeroute.testing import assert_same_bits
from plans_by_hand import fields_of
from small_cases import leaf, plan_of, present, whole_numbers

INF = float("inf")


def layer_of(**options: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(8, 16, 4, 2, **options)


def some_input(tokens: int = 6) -> Tensor:
    return torch.randn(tokens, 8, generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------------------- gating


@pytest.mark.parametrize("given", (False, True), ids=("chosen", "given"))
@pytest.mark.parametrize("renormalize", (False, True), ids=("plain", "renormalised"))
@pytest.mark.parametrize("value", (-17.0, -100.0, -110.0, -200.0, -1e4, -INF, 88.8, 1e4))
def test_n14_sqrtsoftplus_of_extreme_logits(backend: Backend, value: float, renormalize: bool, given: bool) -> None:
    """Small scores were lost, large ones overflowed, and a sum of zeros was divided by."""
    logits = torch.full((1, 4), value, requires_grad=True)
    ids = torch.tensor([[2, 3]]) if given else None
    found = moeroute.gating_topk(
        logits, 2, score="sqrtsoftplus", renormalize=renormalize, expert_ids=ids, backend=backend
    )
    assert found.expert_ids.tolist() == [[2, 3] if given else [0, 1]]
    if value in (-17.0, 88.8, 1e4):
        score = torch.logaddexp(torch.tensor(value).double(), torch.tensor(0.0).double()).sqrt().item()
        torch.testing.assert_close(found.weights, torch.full((1, 2), 0.5 if renormalize else score))
    elif value < -104:
        assert_same_bits(found.weights.detach(), torch.zeros(1, 2))
    (grad,) = torch.autograd.grad(found.weights.sum(), logits)
    for tensor in (found.weights, grad):
        assert bool(tensor.isfinite().all())


@pytest.mark.parametrize("score", ("softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"))
def test_n38_rows_masked_with_minus_infinity(backend: Backend, score: Score) -> None:
    """A row without a finite logit, and one with a single one."""
    logits = torch.tensor([[-INF] * 5, [-INF, -INF, 1.0, -INF, -INF]], requires_grad=True)
    found = moeroute.gating_topk(logits, 3, score=score, renormalize=False, backend=backend)
    for ids in found.expert_ids.tolist():
        assert len(set(ids)) == 3
        assert set(ids) <= set(range(5))
    nothing, one = found.weights.detach()
    if score in ("softmax", "topk_softmax"):
        assert bool(nothing.isnan().all())  # as torch.softmax
    else:
        assert_same_bits(nothing, torch.zeros(3))
    assert found.expert_ids[1, 0] == 2
    assert bool(one.isfinite().all())
    assert one[0] > 0
    assert_same_bits(one[1:], torch.zeros(2))
    (grad,) = torch.autograd.grad(found.weights[1].sum(), logits)
    assert bool(grad[1].isfinite().all())


def test_n20_a_bias_shorter_than_the_logits_is_refused(backend: Backend) -> None:
    """The missing experts were biased with what lay behind."""
    with pytest.raises(ValueError, match=r"gating_topk: bias must be \[E\] with E = 6, as logits; got shape \[4\]"):
        moeroute.gating_topk(torch.zeros(2, 6), 2, bias=torch.zeros(4), backend=backend)


def test_n26_more_tokens_than_a_kernel_was_tried_with(subtests: pytest.Subtests) -> None:
    """Beyond 1,024 or 2,048 tokens another split of the rows gave wrong experts."""
    logits = torch.randn(4099, 128, generator=torch.Generator().manual_seed(0))
    whole = moeroute.gating_topk(logits, 8, score="sigmoid")
    assert_same_bits(whole, moeroute.gating_topk(logits, 8, score="sigmoid", backend="reference"))
    assert bool(whole.weights.isfinite().all())
    for tokens in (1023, 1024, 1025, 2047, 2048, 2049, 4096):
        with subtests.test(tokens=tokens):
            part = moeroute.gating_topk(logits[:tokens], 8, score="sigmoid")
            assert_same_bits(part, tuple(tensor[:tokens] for tensor in whole))


def test_n35_a_common_drift_of_the_bias_selects_nothing_else() -> None:
    """A thousand steps with one expert too full: three of four biases rise, and so does their mean."""
    bias, counts = torch.zeros(4), torch.tensor([8, 0, 0, 0])
    for _ in range(1000):
        bias = moeroute.update_expert_bias(bias, counts, rate=0.01)
    torch.testing.assert_close(bias, torch.tensor([-10.0, 10.0, 10.0, 10.0]), rtol=1e-4, atol=0)
    torch.testing.assert_close(bias.mean(), torch.tensor(5.0), rtol=1e-4, atol=0)
    bias = torch.tensor([4.75, 5.25, 5.0, 5.5])
    logits = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    drifted, centred = (moeroute.gating_topk(logits, 2, score="sigmoid", bias=b) for b in (bias, bias - bias.mean()))
    assert_same_bits(drifted, centred)


# ---------------------------------------------------------------------------- slots


def test_n16_255_is_an_expert_or_an_empty_slot(backend: Backend) -> None:
    """-1 in uint8 is 255: an id with 256 experts, out of range with 200."""
    ids = torch.tensor([[255, 3], [0, 255]], dtype=torch.uint8)
    counts = present(moeroute.plan_from_expert_ids(ids, 256, backend=backend).tokens_per_expert)
    assert {e: n for e, n in enumerate(counts.tolist()) if n} == {0: 1, 3: 1, 255: 2}
    plan = moeroute.plan_from_expert_ids(ids, 200, backend=backend)
    assert plan.row_of_slot.tolist() == [-1, 1, 0, -1]
    with pytest.raises(ValueError, match="got 255 in slot 0"):
        moeroute.plan_from_expert_ids(ids, 200, check=True, backend=backend)


def test_n17_padding_rows_of_a_replay(backend: Backend) -> None:
    """Padding came as expert 0 twice, or as -1 throughout, and took rows or gave NaN."""
    ids = torch.tensor([[3, 1], [0, 0], [-1, -1], [2, 2]])
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    tokens = whole_numbers(4, 5, seed=0).requires_grad_()
    gating = moeroute.gating_topk(logits, 2, score="sigmoid", renormalize=True, expert_ids=ids, backend=backend)
    assert_same_bits(gating.weights[1:].detach(), torch.tensor([[0.5, 0.5], [0.0, 0.0], [0.5, 0.5]]))
    plan = moeroute.plan_from_expert_ids(gating.expert_ids, 4, backend=backend)
    assert present(plan.tokens_per_expert).tolist() == [2, 1, 2, 1]
    assert plan.num_rows == 6
    rows = moeroute.permute(tokens, plan, backend=backend)
    output = moeroute.unpermute(rows, plan, gating.weights, backend=backend)
    assert_same_bits(output[[1, 3]].detach(), tokens[[1, 3]].detach())
    assert_same_bits(output[2].detach(), torch.zeros(5))
    output.sum().backward()
    assert_same_bits(present(tokens.grad)[2], torch.zeros(5))
    assert not present(logits.grad)[2].any()


def test_n19_experts_that_compute_nothing(subtests: pytest.Subtests, backend: Backend) -> None:
    """Ids 4 and 5 are identities: they get no row, and their weights go to the token itself."""
    ids = torch.tensor([[0, 4, 5], [2, 1, 4], [5, 4, 3], [3, 0, 2]])
    start, share = whole_numbers(4, 3, seed=0), torch.tensor([[0.5, 0.25, 1.0]] * 4)
    experts = torch.tensor([2.0, 3.0, 5.0, 7.0])

    def outcome(output_of: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        tokens, weights = leaf(start.tolist()), leaf(share.tolist())
        output = output_of(tokens, weights)
        output.square().sum().backward()
        return output.detach(), present(tokens.grad), present(weights.grad)

    def by_loop(tokens: Tensor, weights: Tensor) -> Tensor:
        factors = torch.cat((experts, torch.ones(2)))[ids]
        return (weights * factors).sum(1, keepdim=True) * tokens

    def routed(tokens: Tensor, weights: Tensor, plan: moeroute.RoutingPlan) -> Tensor:
        rows = moeroute.permute(tokens, plan, backend=backend)
        rows = rows * experts.repeat_interleave(present(plan.rows_per_expert))[:, None]
        identities = (weights * (ids >= 4)).sum(1, keepdim=True) * tokens
        return moeroute.unpermute(rows, plan, weights, backend=backend) + identities

    expected = outcome(by_loop)
    for num_experts, expert_range in ((4, None), (6, (0, 4))):
        with subtests.test(num_experts=num_experts):
            plan = moeroute.plan_from_expert_ids(ids, num_experts, expert_range=expert_range, backend=backend)
            assert plan.num_rows == 7
            for actual, wanted in zip(outcome(functools.partial(routed, plan=plan)), expected, strict=True):
                torch.testing.assert_close(actual, wanted)


def test_n34_every_token_is_padding() -> None:
    """Losses were 0/0, and the bias moved."""
    layer = layer_of(score="sigmoid", expert_bias=True)
    x = some_input().requires_grad_()
    bias = present(layer.router.expert_bias).clone()
    output, routing = layer(x, padding_mask=torch.ones(6, dtype=torch.bool), return_routing=True)
    assert_same_bits(output.detach() + 0.0, torch.zeros(6, 8))
    statistics = routing.statistics()
    assert routing.z_loss().item() == 0
    assert bool(statistics.loss().isfinite())
    (output.square().sum() + statistics.loss() + routing.z_loss()).backward()
    assert bool(present(x.grad).isfinite().all())
    for name, weight in layer.named_parameters():
        assert weight.grad is None or bool(weight.grad.isfinite().all()), name
    updated = moeroute.update_expert_bias(bias, present(routing.plan.tokens_per_expert), rate=0.1)
    assert_same_bits(updated, bias)


# ---------------------------------------------------------------------------- saving


def reloaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    (copy.copy, copy.deepcopy, dataclasses.replace, lambda plan: pickle.loads(pickle.dumps(plan)), reloaded),
    ids=("copy", "deepcopy", "replace", "pickle", "torch.save"),
)
def test_n22_a_plan_survives_copying(backend: Backend, copied: Callable[[Any], Any]) -> None:
    plan = plan_of([[2, 0], [-1, 1], [2, 2]], 3, align=4, backend=backend)
    twin = copied(plan)
    assert fields_of(twin) == fields_of(plan)
    rows = moeroute.permute(torch.eye(3), twin, backend=backend)
    assert_same_bits(rows, moeroute.permute(torch.eye(3), plan, backend=backend))


def test_n25_a_saved_view_brings_its_tensor_and_no_more() -> None:
    """Of recycled memory the tensor's own bytes are saved, not the block's, which is larger."""
    plan = plan_of([[0]] * 1030, 1)
    rows = moeroute.permute(torch.ones(1030, 1024), plan)

    def size(tensor: Tensor) -> int:
        file = io.BytesIO()
        torch.save(tensor, file)
        return len(file.getvalue())

    assert rows.nbytes <= size(rows[:2]) < rows.nbytes + 10_000
    assert size(rows[:2].clone()) < 20_000


def test_n28_an_exported_program_for_other_numbers_of_tokens(subtests: pytest.Subtests) -> None:
    class Route(torch.nn.Module):
        def forward(self, x: Tensor, logits: Tensor) -> Tensor:
            gating = moeroute.gating_topk(logits, 2)
            plan = moeroute.plan_from_expert_ids(gating.expert_ids, 4)
            return moeroute.unpermute(moeroute.permute(x, plan) * 1.5, plan, gating.weights)

    def draw(tokens: int) -> tuple[Tensor, Tensor]:
        return some_input(tokens), torch.randn(tokens, 4, generator=torch.Generator().manual_seed(2))

    tokens = torch.export.Dim("tokens", min=2, max=1000)
    program = torch.export.export(Route(), draw(10), dynamic_shapes=({0: tokens}, {0: tokens}))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for number in (10, 23):
        with subtests.test(tokens=number):
            assert_same_bits(loaded(*draw(number)), Route()(*draw(number)))


# ---------------------------------------------------------------------------- training


def gradients(layer: MoE, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = some_input().requires_grad_()
    layer.zero_grad()
    run(x).square().sum().backward()
    return [present(x.grad), *(present(weight.grad).clone() for weight in layer.parameters())]


@pytest.mark.parametrize("kept", ("nothing", "gating_topk", "plan_expert_ids", "spread", "combine"))
def test_n31_selective_checkpoints(kept: str) -> None:
    """Whatever a checkpoint keeps and whatever it computes again, the gradients are the same bits."""
    layer = layer_of()

    def policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        keep = str(operator).startswith(f"moeroute.{kept}.")
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return torch.as_tensor(checkpoint(layer, x, use_reentrant=False, context_fn=contexts))

    assert_same_bits(gradients(layer, checkpointed), gradients(layer, layer))


@pytest.mark.parametrize(
    "around",
    (
        save_on_cpu,
        torch.autograd.detect_anomaly,
        functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=False),
        functools.partial(torch.autograd.graph.saved_tensors_hooks, lambda t: t.clone(), lambda t: t),
    ),
    ids=("save_on_cpu", "anomaly", "autocast off", "hooks"),
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_n31_around_the_layer(around: Callable[[], AbstractContextManager[Any]]) -> None:
    layer = layer_of()

    def inside(x: Tensor) -> Tensor:
        with around():
            return torch.as_tensor(layer(x))

    assert_same_bits(gradients(layer, inside), gradients(layer, layer))


def test_n32_the_output_may_be_changed_in_place() -> None:
    layer = layer_of()

    def changed(x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        y += 1
        y[:, 0] *= 2
        return y

    def anew(x: Tensor) -> Tensor:
        y: Tensor = layer(x) + 1
        return y * torch.tensor([2.0] + [1.0] * 7)

    assert_same_bits(gradients(layer, changed), gradients(layer, anew))


@pytest.mark.parametrize("what", ("rows", "plan"))
def test_n32_what_backward_needs_may_not(backend: Backend, what: str) -> None:
    plan = plan_of([[0, 1], [1, 0]], 2, backend=backend)
    rows, weights = leaf([[1.0], [2.0], [3.0], [4.0]]), leaf([[0.5, 0.5], [0.5, 0.5]])
    output = moeroute.unpermute(rows, plan, weights, backend=backend)
    with torch.no_grad():
        (rows if what == "rows" else plan.row_of_slot).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
