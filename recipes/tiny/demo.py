"""See a draft head at work, then train, measure and export one, for a model of 135M parameters or a tiny one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from eagle.demo_model import fetch_model
from eagle.log import script
from eagle.recipe.command_lines import ProgramOption
from eagle.shipped import DEMO as RECIPE
from eagle.shipped import RECIPES, check_shipped_head
from eval.result_files.results import (
    ACCEPTANCE_LENGTH,
    CPU_SPEED_UP,
    SPEED_UP,
    TOKENS_PER_SECOND,
    Results,
    read_results,
)
from eval.result_files.statistics import format_number
from recipes.tiny import demo_smollm2
from recipes.tiny.stages import Stage, run, show_report

TARGET = "runs/demo/target"
HEAD = "runs/demo/eagle1/head"
DATA = "runs/demo/data"
RESULTS = "runs/demo/eagle1/results.jsonl"
CERTIFICATE = "runs/demo/eagle1/lossless.json"
MASKS = "runs/demo/mask.html"
REPORT = "runs/demo/report.html"
EXPORTED = "runs/demo/vllm"
QUESTION = "What do you know about otters?"
ABOUT = """\
A language model writes one token per forward pass. A draft head guesses the
next few. The model checks all guesses in one pass and keeps those that it would
have written itself: the same text in fewer passes.

This demo makes a small model, trains a head for it, and measures both on this
machine. Everything goes to runs/demo."""
NEXT = f"""\
  eagle generate {HEAD} --target {TARGET}
  eagle generate {HEAD} "How do I make pancakes?" --target {TARGET} --compare
  eagle measure {RECIPE.removeprefix("recipes/").removesuffix(".yaml")} --tune
  eagle doctor {HEAD} --target {TARGET}"""

TO_TRAIN = [
    Stage(
        "Make a model to speed up",
        "A chat model of 2.7 M weights learns short texts about animals, dishes and functions by heart.\n"
        f"In: 3,000 conversations, generated here. Out: {TARGET}",
        75,
        ["-m", "recipes.tiny.make_target", "--corpus", "stories"],
    ),
    Stage(
        "Let it answer 300 questions",
        "A head learns best from the text that its model writes itself.\n"
        f"In: questions from {DATA}/train.jsonl. Out: {DATA}/regenerated.jsonl",
        25,
        ["-m", "data_prep.regenerate", RECIPE],
    ),
    Stage(
        "Look at what the head will learn",
        f"The model's own words are supervised, the questions are not. Out: {MASKS}",
        5,
        ["-m", "data_prep.inspect_mask", RECIPE, "--count", "1", "--html", MASKS],
    ),
    Stage(
        "Store the model's hidden states",
        "The head reads what the model computed for each token, so the model runs once over all answers.\n"
        "In: the answers. Out: runs/demo/features",
        10,
        ["-m", "data_prep.extract", RECIPE],
    ),
]
STAGES = [
    *TO_TRAIN,
    Stage(
        "Train an EAGLE-1 head",
        "One transformer layer, which predicts the next hidden state from the last one and the token after it.\n"
        f"In: the hidden states. Out: {HEAD}",
        45,
        [str(RECIPES / "train_eagle.py"), RECIPE],
    ),
    Stage(
        "Measure it",
        "12 new questions, answered without drafts (none), with copied text (ngram) and with the head (eagle1),\n"
        "greedily (T = 0) and sampled (T = 1), on the number of threads that is faster for this model here.\n"
        f"Out: {RESULTS}",
        45,
        ["-m", "eval.measure", RECIPE, "--again"],
    ),
    Stage(
        "Check that the text is the same",
        f"Every answer is compared, token by token, with the model's own. Out: {CERTIFICATE}",
        20,
        ["-m", "eval.lossless", RECIPE],
    ),
    Stage(
        "Write the report",
        f"One page with all figures. Out: {REPORT}",
        5,
        ["-m", "eval.report", RESULTS, "--html", REPORT],
    ),
    Stage(
        "Export the head",
        f"In the layout that vLLM serves. Out: {EXPORTED}",
        8,
        ["-m", "eagle", "export", HEAD, "--target", TARGET, "--to", "vllm", EXPORTED],
    ),
    Stage(
        "See it at work",
        "Words in green were guessed by the head and accepted. The model itself wrote the others.",
        8,
        ["-m", "eagle", "generate", HEAD, QUESTION, "--target", TARGET, "--compare"],
    ),
]


def outcome(results: Results) -> Table:
    """Return a table of acceptance length, speed and speedup of each drafter at each temperature."""
    table = Table()
    for name in ("T", "drafter", "tokens per pass (τ)", "tokens/s", "speedup"):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    for group in results.groups():
        # Plain decoding is what others are compared with.
        is_plain = group.drafter == "none"
        length = format_number(group.estimate(ACCEPTANCE_LENGTH))
        speed = format_number(group.estimate(TOKENS_PER_SECOND), digits=0)
        speedup = "1.00 ×" if is_plain else format_number(group.estimate(SPEED_UP), " ×")
        style = None if is_plain or group.drafter == "ngram" else "green"
        temperature = f"{group.temperature:g}"
        table.add_row(temperature, group.drafter, length, speed, speedup, style=style)
    return table


def verdict(results: Results, certificate: Path) -> str:
    """Return the head's speedup at each temperature, and whether the output is unchanged, a line each."""
    lines = []
    for group in results.groups():
        if group.drafter in ("none", "ngram"):
            continue
        speedup = format_number(group.estimate(SPEED_UP))
        line = f"With the head at T = {group.temperature:g}: {speedup} times as fast"
        if group.had_to_wait:
            # Wall time alone would blame the head for what other processes did.
            cpu = format_number(group.estimate(CPU_SPEED_UP))
            line += f"; in CPU seconds {cpu} times, as other work had part of this machine"
        lines.append(line)
    verdicts = json.loads(certificate.read_text())["verdicts"]
    identical = sum(verdict["identical"] for verdict in verdicts)
    answers = sum(verdict["answers"] for verdict in verdicts)
    lossless = "yes" if all(verdict["lossless"] for verdict in verdicts) else "NO"
    lines.append(f"Lossless: {lossless}, {identical} of {answers} answers are the model's own")
    return "\n".join(lines)


