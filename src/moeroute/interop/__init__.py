"""This package under the names of other libraries: one module a host.

They map names and conventions onto the verbs of `moeroute` and `moeroute.nn`. All but `torch_npu`, which also has what
stands between the routing functions, do no arithmetic of their own. A host is imported when a function is called, not
before; docs/interop.md and docs/interop_ascend.md have an example for each.
"""

import importlib
import types

HOSTS = ("huggingface", "megatron", "torch_npu", "transformer_engine")


def __getattr__(name: str) -> types.ModuleType:
    if name in HOSTS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *HOSTS})
