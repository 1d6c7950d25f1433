"""The layout of `speculators` (0.9.0), which vLLM and llama.cpp read too; it has none for EAGLE-1."""

from __future__ import annotations

from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.engine import SCALINGS, Engine
from eagle.formats.layout import Layout, rotary_of
from eagle.formats.networks import FUSED, SWITCHES, FusedLayout, add_embedding
from eagle.formats.vllm import ON_CPU

DEPTH = 3  # which the config wants to be told; a server may be told otherwise
HEAD_KEYS = (*SWITCHES, "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
SERVE = """```sh
vllm serve TARGET --speculative-config '{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": DEPTH}'
```

The folder is one of `speculators` 0.9.0 (`SpeculatorModel.from_pretrained`), which vLLM 0.32.0 and llama.cpp's
converter read too. The loader of `speculators` was run with this layout; vLLM and llama.cpp were not run with it, but
with layouts of their own.""" + ON_CPU.replace("METHOD", "eagle3")


def _nest_block(layout: Layout, drafter: TrainableDrafter, target_config: Any) -> Layout:
    """The block's config nested in the head's; every switch is written, since readers assume different things."""
    block = {
        key: value for key, value in layout.config.items() if key not in (*HEAD_KEYS, "architectures", "eagle_config")
    }
    block["rope_parameters"] = rotary_of(drafter.shape)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": DEPTH,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        **{name: layout.config[name] for name in HEAD_KEYS},
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": block["torch_dtype"],
        "transformer_layer_config": {**block, "architectures": ["LlamaForCausalLM"]},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": target_config.name_or_path or None,
                "architectures": target_config.architectures or ["LlamaForCausalLM"],
            },
        },
    }
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in layout.tensors.items()}
    return add_embedding(Layout(config, tensors, layout.serve), drafter, "speculators")


SPECULATORS = Engine(
    name="speculators",
    title="speculators",
    networks={FUSED: FusedLayout(SERVE, switches=SWITCHES, reads_embedding=True, finish=_nest_block)},
    scalings=(*SCALINGS, "dynamic"),  # as vLLM, which reads it
)
