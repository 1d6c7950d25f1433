"""`eagle generate`: text as it comes, what was drafted in it, and how fast."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from eagle import Budget, Sampling, Target, Trace, generate, load_drafter
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
from eagle.drafters.lookup.ngram import NgramDrafter
from tests.families import PlantedTrees, own_answer

QUESTION = "What does copy do?"
LIMIT = 24
# options -> what is printed, and what is said about it
Ask = Callable[..., tuple[str, str]]


def test_what_was_drafted_is_marked(mixing_target: Target) -> None:
    """By a naive count of what each cycle accepted; streamed pieces are those of the trace."""
    prompt = mixing_target.chat(QUESTION)
    drafter = PlantedTrees(prompt + own_answer(mixing_target.model, prompt, 40))
    trace = generate(mixing_target, drafter, prompt, max_new_tokens=40, stop=[])
    # the first token comes with the prompt, the last of a cycle is the target's own
    marks = [False]
    for cycle in trace.cycles:
        for step in range(cycle.committed):
            marks.append(step < cycle.accepted)
    assert any(marks)
    assert trace.drafted == marks
    assert "".join(text for text, _ in trace.pieces()) == trace.text
    written: list[tuple[str, bool]] = []

    def write(text: str, is_drafted: bool) -> None:
        written.append((text, is_drafted))

    answer = stream_text(
        mixing_target,
        drafter,
        prompt,
        write,
        max_new_tokens=40,
        stop=[],
    )
    assert written == trace.pieces()
    assert answer.trace.tokens == trace.tokens
    assert not Trace([]).drafted


@pytest.fixture
def ask(mixing_target_dir: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Return how to run the command; in float64 no rounding decides between two tokens."""

    def run(
        *options: str,
        question: str = QUESTION,
        max_new_tokens: int = LIMIT,
    ) -> tuple[str, str]:
        command = ["generate", "ngram", question, "--target", str(mixing_target_dir)]
        command += ["--max-new-tokens", str(max_new_tokens), "--dtype", "float64", *options]
        # the sentence of a refusal is on stderr
        with suppress(SystemExit):
            main(command)
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


@pytest.mark.slow
def test_an_answer_is_printed_and_compared(mixing_target: Target, ask: Ask) -> None:
    """The text alone is on stdout; with --compare it is said that drafts changed nothing."""
    out, err = ask("--temperature", "1", "--compare")
    drafter = load_drafter("none", mixing_target)
    prompt = mixing_target.chat(QUESTION)
    # a run without drafts, outside of the command
    plain = generate(
        mixing_target,
        drafter,
        prompt,
        max_new_tokens=LIMIT,
        sampling=Sampling(1.0),
    )
    assert out == f"{plain.text}\n"
    assert re.search(r"(?m)^ngram: \d+ tokens, .*; \d+ forwards .*, acceptance length \d", err)
    assert re.search(rf"(?m)^none: {len(plain.tokens)} tokens, .*, acceptance length 1\.00$", err)
    assert re.search(r"(?m)^[\d.]+ × as fast, and the output is the same$", err)


def test_the_best_answer_of_a_beam_search_is_printed(mixing_target: Target, ask: Ask) -> None:
    """That of transformers, with its score and counts."""
    out, err = ask("--beams", "3", max_new_tokens=16)
    prompt = mixing_target.chat(QUESTION)
    (tokens,) = mixing_target.model.generate(
        torch.tensor([prompt]), num_beams=3, max_new_tokens=16, do_sample=False
    )
    expected = mixing_target.tokenizer.decode(
        tokens[len(prompt) :],
        skip_special_tokens=True,
    )
    assert out == f"{expected}\n"
    assert re.search(r"(?m)^ngram: score -[\d.]+; \d+ steps, \d+ forwards", err)


def test_an_answer_under_a_policy_is_the_same(mixing_target: Target, ask: Ask) -> None:
    """The text is the target's own, and the number of levels is decided in every cycle."""
    out, err = ask("--policy", "--compare")
    drafter = load_drafter("none", mixing_target)
    prompt = mixing_target.chat(QUESTION)
    trace = generate(mixing_target, drafter, prompt, max_new_tokens=LIMIT)
    assert out == f"{trace.text}\n"
    assert "and the output is the same" in err
    assert re.search(r"(?m)^policy: \d+\.\d levels a cycle, of 0 to 8$", err)


def test_a_drafter_tuned_to_no_draft_says_so(monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    """Or a speedup beside it would be taken for that of its drafts; a policy may draft all the same."""
    sentence = "nothing was drafted: "
    assert sentence not in ask(max_new_tokens=8)[1]
    monkeypatch.setattr(NgramDrafter, "budget", Budget(0, 0, 0))
    assert sentence in ask(max_new_tokens=8)[1]
    assert sentence not in ask("--policy", max_new_tokens=8)[1]


def test_options_of_a_method_are_read(ask: Ask) -> None:
    """As numbers where they are numbers."""
    assert parse_options(["trust=2", "pick=frequent"]) == {"trust": 2, "pick": "frequent"}
    _, err = ask(
        "--option",
        "longest=2",
        "--option",
        "pick=frequent",
        max_new_tokens=8,
    )
    assert "ngram: 8 tokens" in err


def test_a_lossy_answer_is_called_one(ask: Ask) -> None:
    """A difference is not taken for a fault then."""
    _, err = ask(
        "--temperature",
        "1",
        "--typical",
        "--compare",
        question="x x x x x x",
    )
    assert "typical acceptance is LOSSY" in err
    assert "which must not be" not in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beams", "3", "--temperature", "1", "--typical"], "leave --temperature, --typical out"),
        (["--typical"], "needs a temperature above 0"),
        (["--typical", "--policy"], "leave one of them out"),
        (["--option", "longst=2"], "did you mean longest"),
        (["--beams", "3", "--option", "longst=2"], "did you mean longest"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: list[str],
    message: str,
    ask: Ask,
) -> None:
    """In a sentence, with nothing printed."""
    out, err = ask(*options)
    assert out == ""
    assert message in err


def test_a_difference_is_reported(monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    """A planted fault: noise that changes with every generation."""
    # as if a draft changed what is sampled
    seeds = iter(range(100))
    original = Noise.__init__

    def begin(noise: Noise, seed: int, request: int) -> None:
        original(noise, next(seeds), request)

    monkeypatch.setattr(Noise, "__init__", begin)
    _, err = ask("--temperature", "1", "--compare")
    assert re.search(r"but the output differs from token \d+ on, which must not be", err)


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        """Return that it is."""
        return True


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never in a pipe, nor where NO_COLOR is set or the terminal cannot show them."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert supports_colour(Terminal())
    assert not supports_colour(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not supports_colour(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not supports_colour(Terminal())


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        (Terminal(), f"a\ufffd]0;title\ufffd\n{GREEN}b{PLAIN}"),
        (io.StringIO(), "a\x1b]0;title\x07\nb"),
    ],
    ids=["terminal", "pipe"],
)
def test_control_characters_are_replaced_in_a_terminal(out: io.StringIO, expected: str) -> None:
    """Hostile text cannot steer it; a pipe gets the text as it is."""
    write = writer_to(out, out.isatty())
    write("a\x1b]0;title\x07\n", False)
    write("b", True)
    assert out.getvalue() == expected
