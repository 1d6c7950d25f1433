"""The target answers many prompts at once as it answers each alone, whatever drafts for it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.servers.answers import Answer, Local, Prompt
from eagle import Target
from eagle.core.budget import Budget
from eagle.core.noise import Noise
from eagle.core.tree import chain_paths
from eagle.core.verify import Sampling
from eagle.decoding.decode import generate
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.none import NoDrafter
from eagle.formats.checkpoint import save_head, write_budget
from eagle.target.state import TargetState
from tests import every_type
from tests.data_prep.stub_servers import section_of
from tests.families import VOCAB_SIZE, build, own_answer, random_tokens


class NumberTokenizer:
    """A tokenizer that spells tokens as their numbers."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def ask(prompt: Prompt) -> Generator[Prompt, Answer, dict[str, Any]]:
    """Hold a conversation of one answer; return its tokens without a stop token, and their count with it."""
    answer = yield prompt
    tokens = [int(word) for word in answer.message["content"].split()]
    return {"tokens": tokens, "count": answer.tokens}


def answer_here(target: Target, prompts: Sequence[Prompt], **fields: Any) -> list[Any]:
    """Return the answers of the target itself, three prompts in a batch."""
    local = Local(
        target,
        NumberTokenizer(),
        section_of(**{"batch_size": 3, **fields}),
    )
    dialogues = ((str(number), ask(prompt)) for number, prompt in enumerate(prompts))
    # answers come as they end, the short ones first
    outcomes = dict(local.run(dialogues))
    return [outcomes[str(number)] for number in range(len(prompts))]


@pytest.fixture
def prompts(mixing_target: Target) -> list[Prompt]:
    """Five prompts of different lengths and limits."""
    questions = ("What is json for?", "Tell me about `csv`.", "Hello", "Where is shutil?", "x")
    made = []
    for number, question in enumerate(questions):
        ids = mixing_target.chat(question)
        made.append(
            Prompt(
                [],
                None,
                ids,
                12 + number,
                request=1000 + number,
            )
        )
    return made


FAMILIES = ("llama", "deepseek_v3", "gemma2", "gpt2", "gpt_oss", "mistral-sliding")


@pytest.mark.quick("llama-none", "gpt2-suffix")
@pytest.mark.parametrize(
    ("name", "drafter"),
    [("llama", "none"), ("llama", "ngram"), *((name, "suffix") for name in FAMILIES)],
)
def test_neighbours_and_drafts_change_no_answer_of_any_family(name: str, drafter: str) -> None:
    """Sliding windows, learned positions and experts, in batches of long and short prompts, greedy and sampled."""
    model = build(name)
    target = Target(model)
    prompts = []
    for number, length in enumerate((3, 14, 30, 7, 1)):
        ids = random_tokens(length, seed=length) * 2
        prompts.append(
            Prompt(
                [],
                None,
                ids,
                6 + number,
                request=number,
            )
        )
    # five prompts in a batch of three: two of them join later
    answers = answer_here(target, prompts, drafter=drafter)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["tokens"] == own_answer(
            model,
            prompt.ids,
            prompt.room,
        )
    answers = answer_here(
        target,
        prompts,
        drafter=drafter,
        temperature=1.0,
        seed=5,
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        noise = Noise(5, prompt.request)
        noise_at = partial(noise_of_position, noise)
        assert answer["tokens"] == own_answer(
            model,
            prompt.ids,
            prompt.room,
            noise=noise_at,
        )


def noise_of_position(noise: Noise, position: int) -> torch.Tensor:
    """Return the noise that is added to the logits of one position, [V]."""
    return noise([position], VOCAB_SIZE, torch.device("cpu"))[0]


@pytest.mark.parametrize("name", ["openai-gpt", "xlnet"])
def test_a_model_that_reads_no_trees_is_refused(name: str) -> None:
    """The error names the way out, a server."""
    target = Target(every_type.build(name))
    with pytest.raises(ValueError, match=r"cannot read a tree: .*\. For its answers serve it"):
        Local(target, NumberTokenizer(), section_of())


@pytest.fixture
def untrained_head(mixing_target: Target, tmp_path: Path) -> str:
    """A head that nobody has trained, with a budget tuned to sampled drafts."""
    settings = settings_of({"kind": "eagle1"}, "test")
    head = DRAFTERS["eagle1"].for_target(
        settings, mixing_target.config, mixing_target.head, supervised=()
    )
    save_head(tmp_path / "head", head, "", {})
    write_budget(tmp_path / "head", Budget.fixed(chain_paths(3), "sampled"))
    return str(tmp_path / "head")


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.2, 0.8)])
def test_answers_are_the_decoders_whoever_drafts(
    temperature: float,
    top_p: float,
    mixing_target: Target,
    prompts: list[Prompt],
    untrained_head: str,
) -> None:
    """In any batch each answer is what `eagle.generate` samples alone, by seed, conversation and position."""
    sampling = {"temperature": temperature, "top_p": top_p, "seed": 3}
    expected = []
    for prompt in prompts:
        trace = generate(
            mixing_target,
            NoDrafter(),
            prompt.ids,
            sampling=Sampling(**sampling, request=prompt.request),
            max_new_tokens=prompt.room,
        )
        expected.append({"tokens": trace.tokens, "count": len(trace.tokens)})
    # an untrained head drafts tokens that are nearly all rejected
    for drafter in ("none", untrained_head, f"suffix,{untrained_head}"):
        assert (
            answer_here(
                mixing_target,
                prompts,
                drafter=drafter,
                **sampling,
            )
            == expected
        )
    assert (
        answer_here(
            mixing_target,
            prompts[::-1],
            **sampling,
        )
        == expected[::-1]
    )
    assert (
        answer_here(
            mixing_target,
            prompts,
            batch_size=1,
            **sampling,
        )
        == expected
    )


