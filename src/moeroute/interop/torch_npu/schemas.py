"""The functions as operators of torch: `torch.ops.npu.<name>`, with schemas read from their annotations."""

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moeroute.interop.torch_npu.arguments import FUNCTIONS, unavailable
from moeroute.interop.torch_npu.gating import npu_moe_gating_top_k
from moeroute.interop.torch_npu.groups import ENDS
from moeroute.interop.torch_npu.quantized_products import npu_grouped_matmul_swiglu_quant_v2, swiglu_quantised
from moeroute.ops.register import publish

_PLAIN = {Tensor: "Tensor", int: "int", float: "float", bool: "bool", str: "str"}
_LISTS = {Tensor: "Tensor[]", int: "int[]", float: "float[]"}


def schemas_of(function: Callable[..., Any]) -> dict[str, str]:
    """The schemas of a function by the names of their overloads: "" alone, or with "List" for a list of ints.

    >>> from moeroute.interop.torch_npu.arguments import FUNCTIONS
    >>> schemas_of(FUNCTIONS["npu_swiglu"])
    {'': 'npu_swiglu(Tensor self, int dim=-1) -> Tensor'}
    """
    hints = typing.get_type_hints(function)
    signature = inspect.signature(function)
    in_place = function.__name__.endswith("_")
    found = {}
    for overload in ("", "List"):
        arguments, differs, star = [], False, False
        for number, parameter in enumerate(signature.parameters.values()):
            kinds = _kinds(hints[parameter.name])
            differs |= len(kinds) > 1
            kind = kinds[-1 if overload else 0]
            if in_place and not number:
                kind = kind.replace("Tensor", "Tensor(a!)")
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not star:
                arguments.append("*")
                star = True
            default = "" if parameter.default is inspect.Parameter.empty else f"={_default(parameter.default)}"
            arguments.append(f"{kind} {parameter.name}{default}")
        if overload and not differs:
            break
        name = f"{function.__name__}.{overload}" if overload else function.__name__
        result = "Tensor(a!)" if in_place else _result(hints["return"])
        found[overload] = f"{name}({', '.join(arguments)}) -> {result}"
    return found


def _kinds(hint: Any) -> list[str]:
    """The kinds that an annotation stands for: two where it is a tensor or a list of ints."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    optional = "?" if type(None) in members else ""
    members = tuple(member for member in members if member not in (type(None), torch.dtype))
    return [f"{_kind(member)}{optional}" for member in members]


def _kind(hint: Any) -> str:
    return _LISTS[typing.get_args(hint)[0]] if typing.get_origin(hint) is list else _PLAIN[hint]


def _result(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return f"({', '.join(_kinds(member)[0].rstrip('?') for member in typing.get_args(hint))})"
    return _kinds(hint)[0].rstrip("?")


def _default(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


# ---------------------------------------------------------------------------- vllm-ascend's own names


def _moe_gating_top_k(
    x: Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`npu_moe_gating_top_k` with its arguments in another order."""
    return npu_moe_gating_top_k(
        x,
        k,
        bias=bias_opt,
        k_group=k_group,
        group_count=group_count,
        group_select_mode=group_select_mode,
        renorm=renorm,
        norm_type=norm_type,
        out_flag=out_flag,
        routed_scaling_factor=routed_scaling_factor,
        eps=eps,
    )


def _grouped_matmul_swiglu_quant_weight_nz_tensor_list(
    x: Tensor,
    weight: list[Tensor],
    weight_scale: list[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    *,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
    swiglu_limit: float = -1000000.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`npu_grouped_matmul_swiglu_quant` of weights in a list, with a limit for the halves of SwiGLU."""
    function = "grouped_matmul_swiglu_quant_weight_nz"
    for name, value in (("bias", bias), ("offset", offset)):
        if value is not None:
            raise unavailable(function, name, "a tensor")
    with torch.no_grad():
        rows, scale = swiglu_quantised(
            function, x, weight, weight_scale, x_scale, group_list, ENDS, torch.int8, None, swiglu_limit
        )
    return rows, scale, scale.new_zeros(())


def _grouped_matmul_swiglu_quant_weight_nz(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor,
    group_list: Tensor,
    *,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
    swiglu_limit: float = -1000000.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of one weight [E, K, 2 n]."""
    return _grouped_matmul_swiglu_quant_weight_nz_tensor_list(
        x, [weight], [weight_scale], x_scale, group_list, bias=bias, offset=offset, swiglu_limit=swiglu_limit
    )


def _grouped_matmul_swiglu_quant_v2(
    x: Tensor,
    weight: list[Tensor],
    weight_scale: list[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    *,
    smooth_scale: Tensor | None = None,
    weight_assist_matrix: list[Tensor] | None = None,
    dequant_mode: int = 0,
    quant_mode: int = 0,
    group_list_type: int = 0,
    swiglu_limit: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`npu_grouped_matmul_swiglu_quant_v2` to int8, with a limit for the halves of SwiGLU."""
    if swiglu_limit <= 0 or weight_assist_matrix is not None or dequant_mode or quant_mode:
        return npu_grouped_matmul_swiglu_quant_v2(
            x,
            weight,
            weight_scale,
            x_scale,
            group_list,
            smooth_scale=smooth_scale,
            weight_assist_matrix=weight_assist_matrix,
            dequant_mode=dequant_mode,
            quant_mode=quant_mode,
            group_list_type=group_list_type,
        )
    function = "grouped_matmul_swiglu_quant_v2"
    options = (group_list, group_list_type, torch.int8, smooth_scale, swiglu_limit)
    with torch.no_grad():
        return swiglu_quantised(function, x, weight, weight_scale, x_scale, *options)


_OWN = (
    _moe_gating_top_k,
    _grouped_matmul_swiglu_quant_v2,
    _grouped_matmul_swiglu_quant_weight_nz,
    _grouped_matmul_swiglu_quant_weight_nz_tensor_list,
)
_ALIASES = {
    "moe_gating_top_k_hash": "npu_moe_gating_top_k",
    "npu_moe_init_routing_custom": "npu_moe_init_routing_v2",
    "npu_dequant_swiglu_quant": "npu_dequant_swiglu_quant",
}


def publish_all() -> None:
    """Define every function in torch.ops.npu, and those of vllm-ascend in torch.ops._C_ascend; once a process."""
    for function in FUNCTIONS.values():
        for schema in schemas_of(function).values():
            publish("npu", schema, function)
    for function in _OWN:
        (schema,) = schemas_of(function).values()
        publish("_C_ascend", schema.removeprefix("_"), function)
    for alias, name in _ALIASES.items():
        schema = schemas_of(FUNCTIONS[name])[""]
        publish("_C_ascend", schema.replace(name, alias, 1), FUNCTIONS[name])
