"""A head guesses in a serving engine as it does here: `python -m eval.engines HEAD --engine ENGINE --target DIR`.

Same target, same prompts, greedy drafts. An engine's answers stay right whatever an export got wrong, so what is
compared, number for number, is how often the guess at each place of the draft was accepted.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from data_prep.conversations import read_conversations
from eagle.core.drafter import Budget
from eagle.disk import lock_path, write_text
from eagle.formats.checkpoint import load_drafter
from eagle.formats.export import export
from eagle.log import script
from eagle.target.target import Target
from eval.engine_builds import VERSIONS, prepared, python_of
from eval.engine_here import Job, Row, Rule, here, pooled, same_counts, same_text
from eval.results import commit

NEAR = 0.01  # how far acceptance lengths may differ where sums are rounded
# one process and one thread; nothing fetched, nothing reported
QUIET = ("OMP_NUM_THREADS=1", "HF_HUB_OFFLINE=1", "TOKENIZERS_PARALLELISM=false")
VLLM = ("VLLM_ENABLE_V1_MULTIPROCESSING=0", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind")
SETTINGS = {"vllm": (*VLLM, "VLLM_NO_USAGE_STATS=1")}


@dataclass(frozen=True, slots=True)
class Proof:
    """The rows of both sides."""

    version: str
    theirs: list[Row]
    ours: list[Row]

    @property
    def same(self) -> tuple[int, int]:
        """How many answers are the same text, and how many have the same counts."""
        pairs = list(zip(self.theirs, self.ours, strict=True))
        return sum(same_text(*pair) for pair in pairs), sum(same_counts(*pair) for pair in pairs)

    @property
    def equal(self) -> bool:
        """Whether every single answer agrees in all."""
        return self.same == (len(self.ours), len(self.ours))

    @property
    def difference(self) -> float:
        """How much longer or shorter the engine's acceptance is, in parts of this decoder's."""
        there, ours = pooled(self.theirs)["tau"], pooled(self.ours)["tau"]
        return there / ours - 1


def questions(target: Target, file: Path, count: int, room: int) -> list[list[int]]:
    """Token ids of conversations up to their last question, as many as asked for that leave room to answer."""
    limit = (target.max_positions or sys.maxsize) - room
    prompts = (target.chat(list(talk.messages[:-1])) for talk in read_conversations(file))
    found = list(islice((prompt for prompt in prompts if len(prompt) <= limit), count))
    if len(found) < count:
        raise ValueError(f"{file} has {len(found)} prompts that leave {room} tokens of room, expected --count {count}")
    return found


def proof(
    job: Job,
    head: Path,
    engine: str,
    environment: Path,
    target: Target,
    work: Path,
    spoil: Callable[[Path], None] | None = None,
) -> Proof:
    """What both say; `spoil` may change the exported head before the engine reads it, `work` keeps the target."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        export(load_drafter(head, target), target.config, engine, f"{folder}/head")
        if spoil is not None:
            spoil(Path(folder) / "head")
        found = there(job, engine, environment, target, work, Path(folder))
    pairs = zip(found["answers"], job.prompts, strict=True)
    misread = sum(row.get("prompt", prompt) != prompt for row, prompt in pairs)
    if misread:
        raise ValueError(
            f"{engine} reads {misread} of {len(job.prompts)} prompts as other tokens than the target's own tokenizer: "
            "choose others with --prompts, or a target whose tokenizer it converts whole"
        )
    rule = Rule(from_prompt=engine == "llamacpp", stops=found.get("stops", ()))
    return Proof(found["version"], found["answers"], here(job, head, target, rule))


def there(job: Job, engine: str, environment: Path, target: Target, work: Path, folder: Path) -> dict[str, Any]:
    """What the engine says of the head that was exported to `folder`."""
    begin = target.tokenizer.bos_token or ""  # which an engine that reads text puts there by itself
    texts = [target.tokenizer.decode(prompt).removeprefix(begin) for prompt in job.prompts]
    asked: dict[str, Any] = {"prompts": job.prompts, "texts": texts, "new_tokens": job.new_tokens, "dtype": job.dtype}
    asked |= {"depth": job.budget.depth, "nodes": job.budget.nodes, "branching": job.budget.top_k}
    asked |= {"target": str(job.target.resolve()), "work": str(work), "head": f"{folder}/head", "out": f"{folder}/out"}
    (folder / "job.json").write_text(json.dumps(asked))
    script = Path(__file__).with_name(f"engine_{engine}.py")
    # isolated: this folder holds files that share a name with the standard library's
    command = [str(python_of(environment)), "-I", str(script), f"{folder}/job.json"]
    done = subprocess.run(["env", "-u", "PYTHONPATH", *QUIET, *SETTINGS.get(engine, ()), *command], capture_output=True)
    if done.returncode:
        printed = (done.stdout + done.stderr).decode(errors="replace")
        raise ValueError(f"{engine} in {environment} failed; its last words:\n{printed[-3000:]}")
    answers: dict[str, Any] = json.loads((folder / "out").read_text())
    return answers


