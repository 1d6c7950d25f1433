"""Answers made anew are the target's own: whoever serves it, however often it is killed, on any number of processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep import regenerate
from data_prep.chats.records import Conversation, conversation_of
from data_prep.conversations import Tally, read_conversations
from data_prep.dialogues import Jobs, Reader, converse, make_names_unique
from data_prep.parts import begin, is_whole, join_parts
from data_prep.regenerate import answer_all, as_begun, main, table
from data_prep.servers.answers import Answer, Local, Prompt
from data_prep.servers.endpoint import PROBE
from data_prep.tokens import examples_of
from eagle import Target
from eagle.core.budget import Budget
from eagle.core.noise import Noise
from eagle.core.tree import chain_paths
from eagle.core.verify import Sampling
from eagle.decoding.decode import generate
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.none import NoDrafter
from eagle.formats.checkpoint import save_head, write_budget
from eagle.recipe import DataSection, Recipe
from eagle.target.state import TargetState
from tests import every_type
from tests.data_prep.stub_servers import (
    NEW_TOKENS,
    TINY,
    Reply,
    completion,
    echo,
    pool_at,
    section_of,
    serving,
    talk,
)
from tests.families import build, own_answer, random_tokens

COUNT = 6
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]


def greedy(target: Target, messages: list[dict[str, Any]], room: int) -> tuple[str, str, int]:
    """The untouched model's own answer, why it ended, and the prompt's length: one text at a time."""
    ids = target.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    tokens = target.model.generate(ids, do_sample=False, max_new_tokens=room)[
        0, ids.shape[1] :
    ].tolist()
    finish = "stop" if tokens[-1] in target.stop_tokens else "length"
    return target.tokenizer.decode(tokens, skip_special_tokens=True), finish, ids.shape[1]


def replay(target: Target, conversation: Conversation, fault: bool = False) -> list[str]:
    """The answers that the untouched model gives in turn; the planted fault keeps the data's answers as history."""
    messages: list[dict[str, Any]] = []
    answers = []
    for turn in conversation.messages:
        if turn["role"] != "assistant":
            messages.append(turn)
            continue
        text, finish, _ = greedy(target, messages, NEW_TOKENS)
        answers.append(text)
        messages.append(turn if fault else {"role": "assistant", "content": text})
        if finish == "length":
            break
    return answers


def answers_in(conversation: Conversation) -> list[str]:
    """The assistant's texts."""
    return [turn["content"] for turn in conversation.messages if turn["role"] == "assistant"]


