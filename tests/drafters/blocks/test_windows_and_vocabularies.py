"""Block heads with windows and draft vocabularies write what the untouched target writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.core.tree import chain_paths
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.parts.reduced_vocab import ReducedVocab
from eagle.formats.checkpoint import load_head, save_pretrained

WINDOW = {"window": {"recent": 4}, "window_blocks": [0], "causal": "window"}
HEADS: dict[str, dict[str, Any]] = {
    "window": {"kind": "dflash", **WINDOW},
    "window at the root": {"kind": "dflash", "window": {"recent": 5}, "window_end": "root"},
    "draft vocabulary": {"kind": "dflash", "draft_vocab": True},
    "dspark": {"kind": "dspark", "rank": 4, "draft_vocab": True, **WINDOW},
    "domino": {"kind": "dspark", "rank": 4, "gru_size": 4, "markov": "domino", "draft_vocab": True},
}
SAMPLINGS: dict[str, tuple[Sampling, Budget]] = {
    "greedy": (Sampling(), Budget(8, 3, 3)),
    "chain": (Sampling(), Budget.fixed(chain_paths(3))),
    "T=1": (Sampling(1.0), Budget(8, 3, 3)),
    "sampled": (Sampling(1.0), Budget.fixed(chain_paths(3), "sampled")),
}
PROMPTS = [[5, 6, 7, 5, 6], [1, 2], [3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2, 3]]


def make_head(name: str, target: Target) -> Any:
    """Return an untrained head, whose draft vocabulary is every third token."""
    settings = {"blocks": 2, "slots": 4, **HEADS[name]}
    tokens = torch.arange(0, target.vocab_size, 3)
    if settings.get("draft_vocab"):
        settings["draft_vocab"] = len(tokens)
    torch.manual_seed(0)
    parsed = settings_of(settings, "test")
    head = DRAFTERS[settings["kind"]].for_target(parsed, target.config, target.head, [tokens])
    return head.to(target.model.dtype)


def drafted_tokens(traces: Any) -> set[int]:
    """Return all tokens that were drafted after the roots."""
    tokens: set[int] = set()
    for trace in traces:
        for cycle in trace.cycles:
            tokens.update(cycle.tree.tokens[1:].tolist())
    return tokens


@pytest.mark.parametrize("way", SAMPLINGS)
@pytest.mark.parametrize("name", HEADS)
def test_output_is_that_of_the_target(name: str, way: str, mixing_target: Target) -> None:
    """Alone and in a ragged batch; sampled drafts have a law of theirs, checked elsewhere."""
    sampling, budget = SAMPLINGS[way]
    options: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 24, "stop": []}
    head = make_head(name, mixing_target).bind(mixing_target.head)
    batch = generate(mixing_target, head, PROMPTS, budget=budget, **options)
    alone = generate(mixing_target, head, PROMPTS[0], budget=budget, **options)
    drafted = drafted_tokens([*batch, alone])
    assert drafted
    if "draft_vocab" in HEADS[name]:
        assert drafted <= set(range(0, mixing_target.vocab_size, 3))
    if way != "sampled":
        plain = load_drafter("none", mixing_target)
        expected = generate(mixing_target, plain, PROMPTS, **options)
        assert [trace.tokens for trace in batch] == [trace.tokens for trace in expected]
        assert alone.tokens == expected[0].tokens


def test_offsets_read_as_tokens_are_seen(
    mixing_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: `d2t` taken for token ids drafts tokens outside of the vocabulary."""

    def read_wrongly(head: Any) -> Tensor:
        return head.d2t

    monkeypatch.setattr(ReducedVocab, "own_drafts", property(read_wrongly))
    head = make_head("draft vocabulary", mixing_target).bind(mixing_target.head)
    budget = Budget(8, 3, 3)
    trace = generate(mixing_target, head, [5, 6, 7], budget=budget, max_new_tokens=24, stop=[])
    assert not drafted_tokens([trace]) <= set(range(0, mixing_target.vocab_size, 3))


def test_a_draft_vocabulary_is_saved(mixing_target: Target, tmp_path: Any) -> None:
    """With the head, which then takes no other one."""
    head = make_head("dspark", mixing_target)
    save_pretrained(head, tmp_path / "head")
    loaded: Any = load_head(tmp_path / "head")
    assert torch.equal(loaded.drafts, torch.arange(0, mixing_target.vocab_size, 3))
    assert loaded.network == head.network
