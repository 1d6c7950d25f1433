"""Greedy answers from OpenVINO GenAI with a draft head: `engine_openvino.py JOB.json`, under OpenVINO's own Python.

It imports nothing of this project, so that OpenVINO may live in an environment of its own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from time import process_time
from typing import Any

# by default keys and values are rounded
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def convert(model: str, out: Path, *more: str) -> Path:
    """Convert a model for OpenVINO, unless it is there."""
    if not out.is_dir():
        program = str(Path(sys.executable).with_name("optimum-cli"))
        options = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
        command = [program, "export", "openvino", "--model", model, *options, *more, f"{out}.part"]
        subprocess.run(command, check=True)
        Path(f"{out}.part").rename(out)
    return out


def add_layers(head: Path, layers: Sequence[int]) -> Path:
    """Copy a converted head and put the layers that it reads, counted by their outputs, into its `rt_info`."""
    import openvino

    out = Path(f"{head}-layers")
    shutil.copytree(head, out, dirs_exist_ok=True)
    model = openvino.Core().read_model(head / "openvino_model.xml")
    model.set_rt_info(" ".join(map(str, layers)), ["hidden_layers_list"])
    openvino.save_model(model, out / "openvino_model.xml", compress_to_fp16=False)
    return out


def generation_config(job: dict[str, Any]) -> Any:
    """Return a config of greedy decoding by chains, or by trees where a node has several children."""
    import openvino_genai

    # one draft further than wanted: near its limit this engine drafts less
    config = openvino_genai.GenerationConfig(max_new_tokens=job["new_tokens"] + job["depth"] + 1)
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    if job.get("plain"):
        return config
    config.num_assistant_tokens = job["nodes"]
    if job["branching"] > 1:
        config.tree_depth = job["depth"]
        config.branching_factor = job["branching"]

    return config


def count_drafts(sizes: Sequence[int], job: dict[str, Any]) -> dict[str, Any]:
    """Count the steps of the main model that begin in the wanted answer; each adds one token to those it accepts."""
    length = sizes[0]
    accepted = []
    for size in sizes[1:]:
        if length < job["new_tokens"]:
            accepted.append(size - 1)
        length += size

    places = [sum(count > place for count in accepted) for place in range(job["depth"])]
    return {"drafts": len(accepted), "accepted": places}


def load_engine(job: dict[str, Any]) -> Any:
    """Return OpenVINO with the target of a job and its head, or with the target alone if the job is `plain`."""
    import openvino_genai

    layers = json.loads((Path(job["head"]) / "config.json").read_text())["eagle_config"]
    head = convert(job["head"], Path(job["head"] + "-ov"), "--trust-remote-code")
    head = add_layers(head, layers["eagle_aux_hidden_state_layer_ids"])
    target = convert(job["target"], Path(job["work"]) / "target-ov")
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = False
    options = dict(EXACT)
    if not job.get("plain"):
        options["draft_model"] = openvino_genai.draft_model(str(head), "CPU", **EXACT)
    return openvino_genai.LLMPipeline(str(target), "CPU", scheduler_config=scheduler, **options)


def answers(job: dict[str, Any]) -> dict[str, Any]:
    """Return one answer for each prompt."""
    import numpy as np
    import openvino
    import openvino_genai

    llm = load_engine(job)
    config = generation_config(job)
    rows = []
    for prompt in job["prompts"]:
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        mask = openvino.Tensor(np.ones((1, len(prompt)), dtype=np.int64))
        begun = process_time()
        answer = llm.generate(openvino_genai.TokenizedInputs(ids, mask), config)
        row = {"seconds": process_time() - begun}
        if job.get("plain"):
            rows.append(row | {"tokens": list(map(int, answer.tokens[0]))})
            continue
        # the tokens that each step of the main model gave
        sizes = list(answer.extended_perf_metrics.main_model_metrics.raw_metrics.m_batch_sizes)
        tokens = list(map(int, answer.tokens[0]))
        if sum(sizes) != len(tokens):
            raise ValueError(
                f"the steps of the main model {sizes} do not add up to its {len(tokens)} tokens"
            )

        # the time is that of all tokens, also of those beyond the wanted answer
        row["made"] = len(tokens)
        rows.append(row | {"tokens": tokens[: job["new_tokens"]], **count_drafts(sizes, job)})

    return {"version": version("openvino-genai"), "answers": rows}


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["out"]).write_text(json.dumps(answers(job)))
