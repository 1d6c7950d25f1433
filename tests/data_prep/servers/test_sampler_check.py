"""A server that does not sample from its model's probabilities is refused, before and during the run."""

# V vocabulary

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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
from tests.data_prep.stub_servers import (
    TINY,
    Reply,
    completion,
    read_records,
    run_talk,
    serving,
    talk,
    write_records,
)

Sampler = Callable[[torch.Tensor], torch.Tensor]  # logits [V] -> the token that is sampled
COUNT = 4
LOCK = threading.Lock()


def sample_rightly(logits: torch.Tensor) -> torch.Tensor:
    """Sample from the model's probabilities."""
    return torch.multinomial(logits.softmax(-1), 1)[0]


def sample_flattened(logits: torch.Tensor) -> torch.Tensor:
    """Sample as a temperature of 3 would."""
    return sample_rightly(logits / 3)


def sample_uniformly(logits: torch.Tensor) -> torch.Tensor:
    """Sample every token alike."""
    return torch.randint(len(logits), ())


@torch.inference_mode()
def write_answer(
    target: Target,
    request: dict[str, Any],
    sample: Sampler,
    tells_probs: bool,
) -> dict[str, Any]:
    """Return the reply of a server of the untouched model that samples in this way, token by token."""
    # answers are the same at every run, as with a server that takes seeds
    torch.manual_seed(request["seed"])
    prompt = target.chat(request["messages"])
    ids = torch.tensor([prompt])
    cache = None
    tokens: list[int] = []
    content = []
    while len(tokens) < request["max_tokens"]:
        output = target.model(
            input_ids=ids,
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        logits = output.logits[0, -1].float()
        logprobs = logits.log_softmax(-1)
        token = int(sample(logits))
        tokens.append(token)
        ids = torch.tensor([[token]])
        likeliest = logprobs.topk(request.get("top_logprobs", 1)).indices.tolist()
        content.append(describe_token(token, logprobs, likeliest))
        if token in target.stop_tokens:
            break
    text = target.tokenizer.decode(tokens, skip_special_tokens=True)
    reply = completion(text, "stop", len(prompt))
    if tells_probs and request.get("logprobs"):
        reply["choices"][0]["logprobs"] = {"content": content}
    return reply


def describe_token(
    token: int,
    logprobs: torch.Tensor,
    likeliest: list[int],
) -> dict[str, Any]:
    """Return the entry of a token in `logprobs.content` of a chat completion."""
    listed = [{"token": str(each), "logprob": float(logprobs[each])} for each in likeliest]
    return {
        "token": str(token),
        "logprob": float(logprobs[token]),
        "top_logprobs": listed,
    }


def serve(
    target: Target,
    sample: Sampler,
    tells_probs: bool = True,
) -> Reply:
    """Return the replies of a server of the target that samples in this way."""

    def reply(request: dict[str, Any]) -> Any:
        with LOCK:
            return write_answer(target, request, sample, tells_probs)

    return reply


@pytest.fixture(scope="module")
def target_dir(mixing_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target that has few likely tokens at a time, none of them a byte."""
    folder = tmp_path_factory.mktemp("sure") / "target"
    target = Target.load(mixing_target_dir, dtype=torch.float32)
    names = target.tokenizer.convert_ids_to_tokens(list(range(target.vocab_size)))
    # other samplers are seen at once, as they choose bytes
    # bytes are the tokens of broken characters
    is_byte = torch.tensor([name.startswith("<") for name in names])
    with torch.no_grad():
        target.model.lm_head.weight *= 3
        target.model.lm_head.weight[is_byte] = 0
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    """That target."""
    return Target.load(target_dir, dtype=torch.float32)


@pytest.fixture
def command(target_dir: Path, tmp_path: Path) -> list[str]:
    """The command line of a few answers at temperature 1."""
    records = [{"prompt": f"Tell me about {n}.", "id": str(n)} for n in range(COUNT)]
    source = write_records(tmp_path / "source.jsonl", records)
    section = {
        "source": str(source),
        "out": str(tmp_path / "out.jsonl"),
        "max_new_tokens": 12,
    }
    # one request at a time, so that the order of the answers is known
    section |= {"temperature": 1.0, "in_flight": 1}
    target = [f"target.path={target_dir}", "target.dtype=float32"]
    return [str(TINY), *target, f"regenerate={json.dumps(section)}"]


@pytest.mark.slow
@pytest.mark.parametrize("tells_probs", [True, False])
def test_a_server_that_samples_rightly_is_taken(
    command: list[str],
    target: Target,
    tmp_path: Path,
    tells_probs: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server that tells no probabilities is taken too, and that is printed."""
    with serving(
        serve(
            target,
            sample_rightly,
            tells_probs,
        )
    ) as (url, requests):
        main([*command, f"regenerate.endpoint={url}"])
    assert len(requests) == 1 + PROBES + COUNT
    assert requests[1]["logprobs"]
    assert "logprobs" not in requests[-1]
    assert len(read_records(tmp_path / "out.jsonl")) == COUNT
    assert ("tells no probabilities" in capsys.readouterr().out) is not tells_probs


@pytest.mark.quick("uniform*")
@pytest.mark.parametrize(
    ("sample", "tells_probs", "probe_tokens", "figure"),
    [
        (sample_uniformly, True, 16, r"of \d+ tokens drawn at temperature 1, .*mean NLL \d+\.\d"),
        (sample_uniformly, False, 16, r"\d of the latest 8 answers hold broken characters"),
        # a flatter distribution needs more tokens to be seen
        (sample_flattened, True, 32, r"of \d+ tokens .*mean NLL \d+\.\d"),
    ],
    ids=["uniform", "uniform, tells nothing", "flattened"],
)
def test_a_server_that_samples_wrongly_is_refused(
    command: list[str],
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sample: Sampler,
    tells_probs: bool,
    probe_tokens: int,
    figure: str,
) -> None:
    """The error names the figure and the way out, and nothing is written."""
    monkeypatch.setattr(endpoint, "PROBE_TOKENS", probe_tokens)
    message = f"does not sample from its model: {figure}.*without drafts"
    with serving(
        serve(
            target,
            sample,
            tells_probs,
        )
    ) as (url, requests):
        with pytest.raises(ValueError, match=message):
            main([*command, f"regenerate.endpoint={url}"])
    assert len(requests) == 1 + PROBES
    assert not list(tmp_path.glob("out*"))


def test_a_server_that_goes_wrong_is_left(
    command: list[str],
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was written before stays whole, and a right server goes on from there."""
    monkeypatch.setattr(sampler_check, "EVERY", 2)
    monkeypatch.setattr(endpoint, "PROBE_TOKENS", 12)
    num_right = 1 + PROBES + 1
    # the probes and one answer are right
    right = serve(target, sample_rightly)
    wrong = serve(target, sample_uniformly)

    def reply(request: dict[str, Any]) -> Any:
        if len(requests) <= num_right:
            return right(request)
        # enough tokens to be sure of it within one answer
        return wrong({**request, "max_tokens": 40})

    message = r"any more: of \d+ tokens .* remove .*out\.jsonl\.parts"
    with serving(reply) as (url, requests):
        with pytest.raises(ValueError, match=message):
            main([*command, f"regenerate.endpoint={url}"])
    (line,) = read_records(tmp_path / "out.jsonl.parts/part-00000.jsonl")
    assert line["id"] == "0"
    assert not (tmp_path / "out.jsonl").exists()
    with serving(serve(target, sample_rightly)) as (url, requests):
        main([*command, f"regenerate.endpoint={url}"])
    assert len(requests) == 1 + PROBES + COUNT - 1
    assert read_records(tmp_path / "out.jsonl")[0] == line["record"]


def sample_tokens(
    probs: torch.Tensor,
    count: int,
    power: float = 1.0,
    swap: bool = False,
) -> list[dict[str, Any]]:
    """Return entries of tokens sampled from `probs ** power`, with the twenty likeliest.

    With `swap` an entry lists the sampled token in the last position, as some servers do.
    """
    logprobs = probs.log()
    likeliest = probs.topk(20).indices.tolist()
    generator = torch.Generator().manual_seed(5)
    entries = []
    # the server says probabilities before the power, as some do for a temperature
    for token in torch.multinomial(
        probs**power, count, replacement=True, generator=generator
    ).tolist():
        listed = likeliest
        if swap and token not in likeliest:
            listed = [*likeliest[:-1], token]
        entries.append(describe_token(token, logprobs, listed))
    return entries


@pytest.mark.parametrize("spread", [0.3, 3.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("swap", [False, True])
def test_a_right_sampler_is_not_suspected(spread: float, swap: bool) -> None:
    """Its hits stay near the expected ones at temperatures below, at and above 1."""
    # nearly uniform, and with a few likely tokens
    scores = torch.randn(500, generator=torch.Generator().manual_seed(1))
    probs = (scores * spread).softmax(0).double()
    for temperature in (0.5, 1.0, 1.5):
        draws = draws_of(
            sample_tokens(probs, 300, 1 / temperature, swap),
            500,
            temperature,
        )
        assert draws.expected - draws.hits <= DEVIATIONS * (draws.variance + 1) ** 0.5
    # at temperature 1 the expectation is the enumerated mass of the likeliest tokens
    mass = float(probs.topk(19).values.sum())
    draws = draws_of(sample_tokens(probs, 100, swap=swap), 500, 1.0)
    assert draws.expected / 100 == pytest.approx(mass)
    assert abs(draws.hits / 100 - mass) < 0.2


@pytest.mark.parametrize(
    ("text", "finish", "question", "expected"),
    [
        ("a\ufffdb", "stop", "What?", True),
        ("a\ufffdb", "length", "What?", True),
        ("a\ufffd", "length", "What?", False),  # a limit cuts through a character
        ("\ufffd", "stop", "What is \ufffd?", False),
    ],
)
def test_broken_characters_are_counted_where_the_target_is_to_blame(
    text: str,
    finish: str,
    question: str,
    expected: bool,
) -> None:
    """Those asked about do not count, nor those that a limit cuts through."""
    assert (
        is_broken(
            text,
            finish,
            [{"role": "user", "content": question}],
        )
        == expected
    )


def test_probabilities_that_agree_do_not_excuse_broken_texts() -> None:
    """A sampler at fault may report what it sampled from; entries without numbers are passed over."""
    # uniform probabilities agree with every sample
    check = SamplerCheck(500, 1.0)
    entries = sample_tokens(torch.full((500,), 1 / 500), 10)
    odd: list[dict[str, Any]] = [
        {"token": "x", "logprob": None, "top_logprobs": entries},
        {"token": "x", "logprob": -1.0},
        {"token": "x", "logprob": -1.0, "top_logprobs": []},
    ]

    def add(text: str) -> str | None:
        message = {"content": text}
        logprobs = {"content": [*entries, *odd]}
        choice = {
            "message": message,
            "finish_reason": "stop",
            "logprobs": logprobs,
        }
        return check.add(choice, [])

    assert [add(text) for text in ("fine", "a\ufffd0", "a\ufffd1")] == [None] * 3
    assert add("a\ufffd1") == "3 of the latest 4 answers hold broken characters (U+FFFD)"
    assert check.draws[0].tokens == 10


def test_probabilities_come_now_and_then() -> None:
    """One answer in so many is asked with its probabilities, and none from a server that tells none."""
    check = SamplerCheck(100, 1.0)
    # probabilities make a reply larger, so few answers come with them
    numbers = range(1, 2 * EVERY + 1)
    assert [number for number in numbers if check.is_due()] == [EVERY, 2 * EVERY]
    check.tells_probs = False
    assert not any(check.is_due() for _ in numbers)


def test_an_answer_with_broken_characters_is_not_learned(tiny_target: Target) -> None:
    """It stays in the history with weight 0."""
    conversation = talk("name", "user: a", "assistant: b", "user: c", "assistant: d")
    line = run_talk(
        tiny_target,
        conversation,
        completion("x\ufffdy"),
        completion("z"),
    )
    weights = [turn.get("weight") for turn in line["record"]["messages"]]
    assert weights == [None, 0, None, None]
    assert "an answer with broken characters (U+FFFD) is not learned" in line["notes"]


@pytest.mark.parametrize(
    ("reply", "note"),
    [
        (completion(None), "cut at an empty answer"),
        (completion(" \n"), "cut at an empty answer"),
        (completion("x", "content_filter"), "cut at an answer that the server filtered"),
    ],
)
def test_an_empty_or_filtered_answer_ends_the_conversation(
    reply: Any,
    note: str,
    tiny_target: Target,
) -> None:
    """The answers before it are kept; where there is none, the conversation is dropped."""
    conversation = talk("name", "user: a", "assistant: b", "user: c", "assistant: d")
    line = run_talk(
        tiny_target,
        conversation,
        completion("fine"),
        reply,
    )
    assert [turn["content"] for turn in line["record"]["messages"]] == ["a", "fine"]
    assert note in line["notes"]
    assert run_talk(tiny_target, conversation, reply)["record"] is None
