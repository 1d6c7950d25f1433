"""Measure drafters and compare them with `none`: `eagle measure RECIPE [key=value ...]`."""

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
from eagle.interrupts import interrupted_by_user
from eagle.log import JSON_HELP, json_alone, progress, script
from eagle.recipe import Recipe
from eagle.recipe.command_lines import ProgramOption, command_line
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
from eval.measurement import ALONE, Measurement, Processes
from eval.prompts import Case, encode_prompt, questions, tell_shortage
from eval.report import conclude, figures, markdown, page
from eval.result_files.results import ACCEPTANCE_LENGTH, SPEED_UP, read_results
from eval.result_files.write_results import (
    ResultsWriter,
    Row,
    merge_parts,
    part_of,
    read_stored,
    row_of,
)

# tokens of a generation that is not counted
WARM_UP = 16
GOES_ON = "finished answers are kept, and the same command goes on"


def measure_alone(measurement: Measurement) -> Iterator[Row]:
    """Yield the missing rows of prompts decoded one at a time, each question's before the next is asked."""
    names = list(measurement.drafters)
    cases = measurement.cases()
    left = [i for i, case in enumerate(cases) if not measurement.is_done(case, 1)]
    if left:
        _warm_up(measurement)
    for i in left:
        # another drafter goes first each time, so that none has the machine's good moments
        first = i % len(names)
        for row in _answers(measurement, cases[i], names[first:] + names[:first]):
            measurement.results.add(row)
            yield row


def _warm_up(measurement: Measurement) -> None:
    """Decode once with each drafter, so that no row pays for what happens once."""
    section = measurement.recipe.eval
    prompt = measurement.first_prompt()
    options = {
        "sampling": Sampling(max(section.temperatures)),
        "max_new_tokens": min(WARM_UP, section.max_new_tokens),
    }
    for measured in measurement.drafters.values():
        time_answer(measurement.target, measured, prompt, options)


def _answers(measurement: Measurement, case: Case, order: list[str]) -> Iterator[Row]:
    """Yield the missing rows of one question, turn by turn; drafters answer in this order."""
    for turn in range(len(case.question.turns)):
        prompt = measurement.prompt(case, turn, 1)
        if prompt is None:
            measurement.missing[case.question.set] += len(measurement.drafters)
            # later turns are longer still
            return

        stored = measurement.answers(case, turn, 1)
        new = {}
        for name in order:
            if name not in stored:
                new[name] = _answer(measurement, case, turn, name, prompt=prompt)
        if "none" in new:
            plain, plain_trace = new["none"]
            measurement.plain_tokens[case.key(turn), 1] = plain_trace.tokens
        else:
            plain = stored["none"]

        # rows are written in the order of the drafters, whoever answered first
        for name in measurement.drafters:
            if name in new:
                row, trace = new[name]
                measurement.compare(row, plain, case, turn, trace=trace)
                yield row


def _answer(
    measurement: Measurement, case: Case, turn: int, name: str, *, prompt: list[int]
) -> tuple[Row, Trace]:
    """Return the row of one drafter's answer to a turn, and its trace."""
    options = {
        "sampling": case.sampling(turn),
        "max_new_tokens": measurement.recipe.eval.max_new_tokens,
    }
    trace, wall, cpu = time_answer(measurement.target, measurement.drafters[name], prompt, options)
    row = {**measurement.describe(name, case, turn), **row_of(trace, wall, cpu)}
    if measurement.is_in_pieces(case):
        row["pieces"] = trace.pieces()
    return row, trace


def time_answer(
    target: Target, measured: MeasuredDrafter, prompt: list[int], options: dict[str, Any]
) -> tuple[Trace, float, float]:
    """Decode an answer.

    Args:
        target: The model that answers.
        measured: What drafts, and how much.
        prompt: Token ids.
        options: Further arguments of `generate`.

    Returns:
        The trace, wall seconds and CPU seconds.
    """
    # without a cache of the prompt, whose prefill is part of the time
    target.forget()
    wall = perf_counter()
    cpu = process_time()
    trace = generate(target, measured.drafter, prompt, timing=True, budget=measured.plan, **options)
    return trace, perf_counter() - wall, process_time() - cpu


