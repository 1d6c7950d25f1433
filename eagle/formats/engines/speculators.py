"""The layout of `speculators` (0.9.0), which vLLM and llama.cpp read too; it has none for EAGLE-1."""

from __future__ import annotations

from dataclasses import replace

from eagle.core.drafter import TrainableDrafter
from eagle.formats.engines.engine import SCALINGS, Engine
from eagle.formats.engines.vllm import explain_serving
from eagle.formats.layout import Layout, TargetConfig, rotary_of
from eagle.formats.networks.block_layouts import DFLASH, DSPARK, SPECULATORS_STYLES, InjectedLayout, propose_config
from eagle.formats.networks.eagle_layouts import FUSED, PEAGLE, FusedLayout, ParallelLayout, add_embedding
from eagle.formats.networks.layers_and_tokens import SWITCHES

DEPTH = 3  # which the config wants to be told; a server may be told otherwise
HEAD_KEYS = (*SWITCHES, "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
MASK = "mask_token_id"
SPECULATOR = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}
FOLDER = "The folder is one of `speculators` 0.9.0 (`SpeculatorModel.from_pretrained`), "
CHAINS = f"""{FOLDER}which vLLM 0.32.0 and llama.cpp's
converter read too. The loader of `speculators` was run with this layout; vLLM and llama.cpp were not run with it, but
with layouts of their own."""
PARALLEL = f"""{FOLDER}whose loader was run with this layout.
vLLM 0.32.0 reads it too, by its V1 model runner; it was not run."""
BLOCKS = f"""{FOLDER}whose loader was run with this layout.
vLLM 0.32.0 reads it too, but for blocks without a Markov head whose first slot names a token, and for Markov heads that
are gated or recurrent; SGLang refuses DSpark's folders of this layout. Neither was run."""
SERVE = explain_serving("eagle3", CHAINS)
SERVE_PARALLEL = explain_serving("eagle3", PARALLEL, more='"parallel_drafting": true', cpu=False)


def _nest_block(layout: Layout, drafter: TrainableDrafter, target_config: TargetConfig) -> Layout:
    """The block's config nested in the head's; every switch is written, since readers assume different things."""
    block = {
        key: value
        for key, value in layout.config.items()
        if key not in (*HEAD_KEYS, MASK, "architectures", "eagle_config")
    }
    block["rope_parameters"] = rotary_of(drafter.shape)
    algorithm = "peagle" if MASK in layout.config else "eagle3"
    config = {
        "architectures": [SPECULATOR[algorithm]],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        **{name: layout.config[name] for name in (*HEAD_KEYS, MASK) if name in layout.config},
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": block["torch_dtype"],
        "transformer_layer_config": {**block, "architectures": ["LlamaForCausalLM"]},
        "speculators_config": propose_config(algorithm, layout.deepest or DEPTH, target_config),
    }
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in layout.tensors.items()}
    return add_embedding(replace(layout, config=config, tensors=tensors), drafter, "speculators")


SPECULATORS = Engine(
    name="speculators",
    title="speculators",
    networks={
        FUSED: FusedLayout(SERVE, switches=SWITCHES, reads_embedding=True, finish=_nest_block),
        PEAGLE: ParallelLayout(
            SERVE_PARALLEL, switches=("norm_before_residual",), reads_embedding=True, finish=_nest_block
        ),
        DFLASH: InjectedLayout(explain_serving("dflash", BLOCKS, cpu=False), styles=SPECULATORS_STYLES),
        DSPARK: InjectedLayout(explain_serving("dspark", BLOCKS, cpu=False), styles=SPECULATORS_STYLES),
    },
    scalings=(*SCALINGS, "dynamic"),  # as vLLM, which reads it
)
