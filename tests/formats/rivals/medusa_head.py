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


def make_model(request: HeadRequest, layers: int, version2: bool) -> Any:
    """Their model with random heads, of which they save a state dict and a config."""
    out = Path(request.out)
    if version2:
        config = medusa_model_legacy.MedusaConfig(
            request.steps, layers, base_model_name_or_path=request.target
        )
        base = medusa_model_legacy.KVLlamaForCausalLM.from_pretrained(request.target)
        model = medusa_model_legacy.MedusaModel(base, request.steps, layers, request.target)
    else:
        config = medusa_model.MedusaConfig(
            request.steps, layers, base_model_name_or_path=request.target
        )
        base = AutoConfig.from_pretrained(request.target)
        base.medusa_num_heads, base.medusa_num_layers = request.steps, layers
        model = medusa_model.KVLlamaForCausalLM.from_pretrained.__func__(
            medusa_model.MedusaModelLlama, request.target, config=base
        )
    randomize_(model.medusa_head.parameters())
    config.save_pretrained(out)
    torch.save(model.medusa_head.state_dict(), out / "medusa_lm_head.pt")
    return model


def main() -> None:
    """All heads at all places of the text; a tokenizer, which heads have no need of, is not there."""
    request = HeadRequest.from_command_line()
    version2 = request.switches.get("version2", False)
    for module in (medusa_model, medusa_model_legacy):
        module.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: None)
    if request.switches.get("load"):
        loader = medusa_model_legacy.MedusaModel if version2 else medusa_model.MedusaModel
        model = loader.from_pretrained(request.out)
    else:
        model = make_model(request, 2 if request.switches.get("two_layers") else 1, version2)
    tokens = load_file(request.inputs)["tokens"]
    more = {} if version2 else {"medusa_forward": True}
    logits = model.eval()(tokens[None], **more)
    save_logits(request, [rows[0] for rows in logits])


if __name__ == "__main__":
    main()
