"""The layouts in which heads are published: those of the methods' authors, of speculators and of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.engines.engine import SCALINGS, Engine
from eagle.formats.engines.servers import explain_serving
from eagle.formats.layout import Layout, TargetConfig, rotary_of
from eagle.formats.networks.block_layouts import (
    DEEPSPEC_STYLES,
    DFLASH,
    DFLASH2,
    DSPARK,
    SPECFORGE_STYLES,
    SPECULATORS_STYLES,
    XPRESS,
    ZLAB_STYLES,
    InjectedLayout,
    propose_config,
)
from eagle.formats.networks.eagle_layouts import (
    FEATURES,
    FUSED,
    PEAGLE,
    FeatureLayout,
    FusedLayout,
    ParallelLayout,
    add_embedding,
)
from eagle.formats.networks.falcon_heads import FALCON, write_falcon
from eagle.formats.networks.layers_and_tokens import JOINT_NORM, SWITCHES, usual_layers
from eagle.formats.networks.level_networks import (
    HYDRA,
    MEDUSA,
    SPECULATOR,
    write_hydra,
    write_medusa,
    write_speculator,
)
from eagle.formats.networks.mtp_layers import DEEPSEEK_NAMES, MIMO_NAMES, MTP, MtpLayout
from eagle.formats.networks.network_layout import NetworkLayout

# model types of targets that SafeAILab/EAGLE reads; it takes every other target for a Mixtral
FAMILIES = ("llama", "qwen2", "qwen3", "mixtral")

EAGLE_SERVE = """```python
from eagle.model.ea_model import EaModel  # of SafeAILab/EAGLE

model = EaModel.from_pretrained(base_model_path="TARGET", ea_model_path="HEAD", use_eagle3=EAGLE3)
```

Not run by this project: names, shapes and keys are those of the published heads."""


def _finish_features(
    layout: Layout, drafter: TrainableDrafter, target_config: TargetConfig
) -> Layout:
    """Return EAGLE-1's layout for SafeAILab/EAGLE, with the target's embedding and without a bias of zeros.

    The config's `bias` tells that code whether `fc` has a bias. ValueError for what the code cannot load.

    Args:
        layout: The layout that `FeatureLayout` wrote, which always has a bias.
        drafter: The head, bound to its target.
        target_config: The target's config.
    """
    _check_eagle(drafter, target_config)
    tensors = dict(layout.tensors)
    has_bias = bool(tensors["fc.bias"].any())
    if not has_bias:
        del tensors["fc.bias"]
    return add_embedding(
        Layout({**layout.config, "bias": has_bias}, tensors, layout.serve), drafter, "eagle"
    )


def _finish_fused(layout: Layout, drafter: TrainableDrafter, target_config: TargetConfig) -> Layout:
    """Return EAGLE-3's layout for SafeAILab/EAGLE, with the target's embedding.

    ValueError if the head reads other layers than that code, which does not read them from the config.

    Args:
        layout: The layout that `FusedLayout` wrote.
        drafter: The head, bound to its target.
        target_config: The target's config.
    """
    layers = target_config.num_hidden_layers
    published = usual_layers(layers)
    if layout.config["eagle_aux_hidden_state_layer_ids"] != [*published]:
        raise ValueError(
            f"eagle: drafter.taps is {drafter.taps}, but this code always reads {published} of {layers} layers: train "
            "with these, or export to an engine that is told"
        )
    _check_eagle(drafter, target_config)
    return add_embedding(layout, drafter, "eagle")


def _check_eagle(drafter: TrainableDrafter, target_config: TargetConfig) -> None:
    """Raise ValueError for a target or a head that the code of SafeAILab/EAGLE cannot load."""
    if target_config.model_type not in FAMILIES:
        raise ValueError(
            f"eagle: the target is a {target_config.model_type}, and this code reads {', '.join(FAMILIES)}: export to "
            "an engine that serves it"
        )
    shape = drafter.shape
    if shape.head_dim * shape.num_attention_heads != shape.hidden_size:
        raise ValueError(
            f"eagle: head_dim is {shape.head_dim}, but this code takes hidden_size / num_attention_heads = "
            f"{shape.hidden_size} / {shape.num_attention_heads} and refuses others: export to another engine"
        )


REFERENCE = Engine(
    name="eagle",
    title="SafeAILab/EAGLE",
    networks={
        FEATURES: FeatureLayout(
            EAGLE_SERVE.replace("EAGLE3", "False"), ("LlamaForCausalLM",), finish=_finish_features
        ),
        FUSED: FusedLayout(
            EAGLE_SERVE.replace("EAGLE3", "True"), ("LlamaForCausalLM",), finish=_finish_fused
        ),
    },
    scalings=(),
)
MEDUSA_CODE = Engine(
    name="medusa",
    title="FasterDecoding/Medusa",
    networks={
        MEDUSA: NetworkLayout(
            """```python
# of FasterDecoding/Medusa: for LM heads of their own, and for the target's (drafter.lm_head=target)
from medusa.model.medusa_model import MedusaModelLlama
from medusa.model.medusa_model_legacy import MedusaModel

model = MedusaModelLlama.from_pretrained("HEAD")
```

