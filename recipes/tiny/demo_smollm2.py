"""The demo with a real model: the shipped head of SmolLM2-135M-Instruct at work, then a new one, trained here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from eagle.demo_model import SMOLLM2
from eagle.device import best_device, fastest_dtype
from eagle.shipped import RECIPES, SHIPPED_HEAD
from eagle.target.gguf import model_folder
from eval.result_files.results import (
    ACCEPTANCE_LENGTH,
    CPU_SPEED_UP,
    SPEED_UP,
    Group,
    read_results,
)
from eval.result_files.statistics import format_number
from recipes.tiny.stages import Stage, run, show_report

RECIPE = "recipes/tiny/demo_smollm2.yaml"
# questions and answers that come with the recipes of this model
TEXTS = RECIPES / "smollm2-135m"
FOLDER = "runs/smollm2-demo"
TARGET = f"{FOLDER}/model.gguf"
ANSWERS = f"{FOLDER}/data/answers.jsonl"
PROMPTS = f"{FOLDER}/data/prompts.jsonl"
# each run is a folder with a head and its results
SHIPPED = f"{FOLDER}/shipped"
TRAINED = f"{FOLDER}/eagle1"
REPORT = f"{FOLDER}/report.html"
EXPORTED = f"{FOLDER}/vllm"
QUESTION = "Give me three tips for learning a language."
ABOUT = f"""\
A language model writes one token per forward pass. A draft head guesses the
next few. The model checks all guesses in one pass and keeps those that it would
have written itself: the same text in fewer passes.

This demo shows the head that ships with eagle for {SMOLLM2.name}, a chat
model of 135 M weights, and trains another one for two minutes, which shows how
far little training goes. Everything goes to {FOLDER}."""
NEXT = f"""\
  eagle chat                       # with this model and the shipped head
  eagle generate {TRAINED}/head --target {TARGET}
  eagle doctor {TRAINED}/head --target {TARGET}
  eagle init --model your/model --data your/conversations.jsonl"""


def make_stages() -> list[Stage]:
    """Return the stages; measurements run in the precision that is fastest on this machine, as serving would."""
    dtype = str(fastest_dtype(best_device())).removeprefix("torch.")
    # Short answers: in the minutes of a demo, more questions tell more than longer answers.
    show = ["--target", TARGET, "--compare", "--dtype", dtype, "--max-new-tokens", "64"]
    measure = ["-m", "eval.measure", RECIPE, "--again", f"target.dtype={dtype}"]
    results = [f"{SHIPPED}/results.jsonl", f"{TRAINED}/results.jsonl"]
    export = ["--target", TARGET, "--to", "vllm", EXPORTED]
    return [
        Stage(
            "See the shipped head at work",
            "Words in green were guessed by the head and accepted. The model itself wrote the others.",
            25,
            ["-m", "eagle", "generate", f"{SHIPPED}/head", QUESTION, *show],
        ),
        Stage(
            "Measure the shipped head",
            "Five questions, answered without drafts (none) and with the head (eagle1), greedily (T = 0).\n"
            f"In: {PROMPTS}. Out: {results[0]}",
            50,
            [*measure, f"train.out={SHIPPED}"],
        ),
        Stage(
            "Store the model's hidden states",
            "Now a head of your own. It reads what the model computed for each token, so the model runs once over\n"
            f"264 answers that it wrote before. In: {ANSWERS}. Out: {FOLDER}/features",
            50,
            ["-m", "data_prep.extract", RECIPE],
        ),
        Stage(
            "Train an EAGLE-1 head",
            "One transformer layer, which predicts the next hidden state from the last one and the token after it.\n"
            f"In: the hidden states. Out: {TRAINED}/head",
            120,
            [str(RECIPES / "train_eagle.py"), RECIPE],
        ),
        Stage("Measure it", f"The same questions. Out: {results[1]}", 50, measure),
        Stage(
            "Write the report",
            f"One page with the figures of both heads. Out: {REPORT}",
            5,
            ["-m", "eval.report", *results, "--html", REPORT],
        ),
        Stage(
            "Export your head",
            f"In the layout that vLLM serves. Out: {EXPORTED}",
            12,
            ["-m", "eagle", "export", f"{TRAINED}/head", *export],
        ),
    ]


def set_up(model: Path) -> None:
    """Put the inputs of all stages into the demo's folder, and unpack the model's weights."""
    folder = Path(FOLDER)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name in (ANSWERS, PROMPTS):
        shutil.copyfile(TEXTS / Path(name).name, name)
    Path(SHIPPED).mkdir(exist_ok=True)
    # large files stay where they are
    for link, place in ((Path(TARGET), model), (Path(SHIPPED) / "head", SHIPPED_HEAD)):
        link.unlink(missing_ok=True)
        link.symlink_to(place.resolve())
    model_folder(TARGET)


def run_demo(model: Path) -> None:
    """Run all stages on the model's GGUF file, and print the time and the outcome."""
    start = perf_counter()
    set_up(model)
    set_up_end = perf_counter()
    stages = make_stages()
    print(
        f"{ABOUT}\n\n{len(stages)} stages, about {promised_minutes(stages)} minutes on two idle cores.",
        flush=True,
    )
    run(stages)
    end = perf_counter()
    print(
        f"\nDone in {(end - set_up_end) / 60:.1f} minutes, and {(set_up_end - start) / 60:.1f} to set up.\n"
    )
    runs = {"shipped": SHIPPED, "yours": TRAINED}
    Console().print(outcome(runs))
    print(
        "More training tokens give longer accepted drafts; `eagle train --estimate` tells what a long run takes."
    )
    show_report(Path(REPORT))
    print(f"\nTry next:\n{NEXT}")


def promised_minutes(stages: Sequence[Stage]) -> int:
    """Return the minutes of all stages together, rounded up."""
    return -(-sum(stage.seconds for stage in stages) // 60)


def outcome(runs: dict[str, str]) -> Table:
    """Return a table of plain decoding and of each head, the one with the fewest training tokens first.

    Args:
        runs: The folder of each head and its results, by the words that the table has for the head.
    """
    rows = []
    for name, folder in runs.items():
        groups = {
            group.drafter: group for group in read_results(f"{folder}/results.jsonl").groups()
        }
        tokens = trained_tokens(Path(folder) / "head")
        rows.append((tokens, name, groups["eagle1"]))
    # more training below less
    rows.sort(key=lambda row: row[0])

    table = Table()
    table.add_column("head")
    # in two lines, so that the table fits a terminal of 80 columns
    titles = ("training\ntokens", "tokens per\npass (τ)", "speedup", "same\nanswers")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    # plain decoding is what heads are compared with
    plain = ["none", "", "1.00", "1.00 ×", ""]
    table.add_row(*plain)
    for tokens, name, group in rows:
        table.add_row(name, f"{tokens:,}", *figures(group), style="green")
    return table


def figures(group: Group) -> list[str]:
    """Return a head's acceptance length, speedup, and how many answers equal those of plain decoding.

    The speedup is that in CPU seconds where other processes had part of the machine: wall time would blame the head.
    """
    speedup = group.estimate(CPU_SPEED_UP if group.had_to_wait else SPEED_UP)
    return [
        format_number(group.estimate(ACCEPTANCE_LENGTH)),
        format_number(speedup, " ×"),
        f"{group.identical} of {len(group.answers)}",
    ]


def trained_tokens(head: Path) -> int:
    """Return how many supervised tokens a head has learned from."""
    tokens: int = json.loads((head / "provenance.json").read_text())["tokens"]
    return tokens
