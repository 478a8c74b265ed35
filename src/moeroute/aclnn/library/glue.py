"""What answers behind the C functions: each by its name, an operator through `moeroute.aclnn`.

Imported inside the library only; `attach` is called once, with the library's own ffi.
"""

import functools
import gc
import traceback
from collections.abc import Callable, Sequence
from typing import Any, cast

from moeroute import aclnn, dispatch
from moeroute.aclnn import core
from moeroute.aclnn.library import meta, prototypes, runtime
from moeroute.aclnn.library.handles import (
    INVALID,
    NULLPTR,
    RUNTIME_ERROR,
    Block,
    ExecutorHandle,
    Failure,
    IntArray,
    Operator,
    TensorHandle,
    block_of,
    c,
    describe,
    find,
    need_init,
    need_pointer,
    need_stream,
    new,
    state,
)
from moeroute.aclnn.signatures import SIGNATURES, Parameter


def _operator(name: str, parameters: Sequence[Parameter]) -> Operator:
    kinds: dict[str, type] = dict.fromkeys(("tensor", "optional_tensor", "out", "optional_out"), TensorHandle)
    kinds["optional_int_array"] = IntArray
    return Operator(
        name,
        getattr(aclnn, f"aclnn{name}GetWorkspaceSize"),
        tuple((place, p.name, kinds[p.kind]) for place, p in enumerate(parameters) if p.kind in kinds),
        tuple(place for place, p in enumerate(parameters) if p.kind in ("tensor", "optional_tensor")),
        tuple(place for place, p in enumerate(parameters) if p.kind in ("out", "optional_out")),
    )


def _prepared(operator: Operator, given: list[Any]) -> tuple[int, core.Executor, tuple[Block, ...]]:
    """The first phase over the memory where the tensors are now."""
    values = given.copy()
    trouble: Failure | None = None
    blocks = []
    for place, name, kind in operator.handles:
        handle = given[place]
        if handle is None:
            continue
        if kind is IntArray:
            values[place] = handle.values
            continue
        values[place], problem = handle.look()
        if problem is not None and trouble is None:
            trouble = Failure(problem.status, f"{name}: {problem}")
        if handle.block is not None:
            blocks.append(handle.block)
    status, size, executor = operator.prepare(*values)
    if status != 0:
        raise Failure(status)
    if trouble is not None:
        raise trouble
    return size, cast(core.Executor, executor), tuple(blocks)


def _first_phase(operator: Operator) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        need_init(RUNTIME_ERROR)
        *given, size_out, executor_out = arguments
        need_pointer(size_out, "workspaceSize", NULLPTR)
        need_pointer(executor_out, "executor", NULLPTR)
        for place, name, kind in operator.handles:
            given[place] = find(kind, given[place], INVALID, name) if given[place] != 0 else None
        size, executor, blocks = _prepared(operator, given)
        size_out[0] = size
        executor_out[0] = new(ExecutorHandle(operator, given, executor, blocks))

    return call


@functools.cache
def _import_kernels() -> None:
    """What the first operator would import. As at the start (python.c): nothing in it is garbage, now or later."""
    if dispatch.unavailable("cpu") is not None:
        return
    pause = c.python_is_ours and gc.isenabled()
    if pause:
        gc.disable()
    try:
        dispatch.module("rows", "cpu")
    finally:
        if pause:
            gc.freeze()
            gc.enable()


def _second_phase(operator: Operator) -> Callable[..., None]:
    run = getattr(aclnn, f"aclnn{operator.name}")

    def call(workspace: int, workspace_size: int, number: int, stream: int) -> None:
        need_init(RUNTIME_ERROR)
        if number == 0:
            raise Failure(NULLPTR, "executor must not be null")
        handle = find(ExecutorHandle, number, INVALID, "executor")
        need_stream(stream, RUNTIME_ERROR)
        if handle.moved and handle.operator is operator:
            repeatable = handle.executor.repeatable
            _, handle.executor, handle.blocks = _prepared(operator, handle.given)
            handle.executor.repeatable, handle.moved = repeatable, False
        executor = handle.executor
        needed = executor.workspace_size
        if needed and workspace == 0 and workspace_size != 0:
            raise Failure(NULLPTR, f"workspace must be {needed} bytes of device memory; got a null pointer")
        if needed and workspace_size >= needed and block_of(workspace, needed) is None:
            what = f"workspace must be {needed} bytes of device memory"
            raise Failure(INVALID, f"{what}; got {describe(workspace)}")
        if not all(block.alive for block in handle.blocks):
            raise Failure(INVALID, "the tensors' memory must live until the operator has run; got a freed one")
        _import_kernels()
        status = run(workspace or None, workspace_size, executor, None)
        if status in (0, core.INNER) and not executor.repeatable:  # it ran
            state.objects.pop(number, None)
        if status != 0:
            raise Failure(status)

    return call


def _answer(name: str, returns_status: bool, function: Callable[..., Any]) -> Callable[..., int]:
    """The function as C calls it: a status plus one, so that 0 is left for "nobody answered"."""

    def call(*arguments: Any) -> int:
        try:
            result = function(*arguments)
        except Failure as failure:
            if str(failure):
                core.remember(f"{name}: {failure}")
            return failure.status + 1 if returns_status else 0
        return 1 if returns_status else result

    return call


def attach(ffi: Any, lib: Any) -> None:
    """Give the library's functions their Python side."""
    c.ffi, c.lib, c.python_is_ours = ffi, lib, bool(lib.moeroute_python_is_ours())
    operators: dict[str, Callable[..., Any]] = {}
    for name, signature in SIGNATURES.items():
        operator = _operator(name, signature.parameters)
        operators[f"aclnn{name}GetWorkspaceSize"] = _first_phase(operator)
        operators[f"aclnn{name}"] = _second_phase(operator)

    def unexpected(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        core.remember("".join(traceback.format_exception(kind, error, trace)))

    for group in prototypes.libraries().values():
        for prototype in group:
            function = operators.get(prototype.name) or getattr(runtime, prototype.name, None)
            function = function or getattr(meta, prototype.name)
            ffi.def_extern(
                name=f"moeroute_{prototype.name}",
                error=prototype.failure + 1 if prototype.returns_status else 0,
                onerror=unexpected,
            )(_answer(prototype.name, prototype.returns_status, function))
