"""A grouped product of quantised numbers with what follows it: SwiGLU and quantisation, or the way back to tokens."""

import torch
from torch import Tensor

from moeroute import check
from moeroute.dtypes import FLOATS
from moeroute.interop.torch_npu.activation import swiglu
from moeroute.interop.torch_npu.arguments import (
    dtype_of,
    npu_function,
    or_default,
    refused,
    unavailable,
    without_autocast,
)
from moeroute.interop.torch_npu.grouped_matmul import grouped_rows
from moeroute.interop.torch_npu.groups import ENDS, PAIRS, SIZES, Segment, segments
from moeroute.interop.torch_npu.mx import as_e8m0, floor_blocks
from moeroute.interop.torch_npu.products import (
    Products,
    carried,
    check_scale_types,
    tensors_of,
)
from moeroute.interop.torch_npu.quantization import LARGEST, factors_of, quantised
from moeroute.ops.indices.op import plan_from_token_ids
from moeroute.permutation import unpermute

_SWIGLU_NAMES = {"scale": "weight_scale", "per_token_scale": "x_scale"}
_FINALIZE_NAMES = {"weight": "w", "per_token_scale": "pertoken_scale"}


@npu_function
@torch.no_grad()
def npu_grouped_matmul_swiglu_quant(
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor,
    *,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """An int8 product of grouped rows, SwiGLU with the left half as gate, and int8 with a scale for each row.

    Args:
        x: int8 [M, K].
        weight: int8 [E, K, 2 n].
        group_list: [E] ascending ends of the groups of rows.
        weight_scale: float [E, 2 n].
        x_scale: float [M].
        bias: not available.
        offset: not available.

    Returns:
        int8 [M, n] and the scales, float32 [M], zero for rows of no group; and a scalar without meaning.
    """
    function = "npu_grouped_matmul_swiglu_quant"
    for name, value in (("bias", bias), ("offset", offset)):
        if value is not None:
            raise unavailable(function, name, "a tensor")
    check.shaped(function, "weight", weight, (None, None, None))
    rows, scale = swiglu_quantised(function, x, [weight], [weight_scale], x_scale, group_list, ENDS, torch.int8, None)
    return rows, scale, scale.new_zeros(())


@npu_function
@torch.no_grad()
def npu_grouped_matmul_swiglu_quant_v2(
    x: Tensor,
    weight: list[Tensor],
    weight_scale: list[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    *,
    smooth_scale: Tensor | None = None,
    weight_assist_matrix: list[Tensor] | None = None,
    bias: Tensor | None = None,
    dequant_mode: int | None = 0,
    dequant_dtype: int | torch.dtype | None = 0,
    quant_mode: int | None = 0,
    quant_dtype: int | torch.dtype | None = 1,
    group_list_type: int | None = 0,
    tuning_config: list[int] | None = None,
    x_dtype: int | torch.dtype | None = None,
    weight_dtype: int | torch.dtype | None = None,
    weight_scale_dtype: int | torch.dtype | None = None,
    x_scale_dtype: int | torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`npu_grouped_matmul_swiglu_quant` of int8 or float8, to int8 or float8.

    With float8_e8m0fnu scales (MX) x, weight and the result are float8 in blocks of 32 along their last axis or K, and
    the result's scales are found by OCP floor.

    Args:
        x: [M, K].
        weight: [(E, K, 2 n)] or E of [K, 2 n].
        weight_scale: [(E, 2 n)] or E of [2 n]; MX: [(E, ceil(K / 64), 2 n, 2)] or E of [ceil(K / 64), 2 n, 2].
        x_scale: [M]; MX: [M, ceil(K / 64), 2].
        group_list: [E] ends (`group_list_type` 0) or sizes (1), or [L, 2] pairs (2), of the groups of rows.
        smooth_scale: [E, n] or [E] factors of the activation; not available with MX.
        weight_assist_matrix: not available.
        bias: not available.
        dequant_mode: 0, one scale for each column; MX: 0 or 2.
        dequant_dtype: the type of the dequantised product: 0 or float32.
        quant_mode: 0, one scale for each row; MX: 0 or 2.
        quant_dtype: int8, float8_e5m2 or float8_e4m3fn.
        group_list_type: 0, 1 or 2.
        tuning_config: changes no result.
        x_dtype: the type of x, if that is carried by another.
        weight_dtype: the type of weight, likewise.
        weight_scale_dtype: the type of weight_scale; float8_e8m0fnu (293) may be carried by bytes.
        x_scale_dtype: the type of x_scale, likewise.

    Returns:
        [M, n] and the scales, float32 [M], or MX float8_e8m0fnu [M, ceil(n / 64), 2]; zero for rows of no group.
    """
    function = "npu_grouped_matmul_swiglu_quant_v2"
    dequant_mode, quant_mode = or_default(dequant_mode, 0), or_default(quant_mode, 0)
    group_list_type = or_default(group_list_type, ENDS)
    for name, value in (("weight_assist_matrix", weight_assist_matrix), ("bias", bias)):
        if value is not None:
            raise unavailable(function, name, "a tensor")
    weight_scale = tensors_of(function, "weight_scale", weight_scale)
    check.tensor(function, "x", x)
    check.tensor(function, "x_scale", x_scale)
    blocks = check_scale_types(function, weight_scale, weight_scale_dtype, [x_scale], x_scale_dtype)
    for name, mode in (("dequant_mode", dequant_mode), ("quant_mode", quant_mode)):
        if check.integer(function, name, mode, 0, 2) not in ((0, 2) if blocks else (0,)):
            raise unavailable(function, name, mode)
    if blocks and smooth_scale is not None:
        raise unavailable(function, "smooth_scale", "a tensor", "with blocks of 32")
    if dequant_dtype not in (None, 0, 6, torch.float32):
        raise unavailable(function, "dequant_dtype", dequant_dtype)
    if group_list_type not in (ENDS, SIZES, PAIRS):
        raise refused(function, "group_list_type", "0, 1 or 2", group_list_type)
    dtype = dtype_of(function, "quant_dtype", torch.int8 if quant_dtype is None else quant_dtype)
    if dtype not in tuple(LARGEST)[:3]:
        raise refused(function, "quant_dtype", "int8, float8_e5m2 or float8_e4m3fn", quant_dtype)
    (x,) = carried(function, "x_dtype", [x], x_dtype)
    weight = carried(function, "weight_dtype", tensors_of(function, "weight", weight), weight_dtype)
    return swiglu_quantised(
        function, x, weight, weight_scale, x_scale, group_list, group_list_type, dtype, smooth_scale, blocks=blocks
    )


def swiglu_quantised(
    function: str,
    x: Tensor,
    weight: list[Tensor],
    weight_scale: list[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    list_type: int,
    dtype: torch.dtype,
    smooth: Tensor | None,
    limit: float = 0.0,
    blocks: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rows and scales of both functions; a limit above 0 cuts the gate from above and the linear half on both sides."""
    values, found, num_groups = _product(
        function, x, weight, weight_scale, x_scale, group_list, list_type, _SWIGLU_NAMES, blocks=blocks
    )
    if values.shape[1] % 2:
        raise check.wrong_shape(function, "weight", "[E, K, 2 n]", weight[0])
    left, right = values.chunk(2, 1)
    if limit > 0:
        left, right = left.clamp(max=limit), right.clamp(-limit, limit)
    if blocks:
        if dtype is torch.int8:
            raise refused(function, "quant_dtype", "float8_e5m2 or float8_e4m3fn with blocks of 32", dtype)
        elements, scale = floor_blocks(swiglu(left, right), dtype)
        return elements, as_e8m0(scale)
    factors = factors_of(function, "smooth_scale", smooth, num_groups, left.shape[1])
    return quantised(
        lambda start, stop: swiglu(left[start:stop], right[start:stop]), values, found, factors, None, 1, dtype
    )


def _product(
    function: str,
    x: Tensor,
    weight: list[Tensor],
    scale: list[Tensor],
    per_token_scale: Tensor | None,
    group_list: Tensor,
    list_type: int,
    names: dict[str, str],
    bias: list[Tensor] | None = None,
    offset: list[Tensor] | None = None,
    blocks: bool = False,
) -> tuple[Tensor, list[Segment], int]:
    """The product of grouped rows in float32, the groups that there are, and their number."""
    check.shaped(function, "x", x, (None, None))
    if x.dtype in FLOATS:
        raise check.wrong_dtype(function, "x", "int8 or float8", x)
    if not weight or (len(weight) == 1 and weight[0].ndim not in (2, 3)):
        raise refused(function, "weight", "[E, K, N], or E tensors [K, N]", [list(tensor.shape) for tensor in weight])
    num_groups = weight[0].shape[0] if len(weight) == 1 and weight[0].ndim == 3 else len(weight)
    found = segments(function, "group_list", group_list, list_type, x.shape[0], num_groups)
    tokens = None if per_token_scale is None else [per_token_scale]
    products = Products(
        function,
        [x],
        weight,
        bias=bias,
        scale=scale,
        offset=offset,
        per_token_scale=tokens,
        blocks=blocks,
        names=names,
    )
    with without_autocast(x.device):
        return grouped_rows(products, found), found, num_groups


@npu_function
@torch.no_grad()
def npu_grouped_matmul_finalize_routing(
    x: Tensor,
    w: Tensor,
    group_list: Tensor,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    shared_input: Tensor | None = None,
    logit: Tensor | None = None,
    row_index: Tensor | None = None,
    dtype: int | torch.dtype | None = None,
    shared_input_weight: float | None = 1.0,
    shared_input_offset: int | None = 0,
    output_bs: int | None = 0,
    group_list_type: int | None = 1,
    tuning_config: list[int] | None = None,
    x_dtype: int | torch.dtype | None = None,
    w_dtype: int | torch.dtype | None = None,
    scale_dtype: int | torch.dtype | None = None,
    pertoken_scale_dtype: int | torch.dtype | None = None,
) -> Tensor:
    """A product of grouped rows, weighted and added up by token: out[row_index[i]] += logit[i] · y[i].

    The rows of a token are added in ascending order, in float32, the shared ones last.

    Args:
        x: int8 or float8 [M, K].
        w: [E, K, N], likewise.
        group_list: [E] sizes (`group_list_type` 1) or ends (0) of the groups of rows. Rows of no group are left out.
        scale: [E, N], as for `npu_grouped_matmul`; MX: float8_e8m0fnu [E, ceil(K / 64), N, 2].
        bias: [E, N].
        offset: [E, N].
        pertoken_scale: [M]; MX: [M, ceil(K / 64), 2].
        shared_input: [S, N] float: rows of the shared expert, for the tokens from `shared_input_offset` on.
        logit: [M] weights; None: 1.
        row_index: int32 or int64 [M], the token of each row.
        dtype: float32.
        shared_input_weight: a factor for `shared_input`.
        shared_input_offset: the first token that has one.
        output_bs: T, the number of tokens; 0: M.
        group_list_type: 0 or 1.
        tuning_config: changes no result.
        x_dtype: the type of x, if that is carried by another.
        w_dtype: the type of w, likewise.
        scale_dtype: the type of scale.
        pertoken_scale_dtype: the type of pertoken_scale.

    Returns:
        float32 [T, N].
    """
    function = "npu_grouped_matmul_finalize_routing"
    group_list_type = or_default(group_list_type, SIZES)
    check.tensor(function, "x", x)
    check.shaped(function, "w", w, (None, None, None))
    if dtype is not None and dtype_of(function, "dtype", dtype) is not torch.float32:
        raise refused(function, "dtype", "torch.float32 or None", dtype)
    if group_list_type not in (ENDS, SIZES):
        raise refused(function, "group_list_type", "0 or 1", group_list_type)
    if scale is None or row_index is None:
        raise refused(function, "scale" if scale is None else "row_index", "a tensor", None)
    tokens = None if pertoken_scale is None else [pertoken_scale]
    blocks = check_scale_types(function, [scale], scale_dtype, tokens, pertoken_scale_dtype)
    (x,), (w,) = carried(function, "x_dtype", [x], x_dtype), carried(function, "w_dtype", [w], w_dtype)
    biases, offsets = (None if value is None else [value] for value in (bias, offset))
    values, found, _ = _product(
        function, x, [w], [scale], pertoken_scale, group_list, group_list_type, _FINALIZE_NAMES, biases, offsets, blocks
    )
    num_rows = x.shape[0]
    num_tokens = check.integer(function, "output_bs", or_default(output_bs, 0), 0) or num_rows
    used = found[-1].stop if found else 0
    check.shaped(function, "row_index", row_index, (num_rows,))
    if row_index.dtype not in (torch.int32, torch.int64):
        raise check.wrong_dtype(function, "row_index", "torch.int32 or torch.int64", row_index)
    token_ids = row_index[:used]
    if used and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < num_tokens:
        raise refused(function, "row_index", f"in 0..{num_tokens - 1}", [int(token_ids.min()), int(token_ids.max())])
    if logit is not None:
        check.shaped(function, "logit", logit, (num_rows,))
        check.floating(function, "logit", logit)
        values *= logit.float()[:, None]
    out = unpermute(values[:used], plan_from_token_ids(token_ids, num_tokens))
    if shared_input is not None:
        check.shaped(function, "shared_input", shared_input, (None, values.shape[1]))
        check.floating(function, "shared_input", shared_input)
        last = num_tokens - shared_input.shape[0]
        first = check.integer(function, "shared_input_offset", or_default(shared_input_offset, 0), 0, max(last, 0))
        if last < 0:
            raise check.wrong_shape(function, "shared_input", f"of at most {num_tokens} rows", shared_input)
        out[first : first + shared_input.shape[0]] += shared_input.float() * or_default(shared_input_weight, 1.0)
    return out
