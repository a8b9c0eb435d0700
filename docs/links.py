"""A hook of mkdocs: links that lead out of docs/ go to the repository."""

from __future__ import annotations

import posixpath
import re
from typing import Any

OUTSIDE = re.compile(r"\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrite ``../src/...`` and the like; links between pages stay."""
    folder = posixpath.dirname(page.file.src_uri)

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match[1].partition("#")[0]))
        if path.startswith("docs/"):
            return match[0]
        return f"]({config.repo_url}/blob/main/{path})"

    return OUTSIDE.sub(target, markdown)
