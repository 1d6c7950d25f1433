"""Seconds of vLLM's greedy answers by batch, under vLLM's own Python: `vllm_speed.py JOB.json`.

The job names `target`, `prompts` (token ids), `new_tokens`, `batches`, `out`, and for drafts a `head` and its `depth`.
A batch is timed twice, for one new token and for all, so that reading the prompts is left out.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import vllm


def answer(llm: Any, prompts: list[list[int]], count: int) -> tuple[float, float]:
    """CPU seconds and seconds in which a batch is answered."""
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    cpu, wall = time.process_time(), time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return time.process_time() - cpu, time.perf_counter() - wall


def main(job: dict[str, Any]) -> None:
    """Time every batch and write the figures."""
    head = {"method": "eagle", "model": job.get("head"), "num_speculative_tokens": job.get("depth")}
    drafts = {"speculative_config": head} if job.get("head") else {}
    options = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 2048, "enable_prefix_caching": False}
    llm = vllm.LLM(model=job["target"], seed=0, max_num_seqs=max(job["batches"]), **options, **drafts)
    prompts, rows = job["prompts"], []
    answer(llm, prompts[:1], 2)  # what the first call alone does
    for size in job["batches"]:
        groups = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        for group in groups:
            first, whole = answer(llm, group, 1), answer(llm, group, job["new_tokens"])
            seconds = {name: round(whole[place] - first[place], 2) for place, name in enumerate(("cpu", "wall"))}
            rows.append({"batch": len(group), "tokens": len(group) * (job["new_tokens"] - 1), **seconds})
    Path(job["out"]).write_text(json.dumps({"vllm": vllm.__version__, "rows": rows}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
