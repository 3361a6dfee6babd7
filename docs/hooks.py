"""MkDocs: name files outside `docs/` by their path; link them if `repo_url` is set."""

import posixpath
import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]*)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Replace each link that leaves `docs/`, because the site does not hold its target."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def replace(found: re.Match[str]) -> str:
        path = posixpath.normpath(f"{folder}/{found[2]}")
        if config.repo_url:
            return f"[{found[1]}]({config.repo_url.rstrip('/')}/blob/main/{path}{found[3] or ''})"
        return f"{found[1]} (`{path}`)"

    return OUTSIDE.sub(replace, markdown)