@pytest.fixture(scope="module")
def target_dir(mixing_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target whose end mark is so loud that about half of its answers end within the limit."""
    folder, target = (
        tmp_path_factory.mktemp("ending") / "target",
        Target.load(mixing_target_dir, dtype=torch.float32),
    )
    asked = [[{"role": "user", "content": f"question {number}"}] for number in range(24)]
    for loudness in (
        3,
        2.5,
        3.5,
        2,
        4,
        1.5,
        6,
    ):  # which it takes depends on the tokenizer, that is on the machine's texts
        with torch.no_grad():
            target.model.lm_head.weight[list(target.stop_tokens)] = (
                loudness * target.model.lm_head.weight[-1]
            )
        if 8 <= sum(greedy(target, messages, NEW_TOKENS)[1] == "stop" for messages in asked) <= 16:
            break
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    """That target in fp64, where no rounding decides between two tokens."""
    return Target.load(target_dir, dtype=torch.float64)


@pytest.fixture(scope="module")
def replayed(target: Target) -> dict[str, tuple[Conversation, list[str]]]:
    """Conversations of two answers, and the untouched model's: none is empty, and every other conversation is cut."""
    turns = ("user: question {}", "assistant: old", "user: more {}", "assistant: older")
    kinds: dict[int, list[tuple[Conversation, list[str]]]] = {
        1: [],
        2: [],
    }  # by the number of answers
    for number in range(40 * COUNT):
        conversation = talk(f"c{number}", *(turn.format(number) for turn in turns))
        answers = replay(target, conversation)
        if all(map(str.strip, answers)):
            kinds[len(answers)].append((conversation, answers))
        if min(map(len, kinds.values())) == COUNT // 2:
            break
    chosen = [pair for pairs in zip(kinds[2], kinds[1], strict=False) for pair in pairs][:COUNT]
    assert len(chosen) == COUNT
    return {conversation.id: (conversation, answers) for conversation, answers in chosen}


@pytest.fixture(scope="module")
def source(
    replayed: dict[str, tuple[Conversation, list[str]]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A file of these conversations."""
    path = tmp_path_factory.mktemp("source") / "source.jsonl"
    lines = [
        {"id": name, "messages": conversation.messages}
        for name, (conversation, _) in replayed.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def truth(replayed: dict[str, tuple[Conversation, list[str]]]) -> dict[str, list[str]]:
    """What the untouched model answers to each."""
    return {name: answers for name, (_, answers) in replayed.items()}


@pytest.fixture
def command(target_dir: Path, source: Path, tmp_path: Path) -> list[str]:
    """The command line but for the endpoint."""
    settings = {
        "source": str(source),
        "out": str(tmp_path / "out.jsonl"),
        "max_new_tokens": NEW_TOKENS,
    }
    settings["batch_size"] = 3
    overrides = [
        f"target.path={target_dir}",
        "target.dtype=float64",
        f"regenerate={json.dumps(settings)}",
    ]
    return [str(TINY), *overrides]


def run_talk(
    target: Target,
    conversation: Conversation,
    *replies: dict[str, Any],
    data: Any = None,
    **fields: Any,
) -> dict[str, Any]:
    """The line of a conversation to which a server answers with these replies."""
    queue = list(replies)
    with serving(lambda _: queue.pop(0)) as (url, _):
        section = section_of(Path("-"), endpoint=url, in_flight=1, attempts=1, **fields)
        reader = Reader(target.tokenizer, data or DataSection(train="-"), target.max_positions)
        ((name, line),) = pool_at(section).run(
            iter([("name", converse("name", conversation, reader, section))])
        )
    assert name == "name" and isinstance(line, dict) and not queue, line
    return line


def run_echo(
    out: Path, jobs: Jobs, target: Target, index: int = 0, count: int = 1, reply: Reply = echo
) -> dict[str, str]:
    """One process's share of the jobs, answered by a server."""
    with serving(reply) as (url, _):
        section = section_of(out, endpoint=url, in_flight=2, attempts=4)
        begin(out, {})
        return answer_all(
            out,
            jobs,
            pool_at(section),
            Reader(target.tokenizer, DataSection(train="-")),
            section,
            index,
            count,
        )


def jobs_of(count: int) -> Jobs:
    """Conversations of one to three answers."""
    turns = (
        "user: question {}",
        "assistant: old",
        "user: more {}",
        "assistant: older",
        "user: end",
        "assistant: no",
    )
    talks = (
        talk(f"c{n}", *(turn.format(n) for turn in turns[: 2 + 2 * (n % 3)])) for n in range(count)
    )
    return Jobs(make_names_unique(talks))


@pytest.fixture(scope="module")
def uninterrupted(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The output of one process in one go, for thirteen jobs."""
    out = tmp_path_factory.mktemp("whole") / "out.jsonl"
    assert not run_echo(out, jobs_of(13), tiny_target)
    join_parts(out, [name for name, _ in jobs_of(13)])
    return out.read_bytes()


@pytest.mark.quick("suffix")
@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_local_answers_are_the_untouched_models(
    drafter: str,
    command: list[str],
    truth: dict[str, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Beside others, greedy answers are those of `generate` for one text; ids and order stay."""
    main([*command, f"regenerate.drafter={drafter}"])
    conversations = list(read_conversations(tmp_path / "out.jsonl"))
    assert {conversation.id: answers_in(conversation) for conversation in conversations} == truth
    assert [conversation.id for conversation in conversations] == list(truth)
    record = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert record["sampling"] == {
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 0,
        "max_new_tokens": NEW_TOKENS,
    }
    assert sorted(path.name for path in tmp_path.glob("out*")) == [
        "out.jsonl",
        "out.jsonl.settings",
    ]
    printed = capsys.readouterr().out
    assert f"{COUNT}  conversations" in printed and "data.train is" in printed


@pytest.mark.slow
def test_local_samples_differ_and_are_drawn_again(command: list[str], tmp_path: Path) -> None:
    """Two answers to each prompt by noise of their own, the same whatever stands beside them."""
    files = []
    for batch_size in (3, 1):
        main(
            [
                *command,
                "regenerate.samples=2",
                "regenerate.temperature=1",
                f"regenerate.batch_size={batch_size}",
            ]
        )
        files.append((tmp_path / "out.jsonl").read_bytes())
        (tmp_path / "out.jsonl").unlink()
    assert files[0] == files[1]
    talks = {record["id"]: record["messages"] for record in map(json.loads, files[0].splitlines())}
    pairs = [
        (talks[f"{name[:-2]}#1"], talks[name])
        for name in talks
        if f"{name[:-2]}#1" in talks and name[-1] == "2"
    ]
    assert len(pairs) >= COUNT - 2 and sum(one != other for one, other in pairs) >= len(pairs) - 1


def test_endpoint_answers_are_the_untouched_models(
    command: list[str], truth: dict[str, list[str]], target: Target, tmp_path: Path
) -> None:
    """Behind a real server that runs the target, too; a run that is whole asks nothing more."""
    lock = threading.Lock()

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        with lock:
            text, finish, length = greedy(target, request["messages"], request["max_tokens"])
        return completion(text, finish, length)

    with serving(reply) as (url, asked):
        main([*command, f"regenerate.endpoint={url}"])
        requests = len(asked)
        main([*command, f"regenerate.endpoint={url}"])
        assert len(asked) == requests == 1 + sum(map(len, truth.values()))
    conversations = read_conversations(tmp_path / "out.jsonl")
    assert {conversation.id: answers_in(conversation) for conversation in conversations} == truth


def test_the_datas_answers_as_history_would_be_seen(
    source: Path, truth: dict[str, list[str]], target: Target
) -> None:
    """A planted fault: the truth above tells new history from old."""
    few = list(read_conversations(source, limit=3))
    faulty = [replay(target, conversation, fault=True) for conversation in few]
    assert faulty != [truth[conversation.id] for conversation in few]


class Numbers:
    """A tokenizer that spells tokens as their numbers."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def ask(prompt: Prompt) -> Generator[Prompt, Answer, dict[str, Any]]:
    """A conversation of one answer: its tokens but for a stop token, and how many there are with it."""
    answer = yield prompt
    return {
        "tokens": [int(word) for word in answer.message["content"].split()],
        "count": answer.tokens,
    }


def answer_here(target: Target, prompts: Sequence[Prompt], **fields: Any) -> list[dict[str, Any]]:
    """The answers of the target itself, three prompts side by side."""
    local = Local(target, Numbers(), section_of(Path("-"), **{"batch_size": 3, **fields}))
    outcomes = dict(local.run((str(number), ask(prompt)) for number, prompt in enumerate(prompts)))
    return [outcomes[str(number)] for number in range(len(prompts))]  # type: ignore[misc]


@pytest.fixture(scope="module")
def head(target: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A head that nobody has trained, and that was tuned to drafts drawn by lot."""
    folder = tmp_path_factory.mktemp("head") / "head"
    torch.manual_seed(0)
    fresh = DRAFTERS["eagle1"].for_target(
        settings_of({"kind": "eagle1"}, "test"), target.config, target.head, supervised=()
    )
    save_head(folder, fresh, "", {})
    write_budget(folder, Budget.fixed(chain_paths(3), "sampled"))
    return str(folder)


WHOLE = ("llama", "deepseek_v3")  # the families that are fast with every drafter
ANSWERED = [
    pytest.param(
        name, drafter, marks=[pytest.mark.slow] * (name not in WHOLE and drafter != "suffix")
    )
    for name in (*WHOLE, "gemma2", "gpt2", "gpt_oss", "mistral-sliding")
    for drafter in ("none", "ngram", "suffix")
]


@pytest.mark.quick("gpt2-suffix")
@pytest.mark.parametrize(("name", "drafter"), ANSWERED)
def test_neighbours_and_drafts_change_no_answer_of_any_family(name: str, drafter: str) -> None:
    """Sliding windows, learned positions and experts beside longer and shorter texts, greedy and drawn."""
    model = build(name)
    target = Target(model)
    texts = [random_tokens(length, seed=length) for length in (3, 14, 30, 7, 1)]
    asked = [Prompt([], None, text * 2, 6 + place, place) for place, text in enumerate(texts)]
    greedy = answer_here(target, asked, drafter=drafter)
    assert [answer["tokens"] for answer in greedy] == [
        own_answer(model, each.ids, each.room) for each in asked
    ]
    drawn = answer_here(target, asked, drafter=drafter, temperature=1.0, seed=5)
    for prompt, answer in zip(asked, drawn, strict=True):
        noise = Noise(5, prompt.request)
        assert answer["tokens"] == own_answer(
            model,
            prompt.ids,
            prompt.room,
            noise=lambda place, noise=noise: noise([place], 96, target.device)[0],
        )


@pytest.mark.parametrize("name", ["openai-gpt", "xlnet"])
def test_a_model_that_reads_no_trees_is_refused(name: str) -> None:
    """With the way out."""
    with pytest.raises(
        ValueError, match=r"cannot read a tree: .*\. For its answers serve it, and name regen"
    ):
        Local(Target(every_type.build(name)), Numbers(), section_of(Path("-")))


def prompts(target: Target) -> list[Prompt]:
    """Five prompts of different lengths."""
    texts = [
        "What is json for?",
        "Tell me about `csv`.",
        "Hello",
        "Where do I find `shutil.copy` in Python?",
        "x",
    ]
    ids = [target.chat(text) for text in texts]
    return [
        Prompt([], None, tokens, 12 + number, 1000 + number) for number, tokens in enumerate(ids)
    ]


@pytest.mark.slow
def test_answers_are_the_decoders_whoever_drafts(target: Target, head: str) -> None:
    """Keyed by seed, conversation and place: in any batch what `eagle.generate` draws alone, though drafts differ."""
    for temperature, top_p in ((0.0, 1.0), (0.7, 1.0), (1.2, 0.8)):
        sampling = {"temperature": temperature, "top_p": top_p, "seed": 3}
        expected = []
        for prompt in prompts(target):
            keyed = Sampling(**sampling, request=prompt.request)
            trace = generate(
                target, NoDrafter(), prompt.ids, sampling=keyed, max_new_tokens=prompt.room
            )
            spoken = trace.tokens[: len(trace.tokens) - (trace.finish == "stop")]
            expected.append({"tokens": spoken, "count": len(trace.tokens)})
        for drafter in ("none", "ngram", "suffix", head, f"suffix,{head}"):
            assert answer_here(target, prompts(target), drafter=drafter, **sampling) == expected
        assert answer_here(target, prompts(target)[::-1], **sampling) == expected[::-1]
        assert answer_here(target, prompts(target), batch_size=1, **sampling) == expected
    assert expected != answer_here(target, prompts(target), **{**sampling, "seed": 4})


def test_noise_of_another_key_would_be_seen(target: Target) -> None:
    """A planted fault: a conversation that draws by its place in the batch answers something else."""
    faulty = [
        Prompt([], None, prompt.ids, prompt.room, number)
        for number, prompt in enumerate(prompts(target))
    ]
    sampling = {"temperature": 1.2, "seed": 3}
    assert answer_here(target, faulty, **sampling) != answer_here(
        target, prompts(target), **sampling
    )


def test_what_the_cache_cannot_hold_fails_alone(target: Target) -> None:
    """It is counted with what to do; the others wait for room, and their answers are the same."""
    few = prompts(target)
    long = Prompt([], None, few[0].ids * 20, 12, 7)
    expected = answer_here(target, few)
    most = 2 * max(len(prompt.ids) + prompt.room for prompt in few) + 30
    *answers, refused = answer_here(
        target, [*few, long], max_tokens_in_cache=most, drafter="suffix"
    )
    assert answers == expected and isinstance(refused, str)
    assert "raise max_tokens_in_cache" in refused and f"the cache may hold {most}" in refused


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_next_turn_reads_what_is_new_alone(
    batch_size: int, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of history stay in the cache; a planted fault reads them anew, for the same answers."""
    read, extend = [0], TargetState.extend

    def count(state: TargetState, tokens: Any) -> Any:
        read[0] += sum(map(len, tokens.values()))
        return extend(state, tokens)

    def run() -> tuple[int, dict[str, Any]]:
        section = section_of(
            Path("-"),
            max_new_tokens=4,
            keep_truncated=True,
            batch_size=batch_size,
            drafter="suffix",
        )
        local, read[0] = Local(target, Numbers(), section), 0
        outcomes = dict(
            local.run((str(number), three_turns(target, number)) for number in range(4))
        )
        return read[0], outcomes

    monkeypatch.setattr(TargetState, "extend", count)
    tokens, outcomes = run()
    monkeypatch.setattr(TargetState, "_shared", lambda *_: 0)
    anew, same = run()
    assert outcomes == same
    assert anew == sum(sum(outcome["lengths"]) for outcome in outcomes.values())
    least = sum(outcome["lengths"][-1] for outcome in outcomes.values())
    if batch_size == 1:
        assert tokens <= least
    assert tokens - least < (anew - least) / 2


def three_turns(target: Target, number: int) -> Generator[Prompt, Answer, dict[str, Any]]:
    """A conversation whose three questions follow what was said; the answers, and the lengths of the prompts."""
    text, said, lengths = target.chat(f"What is {number}?"), [], []
    for turn in range(3):
        lengths.append(len(text))
        answer = yield Prompt([], None, text, 3 + 2 * number, 10 * number + turn)
        said.append(answer.message["content"])
        text = [*text, *map(int, said[-1].split()), *target.chat("And then?")]
    return {"said": said, "lengths": lengths}


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_a_killed_run_of_the_target_itself_resumes(
    drafter: str, target: Target, source: Path, tmp_path: Path
) -> None:
    """By two processes whose last lines are cut, then by one: the bytes of a run that nobody disturbed."""
    jobs = Jobs(make_names_unique(read_conversations(source)))
    names, reader = [name for name, _ in jobs], Reader(target.tokenizer, DataSection(train="-"))

    def run(out: Path, jobs: Any, drafter: str, *share: int) -> None:
        section = section_of(
            out, temperature=0.7, batch_size=2, keep_truncated=True, drafter=drafter
        )
        begin(out, {})
        assert not answer_all(
            out, jobs, Local(target, target.tokenizer, section), reader, section, *share
        )

    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(whole, jobs, "none")
    join_parts(whole, names)
    for index in (0, 1):
        run(out, Jobs(islice(jobs, len(names) - 1)), drafter, index, 2)
        part = tmp_path / f"out.jsonl.parts/part-0000{index}.jsonl"
        part.write_bytes(part.read_bytes()[:-20])
    run(out, jobs, drafter)
    join_parts(out, names)
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.slow
@pytest.mark.long
def test_processes_that_are_killed_change_nothing(command: list[str], tmp_path: Path) -> None:
    """Two processes with a drafter, killed and started again: the file of one without."""
    main([*command, "regenerate.temperature=0.7"])
    whole = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").unlink()
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    settings = [
        *command,
        "regenerate.temperature=0.7",
        "regenerate.drafter=suffix",
        "regenerate.batch_size=1",
    ]
    run = [*launcher, "-m", "data_prep.regenerate", *settings]
    process = subprocess.Popen(run, start_new_session=True)
    parts = tmp_path / "out.jsonl.parts"
    while process.poll() is None and not any(
        part.stat().st_size for part in parts.glob("part-*.jsonl")
    ):
        time.sleep(0.01)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out.jsonl").exists()
    subprocess.run(run, check=True)
    assert (tmp_path / "out.jsonl").read_bytes() == whole


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_processes_gives_the_same(
    count: int, uninterrupted: bytes, tiny_target: Target, tmp_path: Path
) -> None:
    """Byte for byte, in source order."""
    jobs, out = jobs_of(13), tmp_path / "out.jsonl"
    for index in range(count):
        assert not run_echo(out, jobs, tiny_target, index, count)
    join_parts(out, [name for name, _ in jobs])
    assert out.read_bytes() == uninterrupted


def test_a_killed_run_resumes(uninterrupted: bytes, tiny_target: Target, tmp_path: Path) -> None:
    """Half a line is cut or passed over, what is done stays done, and the number of processes may change."""
    jobs, out = jobs_of(13), tmp_path / "out.jsonl"
    run_echo(out, Jobs(islice(jobs, 9)), tiny_target, 0, 2)
    run_echo(out, Jobs(islice(jobs, 9)), tiny_target, 1, 2)
    parts = [tmp_path / f"out.jsonl.parts/part-0000{index}.jsonl" for index in (0, 1)]
    for part in parts:
        part.write_bytes(part.read_bytes()[:-20])
    asked: list[str] = []

    def reply(request: dict[str, Any]) -> Any:
        asked.append(request["messages"][0]["content"])
        return echo(request)

    assert not run_echo(out, jobs, tiny_target, reply=reply)
    assert len(set(asked)) == 4 + 2  # those never tried, and the two that were cut
    join_parts(out, [name for name, _ in jobs])
    assert out.read_bytes() == uninterrupted


@pytest.mark.slow
def test_sigkills_change_nothing(command: list[str], tiny_target: Target, tmp_path: Path) -> None:
    """Five processes killed after ever more requests, one left alone: the file of a run that nobody disturbed."""
    length, asked = len(Reader(tiny_target.tokenizer, DataSection(train="-")).ids(PROBE, None)), []

    def reply(request: dict[str, Any]) -> Any:
        asked.append(request)
        time.sleep(0.05)
        return echo(request) if request["max_tokens"] > 1 else completion("x", prompt_tokens=length)

    with serving(reply) as (url, _):
        main([*command, f"regenerate.endpoint={url}", "regenerate.in_flight=2"])
        whole = (tmp_path / "out.jsonl").read_bytes()
        (tmp_path / "out.jsonl").unlink()
        run = [sys.executable, "-m", "data_prep.regenerate", *command, f"regenerate.endpoint={url}"]
        for kill_after in (1, 3, 5, 6, 7):
            asked.clear()
            process = subprocess.Popen([*run, "regenerate.in_flight=2"])
            while len(asked) < kill_after and process.poll() is None:
                time.sleep(0.01)
            process.kill()
            process.wait()
        assert not (tmp_path / "out.jsonl").exists()
        subprocess.run(run, check=True)
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_a_busy_server_is_asked_again(
    uninterrupted: bytes, tiny_target: Target, tmp_path: Path
) -> None:
    """Errors 500 and 429, garbage and hanging up, now and then, change nothing."""
    jobs, out, count = jobs_of(13), tmp_path / "out.jsonl", iter(range(10_000))
    faults = {3: 500, 5: 429, 8: None, 9: "<html>", 10: 503}
    assert not run_echo(
        out, jobs, tiny_target, reply=lambda asked: faults.get(next(count) % 13) or echo(asked)
    )
    join_parts(out, [name for name, _ in jobs])
    assert out.read_bytes() == uninterrupted


def test_what_fails_is_counted_and_tried_again(
    command: list[str],
    source: Path,
    tiny_target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run goes on, ends with an error that says what to do, and the next one asks for the failed alone."""
    bad = next(read_conversations(source)).messages[0]["content"]
    length = len(Reader(tiny_target.tokenizer, DataSection(train="-")).ids(PROBE, None))

    def reply(request: dict[str, Any]) -> Any:
        if request["max_tokens"] == 1:
            return completion("x", prompt_tokens=length)
        return 400 if request["messages"][0]["content"] == bad else echo(request)

    with serving(reply) as (url, asked):
        for attempt in range(2):
            with pytest.raises(
                SystemExit, match=rf"1 of {COUNT} conversations failed: run the same command again"
            ):
                main([*command, f"regenerate.endpoint={url}"])
            assert not (tmp_path / "out.jsonl").exists()
            assert "400 Bad Request busy" in capsys.readouterr().err
            if attempt == 0:
                asked.clear()
        assert len(asked) == 2
        main([*command, f"regenerate.endpoint={url}", "--without-failed"])
    assert len(list(read_conversations(tmp_path / "out.jsonl"))) == COUNT - 1


def test_a_server_that_is_gone_is_given_up(tiny_target: Target, tmp_path: Path) -> None:
    """After twenty failures in a row no more is tried."""
    asked: list[int] = []
    failed = run_echo(
        tmp_path / "out", jobs_of(40), tiny_target, reply=lambda _: asked.append(1) or 400
    )
    assert len(failed) == 40 and 20 <= len(asked) <= 22
    # a request that was under way at the twentieth failure may be one more
    untried = [
        reason
        for reason in failed.values()
        if re.match(r"not tried, after 2[0-2] failures in a row", reason)
    ]
    assert len(untried) == 40 - len(asked)


def test_a_server_that_is_not_there_is_named() -> None:
    """With what to do."""
    section = section_of(Path("-"), endpoint="http://127.0.0.1:9/v1", attempts=1)
    with pytest.raises(
        ValueError,
        match=r"no answer from http://127\.0\.0\.1:9/v1/models: .*refused.*: start a server of a/b there, correct "
        r"regenerate.endpoint, or set regenerate.endpoint=null to decode here",
    ):
        pool_at(section, "a/b")


def test_another_model_is_refused() -> None:
    """By what the server says that it serves; a folder's or hub id's last part, its full path and a root are fine."""
    with serving(echo, model="Llama-3.2-1B", root="/models/llama") as (url, _):
        section = section_of(Path("-"), endpoint=url)
        with pytest.raises(
            ValueError, match=r"serves \['another', 'Llama-3.2-1B'\], expected a/other or other"
        ):
            pool_at(section, "a/other")
        for path in ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B", "/models/llama"):
            assert pool_at(section, path).endpoints[0].model == "Llama-3.2-1B"


@pytest.mark.parametrize("wrong", [1, -1, None])
def test_another_tokenizer_is_refused(
    command: list[str], tiny_target: Target, wrong: int | None
) -> None:
    """A probe of many scripts must have as many tokens there as here."""
    length = len(Reader(tiny_target.tokenizer, DataSection(train="-")).ids(PROBE, None))
    counted = None if wrong is None else length + wrong
    with serving(lambda _: completion("x", prompt_tokens=counted)) as (url, asked):  # type: ignore[arg-type]
        with pytest.raises(
            ValueError,
            match=f"as {counted} tokens, the recipe's tokenizer and template as {length}",
        ):
            main([*command, f"regenerate.endpoint={url}"])
        assert [request["max_tokens"] for request in asked] == [1]


def test_a_request_holds_all_that_decides_the_answer(tiny_target: Target) -> None:
    """Tools, sampling, a seed of its own for every answer, and the template's arguments."""
    with serving(echo, max_model_len=60) as (url, asked):
        section = section_of(
            Path("-"), endpoint=url, temperature=0.5, top_p=0.9, seed=7, max_new_tokens=50
        )
        pool = pool_at(section, enable_thinking=False)
        reader = Reader(tiny_target.tokenizer, DataSection(train="-"), pool.positions)
        conversation = talk(
            "name", "user: a", "assistant: b", "user: c", "assistant: d", tools=TOOLS
        )
        list(pool.run(iter([("name", converse("name", conversation, reader, section))])))
    first, second = asked
    assert first["messages"] == [{"role": "user", "content": "a"}] and first["tools"] == TOOLS
    assert (first["temperature"], first["top_p"], first["chat_template_kwargs"]) == (
        0.5,
        0.9,
        {"enable_thinking": False},
    )
    assert first["seed"] != second["seed"] and len(second["messages"]) == 3
    room = 60 - len(tiny_target.chat("a"))
    assert first["max_tokens"] == min(50, room) and second["max_tokens"] < first["max_tokens"]


def test_a_truncated_answer_is_learned_without_an_end_and_ends_the_conversation(
    tiny_target: Target,
) -> None:
    """Its tokens are the target's own, but for an end mark; `keep_truncated: false` gives it weight 0."""
    conversation = talk(
        "name", "user: a", "assistant: b", "user: c", "assistant: d", "user: e", "assistant: f"
    )
    replies = completion("fine"), completion("cut o", "length")
    line = run_talk(tiny_target, conversation, *replies)
    assert [turn.get("weight") for turn in line["record"]["messages"]] == [None, None, None, 1]
    assert (
        line["record"]["finish_reasons"] == ["stop", "length"]
        and "cut at a truncated answer" in line["notes"]
    )
    kept, _ = conversation_of(line["record"], "x:1")
    [example] = examples_of(kept, tiny_target.tokenizer, DataSection(train="-"), Tally())
    assert tiny_target.tokenizer.decode(example.tokens).endswith("cut o") and example.loss_mask[-1]
    left = run_talk(tiny_target, conversation, *replies, keep_truncated=False)
    assert [turn.get("weight") for turn in left["record"]["messages"]] == [None, None, None, 0]


def test_a_file_begun_when_truncated_answers_were_left_out_goes_on_so(tmp_path: Path) -> None:
    """Where the recipe does not say; where it does, another setting is refused as any."""
    out = tmp_path / "out.jsonl"
    assert as_begun(section_of(out), out).keep_truncated
    begin(out, {"sampling": {"keep_truncated": False}})
    assert not as_begun(section_of(out), out).keep_truncated
    assert as_begun(section_of(out, keep_truncated=True), out).keep_truncated


def test_tool_results_do_not_outlive_their_calls(tiny_target: Target) -> None:
    """What follows the data's first result, or a call of the target's own, is left away."""
    turns = (
        "user: a",
        "assistant: b",
        "user: c",
        "assistant: calls",
        "tool: result",
        "assistant: d",
    )
    line = run_talk(tiny_target, talk("name", *turns), completion("x"), completion("y"))
    assert [turn["content"] for turn in line["record"]["messages"]] == ["a", "x", "c", "y"]
    assert line["notes"] == ["cut at the first tool result, which belongs to another call"]
    call = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    reply = completion(None, "tool_calls", tool_calls=call)
    line = run_talk(tiny_target, talk("name", *turns, tools=TOOLS), reply)
    assert line["record"]["messages"][-1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": call,
    }
    assert (
        "cut at a tool call of the target, which has no result" in line["notes"]
        and line["record"]["tools"] == TOOLS
    )


def test_odd_conversations_are_noted(tiny_target: Target) -> None:
    """Two answers in a row, texts that are too long, templates that refuse, and answers that are printed otherwise."""
    line = run_talk(
        tiny_target,
        talk("n", "user: a", "assistant: b", "assistant: c", "user: d"),
        completion("x"),
    )
    assert [turn["content"] for turn in line["record"]["messages"]] == ["a", "x"]
    assert line["notes"] == ["two answers in a row: one is given"]
    long = talk("n", "user: a", "assistant: b", "user: " + "long " * 50, "assistant: c")
    line = run_talk(tiny_target, long, completion("x"), data=DataSection(train="-", max_length=60))
    too_long = ["cut where the text fills data.max_length or the model"]
    assert len(line["record"]["messages"]) == 2 and line["notes"] == too_long
    line = run_talk(
        tiny_target,
        talk("n", "user: " + "long " * 50, "assistant: c"),
        data=DataSection(train="-", max_length=60),
    )
    assert line["record"] is None and line["notes"] == too_long
    assert "1  without an answer" in table([line], 0)
    line = run_talk(
        tiny_target, Conversation("n", [{"role": "user", "content": None}, {"role": "assistant"}])
    )
    assert line["record"] is None and line["notes"][0].startswith(
        "cut where the template refuses: "
    )
    line = run_talk(
        tiny_target,
        talk("n", "user: a", "assistant: b"),
        completion("x", reasoning_content="I think"),
    )
    assert line["record"]["messages"][-1]["reasoning_content"] == "I think"
    # this template does not know of reasoning
    assert line["notes"] == ["the template prints an answer otherwise than the target wrote it"]


def test_repeated_ids_become_unique(tiny_target: Target) -> None:
    """By their place, the same at every run; the source's own id is kept beside."""
    names = Jobs(make_names_unique(talk(name) for name in ("a", "b", "a", "a", "a#2"))).names
    assert names == ["a", "b", "a#2", "a#3", "a#2#4"] and len(set(names)) == 5
    with_source = run_talk(tiny_target, talk("other", "user: a", "assistant: b"), completion("x"))
    assert with_source["record"]["source_id"] == "other"


def test_what_other_settings_made_is_refused(tmp_path: Path) -> None:
    """Parts and whole files, by the name of the difference, and files of which nothing is known."""
    out, settings = tmp_path / "out", {"target": {"path": "a"}, "sampling": {"temperature": 0.0}}
    assert not is_whole(out, settings)
    begin(out, settings)
    assert not is_whole(out, settings)
    for wanted, named_so in (
        ({**settings, "sampling": {"temperature": 1.0}}, r"sampling.temperature was 0.0, is 1.0"),
        ({**settings, "target": {"path": "b"}}, r"target.path was 'a', is 'b'"),
    ):
        with pytest.raises(ValueError, match=named_so):
            is_whole(out, wanted)
    join_parts(out, [])
    assert is_whole(out, settings)
    (tmp_path / "out.settings").unlink()
    with pytest.raises(ValueError, match="was made with other settings"):
        is_whole(out, settings)


def test_a_forecast_writes_nothing(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says how much there is to do and how long it takes."""
    main([*command, "--forecast"])
    assert f"{COUNT} conversations, at most " in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_recipes_that_cannot_be_meant_are_refused(command: list[str], source: Path) -> None:
    """No section, and an output that would become its own source."""
    with pytest.raises(ValueError, match="has no section `regenerate`"):
        main([command[0], "regenerate=null"])
    with pytest.raises(ValueError, match=r"within regenerate\.source"):
        main(
            [
                *command,
                f"regenerate.source={source.parent}",
                f"regenerate.out={source.parent}/out.jsonl",
            ]
        )


def test_the_sections_defaults_reach_the_settings() -> None:
    """Whoever decodes or drafts, the settings that decide the answers are the same."""
    ways = [
        {},
        {"endpoint": "http://x/v1"},
        {"drafter": "suffix", "max_tokens_in_cache": 9, "batch_size": 2},
    ]
    recipes = [
        Recipe.load(TINY, [f"regenerate={json.dumps({'source': 'a', 'out': 'b', **way})}"])
        for way in ways
    ]
    first, *others = [regenerate.settings_of(recipe, recipe.regenerate, {}) for recipe in recipes]  # type: ignore[arg-type]
    assert others == [first, first]
    drawn = Recipe.load(TINY, ['regenerate={"source": "a", "out": "b", "seed": 1}'])
    assert regenerate.settings_of(drawn, drawn.regenerate, {}) != first  # type: ignore[arg-type]
