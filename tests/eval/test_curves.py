"""Curves: one head a count that is the head trained for it alone, fits and crossings beside naive ones, any kill."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from comparisons import small_comparison, written

from eval.compare import main
from eval.comparison import curves
from eval.comparison.compare_plan import Comparison
from eval.comparison.compare_rows import Rows
from eval.comparison.curve_figure import draw_curves

ROOT = Path(__file__).parents[2]
COUNTS = [200, 400, 800]


@pytest.fixture(scope="module")
def values(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two curves of three counts, and a method without weights."""
    values = small_comparison(tiny_target_dir, tmp_path_factory.mktemp("curves"))
    values["recipe"]["train"] |= {"warmup": 1, "schedule": "linear", "lr": 3e-3}
    return {
        **values,
        "seeds": [0],
        "tokens": COUNTS,
        "shapes": {"tree": values["shapes"]["tree"]},
        "compare": [["eagle1", "slow"], ["counts", "eagle1"]],
        "arms": {
            "counts": {"untrained": "ngram"},
            "eagle1": {},
            "slow": {"recipe": {"train": {"lr": 1e-4}}},
        },
    }


@pytest.fixture(scope="module")
def done(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """The comparison, run to its end."""
    path = written(values, tmp_path_factory.mktemp("file"))
    main([path])
    return Comparison.load(path)


def head(comparison: Comparison, arm: str) -> bytes:
    """The last head of an arm."""
    return (
        comparison.arms[arm].folder(comparison.folder, 0) / "last/model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_each_head_is_that_of_a_run_made_for_its_count(
    done: Comparison, values: dict[str, Any], tmp_path: Path
) -> None:
    """Bit by bit; the seconds of a point are those of its whole run, and no stem is left but the last."""
    for count in COUNTS[1:]:
        changed = {
            **values,
            "out": str(tmp_path / f"out{count}"),
            "arms": {"eagle1": {}},
            "tokens": [count],
            "compare": None,
        }
        path = written({**values, **changed}, tmp_path / str(count))
        main([path])
        assert head(Comparison.load(path), f"eagle1, {count:,} tokens") == head(
            done, f"eagle1, {count:,} tokens"
        )
    kept = [arm.folder(done.folder, 0) / "stem" for arm in done.curves["eagle1"]]
    assert [stem.exists() for stem in kept] == [False, False, True]
    assert head(done, "eagle1, 800 tokens") != head(done, "slow, 800 tokens")


def test_the_report_has_points_pairs_and_a_figure(done: Comparison) -> None:
    """The table names every point; curves are compared at the counts that they share."""
    figures = json.loads((done.folder / "comparison.json").read_text())
    expected = [f"{name}, {count:,} tokens" for name in ("slow", "eagle1") for count in COUNTS]
    assert [pair["second"] for pair in figures["pairs"]] == expected
    taus = {arm["arm"]: arm["tau"]["tree, T = 0"]["value"] for arm in figures["arms"]}
    [column] = [column for column in figures["curves"] if column["column"] == "tree, T = 0"]
    for name, one in column["curves"].items():
        for point in one["points"]:
            assert point["value"] == pytest.approx(taus[f"{name}, {point['tokens']:,} tokens"])
            assert point["low"] <= point["value"] <= point["high"]
    assert (
        "| tree, T = 0, tokens | 200 | 400 | 800 | the last, predicted |"
        in (done.folder / "comparison.md").read_text()
    )
    drawing = ElementTree.parse(done.folder / "curves.svg").getroot()
    shown = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert (
        shown.count("eagle1") == shown.count("slow") == len(figures["curves"]) and "0.2 k" in shown
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"recipe": {"train": {"warmup": 0.1}}},
            r"arms\.eagle1 is a curve and train\.warmup is 0\.1",
        ),
        ({"arms": {"eagle1": {}, "hass": {"start": "eagle1"}}}, r"arms\.hass starts from an arm"),
        (
            {"arms": {"eagle1": {"tokens": 9}, "hass": {"start": "eagle1", "tokens": [9, 18]}}},
            "starts from an arm",
        ),
        (
            {"arms": {"eagle1": {}, "hass": {"as_long_as": "eagle1"}}},
            r"arms\.hass starts from an arm",
        ),
    ],
)
def test_what_is_no_curve_is_refused(
    changes: dict[str, Any], says: str, values: dict[str, Any], tmp_path: Path
) -> None:
    """Warm-ups that differ, and curves that begin at curves."""
    merged = {**values, "compare": None, **changes}
    if "recipe" in changes:
        merged["recipe"] = {
            **values["recipe"],
            "train": {**values["recipe"]["train"], **changes["recipe"]["train"]},
        }
    with pytest.raises(ValueError, match=says):
        main([written(merged, tmp_path)])


