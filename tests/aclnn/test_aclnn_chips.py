"""One chip chosen: what its documents do not list is refused, and all else stays as it is."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aclnn_calls import GOOD, INVALID, NULL, TILING, call_refused, f32, i32, ones, poison, prepare, run, same
from c_library import Library
from moeroute import aclnn
from moeroute.aclnn.signatures import SIGNATURES

FIND_KERNEL = 561003
CHIPS = ("A2", "A3", "950", "310P")
NOT_ON_950 = {
    "MoeFinalizeRouting", "MoeFusedTopk", "MoeGatingTopKBackward", "MoeInitRoutingQuant", "MoeTokenPermuteWithEp",
    "MoeTokenPermuteWithEpGrad", "MoeTokenUnpermuteWithEp", "MoeTokenUnpermuteWithEpGrad",
}  # fmt: skip
ON_310P = {"MoeGatingTopKSoftmax", "MoeTokenUnpermute"}


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    former = aclnn.set_chip(None)
    yield
    aclnn.set_chip(former)


def absent(operator: str) -> list[str]:
    found = ["310P"] if operator not in ON_310P else []
    found += ["950"] if operator in NOT_ON_950 else []
    found += ["A2"] if operator == "MoeUpdateExpert" else []
    return found


@pytest.mark.parametrize("operator", SIGNATURES)
@pytest.mark.parametrize("chip", CHIPS)
def test_which_chip_has_which_operator(operator: str, chip: str) -> None:
    aclnn.set_chip(chip)
    if chip in absent(operator):
        message = call_refused(operator, {}, FIND_KERNEL)
        assert message.startswith(f"aclnn{operator}: the chip must be A3") or message.startswith(
            f"aclnn{operator}: the chip must be A2 or A3"
        )
        assert message.endswith(f"; got {chip}")
    elif chip != "310P":
        assert prepare(operator, *GOOD[operator]().values())[0] == 0, aclnn.aclGetRecentErrMsg()


def test_set_chip() -> None:
    assert aclnn.set_chip("A3") is None
    assert aclnn.set_chip("950") == "A3"
    with pytest.raises(ValueError, match=r"set_chip: name must be one of 'A2', 'A3', '950', '310P' or None; got 'A4'"):
        aclnn.set_chip("A4")
    assert aclnn.set_chip(None) == "950"
    assert aclnn.set_chip(None) is None


INT8: dict[str, Any] = {
    "tokens": torch.ones(3, 2, dtype=torch.int8),
    "permuteTokensOut": torch.zeros(6, 2, dtype=torch.int8),
}


@pytest.mark.parametrize("chip", ["A2", "A3"])
@pytest.mark.parametrize(
    "operator, changes, code, words",
    [
        ("MoeTokenPermute", INT8, INVALID, "tokens must be float16, bfloat16 or float32 on "),
        ("MoeGatingTopK", {"normType": 2}, TILING, "normType must be 0 or 1 on "),
        ("MoeGatingTopKV2", {"normType": 2}, TILING, "normType must be 0 or 1 on "),
        ("MoeReRouting", {"idxType": 1}, TILING, "idxType must be 0 on "),
        ("MoeFinalizeRoutingV3", {"scalesOptional": ones(3, 2).half()}, INVALID, "scalesOptional must be"),
        ("MoeFinalizeRoutingV4", {"scalesOptional": ones(3, 2).bfloat16()}, INVALID, "scalesOptional must be"),
    ],
)
def test_what_only_950_takes(chip: str, operator: str, changes: dict[str, Any], code: int, words: str) -> None:
    for wider in (None, "950"):
        aclnn.set_chip(wider)
        assert prepare(operator, *(GOOD[operator]() | changes).values())[0] == 0, aclnn.aclGetRecentErrMsg()
    aclnn.set_chip(chip)
    message = call_refused(operator, changes, code)
    assert words in message
    assert f" on {chip}; got " in message


@pytest.mark.parametrize("chip", [None, *CHIPS[:3]])
def test_float32_scales_beside_bfloat16_everywhere(chip: str | None) -> None:
    aclnn.set_chip(chip)
    for operator in ("MoeFinalizeRoutingV3", "MoeFinalizeRoutingV4"):
        arguments = GOOD[operator]()
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and name != "scalesOptional":
                arguments[name] = value.bfloat16()
        assert prepare(operator, *arguments.values())[0] == 0, aclnn.aclGetRecentErrMsg()
        arguments["scalesOptional"] = None
        arguments |= {"x2Optional": None, "x1Optional": None, "out": poison(6, 2, dtype=torch.bfloat16)}
        arguments |= {"expertIdxOptional": None, "biasOptional": None, "xOptional": None}
        if "k" in arguments:
            arguments["k"] = 1
        assert prepare(operator, *arguments.values())[0] == 0, aclnn.aclGetRecentErrMsg()


PADDED: dict[str, Any] = {
    "dropPadMode": 1,
    "expertCapacity": 2,
    "activeExpertRangeOptional": [0, 3],
    "scaleOptional": ones(3, 2),
    "expandedXOut": torch.zeros(3, 2, 2, dtype=torch.int8),
    "expertTokensCountOrCumsumOut": torch.zeros(3, dtype=torch.int64),
}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"activeNum": 0}, "activeNum"),
        ({"expertTokensNumFlag": False}, "expertTokensNumFlag"),
        ({"activeExpertRangeOptional": None, "scaleOptional": None, "expertTokensCountOrCumsumOut": torch.zeros(3, dtype=torch.int64)}, "activeExpertRangeOptional"),
        (PADDED, "quantMode"),
    ],
    ids=["activeNum", "counts", "range", "int8 with a capacity"],
)  # fmt: skip
def test_init_routing_v3_of_950(changes: dict[str, Any], words: str) -> None:
    for wider in (None, "A2", "A3"):
        aclnn.set_chip(wider)
        assert prepare("MoeInitRoutingV3", *(GOOD["MoeInitRoutingV3"]() | changes).values())[0] == 0
    aclnn.set_chip("950")
    assert words in call_refused("MoeInitRoutingV3", changes, TILING)


def test_what_950_takes_less() -> None:
    without: dict[str, Any] = {"permutedTokensOptional": None, "probsOptional": None, "probsGradOut": None}
    without |= {"unpermutedTokensGrad": ones(6, 2)}
    experts = {"x": ones(3, 2049)}
    for chip in (None, "A2", "A3"):
        aclnn.set_chip(chip)
        assert prepare("MoeTokenUnpermuteGrad", *(GOOD["MoeTokenUnpermuteGrad"]() | without).values())[0] == 0
        assert prepare("MoeGatingTopKSoftmax", *(GOOD["MoeGatingTopKSoftmax"]() | experts).values())[0] == 0
    aclnn.set_chip("950")
    for name in ("permutedTokensOptional", "probsGradOut"):
        given = {"permutedTokensOptional": ones(6, 2), "probsGradOut": poison(6, 1)} | {name: None}
        assert name in call_refused("MoeTokenUnpermuteGrad", without | given, NULL)
    assert "in 1..2048 on 950; got 2049" in call_refused("MoeGatingTopKSoftmax", experts, TILING)
    fits = GOOD["MoeGatingTopKSoftmax"]() | {"x": ones(3, 2048)}
    assert prepare("MoeGatingTopKSoftmax", *fits.values())[0] == 0


def test_softmax_of_310p() -> None:
    """Row numbers are not there: zeros. Values and ids as everywhere."""
    rows, k = 3, 2
    x = torch.zeros(rows, 16, dtype=torch.float16)
    x[:, 5], x[:, 3] = 2.0, 1.0
    half, ids = torch.float16, torch.int32
    good: dict[str, Any] = {"x": x, "finishedOptional": None, "k": k, "yOut": poison(rows, k, dtype=half)}
    good |= {"expertIdxOut": poison(rows, k, dtype=ids), "rowIdxOut": poison(rows, k, dtype=ids)}
    aclnn.set_chip("310P")
    run("MoeGatingTopKSoftmax", *good.values())
    same(good["expertIdxOut"], [[5, 3]] * rows)
    same(good["rowIdxOut"], [[0, 0]] * rows)
    total = torch.tensor([2.0, 1.0], dtype=torch.float64).exp().sum() + 14
    wanted = (torch.tensor([2.0, 1.0], dtype=torch.float64).exp() / total).half()
    torch.testing.assert_close(good["yOut"], wanted.expand(rows, k), rtol=2**-11, atol=0)
    aclnn.set_chip("A2")
    run("MoeGatingTopKSoftmax", *good.values())
    same(good["rowIdxOut"], [[0, 3], [1, 4], [2, 5]])
    aclnn.set_chip("310P")
    for changes, code, words in (
        ({"x": x.float(), "yOut": poison(rows, k)}, INVALID, "x must be float16 on 310P; got float32"),
        ({"finishedOptional": torch.zeros(rows, dtype=torch.bool)}, INVALID, "finishedOptional must be null on 310P"),
        ({"x": x[:, :8]}, TILING, "a multiple of 16 up to 256 on 310P; got 8"),
        ({"x": x.repeat(1, 17)}, TILING, "a multiple of 16 up to 256 on 310P; got 272"),
    ):
        assert words in call_refused("MoeGatingTopKSoftmax", good | changes, code)
    deep = {"x": x[None], "yOut": poison(1, rows, k, dtype=half)}
    deep |= {name: poison(1, rows, k, dtype=ids) for name in ("expertIdxOut", "rowIdxOut")}
    assert "x must be 2-dimensional on 310P" in call_refused("MoeGatingTopKSoftmax", good | deep, TILING)


def test_unpermute_of_310p() -> None:
    aclnn.set_chip("310P")
    good = GOOD["MoeTokenUnpermute"]() | {"permutedTokens": ones(6, 128), "out": poison(3, 128)}
    run("MoeTokenUnpermute", *good.values())
    same(good["out"], ones(3, 128) * 2)
    for hidden in (2, 127, 192, 10240):
        changes = {"permutedTokens": ones(6, hidden), "out": poison(3, hidden)}
        assert f"below 10240 on 310P; got {hidden}" in call_refused("MoeTokenUnpermute", good | changes, TILING)
    changes = {"permutedTokens": ones(6, 128).bfloat16(), "out": poison(3, 128, dtype=torch.bfloat16)}
    assert "permutedTokens must be float16 or float32" in call_refused("MoeTokenUnpermute", good | changes, INVALID)
    changes = {"probsOptional": ones(3, 2).bfloat16()}
    assert "probsOptional must be float16 or float32" in call_refused("MoeTokenUnpermute", good | changes, INVALID)
    aclnn.set_chip(None)
    assert prepare("MoeTokenUnpermute", *(good | changes).values())[0] == 0


def test_a_fault_of_every_chip_comes_first() -> None:
    aclnn.set_chip("950")
    wrong = {"grad": f32([[1.0]]), "indices": i32([0])}
    status = prepare("MoeTokenPermuteGrad", wrong["grad"], wrong["indices"], 0, False, poison(1, 1))[0]
    assert status == INVALID
    assert "numTopk" in aclnn.aclGetRecentErrMsg()


@pytest.mark.parametrize("chip", CHIPS)
def test_the_name_that_a_program_is_told(loaded: Library, chip: str) -> None:
    names = {"A2": b"Ascend910B2", "A3": b"Ascend910_9391", "950": b"Ascend950PR_9589", "310P": b"Ascend310P3"}
    before = loaded.call("aclrtGetSocName")
    aclnn.set_chip(chip)
    assert ctypes.string_at(loaded.call("aclrtGetSocName")) == names[chip]
    assert ctypes.string_at(before) == names["A2"], "a name stays where it is"


def test_the_environment_chooses() -> None:
    script = "from moeroute import aclnn; print(aclnn.set_chip(None))"
    for given, wanted in (("950", "950\n"), ("", "None\n")):
        environment = {**os.environ, "MOEROUTE_ACLNN_SOC": given}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert done.stdout == wanted, done.stderr
    environment = {**os.environ, "MOEROUTE_ACLNN_SOC": "A9"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "name must be one of 'A2', 'A3', '950', '310P' or None; got 'A9'" in done.stderr
