"""aclnn/acl_meta.h: tensors, lists, arrays, scalars and executors."""

import math
from typing import Any

from moeroute.aclnn.library.handles import (
    DTYPES,
    INNER,
    INNER_NULLPTR,
    INVALID,
    LARGEST,
    MAX_ARRAY,
    MAX_RANK,
    NULLPTR,
    NUMBERS,
    RUNTIME_ERROR,
    BoolArray,
    ExecutorHandle,
    Failure,
    FloatArray,
    IntArray,
    Scalar,
    TensorHandle,
    TensorList,
    c,
    destroy,
    find,
    need_init,
    need_pointer,
    new,
    state,
)


def _dims(pointer: Any, count: int, argument: str) -> tuple[int, ...]:
    if count > MAX_RANK:
        raise Failure(INVALID, f"{argument} must have at most {MAX_RANK} entries; got {count}")
    if count == 0:
        return ()
    need_pointer(pointer, argument, NULLPTR)
    found = tuple(c.ffi.unpack(pointer, count))
    if min(found) < 0:
        raise Failure(INVALID, f"{argument} must not be negative; got {list(found)}")
    return found


def aclCreateTensor(
    view_dims: Any,
    view_rank: int,
    data_type: int,
    stride: Any,
    offset: int,
    format_: int,
    storage_dims: Any,
    storage_rank: int,
    address: int,
) -> int:
    """A view of the caller's memory, which is looked at only when an operator uses it."""
    need_init()
    shape = _dims(view_dims, view_rank, "viewDims")
    storage = _dims(storage_dims, storage_rank, "storageDims")
    if stride == c.ffi.NULL:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    else:
        strides = _dims(stride, view_rank, "stride")
    dtype = DTYPES.get(data_type)
    if dtype is None:
        raise Failure(INVALID, f"dataType must be one that moeroute has; got {data_type}")
    if offset < 0:
        raise Failure(INVALID, f"offset must not be negative; got {offset}")
    room = math.prod(storage)
    if 0 not in shape:
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if last >= room:
            what = f"the view must lie inside storageDims = {list(storage)}"
            raise Failure(INVALID, f"{what}; got its last element at {last}")
    if max(room, math.prod(shape)) * dtype.itemsize > LARGEST:
        raise Failure(INVALID, f"the storage must fit into memory; got {room} elements")
    return new(TensorHandle(dtype, shape, strides, offset, format_, storage, address))


def aclDestroyTensor(tensor: int) -> None:
    """The memory stays the caller's; null is accepted."""
    need_init(RUNTIME_ERROR)
    if tensor != 0:
        destroy(TensorHandle, tensor, "tensor").forget_view()


def _tensor(tensor: int) -> TensorHandle:
    need_init(RUNTIME_ERROR)
    if tensor == 0:
        raise Failure(NULLPTR, "tensor must not be null")
    found: TensorHandle = find(TensorHandle, tensor, INVALID, "tensor")
    return found


def _give_copy(values: tuple[int, ...], pointer: Any, argument: str, count: Any, count_argument: str) -> None:
    """An array that the caller frees with delete[]."""
    need_pointer(pointer, argument, NULLPTR)
    need_pointer(count, count_argument, NULLPTR)
    address = c.lib.moeroute_new_array(8 * len(values))
    c.ffi.cast("int64_t *", address)[0 : len(values)] = values
    pointer[0], count[0] = address, len(values)


def aclGetViewShape(tensor: int, dims: Any, count: Any) -> None:
    """A copy, which the caller frees with delete[]."""
    _give_copy(_tensor(tensor).shape, dims, "viewDims", count, "viewDimsNum")


def aclGetViewStrides(tensor: int, strides: Any, count: Any) -> None:
    """A copy, which the caller frees with delete[]."""
    _give_copy(_tensor(tensor).strides, strides, "stridesValue", count, "stridesNum")


def aclGetStorageShape(tensor: int, dims: Any, count: Any) -> None:
    """A copy, which the caller frees with delete[]."""
    _give_copy(_tensor(tensor).storage, dims, "storageDims", count, "storageDimsNum")


