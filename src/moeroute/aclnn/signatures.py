"""The C prototypes, once: the Python calls, the headers and the library's glue all follow this table.

Left out of every entry, because every operator has them: the two last parameters of the first phase
(uint64_t *workspaceSize, aclOpExecutor **executor) and the whole second phase.
"""

from dataclasses import dataclass

KINDS = {
    "tensor": "aclTensor *",
    "optional_tensor": "aclTensor *",
    "out": "aclTensor *",
    "optional_out": "aclTensor *",
    "int": "int64_t ",
    "uint32": "uint32_t ",
    "float": "float ",
    "bool": "bool ",
    "double": "double ",
    "optional_int_array": "const aclIntArray *",
}


@dataclass(frozen=True)
class Parameter:
    """One parameter. `const`: a tensor declared const aclTensor * (inputs are; outputs as upstream has them)."""

    name: str
    kind: str
    const: bool = False

    @property
    def declaration(self) -> str:
        """The parameter in C, ``const aclTensor *out``."""
        return f"{'const ' if self.const else ''}{KINDS[self.kind]}{self.name}"


@dataclass(frozen=True)
class Signature:
    """The first phase of an operator: the file that declares it and its parameters in order."""

    header: str
    parameters: tuple[Parameter, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)


_WORDS = {
    "in": ("tensor", True),
    "in?": ("optional_tensor", True),
    "out": ("out", False),
    "out?": ("optional_out", False),
    "const-out": ("out", True),
    "const-out?": ("optional_out", True),
    "int": ("int", False),
    "uint32": ("uint32", False),
    "float": ("float", False),
    "bool": ("bool", False),
    "double": ("double", False),
    "ints?": ("optional_int_array", False),
}


def _signature(header: str, *lines: str) -> Signature:
    """Each line: a kind, a colon, the names of that kind that stand in a row."""
    parameters = []
    for line in lines:
        word, names = line.split(":")
        kind, const = _WORDS[word]
        parameters += [Parameter(name, kind, const) for name in names.split()]
    return Signature(f"aclnn_{header}.h", tuple(parameters))


