"""Measure drafters, always beside `none`: `eagle measure RECIPE [key=value ...]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from eagle.core.drafter import Drafter
from eagle.core.trace import Trace
from eagle.core.verify import Sampling
from eagle.decoding.cycle_times import SIZES, measure_costs
from eagle.decoding.decode import generate
from eagle.decoding.forward_costs import Costs
from eagle.device import ThreadsOfLongWork
from eagle.disk import lock_path, write_text
from eagle.log import interrupted_by_user, progress, script
from eagle.recipe import Recipe, command_line
from eagle.target.target import Target
from eagle.training.trackers import Trackers
from eval.costs import NOT_DRAFTING
from eval.load_run import (
    MeasuredDrafter,
    add_policies,
    describe_run,
    describe_start,
    load_drafters,
    load_target,
    settle_threads,
)
from eval.measure_batches import measure_batches
from eval.measurement import Measurement
from eval.processes import ALONE, Processes
from eval.prompts import Case, encode_prompt, questions
from eval.report import markdown, page
from eval.result_files.answer_rows import Row, row_of
from eval.result_files.results import ACCEPTANCE_LENGTH, SPEED_UP, read_results
from eval.result_files.write_results import ResultsWriter, merge_parts, part_of, read_stored

WARM_UP = 16  # tokens of a generation that is not counted


def measure_alone(measurement: Measurement) -> Iterator[Row]:
    """The missing rows of one text at a time; in every question the drafters take turns, another one first each time.

    A question's rows are in the file before the next is asked.
    """
    names = list(measurement.drafters)
    left = [(number, case) for number, case in enumerate(measurement.cases()) if not measurement.is_done(case, 1)]
    if left:
        _warm_up(measurement)
    for number, case in left:
        first = number % len(names)
        for row in _answers(measurement, case, names[first:] + names[:first]):
            measurement.results.add(row)
            yield row


def _warm_up(measurement: Measurement) -> None:
    """Decode once with each drafter, so that no row pays for what happens once."""
    section, prompt = measurement.recipe.eval, measurement.first_prompt()
    sampling, tokens = Sampling(max(section.temperatures)), min(WARM_UP, section.max_new_tokens)
    for measured in measurement.drafters.values():
        time_answer(measurement.target, measured, prompt, sampling, tokens)


def _answers(measurement: Measurement, case: Case, order: list[str]) -> Iterator[Row]:
    """The missing rows of one question, turn by turn; drafters answer in this order."""
    for turn in range(len(case.question.turns)):
        prompt = measurement.prompt(case, turn, 1)
        if prompt is None:
            measurement.missing[case.question.set] += len(measurement.drafters)
            return  # later turns are longer still
        stored = measurement.answers(case, turn, 1)
        new = {name: _answer(measurement, case, turn, name, prompt) for name in order if name not in stored}
        if "none" in new:
            measurement.plain_tokens[case.key(turn), 1] = new["none"][1].tokens
        plain = new["none"][0] if "none" in new else stored["none"]
        for name in (name for name in measurement.drafters if name in new):
            row, trace = new[name]
            measurement.compare(row, plain, case, turn, trace)
            yield row


def _answer(measurement: Measurement, case: Case, turn: int, name: str, prompt: list[int]) -> tuple[Row, Trace]:
    """The row of one drafter's answer to a turn, and its trace."""
    tokens = measurement.recipe.eval.max_new_tokens
    measured, sampling = measurement.drafters[name], case.sampling(turn)
    trace, wall, cpu = time_answer(measurement.target, measured, prompt, sampling, tokens)
    row = {**measurement.describe(name, case, turn), **row_of(trace, wall, cpu)}
    if measurement.is_in_pieces(case):
        row["pieces"] = trace.pieces()
    return row, trace


def time_answer(
    target: Target, measured: MeasuredDrafter, prompt: list[int], sampling: Sampling, new_tokens: int
) -> tuple[Trace, float, float]:
    """Decode an answer, reading the prompt anew; its trace, wall seconds and CPU seconds."""
    target.forget()
    wall, cpu = perf_counter(), process_time()
    options: dict[str, Any] = {"sampling": sampling, "budget": measured.plan, "max_new_tokens": new_tokens}
    trace = generate(target, measured.drafter, prompt, timing=True, **options)
    return trace, perf_counter() - wall, process_time() - cpu


