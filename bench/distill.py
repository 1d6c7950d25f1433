"""What distilling a draft model is worth: `python bench/distill.py --target FOLDER --train FILE`.

A model of two layers learns raw text. From there all arms go on for equally many supervised tokens: with the text
alone, or towards the target by one of the divergences, on the same text, on the target's own answers, or on what the
draft says itself. The project's training command trains them. Measured is the overlap of both laws at T = 1, and how
often their likeliest tokens agree, over answers of the target's own that nobody has learned from.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor

from bench.machine import made_on
from bench.methods import folder_of
from bench.methods_report import made
from data_prep.extract import main as extract
from data_prep.regenerate import main as regenerate
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle.data.examples import Example
from eagle.data.features import LiveFeatures
from eagle.data.identity import identity
from eagle.data.on_policy import OnPolicyFeatures
from eagle.formats.checkpoint import load_head
from eagle.log import script
from eagle.recipe import Recipe
from eagle.target.target import Target
from eval.statistics import estimate_difference
from recipes.train_eagle import main as train

RECIPE, BATCH, SAMPLED = "recipes/tiny/draft_model.yaml", 4, 64
RAW, AGAIN = "raw text", "raw text, as many tokens again"
FILES = {"data": "data.jsonl", "target": "said.jsonl", "own": "data.jsonl"}  # of whose answers an arm learns


@dataclass(frozen=True, slots=True)
class Arm:
    """How the draft goes on."""

    divergence: str
    answers: str = "data"  # of the data, of the target, or its own


ARMS = {
    AGAIN: Arm("tokens"),
    "forward KL": Arm("forward_kl"),
    "reverse KL": Arm("reverse_kl"),
    "JSD": Arm("jsd"),
    "total variation": Arm("tv"),
    "raw text of the target's answers": Arm("tokens", "target"),
    "forward KL, the target's answers": Arm("forward_kl", "target"),
    "forward KL, the draft's own samples": Arm("forward_kl", "own"),
}


# -- texts ------------------------------------------------------------------------------------------------------------


def prepared(args: argparse.Namespace) -> None:
    """The conversations, the target's own answers in them, those that are held out, and two stores of features."""
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "source.jsonl").exists():
        lines = [line for line in Path(args.train).read_text().splitlines() if line.strip()]
        random.Random(0).shuffle(lines)
        (work / "source.jsonl").write_text("\n".join(lines[: args.conversations]) + "\n")
    if not (work / "answers.jsonl").exists():
        asked = [f"regenerate.source={work / 'source.jsonl'}", f"regenerate.out={work / 'answers.jsonl'}"]
        asked += ["regenerate.temperature=1", "regenerate.max_new_tokens=160"]
        regenerate([*overrides(args), f"data.train={work / 'answers.jsonl'}", *asked])
    if not (work / "heldout.jsonl").exists():
        source, answers = ((work / f"{name}.jsonl").read_text().splitlines() for name in ("source", "answers"))
        kept = {json.loads(line)["id"] for line in answers}
        held = {json.loads(line)["id"] for line in answers[-args.heldout :]}
        for name, lines, inside in (
            ("data", source, kept - held),
            ("said", answers, kept - held),
            ("heldout", answers, held),
        ):
            chosen = [line for line in lines if json.loads(line)["id"] in inside]
            (work / f"{name}.jsonl").write_text("\n".join(chosen) + "\n")
    for answers in ("data", "target"):
        extract([*overrides(args), *laid_over(args, Arm("tokens", answers))])


def laid_over(args: argparse.Namespace, arm: Arm) -> list[str]:
    """What an arm says over the recipe."""
    work = Path(args.work)
    store = None if arm.answers == "own" else work / f"features-{arm.answers}"
    return [
        f"data.train={work / FILES[arm.answers]}",
        f"features.store={store or 'null'}",
        f"drafter.divergence={arm.divergence}",
        f"drafter.samples={'own' if arm.answers == 'own' else 'data'}",
    ]


