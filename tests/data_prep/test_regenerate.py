"""Regenerated answers are the target's own: served or local, killed or not, by any number of processes."""

from __future__ import annotations

import json
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep import regenerate as regenerate_module
from data_prep.chats.records import Conversation
from data_prep.conversations import read_conversations
from data_prep.dialogues import ENDED_EARLY, Jobs
from data_prep.parts import begin, is_whole, join_parts
from data_prep.regenerate import (
    check_section,
    main,
    make_answerer,
    table,
    warn_of_truncated,
)
from data_prep.servers.answers import Local
from eagle import Target
from eagle.recipe import Recipe
from tests.data_prep.stub_servers import (
    NEW_TOKENS,
    TINY,
    completion,
    echo,
    jobs_of,
    join_answers,
    probed,
    read_records,
    regenerate,
    section_of,
    serving,
    talk,
    write_records,
)

COUNT = 6


def generate_greedily(
    target: Target,
    messages: list[dict[str, Any]],
    max_new_tokens: int = NEW_TOKENS,
) -> tuple[str, str]:
    """Return the untouched model's own answer to one prompt, and why it ended."""
    prompt = torch.tensor([target.chat(messages)])
    output = target.model.generate(
        prompt,
        do_sample=False,
        max_new_tokens=max_new_tokens,
    )
    tokens = output[0, prompt.shape[1] :].tolist()
    finish = "stop" if tokens[-1] in target.stop_tokens else "length"
    return target.tokenizer.decode(tokens, skip_special_tokens=True), finish


def replay(
    target: Target,
    conversation: Conversation,
    keeps_old: bool = False,
) -> list[str]:
    """Return the answers that the untouched model gives in turn.

    The planted fault keeps the data's answers as history.
    """
    messages: list[dict[str, Any]] = []
    answers = []
    for turn in conversation.messages:
        if turn["role"] != "assistant":
            messages.append(turn)
            continue
        text, finish = generate_greedily(target, messages)
        answers.append(text)
        messages.append(turn if keeps_old else {"role": "assistant", "content": text})
        if finish == "length":
            break
    return answers


def answers_of(conversation: Conversation) -> list[str]:
    """Return the assistant's turns."""
    return [turn["content"] for turn in conversation.messages if turn["role"] == "assistant"]


def read_answers(out: Path) -> dict[str, list[str]]:
    """Return the answers of each conversation of a file, in its order."""
    return {conversation.id: answers_of(conversation) for conversation in read_conversations(out)}


