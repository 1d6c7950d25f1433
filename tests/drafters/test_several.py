"""Several drafters in turn: the same output, and each of them drafts what it would draft alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Budget, Sampling, Target, generate
from eagle.core.drafter import Committed, Drafter, Noise
from eagle.core.tree import PUBLISHED_TREE, DraftTree, chain_paths
from eagle.core.verify import Choose, warp
from eagle.decoding.goodput import Goodput
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.several import FirstOf
from tests.families import PlantedTrees, build, own_answer, own_logits, random_tokens

SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=5)]


def head_of(name: str, target: Target) -> Any:
    """An untrained head, the same every time."""
    torch.manual_seed(0)
    method = DRAFTERS[name]
    return method.for_target(settings_of({"kind": name}, "test"), target.config, target.head).bind(
        target.head
    )


class Heard(Drafter):
    """A drafter, and what it was told and said."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.taps = inner, inner.taps
        self.news: list[Committed] = []
        self.trees: list[DraftTree] = []

    def begin(self, noise: Noise | None = None) -> Any:
        """A new sequence."""
        self.text = self.inner.begin(noise)
        return self

    def propose(self, news: Committed, budget: Budget) -> DraftTree:
        """What the drafter says."""
        self.news.append(news)
        self.trees.append(self.text.propose(news, budget))
        return self.trees[-1]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T=0", "T=1"])
def test_the_output_is_the_untouched_models(sampling: Sampling) -> None:
    """Lookup first, then two heads that read different layers: both kinds speak, and each is told every token once.

    A random target of 96 tokens says some of them again and others for the first time.
    """
    target, prompt, noise = (
        Target(build("llama")),
        random_tokens(20, seed=1),
        Choose(sampling).noise,
    )
    lookup, head = Heard(NgramDrafter()), Heard(head_of("eagle3", target))
    silent = Heard(head_of("eagle1", target))
    several = FirstOf([lookup, head, silent])
    assert several.taps == (*head.taps, *(tap for tap in silent.taps if tap not in head.taps))
    noised = noise and (lambda at: noise([at], target.vocab_size, target.device)[0])
    expected = own_answer(target.model, prompt, 16, None, noised)
    for _ in range(2):  # `begin` forgets
        lookup.news.clear(), head.news.clear(), head.trees.clear(), lookup.trees.clear()
        trace = generate(target, several, prompt, sampling=sampling, max_new_tokens=16, stop=[])
        assert trace.tokens == expected
        spoken = [tree for tree in lookup.trees if len(tree) > 1]
        assert 0 < len(spoken) < len(lookup.trees) and len(head.trees) == len(lookup.trees) - len(
            spoken
        )
        for heard in (lookup, head):
            said = torch.cat([news.tokens for news in heard.news]).tolist()
            assert (
                said == [*prompt, *expected][: len(said)]
                and heard.news[-1].root == (prompt + expected)[len(said)]
            )
    assert not silent.news


class Moody(PlantedTrees):
    """Knows the answer, and says nothing where the text has an even length."""

    def propose(self, news: Committed, budget: Budget) -> DraftTree:
        """Two right tokens, or none."""
        self.read += len(news.tokens)
        right = self.text[self.read + 1 :][: min(2, budget.depth)] if self.read % 2 else []
        return DraftTree.chain([news.root, *right])


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_a_head_drafts_what_it_would_alone(name: str, tiny_target: Target) -> None:
    """Where it is asked, with features of its own layers behind all tokens that it was not told at once."""
    prompt, head = tiny_target.chat("What does copy do?"), Heard(head_of(name, tiny_target))
    text = prompt + own_answer(tiny_target.model, prompt, 20)
    moody = Moody(text, taps=(1,))  # so that the head's own layers are not the first
    generate(tiny_target, FirstOf([moody, head]), prompt, max_new_tokens=20, stop=[])
    assert len(head.trees) > 2 and max(len(news.tokens) for news in head.news[1:]) > 2
    alone, features = (
        head_of(name, tiny_target).begin(),
        tiny_target.features(torch.tensor([text]), head.taps)[0],
    )
    ends = set(accumulate(len(news.tokens) for news in head.news))
    drafts, seen = [], 0
    for end in range(len(prompt), max(ends) + 1):  # token by token
        levels = len(text) - end - 2 if end in ends else 1
        tree = alone.propose(
            Committed(torch.tensor(text[seen:end]), features[seen:end], text[end]),
            Budget(depth=levels),
        )
        drafts += [tree] if end in ends else []
        seen = end
    for tree, expected in zip(head.trees, drafts, strict=True):
        assert torch.equal(tree.tokens, expected.tokens) and torch.equal(
            tree.parents, expected.parents
        )


def test_it_is_silent_where_all_are(tiny_target: Target) -> None:
    """Nobody has anything to say: the root alone; and a list of nobody is refused."""
    several = FirstOf([NgramDrafter(), NgramDrafter(longest=2)])
    assert len(several.begin().propose(Committed(torch.tensor([1, 2, 3]), None, 4), Budget())) == 1
    with pytest.raises(ValueError, match="expected at least one"):
        FirstOf([])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [chain_paths(3), PUBLISHED_TREE], ids=["chain", "published"])
def test_lookup_and_drawn_drafts_in_turn_have_the_targets_law(shape: Any) -> None:
    """Drafts with a law from a head, without one from lookup, as far as a policy wants, in 600 requests."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=4, num_hidden_layers=4, bos_token_id=0, **sizes)
    )
    torch.nn.init.normal_(model.lm_head.weight, std=0.4)
    letters, sampling, prompt = Target(model), Sampling(temperature=1.0, seed=3), [1, 2, 3, 0, 1]
    lookup = Heard(NgramDrafter(longest=3, shortest=3))
    several = FirstOf([lookup, head_of("eagle1", letters)])
    levels = max(map(len, shape))
    policy = Goodput(
        [0.1 * level for level in range(levels + 1)],
        [1.0] * (levels + 1),
        Budget.fixed(shape, "sampled"),
        share=1,
        memory=3,
    )
    counts: Any = np.zeros([4] * 3)
    for request in range(600):
        options: dict[str, Any] = {
            "sampling": replace(sampling, request=request),
            "budget": policy,
            "stop": [],
        }
        counts[
            tuple(generate(letters, several, prompt, max_new_tokens=6, **options).tokens[:3])
        ] += 1
    law = np.ones_like(counts)
    for said in np.ndindex(law.shape):
        for end in range(3):
            scores = warp(own_logits(letters.model, [*prompt, *said[:end]])[-1:], sampling)
            law[said] *= scores.softmax(-1)[0, said[end]].item()
    assert scipy.stats.chisquare(counts.flatten(), 600 * law.flatten() / law.sum()).pvalue > 1e-4
    spoken = sum(len(tree) > 1 for tree in lookup.trees)
    assert 0.1 < spoken / len(lookup.trees) < 0.9
