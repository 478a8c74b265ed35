"""A valid call of every aclnn operator, both phases of it, its refusal, and what results are compared with.

Expectations of the aclnn tests are written in them, in float64 and Python lists; none comes from the package.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from moeroute import aclnn
from moeroute.aclnn.signatures import SIGNATURES

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


# A test of small results: once with each backend behind the layer.
on_every_backend = pytest.mark.usefixtures("layer_backend")

NULL, INVALID, INNER, TILING, INNER_NULL = 161001, 161002, 561000, 561002, 561103


def prepare(name: str, *arguments: Any) -> tuple[int, int, Any]:
    return getattr(aclnn, f"aclnn{name}GetWorkspaceSize")(*arguments)


def run(name: str, *arguments: Any, workspace: int = 0) -> None:
    """Both phases; both must succeed."""
    status, size, executor = prepare(name, *arguments)
    assert status == 0, aclnn.aclGetRecentErrMsg()
    assert size == workspace
    status = getattr(aclnn, f"aclnn{name}")(None, 0, executor, None)
    assert status == 0, aclnn.aclGetRecentErrMsg()


def same(actual: Tensor, expected: Any) -> None:
    expected = torch.as_tensor(expected).to(actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# Half a unit in the last place: there is one rounding to the dtype, at the store. Sums are float32 before.
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def close(actual: Tensor, expected: Any) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=1.01 * ROUNDING[actual.dtype], atol=2e-5)


def f32(values: Any, *shape: int) -> Tensor:
    made = torch.tensor(values, dtype=torch.float32)
    return made.reshape(shape) if shape else made


def i32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What nobody writes by accident."""
    if dtype.is_floating_point:
        return torch.full(shape, math.nan, dtype=dtype)
    return torch.full(shape, -77, dtype=dtype)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def empty_ids(*shape: int) -> Tensor:
    return poison(*shape, dtype=torch.int32)


X34 = [[0.1] * 4, [0.2] * 4, [0.3] * 4]


MAP = [[1, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1]]


def routing_map() -> Tensor:
    return torch.tensor(MAP, dtype=torch.int8)


# ---------------------------------------------------------------------------- valid calls