def overrides(args: argparse.Namespace) -> list[str]:
    """What all say over the recipe."""
    return [
        RECIPE,
        f"target.path={args.target}",
        "target.dtype=float32",
        "data.limit=null",
        "data.max_length=1024",
        "train.dtype=float32",
        "train.epochs=1000",  # the steps decide
        "train.validation=0",
        "train.checkpoint_every=1000000",
        f"drafter.hidden_size={args.width}",
    ]


def trained(argv: list[str]) -> float:
    """Run the project's training command; the CPU seconds that it took."""
    begun = process_time()
    train(argv)
    return process_time() - begun


# -- training ---------------------------------------------------------------------------------------------------------


class Bench:
    """The target, and its laws along answers of its own that are held out."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.target = args, Target.load(args.target, dtype="float32")
        self.examples = {name: self.read(name) for name in ("data", "said", "heldout")}
        self.laws = [self.law(example) for example in self.examples["heldout"]]

    def recipe(self, name: str) -> Recipe:
        """The recipe over one of the files."""
        where = f"data.train={Path(self.args.work) / name}.jsonl"
        return Recipe.load(RECIPE, [*overrides(self.args)[1:], where])

    def read(self, name: str) -> list[Example]:
        """The examples of one of the files that teach something."""
        recipe = self.recipe(name)
        return [one for one in tokenize_data(recipe, load_tokenizer(recipe))[0] if one.loss_mask[1:].any()]

    @torch.no_grad()
    def law(self, example: Example) -> Tensor:
        """[S, V], the target's law of every token that it said."""
        return self.target.model(example.tokens[None]).logits[0, :-1][example.loss_mask[1:]].softmax(-1)

    @torch.no_grad()
    def judged(self, folder: Path) -> dict[str, list[float]]:
        """Of each held-out conversation the sum of the overlaps, and how often the likeliest tokens agree."""
        model: Any = load_head(folder).eval().model
        found: dict[str, list[float]] = {"overlap": [], "agreement": []}
        for example, law in zip(self.examples["heldout"], self.laws, strict=True):
            own = model(input_ids=example.tokens[None]).logits[0, :-1][example.loss_mask[1:]].softmax(-1)
            found["overlap"].append(round(float(torch.minimum(own, law).sum()), 3))
            found["agreement"].append(int((own.argmax(-1) == law.argmax(-1)).sum()))
        return found

    def supervised(self, arm: Arm, folder: Path) -> float:
        """Tokens of a conversation that such an arm learns from; what the draft says itself is tried out."""
        if arm.answers != "own":
            found = self.examples[Path(FILES[arm.answers]).stem]
        else:
            made, head = identity(self.recipe("data"), (-1,)), load_head(folder).train()
            torch.manual_seed(0)
            found = OnPolicyFeatures(LiveFeatures(self.target, self.examples["data"], made), head).read(range(SAMPLED))
        return sum(int(one.loss_mask.sum()) for one in found) / len(found)

    def run(self, name: str, arm: Arm, seed: int) -> dict[str, Any]:
        """An arm by the project's training command, and what its last head is worth."""
        args, raw = self.args, name == RAW
        start = folder_of(args, RAW, seed) / "last"
        count, share = self.supervised(Arm("tokens"), start), self.supervised(arm, start)
        # a draft's own sample holds one answer: then a step has more conversations, not more steps
        batch = round(BATCH * count / share) if arm.answers == "own" else BATCH
        steps = round((args.raw_tokens if raw else args.tokens) / (batch * share))
        out = folder_of(args, name, seed)
        more = [f"train.out={out}", f"train.seed={seed}", f"train.max_steps={steps}", f"train.batch_size={batch}"]
        more += [f"train.lr={args.raw_lr if raw else args.lr}", *([] if raw else [f"train.init={start}"])]
        seconds = trained([*overrides(args), *laid_over(args, arm), *more])
        return {
            "arm": name,
            "seed": seed,
            "steps": steps,
            "batch": batch,
            "supervised": round(steps * batch * share),
            "cpu_seconds": round(seconds, 1),
            **self.judged(out / "last"),
        }


# -- what it shows ----------------------------------------------------------------------------------------------------


