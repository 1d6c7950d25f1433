"""A head that follows a target in fine-tuning: `python -m bench.drift`, on one thread, behind `make tiny`.

The tiny target learns to answer in capitals, some steps at a time. After each of these stages the head of
`runs/tiny/eagle1` is refreshed on prompts that the target answers with its drafts, or left alone; at the end others are
trained anew, on as many and on four times as many tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from bench.machine import made_on, markdown, write_results
from data_prep.read_once import read_examples
from eagle import Budget, Sampling, Target, generate
from eagle.core.examples import Example
from eagle.data.on_policy import trained_target
from eagle.drafters import DRAFTERS
from eagle.formats.checkpoint import load_head
from eagle.log import progress, script
from eagle.recipe import OnPolicySection, Recipe
from eagle.training.refresh import Refresh
from eval.result_files.statistics import estimate_difference
from recipes.held_out import first_prompt

STAGES, TARGET_STEPS, TARGET_LR, BATCH = 4, 25, 3e-4, 4
STEPS, PROMPTS, NEW_TOKENS, LR = 15, 8, 48, 1e-3  # of a refresh, and of each of its steps
MEASURED = 40  # held-out prompts
BUDGET = Budget(25, 6, 6)
TEXTS = OnPolicySection.model_validate({"share": 1.0, "weight": 0.0})  # the same loop, without what drafts teach


def rewrite_answers(source: str, out: Path, change: Callable[[str], str]) -> str:
    """A file of the same conversations, each answer changed, as into capitals."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w") as file:
        for line in Path(source).read_text().splitlines():
            record = json.loads(line)
            for turn in record["conversations"]:
                if turn["from"] in ("gpt", "assistant"):
                    turn["value"] = change(turn["value"])
            file.write(json.dumps(record) + "\n")
    return str(out)


class Tuning:
    """A target in fine-tuning, on the answers of conversations."""

    def __init__(self, target: Target, examples: Sequence[Example], lr: float = TARGET_LR) -> None:
        self.target, self.examples, self.steps = target, examples, 0
        weights = [weight for weight in target.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, lr=lr)

    def run(self, steps: int) -> float:
        """So many steps; the last loss."""
        for _ in progress(range(steps), "fine-tune", steps, unit="steps"):
            first = self.steps * BATCH % (len(self.examples) - BATCH)
            chosen = self.examples[first : first + BATCH]
            tokens = pad_sequence([example.tokens for example in chosen], batch_first=True)
            mask = pad_sequence([example.loss_mask for example in chosen], batch_first=True)
            logits = self.target.model(input_ids=tokens, use_cache=False).logits
            loss = cross_entropy(logits[:, :-1][mask[:, 1:]], tokens[:, 1:][mask[:, 1:]])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
        self.target.forget()
        return float(loss.detach())


def acceptance(target: Target, drafter: Any, prompts: Sequence[list[int]]) -> dict[Any, list[int]]:
    """Tokens and cycles of every prompt, at T = 0 and 1."""
    counts = {}
    for temperature in (0.0, 1.0):
        samplings = [Sampling(temperature, request=number) for number in range(len(prompts))]
        options: dict[str, Any] = {"budget": BUDGET, "sampling": samplings, "max_new_tokens": 64}
        for number, trace in enumerate(generate(target, drafter, prompts, batch_size=len(prompts), **options)):
            counts[temperature, number] = [sum(cycle.committed for cycle in trace.cycles), len(trace.cycles)]
    return counts


def follow(refresh: Refresh, target: Target, prompts: Sequence[list[int]], steps: int) -> float:
    """So many steps; returns their CPU seconds."""
    begin = process_time()
    for _ in progress(range(steps), "refresh", steps, unit="steps"):
        first = refresh.steps * PROMPTS % (len(prompts) - PROMPTS)
        refresh.step(target, prompts[first : first + PROMPTS], max_new_tokens=NEW_TOKENS)
    return process_time() - begin


def describe(rows: dict[Any, list[int]], at: float, other: dict[Any, list[int]] | None = None) -> str:
    """The acceptance length at a temperature, and how much longer it is than another, with the interval."""
    mine = {key: row for key, row in rows.items() if key[0] == at}
    tokens, cycles = (sum(column) for column in zip(*mine.values(), strict=True))
    said = f"{tokens / cycles:.2f}"
    if other is None:
        return said
    theirs = {key: row for key, row in other.items() if key[0] == at}
    more, low, high = estimate_difference(theirs, mine, cluster=lambda key: key[1]).estimate
    return f"{said} ({more:+.2f}, {low:+.2f} to {high:+.2f})"


