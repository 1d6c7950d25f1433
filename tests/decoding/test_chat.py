"""`eagle chat`: drafted and plain answers are the same, and what may happen in a conversation."""

from __future__ import annotations

import io
import re
import shutil
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from docs_build import terminal
from docs_build.terminal import run_in_terminal
from eagle import Sampling, Target, generate, load_drafter
from eagle.__main__ import main
from eagle.command.answering import GREEN, PLAIN
from eagle.command.chat import Chat, noting_interrupt
from eagle.core.trace import Trace
from eagle.target.state import TargetState
from tests.families import own_answer

QUESTIONS = ["What does copy do?", "And what does that do, and that, and that?", "Why?"]
SESSION = [
    *QUESTIONS,
    "/plain",
    "/reset",
    *QUESTIONS,
    "/draft",
    "/reset",
    QUESTIONS[1],
]
LIMIT = 24
LINE = re.compile(
    r"^(\d+) tokens, (\d+) forwards after the prompt's: τ = ([\d.]+), \d+ tokens/s(.*)$",
    re.MULTILINE,
)
# lines and options -> what is printed, and what is said about it
Talk = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def target(eight_token_dir: Path) -> Target:
    """Return a target that says eight tokens in turn, so that drafts are accepted, in fp64."""
    return Target.load(eight_token_dir, dtype=torch.float64)


@pytest.fixture
def chat(target: Target) -> Chat:
    """Return a conversation with short greedy answers, none of whose prompts was read before."""
    # else the first turn would find its prompt in the cache
    target.forget()
    return Chat(target, load_drafter("suffix", target), Sampling(), LIMIT)


