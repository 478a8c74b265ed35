"""`python -m demo`: the options of `run`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from demo.model import DTYPES
from demo.run import PARTS, run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="demo", description="The same bits everywhere, the speed, and a training.")
    parser.add_argument(
        "--steps", type=_positive, help="of each training (default: 300, fewer where they take too long)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="float32", help="of tokens and experts in the training"
    )
    parser.add_argument("--threads", type=_positive, help="of each training process (default: torch's)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for charts and figures (default: out)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to show (default: all)")
    return run(**vars(parser.parse_args(arguments)))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
