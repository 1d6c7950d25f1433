"""Validation without decoding says what decoding would have kept."""

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
from eagle.drafters.parts import text_blocks
from eagle.drafters.parts.validation import figures, validate_text
from eagle.drafters.recurrent.eagle1 import Eagle1
from tests.families import VOCAB_SIZE, build, random_tokens
from tests.trained import fixture_seed
from tests.unrolled_heads import causal_states

TREES = {"chain": chain_paths(4), "tree": PUBLISHED_TREE}
NEW_TOKENS = 48


def batch_of(target: Target, texts: list[list[int]], masks: list[Tensor]) -> Batch:
    """Texts with the target's features."""
    examples = [Example(torch.tensor(text), mask) for text, mask in zip(texts, masks, strict=True)]
    live = LiveFeatures(target, examples, {"taps": [-1], "dtype": "float32"})
    return collate(live.read(range(len(texts))), live.taps)


@pytest.fixture(scope="module")
def target() -> Target:
    """A llama whose greedy answers are no loops."""
    return Target(build("llama"))


@pytest.fixture(scope="module")
def texts(target: Target) -> list[list[int]]:
    """Twelve prompts of twelve tokens, each with the target's greedy answer."""
    prompts = [random_tokens(12, seed) for seed in range(12)]
    return [
        prompt + generate(target, NoDrafter(), prompt, max_new_tokens=NEW_TOKENS, stop=[]).tokens
        for prompt in prompts
    ]


@pytest.fixture(scope="module")
def answered(target: Target, texts: list[list[int]]) -> Batch:
    """The answers, supervised whole."""
    return batch_of(target, texts, [torch.arange(len(text)) >= 12 for text in texts])


@pytest.fixture(scope="module")
def head(target: Target, answered: Batch) -> Eagle1:
    """A head that has learned a little."""
    torch.manual_seed(fixture_seed())
    head = Eagle1.for_target(Eagle1.Settings(), target.config).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        head(answered, target.head)["total"].backward()
        optimizer.step()
    return head.bind(target.head)


@pytest.fixture(scope="module")
def mixed(target: Target, texts: list[list[int]]) -> Batch:
    """Texts in which a token stands that the target would not say, supervised in two stretches."""
    said = [
        [(token + (place == 46)) % VOCAB_SIZE for place, token in enumerate(text)] for text in texts
    ]
    places = torch.arange(12 + NEW_TOKENS)
    return batch_of(target, said, [(places >= 12) & (places != 30) & (places != 31)] * len(said))


def counted_by_drafting(
    head: Eagle1, target: Target, batch: Batch, paths: Paths
) -> dict[str, list[int]]:
    """A naive loop: at every slot a real tree, and the target's own walk through it as far as the text tells it."""
    budget, depth = Budget.fixed(paths), max(map(len, paths))
    reached, accepted = [0] * depth, [0] * depth
    columns = (batch.tokens, batch.features, batch.loss_mask)
    for text, features, mask in zip(
        *(column.split(batch.lengths) for column in columns), strict=True
    ):
        choices = target.head.logits(features[:, 0]).argmax(-1).tolist()
        for slot in (mask.nonzero()[:, 0] - 2).tolist():
            update = Committed(text[: slot + 1], features[: slot + 1], int(text[slot + 1]))
            tree = head.begin().propose(update, budget)
            known = [slot + 1]  # places whose choice the text tells
            while (
                known[-1] + 2 < len(text)
                and mask[known[-1] + 2]
                and int(text[known[-1] + 1]) == choices[known[-1]]
            ):
                known.append(known[-1] + 1)
            told = [choices[place] for place in known[:depth]]
            depths = tree.depths()
            path = walk(tree, [told[at] if at < len(told) else -1 for at in depths])
            for level in range(min(len(path), len(told))):
                reached[level] += 1
                accepted[level] += level + 1 < len(path)
    return {"reached": reached, "accepted": accepted}


@pytest.fixture(scope="module")
def drafted(head: Eagle1, target: Target, mixed: Batch) -> dict[str, list[int]]:
    """What drafting at every slot counts, tree by tree."""
    return {
        f"{name}/{kind}": counts
        for name, paths in TREES.items()
        for kind, counts in counted_by_drafting(head, target, mixed, paths).items()
    }


def judged_counts(head: Eagle1, target: Target, batch: Batch) -> dict[str, list[int]]:
    """The same by judging."""
    return {
        name: sums.tolist()
        for name, sums in head.validate(batch, target.head, TREES).items()
        if "/" in name
    }


@pytest.mark.slow
def test_counts_are_those_of_drafting_at_every_slot(
    head: Eagle1, target: Target, mixed: Batch, drafted: dict[str, list[int]]
) -> None:
    """Slot by slot with the real cache and the real trees, to the last count."""
    assert judged_counts(head, target, mixed) == drafted
    assert min(drafted["tree/accepted"][:3]) > 0  # there was something to count
    assert (
        drafted["tree/reached"][1] < drafted["tree/accepted"][0]
    )  # and something that could not be watched


