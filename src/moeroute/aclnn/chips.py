"""One chip's share of what the operators take.

By default the checks are the union of A2, A3 and 950. With a chip chosen, what its documents do not list is
refused behind all other checks: operators, dtypes, values and sizes.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from moeroute.aclnn import core
from moeroute.aclnn.core import PARAM_NULLPTR, TILING, Refusal, Work, wrong
from moeroute.aclnn.signatures import SIGNATURES

FIND_KERNEL = 561003

# The chips, and a name of one of each as the runtime tells it.
SOC_NAMES = {
    "A2": "Ascend910B2",
    "A3": "Ascend910_9391",
    "950": "Ascend950PR_9589",
    "310P": "Ascend310P3",
}

_EP = ("MoeTokenPermuteWithEp", "MoeTokenPermuteWithEpGrad", "MoeTokenUnpermuteWithEp", "MoeTokenUnpermuteWithEpGrad")
_310P = ("MoeGatingTopKSoftmax", "MoeTokenUnpermute")  # the only pages with limits for it
_ABSENT: dict[str, frozenset[str]] = {
    "A2": frozenset(["MoeUpdateExpert"]),
    "A3": frozenset(),
    "950": frozenset(
        ["MoeFinalizeRouting", "MoeFusedTopk", "MoeGatingTopKBackward", "MoeInitRoutingQuant", *_EP],
    ),
    "310P": frozenset(SIGNATURES) - frozenset(_310P),
}

_chip: str | None = None


def set_chip(name: str | None) -> str | None:
    """Take what this chip takes and no more: "A2", "A3", "950" or "310P"; None, the default, is the union of the
    first three. Returns the former one.

    The environment variable MOEROUTE_ACLNN_SOC sets it for a process, C programs included. An operator that the
    chip does not have is refused with 561003; dtypes, values and sizes with the codes of its documents. The size
    of the unified buffer is a setting of its own, `set_ub_bytes`.

    >>> import torch
    >>> from moeroute import aclnn
    >>> former = aclnn.set_chip("A2")
    >>> ids, out = torch.tensor([[1, 0]], dtype=torch.int32), torch.empty(2, 1, dtype=torch.int8)
    >>> tokens, places = torch.ones(1, 1, dtype=torch.int8), torch.empty(2, dtype=torch.int32)
    >>> aclnn.aclnnMoeTokenPermuteGetWorkspaceSize(tokens, ids, 0, False, out, places)
    (161002, 0, None)
    >>> aclnn.aclGetRecentErrMsg()
    'aclnnMoeTokenPermute: tokens must be float16, bfloat16 or float32 on A2; got int8'
    >>> aclnn.set_chip(former)
    'A2'
    """
    global _chip
    if name is not None and name not in SOC_NAMES:
        names = ", ".join(map(repr, SOC_NAMES))
        raise ValueError(f"moeroute.aclnn.set_chip: name must be one of {names} or None; got {name!r}")
    former, _chip = _chip, name
    core.limits_of_chip = None if name is None else _limited
    return former


def soc_name() -> str:
    """What `aclrtGetSocName` says."""
    return SOC_NAMES[_chip or "A2"]


def _limited(operator: str, arguments: dict[str, Any], work: Work) -> Work:
    """The work as the chip does it; a Refusal where it does not."""
    chip = str(_chip)
    if operator in _ABSENT[chip]:
        others = [name for name, absent in _ABSENT.items() if operator not in absent]
        raise Refusal(FIND_KERNEL, f"the chip must be {' or '.join(others)}; got {chip}")
    rule = _RULES.get((chip, operator))
    return work if rule is None else rule(arguments, work)


def _no_int8(arguments: dict[str, Any], work: Work) -> Work:
    if arguments["tokens"].dtype is torch.int8:
        raise wrong("tokens", f"float16, bfloat16 or float32 on {_chip}", "int8")
    return work


def _no_sqrtsoftplus(arguments: dict[str, Any], work: Work) -> Work:
    if arguments["normType"] == 2:
        raise wrong("normType", f"0 or 1 on {_chip}", 2, TILING)
    return work


def _gather_only(arguments: dict[str, Any], work: Work) -> Work:
    if arguments["idxType"] == 1:
        raise wrong("idxType", f"0 on {_chip}", 1, TILING)
    return work


def _plain_scales(arguments: dict[str, Any], work: Work) -> Work:
    scales, rows = arguments["scalesOptional"], arguments["expandedX"]
    if scales is None or scales.dtype is rows.dtype:
        return work
    if rows.dtype is not torch.bfloat16 or scales.dtype is not torch.float32:
        raise wrong(
            "scalesOptional", f"{rows.dtype}, as expandedX, or float32 beside bfloat16 on {_chip}", scales.dtype
        )
    return work


def _unpermute_grad_of_950(arguments: dict[str, Any], work: Work) -> Work:
    for name in ("permutedTokensOptional", "probsGradOut"):
        if arguments[name] is None:
            raise Refusal(PARAM_NULLPTR, f"{name} must not be null on 950")
    return work


def _softmax_of_950(arguments: dict[str, Any], work: Work) -> Work:
    if (experts := arguments["x"].shape[-1]) > core.MAX_EXPERTS:
        raise wrong("E of x", f"in 1..{core.MAX_EXPERTS} on 950", experts, TILING)
    return work


def _init_routing_of_950(arguments: dict[str, Any], work: Work) -> Work:
    slots, drop = arguments["expertIdx"].numel(), arguments["dropPadMode"] == 1
    if not drop and arguments["activeNum"] not in (-1, slots):
        raise wrong("activeNum", f"-1 or T * K = {slots} on 950", arguments["activeNum"], TILING)
    if not arguments["expertTokensNumFlag"]:
        raise wrong("expertTokensNumFlag", "true on 950", "false", TILING)
    if drop and arguments["quantMode"] != -1:
        raise wrong("quantMode with dropPadMode 1", "-1 on 950", arguments["quantMode"], TILING)
    if not arguments["activeExpertRangeOptional"]:
        raise wrong("activeExpertRangeOptional", "[s, e) on 950", arguments["activeExpertRangeOptional"], TILING)
    return work


def _softmax_of_310p(arguments: dict[str, Any], work: Work) -> Work:
    """Rows of float16, and row numbers that stay 0."""
    x = arguments["x"]
    if x.dtype is not torch.float16:
        raise wrong("x", "float16 on 310P", str(x.dtype).removeprefix("torch."))
    if arguments["finishedOptional"] is not None:
        raise wrong("finishedOptional", "null on 310P", "a tensor")
    if x.ndim != 2:
        raise wrong("x", "2-dimensional on 310P", f"shape {list(x.shape)}", TILING)
    if x.shape[1] % 16 or x.shape[1] > 256:
        raise wrong("E of x", "a multiple of 16 up to 256 on 310P", x.shape[1], TILING)

    def without_rows() -> None:
        work()
        arguments["rowIdxOut"].zero_()

    return without_rows


def _unpermute_of_310p(arguments: dict[str, Any], work: Work) -> Work:
    for name in ("permutedTokens", "probsOptional"):
        if arguments[name] is not None and arguments[name].dtype is torch.bfloat16:
            raise wrong(name, "float16 or float32 on 310P", "bfloat16")
    hidden = arguments["permutedTokens"].shape[1]
    if hidden % 128 or hidden >= 10240:
        raise wrong("H of permutedTokens", "a multiple of 128 below 10240 on 310P", hidden, TILING)
    return work


_OLDER: dict[str, Callable[[dict[str, Any], Work], Work]] = {
    "MoeTokenPermute": _no_int8,
    "MoeGatingTopK": _no_sqrtsoftplus,
    "MoeGatingTopKV2": _no_sqrtsoftplus,
    "MoeReRouting": _gather_only,
    "MoeFinalizeRoutingV3": _plain_scales,
    "MoeFinalizeRoutingV4": _plain_scales,
}
_RULES = {
    **{(chip, operator): rule for chip in ("A2", "A3") for operator, rule in _OLDER.items()},
    ("950", "MoeTokenUnpermuteGrad"): _unpermute_grad_of_950,
    ("950", "MoeGatingTopKSoftmax"): _softmax_of_950,
    ("950", "MoeInitRoutingV3"): _init_routing_of_950,
    ("310P", "MoeGatingTopKSoftmax"): _softmax_of_310p,
    ("310P", "MoeTokenUnpermute"): _unpermute_of_310p,
}

set_chip(os.environ.get("MOEROUTE_ACLNN_SOC") or None)
