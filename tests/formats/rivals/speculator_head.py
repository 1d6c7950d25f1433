"""Random MLP speculators of fms-extras, or such that its wrapper reads, and their logits; see `random_head`."""

from __future__ import annotations

import torch
from fms_extras.models.hf.modeling_mlp_speculator import (
    MLPSpeculatorConfig,
    MLPSpeculatorPreTrainedModel,
)
from safetensors.torch import load_file

from tests.formats.rivals.random_head import HeadRequest, randomize_, save_logits


def main() -> None:
    """Write the logits of all levels at all positions that have as many tokens after them."""
    request = HeadRequest.from_command_line()
    inputs = load_file(request.inputs)
    hidden = inputs["hidden"]
    tokens = inputs["tokens"]
    if request.switches.get("load"):
        model = MLPSpeculatorPreTrainedModel.from_pretrained(request.out)
    else:
        config = MLPSpeculatorConfig(
            vocab_size=int(inputs["vocab_size"]),
            emb_dim=hidden.shape[1],
            inner_dim=48,
            n_predict=request.steps,
            top_k_tokens_per_head=[5, 4, 3, 2, 1][: request.steps],
            tie_weights=request.switches.get("tied", False),
            scale_input=request.switches.get("scaled", False),
        )
        model = MLPSpeculatorPreTrainedModel(config)
        randomize_(model.parameters())
        # tied weights are several names of one tensor, which safetensors does not write
        model.save_pretrained(request.out, safe_serialization=False)
    with torch.no_grad():
        logits = model.eval()(hidden[None, : len(tokens) - request.steps], tokens[None, 1:])
    save_logits(request, [rows[0] for rows in logits])


if __name__ == "__main__":
    main()
