"""A least confidence: drafts end where a head is less sure, and what is drawn keeps the target's law to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from eagle import Budget, Target, generate
from eagle.core.drafter import Committed
from eagle.core.tree import DraftTree, Paths, chain_paths
from eagle.core.verify import Sampling, sample_block, sample_tree
from eagle.drafters import settings_of
from eagle.drafters.blocks.dspark import DSpark
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.several import FirstOf
from tests.drafters.blocks.test_dspark import frozen_head
from tests.enumerate_law import (
    Chance,
    Drawn,
    Rule,
    distance,
    emitted,
    every_outcome,
    laws_of,
    random_logits,
    texts_of,
)
from tests.families import build

VOCAB, ROOT, LEAST = 3, 0, 0.5
BUSHY: Paths = ((0,), (1,), (0, 0), (1, 0), (0, 0, 0))
Cut = Callable[[DraftTree], DraftTree]


def small_head(markov: str = "rnn") -> DSpark:
    """A head of three tokens, whose laws and confidences differ from path to path."""

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=5, head_dim=8, **sizes)
    small = {
        "kind": "dspark",
        "blocks": 1,
        "slots": 3,
        "rank": 4,
        "gru_size": 5,
        "taps": (1, 2),
        "markov": markov,
    }
    torch.manual_seed(8)
    head = DSpark.for_target(settings_of(small, "test"), config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    frozen = frozen_head().cast(torch.float32).narrow(slice(0, VOCAB))
    head.bind(frozen)
    return head


class Scripted:
    """Noise by which chance draws every level's children, in all orders."""

    temperature = 1.0

    def __init__(self, chance: Chance, count: int) -> None:
        self.chance, self.count, self.draft_probs = chance, count, torch.empty(0)

    def filter_logits(self, logits: Tensor) -> Tensor:
        """The logits, whose laws the next draws are from."""
        self.draft_probs = logits.double().softmax(-1)
        return logits

    def own(self, rows: int) -> Tensor:
        """High where chance drew first, then second."""
        noise = torch.zeros(rows, VOCAB)
        for row, law in enumerate(self.draft_probs):
            rest = law.clone()
            for rank in range(self.count):
                token = self.chance.draw((rest / rest.sum()).tolist())
                rest[token], noise[row, token] = 0, 1e4 * (self.count - rank)
        return noise


def every_tree(head: DSpark, budget: Budget) -> Iterator[tuple[DraftTree, float]]:
    """All that the head may draft, with probabilities."""
    features = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(9))
    update = Committed(torch.tensor([1, 2]), features, ROOT)
    yield from every_outcome(
        lambda chance: head.begin(Scripted(chance, budget.top_k)).propose(update, budget)
    )


def bias_of(rule: Rule, budget: Budget, cut: Cut | None = None) -> tuple[float, set[int]]:
    """How far what comes out is from the target's law, and the sizes of the trees."""
    drawn: list[Drawn] = []
    for tree, weight in every_tree(small_head(), budget):
        kept = tree if cut is None else cut(tree)
        drawn.append((kept, texts_of(kept), weight))
    target = laws_of(random_logits(4, VOCAB, 5, torch.float32), Sampling(temperature=1.0))
    return distance(emitted(rule, target, drawn)[0], target), {len(tree) for tree, _, _ in drawn}


CASES = [(sample_tree, chain_paths(3)), (sample_block, chain_paths(3)), (sample_tree, BUSHY)]


@pytest.mark.quick("chain", "chain as a block")
@pytest.mark.parametrize(("rule", "paths"), CASES, ids=["chain", "chain as a block", "tree"])
def test_drafts_that_end_early_leave_the_targets_law_as_it_is(rule: Rule, paths: Paths) -> None:
    """All that a head may draw is drawn, and some of it ends early."""
    apart, sizes = bias_of(rule, Budget.fixed(paths, "sampled", LEAST))
    assert apart < 1e-6 and len(sizes) > 1


def rates(tree: DraftTree) -> dict[int, float]:
    """How likely a child of each node is kept."""
    seen: dict[int, float] = {}
    head = small_head()
    features = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(9))
    state = head.open()
    state.admit(0)
    state.take_rows([0])
    with torch.inference_mode():
        state.inject([0], [features])
        states = state.read_blocks([0], torch.tensor([ROOT]))[0]
        for node, depth in enumerate(tree.depths()):
            if depth < len(states):
                seen[node] = head.rate(states[depth], tree.tokens[node]).sigmoid().item()
    return seen


