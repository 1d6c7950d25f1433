"""Check that a head drafts in an engine as in this decoder: `python -m tests.engines HEAD`.

Same target, same prompts, greedy drafts. An engine's answers stay right whatever an export got wrong, so the numbers of
accepted tokens at each place of the draft are compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from data_prep.conversations import read_conversations
from eagle.core.budget import Budget
from eagle.disk import lock_path, write_text
from eagle.formats.checkpoint import load_drafter
from eagle.formats.export import export
from eagle.shipped import commit
from eagle.target.target import Target
from eval.result_files.results import device_name
from tests.engines.engine_builds import VERSIONS, build_environment, python_of
from tests.engines.engine_families import FAMILIES, write_model
from tests.engines.engine_reference import (
    Job,
    Row,
    Rule,
    decode_as_engine,
    same_counts,
    same_text,
    sum_rows,
)

# how far acceptance lengths may differ where sums are rounded
NEAR = 0.01
# one process and one thread; nothing fetched, nothing reported
QUIET = ("OMP_NUM_THREADS=1", "HF_HUB_OFFLINE=1", "TOKENIZERS_PARALLELISM=false")
VLLM = (
    "VLLM_ENABLE_V1_MULTIPROCESSING=0",
    "VLLM_CPU_KVCACHE_SPACE=1",
    "VLLM_CPU_OMP_THREADS_BIND=nobind",
)
SETTINGS = {"vllm": (*VLLM, "VLLM_NO_USAGE_STATS=1")}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows of an engine and of this decoder."""

    version: str
    theirs: list[Row]
    ours: list[Row]

    @property
    def same(self) -> tuple[int, int]:
        """Return how many answers are the same text, and how many have the same counts."""
        text = sum(map(same_text, self.theirs, self.ours))
        return text, sum(map(same_counts, self.theirs, self.ours))

    @property
    def equal(self) -> bool:
        """Return whether text and counts of every answer agree."""
        return self.same == (len(self.ours), len(self.ours))

    @property
    def difference(self) -> float:
        """Return the engine's acceptance length over this decoder's, minus 1."""
        return sum_rows(self.theirs)["tau"] / sum_rows(self.ours)["tau"] - 1


def read_prompts(target: Target, file: Path, count: int, room: int) -> list[list[int]]:
    """Return token ids of the first `count` conversations, up to their last question, that leave room to answer."""
    limit = (target.max_positions or sys.maxsize) - room
    prompts: list[list[int]] = []
    for conversation in read_conversations(file):
        prompt = target.chat(list(conversation.messages[:-1]))
        if len(prompt) <= limit:
            prompts.append(prompt)
        if len(prompts) == count:
            return prompts

    raise ValueError(
        f"{file} has {len(prompts)} prompts that leave {room} tokens of room, expected --count {count}"
    )


def compare_engine(
    job: Job,
    head: Path,
    engine: str,
    environment: Path,
    target: Target,
    work: Path,
    spoil: Callable[[Path], None] | None = None,
    family: str | None = None,
) -> Comparison:
    """Decode in the engine and here; `spoil` may change the exported head before, `work` keeps the converted target.

    A `family` is of MTP layers, of which an engine reads one in the files of its own family's models alone.
    """
    with tempfile.TemporaryDirectory(dir=work) as folder:
        # what is exported is the head as users load it
        drafter: Any = load_drafter(head, target)
        if family is None:
            export(drafter, target.config, engine, f"{folder}/head")
        else:
            write_model(
                drafter,
                target.config,
                job.target,
                family,
                Path(folder) / "head",
            )

        if spoil is not None:
            spoil(Path(folder) / "head")
        output = run_engine(job, engine, environment, target, work, Path(folder))

    rows = output["answers"]
    # an engine that is given text says how it tokenized it
    misread = 0
    for row, prompt in zip(rows, job.prompts, strict=True):
        misread += row.get("prompt", prompt) != prompt
    if misread:
        raise ValueError(
            f"{engine} reads {misread} of {len(job.prompts)} prompts as other tokens than the target's own tokenizer: "
            "choose others with --prompts, or a target whose tokenizer it converts whole"
        )

    options = {name: output[name] for name in ("stops", "reads") if name in output}
    rule = Rule(from_prompt=engine == "llamacpp", **options)
    return Comparison(output["version"], rows, decode_as_engine(job, head, target, rule))


def run_engine(
    job: Job,
    engine: str,
    environment: Path,
    target: Target,
    work: Path,
    folder: Path,
) -> dict[str, Any]:
    """Run the engine on the head that was exported to `folder`, and return version, answers and stop tokens."""
    values = {
        "prompts": job.prompts,
        "texts": [target.tokenizer.decode(prompt) for prompt in job.prompts],
        # an engine that reads text may add this token by itself
        "start": target.tokenizer.bos_token or "",
        "new_tokens": job.new_tokens,
        "dtype": job.dtype,
        "depth": job.budget.depth,
        "nodes": job.budget.nodes,
        "branching": job.budget.top_k,
        "target": str(job.target.resolve()),
        "work": str(work),
        "head": f"{folder}/head",
        "out": f"{folder}/out",
    }
    (folder / "job.json").write_text(json.dumps(values))
    script = Path(__file__).with_name(f"engine_{engine}.py")
    # isolated: this folder holds files that share a name with the standard library's
    command = [str(python_of(environment)), "-I", str(script), f"{folder}/job.json"]
    settings = ["env", "-u", "PYTHONPATH", *QUIET, *SETTINGS.get(engine, ())]
    process = subprocess.run([*settings, *command], capture_output=True)
    if process.returncode:
        printed = (process.stdout + process.stderr).decode(errors="replace")
        raise ValueError(f"{engine} in {environment} failed; its last words:\n{printed[-3000:]}")

    output: dict[str, Any] = json.loads((folder / "out").read_text())
    return output


