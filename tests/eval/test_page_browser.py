"""The report in a real browser, at the width of a desk and of a phone."""

from __future__ import annotations

import json
import re
import subprocess
from html import unescape
from typing import Any

import pytest
from chromium import NAMES, browser
from synthetic import HOSTILE, write

from eagle.markup import readable
from eval.report import SECTIONS, page
from eval.result_files.figures import RIGHT
from tests.eval.test_page import FIGURES, add_batch_sizes

WIDTHS = (1280, 390)
# a page around the report, which runs no script of its own, asks what the browser made of it
PROBE = """<!doctype html><meta charset="utf-8"><title>probe</title><pre id="out">nothing</pre>FRAMES<script>
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, width = page.documentElement.clientWidth
    const all = [...page.querySelectorAll("body *")]
    const sizes = [...page.querySelectorAll("figure > svg, .answer")].map(one => one.getBoundingClientRect())
    const scrolls = one => one.closest(".answer")
    const box = one => one.getBoundingClientRect()
    const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
      Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3
    const labels = [...page.querySelectorAll("figure > svg")].map(
      one => [...one.querySelectorAll("text")].filter(text => text.textContent))
    return {
      overlaps: labels.flatMap(texts => texts.flatMap((one, i) => texts.slice(i + 1).filter(
        other => overlap(box(one), box(other))).map(other => `${one.textContent} | ${other.textContent}`))),
      margins: [...page.querySelectorAll(".panels")].map(one => box(one).right - Math.max(
        ...[...one.querySelectorAll("figure > svg")].map(drawing => box(drawing).right))),
      widths: [...new Set([...page.querySelectorAll(".panels, table")].map(one => Math.round(box(one).width)))],
      title: page.title,
      scripts: page.scripts.length,
      width: page.documentElement.scrollWidth - width,
      outside: all.filter(one => !scrolls(one) && one.getBoundingClientRect().right > width + 1).map(
        one => one.outerHTML),
      figures: Object.fromEntries([...page.querySelectorAll("section")].map(
        part => [part.id, part.querySelectorAll("figure").length])),
      drawn: sizes.filter(one => one.width > 100 && one.height > 30).length,
      letters: Math.min(...[...page.querySelectorAll("figure svg text")].map(
        one => parseFloat(getComputedStyle(one).fontSize) * one.getScreenCTM().a)),
      cut: Math.max(...[...page.querySelectorAll(".answer")].map(one => one.scrollWidth - one.clientWidth)),
      answers: [...page.querySelectorAll(".answer")].map(one => one.textContent),
    }
  })
  document.getElementById("out").textContent = JSON.stringify(found)
}
</script>"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[str]]:
    """What the browser made of the page at each width, and the lines on its console."""
    if (program := browser()) is None:
        pytest.skip(
            f"no browser: none of {', '.join(NAMES)} is on the path, and playwright has installed none"
        )

    folder = tmp_path_factory.mktemp("browser")
    # names longer than a phone is wide
    written = write(folder / "alone.jsonl")
    written.write_text(written.read_text().replace("eagle1-chain", "W" * 40))
    results = add_batch_sizes(written, folder / "results.jsonl", 4, 16)
    (folder / "report.html").write_text(page([results]), encoding="utf-8")
    # one frame for each width of a window
    frames = (
        f'<iframe src="report.html" style="width:{width}px;height:900px;border:0"></iframe>'
        for width in WIDTHS
    )
    (folder / "probe.html").write_text(PROBE.replace("FRAMES", "".join(frames)))
    # virtual time lets the page settle without waiting
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--dump-dom",
    ]
    options += [
        "--virtual-time-budget=8000",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
    ]
    asked = [program, *options, (folder / "probe.html").as_uri()]
    ran = subprocess.run(asked, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="out">(.*?)</pre>', ran.stdout, re.DOTALL)

    assert found and found[1] != "nothing", f"{program} did not show the page: {ran.stderr[-2000:]}"
    return json.loads(unescape(found[1])), [
        line for line in ran.stderr.splitlines() if "CONSOLE" in line
    ]


def test_the_console_is_silent(seen: tuple[list[dict[str, Any]], list[str]]) -> None:
    """No error and no warning: nothing was refused, nothing was fetched, nothing was malformed."""
    assert seen[1] == []


@pytest.mark.parametrize("place", range(len(WIDTHS)), ids=[f"{width} px" for width in WIDTHS])
def test_all_figures_are_drawn_and_fit(
    seen: tuple[list[dict[str, Any]], list[str]], place: int
) -> None:
    """Every section has its figures, each has a size, nothing is wider than the window, letters can be read."""
    found = seen[0][place]
    drawn = {**FIGURES, "batches": 4}
    assert found["figures"] == {name: drawn.get(name, 0) for name in SECTIONS}
    assert found["drawn"] == sum(drawn.values())
    assert found["width"] == 0
    assert found["outside"] == []
    assert found["cut"] == 0  # a word without an end is broken
    assert found["letters"] >= 9.5
    assert found["overlaps"] == []
    # charts are as wide as tables, but for the margin that holds the last number of an axis
    assert len(found["widths"]) == 1
    assert max(found["margins"]) <= max(RIGHT.values())


@pytest.mark.parametrize("place", range(len(WIDTHS)), ids=[f"{width} px" for width in WIDTHS])
def test_a_hostile_generation_does_not_run(
    seen: tuple[list[dict[str, Any]], list[str]], place: int
) -> None:
    """It changed no title, is no script, and stands on the page letter for letter."""
    found = seen[0][place]
    assert (found["title"], found["scripts"]) == ("Speculative decoding of a/target", 0)
    assert "".join(map(readable, HOSTILE)) in found["answers"]
