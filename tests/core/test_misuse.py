"""What users pass by mistake ends in a sentence: what it was, what is expected, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from eagle import Budget, Sampling, Target, Trace, beam_search, generate, load_drafter, stream
from eagle.decoding.goodput import Goodput
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.lookup.suffix import SuffixDrafter
from eagle.drafters.none import NoDrafter
from eagle.drafters.several import FirstOf
from eagle.formats.checkpoint import save_pretrained
from tests.families import VOCAB_SIZE, build, own_answer

PROMPT = [5, 9, 11, 40]
MESSAGES = [{"role": "user", "content": "Hello"}]
NONE = NoDrafter()


@pytest.fixture(scope="module")
def target() -> Target:
    """A llama of random weights."""
    return Target(build("llama"))


CALLS: dict[str, tuple[Callable[[Target], Any], str]] = {
    "temperature": (
        lambda t: generate(t, NONE, PROMPT, temperature=1),
        r"temperature: pass sampling=Sampling\(temp",
    ),
    "nodes": (
        lambda t: generate(t, NONE, PROMPT, nodes=8),
        r"no option nodes: pass budget=Budget\(nodes=\.\.\.\)",
    ),
    "max_tokens": (
        lambda t: generate(t, NONE, PROMPT, max_tokens=8),
        r"max_tokens; did you mean max_new_tokens\?",
    ),
    "stream": (
        lambda t: stream(t, NONE, PROMPT, budgets=8),
        r"budgets; did you mean budget\?: expected some of batch_size, budget",
    ),
    "odd": (
        lambda t: generate(t, NONE, PROMPT, do_it=8),
        r"no option do_it: expected some of batch_size, budget",
    ),
    "text": (
        lambda t: generate(t, NONE, "Hello"),
        r"the prompt is text, expected token ids: use target\.chat",
    ),
    "messages": (
        lambda t: generate(t, NONE, MESSAGES),
        r"a list of messages, expected token ids: use target\.chat",
    ),
    "message": (
        lambda t: generate(t, NONE, MESSAGES[0]),
        r"holds role, content, expected input_ids.*target\.chat",
    ),
    "texts": (
        lambda t: generate(t, NONE, ["Hello"]),
        r"the prompt holds 'Hello', expected token ids",
    ),
    "floats": (
        lambda t: generate(t, NONE, np.ones(3)),
        r"the prompt holds 1\.0, expected token ids, which are whole",
    ),
    "none": (
        lambda t: generate(t, NONE, None),
        r"the prompt is None, expected token ids in a list",
    ),
    "rows": (
        lambda t: generate(t, NONE, [PROMPT, 3]),
        r"the prompt is 3, expected token ids in a list or a tensor",
    ),
    "an empty row": (
        lambda t: generate(t, NONE, [PROMPT, []]),
        r"the prompt is empty: expected at least one token",
    ),
    "nested": (
        lambda t: generate(t, NONE, [PROMPT, [PROMPT] * 2]),
        r"one prompt at a time: got 2 rows",
    ),
    "tensors": (
        lambda t: generate(t, NONE, torch.ones(2, 2, 3, dtype=int)),
        r"one prompt at a time.*\(2, 2, 3\)",
    ),
    "masks": (
        lambda t: generate(t, NONE, {"input_ids": [PROMPT] * 2, "attention_mask": [[1] * 4]}),
        r"attention_mask has rows of \[4\] tokens, expected \[4, 4\] as input_ids",
    ),
    "batch of one": (
        lambda t: generate(t, NONE, PROMPT, batch_size=2),
        r"batch_size is 2, expected several prompts",
    ),
    "batch size": (
        lambda t: generate(t, NONE, [PROMPT] * 2, batch_size=0),
        r"batch_size is 0, expected 1 or more",
    ),
    "cache": (
        lambda t: generate(t, NONE, PROMPT, max_tokens_in_cache=0.5),
        r"max_tokens_in_cache is 0\.5, expected a whole number",
    ),
    "samplings": (
        lambda t: generate(t, NONE, [PROMPT] * 2, sampling=[Sampling()] * 3),
        r"sampling holds 3 values for 2 prompts: expected one for all, or one for each",
    ),
    "limits": (
        lambda t: generate(t, NONE, [PROMPT] * 2, max_new_tokens=[1]),
        r"max_new_tokens holds 1 values for 2 prompts",
    ),
    "traces": (
        lambda t: stream(t, NONE, [PROMPT] * 2, trace=Trace([])),
        r"trace is of type Trace, expected a list of 2, one for each prompt",
    ),
    "padding": (
        lambda t: generate(t, NONE, {"input_ids": [PROMPT], "attention_mask": [[0, 1, 1, 1]]}),
        r"attention_mask hides padding",
    ),
    "empty": (
        lambda t: generate(t, NONE, []),
        r"the prompt is empty: expected at least one token id",
    ),
    "outside": (
        lambda t: generate(t, NONE, [1, VOCAB_SIZE]),
        r"token ids \[96\] are outside the vocabulary.*0\.\.95",
    ),
    "negative": (
        lambda t: generate(t, NONE, [1, -1]),
        r"token ids \[-1\] are outside the vocabulary",
    ),
    "budget": (
        lambda t: generate(t, NONE, PROMPT, budget=8),
        r"budget is 8, expected a Budget or a policy: as Budget",
    ),
    "sampling": (
        lambda t: generate(t, NONE, PROMPT, sampling=0.7),
        r"sampling is 0\.7, expected a Sampling",
    ),
    "name": (
        lambda t: generate(t, "ngram", PROMPT),
        r"the drafter is 'ngram', expected a Drafter: .*'ngram', target",
    ),
    "class": (
        lambda t: generate(t, NgramDrafter, PROMPT),
        r"the drafter is the class NgramDrafter",
    ),
    "no drafter": (lambda t: generate(t, None, PROMPT), r"the drafter is None, expected a Drafter"),
    "model": (
        lambda t: generate(t.model, NONE, PROMPT),
        r"type LlamaForCausalLM, expected a Target: pass Target\(model",
    ),
    "path": (
        lambda t: generate("runs/tiny", NONE, PROMPT),
        r"'runs/tiny', expected a Target: load one: Target\.load",
    ),
    "swapped": (
        lambda t: generate(NONE, t, PROMPT),
        r"drafter stands where the target belongs: call generate\(target",
    ),
    "4.0": (
        lambda t: generate(t, NONE, PROMPT, max_new_tokens=4.0),
        r"max_new_tokens is 4\.0, expected a whole number",
    ),
    "0": (
        lambda t: generate(t, NONE, PROMPT, max_new_tokens=0),
        r"max_new_tokens is 0, expected 1 or more",
    ),
    "stop float": (
        lambda t: generate(t, NONE, PROMPT, stop=[1.5]),
        r"stop holds 1\.5 of type float, expected token ids",
    ),
    "stop None": (
        lambda t: generate(t, NONE, PROMPT, stop=[3, None]),
        r"stop holds None of type NoneType",
    ),
    "stop empty": (
        lambda t: generate(t, NONE, PROMPT, stop=[""]),
        r"stop holds an empty string.*leave it out",
    ),
    "stop list": (
        lambda t: generate(t, NONE, PROMPT, stop=[[3]]),
        r"stop holds \[3\] of type list",
    ),
    "stop object": (
        lambda t: generate(t, NONE, PROMPT, stop=1.5),
        r"stop is 1\.5, expected token ids and strings",
    ),
    "stop id": (
        lambda t: generate(t, NONE, PROMPT, stop=[-1]),
        r"token id -1, which no answer has: expected 0\.\.95",
    ),
    "stop string": (
        lambda t: generate(t, NONE, PROMPT, stop="x"),
        r"stop strings \['x'\] need a tokenizer",
    ),
    "seed": (lambda t: Sampling(seed=1.5), r"Sampling\.seed is 1\.5, expected a whole number"),
    "request": (
        lambda t: Sampling(request="a"),
        r"Sampling\.request is 'a', expected a whole number",
    ),
    "warmth": (
        lambda t: Sampling(temperature="1"),
        r"Sampling\.temperature is '1', expected a number",
    ),
    "top_k": (lambda t: Sampling(top_k=5.0), r"Sampling\.top_k is 5\.0, expected a whole number"),
    "budget nodes": (
        lambda t: Budget(nodes=4.0),
        r"Budget\.nodes is 4\.0, expected a whole number",
    ),
    "budget paths": (
        lambda t: Budget.fixed(3),
        r"Budget\.paths is 3, expected the ranks on the way to every node",
    ),
    "no list": (
        lambda t: load_drafter([], t),
        r"got \[\] for a drafter, expected a folder, a hub id or one of none, ngram",
    ),
    "comma": (
        lambda t: load_drafter("suffix,", t),
        r"got 'suffix,' for a drafter, expected a folder",
    ),
    "number": (
        lambda t: load_drafter(3, t),
        r"got int for a drafter's name, expected a string, a path or a list",
    ),
    "near": (
        lambda t: load_drafter("ngarm", t),
        r"no drafter ngarm; did you mean ngram\?: expected a folder with",
    ),
    "option": (
        lambda t: load_drafter("suffix", t, remembr=1),
        r"no option remembr; did you mean remember\?",
    ),
    "options": (
        lambda t: load_drafter("none,ngram", t, remember=1),
        r"none, ngram has no option remember: expected",
    ),
    "no options": (
        lambda t: load_drafter("a/b", t, longest=1),
        r"a/b has no option longest.*options belong to none, ",
    ),
    "no target": (
        lambda t: load_drafter("ngram", "runs/tiny"),
        r"the target is a str, expected a Target",
    ),
    "turned": (
        lambda t: load_drafter(t, "ngram"),
        r"the target is a str, expected a Target: load_drafter\(name, target",
    ),
    "seconds": (
        lambda t: Goodput(0.1, 1.0),
        r"draft is 0\.1, expected a list of seconds of 0, 1, 2, \.\.\. levels",
    ),
    "levels": (lambda t: Goodput([0, 1], [1, 1], 8), r"budget is 8, expected a Budget"),
    "measured": (
        lambda t: Goodput.measure(NONE, t, PROMPT),
        r"the drafter stands where the target belongs",
    ),
    "shared trace": (
        lambda t: generate(t, NONE, [PROMPT] * 2, trace=[Trace([])] * 2),
        r"one trace is given for several prompts, expected one for each",
    ),
    "used trace": (
        lambda t: generate(t, NONE, PROMPT, trace=generate(t, NONE, PROMPT, max_new_tokens=2)),
        r"the trace records an answer of 2 tokens already: pass a new Trace\(\)",
    ),
    "lossy policy": (
        lambda t: stream(
            t,
            NONE,
            PROMPT,
            sampling=Sampling(1.0, typical=(0.09, 0.3)),
            budget=Goodput([0, 1], [1, 1]),
        ),
        r"the policy forecasts exact verification, and Sampling\.typical is lossy",
    ),
    "lossy and drawn": (
        lambda t: stream(
            t,
            NONE,
            PROMPT,
            sampling=Sampling(1.0, typical=(0.09, 0.3)),
            budget=Budget.fixed(((0,),), "sampled"),
        ),
        r"got sampled drafts, use Budget\(draw='likeliest'\)",
    ),
    "wide": (
        lambda t: generate(
            t, head_for(t).bind(t.head), PROMPT, budget=Budget.fixed(((VOCAB_SIZE,),))
        ),
        r"child of rank 96, and the drafter knows 96 tokens",
    ),
    "penalty": (
        lambda t: beam_search(t, NONE, PROMPT, length_penalty=1000.0),
        r"length_penalty is 1000, and 128 tokens",
    ),
    "device": (
        lambda t: Target.load("x", device="cuda:99"),
        r"device is .cuda:99., and torch .* of its kind",
    ),
    "chunked": (
        lambda t: Goodput.measure(t, "ngram", PROMPT),
        r"the drafter is 'ngram', expected a Drafter",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_refused_in_words(name: str, target: Target) -> None:
    """At the call, with a hint."""
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call(target)


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(PROMPT),
        [PROMPT],
        [np.int64(token) for token in PROMPT],
        np.array(PROMPT),
        np.array([PROMPT]),
        torch.tensor(PROMPT),
        torch.tensor([PROMPT]),
        list(torch.tensor(PROMPT)),
        iter(PROMPT),
        {"input_ids": PROMPT},
        BatchEncoding(
            {"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, 4)}.items()
        ),
        BatchEncoding({"input_ids": [PROMPT], "attention_mask": [[1, 1, 1, 1]]}),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_every_kind_of_token_ids_is_a_prompt(prompt: Any, target: Target) -> None:
    """Lists, tensors, arrays, and what tokenizers return."""
    if isinstance(prompt, BatchEncoding) and isinstance(prompt.get("attention_mask"), torch.Tensor):
        prompt["attention_mask"] = prompt["attention_mask"].long()
    trace = generate(target, NONE, prompt, max_new_tokens=np.int64(3), stop=[])
    assert trace.prompt == PROMPT and trace.tokens == own_answer(target.model, PROMPT, 3)


@pytest.mark.parametrize(
    "kind", [int, np.int64, np.uint8, torch.tensor], ids=["int", "int64", "uint8", "tensor"]
)
def test_every_kind_of_whole_number_stops(kind: Callable[[int], Any], target: Target) -> None:
    """In a list, by itself, and all of them in a tensor or an array."""
    answer = own_answer(target.model, PROMPT, 8)
    place = next(place for place in range(1, 8) if answer.index(answer[place]) == place)
    token = kind(answer[place])
    for stop in (
        [token],
        token,
        (token, token),
        torch.tensor([int(token)]),
        np.array([int(token)]),
    ):
        trace = generate(target, NONE, PROMPT, stop=stop, max_new_tokens=8)
        assert trace.tokens == answer[: place + 1] and trace.finish == "stop"


def test_a_seed_may_be_numpys(target: Target) -> None:
    """The same noise as of Python's own."""
    answers = [
        generate(
            target, NONE, PROMPT, sampling=Sampling(1.0, seed=seed, request=seed), max_new_tokens=8
        ).tokens
        for seed in (3, np.int64(3), np.uint8(3))
    ]
    assert answers[0] == answers[1] == answers[2]


