"""What holds for all operators: prototypes, nulls, dtypes, formats, layouts, outputs."""

import inspect

import pytest
import torch
from torch import Tensor

from aclnn_calls import (
    GOOD,
    INNER,
    INNER_NULL,
    INVALID,
    NULL,
    TILING,
    call_refused,
    cases,
    on_every_backend,
    outputs_of,
    poison,
    prepare,
    run,
    same,
    workspace_of,
)
from moeroute import aclnn, dispatch
from moeroute.aclnn.signatures import SIGNATURES
from moeroute.dispatch import Backend
from moeroute.testing import assert_same_bits

# ---------------------------------------------------------------------------- prototypes


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_and_order_follow_the_prototypes(name: str) -> None:
    first = getattr(aclnn, f"aclnn{name}GetWorkspaceSize")
    second = getattr(aclnn, f"aclnn{name}")
    assert tuple(inspect.signature(first).parameters) == SIGNATURES[name].names
    assert tuple(inspect.signature(second).parameters) == ("workspace", "workspace_size", "executor", "stream")
    assert first.__name__ == f"aclnn{name}GetWorkspaceSize"
    assert first.__doc__


def test_nothing_else_is_exported() -> None:
    calls = {f"aclnn{name}{end}" for name in SIGNATURES for end in ("", "GetWorkspaceSize")}
    public = {name for name in vars(aclnn) if name.startswith("acl")}
    assert public - calls == {"aclGetRecentErrMsg"}
    assert calls <= public


def test_declarations() -> None:
    signature = SIGNATURES["MoeTokenPermuteWithRoutingMapGrad"]
    assert signature.header == "aclnn_moe_token_permute_with_routing_map_grad.h"
    assert [p.declaration for p in signature.parameters] == [
        "const aclTensor *permutedTokensOutputGrad",
        "const aclTensor *permutedProbsOutputGradOptional",
        "const aclTensor *sortedIndices",
        "const aclTensor *routingMapOptional",
        "int64_t experts_num",
        "int64_t tokens_num",
        "bool dropAndPad",
        "aclTensor *tokenGradOut",
        "aclTensor *probsGradOutOptional",
    ]
    assert [p.declaration for p in SIGNATURES["MoeFusedTopk"].parameters[4:]] == [
        "uint32_t groupNum",
        "uint32_t groupTopk",
        "uint32_t topN",
        "uint32_t topK",
        "uint32_t activateType",
        "bool isNorm",
        "float scale",
        "bool enableExpertMapping",
        "aclTensor *y",
        "aclTensor *indices",
    ]


# ---------------------------------------------------------------------------- valid calls


@pytest.mark.parametrize(
    "name", ["MoeTokenPermute", "MoeTokenUnpermuteGrad", "MoeGatingTopKSoftmax", "MoeInitRoutingQuantV2"]
)
def test_the_layer_asks_the_backend_of_the_fixture(layer_backend: Backend, name: str) -> None:
    run(name, *GOOD[name]().values(), workspace=workspace_of(name))
    assert set(dispatch._chosen.values()) == {layer_backend}


def test_every_operator_has_a_valid_call() -> None:
    assert list(GOOD) == list(SIGNATURES)


@pytest.mark.parametrize("name", GOOD)
@on_every_backend
def test_valid_call_writes_every_output(subtests: pytest.Subtests, name: str) -> None:
    arguments = GOOD[name]()
    run(name, *arguments.values(), workspace=workspace_of(name))
    for output in outputs_of(name, arguments):
        with subtests.test(output):
            assert not (arguments[output].isnan() | (arguments[output] == -77)).any(), "unwritten elements"


@pytest.mark.parametrize("layout", ("rows", "columns", "transposed"))
@pytest.mark.parametrize("name", GOOD)
@on_every_backend
def test_strided_outputs_and_inputs(subtests: pytest.Subtests, name: str, layout: str) -> None:
    """Every second element of a wider buffer, or a transposed one: same result, nothing beside it touched."""
    plain = GOOD[name]()
    run(name, *plain.values(), workspace=workspace_of(name))
    strided, buffers = GOOD[name](), {}
    for key, value in strided.items():
        if isinstance(value, Tensor) and value.ndim:
            strided[key], buffers[key] = lay_out(value, layout)
    run(name, *strided.values(), workspace=workspace_of(name))
    for output in outputs_of(name, plain):
        with subtests.test(output):
            same(strided[output], plain[output])
            strided[output].fill_(0)
            buffer = buffers[output]
            left = torch.isnan(buffer) if buffer.dtype.is_floating_point else buffer == -77
            assert int(left.sum()) == buffer.numel() - strided[output].numel(), "written beside the output"


