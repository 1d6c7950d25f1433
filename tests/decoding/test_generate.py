"""`python -m eagle generate`: text as it comes, what was drafted in it, and how fast."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from eagle import Sampling, Target, generate, load_drafter
from eagle.__main__ import main
from eagle.command.answering import (
    GREEN,
    PLAIN,
    parse_options,
    stream_text,
    supports_colour,
    writer_to,
)
from eagle.core.noise import Noise
from eagle.core.spelling import Spelling
from eagle.core.trace import Trace
from tests.families import PlantedTrees, own_answer

PUBLISHED = Path(__file__).parents[3] / "shared/data/tokenizers"
TEXT = "Naïve 日本語: 😀👩‍👩‍👧 ü שלום\n\tdef f(x):  return 'é'"
QUESTION = "What does copy do?"
EXACT = ["--dtype", "float64"]  # in which no rounding decides between two tokens


def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer of 256 tokens, one for each byte: every character beyond ASCII takes several."""
    vocabulary = {
        letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def spelt(tokenizer: Any, tokens: list[int]) -> list[str]:
    """The pieces of a text, the rest at the end."""
    spell = Spelling(tokenizer)
    return [*map(spell, tokens), spell.rest()]


def check(tokenizer: Any) -> None:
    """The pieces of a text are the text; cut anywhere, what has been said of it stays true and breaks no character."""
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    for end in range(len(tokens) + 1):
        *said, rest = spelt(tokenizer, tokens[:end])
        assert whole.startswith("".join(said)) and "\ufffd" not in "".join(said)
    assert "".join(said) == whole and rest == ""


def test_pieces_are_the_text_and_break_no_character(base: Any) -> None:
    """With bytes as tokens, and with the tiny tokenizer's byte fallback."""
    tokenizer = byte_level()
    assert spelt(tokenizer, tokenizer.encode("a日")) == ["a", "", "", "日", ""]
    for one in (tokenizer, base):
        check(one)


def test_bytes_that_are_no_text_are_said_as_they_are_decoded() -> None:
    """Whatever random bytes are: a replacement waits until it is certain, and all is said in the end."""
    tokenizer, dice = byte_level(), random.Random(0)
    for count in (1, 2, 5, 20, 200):
        tokens = [dice.randrange(len(tokenizer)) for _ in range(count)]
        assert "".join(spelt(tokenizer, tokens)) == tokenizer.decode(
            tokens, skip_special_tokens=True
        )


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama3.1-instruct", "qwen3")]


@pytest.mark.skipif(not PUBLISHED.exists(), reason="no published tokenizers beside the checkout")
@pytest.mark.parametrize("name", ["gpt2-chatml", "vicuna", *SLOW])
def test_pieces_of_published_tokenizers_are_the_text(name: str) -> None:
    """Byte-level BPE, and sentencepiece, whose first space is not said."""
    check(AutoTokenizer.from_pretrained(PUBLISHED / name))


def test_what_was_drafted_is_marked(mixing_target: Target) -> None:
    """The marks are the tokens that a cycle accepted, by a naive count; streamed pieces are those of the trace."""
    prompt = mixing_target.chat(QUESTION)
    drafter = PlantedTrees(prompt + own_answer(mixing_target.model, prompt, 40))
    trace = generate(mixing_target, drafter, prompt, max_new_tokens=40, stop=[])
    accepted = {
        1 + sum(cycle.committed for cycle in trace.cycles[:number]) + step
        for number, cycle in enumerate(trace.cycles)
        for step in range(min(cycle.accepted, cycle.committed))
    }
    assert accepted and trace.drafted == [place in accepted for place in range(len(trace.tokens))]
    assert "".join(text for text, _ in trace.pieces()) == trace.text
    said: list[tuple[str, bool]] = []
    heard = stream_text(
        mixing_target,
        drafter,
        prompt,
        lambda *piece: said.append(piece),
        max_new_tokens=40,
        stop=[],
    )
    assert said == trace.pieces() and heard.trace.tokens == trace.tokens
    assert not Trace([]).drafted


@pytest.mark.slow
def test_an_answer_is_streamed_and_compared(
    mixing_target: Target, mixing_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text alone where one pipes it; figures beside it, and with --compare that drafts changed nothing."""
    asked = [
        "generate",
        "ngram",
        QUESTION,
        "--target",
        str(mixing_target_dir),
        "--max-new-tokens",
        "24",
        *EXACT,
    ]
    main([*asked, "--temperature", "1", "--compare"])
    out, told = capsys.readouterr()
    drafter, prompt = load_drafter("none", mixing_target), mixing_target.chat(QUESTION)
    plain = generate(mixing_target, drafter, prompt, max_new_tokens=24, sampling=Sampling(1.0))
    assert out == plain.text + "\n"
    assert re.search(
        r"^ngram: \d+ tokens, [\d.]+ tokens/s; \d+ forwards .*, acceptance length \d+\.\d\d$",
        told,
        re.M,
    )
    assert re.search(
        rf"^none: {len(plain.tokens)} tokens, .*, acceptance length 1\.00$", told, re.M
    )
    assert re.search(r"^[\d.]+ × as fast, and the output is the same$", told, re.M)


def test_the_best_answer_of_a_beam_search_is_printed(
    mixing_target: Target, mixing_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --beams, its score and counts beside it; options that mean nothing then are refused."""
    asked = [
        "generate",
        "ngram",
        QUESTION,
        "--target",
        str(mixing_target_dir),
        "--max-new-tokens",
        "16",
        *EXACT,
    ]
    main([*asked, "--beams", "3"])
    out, told = capsys.readouterr()
    prompt = mixing_target.chat(QUESTION)
    options = {"num_beams": 3, "max_new_tokens": 16, "do_sample": False}
    (expected,) = mixing_target.model.generate(torch.tensor([prompt]), **options)
    assert (
        out
        == mixing_target.tokenizer.decode(expected[len(prompt) :], skip_special_tokens=True) + "\n"
    )
    assert re.search(
        r"^ngram: score -[\d.]+; \d+ steps, \d+ forwards after the prompt's, [\d.]+ steps each",
        told,
        re.M,
    )
    with pytest.raises(SystemExit):
        main([*asked, "--beams", "3", "--temperature", "1", "--typical"])
    assert "leave --temperature, --typical out" in capsys.readouterr().err


def test_an_answer_under_a_policy_is_the_same(
    mixing_target: Target, mixing_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --policy the text is the target's own, and the number of levels is decided in every cycle."""
    asked = [
        "generate",
        "ngram",
        QUESTION,
        "--target",
        str(mixing_target_dir),
        "--max-new-tokens",
        "24",
        *EXACT,
    ]
    main([*asked, "--policy", "--compare"])
    out, told = capsys.readouterr()
    trace = generate(
        mixing_target,
        load_drafter("none", mixing_target),
        mixing_target.chat(QUESTION),
        max_new_tokens=24,
    )
    assert out == trace.text + "\n" and "and the output is the same" in told
    assert re.search(r"^policy: \d+\.\d levels a cycle, of 0 to 8$", told, re.M)


def test_options_are_given_on_the_command_line(
    mixing_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As numbers where they are numbers; one that the method has not is refused."""
    assert parse_options(["trust=2", "pick=frequent"]) == {"trust": 2, "pick": "frequent"}
    asked = [
        "generate",
        "ngram",
        QUESTION,
        "--target",
        str(mixing_target_dir),
        "--max-new-tokens",
        "8",
    ]
    main([*asked, "--option", "longest=2", "--option", "pick=frequent"])
    assert "ngram: 8 tokens" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*asked, "--option", "longst=2"])
    assert "ngram has no option longst; did you mean longest" in capsys.readouterr().err


def test_a_lossy_answer_is_called_one(
    mixing_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --typical, which is refused at temperature 0; a difference is not taken for a fault then."""
    asked = [
        "generate",
        "ngram",
        "x x x x x x",
        "--target",
        str(mixing_target_dir),
        "--max-new-tokens",
        "24",
        *EXACT,
    ]
    main([*asked, "--temperature", "1", "--typical", "--compare"])
    told = capsys.readouterr().err
    assert (
        "typical acceptance is LOSSY: the answer does not follow the model's distribution" in told
    )
    assert "which must not be" not in told
    with pytest.raises(SystemExit):
        main([*asked, "--typical"])
    assert "needs a temperature above 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*asked, "--typical", "--policy"])
    assert "leave one of them out" in capsys.readouterr().err


def test_a_difference_is_told(
    mixing_target_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A planted fault: noise that changes with every generation."""
    seeds = iter(range(100))
    begin = Noise.__init__
    monkeypatch.setattr(
        Noise, "__init__", lambda noise, seed, request: begin(noise, next(seeds), request)
    )
    asked = [
        "generate",
        "ngram",
        QUESTION,
        "--target",
        str(mixing_target_dir),
        "--max-new-tokens",
        "24",
        *EXACT,
    ]
    main([*asked, "--temperature", "1", "--compare"])
    assert re.search(
        r"but the output differs from token \d+ on, which must not be", capsys.readouterr().err
    )


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        """It does."""
        return True


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never in a pipe, nor where NO_COLOR is set or the terminal is dumb; hostile text cannot steer a terminal."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert supports_colour(Terminal()) and not supports_colour(io.StringIO())
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not supports_colour(Terminal())
    shown, piped = Terminal(), io.StringIO()
    for out, coloured in ((shown, True), (piped, False)):
        say = writer_to(out, coloured)
        say("a\x1b]0;title\x07\n", False)
        say("b", True)
    assert shown.getvalue() == f"a\ufffd]0;title\ufffd\n{GREEN}b{PLAIN}"
    assert piped.getvalue() == "a\x1b]0;title\x07\nb"
