"""Every architecture that the host decorates, as a whole tiny model, against the host's loop over the experts."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hosts import architectures
from moeroute.interop import huggingface

huggingface.register()


def run(model: Any, ids: Tensor, implementation: str) -> tuple[Tensor, dict[str, Tensor | None]]:
    model = copy.deepcopy(model)
    model.set_experts_implementation(implementation)
    assert set(huggingface.check(model).values()) == {implementation}
    output = model(input_ids=ids)
    output = output.logits if hasattr(output, "logits") else output[0]
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(9)))
    return output.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def worst(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("architecture", architectures.DECORATED)
def test_logits_and_gradients(architecture: str) -> None:
    model, ids = architectures.build(architecture)
    expected, expected_grads = run(model, ids, "eager")
    actual, grads = run(model, ids, "moeroute")
    differences = {"the logits": worst(actual, expected)}
    for name, gradient in expected_grads.items():
        ours = grads[name]
        assert (gradient is None) == (ours is None), name
        if gradient is not None and ours is not None:
            differences[name] = worst(ours, gradient)
    largest = max(differences, key=differences.__getitem__)
    same = "equal" if torch.equal(actual, expected) else "near"
    print(f"{architecture}: logits {same}, {differences['the logits']:.1e}; most {differences[largest]:.1e}, {largest}")
    assert differences["the logits"] < 2e-6
    assert differences[largest] < 2e-5, largest
