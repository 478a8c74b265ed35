"""Calls that want to break the package, each kind in a process of its own; the results go into docs/reliability.md.

    python tools/torture.py --minutes 10          all kinds, each its share of the time
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

# What is done, and its share of the time: ten minutes make 60 of them.
KINDS = {
    "properties": (9, "every function of moeroute and moeroute.nn with random sizes, dtypes and options, and the table "
                      "of cases: both backends give the same bits, plans are permutations"),
    "lies": (6, "every public function with arguments that are something else: a result, or an error of ours"),
    "indices": (3, "plans made of random bytes: the same bits on both backends, nothing read outside"),
    "handles": (4, "a C program calls every function of the C interface with random handles, sizes and lies, in one "
                   "thread and in four, while it forks"),
    "sanitizers": (9, "the same program and the library under AddressSanitizer and UBSan; any report fails, and so "
                      "does a planted fault that is not reported"),
    "threads": (7, "8 threads make every small call in random order; every result is compared"),
    "forks": (4, "processes fork while others compute; every child computes and compares"),
    "interrupts": (5, "an exception raised by a timer at random lines; the next results are compared"),
    "memory": (4, "large calls under a limit on the address space: an error or the result, and the next call works"),
    "leaks": (5, "small calls without end, some of them refused: the resident memory must not grow"),
    "disk": (4, "kernels compiled on a full disk, on one for reading only, and where files may not grow; every "
                "result is compared"),
}  # fmt: skip


def main() -> int:
    """Run the kinds one after the other, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all kinds together (default: 10)")
    parser.add_argument("--only", default="", help="kinds whose name contains this; the page stays as it is")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: 0)")
    chosen = parser.parse_args()
    kinds = [kind for kind in KINDS if chosen.only in kind]
    if not kinds:
        parser.error(f"--only must be a part of {', '.join(KINDS)}")
    parts = sum(KINDS[kind][0] for kind in kinds)
    # Compiled before the clocks start: a new checkout would spend most of a short run on that.
    subprocess.run([sys.executable, "-m", "moeroute", "info", "--warm"], check=True, capture_output=True)
    results = {}
    for kind in kinds:
        results[kind] = attempt(kind, 60 * chosen.minutes * KINDS[kind][0] / parts, chosen.seed)
        print(f"{kind:<11} {results[kind]}", flush=True)
    if not chosen.only:
        PAGE.write_text(page(results, chosen.minutes, chosen.seed))
    return 1 if any(result.startswith("FAILED") for result in results.values()) else 0


def attempt(kind: str, seconds: float, seed: int) -> str:
    """One kind in a process of its own, in words."""
    code = f"import torture_kinds as t; t.run({kind!r}, {seconds}, {seed})"
    folders = [str(ROOT / folder) for folder in ("tools", "tests", "src")]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
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
        print(done.stderr[-6000:], file=sys.stderr)
        said = done.stderr.strip().splitlines()[-1:] or [""]
        return f"FAILED: {how}, seed {seed}: {said[0][:300]}"
    told = json.loads(done.stdout.strip().splitlines()[-1])
    return f"passed: {told['calls']:,} {told['what']}" if told["calls"] else told["what"]


def page(results: dict[str, str], minutes: float, seed: int) -> str:
    """docs/reliability.md."""
    rows = [f"| {kind} | {KINDS[kind][1]} | {result.replace('|', ' ')} |" for kind, result in results.items()]
    when = f"{time.strftime('%Y-%m-%d')}, {platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    command = f'make torture ARGS="--minutes {minutes:g} --seed {seed}"'
    return f"""# Reliability

`make torture` is a run of calls that want to break something: `tools/torture.py`, ten minutes as a rule, no part of
`make test`. Each kind is a process of its own with its share of the time; it passes when that ends by itself after
every check held.

The last run: `{command}`, {when}.{" A short run finds less than a long one." if minutes < 10 else ""}

| kind | what is done | result |
| --- | --- | --- |
{chr(10).join(rows)}

Of the kinds:

- `sanitizers` compiles all C of this package, the code that cffi makes of it included, and the calling program with
  `-fsanitize=address,undefined`; the first report ends the program and fails the kind. Two reports are off: of leaks,
  since a Python interpreter that ends leaves memory behind (`leaks` looks for those), and of sizes that no machine has,
  which are drawn and must be refused. Python, torch and the compiled kernels are as installed: of them the sanitizers
  see allocations and copies, not each access. What a C library cannot check is not tried: pointers to outputs and host
  memory are null or right. Processes fork from one thread there; beside four threads they fork in `handles`, which is
  the same program without the sanitizers. With both at once a child can hang: a stack that was looked at waits
  for a lock of the sanitizer's allocator, which another thread held at the fork.
- `lies` calls functions under other libraries' names with arguments of the declared types and nothing else in common,
  so most are refused; valid ones are among the cases in `properties`, twice with the default backend. In
  `lies` they may raise ValueError, TypeError, RuntimeError, NotImplementedError or ImportError, whatever the words.
- `properties` compares two calls where a function takes no backend, only shapes of `nn.Experts` and `nn.Router`, and
  the routing of `nn.MoE`, whose products are torch's.
- Not drawn: what `LEFT_OUT` in `tools/torture_calls.py` lists; `moeroute.interop.huggingface`, which needs its host;
  `moeroute.expert_parallel`, `moeroute.testing` and `moeroute.conformance`. The tests have them.
- Not done: anything on a GPU.

`make test` has the same kinds in small, with fixed inputs: threads, forks, interrupts, memory that ends at a page that
nobody may read, damaged files of compiled kernels, and registered operators called with sizes that lie.
"""


if __name__ == "__main__":
    sys.exit(main())
