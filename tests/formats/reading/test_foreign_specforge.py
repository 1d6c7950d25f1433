"""What `norm_output` means in SpecForge's heads, by the formula that it trains with."""

# T tokens of a text, D draft vocabulary

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle.__main__ import main
from eagle.core.examples import Example, collate
from eagle.formats.checkpoint import load_head
from eagle.formats.reading.foreign import import_head, inspect
from tests import foreign_heads as made
from tests.formats.make_heads import borrow_from
from tests.naive_unroll import eagle3_logits

STEPS = 3
LENGTH = 12
# written out, as the head that is imported may have others
SETTINGS = SimpleNamespace(
    steps=STEPS,
    fc_norm=True,
    norm_output=False,
    norm_before_residual=False,
)
SHAPE = SimpleNamespace(
    head_dim=made.WIDE,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_theta": 10000.0},
)


def specforge31(norm_output: bool | None = True) -> made.Head:
    """Return an EAGLE-3.1 head as SpecForge writes it: a norm on each tap, `norm_output` in the config."""
    config, tensors = made.saying(made.specforge(), fc_norm=True, norm_output=norm_output)
    norms = {f"fc_norm.{tap}.weight": made.drawn(made.H, seed=tap + 1) for tap in range(3)}
    return config, {**tensors, **norms}


def compute_specforge_logits(weights: dict[str, Tensor], text: Example) -> list[Tensor]:
    """Return [T - 2 - s, D] of each step s, by the loop over single tokens of `naive_unroll`.

    SpecForge's `norm_output: true` is the formula's false: the LM head, and nothing else, reads the output through
    the last norm.
    """
    renamed = {name.replace("midlayer.", "layers.0."): weights[name] for name in weights}
    # a draft reads one token fewer at each of the last slots
    anchors = {slot: min(STEPS, LENGTH - 2 - slot) for slot in range(LENGTH - 2)}
    logits = eagle3_logits(
        renamed,
        settings=SETTINGS,
        shape=SHAPE,
        text=(text.tokens, text.features[:-2]),
        target_head=borrow_from(None).head,
        anchors=anchors,
    )
    by_step: list[list[Tensor]] = [[] for _ in range(STEPS)]
    for (_, step), row in logits.items():
        by_step[step].append(row)
    return [torch.stack(rows) for rows in by_step]


def make_example() -> Example:
    """Return a random text with random states of three layers, all of it supervised."""
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(made.V, (LENGTH,), generator=generator)
    features = torch.randn(LENGTH, 3, made.H, generator=generator)
    return Example(tokens, torch.ones(LENGTH, dtype=torch.bool), features)


@torch.no_grad()
def compare_logits(folder: Path, weights: dict[str, Tensor]) -> list[float]:
    """Return the largest difference of each step from SpecForge's logits, as a share of how far those spread."""
    head: Any = load_head(folder)
    text = make_example()
    # of which only the embedding decides logits: the head has its own LM head
    target = borrow_from(None).head
    theirs = compute_specforge_logits(weights, text)
    states = head.unroll(collate([text], head.taps), target, STEPS).states
    spread = torch.cat(theirs).std()
    differences = []
    for state, rows in zip(states, theirs, strict=True):
        ours = head.logits(state, target)[: len(rows)]
        # later slots of a step have no token to read
        differences.append(float((ours - rows).abs().max() / spread))
    return differences


@pytest.mark.parametrize("norm_output", [True, None])
def test_an_imported_head_has_the_logits_that_specforge_trained(
    norm_output: bool | None, tmp_path: Path
) -> None:
    """All logits of three steps; SpecForge takes a missing switch for true."""
    head = specforge31(norm_output)
    folder = made.write(tmp_path / "head", head)
    target = made.write_target(tmp_path / "target")
    out = tmp_path / "out"
    options = ["--target", target, "--norm-output", "lm-head"]
    main(["import", str(folder), str(out), *options])

    assert max(compare_logits(out, head[1])) < 1e-4
    assert load_head(out).settings.norm_output is False


def test_engines_mean_something_else(tmp_path: Path) -> None:
    """They feed the normed state back, so that logits agree in the first step alone."""
    head = specforge31()
    out = tmp_path / "out"
    import_head(made.write(tmp_path / "head", head), out, norm_output="next-step")
    first, *later = compare_logits(out, head[1])

    assert first < 1e-4
    assert min(later) > 0.1
    assert load_head(out).settings.norm_output is True


@pytest.mark.parametrize("norm_output", [True, False])
def test_a_meaning_that_nobody_can_know_is_asked_for(norm_output: bool, tmp_path: Path) -> None:
    """Import writes nothing until it is told, and inspect names both meanings."""
    folder = made.write(tmp_path / "head", specforge31(norm_output))
    message = made.refused(folder)
    assert "--norm-output=lm-head" in message
    assert "--norm-output=next-step" in message
    assert "SpecForge" in message

    (finding,) = [one for one in inspect(folder).findings if "SpecForge" in one.what]
    assert not finding.fatal
    assert "--norm-output" in finding.fix


def test_a_head_whose_lm_head_reads_the_bare_state_is_refused(tmp_path: Path) -> None:
    """No head here computes SpecForge's `norm_output: false`."""
    folder = made.write(tmp_path / "head", specforge31(False))
    with pytest.raises(ValueError, match="LM head reads the un-normed state"):
        import_head(folder, tmp_path / "out", norm_output="lm-head")


@pytest.mark.parametrize("name", ["speculators EAGLE-3.1", "speculators trainer", "Automodel"])
def test_layouts_of_one_meaning_are_not_asked(name: str, tmp_path: Path) -> None:
    """Speculators and Automodel feed the normed state back, as engines do."""
    folder = made.write(tmp_path / "head", made.saying(made.LAYOUTS[name], norm_output=True))
    import_head(folder, tmp_path / "out", made.write_target(tmp_path / "target"))
    assert load_head(tmp_path / "out").settings.norm_output is True
    assert "SpecForge" not in str(inspect(folder))
