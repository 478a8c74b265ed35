"""W processes that meet over gloo, forked from one that has imported torch and loaded the kernels.

As a script, `forked.py FOLDER WORLDS [NAMES]`: for each W runs the `cases(W)` of all modules in W processes, then each
of their `faults(W)` in W processes of its own. Prints a line for each, one that starts with "wrong" where it failed.
"""

import datetime
import importlib
import mmap
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # DTensor imports it in each rank, which takes seconds
import torch.distributed as dist

TIMEOUT = 2.0  # of the groups in which something goes wrong, in seconds
Case = Callable[[int, int], None]  # world, rank


def start(case: Case, world: int, rank: int, meet: Path, timeout: float) -> int:
    """Fork a rank; its process number. It exits with 0 if nothing is raised."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", f"file://{meet}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout)
        )
        case(world, rank)
        status = 0
    except BaseException:
        text = traceback.format_exc()
        sys.stderr.write(f"rank {rank} of {world}:\n{text}\n")
        sys.stderr.flush()
    os._exit(status)


_begun = mmap.mmap(-1, 8)  # shared with the ranks


def mark() -> None:
    """Count the seconds of `run` from here."""
    _begun[:] = struct.pack("d", time.monotonic())


def run(case: Case, world: int, meet: Path, timeout: float) -> tuple[list[int], float]:
    """The wait statuses of all ranks, and the seconds from the last `mark` until the last of them ended."""
    mark()
    children = [start(case, world, rank, meet, timeout) for rank in range(world)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return statuses, time.monotonic() - struct.unpack("d", _begun[:])[0]


MODULES = ("exact", "faults", "wrappers", "paper")
FOLDER = Path()


def main() -> None:
    """Everything, or what has one of the names."""
    global FOLDER
    folder, worlds, names = Path(sys.argv[1]), [int(world) for world in sys.argv[2].split(",")], sys.argv[3:]
    FOLDER = folder
    modules = [importlib.import_module(f"ranks.{name}") for name in MODULES]
    modules[0].warm()

    def asked(kind: str, world: int) -> list[Case]:
        found = [case for module in modules if hasattr(module, kind) for case in getattr(module, kind)(world)]
        return [case for case in found if not names or case.__name__ in names]

    def every(world: int, rank: int) -> None:
        for case in asked("cases", world):
            begun = time.monotonic()
            case(world, rank)
            if rank == 0:
                print(f"{case.__name__}: {time.monotonic() - begun:.1f} s", flush=True)
        dist.barrier()
        dist.destroy_process_group()

    for world in worlds:
        statuses, seconds = run(every, world, folder / f"cases{world}", 60)
        print(f"{'wrong' if any(statuses) else 'right'}: W={world}, {statuses} in {seconds:.1f} s", flush=True)
        for fault in asked("faults", world):
            statuses, seconds = run(fault, world, folder / f"{fault.__name__}{world}", TIMEOUT)
            expected = [0] * (world - 1) + [-signal.SIGKILL if fault.__name__ == "killed" else 0]
            verdict = "right" if statuses == expected and seconds < TIMEOUT + 5 else "wrong"
            print(f"{verdict}: W={world}, {fault.__name__}: {statuses} in {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    importlib.import_module("ranks.forked").main()  # the module that the cases import
