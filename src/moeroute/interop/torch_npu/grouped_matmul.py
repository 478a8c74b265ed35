"""Grouped matrix products: which rows meet which matrix, and what comes out as one tensor or as a list.

`Products` computes each of them. Products of floats alone go to `ops.experts`, in one call for all groups. No result
requires a gradient.
"""

import math

import torch
from torch import Tensor

from moeroute import check, memory
from moeroute.dtypes import wide
from moeroute.interop.torch_npu.arguments import (
    dtype_of,
    npu_function,
    or_default,
    refused,
    unavailable,
    without_autocast,
)
from moeroute.interop.torch_npu.groups import ENDS, PAIRS, SIZES, Segment, by_group, consecutive, segments
from moeroute.interop.torch_npu.products import (
    Products,
    block_scales_unavailable,
    carried,
    check_scale_types,
    tensors_of,
)
from moeroute.ops.experts import grouped_linear, grouped_outer

ROWS, REDUCTION, LISTS = 0, 2, -1

# ---------------------------------------------------------------------------- the public functions


@npu_function
@torch.no_grad()
def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    offset: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | list[int] | None = None,
    activation_input: list[Tensor] | None = None,
    activation_quant_scale: list[Tensor] | None = None,
    activation_quant_offset: list[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: list[int] | None = None,
    output_dtype: int | torch.dtype | None = None,
    x_dtype: int | torch.dtype | None = None,
    weight_dtype: int | torch.dtype | None = None,
    scale_dtype: int | torch.dtype | None = None,
    per_token_scale_dtype: int | torch.dtype | None = None,
) -> list[Tensor]:
    """One matrix product per group: of rows (group_type 0), of parts of the summed axis (2), or of a list (-1).

    ```
    -1: y_g = x_g @ w_g          x: G of [..., K_g]           weight: G of [K_g, N_g]
     0: y[seg g] = x[seg g] @ w_g    x: [M, K] or E of [m, K]     weight: [E, K, N] or E of [K, N]
     2: y_g = x[:, seg g] @ w[seg g]    x: [M, T]                weight: [T, N] or G of [seg, N]
    ```

    Args:
        x: float, int8 or float8, of any strides.
        weight: as x; int8, or int32 with eight 4-bit numbers along the last axis, with `antiquant_scale`.
        bias: [(E, N)] or E of [N], of x's type or float32; int32 too, added to the integers, for int8.
        scale: for 8-bit numbers, [(E, N)] or E of [N], or one number for each expert, [(E,)] or [(E, 1)]. Float, or
            int64 whose low 32 bits are a float32. For float8 with MX blocks of 32 along K: float8_e8m0fnu
            [(E, ceil(K / 64), N, 2)], or E of [ceil(K / 64), N, 2]; with group_type 2, as
            `npu_grouped_dynamic_mx_quant` makes them, [(T // 64 + G, N, 2)].
        offset: as scale, added after the factors.
        antiquant_scale: for a quantised weight, of scale's shapes or [(E, S, N)] for S parts of K: the weight is
            (w + offset) · scale, rounded to x's type.
        antiquant_offset: as antiquant_scale.
        per_token_scale: for 8-bit numbers, [(M,)] or [(M, 1)], or one number for each expert, [(E,)]. With MX blocks
            [(M, ceil(K / 64), 2)], or [(M, T // 64 + G, 2)] with group_type 2.
        group_list: ends, sizes or pairs, see `group_list_type`. As a list of ints: ends, and group_type 0.
        activation_input: not available.
        activation_quant_scale: not available.
        activation_quant_offset: not available.
        split_item: 0, 1: a tensor for each group; 2, 3: one tensor.
        group_type: -1, 0 or 2.
        group_list_type: 0: ascending ends [E]; 1: sizes [E]; 2: pairs (expert, size), [L, 2].
        act_type: 0 none, 1 relu, 2 gelu by tanh, 4 x · sigmoid(1.702 x), 5 silu.
        tuning_config: changes no result.
        output_dtype: x's type where it is None; int32 for int8 is the product itself.
        x_dtype: the type of x, if that is carried by another.
        weight_dtype: the type of weight, likewise.
        scale_dtype: the type of scale; float8_e8m0fnu (293) may be carried by bytes.
        per_token_scale_dtype: the type of per_token_scale, likewise.

    Returns:
        A list: y_g for each group, or one tensor, [M, N] or [G, M, N]. Rows behind the last group are 0.
    """
    function = "npu_grouped_matmul"
    split_item, group_list_type = or_default(split_item, 0), or_default(group_list_type, ENDS)
    for name, value in (
        ("activation_input", activation_input),
        ("activation_quant_scale", activation_quant_scale),
        ("activation_quant_offset", activation_quant_offset),
    ):
        if value is not None:
            raise unavailable(function, name, "a list of tensors")
    x = carried(function, "x_dtype", tensors_of(function, "x", x), x_dtype)
    weight = carried(function, "weight_dtype", tensors_of(function, "weight", weight), weight_dtype)
    if not x or not weight:
        raise refused(function, "x and weight", "lists of tensors", "none", "neither x nor weight could be empty")
    if isinstance(group_list, list | tuple):
        if group_list_type:
            raise refused(function, "group_list_type", "0 with a list of ints", group_list_type)
        group_type = ROWS if group_list else LISTS
    if group_type is None:
        raise refused(function, "group_type", "-1, 0 or 2", None, "Requires manual passing group_type")
    if group_type not in (LISTS, ROWS, REDUCTION):
        raise refused(function, "group_type", "-1, 0 or 2", group_type, "The group type must be -1, 0 or 2")
    if split_item not in (0, 1, 2, 3):
        raise refused(function, "split_item", "0, 1, 2 or 3", split_item)
    if group_list_type not in (ENDS, SIZES, PAIRS):
        raise refused(function, "group_list_type", "0, 1 or 2", group_list_type)
    blocks = check_scale_types(function, scale, scale_dtype, per_token_scale, per_token_scale_dtype)
    products = Products(
        function,
        x,
        weight,
        bias=bias,
        scale=scale,
        offset=offset,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        per_token_scale=per_token_scale,
        act_type=or_default(act_type, 0),
        output_dtype=x[0].dtype if output_dtype is None else dtype_of(function, "output_dtype", output_dtype),
        blocks=blocks,
    )
    with without_autocast(x[0].device):
        if group_type == LISTS:
            if isinstance(group_list, Tensor):
                raise refused(function, "group_list", "None for group_type -1", "a tensor")
            return _of_lists(products, split_item)
        if group_type == ROWS:
            return _of_rows(products, group_list, group_list_type, split_item)
        return _of_reduction(products, group_list, group_list_type, split_item)


