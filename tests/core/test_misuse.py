"""Common mistakes of users are refused with a sentence that says what to do; every usual kind of number is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from eagle import Budget, Sampling, Target, Trace, beam_search, generate, load_drafter, stream
from eagle.core.drafter import Drafter, Reads
from eagle.decoding.goodput import Goodput
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.lookup.suffix import SuffixDrafter
from eagle.drafters.none import NoDrafter
from eagle.drafters.several import FirstOf
from eagle.formats.checkpoint import save_pretrained
from tests.batches import new_head
from tests.families import VOCAB_SIZE, build, own_answer

PROMPT = [5, 9, 11, 40]
MESSAGE = {"role": "user", "content": "Hello"}
TYPICAL = Sampling(1.0, typical=(0.09, 0.3))


@pytest.fixture(scope="module")
def target() -> Target:
    """Return a llama of random weights."""
    return Target(build("llama"))


# options of `generate` for one prompt, and a word of the sentence
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"min_p": 0.1}, r"pass sampling=Sampling\(min_p"),
    ({"nodes": 8}, r"pass budget=Budget\(nodes"),
    ({"max_tokens": 8}, "did you mean max_new_tokens"),
    ({"do_it": 8}, "no option do_it"),
    ({"batch_size": 2}, "expected several prompts"),
    ({"stop": [-1]}, "token id -1"),
    ({"stop": "x"}, "need a tokenizer"),
    (
        {
            "sampling": TYPICAL,
            "budget": Goodput([0, 1], [1, 1]),
        },
        r"Sampling\.typical is lossy",
    ),
    (
        {
            "sampling": TYPICAL,
            "budget": Budget.fixed(((0,),), "sampled"),
        },
        r"draw='likeliest'",
    ),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
@pytest.mark.parametrize("call", [generate, stream])
def test_wrong_options_are_refused(
    call: Callable[..., Any],
    options: dict[str, Any],
    message: str,
    target: Target,
) -> None:
    """At the call, and also by `stream` before the first token."""
    with pytest.raises(ValueError, match=message):
        call(target, NoDrafter(), PROMPT, **options)


# what is passed for a prompt, options, and a word of the sentence
PROMPTS: list[tuple[Any, dict[str, Any], str]] = [
    # this target has no tokenizer
    ("Hello", {}, "no chat template"),
    ([MESSAGE], {}, "no chat template"),
    (MESSAGE, {}, "holds role, content"),
    (np.ones(3), {}, "which are whole"),
    ([PROMPT, [PROMPT] * 2], {}, "got 2 rows"),
    (
        torch.ones(2, 2, 3, dtype=int),
        {},
        "one prompt at a time",
    ),
    (
        {
            "input_ids": [PROMPT] * 2,
            "attention_mask": [[1] * 4],
        },
        {},
        r"rows of \[4\] tokens",
    ),
    (
        {
            "input_ids": [PROMPT],
            "attention_mask": [[0, 1, 1, 1]],
        },
        {},
        "hides padding",
    ),
    ([1, VOCAB_SIZE], {}, r"\[96\] are outside the vocabulary"),
    (
        [PROMPT] * 2,
        {"sampling": [Sampling()] * 3},
        "3 values for 2 prompts",
    ),
    (
        [PROMPT] * 2,
        {"trace": Trace([])},
        "expected a list of 2",
    ),
    (
        [PROMPT] * 2,
        {"trace": [Trace([])] * 2},
        "one trace is given for several",
    ),
]


@pytest.mark.parametrize(("prompt", "options", "message"), PROMPTS)
def test_wrong_prompts_are_refused(
    prompt: Any,
    options: dict[str, Any],
    message: str,
    target: Target,
) -> None:
    """And lists of options that do not fit the prompts."""
    with pytest.raises(ValueError, match=message):
        generate(target, NoDrafter(), prompt, **options)


CALLS: list[tuple[Callable[[Target], Any], str]] = [
    (lambda target: generate(target, "ngrem", PROMPT), "did you mean ngram"),
    (lambda target: generate(target, NgramDrafter, PROMPT), "the class NgramDrafter"),
    (
        lambda target: generate(target.model, NoDrafter(), PROMPT),
        r"pass Target\(model",
    ),
    (
        lambda target: generate("runs/tiny", NoDrafter(), PROMPT),
        r"Target\.load",
    ),
    (
        lambda target: generate(NoDrafter(), target, PROMPT),
        r"call generate\(target",
    ),
    (
        lambda target: Goodput.measure(NoDrafter(), target, PROMPT),
        "where the target belongs",
    ),
    (
        lambda target: Goodput.measure(target, "ngram", PROMPT),
        "expected a Drafter",
    ),
    (lambda target: load_drafter([], target), "got .* for a drafter"),
    (lambda target: load_drafter("suffix,", target), "got 'suffix,' for a drafter"),
    (lambda target: load_drafter("ngarm", target), "did you mean ngram"),
    (
        lambda target: load_drafter("suffix", target, remembr=1),
        "did you mean remember",
    ),
    (
        lambda target: load_drafter("none,ngram", target, remember=1),
        "no option remember",
    ),
    (
        lambda target: load_drafter("a/b", target, longest=1),
        "options belong to none",
    ),
    (lambda target: load_drafter(target, "ngram"), r"load_drafter\(name, target"),
    (
        lambda target: Target.load("x", device="cuda:99"),
        "device is .cuda:99.",
    ),
    (
        lambda target: beam_search(
            target,
            NoDrafter(),
            PROMPT,
            length_penalty=1000.0,
        ),
        "length_penalty is 1000",
    ),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_wrong_calls_are_refused(
    call: Callable[[Target], Any],
    message: str,
    target: Target,
) -> None:
    """The sentence names the call that was meant."""
    with pytest.raises(ValueError, match=message):
        call(target)


def test_what_belongs_to_another_answer_or_vocabulary_is_refused(target: Target) -> None:
    """A trace that was used before, and a tree wider than the vocabulary."""
    # a trace holds one answer
    trace = generate(target, NoDrafter(), PROMPT, max_new_tokens=2)
    with pytest.raises(ValueError, match="pass a new Trace"):
        generate(target, NoDrafter(), PROMPT, trace=trace)
    wide = Budget.fixed(((VOCAB_SIZE,),))
    with pytest.raises(ValueError, match="child of rank 96"):
        generate(target, new_head("eagle1", target), PROMPT, budget=wide)


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(PROMPT),
        [np.int64(token) for token in PROMPT],
        np.array([PROMPT]),
        torch.tensor(PROMPT),
        torch.tensor([PROMPT]),
        list(torch.tensor(PROMPT)),
        iter(PROMPT),
        {"input_ids": PROMPT},
        BatchEncoding(
            {
                "input_ids": torch.tensor([PROMPT]),
                "attention_mask": torch.tensor([[1] * 4]),
            }
        ),
        BatchEncoding({"input_ids": [PROMPT], "attention_mask": [[1] * 4]}),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_every_kind_of_token_ids_is_a_prompt(prompt: Any, target: Target) -> None:
    """Lists, tensors, arrays, and what tokenizers return."""
    trace = generate(
        target,
        NoDrafter(),
        prompt,
        max_new_tokens=np.int64(3),
        stop=[],
    )
    assert trace.prompt == PROMPT
    assert trace.tokens == own_answer(target.model, PROMPT, 3)


@pytest.mark.parametrize(
    "kind",
    [int, np.uint8, torch.tensor],
)
def test_every_kind_of_whole_number_stops(
    kind: Callable[[int], Any],
    target: Target,
) -> None:
    """In a list, by itself, and in a tensor or an array."""
    # the untouched model shows where the answer ends
    answer = own_answer(target.model, PROMPT, 8)
    # a token that the answer does not have before
    index = next(index for index in range(1, 8) if answer[index] not in answer[:index])
    number = answer[index]
    token = kind(number)
    for stop in ([token], token, (token, token), torch.tensor([number]), np.array([number])):
        trace = generate(
            target,
            NoDrafter(),
            PROMPT,
            stop=stop,
            max_new_tokens=8,
        )
        assert trace.tokens == answer[: index + 1]
        assert trace.finish == "stop"


@pytest.mark.parametrize(
    "kind",
    [np.int64, np.uint8],
)
def test_a_seed_may_be_numpys(
    kind: Callable[[int], Any],
    target: Target,
) -> None:
    """The noise is the same as of Python's own number."""

    # numpy's numbers overflow where Python's grow
    def answer(seed: Any) -> list[int]:
        sampling = Sampling(1.0, seed=seed, request=seed)
        return generate(
            target,
            NoDrafter(),
            PROMPT,
            sampling=sampling,
            max_new_tokens=8,
        ).tokens

    assert answer(kind(3)) == answer(3)


