"""What the library's own interpreter runs first: torch's import, without a fifth that only meta tensors need.

That fifth registers, in Python, what operators make of tensors without data (torch._meta_registrations and all that it
imports). No aclnn operator has such tensors. It is imported before any other code is, torch's compiler say: whatever
is neither ours nor behind our operators. The text of this file is part of libmoeroute_acl.so, since an import of
moeroute would import torch. In another version of torch than the one that `moeroute aclnn build` has tried, nothing is
left out.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

LATE = "torch._meta_registrations"
# What operators and their kernels import, and what Numba imports where it is installed.
OURS = frozenset(("moeroute", "numpy", "numba", "llvmlite", "yaml", "cffi", "_cffi_backend", "pycparser"))
OURS |= {"scipy", "colorama", "IPython", "tbb"}


class Late:
    """A finder: of an empty module in the place of the late one while torch is imported, afterwards of nothing."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.importing = True  # torch itself
        self.left_out = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """As importlib wants it."""
        if self.importing:
            if name != LATE or str(getattr(sys.modules["torch"], "__version__", "")) != self.version:
                return None
            self.left_out = True
            return ModuleSpec(name, self)  # type: ignore[arg-type]
        top = name.partition(".")[0]
        if top in OURS or top in sys.stdlib_module_names or PathFinder.find_spec(name, path) is None:
            return None
        self.complete()
        module = sys.modules.get(name)
        if module is None:
            return None
        # Imported meanwhile: importlib would load it again, by the specification that it has.
        module.__spec__ = ModuleSpec(name, There(module))  # type: ignore[arg-type]
        return module.__spec__

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """It stays empty."""

    def end(self) -> None:
        """After torch's import: take the empty module away, for the true one to be found."""
        self.importing = False
        if not self.left_out:
            self.complete()
            return
        sys.modules.pop(LATE, None)
        vars(sys.modules["torch"]).pop(LATE.partition(".")[2], None)

    def complete(self) -> None:
        """Import what was left out; a second time there is nothing to do."""
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return
        if self.left_out:
            importlib.import_module(LATE)


class There:
    """The loader of a module that was imported while it was looked for."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The one that is there."""
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""
        module.__spec__ = self.spec


def import_torch(version: str) -> None:
    """Import torch; where it is of this version, without what is late."""
    late = Late(version)
    sys.meta_path.insert(0, late)
    try:
        importlib.import_module("torch")
    except ImportError:  # moeroute's own import will say so
        sys.meta_path.remove(late)
    else:
        late.end()