@npu_function
@torch.no_grad()
def npu_grouped_matmul_add_(
    self: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int = 0,
) -> Tensor:
    """self[g] += x[seg g].T @ weight[seg g], in place; the products are not rounded before they are added.

    Args:
        self: float32 [G, M, N] or [G M, N].
        x: [T, M] float.
        weight: [T, N] of x's type.
        group_list: [G] ends (`group_list_type` 0) or sizes (1) of the groups of T.
        transpose_x: True.
        transpose_weight: False.
        group_type: 2.
        group_list_type: 0 or 1.

    Returns:
        self.
    """
    function = "npu_grouped_matmul_add_"
    for name, value, wanted in (
        ("transpose_x", transpose_x, True),
        ("transpose_weight", transpose_weight, False),
        ("group_type", group_type, 2),
    ):
        if value != wanted:
            raise refused(function, name, str(wanted), value)
    if group_list_type not in (ENDS, SIZES):
        raise refused(function, "group_list_type", "0 or 1", group_list_type)
    check.shaped(function, "x", x, (None, None))
    check.floating(function, "x", x)
    check.shaped(function, "weight", weight, (x.shape[0], None))
    if weight.dtype != x.dtype:
        raise check.wrong_dtype(function, "weight", f"{x.dtype}, as x", weight)
    found = segments(function, "group_list", group_list, group_list_type, x.shape[0])
    shape = (len(found), x.shape[1], weight.shape[1])
    check.tensor(function, "self", self)
    if tuple(self.shape) not in (shape, (shape[0] * shape[1], shape[2])):
        raise check.wrong_shape(function, "self", f"{list(shape)} or [{shape[0] * shape[1]}, {shape[2]}]", self)
    if self.dtype != wide(x):
        raise check.wrong_dtype(function, "self", str(wide(x)), self)
    parts = self if self.ndim == 3 else self.unflatten(0, shape[:2])
    with without_autocast(x.device):
        for group, start, stop in found:
            if stop > start:
                left, right = x[start:stop].to(self.dtype), weight[start:stop].to(self.dtype)
                parts[group].addmm_(left.t(), right)
    return self


