"""Whatever a drafter proposes, the output is what the untouched model says by itself: family by family."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel

from eagle import Sampling, Target, Trace, generate
from eagle.core.drafter import Drafter
from eagle.core.tree import DraftTree
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.target.cache import TreeCache
from tests.batches import WARPERS
from tests.families import (
    FAMILIES,
    NUM_LAYERS,
    VOCAB_SIZE,
    PlantedTrees,
    RandomTrees,
    build,
    own_answer,
    random_tokens,
)
from tests.target.decoded import decode, is_close

COUNT = 64
FIRST = random_tokens(17, seed=1)
PROMPTS = [FIRST, FIRST[:11] + random_tokens(12, seed=2)]  # the second finds its start in the cache
TAPS = (0, 1, NUM_LAYERS - 1, -1)
DRAFTERS = {
    "random": lambda prompt, answer: RandomTrees(answer),
    "planted": lambda prompt, answer: PlantedTrees(prompt + answer),
    "ngram": lambda prompt, answer: NgramDrafter(),
}
SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1.3, "temperature": 0.5},
    {"temperature": 0.5, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
]


@cache
def gumbel(position: int) -> Tensor:
    """Return [V], the test's own noise for the token at this position."""
    generator = torch.Generator().manual_seed(position)
    return -torch.empty(VOCAB_SIZE).exponential_(generator=generator).log()


class HandedIn:
    """The test's noise, put where the decoder looks for its own."""

    def __init__(self, seed: int, request: int) -> None:
        pass

    def __call__(self, positions: list[int], vocab_size: int, device: torch.device) -> Tensor:
        return torch.stack([gumbel(position) for position in positions])

    def pick(self, scores: Tensor, position: int) -> int | None:
        """Return the token of the largest sum, by noise for every token."""
        noise = self([position], len(scores), scores.device)[0]
        return int((scores + noise).argmax())

    def forget(self, position: int) -> None:
        """Hold nothing."""


@dataclass
class Family:
    """A model nobody touches, a target made from its copy, and the answers of the first."""

    model: PreTrainedModel
    target: Target
    answers: dict[str, list[list[int]]] = field(default_factory=dict)

    def own(self, setting: dict[str, Any]) -> list[list[int]]:
        """Return what the untouched model says to each prompt, computed once."""
        key = str(setting)
        if key not in self.answers:
            warp = LogitsProcessorList([WARPERS[name](value) for name, value in setting.items()])
            noise = gumbel if "temperature" in setting else None
            answers = [
                own_answer(self.model, prompt, COUNT, warp=warp, noise=noise) for prompt in PROMPTS
            ]
            self.answers[key] = answers
        return self.answers[key]

    def decode(self, kind: str, setting: dict[str, Any]) -> list[Trace]:
        """Return what the target says to one prompt right after the other, with drafts."""
        traces = []

        for prompt, answer in zip(PROMPTS, self.own(setting), strict=True):
            drafter: Drafter = DRAFTERS[kind](prompt, answer)
            options: dict[str, Any] = {"max_new_tokens": COUNT, "stop": []}
            sampling = Sampling(**setting)
            # both prompts by one target, so that the second meets the first one's cache
            traces.append(generate(self.target, drafter, prompt, sampling=sampling, **options))

        return traces


def make(name: str, dtype: torch.dtype = torch.float32) -> Family:
    """Return the family with a target on a copy of its model."""
    model = build(name, dtype)
    return Family(model, Target(copy.deepcopy(model)))


family = cache(make)


def assert_lossless(family: Family, kind: str, setting: dict[str, Any]) -> None:
    """Check that both answers equal the untouched model's, and that drafts took part in them."""
    traces = family.decode(kind, setting)
    assert [trace.tokens for trace in traces] == family.own(setting)
    accepted = sum(cycle.accepted for trace in traces for cycle in trace.cycles)
    # else no draft was ever kept, and the comparison would be of plain decoding
    assert accepted > 0 or kind == "ngram"
    assert kind != "planted" or min(trace.acceptance_length for trace in traces) > 3


@pytest.mark.quick(
    "*-planted", "llama-random", "deepseek_v3-random", "gemma3-random", "llama-ngram"
)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_output_is_the_untouched_models(name: str, kind: str) -> None:
    """At T = 0 drafts change nothing, be they random, right or copied, and the answer is not a constant."""
    assert_lossless(family(name), kind, {})
    assert min(len(set(answer)) for answer in family(name).own({})) > 3


def sampled_cases() -> list[Any]:
    """Return each family with two settings and random or right trees, in turns: each setting meets 12 families."""
    # 60 cases over 5 settings
    settings = cycle(SETTINGS)
    cases = []

    for name, kind in product(FAMILIES, ("planted", "random")):
        setting = next(settings)
        label = "-".join([name, kind, *(f"{key}={value}" for key, value in setting.items())])
        cases.append(pytest.param(name, kind, setting, id=label))

    return cases