def main(argv: list[str]) -> None:
    """Fine-tune, refresh, measure; print the table and write the results."""
    parser = argparse.ArgumentParser(prog="python -m bench.drift", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="laid over recipes/tiny/eagle1.yaml")
    parser.add_argument("--head", default="runs/tiny/eagle1/head", help="the folder of the head that follows")
    parser.add_argument("--out", default="docs/results/drift.json", help="the file of results")
    parser.add_argument("--seeds", type=int, default=3, help="how often, with other answers")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    old = load_head(args.head)
    recipe = Recipe.load("recipes/tiny/eagle1.yaml", args.overrides)
    data, regenerate = recipe.data, recipe.regenerate
    assert regenerate is not None
    upper = rewrite_answers(regenerate.source, Path(recipe.train.out).parent / "capitals.jsonl", str.upper)
    tuned_on = read_examples(recipe.model_copy(update={"data": data.model_copy(update={"train": upper})}))
    prompts = [first_prompt(example.tokens, example.loss_mask) for example in tuned_on]
    heldout = recipe.model_copy(update={"data": data.model_copy(update={"train": data.heldout, "limit": MEASURED})})
    asked = [first_prompt(example.tokens, example.loss_mask) for example in read_examples(heldout)]
    results = []
    for seed in range(args.seeds):
        results += run(recipe, old, tuned_on, prompts, asked, seed)
    found = {**made_on(prompts=len(asked)), "rows": results}
    write_results(Path(args.out), found)
    print(drift_table(found))


def drift_table(results: dict[str, Any]) -> str:
    """The acceptance lengths of all arms, and their distance to the arm that each is compared with."""
    columns = ["seed", "target's steps", "arm", "tokens", "CPU s", "T = 0", "T = 1"]
    return markdown(columns, [[row[name] for name in columns] for row in results["rows"]])


def run(
    recipe: Recipe,
    old: Any,
    tuned_on: Sequence[Example],
    prompts: list[list[int]],
    asked: list[list[int]],
    seed: int,
) -> list[dict[str, Any]]:
    """One seed: the rows of all stages."""
    target = trained_target(Target.load(recipe.target.path, dtype="float32").model.requires_grad_(True))
    tuning = Tuning(target, tuned_on)
    refresh, seconds, rows = Refresh(copy.deepcopy(old), lr=LR, seed=seed * 10**6), 0.0, []

    def add(
        arm: str, head: Any, tokens: int, spent: float, beside: dict[Any, list[int]] | None
    ) -> dict[Any, list[int]]:
        counts = acceptance(target, head, asked)
        row = {"seed": seed, "target's steps": tuning.steps, "arm": arm, "tokens": tokens, "CPU s": round(spent)}
        row |= {f"T = {at}": describe(counts, at, beside) for at in (0, 1)}
        rows.append({**row, "counts": [[*key, *values] for key, values in counts.items()]})
        print({name: value for name, value in row.items()}, flush=True)
        return counts

    def left_alone() -> Any:
        return copy.deepcopy(old).bind(target.head)

    add("left alone", left_alone(), 0, 0.0, None)
    most = PROMPTS * NEW_TOKENS
    for stage in range(1, STAGES + 1):
        tuning.run(TARGET_STEPS)
        alone = add("left alone", left_alone(), 0, 0.0, None)
        seconds += follow(refresh, target, prompts, STEPS)
        followed = add("refreshed", refresh.drafter(target), stage * STEPS * most, seconds, alone)
    for arm, times, policy in (("anew", 1, TEXTS), ("anew", 4, TEXTS), ("from the old head, texts alone", 1, TEXTS)):
        torch.manual_seed(seed)
        head = (
            copy.deepcopy(old)
            if "old" in arm
            else DRAFTERS[old.settings.kind].for_target(old.settings, target.config, target.head)
        )
        others = Refresh(head, lr=LR if "old" in arm else 3e-3, policy=policy, seed=seed * 10**6)
        spent = follow(others, target, prompts, times * STAGES * STEPS)
        add(arm, others.drafter(target), times * STAGES * STEPS * most, spent, followed)
    return rows


if __name__ == "__main__":
    script(main)