def row_of(found: Proof, job: Job, head: Path, engine: str) -> dict[str, Any]:
    """One row of the result file."""
    text, counts = found.same
    return {
        "head": name_of(head),
        "target": name_of(job.target),
        "engine": engine,
        "dtype": job.dtype,
        "draft": [job.budget.nodes, job.budget.depth, job.budget.top_k],
        "prompts": len(job.prompts),
        "new_tokens": job.new_tokens,
        "version": found.version,
        "there": pooled(found.theirs),
        "here": pooled(found.ours),
        "same_text": text,
        "same_counts": counts,
        "made": {
            "cpu": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "date": str(date.today()),
            "commit": commit(),
        },
    }


KEY = ("head", "target", "engine", "dtype", "draft", "prompts", "new_tokens")


def name_of(folder: Path) -> str:
    """What a head or a target is called: its folder, or where that says nothing, the one above."""
    folder = folder.resolve()
    return folder.parent.name if folder.name in ("head", "target") else folder.name


def merged(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Put rows into the result file in place of those with the same key."""
    try:
        before = json.loads(file.read_text()) if file.is_file() else []
        keyed = {json.dumps([row[name] for name in KEY]): row for row in [*before, *rows]}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} holds no rows of eval.engines ({error}): name another --out, or remove it") from None
    write_text(file, json.dumps([row for _, row in sorted(keyed.items())], indent=2) + "\n")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown, the engine's figures before this decoder's."""
    lines = ["| head | engine | draft | drafts | accepted at each place | τ | equal |", "|---" * 7 + "|"]
    for row in rows:
        there, ours = row["there"], row["here"]
        accepted = " / ".join(", ".join(map(str, side["accepted"])) for side in (there, ours))
        nodes, depth, width = row["draft"]
        draft = f"chain of {depth}" if width == 1 else f"tree: {nodes} nodes, {depth} deep, {width} wide"
        known = f"{row['target']} · {row['head']} ({row['dtype']})"
        lines.append(
            f"| {known} | {row['engine']} {row['version']} | {draft} | {there['drafts']} / {ours['drafts']} | "
            f"{accepted} | {there['tau']:.3f} / {ours['tau']:.3f} | {verdict(row)} |"
        )
    return "\n".join(lines)


def verdict(row: dict[str, Any]) -> str:
    """Whether all answers agree; where sums are rounded, how far acceptance is apart."""
    counts, text = row["same_counts"], row["same_text"]
    if counts == text == row["prompts"]:
        return "yes"
    apart = row["there"]["tau"] / row["here"]["tau"] - 1
    return f"{apart:+.2%}; counts of {counts}, text of {text} of {row['prompts']}"


def main(argv: list[str]) -> None:
    """Run the heads in the engine, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("heads", nargs="+", type=Path, metavar="HEAD")
    parser.add_argument("--engine", required=True, choices=list(VERSIONS))
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=Path("runs/tiny/data/heldout.jsonl"))
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--branching", type=int, default=1, help="children of a node; more than 1: trees")
    parser.add_argument("--nodes", type=int, help="of a tree, the root not counted; by default 8")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--environment", type=Path, help="of the engine; made there if it is not; build/engines/ENGINE")
    parser.add_argument("--out", type=Path, default=Path("runs/engines.json"), help="default: runs/engines.json")
    args = parser.parse_args(argv)
    sys.exit(run(args))


def run(args: argparse.Namespace) -> int:
    """0 where all heads agree."""
    if args.engine != "openvino" and args.branching > 1:
        raise ValueError(f"{args.engine} drafts chains alone: leave --branching out, or take openvino")
    if args.engine == "openvino" and args.dtype != "float32":
        raise ValueError("openvino is compared in float32 alone: its conversion to bfloat16 is not this project's")
    if absent := [str(head) for head in args.heads if not (head / "config.json").is_file()]:
        raise ValueError(f"no head at {', '.join(absent)}: expected the folder that training leaves in train.out")
    target = Target.load(args.target, dtype=args.dtype)
    nodes = args.depth if args.branching == 1 else args.nodes or 8
    prompts = questions(target, args.prompts, args.count, args.new_tokens + 2 * (nodes + 2))
    job = Job(args.target, prompts, Budget(nodes, args.depth, args.branching), args.new_tokens, args.dtype)
    rows, right = [], True
    environment = prepared(args.engine, args.environment or Path("build/engines") / args.engine)
    with lock_path(args.out), tempfile.TemporaryDirectory() as work:
        for head in args.heads:
            print(f"{args.engine}: {head}", file=sys.stderr, flush=True)
            found = proof(job, head, args.engine, environment, target, Path(work))
            right &= found.equal if args.dtype == "float32" else abs(found.difference) <= NEAR
            rows.append(row_of(found, job, head, args.engine))
            merged(rows[-1:], args.out)
    print(table(rows))
    return 0 if right else 1


if __name__ == "__main__":
    script(main)