def row_of(
    comparison: Comparison,
    job: Job,
    head: Path,
    engine: str,
    family: str | None = None,
) -> dict[str, Any]:
    """Return a row of the result file."""
    text, counts = comparison.same
    return {
        "head": name_of(head),
        "target": name_of(job.target) + (f" as {FAMILIES[family].title}" if family else ""),
        "engine": engine,
        "dtype": job.dtype,
        "draft": [job.budget.nodes, job.budget.depth, job.budget.top_k],
        "prompts": len(job.prompts),
        "new_tokens": job.new_tokens,
        "version": comparison.version,
        "there": sum_rows(comparison.theirs),
        "here": sum_rows(comparison.ours),
        "same_text": text,
        "same_counts": counts,
        "made": {
            "cpu": device_name("cpu"),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "date": str(date.today()),
            "commit": commit(),
        },
    }


# rows of one key replace one another
KEY = ("head", "target", "engine", "dtype", "draft", "prompts", "new_tokens")


def name_of(folder: Path) -> str:
    """Return the name of a head or a target: its folder's, or its parent's where that is `head` or `target`."""
    folder = folder.resolve()
    return folder.parent.name if folder.name in ("head", "target") else folder.name


def merge_rows(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Put rows into the result file in place of those with the same key."""
    try:
        before = json.loads(file.read_text()) if file.is_file() else []
        keyed = {json.dumps([row[name] for name in KEY]): row for row in [*before, *rows]}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{file} holds no rows of tests.engines ({error}): name another --out, or remove it"
        ) from None

    write_text(file, json.dumps([row for _, row in sorted(keyed.items())], indent=2) + "\n")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown, the engine's figures before this decoder's."""
    lines = [
        "| head | engine | draft | drafts | accepted at each place | τ | equal |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        sides = (row["there"], row["here"])
        nodes, depth, width = row["draft"]
        draft = f"chain of {depth}"
        if width > 1:
            draft = f"tree: {nodes} nodes, {depth} deep, {width} wide"
        cells = [
            f"{row['target']} · {row['head']} ({row['dtype']})",
            f"{row['engine']} {row['version']}",
            draft,
            " / ".join(str(side["drafts"]) for side in sides),
            " / ".join(", ".join(map(str, side["accepted"])) for side in sides),
            " / ".join(f"{side['tau']:.3f}" for side in sides),
            _verdict(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")

    return "\n".join(lines)


def _verdict(row: dict[str, Any]) -> str:
    """Return whether all answers agree; otherwise the difference of acceptance lengths."""
    counts, text = row["same_counts"], row["same_text"]
    if counts == text == row["prompts"]:
        return "yes"
    difference = row["there"]["tau"] / row["here"]["tau"] - 1
    return f"{difference:+.2%}; counts of {counts}, text of {text} of {row['prompts']}"


def main(argv: list[str]) -> None:
    """Run the heads in the engine, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    # defaults compare what docs/results/engines.json holds
    parser.add_argument("heads", nargs="+", type=Path, metavar="HEAD")
    parser.add_argument("--engine", required=True, choices=list(VERSIONS))
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=Path("runs/tiny/data/heldout.jsonl"))
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument(
        "--branching", type=int, default=1, help="children of a node; more than 1: trees"
    )
    parser.add_argument("--nodes", type=int, help="of a tree, the root not counted; by default 8")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--family", choices=list(FAMILIES), help="MTP heads: write head and target as such a model"
    )
    parser.add_argument(
        "--environment",
        type=Path,
        help="of the engine; made there if it is not; build/engines/ENGINE",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/engines.json"), help="default: runs/engines.json"
    )
    args = parser.parse_args(argv)
    sys.exit(run(args))


def run(args: argparse.Namespace) -> int:
    """Compare all heads, and return the exit status: 0 where they agree."""
    if args.engine != "openvino" and args.branching > 1:
        raise ValueError(
            f"{args.engine} drafts chains alone: leave --branching out, or take openvino"
        )

    if args.engine == "openvino" and args.dtype != "float32":
        raise ValueError(
            "openvino is compared in float32 alone: its conversion to bfloat16 is not this project's"
        )

    if missing := [str(head) for head in args.heads if not (head / "config.json").is_file()]:
        raise ValueError(
            f"no head at {', '.join(missing)}: expected the folder that training leaves in train.out"
        )

    target = Target.load(args.target, dtype=args.dtype)
    nodes = args.depth if args.branching == 1 else args.nodes or 8
    # engines draft beyond the limit
    room = args.new_tokens + 2 * (nodes + 2)
    job = Job(
        args.target,
        prompts=read_prompts(target, args.prompts, args.count, room),
        budget=Budget(nodes, args.depth, args.branching),
        new_tokens=args.new_tokens,
        dtype=args.dtype,
    )
    rows = []
    agree = True
    folder = args.environment or Path("build/engines") / args.engine
    environment = build_environment(args.engine, folder)
    engine = args.engine.removesuffix("-newest")
    # rows are stored one by one, since each takes minutes
    with lock_path(args.out), tempfile.TemporaryDirectory() as work:
        for head in args.heads:
            print(f"{args.engine}: {head}", file=sys.stderr, flush=True)
            both = compare_engine(
                job,
                head,
                engine,
                environment=environment,
                target=target,
                work=Path(work),
                family=args.family,
            )
            agree &= both.equal if args.dtype == "float32" else abs(both.difference) <= NEAR
            rows.append(row_of(both, job, head, engine, family=args.family))
            merge_rows(rows[-1:], args.out)

    print(table(rows))
    return 0 if agree else 1
