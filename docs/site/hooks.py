"""What mkdocs does beside its configuration: the page of the changelog is the file in the root of the project."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The changelog is the file beside README."""
    if page.file.src_path == "changelog.md":
        return (ROOT / "CHANGELOG.md").read_text()
    return markdown
