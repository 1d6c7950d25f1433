"""TensorRT-LLM's layout (its PyTorch backend, read and not run): the layers are named when it is started."""

from __future__ import annotations

from eagle.formats.engines.engine import Engine
from eagle.formats.networks.dflash_heads import DFLASH
from eagle.formats.networks.dspark_heads import DSPARK, ZLAB_STYLES, InjectedLayout, specforge_config
from eagle.formats.networks.eagle3_heads import FUSED, FusedLayout
from eagle.formats.networks.medusa_heads import MEDUSA
from eagle.formats.reading import traps

SWITCHES = ("fc_norm", "norm_output")

SERVE = """```sh
trtllm-serve TARGET --extra_llm_api_options eagle3.yaml
```

with `eagle3.yaml`:

```yaml
speculative_config:
  decoding_type: Eagle3
  max_draft_len: DEPTH
  speculative_model: HEAD
  eagle3_layers_to_capture: [LAYERS]
```

TensorRT-LLM reads no layer ids from the head: these count the *outputs* of layers, one less than `drafter.taps`.

Not run by this project, for it needs a GPU: names, shapes and keys are those of TensorRT-LLM's source."""
BLOCKS = """```sh
trtllm-serve TARGET --extra_llm_api_options blocks.yaml
```

with `blocks.yaml`:

```yaml
speculative_config:
  decoding_type: METHOD
  max_draft_len: DEPTH
  speculative_model: HEAD
```

TensorRT-LLM takes the layers, the mask token and the block's width from the head (1.4, its PyTorch backend).

Not run by this project, for it needs a GPU: names, shapes and keys are those of TensorRT-LLM's source."""
TRTLLM = Engine(
    name="trtllm",
    title="TensorRT-LLM",
    # whether heads of EAGLE-1 are still read was not found out
    networks={
        FUSED: FusedLayout(SERVE, switches=SWITCHES, nested_switches=SWITCHES),
        DFLASH: InjectedLayout(BLOCKS.replace("METHOD", "DFlash"), styles=ZLAB_STYLES),
        DSPARK: InjectedLayout(BLOCKS.replace("METHOD", "DSpark"), styles={("vanilla", True): specforge_config}),
    },
    past={MEDUSA: "its PyTorch backend has none, but what `trtllm-build` makes reads `--to medusa`"},
    ignored_rotary=("attention_factor", "truncate"),
    traps=(traps.PROMISED_BIAS,),
)
