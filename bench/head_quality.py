"""Heads of this project beside such as the published loop trains: `python bench/head_quality.py --target FOLDER ...`.

Same conversations, same first weights, same order, same learning rate; what differs is what each does by itself. Both
are compared at equal tokens and at equal time, decoded greedily with a chain of 4 and with the published tree.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import torch

from bench.machine import made_on
from bench.published_eagle1 import PublishedHead, padded, published_loss, published_optimizer, published_step
from bench.train_speed import our_step
from eagle.core.decode import generate
from eagle.core.drafter import Budget
from eagle.data.examples import collate, trim_mask
from eagle.data.store import FeatureStore
from eagle.drafters.eagle1 import Eagle1
from eagle.formats.checkpoint import load_drafter, save_head
from eagle.log import progress, script
from eagle.recipe import Recipe
from eagle.target.target import Target
from eagle.training.plan import Plan
from eagle.training.train import TREES
from eval.prompts import first_turns

TINY = "recipes/tiny/eagle1.yaml"
SHAPES = {"chain of 4": TREES["chain"], "tree of 25": TREES["tree"]}
ARMS = ("ours", "published, equal tokens", "published, equal time")
NEW_TOKENS = 64


def recipe_of(args: argparse.Namespace, seed: int) -> tuple[Recipe, list[str]]:
    """The recipe of one run, and how to say it on a command line."""
    work = Path(args.work)
    overrides = [
        f"target.path={args.target}",
        "target.dtype=bfloat16",
        f"data.train={work / 'train.jsonl'}",
        "data.limit=null",
        "data.max_length=1024",
        f"features.store={work / 'features'}",
        f"train.out={work / f'ours-{seed}'}",
        f"train.epochs={args.epochs}",
        "train.lr=1e-3",
        "train.dtype=bfloat16",
        f"train.seed={seed}",
        "train.validate_every=80",
        "train.checkpoint_every=100000",
        f"eval.prompts={work / 'prompts.jsonl'}",
        f"eval.count={args.prompts}",
    ]
    return Recipe.load(TINY, overrides), overrides


def prepared(args: argparse.Namespace) -> None:
    """One file of conversations, one of prompts, and the target's features."""
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    lines = [line for path in args.train for line in Path(path).read_text().splitlines() if line.strip()]
    random.Random(0).shuffle(lines)
    (work / "train.jsonl").write_text("\n".join(lines[: args.conversations]) + "\n")
    asked = [
        json.loads(line)["turns"][0]
        for path in args.questions
        for line in Path(path).read_text().splitlines()[: -(-args.prompts // len(args.questions))]
    ]
    talks = [{"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "-"}]} for text in asked]
    (work / "prompts.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    subprocess.run([sys.executable, "-m", "data_prep.extract", TINY, *recipe_of(args, 0)[1]], check=True)


def trained_here(args: argparse.Namespace, seed: int) -> tuple[Path, list[dict[str, Any]]]:
    """A head by this project's training command, with its learning curve."""
    recipe, overrides = recipe_of(args, seed)
    subprocess.run([sys.executable, "recipes/train_eagle.py", TINY, *overrides], check=True)
    out = Path(recipe.train.out)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    curve = [{"step": row["step"] + 1, **row["validation"]} for row in rows if "validation" in row]
    return out / "last", curve


def published_trainer(
    recipe: Recipe, target: Target, store: FeatureStore, plan: Plan
) -> tuple[Eagle1, Callable[[int], int]]:
    """A head that the steps of the published loop train, from the first weights of ours; a step tells its tokens."""
    torch.manual_seed(recipe.train.seed)
    ours = Eagle1.for_target(Eagle1.Settings(fc_bias=False), target.config)
    head = PublishedHead(ours.shape, bias=False)
    head.load_state_dict(ours.state_dict())
    ours.load_state_dict(head.state_dict(), assign=True)  # one storage: what trains the one trains the other
    optimizer = published_optimizer(head)
    frozen = target.head.cast(torch.bfloat16)
    embedding, weight = frozen.embedding.get_parameter("weight"), frozen.weight

    def step(number: int) -> int:
        optimizer.param_groups[0]["lr"] = plan.lr(number)
        examples = store.read(plan.step(number))
        loss = partial(published_loss, head, padded(examples), embedding, weight, noise_seed=number)
        published_step(loss, optimizer)
        return sum(len(example.tokens) for example in examples)

    return ours, step


def our_trainer(recipe: Recipe, target: Target, store: FeatureStore, plan: Plan) -> Callable[[int], int]:
    """A step of this project's, for the clock alone: heads to compare are trained by the command."""
    head = Eagle1.for_target(Eagle1.Settings(), target.config)
    optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.train.lr, betas=recipe.train.betas, fused=True)
    frozen = target.head.cast(torch.bfloat16)

    def step(number: int) -> int:
        examples = store.read(plan.step(number))
        batch = collate(examples, store.taps, plan.seeds(number, plan.step(number)))
        our_step(head, batch, frozen, optimizer, bf16=True)
        return sum(len(example.tokens) for example in examples)

    return step


def opened(args: argparse.Namespace, seed: int, steps: int | None = None) -> tuple[Recipe, FeatureStore, Plan]:
    """What both loops read, in which order."""
    recipe, _ = recipe_of(args, seed)
    store = FeatureStore(recipe.features.store or "")
    settings = recipe.train.model_copy(update={"max_steps": steps})
    return recipe, store, Plan([int(trim_mask(store.mask(place)).sum()) for place in range(len(store))], settings)


def clocked(args: argparse.Namespace, target: Target) -> dict[str, float]:
    """Tokens per CPU second of both steps, which take turns on the same conversations; reading is counted."""
    recipe, store, plan = opened(args, 0)
    steps = {ARMS[0]: our_trainer(recipe, target, store, plan)}
    steps[ARMS[1]] = published_trainer(recipe, target, store, plan)[1]
    seconds, tokens = dict.fromkeys(steps, 0.0), dict.fromkeys(steps, 0)
    for number in progress(range(args.clocked), "clock", args.clocked):
        for name, step in steps.items():
            begun = process_time()
            read = step(number)
            if number >= args.clocked // 10:  # the first are warm-up
                seconds[name], tokens[name] = seconds[name] + process_time() - begun, tokens[name] + read
    return {name: tokens[name] / seconds[name] for name in steps}


def trained_as_published(args: argparse.Namespace, seed: int, target: Target, steps: int, name: str) -> Path:
    """A head by the plain rendering of the published loop."""
    recipe, store, plan = opened(args, seed, steps)
    head, step = published_trainer(recipe, target, store, plan)
    for number in progress(range(len(plan)), name, len(plan)):
        step(number)
    folder = Path(args.work) / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    save_head(folder, head, recipe.dump(), {"rendering": name, "steps": steps})
    return folder


def decoded(args: argparse.Namespace, target: Target, folder: Path) -> Iterator[dict[str, Any]]:
    """One row per shape and prompt."""
    drafter = load_drafter(folder, target)
    prompts = first_turns(recipe_of(args, 0)[0], target)
    for shape, paths in SHAPES.items():
        for number, prompt in enumerate(progress(prompts, f"{folder.name}, {shape}", len(prompts))):
            trace = generate(target, drafter, prompt, budget=Budget.fixed(paths), max_new_tokens=NEW_TOKENS)
            committed = sum(cycle.committed for cycle in trace.cycles)
            yield {"shape": shape, "prompt": number, "committed": committed, "cycles": len(trace.cycles)}


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """All arms and seeds, decoded."""
    target = Target.load(args.target, dtype="float32")
    speeds, runs = clocked(args, target), []
    for seed in range(args.seeds):
        folder, curve = trained_here(args, seed)
        steps = curve[-1]["step"]
        runs.append({"arm": ARMS[0], "seed": seed, "steps": steps, "curve": curve})
        runs[-1]["rows"] = list(decoded(args, target, folder))
        equal_time = round(steps * speeds[ARMS[1]] / speeds[ARMS[0]])
        for arm, count in zip(ARMS[1:], (steps, equal_time), strict=True):
            folder = trained_as_published(args, seed, target, count, arm)
            runs.append({"arm": arm, "seed": seed, "steps": count, "rows": list(decoded(args, target, folder))})
    machine = made_on(
        target=Path(args.target).name, conversations=args.conversations, epochs=args.epochs, prompts=args.prompts
    )
    return {"machine": machine, "speeds": speeds, "runs": runs}


def lengths(runs: list[dict[str, Any]], arm: str, shape: str) -> dict[tuple[int, int], float]:
    """The acceptance length of each seed and prompt."""
    return {
        (run["seed"], row["prompt"]): row["committed"] / row["cycles"]
        for run in runs
        if run["arm"] == arm
        for row in run["rows"]
        if row["shape"] == shape and row["cycles"]
    }


def paired(runs: list[dict[str, Any]], arm: str, shape: str) -> tuple[float, float]:
    """The mean difference of ours to an arm, by seed and prompt, and its standard error over prompts."""
    ours, theirs = lengths(runs, ARMS[0], shape), lengths(runs, arm, shape)
    by_prompt: dict[int, list[float]] = {}
    for seed, prompt in ours.keys() & theirs.keys():
        by_prompt.setdefault(prompt, []).append(ours[seed, prompt] - theirs[seed, prompt])
    means = torch.tensor([sum(values) / len(values) for values in by_prompt.values()])
    return float(means.mean()), float(means.std() / len(means) ** 0.5)


def pooled(run: dict[str, Any], shape: str) -> float:
    """Tokens per target forward over all prompts."""
    rows = [row for row in run["rows"] if row["shape"] == shape]
    return sum(row["committed"] for row in rows) / sum(row["cycles"] for row in rows)


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    runs = results["runs"]
    lines = [
        "| trained by | steps | tokens per CPU second | shape | τ per seed | mean τ | ours better by, per prompt |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        mine = [run for run in runs if run["arm"] == arm]
        steps, speed = mine[0]["steps"], results["speeds"][arm if arm in results["speeds"] else ARMS[1]]
        for shape in SHAPES:
            found = [pooled(run, shape) for run in mine]
            better = "" if arm == ARMS[0] else "{:+.3f} ± {:.3f}".format(*paired(runs, arm, shape))
            each = ", ".join(f"{value:.3f}" for value in found)
            mean = sum(found) / len(found)
            lines.append(f"| {arm} | {steps:,} | {speed:,.0f} | {shape} | {each} | {mean:.3f} | {better} |")
    made = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    return "\n".join([*lines, "", f"<sub>{made}</sub>"])


def curve(results: dict[str, Any]) -> str:
    """The learning curve of the first seed as Markdown."""
    rows = results["runs"][0]["curve"]
    names = ["cross_entropy", "agreement", "overlap", "chain/tau", "tree/tau"]
    lines = [f"| step | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {row['step']} | {' | '.join(f'{row[name]:.3f}' for name in names)} |" for row in rows]
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Prepare, train, decode, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--train", nargs="+", required=True, help="files of conversations")
    parser.add_argument("--questions", nargs="+", required=True, help="files of prompts, with `turns`")
    parser.add_argument("--work", default="runs/head_quality")
    parser.add_argument("--out", default="docs/results/head_quality.json")
    parser.add_argument("--conversations", type=int, default=2500)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--clocked", type=int, default=60, help="steps in which both loops are timed in turns")
    args = parser.parse_args(argv)
    prepared(args)
    results = compared(args)
    Path(args.out).write_text(json.dumps(results) + "\n")
    print(table(results))


if __name__ == "__main__":
    script(main)
