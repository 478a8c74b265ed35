"""README's examples print what README says, its drawing is a real plan, and what it names exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moeroute
from moeroute.nn import Router
from small_cases import present

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("code, printed", EXAMPLES, ids=["layer", "operators"])
def test_example_prints_what_it_says(code: str, printed: str) -> None:
    assert printed
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == printed


def test_drawing_is_a_real_plan() -> None:
    _, drawing, _ = re.split(r"<!-- (?:end of the )?drawing -->", README.read_text())
    lines = re.findall(r"^([a-z_]+) {2,}([\d |]+\d)", drawing, re.MULTILINE)
    drawn = {name: [int(number) for number in re.findall(r"\d+", numbers)] for name, numbers in lines}
    ids = torch.tensor(drawn["expert_ids"]).view(4, 2)
    plan = moeroute.plan_from_expert_ids(ids, num_experts=3)
    assert drawn == {
        "slot": list(range(8)),
        "expert_ids": ids.flatten().tolist(),
        "row_of_slot": plan.row_of_slot.tolist(),
        "row": list(range(8)),
        "slot_of_row": plan.slot_of_row.tolist(),
        "token_of_row": plan.token_of_row.tolist(),
        "rows_per_expert": present(plan.rows_per_expert).tolist(),
    }
    # The bars stand between the rows of two experts.
    bars = [line.split("|") for line in drawing.splitlines() if line.startswith(("row  ", "slot_of", "token_of"))]
    assert len(bars) == 3
    for name, *others in bars:
        counts = [len(re.findall(r"\d+", part)) for part in (name, *others)]
        assert counts == drawn["rows_per_expert"]


def test_router_logits_are_float32_where_the_model_is_bfloat16() -> None:
    """Logits in the model's dtype choose other experts for some tokens, in near ties, and for few."""
    torch.manual_seed(0)
    router = Router(1024, 64, 8, dtype=torch.bfloat16)
    tokens = torch.randn(2048, 1024, dtype=torch.bfloat16)
    gating, logits = router(tokens)
    exact = tokens.double() @ router.weight.double().t()
    torch.testing.assert_close(logits.double(), exact, rtol=1e-4, atol=1e-4)
    chosen = gating.expert_ids.sort(dim=-1).values
    theirs = torch.nn.functional.linear(tokens, router.weight).topk(8, dim=-1).indices.sort(dim=-1).values
    others = (chosen != theirs).any(dim=-1)
    assert 0 < others.sum() < 2048 * 0.1
    replayed, _ = router(tokens, theirs)
    torch.testing.assert_close(replayed.expert_ids.long(), theirs, rtol=0, atol=0)


def test_named_tests_and_files_exist() -> None:
    text = README.read_text()
    root = README.parent
    everything = "\n".join(path.read_text() for path in (root / "tests").rglob("test_*.py"))
    for name in set(re.findall(r"`(test_\w+)`", text)):
        assert f"def {name}(" in everything, name
    for name in set(re.findall(r"`((?:tests|docs)/[\w.]+)`", text)):
        assert (root / name).exists(), name