def test_options_go_to_the_drafters_that_have_them(target: Target) -> None:
    """Of several, with or without blanks between their names."""
    for name in ("suffix,ngram", " suffix , ngram", ["suffix", "ngram"]):
        several = load_drafter(name, target, remember=4000, pick="frequent")
        assert isinstance(several, FirstOf)
        suffix, ngram = several.drafters
        assert isinstance(suffix, SuffixDrafter) and suffix.remember == 4000
        assert isinstance(ngram, NgramDrafter) and ngram.pick == "frequent"
    assert isinstance(load_drafter(" ngram ", target), NgramDrafter)


def head_for(target: Target) -> Any:
    """An untrained head."""
    return DRAFTERS["eagle1"].for_target(
        settings_of({"kind": "eagle1"}, "test"), target.config, target.head
    )


def test_a_torn_head_is_named(target: Target, tmp_path: Path) -> None:
    """Weights or config cut off anywhere: the error names the file."""
    save_pretrained(head_for(target), tmp_path / "head")
    load_drafter(tmp_path / "head", target)
    for name in ("model.safetensors", "config.json"):
        file = tmp_path / "head" / name
        whole = file.read_bytes()
        for length in (0, 5, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:length])
            with pytest.raises(
                ValueError, match=rf"head/{name} cannot be read: .* is it cut short"
            ):
                load_drafter(tmp_path / "head", target)
        file.write_bytes(whole)


def test_a_head_on_another_vocabulary_is_refused(target: Target, tmp_path: Path) -> None:
    """When it is loaded, and when it is bound to one target and drafts for another."""
    head = head_for(target).bind(target.head)
    save_pretrained(head, tmp_path / "head")
    larger = build("llama")
    larger.resize_token_embeddings(VOCAB_SIZE + 8)
    other = Target(larger)
    with pytest.raises(
        ValueError, match=r"made for a target of width 32 and 96 tokens, this one has 32 and 104"
    ):
        load_drafter(tmp_path / "head", other)
    with pytest.raises(
        ValueError, match=r"bound to a target of 96 tokens and width 32, this one has 104 and 32"
    ):
        generate(other, head, PROMPT)
