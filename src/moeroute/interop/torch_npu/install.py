"""Putting this package's torch_npu where programs look for it, and taking it away again."""

import importlib.util
import sys
from typing import Any

import torch
import torch.distributed as dist

from moeroute.interop.torch_npu import host
from moeroute.interop.torch_npu.arguments import FUNCTIONS
from moeroute.interop.torch_npu.schemas import publish_all
from moeroute.memory import set_memory_pool

_ABSENT = object()


class _Installed:
    """What was replaced, and by what it is to be replaced again."""

    def __init__(self) -> None:
        self.attributes: list[tuple[Any, str, Any]] = []
        self.modules: dict[str, Any] = {}
        self.pool: dict[str, Any] = {}
        self.mode: host.OnThisDevice | None = None

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute and remember what it was."""
        self.attributes.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back, the last first."""
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
        for owner, name, former in reversed(self.attributes):
            if former is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, former)
        for name, module in self.modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        if _named():  # torch asks the module of the name that it keeps whether there is such a device
            sys.modules["torch.npu"] = host.absent_module()
            setattr(torch, "npu", sys.modules["torch.npu"])  # noqa: B010 - torch has no such attribute for mypy
        set_memory_pool(**self.pool)


_installed: _Installed | None = None


def install(*, device_strings: bool = False) -> None:
    """Let `import torch_npu` find this package's functions, and torch what torch_npu adds to it.

    That is: the modules torch_npu and torch.npu, `torch.ops.npu`, `.npu()` of tensors and modules, `Tensor.is_npu`
    (False), `torch.histc` for integers on the CPU, and the backend "hccl" of torch.distributed, which is gloo. The
    memory pool is switched off, since programs for Ascend resize storages. A second call changes nothing, but for
    device_strings.

    Args:
        device_strings: devices named "npu" are the CPU in every call of torch in this thread, and in generators and
            autocast. To that end torch learns the name for good (`torch.utils.rename_privateuse1_backend`): after
            `uninstall` `torch.device("npu")` can still be named, though not used, and `torch.npu` says that there is no
            such device.

    Raises:
        RuntimeError: where the real torch_npu is installed.

    >>> from moeroute.interop.torch_npu import install, uninstall
    >>> install()
    >>> import torch, torch_npu
    >>> torch_npu.npu_swiglu(torch.tensor([[0.0, 1.0, 2.0, 3.0]])).npu()
    tensor([[0.0000, 2.1932]])
    >>> uninstall()
    """
    global _installed
    if _installed is None:
        _refuse_another()
        publish_all()
        _installed = _put()
    if device_strings and _installed.mode is None:
        _name_devices(_installed)


def uninstall() -> None:
    """Take away what `install` put in place. The operators of `torch.ops.npu` and the backend "hccl" stay."""
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None


def _refuse_another() -> None:
    """RuntimeError where another torch_npu is loaded or could be."""
    loaded = sys.modules.get("torch_npu")
    spec = importlib.util.find_spec("torch_npu") if loaded is None else None
    if loaded is not None or spec is not None:
        place = getattr(loaded, "__file__", None) if spec is None else spec.origin
        raise RuntimeError(
            "moeroute.interop.torch_npu.install: torch_npu must be no other than moeroute's; "
            f"got the one of {place or 'a module without a file'}"
        )


def _put() -> _Installed:
    done = _Installed()
    npu = host.npu_module()
    modules = {"torch.npu": npu, **host.torch_npu_modules(dict(FUNCTIONS), npu)}
    sys.modules.update(modules)
    done.modules = modules
    done.replace(torch, "npu", npu)
    done.replace(torch.Tensor, "npu", host.moved)
    done.replace(torch.Tensor, "is_npu", False)
    done.replace(torch.nn.Module, "npu", host.moved)
    counted = host.histc(torch.histc)
    done.replace(torch, "histc", counted)
    done.replace(torch.Tensor, "histc", counted)
    if dist.is_available():
        host.register_hccl()
        done.replace(torch._C._distributed_c10d.Backend, "get_hccl_comm_name", host.comm_name)
    done.pool = set_memory_pool(False)
    return done


def _named() -> bool:
    """Whether torch knows "npu" as the name of a device."""
    return torch._C._get_privateuse1_backend_name() == "npu"


def _name_devices(done: _Installed) -> None:
    """Let "npu" name a device; torch accepts the name once a process and keeps it."""
    if not _named():
        torch.utils.rename_privateuse1_backend("npu")  # type: ignore[attr-defined]
        # It would ask a driver of the named device, which is not there; fully_shard calls it.
        torch._C._get_accelerator = lambda check=None: torch.device("cpu")
    done.replace(torch, "Generator", host.Generator)
    done.replace(torch, "autocast", host.Autocast)
    done.replace(torch.amp, "autocast", host.Autocast)
    done.mode = host.OnThisDevice()
    done.mode.__enter__()
