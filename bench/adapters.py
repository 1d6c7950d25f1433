"""Heads for LoRA adapters, from the base's head or anew, at equal time: `python -m bench.adapters`, behind `make tiny`.

The tiny target learns by adapters of rank 8 to answer in capitals, or in small letters. The adapters share its weights
and are not merged. For each, the head of `runs/tiny/eagle1` is measured as it is and trained on, and a new head is
trained for as many CPU seconds.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import torch

from bench.drift import LR, NEW_TOKENS, PROMPTS, TEXTS, Tuning, acceptance, rewrite_answers
from bench.machine import made_on, markdown, write_results
from data_prep.read_once import read_examples
from eagle import Target
from eagle.core.examples import Example
from eagle.data.on_policy import trained_target
from eagle.drafters import DRAFTERS
from eagle.formats.checkpoint import load_head
from eagle.log import script
from eagle.recipe import Recipe
from eagle.target.loading import add_adapter
from eagle.training.refresh import Refresh
from eval.result_files.statistics import estimate_difference
from recipes.held_out import first_prompt

ADAPTERS = {"capitals": str.upper, "small letters": str.lower}
RANK, TUNING_LR = 8, 2e-3
NEW_LR = 3e-3  # of a new head
OLD, ON, NEW = "the base's head", "trained on from it", "a new head"
ARMS = {ON: LR, NEW: NEW_LR}
Counts = dict[Any, list[int]]  # tokens and cycles, by temperature and prompt


class Texts(NamedTuple):
    """What a head learns from and is measured by."""

    learned: list[list[int]]
    measured: list[list[int]]


def prompts_of(examples: Sequence[Example]) -> list[list[int]]:
    """What stands before the first answer of each conversation."""
    return [first_prompt(example.tokens, example.loss_mask) for example in examples]


def tune_adapter(path: str, examples: Sequence[Example], steps: int, folder: Path) -> Path:
    """Train an adapter of a model on answers; returns its folder."""
    model = Target.load(path, dtype="float32").model
    torch.manual_seed(0)
    adapted = add_adapter(model, RANK, 2 * RANK, 0.0)
    Tuning(trained_target(model), examples, lr=TUNING_LR).run(steps)
    adapted.save_pretrained(folder)
    return folder


def train_until(refresh: Refresh, target: Target, prompts: list[list[int]], seconds: float) -> float:
    """Steps that take so many CPU seconds together; returns what they took."""
    begin = process_time()
    while process_time() - begin < seconds:
        first = refresh.steps * PROMPTS % (len(prompts) - PROMPTS)
        refresh.step(target, prompts[first : first + PROMPTS], max_new_tokens=NEW_TOKENS)
    return process_time() - begin


def measure_arm(
    arm: str, old: Any, target: Target, texts: Texts, seed: int, marks: Sequence[float]
) -> list[tuple[float, int, Counts]]:
    """CPU seconds, tokens learned and acceptance of one head, whenever it has trained for so many seconds."""
    torch.manual_seed(seed)
    method = DRAFTERS[old.settings.kind]
    head = copy.deepcopy(old) if arm == ON else method.for_target(old.settings, target.config, target.head)
    refresh, spent, rows = Refresh(head, lr=ARMS[arm], policy=TEXTS, seed=seed * 10**6), 0.0, []
    for mark in marks:
        spent += train_until(refresh, target, texts.learned, mark - spent)
        tokens = refresh.steps * PROMPTS * NEW_TOKENS
        rows.append((spent, tokens, acceptance(target, refresh.drafter(target), texts.measured)))
    return rows


def row_of(adapter: str, arm: str, seed: int, mark: float, seconds: float, tokens: int, counts: Counts) -> Any:
    """One measurement, as the results hold it."""
    row = {"adapter": adapter, "arm": arm, "seed": seed, "mark": mark, "CPU s": round(seconds, 1), "tokens": tokens}
    print(row, {at: f"{length([{**row, 'counts': listed(counts)}], at):.2f}" for at in (0, 1)}, flush=True)
    return {**row, "counts": listed(counts)}


def listed(counts: Counts) -> list[list[float]]:
    """Counts as JSON holds them: temperature, prompt, tokens, cycles."""
    return [[*key, *values] for key, values in counts.items()]


def main(argv: list[str]) -> None:
    """Tune the adapters, train and measure the heads; print the table and write the results."""
    parser = argparse.ArgumentParser(prog="python -m bench.adapters", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="laid over recipes/tiny/eagle1.yaml")
    parser.add_argument("--head", default="runs/tiny/eagle1/head", help="the folder of the base's head")
    parser.add_argument("--out", default="docs/results/adapters.json", help="the file of results")
    parser.add_argument("--seeds", type=int, default=3, help="how often each head is trained, with other answers")
    parser.add_argument("--steps", type=int, default=200, help="of each adapter, with four conversations")
    parser.add_argument("--seconds", default="6,24", help="of CPU, after which heads are measured")
    parser.add_argument("--prompts", type=int, default=32, help="held-out ones, by which heads are measured")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    old, recipe = load_head(args.head), Recipe.load("recipes/tiny/eagle1.yaml", args.overrides)
    marks, data, folder = [float(mark) for mark in args.seconds.split(",")], recipe.data, Path(recipe.train.out).parent
    assert recipe.regenerate is not None

    def read(**changed: Any) -> list[Example]:
        return list(read_examples(recipe.model_copy(update={"data": data.model_copy(update=changed)})))

    asked = prompts_of(read(train=data.heldout, limit=args.prompts))
    base = Target.load(recipe.target.path, dtype="float32")
    rows = [row_of("none", OLD, 0, 0.0, 0.0, 0, acceptance(base, copy.deepcopy(old).bind(base.head), asked))]
    for name, change in ADAPTERS.items():
        file = rewrite_answers(recipe.regenerate.source, folder / f"{name.split()[0]}.jsonl", change)
        tuned_on = read(train=file)
        target = base.with_adapter(tune_adapter(recipe.target.path, tuned_on, args.steps, folder / name.split()[0]))
        texts = Texts(prompts_of(tuned_on), asked)
        counts = acceptance(target, copy.deepcopy(old).bind(target.head), asked)
        rows.append(row_of(name, OLD, 0, 0.0, 0.0, 0, counts))
        for seed in range(args.seeds):
            for arm in ARMS:
                for mark, measured in zip(marks, measure_arm(arm, old, target, texts, seed, marks), strict=True):
                    rows.append(row_of(name, arm, seed, mark, *measured))
    results = {**made_on(prompts=len(asked), steps=args.steps, rank=RANK, seeds=args.seeds), "rows": rows}
    write_results(Path(args.out), results)
    print(adapter_table(results))


def length(rows: Sequence[Any], at: float) -> float:
    """The acceptance length at a temperature."""
    tokens, cycles = (
        sum(count[place] for row in rows for count in row["counts"] if count[0] == at) for place in (2, 3)
    )
    return tokens / max(cycles, 1)


def adapter_table(results: dict[str, Any]) -> str:
    """Acceptance lengths of all seeds, and by how much those of heads trained on are longer than new heads'."""
    groups: dict[Any, list[Any]] = {}
    for row in results["rows"]:
        groups.setdefault((row["adapter"], row["arm"], row["mark"]), []).append(row)
    lines = []
    for (adapter, arm, mark), rows in groups.items():
        line = [adapter, arm, f"{mark:g}"]
        for at in (0, 1):
            lengths = [length([row], at) for row in rows]
            line.append(f"{min(lengths):.2f} to {max(lengths):.2f}" if len(rows) > 1 else f"{lengths[0]:.2f}")
            line.append(describe_gain(groups[adapter, NEW, mark], rows, at) if arm == ON else "")
        lines.append(line)
    return markdown(["adapter", "head", "CPU s", "T = 0", "above a new head", "T = 1", "above a new head"], lines)


def describe_gain(new: Sequence[Any], on: Sequence[Any], at: float) -> str:
    """By how much the second's acceptance length is longer, with the interval, paired by seed and prompt."""
    more, low, high = estimate_difference(counts_of(new, at), counts_of(on, at), cluster=lambda key: key[1]).estimate
    return f"{more:+.2f} ({low:+.2f} to {high:+.2f})"


def counts_of(rows: Sequence[Any], at: float) -> Counts:
    """Tokens and cycles at a temperature, by seed and prompt."""
    return {(row["seed"], number): counts for row in rows for heat, number, *counts in row["counts"] if heat == at}


if __name__ == "__main__":
    script(main)
