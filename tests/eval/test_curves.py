"""Curves: a head of each count equals one trained for it alone; fits and crossings agree with naive ones."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from comparisons import small_comparison, written
from torch import Tensor

from eval.compare import main
from eval.comparison import curves
from eval.comparison.compare_plan import Comparison
from eval.comparison.compare_rows import Rows

ROOT = Path(__file__).parents[2]
# tokens that heads learn from: a few steps each
COUNTS = [200, 400, 800]


@pytest.fixture(scope="module")
def values(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two curves of three counts, and a method without weights."""
    values = small_comparison(tiny_target_dir, tmp_path_factory.mktemp("curves"))
    values["recipe"]["train"] |= {
        "warmup": 1,
        "schedule": "linear",
        "lr": 3e-3,
    }
    values["shapes"].pop("drawn")
    return {
        **values,
        "seeds": [0],
        "tokens": COUNTS,
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


def read_head(comparison: Comparison, name: str) -> bytes:
    """Return the last head of an arm."""
    folder = comparison.arms[name].folder(comparison.folder, 0)
    return (folder / "last/model.safetensors").read_bytes()


@pytest.mark.slow
def test_each_head_is_that_of_a_run_made_for_its_count(
    done: Comparison,
    values: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Heads agree bit by bit; of the shared training states only the last is left."""
    alone = {**values, "arms": {"eagle1": {}}, "compare": None}
    for count in COUNTS[1:]:
        folder = tmp_path / str(count)
        path = written(alone, folder, tokens=[count], out=str(folder / "out"))
        main([path])
        name = f"eagle1, {count:,} tokens"

        assert read_head(Comparison.load(path), name) == read_head(done, name)

    # a stem is the state from which the next point goes on
    stems = [arm.folder(done.folder, 0) / "stem" for arm in done.curves["eagle1"]]

    assert [stem.exists() for stem in stems] == [False, False, True]


def test_the_report_has_points_pairs_and_a_figure(done: Comparison) -> None:
    """The table names every point, and curves are compared at the counts that they share."""
    figures = json.loads((done.folder / "comparison.json").read_text())
    expected = [f"{name}, {count:,} tokens" for name in ("slow", "eagle1") for count in COUNTS]

    assert [pair["second"] for pair in figures["pairs"]] == expected

    taus = {arm["arm"]: arm["tau"]["tree, T = 0"]["value"] for arm in figures["arms"]}
    columns = {column["column"]: column["curves"] for column in figures["curves"]}
    for name, curve in columns["tree, T = 0"].items():
        for point in curve["points"]:
            assert point["value"] == pytest.approx(taus[f"{name}, {point['tokens']:,} tokens"])
            assert point["low"] <= point["value"] <= point["high"]

    # the last column compares the last point with its prediction
    heading = "| tree, T = 0, tokens | 200 | 400 | 800 | the last, predicted |"

    assert heading in (done.folder / "comparison.md").read_text()

    drawing = (done.folder / "curves.html").read_text()
    # one colour for a curve in all figures, which the legend names once
    assert drawing.count("<span>eagle1</span>") == drawing.count("<span>slow</span>") == 1
    assert drawing.count('class="point"') == 2 + len(columns) * 2 * len(COUNTS)
    assert drawing.count('class="trace"') == len(columns) * 2 * (len(COUNTS) - 1)
    assert all(f">{count}<" in drawing for count in COUNTS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"warmup": 0.1}, r"arms\.eagle1 is a curve and train\.warmup is 0\.1"),
        # curves do not begin at arms
        ({"start": "eagle1"}, r"arms\.hass starts from an arm"),
        ({"start": "eagle1", "tokens": [9, 18]}, "starts from an arm"),
        ({"as_long_as": "eagle1"}, r"arms\.hass starts from an arm"),
    ],
)
def test_what_is_no_curve_is_refused(
    changes: dict[str, Any],
    words: str,
    values: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Warmups must be counted in steps, and curves begin with new heads."""
    arms: dict[str, Any] = {"eagle1": {}}
    if "warmup" in changes:
        arms["eagle1"] = {"recipe": {"train": changes}}
    else:
        arms["hass"] = changes

    if "tokens" in changes:
        arms["eagle1"] = {"tokens": 9}

    with pytest.raises(ValueError, match=words):
        main([written(values, tmp_path, compare=None, arms=arms)])


# -- fits and crossings -----------------------------------------------------------------------------------------------


def as_tensor(*values: Any) -> Tensor:
    """Return figures in fp64."""
    return torch.tensor(values, dtype=torch.float64)


def points(ceiling: float, scale: float, exponent: float, counts: list[int]) -> Tensor:
    """Return acceptance lengths that lie on a curve: ceiling - scale (thousands of tokens)^-exponent."""
    return as_tensor(*(ceiling - scale * (count / 1000) ** -exponent for count in counts))


def squared_error(parameters: tuple[float, ...], counts: list[int], lengths: Tensor) -> float:
    """Return how far a curve lies from these lengths."""
    ceiling, scale, exponent = parameters
    return float((points(ceiling, scale, exponent, counts) - lengths).square().sum())


@pytest.mark.parametrize("numbers", [(4.0, 3.0, 0.5), (2.5, 6.0, 0.9), (3.0, 1.0, 0.3)])
def test_a_fit_finds_what_made_the_points(numbers: tuple[float, float, float]) -> None:
    """Noisy points are fitted no worse than by a naive search; a falling curve is flat."""
    counts = [50_000 * 2**power for power in range(7)]
    exact = points(*numbers, counts)
    generator = torch.Generator().manual_seed(1)
    noisy = exact + 0.02 * torch.randn(7, generator=generator, dtype=torch.float64)
    # [points, curves]
    lengths = torch.stack([exact, noisy, exact.flip(0)], dim=1)
    fitted = curves.fit(as_tensor(*counts), lengths, 9.0)

    assert fitted[0].tolist() == pytest.approx(numbers, rel=0.05)
    assert fitted[2, :2].tolist() == pytest.approx([float(exact.mean()), 0])

    # the fit minimises this error, so that no random curve may be better
    dice = random.Random(0)
    best = min(
        squared_error(tuple(value * dice.uniform(0.5, 1.5) for value in numbers), counts, noisy)
        for _ in range(20_000)
    )
    assert squared_error(tuple(fitted[1].tolist()), counts, noisy) <= best * 1.01
    [predicted] = curves.curve(as_tensor(counts[-1]), fitted)
    assert float(predicted[0]) == pytest.approx(float(exact[-1]), rel=0.01)


@pytest.mark.parametrize(("shown", "first"), [(9, 32_000), (6, 8_000), (5, 8_000), (4, None)])
def test_the_last_point_is_predicted_from_an_eighth_of_its_tokens(
    shown: int, first: int | None
) -> None:
    """The prediction needs four points; with four in all there is nothing left to predict."""
    counts = [1000 * 2**power for power in range(shown)]
    lengths = points(4.0, 2.0, 0.5, counts)[:, None].expand(-1, 3)
    described = curves.describe_curve(as_tensor(*counts), lengths, 9.0)

    assert ("predicted" in described) == (first is not None)
    if first is not None:
        predicted = described["predicted"]
        assert (predicted["from"], predicted["at"]) == (first, counts[-1])
        assert abs(predicted["error"]) < 0.01


def test_a_ceiling_is_no_longer_than_the_deepest_path() -> None:
    """Points on a straight line over the logarithm have no ceiling below it; the best scale for it is found."""
    counts = [50_000, 100_000, 200_000, 400_000]
    lengths = as_tensor(2.0, 2.4, 2.8, 3.2)
    fitted = curves.fit(as_tensor(*counts), lengths[:, None], 3.6)
    ceiling, scale, exponent = fitted[0].tolist()

    assert ceiling == 3.6

    error = squared_error((ceiling, scale, exponent), counts, lengths)
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert error <= squared_error((ceiling, scale * factor, exponent), counts, lengths)
    assert curves.curve(1000 * as_tensor(*counts), fitted).max() < 3.6


def test_crossings_lie_between_points() -> None:
    """They are interpolated over the logarithm; the last of several counts, and a curve always above has none."""
    gaps = as_tensor([-1, 1, -1, 1], [1, 1, 0.5, 1], [2, 1, -0.5, -3])
    found = curves.cross(as_tensor(100, 1000, 10_000), gaps)
    expected = [10**2.5, float("nan"), 10**3.5, 10**3.25]
    assert found.tolist() == pytest.approx(expected, nan_ok=True)


def test_intervals_are_those_of_a_naive_bootstrap() -> None:
    """Turns of a conversation are resampled together."""
    dice = random.Random(3)
    lengths = {}
    for i in range(24):
        lengths[0, "set", i // 2, i % 2, 0] = (dice.randint(20, 60), 20)
    samples = curves.draw_taus(lengths)
    tokens = [row[0] for row in lengths.values()]

    assert float(samples[0]) == sum(tokens) / (24 * 20)

    # the same resampling, one conversation of two turns at a time
    taus = []
    for _ in range(4000):
        chosen = dice.choices(range(12), k=12)
        total = sum(tokens[2 * i] + tokens[2 * i + 1] for i in chosen)
        taus.append(total / (24 * 20))

    ends = as_tensor(0.025, 0.975)
    expected = as_tensor(*taus).quantile(ends).tolist()

    assert samples[1:].quantile(ends).tolist() == pytest.approx(expected, abs=0.04)


def test_points_stand_where_their_tokens_and_lengths_are() -> None:
    """The axis of tokens is logarithmic, a missing curve leaves no colour, and names are escaped."""
    points = [
        {"tokens": 1000 * 2**doubling, "value": tau, "low": tau - 0.5, "high": tau + 0.5}
        for doubling, tau in ((0, 1.5), (2, 2.0), (4, 2.5))
    ]
    first = {"column": "a < b", "curves": {"long": {"points": points}}}
    second = {"column": "c", "curves": {"short": {"points": points[:1]}}}
    drawing = curves.draw_curves([first, second, {"column": "empty", "curves": {}}])
    marks = re.findall(r'<svg x="([0-9.]+)%" y="([0-9.]+)">', drawing)

    # over 4 doublings, then the single point of the second curve
    assert [float(x) for x, _ in marks] == [0, 50, 100, 0]
    heights = [float(y) for _, y in marks[:3]]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2])
    assert heights[0] > heights[1]
    assert "a &lt; b" in drawing
    assert "empty" not in drawing
    assert ">16,000<" in drawing
    assert drawing.count("<figure>") == 2


@pytest.mark.slow
def test_kills_change_no_bit(done: Comparison, values: dict[str, Any], tmp_path: Path) -> None:
    """Killed three times after a further arm was trained, a run ends with the figures and heads of a whole one."""
    out = tmp_path / "killed"
    path = written(values, tmp_path, out=str(out))
    command = [sys.executable, "-m", "eval.compare", path]
    dice = random.Random(5)

    def count_trained() -> int:
        return len(Rows(out).by_kind.get("trained", []))

    for _ in range(3):
        before = count_trained()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as run:
            while run.poll() is None and count_trained() <= before:
                time.sleep(0.02)
            # somewhere in the next arm
            time.sleep(dice.random() * 0.3)
            run.kill()

    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    killed = Comparison.load(path)
    for name, arm in done.arms.items():
        if arm.is_trained:
            assert read_head(killed, name) == read_head(done, name)

    ours, expected = (
        json.loads((folder / "comparison.json").read_text())["curves"]
        for folder in (out, done.folder)
    )

    assert ours == expected