def test_noise_of_another_key_would_be_seen(mixing_target: Target, prompts: list[Prompt]) -> None:
    """A planted fault: a conversation that samples by its position in the batch answers something else."""
    sampling = {"temperature": 1.2, "seed": 3}
    # the key of an answer is its position, not its conversation
    faulty = [
        Prompt([], None, prompt.ids, prompt.room, request=number)
        for number, prompt in enumerate(prompts)
    ]
    right = answer_here(mixing_target, prompts, **sampling)
    assert answer_here(mixing_target, faulty, **sampling) != right


def test_what_the_cache_cannot_hold_fails_alone(
    mixing_target: Target, prompts: list[Prompt]
) -> None:
    """The reason says what to do; the others wait for room, and their answers are the same."""
    too_long = Prompt([], None, prompts[0].ids * 20, 12, request=7)
    expected = answer_here(mixing_target, prompts)
    # two prompts fit at once, with room for their drafts
    limit = 2 * max(len(prompt.ids) + prompt.room for prompt in prompts) + 30
    options = {"max_tokens_in_cache": limit, "drafter": "suffix"}
    *answers, refused = answer_here(
        mixing_target,
        [*prompts, too_long],
        **options,
    )
    assert answers == expected
    assert "raise max_tokens_in_cache" in refused
    assert f"the cache may hold {limit}" in refused


def ask_three_times(
    target: Target,
    number: int,
    lengths: list[int],
) -> Generator[Prompt, Answer, dict[str, Any]]:
    """Hold a conversation of three questions; return the answers, and note the lengths of the prompts."""
    ids = target.chat(f"What is {number}?")
    answers = []
    for turn in range(3):
        lengths.append(len(ids))
        answer = yield Prompt(
            [],
            None,
            ids,
            3 + 2 * number,
            request=10 * number + turn,
        )
        answers.append(answer.message["content"])
        ids = [*ids, *map(int, answers[-1].split()), *target.chat("And then?")]
    return {"answers": answers}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_next_turn_reads_only_new_tokens(
    batch_size: int,
    mixing_target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The history stays in the cache; a planted fault reads it again, for the same answers."""
    num_read = [0]
    extend = TargetState.extend

    # every read of the target goes through this
    def count_tokens(state: TargetState, tokens: Any) -> Any:
        num_read[0] += sum(map(len, tokens.values()))
        return extend(state, tokens)

    def run() -> tuple[int, list[list[int]], dict[str, Any]]:
        num_read[0] = 0
        options = {
            "max_new_tokens": 4,
            "keep_truncated": True,
            "drafter": "suffix",
        }
        section = section_of(batch_size=batch_size, **options)
        local = Local(mixing_target, NumberTokenizer(), section)
        lengths: list[list[int]] = [[] for _ in range(4)]
        dialogues = (
            (
                str(number),
                ask_three_times(
                    mixing_target,
                    number,
                    lengths[number],
                ),
            )
            for number in range(4)
        )
        outcomes = dict(local.run(dialogues))
        return num_read[0], lengths, outcomes

    monkeypatch.setattr(TargetState, "extend", count_tokens)
    num_tokens, lengths, outcomes = run()
    monkeypatch.setattr(TargetState, "_shared_prefix", lambda *_: 0)
    num_without_history, _, same = run()
    assert outcomes == same
    # without history each prompt is read whole; with it only the last is, turn by turn
    assert num_without_history == sum(map(sum, lengths))
    fewest = sum(row[-1] for row in lengths)
    if batch_size == 1:
        assert num_tokens <= fewest
    assert num_tokens - fewest < (num_without_history - fewest) / 2
