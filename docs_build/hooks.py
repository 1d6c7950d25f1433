"""The site's hooks: links that leave docs/ lead to copies of those files, which the site carries."""

from __future__ import annotations

import posixpath
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs_build.links import find_links

ROOT = Path(__file__).parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
ORIGINS = {page: origin for origin, page in PAGES.items() if origin != "README.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/, and a copy of each file that any page links."""
    for page, origin in ORIGINS.items():
        files.append(File.generated(config, page, content=(ROOT / origin).read_text()))
    copied = set()
    for file in files.documentation_pages():
        for link in find_links(file.content_string):
            path = path_in_repository(file.src_uri, link[0])
            if path and site_path(path).startswith("source/") and (ROOT / path).is_file():
                copied.add(path)
    for path in sorted(copied):
        files.append(File.generated(config, site_path(path), content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links to its neighbours on the site."""
    source = page.file.src_uri
    pieces, end = [], 0
    for link in sorted(find_links(markdown), key=lambda found: found.start()):
        path = path_in_repository(source, link[0])
        if path:
            _, mark, anchor = link[0].partition("#")
            address = posixpath.relpath(site_path(path), posixpath.dirname(source) or ".")
            is_page = address.endswith(".md")
            pieces += [markdown[end : link.start()], address, mark + anchor if is_page else ""]
            end = link.end()
    return "".join(pieces) + markdown[end:]


def path_in_repository(source: str, address: str) -> str | None:
    """The file that a page's link names, from the repository's top; None for other machines and the page itself."""
    path = address.partition("#")[0]
    if not path or ":" in path:
        return None
    origin = ORIGINS.get(source, f"docs/{source}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))


def site_path(path: str) -> str:
    """Where the site has a file of the repository: a page, or a copy that browsers show as text."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path, f"source/{path}.txt")
