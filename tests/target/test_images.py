"""Prompts with images: whatever is drafted, the answer is what the untouched model says by itself."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.nn.functional import pad
from transformers import LogitsProcessorList

from eagle import Budget, Sampling, Target, generate
from eagle.core.arguments import PromptTokens, prompt_rows, token_ids
from eagle.core.drafter import Drafter
from eagle.core.examples import Example, collate
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.draft_model import DraftModel, DraftModelSettings
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.target.reader import TreeReader
from eagle.target.slots import SlotCache
from eagle.target.state import TargetState
from eagle.target.structure import decoder_layers
from tests.families import PlantedTrees, RandomTrees
from tests.families import build as build_text
from tests.target.test_families import HandedIn, gumbel
from tests.vision_families import IMAGE, VISION_FAMILIES, ask, build

COUNT = 24
TREE = Budget(12, 4, 3)
HEADS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle1"},
    "eagle3": {"kind": "eagle3", "taps": [0, 1, 3]},
}


@cache
def family(name: str) -> tuple[Any, Target]:
    """A model that nobody touches, and a target on its copy."""
    model = build(name)
    return model, Target(copy.deepcopy(model))


@cache
def own(name: str, images: int, seed: int, *, drawn: bool) -> tuple[dict[str, Any], list[int]]:
    """A prompt, and what the untouched model says to it by its own `generate`."""
    model = family(name)[0]
    asked = ask(name, model, images, seed)
    noise = LogitsProcessorList(
        [lambda text, scores: scores + gumbel(text.shape[1])] if drawn else []
    )
    text = model.generate(
        **asked,
        max_new_tokens=COUNT,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=noise,
    )
    return asked, text[0, asked["input_ids"].shape[1] :].tolist()


def drafter_of(kind: str, target: Target, asked: dict[str, Any], answer: list[int]) -> Drafter:
    """A drafter by its name; heads are random."""
    text = asked["input_ids"][0].tolist() + answer
    if kind in HEADS:
        torch.manual_seed(1)
        settings = settings_of(HEADS[kind], "test")
        return (
            DRAFTERS[kind].for_target(settings, target.config, target.head).bind(target.head).eval()
        )
    if kind == "draft_model":
        model = build_text("llama")
        return DraftModel(DraftModelSettings(), model.config, model).bind(target.head)
    return {"random": RandomTrees(answer), "planted": PlantedTrees(text), "ngram": NgramDrafter()}[
        kind
    ]


def greedy_cases() -> list[Any]:
    """Every family with trees and with a head; three families stand for all in what the other drafters do."""
    cases = []
    for name in VISION_FAMILIES:
        for kind in ("random", "planted", "ngram", "eagle1", "eagle3", "draft_model"):
            is_fast = kind in ("planted", "eagle1") or name in ("llava", "gemma3", "qwen2_5_vl")
            cases.append(
                pytest.param(
                    name, kind, marks=[] if is_fast else [pytest.mark.slow, pytest.mark.long]
                )
            )
    return cases


@pytest.mark.quick("qwen2_5_vl-planted", "qwen2_5_vl-ngram", "gemma3-planted", "gemma3-ngram")
@pytest.mark.parametrize(("name", "kind"), greedy_cases())
def test_greedy_answers_are_the_untouched_models(name: str, kind: str) -> None:
    """To no, one and three images; and to other images the model says something else."""
    _, target = family(name)
    for images in (0, 1, 3):
        asked, answer = own(name, images, images, drawn=False)
        trace = generate(
            target,
            drafter_of(kind, target, asked, answer),
            asked,
            max_new_tokens=COUNT,
            budget=TREE,
            stop=[],
        )
        assert trace.tokens == answer
        assert kind != "planted" or trace.acceptance_length > 2.5
        if images and kind == "random":
            assert own(name, images, 7, drawn=False)[1] != answer


@pytest.mark.slow
@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_drawn_answers_are_the_untouched_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At T = 1 by the same noise."""
    monkeypatch.setattr("eagle.core.verify.Noise", HandedIn)
    _, target = family(name)
    for images in (1, 3):
        asked, answer = own(name, images, images, drawn=True)
        for kind in ("random", "planted", "eagle1"):
            drafter = drafter_of(kind, target, asked, answer)
            options: dict[str, Any] = {
                "sampling": Sampling(temperature=1.0),
                "max_new_tokens": COUNT,
                "stop": [],
            }
            assert generate(target, drafter, asked, budget=TREE, **options).tokens == answer


