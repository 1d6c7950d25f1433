"""A head exported for vLLM guesses there as it does here: `python bench/vllm_acceptance.py --python VLLM/bin/python`.

Same target, same prompts, greedy chains. An engine's answers stay right whatever an export got wrong, so what is
compared, number for number, is how often the guess at each place of the draft was accepted. Exports spoilt on purpose
must differ.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from data_prep.conversations import read_conversations
from eagle import Budget, Target, generate, load_drafter
from eagle.checkpoint import load_head
from eagle.export import export
from eval.results import commit

ENGINE = Path(__file__).with_name("vllm_engine.py")
HERE, THERE = "this decoder", "vLLM"


@dataclass(frozen=True, slots=True)
class Job:
    """What both sides are asked: so many new tokens after each prompt, by drafts of so many tokens."""

    target: Path
    head: Path
    prompts: list[list[int]]
    depth: int = 4
    new_tokens: int = 96


def questions(target: Target, file: Path, count: int) -> list[list[int]]:
    """Token ids of conversations up to their last question."""
    return [target.chat(list(talk.messages[:-1])) for talk in read_conversations(file, limit=count)]


def here(job: Job, target: Target) -> list[dict[str, Any]]:
    """Tokens, drafts and acceptances at each place, of every prompt, by this decoder, counted as vLLM counts."""
    drafter, rows = load_drafter(job.head, target), []
    chain = Budget(nodes=job.depth, depth=job.depth, top_k=1)
    for prompt in job.prompts:
        # vLLM drafts `depth` tokens in every step of an unfinished answer and counts all that is accepted of them, even
        # what max_tokens then cuts off; this decoder drafts less near its limit, so its limit is put that much further
        trace = generate(target, drafter, prompt, max_new_tokens=job.new_tokens + job.depth, stop=[], budget=chain)
        said, accepted = 1, []
        for cycle in trace.cycles:
            if said < job.new_tokens:
                accepted.append(cycle.accepted)
            said += cycle.committed
        rows.append({"tokens": trace.tokens[: job.new_tokens], **counted(accepted, job.depth)})
    return rows


def counted(accepted: Sequence[int], depth: int) -> dict[str, Any]:
    """Drafts, and how many of them had their first, second, ... token accepted."""
    return {"drafts": len(accepted), "accepted": [sum(n > place for n in accepted) for place in range(depth)]}


def there(job: Job, python: str | Path, target: Target, fault: str = "") -> tuple[str, list[dict[str, Any]]]:
    """vLLM's version, and the same rows from vLLM with the exported head, spoilt by one of FAULTS if it is named."""
    with tempfile.TemporaryDirectory() as folder:
        export(load_head(job.head), target.config, "vllm", f"{folder}/head")
        if fault:
            FAULTS[fault](Path(folder) / "head")
        asked: dict[str, Any] = {"prompts": job.prompts, "depth": job.depth, "new_tokens": job.new_tokens}
        asked |= {"target": str(job.target.resolve()), "head": f"{folder}/head", "out": f"{folder}/out.json"}
        (Path(folder) / "job.json").write_text(json.dumps(asked))
        done = subprocess.run([python, ENGINE, f"{folder}/job.json"], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"vLLM under {python} failed; its last words:\n{(done.stdout + done.stderr)[-3000:]}")
        found = json.loads((Path(folder) / "out.json").read_text())
        return found["version"], found["answers"]


def swap_fc(head: Path) -> None:
    """Let `fc` read [feature; embedding] where it was trained on [embedding; feature]."""
    tensors = load_file(head / "model.safetensors")
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(2, dim=1)[::-1], dim=1)
    save_file(tensors, head / "model.safetensors")


def slow_rotary(head: Path) -> None:
    """Name ten times the rotary base that the head was trained with."""
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, "rope_theta": 10 * config["rope_theta"]}))


# what vLLM loads without a word, and what leaves every answer as it was
FAULTS: dict[str, Callable[[Path], None]] = {"halves of `fc` swapped": swap_fc, "rotary base × 10": slow_rotary}


def measured(job: Job, python: str | Path) -> dict[str, Any]:
    """All sides pooled over the prompts, and in how many answers text and counts equal this decoder's."""
    target = Target.load(job.target, dtype="float32")
    ours, (version, theirs) = here(job, target), there(job, python, target)
    sides = {HERE: ours, THERE: theirs}
    sides |= {f"{THERE}, spoilt: {fault}": there(job, python, target, fault)[1] for fault in FAULTS}
    machine = {"vllm": version, "torch": torch.__version__, "cpu": platform.processor() or platform.machine()}
    machine |= {"dtype": "float32", "date": str(date.today()), "commit": commit()}
    return {
        "machine": machine,
        "prompts": len(job.prompts),
        "new_tokens": job.new_tokens,
        "sides": {name: pooled(rows, ours) for name, rows in sides.items()},
    }


def pooled(rows: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the prompts, and how many rows agree with this decoder's."""
    pairs = list(zip(rows, ours, strict=True))
    return {
        "drafts": sum(row["drafts"] for row in rows),
        "accepted": [sum(place) for place in zip(*(row["accepted"] for row in rows), strict=True)],
        "same_text": sum(row["tokens"] == our["tokens"] for row, our in pairs),
        "same_counts": sum(counts(row) == counts(our) for row, our in pairs),
    }


def counts(row: dict[str, Any]) -> tuple[int, list[int]]:
    """What is compared: drafts, and acceptances at each place."""
    return row["drafts"], row["accepted"]


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    depth, prompts = len(results["sides"][HERE]["accepted"]), results["prompts"]
    places = " | ".join(f"accepted at {place}" for place in range(1, depth + 1))
    lines = [f"| side | drafts | {places} | τ | same text | same counts |", "|---" * (depth + 5) + "|"]
    for name, side in results["sides"].items():
        accepted = " | ".join(map(str, side["accepted"]))
        length = 1 + sum(side["accepted"]) / side["drafts"]
        same = [f"{side[what]} of {prompts}" for what in ("same_text", "same_counts")]
        lines.append(f"| {name} | {side['drafts']} | {accepted} | {length:.3f} | {' | '.join(same)} |")
    made = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    return "\n".join([*lines, "", f"<sub>{prompts} prompts, {results['new_tokens']} new tokens each, {made}</sub>"])


def main() -> None:
    """Run both engines, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="the python of an environment that holds vLLM")
    parser.add_argument("--target", type=Path, default=Path("runs/tiny/target"))
    parser.add_argument("--head", type=Path, default=Path("runs/tiny/eagle1/head"))
    parser.add_argument("--data", type=Path, default=Path("runs/tiny/data/heldout.jsonl"))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("docs/results/vllm_eagle1.json"))
    args = parser.parse_args()
    prompts = questions(Target.load(args.target, dtype="float32"), args.data, args.prompts)
    results = measured(Job(args.target, args.head, prompts, args.depth), args.python)
    print(table(results))
    args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
