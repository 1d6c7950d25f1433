"""The links of the documents lead somewhere, as does every page's place in the site's navigation."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from docs_build.links import check_documents, check_site, documents, find_anchors

ROOT = Path(__file__).parent.parent


def test_every_link_of_the_documents_leads_somewhere() -> None:
    """Files and headings exist; addresses of other machines are well formed."""
    assert check_documents(documents()) == []


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("other.md", None),
        ("other.md#two-words-and-code", None),
        ("other.md#again-1", None),
        ("#here", None),
        ("https://example.org/page#any", None),
        ("missing.md", "no such file"),
        ("folder", "is a folder: link a file in it"),
        (
            "other.md#wrong",
            "no such heading; other.md has again, again-1, placed, two-words-and-code",
        ),
        ("https:/example.org", "expected https://HOST/..."),
    ],
)
def test_a_planted_link_is_judged(link: str, reason: str | None, tmp_path: Path) -> None:
    """Broken files, broken anchors and malformed addresses are named with their line."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "other.md").write_text(
        '# Two words, and `code`\n```bash\n# no heading\n```\n## Again\n## Again\n<a id="placed"></a>\n'
    )
    # links in code are none, and pictures are links
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n`[no](link.md)`\n\n[a link]({link}) and ![a picture](other.md)\n")
    assert check_documents([page]) == ([f"{page}:4: {link}: {reason}"] if reason else [])


def test_anchors_are_those_of_repository_browsers() -> None:
    """Punctuation goes, spaces become hyphens one by one, and letters of other alphabets stay."""
    assert find_anchors("# A – b: `drafter.window`, [linked](x.md)\n\n## Länge τ\n") == {
        "a--b-drafterwindow-linked",
        "länge-τ",
    }


def test_a_broken_link_of_the_site_is_seen(tmp_path: Path) -> None:
    """So are an anchor that no tag has, and a table that was not understood."""
    (tmp_path / "index.html").write_text(
        '<h1 id="top"></h1><a href="a.html"></a><img src="b.svg"><a href="#top"></a>'
    )
    (tmp_path / "a.html").write_text(
        '<a href="index.html#bottom"></a><a href="https://example.org"></a><p>| a | b |---|</p><code>**</code>'
    )
    assert [line.partition(": ")[2] for line in check_site(tmp_path)] == [
        "left as Markdown: | a | b |---|",
        "index.html#bottom: no such anchor",
        "b.svg: no such file",
    ]


def repeated_keys(text: str) -> list[str]:
    """The rows of tables of keys that name the same key of the same methods again."""
    repeated = []
    # a table of keys begins with the words "key of"
    for table in re.findall(r"^\| key of .*\n(?:\|.*\n)+", text, re.MULTILINE):
        rows = [
            tuple(cell.strip() for cell in row.split("|")[1:3]) for row in table.splitlines()[2:]
        ]
        repeated += [" of ".join(row) for row, times in Counter(rows).items() if times > 1]
    return repeated


def test_no_table_of_keys_names_one_twice() -> None:
    """Of all pages; a planted repetition is seen."""
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    assert sum("\n| key of " in page for page in pages) >= 2
    assert [line for page in pages for line in repeated_keys(page)] == []
    assert repeated_keys(
        "| key of x | of | y |\n|---|---|---|\n| a | b | 1 |\n| a | b | 2 |\n"
    ) == ["a of b"]


def test_every_page_has_a_place_in_the_navigation() -> None:
    """No page is left out."""
    # every file name in the navigation, whatever its title
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(set(pages) - set(listed)) == []
    assert len(listed) == len(set(listed))