The first class makes five heads whatever the config says: one that is missing stays random, and costs acceptance at its
place alone. Both draw "typically" at a temperature above 0, which is not the target's distribution.

Its heads say here what they say there; generation by that code was not run by this project.""",
            writer=write_medusa,
        )
    },
)
HYDRA_CODE = Engine(
    name="hydra",
    title="zankner/Hydra",
    networks={
        HYDRA: NetworkLayout(
            """```python
from hydra.model.hydra_model import HydraModel  # of zankner/Hydra

model = HydraModel.from_pretrained("HEAD", base_model="TARGET")
```

At a temperature above 0 it accepts "typically", which is not the target's distribution.

Its heads say here what they say there; generation by that code was not run by this project.""",
            writer=write_hydra,
        )
    },
    scalings=(),  # of its own modelling file, which knows none of today's
)
FMS = Engine(
    name="fms",
    title="fms-extras",
    networks={
        SPECULATOR: NetworkLayout(
            """```python
from fms_extras.models.hf.modeling_mlp_speculator import MLPSpeculatorPreTrainedModel

speculator = MLPSpeculatorPreTrainedModel.from_pretrained("HEAD")
```

vLLM served such a folder up to 0.9.2. What it says is what it says here; generation by that code was not run by this
project.""",
            writer=write_speculator,
        )
    },
)
FALCON_CODE = Engine(
    name="falcon",
    title="Bestpay-inc/Falcon",
    networks={
        FALCON: NetworkLayout(
            """```python
from models.falcon_model import FaModel  # of Bestpay-inc/Falcon

model = FaModel.from_pretrained(base_model_path="TARGET", fa_model_path="HEAD")
```

As published, that code feeds the whole tuple of its LSTM to the next layer and does not run: take the first part of it.
Names, shapes and keys are those of its source.""",
            writer=write_falcon,
        )
    },
    scalings=(),
)

DEEPSEEK = Engine(
    name="deepseek",
    title="DeepSeek's MTP layer",
    networks={
        MTP: MtpLayout(
            """The tensors are named as those of DeepSeek-V3's layer of multi-token prediction.
They stand beside the target's config, with copies of its embedding and LM head, and can be put among the target's own
tensors. The block is a Llama's: engines that expect latent attention or experts there cannot load it as it is.