# T = 3, K = 2, E = 4, H = 2 where an operator has them.
GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "MoeTokenPermuteGrad": lambda: {
        "permutedOutputGrad": ones(6, 2), "sortedIndices": i32([0, 1, 2, 3, 4, 5]), "numTopk": 2, "paddedMode": False,
        "out": poison(3, 2),
    },
    "MoeGatingTopKBackward": lambda: {
        "xNorm": ones(3, 4) / 2, "gradY": ones(3, 2), "expertIdx": i32([[0, 1], [1, 2], [3, 0]]), "renorm": 0,
        "normType": 1, "routedScalingFactor": 1.0, "eps": 1e-20, "out": poison(3, 4),
    },
    "MoeTokenUnpermuteWithRoutingMapGrad": lambda: {
        "unpermutedTokensGrad": ones(3, 2), "outIndex": i32([0, 3, 2, 4, 1, 5]), "permuteTokenId": i32([0, 0, 1, 1, 2, 2]),
        "routingMapOptional": routing_map(), "permutedTokensOptional": ones(6, 2), "probsOptional": ones(3, 4),
        "dropAndPad": False, "restoreShapeOptional": None, "permutedTokensGradOut": poison(6, 2),
        "probsGradOutOptional": poison(3, 4),
    },
    "MoeTokenPermuteWithRoutingMapGrad": lambda: {
        "permutedTokensOutputGrad": ones(6, 2), "permutedProbsOutputGradOptional": ones(6),
        "sortedIndices": i32([0, 3, 2, 4, 1, 5]), "routingMapOptional": routing_map(), "experts_num": 4, "tokens_num": 3,
        "dropAndPad": False, "tokenGradOut": poison(3, 2), "probsGradOutOptional": poison(3, 4),
    },
    "MoeTokenPermute": lambda: {
        "tokens": ones(3, 2), "indices": i32([[1, 2], [0, 1], [0, 2]]), "numOutTokens": 0, "paddedMode": False,
        "permuteTokensOut": poison(6, 2), "sortedIndicesOut": empty_ids(6),
    },
    "MoeTokenUnpermute": lambda: {
        "permutedTokens": ones(6, 2), "sortedIndices": i32([2, 4, 0, 3, 1, 5]), "probsOptional": ones(3, 2),
        "paddedMode": False, "restoreShapeOptional": None, "out": poison(3, 2),
    },
    "MoeTokenUnpermuteGrad": lambda: {
        "permutedTokensOptional": ones(6, 2), "unpermutedTokensGrad": ones(3, 2), "sortedIndices": i32([2, 4, 0, 3, 1, 5]),
        "probsOptional": ones(3, 2), "paddedMode": False, "restoreShapeOptional": None,
        "permutedTokensGradOut": poison(6, 2), "probsGradOut": poison(3, 2),
    },
    "MoeTokenPermuteWithRoutingMap": lambda: {
        "tokens": ones(3, 2), "routingMap": routing_map(), "probsOptional": ones(3, 4), "numOutTokens": 6,
        "dropAndPad": False, "permuteTokensOut": poison(6, 2), "permuteProbsOutOptional": poison(6),
        "sortedIndicesOut": empty_ids(6),
    },
    "MoeTokenUnpermuteWithRoutingMap": lambda: {
        "permutedTokens": ones(6, 2), "sortedIndices": i32([0, 3, 2, 4, 1, 5]), "routingMapOptional": routing_map(),
        "probsOptional": ones(3, 4), "paddedMode": False, "restoreShapeOptional": [3, 2], "unpermutedTokens": poison(3, 2),
        "outIndex": empty_ids(6), "permuteTokenId": empty_ids(6), "permuteProbs": poison(6),
    },
    "MoeGatingTopK": lambda: {
        "x": ones(3, 4), "biasOptional": ones(4), "k": 2, "kGroup": 1, "groupCount": 2, "groupSelectMode": 0, "renorm": 0,
        "normType": 1, "outFlag": True, "routedScalingFactor": 1.0, "eps": 1e-20, "yOut": poison(3, 2),
        "expertIdxOut": empty_ids(3, 2), "outOut": poison(3, 4),
    },
    "MoeGatingTopKV2": lambda: {
        "x": ones(3, 4), "biasOptional": ones(4), "inputIdsOptional": i32([0, 1, 0]),
        "tid2eidOptional": i32([[0, 1], [2, 3]]), "k": 2, "kGroup": 2, "groupCount": 2, "groupSelectMode": 0, "renorm": 0,
        "normType": 1, "outFlag": True, "routedScalingFactor": 1.0, "eps": 1e-20, "yOut": poison(3, 2),
        "expertIdxOut": empty_ids(3, 2), "outOut": poison(3, 4),
    },
    "MoeGatingTopKSoftmax": lambda: {
        "x": ones(3, 4), "finishedOptional": torch.zeros(3, dtype=torch.bool), "k": 2, "yOut": poison(3, 2),
        "expertIdxOut": empty_ids(3, 2), "rowIdxOut": empty_ids(3, 2),
    },
    "MoeGatingTopKSoftmaxV2": lambda: {
        "x": ones(3, 4), "finishedOptional": torch.zeros(3, dtype=torch.bool), "k": 2, "renorm": 0,
        "outputSoftmaxResultFlag": True, "yOut": poison(3, 2), "expertIdxOut": empty_ids(3, 2),
        "softmaxResultOutOptional": poison(3, 4),
    },
    "MoeFusedTopk": lambda: {
        "x": ones(3, 4), "addNum": ones(4), "mappingNum": i32([1, 2, 2, 1]),
        "mappingTable": i32([[0, 0], [1, 4], [2, 5], [3, 0]]), "groupNum": 2, "groupTopk": 1, "topN": 2, "topK": 2,
        "activateType": 0, "isNorm": True, "scale": 1.0, "enableExpertMapping": True, "y": poison(3, 2),
        "indices": empty_ids(3, 2),
    },
    "MoeTokenPermuteWithEp": lambda: {
        "tokens": ones(3, 2), "indices": i32([[1, 2], [0, 1], [0, 2]]), "probsOptional": ones(3, 2),
        "rangeOptional": [1, 5], "numOutTokens": 0, "paddedMode": False, "permuteTokensOut": poison(4, 2),
        "sortedIndicesOut": empty_ids(6), "permuteProbsOut": poison(4),
    },
    "MoeTokenPermuteWithEpGrad": lambda: {
        "permutedTokensOutputGrad": ones(4, 2), "sortedIndices": i32([2, 4, 0, 3, 1, 5]),
        "permutedProbsOutputGradOptional": ones(4), "numTopk": 2, "rangeOptional": [1, 5], "paddedMode": False,
        "tokenGradOut": poison(3, 2), "probsGradOut": poison(3, 2),
    },
    "MoeTokenUnpermuteWithEp": lambda: {
        "permutedTokens": ones(4, 2), "sortedIndices": i32([2, 4, 0, 3, 1, 5]), "probsOptional": ones(3, 2), "numTopk": 2,
        "rangeOptional": [1, 5], "paddedMode": False, "restoreShapeOptional": None, "out": poison(3, 2),
    },
    "MoeTokenUnpermuteWithEpGrad": lambda: {
        "unpermutedTokensGrad": ones(3, 2), "sortedIndices": i32([2, 4, 0, 3, 1, 5]), "permutedTokensOptional": ones(4, 2),
        "probsOptional": ones(3, 2), "paddedMode": False, "restoreShapeOptional": None, "rangeOptional": [1, 5],
        "topkNum": 2, "permutedTokensGradOut": poison(4, 2), "probsGradOut": poison(3, 2),
    },
    "MoeInitRouting": lambda: {
        "x": ones(3, 2), "rowIdx": i32([[0, 3], [1, 4], [2, 5]]), "expertIdx": i32([[1, 2], [0, 1], [0, 2]]), "activeNum": 2,
        "expandedXOut": poison(4, 2), "expandedRowIdxOut": empty_ids(6), "expandedExpertIdxOut": empty_ids(6),
    },
    "MoeInitRoutingV2": lambda: {
        "x": ones(3, 2), "expertIdx": i32([[1, 2], [0, 1], [0, 2]]), "activeNum": 0, "expertCapacity": 2, "expertNum": 3,
        "dropPadMode": 0, "expertTokensCountOrCumsumFlag": 1, "expertTokensBeforeCapacityFlag": False,
        "expandedXOut": poison(6, 2), "expandedRowIdxOut": empty_ids(6), "expertTokensCountOrCumsumOut": empty_ids(3),
        "expertTokensBeforeCapacityOut": None,
    },
    "MoeInitRoutingV3": lambda: {
        "x": ones(3, 2), "expertIdx": i32([[1, 2], [0, 1], [0, 2]]), "scaleOptional": ones(2, 2), "offsetOptional": None,
        "activeNum": -1, "expertCapacity": 0, "expertNum": 3, "dropPadMode": 0, "expertTokensNumType": 1,
        "expertTokensNumFlag": True, "quantMode": 1, "activeExpertRangeOptional": [1, 3], "rowIdxType": 0,
        "expandedXOut": poison(6, 2, dtype=torch.int8), "expandedRowIdxOut": empty_ids(6),
        "expertTokensCountOrCumsumOut": poison(2, dtype=torch.int64), "expandedScaleOut": poison(6),
    },
    "MoeInitRoutingQuant": lambda: {
        "x": ones(3, 2), "rowIdx": i32([[0, 3], [1, 4], [2, 5]]), "expertIdx": i32([[1, 2], [0, 1], [0, 2]]), "activeNum": 2,
        "scale": 2.0, "offset": 1.0, "expandedXOut": poison(4, 2, dtype=torch.int8), "expandedRowIdxOut": empty_ids(6),
        "expandedExpertIdxOut": empty_ids(6),
    },
    "MoeInitRoutingQuantV2": lambda: {
        "x": ones(3, 2), "expertIdx": i32([[1, 2], [0, 1], [0, 2]]), "scaleOptional": ones(3, 2), "offsetOptional": None,
        "activeNum": 0, "expertCapacity": 2, "expertNum": 3, "dropPadMode": 0, "expertTokensCountOrCumsumFlag": 1,
        "expertTokensBeforeCapacityFlag": False, "quantMode": 1, "expandedXOut": poison(6, 2, dtype=torch.int8),
        "expandedRowIdxOut": empty_ids(6), "expertTokensCountOrCumsumOutOptional": empty_ids(3),
        "expertTokensBeforeCapacityOutOptional": None, "dynamicQuantScaleOutOptional": poison(6),
    },
    "MoeInitRoutingV2Grad": lambda: {
        "gradExpandedX": ones(6, 2), "expandedRowIdx": i32([2, 4, 0, 3, 1, 5]), "topK": 2, "dropPadMode": 0,
        "activeNum": 0, "out": poison(3, 2),
    },
    "MoeFinalizeRouting": lambda: {
        "expandedX": ones(6, 2), "x1": ones(3, 2), "x2Optional": ones(3, 2), "bias": ones(4, 2), "scales": ones(3, 2),
        "expandedRowIdx": i32([2, 4, 0, 3, 1, 5]), "expandedExpertIdx": i32([[1, 2], [0, 1], [0, 2]]), "out": poison(3, 2),
    },
    "MoeFinalizeRoutingV2": lambda: {
        "expandedX": ones(6, 2), "expandedRowIdx": i32([2, 4, 0, 3, 1, 5]), "x1Optional": ones(3, 2),
        "x2Optional": ones(3, 2), "biasOptional": ones(4, 2), "scalesOptional": ones(3, 2),
        "expertIdxOptional": i32([[1, 2], [0, 1], [0, 2]]), "dropPadMode": 2, "out": poison(3, 2),
    },
    "MoeFinalizeRoutingV3": lambda: {
        "expandedX": ones(6, 2), "expandedRowIdx": i32([2, 4, 0, 3, 1, 5]), "x1Optional": ones(3, 2),
        "x2Optional": ones(3, 2), "biasOptional": ones(6, 2), "scalesOptional": ones(3, 2),
        "expertIdxOptional": i32([[1, 2], [0, 4], [3, 5]]), "xOptional": ones(3, 2), "alpha1Optional": ones(1, 2),
        "alpha2Optional": ones(1, 2), "vOptional": ones(1, 2), "dropPadMode": 2, "zeroExpertRange": [3, 4],
        "copyExpertRange": [4, 5], "constantExpertRange": [5, 6], "out": poison(3, 2),
    },
    "MoeFinalizeRoutingV4": lambda: {
        "expandedX": ones(6, 2), "expandedRowIdx": i32([2, 4, 0, 3, 1, 5]), "x1Optional": ones(3, 2),
        "x2Optional": ones(3, 2), "biasOptional": ones(6, 2), "scalesOptional": ones(3, 2),
        "expertIdxOptional": i32([[1, 2], [0, 4], [3, 5]]), "xOptional": ones(3, 2), "alpha1Optional": ones(1, 2),
        "alpha2Optional": ones(1, 2), "vOptional": ones(1, 2), "dropPadMode": 2, "zeroExpertRange": [3, 4],
        "copyExpertRange": [4, 5], "constantExpertRange": [5, 6], "k": 2, "out": poison(3, 2),
    },
    "MoeFinalizeRoutingV2Grad": lambda: {
        "gradY": ones(3, 2), "expandedRowIdx": i32([2, 4, 0, 3, 1, 5]), "expandedXOptional": ones(6, 2),
        "scalesOptional": ones(3, 2), "expertIdxOptional": i32([[1, 2], [0, 1], [0, 2]]), "biasOptional": ones(4, 2),
        "dropPadMode": 0, "activeNum": 0, "expertNum": 0, "expertCapacity": 0, "gradExpandedXOut": poison(6, 2),
        "gradScalesOut": poison(3, 2),
    },
    "MoeComputeExpertTokens": lambda: {"sortedExperts": i32([0, 0, 1]), "numExperts": 2, "out": empty_ids(2)},
    "MoeUpdateExpert": lambda: {
        "expertIds": i32([[0, 1], [1, 2], [2, 3]]), "eplbTable": i32([[1, 0, -1], [2, 1, 4], [2, 2, 5], [1, 3, -1]]),
        "expertScalesOptional": ones(3, 2), "pruningThresholdOptional": ones(2) / 4,
        "activeMaskOptional": torch.ones(3, dtype=torch.bool), "localRankId": 0, "worldSize": 4, "balanceMode": 0,
        "balancedExpertIds": empty_ids(3, 2), "balancedActiveMask": torch.zeros(3, 2, dtype=torch.bool),
    },
    "MoeReRouting": lambda: {
        "tokens": ones(3, 2), "expertTokenNumPerRank": i32([[1, 1], [1, 0]]), "perTokenScalesOptional": ones(3),
        "expertTokenNumType": 1, "idxType": 0, "permuteTokensOut": poison(3, 2), "permutePerTokenScalesOut": poison(3),
        "permuteTokenIdxOut": empty_ids(3), "expertTokenNumOut": empty_ids(2),
    },
}  # fmt: skip


