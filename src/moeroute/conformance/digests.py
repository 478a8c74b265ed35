"""`make digests`: remake digests.json from the reference, each result confirmed by `exact` before it is written.

python -m moeroute.conformance.digests          write the file
python -m moeroute.conformance.digests --check  say what would change; exit status 1 where something would
"""

import argparse
import importlib.resources
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from moeroute.conformance.case import DIGESTS, Case, digests_of, expected_digests, inputs_digest
from moeroute.conformance.exact import refusals
from moeroute.conformance.table import cases
from moeroute.conformance.verification import one_thread, subnormals_kept


def made(
    wanted: Iterable[Case], tell: Callable[[str], None] = lambda name: None
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """The digests of these cases' inputs and reference results, and what the exact computation does not confirm."""
    found, refused = {}, []
    with subnormals_kept(), one_thread():
        for case in wanted:
            tell(case.name)
            arguments = case.arguments()
            results = case.run(arguments, "reference")
            refused += refusals(case, arguments, results)
            found[case.name] = {"inputs": inputs_digest(case.arguments()), **digests_of(results)}
    return found, refused


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the file; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m moeroute.conformance.digests")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where something would change")
    chosen = parser.parse_args(arguments)
    found, refused = made(cases())
    say = sys.stdout.write
    for line in refused[:20]:
        say(f"not confirmed: {line}\n")
    if refused:
        say(f"{len(refused)} results are not what the exact computation gives; nothing is written\n")
        return 1
    former = expected_digests() if importlib.resources.files(__package__).joinpath(DIGESTS).is_file() else {}
    changed = sorted(name for name in found.keys() & former.keys() if found[name] != former[name])
    added, gone = sorted(found.keys() - former.keys()), sorted(former.keys() - found.keys())
    for what, names in (("changed", changed), ("new", added), ("gone", gone)):
        if names:
            say(f"{what}: {len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})\n")
    if not chosen.check:
        text = json.dumps(found, indent=0, sort_keys=True) + "\n"
        Path(__file__).with_name(DIGESTS).write_text(text)
    say(f"{len(found)} cases, every result confirmed\n")
    return 1 if chosen.check and (changed or added or gone) else 0


if __name__ == "__main__":
    raise SystemExit(main())