With equal experts written around it, vLLM 0.32.0 (DeepSeek-V3's and GLM-4.5's layers) and llama.cpp (`draft-mtp`,
GLM-4.5's) accept at every place of a draft what this project's decoder accepts when it reads what they read:
docs/serving.md.""",
            names=DEEPSEEK_NAMES,
        )
    },
    scalings=None,
)
MIMO = Engine(
    name="mimo",
    title="MiMo's MTP layer",
    networks={
        MTP: MtpLayout(
            """The tensors are named as those of MiMo's layer of multi-token prediction. They stand beside the target's
config, with copies of its embedding and LM head, and can be put among the target's own tensors. `--to vllm` tells how
it is served.""",
            names=MIMO_NAMES,
            hidden_first=True,
            biased=True,
        )
    },
    scalings=None,
)
ZLAB = Engine(
    name="zlab",
    title="z-lab/dflash",
    networks={
        network: InjectedLayout(
            f"""```python
from dflash.model import {model}  # of z-lab/dflash

draft = {model}.from_pretrained("HEAD")
```

Its package 0.1.0 reads windows and `is_causal`. Older code always lets a slot see its whole block and context.

Its heads say here what they say there; generation by that code was not run by this project.""",
            styles=ZLAB_STYLES,
            reads_causal=True,
            reads_window=True,
        )
        for network, model in ((DFLASH, "DFlashDraftModel"), (DFLASH2, "DFlash2DraftModel"))
    },
    scalings=None,
)
DEEPSPEC = Engine(
    name="deepspec",
    title="deepseek-ai/DeepSpec",
    networks={
        network: InjectedLayout(
            """```python
from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel  # of deepseek-ai/DeepSpec

draft = Qwen3DSparkModel.from_pretrained("HEAD", attn_implementation="eager")
```

What that project calls DFlash is this network without a Markov head (`markov_rank` 0): its slot k names the token
behind its place. In z-lab's DFlash it names the one at its place: no reader of one reads the other.

Its heads say here what they say there; generation by that code was not run by this project.""",
            styles=DEEPSPEC_STYLES,
            brings_copies=True,
        )
        for network in (DFLASH, DSPARK)
    },
    scalings=None,
)
SPECFORGE = Engine(
    name="specforge",
    title="sgl-project/SpecForge",
    networks={
        network: InjectedLayout(
            """```python
from specforge.modeling.auto import AutoDraftModel  # of sgl-project/SpecForge

draft = AutoDraftModel.from_pretrained("HEAD")
```

Its heads say here what they say there; generation by that code was not run by this project.""",
            styles=styles,
            reads_window=True,
        )
        for network, styles in (
            (DFLASH, ZLAB_STYLES),
            (DFLASH2, ZLAB_STYLES),
            (DSPARK, SPECFORGE_STYLES),
        )
    },
    scalings=None,
)


# -- speculators (0.9.0), which vLLM and llama.cpp read too; it has none for EAGLE-1 -----------------------------------

SPECULATORS_DEPTH = 3  # which the config wants to be told; a server may be told otherwise
SPECULATORS_HEAD_KEYS = (
    *SWITCHES,
    JOINT_NORM,
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "mask_token_id",
)
SPECULATOR_CLASSES = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}
SPECULATORS_FOLDER = (
    "The folder is one of `speculators` 0.9.0 (`SpeculatorModel.from_pretrained`), "
)
SPECULATORS_CHAINS = f"""{SPECULATORS_FOLDER}which vLLM 0.32.0 and llama.cpp's
converter read too. The loader of `speculators` was run with this layout; vLLM and llama.cpp were not run with it, but
with layouts of their own."""
SPECULATORS_PARALLEL = f"""{SPECULATORS_FOLDER}whose loader was run with this layout.
vLLM 0.32.0 reads it too, by its V1 model runner; it was not run."""
SPECULATORS_BLOCKS = f"""{SPECULATORS_FOLDER}whose loader was run with this layout.
vLLM 0.32.0 reads it too, but for blocks without a Markov head whose first slot names a token, and for Markov heads that
are gated or recurrent; SGLang refuses DSpark's folders of this layout. Neither was run."""
SPECULATORS_REFINED = f"""{SPECULATORS_FOLDER}whose loader was run with this layout.
Its `from_pretrained` leaves the mask `refiner_head.causal_tril` unset: call `.fill_(1).tril_()` on it. vLLM 0.33.0
reads XPress by other names: export to vllm."""
SPECULATORS_SERVE = explain_serving("eagle3", SPECULATORS_CHAINS)
SPECULATORS_SERVE_MASKS = explain_serving(
    "eagle3", SPECULATORS_PARALLEL, more='"parallel_drafting": true', cpu=False
)


def _nest_block(layout: Layout, drafter: TrainableDrafter, target_config: TargetConfig) -> Layout:
    """Return the layout of EAGLE-3 or P-EAGLE for speculators, which nests the block's config in the head's.

    Every switch, a boolean setting of the network, is written, since readers have different defaults.

    Args:
        layout: The layout that `FusedLayout` or `ParallelLayout` wrote, with a flat config.
        drafter: The head, bound to its target, whose embedding is copied.
        target_config: The target's config.
    """
    # split the flat config: these keys are the head's and the others the block's
    head = {key: layout.config[key] for key in SPECULATORS_HEAD_KEYS if key in layout.config}
    block = {key: value for key, value in layout.config.items() if key not in head}
    # neither is the block's: the first is not part of this config, the second becomes the block's own class
    del block["eagle_config"]
    del block["architectures"]
    block |= {"rope_parameters": rotary_of(drafter.shape), "architectures": ["LlamaForCausalLM"]}
    algorithm = "peagle" if "mask_token_id" in head else "eagle3"
    config = {
        "architectures": [SPECULATOR_CLASSES[algorithm]],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        JOINT_NORM: False,
        **head,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": block["torch_dtype"],
        "transformer_layer_config": block,
        "speculators_config": propose_config(
            algorithm, layout.max_depth or SPECULATORS_DEPTH, target_config
        ),
    }
    # speculators numbers EAGLE-3's block too
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor for name, tensor in layout.tensors.items()
    }
    return add_embedding(replace(layout, config=config, tensors=tensors), drafter, "speculators")


