"""A server that does not draw from its model's probabilities is refused, before work and while it goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.conversations import read_conversations
from data_prep.dialogues import Reader, converse
from data_prep.regenerate import main
from data_prep.servers import endpoint, sampler_check
from data_prep.servers.sampler_check import (
    DEVIATIONS,
    EVERY,
    PROBES,
    SamplerCheck,
    draws_of,
    is_broken,
)
from eagle import Target
from eagle.recipe import DataSection, RegenerateSection
from tests.data_prep.stub_servers import TINY, Reply, completion, pool_at, serving, talk
from tests.data_prep.test_regenerate import run_talk

Draw = Callable[[torch.Tensor], torch.Tensor]  # logits [V] -> the token that is sampled
COUNT, NEW_TOKENS, LOCK = 4, 12, threading.Lock()


def draw_rightly(logits: torch.Tensor) -> torch.Tensor:
    """As the model's probabilities say."""
    return torch.multinomial(logits.softmax(-1), 1)[0]


def draw_flattened(logits: torch.Tensor) -> torch.Tensor:
    """As a temperature of 3 would."""
    return torch.multinomial((logits / 3).softmax(-1), 1)[0]


def draw_uniformly(logits: torch.Tensor) -> torch.Tensor:
    """Every token alike."""
    return torch.randint(len(logits), ())


@torch.inference_mode()
def sample_reply(
    target: Target, request: dict[str, Any], draw: Draw, tells: bool = True
) -> dict[str, Any]:
    """What a server of the untouched model replies that samples in this way, token by token."""
    torch.manual_seed(request["seed"])
    ids = target.tokenizer.apply_chat_template(
        request["messages"], add_generation_prompt=True, return_tensors="pt"
    )
    read, tokens, content = ids["input_ids"], list[int](), list[dict[str, Any]]()
    length, cache = read.shape[1], None
    while len(tokens) < request["max_tokens"] and not (tokens and tokens[-1] in target.stop_tokens):
        output = target.model(input_ids=read, past_key_values=cache, use_cache=True)
        logits, cache = output.logits[0, -1].float(), output.past_key_values
        tokens.append(int(draw(logits)))
        read, logprobs = torch.tensor([tokens[-1:]]), logits.log_softmax(-1)
        best = [*logprobs.topk(request.get("top_logprobs", 1)).indices.tolist()]
        listed = [{"token": str(token), "logprob": float(logprobs[token])} for token in best]
        chosen = {"token": str(tokens[-1]), "logprob": float(logprobs[tokens[-1]])}
        content.append({**chosen, "top_logprobs": listed})
    reply = completion(target.tokenizer.decode(tokens, skip_special_tokens=True), "stop", length)
    if tells and request.get("logprobs"):
        reply["choices"][0]["logprobs"] = {"content": content}
    return reply


