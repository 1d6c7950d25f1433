"""Prompts with images: whatever is drafted, the answer is what the untouched model says by itself."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from eagle import Budget, Target, generate
from eagle.conformance.trial import make_head
from eagle.core.arguments import PromptTokens, prompt_rows, token_ids
from eagle.core.drafter import Drafter
from eagle.core.examples import Example, collate
from eagle.drafters.draft_model import DraftModel, DraftModelSettings
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.target.reader import TreeReader
from eagle.target.slots import RowCache
from eagle.target.state import TargetState
from eagle.target.structure import decoder_layers
from tests.families import PlantedTrees, RandomTrees
from tests.families import build as build_text
from tests.target.decoded import decode, decode_batch, is_close
from tests.vision_families import IMAGE, VISION_FAMILIES, ask, build

COUNT = 24
TREE = Budget(12, 4, 3)


@cache
def load_family(name: str) -> tuple[Any, Target]:
    """Return a model that nobody touches, and a target on its copy."""
    model = build(name)
    return model, Target(copy.deepcopy(model))


@cache
def ask_model(name: str, images: int, seed: int) -> tuple[Any, list[int]]:
    """Return a prompt, and what the untouched model says to it by its own `generate`."""
    model, _ = load_family(name)
    asked = ask(name, model, images, seed)
    options: dict[str, Any] = {
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    tokens = model.generate(**asked, max_new_tokens=COUNT, **options)
    return asked, tokens[0, asked["input_ids"].shape[1] :].tolist()


def make_drafter(kind: str, target: Target, asked: dict[str, Any], answer: list[int]) -> Drafter:
    """Return a drafter by its name; heads are random."""
    if kind == "draft_model":
        model = build_text("llama")
        return DraftModel(DraftModelSettings(), model.config, model).bind(target.head)
    if kind == "random":
        return RandomTrees(answer)
    if kind == "planted":
        return PlantedTrees(asked["input_ids"][0].tolist() + answer)
    if kind == "ngram":
        return NgramDrafter()
    return make_head(kind, target).bind(target.head).eval()


@pytest.mark.quick(
    "qwen2_5_vl-planted",
    "qwen2_5_vl-ngram",
    "gemma3-planted",
    "gemma3-ngram",
)
@pytest.mark.not_long(
    "*-planted",
    "*-eagle1",
    "llava-*",
    "gemma3-ngram",
    "qwen2_5_vl-ngram",
)
@pytest.mark.parametrize("kind", ["random", "planted", "ngram", "eagle1", "eagle3", "draft_model"])
@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_greedy_answers_are_the_untouched_models(name: str, kind: str) -> None:
    """To no, one and three images; and to other images the model says something else."""
    _, target = load_family(name)

    for images in (0, 1, 3):
        asked, answer = ask_model(name, images, images)
        drafter = make_drafter(kind, target, asked, answer)
        options: dict[str, Any] = {
            "max_new_tokens": COUNT,
            "budget": TREE,
            "stop": [],
        }
        trace = generate(target, drafter, asked, **options)
        assert trace.tokens == answer
        assert kind != "planted" or trace.acceptance_length > 2.5
        # else the model would not look at the image, and the test would show nothing
        if images and kind == "random":
            assert ask_model(name, images, 7)[1] != answer


@pytest.mark.slow
@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_batches_are_answered_as_prompts_alone(name: str) -> None:
    """With none to three images, in more prompts than fit at once; the same tokens stand for other images."""
    _, target = load_family(name)
    # (images, seed of their pixels): 1 and 7 have the same tokens
    seeds = [(1, 1), (0, 0), (3, 3), (1, 7), (2, 2), (3, 7)]
    prompts, answers = zip(*(ask_model(name, images, seed) for images, seed in seeds), strict=True)
    drafter = make_drafter("eagle1", target, prompts[0], answers[0])
    got = decode_batch(
        target,
        drafter,
        [*prompts],
        COUNT,
        batch_size=3,
        budget=TREE,
    )

    assert got == [*answers]


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_features_are_the_untouched_models(name: str) -> None:
    """Of a sequence with images: what its layers are given, and its LM head."""
    model, target = load_family(name)
    asked = ask(name, model, 2, 2)
    inputs: dict[Any, torch.Tensor] = {}

    def record(module: Any, args: Any, kwargs: Any) -> None:
        inputs[module] = args[0] if args else kwargs["hidden_states"]

    taps = (0, 1, 3, -1)
    layers = decoder_layers(model.model, 4)
    modules = [layers[0], layers[1], layers[3], model.lm_head]
    # hooks on the untouched model see what its layers are given
    handles = [each.register_forward_pre_hook(record, with_kwargs=True) for each in modules]

    with torch.no_grad():
        model(**asked, use_cache=False)

    for handle in handles:
        handle.remove()

    prompt = token_ids(asked)
    assert isinstance(prompt, PromptTokens)
    assert prompt.count(IMAGE) >= 4

    features = target.features(torch.tensor([prompt]), taps, media=prompt.media)

    for got, module in zip(features.unbind(2), modules, strict=True):
        assert is_close(got, inputs[module])


def place_by_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give what follows an image the position of its column."""
    # three-dimensional rotary positions make text after an image come earlier than its column
    monkeypatch.setattr(RowCache, "from_columns", lambda _, positions: positions)


