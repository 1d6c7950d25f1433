"""Greedy answers from vLLM with a draft head, and what it counted: `engine_vllm.py JOB.json`, under vLLM's own Python.

It imports nothing of this project, so that vLLM may live in an environment of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import Any

# by the architecture that a head's config names; EAGLE-1's is the target's own
METHODS = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3Qwen3ForCausalLM": "eagle3",
    "MedusaModel": "medusa",
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash",
    "LiLiCorrDraftModel": "dflash",
    "Qwen3DSparkModel": "dspark",
    "MiMoForCausalLM": "mtp",
    "Glm4MoeForCausalLM": "mtp",
    "DeepseekV3ForCausalLM": "mtp",
}
# what an MTP layer reads there: `Rule.reads` of engine_reference.py
READS = {
    # mimo_mtp.py; mimo.py returns the state before its norm
    "MiMoForCausalLM": ("blank_first", "before_norm"),
    # glm4_moe_mtp.py norms for the logits alone
    "Glm4MoeForCausalLM": ("blank_first", "raw_states"),
    # deepseek_mtp.py
    "DeepseekV3ForCausalLM": ("blank_first",),
}
# architectures that only vLLM's V2 runner serves
V2_ARCHITECTURES = {"Qwen3DSparkModel", "DFlash2DraftModel", "LiLiCorrDraftModel"}
# the last version that has a method
LAST = {"medusa": "0.32"}
# config keys of heads that draft all positions by one forward
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")


def read_counts(llm: Any) -> tuple[int, list[int]]:
    """Return the drafts verified so far, and how many of them had each of their positions accepted."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts = int(metrics["vllm:spec_decode_num_drafts"].value)
    return drafts, list(map(int, metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values))


def read_method(config: dict[str, Any]) -> dict[str, Any]:
    """Return the method that vLLM is given for a head with this config."""
    method = METHODS.get(config["architectures"][0], "eagle")
    found: dict[str, Any] = {"method": method}
    if method == "eagle3" and any(name in config for name in MASKS):
        found["parallel_drafting"] = True
    return found


def check_version(method: str, version: str) -> None:
    """Refuse a version that has no such method any more."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    last = LAST.get(method)
    if last is not None and numbers > tuple(map(int, last.split("."))):
        sys.exit(
            f"vLLM {version} serves no {method} heads, {last} is the last that does: name such an environment"
        )


def needs_interpreter(config: dict[str, Any]) -> bool:
    """Return whether only the V2 runner serves a head with this config; its kernels need Triton."""
    # layers with a window beside layers without one
    is_mixed = len(set(config.get("layer_types") or [])) > 1
    return is_mixed or config["architectures"][0] in V2_ARCHITECTURES


def interpret_kernels() -> None:
    """Let Triton's own interpreter run the kernels that the V2 runner has for Triton alone.

    vLLM's CPU build looks for a backend of Triton that is called cpu, and the wheels on PyPI bring none.
    """
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton import backends

    compiler = next(iter(backends.backends.values())).compiler
    backends.backends = {
        "cpu": SimpleNamespace(compiler=compiler, driver=SimpleNamespace(is_active=lambda: True))
    }
    accept_integer_masks()


def accept_integer_masks() -> None:
    """Let the interpreter load and store behind masks that it has made integers of, as the walk over candidates has."""
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store

    def as_bool(mask: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return mask

    def masked_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        return load(self, pointers, as_bool(mask), *more)

    def masked_store(self: Any, pointers: Any, values: Any, mask: Any, *more: Any) -> Any:
        return store(self, pointers, values, as_bool(mask), *more)

    InterpreterBuilder.create_masked_load = masked_load
    InterpreterBuilder.create_masked_store = masked_store


def norm_each_layer() -> None:
    """Let every layer's keys be normed by that layer's own weights.

    DFlash's are normed by one call for all layers, of which the CPU kernel reads the first layer's weights alone.
    """
    from vllm import _custom_ops as operations

    norm = operations.rms_norm

    def rms_norm(out: Any, states: Any, weight: Any, epsilon: float) -> None:
        if weight.dim() == 1:
            norm(out, states, weight, epsilon)
            return

        for part in zip(out, states, weight, strict=True):
            norm(*part, epsilon)

    operations.rms_norm = rms_norm


def as_input(prompt: Any) -> dict[str, Any]:
    """Return a prompt of a job as vLLM takes it: token ids, or a text with the files of its images."""
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt}
    from PIL import Image

    images = [Image.open(path).convert("RGB") for path in prompt["images"]]
    return {"prompt": prompt["text"], "multi_modal_data": {"image": images}}


def timed(llm: Any, prompt: Any, sampling: Any) -> tuple[Any, dict[str, Any]]:
    """Return vLLM's answer to a prompt, and its tokens and CPU seconds."""
    begun = process_time()
    (answer,) = llm.generate(as_input(prompt), sampling, use_tqdm=False)
    seconds = process_time() - begun
    return answer, {"tokens": list(answer.outputs[0].token_ids), "seconds": seconds}


def load_engine(job: dict[str, Any], config: dict[str, Any]) -> Any:
    """Return vLLM with the target of a job and its head, or with the target alone if the job is `plain`."""
    head = read_method(config)
    if needs_interpreter(config):
        interpret_kernels()
    if config["architectures"][0] == "DeepseekV3ForCausalLM":
        # no latent attention: the layer is a Llama's
        os.environ["VLLM_MLA_DISABLE"] = "1"

    import vllm

    check_version(head["method"], vllm.__version__)
    norm_each_layer()
    drafted = {**head, "model": job["head"], "num_speculative_tokens": job["depth"]}
    return vllm.LLM(
        # with an MTP layer one folder holds both
        model=job["head"] if head["method"] == "mtp" else job["target"],
        dtype=job["dtype"],
        seed=0,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=None if job.get("plain") else drafted,
    )


def answers(job: dict[str, Any]) -> dict[str, Any]:
    """Return one answer for each prompt, one prompt at a time, so that the counters tell them apart."""
    config = json.loads((Path(job["head"]) / "config.json").read_text())
    # EAGLE-1's names two classes: SGLang's, and vLLM's own
    architecture = config["architectures"][0]
    llm = load_engine(job, config)
    import vllm

    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=not job.get("ends")
    )
    rows = []
    # without drafts there are no counters
    drafts, accepted = (0, []) if job.get("plain") else read_counts(llm)
    for prompt in job["prompts"]:
        answer, row = timed(llm, prompt, sampling)
        if not job.get("plain"):
            before, accepted_before = drafts, accepted
            drafts, accepted = read_counts(llm)
            gained = [now - then for now, then in zip(accepted, accepted_before, strict=True)]
            row |= {"drafts": drafts - before, "accepted": gained}
        if isinstance(prompt, dict):
            # a text, which the engine has tokenized
            row["prompt"] = list(answer.prompt_token_ids)

        rows.append(row)

    return {
        "version": vllm.__version__,
        "reads": READS.get(architecture, ()),
        "answers": rows,
    }


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["out"]).write_text(json.dumps(answers(job)))