def costs_of(measurement: Measurement) -> dict[str, Any]:
    """Return the costs by drafter. Drafters without forwards share the target's.

    Returns:
        For each drafter the fields of `Costs`, and by depth of the draft its rows of "forwards" and its rows "unread"
        after each number of accepted tokens; both are None where it runs no forwards.
    """
    prompts, tables = _cost_tables(measurement)
    options = {"max_new_tokens": measurement.recipe.eval.max_new_tokens}
    by_drafter: dict[Drafter | None, Costs] = {}
    costs: dict[str, Any] = {}
    for name, measured in measurement.drafters.items():
        head = None
        budget = NOT_DRAFTING
        forwards = None
        unread = None
        # a drafter that runs forwards has something to probe
        if measured.drafter.probe(1, 1, 1):
            head = measured.drafter
            budget = measured.budget
            levels = range(budget.depth + 1)
            forwards = [head.forwards(budget.within(level)) for level in levels]
            unread = []
            for level in levels:
                unread.append([head.unread(accepted, level) for accepted in range(level + 1)])

        # the same forwards are timed once
        if head not in by_drafter:
            by_drafter[head], _ = measure_costs(
                measurement.target, measured.drafter, prompts, budget, options=options, **tables
            )
        costs[name] = {**asdict(by_drafter[head]), "forwards": forwards, "unread": unread}
    return costs


