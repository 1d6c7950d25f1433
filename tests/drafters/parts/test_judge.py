"""Validation without decoding counts what decoding would have accepted."""

# V vocabulary

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget, Target, generate
from eagle.core.drafter import Committed
from eagle.core.examples import Batch, Example, collate
from eagle.core.tree import PUBLISHED_TREE, Paths, chain_paths
from eagle.core.verify import walk
from eagle.data.features import LiveFeatures
from eagle.drafters.none import NoDrafter
from eagle.drafters.parts import sequence_blocks
from eagle.drafters.parts.validation import figures, validate_sequence
from eagle.drafters.recurrent.eagle1 import Eagle1
from tests.families import VOCAB_SIZE, build, random_tokens
from tests.trained import fixture_seed
from tests.unrolled_heads import causal_states, split_texts

TREES = {"chain": chain_paths(4), "tree": PUBLISHED_TREE}
PROMPT = 12
NEW_TOKENS = 48
Counts = dict[str, list[int]]


def batch_of(
    target: Target,
    texts: list[list[int]],
    masks: list[Tensor],
) -> Batch:
    """Return texts with the target's features."""
    examples = [Example(torch.tensor(text), mask) for text, mask in zip(texts, masks, strict=True)]
    live = LiveFeatures(
        target,
        examples,
        {"taps": [-1], "dtype": "float32"},
    )
    return collate(live.read(range(len(texts))), live.taps)


@pytest.fixture(scope="module")
def target() -> Target:
    """Return a llama whose greedy answers are no loops."""
    return Target(build("llama"))


@pytest.fixture(scope="module")
def texts(target: Target) -> list[list[int]]:
    """Return twelve prompts of twelve tokens, each with the target's greedy answer."""
    prompts = [random_tokens(PROMPT, seed) for seed in range(12)]
    traces = generate(
        target,
        NoDrafter(),
        prompts,
        max_new_tokens=NEW_TOKENS,
        stop=[],
    )
    return [trace.prompt + trace.tokens for trace in traces]


@pytest.fixture(scope="module")
def answered(target: Target, texts: list[list[int]]) -> Batch:
    """Return the answers, supervised whole."""
    return batch_of(
        target,
        texts,
        [torch.arange(len(text)) >= PROMPT for text in texts],
    )


@pytest.fixture(scope="module")
def head(target: Target, answered: Batch) -> Eagle1:
    """Return a head that has learned a little, so that some of its drafts are right."""
    torch.manual_seed(fixture_seed())
    head = Eagle1.for_target(Eagle1.Settings(), target.config).train()
    # 100 steps leave most drafts wrong at the second level
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        head(answered, target.head)["total"].backward()
        optimizer.step()
    return head.bind(target.head)


@pytest.fixture(scope="module")
def mixed(target: Target, texts: list[list[int]]) -> Batch:
    """Return texts with one token that the target would not say, supervised in two stretches."""
    changed = [[*text[:46], (text[46] + 1) % VOCAB_SIZE, *text[47:]] for text in texts]
    positions = torch.arange(PROMPT + NEW_TOKENS)
    mask = (positions >= PROMPT) & (positions != 30) & (positions != 31)
    return batch_of(target, changed, [mask] * len(changed))


def counted_by_drafting(
    head: Any,
    target: Target,
    batch: Batch,
    paths: Paths,
) -> Counts:
    """Return how many drafts come to each level, and are accepted there: a real tree at every slot, walked naively."""
    budget = Budget.fixed(paths)
    depth = max(map(len, paths))
    reached = [0] * depth
    accepted = [0] * depth
    features = batch.features.split(batch.lengths)
    for (tokens, states, mask), text_features in zip(split_texts(batch), features, strict=True):
        choices = target.head.logits(states).argmax(-1).tolist()
        for slot in (mask.nonzero()[:, 0] - 2).tolist():
            root = int(tokens[slot + 1])
            update = Committed(tokens[: slot + 1], text_features[: slot + 1], root)
            tree = head.begin().propose(update, budget)

            # the target's choices are known as long as the text says what the target does
            known = [choices[slot + 1]]
            position = slot + 2
            while (
                position + 1 < len(tokens) and mask[position + 1] and tokens[position] == known[-1]
            ):
                known.append(choices[position])
                position += 1
            known = known[:depth]

            # beyond these no node is accepted
            node_choices = [known[d] if d < len(known) else -1 for d in tree.depths()]
            path = walk(tree, node_choices)
            for level in range(min(len(path), len(known))):
                reached[level] += 1
                accepted[level] += level + 1 < len(path)
    return {"reached": reached, "accepted": accepted}


@pytest.fixture(scope="module")
def drafted(
    head: Eagle1,
    target: Target,
    mixed: Batch,
) -> Counts:
    """Return what drafting at every slot counts, of each tree."""
    counts = {}
    for name, paths in TREES.items():
        for kind, levels in counted_by_drafting(head, target, mixed, paths).items():
            counts[f"{name}/{kind}"] = levels
    return counts


