"""Random Medusa heads of `nvidia-modelopt` in one file with their target, and their logits; see `random_head`."""

from __future__ import annotations

import modelopt.torch.opt as mto
import modelopt.torch.speculative as mtsp
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.formats.rivals.random_head import HeadRequest, randomize_, save_logits


def main() -> None:
    """Write the logits of all heads at all positions of the text, from their model's own forward."""
    request = HeadRequest.from_command_line()
    model = AutoModelForCausalLM.from_pretrained(request.target, dtype=torch.float32)
    layers = 2 if request.switches.get("two_layers") else 1
    # so that `save_pretrained` writes the heads too
    mto.enable_huggingface_checkpointing()
    settings = {"medusa_num_heads": request.steps, "medusa_num_layers": layers}
    mtsp.convert(model, mode=[("medusa", settings)])
    randomize_(model.medusa_heads.parameters())
    tokens = load_file(request.inputs)["tokens"]
    with torch.no_grad():
        found = model.eval()(input_ids=tokens[None])
    model.save_pretrained(request.out)
    save_logits(request, [rows[0] for rows in found.medusa_logits])


if __name__ == "__main__":
    main()