def aclGetViewOffset(tensor: int, offset: Any) -> None:
    """In elements."""
    handle = _tensor(tensor)
    need_pointer(offset, "offset", NULLPTR)
    offset[0] = handle.offset


def aclGetFormat(tensor: int, format_: Any) -> None:
    """The number that aclCreateTensor was given."""
    handle = _tensor(tensor)
    need_pointer(format_, "format", NULLPTR)
    format_[0] = handle.format


def aclGetDataType(tensor: int, data_type: Any) -> None:
    """The number of the dtype."""
    handle = _tensor(tensor)
    need_pointer(data_type, "dataType", NULLPTR)
    data_type[0] = NUMBERS[handle.dtype]


def aclGetRawTensorAddr(tensor: int, address: Any) -> None:
    """Where the storage begins, without the view's offset."""
    handle = _tensor(tensor)
    need_pointer(address, "addr", NULLPTR)
    address[0] = handle.address


def aclSetRawTensorAddr(tensor: int, address: int) -> None:
    """Other memory of the same size; executors that exist keep the former."""
    _tensor(tensor).move(address)


def aclCreateTensorList(value: Any, size: int) -> int:
    """The list holds the tensors' numbers; a null entry is allowed."""
    need_init()
    tensors = _array(value, size)
    for place, tensor in enumerate(tensors):
        if tensor != 0:
            find(TensorHandle, tensor, INVALID, f"value[{place}]")
    return new(TensorList(tensors))


def aclDestroyTensorList(array: int) -> None:
    """And the tensors in it; those that are gone already are gone."""
    need_init(RUNTIME_ERROR)
    if array != 0:
        for tensor in destroy(TensorList, array, "array").tensors:
            if tensor in state.objects:
                aclDestroyTensor(tensor)


def aclGetTensorListSize(tensor_list: int, size: Any) -> None:
    """How many entries it has."""
    _give_size(TensorList, tensor_list, "tensorList", size)


def aclCreateScalar(value: int, data_type: int) -> int:
    """The value is copied."""
    need_init()
    if value == 0:
        raise Failure(NULLPTR, "value must not be null")
    dtype = DTYPES.get(data_type)
    if dtype is None:
        raise Failure(INVALID, f"dataType must be one that moeroute has; got {data_type}")
    return new(Scalar(dtype, bytes(c.ffi.buffer(c.ffi.cast("char *", value), dtype.itemsize))))


def aclDestroyScalar(scalar: int) -> None:
    """Null is accepted."""
    need_init(RUNTIME_ERROR)
    if scalar != 0:
        destroy(Scalar, scalar, "scalar")


def _array(pointer: Any, size: int) -> list[Any]:
    if size > MAX_ARRAY:
        raise Failure(INVALID, f"size must be at most {MAX_ARRAY}; got {size}")
    if size == 0:
        return []
    need_pointer(pointer, "value", NULLPTR)
    return list(c.ffi.unpack(pointer, size))


def _destroy_array(kind: type, array: int) -> None:
    need_init(RUNTIME_ERROR)
    if array != 0:
        destroy(kind, array, "array")


def _give_size(kind: type, number: int, argument: str, size: Any) -> None:
    need_init(RUNTIME_ERROR)
    if number == 0:
        raise Failure(NULLPTR, f"{argument} must not be null")
    thing = find(kind, number, INVALID, argument)
    need_pointer(size, "size", NULLPTR)
    size[0] = len(thing.tensors if kind is TensorList else thing.values)


def aclCreateIntArray(value: Any, size: int) -> int:
    """The values are copied."""
    need_init()
    return new(IntArray(_array(value, size)))


def aclDestroyIntArray(array: int) -> None:
    """Null is accepted."""
    _destroy_array(IntArray, array)


def aclGetIntArraySize(array: int, size: Any) -> None:
    """How many values it has."""
    _give_size(IntArray, array, "array", size)


def aclCreateFloatArray(value: Any, size: int) -> int:
    """The values are copied."""
    need_init()
    return new(FloatArray(_array(value, size)))


def aclDestroyFloatArray(array: int) -> None:
    """Null is accepted."""
    _destroy_array(FloatArray, array)


