"""Heads for a target that sees, in vLLM and here: `python -m bench.seeing_vllm ENV HEAD ...`.

Behind `python recipes/tiny/make_seeing_target.py`; ENV holds vLLM and torchvision. Both answer held-out questions about
images greedily, with chains of one length. Answers, and how often each place of a draft was accepted, are compared.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from bench.machine import made_on, markdown, write_results
from eagle import Budget, Target, generate, load_drafter
from eagle.core.tree import chain_paths
from eagle.formats.export import export
from eagle.log import script
from tests.engines import engine_vllm
from tests.engines.engine_builds import python_of

SEEING = Path("runs/seeing")
PROMPTS, NEW_TOKENS, DEPTH = 54, 80, 3
RENAMED = ("vision_tower.", "vision_tower.vision_model.")  # vLLM 0.32 knows transformers' names of before version 5


def read_questions(count: int) -> list[dict[str, Any]]:
    """The first held-out questions about an image, by its path."""
    records = map(json.loads, (SEEING / "data/heldout.jsonl").read_text().splitlines())
    folder = SEEING / "data/images"
    asked = [
        {"text": record["conversations"][0]["value"].removeprefix("<image>"), "image": str(folder / record["image"])}
        for record in records
        if "image" in record
    ]
    return asked[:count]


def messages_of(question: dict[str, Any]) -> list[dict[str, Any]]:
    """A question as a conversation."""
    parts = [{"type": "image", "image": question["image"]}, {"type": "text", "text": question["text"]}]
    return [{"role": "user", "content": parts}]


def rename_weights(folder: Path) -> Path:
    """A copy of the target with the names that vLLM reads."""
    shutil.copytree(SEEING / "target", folder)
    tensors = load_file(folder / "model.safetensors")
    known = {name.replace(*RENAMED) if RENAMED[1] not in name else name: tensor for name, tensor in tensors.items()}
    save_file(known, folder / "model.safetensors", {"format": "pt"})
    return folder


def answer_there(env: str, target: Target, head: str, questions: Sequence[dict[str, Any]], work: Path) -> Any:
    """What vLLM answers with the exported head, and what it counted."""
    export(load_drafter(head, target), target.config, "vllm", work / "head", Path(head))
    prompts = []
    for question in questions:
        parts = [{"type": "image"}, {"type": "text", "text": question["text"]}]
        text = target.processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        prompts.append({"text": text, "images": [question["image"]]})
    job = {"target": str(rename_weights(work / "target")), "head": str(work / "head"), "dtype": "float32", "ends": True}
    job |= {"depth": DEPTH, "new_tokens": NEW_TOKENS, "prompts": prompts, "out": str(work / "out.json")}
    (work / "job.json").write_text(json.dumps(job))
    subprocess.run([str(python_of(Path(env))), engine_vllm.__file__, str(work / "job.json")], check=True)
    return json.loads((work / "out.json").read_text())


def answer_here(target: Target, head: str, questions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same answers by this decoder."""
    drafter, rows = load_drafter(head, target), []
    for question in questions:
        prompt = target.chat(messages_of(question))
        budget = Budget.fixed(chain_paths(DEPTH))
        trace = generate(target, drafter, prompt, budget=budget, max_new_tokens=NEW_TOKENS)
        accepted = [sum(cycle.accepted > place for cycle in trace.cycles) for place in range(DEPTH)]
        rows.append({"tokens": trace.tokens, "drafts": len(trace.cycles), "accepted": accepted, "prompt": list(prompt)})
    return rows


def count_accepted(rows: Sequence[dict[str, Any]]) -> list[int]:
    """How many drafts there were, and how many of them had each place accepted."""
    return [sum(row["drafts"] for row in rows), *map(sum, zip(*(row["accepted"] for row in rows), strict=True))]


def compare_head(env: str, target: Target, head: str, questions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many prompts and answers are equal, and both counts."""
    with tempfile.TemporaryDirectory() as folder:
        there = answer_there(env, target, head, questions, Path(folder))
    here, theirs = answer_here(target, head, questions), there["answers"]
    pairs = list(zip(here, theirs, strict=True))
    counts = {name: count_accepted(rows) for name, rows in (("here", here), ("vllm", theirs))}
    return {
        "head": json.loads((Path(head) / "config.json").read_text())["settings"]["kind"],
        "version": there["version"],
        "prompts": len(pairs),
        "equal prompts": sum(ours["prompt"] == row["prompt"] for ours, row in pairs),
        "equal answers": sum(ours["tokens"] == row["tokens"] for ours, row in pairs),
        **counts,
    }


def seeing_table(results: dict[str, Any]) -> str:
    """The comparison as Markdown."""
    rows = [
        (f"`{row['head']}`", name, row[name][0], *row[name][1:], f"{row['equal answers']} of {row['prompts']}")
        for row in results["heads"]
        for name in ("here", "vllm")
    ]
    header = ("head", "decoder", "drafts", *(f"place {place + 1} accepted" for place in range(DEPTH)), "equal answers")
    return markdown(header, rows, results["run"])


def main(argv: list[str]) -> None:
    """Compare, print the table, and write docs/results/seeing_vllm.json."""
    parser = argparse.ArgumentParser(prog="python -m bench.seeing_vllm", description=__doc__.splitlines()[0])
    parser.add_argument("env", help="an environment with vLLM for this machine, and torchvision")
    parser.add_argument("heads", nargs="+", help="folders of trained heads")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="questions about images")
    parser.add_argument("--out", default="docs/results/seeing_vllm.json")
    args = parser.parse_args(argv)
    target, questions = Target.load(SEEING / "target", dtype="float32"), read_questions(args.prompts)
    heads = [compare_head(args.env, target, head, questions) for head in args.heads]
    results = {"run": made_on(vllm=heads[0]["version"], new_tokens=NEW_TOKENS), "heads": heads}
    write_results(Path(args.out), results)
    print(seeing_table(results))


if __name__ == "__main__":
    script(main)
