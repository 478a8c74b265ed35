"""Functions that only ever become part of a kernel.

Numba optimises and emits machine code for every function that a kernel calls, and again for the kernel that all
of them are inlined into: 20 of the 30 seconds that a first training step took. Helpers are therefore only linked;
the optimiser sees them once, inside the kernel.
"""

from collections.abc import Callable
from typing import Any

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _WithoutEnvironment:
    """Numba's code generator for code that has no address, and so no place to put its environment."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, name: str, environment: Any) -> None:
        """Nothing to set: only printing and raising with arguments read it."""


class _LinkedLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Code that only ever becomes part of other code: neither optimised nor emitted by itself."""

    @property
    def codegen(self) -> Any:
        return _WithoutEnvironment(self._codegen)

    def finalize(self) -> None:
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._final_module.verify()
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """It has no address."""
        self._ensure_finalized()
        return 0


class _HelperCompiler(Compiler):  # type: ignore[misc]
    def compile_extra(self, function: Any) -> Any:
        library = _LinkedLibrary(self.state.targetctx.codegen(), function.__qualname__)
        library.enable_object_caching()
        self.state.library = library
        return super().compile_extra(function)


HELPER_OPTIONS = {
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": _HelperCompiler,
}


def helper(function: Callable[..., Any]) -> Any:
    """Decorator of a function that kernels call."""
    return numba.njit(**HELPER_OPTIONS)(function)
