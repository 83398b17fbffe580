"""Brings what the pages link to outside `docs/` into the site, under `repository/`.

In the source the links are relative to the page, so that they work where the repository is read.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")


def _outside(page: str, link: str) -> str | None:
    """Path from the repository's root of what `link` on `page` (a path below docs/) leads to; None
    if that is below docs/ itself."""
    target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if target.startswith("docs/") else target


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds every linked file of the repository, once."""
    for page in list(files.documentation_pages()):
        for link in _LINK.findall(Path(page.abs_src_path or "").read_text()):
            target = _outside(page.src_uri, link)
            where = f"repository/{target}"
            if target is not None and (ROOT / target).is_file() and not files.src_uris.get(where):
                files.append(File.generated(config, where, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Points those links to where the files are in the site."""

    def moved(link: re.Match[str]) -> str:
        target = _outside(page.file.src_uri, link[1])
        if target is None:
            return link[1]
        return posixpath.relpath(f"repository/{target}", posixpath.dirname(page.file.src_uri))

    return _LINK.sub(moved, markdown)