def _cost_tables(measurement: Measurement) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the prompts that fit, and the contexts, batch sizes and widths at which forwards are timed."""
    recipe = measurement.recipe
    prompts = []
    max_turns = 1
    for question in measurement.questions:
        max_turns = max(max_turns, len(question.turns))
        turns = [0]
        # the last prompt of a replay is known, and its longest
        if question.replay is not None:
            turns.append(len(question.turns) - 1)
        for turn in turns:
            prompt = encode_prompt(recipe, measurement.target, question, [""] * turn)
            if prompt is not None:
                prompts.append(prompt)
    # something must be timed, even where no prompt fits
    prompts = prompts or [[1]]

    # contexts from the shortest prompt to the end of the longest answer
    lengths = [len(prompt) for prompt in prompts]
    shortest = min(lengths)
    longest = max(lengths) + recipe.eval.max_new_tokens * max_turns
    # the widest forward verifies all nodes and the root
    max_nodes = 1 + max(measured.budget.nodes for measured in measurement.drafters.values())
    return prompts, {
        "contexts": [shortest, (shortest + longest) // 2, longest],
        "batch_sizes": measurement.batch_sizes,
        "batch_tokens": [*(size for size in SIZES if size < max_nodes), max_nodes],
    }


def results_file(recipe: Recipe) -> Path:
    """Return the results file of a recipe."""
    return Path(recipe.train.out) / "results.jsonl"


def measure(
    recipe: Recipe, path: str, *, again: bool = False, processes: Processes = ALONE
) -> Path:
    """Measure what a recipe asks for and is not measured yet.

    Args:
        recipe: What is measured.
        path: Where the recipe lies, for the header.
        again: Whether rows that are there are moved aside and measured again.
        processes: Those that share the questions.

    Returns:
        The results file; with several processes it still lacks the rows in their own files.
    """
    target = load_target(recipe)
    stored = processes.share(lambda: read_stored(results_file(recipe)))
    threads = settle_threads(target, None if again else stored.header)
    torch.set_num_threads(processes.share(torch.get_num_threads))

    drafters = load_drafters(recipe, target)
    asked = questions(recipe)
    if processes.is_first:
        tell_shortage(recipe, asked)
    if recipe.eval.goodput_policy:
        drafters = add_policies(recipe, target, drafters, asked)
    settings = describe_run(recipe, target, drafters, processes.count)
    if "trees" in settings and processes.is_first:
        print(f"trees are read by {settings['trees']}")

    results = processes.share(lambda: ResultsWriter(stored, settings, again=again))
    measurement = Measurement(
        recipe=recipe,
        target=target,
        drafters=drafters,
        questions=asked,
        results=results,
        processes=processes,
    )
    if measurement.has_all():
        print(f"all answers are in {results.path} already: --again measures again")
        return results.path

    costs = processes.share(lambda: {"costs": costs_of(measurement)} if recipe.eval.costs else {})
    if processes.is_first:
        results.begin({**describe_start(recipe, path), "prompts": len(asked), **costs})
    if processes.count > 1:
        results.path = part_of(results_file(recipe), processes.rank)
        # several processes are a load for one another, which tells nothing about other jobs
        threads = None
    _measure_missing(measurement, threads)
    return results_file(recipe)


def _measure_missing(measurement: Measurement, threads: ThreadsOfLongWork | None) -> None:
    """Measure this process's part with a progress bar, and report the answers that do not fit the model.

    All rows are measured on as many threads as the file names; a message says when another number would be faster.
    """
    total = 0
    done = 0
    for case in measurement.cases():
        for turn in range(len(case.question.turns)):
            for batch_size in measurement.batch_sizes:
                total += len(measurement.drafters)
                done += len(measurement.answers(case, turn, batch_size))

    show = measurement.processes.is_first
    reported = None
    for _ in progress(_rows(measurement), "measure", total, unit="answers", done=done, show=show):
        faster = None if threads is None else threads.faster()
        if faster is not None and faster != reported:
            reported = faster
            print(
                f"threads: {faster} would be faster now than {torch.get_num_threads()}, which these results are "
                "measured with: other jobs came or went, and speeds may have changed; --again measures again",
                file=sys.stderr,
            )
    for name, count in measurement.missing.items():
        print(
            f"{name}: {count} answers are missing: their prompts and {measurement.recipe.eval.max_new_tokens} new "
            f"tokens exceed the model's {measurement.target.max_positions} positions"
        )


def _rows(measurement: Measurement) -> Iterator[Row]:
    """Yield the missing rows, the smallest batch size first."""
    for batch_size in measurement.batch_sizes:
        if batch_size == 1:
            yield from measure_alone(measurement)
        else:
            yield from measure_batches(measurement, batch_size)


def log_measurement(recipe: Recipe, path: Path, table: str) -> None:
    """Log the measurement and its page to the run that training has begun in each of the recipe's trackers."""
    if not recipe.train.trackers:
        return
    out = path.with_name("report.html")
    write_text(out, page([path]))

    measured: dict[str, float] = {}
    for group in read_results(path).groups():
        prefix = f"T{group.temperature:g}/batch{group.batch_size}/{group.drafter}"
        measured[f"{prefix}/tau"] = group.estimate(ACCEPTANCE_LENGTH).value
        measured[f"{prefix}/speed_up"] = group.estimate(SPEED_UP).value

    trackers = Trackers(recipe)
    trackers.log({"measured": measured})
    trackers.send([out, path], table)
    names = [tracker.name for tracker in trackers.running]
    if names:
        print(f"logged to {', '.join(names)}, with {out}")
    trackers.finish()


def main(argv: list[str]) -> None:
    """Measure the recipe's drafters, append the rows to results.jsonl and print the table."""
    parser = command_line("eagle measure", __doc__)
    parser.add_argument(
        "--again", action="store_true", help="measure again; another file keeps the earlier results"
    )
    parser.add_argument(
        "--verify",
        action=ProgramOption,
        nargs=0,
        help="compare every answer with the unmodified model's: see `eagle help measure --verify`",
    )
    parser.add_argument(
        "--tune",
        action=ProgramOption,
        nargs=0,
        help="find the fastest draft tree: see `eagle help measure --tune`",
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    args = parser.parse_intermixed_args(argv)
    recipe = Recipe.load(args.recipe, args.overrides)
    processes = Processes.join()
    # only the first process writes the file, so only it holds the lock
    lock = lock_path(results_file(recipe), hold=processes.is_first)
    with interrupted_by_user(lambda: GOES_ON), lock, json_alone(args.json) as write_json:
        path = measure(recipe, args.recipe, again=args.again, processes=processes)
        processes.wait()
        if processes.is_first:
            merge_parts(path)
            table = markdown(path)
            print(table, conclude(path), sep="\n\n")
            log_measurement(recipe, path, table)
            write_json(figures(path))


if __name__ == "__main__":
    script(main)
