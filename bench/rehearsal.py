"""Every stage at a real model's shapes in bf16, with random weights: `make rehearsal`, or `python bench/rehearsal.py`.

The target has the layers, widths and vocabulary of Qwen3-0.6B; conversations are few and short. Each stage is a command
that a user would give. `--size small` makes the same in a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.machine import made_on, markdown, write_results
from bench.rehearsal_stages import PROMPTS, QUESTION, SIZES, compare_heads, make_target, write_conversations
from eagle.formats.export import EXPORTERS
from eagle.log import script
from eval.result_files.results import ACCEPTANCE_LENGTH, read_results

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results/rehearsal.json"
LENGTH, BATCH, STEPS = 128, 2, 20
NEW_TOKENS = 8
EAGLE1_ENGINES = ("vllm", "sglang", "portable")
EAGLE3_ENGINES = ("vllm", "sglang", "trtllm", "openvino", "llamacpp", "speculators", "portable")
NEWER = ("drafter.fc_norm=true", "drafter.norm_output=true")


@dataclass(frozen=True)
class Method:
    """A method that is trained: its recipe, what is changed in it, and the engines that have a layout for its head."""

    recipe: str
    engines: tuple[str, ...]
    overrides: tuple[str, ...] = ()


METHODS = {
    "eagle1": Method("eagle1", EAGLE1_ENGINES),
    "hass": Method("hass", EAGLE1_ENGINES),
    "eagle3": Method("eagle3", EAGLE3_ENGINES),
    "eagle3.1": Method("eagle3", ("vllm", "sglang", "trtllm", "speculators"), NEWER),
    "draft_model": Method("draft_model", ("transformers",)),
}  # SafeAILab/EAGLE takes no head of these: 16 heads of 128 are wider than 1,024


@dataclass
class Rehearsal:
    """A folder in which all stages run, and what each of them took."""

    folder: Path
    size: str
    methods: Sequence[str]
    engines: Sequence[str]  # as far as they have a layout for a head
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def target(self) -> Path:
        """The folder of the target."""
        return self.folder / "target"

    def head(self, name: str) -> Path:
        """The folder of a trained head."""
        return self.folder / name / "head"

    def recipe(self, name: str) -> list[str]:
        """The recipe of a method with what is other in a rehearsal, as words of a command line."""
        method = METHODS[name]
        prompts = self.folder / "heldout.jsonl"
        drafters = {other: {"head": str(self.head(other))} for other in self.methods}
        init = self.head("eagle1") if name == "hass" and "eagle1" in self.methods else "null"
        vocabulary = [f"drafter.draft_vocab={SIZES[self.size]['vocab_size'] // 5}"] if method.recipe == "eagle3" else []
        return [
            str(ROOT / f"recipes/tiny/{method.recipe}.yaml"),
            *(f"target.path={self.target}", "target.dtype=bfloat16"),
            *(f"data.train={self.folder / 'regenerated.jsonl'}", "data.limit=null", f"data.max_length={LENGTH}"),
            *(f"data.heldout={prompts}", f"regenerate.source={self.folder / 'train.jsonl'}"),
            *(f"regenerate.out={self.folder / 'regenerated.jsonl'}", "regenerate.keep_truncated=true"),
            f"features.store={self.folder / ('features3' if method.recipe == 'eagle3' else 'features')}",
            *(f"train.out={self.folder / name}", "train.dtype=bfloat16", f"train.batch_size={BATCH}"),
            *(
                f"train.epochs={STEPS}",
                f"train.max_steps={STEPS}",
                f"train.validate_every={STEPS}",
                f"train.checkpoint_every={STEPS}",
            ),
            *(f"eval.prompts={prompts}", f"eval.count={PROMPTS}", f"eval.max_new_tokens={NEW_TOKENS}"),
            f"eval.drafters={json.dumps(drafters)}",
            *(f"train.init={init}", *vocabulary, *method.overrides),
        ]

    def run(self, stage: str, *commands: Sequence[object]) -> str:
        """Run a stage's commands, note seconds and peak memory, and return all output; stop at the first that fails."""
        row: dict[str, Any] = {"stage": stage, "ok": False, "seconds": 0, "cpu_seconds": 0, "peak_mb": 0, "note": ""}
        self.rows.append(row)
        log = self.folder / f"{len(self.rows):02}-{stage.replace(' ', '-').replace(',', '')}.log"
        print(f"{stage} ...", file=sys.stderr, flush=True)
        for command in commands:
            words = [sys.executable, *map(str, command)]
            with log.open("a") as out:
                start = perf_counter()
                process = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
                _, status, used = os.wait4(process.pid, 0)  # which tells the peak of this process, or ours
            process.returncode = os.waitstatus_to_exitcode(status)
            row["seconds"] = round(row["seconds"] + perf_counter() - start, 1)
            row["cpu_seconds"] = round(row["cpu_seconds"] + used.ru_utime + used.ru_stime, 1)
            row["peak_mb"] = max(row["peak_mb"], used.ru_maxrss * 1024 // 10**6)
            if process.returncode:
                raise ValueError(
                    f"{stage} ended with {process.returncode}, expected 0: {shlex.join(words)}\n"
                    f"{log.read_text()[-3000:]}"
                )
        row["ok"] = True
        return log.read_text()

    def note(self, text: str) -> None:
        """What came out of the last stage."""
        self.rows[-1]["note"] = text
        print(f"  {text}", file=sys.stderr, flush=True)

    def run_all(self) -> None:
        """All stages."""
        self.run("target", python(make_target, self.target, self.size))
        self.note(", ".join(f"{name} {value:,}" for name, value in SIZES[self.size].items()))
        write_conversations(self.folder)
        first = self.recipe(self.methods[0])
        self.run("answers of the target", ["-m", "data_prep.regenerate", *first])
        for name in {METHODS[name].recipe == "eagle3": name for name in self.methods}.values():  # one of each store
            extract = ["-m", "data_prep.extract", *self.recipe(name)]
            self.run(f"features, {name}", extract, [*extract, "--verify"])
        for name in self.methods:
            self.run(f"training, {name}", ["recipes/train_eagle.py", *self.recipe(name)])
            self.note(describe_training(self.folder / name))
        for name in self.methods:
            generating = ["-m", "eagle", "generate", self.head(name), QUESTION, "--target", self.target, "--compare"]
            self.run(f"generate, {name}", [*generating, "--dtype", "bfloat16", "--max-new-tokens", NEW_TOKENS])
        self.run("measuring, all", ["-m", "eval.measure", *first])
        self.note(describe_measurement(self.folder / self.methods[0] / "results.jsonl"))
        self.run("lossless, all", ["-m", "eval.lossless", *first])
        self.note(describe_certificate(self.folder / self.methods[0] / "lossless.json"))
        for name in self.methods:
            self.export_and_import(name, [engine for engine in METHODS[name].engines if engine in self.engines])

    def export_and_import(self, name: str, engines: Sequence[str]) -> None:
        """A head in the layout of each engine, inspected, imported again and compared with what it was."""
        folder, target = self.folder / name, ["--target", self.target]
        exports = [folder / engine for engine in engines]
        exporting = ["-m", "eagle", "export", self.head(name), *target]
        self.run(f"export, {name}", *([*exporting, "--to", path.name, path] for path in exports))
        self.note(", ".join(engines))
        self.run(f"inspect, {name}", *(["-m", "eagle", "inspect", path, *target] for path in exports))
        again = exports
        if name != "draft_model":  # whose export is a model of transformers, which drafts as it stands
            again = [path.with_name(f"{path.name}-again") for path in exports]
            pairs = zip(exports, again, strict=True)
            self.run(f"import, {name}", *(["-m", "eagle", "import", path, out, *target] for path, out in pairs))
        output = self.run(f"compare, {name}", python(compare_heads, self.target, self.head(name), *again))
        self.note(output.splitlines()[-1])


def python(function: Callable[..., None], *values: object) -> list[str]:
    """A function of bench/rehearsal_stages.py with its values, as words of a command line."""
    return ["-c", f"from bench.rehearsal_stages import *; {function.__name__}{tuple(map(str, values))}"]


# -- what came out -----------------------------------------------------------------------------------------------------


def describe_training(folder: Path) -> str:
    """The first and last loss of a run."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [row["total"] for row in rows if "total" in row]
    return f"loss {losses[0]:.3f} to {losses[-1]:.3f}"


def describe_measurement(path: Path) -> str:
    """The acceptance length of each drafter at each temperature."""
    groups = [group for group in read_results(path).groups() if group.drafter != "none"]
    lengths = [f"{group.drafter} {group.estimate(ACCEPTANCE_LENGTH).value:.2f}" for group in groups]
    heats = [f"(T = {group.temperature:g})" for group in groups]
    return "acceptance length " + ", ".join(map(" ".join, zip(lengths, heats, strict=True)))


def describe_certificate(path: Path) -> str:
    """How many answers are the untouched model's own, and how many differ at near ties."""
    verdicts = json.loads(path.read_text())["verdicts"]
    same, answers = (sum(verdict[key] for verdict in verdicts) for key in ("identical", "answers"))
    return f"{same} of {answers} answers identical, {answers - same} differ at a near tie, none otherwise"


def table(results: dict[str, Any]) -> str:
    """The stages as a table."""
    lines = []
    for row in results["stages"]:
        figures = [f"{row['seconds']:.0f}", f"{row['cpu_seconds']:.0f}", f"{row['peak_mb']:,} MB"]
        lines.append([row["stage"], *figures, "yes" if row["ok"] else "NO", row["note"]])
    header = ["stage", "seconds", "CPU seconds", "peak memory", "ok", "what came out"]
    return markdown(header, lines, results["machine"])


def main(argv: list[str]) -> None:
    """Run all stages, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="qwen3-0.6b")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--engines", nargs="+", choices=EXPORTERS, default=[*EXPORTERS])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/rehearsal", help="a new one, for all that is made")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the result file")
    args = parser.parse_args(argv)
    if args.folder.exists():
        raise ValueError(f"{args.folder} is there already, expected a new folder: take it away, or name another")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # in every stage
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    args.folder.mkdir(parents=True)
    rehearsal = Rehearsal(args.folder.resolve(), args.size, args.methods, args.engines)
    try:
        rehearsal.run_all()
    finally:
        results = {"machine": made_on(size=args.size), "stages": rehearsal.rows}
        print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    script(main)
