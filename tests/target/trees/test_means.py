"""Lossless in every read mode: each answer is the untouched model's own, alone and in any batch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from eagle import Target, beam_search, load_drafter
from eagle.core.trace import Cycle
from eagle.drafters import DRAFTERS as METHODS
from eagle.drafters import settings_of
from eagle.drafters.draft_model import DraftModel, DraftModelSettings
from eagle.drafters.parts.decoder_block import head_shape
from eagle.drafters.self_speculation.lookahead import LookaheadDrafter
from eagle.target import reader, state
from eagle.target.state import TargetState
from eagle.target.structure import base_of, decoder_layers
from tests.batches import MAKE, Bench, Request, new_head, own_model
from tests.every_type import LAYERS, SPECIAL, VOCAB, build
from tests.families import RandomTrees, random_tokens
from tests.own_answers import Logits, answer_naively, cached_steps, search_naively, whole_texts
from tests.target.trees.test_masks import COUNTING, build_small

# one of each mechanism: a table by position, offsets, mixers by paths and by levels, steps that differ from the
# forward over a sequence, and attention by the order of columns. tests/target/test_every_type.py tries all types.
TYPES = ["bloom", "llama4_text", "qwen3_5_text", "jamba", "nemotron_h", "gpt_neo"]
CHANGED: dict[str, dict[str, Any]] = {
    **COUNTING,
    "bloom": {"n_layer": 4},
    # chunks as large as any sequence here
    "xlstm": {**SPECIAL["xlstm"], "max_inference_chunksize": 1024},
}
TEMPERATURES = [0.0, 0.7, 1.0]
# their layers cannot run one by one: they start from more than one state, or are read with the whole model
NO_VIEW = ["bloom", "gpt_neo"]


class Own(Bench):
    """A model of any type that nobody touches, a target made from its copy, and its naive answers."""

    def __init__(self, model_type: str, **values: Any) -> None:
        values = CHANGED.get(model_type, {}) | values
        self.model = build_small(model_type, **values) if values else build(model_type)
        self.target = Target(copy.deepcopy(self.model))
        self.target.reader.check(rows=2)

    def logits(self) -> Logits:
        """Return the truth: uncached forwards, or the model's own steps where these differ."""
        if self.target.reader.follows_steps:
            return cached_steps(self.model)
        return whole_texts(self.model)

    def ask(self, prompt: list[int], temperature: float, limit: int, number: int) -> Request:
        """Return a request with its naive answer."""
        request = Request(prompt, {"temperature": temperature}, limit, number)
        request.answer = answer_naively(
            self.logits(),
            prompt,
            limit,
            request.sampling,
        )
        return request

    def draw(
        self,
        count: int,
        seed: int,
        longest: int = 30,
        least: int = 3,
        most: int = 12,
    ) -> list[Request]:
        """Return random requests; some begin like the one before, as the next turn of a chat does."""
        dice = random.Random(seed)
        requests: list[Request] = []

        for number in range(count):
            prompt = random_tokens(dice.randint(1, longest), seed=dice.randrange(10**6))
            # as the next turn of a chat
            if number % 4 == 2:
                # its prompt, and perhaps the start of its answer
                previous = requests[-1]
                shared = [*previous.prompt, *previous.answer[: dice.randint(0, 3)]]
                prompt = [*shared, *prompt[:5]]
            elif number % 4 == 3:  # repeated, so that what n-grams draft is right now and then
                prompt = (prompt[: len(prompt) // 3 + 1] * 3)[: len(prompt)]
            temperature = TEMPERATURES[(seed + number) % 3]
            requests.append(self.ask(prompt, temperature, dice.randint(least, most), number))

        return requests


own = cache(Own)


def make_hybrid(target: Target, requests: list[Request]) -> DraftModel:
    """Return a tiny hybrid as draft model."""
    model = build("qwen3_5_text")
    return DraftModel(DraftModelSettings(), model.config, model).bind(target.head)


DRAFTERS: dict[str, Callable[[Target, list[Request]], Any]] = {
    **{kind: make for kind, make in MAKE.items() if "," not in kind},
    "random": lambda target, requests: RandomTrees([*range(VOCAB)], taps=(1,)),
    "lookahead": lambda target, requests: LookaheadDrafter(window=4, level=3, guesses=3),
    "hybrid": make_hybrid,
    "mtp": lambda target, requests: new_head("mtp", target),
    "spire": lambda target, requests: new_head("spire", target),
    "early_exit": lambda target, requests: load_drafter("early_exit", target),
}


def assert_own(
    bench: Own,
    kind: str,
    requests: list[Request],
    batch_size: int,
    dice: Any = None,
) -> list[Cycle]:
    """Check that all sequences of a batch are answered as the model itself does; return their cycles."""
    traces = bench.run(
        DRAFTERS[kind](bench.target, requests),
        requests,
        batch_size,
        dice,
    )
    assert [trace.tokens for trace in traces] == [request.answer for request in requests], kind
    return [cycle for trace in traces for cycle in trace.cycles]


@pytest.mark.quick("qwen3_5_text", "bloom")
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "jamba", "bloom"])
def test_a_ragged_batch_is_lossless(model_type: str) -> None:
    """By paths, by levels and with tables: sequences come and go, and trees are kept."""
    bench = own(model_type)
    requests = bench.draw(4, seed=1, most=8)
    cycles = assert_own(
        bench,
        "trees",
        requests,
        batch_size=3,
        dice=random.Random(0),
    )
    assert any(cycle.rows > 1 for cycle in cycles)
    assert any(cycle.accepted for cycle in cycles)


