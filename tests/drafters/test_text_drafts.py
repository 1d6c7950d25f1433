"""Draft models whose drafts become text and are split again by the target's tokenizer (SLEM)."""

# V vocabulary

from __future__ import annotations

import codecs
import copy
import random
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.core.drafter import Committed
from eagle.core.tree import chain_paths
from eagle.core.verify import walk
from eagle.drafters.draft_model import DraftModel, DraftModelSettings, ModelState
from eagle.drafters.other_tokenizer import BYTE_OF, TextPieces
from tests.drafters.test_other_tokenizer import PROMPT, renumber
from tests.enumerate_law import (
    Chance,
    Laws,
    distance,
    every_outcome,
    laws_of,
    random_logits,
    texts_of,
)
from tests.families import VOCAB_SIZE, build
from tests.own_answers import answer_naively, whole_texts

FAMILIES = ["llama", "qwen3", "gemma2", "gpt2", "mixtral"]
RECURRENT = "mamba"
SAMPLINGS = {"T=0": Sampling(), "T=1": Sampling(1.0, seed=2)}
CHAIN = Budget.fixed(chain_paths(3))
SPECIAL = ["<turn>", "<end>", *(f"<extra {number}>" for number in range(4))]
START = [90, 3, 17, 40, 91, 8]  # a prompt with special tokens
PRINTABLE = {byte: character for character, byte in BYTE_OF.items()}


def spelled(text: str) -> str:
    """Return a text's bytes as a byte-level tokenizer writes them."""
    return "".join(PRINTABLE[byte] for byte in text.encode())


