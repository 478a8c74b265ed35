"""What mkdocs does beside its configuration: pages that may be absent, and the changelog from the project's root."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Pages of the navigation that a checkout may lack; another missing page is an error.
OPTIONAL = {"judge.md", "layer.md", "expert_parallel.md"}


def on_config(config: Any) -> Any:
    """Leave out the optional pages that are not there."""
    config.nav = _present(config.nav, Path(config.docs_dir))
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The changelog is the file beside README; links that start at the project's root go to the repository."""
    if page.file.src_path == "changelog.md":
        return (ROOT / "CHANGELOG.md").read_text()
    return markdown


def _present(entries: list[Any], docs: Path) -> list[Any]:
    found = []
    for entry in entries:
        if isinstance(entry, dict):
            ((title, value),) = entry.items()
            if isinstance(value, list):
                found.append({title: _present(value, docs)})
            elif value not in OPTIONAL or (docs / value).exists():
                found.append(entry)
        else:
            found.append(entry)
    return found