@pytest.mark.parametrize(
    "name",
    ["suffix,ngram", " suffix , ngram", ["suffix", "ngram"]],
)
def test_options_go_to_the_drafters_that_have_them(name: Any, target: Target) -> None:
    """Of several drafters, with or without blanks between their names."""
    several = load_drafter(name, target, remember=4000, pick="frequent")
    assert isinstance(several, FirstOf)
    # the order of the names is that of the drafters
    suffix, ngram = several.drafters
    assert isinstance(suffix, SuffixDrafter)
    assert isinstance(ngram, NgramDrafter)
    assert suffix.remember == 4000
    assert ngram.pick == "frequent"


def test_a_head_on_another_vocabulary_is_refused(target: Target, tmp_path: Path) -> None:
    """When it is loaded, and when it is bound to one target and drafts for another."""
    head = new_head("eagle1", target)
    save_pretrained(head, tmp_path)
    # an embedding that was padded, as many are
    larger = build("llama")
    larger.resize_token_embeddings(VOCAB_SIZE + 8)
    other = Target(larger)
    with pytest.raises(ValueError, match="made for a target of width 32 and 96 tokens"):
        load_drafter(tmp_path, other)
    with pytest.raises(ValueError, match="bound to a target of 96 tokens"):
        generate(other, head, PROMPT)


def test_a_method_that_cannot_begin_a_sequence_says_what_is_missing() -> None:
    class Unwritten(Drafter):
        pass

    class Reader(Drafter):
        reads = Reads(kv_cache=True)

    with pytest.raises(NotImplementedError, match=r"^Unwritten cannot draft: write begin or open$"):
        Unwritten().begin()
    with pytest.raises(
        NotImplementedError,
        match=r"^Reader cannot draft without the target's sequences: call open_with$",
    ):
        Reader().begin()
