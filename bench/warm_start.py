"""Starting from a head of a sibling target, beside starting anew: `python bench/warm_start.py`, after `make demo`.

The tiny target is trained on, on one part of its corpus, until it says something else at every third to seventh token.
The head that was trained for the first then starts the training for the second: by the same recipe, in a third of the
steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.machine import made_on
from eagle.core.drafter import TrainableDrafter
from eagle.data.examples import collate, supervised
from eagle.data.store import FeatureStore
from eagle.drafters import settings_of
from eagle.drafters.parts.validation import added, figures
from eagle.log import progress, script
from eagle.recipe import Recipe
from eagle.target.target import Target
from eagle.training.launch import launch
from eagle.training.plan import Plan
from eagle.training.train import TREES, train
from recipes.first_head import first_head
from recipes.tiny.make_target import BATCH, pack_conversations, perplexity
from recipes.train_eagle import decoded

TINY, FIRST = "recipes/tiny/eagle1.yaml", Path("runs/tiny")
PART = "torch"  # the package whose documentation the sibling has read again
LR, STEPS, WARMUP, SEED = 1e-3, 150, 10, 1  # of the sibling
FIGURES = ("agreement", "overlap", "chain/1", "chain/tau", "tree/tau")


def sibling(work: Path, steps: int) -> dict[str, float]:
    """Train the tiny target on, on one package's documentation, once; how far that moved it on held-out text."""
    if (work / "sibling.json").exists():
        return json.loads((work / "sibling.json").read_text())
    target = Target.load(FIRST / "target", dtype="float32")
    records = [json.loads(line) for line in (FIRST / "data/train.jsonl").read_text().splitlines()]
    records = [record for record in records if record["module"].split(".")[0] == PART]
    held = [json.loads(line) for line in (FIRST / "data/heldout.jsonl").read_text().splitlines()]
    rows, held_rows = pack_conversations(records, target.tokenizer), pack_conversations(held, target.tokenizer)
    before, first = laws(target.model, held_rows), perplexity(target.model, held_rows)
    train_on(target.model, rows, steps)
    after, then = laws(target.model, held_rows), perplexity(target.model, held_rows)
    work.mkdir(parents=True, exist_ok=True)
    shutil.copytree(FIRST / "target", work / "target", dirs_exist_ok=True)
    target.model.save_pretrained(work / "target")
    (work / "asked.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    moved = {
        "conversations": len(records),
        "steps": steps,
        "kl": float((after.exp() * (after - before)).sum(-1).mean()),
        "agreement": float((after.argmax(-1) == before.argmax(-1)).float().mean()),
        "perplexity_before": first,
        "perplexity_after": then,
    }
    (work / "sibling.json").write_text(json.dumps(moved))
    return moved


def train_on(model: Any, rows: Tensor, steps: int) -> None:
    """Further training on the rows, all weights, with a short warm-up and linear decay to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(SEED)
    model.requires_grad_(True)
    for step in progress(range(steps), "sibling", steps, unit="steps"):
        optimizer.param_groups[0]["lr"] = LR * min((step + 1) / WARMUP, (steps - step) / max(steps - WARMUP, 1))
        batch = rows[torch.randint(len(rows), (BATCH,), generator=generator)]
        logits = model(input_ids=batch, use_cache=False).logits
        cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.requires_grad_(False)


@torch.no_grad()
def laws(model: Any, rows: Tensor) -> Tensor:
    """[N, V], the log-probabilities after every token of every fourth row."""
    return torch.cat([model(input_ids=row[None]).logits[0].log_softmax(-1) for row in rows[::4]])


def spread(work: Path, count: int) -> None:
    """Prompts from all over the held-out part of the corpus, whose beginning is about three modules."""
    lines = (FIRST / "data/heldout.jsonl").read_text().splitlines()
    (work / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines[:: max(len(lines) // count, 1)][:count]))


def recipe_of(work: Path, conversations: int, *more: str) -> tuple[Recipe, list[str]]:
    """The tiny recipe for the sibling and its own answers, and how to say it on a command line."""
    overrides = [
        f"target.path={work / 'target'}",
        f"data.train={work / 'answers.jsonl'}",
        f"data.limit={conversations}",
        f"regenerate.source={work / 'asked.jsonl'}",
        f"regenerate.out={work / 'answers.jsonl'}",
        f"features.store={work / 'features'}",
        "features.dtype=float32",
        f"eval.prompts={work / 'prompts.jsonl'}",
        "train.dtype=float32",
        "train.validation=0.2",
        "train.checkpoint_every=1000000",
        "train.epochs=1000",  # the steps decide
        *more,
    ]
    return Recipe.load(TINY, overrides), overrides


def judged(recipe: Recipe, head: TrainableDrafter, target: Target, store: FeatureStore) -> dict[str, float]:
    """What validation says of a head before its first step."""
    plan = Plan([int(supervised(store.mask(place)).sum()) for place in range(len(store))], recipe.train)
    sums = [head.judge(collate([store[place]], store.taps), target.head, TREES) for place in plan.validation]
    return figures(reduce(added, [{name: value.double() for name, value in part.items()} for part in sums]))


def trained(recipe: Recipe, target: Target, store: FeatureStore) -> dict[str, Any]:
    """One run from its first head to its last: its curve from step 0 on, and what the decoder reaches at both ends."""
    shutil.rmtree(recipe.train.out, ignore_errors=True)
    torch.manual_seed(recipe.train.seed)
    head = first_head(recipe, settings_of(recipe.drafter.model_dump(), TINY), target, store)
    given = judged(recipe, head.eval(), target, store)
    start = decoded(recipe, target, head)
    train(launch(recipe.train), recipe, head, target.head, store)
    rows = [json.loads(line) for line in (Path(recipe.train.out) / "metrics.jsonl").read_text().splitlines()]
    found = [(0, given)] + [(row["step"] + 1, row["validation"]) for row in rows if "validation" in row]
    curve = [{"step": step, **{name: values[name] for name in FIGURES}} for step, values in found]
    return {"curve": curve, "decoded_start": start, "decoded_end": decoded(recipe, target, head.eval())}


def arms(args: argparse.Namespace) -> dict[str, list[str]]:
    """What is laid over the recipe in each arm: the steps of the warm start are a third of the cold one's."""
    third = args.steps // 3
    warm = [
        f"train.init={FIRST / 'eagle1/head'}",
        f"train.max_steps={third}",
        f"train.validate_every={max(third // 40, 1)}",
    ]
    return {
        "cold": [f"train.max_steps={args.steps}", f"train.validate_every={max(args.steps // 10, 1)}"],
        "warm": warm,
    }


