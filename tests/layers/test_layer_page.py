"""docs/layer.md names every option of the layer, and the families' options are ones that it takes."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from moeroute.nn import MoE, SwiGLU

PAGE = (Path(__file__).parents[2] / "docs" / "layer.md").read_text()
FAMILIES = {
    name: options
    for name, options in re.findall(
        r"^\| ([^|]+) \| `([^`]+)`", PAGE.partition("## What model families")[2], re.MULTILINE
    )
}


def test_every_option_is_on_the_page() -> None:
    options = set(inspect.signature(MoE).parameters) - {"hidden_size", "intermediate_size", "num_experts", "k"}
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", PAGE))))
    assert options - named <= {"device", "dtype", "backend"}


def test_the_page_has_the_families() -> None:
    assert {"Mixtral", "Qwen2-MoE", "Qwen3-MoE", "DeepSeek-V3", "gpt-oss", "Llama 4"} <= FAMILIES.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_a_layer(name: str) -> None:
    known = {
        "torch": torch,
        "SwiGLU": SwiGLU,
        "H": 8,
        "I": 4,
        "I_shared": 6,
        "tid2eid": torch.zeros(9, 2, dtype=torch.int64),
    }
    options = eval(f"dict({FAMILIES[name]})", known)
    layer = MoE(8, 4, 16, **{"k": 2, **options})
    keys = torch.arange(5) if "hash_table" in options else None
    assert layer(torch.randn(5, 8), keys=keys).shape == (5, 8)
