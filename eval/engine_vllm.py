"""Greedy answers from vLLM with a draft head, and what it counted: `engine_vllm.py JOB.json`, under vLLM's own Python.

It imports nothing of this project, so that vLLM may live in an environment of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def read_counts(llm: Any) -> tuple[int, list[int]]:
    """Drafts verified so far, and how many of them had each of their positions accepted."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts = int(metrics["vllm:spec_decode_num_drafts"].value)
    return drafts, list(map(int, metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values))


def answers(job: dict[str, Any]) -> dict[str, Any]:
    """One answer a prompt, one prompt at a time, so that the counters tell them apart."""
    import vllm

    config = json.loads((Path(job["head"]) / "config.json").read_text())
    # an EAGLE-3 head has an LM head of its own, and names its size
    method = "eagle3" if "draft_vocab_size" in config else "medusa" if config["model_type"] == "medusa" else "eagle"
    llm = vllm.LLM(
        model=job["target"],
        dtype=job["dtype"],
        seed=0,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={"method": method, "model": job["head"], "num_speculative_tokens": job["depth"]},
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True)
    rows, drafts, accepted = [], *read_counts(llm)
    for prompt in job["prompts"]:
        (answer,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        before, accepted_before = drafts, accepted
        drafts, accepted = read_counts(llm)
        gained = [now - then for now, then in zip(accepted, accepted_before, strict=True)]
        rows.append({"tokens": list(answer.outputs[0].token_ids), "drafts": drafts - before, "accepted": gained})
    return {"version": vllm.__version__, "answers": rows}


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["out"]).write_text(json.dumps(answers(job)))
