"""W processes that meet over gloo, forked from one that has imported torch and loaded the kernels.

As a script, `forked.py MODULE W FOLDER`: runs every function of `ranks.MODULE.cases(W)` in W processes, then every
one of `ranks.MODULE.faults(W)` in W processes of its own. Prints what went wrong; exits with the number of failures.
"""

import datetime
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
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


def run(case: Case, world: int, meet: Path, timeout: float) -> tuple[list[int], float]:
    """The wait statuses of all ranks, and the seconds until the last of them ended."""
    begun = time.monotonic()
    children = [start(case, world, rank, meet, timeout) for rank in range(world)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return statuses, time.monotonic() - begun


def main() -> int:
    name, world, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    module = importlib.import_module(f"ranks.{name}")
    module.warm()
    failures = 0

    def every(world: int, rank: int) -> None:
        for case in module.cases(world):
            begun = time.monotonic()
            case(world, rank)
            if rank == 0:
                print(f"{case.__name__}: {time.monotonic() - begun:.1f} s", flush=True)
        dist.barrier()
        dist.destroy_process_group()

    statuses, seconds = run(every, world, folder / "all", 60)
    print(f"cases: {statuses} in {seconds:.1f} s", flush=True)
    failures += any(statuses)
    for fault in getattr(module, "faults", lambda _: [])(world):
        statuses, seconds = run(fault, world, folder / fault.__name__, TIMEOUT)
        print(f"{fault.__name__}: {statuses} in {seconds:.1f} s", flush=True)
        killed = -signal.SIGKILL if fault.__name__ == "killed" else 0
        expected = [killed if rank == world - 1 else 0 for rank in range(world)]
        failures += statuses != expected or seconds > TIMEOUT + 5
    return failures


if __name__ == "__main__":
    sys.exit(main())