@pytest.mark.parametrize("fault", ["keys", "position", "token"])
def test_another_unroll_is_seen(
    head: Eagle1,
    target: Target,
    mixed: Batch,
    drafted: dict[str, list[int]],
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted faults: steps that do not see themselves, stand one place too early, or read another slot's token."""
    attend, rotate, block_inputs = text_blocks.attend, text_blocks.rotate, Eagle1.block_inputs
    turned: list[Tensor] = []

    def forgetful(query: Tensor, key: Tensor, value: Tensor, spans: Any, own: Any) -> Tensor:
        return attend(query, key, value, spans, own[:-1])

    def behind(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        turned.append(rotary[0])
        return rotate(x, rotary if len(turned) < 3 else tuple(table.roll(1, 0) for table in rotary))

    def mistaken(self: Any, tokens: Tensor, hidden: Tensor) -> Any:
        step = hidden.shape[0] == mixed.slots
        return block_inputs(self, tokens.roll(1, dims=0) if step else tokens, hidden)

    home, name, wrong = {
        "keys": (text_blocks, "attend", forgetful),
        "position": (text_blocks, "rotate", behind),
        "token": (Eagle1, "block_inputs", mistaken),
    }[fault]
    monkeypatch.setattr(home, name, wrong)
    assert judged_counts(head, target, mixed) != drafted


def test_loss_terms_agreement_and_overlap_are_the_plain_ones(
    head: Eagle1, target: Target, mixed: Batch
) -> None:
    """Agreement and Σ min(p, q) by whole laws, slot by slot; the first level of a chain is the agreement."""
    columns = (mixed.tokens, mixed.features[:, 0], mixed.loss_mask)
    agreed, overlaps = [], []
    for tokens, features, mask in zip(
        *(column.split(mixed.lengths) for column in columns), strict=True
    ):
        with torch.no_grad():
            predicted = causal_states(head, tokens[None, 1:], features[None, :-1], 0, target.head)[
                0
            ]
        for slot in (mask.nonzero()[:, 0] - 2).tolist():
            own, law = (
                target.head.logits(state).double().softmax(-1)
                for state in (predicted[slot], features[slot + 1])
            )
            agreed.append(float(own.argmax() == law.argmax()))
            overlaps.append(float(torch.minimum(own, law).sum()))
    found = figures(head.validate(mixed, target.head, TREES))
    assert found["agreement"] == pytest.approx(sum(agreed) / len(agreed))
    assert found["overlap"] == pytest.approx(sum(overlaps) / len(overlaps), rel=1e-5)
    assert found["chain/1"] == found["agreement"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_the_predicted_acceptance_length_is_near_the_decoders(
    name: str, head: Eagle1, target: Target, texts: list[list[int]], answered: Batch
) -> None:
    """Within 5%: the decoder's cycles begin where a draft ended, the prediction counts every token alike."""
    budget, traces = Budget.fixed(TREES[name]), []
    for text in texts:
        traces.append(
            generate(target, head, text[:12], budget=budget, max_new_tokens=NEW_TOKENS, stop=[])
        )
        assert traces[-1].tokens == text[12:]
    cycles = [cycle for trace in traces for cycle in trace.cycles]
    measured = sum(cycle.committed for cycle in cycles) / len(cycles)
    assert measured > 1.4
    assert figures(head.validate(answered, target.head, TREES))[f"{name}/tau"] == pytest.approx(
        measured, rel=0.05
    )


def test_figures_multiply_what_each_level_keeps() -> None:
    """By hand: of four slots three are accepted, of two watched then one; nothing was left to count behind."""
    sums = {
        "slots": torch.tensor(4.0),
        "agreement": torch.tensor(3.0),
        "chain/reached": torch.tensor([4.0, 2.0, 0.0]),
        "chain/accepted": torch.tensor([3.0, 1.0, 0.0]),
    }
    found = figures(sums)
    assert found == {
        "agreement": 0.75,
        "chain/1": 0.75,
        "chain/2": 0.5,
        "chain/3": 0.0,
        "chain/tau": 2.125,
    }


def test_a_head_that_is_the_target_accepts_everything_it_can_watch() -> None:
    """States of the teacher itself one step ahead: nothing is rejected until the text ends or disagrees."""
    true = torch.eye(6)  # after token i the target says token i
    tokens = torch.tensor([0, 0, 1, 2, 5, 4])  # which the text does, but for the last but one
    counted = torch.tensor([False, False, True, True, True, True])
    states = [true[torch.arange(4) + step] for step in (1, 2)]
    states[1] = true[(torch.arange(4) + 2).clamp(max=5)]
    sums = validate_text(
        states,
        true,
        tokens,
        counted,
        ([torch.clone] * len(states), torch.clone),
        {"chain": chain_paths(2)},
    )
    assert sums["chain/accepted"].tolist() == sums["chain/reached"].tolist() == [4.0, 2.0]
    assert sums["agreement"] == 4
