"""Which draft tree keeps most, and which way of drawing: `python bench/tree_kinds.py RECIPE [key=value ...]`.

Trees of equal nodes and levels are compared on the same answers of the target, prompt by prompt; shapes that are fitted
are fitted on other prompts. Drafts that carry their law are decoded, all others replayed along the answers, which gives
the same cycles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.machine import made_on
from eagle.core.decode import generate
from eagle.core.drafter import Budget, Drafter
from eagle.core.tree import PUBLISHED_TREE, best_tree, chain_paths
from eagle.core.verify import Sampling
from eagle.formats.checkpoint import load_drafter
from eagle.log import progress, script
from eagle.recipe import Recipe, command_line
from eagle.target.target import Target
from eval.load_run import load_target
from eval.prompts import Question, questions
from eval.replay import Answer, answer, rates_by_rank, recorded, replay
from eval.statistics import Estimate, Row, estimate, estimate_difference
from eval.tune import GUESS, WIDE, tuning_questions

LEVELS, NODES = 6, (8, 25, 60)
DRAWS = ("noise", "likeliest", "sampled")
OUT = Path("docs/results/tree_kinds.json")
Lengths = dict[int, Row]  # by prompt: tokens committed, and cycles


def answers(recipe: Recipe, target: Target, asked: Sequence[Question], drafter: Drafter, heat: float) -> list[Answer]:
    """The target's own answers of more than one token."""
    found = []
    for number, one in enumerate(progress(asked, f"answers at T = {heat:g}", len(asked))):
        prompt = target.chat([{"role": "user", "content": one.turns[0]}], **recipe.data.template_kwargs)
        sampling = Sampling(temperature=heat, request=number)
        found.append(answer(target, drafter.taps, prompt, limit=recipe.eval.max_new_tokens, sampling=sampling))
    return [told for told in found if told.length > 1]


def replayed(target: Target, drafter: Drafter, told: Answer, budget: Budget) -> Row:
    """Tokens and cycles of an answer, without the target's forwards."""
    rows = recorded(told, replay(target, drafter, told, budget))
    return sum(row["committed"] for row in rows), len(rows)


def decoded(target: Target, drafter: Drafter, told: Answer, budget: Budget) -> Row:
    """The same by decoding."""
    options: dict[str, Any] = {"sampling": told.sampling, "max_new_tokens": told.limit, "budget": budget}
    trace = generate(target, drafter, told.tokens[: told.prompt], **options)
    return sum(cycle.committed for cycle in trace.cycles), len(trace.cycles)


def by_prompt(answers: list[Answer], one: Callable[[Answer], Row], what: str) -> Lengths:
    """What every answer adds; those that took no cycle add nothing."""
    rows = {number: one(told) for number, told in enumerate(progress(answers, what, len(answers)))}
    return {number: row for number, row in rows.items() if row[1]}


def shapes(rates: list[list[float]]) -> dict[str, Budget]:
    """All trees of equal levels, by kind and size."""
    found = {"chain": Budget.fixed(chain_paths(LEVELS)), "published 25": Budget.fixed(PUBLISHED_TREE)}
    for nodes in NODES:
        found[f"fixed {nodes}"] = Budget.fixed(best_tree(GUESS, nodes, LEVELS))
        found[f"fitted {nodes}"] = Budget.fixed(best_tree(rates, nodes, LEVELS))
        found[f"dynamic {nodes}"] = Budget(nodes, LEVELS, min(nodes, 10))
    return found


def kinds(target: Target, drafter: Drafter, fit: list[Answer], shown: list[Answer]) -> dict[str, Any]:
    """Every kind on every prompt, and the acceptance by rank that the fitted ones were made for."""
    wide = Budget.fixed(WIDE)
    told = progress(fit, "acceptance by rank", len(fit))
    rates = rates_by_rank(cycle for one in told for cycle in replay(target, drafter, one, wide))
    found = {
        name: by_prompt(shown, lambda told, budget=budget: replayed(target, drafter, told, budget), name)  # type: ignore[misc]
        for name, budget in shapes(rates).items()
    }
    return {"rates": rates, "lengths": found}


