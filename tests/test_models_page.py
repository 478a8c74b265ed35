"""docs/models.md: every block against the gate's formula in plain torch; the modules themselves are in tests/hosts."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models_page
from models_page import dense

T, E, K, H, B = 24, 8, 3, 5, 4
BLOCKS = models_page.blocks()
OF_MODELS = [block for block in BLOCKS if block.gates]


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def names(**more: Any) -> dict[str, Any]:
    weight = drawn(2 * E, H, H, seed=3)

    def experts(rows: Tensor, rows_per_expert: Tensor) -> Tensor:
        parts = rows.split(rows_per_expert.tolist())
        return torch.cat([part @ weight[e] for e, part in enumerate(parts)])

    common = {
        "logits": drawn(T, E, seed=1, scale=2.0),
        "bias": drawn(E, seed=2, scale=0.5),
        "x": drawn(T, H, seed=4),
        "experts": experts,
        "weight": weight,
        "T": T,
        "E": E,
        "k": K,
        "B": B,
        "norm_topk_prob": True,
        "n_group": 4,
        "topk_group": 2,
        "scaling_factor": 1.5,
        "p": 2.0,
        "per_expert_scale": drawn(E, seed=5).abs(),
        "softcap": 2.0,
        "output_multiplier": 0.7,
        "jitter": 0.2,
        "training": False,
        "input_ids": torch.randint(11, (2, T // 2), generator=torch.Generator().manual_seed(6)),
        "table": torch.rand(11, E, generator=torch.Generator().manual_seed(7)).argsort(dim=1)[:, :K],
        "batch_prioritized_routing": False,
        "normalize_router_prob_before_dropping": False,
    }
    return common | more


# ---------------------------------------------------------------------------- formulas, [T, E]


def among(values: Tensor, k: int) -> Tensor:
    """Whether an expert is among the k largest of its row, of equal ones the first."""
    order = values.sort(dim=1, descending=True, stable=True).indices
    return torch.zeros_like(values, dtype=torch.bool).scatter(1, order[:, :k], True)


def shares(values: Tensor, eps: float = 0.0) -> Tensor:
    return values / (values.sum(dim=1, keepdim=True) + eps)


def grouped(values: Tensor, n: Any, best: int, out: float) -> Tensor:
    by_group = values.view(T, n.n_group, -1)
    kept = among(by_group.topk(best, dim=2).values.sum(dim=2), n.topk_group)
    return by_group.masked_fill(~kept[:, :, None], out).flatten(1)


def weighed(scores: Tensor, values: Tensor, n: Any, eps: float = 0.0, normed: bool | None = None) -> Tensor:
    found = scores * among(values, n.k)
    return (shares(found, eps) if (n.norm_topk_prob if normed is None else normed) else found) * n.scaling_factor


def plain_softmax(n: Any) -> Tensor:
    scores = n.logits.softmax(dim=1)
    return weighed(scores, scores, SimpleNamespace(**vars(n) | {"scaling_factor": 1.0}))


def topk_softmax(n: Any) -> Tensor:
    return n.logits.masked_fill(~among(n.logits, n.k), float("-inf")).softmax(dim=1)


def best_groups(n: Any) -> Tensor:
    scores = n.logits.softmax(dim=1)
    return weighed(scores, grouped(scores, n, 1, 0.0), n, normed=False)


def two_best_in_groups(n: Any) -> Tensor:
    scores = n.logits.softmax(dim=1)
    return weighed(scores, grouped(scores, n, 2, float("-inf")), n, 1e-20)


def ernie(n: Any) -> Tensor:
    scores = n.logits.softmax(dim=1)
    found = scores * among(scores + n.bias, n.k)
    return found / found.sum(dim=1, keepdim=True).clamp(min=1e-12)


def dbrx(n: Any) -> Tensor:
    scores = n.logits.softmax(dim=1)
    found = scores * among(scores, n.k)
    return found / (found**n.p).sum(dim=1, keepdim=True) ** (1 / n.p)


def sigmoid(n: Any, eps: float = 1e-20, factor: float | None = None) -> Tensor:
    scores = n.logits.sigmoid()
    values = scores if n.bias is None else scores + n.bias
    return weighed(
        scores, values, n if factor is None else SimpleNamespace(**vars(n) | {"scaling_factor": factor}), eps
    )


def grouped_sigmoid(n: Any, out: float = float("-inf")) -> Tensor:
    scores = n.logits.sigmoid()
    values = scores + n.bias
    return weighed(scores, values if n.n_group is None else grouped(values, n, 2, out), n, 1e-20)


def of_logits(logits: Tensor, n: Any) -> SimpleNamespace:
    return SimpleNamespace(**vars(n) | {"logits": logits})


def inkling(n: Any) -> Tensor:
    scores = n.logits.sigmoid()
    routed = among(scores[:, :E] + n.bias, n.k)
    found = torch.cat([scores[:, :E] * routed, scores[:, E:]], dim=1)
    return shares(found) * n.scaling_factor * n.global_scale


def sigmoid_of_chosen(n: Any, bias: float | Tensor = 0.0) -> Tensor:
    found = n.logits.sigmoid() * among(n.logits + bias, n.k)
    return shares(found) if n.norm_topk_prob else found


def sqrtsoftplus(n: Any) -> Tensor:
    scores = nn.functional.softplus(n.logits).sqrt()
    return weighed(scores, scores + n.bias, n, 1e-20)


def hashed(n: Any) -> Tensor:
    scores = nn.functional.softplus(n.logits).sqrt()
    chosen = torch.zeros_like(scores).scatter(1, n.table[n.input_ids.flatten()], 1.0)
    return shares(scores * chosen) * n.scaling_factor


def biased_softmax(n: Any, factor: float) -> Tensor:
    scores = n.logits.softmax(dim=1)
    return scores * among(scores + n.bias, n.k) * factor


def product_keys(n: Any) -> Tensor:
    return topk_softmax(of_logits(torch.stack([n.keys[0, :, e // 3] + n.keys[1, :, e % 3] for e in range(9)], 1), n))


def sparse_mixer(n: Any) -> Tensor:
    found = torch.zeros_like(n.logits)
    for t, row in enumerate(n.logits.tolist()):
        left = dict(enumerate(row))
        for _ in range(2):
            best = max(left, key=lambda e: left[e])
            near = {e: v for e, v in left.items() if (left[best] - v) / max(abs(v), left[best]) <= 2 * n.jitter}
            found[t, best] = torch.tensor(list(near.values())).sub(left[best]).exp().sum().reciprocal()
            del left[best]
    return found


FORMULAS: dict[str, Callable[[Any], Tensor]] = {
    "flex_olmo": plain_softmax,
    "aria": topk_softmax,
    "openai_privacy_filter": lambda n: topk_softmax(n) / n.k,
    "deepseek_v2": best_groups,
    "mistral4": two_best_in_groups,
    "ernie4_5_moe": ernie,
    "dbrx": dbrx,
    "gemma4": lambda n: plain_softmax(n) * n.per_expert_scale,
    "axk1": grouped_sigmoid,
    "afmoe": sigmoid,
    "lfm2_moe": lambda n: sigmoid(n, 1e-6),
    "flint": lambda n: sigmoid(n, 0.0, 1.0),
    "laguna": lambda n: sigmoid(of_logits(torch.tanh(n.logits / n.softcap) * n.softcap, n), 0.0, 1.0),
    "muse_spark": lambda n: sigmoid(of_logits(n.logits * n.output_multiplier, n), 1e-15),
    "axk2": lambda n: grouped_sigmoid(n, 0.0),
    "inkling": inkling,
    "llama4": sigmoid_of_chosen,
    "kolibri1": lambda n: sigmoid_of_chosen(n, n.bias),
    "deepseek_v4": sqrtsoftplus,
    "deepseek_v4_hash": hashed,
    "zaya": lambda n: biased_softmax(n, 1.0),
    "longcat_flash": lambda n: biased_softmax(n, n.scaling_factor),
    "doge": product_keys,
    "phimoe": sparse_mixer,
}
# What the names are, other than the common ones.
OWN: dict[str, list[dict[str, Any]]] = {
    "flex_olmo": [{}, {"norm_topk_prob": False}],
    "mistral4": [{}, {"norm_topk_prob": False}],
    "axk1": [{}, {"norm_topk_prob": False}, {"n_group": 1, "topk_group": 1}],
    "afmoe": [{}, {"norm_topk_prob": False}],
    "flint": [{}, {"bias": None}],
    "llama4": [{}, {"norm_topk_prob": False}, {"logits": drawn(T, E) + 20}],
    "kolibri1": [{}, {"logits": drawn(T, E) + 20}],
    "dbrx": [{}, {"p": 1.0}],
    "axk2": [{}, {"bias": drawn(E, seed=8) - 1.0}, {"n_group": None}],
    "inkling": [{"logits": drawn(T, E + 2, seed=9), "num_shared": 2, "global_scale": torch.tensor([0.6])}],
    "zaya": [{"logits": drawn(T, E + 1), "bias": drawn(E + 1, seed=8, scale=0.1), "k": 1}],
    "longcat_flash": [{"logits": drawn(T, E + 3), "bias": drawn(E + 3, seed=8, scale=0.1)}],
    "doge": [{"keys": drawn(2, T, 3), "logits": None, "E": 9}],
}
LAYERS = {"switch_transformers", "nllb_moe"}  # have tests of their own


def test_every_gate_is_here_and_only_one_form_of_each() -> None:
    gates = [gate for block in OF_MODELS for gate in block.gates]
    assert len(set(gates)) == 79
    twice = {gate for gate in gates if gates.count(gate) > 1}
    assert twice == {"cohere2_moe"}  # a softmax or a sigmoid, by its settings
    assert {block.gates[0] for block in OF_MODELS} == FORMULAS.keys() | LAYERS


@pytest.mark.parametrize("block", [b for b in OF_MODELS if b.gates[0] not in LAYERS], ids=lambda block: block.gates[0])
def test_block_is_the_formula(block: models_page.Block) -> None:
    gate = block.gates[0]
    for own in OWN.get(gate, [{}]):
        given = names(**own)
        found = models_page.run(block.code, **given)
        expected = FORMULAS[gate](SimpleNamespace(**given))
        actual = dense(found["weights"], found["expert_ids"], expected.shape[1])
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
        assert found["expert_ids"].dtype == torch.int32


# ---------------------------------------------------------------------------- layers


def layer(weights: Tensor, n: Any) -> Tensor:
    """Every expert on every token, by [T, E] weights."""
    outputs = torch.stack([n["x"] @ n["weight"][e] for e in range(weights.shape[1])], dim=1)
    return (outputs * weights[:, :, None]).sum(dim=1)


def code_of(gate: str) -> str:
    return next(block.code for block in OF_MODELS if gate in block.gates)


def test_experts_that_compute_nothing() -> None:
    n = names(**OWN["zaya"][0])
    weights = FORMULAS["zaya"](SimpleNamespace(**n))
    assert (weights[:, E] > 0).any()
    torch.testing.assert_close(models_page.run(code_of("zaya"), **n)["output"], layer(weights[:, :E], n))
    n = names(**OWN["longcat_flash"][0])
    weights = FORMULAS["longcat_flash"](SimpleNamespace(**n))
    expected = layer(weights[:, :E], n) + n["x"] * weights[:, E:].sum(dim=1, keepdim=True)
    torch.testing.assert_close(models_page.run(code_of("longcat_flash"), **n)["output"], expected)


def test_capacity_per_sequence() -> None:
    n = names(capacity=2)
    scores = n["logits"].softmax(dim=1)
    weights = scores * among(scores, 1)
    dropped = 0
    for first in range(0, T, T // B):
        part = weights[first : first + T // B]
        over = (part > 0).cumsum(dim=0) > 2
        dropped += int((over & (part > 0)).sum())
        part.masked_fill_(over, 0.0)
    assert dropped
    torch.testing.assert_close(models_page.run(code_of("switch_transformers"), **n)["output"], layer(weights, n))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("prioritized", [False, True])
def test_first_choices_first(prioritized: bool, before: bool) -> None:
    n = names(capacity=4, batch_prioritized_routing=prioritized, normalize_router_prob_before_dropping=before)
    scores = n["logits"].softmax(dim=1)
    best, ids = scores.topk(2, dim=1)
    order = best[:, 0].argsort(descending=True) if prioritized else torch.arange(T)
    room, kept = [4] * E, torch.zeros(T, 2, dtype=torch.bool)
    for k in range(2):
        for t in order.tolist():
            kept[t, k] = room[ids[t, k]] > 0
            room[ids[t, k]] -= 1
    assert not kept.all(dim=0).any()
    divisor = (best if before else best * kept).sum(dim=1, keepdim=True)
    weights = torch.where(kept, best / divisor, 0.0)
    expected = layer(torch.zeros(T, E).scatter(1, ids, weights), n)
    torch.testing.assert_close(models_page.run(code_of("nllb_moe"), **n)["output"], expected)


def test_sparse_mixer_in_training() -> None:
    """The values are reduced by the factor, the gradient is not."""
    given = names(logits=drawn(T, E, seed=1).requires_grad_(), training=True, jitter=10.0)
    torch.manual_seed(0)
    found = models_page.run(code_of("phimoe"), **given)
    weights, ids = found["weights"], found["expert_ids"].long()
    assert (ids[:, 0] != ids[:, 1]).all()
    first = given["logits"].detach().requires_grad_()
    whole = first.softmax(dim=1).gather(1, ids[:, :1])
    factor = (weights[:, :1] / whole).detach()
    reduced = torch.isclose(factor, torch.tensor(0.3333))
    assert reduced.any()
    assert (reduced | torch.isclose(factor, torch.tensor(1.0))).all()
    whole.sum().backward()
    weights[:, 0].sum().backward()
    torch.testing.assert_close(given["logits"].grad, first.grad)


# ---------------------------------------------------------------------------- beyond one model


def beyond(start: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    n = names(**more)
    (code,) = (block.code for block in BLOCKS if not block.gates and start in block.title)
    return models_page.run(code, **n), n


def test_tokens_multiplied_before_the_experts() -> None:
    gating = models_page.run(code_of("llama4"), **names())["gating"]
    found, n = beyond("multiplies the tokens", gating=gating)
    torch.testing.assert_close(found["output"], layer(sigmoid_of_chosen(SimpleNamespace(**n)), n))


def test_expert_choice() -> None:
    found, n = beyond("Expert choice", capacity=5)
    scores = n["logits"].softmax(dim=1)
    torch.testing.assert_close(found["output"], layer(scores * among(scores.t(), 5).t(), n))


def test_shared_experts_as_slots() -> None:
    found, n = beyond("Shared experts as slots", num_shared=2)
    scores = n["logits"].softmax(dim=1)
    expected = torch.cat([scores * among(scores, K), torch.ones(T, 2)], dim=1)
    torch.testing.assert_close(dense(found["weights"], found["expert_ids"], E + 2), expected)
    assert found["plan"].rows_per_expert[E:].tolist() == [T, T]


def test_losses() -> None:
    layers = [drawn(T, E, seed=seed) for seed in (1, 2)]
    mask = torch.arange(T) % 5 == 0
    found, _ = beyond("load_balancing_loss_func", all_logits=layers, padding_mask=mask)
    scores = torch.cat([logits[~mask].softmax(dim=1) for logits in layers])
    slots = among(scores, K).float().mean(dim=0)
    torch.testing.assert_close(found["loss"], E * (slots * scores.mean(dim=0)).sum())

    found, n = beyond("Switch Transformers is the mean")
    scores = n["logits"].softmax(dim=1).view(B, -1, E)
    slots = torch.stack([among(part, 1).float().mean(dim=0) for part in scores])
    torch.testing.assert_close(found["loss"], E * (slots * scores.mean(dim=1)).sum(dim=1).mean())

    found, n = beyond("first choices only")
    scores = n["logits"].softmax(dim=1)
    torch.testing.assert_close(found["loss"], E * (among(scores, 1).float().mean(dim=0) * scores.mean(dim=0)).sum())


def test_sinkhorn() -> None:
    found, n = beyond("sinkhorn routing")
    plan = n["logits"].double().exp()
    for _ in range(200):
        plan = plan / plan.sum(dim=1, keepdim=True) / T
        plan = plan / plan.sum(dim=0, keepdim=True) / E
    expected = n["logits"].softmax(dim=1) * among(plan, K)
    torch.testing.assert_close(dense(found["weights"], found["expert_ids"], E), expected)


def test_groups_of_megatron() -> None:
    found, n = beyond("Megatron's groups", k=4, topk_group=2)
    scores = n["logits"].sigmoid()
    expected = scores * among(grouped(scores + n["bias"], SimpleNamespace(**n), 2, float("-inf")), 4)
    torch.testing.assert_close(dense(found["weights"], found["expert_ids"], E), shares(expected))


def test_random_token_selection() -> None:
    found, _ = beyond("random token selection", capacity=4)
    wanted = torch.bincount(found["expert_ids"].flatten().long(), minlength=E)
    assert found["plan"].tokens_per_expert.tolist() == wanted.clamp(max=4).tolist()
    assert (wanted > 4).any()
