"""Random Medusa heads of FasterDecoding/Medusa, or heads that its loader reads, and their logits; see `random_head`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from medusa.model import medusa_model, medusa_model_legacy
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.formats.rivals.random_head import HeadRequest, randomize_, save_logits


def make_model(
    request: HeadRequest,
    layers: int,
    version2: bool,
) -> Any:
    """Return their model with random heads, after saving those and their config as they do."""
    out = Path(request.out)
    if version2:
        config = medusa_model_legacy.MedusaConfig(
            request.steps, layers, base_model_name_or_path=request.target
        )
        base = medusa_model_legacy.KVLlamaForCausalLM.from_pretrained(request.target)
        model = medusa_model_legacy.MedusaModel(
            base,
            request.steps,
            layers,
            request.target,
        )
    else:
        config = medusa_model.MedusaConfig(
            request.steps, layers, base_model_name_or_path=request.target
        )
        base = AutoConfig.from_pretrained(request.target)
        base.medusa_num_heads = request.steps
        base.medusa_num_layers = layers
        # the loader of the base class, which asks for no published head
        model = medusa_model.KVLlamaForCausalLM.from_pretrained.__func__(
            medusa_model.MedusaModelLlama, request.target, config=base
        )
    randomize_(model.medusa_head.parameters())
    # their trainer saves the heads without the model
    config.save_pretrained(out)
    torch.save(model.medusa_head.state_dict(), out / "medusa_lm_head.pt")
    return model


def main() -> None:
    """Write the logits of all heads at all positions of the text."""
    request = HeadRequest.from_command_line()
    version2 = request.switches.get("version2", False)
    # heads need no tokenizer, and the target has none
    for module in (medusa_model, medusa_model_legacy):
        module.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: None)
    if request.switches.get("load"):
        loader = medusa_model_legacy.MedusaModel if version2 else medusa_model.MedusaModel
        model = loader.from_pretrained(request.out)
    else:
        layers = 2 if request.switches.get("two_layers") else 1
        model = make_model(request, layers, version2)
    tokens = load_file(request.inputs)["tokens"]
    options = {} if version2 else {"medusa_forward": True}
    logits = model.eval()(tokens[None], **options)
    save_logits(request, [rows[0] for rows in logits])


if __name__ == "__main__":
    main()
