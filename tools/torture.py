"""Calls that want to break the package, each kind in a process of its own; the results go into docs/reliability.md.

    python tools/torture.py --minutes 10          all kinds, in equal shares of the time
    python tools/torture.py --only forks --seed 7

A kind passes when its process ends by itself, with status 0, after every check held. A crash, a hang (twice its share
and five minutes) and a wrong result are failures, told with the seed. Needs Linux; the C interface a C compiler.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
KINDS = {
    "properties": "random sizes, dtypes and options: both backends give the same bits, plans are permutations",
    "indices": "plans made of random bytes: the same bits on both backends, nothing read outside",
    "handles": "random handles, sizes and lies for tensors and for both phases of every operator of the C interface",
    "threads": "8 threads call the same operators; every result is compared",
    "forks": "processes fork while others compute; every child computes and compares",
    "interrupts": "an exception raised by a timer at random lines; the next result is compared",
    "memory": "large calls under a limit on the address space: an error or the result, and the next call works",
    "leaks": "calls without end: the resident memory must not grow",
    "disk": "kernels compiled where no file can be written; every result is compared",
}


def main() -> int:
    """Run the kinds one after the other, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all kinds together (default: 10)")
    parser.add_argument("--only", default="", help="kinds whose name contains this; the page stays as it is")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: 0)")
    chosen = parser.parse_args()
    kinds = [kind for kind in KINDS if chosen.only in kind]
    share = chosen.minutes * 60 / max(len(kinds), 1)
    results = {}
    for kind in kinds:
        results[kind] = attempt(kind, share, chosen.seed)
        print(f"{kind:<11} {results[kind]}", flush=True)
    if not chosen.only:
        PAGE.write_text(page(results, chosen.minutes, chosen.seed))
    return 0 if all(result.startswith("passed") for result in results.values()) else 1


def attempt(kind: str, seconds: float, seed: int) -> str:
    """One kind in a process of its own, in words."""
    code = f"import torture_kinds as t; t.run({kind!r}, {seconds}, {seed})"
    path = os.pathsep.join([str(ROOT / "tools"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "MOEROUTE_QUIET": "1"}
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=2 * seconds + 300, check=False
        )
    except subprocess.TimeoutExpired:
        return f"FAILED: hangs (seed {seed})"
    if done.returncode != 0:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        said = done.stderr.strip().splitlines()[-1:] or [""]
        return f"FAILED: {how}, seed {seed}: {said[0][:160]}"
    told = json.loads(done.stdout.strip().splitlines()[-1])
    return f"passed: {told['calls']:,} {told['what']}"


def page(results: dict[str, str], minutes: float, seed: int) -> str:
    """docs/reliability.md."""
    rows = [f"| {kind} | {KINDS[kind]} | {result} |" for kind, result in results.items()]
    when = f"{time.strftime('%Y-%m-%d')}, {platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    return f"""# Reliability

`make torture` is a run of calls that want to break something: `tools/torture.py`, ten minutes as a rule, no part of
`make test`. Each kind is a process of its own; it passes when that ends by itself after every check held.

The last run: `make torture ARGS="--minutes {minutes:g} --seed {seed}"`, {when}. A short run finds less than a long one.

| kind | what is done | result |
| --- | --- | --- |
{chr(10).join(rows)}

Not done: the C interface under AddressSanitizer and UBSan, and anything on a GPU.

`make test` has the same kinds in small, with fixed inputs: threads, forks, interrupts, memory that ends at a page that
nobody may read, damaged files of compiled kernels, and registered operators called with sizes that lie.
"""


if __name__ == "__main__":
    sys.exit(main())
