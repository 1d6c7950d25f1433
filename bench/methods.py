"""Heads of three methods on one target, and what each setting of EAGLE-3 is worth: `python bench/methods.py ...`.

Every arm is trained by this project's training command on the same stored features, for equally many tokens or equally
long. What its drafts would keep is found by replaying them along the target's own answers, which gives the cycles of
decoding. An arm whose rows are in the result file is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from time import process_time
from typing import Any

import torch

from bench.machine import made_on
from bench.methods_arms import ARMS, METHODS, Arm
from bench.methods_replay import NEW_TOKENS, decoded, told, top_ten
from bench.train_speed import our_step
from eagle.data.examples import collate, supervised
from eagle.data.store import FeatureStore
from eagle.drafters import settings_of
from eagle.log import progress, script
from eagle.recipe import Recipe
from eagle.target.target import Target
from eagle.training.first_head import first_head
from eagle.training.plan import Plan
from eval.prompts import questions

BATCH, HEATS = 4, (0.0, 1.0)
CURVE = ("agreement", "overlap", "chain/tau", "tree/tau")  # of what validation tells


# -- what all arms share ----------------------------------------------------------------------------------------------


def command_of(args: argparse.Namespace, arm: Arm, seed: int = 0) -> tuple[str, list[str]]:
    """The recipe of an arm, and what is laid over it."""
    work = Path(args.work)
    overrides = [
        f"target.path={args.target}",
        "target.dtype=bfloat16",
        f"data.train={work / 'train.jsonl'}",
        "data.limit=null",
        "data.max_length=1024",
        f"features.store={work / arm.store}",
        "features.dtype=bfloat16",
        f"train.batch_size={BATCH}",
        "train.epochs=1000",  # the steps decide
        f"train.lr={args.lr}",
        "train.dtype=bfloat16",
        f"train.seed={seed}",
        "train.validation=0.02",
        "train.checkpoint_every=1000000",
        f"eval.prompts={args.questions}",
        f"eval.count={args.prompts}",
    ]
    size = json.loads((Path(args.target) / "config.json").read_text())["vocab_size"]
    told = {"work": work, **{f"vocab_{part}": size // part for part in (2, 4, 8, 16)}}
    return f"recipes/tiny/{arm.method}.yaml", [*overrides, *(one.format(**told) for one in arm.overrides)]


def recipe_of(args: argparse.Namespace, arm: Arm, *more: str) -> Recipe:
    """The same as a recipe."""
    path, overrides = command_of(args, arm)
    return Recipe.load(path, [*overrides, *more])


def prepared(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Conversations and stores of features, each where it is not there yet."""
    work, plain = Path(args.work), METHODS["EAGLE-3"]
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "train.jsonl").exists():
        lines = [line for path in args.train for line in Path(path).read_text().splitlines() if line.strip()]
        random.Random(0).shuffle(lines)
        (work / "train.jsonl").write_text("\n".join(lines[: args.conversations]) + "\n")
        (work / "few.jsonl").write_text("\n".join(lines[: args.regenerated]) + "\n")
    for arm in {ARMS[name].store: ARMS[name] for name in names}.values():
        if "regenerated" in arm.store and not (work / "regenerated.jsonl").exists():
            answers = [f"regenerate.source={work / 'few.jsonl'}", f"regenerate.out={work / 'regenerated.jsonl'}"]
            answers += ["regenerate.temperature=1", "regenerate.max_new_tokens=256"]
            stage(args, arm, "-m", "data_prep.regenerate", more=answers)
        read = tuple(one for one in arm.overrides if not one.startswith(("drafter.", "train.")))
        stage(args, replace(plain, overrides=read, store=arm.store), "-m", "data_prep.extract")


def stage(args: argparse.Namespace, arm: Arm, *command: str, seed: int = 0, more: Sequence[str] = ()) -> float:
    """Run one of the project's commands on the recipe of an arm; the CPU seconds that it took."""
    path, overrides = command_of(args, arm, seed)
    begun = getrusage(RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command, path, *overrides, *more], check=True)
    ended = getrusage(RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime


# -- how long ---------------------------------------------------------------------------------------------------------


def stepper(args: argparse.Namespace, arm: Arm, target: Target, store: FeatureStore) -> Callable[[list[int]], None]:
    """A step of an arm's training, for the clock alone: reading is counted, what is learned is thrown away."""
    recipe, frozen = recipe_of(args, arm, "train.init=null"), target.head.cast(torch.bfloat16)
    head: Any = first_head(recipe, settings_of(recipe.drafter.model_dump(), arm.method), target, store)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)

    def step(places: list[int]) -> None:
        batch = collate(store.read(places), store.taps, places)
        our_step(head, batch, frozen, optimizer, bf16=True)

    return step