def find_real_model() -> Path | None:
    """Return the file of the real model; None, after a line that says why, where it cannot be had."""
    try:
        check_shipped_head()
        return fetch_model()
    except (ValueError, OSError) as error:
        print(f"{error}. The demo runs with a small model that it makes itself, as with --tiny.\n")
        return None


def main(argv: list[str]) -> None:
    """Run the demo with the real model, or with the tiny one where that is asked for or is all there is."""
    parser = argparse.ArgumentParser(prog="eagle demo", description=__doc__)
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="train a small model and a head for it in runs/demo: two to five minutes, without downloads",
    )
    # for which `eagle` runs the program of the first stage
    parser.add_argument(
        "--tiny-target",
        action=ProgramOption,
        nargs=0,
        help="only train the example model and write its data: see `eagle help demo --tiny-target`",
    )
    args = parser.parse_args(argv)
    model = None if args.tiny else find_real_model()
    if model is None:
        run_tiny()
    else:
        demo_smollm2.run_demo(model)


def run_tiny() -> None:
    """Run all stages with the tiny model, and print the time and the outcome."""
    start = perf_counter()
    print(f"{ABOUT}\n\n{len(STAGES)} stages, two to five minutes on two cores.", flush=True)
    run(STAGES)
    results = read_results(RESULTS)
    minutes = (perf_counter() - start) / 60
    print(f"\nDone in {minutes:.1f} minutes, on {results.header.get('machine', 'this machine')}.\n")
    Console().print(outcome(results))
    print(verdict(results, Path(CERTIFICATE)))
    show_report(Path(REPORT))
    print(f"\nTry next:\n{NEXT}")


if __name__ == "__main__":
    script(main)
