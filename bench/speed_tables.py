"""Speed of drafters on a target that costs like a real one: `python -m bench.speed_tables RECIPE [key=value ...]`.

The recipe names the target, prompts, temperatures, batch sizes and `eval.drafters`; the target is widened to each size
(`bench.widen`), drafters in step. All arms of a setting take turns at each prompt. Every finished turn is a line of a
file, so that a killed run goes on, and cells can be added later: plain decoding is then timed anew beside them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from time import time_ns
from typing import Any

import torch

from bench.machine import made_on, write_results
from bench.speed_arms import PEERS, PLAIN, POLICY, SHAPES, THEIRS, TUNED, Costly, Setting
from bench.speed_report import Record, compute_cells, table
from eagle.core.verify import Sampling
from eagle.log import progress, script
from eagle.recipe import Recipe, command_line
from eval.prompts import encode_prompt, questions


def list_arms(recipe: Recipe, shapes: Sequence[str], batch: int) -> list[str]:
    """The arms of a setting, plain decoding first; transformers assists and looks up one text alone."""
    peers = [THEIRS] if batch > 1 else list(PEERS)
    return [PLAIN, *peers, *(f"{name}, {shape}" for name in recipe.eval.drafters for shape in shapes)]


def read_prompts(recipe: Recipe, target: Any, context: int) -> list[list[int]]:
    """The first turns of the recipe's questions, with a context repeated or cut to so many tokens."""
    prompts = [encode_prompt(recipe, target, question.turns[:1], question.images) for question in questions(recipe)]
    known = [prompt for prompt in prompts if prompt is not None]
    return [(prompt * (context // len(prompt) + 1))[-context:] if context else prompt for prompt in known]


def group_prompts(prompts: Sequence[list[int]], batch: int) -> list[list[list[int]]]:
    """Batches of that many prompts; where there are fewer, they are taken again."""
    count = max(len(prompts) // batch, 1)
    return [[prompts[(number * batch + row) % len(prompts)] for row in range(batch)] for number in range(count)]


def count_unequal(arm: str, temperature: float, answers: list[list[int]], plain: list[list[int]]) -> int | None:
    """Answers unlike plain decoding's; None for itself, and drawn answers of transformers, whose noise is another."""
    if arm == PLAIN or (arm in PEERS and temperature):
        return None
    return sum(answer != expected for answer, expected in zip(answers, plain, strict=True))


def run_setting(
    costly: Costly,
    setting: Setting,
    groups: Sequence[list[list[int]]],
    arms: Sequence[str],
    records: Iterable[Record],
    write: Callable[[Record], None],
) -> None:
    """Time the arms that have no record yet, in turns at each batch of prompts, plain decoding before them."""
    done = {(record["arm"], record["group"]) for record in records if record["setting"] == [*setting]}
    flat, limit = [prompt for group in groups for prompt in group], costly.recipe.eval.max_new_tokens
    sides: dict[str, Any] = {}
    run = time_ns()
    for number, prompts in enumerate(groups):
        missing = [arm for arm in arms if (arm, number) not in done]
        plain: list[list[int]] = []
        for arm in [PLAIN, *(arm for arm in missing if arm != PLAIN)] if missing else []:
            if arm not in sides:
                sides[arm] = costly.side(arm, setting, flat)
                sides[arm](prompts[:1], Sampling(setting.temperature), 4)  # what the first call alone does
            sampling = Sampling(setting.temperature, request=number * setting.batch)
            figures, answers = sides[arm](prompts, sampling, limit)
            plain = plain or answers
            unequal = count_unequal(arm, setting.temperature, answers, plain)
            place = {"setting": [*setting], "arm": arm, "group": number, "run": run}
            write({**place, **figures, "unequal": unequal, "texts": len(prompts)})


def read_json(path: Path) -> Any:
    """What a file holds, nothing where there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def read_records(path: Path) -> list[Record]:
    """The finished turns; a line that was cut off has no end, as records hold no braces."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def check_asked(recipe: Recipe, work: Path) -> None:
    """Refuse a folder whose turns belong to other questions or answers of another length."""
    asked = {"target": recipe.target.path, **recipe.eval.model_dump(include={"prompts", "count", "max_new_tokens"})}
    file = work / "asked.json"
    known = json.loads(file.read_text()) if file.exists() else asked
    if known != asked:
        raise ValueError(f"the turns in {work} are of {known}, expected {asked}: name another folder with --work")
    file.write_text(json.dumps(asked))


def main(argv: list[str]) -> None:
    """Time what is missing, and write and print the table of all that is there."""
    parser = command_line("python -m bench.speed_tables", __doc__)
    parser.add_argument("--sizes", nargs="+", default=["1 B"], help="as '1 B'; '' leaves the target as it is")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--contexts", nargs="+", type=int, default=[0], help="tokens of a prompt; 0: its own")
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES, TUNED, POLICY])
    parser.add_argument("--arms", nargs="+", help="only these, as 'none' or 'eagle1, chain 3'")
    parser.add_argument("--work", type=Path, default=Path("runs/speed"), help="finished turns and tuned budgets")
    parser.add_argument("--out", type=Path, default=Path("docs/results/speed_tables.json"))
    parser.add_argument("--check-tuned", nargs="+", metavar="DRAFTER", help="model every budget on these prompts, too")
    parser.add_argument("--report", action="store_true", help="the table of what is there, and nothing else")
    args = parser.parse_intermixed_args(argv)
    recipe = Recipe.load(args.recipe, args.overrides)
    args.work.mkdir(parents=True, exist_ok=True)
    check_asked(recipe, args.work)
    turns, plans, machine = (args.work / name for name in ("turns.jsonl", "plans.json", "machine.json"))

    def write(record: Record) -> None:
        with turns.open("a") as file:
            file.write("\n" + json.dumps(record))  # before it: the line before may have been cut off

    for size, dtype, threads in [] if args.report else list(product(args.sizes, args.dtypes, args.threads)):
        torch.set_num_threads(threads)
        made = made_on(target=Path(recipe.target.path).name, new_tokens=recipe.eval.max_new_tokens)
        machine.write_text(json.dumps(made))
        costly = Costly(recipe, size, dtype, plans)
        rest = list(product(args.contexts, recipe.eval.batch_size, recipe.eval.temperatures))
        for context, batch, temperature in progress(rest, f"{size}, {dtype}, {threads} threads", len(rest)):
            setting = Setting(size, dtype, threads, context, batch, temperature)
            groups = group_prompts(read_prompts(recipe, costly.target, context), batch)
            arms = list_arms(recipe, args.shapes, batch)
            chosen = [arm for arm in arms if args.arms is None or arm in args.arms]
            run_setting(costly, setting, groups, chosen, read_records(turns), write)
            for name in args.check_tuned or ():
                costly.check_tuned(name, setting, [prompt for group in groups for prompt in group])
    about = {name: read_json(path) for name, path in (("machine", machine), ("drafters", plans))}
    results = {**about, "cells": compute_cells(read_records(turns), about["drafters"])}
    write_results(args.out, results)
    print(table(results))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    script(main)