def aclGetFloatArraySize(array: int, size: Any) -> None:
    """How many values it has."""
    _give_size(FloatArray, array, "array", size)


def aclCreateBoolArray(value: Any, size: int) -> int:
    """The values are copied."""
    need_init()
    return new(BoolArray(_array(value, size)))


def aclDestroyBoolArray(array: int) -> None:
    """Null is accepted."""
    _destroy_array(BoolArray, array)


def aclGetBoolArraySize(array: int, size: Any) -> None:
    """How many values it has."""
    _give_size(BoolArray, array, "array", size)


# ---------------------------------------------------------------------------- executors


def _executor(number: int) -> ExecutorHandle:
    if number == 0:
        raise Failure(INNER_NULLPTR, "executor must not be null")
    found: ExecutorHandle = find(ExecutorHandle, number, INNER, "executor")
    return found


def aclSetAclOpExecutorRepeatable(executor: int) -> None:
    """The executor outlives its run; the caller destroys it."""
    need_init(RUNTIME_ERROR)
    _executor(executor).executor.repeatable = True


def aclDestroyAclOpExecutor(executor: int) -> None:
    """Also of one that never runs."""
    need_init(RUNTIME_ERROR)
    _executor(executor)
    state.objects.pop(executor, None)


def aclSetInputTensorAddr(executor: int, index: int, tensor: int, address: int) -> None:
    """`index` counts the inputs."""
    _set_address(executor, index, tensor, address, "input")


def aclSetOutputTensorAddr(executor: int, index: int, tensor: int, address: int) -> None:
    """`index` counts the outputs."""
    _set_address(executor, index, tensor, address, "output")


def aclSetTensorAddr(executor: int, index: int, tensor: int, address: int) -> None:
    """`index` counts the inputs, then the outputs."""
    _set_address(executor, index, tensor, address, "tensor")


def _set_address(executor: int, index: int, tensor: int, address: int, kind: str) -> None:
    """Other memory for a tensor of the operator, which is prepared anew when it runs next."""
    need_init(RUNTIME_ERROR)
    if tensor == 0:
        raise Failure(INNER_NULLPTR, "tensor must not be null")
    moved = find(TensorHandle, tensor, INVALID, "tensor")
    handle = _executor(executor)
    operator = handle.operator
    places = {"input": operator.inputs, "output": operator.outputs}.get(kind, operator.inputs + operator.outputs)
    if index >= len(places):
        raise Failure(INVALID, f"index must be below {len(places)}, the {kind}s of aclnn{operator.name}; got {index}")
    if handle.given[places[index]] is not moved:
        raise Failure(INVALID, f"tensor must be {kind} {index} of the first phase; got another one, or none was given")
    moved.move(address)
    handle.moved = True


def aclSetDynamicInputTensorAddr(executor: int, index: int, relative: int, tensors: int, address: int) -> None:
    """No operator here has a list of tensors: always refused."""
    _set_list_address(executor, index, relative, tensors, address)


def aclSetDynamicOutputTensorAddr(executor: int, index: int, relative: int, tensors: int, address: int) -> None:
    """No operator here has a list of tensors: always refused."""
    _set_list_address(executor, index, relative, tensors, address)


def aclSetDynamicTensorAddr(executor: int, index: int, relative: int, tensors: int, address: int) -> None:
    """No operator here has a list of tensors: always refused."""
    _set_list_address(executor, index, relative, tensors, address)


def _set_list_address(executor: int, index: int, relative: int, tensors: int, address: int) -> None:
    """None of our operators takes a list, so no executor has one."""
    need_init(RUNTIME_ERROR)
    if tensors == 0:
        raise Failure(INNER_NULLPTR, "tensors must not be null")
    held = find(TensorList, tensors, INVALID, "tensors").tensors
    if relative >= len(held):
        raise Failure(INVALID, f"relativeIndex must be below {len(held)}; got {relative}")
    operator = _executor(executor).operator
    raise Failure(INVALID, f"irIndex must name a list of tensors of aclnn{operator.name}; got {index}, and it has none")
