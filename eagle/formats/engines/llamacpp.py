"""llama.cpp's layout (commit 0c1e5709): the folder that its converter takes."""

from __future__ import annotations

from eagle.formats.engines.engine import Engine
from eagle.formats.networks.block_layouts import DFLASH, DSPARK, VANILLA_STYLES, ZLAB_STYLES, InjectedLayout
from eagle.formats.networks.eagle_layouts import FUSED, FusedLayout
from eagle.formats.reading import faults

SERVE = """```sh
python convert_hf_to_gguf.py TARGET --outtype f32 --outfile target.gguf
python convert_hf_to_gguf.py HEAD --target-model-dir TARGET --outtype f32 --outfile head.gguf
llama-server -m target.gguf -md head.gguf --spec-type draft-METHOD --spec-draft-n-max DEPTH
```

llama.cpp as of October 2026. `llama-speculative-simple` takes the same flags and prints how many tokens were drafted
and accepted."""
BLOCK = """

It reads a block of as many masks as it drafts, and the root; a block shorter than the head was trained with guesses
otherwise."""
LLAMACPP = Engine(
    name="llamacpp",
    title="llama.cpp",
    networks={
        FUSED: FusedLayout(SERVE.replace("METHOD", "eagle3"), switches=("norm_before_residual",), reads_embedding=True),
        DFLASH: InjectedLayout(SERVE.replace("METHOD", "dflash") + BLOCK, styles=ZLAB_STYLES, causal=True),
        DSPARK: InjectedLayout(SERVE.replace("METHOD", "dspark") + BLOCK, styles=VANILLA_STYLES, causal=True),
    },
    ignored_rotary=("attention_factor", "truncate", "mscale", "mscale_all_dim"),
    faults=(
        faults.MODEL_PREFIX,
        faults.IDS_DISAGREE,
        faults.INNER_IDS_ALONE,
        faults.ROPE_THETA_NESTED,
        faults.FUSED_BIAS,
        faults.LAYER_COUNT,
        faults.ANCHOR_UNSAID,
    ),
)
