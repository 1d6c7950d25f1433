"""Greedy answers from llama.cpp with a draft head, and what it counted: `engine_llamacpp.py JOB.json`.

It runs under the Python of the environment that llama.cpp was built in, and imports nothing of this project.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HOME = Path(sys.prefix)
CONVERTER = "convert_hf_to_gguf.py"
SOURCE = HOME / "llama.cpp"
PROGRAMS = HOME / "build/bin"
# what the engine calls drafts of a head, by the head's architecture
KINDS = {
    "DFlashDraftModel": "draft-dflash",
    "DFlash2DraftModel": "draft-dflash",
    "Qwen3DSparkModel": "draft-dspark",
    "Glm4MoeForCausalLM": "draft-mtp",
}
# the converter takes GLM's own vocabularies alone, and tests/engines/engine_families.py writes models with a Llama's
CONVERT_GLM = """
import runpy, sys
source = sys.argv[1]
sys.path[:0] = [source, source + "/gguf-py"]
from conversion.glm import Glm4MoeModel
def set_vocab(model):
    model.gguf_writer.add_add_space_prefix(False)
    model._set_vocab_sentencepiece()
Glm4MoeModel.set_vocab = set_vocab
sys.argv = sys.argv[1:]
runpy.run_path(source + "/convert_hf_to_gguf.py", run_name="__main__")
"""
# lines of its log
STEP = re.compile(r"accepted (\d+)/(\d+) draft tokens, the last target token is: \((-?\d+)\)")
ENDS = re.compile(r"EOG token\s+= (\d+) ")
# how often a program may end without its totals
TRIES = 20
TOTALS = re.compile(r"n_drafted = (\d+)\s.*?n_accept\s+= (\d+)\s", re.DOTALL)


def convert(model: str, out: Path, dtype: str, *more: str) -> Path:
    """Convert a model to one GGUF file, unless it is there."""
    if not out.is_file():
        is_written = read_kind(model) == "draft-mtp" and (Path(model) / "tokenizer.model").is_file()
        script = ["-c", CONVERT_GLM, str(SOURCE)] if is_written else [str(SOURCE / CONVERTER)]
        command = [sys.executable, *script, model, *more]
        kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        subprocess.run([*command, "--outtype", kind, "--outfile", str(out)], check=True)
    return out


def run_program(program: str, *arguments: str | Path) -> str:
    """Run a program of llama.cpp; returns all that it prints."""
    process = subprocess.run([PROGRAMS / program, *arguments], capture_output=True)
    output = (process.stdout + process.stderr).decode(errors="replace")
    if process.returncode:
        raise ValueError(f"{program} failed; its last words:\n{output[-2000:]}")
    return output


def run_with_totals(program: str, *arguments: str | Path) -> tuple[str, tuple[int, ...]]:
    """Run a program until its output ends with totals, which are lost where it exits before its log is written."""
    for _ in range(TRIES):
        output = run_program(program, *arguments)
        if totals := TOTALS.search(output):
            return output, tuple(map(int, totals.groups()))
    raise ValueError(
        f"{program} ended {TRIES} times without its totals; its last words:\n{output[-2000:]}"
    )


def tokenize(target: Path, text: str) -> list[int]:
    """Return the tokens that llama.cpp makes of a text."""
    output = run_program(
        "llama-tokenize", "-m", target, "--ids", "--log-disable", "--no-escape", "-p", text
    )
    lists = [line for line in output.splitlines() if line.startswith("[") and line.endswith("]")]
    return list(map(int, json.loads(lists[-1])))


def read_kind(head: str) -> str:
    """Return what the engine calls drafts of a head in such a folder."""
    config = json.loads((Path(head) / "config.json").read_text())
    return KINDS.get(config["architectures"][0], "draft-eagle3")


def answer(
    job: dict[str, Any],
    models: Sequence[str | Path],
    text: str,
) -> tuple[dict[str, Any], list[int]]:
    """Return a row of drafts, acceptances and the last token of each step, and the tokens that end an answer."""
    # one draft further than wanted: near its limit this engine drafts less
    depth = job["depth"]
    limit = job["new_tokens"] + depth
    greedy = f"--temp 0 --top-k 1 --spec-draft-n-max {depth} -n {limit} -t 1 -b 2048"
    exact = "-ub 2048 -ctk f32 -ctv f32 -ctkd f32 -ctvd f32 -fa off"
    output, totals = run_with_totals(
        "llama-speculative-simple",
        *models,
        *greedy.split(),
        *exact.split(),
        "-v",
        "--no-escape",
        "-p",
        text,
    )
    steps = [tuple(map(int, step)) for step in STEP.findall(output)]
    if totals != (sum(drafted for _, drafted, _ in steps), sum(accepted for accepted, *_ in steps)):
        raise ValueError(f"its steps {steps} do not add up to its totals {totals}")
    length = 0
    counted = []
    for step in steps:
        if length < job["new_tokens"]:
            counted.append(step)
        length += step[0] + 1

    places = [sum(accepted > i for accepted, *_ in counted) for i in range(depth)]
    row = {
        "drafts": len(counted),
        "accepted": places,
        "own": [token for *_, token in counted],
    }
    return row, sorted({int(token) for token in ENDS.findall(output)})


def answers(job: dict[str, Any]) -> dict[str, Any]:
    """Return one answer for each prompt, each from a process of its own."""
    kind = read_kind(job["head"])
    head = Path(job["head"] + ".gguf")
    if kind == "draft-mtp":
        # one model holds both
        target = convert(job["head"], head, job["dtype"])
        models: tuple[str | Path, ...] = ("-m", target)
    else:
        file = Path(job["work"]) / f"target-{job['dtype']}.gguf"
        target = convert(job["target"], file, job["dtype"])
        convert(
            job["head"],
            head,
            job["dtype"],
            "--target-model-dir",
            job["target"],
        )
        models = ("-m", target, "-md", head)

    rows: list[dict[str, Any]] = []
    stops: list[int] = []
    for prompt, whole in zip(job["prompts"], job["texts"], strict=True):
        text = whole
        if tokenize(target, whole) != prompt:
            # the engine adds the start token by itself
            text = whole.removeprefix(job["start"])
        row, stops = answer(job, (*models, "--spec-type", kind), text)
        rows.append({"prompt": tokenize(target, text), **row})

    return {
        "version": version(),
        "stops": stops,
        "reads": ["first_token"] * (kind == "draft-mtp"),
        "answers": rows,
    }


def version() -> str:
    """Return the build of llama.cpp."""
    match = re.search(r"version: (.*)", run_program("llama-speculative-simple", "--version"))
    return match[1].strip() if match else "unknown"


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["out"]).write_text(json.dumps(answers(job)))
