"""Speed and memory of an EAGLE-3 training step beside those of two rivals and the machine's limit.

`python bench/unroll_speed.py --speculators PYTHON --modelopt PYTHON`, each the interpreter of an environment that has
that rival. In one run on one thread, in CPU seconds: each side is a process of its own, all take turns, and the limit
is the floating-point operations that a step cannot do without at the peak of matrix products, measured beside them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.machine import made_on
from bench.rivals.serve import Work
from bench.train_speed import DTYPES, Case, Sizes, peak
from bench.unroll_cost import Shape, anchors, necessary
from bench.unroll_report import memory_table, plot, table
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle.log import script
from eagle.recipe import Recipe

ROOT = Path(__file__).parent.parent
TARGET = LlamaConfig(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=2048,
)
HEAD = Shape(2048, 256, 688, 4, 2, 64)
# each rival, and ours training the same tensors
SIDES = {
    "speculators": ("speculators_step", False),
    "ours_frozen": ("eagle_step", False),
    "modelopt": ("modelopt_step", True),
    "ours_trained": ("eagle_step", True),
}
TURN = 1.0  # seconds, at least a step


class Side:
    """A process that makes a step whenever it is asked to."""

    def __init__(self, name: str, python: str, work: Work) -> None:
        self.name, self.said = name, TemporaryFile("w+")  # noqa: SIM115
        module, head_trained = SIDES[name]
        self.command = [python, "-m", f"bench.rivals.{module}"]
        self.command.append(json.dumps(vars(replace(work, head_trained=head_trained))))
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(self.command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=self.said, text=True)
        self.trained = self._answer()  # weights

    def _answer(self) -> float:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.said.seek(0)
            raise ValueError(
                f"{self.name} stopped with code {self.process.wait()}, expected an answer: run "
                f"{shlex.join(self.command)}, for it said:\n{self.said.read()[-2000:]}"
            )
        return float(line)

    def ask(self, what: str) -> float:
        """The CPU seconds of a "step", or its megabytes where "memory" is asked for."""
        assert self.process.stdin
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self._answer()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.said.close()


def measured(work: Work, pythons: dict[str, str], rounds: int) -> dict[str, Any]:
    """One row: memory of each side in its second step, then tokens per CPU second of all by turns, and of the limit."""
    row: dict[str, Any] = {}
    with ExitStack() as stack:
        sides = {name: stack.enter_context(Side(name, pythons[SIDES[name][0]], work)) for name in SIDES}
        for ours, rival in (("ours_frozen", "speculators"), ("ours_trained", "modelopt")):
            if sides[ours].trained != sides[rival].trained:
                raise ValueError(
                    f"{ours} trains {sides[ours].trained:.0f} weights, expected {sides[rival].trained:.0f} as {rival} "
                    f"does: make both train the same tensors in bench/rivals"
                )
        turns = {}
        for name, side in sides.items():
            turns[name] = max(int(TURN / side.ask("step")), 1)
            row[f"{name}_mb"] = side.ask("memory")
        case = Case(Sizes(HEAD.vocab, *HEAD[1:5]), (), work.dtype, "cpu")
        times: dict[str, list[float]] = {name: [] for name in SIDES}
        peaks = []
        for _ in range(rounds):
            peaks.append(peak(case))
            for name, side in sides.items():
                times[name] += [side.ask("step") for _ in range(turns[name])]
    supervised = work.mask().tolist()
    for name, found in times.items():
        row |= {name: work.length / median(found), f"{name}_best": work.length / min(found)}
    for name, head_trained in (("frozen", False), ("trained", True)):
        row[f"limit_{name}"] = work.length * max(peaks) / necessary(HEAD, supervised, work.steps, head_trained)
    slots = len(anchors(supervised, work.steps))
    row |= {"share": slots / work.length, "peak": max(peaks), "samples": min(map(len, times.values()))}
    return {key: float(f"{value:.4g}") for key, value in row.items()}


def share(data: Path, tokenizer: Path, length: int) -> dict[str, Any]:
    """The share of supervised tokens in conversations that are cut at `length`."""
    overrides = [f"target.path={tokenizer}", f"data.train={data}", f"data.max_length={length}", "data.limit=1000"]
    recipe = Recipe.load(ROOT / "recipes/tiny/eagle3.yaml", overrides)
    masks = [example.loss_mask for example in tokenize_data(recipe, load_tokenizer(recipe))[0]]
    return {"share": round(float(torch.cat(masks).float().mean()), 3), "conversations": len(masks), "length": length}


def answers(length: int, supervised: float) -> list[list[int]]:
    """A text with an answer in every 256 tokens, which ends with them and is this share of them; 1: all of it."""
    if supervised == 1:
        return [[0, length]]
    return [[end - round(256 * supervised), end] for end in range(256, length + 1, 256)]


def cells(chosen: list[tuple[int, int]], dtypes: list[str], shares: list[float]) -> list[tuple[str, int, int, float]]:
    """What is measured; steps other than 3 and 7 in fp32 and with all slots supervised alone."""
    return [
        (dtype, length, steps, supervised)
        for dtype in dtypes
        for supervised in shares
        for length, steps in chosen
        if steps in (3, 7) or (dtype, supervised) == ("fp32", 1.0)
    ]


def _cell(text: str) -> tuple[int, int]:
    length, steps = text.split(",")
    return int(length), int(steps)


ALL = ["256,3", "256,7", "1024,1", "1024,3", "1024,5", "1024,7", "2048,3", "2048,7"]


def main(argv: list[str]) -> None:
    """Measure, print the tables, write the result file and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speculators", required=True, help="a Python that has speculators")
    parser.add_argument("--modelopt", required=True, help="a Python that has nvidia-modelopt")
    parser.add_argument("--cells", type=_cell, nargs="+", default=[_cell(text) for text in ALL], metavar="T,k")
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path, help="conversations; without, the share of the last result")
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer and a chat template, for --data")
    parser.add_argument("--out", type=Path, default=Path("docs/results/unroll_speed.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/images/unroll_speed.svg"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    last = ROOT / "docs/results/unroll_speed.json"
    texts = share(args.data, args.tokenizer, 1024) if args.data else json.loads(last.read_text())["texts"]
    pythons = {"speculators_step": args.speculators, "modelopt_step": args.modelopt, "eagle_step": sys.executable}
    results: dict[str, Any] = {"machine": made_on(rounds=args.rounds), "texts": texts, "rows": []}
    with TemporaryDirectory() as target:
        LlamaForCausalLM(TARGET).save_pretrained(target)
        for dtype, length, steps, supervised in cells(args.cells, args.dtypes, [1.0, texts["share"]]):
            work = Work(target, HEAD.vocab, length, answers(length, supervised), steps, dtype, False)
            row = {"dtype": dtype, "length": length, "steps": steps, "all": supervised == 1}
            results["rows"].append({**row, **measured(work, pythons, args.rounds)})
            print(results["rows"][-1], file=sys.stderr, flush=True)
    print(table(results), memory_table(results), sep="\n\n")
    args.out.write_text(json.dumps(results) + "\n")
    args.picture.write_text(plot(results))


if __name__ == "__main__":
    script(main)
