"""Stage 4, the whole path in one process: answers, features, training, measuring, export, by the stages' own commands.

The target is a published model, where `bench.gpu.prepare` was given one. Otherwise it has random weights at the shapes
of Qwen3-0.6B, which tells speed and nothing about acceptance.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

from bench.gpu.common import Context, Figures, Unit
from bench.rehearsal import describe_measurement
from bench.rehearsal_stages import make_target, write_conversations
from data_prep import extract, regenerate
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle.command import ship
from eagle.recipe import Recipe
from eval import measure
from recipes import train_eagle

RECIPE = "recipes/tiny/eagle3.yaml"


class Path4:
    """The folder of a path, its recipe, and the steps in their order."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.folder = context.work / "path"
        published = context.inputs / "model" if context.inputs else None
        self.is_published = published is not None and published.exists()
        self.target = published if published and self.is_published else self.folder / "target"
        self.steps: dict[str, tuple[Path, Callable[[], Figures]]] = {
            "target": (self.target, self.make_target),
            "answers": (self.folder / "answers.jsonl", self.make_answers),
            "features": (self.folder / "features", self.make_features),
            "training": (self.folder / "run/head", self.train),
            "measuring": (self.folder / "run/results.jsonl", self.measure),
            "export": (self.folder / "vllm", self.export),
        }

    @property
    def words(self) -> list[str]:
        """The recipe as words of a command line."""
        small = self.context.rehearse
        length, new_tokens, steps = (96, 16, 4) if small else (512, 128, 100)
        train = self.context.inputs / "train.jsonl" if self.is_published and self.context.inputs else None
        return [
            RECIPE,
            f"target.path={self.target}",
            "target.dtype=bfloat16",
            f"regenerate.source={train or self.folder / 'train.jsonl'}",
            f"regenerate.out={self.folder / 'answers.jsonl'}",
            "regenerate.keep_truncated=true",
            f"regenerate.max_new_tokens={new_tokens}",
            f"regenerate.batch_size={4 if small else 64}",
            f"data.train={self.folder / 'answers.jsonl'}",
            f"data.heldout={self.folder / 'heldout.jsonl'}",
            "data.limit=null",
            f"data.max_length={length}",
            f"features.store={self.folder / 'features'}",
            "drafter.draft_vocab=512",
            f"train.out={self.folder / 'run'}",
            "train.dtype=bfloat16",
            f"train.batch_size={2 if small else 16}",
            f"train.max_steps={steps}",
            f"train.epochs={steps}",
            f"train.validate_every={steps}",
            f"eval.prompts={self.folder / 'heldout.jsonl'}",
            f"eval.count={2 if small else 3}",
            f"eval.max_new_tokens={16 if small else 48}",
            "eval.temperatures=[0.0]",
        ]

    def make_target(self) -> Figures:
        """Make a random model, unless a published one was brought."""
        make_target(self.target, "small" if self.context.rehearse else "qwen3-0.6b")
        return {}

    def make_answers(self) -> Figures:
        """Answer all questions on this device."""
        if not (self.folder / "heldout.jsonl").exists():
            write_conversations(self.folder, 8 if self.context.rehearse else 256)
        start = perf_counter()
        regenerate.main([*self.words, "regenerate.endpoint=null"])
        seconds = perf_counter() - start
        return {"tokens/s": self.count(supervised=True) / seconds}

    def count(self, supervised: bool = False) -> int:
        """Return the tokens of the conversations, or those of their answers."""
        recipe = Recipe.load(RECIPE, self.words[1:])
        examples = tokenize_data(recipe, load_tokenizer(recipe))[0]
        return sum(int(each.loss_mask.sum()) if supervised else len(each.tokens) for each in examples)

    def make_features(self) -> Figures:
        """Compute and store hidden states."""
        start = perf_counter()
        extract.main(self.words)
        return {"tokens/s": self.count() / (perf_counter() - start)}

    def train(self) -> Figures:
        """Train a head for some steps; the rate is that of the last ones, behind compilation."""
        train_eagle.main(self.words)
        rows = map(json.loads, (self.folder / "run/metrics.jsonl").read_text().splitlines())
        losses = [row for row in rows if "total" in row]
        return {"tokens/s": losses[-1]["tokens_per_second"], "loss": [losses[0]["total"], losses[-1]["total"]]}

    def measure(self) -> Figures:
        """Measure the head beside n-grams and plain decoding."""
        measure.main(self.words)
        return {"found": describe_measurement(self.folder / "run/results.jsonl")}

    def export(self) -> Figures:
        """Write the head for vLLM."""
        head, out = self.folder / "run/head", self.folder / "vllm"
        ship.run_export([str(head), "--target", str(self.target), "--to", "vllm", str(out)])
        return {"files": sorted(path.name for path in out.iterdir())}


def units(context: Context) -> dict[str, Unit]:
    """Return the steps in their order."""
    return {name: partial(run_step, context, name) for name in Path4(context).steps}


def run_step(context: Context, name: str) -> Figures:
    """Run a step, and those before it whose output is not there, as on a machine that is new."""
    path = Path4(context)
    path.folder.mkdir(parents=True, exist_ok=True)
    for earlier, (output, run) in path.steps.items():
        if earlier != name and not output.exists():
            run()
        if earlier == name:
            break
    output, run = path.steps[name]
    start = perf_counter()
    figures = {} if name == "target" and output.exists() else run()
    seconds = perf_counter() - start
    told = [f"{figures['tokens/s']:,.0f} tokens/s"] if "tokens/s" in figures else [f"{seconds:.1f} s"]
    told += [figures["found"]] if "found" in figures else []
    return {"line": ", ".join(told), "step s": seconds, "published": path.is_published, **figures}
