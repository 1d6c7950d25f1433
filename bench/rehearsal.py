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
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from bench.machine import made_on, markdown, write_results
from eagle.decoding.decode import generate
from eagle.formats.checkpoint import load_drafter, load_head
from eagle.log import script
from eagle.target.target import Target
from eval.result_files.results import ACCEPTANCE_LENGTH, read_results
from recipes.tiny.train_tokenizer import END, SPECIAL, TEMPLATE

ROOT = Path(__file__).parent.parent
SIZES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "small": {
        "vocab_size": 8192,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 1024,
    },
}
# the engines that have a layout for a method's head; SafeAILab/EAGLE takes none as wide as 16 heads of 128
METHODS = {
    "eagle1": ("vllm", "sglang", "portable"),
    "hass": ("vllm", "sglang", "portable"),
    "eagle3": ("vllm", "sglang", "trtllm", "openvino", "llamacpp", "speculators", "portable"),
    "eagle3.1": ("vllm", "sglang", "trtllm", "speculators"),
    "draft_model": ("transformers",),
}
NUM_CONVERSATIONS = 8
NUM_PROMPTS = 2
NUM_STEPS = 20
QUESTION = "What is this?"


class Rehearsal:
    """A folder in which all stages run, and what each of them took.

    Args:
        folder: Holds everything that the stages make.
        size: A key of `SIZES`.
        methods: Keys of `METHODS`; the first has the recipe of the stages that all share.
    """

    def __init__(self, folder: Path, size: str, methods: Sequence[str]) -> None:
        self.folder = folder
        self.size = size
        self.methods = methods
        self.target = folder / "target"
        self.rows: list[dict[str, Any]] = []

    def head(self, name: str) -> Path:
        """Return the folder of a trained head."""
        return self.folder / name / "head"

    def recipe(self, name: str) -> list[str]:
        """Return the recipe of a method with the overrides of a rehearsal, as words of a command line."""
        folder = self.folder
        drafters = {method: {"head": str(self.head(method))} for method in self.methods}
        overrides: dict[str, Any] = {
            "target.path": self.target,
            "target.dtype": "bfloat16",
            "data.train": folder / "regenerated.jsonl",
            "data.limit": "null",
            "data.max_length": 128,
            "data.heldout": folder / "heldout.jsonl",
            "regenerate.source": folder / "train.jsonl",
            "regenerate.out": folder / "regenerated.jsonl",
            "regenerate.keep_truncated": "true",
            "features.store": folder / "features",
            "train.out": folder / name,
            "train.dtype": "bfloat16",
            "train.batch_size": 2,
            "train.epochs": NUM_STEPS,
            "train.max_steps": NUM_STEPS,
            "train.validate_every": NUM_STEPS,
            "train.checkpoint_every": NUM_STEPS,
            "eval.prompts": folder / "heldout.jsonl",
            "eval.count": NUM_PROMPTS,
            "eval.max_new_tokens": 8,
            "eval.drafters": json.dumps(drafters),
            "train.init": "null",
        }
        is_eagle3 = name.startswith("eagle3")
        if is_eagle3:
            # these heads read other layers
            overrides["features.store"] = folder / "features3"
            overrides["drafter.draft_vocab"] = SIZES[self.size]["vocab_size"] // 5
        if name == "eagle3.1":
            overrides |= {"drafter.fc_norm": "true", "drafter.norm_output": "true"}
        if name == "hass" and "eagle1" in self.methods:
            overrides["train.init"] = self.head("eagle1")
        method = "eagle3" if is_eagle3 else name
        recipe = ROOT / f"recipes/tiny/{method}.yaml"
        return [str(recipe), *(f"{key}={value}" for key, value in overrides.items())]

    def run(self, stage: str, *commands: Sequence[object]) -> str:
        """Run a stage's commands, note seconds and peak memory, and return all output.

        Args:
            stage: Its name in the table, from which that of its log follows.
            commands: What follows the name of the interpreter.

        Raises:
            ValueError: A command failed; those after it are not run.
        """
        row: dict[str, Any] = {
            "stage": stage,
            "ok": False,
            "seconds": 0,
            "cpu_seconds": 0,
            "peak_mb": 0,
            "note": "",
        }
        self.rows.append(row)
        name = stage.replace(" ", "-").replace(",", "")
        log = self.folder / f"{len(self.rows):02}-{name}.log"
        print(f"{stage} ...", file=sys.stderr, flush=True)
        for command in commands:
            words = [sys.executable, *map(str, command)]
            with log.open("a") as out:
                start = perf_counter()
                process = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
                # unlike Popen.wait it tells the peak memory of this process
                _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            seconds = perf_counter() - start
            cpu_seconds = usage.ru_utime + usage.ru_stime
            row["seconds"] = round(row["seconds"] + seconds, 1)
            row["cpu_seconds"] = round(row["cpu_seconds"] + cpu_seconds, 1)
            row["peak_mb"] = max(row["peak_mb"], usage.ru_maxrss * 1024 // 10**6)
            if process.returncode:
                printed = log.read_text()[-3000:]
                raise ValueError(
                    f"{stage} ended with {process.returncode}, expected 0: {shlex.join(words)}\n{printed}"
                )
        row["ok"] = True
        return log.read_text()

    def note(self, text: str) -> None:
        """Note what came out of the last stage."""
        self.rows[-1]["note"] = text
        print(f"  {text}", file=sys.stderr, flush=True)

    def run_all(self) -> None:
        """Run all stages."""
        self.run("target", call(make_target, self.target, self.size))
        self.note(", ".join(f"{name} {value:,}" for name, value in SIZES[self.size].items()))
        write_conversations(self.folder)
        first = self.recipe(self.methods[0])
        self.run("answers of the target", ["-m", "data_prep.regenerate", *first])
        # one method of each store of features
        stores = {name.startswith("eagle3"): name for name in self.methods}
        for name in stores.values():
            extract = ["-m", "data_prep.extract", *self.recipe(name)]
            self.run(f"features, {name}", extract, [*extract, "--verify"])
        for name in self.methods:
            self.run(f"training, {name}", ["recipes/train_eagle.py", *self.recipe(name)])
            self.note(describe_training(self.folder / name))

        for name in self.methods:
            command = [
                "-m",
                "eagle",
                "generate",
                self.head(name),
                QUESTION,
                "--target",
                self.target,
            ]
            options = ["--compare", "--dtype", "bfloat16", "--max-new-tokens", 8]
            self.run(f"generate, {name}", [*command, *options])

        # one run measures the heads of all methods, under the folder of the first
        results = self.folder / self.methods[0]
        self.run("measuring, all", ["-m", "eval.measure", *first])
        self.note(describe_measurement(results / "results.jsonl"))
        self.run("lossless, all", ["-m", "eval.lossless", *first])
        self.note(describe_certificate(results / "lossless.json"))

        for name in self.methods:
            self.export_and_import(name)

    def export_and_import(self, name: str) -> None:
        """Write a head for each engine, inspect it, import it again and compare it with what it was."""
        target = ["--target", self.target]
        exports = [self.folder / name / engine for engine in METHODS[name]]
        commands: list[list[object]] = []
        for path in exports:
            commands.append(
                ["-m", "eagle", "export", self.head(name), "--to", path.name, path, *target]
            )
        self.run(f"export, {name}", *commands)
        self.note(", ".join(METHODS[name]))
        commands = [["-m", "eagle", "inspect", path, *target] for path in exports]
        self.run(f"inspect, {name}", *commands)
        imported = exports
        # a draft model's export is a model of transformers, which drafts as it stands
        if name != "draft_model":
            imported = [path.with_name(f"{path.name}-again") for path in exports]
            pairs = zip(exports, imported, strict=True)
            commands = [["-m", "eagle", "import", path, again, *target] for path, again in pairs]
            self.run(f"import, {name}", *commands)
        compare = call(compare_heads, self.target, self.head(name), *imported)
        output = self.run(f"compare, {name}", compare)
        self.note(output.splitlines()[-1])


def call(function: Callable[..., None], *values: object) -> list[str]:
    """Return the call of a function of this file as words of a command line."""
    return ["-c", f"from bench.rehearsal import *; {function.__name__}{tuple(map(str, values))}"]


# -- what no command does: a random target, its conversations, and heads compared --------------------------------------


def make_target(folder: str | Path, size: str) -> None:
    """Save a random model in bf16, and a tokenizer whose tokens are single characters, as many as the model has."""
    config = Qwen3Config(
        **SIZES[size],
        tie_word_embeddings=True,
        rope_theta=1e6,
        eos_token_id=SPECIAL.index(END),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    # surrogates are no characters
    characters = (chr(code) for code in range(10, 0x110000) if not 0xD800 <= code < 0xE000)
    tokens = [*SPECIAL, *islice(characters, config.vocab_size - len(SPECIAL))]
    backend = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        additional_special_tokens=SPECIAL,
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)


def write_conversations(folder: Path) -> None:
    """Write conversations whose answers the target will replace, and questions that it will be asked."""
    for split, count in (("train", NUM_CONVERSATIONS), ("heldout", NUM_PROMPTS)):
        lines = []
        for i in range(count):
            question = {"from": "human", "value": f"What is number {i} of the {split} questions?"}
            answer = {"from": "gpt", "value": "An answer."}
            lines.append(json.dumps({"conversations": [question, answer]}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def compare_heads(target_folder: str, head: str, *imported: str) -> None:
    """Print that all weights are bit-equal and all drafts the same, or stop at the first head that differs.

    Args:
        target_folder: The model for which the heads draft.
        head: The head that was exported.
        imported: What its exports became when they were imported again.

    Raises:
        SystemExit: One has another weight, or drafts another tree.
    """
    target = Target.load(target_folder, dtype="bfloat16")
    weights = load_head(head).state_dict()
    expected = draft(target, head)
    for folder in imported:
        again = read_weights(folder)
        # what only one of them has, then what both have and which differs
        names = sorted(weights.keys() ^ again.keys())
        for name in weights:
            if name in again and not torch.equal(weights[name], again[name]):
                names.append(name)
        if names:
            count = f"{len(names)} of {len(weights)} tensors differ"
            raise SystemExit(f"{folder} is not {head}: {count}, as {names[:3]}")
        if draft(target, folder) != expected:
            raise SystemExit(
                f"{folder} drafts otherwise than {head}, expected the same from the same weights"
            )
    num_nodes = sum(len(tokens) for tokens, _ in expected)
    print(f"{len(weights)} tensors bit-equal, {num_nodes} nodes drafted alike")


def read_weights(head: str) -> dict[str, Tensor]:
    """Return the tensors of a head of this project, or of a causal language model as a draft model names them."""
    if (Path(head) / "recipe.yaml").exists():
        return load_head(head).state_dict()
    model = AutoModelForCausalLM.from_pretrained(head)
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def draft(target: Target, head: str) -> list[tuple[list[int], list[int]]]:
    """Return the drafted trees of a short generation, as tokens and parents."""
    target.forget()
    drafter = load_drafter(head, target)
    prompt = target.chat(QUESTION)
    trace = generate(target, drafter, prompt, max_new_tokens=6, stop=[])
    return [(cycle.tree.tokens.tolist(), cycle.tree.parents.tolist()) for cycle in trace.cycles]


# -- what came out -----------------------------------------------------------------------------------------------------


def describe_training(folder: Path) -> str:
    """Return the first and last loss of a run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["total"] for row in rows if "total" in row]
    return f"loss {losses[0]:.3f} to {losses[-1]:.3f}"


def describe_measurement(path: Path) -> str:
    """Return the acceptance length of each drafter at each temperature."""
    lengths = []
    for group in read_results(path).groups():
        if group.drafter != "none":
            length = group.estimate(ACCEPTANCE_LENGTH).value
            lengths.append(f"{group.drafter} {length:.2f} (T = {group.temperature:g})")
    return "acceptance length " + ", ".join(lengths)


def describe_certificate(path: Path) -> str:
    """Return how many answers are the untouched model's own, and how many differ at near ties."""
    verdicts = json.loads(path.read_text())["verdicts"]
    identical = sum(verdict["identical"] for verdict in verdicts)
    answers = sum(verdict["answers"] for verdict in verdicts)
    return f"{identical} of {answers} answers identical, {answers - identical} differ at a near tie, none otherwise"


def table(results: dict[str, Any]) -> str:
    """Return the stages as a table."""
    lines = []
    for row in results["stages"]:
        line = [row["stage"], f"{row['seconds']:.0f}", f"{row['cpu_seconds']:.0f}"]
        line += [f"{row['peak_mb']:,} MB", "yes" if row["ok"] else "NO", row["note"]]
        lines.append(line)
    header = ["stage", "seconds", "CPU seconds", "peak memory", "ok", "what came out"]
    return markdown(header, lines, results["machine"])


def main(argv: list[str]) -> None:
    """Run all stages, print the table and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="qwen3-0.6b")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "runs/rehearsal",
        help="a new one, for all that is made",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs/results/rehearsal.json", help="the result file"
    )
    args = parser.parse_args(argv)
    if args.folder.exists():
        raise ValueError(
            f"{args.folder} is there already, expected a new folder: take it away, or name another"
        )
    # in every stage
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    args.folder.mkdir(parents=True)
    rehearsal = Rehearsal(args.folder.resolve(), args.size, args.methods)
    try:
        rehearsal.run_all()
    finally:
        results = {"machine": made_on(size=args.size), "stages": rehearsal.rows}
        print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    script(main)