SIXTEEN_MIB = ("MoeGatingTopKBackward", "MoeTokenPermuteWithRoutingMapGrad")


def workspace_of(name: str) -> int:
    return 16 * 2**20 if name in SIXTEEN_MIB else 0


def outputs_of(name: str, arguments: dict[str, Any]) -> list[str]:
    """The names of the outputs that are there."""
    return [p.name for p in SIGNATURES[name].parameters if "out" in p.kind and arguments[p.name] is not None]


def call_refused(name: str, changes: dict[str, Any], code: int) -> str:
    """The call with changes gives this code and a message, and writes nothing. Returns the message."""
    arguments = GOOD[name]() | changes
    assert list(arguments) == list(SIGNATURES[name].names)
    outputs = [
        value for p, value in zip(SIGNATURES[name].parameters, arguments.values(), strict=True) if "out" in p.kind
    ]
    before = [None if out is None else out.clone() for out in outputs]
    aclnn.aclGetRecentErrMsg()
    status, size, executor = prepare(name, *arguments.values())
    message = aclnn.aclGetRecentErrMsg()
    assert (status, size, executor) == (code, 0, None), message
    assert message.startswith(f"aclnn{name}: ")
    assert aclnn.aclGetRecentErrMsg() == "", "a message is read once"
    for out, was in zip(outputs, before, strict=True):
        if out is not None:
            torch.testing.assert_close(out, was, rtol=0, atol=0, equal_nan=True)
    return message


def zeros_where_nothing_is_to_do(subtests: pytest.Subtests, name: str, changes: dict[str, Any]) -> None:
    """A valid call with empty tensors in it: workspace 0, and zeros in what still has elements."""
    arguments = GOOD[name]() | changes
    run(name, *arguments.values())
    for output in outputs_of(name, arguments):
        with subtests.test(output):
            same(arguments[output], torch.zeros_like(arguments[output]))


# ---------------------------------------------------------------------------- what a test is called


def spoken(value: Any) -> str:
    """A value as it stands in the name of a test: ``float32_3x2``, ``numTopk=0 out=float16_3x2``."""
    if isinstance(value, Tensor):
        shape = "x".join(map(str, value.shape)) or "scalar"
        return f"{str(value.dtype).removeprefix('torch.')}_{shape}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, dict):
        return " ".join(f"{key}={spoken(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(spoken, value))
    return str(value)


def cases(names: str, rows: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """A table of cases as parameters; the name of each test says what is in its row."""
    return pytest.mark.parametrize(names, [pytest.param(*row, id="-".join(map(spoken, row))) for row in rows])
