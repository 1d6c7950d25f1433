"""Labels of figures do not collide in the narrowest figure, and stand where their values are."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

import pytest

from eagle.markup import Html
from eval.result_files.figures import (
    LEFT,
    RIGHT,
    WIDTH,
    Scale,
    draw_bars,
    draw_dots,
    draw_plot,
    text_width,
)
from eval.result_files.statistics import Estimate

# pixels, of the style sheet
SIZES = {"label": 13, "value": 12}
# shares of a text's width left of its position
ANCHORS = {"start": 0.0, "middle": 0.5, "end": 1.0}
LONG = Estimate(123.45, 101.23, 145.67)
NAMES = ("ngram", "eagle1 with a name that is longer than a phone is wide", "W" * 40)

CASES = {
    "dots": draw_dots(
        "t",
        [(name, [(1, LONG)]) for name in NAMES],
        Scale.over(LONG),
        reference=1,
        unit=" ×",
    ),
    "several": draw_dots(
        "t", [(name, [(1, LONG)] * 2) for name in NAMES], Scale(0, 1), reference=1
    ),
    "bars": draw_bars(
        "t",
        [1.0] * 24,
        y=Scale(0, 1, percent=True),
        series=1,
        axes=("accepted tokens", "share"),
    ),
    "positions": draw_plot(
        "t",
        [],
        x=Scale(1, 60, step=1),
        y=Scale(0, 1),
        axes=("position in the draft", "accepted"),
    ),
    "speeds": draw_plot(
        "t", [], x=Scale(0, 99999), y=Scale(0, 99999), axes=("predicted", "measured")
    ),
}


def boxes(figure: Html) -> list[tuple[str, float, float, float, float]]:
    """Return each text with its left, right, top and bottom, in a figure of the narrowest width."""
    drawing = ElementTree.fromstring(figure).find("svg")
    assert drawing is not None
    kind = drawing.attrib["class"]
    area = WIDTH - LEFT[kind] - RIGHT[kind]
    found = []
    for text in drawing.iter("text"):
        if not text.text:
            continue
        # a percentage of the area between the margins, or pixels
        x = text.attrib["x"]
        at = float(x.removesuffix("%"))
        if x.endswith("%"):
            at *= area / 100

        size = SIZES.get(text.attrib["class"], 11)
        width = text_width(text.text, size)
        left = at - ANCHORS[text.attrib["text-anchor"]] * width
        foot = float(text.attrib["y"])
        found.append((text.text, left, left + width, foot - 0.8 * size, foot + 0.2 * size))
    return found


@pytest.mark.parametrize("case", CASES)
def test_labels_do_not_collide(case: str) -> None:
    """No two texts share a pixel where names, numbers and axes are long, and none leaves the figure."""
    found = boxes(CASES[case])
    assert found
    # boxes that overlap in one direction alone do not collide
    for one, other in combinations(found, 2):
        across = min(one[2], other[2]) - max(one[1], other[1])
        down = min(one[4], other[4]) - max(one[3], other[3])
        assert across <= 0 or down <= 0, (one, other)
    kind = re.findall('class="(plot|dots)"', CASES[case])[0]
    for text, left, right, *_ in found:
        assert left >= -LEFT[kind] - 8, text
        assert right <= WIDTH - LEFT[kind] + 8, text


def test_marks_stand_at_their_values() -> None:
    """A mark's percentage is its share of the axis; its interval ends at the interval's values."""
    figure = draw_dots(
        "t",
        [("a", [(1, Estimate(2, 1, 3))])],
        Scale(0, 4),
        reference=1,
    )
    drawing = ElementTree.fromstring(figure)
    marks = [mark.attrib["x"] for mark in drawing.iter("svg") if "x" in mark.attrib]
    [whisker] = [line for line in drawing.iter("line") if line.attrib["class"] == "whisker"]
    assert marks == ["50%"]
    assert (whisker.attrib["x1"], whisker.attrib["x2"]) == ("25%", "75%")
