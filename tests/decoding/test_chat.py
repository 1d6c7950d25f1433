"""`eagle chat`: a conversation whose drafted and plain answers are one, and what may happen in it."""

from __future__ import annotations

import io
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from docs_build import terminal
from docs_build.terminal import run_in_terminal
from eagle import Sampling, Target, generate, load_drafter
from eagle.__main__ import main
from eagle.command.answering import GREEN, PLAIN, writer_to
from eagle.command.chat import Chat, noting_interrupt
from eagle.core.noise import Noise
from eagle.core.trace import Trace
from eagle.target.state import TargetState
from tests.families import own_answer

ASKED = ["What does copy do?", "And what does that do, and that, and that?", "Why?"]
NEW = 24
LINE = re.compile(
    r"^(\d+) tokens, (\d+) forwards after the prompt's: τ = ([\d.]+), \d+ tokens/s(.*)$",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def exact(eight_token_dir: Path) -> Target:
    """A target that says eight tokens in turn, so that drafts are accepted, in fp64."""
    return Target.load(eight_token_dir, dtype=torch.float64)


def talk(folder: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    """Pipe lines into a chat with short answers."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    main(
        [
            "chat",
            "suffix",
            "--target",
            str(folder),
            "--dtype",
            "float64",
            "--max-new-tokens",
            str(NEW),
            *options,
        ]
    )


def answers(
    target: Target, asked: list[str], drafter: str = "none", temperature: float = 0.0
) -> list[Trace]:
    """The traces of a conversation, each from the whole conversation before it and with nothing kept."""
    messages: list[dict[str, str]] = []
    sampling, traces = Sampling(temperature, seed=3), []
    for question in asked:
        messages.append({"role": "user", "content": question})
        target.forget()
        prompt = target.chat(messages)
        traces.append(
            generate(
                target, load_drafter(drafter, target), prompt, sampling=sampling, max_new_tokens=NEW
            )
        )
        messages.append({"role": "assistant", "content": traces[-1].text})
    return traces


def as_printed(traces: list[Trace]) -> str:
    """Answers as a pipe gets them."""
    return "".join(f"{trace.text}\n" for trace in traces)


SESSION = [*ASKED, "/plain", "/reset", *ASKED, "/draft", "/reset", ASKED[1]]


def expected_session(target: Target, temperature: float) -> list[Trace]:
    """The answers of that session, in its order."""
    drafted, plain = (answers(target, ASKED, name, temperature) for name in ("suffix", "none"))
    assert [trace.tokens for trace in drafted] == [trace.tokens for trace in plain]
    if temperature == 0:
        assert [trace.tokens for trace in plain] == [
            own_answer(target.model, t.prompt, NEW) for t in plain
        ]
    return [*drafted, *plain, *answers(target, ASKED[1:2], "suffix", temperature)]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafted_and_plain_answers_are_the_same(
    temperature: float,
    exact: Target,
    eight_token_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are those of whole conversations that are read anew; the counts and τ in the lines are the traces'."""
    talk(eight_token_dir, SESSION, monkeypatch, "--temperature", str(temperature), "--seed", "3")
    out, told = capsys.readouterr()
    traces = expected_session(exact, temperature)
    assert out == as_printed(traces) and "\x1b" not in out + told
    shown = [(int(tokens), int(forwards), tau) for tokens, forwards, tau, _ in LINE.findall(told)]
    assert shown == [(len(t.tokens), len(t.cycles), f"{t.acceptance_length:.2f}") for t in traces]
    assert max(trace.acceptance_length for trace in traces) > 1  # some draft was accepted


def test_a_speed_up_is_told_once_both_were_timed(
    eight_token_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is that of the speeds in the lines; before, a line says how to compare."""
    clock = iter(range(10**6))
    monkeypatch.setattr(
        "eagle.command.answering.perf_counter", lambda: float(next(clock))
    )  # a step takes a second
    talk(eight_token_dir, SESSION, monkeypatch)
    endings = [rest for *_, rest in LINE.findall(capsys.readouterr().err)]
    limit = "; cut off at --max-new-tokens"
    assert endings[:3] == [f"; /plain answers without drafts, to compare{limit}"] * 3
    gains = [float(re.search(r"([\d.]+) × as fast", ending)[1]) for ending in endings[3:]]
    assert endings[3] == f"; with drafts {gains[0]:.2f} × as fast ({gains[0]:.0f}){limit}"
    assert endings[-1] == f", {gains[-1]:.2f} × as fast as without drafts (1){limit}"
    assert min(gains) > 1  # more than a token a second, where plain decoding writes one


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["noise", "prefix"])
def test_a_wrong_answer_would_be_seen(
    fault: str,
    exact: Target,
    eight_token_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Planted: noise that changes with every answer; and a prefix that is taken for read although it differs."""
    expected = as_printed(expected_session(exact, 1.0))
    seeds, begin = iter(range(10**6)), Noise.__init__
    if fault == "noise":
        monkeypatch.setattr(
            Noise, "__init__", lambda noise, seed, request: begin(noise, next(seeds), request)
        )
    else:
        monkeypatch.setattr(
            TargetState, "_shared", lambda s, at, new: min(len(s.texts[at]), len(new) - 1)
        )
    talk(eight_token_dir, SESSION, monkeypatch, "--temperature", "1", "--seed", "3")
    assert capsys.readouterr().out != expected


def test_a_conversation_is_not_read_again(exact: Target) -> None:
    """A turn reads what is new in it, by the rows of the target's first layer."""
    exact.describe()  # which finds out, by a text of its own, how trees are read
    rows: list[int] = []
    hook = exact.layers[0].register_forward_pre_hook(
        lambda _, inputs: rows.append(inputs[0].shape[1])
    )
    chat = Chat(exact, load_drafter("suffix", exact), Sampling(), NEW)
    exact.forget()
    prompts = []
    for question in ASKED:
        rows.clear()
        prompts.append((len(chat.answer(question, ignore).trace.prompt), rows[0]))
    hook.remove()
    assert prompts[0][0] == prompts[0][1]
    assert all(read < length - NEW for length, read in prompts[1:])


def ignore(text: str, drafted: bool) -> None:
    """Write nothing."""


def test_an_interrupt_stops_the_answer_and_keeps_what_was_said(exact: Target) -> None:
    """The text that was written is in the history, and the next answer is that of a conversation read anew."""
    chat = Chat(exact, load_drafter("suffix", exact), Sampling(), NEW)
    written: list[str] = []

    def write(text: str, drafted: bool) -> None:
        written.append(text)
        if len(written) == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):  # planted: nothing notes it
        chat.answer(ASKED[0], write)
    assert not chat.turns
    written.clear()
    handler = signal.getsignal(signal.SIGINT)
    with noting_interrupt() as is_stopped:
        answer = chat.answer(ASKED[0], write, is_stopped)
    assert signal.getsignal(signal.SIGINT) is handler
    assert 5 <= len(answer.trace.tokens) < NEW and chat.describe(answer).endswith("; stopped")
    assert chat.turns[-1] == {"role": "assistant", "content": "".join(written)}
    second = chat.answer(ASKED[1], ignore).trace
    exact.forget()
    assert second.prompt == exact.chat(chat.turns[:-1])
    assert (
        second.tokens
        == generate(exact, load_drafter("none", exact), second.prompt, max_new_tokens=NEW).tokens
    )


def test_a_second_interrupt_leaves() -> None:
    """The first is noted alone."""
    with pytest.raises(KeyboardInterrupt), noting_interrupt() as is_stopped:
        signal.raise_signal(signal.SIGINT)
        assert is_stopped()
        signal.raise_signal(signal.SIGINT)


def test_what_was_drafted_is_written_as_such(exact: Target) -> None:
    """The pieces and marks are those of the trace."""
    chat, pieces = (
        Chat(exact, load_drafter("suffix", exact), Sampling(), NEW),
        list[tuple[str, bool]](),
    )
    answer = chat.answer(ASKED[0], lambda *piece: pieces.append(piece))
    assert pieces == answer.trace.pieces() and any(drafted for _, drafted in pieces)


@pytest.fixture
def steering(eight_token_dir: Path) -> Target:
    """A target that says the escape character and the bell alone."""
    target = Target.load(eight_token_dir, dtype=torch.float64)
    codes = target.tokenizer.convert_tokens_to_ids(["<0x1B>", "<0x07>"])
    with torch.no_grad():
        row = target.model.lm_head.weight[-1].clone()
        target.model.lm_head.weight.zero_()
        target.model.lm_head.weight[codes] = torch.stack(
            [row, -row]
        )  # one of them is always above 0
    return target


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        """It does."""
        return True


@pytest.mark.parametrize("is_planted", [False, True])
def test_an_answer_cannot_steer_the_terminal(
    is_planted: bool, steering: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control characters are replaced in a terminal, and seen if they are not; the conversation keeps them."""
    if is_planted:
        monkeypatch.setattr("eagle.command.answering.HARMLESS", {})
    shown, chat = Terminal(), Chat(steering, load_drafter("suffix", steering), Sampling(), NEW)
    answer = chat.answer(ASKED[0], writer_to(shown, False))
    assert set(answer.trace.text) <= set("\x1b\x07") and len(answer.trace.text) == NEW
    assert shown.getvalue() == (answer.trace.text if is_planted else "\ufffd" * NEW)


def test_a_conversation_that_does_not_fit_is_refused(
    exact: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer ends at the last position; a question that leaves no room is refused, and the conversation stays."""
    chat = Chat(exact, load_drafter("suffix", exact), Sampling(), NEW)
    room = 7
    monkeypatch.setattr(exact.config, "max_position_embeddings", len(exact.chat(ASKED[0])) + room)
    answer = chat.answer(ASKED[0], ignore)
    assert len(answer.trace.tokens) == room and chat.describe(answer).endswith(
        "; cut off at the model's last position"
    )
    turns = chat.turns
    with pytest.raises(
        ValueError,
        match=r"has come to \d+ tokens, and this model has \d+ positions.*: /reset forgets",
    ):
        chat.answer(ASKED[1], ignore)
    assert chat.turns is turns
    chat.command("/reset")
    assert chat.answer(ASKED[0], ignore).trace.tokens == answer.trace.tokens


def test_commands_set_what_they_say(exact: Target) -> None:
    """The system message stands before the conversation; what is wrong is told and changes nothing."""
    chat = Chat(exact, load_drafter("suffix", exact), Sampling(seed=5), NEW)
    assert chat.command("/temperature 0.5") == "temperature 0.5" and chat.sampling == Sampling(
        0.5, seed=5
    )
    chat.command("/system Be brief.")
    prompt = chat.answer(ASKED[0], ignore).trace.prompt
    question = {"role": "user", "content": ASKED[0]}
    assert prompt == exact.chat([{"role": "system", "content": "Be brief."}, question])
    chat.command("/reset")
    chat.command("/system")
    assert chat.answer(ASKED[0], ignore).trace.prompt == exact.chat([question])
    for line, message in (
        ("/temperature warm", "/temperature got 'warm', expected a number"),
        ("/temperature -1", "/temperature got '-1', expected a number: 0"),
        (
            "/plain why?",
            "/plain got 'why\\?', expected nothing behind it: ask on a line of its own",
        ),
        (
            "/usr/bin",
            "no command /usr/bin: /help lists them; text that begins with / needs a space before",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            chat.command(line)
    assert chat.sampling.temperature == 0.5 and chat.drafts
    named = re.findall(r"^(/\w+)", chat.command("/help"), re.MULTILINE)
    assert named == ["/plain", "/draft", "/temperature", "/system", "/reset", "/help", "/quit"]
    assert not [name for name in named if f"`{name}" not in terminal.PAGE.read_text()]


def test_a_mistake_is_told_and_the_conversation_goes_on(
    exact: Target,
    eight_token_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a sentence on stderr; empty lines ask nothing, and /quit leaves what follows unread."""
    talk(eight_token_dir, ["/what", "", ASKED[0], "/quit", ASKED[1]], monkeypatch)
    out, told = capsys.readouterr()
    assert out == as_printed(answers(exact, ASKED[:1]))
    assert told.count("error: ") == 1 and "there is no command /what" in told


TEMPLATE = """{% if messages[0].role == 'system' %}{{ raise_exception('No system role.') }}{% endif %}\
{% for turn in messages %}{{ turn.content }}{% endfor %}"""


def test_a_template_that_refuses_is_told(exact: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words, and what to do; the conversation stays."""
    monkeypatch.setattr(exact.tokenizer, "chat_template", TEMPLATE)
    chat = Chat(exact, load_drafter("suffix", exact), Sampling(), NEW)
    chat.command("/system Be brief.")
    with pytest.raises(
        ValueError,
        match=r"template refuses these messages: No system role\.; /system without a text",
    ):
        chat.answer(ASKED[0], ignore)
    assert not chat.turns


def test_a_model_without_a_chat_template_is_refused(
    eight_token_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before the first question."""
    folder = shutil.copytree(eight_token_dir, tmp_path / "target")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(SystemExit):
        talk(folder, ASKED, monkeypatch)
    assert "error: this target has no chat template" in capsys.readouterr().err


@pytest.mark.slow
def test_in_a_terminal_drafts_are_green_and_an_interrupt_stops_the_answer_alone(
    eight_token_dir: Path,
) -> None:
    """In a terminal of its own: what is green was drafted, Ctrl-C comes back to the prompt, and Ctrl-D leaves."""
    command = [sys.executable, "-m", "eagle", "chat", "suffix", "--target", str(eight_token_dir)]
    steps = [("> ", "one two\n"), (GREEN, "\x03"), ("; stopped", "")]
    steps += [("> ", "half a line"), ("half a line", "\x03"), ("> ", "\x04")]
    text, status = run_in_terminal([*command, "--max-new-tokens", "1500"], steps)
    assert status == 0 and text.count("; stopped") == 1 and text.count("tokens/s") == 1, text
    assert "drafted text is green" in text and text.count(GREEN) == text.count(PLAIN) >= 1
    asked = [("> ", "one two\n"), ("tokens/s", ""), ("> ", "\x04")]
    text, status = run_in_terminal(["env", "NO_COLOR=1", *command, "--max-new-tokens", "24"], asked)
    assert (
        status == 0 and text.count("tokens/s") == 1 and "\x1b[3" not in text and "green" not in text
    ), text


def test_the_recording_is_one_run() -> None:
    """The picture and the page show the same words, and the picture asks no other machine for a font."""
    picture, page = terminal.PICTURE.read_text(), terminal.PAGE.read_text()
    text = page.partition(terminal.BEGIN)[2].partition(terminal.END)[0]
    assert re.findall(r"https?://[^\s\"')]*", picture) == ["http://www.w3.org/2000/svg"]
    words = re.sub(r"<[^>]+>|&#160;", " ", picture)
    assert all(question in text for question in terminal.TYPED)
    assert set(re.findall(r"\w{4,}", text)) - {"text"} <= set(re.findall(r"\w{4,}", words))
