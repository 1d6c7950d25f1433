"""TensorRT-LLM's layout (its PyTorch backend, read and not run): the layers are named when it is started."""

from __future__ import annotations

from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.fused import fused_layout
from eagle.formats.layout import Layout

SERVE = """```sh
trtllm-serve TARGET --extra_llm_api_options eagle3.yaml
```

with `eagle3.yaml`:

```yaml
speculative_config:
  decoding_type: Eagle3
  max_draft_len: DEPTH
  speculative_model: HEAD
  eagle3_layers_to_capture: LAYERS
```

TensorRT-LLM reads no layer ids from the head: these count the *outputs* of layers, one less than `drafter.taps`.

Not run by this project, for it needs a GPU: names, shapes and keys are those of TensorRT-LLM's source."""


def layout(drafter: TrainableDrafter, target_config: Any) -> Layout:
    """A residual that is normed is not known there; whether heads of EAGLE-1 still are was not found out."""
    made = fused_layout(drafter, target_config, "trtllm", ("fc_norm", "norm_output"))
    nested = made.config["eagle_config"]
    nested |= {switch: made.config[switch] for switch in ("fc_norm", "norm_output")}
    layers = nested["eagle_aux_hidden_state_layer_ids"]
    return made.of(SERVE.replace("LAYERS", str(layers)), eagle_config=nested)