def reached(cold: dict[str, Any], warm: dict[str, Any], name: str) -> int | None:
    """The first step at which the warm start is where the cold one ended."""
    wanted = cold["curve"][-1][name]
    return next((point["step"] for point in warm["curve"] if point[name] >= wanted), None)


def dip(run: dict[str, Any], name: str) -> float:
    """How far the worst of a run's validations lies above what it was given; below 0 it lost something on its way."""
    first, *later = (point[name] for point in run["curve"])
    return float(min(later) - first)


def table(results: dict[str, Any]) -> str:
    """The results as Markdown: predicted acceptance lengths on held-out conversations, decoded ones on prompts."""
    cold, warm = (results["runs"][name] for name in ("cold", "warm"))
    lines = [
        "| seed | shape | given head | cold, {:,} steps | warm, {:,} steps | there at step | worst − given | "
        "decoded: given | cold | warm |".format(*(runs[0]["curve"][-1]["step"] for runs in (cold, warm))),
        "|---" * 10 + "|",
    ]
    for seed, (anew, kept) in enumerate(zip(cold, warm, strict=True)):
        for shape in TREES:
            name = f"{shape}/tau"
            values = [kept["curve"][0][name], anew["curve"][-1][name], kept["curve"][-1][name]]
            there = reached(anew, kept, name)
            ends = [kept["decoded_start"], anew["decoded_end"], kept["decoded_end"]]
            values_decoded = [end[f"decoded_{shape}_tau"] for end in ends]
            lines.append(
                f"| {seed} | {shape} | {' | '.join(f'{value:.3f}' for value in values)} | "
                f"{'never' if there is None else there} | {dip(kept, name):+.3f} | "
                f"{' | '.join(f'{value:.2f}' for value in values_decoded)} |"
            )
    made = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    moved = results["sibling"]
    return "\n".join(
        [
            *lines,
            "",
            f"<sub>sibling: {moved['steps']} steps, KL {moved['kl']:.2f} from the tiny target, top-1 agreement "
            f"{moved['agreement']:.0%}; {made}</sub>",
        ]
    )


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """The sibling, its data, and all arms and seeds."""
    work = Path(args.work)
    moved = sibling(work, args.sibling_steps)
    spread(work, args.prompts)
    _, overrides = recipe_of(work, args.conversations)
    for stage in ("regenerate", "extract"):
        subprocess.run([sys.executable, "-m", f"data_prep.{stage}", TINY, *overrides], check=True)
    target, store = Target.load(work / "target", dtype="float32"), FeatureStore(work / "features")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arms(args)}
    for seed in range(args.seeds):
        for name, own in arms(args).items():
            out = [f"train.out={work / f'{name}-{seed}'}", f"train.seed={seed}", f"train.decode={args.prompts}"]
            runs[name].append(trained(recipe_of(work, args.conversations, *own, *out)[0], target, store))
    machine = made_on(conversations=len(store), prompts=args.prompts)
    return {"machine": machine, "sibling": moved, "runs": runs}


def main(argv: list[str]) -> None:
    """Compare, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", default="runs/warm_start")
    parser.add_argument("--out", default="docs/results/warm_start.json")
    parser.add_argument("--sibling-steps", type=int, default=STEPS)
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--steps", type=int, default=360, help="of the cold start")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=48)
    args = parser.parse_args(argv)
    results = compared(args)
    Path(args.out).write_text(json.dumps(results) + "\n")
    print(table(results))


if __name__ == "__main__":
    script(main)
