"""The specialisations of the Triton kernels that the launchers choose, recorded without a GPU.

The launchers are called on the inputs of `launch_cases.py`, with a driver that reports a device and has none. Triton
asks a hook whether to compile; the hook records the launch and refuses. `machine_code.py` compiles what was recorded.

TRITON_INTERPRET must be unset.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Case = tuple[str, Callable[[], Any]]

# The backend, its name for the architecture, and lanes of a warp.
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}


@dataclass(frozen=True)
class Specialisation:
    """What decides about the machine code of a kernel."""

    kernel: str  # module:name
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[int, Any], ...]  # by position; None where a tensor is absent
    attributes: tuple[tuple[int, tuple[tuple[str, int], ...]], ...]
    warps: int
    registers: int | None  # the most of a thread; None: ptxas weighs them against occupancy
    fused: bool  # may the compiler fuse a multiplication with an addition
    case: str = field(compare=False)  # who asked for it first

    @property
    def name(self) -> str:
        return self.kernel.partition(":")[2]

    @property
    def named_constants(self) -> dict[str, Any]:
        return {self.signature[at][0]: value for at, value in self.constants}

    @property
    def divisible(self) -> set[str]:
        """Pointers and integers known to be multiples of 16."""
        return {self.signature[at][0] for at, found in self.attributes if ("tt.divisibility", 16) in found}

    @property
    def limit(self) -> dict[str, int]:
        return {} if self.registers is None else {"maxnreg": self.registers}

    def __str__(self) -> str:
        """The types, absent tensors as `-`, then the constants."""
        constants = self.named_constants
        pointers = [
            "-" if constants.get(name, 0) is None else kind.removeprefix("*")
            for name, kind in self.signature
            if kind.startswith("*") or constants.get(name, 0) is None
        ]
        chosen = [f"{name}={value}" for name, value in constants.items() if name.isupper()]
        return " ".join([*pointers, *chosen, f"warps={self.warps}"])


class NothingUnwritten(TorchFunctionMode):
    """Fresh tensors are zero: a launcher may read a size from one that no kernel has filled."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.empty, torch.empty_like, Tensor.new_empty) and result.nbytes < 2**26:
            result.zero_()
        return result


class NoDevice:
    """As much of a driver as a launch needs until it compiles."""

    def __init__(self, target: str) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(*TARGETS[target])
        self.device = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        return self.device

    def get_current_stream(self, device: str) -> int:
        return 0


def record(target: str, cases: Iterable[Case]) -> list[Specialisation]:
    """The launches of the cases, in order, on a device of this kind."""
    import triton

    found: list[Specialisation] = []
    current = ""

    def refuse(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found.append(
            Specialisation(
                kernel=f"{fn.module}:{fn.name}",
                signature=tuple(compile["signature"].items()),
                constants=tuple((path[0], value) for path, value in compile["constants"].items()),
                attributes=tuple((path[0], tuple(map(tuple, a))) for path, a in compile["configs"][0].items() if a),
                warps=compile["num_warps"],
                registers=json.loads(compile["specialization_data"])["options"].get("maxnreg"),
                fused=compile["enable_fp_fusion"],
                case=current,
            )
        )
        return True

    triton.runtime.driver.set_active(NoDevice(target))
    triton.knobs.runtime.jit_cache_hook = refuse
    try:
        with NothingUnwritten():
            for current, call in cases:  # noqa: B007
                call()
    finally:
        triton.knobs.runtime.jit_cache_hook = None
    return found


def distinct(launches: Iterable[Specialisation]) -> list[Specialisation]:
    """Each specialisation once, in the order of first use."""
    return list(dict.fromkeys(launches))


def cover(found: Iterable[Specialisation]) -> list[Specialisation]:
    """A few that have, of each kernel, each type, constant and alignment of each argument at least once.

    The next one is always that with the most that none before it had; of equals the first.
    """
    features = {one: _features(one) for one in found}
    kept: list[Specialisation] = []
    while features:
        best = max(features, key=lambda one: len(features[one]))
        kept.append(best)
        seen = features.pop(best)
        features = {one: left for one, had in features.items() if (left := had - seen)}
    return kept


def _features(one: Specialisation) -> set[tuple[str, Any]]:
    return {
        (one.kernel, feature)
        for feature in (
            *one.signature,
            *((name, str(value)) for name, value in one.named_constants.items()),
            *((name, name in one.divisible) for name, _ in one.signature),
        )
    }
