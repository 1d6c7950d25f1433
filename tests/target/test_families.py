"""Whatever a drafter proposes, the output is what the untouched model says by itself: family by family."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle import Sampling, Target, Trace, generate
from eagle.core.drafter import Drafter
from eagle.core.tree import DraftTree
from eagle.core.verify import Choose
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.target.cache import TreeCache
from tests.families import (
    FAMILIES,
    NUM_LAYERS,
    OTHER_MEANS,
    VOCAB_SIZE,
    PlantedTrees,
    RandomTrees,
    build,
    own_answer,
    random_tokens,
)

COUNT = 64
FIRST = random_tokens(17, seed=1)
PROMPTS = [FIRST, FIRST[:11] + random_tokens(12, seed=2)]  # the second finds its start in the cache
DRAFTERS = {
    "random": lambda prompt, answer: RandomTrees(answer),
    "planted": lambda prompt, answer: PlantedTrees(prompt + answer),
    "ngram": lambda prompt, answer: NgramDrafter(),
}
WARPERS = {  # in the order in which transformers applies them
    "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}
SETTINGS: list[dict[str, Any]] = [{"repetition_penalty": 1.3}] + [
    {"repetition_penalty": 1.3, "temperature": temperature}
    if how is None
    else {"temperature": temperature, **how}
    for temperature in (0.5, 1.0)
    for how in ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, None)
]


@cache
def gumbel(position: int) -> Tensor:
    """[V], the test's own noise for the token at this position."""
    generator = torch.Generator().manual_seed(position)
    return -torch.empty(VOCAB_SIZE).exponential_(generator=generator).log()


class HandedIn:
    """The test's noise where the decoder looks for its own."""

    def __init__(self, seed: int, request: int) -> None:
        pass

    def __call__(self, positions: list[int], vocab_size: int, device: torch.device) -> Tensor:
        return torch.stack([gumbel(position) for position in positions])

    def forget(self, position: int) -> None:
        """Nothing is held."""


@dataclass
class Family:
    """A model nobody touches, a target made from its copy, and the answers of the first."""

    model: PreTrainedModel
    target: Target
    answers: dict[str, list[list[int]]] = field(default_factory=dict)

    def own(self, setting: dict[str, Any]) -> list[list[int]]:
        """What the untouched model says to each prompt, computed once."""
        warp = LogitsProcessorList([WARPERS[name](value) for name, value in setting.items()])
        noise = gumbel if "temperature" in setting else None
        if (key := str(setting)) not in self.answers:
            self.answers[key] = [
                own_answer(self.model, prompt, COUNT, warp, noise) for prompt in PROMPTS
            ]
        return self.answers[key]

    def drafted(self, drafter: str, setting: dict[str, Any]) -> list[Trace]:
        """What the target says to one prompt right after the other, with drafts."""
        drafters = [
            DRAFTERS[drafter](*pair) for pair in zip(PROMPTS, self.own(setting), strict=True)
        ]
        options: dict[str, Any] = {
            "sampling": Sampling(**setting),
            "max_new_tokens": COUNT,
            "stop": [],
        }
        return [
            generate(self.target, *pair, **options) for pair in zip(drafters, PROMPTS, strict=True)
        ]


def make(name: str, dtype: torch.dtype = torch.float32) -> Family:
    """The family, its target on a copy of the model."""
    model = build(name, dtype)
    return Family(model, Target(copy.deepcopy(model)))


family = cache(make)


def assert_lossless(family: Family, drafter: str, setting: dict[str, Any]) -> None:
    """Both answers equal the untouched model's, and drafts took part in them."""
    traces = family.drafted(drafter, setting)
    assert [trace.tokens for trace in traces] == family.own(setting)
    accepted = sum(cycle.accepted for trace in traces for cycle in trace.cycles)
    assert accepted > 0 or drafter == "ngram"
    assert drafter != "planted" or min(trace.acceptance_length for trace in traces) > 3


def greedy_cases() -> list[Any]:
    """Every family with every drafter; lookup, which a right answer may leave idle, for one family of five is fast."""
    cases = []
    for (i, name), drafter in product(enumerate(FAMILIES), DRAFTERS):
        slow = drafter == "ngram" and i % 5 > 0
        cases.append(
            pytest.param(
                name, drafter, marks=pytest.mark.slow if slow else (), id=f"{name}-{drafter}"
            )
        )
    return cases