@pytest.fixture(scope="module")
def target_dir(mixing_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target that has few likely tokens at a time, none of them a byte: other draws are seen at once."""
    folder, target = (
        tmp_path_factory.mktemp("sure") / "target",
        Target.load(mixing_target_dir, dtype=torch.float32),
    )
    names = target.tokenizer.convert_ids_to_tokens(list(range(target.vocab_size)))
    with torch.no_grad():
        target.model.lm_head.weight *= 3
        target.model.lm_head.weight[
            [number for number, name in enumerate(names) if name.startswith("<")]
        ] = 0
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    """That target."""
    return Target.load(target_dir, dtype=torch.float32)


@pytest.fixture
def command(target_dir: Path, tmp_path: Path) -> list[str]:
    """Answers to a few questions, drawn at temperature 1."""
    source = tmp_path / "source.jsonl"
    source.write_text(
        "".join(
            json.dumps({"prompt": f"Tell me about {n}.", "id": str(n)}) + "\n" for n in range(COUNT)
        )
    )
    section = {
        "source": str(source),
        "out": str(tmp_path / "out.jsonl"),
        "max_new_tokens": NEW_TOKENS,
    }
    section |= {"temperature": 1.0, "in_flight": 1}
    where = [f"target.path={target_dir}", "target.dtype=float32"]
    return [str(TINY), *where, f"regenerate={json.dumps(section)}"]


def serve(target: Target, draw: Draw, tells: bool = True) -> Reply:
    """A server of the target that samples in this way."""

    def reply(request: dict[str, Any]) -> Any:
        with LOCK:
            return sample_reply(target, request, draw, tells)

    return reply


@pytest.mark.slow
@pytest.mark.parametrize("tells", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_server_that_samples_rightly_is_taken(
    command: list[str],
    target: Target,
    tmp_path: Path,
    tells: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Prompts alone are answered; where the server tells no probabilities, that is said."""
    with serving(serve(target, draw_rightly, tells)) as (url, requests):
        main([*command, f"regenerate.endpoint={url}"])
    assert (
        len(requests) == 1 + PROBES + COUNT
        and requests[1]["logprobs"]
        and "logprobs" not in requests[-1]
    )
    assert len(list(read_conversations(tmp_path / "out.jsonl"))) == COUNT
    assert ("tells no probabilities" in capsys.readouterr().out) is not tells


@pytest.mark.parametrize(
    ("draw", "tells", "figure"),
    [
        (
            draw_uniformly,
            True,
            r"of \d+ tokens drawn at temperature 1, \d% are among the likeliest .* have \d+% .*mean NLL \d+\.\d",
        ),
        pytest.param(
            draw_flattened, True, r"of \d+ tokens .*mean NLL \d+\.\d", marks=pytest.mark.slow
        ),
        (draw_uniformly, False, r"\d of the latest 8 answers hold broken characters \(U\+FFFD\)"),
    ],
)
def test_a_server_that_samples_wrongly_is_refused(
    command: list[str],
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    draw: Draw,
    tells: bool,
    figure: str,
) -> None:
    """With the figure and the way out, before anything is written; uniform draws need few tokens to be seen."""
    monkeypatch.setattr(endpoint, "PROBE_TOKENS", 32 if draw is draw_flattened else 16)
    with serving(serve(target, draw, tells)) as (url, requests):
        with pytest.raises(
            ValueError, match=f"does not sample from its model: {figure}.*without drafts"
        ):
            main([*command, f"regenerate.endpoint={url}"])
    assert len(requests) == 1 + PROBES
    assert not list(tmp_path.glob("out*"))


def test_a_server_that_goes_wrong_is_left(
    command: list[str], target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written before stays and is not torn, and a right server goes on from there."""
    monkeypatch.setattr(sampler_check, "EVERY", 2)
    monkeypatch.setattr(endpoint, "PROBE_TOKENS", 12)
    asked: list[Any] = []

    def reply(request: dict[str, Any]) -> Any:
        asked.append(request)
        wrong = len(asked) > 1 + PROBES + 1
        return sample_reply(
            target, {**request, "max_tokens": 40 if wrong else request["max_tokens"]}, draw_broken
        )

    def draw_broken(logits: torch.Tensor) -> torch.Tensor:
        return draw_uniformly(logits) if len(asked) > 1 + PROBES + 1 else draw_rightly(logits)

    with serving(reply) as (url, _):
        with pytest.raises(
            ValueError, match=r"any more: of \d+ tokens .* remove .*out\.jsonl\.parts"
        ):
            main([*command, f"regenerate.endpoint={url}"])
    lines = (tmp_path / "out.jsonl.parts/part-00000.jsonl").read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["id"] for line in lines] == ["0"] and not (
        tmp_path / "out.jsonl"
    ).exists()
    with serving(serve(target, draw_rightly)) as (url, requests):
        main([*command, f"regenerate.endpoint={url}"])
    assert len(requests) == 1 + PROBES + COUNT - 1
    assert (
        (tmp_path / "out.jsonl")
        .read_text()
        .startswith(json.dumps(json.loads(lines[0])["record"]) + "\n")
    )


def tokens_of(
    probs: torch.Tensor, draws: int, power: float = 1.0, swap: bool = False
) -> list[dict[str, Any]]:
    """Tokens drawn from `probs ** power`, with the twenty likeliest; `swap` lists the sampled one in the last place."""
    tokens, likeliest = [], probs.topk(20).indices.tolist()
    for token in torch.multinomial(
        probs**power, draws, replacement=True, generator=torch.Generator().manual_seed(5)
    ):
        best = [*likeliest[:-1], int(token)] if swap and int(token) not in likeliest else likeliest
        listed = [{"token": str(token), "logprob": float(probs[token].log())} for token in best]
        tokens.append(
            {"token": str(int(token)), "logprob": float(probs[token].log()), "top_logprobs": listed}
        )
    return tokens


@pytest.mark.quick("True-0.3")
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("swap", [False, True])
def test_a_right_sampler_is_not_suspected(spread: float, swap: bool) -> None:
    """Flat and peaked probabilities, at temperatures below, at and above 1; the expected hits are enumerated ones."""
    probs = (
        (torch.randn(500, generator=torch.Generator().manual_seed(1)) * spread).softmax(0).double()
    )
    for temperature in (0.5, 1.0, 1.5):
        draws = draws_of(tokens_of(probs, 1000, 1 / temperature, swap), 500, temperature)
        assert draws.expected - draws.hits <= DEVIATIONS * (draws.variance + 1) ** 0.5
    exact = float(probs.topk(19).values.sum())
    at_one = draws_of(tokens_of(probs, 100, swap=swap), 500, 1.0)
    assert at_one.expected / 100 == pytest.approx(exact) and abs(at_one.hits / 100 - exact) < 0.2


def test_broken_characters_are_counted_where_the_target_is_to_blame() -> None:
    """Not those asked about, nor those that a limit cuts through."""
    history = [{"role": "user", "content": "What is \ufffd?"}]
    assert is_broken("a\ufffdb", "stop", []) and is_broken("a\ufffdb", "length", [])
    assert not is_broken("a\ufffd", "length", []) and not is_broken("\ufffd", "stop", history)


def test_probabilities_that_agree_do_not_excuse_broken_texts() -> None:
    """A sampler at fault may tell what it drew from; numbers that are missing are passed over."""
    check = SamplerCheck(500, 1.0)
    tokens = tokens_of(torch.full((500,), 1 / 500), 10)
    odd = [{"token": "x", "logprob": None, "top_logprobs": tokens}, {"token": "x", "logprob": -1.0}]
    odd.append({"token": "x", "logprob": -1.0, "top_logprobs": []})
    for text, fault in (("fine", None), *((f"a\ufffd{number}", None) for number in range(2))):
        choice = {
            "message": {"content": text},
            "finish_reason": "stop",
            "logprobs": {"content": [*tokens, *odd]},
        }
        assert check.add(choice, []) == fault
    assert check.add(choice, []) == "3 of the latest 4 answers hold broken characters (U+FFFD)"
    assert check.draws[0].tokens == 10


def test_probabilities_come_now_and_then() -> None:
    """One answer in so many, and none from a server that tells none."""
    check = SamplerCheck(100, 1.0)
    assert [number for number in range(1, 2 * EVERY + 1) if check.is_due()] == [EVERY, 2 * EVERY]
    check.tells_probs = False
    assert not any(check.is_due() for _ in range(2 * EVERY))


def test_answers_that_are_none_are_not_learned(tiny_target: Target) -> None:
    """Broken characters have weight 0, an empty or filtered answer ends the conversation, an aborted one has failed."""
    conversation = talk("name", "user: a", "assistant: b", "user: c", "assistant: d")
    line = run_talk(tiny_target, conversation, completion("x\ufffdy"), completion("z"))
    assert [turn.get("weight") for turn in line["record"]["messages"]] == [None, 0, None, None]
    assert "an answer with broken characters (U+FFFD) is not learned" in line["notes"]
    for reply, note in (
        (completion(None), "cut at an empty answer"),
        (completion(" \n"), "cut at an empty answer"),
        (completion("x", "content_filter"), "cut at an answer that the server filtered"),
    ):
        line = run_talk(tiny_target, conversation, completion("fine"), reply)
        assert [turn["content"] for turn in line["record"]["messages"]] == [
            "a",
            "fine",
        ] and note in line["notes"]
        assert run_talk(tiny_target, conversation, reply)["record"] is None
    with serving(lambda _: completion("half an", "abort")) as (url, _):
        section = RegenerateSection(source="-", out="-", endpoint=url, in_flight=1, attempts=1)
        server = pool_at(section)
        read = Reader(tiny_target.tokenizer, DataSection(train="-"))
        ((_, outcome),) = server.run(
            iter([("name", converse("name", conversation, read, section))])
        )
    assert isinstance(outcome, str) and outcome.endswith("broke an answer off: finish_reason abort")
