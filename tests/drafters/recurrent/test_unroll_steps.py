"""Each step of training is a level of drafting, and sees nothing else: neither what it names nor another text."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget
from eagle.core.drafter import Committed, TargetHead
from eagle.core.examples import Batch, Example, collate
from eagle.core.tree import DraftTree
from eagle.drafters.parts import text_blocks
from eagle.drafters.parts.spans import Spans
from eagle.drafters.recurrent import head_state
from eagle.drafters.recurrent.unroll import Unrolled, UnrolledDrafter
from tests.unrolled_heads import (
    TAPS,
    VARIANTS,
    computed,
    everywhere,
    frozen_head,
    new_head,
    texts_of,
)

# -- training is drafting ---------------------------------------------------------------------------------------------


def trained_logits(
    head: Any, batch: Batch, frozen: TargetHead, patch: pytest.MonkeyPatch
) -> Tensor:
    """[K, S, V or D], what the head says at each step of all supervised slots while its loss is computed."""
    kept: list[Unrolled] = []
    honest = UnrolledDrafter.unroll

    def keep(*given: Any, **options: Any) -> Unrolled:
        kept.append(honest(*given, **options))
        return kept[-1]

    with patch.context() as inner:
        inner.setattr(UnrolledDrafter, "unroll", keep)
        head(batch, frozen)
    with torch.no_grad():
        return torch.stack([head.logits(state, frozen) for state in kept[0].states])


def drafted_logits(
    head: Any, text: Example, pieces: list[int], patch: pytest.MonkeyPatch
) -> dict[int, Tensor]:
    """By committed length [K, V or D], what the head says at each level of a chain that is the text's own."""
    kept: dict[int, Tensor] = {}
    tokens, features = text.tokens, text.features[:, [TAPS.index(tap) for tap in head.taps]]  # type: ignore[index]

    def forced(seeds: Any, logits: Tensor, level: Any, *rest: Any) -> list[DraftTree]:
        levels, above = [logits[0]], torch.zeros(1, 1, dtype=torch.long)
        for depth in range(1, min(head.settings.steps, len(tokens) - 1 - committed)):
            chain = torch.ones(1, 1, depth, dtype=torch.bool)
            levels.append(
                level(depth, [0], tokens[committed + depth][None, None], above, chain)[0, 0]
            )
        kept[committed] = torch.stack(levels)
        return [DraftTree.chain([seeds[0].root])]

    with patch.context() as inner:
        inner.setattr(head_state, "grow_rows", forced)
        draft = head.begin()
        for start, committed in pairwise(pieces):
            news = Committed(
                tokens[start:committed], features[start:committed], int(tokens[committed])
            )
            draft.propose(news, Budget(8, head.settings.steps, 3))
    return kept