def read_as_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read an image's tokens as words."""
    monkeypatch.setattr(TreeReader, "to_inputs", lambda *_: {})


@pytest.mark.parametrize(
    ("name", "fault"), [("qwen2_5_vl", place_by_column), ("gemma3", read_as_words)]
)
def test_a_fault_is_seen(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons of this file can fail."""
    _, target = load_family(name)
    asked, answer = ask_model(name, 3, 3)
    fault(monkeypatch)
    assert decode(target, RandomTrees(answer), asked, COUNT, budget=TREE) != answer


def test_the_same_tokens_are_read_again_for_another_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of one image is kept for the next; a fault in that is seen."""
    _, target = load_family("llava")
    pairs = [ask_model("llava", 1, seed) for seed in (1, 7, 1)]

    assert torch.equal(pairs[0][0]["input_ids"], pairs[1][0]["input_ids"])
    assert pairs[0][1] != pairs[1][1]

    for asked, answer in pairs:
        assert decode(target, RandomTrees(answer), asked, COUNT) == answer

    # a sequence that is continued by its tokens alone
    monkeypatch.setattr(TargetState, "_shared_prefix", lambda *_: 20)
    answers = [decode(target, RandomTrees(answer), asked, COUNT) for asked, answer in pairs[:2]]

    assert answers[1] != pairs[1][1]


def test_what_cannot_be_meant_is_refused() -> None:
    """Images for a text model, and several prompts in one output."""
    asked = ask("llava", load_family("llava")[0], 1, 1)

    with pytest.raises(ValueError, match="llama takes no pixel_values"):
        decode(Target(build_text("llama")), NgramDrafter(), asked, 4)

    two = {name: torch.cat([value, value]) for name, value in asked.items()}

    with pytest.raises(ValueError, match="2 prompts with images"):
        prompt_rows(two)


@pytest.mark.quick("llava-eagle1")
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_heads_draft_from_what_they_learn_from(name: str, kind: str) -> None:
    """A chain holds what the head predicts in training, from the features of the same sequence.

    Features of the sequence without its images give others.
    """
    model, target = load_family(name)
    asked = ask(name, model, 2, seed=5)
    prompt: Any = token_ids(asked)
    head: Any = make_drafter(kind, target, asked, [])
    chain = Budget.fixed([(0,), (0, 0), (0, 0, 0)])
    trace = generate(target, head, prompt, budget=chain, max_new_tokens=8, stop=[])

    assert len(trace.cycles) > 3

    blind = []

    # the last cycle has no room for drafts
    for cycle in trace.cycles[:-1]:
        root, *drafts = cycle.tree.tokens.tolist()
        count = cycle.context + 1
        tokens = torch.tensor([*[*prompt, *trace.tokens][:count], *drafts])
        assert tokens[count - 1] == root
        # a random model may say the image token, and then a whole sequence cannot be read with it
        if IMAGE in tokens[len(prompt) :]:
            continue
        longer = (0, len(tokens) - len(prompt))
        media = dict(prompt.media)
        for key in media:
            if "type_ids" in key:
                media[key] = pad(media[key], longer)
        assert predict_chain(head, target, tokens, count, media) == drafts
        # the same sequence without its images, as a head would see it if they were left out
        words = torch.where(tokens == IMAGE, 5, tokens)
        blind.append(predict_chain(head, target, words, count, None) == drafts)

    assert len(blind) > 2
    assert not all(blind)


def predict_chain(
    head: Any,
    target: Target,
    tokens: torch.Tensor,
    count: int,
    media: Any,
) -> list[int]:
    """Return what a head predicts for the tokens [T] from `count` on, by its training forward."""
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    mask[[count, -1]] = True
    features = target.features(tokens[None], head.taps, media=media)[0]
    batch = collate([Example(tokens, mask, features)], head.taps)
    levels = head.draft_levels(batch, target.head, len(tokens) - count)
    return [int(logits(states)[0].argmax()) for states, logits in levels]