def lay_out(value: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The same values, spread over a larger poisoned buffer."""
    fill = torch.nan if value.dtype.is_floating_point else -77
    shape = list(value.shape)
    if value.dtype is torch.bool:
        return value, value
    if layout == "rows" or value.ndim == 1:
        buffer = torch.full([shape[0] * 2 + 1, *(size + 3 for size in shape[1:])], fill, dtype=value.dtype)
        view = buffer[1::2][tuple(slice(0, size) for size in shape)]
    elif layout == "columns":
        buffer = torch.full([*shape[:-1], 2 * shape[-1] + 1], fill, dtype=value.dtype)
        view = buffer[..., 1::2][..., : shape[-1]]
    else:
        buffer = torch.full([shape[-1] + 1, *shape[1:-1], shape[0] + 2], fill, dtype=value.dtype)
        view = buffer.transpose(0, -1)[tuple(slice(0, size) for size in shape)]
    view.copy_(value)
    return view, buffer


# ---------------------------------------------------------------------------- refusals


# Optional ones that the valid call makes necessary, with the code for their absence.
NEEDED = {
    ("MoeTokenUnpermuteWithRoutingMapGrad", "routingMapOptional"): TILING,
    ("MoeTokenUnpermuteWithRoutingMapGrad", "permutedTokensOptional"): TILING,
    ("MoeTokenUnpermuteWithRoutingMapGrad", "probsGradOutOptional"): NULL,
    ("MoeTokenPermuteWithRoutingMapGrad", "routingMapOptional"): NULL,
    ("MoeTokenUnpermuteGrad", "permutedTokensOptional"): NULL,
    ("MoeTokenUnpermuteGrad", "probsGradOut"): NULL,
    ("MoeTokenPermuteWithRoutingMap", "permuteProbsOutOptional"): NULL,
    ("MoeTokenUnpermuteWithRoutingMap", "permuteProbs"): NULL,
    ("MoeTokenUnpermuteWithRoutingMap", "routingMapOptional"): NULL,
    ("MoeGatingTopKV2", "inputIdsOptional"): TILING,
    ("MoeGatingTopKV2", "tid2eidOptional"): TILING,
    ("MoeGatingTopKSoftmaxV2", "softmaxResultOutOptional"): NULL,
    ("MoeFusedTopk", "mappingNum"): NULL,
    ("MoeFusedTopk", "mappingTable"): NULL,
    ("MoeTokenPermuteWithEp", "permuteProbsOut"): NULL,
    ("MoeTokenPermuteWithEpGrad", "probsGradOut"): NULL,
    ("MoeTokenUnpermuteWithEpGrad", "permutedTokensOptional"): NULL,
    ("MoeTokenUnpermuteWithEpGrad", "probsGradOut"): NULL,
    ("MoeInitRoutingV2", "expertTokensCountOrCumsumOut"): NULL,
    ("MoeInitRoutingQuantV2", "expertTokensCountOrCumsumOutOptional"): TILING,
    ("MoeInitRoutingQuantV2", "dynamicQuantScaleOutOptional"): TILING,
    ("MoeFinalizeRoutingV2", "x1Optional"): INNER_NULL,
    ("MoeFinalizeRoutingV3", "x1Optional"): TILING,
    ("MoeFinalizeRoutingV3", "expertIdxOptional"): TILING,
    ("MoeFinalizeRoutingV4", "x1Optional"): TILING,
    ("MoeFinalizeRoutingV4", "expertIdxOptional"): TILING,
    ("MoeFinalizeRoutingV2", "expertIdxOptional"): INNER_NULL,
    ("MoeFinalizeRoutingV2Grad", "expandedXOptional"): INNER_NULL,
    ("MoeFinalizeRoutingV2Grad", "expertIdxOptional"): INNER_NULL,
    ("MoeReRouting", "permutePerTokenScalesOut"): NULL,
    ("MoeUpdateExpert", "expertScalesOptional"): TILING,
    ("MoeUpdateExpert", "pruningThresholdOptional"): TILING,
}


TENSORS = [
    (name, parameter.name, parameter.kind)
    for name, signature in SIGNATURES.items()
    for parameter in signature.parameters
    if parameter.kind in ("tensor", "optional_tensor", "out", "optional_out")
]


@cases("name, argument, kind", TENSORS)
def test_nulls(name: str, argument: str, kind: str) -> None:
    code = NULL if kind in ("tensor", "out") else NEEDED.get((name, argument))
    if code is not None:
        assert argument in call_refused(name, {argument: None}, code)


@cases("name, argument, kind", TENSORS)
def test_dtypes_and_formats(subtests: pytest.Subtests, name: str, argument: str, kind: str) -> None:
    good = GOOD[name]()[argument]
    if good is None:
        return
    for dtype in (torch.float64, torch.int16):
        with subtests.test(dtype=dtype):
            code = TILING if argument == "softmaxResultOutOptional" else INVALID
            assert argument in call_refused(name, {argument: good.to(dtype)}, code)
    with subtests.test(acl_format=29):
        good.acl_format = 29
        if name == "MoeTokenPermuteWithRoutingMapGrad" or argument == "softmaxResultOutOptional":
            assert prepare(name, *(GOOD[name]() | {argument: good}).values())[0] == 0
        else:
            assert "aclFormat 29" in call_refused(name, {argument: good}, INVALID)
    for plain in (0, 2):
        with subtests.test(acl_format=plain):
            good.acl_format = plain
            assert prepare(name, *(GOOD[name]() | {argument: good}).values())[0] == 0


OUTPUT_SHAPES_561002 = (
    "MoeInitRouting",
    "MoeInitRoutingV3",
    "MoeInitRoutingQuant",
    "MoeInitRoutingQuantV2",
    "MoeFinalizeRoutingV3",
    "MoeFinalizeRoutingV4",
    "MoeTokenUnpermuteWithRoutingMapGrad",
    "MoeTokenPermute",
    "MoeTokenPermuteWithEp",
    "MoeGatingTopKSoftmax",
    "MoeGatingTopKSoftmaxV2",
    "MoeUpdateExpert",
)


@cases("name, argument, kind", [t for t in TENSORS if "out" in t[2]])
def test_wrong_output_shapes_and_memory(subtests: pytest.Subtests, name: str, argument: str, kind: str) -> None:
    arguments = GOOD[name]()
    good = arguments[argument]
    if good is None:
        return
    with subtests.test("a larger one"):
        larger = poison(*(size + 1 for size in good.shape), dtype=good.dtype)
        code = TILING if name in OUTPUT_SHAPES_561002 else INVALID
        if name == "MoeInitRoutingV2Grad":
            code = INNER_NULL
        call_refused(name, {argument: larger}, code)
    with subtests.test("elements over each other"):
        overlapping = poison(1, dtype=good.dtype).expand(good.shape)
        call_refused(name, {argument: overlapping}, INVALID)
    for other, value in arguments.items():
        if isinstance(value, Tensor) and value.dtype is good.dtype and value.shape == good.shape and other != argument:
            with subtests.test(memory_of=other):
                memory = value.clone()
                assert "memory of its own" in call_refused(name, {argument: memory, other: memory}, INVALID)


@cases("name, argument, kind", TENSORS)
def test_a_resized_tensor_is_refused_before_anything_is_written(
    subtests: pytest.Subtests, name: str, argument: str, kind: str
) -> None:
    arguments = GOOD[name]()
    if arguments[argument] is None:
        return
    executor = prepare(name, *arguments.values())[2]
    arguments[argument].resize_([size + 1 for size in arguments[argument].shape])
    before = {key: value.clone() for key, value in arguments.items() if isinstance(value, Tensor)}
    assert getattr(aclnn, f"aclnn{name}")(None, 0, executor, None) == INNER
    assert f"{argument} must be what the first phase saw" in aclnn.aclGetRecentErrMsg()
    for key, value in before.items():
        with subtests.test(key):
            assert_same_bits(arguments[key], value)
