"""Find the fastest budget for a head on this machine: `eagle measure RECIPE --tune`.

Single forward passes are timed, and the target answers the tuning prompts once. Every candidate is replayed on these
answers, and accepts the same tokens as in decoding. Its tokens per second are calculated from these replays and times.
For a drafter without forward passes, the time of its drafts is that of the replays.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from eagle.core.budget import Budget
from eagle.core.drafter import Drafter
from eagle.core.tree import best_tree
from eagle.core.verify import Sampling
from eagle.decoding.cycle_times import measure_costs
from eagle.decoding.forward_costs import PENDING, Costs
from eagle.device import ThreadsOfLongWork
from eagle.disk import write_text
from eagle.formats.checkpoint import TEMPERATURES, load_drafter, write_budget
from eagle.interrupts import interrupted_by_user
from eagle.log import JSON_HELP, describe_seconds, json_alone, progress, script
from eagle.recipe import Recipe
from eagle.recipe.command_lines import command_line
from eagle.target.target import Target
from eval.calibrate import collect_confidences, fit_temperatures
from eval.costs import NOT_DRAFTING, asked_budgets, draft_seconds, model_seconds, shape_of
from eval.load_run import load_named, load_target, settle_threads
from eval.prompts import Question, chat_prompt, questions
from eval.replay import Answer, answer, plain, rates_by_rank, record_cycles, replay

# the grid of trees
NODES = (2, 3, 4, 6, 8, 12, 16, 25, 40, 60)
DEPTHS = (1, 2, 3, 4, 6, 8)
TOP_K = (2, 3, 4, 6, 10)
CHAINS = range(1, 9)
# acceptance by rank, before any is known
GUESS = ((0.6, 0.15, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01),)
# where it is looked for: likely nodes have many children, others few
WIDE = best_tree(GUESS, 500, 6)
# whose cycles show what is spent beside forwards
TRIAL = Budget(8, 4, 3)
# a smaller gain on paper may be none
MARGIN = 1.03
# of a round of the search, that go on to the next one at least
MIN_LEFT = 8
# whose replays are timed for the forecast
TIMED = 8


def chain(length: int) -> Budget:
    """Return the budget of a chain, which is what most engines serve."""
    return Budget(length, length, 1)


def dynamic() -> list[Budget]:
    """Return the grid of dynamic trees, without trees deeper than their nodes or narrower than a chain."""
    budgets = []
    for nodes, depth, top_k in product(NODES, DEPTHS, TOP_K):
        # the first level has top_k nodes, each later one top_k children of each of top_k nodes
        largest = top_k + (depth - 1) * top_k**2
        if max(depth, top_k) <= nodes <= largest:
            budgets.append(Budget(nodes, depth, top_k))
    return budgets


def fixed(rates: Sequence[Sequence[float]]) -> list[Budget]:
    """Return the best shapes of each size and depth for acceptance by rank."""
    trees = [best_tree(rates, *size) for size in product(NODES, DEPTHS)]
    # several sizes and depths have the same best shape
    shapes = dict.fromkeys(trees)
    return [Budget.fixed(shape) for shape in shapes if shape]


def list_candidates(
    drafter: Drafter, rates: Sequence[Sequence[float]], num_trees: int | None
) -> list[Budget]:
    """Return the drafter's own budget, the chains, and all trees or at most `num_trees` of them."""
    trees = [*dynamic(), *fixed(rates)]
    if num_trees is not None:
        trees = spread(trees, num_trees)
    candidates = [*map(chain, CHAINS), *trees]
    if drafter.budget is not None:
        candidates.insert(0, drafter.budget)
    return list(dict.fromkeys(candidates))


@dataclass(frozen=True)
class Trial:
    """The figures of a budget on some answers."""

    budget: Budget
    cycles: int
    committed: int
    seconds: float  # modelled

    @property
    def acceptance_length(self) -> float:
        """Return tau of these answers."""
        return self.committed / self.cycles

    @property
    def speed(self) -> float:
        """Return the modelled tokens per second."""
        return self.committed / self.seconds