@pytest.fixture(scope="module")
def target_dir(mixing_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target whose end mark is so loud that about half of its answers end within the limit."""
    folder = tmp_path_factory.mktemp("ending") / "target"
    target = Target.load(mixing_target_dir, dtype=torch.float32)
    # 24 answers tell the share that ends
    questions = [[{"role": "user", "content": f"question {number}"}] for number in range(24)]
    weight = target.model.lm_head.weight
    # which loudness it takes depends on the tokenizer, which was trained on the machine's own files
    for loudness in (3, 2.5, 3.5, 2, 4, 1.5, 6):
        with torch.no_grad():
            weight[list(target.stop_tokens)] = loudness * weight[-1]
        reasons = [generate_greedily(target, messages)[1] for messages in questions]
        if 8 <= reasons.count("stop") <= 16:
            break
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    """That target in fp64, where no rounding decides between two tokens."""
    return Target.load(target_dir, dtype=torch.float64)


@pytest.fixture(scope="module")
def source(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of conversations of two questions, half of which the target's first answer cuts short."""
    turns = ("user: question {}", "assistant: old", "user: more {}", "assistant: older")
    missing = {1: COUNT // 2, 2: COUNT // 2}  # by the number of answers
    records = []
    for number in range(40 * COUNT):
        conversation = talk(f"c{number}", *(turn.format(number) for turn in turns))
        answers = replay(target, conversation)
        # a conversation is cut at an empty answer
        if all(map(str.strip, answers)) and missing[len(answers)]:
            missing[len(answers)] -= 1
            records.append({"id": conversation.id, "messages": conversation.messages})
        if len(records) == COUNT:
            break
    assert len(records) == COUNT
    return write_records(tmp_path_factory.mktemp("source") / "source.jsonl", records)


@pytest.fixture(scope="module")
def truth(target: Target, source: Path) -> dict[str, list[str]]:
    """What the untouched model answers to each conversation."""
    return {each.id: replay(target, each) for each in read_conversations(source)}


@pytest.fixture
def command(
    target_dir: Path,
    source: Path,
    tmp_path: Path,
) -> list[str]:
    """The command line without an endpoint."""
    out = str(tmp_path / "out.jsonl")
    section = {
        "source": str(source),
        "out": out,
        "max_new_tokens": NEW_TOKENS,
        "batch_size": 3,
    }
    target = [f"target.path={target_dir}", "target.dtype=float64"]
    return [str(TINY), *target, f"regenerate={json.dumps(section)}"]


@pytest.fixture(scope="module")
def undisturbed(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The output of one process in one go, for sixteen jobs."""
    out = tmp_path_factory.mktemp("whole") / "out.jsonl"
    with serving(echo) as (url, _):
        assert not regenerate(out, jobs_of(16), tiny_target, url)
    return join_answers(out, jobs_of(16))


def test_local_answers_are_the_untouched_models(
    command: list[str],
    truth: dict[str, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a batch and with drafts, greedy answers are those of `generate` for one prompt, in their order."""
    main([*command, "regenerate.drafter=suffix"])
    answers = read_answers(tmp_path / "out.jsonl")
    assert answers == truth
    assert list(answers) == list(truth)
    sampling = {
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 0,
        "max_new_tokens": NEW_TOKENS,
    }
    assert read_records(tmp_path / "out.jsonl")[0]["sampling"] == sampling
    # the parts are gone once the file is whole
    names = sorted(path.name for path in tmp_path.glob("out*"))
    assert names == ["out.jsonl", "out.jsonl.settings"]
    printed = capsys.readouterr().out
    assert f"{COUNT}  conversations" in printed
    assert "data.train is" in printed


@pytest.mark.parametrize(("distinct", "warns"), [(4, True), (5, False), (10, False)])
def test_few_distinct_answers_are_warned_of(distinct: int, warns: bool) -> None:
    """The summary counts them; of fewer than half of ten answers it says what to do."""
    lines = []
    for number in range(10):
        messages = [
            {"role": "user", "content": f"Question {number}?"},
            {"role": "assistant", "content": f"Answer {number % distinct}."},
        ]
        record = {"messages": messages, "finish_reasons": ["stop"]}
        lines.append({"record": record, "tokens": 3, "notes": []})
    text = table(lines, 0)
    assert f"{distinct}  distinct answers" in text
    warning = f"warning: only {distinct} of 10 answers are distinct ({distinct}0%)"
    assert (warning in text) == warns
    assert ("regenerate.temperature" in text) == warns
    # a few answers tell nothing
    assert "warning" not in table([lines[0]] * 9, 0)


def test_answers_are_written_with_the_fastest_kernels(command: list[str]) -> None:
    """Bits that depend on nothing else in a batch are for verification; answers would pay for them."""
    recipe = Recipe.load(command[0], [*command[1:], "target.dtype=bfloat16"])
    assert recipe.regenerate is not None
    answerer, _ = make_answerer(recipe, recipe.regenerate)
    assert isinstance(answerer, Local)
    assert answerer.target.invariant is False


def test_endpoint_answers_are_the_untouched_models(
    command: list[str],
    truth: dict[str, list[str]],
    target: Target,
    tmp_path: Path,
) -> None:
    """A real server that runs the target gives the same; a run that is whole asks nothing more."""
    # requests come from several threads, and the model is read by one
    lock = threading.Lock()

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        messages = request["messages"]
        with lock:
            text, finish = generate_greedily(
                target,
                messages,
                request["max_tokens"],
            )
        return completion(text, finish, len(target.chat(messages)))

    with serving(reply) as (url, asked):
        for _ in range(2):
            main([*command, f"regenerate.endpoint={url}"])
            assert len(asked) == 1 + sum(map(len, truth.values()))
    assert read_answers(tmp_path / "out.jsonl") == truth


def test_old_answers_as_history_would_be_seen(
    source: Path,
    truth: dict[str, list[str]],
    target: Target,
) -> None:
    """A planted fault: the truth above tells new history from old."""
    conversations = read_conversations(source)
    faulty = {
        each.id: replay(
            target,
            each,
            keeps_old=True,
        )
        for each in conversations
    }
    assert faulty != truth


def test_any_number_of_processes_gives_the_same(
    undisturbed: bytes,
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    """Three processes write the same bytes, in source order."""
    jobs = jobs_of(16)
    out = tmp_path / "out.jsonl"
    with serving(echo) as (url, _):
        # each process answers every third job
        for index in range(3):
            assert not regenerate(
                out,
                jobs,
                tiny_target,
                url,
                (index, 3),
            )
    assert join_answers(out, jobs) == undisturbed


def test_a_killed_run_resumes(
    undisturbed: bytes,
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    """Half a line is passed over, finished answers stay, and the number of processes may change."""
    jobs = jobs_of(16)
    first_jobs = Jobs(islice(jobs, 12))
    out = tmp_path / "out.jsonl"
    with serving(echo) as (url, asked):
        for index in (0, 1):
            assert not regenerate(
                out,
                first_jobs,
                tiny_target,
                url,
                (index, 2),
            )
            part = tmp_path / f"out.jsonl.parts/part-0000{index}.jsonl"
            # a kill may leave half a line
            part.write_bytes(part.read_bytes()[:-20])
        asked.clear()
        assert not regenerate(out, jobs, tiny_target, url)
    # those never tried, and the two that were cut
    assert len({request["messages"][0]["content"] for request in asked}) == 4 + 2
    assert join_answers(out, jobs) == undisturbed


def test_what_fails_is_counted_and_tried_again(
    command: list[str],
    source: Path,
    tiny_target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run ends with an error that says what to do, and the next one asks for the failed alone."""
    # a request that the server refuses each time
    bad = next(read_conversations(source)).messages[0]["content"]

    def reply(request: dict[str, Any]) -> Any:
        return 400 if request["messages"][0]["content"] == bad else echo(request)

    message = rf"1 of {COUNT} conversations failed: run the same command again"
    with serving(probed(tiny_target, reply)) as (url, asked):
        command = [*command, f"regenerate.endpoint={url}"]
        for _ in range(2):
            asked.clear()
            with pytest.raises(SystemExit, match=message):
                main(command)
            assert not (tmp_path / "out.jsonl").exists()
            assert "400 Bad Request busy" in capsys.readouterr().err
        # the probe, and the one that failed
        assert len(asked) == 2
        main([*command, "--without-failed"])
    assert len(read_records(tmp_path / "out.jsonl")) == COUNT - 1


def test_what_other_settings_made_is_refused(tmp_path: Path) -> None:
    """The difference is named, for parts and whole files; files of which nothing is known are refused too."""
    out = tmp_path / "out"
    settings = {"target": {"path": "a"}, "sampling": {"temperature": 0.0}}
    assert not is_whole(out, settings)
    begin(out, settings)
    assert not is_whole(out, settings)
    # parts that were begun
    with pytest.raises(ValueError, match=r"sampling.temperature was 0.0, is 1.0"):
        is_whole(out, {**settings, "sampling": {"temperature": 1.0}})
    join_parts(out, [])
    assert is_whole(out, settings)
    with pytest.raises(ValueError, match=r"target.path was 'a', is 'b'"):
        is_whole(out, {**settings, "target": {"path": "b"}})
    (tmp_path / "out.settings").unlink()
    with pytest.raises(ValueError, match="was made with other settings"):
        is_whole(out, settings)


def test_a_forecast_writes_nothing(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It prints how much there is to do and how long it takes."""
    main([*command, "--forecast"])
    assert f"{COUNT} conversations, at most " in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_an_output_within_its_source_is_refused(command: list[str], source: Path) -> None:
    """It would become a source of itself."""
    out = [f"regenerate.source={source.parent}", f"regenerate.out={source.parent}/out.jsonl"]
    with pytest.raises(ValueError, match=r"within regenerate\.source"):
        main([*command, *out])
    with pytest.raises(ValueError, match="has no section `regenerate`"):
        main([command[0], "regenerate=null"])


def test_settings_that_exclude_each_other_are_refused() -> None:
    """The error says what to set."""
    with pytest.raises(ValueError, match=r"samples is 2 at temperature 0, .*samples=1"):
        check_section(section_of(source="questions", samples=2))
    with pytest.raises(ValueError, match=r"drop without a server: .*reasoning=keep"):
        check_section(section_of(source="questions", reasoning="drop"))
    sampling = {"samples": 2, "temperature": 1.0}
    check_section(
        section_of(
            source="questions",
            reasoning="drop",
            endpoint="http://a",
            **sampling,
        )
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"endpoint": "http://x/v1"},
        {"drafter": "suffix", "max_tokens_in_cache": 9, "batch_size": 2},
    ],
)
def test_who_decodes_changes_no_setting(fields: dict[str, Any]) -> None:
    """The settings that decide the answers are the same with a server and with a drafter."""

    def settings_with(**fields: Any) -> dict[str, Any]:
        section = {"source": "a", "out": "b", **fields}
        recipe = Recipe.load(TINY, [f"regenerate={json.dumps(section)}"])
        assert recipe.regenerate is not None
        return regenerate_module.settings_of(recipe, recipe.regenerate, {})

    assert settings_with(**fields) == settings_with()
    assert settings_with(seed=1) != settings_with()


def test_many_lost_turns_are_told() -> None:
    """A fifth of the conversations is not yet many."""
    whole = b'{"notes": []}'
    ended = f'{{"notes": ["{ENDED_EARLY}"]}}'.encode()
    lines = {str(index): whole for index in range(4)}
    assert not warn_of_truncated({**lines, "a": ended})
    warning = warn_of_truncated({**lines, "a": ended, "b": ended})
    assert warning.startswith("2 of 6 conversations end at an answer that reached")
