"""SGLang's layout (0.5.23, read and not run): it takes the target's embedding whatever the head brings."""

from __future__ import annotations

from eagle.formats.engines.engine import Engine
from eagle.formats.networks.block_layouts import (
    DFLASH,
    DOMINO_STYLES,
    DSPARK,
    MARKOV_KINDS,
    ZLAB_STYLES,
    InjectedLayout,
    deepspec_config,
)
from eagle.formats.networks.eagle_layouts import FEATURES, FUSED, FeatureLayout, FusedLayout
from eagle.formats.reading import faults

SERVE = """```sh
python -m sglang.launch_server --model-path TARGET --speculative-algorithm METHOD \\
    --speculative-draft-model-path HEAD --speculative-num-steps DEPTH \\
    --speculative-eagle-topk 1 --speculative-num-draft-tokens NODES
```

SGLang 0.5.23. The last number counts the root too: one more than the steps of a chain. The server's log and `/metrics`
(`--enable-metrics`) tell the accept length, in which the target's own token counts.

Not run by this project, for it needs a GPU: names, shapes and keys are those of SGLang's source."""
BLOCKS = """```sh
python -m sglang.launch_server --model-path TARGET --speculative-algorithm METHOD \\
    --speculative-draft-model-path HEAD
```

SGLang 0.5.23, which takes the block's width from the head.MORE

Not run by this project, for it needs a GPU: names, shapes and keys are those of SGLang's source."""
SGLANG = Engine(
    name="sglang",
    title="SGLang",
    networks={
        FEATURES: FeatureLayout(SERVE.replace("METHOD", "EAGLE"), ("LlamaForCausalLMEagle",)),
        FUSED: FusedLayout(SERVE.replace("METHOD", "EAGLE3"), switches=("fc_norm", "norm_output")),
        DFLASH: InjectedLayout(BLOCKS.replace("METHOD", "DFLASH").replace("MORE", ""), styles=ZLAB_STYLES),
        DSPARK: InjectedLayout(
            BLOCKS.replace("METHOD", "DSPARK").replace("MORE", " A Domino head's algorithm is `DFLASH`."),
            styles={(kind, True): deepspec_config for kind in MARKOV_KINDS} | DOMINO_STYLES,
            confidence=True,
        ),
    },
    ignored_rotary=("attention_factor",),
    faults=(
        faults.IDS_DISAGREE,
        faults.OUTER_IDS_ALONE,
        faults.ROPE_THETA_NESTED,
        faults.FUSED_BIAS,
        faults.LAYER_COUNT,
    ),
)
