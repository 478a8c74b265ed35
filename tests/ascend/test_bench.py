"""`moeroute bench --npu`: both sides of every case give the same bits, and what it says of the bounds."""

import pytest
import torch

from moeroute import cli, npu
from moeroute.testing import assert_same_bits

SMALL = npu.Sizes(tokens=48, topk=3, experts=16, hidden=40)


@pytest.mark.parametrize("case", npu.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_sides_are_the_same(case: npu.Case, dtype: torch.dtype) -> None:
    pair = case.make(SMALL._replace(dtype=dtype))
    assert_same_bits(pair.named(), pair.core(), case.name)


def test_a_wrong_result_is_not_measured() -> None:
    wrong = npu.Case("wrong", lambda sizes: npu.Pair(lambda: torch.ones(2), lambda: torch.zeros(2)), {})
    with pytest.raises(AssertionError, match="wrong: 2 of 2 elements differ"):
        npu.measure(wrong, 0.0, SMALL)


def test_the_verdict() -> None:
    case = npu.Case("case", npu._permute, {"core": 1 / npu.SLOWEST, "roof": 0.6})
    assert npu.Result(case, 1.09, 1.0, 0.7).missed == []
    assert npu.Result(case, 1.2, 1.0, 0.6).missed == ["core 0.833 < 0.909", "roof 0.500 < 0.600"]
    assert npu.Result(npu.CASES[0], 2.0, 1.0, None).ratios == {"core": 0.5}


def test_the_cases_cover_the_routing_functions() -> None:
    names = [case.name for case in npu.CASES]
    assert len(set(names)) == len(names)
    assert all(case.bounds["core"] * npu.SLOWEST == pytest.approx(1) for case in npu.CASES)
    assert [case.name for case in npu.CASES if case.bounds.get("roof")] == ["npu_moe_init_routing_v2 quant_mode=1"]


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    case = npu.Case("npu_moe_token_permute", npu._permute, {"core": 1e9})
    monkeypatch.setattr(npu, "CASES", (case,))
    monkeypatch.setattr(npu, "SIZES", SMALL)
    assert cli.main(["bench", "--npu", "--seconds", "0"]) == 0
    assert cli.main(["bench", "--npu", "--seconds", "0", "--check"]) == 1
    printed = capsys.readouterr().out
    assert "core verbs" in printed
    assert "below its bound: npu_moe_token_permute: core" in printed
    with pytest.raises(SystemExit, match="no case's name contains 'nothing'"):
        cli.main(["bench", "--npu", "--only", "nothing"])
