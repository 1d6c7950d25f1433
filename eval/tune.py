"""The fastest budget for a head on this machine: `eagle tune RECIPE [key=value ...] [--write] [--exhaustive]`.

Bare forwards are timed, the target answers the tuning prompts once, and every candidate is replayed along its answers:
exactly the cycles that it would decode in. Tokens per second are those cycles at the prices of the bare forwards; a
drafter that takes no forwards pays for its drafts what they took in the replays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from eagle.core.budget import Budget
from eagle.core.drafter import Drafter
from eagle.core.tree import best_tree
from eagle.core.verify import Sampling
from eagle.decoding.cycle_costs import PENDING
from eagle.decoding.cycle_times import measure_costs
from eagle.decoding.forward_costs import Costs
from eagle.device import ThreadsOfLongWork
from eagle.formats.checkpoint import load_drafter, write_budget
from eagle.log import progress, script
from eagle.recipe import Recipe, command_line
from eagle.target.target import Target
from eval.costs import NOT_DRAFTING, asked_budgets, draft_seconds, model_seconds, shape_of
from eval.load_run import load_named, load_target, settle_threads
from eval.prompts import Question, chat_prompt, questions
from eval.replay import Answer, answer, plain, rates_by_rank, record_cycles, replay
from eval.tune_policy import replay_policy

NODES, DEPTHS, TOP_K = (2, 3, 4, 6, 8, 12, 16, 25, 40, 60), (1, 2, 3, 4, 6, 8), (2, 3, 4, 6, 10)
CHAINS = range(1, 9)
GUESS = ((0.6, 0.15, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01),)  # acceptance by rank, before any is known
WIDE = best_tree(GUESS, 500, 6)  # where it is looked for: many ranks behind likely nodes, few behind others
TRIAL = Budget(8, 4, 3)  # whose cycles show what is spent beside forwards
MARGIN = 1.03  # a smaller gain on paper may be none


def chain(length: int) -> Budget:
    """A chain, which is what most engines serve."""
    return Budget(length, length, 1)


def dynamic() -> list[Budget]:
    """The grid of dynamic trees, without trees deeper than their nodes or narrower than a chain."""
    return [
        Budget(nodes, depth, top_k)
        for nodes in NODES
        for depth in DEPTHS
        for top_k in TOP_K
        if max(depth, top_k) <= nodes <= top_k + (depth - 1) * top_k**2
    ]


def fixed(rates: Sequence[Sequence[float]]) -> list[Budget]:
    """The best shapes of each size and depth for acceptance by rank."""
    shapes = {best_tree(rates, nodes, depth): None for nodes in NODES for depth in DEPTHS}
    return [Budget.fixed(shape) for shape in shapes if shape]


@dataclass(frozen=True)
class Trial:
    """The figures of a budget on some answers."""

    budget: Budget
    cycles: int
    committed: int
    seconds: float  # modelled

    @property
    def acceptance_length(self) -> float:
        """tau, of these answers."""
        return self.committed / self.cycles

    @property
    def speed(self) -> float:
        """Modelled tokens per second."""
        return self.committed / self.seconds


@dataclass(frozen=True)
class Tuning:
    """A drafter, the target's answers and the costs of forwards: what a budget is measured with."""

    target: Target
    drafter: Drafter
    answers: list[Answer]
    costs: Costs
    records: dict[Budget, list[list[dict[str, Any]]]] = field(default_factory=dict)  # cycles of the first few answers

    def trial(self, budget: Budget, count: int | None = None, task: str | None = None) -> Trial:
        """The budget along the first `count` answers, or those of them that belong to a task."""
        answers = self.answers[:count]
        records = self.records.setdefault(budget, [])
        records += [self._replay_answer(known, budget) for known in answers[len(records) :]]
        shown = [pair for pair in zip(answers, records, strict=False) if task in (None, pair[0].task)]
        cycles = [row for _, rows in shown for row in rows]
        asked = [asked_budgets(rows, budget, known.limit) for known, rows in shown]
        seconds = model_seconds(self.costs, [{"cycles": rows} for _, rows in shown], asked, self.drafter)
        return Trial(budget, len(cycles), sum(row["committed"] for row in cycles), sum(seconds))

    def _replay_answer(self, known: Answer, budget: Budget) -> list[dict[str, Any]]:
        if not budget.nodes:
            return plain(known)
        seconds: list[float] = []
        cycles = replay(self.target, self.drafter, known, budget, seconds)
        return record_cycles(known, cycles, seconds)

    def break_even(self, budget: Budget, task: str | None = None) -> float:
        """The acceptance length below which this budget is slower than no draft, at the answers' mean context.

        Of a drafter without bare costs it holds the drafts that were replayed, so none before the first replay.
        """
        known = [one for one in self.answers if task in (None, one.task)]
        context = sum(one.prompt + one.length // 2 for one in known) // len(known)
        rows = self.costs.rows(self.drafter, budget, PENDING)
        drafting = 0.0
        if rows is None and (replayed := [[row] for cycles in self.records.get(budget, []) for row in cycles]):
            drafts = draft_seconds(replayed)
            drafting = fmean(drafts.get(shape_of(cycle), 0.0) for cycle in replayed)
        return (self.costs.cycle(budget.nodes, rows or (), context) + drafting) / self.costs.read(1, context)

    def could_pay(self, budget: Budget) -> bool:
        """Whether it would be faster than no draft if every level were accepted."""
        return budget.depth + 1 > self.break_even(budget)


def search(tuning: Tuning, candidates: Sequence[Budget], note: Callable[[str], None] = print) -> Trial:
    """The fastest of candidates and no draft, by halving: all on a few answers, the better half on twice as many."""
    left = [NOT_DRAFTING, *filter(tuning.could_pay, candidates)]
    note(f"{len(candidates) + 1 - len(left)} of {len(candidates)} shapes cost more than they could ever bring")
    count = min(max(len(tuning.answers) // 8, 2), len(tuning.answers))
    while True:
        shown = progress(left, f"{count} answers", len(left), unit="shapes")
        trials = [tuning.trial(budget, count) for budget in shown]
        trials.sort(key=lambda trial: -trial.speed)
        if count == len(tuning.answers):
            return trials[0]
        left = [trial.budget for trial in trials[: max(len(left) // 2, 8)]]
        count = min(2 * count, len(tuning.answers))


def acceptance_by_rank(tuning: Tuning) -> list[list[float]]:
    """How often the target chooses each child, by depth and rank, along half of the answers."""
    wide = Budget.fixed(WIDE)
    few = tuning.answers[: max(len(tuning.answers) // 2, 8)]
    return rates_by_rank(cycle for known in few for cycle in replay(tuning.target, tuning.drafter, known, wide))


def tuning_questions(recipe: Recipe) -> list[Question]:
    """The questions behind those that are measured, so that no tree is measured on what it was fitted to."""
    measured = questions(recipe)
    twice = recipe.eval.model_copy(update={"count": 2 * recipe.eval.count})
    behind = [one for one in questions(recipe.model_copy(update={"eval": twice})) if one not in measured]
    if not behind:
        print(f"the sets have no more than the {len(measured)} questions that are measured: they are tuned on, too")
    ranks: Counter[str] = Counter()
    order = []
    for one in behind or measured:
        ranks[one.set] += 1
        order.append((ranks[one.set], one))
    return [one for _, one in sorted(order, key=lambda pair: pair[0])]  # the sets in turn: the first few are of all


def answer_prompts(
    recipe: Recipe, target: Target, taps: tuple[int, ...], threads: ThreadsOfLongWork | None = None
) -> list[Answer]:
    """The target's own answers to the first turns of the tuning questions, at every temperature of the recipe.

    `threads` are timed again where other jobs come or go.
    """
    asked, limit = tuning_questions(recipe), recipe.eval.max_new_tokens
    answers = []
    for number, one in enumerate(progress(asked, "answer the tuning questions", len(asked), unit="questions")):
        if threads is not None:
            threads.settle()
        prompt = chat_prompt(recipe, target, one.turns[:1], one.images)
        for temperature in recipe.eval.temperatures:
            sampling = Sampling(temperature=temperature, request=number)
            known = answer(target, taps, prompt, limit=limit, sampling=sampling, task=one.task or one.set)
            answers += [known] if known.length > 1 else []
    if not answers:
        raise ValueError(f"the target answers none of the {len(asked)} tuning questions with more than one token")
    return answers


def name_budget(budget: Budget) -> str:
    """A budget in a few words."""
    if not budget.nodes:
        return "no draft"
    if budget.top_k == 1:
        return f"chain of {budget.depth}"
    kind = "dynamic" if budget.paths is None else "fixed"
    return f"{kind}, {budget.nodes} nodes, {budget.depth} levels, top {budget.top_k}"


def by_rank(rates: Sequence[Sequence[float]]) -> str:
    """Acceptance by depth and rank as a table."""
    lines = [f"{'chosen at':22}" + "".join(f"{f'rank {rank}':>9}" for rank in range(max(map(len, rates))))]
    for depth, row in enumerate(rates, start=1):
        lines.append(f"{f'level {depth}':22}" + "".join(f"{rate:9.3f}" for rate in row))
    return "\n".join(lines)


def chains_by_task(tuning: Tuning) -> str:
    """tau and modelled speed-up of chains, per task and over all, as a table."""
    tasks = dict.fromkeys(known.task for known in tuning.answers)
    lines = [f"{'tau, speed-up':22}" + "".join(f"{f'k = {length}':>13}" for length in CHAINS)]
    for task in [*tasks, None] if len(tasks) > 1 else [None]:
        plain = tuning.trial(NOT_DRAFTING, task=task).speed
        trials = [tuning.trial(chain(length), task=task) for length in CHAINS]
        cells = [f"{trial.acceptance_length:.2f}, {trial.speed / plain:.2f} x" for trial in trials]
        lines.append(f"{(task or 'all')[:22]:22}" + "".join(f"{cell:>13}" for cell in cells))
    lines.append(f"{'break-even tau':22}" + "".join(f"{tuning.break_even(chain(length)):>13.2f}" for length in CHAINS))
    return "\n".join(lines)


def ranking(tuning: Tuning, count: int = 12) -> str:
    """The fastest of the budgets that were replayed along every answer."""
    whole = [one for one, rows in tuning.records.items() if len(rows) == len(tuning.answers)]
    whole.sort(key=lambda budget: -tuning.trial(budget).speed)
    return _table("fastest, modelled", [(name_budget(budget), tuning, budget, None) for budget in whole[:count]])


def choice_by_task(tuning: Tuning, budget: Budget) -> str:
    """The chosen budget on each task."""
    tasks = dict.fromkeys(known.task for known in tuning.answers)
    return _table(f"{name_budget(budget)}, by task", [(task, tuning, budget, task) for task in tasks])


def _table(title: str, rows: Sequence[tuple[str, Tuning, Budget, str | None]]) -> str:
    lines = [f"{title:44}{'tau':>8}{'break-even':>12}{'speed-up':>12}"]
    for name, tuning, budget, task in rows:
        trial, plain = tuning.trial(budget, task=task), tuning.trial(NOT_DRAFTING, task=task)
        gain = trial.speed / plain.speed
        figures = f"{trial.acceptance_length:8.2f}{tuning.break_even(budget, task):12.2f}{gain:10.2f} x"
        lines.append(f"{name[:43]:44}{figures}{'  slower than no draft' * (gain < 1)}")
    return "\n".join(lines)


def verdict(tuning: Tuning, best: Trial) -> tuple[Budget, str]:
    """The budget to decode with, and the reason."""
    gain = best.speed / tuning.trial(NOT_DRAFTING).speed
    reached = f"{name_budget(best.budget)}: tau {best.acceptance_length:.2f}, modelled speed-up {gain:.2f} x"
    if gain >= MARGIN:
        return best.budget, f"decode with {reached}"
    return NOT_DRAFTING, (
        f"drafting with this head does not pay on this machine: decode with `none`. The best is {reached}, "
        f"less than the {MARGIN:.2f} x that growing and verifying a tree may take back"
    )


def policy_line(tuning: Tuning) -> str:
    """A line with the figures of an adaptive policy over chains."""
    longest = chain(max(CHAINS))
    tuning.trial(longest)  # for what its drafts take, where no bare forwards tell
    seconds = fmean(row["seconds"]["draft"] for rows in tuning.records[longest] for row in rows)
    tokens, total = replay_policy(tuning.target, tuning.drafter, tuning.answers, tuning.costs, longest, seconds)
    gain = tokens / total / tuning.trial(NOT_DRAFTING).speed
    return f"policy, chains of 0 to {longest.depth}: modelled speed-up {gain:.2f} x"


def main(argv: list[str]) -> None:
    """Time bare forwards, replay the candidates, print what they would bring, and say what to decode with."""
    parser = command_line("eagle tune", __doc__)
    parser.add_argument("--write", action="store_true", help="put the budget into the head's config.json")
    parser.add_argument("--drafter", metavar="NAME", help="one of eval.drafters, instead of the recipe's head")
    parser.add_argument("--exhaustive", action="store_true", help="replay every candidate, and compare the choice")
    args = parser.parse_intermixed_args(argv)
    recipe = Recipe.load(args.recipe, args.overrides)
    target, head = load_target(recipe), Path(recipe.train.out) / "head"
    if args.write and args.drafter:
        raise ValueError(f"--write is for the recipe's head: put the budget into eval.drafters.{args.drafter}.budget")
    threads = settle_threads(target)
    drafter = load_named(recipe, target, args.drafter) if args.drafter else load_drafter(head, target)
    answers = answer_prompts(recipe, target, drafter.taps, threads)
    if threads is not None:
        threads.settle()  # for the last time: from here on all that is timed is compared
    tuning = Tuning(target, drafter, answers, time_forwards(target, drafter, answers))
    rates = acceptance_by_rank(tuning)
    own = [] if drafter.budget is None else [drafter.budget]
    candidates = list(dict.fromkeys([*own, *map(chain, CHAINS), *dynamic(), *fixed(rates)]))
    best = search(tuning, candidates)
    print(by_rank(rates), chains_by_task(tuning), ranking(tuning), sep="\n\n")
    chains = [tuning.trial(chain(length)) for length in CHAINS]
    fastest = max(chains, key=lambda trial: trial.speed)
    print(f"\nengines that serve chains: num_speculative_tokens = {fastest.budget.depth}")
    budget, why = verdict(tuning, best)
    print(f"\n{choice_by_task(tuning, best.budget)}\n\n{why}")
    if recipe.eval.goodput_policy:
        print(policy_line(tuning))
    if args.exhaustive:
        shown = progress(candidates, "every shape", len(candidates), unit="shapes")
        every = [tuning.trial(one) for one in [NOT_DRAFTING, *shown]]
        top = max(every, key=lambda trial: trial.speed)
        share = tuning.trial(budget).speed / top.speed
        print(
            f"the best of no draft and all {len(candidates)} is {name_budget(top.budget)}; "
            f"the choice has {share:.1%} of it"
        )
    if args.write:
        write_budget(head, budget)
        print(f"written into {head}/config.json")


def time_forwards(target: Target, drafter: Drafter, answers: Sequence[Answer]) -> Costs:
    """The costs of forwards from the shortest prompt to the end of the longest answer, and of cycles beside them."""
    low, high = min(known.prompt for known in answers), max(len(known.tokens) for known in answers)
    prompts, options = [known.asked for known in answers], {"max_new_tokens": answers[0].limit}
    return measure_costs(target, drafter, prompts, TRIAL, options, contexts=[low, (low + high) // 2, high])[0]


if __name__ == "__main__":
    script(main)