def validate(
    head: Eagle1,
    target: Target,
    batch: Batch,
) -> Counts:
    """Return the same counts by validation."""
    sums = head.validate(batch, target.head, TREES)
    return {name: value.tolist() for name, value in sums.items() if "/" in name}


@pytest.mark.slow
def test_counts_are_those_of_drafting_at_every_slot(
    head: Eagle1,
    target: Target,
    mixed: Batch,
    drafted: Counts,
) -> None:
    """Real caches and real trees count the same, to the last draft."""
    assert validate(head, target, mixed) == drafted
    # there was something to count, and something that could not be followed
    assert min(drafted["tree/accepted"][:3]) > 0
    assert drafted["tree/reached"][1] < drafted["tree/accepted"][0]


def test_another_unroll_is_seen(
    head: Eagle1,
    target: Target,
    mixed: Batch,
    drafted: Counts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps that do not see themselves count something else."""
    attend = sequence_blocks.attend

    # the last of a step's own keys is its own
    def forget_last(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spans: Any,
        own: Any,
    ) -> Tensor:
        return attend(query, key, value, spans, step_pairs=own[:-1])

    monkeypatch.setattr(sequence_blocks, "attend", forget_last)
    assert validate(head, target, mixed) != drafted


@torch.no_grad()
def test_agreement_and_overlap_are_the_plain_ones(
    head: Eagle1,
    target: Target,
    mixed: Batch,
) -> None:
    """They are means over slots of whole distributions, by a causal pass over each text."""
    agreements = []
    overlaps = []
    for tokens, states, mask in split_texts(mixed):
        # a slot reads the token after its state
        predicted = causal_states(
            head,
            tokens[None, 1:],
            states[None, :-1],
            0,
            target_head=target.head,
        )
        slots = mask.nonzero()[:, 0] - 2
        probs = target.head.logits(predicted[0, slots]).double().softmax(-1)
        target_probs = target.head.logits(states[slots + 1]).double().softmax(-1)
        agreements += (probs.argmax(-1) == target_probs.argmax(-1)).tolist()
        overlaps += torch.minimum(probs, target_probs).sum(-1).tolist()
    validated = figures(head.validate(mixed, target.head, TREES))
    assert validated["agreement"] == pytest.approx(sum(agreements) / len(agreements))
    assert validated["overlap"] == pytest.approx(sum(overlaps) / len(overlaps), rel=1e-5)
    assert validated["chain/1"] == validated["agreement"]


@pytest.mark.slow
def test_the_predicted_acceptance_length_is_near_the_decoders(
    head: Eagle1,
    target: Target,
    texts: list[list[int]],
    answered: Batch,
) -> None:
    """Within 5%: the decoder's cycles begin where a draft ended, the prediction counts every token alike."""
    prompts = [text[:PROMPT] for text in texts]
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "stop": []}
    traces = generate(
        target,
        head,
        prompts,
        budget=Budget.fixed(TREES["tree"]),
        **options,
    )
    committed = [cycle.committed for trace in traces for cycle in trace.cycles]
    measured = sum(committed) / len(committed)
    assert measured > 1.4
    validated = figures(head.validate(answered, target.head, TREES))
    assert validated["tree/tau"] == pytest.approx(measured, rel=0.05)


def test_figures_multiply_what_each_level_keeps() -> None:
    """Of four slots three are accepted, then one of two; nothing is left to count at the third level."""
    sums = {
        "slots": torch.tensor(4.0),
        "agreement": torch.tensor(3.0),
        "chain/reached": torch.tensor([4.0, 2.0, 0.0]),
        "chain/accepted": torch.tensor([3.0, 1.0, 0.0]),
    }
    assert figures(sums) == {
        "agreement": 0.75,
        "chain/1": 0.75,
        "chain/2": 0.5,
        "chain/3": 0.0,
        # 1 + 0.75 + 0.75 * 0.5
        "chain/tau": 2.125,
    }


def test_a_head_that_is_the_target_accepts_everything_it_can_follow() -> None:
    """If a head has the teacher's own states, nothing is rejected until the text ends or disagrees."""
    # after token i the target says token i, and so does the text but for its last but one
    states = torch.eye(6)
    tokens = torch.tensor([0, 0, 1, 2, 5, 4])
    mask = torch.tensor([False, False, True, True, True, True])
    levels = [states[1:5], states[[2, 3, 4, 5]]]
    sums = validate_sequence(
        levels,
        states,
        tokens,
        mask,
        ([torch.clone] * 2, torch.clone),
        {"chain": chain_paths(2)},
    )  # fmt: skip
    assert sums["chain/accepted"].tolist() == sums["chain/reached"].tolist() == [4.0, 2.0]
    assert sums["agreement"] == 4
