"""The whole path on the embedded default, stage by stage, as a user would run it: `make demo`."""

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
from eval.page_parts import is_modelled, modelled, price
from eval.results import beside, read, speed_up, taken
from eval.statistics import Estimate

RECIPE = str(Path(__file__).with_name("eagle1.yaml"))
HERE = Path(__file__).parent
ROOT = HERE.parent.parent  # which the recipe's paths start from
TARGET, HEAD = "runs/tiny/target", "runs/tiny/eagle1/head"
MASKS, VOCABULARY = "runs/tiny/mask.html", "runs/tiny/draft_vocab.safetensors"
RESULTS, REPORT = "runs/tiny/eagle1/results.jsonl", "runs/tiny/report.html"
CERTIFICATE = "runs/tiny/eagle1/lossless.json"

TO_TRAIN = {
    "A small chat target, trained on the documentation that is installed here": [str(HERE / "make_target.py")],
    "Its own answers to the questions of 300 conversations": ["-m", "data_prep.regenerate", RECIPE],
    "What of them is learned": ["-m", "data_prep.inspect_mask", RECIPE, "--count", "1", "--html", MASKS],
    "The tokens that it says most": ["-m", "data_prep.draft_vocab", RECIPE, "--size", "512", "--out", VOCABULARY],
    "Its hidden features on these conversations": ["-m", "data_prep.extract", RECIPE],
}
STAGES = {
    **TO_TRAIN,
    "An EAGLE-1 head": ["-m", "accelerate.commands.launch", str(HERE.parent / "train_eagle.py"), RECIPE],
    "Decoding with it, beside plain decoding": ["-m", "eval.measure", RECIPE, "eval.costs=true"],
    "Its output, beside the untouched model's own": ["-m", "eval.lossless", RECIPE],
    "All of that as a page": ["-m", "eval.report", RESULTS, "--html", REPORT],
    "The head in vLLM's layout": ["-m", "eagle", "export", HEAD, "--target", TARGET, "--to", "vllm", "runs/tiny/vllm"],
}


def run(stages: dict[str, list[str]]) -> None:
    """Run the stages in order, all on the number of threads that is fastest now; the first that fails ends it."""
    left, right = torch.ones(512, 256), torch.ones(256, 1024)  # as large as what is trained
    threads = choose_threads(lambda: [left @ right for _ in range(8)])
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    print(f"threads: {threads}, by timing; OMP_NUM_THREADS sets the most that are tried")
    for number, (what, command) in enumerate(stages.items(), start=1):
        print(f"\n[{number}/{len(stages)}] {what}", flush=True)
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env)
        if done.returncode:
            sys.exit(f"stage {number} failed: {' '.join(command)}")


def outcome(results: Path, certificate: Path) -> str:
    """What drafting brought at each temperature, and whether it changed anything."""
    run, lines = read(results), []
    for group in run.groups():
        if group.drafter in ("none", "ngram"):
            continue
        price(run, group)
        length, measured = group.estimate(taken), group.estimate(beside, speed_up)
        speeds = [f"× {_reach(measured)} by the clock"]
        if is_modelled(group):
            speeds.insert(
                0, f"× {_reach(group.estimate(modelled, speed_up))} in modelled time, which other work leaves alone"
            )
        lines.append(
            f"{group.drafter} at T = {group.temperature:g}: acceptance length τ {length.value:.2f}; "
            f"speed of plain decoding {', '.join(speeds)}"
        )
    verdicts = json.loads(certificate.read_text())["verdicts"]
    same, answers = (sum(verdict[key] for verdict in verdicts) for key in ("identical", "answers"))
    lossless = "yes" if all(verdict["lossless"] for verdict in verdicts) else "NO"
    return "\n".join([*lines, f"lossless: {lossless}, {same} of {answers} answers are the untouched model's own"])


def _reach(speed: Estimate) -> str:
    return f"{speed.value:.2f} [{speed.low:.2f}, {speed.high:.2f}]"


def main() -> None:
    """All stages, timed."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    begun = perf_counter()
    run(STAGES)
    print(f"\nDone in {perf_counter() - begun:.0f} s. Everything is in runs/tiny.\n")
    print(outcome(ROOT / RESULTS, ROOT / CERTIFICATE))
    print(f"report: {REPORT}")


if __name__ == "__main__":
    script(lambda _: main())
