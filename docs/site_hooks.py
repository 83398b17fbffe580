"""Brings what the pages link to outside `docs/` into the site, under `repository/`.

In the source, links are relative to the page, so that they work where the repository is read.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = "repository/"
_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")


def _target(page: str, link: str) -> str | None:
    """Path in the repository of the file that `link` on a page of the site leads to."""
    here = page.removeprefix(OUTSIDE) if page.startswith(OUTSIDE) else f"docs/{page}"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link))
    return target if (ROOT / target).is_file() else None


def _site_path(target: str) -> str:
    return target.removeprefix("docs/") if target.startswith("docs/") else OUTSIDE + target


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds every linked file of the repository, and what the added pages link to."""
    pages = list(files.documentation_pages())
    while pages:
        page = pages.pop()
        for link in _LINK.findall(page.content_string):
            target = _target(page.src_uri, link)
            if target is None or files.get_file_from_path(_site_path(target)):
                continue
            added = File.generated(config, _site_path(target), abs_src_path=str(ROOT / target))
            files.append(added)
            if added.is_documentation_page():
                pages.append(added)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Points links to where the files are in the site."""
    here = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        target = _target(here, link[1])
        if target is None:
            return link[1]
        return posixpath.relpath(_site_path(target), posixpath.dirname(here))

    return _LINK.sub(moved, markdown)