@npu_function
@torch.no_grad()
def npu_grouped_matmul_add(
    self: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int = 0,
) -> Tensor:
    """`npu_grouped_matmul_add_` as a new tensor: nothing is written into `self`."""
    return npu_grouped_matmul_add_(
        self.clone(),
        x,
        weight,
        group_list,
        transpose_x=transpose_x,
        transpose_weight=transpose_weight,
        group_type=group_type,
        group_list_type=group_list_type,
    )


# ---------------------------------------------------------------------------- the three kinds of groups


def grouped_rows(products: Products, found: list[Segment]) -> Tensor:
    """[M, N]: the products of the rows of x, one [M, K] or a tensor for each group; those of no group are 0."""
    x, weight = products.x, products.weight
    matrices = _matrices(products)
    width = products.width(weight[0])
    if any(products.width(matrix) != width for matrix in matrices):
        wanted = "of one width N for one result"
        raise refused(
            products.function, products.name("weight"), wanted, [products.width(matrix) for matrix in matrices]
        )
    in_order = [segment.group for segment in found] == list(range(len(matrices)))
    if products.plain and weight[0].ndim == 3 and len(x) == 1 and matrices and in_order:
        sizes = torch.tensor([stop - start for _, start, stop in found], dtype=torch.int64, device=x[0].device)
        return grouped_linear(x[0], weight[0].transpose(1, 2), sizes, products.stacked_bias())
    out = memory.empty((sum(tensor.shape[0] for tensor in x), width), products.dtype, x[0].device)
    last = 0
    for group, start, stop in found:
        if stop > start:
            rows = x[0][start:stop] if len(x) == 1 else x[group]
            products.write(group, rows, matrices[group], slice(start, stop), out[start:stop])
        last = stop
    out[last:] = 0
    return out


def _of_lists(products: Products, split_item: int) -> list[Tensor]:
    function, x, weight = products.function, products.x, products.weight
    if split_item not in (0, 1):
        raise refused(function, "split_item", "0 or 1 for group_type -1", split_item)
    if len(x) != len(weight):
        raise refused(function, "weight", f"{len(x)} tensors, as x", len(weight))
    for number, (tensor, matrix) in enumerate(zip(x, weight, strict=True)):
        check.shaped(function, f"weight[{number}]", matrix, (None, None))
        if not 2 <= tensor.ndim <= 6 or tensor.shape[-1] != matrix.shape[0]:
            wanted = f"[..., K] of 2 to 6 axes with K = {matrix.shape[0]}, as its weight"
            raise check.wrong_shape(function, f"x[{number}]", wanted, tensor)
    rows = [tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1]) for tensor in x]
    sizes = [len(matrix) for matrix in rows]
    products.sort_parameters([products.width(matrix) for matrix in weight], sizes)
    results = []
    for group, start, stop in consecutive(sizes):
        out = memory.empty((stop - start, products.width(weight[group])), products.dtype, x[0].device)
        products.write(group, rows[group], weight[group], slice(start, stop), out)
        results.append(out.view(*x[group].shape[:-1], out.shape[1]))
    return results


