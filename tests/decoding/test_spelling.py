"""Text of a stream of tokens: it is the whole answer's, and no character is broken."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from eagle.core.trace import Spelling, Trace

PUBLISHED = Path(__file__).parents[3] / "shared/data/tokenizers"
TEXT = "Naïve 日本語: 😀👩‍👩‍👧 ü שלום\n\tdef f(x):  return 'é'"


def byte_level() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 tokens, one for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: token for token, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Return a tokenizer of a few letters and sentencepiece's token for each byte."""
    names = [
        "a",
        "b",
        "日",
        "▁c",
        "▁",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    vocabulary = {name: token for token, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    # the end token is never printed
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def published(name: str) -> Callable[[], Any]:
    """Return how to load a published tokenizer."""
    return lambda: AutoTokenizer.from_pretrained(PUBLISHED / name)


def spell(
    tokenizer: Any,
    tokens: list[int],
) -> tuple[str, str]:
    """Return the text that is streamed with each token, and what is left at the end."""
    spelling = Spelling(tokenizer)
    said = "".join(map(spelling, tokens))
    return said, spelling.rest()


TOKENIZERS = [
    byte_level,
    byte_fallback,
    *(
        pytest.param(
            published(name),
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(not PUBLISHED.exists(), reason="no published tokenizers here"),
            ],
            id=name,
        )
        # byte-level BPE, and sentencepiece, whose first space is not said
        for name in ("gpt2-chatml", "vicuna", "qwen3")
    ),
]


@pytest.mark.parametrize("make_tokenizer", TOKENIZERS)
def test_streamed_tokens_are_the_whole_text(make_tokenizer: Callable[[], Any]) -> None:
    """Random tokens, mostly of bytes and single letters, whether they make characters or not."""
    tokenizer = make_tokenizer()
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    short = [token for token, name in enumerate(names) if len(name) <= 2 or name[:3] == "<0x"]
    dice = random.Random(0)
    for _ in range(400):
        # a few others between them
        rare = dice.choices(range(len(tokenizer)), k=2)
        tokens = dice.choices(
            [*short, *rare],
            k=dice.choice((1, 3, 8, 20)),
        )
        said, rest = spell(tokenizer, tokens)
        assert said + rest == tokenizer.decode(tokens, skip_special_tokens=True), tokens
        # a trace may end within a character
        cut = Trace([], tokens[:1], tokenizer=tokenizer)
        expected = tokenizer.decode(tokens[:1], skip_special_tokens=True)
        assert "".join(text for text, _ in cut.pieces()) == expected


@pytest.mark.parametrize("make_tokenizer", [byte_level, *TOKENIZERS[2:]])
def test_streamed_text_breaks_no_character(make_tokenizer: Callable[[], Any]) -> None:
    """Wherever a text is cut, what has been said of it stays true."""
    tokenizer = make_tokenizer()
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    for end in range(len(tokens) + 1):
        said, rest = spell(tokenizer, tokens[:end])
        assert whole.startswith(said)
        assert "\ufffd" not in said
    assert said == whole
    assert rest == ""


def test_a_character_is_said_with_its_last_byte() -> None:
    """Three bytes of one character."""
    tokenizer = byte_level()
    spelling = Spelling(tokenizer)
    assert [spelling(token) for token in tokenizer.encode("a日")] == [
        "a",
        "",
        "",
        "日",
    ]