def draws(target: Target, drafter: Drafter, shown: list[Answer]) -> dict[str, Lengths]:
    """The chain of 4 and the published tree, drawn in three ways and decoded."""
    found = {}
    for name, paths in (("chain of 4", chain_paths(4)), ("published 25", PUBLISHED_TREE)):
        for draw in DRAWS:
            budget = replace(Budget.fixed(paths), draw=draw)
            found[f"{name}, {draw}"] = by_prompt(
                shown,
                lambda told, budget=budget: decoded(target, drafter, told, budget),
                f"{name}, {draw}",  # type: ignore[misc]
            )
    return found


def pairs() -> list[tuple[str, str]]:
    """What should be no better, and what should be no worse."""
    found = []
    for nodes in NODES:
        fixed = f"fixed {nodes}"
        found += [("chain", fixed), (fixed, f"fitted {nodes}"), (fixed, f"dynamic {nodes}")]
    return [*found, ("chain", "published 25"), ("published 25", "fitted 25"), ("published 25", "dynamic 25")]


def _lengths(rows: dict[str, Row]) -> Estimate:
    return estimate({prompt: [row] for prompt, row in rows.items()})


def _said(value: Estimate, form: str = ".2f") -> str:
    return f"{value.value:{form}} ({value.low:{form}} to {value.high:{form}})"


def kinds_table(results: dict[str, Any]) -> str:
    """Acceptance lengths by kind, and the differences by prompt, as Markdown."""
    heats = list(results["kinds"])
    head = " | ".join(f"T = {heat}" for heat in heats)
    lines = [f"| tree | {head} |", "|---" * (len(heats) + 1) + "|"]
    for name in results["kinds"][heats[0]]["lengths"]:
        cells = [_said(_lengths(results["kinds"][heat]["lengths"][name])) for heat in heats]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"| difference in τ | {head} |", "|---" * (len(heats) + 1) + "|"]
    for less, more in pairs():
        cells = []
        for heat in heats:
            rows = results["kinds"][heat]["lengths"]
            cells.append(_said(estimate_difference(rows[less], rows[more], lambda prompt: prompt).estimate, "+.2f"))
        lines.append(f"| {more} over {less} | {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", f"<sub>{', '.join(f'{key} {value}' for key, value in results['machine'].items())}</sub>"]
    )


def draws_table(results: dict[str, Any]) -> str:
    """Acceptance lengths by way of drawing, as Markdown."""
    lines = [f"| shape | T | {' | '.join(DRAWS)} |", "|---" * (len(DRAWS) + 2) + "|"]
    for heat, found in results["draws"].items():
        for name in dict.fromkeys(key.rpartition(", ")[0] for key in found):
            cells = [_said(_lengths(found[f"{name}, {draw}"])) for draw in DRAWS]
            lines.append(f"| {name} | {heat} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Compare, write, print."""
    args = command_line("bench.tree_kinds", __doc__).parse_intermixed_args(argv)
    recipe = Recipe.load(args.recipe, args.overrides)
    target = load_target(recipe)
    drafter = load_drafter(Path(recipe.train.out) / "head", target)
    found: dict[str, Any] = {"machine": {}, "kinds": {}, "draws": {}}
    for heat in (0.0, 0.5, 1.0):
        fit, shown = (
            answers(recipe, target, asked, drafter, heat) for asked in (tuning_questions(recipe), questions(recipe))
        )
        found["kinds"][f"{heat:g}"] = kinds(target, drafter, fit, shown)
        if heat:
            found["draws"][f"{heat:g}"] = draws(target, drafter, shown)
    found["machine"] = made_on(
        target=Path(recipe.target.path).name,
        prompts=len(questions(recipe)),
        fitted_on=len(tuning_questions(recipe)),
        new_tokens=recipe.eval.max_new_tokens,
    )
    OUT.write_text(json.dumps(found) + "\n")
    found = json.loads(OUT.read_text())
    print(kinds_table(found), draws_table(found), sep="\n\n")


if __name__ == "__main__":
    script(main)