@dataclass(frozen=True)
class Tuning:
    """A drafter, the target's answers and the costs of forwards: what a budget is measured with."""

    target: Target
    drafter: Drafter
    answers: list[Answer]
    costs: Costs
    # cycles of the first few answers
    records: dict[Budget, list[list[dict[str, Any]]]] = field(default_factory=dict)

    def trial(self, budget: Budget, count: int | None = None, task: str | None = None) -> Trial:
        """Try a budget on some of the answers.

        Args:
            budget: What may be drafted.
            count: The first answers are tried, this many; all by default.
            task: Of these only the answers that belong to a task; all by default.
        """
        answers = self.answers[:count]
        # the search tries a budget on more and more answers: a replay is not repeated
        records = self.records.setdefault(budget, [])
        for target_answer in answers[len(records) :]:
            records.append(self._replay_answer(target_answer, budget))

        cycles: list[dict[str, Any]] = []
        recorded = []
        budgets = []
        for target_answer, rows in zip(answers, records, strict=False):
            if task is None or target_answer.task == task:
                cycles += rows
                recorded.append({"cycles": rows})
                budgets.append(asked_budgets(rows, budget, target_answer.limit))
        seconds = model_seconds(self.costs, recorded, budgets, self.drafter)
        return Trial(budget, len(cycles), sum(row["committed"] for row in cycles), sum(seconds))

    def _replay_answer(self, target_answer: Answer, budget: Budget) -> list[dict[str, Any]]:
        if not budget.nodes:
            return plain(target_answer)
        seconds: list[float] = []
        cycles = replay(self.target, self.drafter, target_answer, budget, seconds=seconds)
        return record_cycles(target_answer, cycles, seconds)

    def break_even(self, budget: Budget, task: str | None = None) -> float:
        """Return the acceptance length below which this budget is slower than no draft, at the mean context.

        Of a drafter without bare costs it holds the drafts that were replayed, so none before the first replay.
        """
        answers = [
            target_answer for target_answer in self.answers if task in (None, target_answer.task)
        ]
        middles = [target_answer.prompt + target_answer.length // 2 for target_answer in answers]
        context = sum(middles) // len(answers)
        rows = self.costs.rows(self.drafter, budget, PENDING)
        drafting = 0.0
        if rows is None:
            drafting = self._recorded_draft_seconds(budget)
        seconds = self.costs.cycle(budget.nodes, rows or (), context) + drafting
        # a step of plain decoding reads one token
        return seconds / self.costs.read(1, context)

    def _recorded_draft_seconds(self, budget: Budget) -> float:
        """Return the mean seconds of a budget's replayed drafts, 0 before the first replay."""
        replayed = []
        for cycles in self.records.get(budget, []):
            replayed += [[cycle] for cycle in cycles]
        if not replayed:
            return 0.0
        drafts = draft_seconds(replayed)
        return fmean(drafts.get(shape_of(cycle), 0.0) for cycle in replayed)

    def could_pay(self, budget: Budget) -> bool:
        """Return whether it would be faster than no draft if every level were accepted."""
        return budget.depth + 1 > self.break_even(budget)


def search(
    tuning: Tuning, candidates: Sequence[Budget], note: Callable[[str], None] = print
) -> Trial:
    """Return the fastest of candidates and no draft, by successive halving.

    Args:
        tuning: What a budget is measured with; it keeps the cycles that were replayed.
        candidates: The budgets to choose from.
        note: Takes a sentence on how many of them are tried.
    """
    left = [NOT_DRAFTING, *filter(tuning.could_pay, candidates)]
    num_shapes = len(left) - 1
    num_dropped = len(candidates) - num_shapes
    if num_dropped:
        note(
            f"{num_dropped} of {len(candidates)} shapes are not tried: they would be slower than no draft even if "
            "every level were accepted"
        )

    rounds = plan_rounds(len(left), len(tuning.answers))
    if num_shapes:
        note(forecast(tuning, left[1:], rounds))
    # all on a few answers, the better half on twice as many
    for num_left, count in rounds:
        left = left[:num_left]
        bar = progress(left, f"tried on {count} answers", len(left), unit="candidates")
        trials = [tuning.trial(budget, count) for budget in bar]
        trials.sort(key=lambda trial: -trial.speed)
        left = [trial.budget for trial in trials]
    return trials[0]


def plan_rounds(num_candidates: int, num_answers: int) -> list[tuple[int, int]]:
    """Return how many candidates each round of the search tries, and on how many answers."""
    count = min(max(num_answers // 8, 2), num_answers)
    rounds = [(num_candidates, count)]
    while count < num_answers:
        num_candidates = min(num_candidates, max(num_candidates // 2, MIN_LEFT))
        count = min(2 * count, num_answers)
        rounds.append((num_candidates, count))
    return rounds


def forecast(tuning: Tuning, shapes: Sequence[Budget], rounds: Sequence[tuple[int, int]]) -> str:
    """Replay a few of the shapes, which the search needs anyway, and return how long all rounds will take at most.

    The shapes that are left in later rounds are mostly small, and take less time than these.
    """
    count = rounds[0][1]
    timed = spread(shapes, TIMED)
    start = perf_counter()
    for budget in progress(timed, "timed for the forecast", len(timed), unit="candidates"):
        tuning.trial(budget, count)
    seconds = (perf_counter() - start) / (len(timed) * count)

    num_replays = 0
    num_replayed = 0
    for num_left, num_answers in rounds:
        # an answer is replayed once for each shape
        num_replays += num_left * (num_answers - num_replayed)
        num_replayed = num_answers
    # the table of chains is of all answers
    num_replays += len(CHAINS) * num_replayed
    return (
        f"{len(shapes)} shapes and no draft are tried: at most about {describe_seconds(seconds * num_replays)}; "
        "--trees, eval.count and eval.max_new_tokens make it less, and Ctrl-C prints the best so far"
    )


def spread(shapes: Sequence[Budget], count: int) -> list[Budget]:
    """Return at most `count` of the shapes, evenly from the first to the last."""
    if count >= len(shapes):
        return list(shapes)
    return [shapes[i * len(shapes) // count] for i in range(count)]


def best_so_far(tuning: Tuning) -> str:
    """Return the fastest of the candidates that were replayed until now, for who stops the search."""
    num_replayed = sorted(map(len, tuning.records.values()), reverse=True)
    if not num_replayed or not num_replayed[0]:
        return "no shape was tried yet, and nothing was written"
    # on as many answers as enough candidates have in common
    count = max(num_replayed[:MIN_LEFT][-1], 1)
    tried = [budget for budget, cycles in tuning.records.items() if len(cycles) >= count]
    best = max((tuning.trial(budget, count) for budget in tried), key=lambda trial: trial.speed)
    gain = best.speed / tuning.trial(NOT_DRAFTING, count).speed
    line = (
        f"the fastest of {len(tried)} candidates on {count} of {len(tuning.answers)} answers is "
        f"{name_budget(best.budget)}: tau {best.acceptance_length:.2f}, modelled speedup {gain:.2f} x. Nothing was "
        "written"
    )
    if best.budget.nodes and best.budget.paths is None:
        return (
            f"{line}: use it with eval.nodes={best.budget.nodes} eval.depth={best.budget.depth} "
            f"eval.top_k={best.budget.top_k}"
        )
    return line


def acceptance_by_rank(tuning: Tuning) -> list[list[float]]:
    """Return how often the target chooses each child, by depth and rank, along half of the answers."""
    wide = Budget.fixed(WIDE)
    cycles = []
    answers = tuning.answers[: max(len(tuning.answers) // 2, 8)]
    for target_answer in progress(answers, "acceptance by rank", len(answers), unit="answers"):
        cycles += replay(tuning.target, tuning.drafter, target_answer, wide)
    return rates_by_rank(cycles)


def tuning_questions(recipe: Recipe) -> list[Question]:
    """Return the questions after those that are measured, so that no tree is measured on what it was fitted to."""
    measured = questions(recipe)
    twice = recipe.eval.model_copy(update={"count": 2 * recipe.eval.count})
    every = questions(recipe.model_copy(update={"eval": twice}))
    asked = [question for question in every if question not in measured]
    if not asked:
        print(
            f"the sets have no more than the {len(measured)} questions that are measured: they are tuned on, too"
        )
        asked = measured

    # the sets take turns: the search begins with the first few, which are of all sets
    ranks: Counter[str] = Counter()
    ranked = []
    for question in asked:
        ranks[question.set] += 1
        ranked.append((ranks[question.set], question))
    ranked.sort(key=lambda pair: pair[0])
    return [question for _, question in ranked]


def answer_prompts(
    recipe: Recipe, target: Target, taps: tuple[int, ...], threads: ThreadsOfLongWork | None = None
) -> list[Answer]:
    """Return the target's own answers to the first turns of the tuning questions, at the recipe's temperatures.

    Args:
        recipe: Names the questions and the temperatures.
        target: The model that answers.
        taps: The layers whose features the drafter reads.
        threads: Timed again where other jobs come or go.

    Raises:
        ValueError: No answer has more than one token.
    """
    asked = tuning_questions(recipe)
    limit = recipe.eval.max_new_tokens
    answers = []
    bar = progress(asked, "answer the tuning questions", len(asked), unit="questions")
    for i, question in enumerate(bar):
        if threads is not None:
            threads.settle()
        prompt = chat_prompt(recipe, target, question)
        task = question.task or question.set
        for temperature in recipe.eval.temperatures:
            sampling = Sampling(temperature=temperature, request=i)
            target_answer = answer(target, taps, prompt, limit=limit, sampling=sampling, task=task)
            # the prefill gives the first token: an answer without a second has no cycle
            if target_answer.length > 1:
                answers.append(target_answer)
    if not answers:
        raise ValueError(
            f"the target answers none of the {len(asked)} tuning questions with more than one token"
        )
    return answers


def name_budget(budget: Budget) -> str:
    """Describe a budget in a few words."""
    if not budget.nodes:
        return "no draft"
    if budget.top_k == 1:
        return f"chain of {budget.depth}"
    kind = "dynamic" if budget.paths is None else "fixed"
    return f"{kind}, {budget.nodes} nodes, {budget.depth} levels, top {budget.top_k}"


def by_rank(rates: Sequence[Sequence[float]]) -> str:
    """Return acceptance by depth and rank as a table."""
    num_ranks = max(map(len, rates))
    lines = [f"{'chosen at':22}" + "".join(f"{f'rank {rank}':>9}" for rank in range(num_ranks))]
    for depth, row in enumerate(rates, start=1):
        lines.append(f"{f'level {depth}':22}" + "".join(f"{rate:9.3f}" for rate in row))
    return "\n".join(lines)


def chains_by_task(tuning: Tuning) -> str:
    """Return tau and modelled speedup of chains, per task and over all, as a table."""
    tasks: list[str | None] = [*_tasks(tuning), None]
    # a single task is the same as all
    if len(tasks) == 2:
        tasks = [None]
    budgets = [chain(length) for length in CHAINS]
    # the search has dropped some of them early
    for budget in progress(budgets, "chains on all answers", len(budgets), unit="candidates"):
        tuning.trial(budget)
    lines = [f"{'tau, speedup':22}" + "".join(f"{f'k = {length}':>13}" for length in CHAINS)]
    for task in tasks:
        plain_speed = tuning.trial(NOT_DRAFTING, task=task).speed
        line = f"{(task or 'all')[:22]:22}"
        for budget in budgets:
            trial = tuning.trial(budget, task=task)
            line += f"{f'{trial.acceptance_length:.2f}, {trial.speed / plain_speed:.2f} x':>13}"
        lines.append(line)

    line = f"{'break-even tau':22}"
    for budget in budgets:
        line += f"{tuning.break_even(budget):>13.2f}"
    lines.append(line)
    return "\n".join(lines)


def _tasks(tuning: Tuning) -> list[str]:
    return list(dict.fromkeys(target_answer.task for target_answer in tuning.answers))


def ranking(tuning: Tuning, count: int = 12) -> str:
    """Return the fastest of the budgets that were replayed along every answer."""
    num_answers = len(tuning.answers)
    whole = [budget for budget, cycles in tuning.records.items() if len(cycles) == num_answers]
    whole.sort(key=lambda budget: -tuning.trial(budget).speed)
    lines = [_line(name_budget(budget), tuning, budget) for budget in whole[:count]]
    return "\n".join([_heading("fastest, modelled"), *lines])


def choice_by_task(tuning: Tuning, budget: Budget) -> str:
    """Return the figures of the chosen budget on each task."""
    lines = [_line(task, tuning, budget, task) for task in _tasks(tuning)]
    return "\n".join([_heading(f"{name_budget(budget)}, by task"), *lines])


def _heading(title: str) -> str:
    return f"{title:44}{'tau':>8}{'break-even':>12}{'speedup':>12}"


def _line(name: str, tuning: Tuning, budget: Budget, task: str | None = None) -> str:
    trial = tuning.trial(budget, task=task)
    gain = trial.speed / tuning.trial(NOT_DRAFTING, task=task).speed
    even = tuning.break_even(budget, task)
    line = f"{name[:43]:44}{trial.acceptance_length:8.2f}{even:12.2f}{gain:10.2f} x"
    if gain < 1:
        return f"{line}  slower than no draft"
    return line


def verdict(tuning: Tuning, best: Trial) -> tuple[Budget, str]:
    """Return the budget to decode with, and the reason."""
    gain = best.speed / tuning.trial(NOT_DRAFTING).speed
    reached = f"{name_budget(best.budget)}: tau {best.acceptance_length:.2f}, modelled speedup {gain:.2f} x"
    if gain >= MARGIN:
        return best.budget, f"decode with {reached}"
    return NOT_DRAFTING, (
        f"drafting with this head does not pay on this machine: decode with `none`. The best is {reached}, "
        f"less than the {MARGIN:.2f} x that growing and verifying a tree may take back"
    )


def calibrate(tuning: Tuning, head: Path) -> None:
    """Fit the temperatures of a head's confidence to the target's answers, and write them into the head's folder."""
    logits, accepted = collect_confidences(tuning.target, tuning.drafter, tuning.answers)
    if not len(logits):
        print("the answers are too short to calibrate the head's confidence")
        return
    calibration = fit_temperatures(logits, accepted)
    tasks = sorted({target_answer.task for target_answer in tuning.answers})
    write_text(
        head / TEMPERATURES,
        json.dumps({**calibration, "dataset": ", ".join(tasks)}, indent=2) + "\n",
    )
    print(
        f"the confidence's calibration error falls from {calibration['ece_before']:.3f} to "
        f"{calibration['ece_after']:.3f}: temperatures in {head}/{TEMPERATURES}"
    )


def main(argv: list[str]) -> None:
    """Time bare forwards, replay the candidates, print what they would bring, and say what to decode with."""
    parser = command_line("eagle measure --tune", __doc__)
    parser.add_argument(
        "--write", action="store_true", help="store the fastest budget in the head's config.json"
    )
    parser.add_argument(
        "--drafter", metavar="NAME", help="tune one of eval.drafters instead of the recipe's head"
    )
    parser.add_argument(
        "--trees",
        type=int,
        metavar="N",
        help="try all chains, but only N of the tree shapes; 0 tries only chains",
    )
    parser.add_argument(
        "--exhaustive", action="store_true", help="replay every candidate, to check the search"
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    args = parser.parse_intermixed_args(argv)
    with json_alone(args.json) as write_json:
        write_json(tune(args))


def tune(args: argparse.Namespace) -> dict[str, Any]:
    """Tune as a command line asks, print how, and return the budget to decode with and its figures."""
    recipe = Recipe.load(args.recipe, args.overrides)
    target = load_target(recipe)
    head = Path(recipe.train.out) / "head"
    if args.write and args.drafter:
        raise ValueError(
            f"--write is for the recipe's head: put the budget into eval.drafters.{args.drafter}.budget"
        )

    if args.trees is not None and args.trees < 0:
        raise ValueError(f"--trees is {args.trees}, expected a number of tree shapes, at least 0")
    threads = settle_threads(target)
    drafter = (
        load_named(recipe, target, args.drafter) if args.drafter else load_drafter(head, target)
    )
    print("the target answers, and forwards are timed; then a forecast of the search follows")
    answers = answer_prompts(recipe, target, drafter.taps, threads)
    if threads is not None:
        # for the last time: from here on all that is timed is compared
        threads.settle()

    tuning = Tuning(target, drafter, answers, time_forwards(target, drafter, answers))
    rates = acceptance_by_rank(tuning)
    candidates = list_candidates(drafter, rates, args.trees)
    with interrupted_by_user(lambda: best_so_far(tuning)):
        best = search(tuning, candidates)
        print(by_rank(rates), chains_by_task(tuning), ranking(tuning), sep="\n\n")

    chains = [tuning.trial(chain(length)) for length in CHAINS]
    fastest = max(chains, key=lambda trial: trial.speed)
    print(f"\nengines that serve chains: num_speculative_tokens = {fastest.budget.depth}")
    budget, reason = verdict(tuning, best)
    print(f"\n{choice_by_task(tuning, best.budget)}\n\n{reason}")
    if args.exhaustive:
        _try_all(tuning, candidates, budget)
    if args.write:
        if drafter.rates_nodes:
            calibrate(tuning, head)
        write_budget(head, budget)
        off = "" if budget.nodes else "; the head drafts nothing until `budget` is deleted there"
        print(f"written into {head}/config.json{off}")
    chosen = tuning.trial(budget)
    return {
        "budget": budget,
        "reason": reason,
        "acceptance_length": chosen.acceptance_length,
        "modelled_speedup": chosen.speed / tuning.trial(NOT_DRAFTING).speed,
        "num_speculative_tokens": fastest.budget.depth,
    }


def _try_all(tuning: Tuning, candidates: Sequence[Budget], chosen: Budget) -> None:
    """Replay every candidate along all answers, and print what share of the best the choice has."""
    trials = [tuning.trial(NOT_DRAFTING)]
    for budget in progress(candidates, "every shape", len(candidates), unit="shapes"):
        trials.append(tuning.trial(budget))
    best = max(trials, key=lambda trial: trial.speed)
    share = tuning.trial(chosen).speed / best.speed
    print(
        f"the best of no draft and all {len(candidates)} is {name_budget(best.budget)}; "
        f"the choice has {share:.1%} of it"
    )


def time_forwards(target: Target, drafter: Drafter, answers: Sequence[Answer]) -> Costs:
    """Return the costs of forwards and of the rest of a cycle."""
    # contexts from the shortest prompt to the end of the longest answer
    shortest = min(target_answer.prompt for target_answer in answers)
    longest = max(len(target_answer.tokens) for target_answer in answers)
    contexts = [shortest, (shortest + longest) // 2, longest]
    prompts = [target_answer.asked for target_answer in answers]
    options = {"max_new_tokens": answers[0].limit}
    costs, _ = measure_costs(target, drafter, prompts, TRIAL, options=options, contexts=contexts)
    return costs


if __name__ == "__main__":
    script(main)