@pytest.mark.slow
@pytest.mark.not_long("llama4_text", "jamba")
@pytest.mark.parametrize("model_type", TYPES)
def test_every_drafter_is_lossless(model_type: str) -> None:
    """Ragged batches of 1 to 6 sequences, at once and coming in at random, at T = 0, 0.7 and 1."""
    bench = own(model_type)
    dice = random.Random(model_type)
    batches = [bench.draw(7, seed) for seed in range(3)]
    kinds = [kind for kind in DRAFTERS if kind != "early_exit" or model_type not in NO_VIEW]

    # sizes and batches rotate, so that each drafter meets several of them
    for number, (kind, at_once) in enumerate(product(kinds, (True, False))):
        for size in (1, 2 + number % 5):
            requests = batches[(number + size) % 3]
            assert_own(
                bench,
                kind,
                requests,
                batch_size=size,
                dice=None if at_once else dice,
            )


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_prompts_in_chunks_are_lossless(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of up to 60 tokens, read in pieces of up to 7 with padding where the read mode allows pieces."""
    bench = own(model_type)
    # shorter than the models' windows of 8, and no divisor of them
    monkeypatch.setattr(state, "PREFILL_CHUNK", 7)

    for seed, kind in enumerate(["trees", "eagle3", "hybrid"]):
        requests = bench.draw(5, seed + 10, longest=60, most=8)
        for size in (1, 3):
            bench.target.forget()
            assert_own(bench, kind, requests, size)


def continue_prompts(bench: Own, seed: int, most: int = 8) -> list[Request]:
    """Return a prompt, its next turn, the prompt again, and other tokens after all of it or after its start."""
    first = bench.draw(1, seed, longest=20, least=6, most=most)[0]
    tail = random_tokens(5, seed=seed + 1000)
    prompt = first.prompt + random_tokens(6, seed)
    prompts = [
        prompt,
        [*prompt, *tail],
        [*prompt, *tail, *first.answer],
        prompt,
        [*prompt, *tail[::-1]],
        [*prompt[:4], *tail],
    ]
    requests = []

    for number, each in enumerate(prompts):
        requests.append(bench.ask(each, TEMPERATURES[number % 3], 4 + number % 3, number))

    return requests


def answer_in_turn(bench: Own, kind: str, requests: list[Request]) -> tuple[bool, int]:
    """Tell whether prompts that follow each other are answered right, and how many tokens were not read again."""
    read: list[int] = []
    extend = TargetState.extend

    def count(self: TargetState, tokens: dict[int, list[int]]) -> Any:
        # a draft model has a state of its own
        if self.target is bench.target:
            read.extend(map(len, tokens.values()))
        return extend(self, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TargetState, "extend", count)
        drafter = DRAFTERS[kind](bench.target, requests)
        bench.target.forget()
        answers = [bench.run_alone(drafter, request).tokens for request in requests]
        bench.target.forget()

    reused = sum(len(request.prompt) for request in requests) - sum(read)
    return answers == [request.answer for request in requests], reused


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_shared_prefixes_are_lossless(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a prompt shares with the sequence before it is not read again, where states after it are held."""
    monkeypatch.setattr(reader, "STEP_TOKENS", 0)
    bench = own(model_type)

    for seed, kind in enumerate(["none", "random", "eagle1", "hybrid"]):
        is_right, reused = answer_in_turn(bench, kind, continue_prompts(bench, seed))
        assert is_right, kind
        assert reused > 0 or bench.target.reader.follows_steps


def assert_search(bench: Own, kind: str, prompt: list[int], beams: int, count: int) -> None:
    """Check a beam search against one that reads every beam from its prompt on."""
    # near ties may order beams either way, so that scores are compared too
    expected, scores = search_naively(bench.logits, prompt, beams, count)
    options: dict[str, Any] = {
        "beams": beams,
        "max_new_tokens": count,
        "stop": [],
    }
    options["num_return_sequences"] = beams
    found = beam_search(
        bench.target,
        DRAFTERS[kind](bench.target, []),
        prompt,
        **options,
    )

    assert found.near_ties or found.tokens == expected, kind
    assert torch.tensor(found.scores).allclose(torch.tensor(scores), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_beams_are_lossless(model_type: str) -> None:
    """Searches with 1 to 4 beams, with and without drafts."""
    for seed, kind in enumerate(["none", "ngram", "random", "eagle3", "draft_model", "hybrid"]):
        prompt = random_tokens(3 + 2 * seed, seed=seed)
        assert_search(
            own(model_type),
            kind,
            prompt,
            beams=1 + (seed + 2) % 4,
            count=5,
        )


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama4_text", "qwen3_5_text", "jamba"])
def test_layers_run_one_by_one(model_type: str) -> None:
    """What the first layers of a view give is the untouched model's, also where siblings' positions are counted."""
    bench = own(model_type)
    tokens = random_tokens(9, seed=1)
    hidden: list[torch.Tensor] = []
    handles = []

    for layer in decoder_layers(base_of(bench.model), LAYERS):
        # the untouched model tells what each layer is given
        handle = layer.register_forward_pre_hook(
            lambda _, args, kwargs: hidden.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        handles.append(handle)

    whole_texts(bench.model)(tokens)

    for handle in handles:
        handle.remove()

    view = bench.target.view()
    cache = view.new_cache()
    cache.set_write_offset([0], commits=True)
    view.read(hidden[0][:, :7], torch.arange(7)[None], None, cache, start=0, end=2)
    cache.length = 7
    # a tree of the last two tokens, with a wrong one between them
    ancestors = torch.tensor([[[True, False, False], [True, True, False], [True, False, True]]])
    nodes = hidden[0][:, [7, 0, 8]]
    positions = torch.tensor([[7, 8, 8]])
    found = view.read(nodes, positions, ancestors, cache, start=0, end=2)
    torch.testing.assert_close(
        found[:, [0, 2]],
        hidden[2][:, 7:],
        rtol=1e-3,
        atol=1e-4,
    )

    # what measures the time of a draft runs the same layers
    for drafter in (load_drafter("early_exit", bench.target), own_model(bench.target)):
        assert drafter.probe(7, 3, 2)().shape == (2, VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", NO_VIEW)
def test_layers_that_cannot_run_one_by_one_are_refused(model_type: str) -> None:
    """An early exit is refused when it is made."""
    with pytest.raises(ValueError, match="one by one"):
        load_drafter("early_exit", own(model_type).target)


def test_what_a_hybrid_cannot_serve_is_refused() -> None:
    """A choice of columns of a state, and blocks of another kind to start a head from."""
    target = own("qwen3_5_text").target

    with pytest.raises(ValueError, match="expected attention in all layers"):
        load_drafter("sparse_kv", target)

    settings = settings_of({"kind": "spire"}, "test")
    weights: Any = {"weights": target.tensor}

    with pytest.raises(ValueError, match="no Llama block"):
        METHODS["spire"].for_target(
            settings,
            target.config,
            target.head,
            **weights,
        )


@pytest.mark.parametrize("model_type", ["bloom", "mamba2", "rwkv", "gemma3n_text"])
def test_heads_have_sizes_that_their_target_does_not_name(model_type: str) -> None:
    """Heads of attention, an MLP and positions for targets without any; one width where each layer has its own."""
    config = AutoConfig.for_model(model_type)
    shape: Any = head_shape(config)
    assert shape.num_attention_heads * shape.head_dim == config.hidden_size
    assert shape.intermediate_size >= 2 * shape.hidden_size
    assert shape.max_position_embeddings >= 1024


# -- targets that read one sequence at a time: each row of a batch has a forward of its own ----------------------------


@pytest.mark.quick("roformer")
@pytest.mark.parametrize("model_type", ["llama4_text", "mpt", "roformer", "doge"])
def test_a_batch_reads_each_sequence_by_itself(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets, a table without a row for each sequence, the whole model and its steps, in batches and in a search."""
    bench = own(model_type)

    assert "one sequence at a time" in bench.target.describe()

    # the number of sequences of each forward
    counts: list[int] = []
    call = reader.TreeReader.__call__

    def count(self: reader.TreeReader, tokens: torch.Tensor, *args: Any) -> Any:
        if self is bench.target.reader:
            counts.append(len(tokens))
        return call(self, tokens, *args)

    monkeypatch.setattr(reader.TreeReader, "__call__", count)
    dice = random.Random(0)

    for seed, kind in enumerate(["trees", "eagle3", "draft_model", "ngram"]):
        requests = bench.draw(5, seed + 40)
        cycles = assert_own(
            bench,
            kind,
            requests,
            batch_size=3,
            dice=dice if seed % 2 else None,
        )
        assert any(cycle.rows > 1 for cycle in cycles)

    assert_search(bench, "ngram", random_tokens(9, seed=9), beams=3, count=4)

    assert set(counts) == {1}
