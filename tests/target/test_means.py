"""Lossless with targets read by every means: each answer is the untouched model's own, alone and in any batch."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from eagle import Target, beam_search, load_drafter
from eagle.drafters import DRAFTERS as DRAFTERS_BY_KIND
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
from tests.target.test_masks import build_small
from tests.target.test_positions import COUNTING

MASKS = ["deepseek_v32", "gemma3n_text"]
TABLED = ["bloom", "mpt"]
OFFSET = ["llama4_text", "inkling_text"]
PATHS = ["qwen3_5_text", "qwen3_next", "kimi_linear", "mamba2", "lfm3", "minimax", "falcon_h1"]
LEVELS = ["mamba", "jamba", "recurrent_gemma"]
STEPS = ["nemotron_h", "zamba2", "xlstm"]  # whose own steps differ from their forwards over texts
ROWS = ["gpt_neo", "deepseek_v4"]
WHOLE = ["rwkv"]
TYPES = [*MASKS, *TABLED, *OFFSET, *PATHS, *LEVELS, *STEPS, *ROWS, *WHOLE]
SOME = [
    "bloom",
    "llama4_text",
    "qwen3_5_text",
    "jamba",
    "nemotron_h",
    "gpt_neo",
]  # one of each mechanism
# all of them take a quarter of an hour
EVERY = [
    pytest.param(model_type, marks=() if model_type in SOME else pytest.mark.long)
    for model_type in TYPES
]
CHANGED: dict[str, dict[str, Any]] = {
    **COUNTING,
    "bloom": {"n_layer": 4},
    "xlstm": {**SPECIAL["xlstm"], "max_inference_chunksize": 1024},  # as large as any text here
}
TEMPERATURES = [0.0, 0.7, 1.0]
# whose layers cannot be run one by one: they start from more than one state, or are read with the whole model
NO_VIEW = [
    "gemma3n_text",
    "bloom",
    "recurrent_gemma",
    "zamba2",
    "xlstm",
    "gpt_neo",
    "deepseek_v4",
    "rwkv",
]
VIEWED = [model_type for model_type in TYPES if model_type not in NO_VIEW]


class Own(Bench):
    """A model of any type that nobody touches, a target made from its copy, and its naive answers."""

    def __init__(self, model_type: str, **values: Any) -> None:
        values = CHANGED.get(model_type, {}) | values
        self.model = build_small(model_type, **values) if values else build(model_type)
        self.target = Target(copy.deepcopy(self.model))
        self.target.reader.check(rows=2)

    def logits(self) -> Logits:
        """The truth: uncached forwards, or where the model's own steps differ from them, these."""
        return (cached_steps if self.target.reader.follows_steps else whole_texts)(self.model)

    def draw(
        self, count: int, seed: int, longest: int = 30, least: int = 3, most: int = 12
    ) -> list[Request]:
        """Requests with their answers; some begin like the one before, as the next turn of a chat does."""
        dice, requests = random.Random(seed), list[Request]()
        for number in range(count):
            prompt = random_tokens(dice.randint(1, longest), seed=dice.randrange(10**6))
            if number % 4 == 2:
                before = requests[-1]
                prompt = [*before.prompt, *before.answer[: dice.randint(0, 3)], *prompt[:5]]
            elif number % 4 == 3:  # what is copied from the text is right now and then
                prompt = (prompt[: len(prompt) // 3 + 1] * 3)[: len(prompt)]
            setting = {"temperature": TEMPERATURES[(seed + number) % 3]}
            request = Request(prompt, setting, dice.randint(least, most), number)
            request.answer = answer_naively(self.logits(), prompt, request.limit, request.sampling)
            requests.append(request)
        return requests


own = cache(Own)


def hybrid_model(target: Target, requests: list[Request]) -> DraftModel:
    """A tiny hybrid as draft model."""
    model = build("qwen3_5_text")
    return DraftModel(DraftModelSettings(), model.config, model).bind(target.head)


DRAFTERS: dict[str, Callable[[Target, list[Request]], Any]] = {
    **{kind: make for kind, make in MAKE.items() if "," not in kind},
    "random": lambda target, requests: RandomTrees([*range(VOCAB)], taps=(1,)),
    "lookahead": lambda target, requests: LookaheadDrafter(window=4, level=3, guesses=3),
    "hybrid": hybrid_model,
    "mtp": lambda target, requests: new_head("mtp", target),
    "spire": lambda target, requests: new_head("spire", target),
    "early_exit": lambda target, requests: load_drafter("early_exit", target),
}


def assert_own(
    bench: Own, kind: str, requests: list[Request], batch_size: int, dice: Any = None
) -> Counter[str]:
    """All rows of a batch answer as they must; how much was compared."""
    traces = bench.run(DRAFTERS[kind](bench.target, requests), requests, batch_size, dice)
    assert [trace.tokens for trace in traces] == [request.answer for request in requests], kind
    cycles = [cycle for trace in traces for cycle in trace.cycles]
    return Counter(
        texts=len(traces),
        tokens=sum(len(trace.tokens) for trace in traces),
        accepted=sum(cycle.accepted for cycle in cycles),
        shared=sum(cycle.rows > 1 for cycle in cycles),
    )


@pytest.mark.quick("bloom")
@pytest.mark.parametrize(
    "model_type", ["qwen3_5_text", pytest.param("jamba", marks=pytest.mark.slow), "bloom"]
)
def test_a_ragged_batch_is_lossless(model_type: str) -> None:
    """By paths, by levels and with tables: rows come and go, and trees are kept."""
    counts = assert_own(
        own(model_type), "trees", own(model_type).draw(4, seed=1, most=8), 3, random.Random(0)
    )
    assert counts["shared"] and counts["accepted"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name in SOME[1:4:2] else pytest.mark.long) for name in TYPES],
)
def test_every_drafter_is_lossless(model_type: str) -> None:
    """Ragged batches of 1 to 6 texts, at once and coming in at random, at T = 0, 0.7 and 1."""
    bench, total, dice = own(model_type), Counter[str](), random.Random(model_type)
    batches = [bench.draw(7, seed) for seed in range(3)]
    served = [kind for kind in DRAFTERS if kind != "early_exit" or model_type not in NO_VIEW]
    for number, (kind, at_once) in enumerate(product(served, (True, False))):
        for size in (1, 2 + number % 5):
            requests = batches[(number + size) % 3]
            total += assert_own(bench, kind, requests, size, None if at_once else dice)
    print(f"{model_type}: {dict(total)}")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", EVERY)