def drafting_is_training(head: Any, patch: pytest.MonkeyPatch) -> None:
    """Step s of slot i says what level s of a chain says when i + 1 tokens are committed."""
    texts, frozen = everywhere([9, 24]), frozen_head(torch.float32)
    trained = trained_logits(head, collate(texts, TAPS), frozen, patch)[:, 7:]  # of the second text
    drafted = drafted_logits(head.bind(frozen), texts[1], [0, 5, 6, 11, 15, 22], patch)
    for committed, levels in drafted.items():
        torch.testing.assert_close(trained[: len(levels), committed - 1], levels, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name", [name for name in VARIANTS if name not in ("eagle3 acceptance", "eagle3 hybrid")]
)
def test_each_step_of_training_is_a_level_of_drafting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Within 1e-5 for every step, however the text came in pieces and whatever was drafted in between."""
    drafting_is_training(new_head(tmp_path, name), monkeypatch)


# -- what a step sees -------------------------------------------------------------------------------------------------


def leak(head: Any, patch: pytest.MonkeyPatch) -> None:
    """Of a changed token or state, step s of slot i sees what lies before the token i + 2 + s that it names."""
    texts, frozen = everywhere([15, 9]), frozen_head(torch.float32)
    slots = torch.arange(13)[None]
    ahead = (
        slots + torch.arange(head.settings.steps)[:, None]
    )  # [K, S], the token two before the one that is named
    inside = ahead < 13
    before = trained_logits(head, collate(texts, TAPS), frozen, patch)
    for place in (2, 7, 12):
        for what in ("tokens", "features"):
            changed = getattr(texts[0], what).clone()
            changed[place] = changed[place] + 1 if what == "tokens" else -changed[place]
            after = trained_logits(
                head, collate([replace(texts[0], **{what: changed}), texts[1]], TAPS), frozen, patch
            )
            same = (after == before).all(-1)
            may_see = ahead + 1 >= place if what == "tokens" else (slots >= place).expand_as(ahead)
            assert same[:, 13:].all(), "a slot saw another text"
            assert same[:, :13][inside & ~may_see].all(), "a slot saw what it names"
            assert not same[:, :13][inside & may_see].any(), "a slot did not see its own text"


@pytest.mark.parametrize("name", ["eagle3", "eagle3.1", "hass"])
def test_no_step_sees_what_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nor the states of the target behind its anchor, nor another text."""
    leak(new_head(tmp_path, name, steps=4), monkeypatch)


attend, spans_of = text_blocks.attend, Spans.of  # what faults are planted in


def moving(query: Tensor, key: Tensor, value: Tensor, spans: Spans, own: Any = ()) -> Tensor:
    """A mask that moves with the step: its true keys are those of later slots."""
    later = (torch.arange(key.shape[1]) + len(own)).clamp(max=key.shape[1] - 1)
    return attend(query, key[:, later], value[:, later], spans, own)


def strangers(query: Tensor, key: Tensor, value: Tensor, spans: Spans, own: Any = ()) -> Tensor:
    """What another anchor has drafted."""
    return attend(
        query, key, value, spans, [(mine.roll(1, 1), its.roll(1, 1)) for mine, its in own]
    )


def from_the_first_text(*given: Any, **window: Any) -> Spans:
    """Texts that see what lies before them."""
    found = spans_of(*given, **window)
    return replace(found, runs=[(0, start, stop) for _, start, stop in found.runs])


@pytest.mark.parametrize(
    ("check", "home", "name", "fault", "seen"),
    [
        (leak, text_blocks, "attend", moving, "what it names"),
        (drafting_is_training, text_blocks, "attend", moving, "not close"),
        (drafting_is_training, text_blocks, "attend", strangers, "not close"),
        (leak, Spans, "of", from_the_first_text, "another text"),
    ],
)
def test_a_leak_is_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    check: Any,
    home: Any,
    name: str,
    fault: Any,
    seen: str,
) -> None:
    """Planted faults: attention to later slots, to another's drafts, to another text."""
    monkeypatch.setattr(home, name, fault)
    with pytest.raises(AssertionError, match=seen):
        check(new_head(tmp_path, "hass"), monkeypatch)


@pytest.mark.parametrize("name", ["eagle3", "hass"])
def test_an_unsupervised_label_changes_no_gradient(tmp_path: Path, name: str) -> None:
    """What stands behind an answer, and the state that names it, count for no step; the answer's own count."""
    head, frozen, gradients = new_head(tmp_path, name, steps=4), frozen_head(torch.float32), []
    (text,) = texts_of({16: [(4, 12)]}, torch.float32)
    for place in (15, 12, 11):  # the first is far from any slot
        tokens, features = text.tokens.clone(), text.features.clone()  # type: ignore[union-attr]
        tokens[place], features[place - 1] = 96 - tokens[place], -features[place - 1]
        batch = Batch(tokens, text.loss_mask, features, (16,), TAPS, (0,))
        gradients.append(computed(head, batch, frozen))
    assert all(value.equal(gradients[0][part]) for part, value in gradients[1].items())
    assert not any(value.equal(gradients[0][part]) for part, value in gradients[2].items())