def _of_rows(
    products: Products, group_list: Tensor | list[int] | None, list_type: int, split_item: int
) -> list[Tensor]:
    function, x, weight = products.function, products.x, products.weight
    stacked = len(weight) == 1 and weight[0].ndim == 3
    num_groups = weight[0].shape[0] if stacked else len(weight)
    if split_item in (0, 1) and (stacked or len(x) > 1):
        raise refused(function, "split_item", "2 or 3 for one weight [E, K, N] or several x", split_item)
    for number, tensor in enumerate(x):
        check.shaped(function, f"x[{number}]", tensor, (None, x[0].shape[-1]))
    if len(x) != num_groups and (len(x) > 1 or group_list is None):
        raise refused(function, "x", f"one tensor with a group_list, or {num_groups}, as the weight", len(x))
    sizes = [tensor.shape[0] for tensor in x]
    found = consecutive(sizes)
    if group_list is not None:
        listed = segments(function, "group_list", group_list, list_type, sum(sizes), num_groups)
        if len(x) > 1 and by_group(listed, num_groups) != by_group(found, num_groups):
            raise refused(function, "group_list", f"of the rows of x, {sizes}", group_list)
        found = listed
    if split_item in (2, 3):
        return [grouped_rows(products, found)]
    matrices = _matrices(products)
    results = []
    for group, start, stop in by_group(found, num_groups):
        out = memory.empty((stop - start, products.width(matrices[group])), products.dtype, x[0].device)
        products.write(group, x[0][start:stop], matrices[group], slice(start, stop), out)
        results.append(out)
    return results


def _of_reduction(
    products: Products, group_list: Tensor | list[int] | None, list_type: int, split_item: int
) -> list[Tensor]:
    function, x, weight = products.function, products.x, products.weight
    if len(x) != 1:
        raise refused(function, "x", "one tensor for group_type 2", len(x))
    check.shaped(function, "x[0]", x[0], (None, None))
    num_rows, total = x[0].shape
    products.refuse_for_reduction()
    separate = split_item in (0, 1)
    for number, matrix in enumerate(weight):
        check.shaped(function, f"weight[{number}]", matrix, (None if separate else total, None))
    sizes = [matrix.shape[0] for matrix in weight]
    if separate:
        found = consecutive(sizes)
        if sum(sizes) > total:
            raise check.wrong_shape(function, "x[0]", f"[M, T] with T of at least {sum(sizes)}, as weight", x[0])
        if group_list is not None:
            listed = segments(function, "group_list", group_list, list_type, total, len(weight))
            if by_group(listed, len(weight)) != by_group(found, len(weight)):
                raise refused(function, "group_list", f"of the rows of weight, {sizes}", group_list)
    elif len(weight) > 1 or group_list is None:
        raise refused(function, "weight", "one tensor, with a group_list, for split_item 2 or 3", len(weight))
    else:
        found = segments(function, "group_list", group_list, list_type, total)
    in_order = by_group(found, len(found))
    widths = [products.width(weight[group if separate else 0]) for group, _, _ in in_order]
    if products.kind == "MX":
        if separate or list_type == PAIRS:
            raise block_scales_unavailable(function, "with group_type 2 and several weights or pairs")
        products.sort_block_parts(found)
    else:
        products.sort_parameters(widths, [num_rows], or_of_groups=True)
    if products.plain and not separate and list_type != PAIRS:
        counts = torch.tensor([stop - start for _, start, stop in found], dtype=torch.int64, device=x[0].device)
        return [grouped_outer(x[0].t(), weight[0], counts)]
    stack = None
    if not separate:
        stack = memory.empty((len(found), num_rows, weight[0].shape[1]), products.dtype, x[0].device)
    results = []
    for group, start, stop in in_order:
        out = memory.empty((num_rows, widths[group]), products.dtype, x[0].device) if stack is None else stack[group]
        if stop > start:
            matrix = weight[group] if separate else weight[0][start:stop]
            products.write(group, x[0][:, start:stop], matrix, slice(0, num_rows), out)
        else:
            out.fill_(0)
        results.append(out)
    return results if stack is None else [stack]


def _matrices(products: Products) -> list[Tensor]:
    """The matrix of each group of rows, checked; the parameters are sorted by them."""
    x, weight = products.x, products.weight
    matrices = list(weight[0].unbind(0)) if len(weight) == 1 and weight[0].ndim == 3 else weight
    for number, matrix in enumerate(matrices):
        check.shaped(products.function, f"{products.name('weight')}[{number}]", matrix, (x[0].shape[-1], None))
    widths = [products.width(matrix) for matrix in matrices]
    products.sort_parameters(widths, [tensor.shape[0] for tensor in x], or_of_groups=True)
    return matrices
