"""How close a policy comes to the best fixed number of levels: `python bench/goodput.py TARGET HEAD QUESTIONS WORK`.

HEAD is a trained head for the target, QUESTIONS a Spec-Bench file; the target's answers are kept in WORK. Drafts are
replayed along these answers, which gives the cycles of decoding, and cycles are charged with the medians of those that
were timed. The policy begins anew with every set of prompts, so that what it learns is paid for.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from bench.machine import made_on
from bench.methods_report import made
from eagle.core.decode import Cycle
from eagle.core.drafter import Budget, Drafter, Draw, Policy
from eagle.core.goodput import Goodput
from eagle.core.tree import chain_paths
from eagle.core.verify import Sampling
from eagle.formats.checkpoint import load_drafter
from eagle.log import progress, script
from eagle.target.target import Target
from eval.prompts import MT_BENCH
from eval.replay import Answer, answer, replay
from eval.statistics import Estimate, estimate

LEVELS, FIXED, NEW_TOKENS = 8, (0, 1, 2, 4, 8), 128
TIMED = 3  # prompts of a set along which costs are measured
OUT = Path("docs/results/goodput.json")


class Prompts(NamedTuple):
    """Who drafts what the target says to which prompts, one task after the other, each at its temperature."""

    drafter: str
    tasks: tuple[tuple[str, float], ...]
    draw: Draw = "noise"


SETS = {
    "lookup, translation": Prompts("ngram", (("translation", 0),)),
    "lookup, summarization": Prompts("ngram", (("summarization", 0),)),
    "lookup, summarization at T = 1": Prompts("ngram", (("summarization", 1),)),
    "lookup, conversation at T = 1, then T = 0": Prompts("ngram", (("conversation", 1), ("conversation", 0))),
    "head, conversation": Prompts("head", (("conversation", 0),)),
    "head, translation": Prompts("head", (("translation", 0),)),
    "head, conversation at T = 1": Prompts("head", (("conversation", 1),)),
    "head by its law alone, conversation at T = 1": Prompts("head", (("conversation", 1),), "likeliest"),
}


class Priced:
    """A budget or a policy, and what its cycles cost."""

    def __init__(self, inner: Budget | Policy, costs: Goodput) -> None:
        self.inner, self.costs, self.nodes = inner, costs, inner.nodes
        self.seconds, self.asked = 0.0, 0
        self.levels: Counter[int] = Counter()

    def within(self, levels: int) -> Budget:
        """What the inner one says."""
        here = self.inner.within(levels)
        self.asked = here.depth
        return here

    def learn(self, cycle: Cycle) -> None:
        """Charge it, and hand it on."""
        self.seconds += self.costs.draft[self.asked] + self.costs.read[cycle.depth]
        self.levels[self.asked] += 1
        if isinstance(self.inner, Goodput):
            self.inner.learn(cycle)


def asked_of(questions: Path, target: Target, count: int) -> dict[str, list[list[int]]]:
    """Token ids of the first turns by task, of those that leave room for an answer."""
    prompts: dict[str, list[list[int]]] = {}
    for line in questions.read_text().splitlines():
        record = json.loads(line)
        task = "conversation" if record["category"] in MT_BENCH else record["category"]
        prompts.setdefault(task, []).append(target.chat(record["turns"][0]))
    room = (target.max_positions or 10**9) - 2 * NEW_TOKENS
    return {task: [one for one in found if len(one) <= room][:count] for task, found in prompts.items()}


def told(
    work: Path, target: Target, prompts: list[list[int]], taps: tuple[int, ...], task: str, heat: float
) -> list[Answer]:
    """The target's own answers with these taps, kept for the next time."""
    path = work / f"answers-{task}-{heat:g}-{len(prompts)}.pt"
    if not path.exists():
        found = [
            answer(target, taps, prompt, limit=NEW_TOKENS, sampling=Sampling(heat, request=number), task=task)
            for number, prompt in enumerate(progress(prompts, f"{task} at T = {heat:g}", len(prompts)))
        ]
        torch.save(found, path)
    return [one for one in torch.load(path, weights_only=False) if one.length > 1]