def cut_behind(tree: DraftTree, ahead: int) -> DraftTree:
    """The chain up to the first node that is followed by too little confidence, or `ahead` nodes before it."""
    sure = rates(tree)
    last = next(
        (node for node in range(len(tree)) if node in sure and sure[node] < LEAST), len(tree) - 1
    )
    end = max(last - ahead, 0) + 1 if last < len(tree) - 1 else len(tree)
    laws = None if tree.draft_probs is None else tree.draft_probs[:end]
    return DraftTree(tree.tokens[:end], tree.parents[:end], laws)


@pytest.mark.slow
def test_what_looks_ahead_has_another_law() -> None:
    """The shipped rule is that of the first node behind which confidence lacks; one node earlier is biased."""
    whole, budget = (
        Budget.fixed(chain_paths(3), "sampled"),
        Budget.fixed(chain_paths(3), "sampled", LEAST),
    )
    for (tree, _), (short, _) in zip(
        every_tree(small_head(), whole), every_tree(small_head(), budget), strict=True
    ):
        assert cut_behind(tree, 0).tokens.tolist() == short.tokens.tolist()
    assert bias_of(sample_tree, whole, lambda tree: cut_behind(tree, 0))[0] < 1e-6
    assert bias_of(sample_tree, whole, lambda tree: cut_behind(tree, 1))[0] > 1e-3


def test_no_node_goes_on_without_confidence() -> None:
    """In grown and in fixed trees, side by side and alone; with all confidence asked for, nothing is drafted."""
    head = small_head()
    features = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(9))
    update = Committed(torch.tensor([1, 2]), features, ROOT)
    for shape in (Budget(12, 3, 3), Budget.fixed(BUSHY), Budget.fixed(chain_paths(3))):
        least = replace(shape, confidence=LEAST)
        whole, short = (head.begin().propose(update, budget) for budget in (shape, least))
        sure = rates(whole)
        allowed = {(): True}
        for node, text in list(enumerate(texts_of(whole)))[1:]:
            allowed[text] = allowed[text[:-1]] and sure[int(whole.parents[node])] >= LEAST
        assert 1 < len(short) < len(whole)
        assert [text for text in texts_of(whole) if allowed[text]] == [
            t for t in texts_of(short) if t in allowed
        ]
        assert len(head.begin().propose(update, replace(shape, confidence=1.0))) == 1


@pytest.mark.slow
def test_a_text_is_written_the_same_with_any_confidence() -> None:
    """In batches, and behind a drafter that is asked first."""
    target, prompts = Target(build("llama")), [[5, 6, 7, 5, 6], [9, 8, 7]]
    torch.manual_seed(0)
    head = DSpark.for_target(
        settings_of({"kind": "dspark", "blocks": 1}, "test"), target.config
    ).bind(target.head)
    torch.nn.init.normal_(head.confidence_head.proj.weight)
    for sampling in (Sampling(seed=3), Sampling(temperature=1.0, seed=3)):
        for draft in (head, FirstOf([NgramDrafter(), head])):
            options: dict[str, Any] = {
                "sampling": sampling,
                "max_new_tokens": 12,
                "stop": [],
                "batch_size": 2,
            }
            budgets = [Budget(8, 4, 3, confidence=least) for least in (None, 0.5, 0.9)]
            traces = [
                generate(target, draft, prompts, budget=budget, **options) for budget in budgets
            ]
            written = [[trace.tokens for trace in both] for both in traces]
            assert written[0] == written[1] == written[2]


def test_a_drafter_without_confidence_says_so() -> None:
    """It is asked, not its type; a probability is expected."""
    with pytest.raises(ValueError, match=r"confidence is 0\.5, and NgramDrafter cannot tell"):
        generate(
            Target(build("llama")),
            NgramDrafter(),
            [5, 6, 5],
            budget=Budget(confidence=0.5),
            max_new_tokens=4,
        )
    with pytest.raises(ValueError, match="expected a probability"):
        Budget(confidence=2)
