"""The EAGLE-3 step of `nvidia-modelopt`: run by an interpreter that has it, as `bench.rivals.serve` describes."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy

import modelopt.torch.speculative as mtsp
import torch
from modelopt.torch.speculative.config import EAGLE3_DEFAULT_CFG
from torch import nn
from transformers import AutoModelForCausalLM

from bench.rivals.serve import Step, Work, serve, update_step


def side(work: Work) -> tuple[Step, Iterable[nn.Parameter]]:
    """Their model and loss on stored features, without compilation; its LM head is trained."""
    model = AutoModelForCausalLM.from_pretrained(work.target, dtype=torch.float32)
    config = model.config
    config.num_orig_hidden_layers = config.num_hidden_layers
    settings = deepcopy(EAGLE3_DEFAULT_CFG["config"])
    settings |= {"eagle_offline": True, "eagle_use_torch_compile": False, "eagle_ttt_steps": work.steps}
    shape = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    settings["eagle_architecture_config"] |= {name: getattr(config, name) for name in shape}
    settings["eagle_architecture_config"] |= {"draft_vocab_size": work.draft_vocab, "num_hidden_layers": 1}
    mtsp.convert(model, mode=[("eagle", settings)])
    model.get_input_embeddings().to(work.frozen_dtype)
    model.get_output_embeddings().to(work.frozen_dtype)
    tokens, mask = work.tokens_and_mask(work.batches[0][0])
    width = config.hidden_size
    features = {
        "base_model_hidden_states": torch.randn(1, len(tokens), width, dtype=work.frozen_dtype),
        "aux_hidden_states": torch.randn(1, len(tokens), 3 * width, dtype=work.frozen_dtype),
    }
    batch = {
        "input_ids": tokens[None],
        "labels": tokens[None],
        "loss_mask": mask[None].long(),
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.long),
        "base_model_outputs": features,
    }
    model.train()
    parameters = [*model.eagle_module.parameters()]
    return update_step(lambda _: model(**batch).loss, parameters, work), parameters


if __name__ == "__main__":
    serve(side)
