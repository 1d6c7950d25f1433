"""What a draft model says itself while it trains: its own law, one answer a text, the same after a stop."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trained import equal, run
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from eagle import Target
from eagle.core.examples import Example
from eagle.core.noise import Noise
from eagle.core.verify import Sampling
from eagle.data.features import LiveFeatures
from eagle.data.on_policy import OnPolicyFeatures, sample_answers, trained_target
from eagle.drafters import DRAFTERS, settings_of
from eagle.target.weights.weight_mark import WeightMark

ROOT = Path(__file__).parents[2]
ANSWERS = [(4, 9), (12, 40), (45, 50)]  # of every text but the last, which has the second alone
STOP = 2


@pytest.fixture(scope="module")
def own(tiny_target: Target) -> OnPolicyFeatures:
    """Five texts of three answers each, and a draft model that nobody has trained."""
    torch.manual_seed(0)
    texts = torch.randint(4, tiny_target.vocab_size, (5, 50)).unbind()
    texts = tuple(text[: 50 - 3 * place] for place, text in enumerate(texts))
    masks = [
        sum(((at >= a) & (at < b) for a, b in ANSWERS), at < 0)
        for at in map(torch.arange, map(len, texts))
    ]
    masks[4][:12] = masks[4][40:] = False
    examples = [Example(text, mask) for text, mask in zip(texts, masks, strict=True)]
    settings = settings_of({"kind": "draft_model"}, "test")
    head: Any = DRAFTERS["draft_model"].for_target(
        settings, tiny_target.config, tiny_target.head, supervised=()
    )
    return OnPolicyFeatures(
        LiveFeatures(tiny_target, examples, {"taps": [-1], "dtype": "float32"}), head.train()
    )


@torch.no_grad()
def alone(model: Any, prompt: Tensor, limit: int, noise: Noise, stops: tuple[int, ...]) -> Tensor:
    """The same text by itself: no cache, no padding, every token read anew."""
    text = prompt
    for _ in range(limit):
        logits = model(input_ids=text[None]).logits[0, -1]
        text = torch.cat(
            [text, (logits + noise([len(text)], len(logits), logits.device)[0]).argmax()[None]]
        )
        if int(text[-1]) in stops:
            break
    return text[len(prompt) :]


def test_side_by_side_is_alone() -> None:
    """Prompts of different lengths, limits and stops: each as if it were the only one; positions are learned here."""
    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5)
    ).eval()
    prompts = [torch.randint(99, (length,)) for length in (7, 1, 19)]
    limits, stops = [3, 30, 21], (17, 40)
    samplings = [Sampling(temperature=1.0, seed=5, request=place) for place in range(3)]
    said = sample_answers(trained_target(model), prompts, limits, samplings, stops)
    for place, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        assert torch.equal(said[place], alone(model, prompt, limit, Noise(5, place), stops))
    ends = [int(row[-1]) in stops for row in said]
    assert sorted(ends) == [False, False, True] and [len(row) for row in said] != limits


@pytest.mark.slow
def test_it_is_drawn_from_the_law() -> None:
    """Of 1,200 answers of two tokens each of the 36 comes as often as the model's own law says, by a chi-square."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=6, initializer_range=1.0, **sizes)).eval()
    prompt, count = torch.tensor([1, 5, 3]), 1200
    samplings = [Sampling(temperature=1.0, seed=seed) for seed in range(count)]
    said = sample_answers(trained_target(model), [prompt] * count, [2] * count, samplings, ())
    found, expected = Counter(tuple(row.tolist()) for row in said), {}
    with torch.no_grad():
        first = model(input_ids=prompt[None]).logits[0, -1].softmax(-1)
        for a, b in product(range(6), repeat=2):
            text = torch.cat([prompt, torch.tensor([a])])
            expected[a, b] = count * float(
                first[a] * model(input_ids=text[None]).logits[0, -1].softmax(-1)[b]
            )
    often = {pair: value for pair, value in expected.items() if value >= 5}
    rest = [count - sum(found[pair] for pair in often), count - sum(often.values())]
    cells = [(found[pair], value) for pair, value in often.items()] + (
        [(rest[0], rest[1])] if rest[1] > 1 else []
    )
    assert sum((seen - value) ** 2 / value for seen, value in cells) < 75  # 36 cells: 1 in 10,000


