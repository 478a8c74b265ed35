"""`moeroute verify` and `moeroute cases`: what the command line does with the table."""

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from moeroute import dispatch
from moeroute.conformance import verification

Tell = Callable[[int, int], None]


@contextlib.contextmanager
def progress(words: str) -> Iterator[Tell]:
    """A bar on standard error: by rich, where it is installed and somebody looks."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda done, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(words, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def verify(chosen: argparse.Namespace, devices: Sequence[torch.device]) -> int:
    """Every case on every backend and device that can run here, or a target's functions."""
    if verification.flushes_subnormals():
        print(
            "warning: denormal numbers are flushed to zero (torch.set_flush_denormal): expected results are computed "
            "without; Triton's interpreter, and the reference on another device, may differ"
        )
    if chosen.target:
        return _target(chosen)
    names = [chosen.backend] if chosen.backend else dispatch.NAMES
    for name in names:
        if (reason := dispatch.unavailable(name)) is not None:
            print(f"backend {name}: not available: {reason}")
    wanted = [chosen.device] if chosen.device else devices
    places = [
        (name, device)
        for device in wanted
        for name in names
        if verification.can_run(name, device) or (name == chosen.backend == "reference")
    ]
    if not places:
        where = f"{', '.join(names)} on {', '.join(map(str, wanted))}"
        print(f"nothing to compare with the reference on the CPU: {where}")
        return 1
    with progress("verify") as tell:
        outcomes = verification.run(places, chosen.only, chosen.seed, tell=tell)
    if not outcomes:
        raise SystemExit(f"moeroute verify: no check's name contains {chosen.only!r}")
    failed = [outcome for outcome in outcomes if not outcome.passed]
    for outcome in failed[:20]:
        print(f"{outcome.place}: {outcome.case}: {'; '.join(outcome.words)}")
    if len(failed) > 20:
        print(f"... and {len(failed) - 20} more")
    _write(chosen, outcomes)
    shown = ", ".join(name if device.type == "cpu" else f"{name} on {device}" for name, device in places)
    verdict = f"{len(failed)} differ from the reference" if failed else "same bits as the reference"
    print(f"{len({outcome.case for outcome in outcomes})} checks of {shown}: {verdict}")
    return 1 if failed else 0


def _write(chosen: argparse.Namespace, outcomes: Sequence[verification.Outcome]) -> None:
    from moeroute.conformance import tables

    if chosen.json:
        lines = [
            {
                "case": o.case,
                "place": o.place,
                "passed": o.passed,
                "words": list(o.words),
                "seconds": round(o.seconds, 6),
            }
            for o in outcomes
        ]
        chosen.json.write_text(json.dumps({"passed": all(o.passed for o in outcomes), "cases": lines}, indent=1) + "\n")
    if chosen.junit:
        found = [(outcome.place, outcome.case, outcome.words, outcome.seconds) for outcome in outcomes]
        chosen.junit.write_text(tables.junit("moeroute verify", found))


def _target(chosen: argparse.Namespace) -> int:
    """Judge the functions of a module."""
    from moeroute.conformance import pages, tables, targets
    from moeroute.conformance.judging import judge

    sys.path.insert(0, str(Path.cwd()))  # as python -m does
    try:
        functions, signature = targets.load(chosen.target, chosen.signature)
        with progress(chosen.target) as tell:
            options: dict[str, Any] = dict(functions)
            judgement = judge(
                arithmetic=chosen.arithmetic,
                signature=signature,
                device=chosen.device or "cpu",
                only=chosen.only,
                autograd=chosen.autograd,
                large=chosen.large,
                tell=tell,
                name=chosen.target,
                **options,
            )
    except ValueError as error:
        raise SystemExit(f"moeroute verify: {error}") from None
    finally:
        sys.path.pop(0)
    print(judgement)
    if chosen.json:
        chosen.json.write_text(tables.as_json(judgement))
    if chosen.junit:
        found = [(v.operator, v.case, v.words, v.seconds) for v in judgement.verdicts]
        chosen.junit.write_text(tables.junit(chosen.target, found))
    if chosen.html:
        chosen.html.write_text(pages.html(judgement))
    return 0 if judgement.passed else 1


def cases(chosen: argparse.Namespace) -> int:
    """`moeroute cases export | compare`."""
    from moeroute.conformance import files, pages, tables

    try:
        if chosen.cases_command == "export":
            with progress("export") as tell:
                count = files.export(chosen.folder, chosen.format, chosen.only, tell)
            print(f"written: {count} cases and manifest.json to {chosen.folder}")
            return 0
        with progress("compare") as tell:
            judgement = files.compare(chosen.folder, chosen.arithmetic, chosen.only, tell)
    except files.Refused as error:
        raise SystemExit(f"moeroute cases: {error}") from None
    print(judgement)
    if chosen.json:
        chosen.json.write_text(tables.as_json(judgement))
    if chosen.html:
        chosen.html.write_text(pages.html(judgement))
    return 0 if judgement.passed else 1
