"""Run every stage on a tiny model, in `runs/tiny` of the current folder: minutes on a CPU, and no downloads."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import torch

from eagle.device import choose_threads
from eagle.log import script
from eagle.shipped import RECIPES
from eval.figures import format_number
from eval.results import ACCEPTANCE_LENGTH, CPU_SPEED_UP, MODELLED_SPEED_UP, SPEED_UP, read_results

RECIPE = "recipes/tiny/eagle1.yaml"
TARGET, HEAD = "runs/tiny/target", "runs/tiny/eagle1/head"
MASKS, VOCABULARY = "runs/tiny/mask.html", "runs/tiny/draft_vocab.safetensors"
RESULTS, REPORT = "runs/tiny/eagle1/results.jsonl", "runs/tiny/report.html"
CERTIFICATE = "runs/tiny/eagle1/lossless.json"

TO_TRAIN = {
    "A small chat target, trained on the documentation that is installed here": ["-m", "recipes.tiny.make_target"],
    "Its own answers to the questions of 300 conversations": ["-m", "data_prep.regenerate", RECIPE],
    "What of them is learned": ["-m", "data_prep.inspect_mask", RECIPE, "--count", "1", "--html", MASKS],
    "The tokens that it says most": ["-m", "data_prep.draft_vocab", RECIPE, "--size", "512", "--out", VOCABULARY],
    "Its hidden features on these conversations": ["-m", "data_prep.extract", RECIPE],
}
STAGES = {
    **TO_TRAIN,
    "An EAGLE-1 head": ["-m", "accelerate.commands.launch", str(RECIPES / "train_eagle.py"), RECIPE],
    "Decoding with it, beside plain decoding": ["-m", "eval.measure", RECIPE, "eval.costs=true"],
    "Its output, beside the untouched model's own": ["-m", "eval.lossless", RECIPE],
    "All of that as a page": ["-m", "eval.report", RESULTS, "--html", REPORT],
    "The head in vLLM's layout": ["-m", "eagle", "export", HEAD, "--target", TARGET, "--to", "vllm", "runs/tiny/vllm"],
}


def run(stages: dict[str, list[str]]) -> None:
    """Run the stages in order, all on the number of threads that is fastest now; stop at the first that fails."""
    left, right = torch.ones(512, 256), torch.ones(256, 1024)  # as large as the matrices that are trained
    threads = choose_threads(lambda: [left @ right for _ in range(8)])
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    for number, (title, command) in enumerate(stages.items(), start=1):
        print(f"\n[{number}/{len(stages)}] {title}", flush=True)
        process = subprocess.run([sys.executable, *command], env=env)
        if process.returncode:
            sys.exit(f"stage {number} failed: {' '.join(command)}")


def outcome(results: Path, certificate: Path) -> str:
    """Acceptance length and speed-up at each temperature, and whether the output is unchanged."""
    lines = []
    for group in read_results(results).groups():
        if group.drafter in ("none", "ngram"):
            continue
        metrics = {"by the clock": SPEED_UP}
        if group.had_to_wait:
            metrics["in CPU seconds"] = CPU_SPEED_UP
        if group.is_modelled:
            metrics = {"in modelled time, which other work leaves alone": MODELLED_SPEED_UP, **metrics}
        speeds = (f"{format_number(group.estimate(metric))} {name}" for name, metric in metrics.items())
        lines.append(
            f"{group.drafter} at T = {group.temperature:g}: acceptance length τ "
            f"{group.estimate(ACCEPTANCE_LENGTH).value:.2f}; speed of plain decoding × {', × '.join(speeds)}"
        )
    verdicts = json.loads(certificate.read_text())["verdicts"]
    same, answers = (sum(verdict[key] for verdict in verdicts) for key in ("identical", "answers"))
    lossless = "yes" if all(verdict["lossless"] for verdict in verdicts) else "NO"
    return "\n".join([*lines, f"lossless: {lossless}, {same} of {answers} answers are the untouched model's own"])


def main(argv: list[str]) -> None:
    """Run all stages, and print the time and the outcome."""
    argparse.ArgumentParser(prog="eagle demo", description=__doc__).parse_args(argv)
    start = perf_counter()
    run(STAGES)
    print(f"\nDone in {perf_counter() - start:.0f} s. Everything is in runs/tiny.\n")
    print(outcome(Path(RESULTS), Path(CERTIFICATE)))
    print(f"report: {REPORT}")


if __name__ == "__main__":
    script(main)