@pytest.mark.slow
@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_texts_side_by_side(name: str) -> None:
    """With none to three images, in more prompts than there are rows; the same tokens stand for other images."""
    _, target = family(name)
    pairs = [
        own(name, images, seed, drawn=False)
        for images, seed in ((1, 1), (0, 0), (3, 3), (1, 7), (2, 2), (3, 7))
    ]
    prompts, answers = [asked for asked, _ in pairs], [answer for _, answer in pairs]
    for kind in ("random", "eagle1"):
        drafter = drafter_of(kind, target, *pairs[0])
        traces = generate(
            target, drafter, prompts, batch_size=3, max_new_tokens=COUNT, budget=TREE, stop=[]
        )
        assert [trace.tokens for trace in traces] == answers


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_features_are_the_untouched_models(name: str) -> None:
    """Of a text with images: what its layers are given, and its LM head."""
    model, target = family(name)
    asked, states = ask(name, model, 2, 2), dict[int, torch.Tensor]()

    def keep(tap: int, _: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        states[tap] = given[0] if given else named["hidden_states"]

    layers = decoder_layers(model.model, 4)
    hooked = {0: layers[0], 1: layers[1], 3: layers[3], -1: model.lm_head}
    handles = [
        part.register_forward_pre_hook(partial(keep, tap), with_kwargs=True)
        for tap, part in hooked.items()
    ]
    with torch.no_grad():
        model(**asked, use_cache=False)
    for handle in handles:
        handle.remove()
    prompt = token_ids(asked)
    assert isinstance(prompt, PromptTokens) and prompt.count(IMAGE) >= 4
    got = target.features(torch.tensor([prompt]), (0, 1, 3, -1), media=prompt.media)
    for place, tap in enumerate((0, 1, 3, -1)):
        assert (got[0, :, place] - states[tap][0]).abs().max() <= 1e-5 * states[tap].abs().max()


def wrong_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text behind an image stands where its column is."""
    monkeypatch.setattr(SlotCache, "from_columns", lambda _, positions: positions)


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image's tokens are read as words."""
    monkeypatch.setattr(TreeReader, "to_inputs", lambda *_: {})


def one_image_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is taken up by its tokens alone."""
    monkeypatch.setattr("eagle.target.state.media_of", lambda _: {})


@pytest.mark.parametrize(
    ("name", "fault"), [("qwen2_5_vl", wrong_positions), ("gemma3", blind), ("llava", blind)]
)
def test_a_fault_is_seen(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above can fail."""
    _, target = family(name)
    asked, answer = own(name, 3, 3, drawn=False)
    fault(monkeypatch)
    trace = generate(target, RandomTrees(answer), asked, max_new_tokens=COUNT, budget=TREE, stop=[])
    assert trace.tokens != answer


def test_the_same_tokens_are_read_again_for_another_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of one image is kept for the next; a fault in that is seen."""
    _, target = family("llava")
    pairs = [own("llava", 1, seed, drawn=False) for seed in (1, 7)]
    assert (
        torch.equal(pairs[0][0]["input_ids"], pairs[1][0]["input_ids"])
        and pairs[0][1] != pairs[1][1]
    )
    for asked, answer in (*pairs, pairs[0]):
        trace = generate(target, RandomTrees(answer), asked, max_new_tokens=COUNT, stop=[])
        assert trace.tokens == answer
    monkeypatch.setattr(TargetState, "_shared", lambda *_: 20)
    for asked, answer in pairs:
        trace = generate(target, RandomTrees(answer), asked, max_new_tokens=COUNT, stop=[])
    assert trace.tokens != answer


def test_what_cannot_be_meant_is_refused() -> None:
    """Images for a model that is blind, and several prompts in one output."""
    asked = ask("llava", family("llava")[0], 1, 1)
    with pytest.raises(
        ValueError, match=r"llama takes no pixel_values: pass what its own processor gives"
    ):
        generate(Target(build_text("llama")), NgramDrafter(), asked, max_new_tokens=4)
    two = {name: torch.cat([value, value]) for name, value in asked.items()}
    with pytest.raises(
        ValueError, match="2 prompts with images are one output of the processor, expected a list"
    ):
        prompt_rows(two)


@pytest.mark.quick("llava-eagle1")
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl", "llava_onevision"])
def test_heads_draft_from_what_they_learn_from(name: str, kind: str) -> None:
    """Behind images, too, a chain holds what the head predicts in training, from the features of the same text.

    Features of the text without its images give others.
    """
    model, target = family(name)
    asked = token_ids(ask(name, model, 2, seed=5))
    head: Any = drafter_of(kind, target, ask(name, model, 2, seed=5), [])
    chain = Budget.fixed([(0,), (0, 0), (0, 0, 0)])
    trace = generate(target, head, asked, budget=chain, max_new_tokens=8, stop=[])
    assert len(trace.cycles) > 3
    blind = []
    for cycle in trace.cycles[:-1]:  # the last has no room for drafts
        drafts, count = cycle.tree.tokens.tolist()[1:], cycle.context + 1
        tokens = torch.tensor([*[*asked, *trace.tokens][:count], *drafts])
        assert int(tokens[count - 1]) == int(cycle.tree.tokens[0])
        if (
            IMAGE in tokens[len(asked) :]
        ):  # a random model says it, too; a whole text cannot be read with it
            continue
        media = {
            name: pad(value, (0, len(tokens) - len(asked))) if "type_ids" in name else value
            for name, value in asked.media.items()
        }
        assert predict_chain(head, target, tokens, count, media) == drafts
        text = torch.where(tokens == IMAGE, 5, tokens)
        blind.append(predict_chain(head, target, text, count, None) == drafts)
    assert len(blind) > 2 and not all(blind)


def predict_chain(
    head: Any, target: Target, tokens: torch.Tensor, count: int, media: Any
) -> list[int]:
    """What a head predicts for the tokens [T] from `count` on, by its training forward."""
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    mask[[count, -1]] = True
    features = target.features(tokens[None], head.taps, media=media)[0]
    batch = collate([Example(tokens, mask, features)], head.taps)
    levels = head.draft_levels(batch, target.head, len(tokens) - count)
    return [int(logits(states)[0].argmax()) for states, logits in levels]