@pytest.mark.quick("*-planted", "llama-random", "deepseek_v3-random", "gemma3-random")
@pytest.mark.parametrize(("name", "drafter"), greedy_cases())
def test_greedy_output_is_the_untouched_models(name: str, drafter: str) -> None:
    """At T = 0 drafts change nothing, be they random, right or copied, and the answer is not a constant."""
    assert_lossless(family(name), drafter, {})
    assert min(len(set(answer)) for answer in family(name).own({})) > 3


def grid() -> list[Any]:
    """Every family with every setting and drafter, of which all is long.

    One of both per family, in turns, is fast. Every second setting with one drafter, in turns, is slow: so a setting
    meets every second family, and every drafter.
    """
    cases = []
    for (i, name), (j, setting), (k, drafter) in product(
        enumerate(FAMILIES), enumerate(SETTINGS), enumerate(DRAFTERS)
    ):
        fast = j == (2 * i + k) % len(SETTINGS) and k == i % 2 and drafter != "ngram"
        marks = [] if fast else [pytest.mark.slow]
        is_chosen = k == (i + j) % len(DRAFTERS) and (i + j) % 2 == 0
        marks += [] if fast or is_chosen else [pytest.mark.long]
        label = "-".join([name, drafter, *(f"{key}={value}" for key, value in setting.items())])
        cases.append(pytest.param(name, drafter, setting, marks=marks, id=label))
    return cases


@pytest.mark.quick(
    "llama-rope-llama3-planted-temperature=0.5-min_p=0.05",
    "llama-tied-planted-temperature=1.0-min_p=0.05",
    "mixtral-planted-temperature=1.0-top_p=0.9",
    "gpt2-planted-temperature=0.5-min_p=0.05",
    "starcoder2-planted-temperature=0.5-top_p=0.9",
)
@pytest.mark.parametrize(("name", "drafter", "setting"), grid())
def test_sampled_output_is_the_untouched_models(
    name: str, drafter: str, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same noise added to transformers' own warped logits, sampling gives the same tokens too."""
    monkeypatch.setattr("eagle.core.verify.Noise", HandedIn)
    assert_lossless(family(name), drafter, setting)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma2", "gpt2"])
def test_double_precision_is_lossless_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models in fp64 are decoded in fp64."""
    monkeypatch.setattr("eagle.core.verify.Noise", HandedIn)
    double = make(name, torch.float64)
    for setting in ({}, {"temperature": 1.0, "top_p": 0.9}):
        assert_lossless(double, "planted", setting)
    assert double.target.features(torch.tensor([PROMPTS[0]]), (-1,)).dtype == torch.float64


@dataclass
class Recorded(Drafter):
    """A drafter that reads taps and keeps what it was told."""

    drafter: Any
    taps: tuple[int, ...]

    def begin(self, noise: Any = None) -> Any:
        """A new sequence."""
        self.features: list[Tensor] = []
        self.drafter.begin(noise)
        return self

    def propose(self, update: Any, budget: Any) -> DraftTree:
        """Whatever the drafter says."""
        self.features.append(update.features)
        return self.drafter.propose(update, budget)


@pytest.mark.parametrize("name", FAMILIES)
def test_taps_are_the_models_hidden_states(name: str) -> None:
    """Tap i is layer i's input and -1 the LM head's, read at once or gathered over a whole generation."""
    model, target, taps = family(name).model, family(name).target, (0, 1, NUM_LAYERS - 1, -1)
    for prompt, answer in zip(PROMPTS, family(name).own({}), strict=True):
        recorded = Recorded(PlantedTrees(prompt + answer), taps)
        tokens = generate(target, recorded, prompt, max_new_tokens=COUNT, stop=[]).tokens
        features = torch.cat(recorded.features)
        text = torch.tensor([prompt + tokens])
        with torch.no_grad():
            states = model(input_ids=text, use_cache=False, output_hidden_states=True).hidden_states
        expected = torch.stack([states[tap] for tap in taps], dim=2)
        assert_close(target.features(text, taps), expected)
        assert len(features) > len(prompt) + COUNT - 5  # all but the last cycle's
        assert_close(features, expected[0, : len(features)])


@pytest.mark.quick("bloom")
@pytest.mark.parametrize("name", OTHER_MEANS)
def test_other_means_than_masks_leave_taps_and_answers_as_they_are(name: str) -> None:
    """State from token to token, or positions that cannot be given: trees are read all the same."""
    served, taps = make(name), (0, 1, NUM_LAYERS - 1, -1)
    text = torch.tensor([PROMPTS[0], PROMPTS[1][: len(PROMPTS[0])]])
    with torch.no_grad():
        states = served.model(
            input_ids=text, use_cache=False, output_hidden_states=True
        ).hidden_states
        if name == "mamba":  # its hidden states leave out the first layer's input
            states = (served.model.get_input_embeddings()(text), *states)
    expected = torch.stack([states[tap] for tap in taps], dim=2)
    assert_close(served.target.features(text, taps), expected)
    answer = own_answer(served.model, PROMPTS[0], 16)
    drafter = PlantedTrees(PROMPTS[0] + answer)
    assert generate(served.target, drafter, PROMPTS[0], max_new_tokens=16, stop=[]).tokens == answer


def test_a_model_that_keeps_nothing_is_refused_but_tapped() -> None:
    """Without a cache every cycle would read the whole text."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "openai-gpt", vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=2, n_positions=64
    )
    target = Target(AutoModelForCausalLM.from_config(config))
    assert target.features(torch.tensor(PROMPTS[:1]), (0, -1)).shape == (1, len(FIRST), 2, 32)
    with pytest.raises(
        ValueError, match=r"cannot read a tree: it keeps nothing between its forwards\. Taps"
    ):
        generate(target, NgramDrafter(), PROMPTS[0], max_new_tokens=8)


