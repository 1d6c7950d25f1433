"""Adapters over one base: each target answers as peft's own model, whichever answered before it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle import Budget, Sampling, Target, generate
from eagle.drafters import DRAFTERS, settings_of
from eagle.target.cache import TreeCache

peft = pytest.importorskip("peft", reason="peft is not installed")

BUDGET = Budget(nodes=6, depth=3, top_k=2)
NEW_TOKENS = 24
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 30, 31]]  # which begin alike


def save_adapter(model: Any, folder: Path, seed: int = 0, **settings: Any) -> Path:
    """An adapter of random weights, which changes what the model says."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, **settings
    )
    peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(mixing_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A LoRA and a DoRA adapter of one base."""
    parent = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(mixing_target.model, parent / name, seed, use_dora=name == "dora")
        for seed, name in enumerate(("lora", "dora"))
    }


@pytest.fixture(scope="module")
def adapted(mixing_target: Target, folders: dict[str, Path]) -> dict[str, Target]:
    """The targets of both, over the weights of one."""
    return {name: mixing_target.with_adapter(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def switched(mixing_target: Target, folders: dict[str, Path]) -> Any:
    """The truth: peft's own model, which switches between both."""
    model = peft.PeftModel.from_pretrained(
        copy.deepcopy(mixing_target.model), folders["lora"], adapter_name="lora"
    )
    model.load_adapter(folders["dora"], adapter_name="dora")
    return model.eval()


def head_of(target: Target, seed: int) -> Any:
    """A head of fresh weights."""
    torch.manual_seed(seed)
    settings = settings_of({"kind": "eagle1"}, "test")
    head = DRAFTERS["eagle1"].for_target(settings, target.config, target.head)
    return head.to(target.model.dtype).bind(target.head)


def answer(model: Any, prompt: list[int]) -> list[int]:
    """The greedy answer of a model by its own `generate`."""
    tokens = torch.tensor([prompt])
    said = model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW_TOKENS
    )
    return said[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_drafted_answers_are_pefts_own_in_alternation(
    mixing_target: Target, adapted: dict[str, Target], switched: Any
) -> None:
    """Prompts that begin alike, each adapter with its own head, the base between them."""
    heads = {name: head_of(target, seed) for seed, (name, target) in enumerate(adapted.items())}
    said = {}
    for name in ("lora", "dora", "lora", "dora"):
        switched.set_adapter(name)
        for prompt in PROMPTS:
            trace = generate(
                adapted[name],
                heads[name],
                prompt,
                budget=BUDGET,
                max_new_tokens=NEW_TOKENS,
                stop=[],
            )
            assert trace.tokens == answer(switched, prompt)
            said[name, len(prompt)] = trace.tokens
    with switched.disable_adapter():
        for prompt in PROMPTS:
            plain = generate(
                mixing_target, head_of(mixing_target, 0), prompt, max_new_tokens=NEW_TOKENS, stop=[]
            )
            assert plain.tokens == answer(switched, prompt)
            assert (
                len({tuple(plain.tokens), *(tuple(said[name, len(prompt)]) for name in adapted)})
                == 3
            )


@pytest.mark.slow
def test_texts_side_by_side_are_drawn_as_by_the_merged_model(
    mixing_target: Target, adapted: dict[str, Target], switched: Any
) -> None:
    """At T = 1 and several texts, with the noise of each text."""
    for name, target in adapted.items():
        switched.set_adapter(name)
        merged = Target(
            copy.deepcopy(switched).merge_and_unload(adapter_names=[name]), mixing_target.tokenizer
        )
        options: Any = {"sampling": Sampling(1.0), "max_new_tokens": NEW_TOKENS, "stop": []}
        rows = [
            [trace.tokens for trace in generate(each, head_of(each, 3), PROMPTS, **options)]
            for each in (target, merged)
        ]
        assert rows[0] == rows[1]


def test_features_are_those_of_the_merged_model(
    mixing_target_dir: Path,
    mixing_target: Target,
    adapted: dict[str, Target],
    folders: dict[str, Path],
) -> None:
    """Up to rounding in fp64, and others than the base's, which shares its weights."""
    tokens, taps = torch.arange(20, 60)[None], (0, 1, -1)
    for name, target in adapted.items():
        merged = Target.load(mixing_target_dir, dtype=torch.float64, adapter=str(folders[name]))
        torch.testing.assert_close(
            target.features(tokens, taps), merged.features(tokens, taps), rtol=1e-9, atol=1e-9
        )
        assert not torch.allclose(
            target.features(tokens, taps), mixing_target.features(tokens, taps), atol=1e-2
        )
        assert target.head.weight is mixing_target.head.weight
        assert f"with the adapter {folders[name]}" in repr(target) and "adapter" not in repr(
            mixing_target
        )
        assert f"with the adapter {folders[name]}" in target.describe()
        assert copy.copy(target).adapter == str(folders[name])


@pytest.mark.slow
def test_a_text_of_another_adapter_is_not_read_on(
    adapted: dict[str, Target], switched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handed over by a fault, a state is dropped by its weights' mark; read on, it would give wrong answers."""
    lora, dora, prompt = adapted["lora"], adapted["dora"], PROMPTS[0]
    switched.set_adapter("lora")
    expected, none = answer(switched, prompt), DRAFTERS["none"]()

    def plant() -> list[int]:
        generate(dora, none, prompt, max_new_tokens=NEW_TOKENS, stop=[])
        assert dora.spare is not None and dora.spare.texts[0][: len(prompt)] == prompt
        lora.spare, dora.spare = dora.spare, None
        lora.spare.target = lora
        return generate(lora, none, prompt, max_new_tokens=NEW_TOKENS, stop=[]).tokens

    assert plant() == expected
    monkeypatch.setattr(lora.weight_mark, "read", dora.weight_mark.read)
    assert plant() != expected
    lora.forget()


def test_a_state_is_read_on_with_its_own_adapter(
    mixing_target: Target, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter's text outlives another's; a change of the weights that they share drops both."""
    cut: list[int] = []
    original = TreeCache.cut
    monkeypatch.setattr(
        TreeCache,
        "cut",
        lambda cache, slot, length: cut.append(length) or original(cache, slot, length),
    )
    base = Target(copy.deepcopy(mixing_target.model))
    targets, none = [base.with_adapter(folder) for folder in folders.values()], DRAFTERS["none"]()
    for target in [*targets, *targets]:
        generate(target, none, PROMPTS[0], max_new_tokens=4, stop=[])
    assert cut == [0, 0, len(PROMPTS[0]) - 1, len(PROMPTS[0]) - 1]
    with torch.no_grad():
        base.model.model.layers[0].mlp.up_proj.weight.mul_(1.0)
    for target in targets:
        generate(target, none, PROMPTS[0], max_new_tokens=4, stop=[])
    assert cut[4:] == [0, 0]


@pytest.mark.slow
def test_packed_weights_are_laid_out_for_adapters(
    mixing_target_dir: Path, mixing_target: Target, tmp_path: Path
) -> None:
    """DoRA reads the norms of weights; a packed base decodes on, and stays right."""
    base = Target.load(mixing_target_dir, dtype="float32", packed=True)
    plain = Target.load(mixing_target_dir, dtype="float32")
    folder = save_adapter(mixing_target.model, tmp_path / "dora", use_dora=True)
    tokens = torch.arange(20, 40)[None]
    expected = plain.with_adapter(folder).features(tokens, (1, -1))
    torch.testing.assert_close(
        base.with_adapter(folder).features(tokens, (1, -1)), expected, rtol=1e-3, atol=1e-3
    )
    torch.testing.assert_close(
        base.features(tokens, (1, -1)), plain.features(tokens, (1, -1)), rtol=1e-3, atol=1e-3
    )


def test_adapters_that_cannot_be_read_are_refused(
    mixing_target: Target, folders: dict[str, Path], tmp_path: Path, mixing_target_dir: Path
) -> None:
    """No folder, a base of other sizes, weights that are missing; prompts; what heads borrow."""
    with pytest.raises(
        ValueError, match=r"no adapter for this llama at .*gone.* expected a folder that peft's"
    ):
        mixing_target.with_adapter(tmp_path / "gone")
    config = json.loads((folders["lora"] / "adapter_config.json").read_text())
    weights = load_file(folders["lora"] / "adapter_model.safetensors")
    for name, changed in {
        "size mismatch": {key: part[..., :-1] for key, part in weights.items()},
        "missing adapter keys": {key: part for key, part in weights.items() if "q_proj" not in key},
    }.items():
        other = tmp_path / name.split()[0]
        other.mkdir()
        (other / "adapter_config.json").write_text(json.dumps(config))
        save_file(
            {key: part.contiguous() for key, part in changed.items()},
            other / "adapter_model.safetensors",
        )
        with pytest.raises(ValueError, match="no adapter for this llama"):
            mixing_target.with_adapter(other)
        with pytest.raises(ValueError, match="no adapter for this llama"):
            Target.load(mixing_target_dir, dtype="float32", adapter=str(other))
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    peft.get_peft_model(copy.deepcopy(mixing_target.model), prompts).save_pretrained(
        tmp_path / "prompts"
    )
    with pytest.raises(
        ValueError,
        match=r"adds to the prompt .*got PROMPT_TUNING, expected one that changes linear",
    ):
        mixing_target.with_adapter(tmp_path / "prompts")
    config = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    peft.get_peft_model(copy.deepcopy(mixing_target.model), config).save_pretrained(tmp_path / "lm")
    with pytest.raises(
        ValueError, match=r"changes the embedding or the LM head.*; merge it, as Target\.load"
    ):
        mixing_target.with_adapter(tmp_path / "lm")
    said = generate(mixing_target, DRAFTERS["none"](), PROMPTS[0], max_new_tokens=8, stop=[]).tokens
    assert said == answer(mixing_target.model, PROMPTS[0])[:8]  # the base is as it was
