"""SGLang's layout (0.5.23, read and not run): it takes the target's embedding whatever the head brings."""

from __future__ import annotations

from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.feature_layout import features_layout, is_features
from eagle.formats.fused import fused_layout
from eagle.formats.layout import Layout

SERVE = """```sh
python -m sglang.launch_server --model-path TARGET --speculative-algorithm METHOD \\
    --speculative-draft-model-path HEAD --speculative-num-steps DEPTH \\
    --speculative-eagle-topk 1 --speculative-num-draft-tokens NODES
```

SGLang 0.5.23. The last number counts the root too: one more than the steps of a chain. The server's log and `/metrics`
(`--enable-metrics`) tell the accept length, in which the target's own token counts.

Not run by this project, for it needs a GPU: names, shapes and keys are those of SGLang's source."""


def layout(drafter: TrainableDrafter, target_config: Any) -> Layout:
    """A residual that is normed is not known there."""
    if is_features(drafter):
        made = features_layout(drafter, target_config, "sglang")
        return made.of(SERVE.replace("METHOD", "EAGLE"), architectures=["LlamaForCausalLMEagle"])
    made = fused_layout(drafter, target_config, "sglang", ("fc_norm", "norm_output"))
    return made.of(SERVE.replace("METHOD", "EAGLE3"))
