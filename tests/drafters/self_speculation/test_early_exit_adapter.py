"""An adapter drafts and learns what the untouched model's early states give by its formula."""

# T tokens of a text, V vocabulary

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle import Budget, Target, generate
from eagle.core.examples import Batch, Example, collate
from eagle.core.tree import chain_paths
from eagle.doctor.examine import open_head
from eagle.drafters import settings_of
from eagle.drafters.self_speculation.early_exit import EarlyExit
from eagle.drafters.self_speculation.early_exit_adapter import EarlyExitAdapter
from eagle.formats.checkpoint import save_head
from tests.families import NUM_LAYERS, build, own_answer, random_tokens

PROMPTS = [random_tokens(count, seed) for seed, count in enumerate((6, 11, 3))]
LAYERS = 2
OPTIONS: dict[str, Any] = {
    "budget": Budget(6, 4, 2),
    "max_new_tokens": 10,
    "stop": [],
}


def settings_for(layers: int, adapter: str = "mlp") -> Any:
    """Return the settings of an adapter on so many layers."""
    asked = {
        "kind": "early_exit_adapter",
        "layers": layers,
        "adapter": adapter,
    }
    return settings_of(asked, "test")


def new_head(target: Target, adapter: str) -> Any:
    """Return an untrained adapter in fp64, which starts from the target's own norm."""
    head = EarlyExitAdapter.for_target(
        settings_for(LAYERS, adapter),
        target.config,
        target.head,
        weights=target.tensor,
    )
    return head.double().bind(target.head)


def randomise(head: Any) -> Any:
    """Return the adapter with weights that change what it says."""
    torch.manual_seed(0)
    for weight in head.parameters():
        weight.data += 0.5 * torch.randn_like(weight)
    return head


@pytest.mark.quick("linear-llama")
@pytest.mark.parametrize(
    ("adapter", "family"),
    [
        ("norm", "gemma2"),
        ("linear", "llama"),
        ("mlp", "qwen3"),
    ],
)
def test_an_untrained_adapter_is_early_exit(adapter: str, family: str) -> None:
    """Another one drafts something else, and the answers are the target's all the same."""
    model = build(family, torch.float64)
    target = Target(copy.deepcopy(model))
    # an adapter's last layer starts at zero
    expected = [trace.cycles for trace in generate(target, EarlyExit(LAYERS), PROMPTS, **OPTIONS)]
    head = new_head(target, adapter)
    assert [trace.cycles for trace in generate(target, head, PROMPTS, **OPTIONS)] == expected
    changed = generate(target, randomise(head), PROMPTS, **OPTIONS)
    assert [trace.cycles for trace in changed] != expected
    for prompt, trace in zip(PROMPTS, changed, strict=True):
        assert trace.tokens == own_answer(model, prompt, 10)


@pytest.fixture(scope="module")
def model() -> Any:
    """Return an untouched model."""
    return build("llama", torch.float64)


@pytest.fixture(scope="module")
def head(model: Any) -> Any:
    """Return an adapter with random weights."""
    return randomise(new_head(Target(copy.deepcopy(model)), "mlp"))


@torch.no_grad()
def read_states(model: Any, text: list[int]) -> tuple[Tensor, Tensor]:
    """Return the early states and the last ones of a text, by the untouched model."""
    states = model(
        input_ids=torch.tensor([text]),
        output_hidden_states=True,
    ).hidden_states
    return states[LAYERS][0], states[-1][0]


def naive_logits(
    model: Any,
    head: Any,
    text: list[int],
) -> Tensor:
    """Return [T, V], what the adapter says after each token: a SwiGLU-free MLP at unit scale, then a norm."""
    down, up = head.change.parameters()
    rows = []
    for state in read_states(model, text)[0]:
        # states grow from layer to layer, and the MLP reads them at one size
        scale = state.square().mean().sqrt()
        inner = F.silu(down @ (state / scale))
        changed = state + scale * (up @ inner)
        normed = changed / (changed.square().mean() + head.norm.variance_epsilon).sqrt()
        rows.append(normed * head.norm.weight)
    logits: Tensor = model.lm_head(torch.stack(rows))
    return logits.detach()


