"""The site in a real browser, opened from disk, at the width of a desk and of a phone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import NAMES, Tab, browser

from docs_build.links import check_site

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
WIDTHS = (1280, 390)
# what is wider than the window, and in no box that scrolls
OUTSIDE = """(() => {
  const width = document.documentElement.clientWidth
  const scrolls = one => one && one !== document.body &&
    (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(one).overflowX) || scrolls(one.parentElement))
  const content = [...document.querySelectorAll(".md-content *")]
  return content.filter(one => one.getBoundingClientRect().right > width + 1 && !scrolls(one)).map(
    one => one.outerHTML.slice(0, 200))
})()"""

HAS_PHRASE = "one.innerText.toLowerCase().includes('acceptance length')"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning."""
    pytest.importorskip("mkdocs", reason='no mkdocs: pip install -e ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """A browser's tab."""
    if (program := browser()) is None:
        pytest.skip(
            f"no browser: none of {', '.join(NAMES)} is on the path, and playwright has installed none"
        )
    tab = Tab(program, tmp_path_factory.mktemp("browser") / "profile")
    yield tab
    tab.close()


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    """To a page, a heading, a picture, or a copy of a file of the repository."""
    assert check_site(site) == []


def faults(tab: Tab, page: Path, width: int) -> list[str]:
    """What is wrong with a page at a width."""
    tab.open(page.as_uri(), width)
    # a page that scrolls sideways is wider than its window
    wider = tab.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    pictures = tab.evaluate(
        "[...document.images].filter(one => !one.naturalWidth).map(one => `empty: ${one.src}`)"
    )
    return [
        *tab.problems(),
        *tab.evaluate(OUTSIDE),
        *pictures,
        *([f"{wider} px wider"] if wider > 0 else []),
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_is_quiet_and_fits(site: Path, tab: Tab, width: int) -> None:
    """Nothing is logged, nothing fails, nothing leaves this machine, and only wide tables and code scroll sideways."""
    pages = sorted({*site.rglob("*.html")} - {site / "404.html"})  # which only a server shows
    assert len(pages) > 40
    assert {page.name: found for page in pages if (found := faults(tab, page, width))} == {}


def test_a_faulty_page_is_seen(tab: Tab, tmp_path: Path) -> None:
    """An error on the console, a request to another machine, a missing picture, and a box that is too wide."""
    page = tmp_path / "page.html"
    page.write_text(
        '<script>console.error("a mistake")</script><script src="http://127.0.0.1:9/any.js"></script>'
        '<div class="md-content"><img src="missing.svg"><p style="width: 2000px">wide</p></div>'
    )
    found = "\n".join(faults(tab, page, 1280))
    for fault in (
        "a mistake",
        "request: http://127.0.0.1:9/any.js",
        "empty: file:",
        "<p style",
        " px wider",
    ):
        assert fault in found


def test_the_search_finds_a_phrase(site: Path, tab: Tab) -> None:
    """From disk too, where a browser starts no worker; a result leads to a page that has the phrase."""
    for page in ("index.html", "reference/api.html"):
        tab.open((site / page).as_uri(), 1280)
        tab.evaluate("document.querySelector('.md-search__input').focus()")
        tab.ask("Input.insertText", text="acceptance length")
        found = f"[...document.querySelectorAll('.md-search-result__link')].find(one => {HAS_PHRASE})?.href"
        # the index is read in the page itself where no worker starts
        result = tab.wait_for(found)
        assert tab.problems() == []
        tab.open(result, 1280)
        assert "acceptance length" in tab.evaluate(
            "document.querySelector('.md-content').innerText.toLowerCase()"
        )
