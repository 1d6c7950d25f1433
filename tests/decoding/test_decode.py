"""Where an answer ends, what is counted, and how it is handed over."""

from __future__ import annotations

from math import log

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from eagle import Budget, Target, generate, stream
from eagle.core.drafter import Committed
from eagle.core.trace import Cycle
from eagle.core.tree import DraftTree
from eagle.drafters.none import NoDrafter
from tests.families import VOCAB_SIZE, PlantedTrees, build, own_answer, random_tokens

PROMPT = random_tokens(20, seed=3)
MODEL = build("llama")
ANSWER = own_answer(MODEL, PROMPT, 48)
COMMITTED = 4  # three planted tokens and the target's own, per cycle


class Deaf(PlantedTrees):
    """Proposes as deep as it likes."""

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """The same three right tokens, whatever the budget."""
        return super().propose(update, Budget())


def planted() -> PlantedTrees:
    """A drafter of which each cycle accepts three tokens."""
    return PlantedTrees(PROMPT + ANSWER)


def first_seen(places: range, phase: int) -> int:
    """The first of these places, `phase` tokens into a cycle, whose token the answer has not held before."""
    return next(k for k in places if (k - 1) % COMMITTED == phase and ANSWER.index(ANSWER[k]) == k)


@pytest.fixture(scope="module")
def target() -> Target:
    """A llama with a tokenizer of two letters per token, whose stop token is none of the answer's."""
    vocabulary = {
        chr(97 + token // 10) + "ABCDEFGHIJ"[token % 10]: token for token in range(VOCAB_SIZE)
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="aA"))
    tokenizer.decoder = decoders.Fuse()
    return Target(MODEL, PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.mark.parametrize("phase", range(COMMITTED))
def test_a_stop_token_cuts_the_block_it_stands_in(target: Target, phase: int) -> None:
    """The stop token is the last one, wherever in an accepted block; what followed is neither given nor counted."""
    place = first_seen(range(8, 40), phase)
    trace = generate(target, planted(), PROMPT, max_new_tokens=48, stop=[ANSWER[place]])
    assert trace.tokens == ANSWER[: place + 1] and trace.finish == "stop"
    assert [cycle.committed for cycle in trace.cycles] == [COMMITTED] * (
        (place - 1) // COMMITTED
    ) + [phase + 1]
    assert trace.cycles[-1].accepted == COMMITTED - 1
    assert trace.acceptance_length == place / len(trace.cycles)


def test_the_earliest_of_several_stops_counts(target: Target) -> None:
    """In whatever order stop ids are given, and also when it is the prompt's own next token."""
    late, early = first_seen(range(20, 40), 2), first_seen(range(8, 20), 1)
    trace = generate(
        target, planted(), PROMPT, stop=[ANSWER[late], ANSWER[early]], max_new_tokens=48
    )
    assert trace.tokens == ANSWER[: early + 1]
    trace = generate(target, planted(), PROMPT, stop=[ANSWER[early], ANSWER[0]], max_new_tokens=48)
    assert trace.tokens == ANSWER[:1] and trace.finish == "stop" and trace.cycles == []


def test_without_stop_the_targets_own_end_the_answer(target: Target) -> None:
    """The generation config's end tokens are the default; an empty list switches them off."""
    place = first_seen(range(8, 40), 1)
    own = Target(build("llama"))
    own.model.generation_config.eos_token_id = [95, ANSWER[place]]
    assert generate(own, planted(), PROMPT, max_new_tokens=48).tokens == ANSWER[: place + 1]
    assert generate(own, planted(), PROMPT, max_new_tokens=48, stop=[]).tokens == ANSWER


@pytest.mark.parametrize("count", [1, 2, 5, 7, 8])
@pytest.mark.parametrize("kind", [PlantedTrees, Deaf])
def test_max_new_tokens_cuts_inside_a_block(
    target: Target, kind: type[PlantedTrees], count: int
) -> None:
    """The answer has as many tokens as asked for, and those beyond are not counted, whatever is drafted."""
    trace = generate(target, kind(PROMPT + ANSWER), PROMPT, max_new_tokens=count, stop=[])
    assert trace.tokens == ANSWER[:count] and trace.finish == "length"
    assert sum(cycle.committed for cycle in trace.cycles) == count - 1
    if kind is Deaf and count == 7:
        assert [(cycle.accepted, cycle.committed) for cycle in trace.cycles] == [(3, 4), (3, 2)]
        assert trace.acceptance_length == 3.0


def test_a_stop_at_the_last_token_is_a_stop(target: Target) -> None:
    """Where both ends fall together the model's word counts."""
    place = first_seen(range(8, 40), 3)
    trace = generate(target, planted(), PROMPT, max_new_tokens=place + 1, stop=[ANSWER[place]])
    assert trace.finish == "stop" and trace.tokens == ANSWER[: place + 1]


@pytest.mark.parametrize("phase", range(COMMITTED))
def test_a_stop_string_may_span_tokens(target: Target, phase: int) -> None:
    """The answer ends with the token that completes the string, its text before the string begins."""
    text = target.tokenizer.decode(ANSWER)
    odd = range(
        2 * phase + 17, len(text), 2 * COMMITTED
    )  # a token's last letter; the string takes the next one's first
    place = next(at // 2 for at in odd if text.index(text[at : at + 2]) == at)
    string = text[2 * place + 1 : 2 * place + 3]
    trace = generate(target, planted(), PROMPT, max_new_tokens=48, stop=["never said", string])
    assert trace.tokens == ANSWER[: place + 2] and trace.finish == "stop"
    assert trace.text == text[: 2 * place + 1]
    assert generate(target, planted(), PROMPT, max_new_tokens=48, stop=["never said"]).text == text


def test_text_needs_a_tokenizer() -> None:
    """Tokens alone are no text."""
    trace = generate(Target(MODEL), planted(), PROMPT, max_new_tokens=4, stop=[])
    with pytest.raises(
        ValueError, match=r"no tokenizer, so the trace has no text: read trace\.tokens"
    ):
        _ = trace.text


def test_streaming_yields_what_generate_returns(target: Target) -> None:
    """Token by token the same, in pieces as they are committed."""
    place = first_seen(range(8, 40), 1)
    options = {"max_new_tokens": 48, "stop": [ANSWER[place]]}
    pieces = list(stream(target, planted(), PROMPT, **options))
    trace = generate(target, planted(), PROMPT, **options)
    assert [token for piece in pieces for token in piece] == trace.tokens
    assert [len(piece) for piece in pieces] == [1] + [cycle.committed for cycle in trace.cycles]


def test_timing_gives_the_seconds_of_each_part(target: Target) -> None:
    """Four parts per cycle when asked for, and nothing otherwise."""
    timed = generate(target, planted(), PROMPT, max_new_tokens=12, stop=[], timing=True)
    for cycle in timed.cycles:
        assert list(cycle.seconds or {}) == ["draft", "target", "verify", "other"]
        assert all(seconds > 0 for seconds in (cycle.seconds or {}).values())
    assert all(
        cycle.seconds is None
        for cycle in generate(target, planted(), PROMPT, max_new_tokens=12).cycles
    )


def test_without_drafts_each_forward_commits_one_token(target: Target) -> None:
    """The baseline's acceptance length is one, and the first token is the prompt's."""
    trace = generate(target, NoDrafter(), PROMPT, max_new_tokens=48, stop=[])
    assert trace.tokens == ANSWER and trace.prompt == PROMPT
    assert trace.acceptance_length == 1.0 and len(trace.cycles) == 47
    assert all(cycle.nodes == cycle.accepted == 0 for cycle in trace.cycles)


def test_a_cycle_knows_ranks_and_confidence() -> None:
    """By hand: a root with three children, the second of them kept, and the first of its two."""
    half, third = log(0.5), log(0.3)
    likely = torch.tensor([0.0, half, third, log(0.1), third + half, third + log(0.25)])
    tree = DraftTree(
        torch.tensor([9, 1, 2, 3, 4, 5]), torch.tensor([-1, 0, 0, 0, 2, 2]), likelihoods=likely
    )
    cycle = Cycle(tree, (2, 4), 3, 7)
    assert (cycle.nodes, cycle.depth, cycle.accepted, cycle.path) == (5, 2, 2, [1, 0])
    sure, kept = zip(*cycle.confidence, strict=True)
    assert sure == pytest.approx((0.5, 0.3, 0.1, 0.5, 0.25))
    assert kept == (False, True, False, True, False)
    assert (
        Cycle(DraftTree.chain([9, 1]), (1,), 2, 7).confidence == []
    )  # a drafter that has no opinion