def table(runs: Sequence[dict[str, Any]], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Per arm both figures, by seed too, and how much more they are than those of raw text, before and after."""
    found = []
    for name in dict.fromkeys(run["arm"] for run in runs):
        mine = [run for run in runs if run["arm"] == name]
        row: dict[str, Any] = {"arm": name, "seeds": len(mine), "supervised": mine[0]["supervised"]}
        for figure in ("overlap", "agreement"):
            by_seed = [sum(run[figure]) / sum(counts) for run in mine]
            row[figure] = {"mean": sum(by_seed) / len(by_seed), "by_seed": by_seed}
            for other in (RAW, AGAIN):
                if name not in (RAW, other) and any(run["arm"] == other for run in runs):
                    row[figure][f"over {other}"] = more(runs, counts, other, name, figure)
        found.append(row)
    return found


def more(runs: Sequence[dict[str, Any]], counts: Sequence[int], one: str, other: str, figure: str) -> dict[str, Any]:
    """What the other arm has more than the one: paired by conversation and seed, whole conversations drawn."""
    rows = [
        {
            (place, run["seed"]): (value, counts[place])
            for run in runs
            if run["arm"] == name
            for place, value in enumerate(run[figure])
        }
        for name in (one, other)
    ]
    value, low, high = estimate_difference(*rows, cluster=lambda key: key[0]).estimate
    seeds = sorted({seed for _, seed in rows[0]} & {seed for _, seed in rows[1]})
    by_seed = [
        (sum(rows[1][place, seed][0] - rows[0][place, seed][0] for place in range(len(counts)))) / sum(counts)
        for seed in seeds
    ]
    return {"value": value, "low": low, "high": high, "by_seed": by_seed}


def shown(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table as Markdown."""
    yield f"| arm | tokens | α | by seed | α over {RAW} | α over {AGAIN} | likeliest tokens agree |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        found = row["overlap"]
        differences = [
            f"{one['value']:+.4f} ({one['low']:+.4f} to {one['high']:+.4f})" if one else "–"
            for one in (found.get(f"over {other}") for other in (RAW, AGAIN))
        ]
        seeds = ", ".join(f"{value:.4f}" for value in found["by_seed"])
        figures = [f"{found['mean']:.4f}", seeds, *differences, f"{row['agreement']['mean']:.4f}"]
        yield f"| {row['arm']} | {row['supervised']:,} | {' | '.join(figures)} |"


def distill_table(results: dict[str, Any]) -> str:
    """The same of a result file, with what made it."""
    return "\n".join([*shown(results["table"]), "", made(results)])


def arguments(argv: list[str]) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--train", required=True, help="a file of conversations")
    parser.add_argument("--work", default="runs/distill")
    parser.add_argument("--out", type=Path, default=Path("docs/results/distill.json"))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--width", type=int, default=128, help="of the draft")
    parser.add_argument("--raw-tokens", type=int, default=300_000, help="supervised ones, from random weights")
    parser.add_argument("--tokens", type=int, default=100_000, help="supervised ones, of each arm from there")
    parser.add_argument("--raw-lr", type=float, default=3e-3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--conversations", type=int, default=3000)
    parser.add_argument("--heldout", type=int, default=120, help="conversations of which nobody learns")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Prepare, then train and measure arm by arm; runs that the result file holds are not made again."""
    args = arguments(argv)
    prepared(args)
    bench = Bench(args)
    counts = [len(law) for law in bench.laws]
    runs: list[dict[str, Any]] = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    said = {name: getattr(args, name) for name in ("width", "raw_tokens", "tokens", "raw_lr", "lr")}
    for seed in args.seeds:
        for name in (RAW, *args.arms):
            if any((run["arm"], run["seed"]) == (name, seed) for run in runs):
                continue
            runs.append(bench.run(name, ARMS.get(name, Arm("tokens")), seed))
            rows = table(runs, counts)
            results = {"machine": made_on(target=Path(args.target).name, **said), "table": rows, "counts": counts}
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({**results, "runs": runs}) + "\n")
            print(f"{name}, seed {seed}: α {sum(runs[-1]['overlap']) / sum(counts):.4f}", flush=True)
    print("\n".join(shown(table(runs, counts))))


if __name__ == "__main__":
    script(main)
