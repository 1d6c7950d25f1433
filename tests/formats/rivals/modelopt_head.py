"""A random EAGLE-3 head of `nvidia-modelopt`, as it exports it, and its logits; see `random_head`."""

from __future__ import annotations

from copy import deepcopy
from itertools import count
from typing import Any

import modelopt.torch.speculative as mtsp
import torch
from modelopt.torch.export import export_speculative_decoding
from modelopt.torch.speculative.config import EAGLE3_DEFAULT_CFG
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.formats.rivals.random_head import HeadRequest, randomize_, record_logits, save_logits

SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def make_settings(
    request: HeadRequest,
    config: Any,
    draft_vocab_size: int,
) -> dict[str, Any]:
    """Return their settings of a head as wide as the target."""
    settings = deepcopy(EAGLE3_DEFAULT_CFG["config"])
    settings["eagle_offline"] = True
    settings["eagle_use_torch_compile"] = False
    settings["eagle_ttt_steps"] = request.steps
    architecture = {name: getattr(config, name) for name in SHAPE}
    architecture["draft_vocab_size"] = draft_vocab_size
    architecture["num_hidden_layers"] = 1
    architecture["has_lm_head"] = True
    settings["eagle_architecture_config"] |= architecture
    # they write a YaRN into what they export, and do not train with it
    if not request.switches.get("as_exported"):
        settings["eagle_export_rope_scaling"] = {}
    return settings


def compute_as_exported(model: Any) -> None:
    """Rotate by the YaRN that their exporter writes, and norm the state once, as engines do."""
    head = model.eagle_module
    scaled = deepcopy(head.config)
    scaled.rope_parameters = {"rope_theta": 10000.0, **model.eagle_export_rope_scaling}
    head.rotary_emb = LlamaRotaryEmbedding(scaled)
    norm = head.layers[0].input_layernorm
    apply_norm = norm.forward
    calls = count()
    # it is called with the state, then with the token's embedding
    norm.forward = lambda x: apply_norm(x) if next(calls) % 2 else x


def main() -> None:
    """Write the logits of their model in the steps of their training on stored features.

    Switches: `input_layernorm` moves the norm that they use twice, `as_exported` computes what the export says.
    """
    request = HeadRequest.from_command_line()
    logits: list[Tensor] = []
    tokens, features, drafts = request.load_inputs()
    model = AutoModelForCausalLM.from_pretrained(request.target, dtype=torch.float32)
    config = model.config
    config.num_orig_hidden_layers = config.num_hidden_layers
    settings = make_settings(request, config, len(drafts))
    mtsp.convert(model, mode=[("eagle", settings)])
    head = model.eagle_module
    randomize_(head.parameters())
    if not request.switches.get("input_layernorm"):
        # ones, as it is used on the token's embedding, and on the state before that one's own norm
        torch.nn.init.ones_(head.layers[0].input_layernorm.weight)
    if len(drafts) < config.vocab_size:
        head.d2t.copy_(drafts - torch.arange(len(drafts)))
    if request.switches.get("as_exported"):
        compute_as_exported(model)
    record_logits(head.lm_head, logits)
    everything = torch.ones(1, len(tokens), dtype=torch.long)
    outputs = {
        # what the target's last layer says decides no logits of the head
        "base_model_hidden_states": torch.randn(1, len(tokens), config.hidden_size),
        "aux_hidden_states": features[None],
    }
    with torch.no_grad():
        model.train()(
            input_ids=tokens[None],
            labels=tokens[None],
            loss_mask=everything,
            attention_mask=everything,
            base_model_outputs=outputs,
        )
    export_speculative_decoding(model, export_dir=request.out)
    # step s stands s positions later there
    save_logits(request, [rows.roll(-step, 0) for step, rows in enumerate(logits)])


if __name__ == "__main__":
    main()
