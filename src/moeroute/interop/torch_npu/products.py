"""One product of a grouped one: its types, its scales, what is added, and the one rounding at its end.

float        x @ w + bias                                    x, w of one type
weight-only  x @ round((w + antiquant_offset) · antiquant_scale) + bias     w int8, or int4 in int32
integer      (x @ w + int32 bias) · scale · per_token_scale + offset + bias    x, w int8: the product is exact
float8       the same, the product in float32
MX           x @ w + bias    x, w float8 with a power of two for each block of 32 along K
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moeroute import check
from moeroute.dtypes import FLOATS, wide
from moeroute.interop.torch_npu.arguments import FLOAT8_E8M0FNU, INT4, dtype_of, refused, unavailable
from moeroute.interop.torch_npu.groups import Segment
from moeroute.interop.torch_npu.mx import scaled_product
from moeroute.interop.torch_npu.quantization import rounded, unpacked

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BLOCK_SCALE = torch.float8_e8m0fnu
_LONGEST = 2**31 // 128**2 - 1  # sums of so many products of int8 fit into an int32
_NIBBLES = 8
_ACTIVATIONS: dict[int, Callable[[Tensor], Tensor] | None] = {
    0: None,
    1: F.relu,
    2: lambda values: F.gelu(values, approximate="tanh"),
    4: lambda values: values * torch.sigmoid(1.702 * values),
    5: F.silu,
}

# ---------------------------------------------------------------------------- lists of tensors


def tensors_of(function: str, argument: str, value: Any) -> list[Tensor]:
    """A list of dense tensors."""
    if not isinstance(value, list | tuple):
        raise refused(function, argument, "a list of tensors", type(value).__name__)
    return [check.tensor(function, f"{argument}[{number}]", tensor) for number, tensor in enumerate(value)]


def carried(function: str, argument: str, tensors: list[Tensor], value: int | torch.dtype | None) -> list[Tensor]:
    """The tensors in the type that they carry: float8 may come as bytes, 4-bit numbers come as int32."""
    if value is None or (value == INT4 and all(tensor.dtype is torch.int32 for tensor in tensors)):
        return tensors
    dtype = dtype_of(function, argument, value)
    bytes_of_float8 = (torch.uint8, torch.int8) if dtype in _FLOAT8 else ()
    if any(tensor.dtype not in (dtype, *bytes_of_float8) for tensor in tensors):
        raise refused(function, argument, f"the type of the tensors, {tensors[0].dtype}", value)
    return [tensor.view(dtype) for tensor in tensors]


def check_scale_types(
    function: str,
    scale: list[Tensor] | None,
    scale_dtype: int | torch.dtype | None,
    per_token_scale: list[Tensor] | None,
    per_token_scale_dtype: int | torch.dtype | None,
) -> bool:
    """The types that are named are those of the scales, or bytes carry them; whether the scales are of MX blocks."""
    blocks = []
    for argument, scales, value in (
        ("scale_dtype", scale, scale_dtype),
        ("per_token_scale_dtype", per_token_scale, per_token_scale_dtype),
    ):
        types = {scale.dtype for scale in scales or ()}
        named = None if value is None else dtype_of(function, argument, value)
        blocks.append(_BLOCK_SCALE in {*types, named})
        bytes_of_scales = {torch.uint8, torch.int8} if named is _BLOCK_SCALE else set()
        if named is not None and types - {named, *bytes_of_scales}:
            raise refused(function, argument, f"the type of the scales, {', '.join(map(str, types))}", value)
    return any(blocks)


def block_scales_unavailable(function: str, what: str) -> NotImplementedError:
    """Where blocks of 32 elements with a power of two each (MX) are not built."""
    return unavailable(function, "scale_dtype", FLOAT8_E8M0FNU, f"float8_e8m0fnu, {what}")


# ---------------------------------------------------------------------------- products


class Products:
    """The types and parameters of the products of one call.

    Args:
        function: for errors.
        x: tensors of one type.
        weight: tensors of one type.
        bias: see the head of this file, as are the other parameters; None is none.
        scale: float, or int64 with a float32 in the low half.
        offset: as scale.
        antiquant_scale: float.
        antiquant_offset: float.
        per_token_scale: float.
        act_type: the number of an activation.
        output_dtype: of the results.
        blocks: whether the scales are of MX blocks: scale [P, N, 2] of each matrix and per_token_scale [m, P, 2] of
            each tensor of rows, with P = ceil(K / 64), or those of `sort_block_parts`.
        names: what the function calls its weight, scale and per_token_scale, for errors.
    """

    def __init__(
        self,
        function: str,
        x: list[Tensor],
        weight: list[Tensor],
        *,
        bias: list[Tensor] | None = None,
        scale: list[Tensor] | None = None,
        offset: list[Tensor] | None = None,
        antiquant_scale: list[Tensor] | None = None,
        antiquant_offset: list[Tensor] | None = None,
        per_token_scale: list[Tensor] | None = None,
        act_type: int = 0,
        output_dtype: torch.dtype = torch.float32,
        blocks: bool = False,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.function, self.x, self.weight, self.dtype = function, x, weight, output_dtype
        self._names = names
        self._given = {
            name: None if value is None else tensors_of(function, name, value)
            for name, value in (
                ("bias", bias),
                ("scale", scale),
                ("offset", offset),
                ("antiquant_scale", antiquant_scale),
                ("antiquant_offset", antiquant_offset),
                ("per_token_scale", per_token_scale),
            )
        }
        self._token_scale: Tensor | None = None
        self._group_scale: Tensor | None = None
        self.kind = self._kind_of()
        if blocks and self.kind != "float8":
            raise block_scales_unavailable(function, f"with {x[0].dtype}")
        self.kind = "MX" if blocks else self.kind
        self._check_types()
        if act_type not in _ACTIVATIONS:
            raise refused(function, "act_type", "0, 1, 2, 4 or 5", act_type)
        self._activation = _ACTIVATIONS[act_type]
        same = all(tensor.dtype is self.dtype for tensor in (*x, *(self._given["bias"] or ())))
        self._one_rounding = self.kind in ("float", "weight-only") and same and self._activation is None
        self.plain = self._one_rounding and self.kind == "float"
        """Whether a product of floats of one type, with a bias perhaps, is all that there is to do."""

    def _kind_of(self) -> str:
        for name, tensors in (("x", self.x), ("weight", self.weight)):
            if any(tensor.dtype is not tensors[0].dtype for tensor in tensors):
                raise refused(self.function, name, "tensors of one type", [tensor.dtype for tensor in tensors])
        x, weight = self.x[0].dtype, self.weight[0].dtype
        if x is torch.int8 and weight is torch.int8:
            return "integer"
        if x in _FLOAT8 and weight in _FLOAT8:
            return "float8"
        if x in FLOATS and weight is x:
            return "float"
        if x in FLOATS and weight in (torch.int8, torch.int32):
            return "weight-only"
        if weight is torch.int32 and x in (torch.int8, torch.int32):
            raise unavailable(self.function, self.name("weight"), "int32", f"4-bit numbers with {x} x")
        raise refused(self.function, self.name("weight"), f"of a type that goes with {x} x", weight)

    def _check_types(self) -> None:
        function, given, kind = self.function, self._given, self.kind
        own = {"integer": (torch.int8, torch.int32), "float8": _FLOAT8}.get(kind, ())
        if self.dtype not in (*FLOATS, *own):
            raise refused(function, "output_dtype", "a type of floats, or of quantised x", self.dtype)
        for name, kinds in (
            ("scale", ("integer", "float8", "MX")),
            ("offset", ("integer", "float8")),
            ("per_token_scale", ("integer", "float8", "MX")),
            ("antiquant_scale", ("weight-only",)),
            ("antiquant_offset", ("weight-only",)),
        ):
            if given[name] is not None and kind not in kinds:
                types = f"{self.x[0].dtype} and {self.weight[0].dtype}" + (" in blocks" if kind == "MX" else "")
                raise refused(function, name, f"None for {types}", "tensors")
        for name in ("scale", "per_token_scale") if kind == "MX" else ():
            if given[name] is None:
                raise refused(function, self.name(name), "given with the other one, for blocks of 32", None)
        if kind == "weight-only" and given["antiquant_scale"] is None:
            raise refused(function, "antiquant_scale", f"given for a weight of {self.weight[0].dtype}", None)
        if kind == "integer" and self.dtype is not torch.int32 and given["scale"] is None:
            raise refused(function, self.name("scale"), "given for int8, unless output_dtype is int32", None)
        quantised = {"integer": (*FLOATS, torch.int32), "float8": FLOATS, "MX": FLOATS}
        allowed = quantised.get(kind, (self.x[0].dtype, torch.float32))
        for tensor in given["bias"] or ():
            if tensor.dtype not in allowed:
                raise check.wrong_dtype(function, "bias", f"one of {', '.join(map(str, allowed))}", tensor)

    def refuse_for_reduction(self) -> None:
        """Neither a bias nor a weight of other numbers goes with parts of the summed axis."""
        if self.kind == "weight-only" or self._given["bias"] is not None:
            wanted = "None, and the weight not of integers alone, for group_type 2"
            raise refused(self.function, "bias", wanted, f"a weight of {self.weight[0].dtype}")

    def name(self, argument: str) -> str:
        """The function's own name for an argument of `npu_grouped_matmul`."""
        return self._names.get(argument, argument)

    def width(self, matrix: Tensor) -> int:
        """N of a matrix [K, N], whose numbers may be packed."""
        return matrix.shape[-1] * (_NIBBLES if matrix.dtype is torch.int32 else 1)

    def stacked_bias(self) -> Tensor | None:
        """[E, N] or None."""
        return None if self._bias is None else torch.stack(self._bias)

    def sort_parameters(self, widths: list[int], num_tokens: list[int], or_of_groups: bool = False) -> None:
        """Give each product its parameters.

        Args:
            widths: N of each group.
            num_tokens: the numbers in each tensor of per_token_scale.
            or_of_groups: whether per_token_scale may have one number for each group instead.
        """
        function, given = self.function, self._given

        def of(name: str, parts: bool = False) -> list[Tensor] | None:
            tensors = given[name]
            return None if tensors is None else _by_group(function, self.name(name), tensors, widths, parts)

        self._bias = of("bias")
        if self.kind == "MX":
            self._scale = self._offset = self._token_scale = self._group_scale = None
            self._sort_blocks(widths)
            return
        self._scale, self._offset = of("scale"), of("offset")
        self._factor, self._shift = of("antiquant_scale", parts=True), of("antiquant_offset", parts=True)
        self._token_scale = self._group_scale = None
        tokens = given["per_token_scale"]
        if tokens is not None and [tensor.numel() for tensor in tokens] == num_tokens:
            self._token_scale = torch.cat([_float_of(tensor).reshape(-1, 1) for tensor in tokens])
        elif tokens is not None and or_of_groups and [tensor.numel() for tensor in tokens] == [len(widths)]:
            self._group_scale = _float_of(tokens[0]).reshape(-1)
        elif tokens is not None:
            wanted = f"of {num_tokens} numbers" + (f", or of {len(widths)} for the groups" if or_of_groups else "")
            raise refused(function, self.name("per_token_scale"), wanted, [list(tensor.shape) for tensor in tokens])

    def _sort_blocks(self, widths: list[int]) -> None:
        """The scale bytes of each matrix and of each tensor of rows."""
        function, given = self.function, self._given
        scales, tokens = given["scale"] or [], given["per_token_scale"] or []
        matrices = self.weight
        if len(matrices) == 1 and matrices[0].ndim == 3:
            matrices = list(matrices[0].unbind(0))
        name, wanted = self.name("scale"), "[(E, ceil(K / 64), N, 2)], or a tensor for each matrix"
        if len(scales) == 1 and scales[0].ndim == 4:
            scales = list(scales[0].unbind(0))
        if len(scales) != len(matrices):
            raise refused(function, name, wanted, [list(tensor.shape) for tensor in given["scale"] or ()])
        for scale, matrix, width in zip(scales, matrices, widths, strict=True):
            if scale.shape != (-(-matrix.shape[0] // 64), width, 2):
                raise check.wrong_shape(function, name, wanted, scale)
        name, wanted = self.name("per_token_scale"), "[(M, ceil(K / 64), 2)], or a tensor for each x"
        if len(tokens) != len(self.x):
            raise refused(function, name, wanted, [list(tensor.shape) for tensor in tokens])
        for scale, x in zip(tokens, self.x, strict=True):
            if scale.shape != (x.shape[:-1].numel(), -(-x.shape[-1] // 64), 2):
                raise check.wrong_shape(function, name, wanted, scale)
        self._blocks = self._scale_bytes("scale", scales)
        self._token_blocks = self._scale_bytes("per_token_scale", tokens)

    def sort_block_parts(self, parts: list[Segment]) -> None:
        """The scale bytes of parts of the summed axis, which lie as `npu_grouped_dynamic_mx_quant` puts them.

        Args:
            parts: of T, ascending, one for each group.
        """
        pairs = self.x[0].shape[1] // 64 + len(parts)
        for name, shape, letters in (
            ("scale", (pairs, self.weight[0].shape[1], 2), "T // 64 + G, N, 2"),
            ("per_token_scale", (self.x[0].shape[0], pairs, 2), "M, T // 64 + G, 2"),
        ):
            scales = self._given[name] or []
            if [tuple(scale.shape) for scale in scales] != [shape]:
                wanted = f"[({letters})] = [{shape}]"
                raise refused(self.function, self.name(name), wanted, [list(scale.shape) for scale in scales])
        (scale,) = self._scale_bytes("scale", self._given["scale"] or [])
        (tokens,) = self._scale_bytes("per_token_scale", self._given["per_token_scale"] or [])
        firsts = [start // 64 + group for group, start, _ in parts]
        counts = [-(-(stop - start) // 64) for _, start, stop in parts]
        places = [slice(first, first + count) for first, count in zip(firsts, counts, strict=True)]
        self._bias = self._scale = self._offset = None
        self._blocks = [scale[place] for place in places]
        self._token_blocks = [tokens[:, place] for place in places]

    def _scale_bytes(self, name: str, scales: list[Tensor]) -> list[Tensor]:
        for tensor in scales:
            if tensor.dtype not in (_BLOCK_SCALE, torch.uint8, torch.int8):
                raise check.wrong_dtype(self.function, self.name(name), "float8_e8m0fnu, as the other scale", tensor)
        return [scale.view(torch.uint8) for scale in scales]

    def write(self, group: int, rows: Tensor, matrix: Tensor, tokens: slice, out: Tensor) -> None:
        """rows [m, K] @ matrix [K, N] into out [m, N]; `tokens` are the places of the rows among all."""
        bias = None if self._bias is None else self._bias[group]
        if self.kind == "integer":
            sums = integer_product(self.function, rows, matrix)
            if bias is not None and bias.dtype is torch.int32:
                sums, bias = sums.add_(bias), None
            if self.dtype is torch.int32:
                out.copy_(sums)
            else:
                out.copy_(self._finished(sums.float(), group, tokens, bias))
            return
        if self.kind == "MX":
            tokens_of = self._token_blocks
            row_scale = tokens_of[0][tokens] if len(tokens_of) == 1 else tokens_of[group]
            out.copy_(self._finished(scaled_product(rows, matrix, row_scale, self._blocks[group]), group, tokens, bias))
            return
        if self.kind == "weight-only":
            matrix = self._dequantised(matrix, group).to(rows.dtype)
        if bias is not None and self._adds_wide_bias(rows, bias):
            out.copy_(torch.ops.mkldnn._linear_pointwise(rows, matrix.t(), bias, "none", [], ""))
        elif not self._one_rounding:
            dtype = wide(rows)
            out.copy_(self._finished(torch.mm(rows.to(dtype), matrix.to(dtype)), group, tokens, bias))
        elif bias is None:
            torch.mm(rows, matrix, out=out)
        else:
            torch.addmm(bias, rows, matrix, out=out)

    def _adds_wide_bias(self, rows: Tensor, bias: Tensor) -> bool:
        """Whether a product of bfloat16 adds its float32 bias itself: twice as fast as one of float32."""
        return (
            bias.dtype is torch.float32
            and rows.dtype is self.dtype is torch.bfloat16
            and self._activation is None
            and rows.is_cpu
            and rows.numel() > 0
            and _linear_adds_float32()
        )

    def _finished(self, values: Tensor, group: int, tokens: slice, bias: Tensor | None) -> Tensor:
        """The values, which are overwritten, with all that follows the product."""
        if self._scale is not None:
            values *= self._scale[group]
        if self._token_scale is not None:
            values *= self._token_scale[tokens]
        if self._group_scale is not None:
            values *= self._group_scale[group]
        if self._offset is not None:
            values += self._offset[group]
        if bias is not None:
            values += bias
        if self._activation is not None:
            values = self._activation(values)
        return rounded(values, self.dtype)

    def _dequantised(self, matrix: Tensor, group: int) -> Tensor:
        numbers = (unpacked(matrix) if matrix.dtype is torch.int32 else matrix).float()
        if self._shift is not None:
            numbers += self._over_parts("antiquant_offset", self._shift[group], numbers.shape[0])
        if self._factor is not None:
            numbers *= self._over_parts("antiquant_scale", self._factor[group], numbers.shape[0])
        return numbers

    def _over_parts(self, name: str, factors: Tensor, size: int) -> Tensor:
        """Factors [S, N] of S parts of K as [K, N]; others as they are."""
        if factors.ndim < 2:
            return factors
        if factors.shape[0] == 0 or size % factors.shape[0]:
            raise refused(self.function, name, f"of parts of equal size, of K = {size}", f"{factors.shape[0]} parts")
        return factors.repeat_interleave(size // factors.shape[0], 0)


def _by_group(function: str, name: str, tensors: list[Tensor], widths: list[int], parts: bool) -> list[Tensor]:
    """[N] or one number for each group; [S, N] where there may be parts of K. Float32, but for a bias."""
    num_groups = len(widths)
    given = tensors if name == "bias" else [_float_of(tensor) for tensor in tensors]
    stacked = len(given) == 1 and given[0].ndim > 0 and given[0].shape[0] == num_groups
    if stacked and not (num_groups == 1 and given[0].ndim == 1):
        given = list(given[0].unbind(0))
    if len(given) != num_groups:
        wanted = f"[({num_groups}, N)] or {num_groups} tensors"
        raise refused(function, name, wanted, [list(tensor.shape) for tensor in tensors])
    for tensor, width in zip(given, widths, strict=True):
        single = name != "bias" and tensor.numel() == 1
        if tensor.ndim == 2 and not parts and tensor.shape[0] > 1:
            raise unavailable(function, name, list(tensors[0].shape), "scales of parts of K")
        if not single and (tensor.ndim not in (1, 2) or tensor.shape[-1] != width):
            raise check.wrong_shape(function, name, f"[E, N] with N = {width}, or E tensors [N]", tensors[0])
    return [tensor if tensor.ndim < 2 or parts else tensor[0] for tensor in given]


def _float_of(scale: Tensor) -> Tensor:
    """Float32; of a 64-bit integer, the number whose bits are its low half."""
    if scale.dtype in (torch.int64, torch.uint64):
        low = scale.view(torch.int64) & 0xFFFFFFFF
        return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32).view(torch.float32)
    check.floating("", "scale", scale)
    return scale.float()


def integer_product(function: str, rows: Tensor, matrix: Tensor) -> Tensor:
    """int32 [m, N] of int8 [m, K] and [K, N], exactly."""
    m, k = rows.shape
    if k > _LONGEST:
        raise refused(function, "K", f"at most {_LONGEST}, for sums that an int32 holds", k)
    if rows.is_cuda:
        fits = m > 16 and k > 0 and k % 8 == 0 and matrix.shape[1] % 8 == 0
    else:
        fits = rows.is_cpu and _int_mm_is_exact()
    if fits:
        return torch._int_mm(rows, matrix)
    return (rows.double() @ matrix.double()).to(torch.int32)


@functools.cache
def _linear_adds_float32() -> bool:
    """Whether torch's oneDNN adds a float32 bias to a product of bfloat16 on this CPU before it rounds, once.

    A product rounded first would be 496 here, and a bias rounded first -496.
    """
    rows, weight = torch.full((2, 32), 8.0).bfloat16(), torch.full((3, 32), 2.0).bfloat16()
    rows[:, 0] = 0.5  # the product is 497
    bias = torch.full((3,), -496.4375)
    try:
        found = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return bool((found == 0.5625).all())


@functools.cache
def _int_mm_is_exact() -> bool:
    """Whether torch's product of int8 is exact on this CPU: sums of pairs may saturate without VNNI."""
    rows = torch.full((32, 128), -128, dtype=torch.int8)
    rows[::2] = 127
    matrix = torch.full((128, 64), -128, dtype=torch.int8)
    exact = rows.double() @ matrix.double()
    return all(torch.equal(torch._int_mm(rows[:m], matrix).double(), exact[:m]) for m in (1, 32))