@pytest.mark.quick(
    "llama-planted-*",
    "mixtral-planted-*",
    "gpt2-planted-*",
    "qwen2-*",
)
@pytest.mark.parametrize(("name", "kind", "setting"), sampled_cases())
def test_sampled_output_is_the_untouched_models(
    name: str,
    kind: str,
    setting: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the same noise added to transformers' own warped logits, sampling gives the same tokens too."""
    monkeypatch.setattr("eagle.core.verify.Noise", HandedIn)
    assert_lossless(family(name), kind, setting)


@dataclass
class Recorded(Drafter):
    """A drafter that reads taps and keeps what it was told."""

    drafter: Any
    taps: tuple[int, ...] = TAPS

    def begin(self, noise: Any = None) -> Any:
        """Begin a new sequence."""
        self.features: list[Tensor] = []
        self.drafter.begin(noise)
        return self

    def propose(self, update: Any, budget: Any) -> DraftTree:
        """Return whatever the drafter says."""
        self.features.append(update.features)
        return self.drafter.propose(update, budget)


@torch.no_grad()
def read_hidden(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return [B, T, L, D], the untouched model's own hidden states at the taps."""
    output = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    return torch.stack([output.hidden_states[tap] for tap in TAPS], dim=2)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Compare features tap by tap, since a small tap would drown in a large one's norm."""
    for tap, (one, other) in enumerate(zip(got.unbind(-2), expected.unbind(-2), strict=True)):
        assert is_close(one, other, 1e-4), tap


@pytest.mark.parametrize("name", FAMILIES)
def test_taps_are_the_models_hidden_states(name: str) -> None:
    """Tap i is layer i's input and -1 the LM head's, read at once or gathered over a whole generation."""
    tested = family(name)

    for prompt, answer in zip(PROMPTS, tested.own({}), strict=True):
        recorded = Recorded(PlantedTrees(prompt + answer))
        tokens = torch.tensor([prompt + decode(tested.target, recorded, prompt, COUNT)])
        # what a drafter got while decoding, cycle by cycle
        features = torch.cat(recorded.features)
        expected = read_hidden(tested.model, tokens)
        assert_close(tested.target.features(tokens, TAPS), expected)
        # the drafter is told of all but the last cycle's tokens
        assert len(features) > len(prompt) + COUNT - 5
        assert_close(features, expected[0, : len(features)])


def test_a_model_that_keeps_nothing_is_refused_but_tapped() -> None:
    """Without a cache every cycle would read the whole sequence."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
    }
    config = AutoConfig.for_model("openai-gpt", **sizes)
    target = Target(AutoModelForCausalLM.from_config(config))

    assert target.features(torch.tensor([FIRST]), (0, -1)).shape == (1, len(FIRST), 2, 32)
    with pytest.raises(ValueError, match="keeps nothing between its forwards"):
        decode(target, NgramDrafter(), FIRST, 8)


def test_attention_without_tree_masks_is_refused() -> None:
    """Kernels that know causal masks alone would be wrong without a word."""
    flash = make("llama").target
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="load it with 'sdpa' or 'eager'"):
        decode(flash, NgramDrafter(), FIRST, 8)


@pytest.mark.quick(
    "llama",
    "llama-rope-llama3",
    "mixtral",
    "gemma3",
    "gpt2",
    "falcon",
)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_is_left_as_it_was(name: str) -> None:
    """After decoding, the model attends as before and its logits are the untouched model's bit for bit."""
    family(name).decode("planted", {})
    model = family(name).model
    decoded = family(name).target.model
    assert decoded.config._attn_implementation == model.config._attn_implementation

    tokens = torch.tensor([FIRST])

    with torch.no_grad():
        assert torch.equal(decoded(input_ids=tokens).logits, model(input_ids=tokens).logits)


@pytest.mark.parametrize("tap", [NUM_LAYERS, -2])
def test_every_tap_that_is_none_is_refused(tap: int) -> None:
    """Tap L could mean two things; what lies outside means nothing."""
    with pytest.raises(ValueError, match=rf"taps \[{tap}\] are no layer inputs"):
        family("llama").target.features(torch.tensor([FIRST]), (0, tap))


def ignore_window(target: Target, patch: pytest.MonkeyPatch) -> None:
    """Let every key be seen, however far."""
    # the tests' windows hold 8 tokens, fewer than any prompt
    patch.setattr(target.masks, "windows", dict.fromkeys(target.masks.windows))


def keep_rejected(target: Target, patch: pytest.MonkeyPatch) -> None:
    """Keep the first nodes in the cache, whichever were accepted."""
    keep = TreeCache.keep

    def keep_first(cache: TreeCache, paths: Any, *counts: Any) -> None:
        keep(cache, {row: range(len(paths[row])) for row in paths}, *counts)

    patch.setattr(TreeCache, "keep", keep_first)


@pytest.mark.quick("keep_rejected")
@pytest.mark.parametrize("fault", [ignore_window, keep_rejected])
def test_a_planted_fault_is_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of this file fails where the decoder is broken on purpose."""
    broken = make("mistral-sliding")
    assert_lossless(broken, "planted", {})
    fault(broken.target, monkeypatch)
    answers = [trace.tokens for trace in broken.decode("planted", {})]
    assert answers != broken.own({})
