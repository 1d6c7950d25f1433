"""Speed and memory of a training step against other code and the machine's limit: `python bench/train_speed.py`.

EAGLE-1 stands against the published step; with `--speculators PYTHON --modelopt PYTHON`, each the interpreter of an
environment that has that rival, EAGLE-3 stands against these. Each side is a process of its own on one thread, and all
take turns. The limit is the floating-point operations that a step cannot do without, at the peak of matrix products
measured beside them. Seconds are those of the CPU, or of the clock on an accelerator (`--device cuda --size
llama-3.1-8b`).
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import torch
from transformers import LlamaForCausalLM

from bench.machine import made_on, write_results
from bench.rivals.serve import DTYPES, Text, Work, clock
from bench.train_cost import Sizes, anchors, eagle1_flops, eagle3_flops
from bench.train_report import eagle1_table, eagle3_memory_table, eagle3_table
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle.log import script
from eagle.recipe import Recipe

ROOT = Path(__file__).parent.parent
EAGLE1_RESULTS, EAGLE3_RESULTS = (ROOT / f"docs/results/{name}_speed.json" for name in ("train", "unroll"))
# the heads of EAGLE-1, and conversations a batch: two where four would take the published step 10 GB
EAGLE1_HEADS: dict[str, list[tuple[Sizes, int]]] = {
    "small": [(Sizes(8192, 256, 704, 4, 4, 64), 4), (Sizes(131072, 512, 1408, 8, 8, 64), 2)],
    "llama-3.1-8b": [(Sizes(128256, 4096, 14336, 32, 8, 128), 4)],
}
EAGLE3_HEAD, EAGLE3_TARGET_VOCAB = Sizes(2048, 256, 688, 4, 2, 64), 8192
REPEAT_SECONDS = 1.0  # a turn is as many passes as take about so long


class Side:
    """A process that makes training steps whenever it is asked to."""

    def __init__(self, name: str, python: str, module: str, work: Work) -> None:
        self.name, self.stderr = name, TemporaryFile("w+")  # noqa: SIM115
        self.command = [python, "-m", f"bench.rivals.{module}", json.dumps(asdict(work))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(self.command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=self.stderr, text=True)
        self.trained = self._read()  # weights

    def _read(self) -> float:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.stderr.seek(0)
            raise ValueError(
                f"{self.name} stopped with code {self.process.wait()}, expected an answer: run "
                f"{shlex.join(self.command)}, which printed:\n{self.stderr.read()[-2000:]}"
            )
        return float(line)

    def ask(self, question: str) -> float:
        """The seconds of a "pass" over all batches, or the megabytes of a step for "memory"."""
        assert self.process.stdin
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return self._read()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.stderr.close()


def open_sides(work: Work, pythons: dict[str, str], stack: ExitStack) -> dict[str, Side]:
    """All sides of a comparison; every rival trains as many weights as ours."""
    ours = sys.executable
    if work.head and pythons:
        modules = {"speculators": (pythons["speculators"], "speculators_block_step", False)}
        modules |= {"ours": (ours, "eagle_step", False)}
        pairs = {"speculators": "ours"}
    elif work.head:
        modules = {"released": (ours, "level_step", False), "ours": (ours, "eagle_step", False)}
        pairs = {"released": "ours"}
    elif not work.steps:
        modules = {"published": (ours, "published_step", False), "ours": (ours, "eagle_step", False)}
        pairs = {"published": "ours"}
    else:
        modules = {"speculators": (pythons["speculators"], "speculators_step", False)}
        modules |= {"ours_frozen": (ours, "eagle_step", False)}
        modules |= {"modelopt": (pythons["modelopt"], "modelopt_step", True)}
        modules |= {"ours_trained": (ours, "eagle_step", True)}
        pairs = {"speculators": "ours_frozen", "modelopt": "ours_trained"}
    sides = {
        name: stack.enter_context(Side(name, python, module, replace(work, train_lm_head=train_lm_head)))
        for name, (python, module, train_lm_head) in modules.items()
    }
    for rival, ours in pairs.items():
        if sides[ours].trained != sides[rival].trained:
            raise ValueError(
                f"{ours} trains {sides[ours].trained:.0f} weights, expected {sides[rival].trained:.0f} as {rival} "
                f"does: make both train the same tensors in bench/rivals"
            )
    return sides


def peak(sizes: Sizes, dtype: str, device: str, tries: int = 2) -> float:
    """The most operations a second of several big products: a square one, and the step's own shapes."""
    best = 0.0
    for m, k, n in [(2048, 2048, 2048), (1024, sizes.width, sizes.mlp), (256, sizes.width, min(sizes.vocab, 32768))]:
        left, right = (torch.randn(*size, device=device, dtype=DTYPES[dtype]) for size in ((m, k), (n, k)))
        repeats = max(int(1e10 // (2 * m * k * n)), 1) if device == "cpu" else 100
        for _ in range(tries):
            start = clock(device)
            for _ in range(repeats):
                left @ right.T
            best = max(best, repeats * 2 * m * k * n / (clock(device) - start))
    return best


def measure(work: Work, sizes: Sizes, pythons: dict[str, str], rounds: int) -> dict[str, float]:
    """Of each side memory, and tokens per second by the median and at best; and the peak of matrix products."""
    row: dict[str, float] = {}
    with ExitStack() as stack:
        sides = open_sides(work, pythons, stack)
        repeats = {}
        for name, side in sides.items():
            repeats[name] = max(int(REPEAT_SECONDS / side.ask("pass")), 1)
            row[f"{name}_mb"] = side.ask("memory")
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        peaks = []
        for _ in range(rounds):
            peaks.append(peak(sizes, work.dtype, work.device))
            for name, side in sides.items():
                seconds[name] += [side.ask("pass") for _ in range(repeats[name])]
    tokens = sum(length for batch in work.batches for length, _ in batch)
    for name, passes in seconds.items():
        row |= {name: tokens / median(passes), f"{name}_best": tokens / min(passes)}
    return row | {"peak": max(peaks), "samples": min(map(len, seconds.values()))}


def rounded(figures: dict[str, float]) -> dict[str, float]:
    """Four digits of each."""
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def eagle1_rows(args: argparse.Namespace, texts: list[Text], target: str) -> Iterator[dict[str, Any]]:
    """Rows of the published step and ours, on real texts cut at each length and on a text without padding."""
    for dtype, (sizes, batch), length in product(args.dtypes, EAGLE1_HEADS[args.size], args.lengths or [256, 1024]):
        sizes.target_config(sizes.vocab).save_pretrained(target)
        short = [text for text in (cut(text, length) for text in texts) if text]
        used = short[: (4 if sizes.vocab < 100000 else 2) * batch]
        real = [used[i : i + batch] for i in range(0, len(used), batch)]
        for kind, batches in (("real", real), ("full", [[full(length)]])):
            work = Work(target, sizes.vocab, batches, dtype, device=args.device)
            row = measure(work, sizes, {}, args.rounds)
            flat = [text for texts in batches for text in texts]
            tokens = sum(text[0] for text in flat)
            supervised = sum(stop - start for _, spans in flat for start, stop in spans)
            places = sum(len(texts) * max(text[0] for text in texts) for texts in batches)
            row |= {"fill": tokens / places, "share": supervised / tokens}
            row["limit"] = tokens * row["peak"] / eagle1_flops(sizes, flat)
            row |= {"ratio": row["ours"] / row["published"], "of_limit": row["ours"] / row["limit"]}
            about = {"texts": kind, "dtype": dtype, "length": length, "vocab": sizes.vocab, "batch": len(batches[0])}
            yield {**about, **rounded(row)}


def eagle3_rows(args: argparse.Namespace, share: float, target: str) -> Iterator[dict[str, Any]]:
    """Rows of the rivals' steps and ours, on a text that is supervised everywhere and on one that is in part."""
    LlamaForCausalLM(EAGLE3_HEAD.target_config(EAGLE3_TARGET_VOCAB)).save_pretrained(target)
    pythons = {"speculators": args.speculators, "modelopt": args.modelopt}
    lengths = args.lengths or [256, 1024, 2048]
    for dtype, supervised, length, steps in product(args.dtypes, [1.0, share], lengths, args.steps):
        spans = answers(length, supervised)
        work = Work(target, EAGLE3_HEAD.vocab, [[(length, spans)]], dtype, steps)
        row = measure(work, EAGLE3_HEAD, pythons, args.rounds)
        mask = work.tokens_and_mask((length, spans))[1].tolist()
        for name, train_lm_head in (("frozen", False), ("trained", True)):
            flops = eagle3_flops(EAGLE3_HEAD, mask, steps, train_lm_head)
            row[f"limit_{name}"] = length * row["peak"] / flops
        row["share"] = len(anchors(mask, steps)) / length
        yield {"dtype": dtype, "length": length, "steps": steps, "all": supervised == 1, **rounded(row)}


# -- texts -------------------------------------------------------------------------------------------------------------


def read_texts(data: Path, tokenizer: Path) -> list[Text]:
    """How long real conversations are, and where the assistant speaks in them."""
    overrides = [f"target.path={tokenizer}", f"data.train={data}", "data.max_length=2048", "data.limit=1000"]
    recipe = Recipe.load(ROOT / "recipes/tiny/eagle1.yaml", overrides)
    texts = []
    for example in tokenize_data(recipe, load_tokenizer(recipe))[0]:
        edges = torch.nn.functional.pad(example.loss_mask.int(), (1, 1)).diff().nonzero()[:, 0].tolist()
        texts.append((len(example.tokens), [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]))
    return texts


def supervised_share(texts: list[Text], longest: int) -> dict[str, Any]:
    """The share of supervised tokens in texts that are cut."""
    tokens = sum(min(length, longest) for length, _ in texts)
    supervised = sum(max(min(stop, longest) - start, 0) for _, spans in texts for start, stop in spans)
    return {"share": round(supervised / tokens, 3), "conversations": len(texts), "length": longest}


def cut(text: Text, longest: int) -> Text | None:
    """A text's first tokens, without answers that no slot predicts; None where no answer is left."""
    length, spans = min(text[0], longest), [[max(start, 2), min(stop, longest)] for start, stop in text[1]]
    spans = [span for span in spans if span[0] < span[1]]
    return (length, spans) if spans else None


def full(length: int) -> Text:
    """A text with four answers that make three quarters of it."""
    quarter = length // 4
    return length, [[place + quarter // 4, place + quarter] for place in range(0, length, quarter)]


def answers(length: int, supervised: float) -> list[list[int]]:
    """A text with an answer in every 256 tokens, which ends with them and is this share of them; 1: all of it."""
    if supervised == 1:
        return [[0, length]]
    return [[end - round(256 * supervised), end] for end in range(256, length + 1, 256)]


def main(argv: list[str]) -> None:
    """Measure, print the tables and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculators", help="a Python that has speculators: compares EAGLE-3's step")
    parser.add_argument("--modelopt", help="a Python that has nvidia-modelopt: compares EAGLE-3's step")
    parser.add_argument("--device", default="cpu", help="of EAGLE-1's steps")
    parser.add_argument("--size", choices=EAGLE1_HEADS, default="small", help="of EAGLE-1's heads")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of a text")
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 7], help="of EAGLE-3's unroll")
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="conversations; without, the lengths and answers of the last result")
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer and a chat template, for --data")
    parser.add_argument("--out", type=Path, help="default: the file in docs/results")
    args = parser.parse_args(argv)
    if bool(args.speculators) != bool(args.modelopt) or bool(args.data) != bool(args.tokenizer):
        parser.error("expected both or neither of --speculators and --modelopt, and of --data and --tokenizer")
    torch.set_num_threads(1)
    eagle3 = bool(args.speculators)
    out = EAGLE3_RESULTS if eagle3 else EAGLE1_RESULTS
    texts = read_texts(args.data, args.tokenizer) if args.data else None
    if texts is None:
        described = json.loads(out.read_text())["texts"]
    else:
        usable = [text for text in texts if cut(text, 256)]
        described = supervised_share(texts, 1024) if eagle3 else Random(0).sample(usable, 16)
    about = made_on(rounds=args.rounds) if eagle3 else made_on(device=args.device, size=args.size)
    results: dict[str, Any] = {"machine": about, "texts": described, "rows": []}
    with TemporaryDirectory() as target:
        rows = eagle3_rows(args, described["share"], target) if eagle3 else eagle1_rows(args, described, target)
        for row in rows:
            results["rows"].append(row)
            print(row, file=sys.stderr, flush=True)
    print(*[eagle3_table(results), eagle3_memory_table(results)] if eagle3 else [eagle1_table(results)], sep="\n\n")
    write_results(args.out or out, results)


if __name__ == "__main__":
    script(main)
