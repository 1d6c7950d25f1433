"""Hooks of the site: links that leave docs/ lead to copies of those files, which the site carries."""

from __future__ import annotations

import posixpath
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs_build.links import find_links

ROOT = Path(__file__).parent.parent
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
}
ORIGINS = {page: origin for origin, page in PAGES.items() if origin != "README.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/, and a copy of each file that any page links."""
    # pages that the repository keeps at its top
    for page, origin in ORIGINS.items():
        files.append(File.generated(config, page, content=(ROOT / origin).read_text()))
    copied = set()
    for file in files.documentation_pages():
        for link in find_links(file.content_string):
            path = path_in_repository(file.src_uri, link[0])
            # a page of the site needs no copy
            if (
                path is not None
                and site_path(path).startswith("source/")
                and (ROOT / path).is_file()
            ):
                copied.add(path)
    for path in sorted(copied):
        files.append(File.generated(config, site_path(path), content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links to its neighbours on the site."""
    source = page.file.src_uri
    folder = posixpath.dirname(source) or "."
    # from the last to the first, so that the offsets of the others stay
    for link in sorted(find_links(markdown), key=lambda link: -link.start()):
        path = path_in_repository(source, link[0])
        if path is None:
            continue
        address = posixpath.relpath(site_path(path), folder)
        # a copy is shown as text, which has no headings
        if address.endswith(".md"):
            address += link[0][len(link[0].partition("#")[0]) :]
        markdown = markdown[: link.start()] + address + markdown[link.end() :]
    return markdown


def path_in_repository(source: str, address: str) -> str | None:
    """Return the file that a page's link names, from the repository's top; None for other sites and the page itself."""
    path = address.partition("#")[0]
    if not path or ":" in path:
        return None
    origin = ORIGINS.get(source, f"docs/{source}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))


def site_path(path: str) -> str:
    """Return where the site has a file of the repository: a page, or a copy that browsers show as text."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path, f"source/{path}.txt")
