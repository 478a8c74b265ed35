"""Storage formats: an NPU has private ones, this machine has the plain one, ND, alone."""

from torch import Tensor

from moeroute.interop.torch_npu.arguments import npu_function

_ND = 2


@npu_function
def npu_format_cast(
    self: Tensor, acl_format: int, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """The tensor itself, whatever the format: its logical shape and values are what the other functions look at."""
    return self


@npu_function
def get_npu_format(self: Tensor) -> int:
    """2, the number of ND."""
    return _ND


@npu_function
def npu_format_cast_(
    self: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """The tensor itself, as `npu_format_cast`."""
    return self
