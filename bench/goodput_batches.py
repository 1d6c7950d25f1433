"""The policy for batches against fixed lengths: `python bench/goodput_batches.py TARGET QUESTIONS HEAD WORK`.

TARGET is a model, QUESTIONS a Spec-Bench file, HEAD a trained head for the target. The target answers the prompts once,
and at every place of every answer a chain of eight is drafted: since output does not depend on drafts, this tells the
cycles of every length in every batch. Cycles are charged with bare forwards of as many texts, tokens and contexts,
timed on the same machine. What was recorded and timed is kept in WORK for the next time. The policy begins anew with
every set and batch, so that what it learns is paid for.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, NamedTuple, TypeVar

import torch

from bench.machine import made_on, markdown, write_results
from eagle import Budget, Target, generate, load_drafter
from eagle.core.drafter import Committed, Drafter
from eagle.core.trace import Cycle
from eagle.core.tree import DraftTree, chain_paths
from eagle.decoding.cycle_costs import CycleCosts
from eagle.decoding.goodput import BATCH_SIZES, Goodput
from eagle.drafters.none import NoDrafter
from eagle.log import progress, script
from eagle.target.state import TargetState
from eval.costs import bare_read, time_action
from eval.prompts import MT_BENCH

T = TypeVar("T")
LEVELS, FIXED = 8, (0, 1, 2, 3, 4, 8)
CHAIN = Budget.fixed(chain_paths(LEVELS))
TASKS = ("translation", "conversation", "summarization")


class Place(NamedTuple):
    """The chain of eight behind a token of an answer, and how much of it is accepted."""

    context: int
    proposed: int
    accepted: int


Answer = list[Place]  # from its first token to its last but one


# -- what is accepted -------------------------------------------------------------------------------------------------


def read_prompts(questions: Path, target: Target, count: int, new_tokens: int) -> dict[str, list[list[int]]]:
    """Token ids of the first turns by task, of those that leave room for an answer."""
    prompts: dict[str, list[list[int]]] = {task: [] for task in TASKS}
    for line in questions.read_text().splitlines():
        record = json.loads(line)
        task = "conversation" if record["category"] in MT_BENCH else record["category"]
        if task in prompts:
            prompts[task].append(target.chat(record["turns"][0]))
    room = (target.max_positions or 10**9) - new_tokens - LEVELS
    return {task: [prompt for prompt in of_task if len(prompt) <= room][:count] for task, of_task in prompts.items()}


def draft_everywhere(target: Target, drafter: Drafter, prompt: list[int], answer: list[int]) -> Answer:
    """A chain of eight behind every token of an answer but the last, and how much of it is the answer."""
    tokens, text, places, seen = [*prompt, *answer], drafter.begin(), [], 0
    features = target.features(torch.tensor([tokens]), drafter.taps)[0] if drafter.taps else None
    for root in range(len(prompt), len(tokens) - 1):
        known = None if features is None else features[seen:root]
        tree = text.propose(Committed(torch.tensor(tokens[seen:root]), known, tokens[root]), CHAIN)
        drafted, rest = tree.tokens[1:].tolist(), tokens[root + 1 :]
        equal = [a == b for a, b in zip(drafted, rest, strict=False)] + [False]
        places.append(Place(root, len(drafted), equal.index(False)))
        seen = root
    return places


def record(
    target: Target, drafters: dict[str, Drafter], prompts: list[list[int]], new_tokens: int
) -> dict[str, list[Answer]]:
    """The target's answers to prompts, with each drafter's chains and how much of them is accepted."""
    traces = generate(target, NoDrafter(), prompts, max_new_tokens=new_tokens, batch_size=len(prompts))
    pairs = [(trace.prompt, trace.tokens) for trace in traces if len(trace.checked().tokens) > 1]
    return {name: [draft_everywhere(target, one, *pair) for pair in pairs] for name, one in drafters.items()}


def keep(path: Path, make: Callable[[], T]) -> T:
    """The content of a file, which is made first if it is missing."""
    if not path.exists():
        path.write_bytes(pickle.dumps(make()))
    return pickle.loads(path.read_bytes())


# -- what it costs ----------------------------------------------------------------------------------------------------


def hold_texts(target: Target, texts: int, context: int) -> TargetState:
    """A state that holds so many texts of so many tokens."""
    state = target.open()
    for row in range(texts):
        state.admit(row, [1] * context, LEVELS + 1)
    while state.prompts:
        state.read_prompts()
    return state


def time_forwards(target: Target, drafter: Drafter, contexts: tuple[int, ...], rounds: int) -> CycleCosts:
    """Median seconds of bare forwards; in every round all take turns, and the first round warms up.

    A head's forward for several texts is timed as one of as many rows behind one context.
    """
    actions: dict[tuple[Any, ...], Callable[[], Any]] = {}
    for context in contexts:
        for texts in BATCH_SIZES:
            state = hold_texts(target, texts, context)
            actions |= {("read", texts, context, size): bare_read(state, size) for size in range(1, LEVELS + 2)}
            for name, rows in (("first", 2 * texts), ("level", texts)):
                if probe := drafter.probe(context, rows, texts):
                    actions[name, texts, context, 0] = probe
    seconds: dict[tuple[Any, ...], list[float]] = {key: [] for key in actions}
    for number in progress(range(rounds + 1), "time forwards", rounds + 1):
        for key, action in actions.items():
            seconds[key] += [time_action(action, target.device)] if number else []

    def cost(*key: Any) -> float:
        return median(seconds[key]) if key in seconds else 0.0

    def drafts(texts: int, context: int) -> tuple[float, ...]:
        first, level = cost("first", texts, context, 0), cost("level", texts, context, 0)
        return (0.0, *(first + level * number for number in range(LEVELS)))

    def reads(texts: int, context: int) -> tuple[float, ...]:
        return tuple(cost("read", texts, context, size) for size in range(1, LEVELS + 2))

    draft, read = (
        tuple(tuple(grid(texts, context) for context in contexts) for texts in BATCH_SIZES) for grid in (drafts, reads)
    )
    return CycleCosts(BATCH_SIZES, contexts, draft, read)


def time_drafts(drafter: Drafter, prompts: dict[str, list[list[int]]]) -> float:
    """Mean CPU seconds of a draft of lookup, which takes no forwards, behind each token of the prompts."""
    count, start = 0, process_time()
    for asked in prompts.values():
        for prompt in asked:
            text = drafter.begin()
            for place, token in enumerate(prompt):
                text.propose(Committed(torch.tensor(prompt[max(place - 1, 0) : place]), None, token), CHAIN)
            count += len(prompt)
    return (process_time() - start) / count


def price_drafts(costs: CycleCosts, seconds: float) -> CycleCosts:
    """These costs, with drafts that take so many seconds for each text whatever their length."""
    rows = [tuple([(0.0, *[seconds * texts] * LEVELS)] * len(costs.contexts)) for texts in costs.batch_sizes]
    return replace(costs, draft=tuple(rows))


# -- cycles -----------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """Tokens and modelled seconds of a fixed length or of the policy."""

    tokens: int
    seconds: float
    levels: Counter[int]

    @property
    def speed(self) -> float:
        """Tokens per second after the prompts, modelled."""
        return self.tokens / self.seconds


def write_batch(answers: list[Answer], batch_size: int, policy: Goodput | int, costs: CycleCosts) -> Outcome:
    """The cycles of these answers, so many side by side: another one begins where one has ended."""
    waiting = deque(enumerate(answers))
    rows: dict[int, tuple[Answer, int]] = {}  # an answer, and the place that it has come to
    tokens, seconds, levels = 0, 0.0, Counter[int]()
    while waiting or rows:
        while waiting and len(rows) < batch_size:
            number, answer = waiting.popleft()
            rows[number] = answer, 0
        left = {row: len(answer) - place - 1 for row, (answer, place) in rows.items()}
        contexts = {row: answer[place].context for row, (answer, place) in rows.items()}
        if isinstance(policy, Goodput):
            asked = {row: budget.depth for row, budget in policy.share(left, contexts).items()}
        else:
            asked = {row: max(min(policy, most), 0) for row, most in left.items()}
        cycles = {}
        for row, (answer, place) in list(rows.items()):
            here = answer[place]
            proposed, accepted = min(asked[row], here.proposed), min(asked[row], here.accepted)
            tree, kept = DraftTree.chain(range(proposed + 1)), tuple(range(1, accepted + 1))
            cycles[row] = Cycle(tree, kept, accepted + 1, here.context, rows=len(rows))
        table = costs.at(len(rows), max(contexts.values()))
        seconds += table.drafting(list(asked.values())) + table.read[max(cycle.depth for cycle in cycles.values())]
        tokens += sum(cycle.committed for cycle in cycles.values())
        levels.update(asked.values())
        if isinstance(policy, Goodput):
            policy.learn_rows(cycles)
        rows = {row: (answer, place + cycles[row].committed) for row, (answer, place) in rows.items()}
        rows = {row: (answer, place) for row, (answer, place) in rows.items() if place < len(answer)}
    return Outcome(tokens, seconds, levels)


def compare(answers: list[Answer], batch_size: int, costs: CycleCosts) -> dict[str, Any]:
    """Every fixed length and the policy on one set in one batch size."""
    fixed = {length: write_batch(answers, batch_size, length, costs).speed for length in FIXED}
    outcome = write_batch(answers, batch_size, Goodput.of_costs(costs, CHAIN), costs)
    best, worst = max(FIXED, key=fixed.__getitem__), min(FIXED, key=fixed.__getitem__)
    return {
        "batch_size": batch_size,
        "fixed": fixed,
        "policy": outcome.speed,
        "asked": dict(sorted(outcome.levels.items())),
        "best": best,
        "worst": worst,
        "over_best": outcome.speed / fixed[best],
        "over_worst": outcome.speed / fixed[worst],
    }


def table(results: dict[str, Any]) -> str:
    """Tokens per second of all, and the policy over the best and the worst, as Markdown."""
    header = [
        "drafter, prompts",
        "batch",
        *(f"length {length}" for length in FIXED),
        "policy",
        "over best",
        "over worst",
    ]
    rows = []
    for row in results["rows"]:
        speeds = [
            f"**{value:.0f}**" if int(length) == row["best"] else f"{value:.0f}"
            for length, value in row["fixed"].items()
        ]
        ratios = [f"{row[name]:.3f}" for name in ("over_best", "over_worst")]
        rows.append([f"{row['drafter']}, {row['task']}", row["batch_size"], *speeds, f"{row['policy']:.0f}", *ratios])
    return markdown(header, rows, results["machine"])


def main(argv: list[str]) -> None:
    """Record, time, compare, write, print."""
    parser = argparse.ArgumentParser("bench.goodput_batches", description=__doc__)
    for name in ("target", "questions", "head", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("docs/results/goodput_batches.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    target = Target.load(str(args.target), dtype="float32")
    args.work.mkdir(parents=True, exist_ok=True)
    drafters = {"ngram": load_drafter("ngram", target), "head": load_drafter(args.head, target)}
    prompts = read_prompts(args.questions, target, args.prompts, args.new_tokens)
    recorded = {}
    for task, asked in prompts.items():
        drafts = keep(args.work / f"{task}.pkl", partial(record, target, drafters, asked, args.new_tokens))
        recorded |= {(name, task): answers for name, answers in drafts.items()}
    lengths = [len(prompt) for asked in prompts.values() for prompt in asked]
    contexts = (min(lengths), max(lengths) + args.new_tokens)
    timed = keep(args.work / "costs.pkl", partial(time_forwards, target, drafters["head"], contexts, args.rounds))
    lookup = keep(args.work / "lookup.pkl", partial(time_drafts, drafters["ngram"], prompts))
    costs = {"head": timed, "ngram": price_drafts(timed, lookup)}
    rows = []
    for (name, task), answers in recorded.items():
        for size in BATCH_SIZES:
            rows.append({"drafter": name, "task": task, **compare(answers, size, costs[name])})
    about = {"target": args.target.name, "prompts": args.prompts, "new_tokens": args.new_tokens, "levels": LEVELS}
    priced = {name: {"contexts": contexts, "draft": costs[name].draft, "read": costs[name].read} for name in drafters}
    results = {"machine": made_on(**about), "rows": rows, "costs": priced}
    print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    script(main)
