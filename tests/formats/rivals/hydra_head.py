"""Random heads of zankner/Hydra, or heads that its loader reads, and their logits; see `random_head`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from hydra.model import hydra_model
from safetensors.torch import load_file

from tests.formats.rivals.random_head import HeadRequest, randomize_, save_logits


def main() -> None:
    """Write the logits of all heads at all positions of the text, read as in training."""
    request = HeadRequest.from_command_line()
    # the target has no tokenizer
    tokenizer = SimpleNamespace(pad_token_id=-1)
    hydra_model.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: tokenizer)
    if not request.switches.get("load"):
        config = hydra_model.HydraConfig(
            hydra_num_heads=request.steps,
            hydra_num_layers=4 if request.switches.get("four_layers") else 1,
            hydra_head_arch="prefix-mlp" if request.switches.get("prefix") else "mlp",
            base_model_name_or_path=request.target,
            grounded_heads=True,
        )
        config.save_pretrained(request.out)
        torch.save({}, Path(request.out) / "hydra_lm_head.pt")
    model = hydra_model.HydraModel.from_pretrained(request.out).eval()
    if not request.switches.get("load"):
        # what does not learn belongs to the target
        randomize_(weight for weight in model.hydra_head.parameters() if weight.requires_grad)
        model.base_model.load_state_dict(
            load_file(Path(request.target) / "model.safetensors"), strict=False
        )
        torch.save(model.hydra_head.state_dict(), Path(request.out) / "hydra_lm_head.pt")
    tokens = load_file(request.inputs)["tokens"]
    logits = model(tokens[None], run_hydra_head=True)[0]
    save_logits(request, [rows[0].detach() for rows in logits])


if __name__ == "__main__":
    main()