# -- fits and crossings -----------------------------------------------------------------------------------------------


def points(ceiling: float, scale: float, exponent: float, counts: list[int]) -> torch.Tensor:
    """Acceptance lengths that lie on a curve."""
    return torch.tensor(
        [ceiling - scale * (count / 1000) ** -exponent for count in counts], dtype=torch.float64
    )


@pytest.mark.parametrize("numbers", [(4.0, 3.0, 0.5), (2.5, 6.0, 0.9), (3.0, 1.0, 0.3)])
def test_a_fit_finds_what_made_the_points(numbers: tuple[float, float, float]) -> None:
    """And no worse than a naive search where they are noisy; a curve that falls is flat."""
    counts = [50_000, 100_000, 200_000, 400_000, 800_000, 1_600_000, 3_200_000]
    exact = points(*numbers, counts)
    noise = 0.02 * torch.randn(
        len(counts), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    fitted = curves.fit(
        torch.tensor(counts).double(),
        torch.stack([exact, exact + noise, exact.flip(0)], dim=1),
        9.0,
    )
    assert fitted[0].tolist() == pytest.approx(numbers, rel=0.05)
    assert fitted[2, 1] == 0 and fitted[2, 0] == pytest.approx(float(exact.mean()))

    def error(ceiling: float, scale: float, exponent: float) -> float:
        return float((points(ceiling, scale, exponent, counts) - exact - noise).square().sum())

    dice = random.Random(0)
    best = min(error(*(value * dice.uniform(0.5, 1.5) for value in numbers)) for _ in range(20_000))
    assert error(*fitted[1].tolist()) <= best * 1.01
    predicted = curves.curve(torch.tensor(counts[-1:]).double(), fitted)[0]
    assert float(predicted[0]) == pytest.approx(float(exact[-1]), rel=0.01)


def test_the_last_point_is_predicted_from_an_eighth_of_its_tokens() -> None:
    """Or from four points, where those are fewer; with four points there is nothing left to predict."""
    counts = [1000 * 2**power for power in range(9)]
    taus = points(4.0, 2.0, 0.5, counts)[:, None].expand(-1, 3)
    for shown, first in ((9, 32_000), (6, 8_000), (5, 8_000)):
        one = curves.describe_curve(torch.tensor(counts[:shown]).double(), taus[:shown], 9.0)[
            "predicted"
        ]
        assert (one["from"], one["at"]) == (first, counts[shown - 1]) and abs(one["error"]) < 0.01
    assert "predicted" not in curves.describe_curve(
        torch.tensor(counts[:4]).double(), taus[:4], 9.0
    )


def test_a_ceiling_is_no_longer_than_the_deepest_path() -> None:
    """Points on a straight line over the logarithm have none below it: the best scale for that ceiling is found."""
    counts = torch.tensor([50_000, 100_000, 200_000, 400_000]).double()
    taus = torch.tensor([2.0, 2.4, 2.8, 3.2]).double()
    ceiling, scale, exponent = curves.fit(counts, taus[:, None], 3.6)[0].tolist()
    assert ceiling == 3.6

    def error(scale: float) -> float:
        return float(
            (points(3.6, scale, exponent, [50_000, 100_000, 200_000, 400_000]) - taus)
            .square()
            .sum()
        )

    assert error(scale) <= min(error(scale * factor) for factor in (0.9, 0.99, 1.01, 1.1))
    assert curves.curve(counts * 1000, curves.fit(counts, taus[:, None], 3.6)).max() < 3.6


def test_crossings_lie_between_points() -> None:
    """Straight over the logarithm, the last of several; none where one curve is above all along."""
    counts = torch.tensor([100.0, 1000.0, 10_000.0]).double()
    gaps = torch.tensor(
        [[-1.0, 1.0, -1.0, 1.0], [1.0, 1.0, 0.5, 1.0], [2.0, 1.0, -0.5, -3.0]]
    ).double()
    found = curves.cross(counts, gaps)
    expected = [10**2.5, float("nan"), 10**3.5, 10**3.25]
    assert found.tolist() == pytest.approx(expected, nan_ok=True)


def test_intervals_are_those_of_a_naive_bootstrap() -> None:
    """Turns of a conversation are drawn together."""
    dice = random.Random(3)
    lengths = {
        (0, "set", number // 2, number % 2, 0): (dice.randint(20, 60), 20) for number in range(24)
    }
    drawn = curves.draw_taus(lengths)
    taus = []
    for _ in range(4000):
        rows = [
            lengths[0, "set", place, turn, 0]
            for place in dice.choices(range(12), k=12)
            for turn in (0, 1)
        ]
        taus.append(sum(row[0] for row in rows) / sum(row[1] for row in rows))
    assert float(drawn[0]) == sum(row[0] for row in lengths.values()) / sum(
        row[1] for row in lengths.values()
    )
    low, high = torch.quantile(torch.tensor(taus), torch.tensor([0.025, 0.975])).tolist()
    found = torch.quantile(drawn[1:], torch.tensor([0.025, 0.975]).double()).tolist()
    assert found == pytest.approx([low, high], abs=0.04)


def test_names_in_a_figure_do_not_cover_one_another() -> None:
    """Curves that end at one height, and none."""
    same = {
        "points": [
            {"tokens": tokens, "value": 2.0, "low": 1.9, "high": 2.1}
            for tokens in (1000, 2_000_000)
        ]
    }
    drawing = draw_curves(
        [{"column": "a < b", "curves": {f"m{number}": same for number in range(9)}}]
    )
    texts = [
        text for text in ElementTree.fromstring(drawing).iter() if (text.text or "").startswith("m")
    ]
    heights = sorted(float(text.attrib["y"]) for text in texts)
    assert len(heights) == 9 and all(second - first >= 12 for first, second in pairwise(heights))
    assert "a &lt; b" in drawing and "2 M" in drawing and draw_curves([]).startswith("<svg")


@pytest.mark.slow
def test_five_kills_change_no_bit(done: Comparison, values: dict[str, Any], tmp_path: Path) -> None:
    """The same figures and heads as of the run that nobody stopped."""
    path, dice, kills = (
        written({**values, "out": str(tmp_path / "killed")}, tmp_path),
        random.Random(5),
        0,
    )
    command = [sys.executable, "-m", "eval.compare", path]
    while True:
        run = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if kills < 5:
            before = len(Rows(tmp_path / "killed").by_kind.get("trained", []))
            while (
                run.poll() is None
                and len(Rows(tmp_path / "killed").by_kind.get("trained", [])) <= before
            ):
                time.sleep(0.02)
            time.sleep(dice.random() * 0.3)
            run.kill()
            kills += 1
            run.wait()
        else:
            assert run.wait() == 0
            break
    killed = Comparison.load(path)
    assert all(
        head(killed, name) == head(done, name) for name, arm in done.arms.items() if arm.is_trained
    )
    ours, other = (
        json.loads((one.folder / "comparison.json").read_text())["curves"] for one in (killed, done)
    )
    assert ours == other
