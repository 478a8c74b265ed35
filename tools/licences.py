"""The licences of what the package and its development install, from their own metadata, into docs/licences.md."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
HEAD = """# Licences

moeroute is under the MIT licence (`LICENSE`). It contains no code of others and ships no package of others; what it
installs beside itself has the licences below, as these packages state them. Written by `python tools/licences.py` in
the environment of `make test` and `make docs`; a package that is not installed there is not listed.

| package | for | licence |
| --- | --- | --- |
"""


def requirements() -> dict[str, set[str]]:
    """The distributions that pyproject.toml names, and the extras that want them; "" is the package itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"]} | project["optional-dependencies"]
    found: dict[str, set[str]] = {}
    for extra, lines in groups.items():
        for line in lines:
            if match := re.match(r"[\w.-]+", line):
                found.setdefault(match[0].lower(), set()).add(extra)
    found.pop("moeroute", None)
    return found


def licence(package: str) -> str | None:
    """What the installed distribution says of itself; None where it is not installed."""
    try:
        about = importlib.metadata.metadata(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    classified = [c.split(" :: ")[-1] for c in about.get_all("Classifier") or [] if c.startswith("License :: ")]
    own = [text for name in ("License-Expression", "License") for text in about.get_all(name) or [] if text]
    said = (own[0] if "License-Expression" in about else "; ".join(classified) or "".join(own[:1])) or "not stated"
    first = str(said).splitlines()[0]
    return first if len(first) <= 80 else first[:79] + "…"


def page() -> str:
    """docs/licences.md."""
    lines = []
    for package, extras in sorted(requirements().items()):
        said = licence(package)
        if said is not None:
            where = ", ".join(sorted(f"extra {extra}" if extra else "the package" for extra in extras))
            lines.append(f"| {package} | {where} | {said} |")
    return HEAD + "\n".join(lines) + "\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page())
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
