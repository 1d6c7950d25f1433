"""Greedy answers from vLLM with a draft head, and what it counted: `vllm_engine.py JOB.json`, under vLLM's own Python.

It imports nothing of this project, so that vLLM may live in an environment of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def counts(llm: Any) -> tuple[int, list[int]]:
    """Drafts verified so far, and how many of them had each of their positions accepted."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts = int(metrics["vllm:spec_decode_num_drafts"].value)
    return drafts, list(map(int, metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values))


def answers(job: dict[str, Any]) -> dict[str, Any]:
    """One answer a prompt, one prompt at a time, so that the counters tell them apart."""
    import vllm

    llm = vllm.LLM(
        model=job["target"],
        dtype="float32",
        seed=0,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={"method": "eagle", "model": job["head"], "num_speculative_tokens": job["depth"]},
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True)
    rows, drafts, accepted = [], *counts(llm)
    for prompt in job["prompts"]:
        (answer,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        before, accepted_before = drafts, accepted
        drafts, accepted = counts(llm)
        gained = [now - then for now, then in zip(accepted, accepted_before, strict=True)]
        rows.append({"tokens": list(answer.outputs[0].token_ids), "drafts": drafts - before, "accepted": gained})
    return {"version": vllm.__version__, "answers": rows}


if __name__ == "__main__":
    # one process and one thread bound to no core, 1 GiB for keys and values; nothing fetched, nothing reported
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["out"]).write_text(json.dumps(answers(job)))
