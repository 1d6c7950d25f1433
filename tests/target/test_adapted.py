"""Adapters over one base: each target answers as peft's own model, whichever answered before it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle import Budget, Target
from eagle.conformance.trial import make_head
from eagle.drafters.none import NoDrafter
from eagle.target.cache import TreeCache
from tests.target.decoded import decode

peft = pytest.importorskip("peft", reason="peft is not installed")

COUNT = 24
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 30, 31]]  # which begin alike
NONE = NoDrafter()


def save_adapter(model: Any, folder: Path, seed: int = 0, **settings: Any) -> Path:
    """Write an adapter of random weights, which changes what the model says."""
    torch.manual_seed(seed)
    options = {"target_modules": "all-linear", "init_lora_weights": False, **settings}
    config = peft.LoraConfig(r=4, lora_alpha=8, **options)
    peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(mixing_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a LoRA and a DoRA adapter of one base."""
    parent = tmp_path_factory.mktemp("adapters")
    lora = save_adapter(mixing_target.model, parent / "lora", seed=0)
    dora = save_adapter(
        mixing_target.model,
        parent / "dora",
        seed=1,
        use_dora=True,
    )
    return {"lora": lora, "dora": dora}


@pytest.fixture(scope="module")
def adapted(mixing_target: Target, folders: dict[str, Path]) -> dict[str, Target]:
    """Return the targets of both, over the weights of one."""
    return {name: mixing_target.with_adapter(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def switched(mixing_target: Target, folders: dict[str, Path]) -> Any:
    """Return the truth: peft's own model, which switches between both."""
    model = copy.deepcopy(mixing_target.model)
    wrapped = peft.PeftModel.from_pretrained(model, folders["lora"], adapter_name="lora")
    wrapped.load_adapter(folders["dora"], adapter_name="dora")
    # one model in memory, as users of peft have it
    return wrapped.eval()


def new_head(target: Target, seed: int) -> Any:
    """Return a head of new weights in the target's precision."""
    return make_head("eagle1", target, seed).to(target.model.dtype).bind(target.head)


def answer(model: Any, prompt: list[int]) -> list[int]:
    """Return the greedy answer of a model by its own `generate`."""
    tokens = torch.tensor([prompt])
    mask = torch.ones_like(tokens)
    output = model.generate(
        input_ids=tokens,
        attention_mask=mask,
        max_new_tokens=COUNT,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_drafted_answers_are_pefts_own_in_alternation(
    mixing_target: Target,
    adapted: dict[str, Target],
    switched: Any,
) -> None:
    """Prompts that begin alike, each adapter with its own head, and the base at the end."""
    heads = {name: new_head(target, seed) for seed, (name, target) in enumerate(adapted.items())}
    budget = Budget(nodes=6, depth=3, top_k=2)
    answers = set()

    for name in ("lora", "dora", "lora", "dora"):
        switched.set_adapter(name)
        for prompt in PROMPTS:
            tokens = decode(
                adapted[name],
                heads[name],
                prompt,
                COUNT,
                budget=budget,
            )
            assert tokens == answer(switched, prompt)
            answers.add(tuple(tokens))

    with switched.disable_adapter():
        for prompt in PROMPTS:
            tokens = decode(
                mixing_target,
                new_head(mixing_target, 0),
                prompt,
                COUNT,
            )
            assert tokens == answer(switched, prompt)
            answers.add(tuple(tokens))

    # no two of three models say the same to any prompt
    assert len(answers) == 6


def test_features_are_those_of_the_merged_model(
    mixing_target_dir: Path,
    mixing_target: Target,
    folders: dict[str, Path],
) -> None:
    """Up to rounding in fp64, and others than the base's, which shares its weights."""
    tokens = torch.arange(20, 60)[None]
    taps = (0, 1, -1)
    plain = mixing_target.features(tokens, taps)

    for folder in folders.values():
        target = mixing_target.with_adapter(folder)
        # peft's own merge is the oracle; over a shared base nothing is merged
        merged = Target.load(mixing_target_dir, dtype=torch.float64, adapter=str(folder))
        features = target.features(tokens, taps)
        expected = merged.features(tokens, taps)
        torch.testing.assert_close(features, expected, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(features, plain, atol=1e-2)
        # the base's weights are in memory once
        assert target.head.weight is mixing_target.head.weight
        for text in (repr(target), target.describe()):
            assert f"with the adapter {folder}" in text
        assert copy.copy(target).adapter == str(folder)

    assert "adapter" not in repr(mixing_target)


@pytest.mark.slow
def test_a_state_of_another_adapter_is_not_read_on(
    adapted: dict[str, Target],
    switched: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted fault: a state that is handed over is dropped by its weights' mark; read on, it gives wrong answers."""
    lora = adapted["lora"]
    dora = adapted["dora"]
    prompt = PROMPTS[0]
    switched.set_adapter("lora")
    expected = answer(switched, prompt)

    def answer_from_the_others_state() -> list[int]:
        decode(dora, NONE, prompt, COUNT)
        assert dora.spare is not None
        assert dora.spare.sequences[0][: len(prompt)] == prompt

        # the state of one adapter, as if it had been left by the other
        lora.spare = dora.spare
        dora.spare = None
        lora.spare.target = lora
        return decode(lora, NONE, prompt, COUNT)

    assert answer_from_the_others_state() == expected

    monkeypatch.setattr(lora.weight_mark, "read", dora.weight_mark.read)
    assert answer_from_the_others_state() != expected

    lora.forget()


def test_a_state_is_read_on_with_its_own_adapter(
    mixing_target: Target,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An adapter's state outlives another's; a change of the weights that they share drops both."""
    kept: list[int] = []
    cut = TreeCache.cut

    def record(cache: TreeCache, slot: int, length: int) -> None:
        kept.append(length)
        cut(cache, slot, length)

    monkeypatch.setattr(TreeCache, "cut", record)
    base = Target(copy.deepcopy(mixing_target.model))
    targets = [base.with_adapter(folder) for folder in folders.values()]
    prompt = PROMPTS[0]

    # each adapter twice, in turn: the second call of each meets its own state
    for target in [*targets, *targets]:
        decode(target, NONE, prompt, 4)

    assert kept == [0, 0, len(prompt) - 1, len(prompt) - 1]

    with torch.no_grad():
        # a write that changes no value counts, since versions are compared
        base.model.model.layers[0].mlp.up_proj.weight.mul_(1.0)

    for target in targets:
        decode(target, NONE, prompt, 4)

    assert kept[4:] == [0, 0]


@pytest.mark.slow
def test_packed_weights_serve_adapters(mixing_target_dir: Path, folders: dict[str, Path]) -> None:
    """DoRA reads the norms of weights; a packed base decodes on, and stays right."""
    packed = Target.load(mixing_target_dir, dtype="float32", packed=True)
    plain = Target.load(mixing_target_dir, dtype="float32")
    tokens = torch.arange(20, 40)[None]
    over_packed = packed.with_adapter(folders["dora"])
    over_plain = plain.with_adapter(folders["dora"])

    for one, other in ((over_packed, over_plain), (packed, plain)):
        expected = other.features(tokens, (1, -1))
        torch.testing.assert_close(
            one.features(tokens, (1, -1)),
            expected,
            rtol=1e-3,
            atol=1e-3,
        )


def test_adapters_that_cannot_be_read_are_refused(
    mixing_target: Target,
    folders: dict[str, Path],
    tmp_path: Path,
    mixing_target_dir: Path,
) -> None:
    """No folder, a base of other sizes, weights that are missing; prompts; what heads borrow."""

    def assert_refused(folder: Path, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            mixing_target.with_adapter(folder)

    assert_refused(tmp_path / "gone", "no adapter for this llama at .*gone")
    config = (folders["lora"] / "adapter_config.json").read_text()
    weights = load_file(folders["lora"] / "adapter_model.safetensors")
    # a base of other sizes, and a file that lacks weights
    narrow = {name: tensor[..., :-1].contiguous() for name, tensor in weights.items()}
    few = {name: tensor for name, tensor in weights.items() if "q_proj" not in name}

    for number, tensors in enumerate((narrow, few)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "adapter_config.json").write_text(config)
        save_file(tensors, folder / "adapter_model.safetensors")
        assert_refused(folder, "no adapter for this llama")
        with pytest.raises(ValueError, match="no adapter for this llama"):
            Target.load(mixing_target_dir, dtype="float32", adapter=str(folder))

    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = peft.get_peft_model(copy.deepcopy(mixing_target.model), prompts)
    tuned.save_pretrained(tmp_path / "prompts")
    assert_refused(tmp_path / "prompts", "got PROMPT_TUNING")
    save_adapter(mixing_target.model, tmp_path / "lm", target_modules=["lm_head", "q_proj"])
    assert_refused(tmp_path / "lm", "changes the embedding or the LM head")

    # after all refusals the base is as it was
    assert decode(mixing_target, NONE, PROMPTS[0], 8) == answer(mixing_target.model, PROMPTS[0])[:8]
