"""Check the links of the documents, or of the built site: `python -m docs_build.links [build/site]`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r" *(`{3,}|~{3,})")
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"(?<=\]\()[^()\s]*(?:\([^()\s]*\)[^()\s]*)*(?=[)\s])")
TAG = re.compile(r"""(?<=\bhref=")[^"]*|(?<=\bsrc=")[^"]*""")
HEADING = re.compile(r"#{1,6} +(.*?)(?: +#+)? *$")
IDENTIFIER = re.compile(r"""\bid="([^"]+)"|\{ *#([\w-]+) *\}""")
VERBATIM = ("pre", "code", "script", "style")
MARKUP = re.compile(r"\*\*|```|\]\(|\|-{3}")


def blank_code(markdown: str) -> str:
    """Return the text with code replaced by spaces, so that every character keeps its offset."""
    lines = []
    fence = ""  # the marks that opened a block of code
    for line in markdown.splitlines(keepends=True):
        match = FENCE.match(line)
        # a block ends with at least the marks that it began with
        is_fence = match is not None and match[1].startswith(fence)
        lines.append(_blank(line) if fence or is_fence else line)
        if match is not None and is_fence:
            fence = "" if fence else match[1]
    return CODE.sub(lambda code: _blank(code[0]), "".join(lines))


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def find_links(markdown: str) -> Iterator[re.Match[str]]:
    """Yield the addresses of all links and pictures outside code."""
    text = blank_code(markdown)
    yield from LINK.finditer(text)
    yield from TAG.finditer(text)


def slug(heading: str) -> str:
    """Return the anchor of a heading, as repository browsers and the site make it."""
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")


def find_anchors(markdown: str) -> set[str]:
    """Return all anchors of a page: of headings, numbered where one repeats, and explicit ones."""
    anchors: set[str] = set()
    outside = blank_code(markdown)
    for line, text in zip(markdown.splitlines(), outside.splitlines(), strict=True):
        # a heading may hold code, which belongs to its anchor
        heading = HEADING.match(line)
        if heading is None or not HEADING.match(text):
            continue
        base = slug(heading[1])
        name = base
        count = 0
        while name in anchors:
            count += 1
            name = f"{base}-{count}"
        anchors.add(name)
    return anchors | {first or second for first, second in IDENTIFIER.findall(outside)}


def check_documents(paths: list[Path]) -> list[str]:
    """Return what is wrong with the links of Markdown files: `FILE:LINE: ADDRESS: REASON`."""
    anchors: dict[Path, set[str]] = {}
    faults = []
    for path in paths:
        text = path.read_text()
        for link in find_links(text):
            reason = _check_link(path, link[0], anchors)
            if reason:
                line = text.count("\n", 0, link.start()) + 1
                faults.append(f"{path}:{line}: {link[0]}: {reason}")
    return faults


def _check_link(path: Path, address: str, anchors: dict[Path, set[str]]) -> str | None:
    """Return why an address in a file leads nowhere; addresses of other sites are only parsed."""
    url = urlsplit(address)
    if url.scheme == "mailto":
        return None
    if url.scheme or url.netloc:
        is_web = url.scheme in ("http", "https") and "." in url.netloc
        return None if is_web else "expected https://HOST/..."
    target = (path.parent / unquote(url.path)).resolve() if url.path else path
    if target.is_dir():
        return "is a folder: link a file in it"
    if not target.is_file():
        return "no such file"
    if not url.fragment or target.suffix != ".md":
        return None
    # many links lead to one page, which is read once
    if target not in anchors:
        anchors[target] = find_anchors(target.read_text())
    if url.fragment not in anchors[target]:
        return f"no such heading; {target.name} has {', '.join(sorted(anchors[target]))}"
    return None


class _Page(HTMLParser):
    """The addresses and identifiers of an HTML page, and Markdown that was left as it is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.identifiers = {""}
        self.markup: list[str] = []
        self._verbatim = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag points to, and what it is called."""
        self._verbatim += tag in VERBATIM
        for name, value in attrs:
            # <a name="..."> is the older form of an identifier
            is_identifier = name == "id" or (name == "name" and tag == "a")
            if name in ("href", "src") and value is not None and tag != "base":
                self.addresses.append(value)
            elif value and is_identifier:
                self.identifiers.add(value)

    def handle_endtag(self, tag: str) -> None:
        """Leave text that is shown as it is."""
        self._verbatim -= tag in VERBATIM

    def handle_data(self, data: str) -> None:
        """Note signs of Markdown in running text."""
        if not self._verbatim:
            self.markup += [line.strip() for line in data.splitlines() if MARKUP.search(line)]


def check_site(folder: Path) -> list[str]:
    """Return what is wrong with a built site: links that lead nowhere, and Markdown that was not understood."""
    pages = {}
    for path in sorted(folder.rglob("*.html")):
        # whose addresses are those of a site at the top of a host
        if path.name != "404.html":
            pages[path.resolve()] = _Page(path.read_text())
    faults = []
    for path, page in pages.items():
        faults += [f"{path}: left as Markdown: {line}" for line in page.markup]
        for address in page.addresses:
            url = urlsplit(address)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not target.is_file():
                faults.append(f"{path}: {address}: no such file")
            elif target in pages and unquote(url.fragment) not in pages[target].identifiers:
                faults.append(f"{path}: {address}: no such anchor")
    return faults


def documents() -> list[Path]:
    """Return the Markdown files that a reader opens."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return top + sorted((ROOT / "docs").rglob("*.md"))


def main() -> None:
    """Print what is wrong, and end with status 1 if anything is."""
    parser = argparse.ArgumentParser(prog="python -m docs_build.links", description=__doc__)
    parser.add_argument(
        "site", nargs="?", type=Path, help="a built site; without, the Markdown files are checked"
    )
    site = parser.parse_args().site
    if site is not None and not (site / "index.html").is_file():
        sys.exit(f"no site at {site}: expected a folder with index.html, which `make docs` builds")
    faults = check_documents(documents()) if site is None else check_site(site)
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
