"""TensorRT-LLM's layout (its PyTorch backend, read and not run): EAGLE-3's layers are named when it is started."""

from __future__ import annotations

from eagle.formats.engines.engine import Engine
from eagle.formats.networks.block_layouts import DFLASH, DSPARK, ZLAB_STYLES, InjectedLayout, specforge_config
from eagle.formats.networks.eagle_layouts import FUSED, FusedLayout
from eagle.formats.networks.level_heads import MEDUSA
from eagle.formats.reading import faults

SWITCHES = ("fc_norm", "norm_output")

SERVE = """```sh
trtllm-serve TARGET --extra_llm_api_options FILE
```

with `FILE`:

```yaml
speculative_config:
  decoding_type: METHOD
  max_draft_len: DEPTH
  speculative_model: HEADMORE
```

TensorRT-LLM READS

Not run by this project, for it needs a GPU: names, shapes and keys are those of TensorRT-LLM's source."""
CHAINS = (
    SERVE.replace("FILE", "eagle3.yaml")
    .replace("METHOD", "Eagle3")
    .replace("MORE", "\n  eagle3_layers_to_capture: [LAYERS]")
    .replace(
        "READS",
        "reads no layer ids from the head: these count the *outputs* of layers, one less than `drafter.taps`.",
    )
)
BLOCKS = (
    SERVE.replace("FILE", "blocks.yaml")
    .replace("MORE", "")
    .replace(
        "READS", "takes the layers, the mask token and the block's width from the head (1.4, its PyTorch backend)."
    )
)
TRTLLM = Engine(
    name="trtllm",
    title="TensorRT-LLM",
    # whether heads of EAGLE-1 are still read was not found out
    networks={
        FUSED: FusedLayout(CHAINS, switches=SWITCHES, nested_switches=SWITCHES),
        DFLASH: InjectedLayout(BLOCKS.replace("METHOD", "DFlash"), styles=ZLAB_STYLES),
        DSPARK: InjectedLayout(BLOCKS.replace("METHOD", "DSpark"), styles={("vanilla", True): specforge_config}),
    },
    past={MEDUSA: "its PyTorch backend has none, but what `trtllm-build` makes reads `--to medusa`"},
    ignored_rotary=("attention_factor", "truncate"),
    faults=(faults.PROMISED_BIAS,),
)