def test_a_model_that_decodes_goes_on_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights keep their gradients, no random number is spent, and each step speaks with the weights of the step.

    A planted fault: what was read with the weights of the step before would be seen.
    """
    torch.manual_seed(2)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5)
    ).eval()
    model.lm_head.weight.requires_grad_(False)  # tied, and not learned
    learning = {name: weight.requires_grad for name, weight in model.named_parameters()}
    dice = torch.get_rng_state()
    student = trained_target(model)
    assert torch.equal(torch.get_rng_state(), dice)
    prompt, sampling = torch.randint(99, (30,)), Sampling(temperature=1.0, seed=1)
    assert {name: weight.requires_grad for name, weight in model.named_parameters()} == learning
    assert not all(learning.values()) and any(learning.values())

    def step() -> tuple[Tensor, Tensor]:
        before = torch.get_rng_state()
        (said,) = sample_answers(student, [prompt], [12], [sampling], ())
        assert torch.equal(torch.get_rng_state(), before)
        true = alone(model, prompt, 12, Noise(1, 0), ())
        loss = model(
            input_ids=torch.cat([prompt, said])[None], labels=torch.cat([prompt, said])[None]
        ).loss
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.grad is not None:
                    weight.add_(weight.grad.sign(), alpha=0.03)
        return said, true

    for _ in range(3):
        said, true = step()
        assert torch.equal(said, true)
    monkeypatch.setattr(Target, "forget", lambda _: None)
    monkeypatch.setattr(WeightMark, "read", lambda _: [])
    assert not all(torch.equal(*step()) for _ in range(3))


def test_a_text_ends_with_one_answer_of_its_own(own: OnPolicyFeatures, tiny_target: Target) -> None:
    """The words before it are the data's, its length is at most theirs, the target's states are of the new text."""
    torch.manual_seed(3)
    read = own.read([4, 0, 2])
    for place, example in zip([4, 0, 2], read, strict=True):
        start = int(example.loss_mask.nonzero()[0])
        ends = {
            a: min(b, len(own.examples[place].tokens))
            for a, b in (ANSWERS[1:2] if place == 4 else ANSWERS)
        }
        assert (
            start in ends
            and example.loss_mask[start:].all()
            and start < len(example.tokens) <= ends[start]
        )
        assert torch.equal(example.tokens[:start], own.examples[place].tokens[:start])
        assert not torch.equal(
            example.tokens[start:], own.examples[place].tokens[start : len(example.tokens)]
        )
        assert torch.equal(example.features, tiny_target.features(example.tokens[None], (-1,))[0])


def test_the_step_decides_what_is_said(own: OnPolicyFeatures) -> None:
    """The same again within a step, whatever else is read with it; something else in the next; answers take turns."""

    def said(seed: int, *places: int) -> list[list[int]]:
        torch.manual_seed(seed)
        torch.rand(len(places))  # what others draw makes no difference
        return [example.tokens.tolist() for example in own.read(places)]

    assert said(7, 1, 3, 0) == [said(7, place)[0] for place in (1, 3, 0)]
    assert said(7, 4) != said(8, 4)  # whose only answer cannot be another
    starts = set()
    for seed in range(12):
        torch.manual_seed(seed)
        starts.add(int(own.read([0])[0].loss_mask.nonzero()[0]))
    assert starts == {start for start, _ in ANSWERS}


def test_a_head_is_judged_on_the_data(own: OnPolicyFeatures) -> None:
    """While it is not training, its own words are no measure."""
    own.head.eval()
    (read,) = own.read([1])
    own.head.train()
    assert torch.equal(read.tokens, own.examples[1].tokens) and torch.equal(
        read.loss_mask, own.examples[1].loss_mask
    )
    assert own.head.training and own.read([1]) and own.head.training


@pytest.fixture
def command(tiny_target_dir: Path) -> list[str]:
    """A run of four steps on its own samples."""
    overrides = {
        "target.path": tiny_target_dir / "target",
        "data.train": tiny_target_dir / "data/train.jsonl",
        "data.limit": 8,
        "data.max_length": 64,
        "features.store": "null",
        "drafter.samples": "own",
        "train.max_steps": 4,
        "train.validation": 0.2,
        "train.checkpoint_every": 2,
        **dict.fromkeys(("target.dtype", "features.dtype", "train.dtype"), "float32"),
    }
    recipe = str(ROOT / "recipes/tiny/draft_model.yaml")
    return [recipe, *(f"{key}={value}" for key, value in overrides.items())]


@pytest.mark.slow
def test_two_halves_are_the_whole(command: list[str], tmp_path: Path) -> None:
    """A run on its own samples that is stopped and gone on with leaves the same bytes; on the data it leaves others."""
    whole, halves = run(command, tmp_path / "whole"), run(command, tmp_path / "halves")
    assert equal(whole, halves)
    (halves / "checkpoints/step-4/complete.json").unlink()
    (halves / "last").rename(tmp_path / "seen")
    run(command, halves)
    assert equal(whole, halves)
    other = run(command, tmp_path / "other", "drafter.samples=data")
    assert not equal(whole, other)


def test_a_store_cannot_hold_them(command: list[str], tmp_path: Path) -> None:
    """What changes with every step is not read from a disk."""
    from data_prep.extract import main as extract

    stored = [*command, f"features.store={tmp_path / 'store'}"]
    extract(list(stored))
    with pytest.raises(ValueError, match=r"drafter\.samples is own.*expected features\.store=null"):
        run(stored, tmp_path / "run")