def costs_of(measurement: Measurement) -> dict[str, Any]:
    """Costs by drafter, each head's measured once, from the shortest prompt to the end of the longest answer."""
    asked, recipe = measurement.questions, measurement.recipe
    encoded = [encode_prompt(recipe, measurement.target, question.turns[:1], question.images) for question in asked]
    prompts = [prompt for prompt in encoded if prompt is not None] or [[1]]
    low = min(map(len, prompts))
    high = max(map(len, prompts)) + recipe.eval.max_new_tokens * max(len(question.turns) for question in asked)
    widest = 1 + max(measured.budget.nodes for measured in measurement.drafters.values())
    tables: dict[str, Any] = {"contexts": [low, (low + high) // 2, high], "batch_sizes": measurement.batch_sizes}
    tables["batch_tokens"] = [*(size for size in SIZES if size < widest), widest]
    options = {"max_new_tokens": recipe.eval.max_new_tokens}
    by_drafter: dict[Drafter | None, Costs] = {}
    costs: dict[str, Any] = {}
    for name, measured in measurement.drafters.items():
        timed = measured.drafter if measured.drafter.probe(1, 1, 1) else None  # the others share the target's forwards
        if timed not in by_drafter:
            budget = NOT_DRAFTING if timed is None else measured.budget
            by_drafter[timed], _ = measure_costs(
                measurement.target, measured.drafter, prompts, budget, options, **tables
            )
        forwards = unread = None
        if timed is not None:
            levels = range(measured.budget.depth + 1)
            forwards = [timed.forwards(measured.budget.within(level)) for level in levels]
            unread = [[timed.unread(accepted, level) for accepted in range(level + 1)] for level in levels]
        costs[name] = {**asdict(by_drafter[timed]), "forwards": forwards, "unread": unread}
    return costs


def results_file(recipe: Recipe) -> Path:
    """The results file of a recipe."""
    return Path(recipe.train.out) / "results.jsonl"


def measure(recipe: Recipe, path: str, *, again: bool = False, processes: Processes = ALONE) -> Path:
    """Measure what a recipe asks for and is not measured yet; returns the results file."""
    target, stored = load_target(recipe), processes.share(lambda: read_stored(results_file(recipe)))
    threads = settle_threads(target, None if again else stored.header)
    torch.set_num_threads(processes.share(torch.get_num_threads))
    drafters, asked = load_drafters(recipe, target), questions(recipe)
    if recipe.eval.goodput_policy:
        drafters = add_policies(recipe, target, drafters, asked)
    settings = describe_run(recipe, target, drafters, processes.count)
    if "trees" in settings and processes.is_first:
        print(f"trees are read by {settings['trees']}")
    results = processes.share(lambda: ResultsWriter(stored, settings, again=again))
    measurement = Measurement(recipe, target, drafters, asked, results, processes)
    if measurement.has_all():
        print(f"all answers are in {results.path} already: --again measures anew")
        return results.path
    costs = processes.share(lambda: {"costs": costs_of(measurement)} if recipe.eval.costs else {})
    if processes.is_first:
        results.begin({**describe_start(recipe, path), "prompts": len(asked), **costs})
    if processes.count > 1:
        results.path = part_of(results_file(recipe), processes.rank)
    # several processes are a load for one another
    _measure_missing(measurement, threads if processes.count == 1 else None)
    return results_file(recipe)


def _measure_missing(measurement: Measurement, threads: ThreadsOfLongWork | None) -> None:
    """Measure what this process has to, with a progress bar; answers without room are counted and said.

    All rows are measured on as many threads, which the file names: where others would be faster, that is said.
    """
    every, sizes = measurement.cases(), measurement.batch_sizes
    turns = [case.key(turn) for case in every for turn in range(len(case.question.turns))]
    stored = measurement.results.rows
    done = sum(len(stored.get((*key, batch_size), {})) for key in turns for batch_size in sizes)
    total, show = len(turns) * len(sizes) * len(measurement.drafters), measurement.processes.is_first
    said = 0
    for _ in progress(_rows(measurement), "measure", total, unit="answers", done=done, show=show):
        faster = None if threads is None else threads.faster()
        if faster is not None and faster != said:
            said = faster
            print(
                f"threads: {faster} would be faster now than {torch.get_num_threads()}, which these results are "
                "measured with: other jobs came or went, and speeds may have changed; --again measures anew",
                file=sys.stderr,
            )
    for name, count in measurement.missing.items():
        print(
            f"{name}: {count} answers are missing: their prompts and {measurement.recipe.eval.max_new_tokens} new "
            f"tokens exceed the model's {measurement.target.max_positions} positions"
        )


def _rows(measurement: Measurement) -> Iterator[Row]:
    """The missing rows, fewest texts at a time first."""
    for batch_size in measurement.batch_sizes:
        yield from measure_alone(measurement) if batch_size == 1 else measure_batches(measurement, batch_size)


def log_measurement(recipe: Recipe, path: Path, table: str) -> None:
    """Log what was measured, and its page, to the run that training has begun in each of the recipe's trackers."""
    if not recipe.train.trackers:
        return
    write_text(out := path.with_name("report.html"), page([path]))
    measured: dict[str, float] = {}
    for group in read_results(path).groups():
        for name, metric in (("tau", ACCEPTANCE_LENGTH), ("speed_up", SPEED_UP)):
            where = f"T{group.temperature:g}/batch{group.batch_size}/{group.drafter}/{name}"
            measured[where] = group.estimate(metric).value
    trackers = Trackers(recipe)
    trackers.log({"measured": measured})
    trackers.send([out, path], table)
    if names := [tracker.name for tracker in trackers.running]:
        print(f"logged to {', '.join(names)}, with {out}")
    trackers.finish()


def main(argv: list[str]) -> None:
    """Measure the recipe's drafters, append the rows to results.jsonl and print the table."""
    parser = command_line("eagle measure", __doc__)
    parser.add_argument("--again", action="store_true", help="measure anew; the rows that are there are kept aside")
    args = parser.parse_intermixed_args(argv)
    recipe = Recipe.load(args.recipe, args.overrides)
    message, processes = "finished answers are kept, and the same command goes on", Processes.join()
    with interrupted_by_user(lambda: message), lock_path(results_file(recipe), hold=processes.is_first):
        path = measure(recipe, args.recipe, again=args.again, processes=processes)
        processes.wait()
        if processes.is_first:
            merge_parts(path)
            print(table := markdown(path))
            log_measurement(recipe, path, table)


if __name__ == "__main__":
    script(main)
