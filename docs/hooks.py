"""The hooks of mkdocs.yml: they build the site from pages that are written to be read in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: The pages outside docs/. mkdocs makes a README the home page.
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s:#]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Put every page under its path in the repository, so that the links between pages are right as they stand."""
    own = [file for file in files if file.src_dir == config.docs_dir]
    for file in own:
        files.remove(file)
    shown = (f"docs/{file.src_uri}" for file in own if file.inclusion.is_included())
    for path in (*PAGES, *shown):
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace each link to a file of the repository that is not on the site by the file's path."""

    def spelled_out(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = normpath(join(dirname(page.file.src_uri), target))
        if path in files.src_uris or not (ROOT / path).exists():
            return link[0]  # mkdocs makes the link, or warns of it
        return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"

    return LINK.sub(spelled_out, markdown)
