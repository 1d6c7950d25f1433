"""The layouts in which the authors of methods published their heads: what their own code loads."""

from __future__ import annotations

from eagle.core.drafter import TrainableDrafter
from eagle.formats.engines.engine import Engine
from eagle.formats.layout import Layout, TargetConfig
from eagle.formats.networks.block_layouts import (
    DEEPSPEC_STYLES,
    DFLASH,
    DSPARK,
    SPECFORGE_STYLES,
    ZLAB_STYLES,
    InjectedLayout,
)
from eagle.formats.networks.eagle_layouts import FEATURES, FUSED, FeatureLayout, FusedLayout, add_embedding
from eagle.formats.networks.falcon_heads import FALCON, PublishedFalcon
from eagle.formats.networks.layers_and_tokens import usual_layers
from eagle.formats.networks.level_heads import (
    HYDRA,
    MEDUSA,
    SPECULATOR,
    PublishedHydra,
    PublishedMedusa,
    PublishedSpeculator,
)
from eagle.formats.networks.mtp_layers import DEEPSEEK_NAMES, MIMO_NAMES, MTP, MtpLayout

FAMILIES = ("llama", "qwen2", "qwen3", "mixtral")  # it takes every other target for a Mixtral

EAGLE_SERVE = """```python
from eagle.model.ea_model import EaModel  # of SafeAILab/EAGLE

model = EaModel.from_pretrained(base_model_path="TARGET", ea_model_path="HEAD", use_eagle3=EAGLE3)
```

Not run by this project: names, shapes and keys are those of the published heads."""


def _finish_features(layout: Layout, drafter: TrainableDrafter, target_config: TargetConfig) -> Layout:
    """The config says whether `fc` has a bias, which is left out where it is zero."""
    bias = bool(layout.tensors["fc.bias"].any())
    tensors = {name: tensor for name, tensor in layout.tensors.items() if bias or name != "fc.bias"}
    _check_eagle(drafter, target_config)
    return add_embedding(Layout({**layout.config, "bias": bias}, tensors, layout.serve), drafter, "eagle")


def _finish_fused(layout: Layout, drafter: TrainableDrafter, target_config: TargetConfig) -> Layout:
    """Check that the taps are the published layers."""
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
    """Raise ValueError for a target or head that this code cannot load."""
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
        FEATURES: FeatureLayout(EAGLE_SERVE.replace("EAGLE3", "False"), ("LlamaForCausalLM",), finish=_finish_features),
        FUSED: FusedLayout(EAGLE_SERVE.replace("EAGLE3", "True"), ("LlamaForCausalLM",), finish=_finish_fused),
    },
    scalings=(),
)
MEDUSA_CODE = Engine(
    name="medusa",
    title="FasterDecoding/Medusa",
    networks={
        MEDUSA: PublishedMedusa(
            """```python
# of FasterDecoding/Medusa: for LM heads of their own, and for the target's (drafter.lm_head=target)
from medusa.model.medusa_model import MedusaModelLlama
from medusa.model.medusa_model_legacy import MedusaModel

model = MedusaModelLlama.from_pretrained("HEAD")
```

The first class makes five heads whatever the config says: one that is missing stays random, and costs acceptance at its
place alone. Both draw "typically" at a temperature above 0, which is not the target's distribution.

Its heads say here what they say there; generation by that code was not run by this project."""
        )
    },
)
HYDRA_CODE = Engine(
    name="hydra",
    title="zankner/Hydra",
    networks={
        HYDRA: PublishedHydra(
            """```python
from hydra.model.hydra_model import HydraModel  # of zankner/Hydra

model = HydraModel.from_pretrained("HEAD", base_model="TARGET")
```

At a temperature above 0 it accepts "typically", which is not the target's distribution.

Its heads say here what they say there; generation by that code was not run by this project."""
        )
    },
    scalings=(),  # of its own modelling file, which knows none of today's
)
FMS = Engine(
    name="fms",
    title="fms-extras",
    networks={
        SPECULATOR: PublishedSpeculator(
            """```python
from fms_extras.models.hf.modeling_mlp_speculator import MLPSpeculatorPreTrainedModel

speculator = MLPSpeculatorPreTrainedModel.from_pretrained("HEAD")
```

vLLM served such a folder up to 0.9.2. What it says is what it says here; generation by that code was not run by this
project."""
        )
    },
)
FALCON_CODE = Engine(
    name="falcon",
    title="Bestpay-inc/Falcon",
    networks={
        FALCON: PublishedFalcon(
            """```python
from models.falcon_model import FaModel  # of Bestpay-inc/Falcon

model = FaModel.from_pretrained(base_model_path="TARGET", fa_model_path="HEAD")
```

As published, that code feeds the whole tuple of its LSTM to the next layer and does not run: take the first part of it.
Names, shapes and keys are those of its source."""
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
        DFLASH: InjectedLayout(
            """```python
from dflash.model import DFlashDraftModel  # of z-lab/dflash

draft = DFlashDraftModel.from_pretrained("HEAD")
```

Its own `dflash_generate` always lets a slot see its whole block: a head that was trained with `drafter.causal=true` is
read so by engines alone (vLLM, llama.cpp).

Its heads say here what they say there; generation by that code was not run by this project.""",
            styles=ZLAB_STYLES,
            causal=True,
        )
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
            copies=True,
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
        )
        for network, styles in ((DFLASH, ZLAB_STYLES), (DSPARK, SPECFORGE_STYLES))
    },
    scalings=None,
)
PUBLISHED = (REFERENCE, MEDUSA_CODE, HYDRA_CODE, FMS, FALCON_CODE, ZLAB, DEEPSPEC, SPECFORGE, DEEPSEEK, MIMO)