def clocked(args: argparse.Namespace, target: Target) -> dict[str, float]:
    """CPU seconds of a step of each method; all take turns on the same conversations."""
    store = FeatureStore(Path(args.work) / "features")
    plan = plan_of(args, METHODS["EAGLE-1"], store)
    steps = {name: stepper(args, METHODS[name], target, store) for name in ("EAGLE-1", "HASS", "EAGLE-3")}
    seconds = dict.fromkeys(steps, 0.0)
    warm = max(args.clocked // 10, 1)
    for number in progress(range(warm + args.clocked), "clock", warm + args.clocked):
        for name, step in steps.items():
            begun = process_time()
            step(plan.step(number))
            seconds[name] += (process_time() - begun) * (number >= warm)
    return {METHODS[name].method: value / args.clocked for name, value in seconds.items()}


def plan_of(args: argparse.Namespace, arm: Arm, store: FeatureStore) -> Plan:
    """Which conversations the steps of an arm read."""
    slots = [int(supervised(store.mask(place)).sum()) for place in range(len(store))]
    return Plan(slots, recipe_of(args, arm).train)


def steps_of(args: argparse.Namespace, arm: Arm, clock: Callable[[], dict[str, float]]) -> int:
    """As many steps as read the arm's share of the tokens, or as its time is long."""
    if arm.as_long_as is not None:
        seconds = seconds_of(args, arm.as_long_as, clock) - seconds_of(args, arm.start, clock)
        return max(round(seconds / clock()[arm.method]), 1)
    held = json.loads((Path(args.work) / arm.store / "index.json").read_text())["examples"]
    return round(arm.share * args.tokens / (held["tokens"] / held["count"]) / BATCH)


def seconds_of(args: argparse.Namespace, name: str | None, clock: Callable[[], dict[str, float]]) -> float:
    """How long an arm trains by the clock, with all that it starts from."""
    if name is None:
        return 0.0
    arm = ARMS[name]
    return steps_of(args, arm, clock) * clock()[arm.method] + seconds_of(args, arm.start, clock)


# -- one arm ----------------------------------------------------------------------------------------------------------


def folder_of(args: argparse.Namespace, name: str, seed: int) -> Path:
    """Where an arm's run lies."""
    return Path(args.work) / "runs" / f"{''.join(c if c.isalnum() else '-' for c in name)}-{seed}"


def trained(args: argparse.Namespace, name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train an arm by the project's command: its steps, CPU seconds and learning curve."""
    arm, out = ARMS[name], folder_of(args, name, seed)
    more = [f"train.out={out}", f"train.max_steps={steps}", f"train.validate_every={-(-steps // 4)}"]
    if arm.start:
        more.append(f"train.init={folder_of(args, arm.start, seed) / 'last'}")
    if not (told := out / "cpu_seconds.json").exists():  # else only its answers are missing
        told.write_text(json.dumps(stage(args, arm, "recipes/train_eagle.py", seed=seed, more=more)))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    curve = [
        {"step": row["step"] + 1, **{name: row["validation"][name] for name in CURVE}}
        for row in rows
        if "validation" in row
    ]
    return {"arm": name, "seed": seed, "steps": steps, "cpu_seconds": json.loads(told.read_text()), "curve": curve}


def compared(args: argparse.Namespace, results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The results after every arm and seed that they did not hold."""
    target = Target.load(args.target, dtype="float32")
    asked = questions(recipe_of(args, METHODS["EAGLE-1"]))
    taps = FeatureStore(Path(args.work) / "features").taps  # all that any method reads
    answers = {heat: told(args, target, asked, taps, heat) for heat in HEATS}
    results["tasks"] = [one.task for one in asked]
    results["top_ten"] = {f"T = {heat:g}": top_ten(target, said) for heat, said in answers.items()}

    def clock() -> dict[str, float]:
        results["clock"] = results.get("clock") or clocked(args, target)
        found: dict[str, float] = results["clock"]
        return found

    made = {(run["arm"], run["seed"]) for run in results["runs"]}
    for seed in range(args.seeds):
        for name in args.arms:
            if (name, seed) in made:
                continue
            run = trained(args, name, seed, steps_of(args, ARMS[name], clock))
            folder = folder_of(args, name, seed) / "last"
            run["decoded"] = decoded(target, folder, answers, taps, ARMS[name].shapes)
            results["runs"].append(run)
            yield results


# -- all of them ------------------------------------------------------------------------------------------------------


def written(path: Path, results: dict[str, Any]) -> None:
    """Write the results aside, with the runs that another process has added, and put them in place whole."""
    held = json.loads(path.read_text())["runs"] if path.exists() else []
    runs = {(run["arm"], run["seed"]): run for run in [*held, *results["runs"]]}
    order = {name: place for place, name in enumerate(ARMS)}
    results["runs"] = sorted(runs.values(), key=lambda run: (order[run["arm"]], run["seed"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.part")
    aside.write_text(json.dumps(results) + "\n")
    os.replace(aside, path)


def arguments(argv: list[str]) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--train", nargs="+", required=True, help="files of conversations")
    parser.add_argument("--questions", required=True, help="a file of prompts, with `turns`")
    parser.add_argument("--work", default="runs/methods")
    parser.add_argument("--out", type=Path, default=Path("docs/results/methods.json"))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1_750_000, help="that an arm learns from")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--conversations", type=int, default=3500)
    parser.add_argument("--regenerated", type=int, default=500, help="conversations that are answered anew")
    parser.add_argument("--prompts", type=int, default=42)
    parser.add_argument("--clocked", type=int, default=20, help="steps in which the methods are timed in turns")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Prepare, then train, replay and write arm by arm."""
    args = arguments(argv)
    prepared(args, args.arms)
    said = {"tokens": args.tokens, "lr": args.lr, "prompts": args.prompts, "new_tokens": NEW_TOKENS}
    about = made_on(target=Path(args.target).name, **said)
    results: dict[str, Any] = {"runs": []}
    if args.out.exists():
        results = json.loads(args.out.read_text())
    results["machine"] = about
    for found in compared(args, results):
        latest = found["runs"][-1]
        print(told_of(latest), flush=True)
        written(args.out, found)
    written(args.out, results)


def told_of(run: dict[str, Any]) -> str:
    """A run in one line."""
    lengths = [
        f"{name} {sum(row[0] for row in found['rows']) / sum(row[1] for row in found['rows']):.3f}"
        for name, found in run["decoded"].items()
    ]
    return f"{run['arm']}, seed {run['seed']}: {run['steps']} steps, {run['cpu_seconds']:.0f} s; {'; '.join(lengths)}"


if __name__ == "__main__":
    script(main)
