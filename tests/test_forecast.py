"""Forecasts agree with what is counted, stored and kept, and the page shows what the command prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from eagle import Target
from eagle.drafters import DRAFTERS, settings_of
from eagle.examples import Example, collate
from eagle.recipe import Recipe
from recipes import forecast as module
from recipes.forecast import activation_bytes, conversations_of, forecast, sizes_of, sizes_of_config, training_flops

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT.parent / "shared/data/configs"
VICUNA = ROOT / "recipes/vicuna-7b/eagle1.yaml"
SETTINGS = settings_of({"kind": "eagle1", "fc_bias": False}, "test")


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Both tables of docs/recipes.md."""
    module.main([])
    shipped, targets = capsys.readouterr().out.strip().split("\n\n")
    page = (ROOT / "docs/recipes.md").read_text()
    assert shipped in page and targets in page


def test_the_published_run_needs_what_its_authors_report() -> None:
    """740 GB of features for a width of 4,096, and a head of 0.24 B."""
    recipe = Recipe.load(VICUNA)
    run = forecast(recipe, sizes_of(recipe.target.path), conversations_of(recipe))
    assert run.features == pytest.approx(740e9, rel=0.01)
    assert run.parameters == pytest.approx(0.24e9, rel=0.02)
    # 0.236 B weights: masters, gradients, moments and bf16 copies; embedding and LM head in bf16
    assert run.memory > 0.236e9 * 18 + 2 * 32_000 * 4_096 * 2
    assert forecast(recipe, sizes_of(recipe.target.path), 34_000).features == pytest.approx(run.features / 2)


def test_activations_are_what_autograd_keeps() -> None:
    """Distinct storages that a real step saves for its backward pass, within a quarter."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    torch.manual_seed(0)
    target, head = Target(LlamaForCausalLM(config)), DRAFTERS["eagle1"].for_target(SETTINGS, config).train()
    tokens = torch.randint(512, (400,))
    features = target.features(tokens[None], (-1,))[0]
    batch = collate([Example(tokens, torch.ones(400, dtype=torch.bool), features)], (-1,))
    weights = {tensor.untyped_storage().data_ptr() for tensor in [*head.parameters(), *target.model.parameters()]}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        head(batch, target.head)["total"]
    measured = sum(storage.nbytes() for storage in kept.values())
    assert activation_bytes(head.shape, 398, 4) == pytest.approx(measured, rel=0.25)


def test_flops_are_what_torch_counts() -> None:
    """Three times the forward of the weights, at every token, by torch's own counter."""
    from torch.utils.flop_counter import FlopCounterMode

    head = module.empty_head(SETTINGS, sizes_of("lmsys/vicuna-7b-v1.3").config)
    tokens, width, vocabulary = 100, head.shape.hidden_size, head.shape.vocab_size
    matrices = [tensor for tensor in head.parameters() if tensor.dim() == 2]
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        for matrix in matrices:
            torch.zeros(tokens, matrix.shape[1]) @ matrix.detach().T
    rest = training_flops(head, tokens) - 3 * counter.get_total_flops()
    assert rest == pytest.approx(0.75 * tokens * 6 * width * vocabulary, rel=1e-3)


def test_unknown_data_asks_for_its_size() -> None:
    """No number is invented."""
    with pytest.raises(ValueError, match=r"my\.jsonl holds is not known: give --conversations N"):
        conversations_of(Recipe.load(VICUNA, ["data.train=my.jsonl"]))
    assert conversations_of(Recipe.load(VICUNA, ["data.train=my.jsonl", "data.limit=7"])) == 7


def test_a_target_in_a_folder_is_measured(tmp_path: Path) -> None:
    """What is not in the table comes from the target's own config."""
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
    config.num_attention_heads = config.num_key_value_heads = 4
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    sizes = sizes_of(str(tmp_path))
    counted = sum(tensor.numel() for tensor in LlamaForCausalLM(config).parameters())
    assert (sizes.parameters, sizes.active, sizes.head_dim) == (counted, counted, 8)


@pytest.mark.skipif(not CONFIGS.exists(), reason="the configs of published targets are not beside the checkout")
@pytest.mark.parametrize("name", ["llama-3.1-8b-instruct", "qwen3-30b-a3b", "qwen3-0.6b", "gpt-oss-20b"])
def test_the_table_of_sizes_is_the_configs_own(name: str) -> None:
    """Every row of docs/results/sizes.json would be made so again."""
    facts = json.loads((CONFIGS / f"{name}.json").read_text())
    facts.pop("quantization_config", None)
    made = sizes_of_config(AutoConfig.for_model(facts.pop("model_type"), **facts))
    known = json.loads(module.KNOWN.read_text())
    (row,) = (sizes for path, sizes in known.items() if path.split("/")[1].lower() == name)
    assert made == module.Sizes(**row)
