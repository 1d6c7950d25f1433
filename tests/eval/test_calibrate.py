"""Temperatures of a confidence are those of a naive search, and calibrate drafts that were not fitted."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle import Sampling, Target, generate
from eagle.core.budget import Budget, describe_budget
from eagle.core.tree import chain_paths
from eagle.drafters.blocks.dspark import DSpark
from eagle.formats.checkpoint import TEMPERATURES, load_head, save_head
from eagle.formats.export import export
from eagle.recipe import BudgetSection
from eval.calibrate import collect_confidences, fit_temperatures, survival_error
from eval.load_run import budget_of
from eval.replay import answer
from tests.families import build

TRUE = (0.5, 2.5, 1.0)  # temperatures of the levels
BINS = 15
KEYS = {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}


def sample_drafts(
    count: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return log-odds whose temperatures are wrong by TRUE, and how much of each draft was accepted.

    Args:
        count: The number n of drafts.
        seed: Of the random numbers.

    Returns:
        [n, levels] and [n].
    """
    rng = random.Random(seed)
    logits = []
    accepted = []
    for _ in range(count):
        raw = [rng.gauss(0.7, 1.5) * temperature for temperature in TRUE]
        logits.append(raw)
        kept = 0
        for value, temperature in zip(raw, TRUE, strict=True):
            if rng.random() >= 1 / (1 + math.exp(-value / temperature)):
                break
            kept += 1
        accepted.append(kept)
    return torch.tensor(logits), torch.tensor(accepted)


def naive_error(
    probs: list[float],
    labels: list[bool],
) -> float:
    """Return the calibration error, bin by bin.

    Args:
        probs: Predicted probabilities.
        labels: Whether it happened, of each.
    """
    error = 0.0
    for index in range(BINS):
        inside = [i for i, prob in enumerate(probs) if min(int(prob * BINS), BINS - 1) == index]
        if inside:
            mean = sum(probs[i] for i in inside) / len(inside)
            share = sum(labels[i] for i in inside) / len(inside)
            error += len(inside) / len(probs) * abs(mean - share)
    return error


def naive_fit(
    logits: list[list[float]],
    accepted: list[int],
) -> tuple[list[float], list[float]]:
    """Return temperatures and errors of the levels, by loops over levels, temperatures and drafts.

    Args:
        logits: Of each draft the log-odds of its levels.
        accepted: Of each draft the number of accepted tokens.
    """
    # of each draft, down to the level above
    survival = [1.0] * len(logits)
    chosen = []
    errors = []
    for level in range(len(logits[0])):
        labels = [level < kept for kept in accepted]
        best = (math.inf, 0.0, survival)
        for step in range(41):
            temperature = 10 ** (-1 + step / 20)
            probs = [
                above / (1 + math.exp(-row[level] / temperature))
                for above, row in zip(survival, logits, strict=True)
            ]
            best = min(best, (naive_error(probs, labels), temperature, probs), key=lambda x: x[0])
        error, temperature, survival = best
        chosen.append(temperature)
        errors.append(error)
    return chosen, errors


def test_the_fit_is_that_of_a_naive_search() -> None:
    """Temperatures and errors, in fp64."""
    logits, accepted = sample_drafts(300, 1)
    fitted = fit_temperatures(logits, accepted)
    temperatures, errors = naive_fit(logits.double().tolist(), accepted.tolist())
    assert fitted["temperatures"] == pytest.approx(temperatures)
    assert fitted["ece_after"] == pytest.approx(sum(errors) / len(errors))
    assert fitted["num_samples"] == 300


def test_drafts_that_were_not_fitted_are_calibrated_too() -> None:
    """On a held-out half the error falls, and the temperatures are near those that were planted."""
    logits, accepted = sample_drafts(4000, 2)
    fitted = fit_temperatures(logits[:2000], accepted[:2000])
    assert fitted["temperatures"] == pytest.approx(TRUE, rel=0.35)
    before = survival_error(logits[2000:], accepted[2000:], [1.0] * 3)
    after = survival_error(logits[2000:], accepted[2000:], fitted["temperatures"])
    print(f"held-out calibration error: {before:.4f} -> {after:.4f}")
    assert after < before / 2


def small_head(target: Target) -> DSpark:
    """Return an untrained head of three levels."""
    torch.manual_seed(6)
    settings = DSpark.Settings(slots=3, blocks=1, rank=4, taps=(1, 2))
    return DSpark.for_target(settings, target.config).bind(target.head)


def test_replayed_confidences_are_those_of_decoding() -> None:
    """Full chains along an answer, without those that reach beyond its end."""
    target = Target(build("llama"))
    head = small_head(target)
    # which must not be in what is collected
    head.confidence_temperatures = (2.0, 2.0, 2.0)
    written = answer(target, head.taps, [5, 6, 7], limit=24, sampling=Sampling())
    logits, accepted = collect_confidences(target, head, [written])
    budget = Budget.fixed(chain_paths(3), confidence=0.0)
    trace = generate(target, head, [5, 6, 7], budget=budget, max_new_tokens=24)
    whole = [cycle for cycle in trace.cycles if cycle.nodes == 3]
    inside = [cycle for cycle in whole if cycle.context + 3 < len(written.tokens)]
    assert 3 < len(logits) == len(inside)
    assert accepted.tolist() == [cycle.accepted for cycle in inside]
    for row, cycle in zip(logits, inside, strict=True):
        assert cycle.tree.confidences is not None
        assert row.tolist() == pytest.approx(cycle.tree.confidences[1:].tolist(), abs=1e-4)


def test_a_recipe_sets_the_threshold() -> None:
    """It stands beside the shape, and a probability is expected."""
    section = BudgetSection(paths=chain_paths(3), confidence=0.4)
    budget = budget_of(section)
    assert budget == Budget.fixed(chain_paths(3), confidence=0.4)
    assert describe_budget(asdict(budget)).endswith(", confidence from 0.4")
    with pytest.raises(ValueError, match="confidence"):
        BudgetSection(confidence=1.4)


def test_the_file_is_read_exported_and_checked(tmp_path: Path) -> None:
    """It is SGLang's; a faulty one is named, and an export of a head without one has none."""
    target = Target(build("llama"))
    head = small_head(target)
    folder = tmp_path / "head"
    save_head(folder, head, "", {})
    fitted = {**fit_temperatures(*sample_drafts(50, 3)), "dataset": "tests"}
    assert fitted.keys() == KEYS
    (folder / TEMPERATURES).write_text(json.dumps(fitted))
    loaded = load_head(folder).bind(target.head)
    assert loaded.confidence_temperatures == tuple(fitted["temperatures"])

    out = tmp_path / "out"
    export(loaded, target.config, "vllm", out=out, head=folder)
    assert json.loads((out / TEMPERATURES).read_text()) == fitted
    assert "--speculative-dspark-confidence-sts-path" in (out / "README.md").read_text()
    # of another number of levels, no temperature, no number
    for wrong in ([1.0, 1.0], [1.0, 0.0, 1.0], [1.0, "2", 1.0], [1.0, math.inf, 1.0], None):
        (folder / TEMPERATURES).write_text(json.dumps({"temperatures": wrong}))
        with pytest.raises(ValueError, match="tune the head again"):
            load_head(folder)
    (folder / TEMPERATURES).unlink()
    export(load_head(folder).bind(target.head), target.config, "vllm", out=out, head=folder)
    assert not (out / TEMPERATURES).exists()
