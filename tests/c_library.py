"""The C library in this process, through ctypes, and one operator's call through it."""

import ctypes
from ctypes import byref, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from moeroute.aclnn.library import prototypes


class Library:
    """The three libraries in this process; `call` returns the status, `fails` looks at the message too."""

    def __init__(self, prefix: Path) -> None:
        self.functions: dict[str, Any] = {}
        for file, group in prototypes.libraries().items():
            loaded = ctypes.CDLL(str(prefix / "lib" / file))
            for prototype in group:
                function = getattr(loaded, prototype.name)
                if prototype.name == "aclGetRecentErrMsg":
                    function.restype = ctypes.c_char_p
                elif not prototype.returns_status:
                    function.restype = c_void_p
                kinds = {
                    "int64_t": c_int64,
                    "uint32_t": c_uint32,
                    "float": c_float,
                    "double": c_double,
                    "uint64_t": c_uint64,
                    "size_t": c_uint64,
                }
                function.argtypes = [
                    c_void_p
                    if kind.endswith("*") or kind in ("aclrtStream", "aclrtContext", "aclrtEvent")
                    else ctypes.c_bool
                    if kind == "bool"
                    else kinds.get(kind, c_int32)
                    for kind, _ in prototype.parameters
                ]
                self.functions[prototype.name] = function

    def call(self, name: str, *arguments: Any) -> Any:
        return self.functions[name](*arguments)

    def ok(self, name: str, *arguments: Any) -> None:
        status = self.call(name, *arguments)
        assert status == 0, f"{name}: {status}: {self.message()}"

    def fails(self, status: int, words: str, name: str, *arguments: Any) -> None:
        assert self.call(name, *arguments) == status, self.message()
        message = self.message()
        assert message.startswith(f"{name}: ")
        assert words in message
        assert self.message() == ""

    def message(self) -> str:
        return str(self.call("aclGetRecentErrMsg").decode())

    def memory(self, data: np.ndarray[Any, Any]) -> int:
        address = c_void_p()
        self.ok("aclrtMalloc", byref(address), data.nbytes, 0)
        self.ok("aclrtMemcpy", address, data.nbytes, data.ctypes.data, data.nbytes, 1)
        assert address.value is not None
        return address.value

    def read(self, address: int, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        found = np.empty_like(like)
        self.ok("aclrtMemcpy", found.ctypes.data, found.nbytes, address, found.nbytes, 2)
        return found

    def tensor(
        self,
        shape: tuple[int, ...],
        address: int | None,
        dtype: int = 0,
        *,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        form: int = 2,
        storage: tuple[int, ...] | None = None,
    ) -> int | None:
        def dims(values: tuple[int, ...]) -> Any:
            return (c_int64 * max(1, len(values)))(*values)

        storage = shape if storage is None else storage
        given = None if strides is None else dims(strides)
        made = self.call(
            "aclCreateTensor",
            dims(shape),
            len(shape),
            dtype,
            given,
            offset,
            form,
            dims(storage),
            len(storage),
            address,
        )
        return made


class Permutation:
    """aclnnMoeTokenPermuteGrad on small tensors: rows 2 + 0 and 1 + 3."""

    name = "aclnnMoeTokenPermuteGrad"

    def __init__(self, acl: Library) -> None:
        self.acl = acl
        self.rows = acl.memory(np.arange(1, 9, dtype=np.float32))
        self.indices = acl.memory(np.array([2, 0, 1, 3], dtype=np.int32))
        self.sums = acl.memory(np.full(4, -1, dtype=np.float32))
        self.grad, self.out = acl.tensor((4, 2), self.rows), acl.tensor((2, 2), self.sums)
        self.sorted = acl.tensor((4,), self.indices, 3)

    def first(self, grad: Any = ..., out: Any = ..., topk: int = 2) -> tuple[int, c_void_p]:
        size, executor = c_uint64(77), c_void_p()
        grad = self.grad if grad is ... else grad
        out = self.out if out is ... else out
        status = self.acl.call(
            f"{self.name}GetWorkspaceSize", grad, self.sorted, topk, False, out, byref(size), byref(executor)
        )
        assert status != 0 or size.value == 0
        return status, executor

    def result(self) -> list[float]:
        return self.acl.read(self.sums, np.empty(4, np.float32)).tolist()