@pytest.fixture
def talk(
    eight_token_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Talk:
    """Return how to pipe lines into the command."""

    def run(
        lines: list[str],
        *options: str,
        folder: Path = eight_token_dir,
    ) -> tuple[str, str]:
        monkeypatch.setattr(
            sys,
            "stdin",
            io.StringIO("".join(f"{line}\n" for line in lines)),
        )
        command = ["generate", "suffix", "--target", str(folder), "--dtype", "float64"]
        main([*command, "--max-new-tokens", str(LIMIT), *options])
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


def ignore(text: str, is_drafted: bool) -> None:
    """Write nothing."""


def answer_all(
    target: Target,
    questions: list[str],
    drafter: str = "none",
    temperature: float = 0.0,
) -> list[Trace]:
    """Answer a conversation, each time from all of it and with nothing cached."""
    messages: list[dict[str, str]] = []
    sampling = Sampling(temperature, seed=3)
    traces = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        target.forget()
        prompt = target.chat(messages)
        head = load_drafter(drafter, target)
        trace = generate(
            target,
            head,
            prompt,
            sampling=sampling,
            max_new_tokens=LIMIT,
        )
        messages.append({"role": "assistant", "content": trace.text})
        traces.append(trace)
    return traces


def answer_session(target: Target, temperature: float) -> list[Trace]:
    """Return the answers of SESSION, in its order."""
    drafted = answer_all(target, QUESTIONS, "suffix", temperature)
    plain = answer_all(target, QUESTIONS, "none", temperature)
    last = answer_all(target, QUESTIONS[1:2], "suffix", temperature)
    return [*drafted, *plain, *last]


def as_printed(traces: list[Trace]) -> str:
    """Return answers as a pipe gets them."""
    return "".join(f"{trace.text}\n" for trace in traces)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafted_and_plain_answers_are_the_same(
    temperature: float,
    target: Target,
    talk: Talk,
) -> None:
    """They are those of whole conversations that are read again; the counts in the lines are the traces'."""
    # one run of the command reuses what it has read of the conversation
    out, err = talk(SESSION, "--temperature", str(temperature), "--seed", "3")
    traces = answer_session(target, temperature)
    assert out == as_printed(traces)
    assert "\x1b" not in out + err
    lines = [line[:3] for line in LINE.findall(err)]
    expected = []
    for trace in traces:
        length = f"{trace.acceptance_length:.2f}"
        expected.append((str(len(trace.tokens)), str(len(trace.cycles)), length))
    assert lines == expected
    # some draft was accepted
    assert max(trace.acceptance_length for trace in traces) > 1
    if temperature == 0:
        plain = traces[3]
        assert plain.tokens == own_answer(target.model, plain.prompt, LIMIT)


@pytest.mark.slow
def test_a_wrong_answer_is_seen(
    target: Target,
    talk: Talk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted fault: a prefix of the conversation is taken for read although it differs."""
    expected = as_printed(answer_session(target, 1.0))

    def share_all(
        state: TargetState,
        row: int,
        prompt: list[int],
    ) -> int:
        return min(len(state.sequences[row]), len(prompt) - 1)

    monkeypatch.setattr(TargetState, "_shared_prefix", share_all)
    out, _ = talk(SESSION, "--temperature", "1", "--seed", "3")
    assert out != expected


def test_a_speedup_is_printed_once_both_were_timed(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of the speeds in the lines; before, a line says how to compare."""
    # each look at the clock is a second later
    seconds = map(float, count())
    monkeypatch.setattr("eagle.command.answering.perf_counter", lambda: next(seconds))
    _, err = talk(SESSION)
    endings = [match[-1] for match in LINE.findall(err)]
    limit = "; cut off at --max-new-tokens"
    assert endings[:3] == [f"; /plain answers without drafts, to compare{limit}"] * 3
    gains = []
    for ending in endings[3:]:
        match = re.search(r"([\d.]+) × as fast", ending)
        assert match is not None
        gains.append(float(match[1]))
    first = gains[0]
    last = gains[-1]
    assert endings[3] == f"; with drafts {first:.2f} × as fast ({first:.0f}){limit}"
    assert endings[-1] == f", {last:.2f} × as fast as without drafts (1){limit}"
    # plain decoding writes one token a second
    assert min(gains) > 1


def test_a_conversation_is_not_read_again(target: Target, chat: Chat) -> None:
    """A turn reads what is new in it, by the tokens that the target's first layer gets."""
    # the first use finds out, by a text of its own, how trees are read
    target.describe()
    lengths: list[int] = []
    # counts what is really computed
    hook = target.layers[0].register_forward_pre_hook(
        lambda _, inputs: lengths.append(inputs[0].shape[1])
    )
    for index, question in enumerate(QUESTIONS):
        lengths.clear()
        prompt = chat.answer(question, ignore).trace.prompt
        if index == 0:
            assert lengths[0] == len(prompt)
        else:
            assert lengths[0] < len(prompt) - LIMIT
    hook.remove()


def test_an_interrupt_stops_the_answer_and_keeps_what_was_written(
    target: Target, chat: Chat
) -> None:
    """What was written is in the conversation, and the next answer is that of one read again."""
    written: list[str] = []

    def interrupt(text: str, is_drafted: bool) -> None:
        written.append(text)
        if len(written) == 5:
            signal.raise_signal(signal.SIGINT)

    # planted: nothing notes it
    with pytest.raises(KeyboardInterrupt):
        chat.answer(QUESTIONS[0], interrupt)
    assert not chat.turns
    written.clear()
    handler = signal.getsignal(signal.SIGINT)
    with noting_interrupt() as is_stopped:
        answer = chat.answer(QUESTIONS[0], interrupt, is_stopped)
    assert signal.getsignal(signal.SIGINT) is handler
    assert 5 <= len(answer.trace.tokens) < LIMIT
    assert chat.describe(answer).endswith("; stopped")
    assert chat.turns[-1] == {
        "role": "assistant",
        "content": "".join(written),
    }
    second = chat.answer(QUESTIONS[1], ignore).trace
    target.forget()
    assert second.prompt == target.chat(chat.turns[:-1])
    plain = generate(
        target,
        load_drafter("none", target),
        second.prompt,
        max_new_tokens=LIMIT,
    )
    assert second.tokens == plain.tokens


def test_a_second_interrupt_leaves() -> None:
    """The first is only noted."""
    with pytest.raises(KeyboardInterrupt), noting_interrupt() as is_stopped:
        signal.raise_signal(signal.SIGINT)
        assert is_stopped()
        signal.raise_signal(signal.SIGINT)


def test_a_conversation_that_does_not_fit_is_refused(
    target: Target,
    chat: Chat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer ends at the last position; a question that leaves no room is refused, and the conversation stays."""
    room = 7
    # tiny models have more positions than a test can fill
    positions = len(target.chat(QUESTIONS[0])) + room
    monkeypatch.setattr(target.config, "max_position_embeddings", positions)
    answer = chat.answer(QUESTIONS[0], ignore)
    assert len(answer.trace.tokens) == room
    assert chat.describe(answer).endswith("; cut off at the model's last position")
    turns = chat.turns
    with pytest.raises(ValueError, match=r"has come to .* tokens.*: /reset forgets"):
        chat.answer(QUESTIONS[1], ignore)
    assert chat.turns is turns
    chat.command("/reset")
    assert chat.answer(QUESTIONS[0], ignore).trace.tokens == answer.trace.tokens


def test_commands_set_what_they_say(target: Target, chat: Chat) -> None:
    """The system message comes before the conversation, until it is taken away."""
    assert chat.command("/temperature 0.5") == "temperature 0.5"
    assert chat.sampling == Sampling(0.5)
    chat.command("/system Be brief.")
    prompt = chat.answer(QUESTIONS[0], ignore).trace.prompt
    question = {"role": "user", "content": QUESTIONS[0]}
    assert prompt == target.chat([{"role": "system", "content": "Be brief."}, question])
    chat.command("/reset")
    chat.command("/system")
    assert chat.answer(QUESTIONS[0], ignore).trace.prompt == target.chat([question])
    # the page of the docs lists the same commands
    names = re.findall(r"^(/\w+)", chat.command("/help"), re.MULTILINE)
    assert names == ["/plain", "/draft", "/temperature", "/system", "/reset", "/help", "/quit"]
    page = terminal.PAGE.read_text()
    assert [name for name in names if f"`{name}" not in page] == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/temperature warm", "got 'warm', expected a number"),
        ("/temperature -1", "got '-1', expected a number: 0"),
        ("/plain why?", "expected nothing behind it"),
        ("/usr/bin", "no command /usr/bin: /help lists them"),
    ],
)
def test_a_wrong_command_changes_nothing(line: str, message: str, chat: Chat) -> None:
    """The sentence says what was expected."""
    with pytest.raises(ValueError, match=message):
        chat.command(line)
    assert chat.sampling.temperature == 0
    assert chat.drafts


def test_a_conversation_goes_on_after_a_mistake(target: Target, talk: Talk) -> None:
    """Empty lines ask nothing, and what comes after /quit is not read."""
    out, err = talk(["/what", "", QUESTIONS[0], "/quit", QUESTIONS[1]])
    assert out == as_printed(answer_all(target, QUESTIONS[:1]))
    assert err.count("error: ") == 1
    assert "there is no command /what" in err


TEMPLATE = """{% if messages[0].role == 'system' %}{{ raise_exception('No system role.') }}{% endif %}\
{% for turn in messages %}{{ turn.content }}{% endfor %}"""


def test_a_template_that_refuses_is_reported(
    target: Target,
    chat: Chat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With its words and what to do; the conversation stays."""
    monkeypatch.setattr(target.tokenizer, "chat_template", TEMPLATE)
    chat.command("/system Be brief.")
    with pytest.raises(ValueError, match=r"No system role\.; /system without a text"):
        chat.answer(QUESTIONS[0], ignore)
    assert not chat.turns


def test_a_model_without_a_chat_template_is_refused(
    eight_token_dir: Path,
    tmp_path: Path,
    talk: Talk,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before the first question."""
    folder = shutil.copytree(eight_token_dir, tmp_path / "target")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(SystemExit):
        talk(QUESTIONS, folder=folder)
    assert "error: this target has no chat template" in capsys.readouterr().err


@pytest.mark.slow
def test_a_conversation_in_a_terminal(eight_token_dir: Path) -> None:
    """Drafted text is green unless NO_COLOR is set, Ctrl-C comes back to the prompt, and Ctrl-D leaves."""
    command = [
        sys.executable,
        "-m",
        "eagle",
        "chat",
        "suffix",
        "--target",
        str(eight_token_dir),
    ]
    # what is waited for, and what is typed then; half a line is dropped by Ctrl-C
    steps = [
        ("> ", "one two\n"),
        (GREEN, "\x03"),
        ("; stopped", ""),
        ("> ", "half a line"),
        ("half a line", "\x03"),
        ("> ", "\x04"),
    ]
    text, status = run_in_terminal([*command, "--max-new-tokens", "1500"], steps)
    assert status == 0, text
    assert text.count("; stopped") == 1, text
    assert text.count("tokens/s") == 1, text
    assert "drafted text is green" in text
    assert text.count(GREEN) == text.count(PLAIN) >= 1
    plain_steps = [
        ("> ", "one two\n"),
        ("tokens/s", ""),
        ("> ", "\x04"),
    ]
    command = ["env", "NO_COLOR=1", *command, "--max-new-tokens", "24"]
    text, status = run_in_terminal(command, plain_steps)
    assert status == 0, text
    assert text.count("tokens/s") == 1, text
    assert "\x1b[3" not in text
    assert "green" not in text


def test_the_recording_is_one_run() -> None:
    """The picture and the page show the same words, and the picture loads no font from elsewhere."""
    picture = terminal.PICTURE.read_text()
    page = terminal.PAGE.read_text()
    text = page.partition(terminal.BEGIN)[2].partition(terminal.END)[0]
    assert re.findall(r"https?://[^\s\"')]*", picture) == ["http://www.w3.org/2000/svg"]
    assert all(question in text for question in terminal.TYPED)
    words = re.sub(r"<[^>]+>|&#160;", " ", picture)
    # the page's code block is marked as text
    on_page = set(re.findall(r"\w{4,}", text)) - {"text"}
    assert on_page <= set(re.findall(r"\w{4,}", words))