def test_prompts_in_chunks_are_lossless(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of up to 60 tokens, read in pieces of up to 7 with padding where the means allow pieces."""
    bench, total = own(model_type), Counter[str]()
    for seed, kind in enumerate(["trees", "eagle3", "hybrid"]):
        requests = bench.draw(5, seed + 10, longest=60, most=8)
        monkeypatch.setattr(state, "PREFILL_CHUNK", 7)
        for size in (1, 3):
            bench.target.forget()
            total += assert_own(bench, kind, requests, size)
        monkeypatch.undo()
    print(f"{model_type}: {dict(total)}")


def continue_prompts(bench: Own, seed: int, most: int = 8) -> list[Request]:
    """A prompt, its next turn, the prompt again, and with other tokens after all of it, some of it, or one token."""
    first = bench.draw(1, seed, longest=20, least=6, most=most)[0]
    tail = random_tokens(5, seed=seed + 1000)
    prompt, answer = first.prompt + random_tokens(6, seed), first.answer
    prompts = [
        prompt,
        [*prompt, *tail],
        [*prompt, *tail, *answer],
        prompt,
        [*prompt, *tail[::-1]],
        [*prompt[:4], *tail],
    ]
    requests = []
    for number, text in enumerate(prompts):
        request = Request(text, {"temperature": TEMPERATURES[number % 3]}, 4 + number % 3, number)
        request.answer = answer_naively(bench.logits(), text, request.limit, request.sampling)
        requests.append(request)
    return requests


def answer_in_turn(bench: Own, kind: str, requests: list[Request]) -> tuple[bool, int]:
    """Whether prompts that follow each other are answered right, and how many of their tokens were not read again."""
    with pytest.MonkeyPatch.context() as patch:
        read, extend = list[int](), TargetState.extend

        def count(self: TargetState, tokens: dict[int, list[int]]) -> Any:
            if self.target is bench.target:
                read.extend(map(len, tokens.values()))
            return extend(self, tokens)

        patch.setattr(TargetState, "extend", count)
        drafter = DRAFTERS[kind](bench.target, requests)
        bench.target.forget()
        answers = [bench.run_alone(drafter, request).tokens for request in requests]
        bench.target.forget()
    reused = sum(len(request.prompt) for request in requests) - sum(read)
    return answers == [request.answer for request in requests], reused


@pytest.mark.slow
@pytest.mark.parametrize("model_type", EVERY)
def test_shared_prefixes_are_lossless(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a prompt shares with the text before it is not read again, where states behind it are held."""
    monkeypatch.setattr(reader, "STEP_TOKENS", 0)
    bench, total = own(model_type), Counter[str]()
    for seed, kind in enumerate(["none", "random", "eagle1", "hybrid"]):
        requests = continue_prompts(bench, seed)
        right, reused = answer_in_turn(bench, kind, requests)
        assert right, kind
        assert reused > 0 or bench.target.reader.follows_steps
        total += Counter(
            texts=len(requests), tokens=sum(request.limit for request in requests), reused=reused
        )
    print(f"{model_type}: {dict(total)}")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", EVERY)
def test_beams_are_lossless(model_type: str) -> None:
    """The answers and scores of a search that reads every beam from its prompt on."""
    bench, total = own(model_type), Counter[str]()
    for seed, kind in enumerate(
        ["none", "ngram", "random", "eagle1", "eagle3", "draft_model", "hybrid"]
    ):
        prompt, beams, count = random_tokens(3 + 2 * seed, seed=seed), 1 + (seed + 2) % 4, 5
        expected, scores = search_naively(bench.logits, prompt, beams, count)
        drafter = DRAFTERS[kind](bench.target, [])
        options: dict[str, Any] = {
            "max_new_tokens": count,
            "stop": [],
            "num_return_sequences": beams,
        }
        found = beam_search(bench.target, drafter, prompt, beams=beams, **options)
        assert found.near_ties or found.tokens == expected, kind
        assert torch.tensor(found.scores).allclose(torch.tensor(scores), atol=1e-4)
        total += Counter(searches=1, beams=beams, tokens=beams * count, ties=found.near_ties > 0)
    print(f"{model_type}: {dict(total)}")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", VIEWED)
def test_layers_run_one_by_one(model_type: str) -> None:
    """What the first layers of a view leave is the untouched model's, also where siblings' positions are counted."""
    bench, tokens = own(model_type), torch.tensor(random_tokens(9, seed=1))
    view, layers, states = (
        bench.target.view(),
        decoder_layers(base_of(bench.model), LAYERS),
        list[torch.Tensor](),
    )
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: states.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
    try:
        whole_texts(bench.model)(tokens.tolist())
    finally:
        for layer in layers:
            layer._forward_pre_hooks.clear()
    cache = view.new_cache()
    cache.set_write_offset([0], commits=True)
    view.read(states[0][:, :7], torch.arange(7)[None], None, cache, 0, 2)
    cache.length = 7
    seen = torch.tensor([[[True, False, False], [True, True, False], [True, False, True]]])
    nodes = states[0][:, [7, 0, 8]]  # the last token, and a wrong one before it
    found = view.read(nodes, torch.tensor([[7, 8, 8]]), seen, cache, 0, 2)
    torch.testing.assert_close(found[:, [0, 2]], states[2][:, 7:], rtol=1e-3, atol=1e-4)
    probe = load_drafter("early_exit", bench.target).probe(7, 3, 2)
    for timed in (probe, own_model(bench.target).probe(7, 3, 2)):
        assert timed().shape == timed().shape == (2, VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", NO_VIEW)
def test_layers_that_cannot_run_one_by_one_are_refused(model_type: str) -> None:
    """In words, when an early exit is made."""
    with pytest.raises(ValueError, match="one by one"):
        load_drafter("early_exit", own(model_type).target)


def test_what_a_hybrid_cannot_serve_is_refused() -> None:
    """A choice of columns of a state, and blocks of another kind to start a head from."""
    target = own("qwen3_5_text").target
    with pytest.raises(ValueError, match=r"keep a state.*expected attention in all layers"):
        load_drafter("sparse_kv", target)
    settings = settings_of({"kind": "spire"}, "test")
    with pytest.raises(
        ValueError, match=r"qwen3_5_text has .*which no Llama block has|has no Llama blocks"
    ):
        DRAFTERS_BY_KIND["spire"].for_target(
            settings, target.config, target.head, weights=target.tensor
        )


@pytest.mark.parametrize("model_type", ["bloom", "mamba2", "rwkv", "gemma3n_text"])
def test_heads_have_sizes_that_their_target_does_not_name(model_type: str) -> None:
    """Heads of attention, an MLP and positions for targets without any; one width where each layer has its own."""
    shape: Any = head_shape(AutoConfig.for_model(model_type))
    assert (
        shape.num_attention_heads * shape.head_dim == AutoConfig.for_model(model_type).hidden_size
    )
    assert (
        shape.intermediate_size >= 2 * shape.hidden_size and shape.max_position_embeddings >= 1024
    )