SIGNATURES: dict[str, Signature] = {
    "MoeTokenPermuteGrad": _signature(
        "moe_token_permute_grad",
        "in: permutedOutputGrad sortedIndices",
        "int: numTopk",
        "bool: paddedMode",
        "out: out",
    ),
    "MoeGatingTopKBackward": _signature(
        "moe_gating_top_k_backward",
        "in: xNorm gradY expertIdx",
        "int: renorm normType",
        "double: routedScalingFactor eps",
        "const-out: out",
    ),
    "MoeTokenUnpermuteWithRoutingMapGrad": _signature(
        "moe_token_unpermute_with_routing_map_grad",
        "in: unpermutedTokensGrad outIndex permuteTokenId",
        "in?: routingMapOptional permutedTokensOptional probsOptional",
        "bool: dropAndPad",
        "ints?: restoreShapeOptional",
        "const-out: permutedTokensGradOut",
        "const-out?: probsGradOutOptional",
    ),
    "MoeTokenPermuteWithRoutingMapGrad": _signature(
        "moe_token_permute_with_routing_map_grad",
        "in: permutedTokensOutputGrad",
        "in?: permutedProbsOutputGradOptional",
        "in: sortedIndices",
        "in?: routingMapOptional",
        "int: experts_num tokens_num",
        "bool: dropAndPad",
        "out: tokenGradOut",
        "out?: probsGradOutOptional",
    ),
    "MoeTokenPermute": _signature(
        "moe_token_permute",
        "in: tokens indices",
        "int: numOutTokens",
        "bool: paddedMode",
        "const-out: permuteTokensOut sortedIndicesOut",
    ),
    "MoeTokenUnpermute": _signature(
        "moe_token_unpermute",
        "in: permutedTokens sortedIndices",
        "in?: probsOptional",
        "bool: paddedMode",
        "ints?: restoreShapeOptional",
        "out: out",
    ),
    "MoeTokenUnpermuteGrad": _signature(
        "moe_token_unpermute_grad",
        "in?: permutedTokensOptional",
        "in: unpermutedTokensGrad sortedIndices",
        "in?: probsOptional",
        "bool: paddedMode",
        "ints?: restoreShapeOptional",
        "out: permutedTokensGradOut",
        "out?: probsGradOut",
    ),
    "MoeTokenPermuteWithRoutingMap": _signature(
        "moe_token_permute_with_routing_map",
        "in: tokens routingMap",
        "in?: probsOptional",
        "int: numOutTokens",
        "bool: dropAndPad",
        "out: permuteTokensOut",
        "out?: permuteProbsOutOptional",
        "out: sortedIndicesOut",
    ),
    "MoeTokenUnpermuteWithRoutingMap": _signature(
        "moe_token_unpermute_with_routing_map",
        "in: permutedTokens sortedIndices",
        "in?: routingMapOptional probsOptional",
        "bool: paddedMode",
        "ints?: restoreShapeOptional",
        "out: unpermutedTokens outIndex permuteTokenId",
        "out?: permuteProbs",
    ),
    "MoeGatingTopK": _signature(
        "moe_gating_top_k",
        "in: x",
        "in?: biasOptional",
        "int: k kGroup groupCount groupSelectMode renorm normType",
        "bool: outFlag",
        "double: routedScalingFactor eps",
        "const-out: yOut expertIdxOut outOut",
    ),
    "MoeGatingTopKV2": _signature(
        "moe_gating_top_k_v2",
        "in: x",
        "in?: biasOptional inputIdsOptional tid2eidOptional",
        "int: k kGroup groupCount groupSelectMode renorm normType",
        "bool: outFlag",
        "double: routedScalingFactor eps",
        "const-out: yOut expertIdxOut outOut",
    ),
    "MoeGatingTopKSoftmax": _signature(
        "moe_gating_top_k_softmax",
        "in: x",
        "in?: finishedOptional",
        "int: k",
        "const-out: yOut expertIdxOut rowIdxOut",
    ),
    "MoeGatingTopKSoftmaxV2": _signature(
        "moe_gating_top_k_softmax_v2",
        "in: x",
        "in?: finishedOptional",
        "int: k renorm",
        "bool: outputSoftmaxResultFlag",
        "const-out: yOut expertIdxOut",
        "const-out?: softmaxResultOutOptional",
    ),
    "MoeFusedTopk": _signature(
        "moe_fused_topk",
        "in: x addNum",
        "in?: mappingNum mappingTable",
        "uint32: groupNum groupTopk topN topK activateType",
        "bool: isNorm",
        "float: scale",
        "bool: enableExpertMapping",
        "out: y indices",
    ),
    "MoeTokenPermuteWithEp": _signature(
        "moe_token_permute_with_ep",
        "in: tokens indices",
        "in?: probsOptional",
        "ints?: rangeOptional",
        "int: numOutTokens",
        "bool: paddedMode",
        "const-out: permuteTokensOut sortedIndicesOut",
        "const-out?: permuteProbsOut",
    ),
    "MoeTokenPermuteWithEpGrad": _signature(
        "moe_token_permute_with_ep_grad",
        "in: permutedTokensOutputGrad sortedIndices",
        "in?: permutedProbsOutputGradOptional",
        "int: numTopk",
        "ints?: rangeOptional",
        "bool: paddedMode",
        "const-out: tokenGradOut",
        "const-out?: probsGradOut",
    ),
    "MoeTokenUnpermuteWithEp": _signature(
        "moe_token_unpermute_with_ep",
        "in: permutedTokens sortedIndices",
        "in?: probsOptional",
        "int: numTopk",
        "ints?: rangeOptional",
        "bool: paddedMode",
        "ints?: restoreShapeOptional",
        "const-out: out",
    ),
    "MoeTokenUnpermuteWithEpGrad": _signature(
        "moe_token_unpermute_with_ep_grad",
        "in: unpermutedTokensGrad sortedIndices",
        "in?: permutedTokensOptional probsOptional",
        "bool: paddedMode",
        "ints?: restoreShapeOptional rangeOptional",
        "int: topkNum",
        "const-out: permutedTokensGradOut",
        "const-out?: probsGradOut",
    ),
    "MoeInitRouting": _signature(
        "moe_init_routing",
        "in: x rowIdx expertIdx",
        "int: activeNum",
        "const-out: expandedXOut expandedRowIdxOut expandedExpertIdxOut",
    ),
    "MoeInitRoutingV2": _signature(
        "moe_init_routing_v2",
        "in: x expertIdx",
        "int: activeNum expertCapacity expertNum dropPadMode expertTokensCountOrCumsumFlag",
        "bool: expertTokensBeforeCapacityFlag",
        "const-out: expandedXOut expandedRowIdxOut",
        "const-out?: expertTokensCountOrCumsumOut expertTokensBeforeCapacityOut",
    ),
    "MoeInitRoutingV3": _signature(
        "moe_init_routing_v3",
        "in: x expertIdx",
        "in?: scaleOptional offsetOptional",
        "int: activeNum expertCapacity expertNum dropPadMode expertTokensNumType",
        "bool: expertTokensNumFlag",
        "int: quantMode",
        "ints?: activeExpertRangeOptional",
        "int: rowIdxType",
        "const-out: expandedXOut expandedRowIdxOut expertTokensCountOrCumsumOut expandedScaleOut",
    ),
    "MoeInitRoutingQuant": _signature(
        "moe_init_routing_quant",
        "in: x rowIdx expertIdx",
        "int: activeNum",
        "double: scale offset",
        "const-out: expandedXOut expandedRowIdxOut expandedExpertIdxOut",
    ),
    "MoeInitRoutingQuantV2": _signature(
        "moe_init_routing_quant_v2",
        "in: x expertIdx",
        "in?: scaleOptional offsetOptional",
        "int: activeNum expertCapacity expertNum dropPadMode expertTokensCountOrCumsumFlag",
        "bool: expertTokensBeforeCapacityFlag",
        "int: quantMode",
        "const-out: expandedXOut expandedRowIdxOut",
        "const-out?: expertTokensCountOrCumsumOutOptional expertTokensBeforeCapacityOutOptional",
        "const-out?: dynamicQuantScaleOutOptional",
    ),
    "MoeInitRoutingV2Grad": _signature(
        "moe_init_routing_v2_grad",
        "in: gradExpandedX expandedRowIdx",
        "int: topK dropPadMode activeNum",
        "const-out: out",
    ),
    "MoeFinalizeRouting": _signature(
        "moe_finalize_routing",
        "in: expandedX x1",
        "in?: x2Optional",
        "in: bias scales expandedRowIdx expandedExpertIdx",
        "const-out: out",
    ),
    "MoeFinalizeRoutingV2": _signature(
        "moe_finalize_routing_v2",
        "in: expandedX expandedRowIdx",
        "in?: x1Optional x2Optional biasOptional scalesOptional expertIdxOptional",
        "int: dropPadMode",
        "const-out: out",
    ),
    "MoeFinalizeRoutingV3": _signature(
        "moe_finalize_routing_v3",
        "in: expandedX expandedRowIdx",
        "in?: x1Optional x2Optional biasOptional scalesOptional expertIdxOptional",
        "in?: xOptional alpha1Optional alpha2Optional vOptional",
        "int: dropPadMode",
        "ints?: zeroExpertRange copyExpertRange constantExpertRange",
        "const-out: out",
    ),
    "MoeFinalizeRoutingV4": _signature(
        "moe_finalize_routing_v4",
        "in: expandedX expandedRowIdx",
        "in?: x1Optional x2Optional biasOptional scalesOptional expertIdxOptional",
        "in?: xOptional alpha1Optional alpha2Optional vOptional",
        "int: dropPadMode",
        "ints?: zeroExpertRange copyExpertRange constantExpertRange",
        "int: k",
        "const-out: out",
    ),
    "MoeFinalizeRoutingV2Grad": _signature(
        "moe_finalize_routing_v2_grad",
        "in: gradY expandedRowIdx",
        "in?: expandedXOptional scalesOptional expertIdxOptional biasOptional",
        "int: dropPadMode activeNum expertNum expertCapacity",
        "const-out: gradExpandedXOut gradScalesOut",
    ),
    "MoeComputeExpertTokens": _signature(
        "moe_compute_expert_tokens",
        "in: sortedExperts",
        "int: numExperts",
        "const-out: out",
    ),
    "MoeUpdateExpert": _signature(
        "moe_update_expert",
        "in: expertIds eplbTable",
        "in?: expertScalesOptional pruningThresholdOptional activeMaskOptional",
        "int: localRankId worldSize balanceMode",
        "out: balancedExpertIds balancedActiveMask",
    ),
    "MoeReRouting": _signature(
        "moe_re_routing",
        "in: tokens expertTokenNumPerRank",
        "in?: perTokenScalesOptional",
        "int: expertTokenNumType idxType",
        "const-out: permuteTokensOut",
        "const-out?: permutePerTokenScalesOut",
        "const-out: permuteTokenIdxOut expertTokenNumOut",
    ),
}