SPECULATORS = Engine(
    name="speculators",
    title="speculators",
    networks={
        FUSED: FusedLayout(
            SPECULATORS_SERVE,
            switches=(*SWITCHES, JOINT_NORM),
            reads_embedding=True,
            finish=_nest_block,
        ),
        PEAGLE: ParallelLayout(
            SPECULATORS_SERVE_MASKS,
            switches=("norm_before_residual",),
            reads_embedding=True,
            finish=_nest_block,
        ),
        **{
            network: InjectedLayout(
                guide,
                styles=SPECULATORS_STYLES,
                reads_window=True,
                frees_windows=True,
                trains_at_root=True,
                # DFlash2 drafts the whole vocabulary there
                reads_draft_vocab=network != DFLASH2,
            )
            for network, guide in (
                (DFLASH, explain_serving(DFLASH, SPECULATORS_BLOCKS, cpu=False)),
                (DFLASH2, explain_serving(DFLASH, SPECULATORS_BLOCKS, cpu=False)),
                (DSPARK, explain_serving(DSPARK, SPECULATORS_BLOCKS, cpu=False)),
                (XPRESS, SPECULATORS_REFINED),
            )
        },
    },
    scalings=(*SCALINGS, "dynamic"),  # as vLLM, which reads it
)


# -- a draft model as transformers itself writes one; engines load such a folder as they load any model ----------------

LANGUAGE_MODEL = "draft_model"  # the network of a whole model

TRANSFORMERS_SERVE = """```python
from transformers import AutoModelForCausalLM

target, draft = (AutoModelForCausalLM.from_pretrained(name) for name in ("TARGET", "HEAD"))
target.generate(..., assistant_model=draft)
```

```sh
vllm serve TARGET --speculative-config '{"method": "draft_model", "model": "HEAD", "num_speculative_tokens": DEPTH}'
```

It has no tokenizer of its own, for it speaks the target's: copy those files beside it for an engine that asks.
transformers was run with this layout, vLLM was not."""


def write_model(drafter: Any, target_config: TargetConfig, engine: str) -> Layout:
    """Return a draft model, a whole language model, as transformers saves it; of tied tensors only the first.

    Args:
        drafter: The draft model; its own config is written.
        target_config: Not read.
        engine: Not read.
    """
    model = drafter.model
    # tied tensors share their memory, so its address tells them: address -> (name, tensor)
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        tensors.setdefault(tensor.data_ptr(), (name, tensor.detach().cpu()))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "dtype": dtype}
    return Layout(config, dict(tensors.values()))


TRANSFORMERS = Engine(
    name="transformers",
    title="transformers",
    networks={LANGUAGE_MODEL: NetworkLayout(TRANSFORMERS_SERVE, writer=write_model)},
    scalings=None,
    unknown="{kind!r} is a head, which is no model without its target: export to the engine that will serve it "
    "(docs/serving.md)",
)

PUBLISHED = (
    SPECULATORS,
    REFERENCE,
    MEDUSA_CODE,
    HYDRA_CODE,
    FMS,
    FALCON_CODE,
    ZLAB,
    DEEPSPEC,
    SPECFORGE,
    DEEPSEEK,
    MIMO,
    TRANSFORMERS,
)
