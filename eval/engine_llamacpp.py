"""Greedy answers from llama.cpp with a draft head, and what it counted: `engine_llamacpp.py JOB.json`.

It runs under the Python of the environment that llama.cpp was built in, and imports nothing of this project.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HOME = Path(sys.prefix)
SOURCE, PROGRAMS = HOME / "llama.cpp", HOME / "build/bin"
STEP = re.compile(r"accepted (\d+)/(\d+) draft tokens, the last target token is: \((-?\d+)\)")
ENDS = re.compile(r"EOG token\s+= (\d+) ")
TRIES = 5
TOTALS = re.compile(r"n_drafted = (\d+)\s.*?n_accept\s+= (\d+)\s", re.DOTALL)


def converted(model: str, out: Path, dtype: str, *more: str) -> Path:
    """A model as one file; once converted it stays."""
    if not out.is_file():
        command = [sys.executable, str(SOURCE / "convert_hf_to_gguf.py"), model, *more]
        kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        subprocess.run([*command, "--outtype", kind, "--outfile", str(out)], check=True)
    return out


def said(program: str, *arguments: str | Path) -> str:
    """All that a program of llama.cpp prints."""
    done = subprocess.run([PROGRAMS / program, *arguments], capture_output=True)
    printed = (done.stdout + done.stderr).decode(errors="replace")
    if done.returncode:
        raise ValueError(f"{program} failed; its last words:\n{printed[-2000:]}")
    return printed


def whole(program: str, *arguments: str | Path) -> tuple[str, tuple[int, ...]]:
    """The same with the totals at its end, which is lost where a process ends before its log is written."""
    for _ in range(TRIES):
        printed = said(program, *arguments)
        if totals := TOTALS.search(printed):
            return printed, tuple(map(int, totals.groups()))
    raise ValueError(f"{program} ended {TRIES} times without its totals; its last words:\n{printed[-2000:]}")


def tokenised(target: Path, text: str) -> list[int]:
    """The tokens that llama.cpp makes of a text."""
    printed = said("llama-tokenize", "-m", target, "--ids", "--log-disable", "--no-escape", "-p", text)
    lists = [line for line in printed.splitlines() if line.startswith("[") and line.endswith("]")]
    return list(map(int, json.loads(lists[-1])))


def answer(job: dict[str, Any], target: Path, head: Path, text: str) -> tuple[dict[str, Any], list[int]]:
    """Its drafts and what it accepted of them, the token it ended each step with, and the tokens it stops at."""
    # one draft further than wanted: near its limit this engine drafts less
    limit, depth = str(job["new_tokens"] + job["depth"]), str(job["depth"])
    models: tuple[str | Path, ...] = ("-m", target, "-md", head, "--spec-type", "draft-eagle3")
    greedy = ("--temp", "0", "--top-k", "1", "--spec-draft-n-max", depth, "-n", limit, "-t", "1", "-b", "2048")
    exact = ("-ub", "2048", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32", "-fa", "off")
    printed, totals = whole("llama-speculative-simple", *models, *greedy, *exact, "-v", "--no-escape", "-p", text)
    steps = [tuple(map(int, step)) for step in STEP.findall(printed)]
    if totals != (sum(drafted for _, drafted, _ in steps), sum(accepted for accepted, *_ in steps)):
        raise ValueError(f"its steps {steps} do not add up to its totals {totals}")
    length, counted = 0, []
    for step in steps:
        if length < job["new_tokens"]:
            counted.append(step)
        length += step[0] + 1
    places = [sum(accepted > place for accepted, *_ in counted) for place in range(job["depth"])]
    row = {"drafts": len(counted), "accepted": places, "own": [token for *_, token in counted]}
    return row, sorted({int(token) for token in ENDS.findall(printed)})


def answers(job: dict[str, Any]) -> dict[str, Any]:
    """One answer a prompt, each from a process of its own."""
    target = converted(job["target"], Path(job["work"]) / f"target-{job['dtype']}.gguf", job["dtype"])
    head = Path(job["head"] + ".gguf")
    converted(job["head"], head, job["dtype"], "--target-model-dir", job["target"])
    rows: list[dict[str, Any]] = []
    stops: list[int] = []
    for text in job["texts"]:
        row, stops = answer(job, target, head, text)
        rows.append({"prompt": tokenised(target, text), **row})
    return {"version": version(), "stops": stops, "answers": rows}


def version() -> str:
    """Which build of it this is."""
    found = re.search(r"version: (.*)", said("llama-speculative-simple", "--version"))
    return found[1].strip() if found else "unknown"


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    Path(asked["out"]).write_text(json.dumps(answers(asked)))
