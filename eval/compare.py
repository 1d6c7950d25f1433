"""Compare methods: `eagle compare COMPARISON.yaml [key=value ...] [--report]`.

Every arm of the file is trained with every seed, and measured on the same prompts; `docs/compare.md` explains the file.
To resume an interrupted comparison, repeat the command. With `--report`, the table is rebuilt from existing results,
without training.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch

from eagle.data.identity import differences, target_identity
from eagle.device import best_device
from eagle.disk import lock_folder, write_text
from eagle.interrupts import interrupted_by_user
from eagle.log import JSON_HELP, json_alone, progress, script
from eagle.shipped import commit
from eagle.training.trackers import Trackers, check_trackers
from eval.comparison.compare_decode import Decoder
from eval.comparison.compare_plan import Arm, Comparison, with_train
from eval.comparison.compare_rows import Rows
from eval.comparison.compare_table import ComparisonTable, markdown
from eval.comparison.compare_train import is_trained, store_features, train_arm
from eval.comparison.curves import curve_lines, describe_curves, draw_curves
from eval.result_files.results import device_name

GOES_ON = "what is trained and measured is kept, and the same command goes on"


def prepare(comparison: Comparison) -> None:
    """Run the command of every required file that is missing."""
    for path, command in comparison.section.prepare.items():
        if Path(path).exists():
            continue
        print(f"{path} is not there yet: python {command}", flush=True)
        # what it tells is no part of the result
        done = subprocess.run([sys.executable, *shlex.split(command)], stdout=2)
        if done.returncode or not Path(path).exists():
            raise ValueError(
                f"{path} is still missing after `python {command}` (status {done.returncode}): see above"
            )


def header(comparison: Comparison, decoder: Decoder) -> dict[str, Any]:
    """Return the header of a run: what made the rows that follow."""
    return {
        "comparison": Path(comparison.source).name,
        "target": target_identity(comparison.recipe.target),
        "prompts": [[question.set, question.id] for question in decoder.questions],
        "new_tokens": comparison.recipe.eval.max_new_tokens,
        "machine": f"{device_name(best_device())}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "date": str(date.today()),
        "commit": commit(),
    }


def begin(rows: Rows, about: dict[str, Any]) -> None:
    """Write the header of this run, and refuse rows of another target."""
    for run in rows.of("run"):
        for name, earlier, now in differences(run["target"], about["target"]):
            raise ValueError(
                f"{rows.path} holds results of another target: its {name} is {earlier!r}, now {now!r}; name another "
                "out, or remove that file"
            )
    # a command that goes on under the same conditions needs no second header
    if about not in rows.of("run")[-1:]:
        rows.add("run", [about])


def run(comparison: Comparison) -> str:
    """Prepare, train and measure what is missing, seed by seed.

    Returns:
        The table in Markdown, which is in the comparison's folder too.

    Raises:
        ValueError: The file holds results of another target, or a required file cannot be made.
    """
    rows = Rows(comparison.folder)
    for arm in comparison.arms.values():
        check_trackers(arm.recipe.train)
    prepare(comparison)
    decoder = Decoder(comparison, rows)
    begin(rows, header(comparison, decoder))
    store_features(comparison)

    every = _list_work(comparison)
    for work, arm, seed in progress(every, "compare", len(every), unit="arms"):
        if work == "train" and not is_trained(rows, arm, seed):
            # training needs the memory
            decoder.release()
            print(f"training {arm.name}, seed {seed}", flush=True)
            train_arm(comparison, rows, arm, seed)
        elif work == "measure" and not decoder.is_done(arm, seed):
            decoder.measure(arm, seed)
            # after every arm, so that a look at the file tells how far it is
            report(comparison, rows)

    table = report(comparison, rows)
    log_comparison(comparison, table)
    return table


def _list_work(comparison: Comparison) -> list[tuple[str, Arm, int]]:
    """Return what is to be done, in order: the kind of work, the arm and the seed."""
    seeds = comparison.section.seeds
    # the arms of a curve share steps, so they are trained one after another
    groups: list[list[Arm]] = [[], *comparison.curves.values()]
    work = []
    for arm in comparison.arms.values():
        if not arm.is_trained:
            work.append(("measure", arm, seeds[0]))
        elif arm.curve is None:
            groups[0].append(arm)

    for seed, group in product(seeds, groups):
        work += [("train", arm, seed) for arm in group]
        work += [("measure", arm, seed) for arm in group]
    return work


def log_comparison(comparison: Comparison, table: str) -> None:
    """Log the table and the figure to the trackers, as a run beside those of the arms."""
    recipe = comparison.recipe
    if not recipe.train.trackers:
        return
    folder = comparison.folder
    trackers = Trackers(with_train(recipe, {"out": str(folder)}))
    files = [folder / name for name in ("comparison.md", "comparison.json", "curves.html")]
    trackers.send([path for path in files if path.is_file()], table)
    trackers.finish()


def report(comparison: Comparison, rows: Rows) -> str:
    """Write figures and table from the stored rows; return the table."""
    if not rows.of("run"):
        raise ValueError(f"no results in {rows.path}: give the command without --report first")
    stored = ComparisonTable(comparison, rows)
    figures = stored.figures()
    curves = describe_curves(stored)
    table = "\n".join([markdown(figures), *curve_lines(curves)])
    if curves:
        figures["curves"] = curves
        write_text(comparison.folder / "curves.html", draw_curves(curves))
    text = json.dumps(figures, indent=1, ensure_ascii=False) + "\n"
    write_text(comparison.folder / "comparison.json", text)
    write_text(comparison.folder / "comparison.md", table + "\n")
    return table


def main(argv: list[str]) -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(prog="eagle compare", description=__doc__)
    parser.add_argument("comparison", help="a YAML file, such as recipes/compare/tiny.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key")
    parser.add_argument(
        "--report", action="store_true", help="only rebuild the table from existing results"
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    args = parser.parse_intermixed_args(argv)
    comparison = Comparison.load(args.comparison, args.overrides)
    with json_alone(args.json) as write_json:
        if args.report:
            print(report(comparison, Rows(comparison.folder)))
        else:
            with interrupted_by_user(lambda: GOES_ON), lock_folder(comparison.folder):
                print(run(comparison))
        write_json(json.loads((comparison.folder / "comparison.json").read_text()))


if __name__ == "__main__":
    script(main)