def test_attention_without_tree_masks_is_refused() -> None:
    """Kernels that know causal masks alone would be wrong without a word."""
    flash = make("llama").target
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        ValueError, match=r"attends by flash_attention_2, .* load it with 'sdpa' or 'eager'"
    ):
        flash.open().begin(PROMPTS[0], Choose(Sampling()))


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Equal up to 1e-4 of the expected norm, tap by tap (the last dimension but one)."""
    assert got.shape == expected.shape
    for tap in range(got.shape[-2]):
        difference = (got[..., tap, :] - expected[..., tap, :]).norm() / expected[
            ..., tap, :
        ].norm()
        assert difference < 1e-4, f"tap number {tap} is {difference:.1e} away"


@pytest.mark.quick("llama", "llama-rope-llama3", "mixtral", "gemma3", "gpt2", "falcon")
@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_is_left_as_it_was(name: str) -> None:
    """After decoding, the model attends as before and its logits are the untouched model's bit for bit."""
    family(name).drafted("planted", {})
    model, copied = family(name).model, family(name).target.model
    assert copied.config._attn_implementation == model.config._attn_implementation
    text = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        assert torch.equal(copied(input_ids=text).logits, model(input_ids=text).logits)


def test_every_tap_that_is_none_is_refused() -> None:
    """Tap L could mean two things; what lies outside means nothing."""
    for tap in (NUM_LAYERS, -2):
        with pytest.raises(
            ValueError,
            match=rf"taps \[{tap}\] are no layer inputs.*expected 0..{NUM_LAYERS - 1}, or -1",
        ):
            family("llama").target.features(torch.tensor(PROMPTS[:1]), (0, tap))


def ignored_window(target: Target, patch: pytest.MonkeyPatch) -> None:
    """Every key is seen, however far."""
    patch.setattr(target.masks, "windows", dict.fromkeys(target.masks.windows))


def nodes_as_positions(target: Target, patch: pytest.MonkeyPatch) -> None:
    """Siblings stand behind each other."""
    patch.setattr(DraftTree, "depths", lambda tree: list(range(len(tree))))


def siblings_seen(target: Target, patch: pytest.MonkeyPatch) -> None:
    """Every node sees all nodes before it."""
    patch.setattr(
        DraftTree,
        "ancestors",
        lambda tree: torch.ones(len(tree), len(tree), dtype=torch.bool).tril(),
    )


def rejected_nodes_kept(target: Target, patch: pytest.MonkeyPatch) -> None:
    """The first rows stay in the cache, whichever were accepted."""
    keep = TreeCache.keep

    def wrong(cache: TreeCache, paths: Any, *counts: Any) -> None:
        keep(cache, {row: range(len(paths[row])) for row in paths}, *counts)

    patch.setattr(TreeCache, "keep", wrong)


@pytest.mark.quick("rejected_nodes_kept-mistral-sliding")
@pytest.mark.parametrize("name", ["mistral-sliding", "gemma3"])
@pytest.mark.parametrize(
    "fault", [ignored_window, nodes_as_positions, siblings_seen, rejected_nodes_kept]
)
def test_a_planted_fault_is_seen(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails where the decoder is broken on purpose."""
    broken = make(name)
    assert_lossless(broken, "planted", {})
    fault(broken.target, monkeypatch)
    assert [trace.tokens for trace in broken.drafted("planted", {})] != broken.own({})