def measured(target: Target, drafter: Drafter, budget: Budget, answers: Sequence[Answer]) -> Goodput:
    """A policy that has seen nothing, with the costs along some of the prompts."""
    step = -(-len(answers) // TIMED)
    found = []
    for one in answers[::step]:
        options: dict[str, Any] = {"sampling": one.sampling, "max_new_tokens": 2 * NEW_TOKENS}
        found.append(Goodput.measure(target, drafter, one.tokens[: one.prompt], budget, **options))
    draft = [median(row) for row in zip(*(one.draft for one in found), strict=True)]
    read = [median(row) for row in zip(*(one.read for one in found), strict=True)]
    return Goodput(draft, read, budget)


def along(target: Target, drafter: Drafter, answers: Sequence[Answer], priced: Priced, what: str) -> list[float]:
    """Seconds of every answer."""
    seconds = []
    for one in progress(answers, what, len(answers)):
        before = priced.seconds
        replay(target, drafter, one, priced)
        seconds.append(priced.seconds - before)
    return seconds


def compared(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """How many times as fast the second is: the quotient of sums, with its interval over prompts."""
    return estimate({number: [pair] for number, pair in enumerate(zip(first, second, strict=True))})


def one_set(target: Target, drafter: Drafter, answers: Sequence[Answer], draw: Draw, name: str) -> dict[str, Any]:
    """Every fixed number of levels, and the policy."""
    whole = Budget.fixed(chain_paths(LEVELS), draw)
    policy = measured(target, drafter, whole, answers)
    fixed = {
        levels: along(target, drafter, answers, Priced(whole.within(levels), policy), f"{name}: {levels}")
        for levels in FIXED
    }
    priced = Priced(policy, policy)
    mine = along(target, drafter, answers, priced, f"{name}: policy")
    slowest_first = sorted(FIXED, key=lambda levels: -sum(fixed[levels]))
    best, worst = slowest_first[-1], slowest_first[0]
    return {
        "prompts": len(answers),
        "tokens": sum(one.length - 1 for one in answers),
        "draft": policy.draft,
        "read": policy.read,
        "fixed": {levels: compared(fixed[0], seconds) for levels, seconds in fixed.items()},
        "policy": compared(fixed[0], mine),
        "asked": dict(sorted(priced.levels.items())),
        "best": best,
        "worst": worst,
        "over_best": compared(fixed[best], mine),
        "over_worst": compared(fixed[worst], mine),
    }


def table(results: dict[str, Any]) -> str:
    """Speeds over no drafting, and the policy over the best and the worst, as Markdown."""
    lines = [f"| set | {' | '.join(map(str, FIXED))} | policy | over best | over worst |", "|---" * 9 + "|"]
    for name, found in results["sets"].items():
        speeds = [f"{found['fixed'][str(levels)][0]:.3f}" for levels in FIXED]
        ratios = [
            f"{value:.3f} ({low:.3f} to {high:.3f})" for value, low, high in (found["over_best"], found["over_worst"])
        ]
        lines.append(f"| {' | '.join([name, *speeds, format(found['policy'][0], '.3f'), *ratios])} |")
    return "\n".join([*lines, "", made(results)])


def main(argv: list[str]) -> None:
    """Compare, write, print."""
    parser = argparse.ArgumentParser("bench.goodput", description=__doc__)
    for name in ("target", "head", "questions", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    args = parser.parse_args(argv)
    target = Target.load(str(args.target), dtype="float32")
    args.work.mkdir(parents=True, exist_ok=True)
    drafters = {"ngram": load_drafter("ngram", target), "head": load_drafter(args.head, target)}
    prompts, taps = asked_of(args.questions, target, args.prompts), drafters["head"].taps
    machine = made_on(target=args.target.name, prompts=args.prompts, new_tokens=NEW_TOKENS, levels=LEVELS)
    sets = {}
    for name, (drafter, tasks, draw) in SETS.items():
        answers = [one for task, heat in tasks for one in told(args.work, target, prompts[task], taps, task, heat)]
        sets[name] = one_set(target, drafters[drafter], answers, draw, name)
        OUT.write_text(json.dumps({"machine": machine, "sets": sets}) + "\n")  # what is there so far
    print(table(json.loads(OUT.read_text())))


if __name__ == "__main__":
    script(main)
