"""Checks that files of the repository linked from the site exist, and points the links to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """CONTRIBUTING.md is a page of the site, too."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    moved = _LINK.sub(lambda m: f"]({_from_docs(m[1])}{m[2] or ''})", text)
    files.append(File.generated(config, "contributing.md", content=moved))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    folder = (Path(config["docs_dir"]) / page.file.src_uri).parent

    def resolve(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if files.get_file_from_path(link[1]) is not None or target.is_relative_to(config["docs_dir"]):
            return link[0]  # a page of the site; mkdocs checks it
        if not target.exists():
            raise PluginError(f"{page.file.src_uri}: {link[1]} is neither a page nor a file of the repository")
        path = target.relative_to(ROOT).as_posix()
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config['repo_url']}/{kind}/main/{path}{link[2] or ''})"

    return _LINK.sub(resolve, markdown)


def _from_docs(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"
