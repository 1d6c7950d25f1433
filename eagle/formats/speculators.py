"""The layout of `speculators` (0.9.0), which vLLM and llama.cpp read too; it has none for EAGLE-1."""

from __future__ import annotations

from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.fused import SWITCHES, fused_layout
from eagle.formats.layout import Layout, embedding_of
from eagle.formats.rotary import rotary_of
from eagle.formats.vllm import ON_CPU

DEPTH = 3  # which the config wants to be told; a server may be told otherwise
SERVE = """```sh
vllm serve TARGET --speculative-config '{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": DEPTH}'
```

The folder is one of `speculators` 0.9.0 (`SpeculatorModel.from_pretrained`), which vLLM 0.32.0 and llama.cpp's
converter read too. The loader of `speculators` was run with this layout; vLLM and llama.cpp were not run with it, but
with layouts of their own.""" + ON_CPU.replace("METHOD", "eagle3")


def layout(drafter: TrainableDrafter, target_config: Any) -> Layout:
    """The block's config is nested in the head's; every switch is written, since readers assume different things."""
    made = fused_layout(drafter, target_config, "speculators", SWITCHES, own_embedding=True)
    own = (*SWITCHES, "architectures", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "eagle_config")
    block = {key: value for key, value in made.config.items() if key not in own}
    block["rope_parameters"] = rotary_of(drafter.shape)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        **{name: made.config[name] for name in (*SWITCHES, "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")},
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": block["torch_dtype"],
        "transformer_layer_config": {**block, "architectures": ["LlamaForCausalLM"]},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": DEPTH,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": target_config.name_or_path or None,
                "architectures": target_config.architectures or ["LlamaForCausalLM"],
            },
        },
    }
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in made.tensors.items()}
    return Layout(config, {**tensors, "embed_tokens.weight": embedding_of(drafter, "speculators")}, SERVE)
