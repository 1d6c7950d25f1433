"""Where answers end and how they are spelt: the same whoever drafted them, streamed or whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import eagle
from eagle import Target, generate, load_drafter, stream
from eagle.core.spelling import Spelling
from eagle.core.trace import Trace
from eagle.decoding.decode import NewTokens
from tests.families import PlantedTrees, build, own_answer, random_tokens

PUBLISHED = Path(__file__).parents[3] / "shared/data/tokenizers"
PROMPT = random_tokens(20, seed=3)
MODEL = build("llama")
ANSWER = own_answer(MODEL, PROMPT, 24)


@pytest.fixture(scope="module")
def target() -> Target:
    """A llama whose tokens are two letters each."""
    vocabulary = {chr(97 + token // 10) + "ABCDEFGHIJ"[token % 10]: token for token in range(96)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="aA"))
    tokenizer.decoder = decoders.Fuse()
    return Target(MODEL, PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.mark.slow
def test_the_first_end_counts_whoever_drafts(target: Target) -> None:
    """Stop tokens and stop strings at every two places of an answer: the trace is that of plain decoding."""
    none, letters = load_drafter("none", target), target.tokenizer.decode
    for token in range(2, 8):
        for string in range(2, 8):
            stop = [ANSWER[token], letters(ANSWER[string : string + 2])[1:3]]
            plain, drafted = (
                generate(target, drafter, PROMPT, max_new_tokens=24, stop=stop)
                for drafter in (none, PlantedTrees(PROMPT + ANSWER))
            )
            assert drafted.tokens == plain.tokens
            assert (drafted.stop_string, drafted.text) == (plain.stop_string, plain.text)


@pytest.mark.slow
def test_pieces_end_where_the_text_ends(target: Target) -> None:
    """Neither holds the stop string, wherever in a token it begins."""
    text = target.tokenizer.decode(ANSWER)
    for first in range(8, 20):
        for drafter in (load_drafter("none", target), PlantedTrees(PROMPT + ANSWER)):
            trace = generate(
                target, drafter, PROMPT, max_new_tokens=24, stop=[text[first : first + 3]]
            )
            assert trace.stop_string is not None
            assert (
                "".join(piece for piece, _ in trace.pieces())
                == trace.text
                == text[: text.index(trace.stop_string)]
            )


def test_one_string_or_number_is_one_stop(target: Target) -> None:
    """A string is no list of letters."""
    text, none = target.tokenizer.decode(ANSWER), load_drafter("none", target)
    for stop in (text[9:13], ANSWER[5]):
        alone, listed = (
            generate(target, none, PROMPT, max_new_tokens=24, stop=stop) for stop in (stop, [stop])
        )
        assert (
            alone.tokens == listed.tokens and alone.text == listed.text and alone.finish == "stop"
        )


def byte_level() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    vocabulary = {
        letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """A few letters, a token for each byte behind them as sentencepiece has them, and one that is never printed."""
    names = ["a", "b", "日", "▁c", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE({name: number for number, name in enumerate(names)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def check(tokenizer: Any, common: list[int], count: int) -> None:
    """Random texts, mostly of these tokens: what is streamed is the whole's text, also in a trace."""
    dice = random.Random(0)
    for _ in range(count):
        tokens = [
            dice.choice(common) if dice.random() < 0.8 else dice.randrange(len(tokenizer))
            for _ in range(dice.choice((1, 3, 8, 20)))
        ]
        spell, whole = Spelling(tokenizer), tokenizer.decode(tokens, skip_special_tokens=True)
        assert "".join([*map(spell, tokens), spell.rest()]) == whole, tokens
        assert "".join(
            text for text, _ in Trace([], tokens[:1], tokenizer=tokenizer).pieces()
        ) == tokenizer.decode(tokens[:1], skip_special_tokens=True)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_streamed_bytes_are_the_wholes_text(make: Any) -> None:
    """Whatever bytes they are, and whatever stands between them."""
    tokenizer = make()
    check(tokenizer, list(range(len(tokenizer))), 400)
    check(tokenizer, [0, 70, 156, 170, 235, len(tokenizer) - 1], 400)


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.exists(), reason="no published tokenizers beside the checkout")
@pytest.mark.parametrize("name", ["gpt2-chatml", "vicuna", "llama3.1-instruct", "qwen3"])
def test_streamed_bytes_of_published_tokenizers_are_the_wholes_text(name: str) -> None:
    """Tokens of one or two letters and of bytes, and any others between them."""
    tokenizer = AutoTokenizer.from_pretrained(PUBLISHED / name)
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    check(
        tokenizer,
        [place for place, name in enumerate(names) if name.startswith("<0x") or len(name) <= 2],
        400,
    )


def test_streamed_tokens_have_their_text(target: Target) -> None:
    """Together it is the trace's, without the stop string; the tokens are lists as ever, and prints are short."""
    text, drafter = target.tokenizer.decode(ANSWER), PlantedTrees(PROMPT + ANSWER)
    for first in (8, 11):
        trace, pieces = Trace(), list[NewTokens]()
        for new in stream(
            target, drafter, PROMPT, max_new_tokens=24, stop=[text[first : first + 5]], trace=trace
        ):
            assert isinstance(new, list) and new == [*new]
            pieces.append(new)
        assert sum(pieces, []) == trace.tokens  # noqa: RUF017
        assert (
            "".join(new.text for new in pieces)
            == trace.text
            == text[: text.index(text[first : first + 5])]
        )
        assert (
            repr(trace).startswith("Trace(20 prompt tokens, ")
            and "stop" in repr(trace)
            and len(repr(trace)) < 160
        )
    assert "LlamaForCausalLM, 4 layers of width 32, 96 tokens, float32 on cpu" in repr(target)
    assert {"generate", "stream", "Target"} <= set(dir(eagle))