def make_tokenizer(
    words: list[str],
    merges: list[tuple[str, str]],
    order: list[int],
    special: list[str] = SPECIAL,
) -> Any:
    """Return a byte-level tokenizer of these words, then special tokens; `order` are their ids."""
    ids = dict(zip([*words, *special], order, strict=False))
    model = models.BPE(vocab={word: ids[word] for word in words}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # added tokens take the next free ids, so that words keep theirs
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": special})
    return fast


LETTERS = [spelled(chr(code)) for code in range(32, 122)]
PLAIN = make_tokenizer(LETTERS, [], [*range(VOCAB_SIZE)])
# a euro sign is one token here and bytes there
SIGN_TEXT = "€"
SIGN = spelled(SIGN_TEXT)
MERGES = [("a", "b"), ("ab", "c"), ("c", "d"), (SIGN[0], SIGN[1]), (SIGN[:2], SIGN[2])]
BYTEWISE = make_tokenizer(
    [*spelled("abcd "), "ab", "cd", *SIGN], [("a", "b"), ("c", "d")], [*range(96)]
)
MERGED = make_tokenizer(
    [*SIGN, "cd", *spelled("dcba "), "ab", "abc", SIGN[:2], SIGN],
    MERGES,
    [*range(96)],
    SPECIAL[::-1],
)


def drafter_of(model: Any, tokenizer: Any, target: Target) -> DraftModel:
    """Return the model as a drafter whose drafts become text."""
    drafter = DraftModel(DraftModelSettings(), model.config, model)
    drafter.pieces = (TextPieces(tokenizer), TextPieces(target.tokenizer))
    return drafter.bind(target.head)


def reordered(model: Any) -> tuple[Any, Any]:
    """Return the model under other ids of its 90 letters, and its tokenizer."""
    order = torch.arange(VOCAB_SIZE)
    order[:90] = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    model = copy.deepcopy(model)
    tables = {id(layer.weight): layer for layer in _tables(model)}
    with torch.no_grad():
        for layer in tables.values():
            layer.weight.copy_(layer.weight[order].clone())
    words = [LETTERS[old] for old in order[:90].tolist()]
    return model, make_tokenizer(words, [], [*range(VOCAB_SIZE)])


def _tables(model: Any) -> list[Any]:
    """Return the embedding and the LM head."""
    return [model.get_input_embeddings(), model.get_output_embeddings()]


# -- output -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("family", [*FAMILIES, RECURRENT])
def test_answers_are_the_untouched_targets(family: str, name: str) -> None:
    """Whatever drafts; all drafts of the target under other ids are accepted at T = 0."""
    # experts have no kernel for fp64
    dtype = torch.float32 if family == "mixtral" else torch.float64
    model = build(family, dtype)
    expected = answer_naively(whole_texts(model), START, 24, SAMPLINGS[name])
    options: dict[str, Any] = {"max_new_tokens": 24, "stop": [], "sampling": SAMPLINGS[name]}
    target = Target(copy.deepcopy(model), PLAIN)
    trace = generate(target, drafter_of(*reordered(model), target), START, budget=CHAIN, **options)
    assert trace.tokens == expected
    # the last cycle is cut off
    full = [len(cycle.kept) == 3 for cycle in trace.cycles[:-1]]
    assert name == "T=1" or all(full)
    # tokens of another split, with characters that are split among tokens
    target.tokenizer = BYTEWISE
    other = build(RECURRENT if family == RECURRENT else "llama", dtype)
    drafter = drafter_of(other, MERGED, target)
    for budget in (CHAIN, Budget(12, 4, 3)):
        assert generate(target, drafter, START, budget=budget, **options).tokens == expected


@pytest.fixture(scope="module")
def renumbered(
    tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The trained target under other token ids."""
    order = torch.randperm(tiny_target.vocab_size, generator=torch.Generator().manual_seed(0))
    return renumber(
        tiny_target_dir / "target", tmp_path_factory.mktemp("text") / "m", order.tolist()
    )


MODES = {
    "greedy": (Sampling(), "noise"),
    "noise": (Sampling(0.8, seed=1), "noise"),
    "sampled": (Sampling(0.8, seed=1), "sampled"),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_trained_model_under_other_ids(mode: str, tiny_target: Target, renumbered: Path) -> None:
    """What it drafts is accepted nearly always, and the output is the target's own."""
    sampling, draw = MODES[mode]
    options: dict[str, Any] = {
        "max_new_tokens": 40,
        "stop": [],
        "sampling": sampling,
    }
    plain = generate(tiny_target, load_drafter("none", tiny_target), PROMPT, **options)
    drafter = load_drafter(renumbered, tiny_target, translate="text")
    for budget in (Budget.fixed(chain_paths(3), draw), Budget(12, 4, 3)):
        trace = generate(tiny_target, drafter, PROMPT, budget=budget, **options)
        # sampled drafts keep the law, not the tokens
        assert trace.tokens == plain.tokens or budget.draw == "sampled"
        assert trace.acceptance_length > (3.5 if mode == "greedy" else 1.2)


def test_requests_of_a_batch(tiny_target: Target, renumbered: Path) -> None:
    """Each gets the answer and the drafts that it gets alone."""
    drafter = load_drafter(renumbered, tiny_target, translate="text")
    prompts = [PROMPT, "Why?", "What does json.dumps do? " * 3]
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "stop": [],
        "budget": Budget(8, 4, 2),
    }
    together = generate(tiny_target, drafter, prompts, **options)
    for prompt, trace in zip(prompts, together, strict=True):
        alone = generate(tiny_target, drafter, prompt, **options)
        assert trace.tokens == alone.tokens
        assert [cycle.kept for cycle in trace.cycles] == [cycle.kept for cycle in alone.cycles]


def test_wrong_options_are_refused(tiny_target: Target, renumbered: Path) -> None:
    """A language model has no draft vocabulary, and two ways to translate."""
    with pytest.raises(ValueError, match="expected tokens or text"):
        load_drafter(renumbered, tiny_target, translate="words")
    with pytest.raises(ValueError, match="got the option draft_vocab"):
        load_drafter(renumbered, tiny_target, draft_vocab="all")


class Drawn(dict[int, int]):
    """The target's choice after each node of a draft, drawn when it is asked for."""

    def __init__(
        self,
        chance: Chance,
        laws: Laws,
        texts: list[tuple[int, ...]],
    ) -> None:
        self.chance = chance
        self.laws = laws
        self.texts = texts

    def __missing__(self, node: int) -> int:
        """Draw the token after a node; what lies beyond the laws is not counted."""
        text = self.texts[node]
        self[node] = 0
        if len(text) < len(self.laws):
            self[node] = self.chance.draw(self.laws[len(text)][text].tolist())
        return self[node]


def draw_answer(
    drafter: DraftModel,
    laws: Laws,
    budget: Budget,
    chance: Chance,
) -> tuple[int, ...]:
    """Return an answer in as many cycles as it takes; chance draws every token of the target."""
    tokens = [chance.draw(laws[0].tolist())]
    sequence = drafter.begin()
    update = Committed(torch.tensor([0, 1]), None, tokens[0])
    while len(tokens) < len(laws):
        tree = sequence.propose(update, budget)
        texts = texts_of(tree)
        choices = Drawn(
            chance,
            laws,
            [(*tokens, *text) for text in texts],
        )
        path = walk(tree, choices)
        committed = [update.root, *texts[path[-1]]]
        root = choices[path[-1]]
        tokens += [*committed[1:], root]
        update = Committed(torch.tensor(committed), None, root)
    return tuple(tokens[: len(laws)])


@pytest.mark.parametrize("budget", [CHAIN, Budget(6, 3, 2)])
def test_the_law_of_answers(budget: Budget) -> None:
    """Whatever the target may sample, several cycles emit it with the target's own probability."""
    size = 4
    length = 3
    ids = [*range(size)]
    target = Target(
        build("llama"),
        make_tokenizer(["a", "b", "ab"], [("a", "b")], ids, ["<end>"]),
    )
    own = make_tokenizer(["ba", "b", "a"], [("b", "a")], ids, ["<end>"])
    drafter = drafter_of(build("qwen3"), own, target)
    laws = laws_of(
        random_logits(3, size, length, torch.float64),
        Sampling(1.0),
    )
    joint = np.zeros([size] * length)
    run = partial(draw_answer, drafter, laws, budget)
    for tokens, probability in every_outcome(run):
        joint[tokens] += probability
    assert distance(joint, laws) < 1e-12


# -- text -------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 95), min_size=1, max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_sequence_is_split_as_a_whole(tokens: list[int], dice: random.Random) -> None:
    """However it comes: special tokens stay, and a character's bytes are held back until it ends."""
    target = TextPieces(BYTEWISE)
    own = TextPieces(MERGED)
    pieces = target.read(tokens)
    expected, expected_held = own.append([], pieces)
    # the tokenizer itself splits what is between special tokens
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    naive: list[int] = []
    for is_name, group in groupby(pieces, lambda piece: isinstance(piece, str)):
        if is_name:
            naive += MERGED.convert_tokens_to_ids([*group])
            decoder.reset()
        else:
            naive += MERGED.encode(decoder.decode(b"".join(group)), add_special_tokens=False)
    assert expected == naive
    split: list[int] = []
    held = b""
    while pieces:
        count = dice.randint(1, 4)
        split, held = own.append(split, [held, *pieces[:count]])
        pieces = pieces[count:]
    assert (split, held) == (expected, expected_held)


def test_drafts_end_on_whole_characters() -> None:
    """The target's tokens before stay; bytes that it has already are not proposed again."""
    target = TextPieces(BYTEWISE)
    euro = BYTEWISE.encode(SIGN_TEXT)
    bytes_of = SIGN_TEXT.encode()
    # two of the three bytes are there, and one is missing
    assert target.append(euro[:2], [bytes_of, b"a"], overlap=2)[0] == [
        *euro,
        *BYTEWISE.encode("a"),
    ]
    before = BYTEWISE.encode("a")
    assert target.append(before, [b"a", bytes_of[:2]], overlap=0) == (
        [*before, *before],
        bytes_of[:2],
    )
    # "a" is there, and "ab" is one token: the target would not have ended there
    assert target.append(before, [b"b"], overlap=0)[0] == before
    assert target.append(before, [b"b"])[0] == BYTEWISE.encode("ab")


def fresh_trees(drafter: DraftModel, seen: list[int], update: Committed) -> list[int]:
    """Return the chain that a new sequence of the drafter gets after the same tokens."""
    whole = Committed(torch.tensor([*seen, *update.tokens.tolist()]), None, update.root)
    return drafter.begin().propose(whole, CHAIN).tokens.tolist()


def count_stale(target: Target) -> int:
    """Return how many drafts differ from those of a new sequence, while tokens are split again."""
    drafter = drafter_of(build("llama", torch.float64), MERGED, target)
    sequence = drafter.begin()
    tokens = BYTEWISE.encode("ab cd a b c d" + SIGN_TEXT + "abc abcd" + SIGN_TEXT * 2)
    differing = 0
    seen: list[int] = []
    for end in range(3, len(tokens) - 1, 2):
        update = Committed(torch.tensor(tokens[len(seen) : end]), None, tokens[end])
        drafted = sequence.propose(update, CHAIN).tokens.tolist()
        differing += drafted != fresh_trees(drafter, seen, update)
        seen = tokens[:end]
    return differing


def test_faults_are_seen(
    tiny_target: Target, renumbered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a cache that is not rolled back, special tokens that are lost, drafts one token off."""
    target = Target(build("llama", torch.float64), BYTEWISE)
    assert count_stale(target) == 0
    # tokens that were split again would then be read after those that they replace
    with monkeypatch.context() as patch:
        patch.setattr(ModelState, "rewind", keep_all)
        assert count_stale(target) > 0

    drafter = load_drafter(renumbered, tiny_target, translate="text")
    options: dict[str, Any] = {
        "max_new_tokens": 40,
        "stop": [],
        "budget": CHAIN,
    }
    right = generate(tiny_target, drafter, PROMPT, **options)
    read = TextPieces.read
    append = TextPieces.append

    def read_words(self: TextPieces, tokens: Any) -> Any:
        return [piece for piece in read(self, tokens) if isinstance(piece, bytes)]

    def append_late(self: TextPieces, tokens: Any, pieces: Any, **settings: Any) -> Any:
        after, held = append(self, tokens, pieces, **settings)
        if settings:
            after = [*tokens, *after[len(tokens) + 1 :]]
        return after, held

    for name, fault in (("read", read_words), ("append", append_late)):
        with monkeypatch.context() as patch:
            patch.setattr(TextPieces, name, fault)
            wrong = generate(tiny_target, drafter, PROMPT, **options)
        assert wrong.tokens == right.tokens
        assert wrong.acceptance_length < right.acceptance_length


def keep_all(self: ModelState, row: int, tokens: list[int]) -> int:
    """Keep as many tokens as there are, whatever they are."""
    cached = self.state.length(row) if row in self.state.rows else 0
    return min(cached, len(tokens) - 1)