def test_drafts_are_the_adapters_of_early_states(model: Any, head: Any) -> None:
    """Every token of every chain is the likeliest by the formula."""
    options = {**OPTIONS, "budget": Budget.fixed(chain_paths(4))}
    for trace in generate(
        Target(copy.deepcopy(model)),
        head,
        PROMPTS,
        **options,
    ):
        whole = trace.prompt + trace.tokens
        for cycle in trace.cycles:
            root, *chain = cycle.tree.tokens.tolist()
            text = [*whole[: cycle.context], root]
            for token in chain:
                assert token == int(naive_logits(model, head, text)[-1].argmax())
                text.append(token)


def make_batch(model: Any, texts: list[list[int]]) -> Batch:
    """Return texts with the untouched model's states, the first four tokens of each unsupervised."""
    examples = []
    for text in texts:
        features = torch.stack(read_states(model, text), dim=1)
        examples.append(
            Example(
                torch.tensor(text),
                torch.arange(len(text)) >= 4,
                features,
            )
        )
    return collate(examples, (LAYERS, -1))


def test_the_loss_is_that_of_drafts(model: Any, head: Any) -> None:
    """It is the mean cross-entropy to the target's probs over supervised tokens."""
    texts = [random_tokens(count, count) for count in (9, 14)]
    losses = []
    for text in texts:
        with torch.no_grad():
            target_probs = model(input_ids=torch.tensor([text])).logits[0].softmax(-1)
        log_probs = naive_logits(model, head, text).log_softmax(-1)
        entropies = -(target_probs * log_probs).sum(-1)
        # a token is named by the row before it
        losses.append(entropies[3:-1])
    expected = float(torch.cat(losses).mean())
    batch = make_batch(model, texts)
    target_head = head.target_head
    assert head(batch, target_head)["total"].item() == pytest.approx(expected, rel=1e-6)
    # the states of neighbouring tokens would give another loss
    features = batch.features.clone()
    features[:, 0] = features[:, 0].roll(1, 0)
    shifted = replace(batch, features=features)
    assert head(shifted, target_head)["total"].item() != pytest.approx(expected, rel=1e-3)


def test_every_level_is_trained_as_it_drafts(model: Any, head: Any) -> None:
    """Level d of slot i reads the early state of token i + 1 + d."""
    text = random_tokens(12, 3)
    expected = naive_logits(model, head, text).log_softmax(-1)
    levels = head.draft_levels(make_batch(model, [text]), head.target_head, 3)
    for level, (states, logits) in enumerate(levels):
        count = len(text) - 4 - level
        log_probs = F.log_softmax(logits(states), -1)[:count]
        # the first supervised token is the fifth
        first = 3 + level
        torch.testing.assert_close(
            log_probs,
            expected[first : first + count],
            rtol=0,
            atol=1e-6,
        )


def test_the_doctor_refuses_it_by_name(head: Any, tmp_path: Path) -> None:
    """It examines heads that read features when they draft."""
    save_head(tmp_path, head, "", {})
    with pytest.raises(ValueError, match="is a early_exit_adapter"):
        open_head(tmp_path, "any target")


@pytest.mark.parametrize(
    ("layers", "keyword"),
    # all layers need no adapter
    [
        (NUM_LAYERS, "fewer"),
        (NUM_LAYERS + 1, f"1 to {NUM_LAYERS}"),
    ],
)
def test_layers_that_do_not_fit_are_refused(
    model: Any,
    layers: int,
    keyword: str,
) -> None:
    """The message names what is possible."""
    with pytest.raises(ValueError, match=keyword):
        EarlyExitAdapter.for_target(settings_for(layers), model.config)
