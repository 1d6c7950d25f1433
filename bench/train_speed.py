"""Speed and memory of a training step against other code and the machine's limit: `python bench/train_speed.py STUDY`.

`eagle1` stands against the published step, `levels` (heads that guess several tokens at once) against plain renderings
of the released ones; `eagle3` against speculators and modelopt and `blocks` against speculators, each run by the
interpreter of an environment that has it (`--speculators PYTHON --modelopt PYTHON`). Each side is a process of its own
on one thread, and all take turns. The limit is the floating-point operations that a step cannot do without, at the peak
of matrix products measured beside them. Seconds are those of the CPU, or of the clock on an accelerator (`--device cuda
--size llama-3.1-8b`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers import LlamaForCausalLM

from bench.machine import made_on, write_results
from bench.rivals.serve import DTYPES, Text, Work
from bench.sides import ROOT, measure, rounded
from bench.train_cost import Sizes, anchors, block_flops, eagle1_flops, eagle3_flops
from bench.train_report import block_table, eagle1_table, eagle3_memory_table, eagle3_table, level_table
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle.log import script
from eagle.recipe import Recipe
from tests.released_levels import PLAIN

Rows = Iterator[dict[str, Any]]
# the heads of EAGLE-1, and conversations a batch: two where four would take the published step 10 GB
EAGLE1_HEADS: dict[str, list[tuple[Sizes, int]]] = {
    "small": [(Sizes(8192, 256, 704, 4, 4, 64), 4), (Sizes(131072, 512, 1408, 8, 8, 64), 2)],
    "llama-3.1-8b": [(Sizes(128256, 4096, 14336, 32, 8, 128), 4)],
}
EAGLE3_HEAD, EAGLE3_TARGET_VOCAB = Sizes(2048, 256, 688, 4, 2, 64), 8192
# heads of three levels, each as its release trains it
LEVELS: dict[str, dict[str, Any]] = {
    "medusa": {"levels": 3, "layers": 1, "loss": "tokens"},
    "hydra": {"levels": 3, "layers": 4, "prefix": True, "dropout": 0.2, "loss": "cross_entropy"},
    "mlp_speculator": {"levels": 3, "loss": "tokens"},
    "blockwise": {"levels": 3, "drawn": True, "loss": "tokens"},
    "falcon": {"k": 2, "dropout": 0.1},
}
# conversations a batch: one where two would take a plain step 20 GB
LEVEL_SIZES = {8192: (Sizes(8192, 256, 704, 4, 4, 64), 4), 131072: (Sizes(131072, 512, 1408, 8, 8, 64), 1)}
LEVEL_LENGTH = 1024
BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": {"blocks": 5, "taps": [1, 2, 3, 5, 6], "slots": 8, "anchors": 256, "loss": "cross_entropy"},
    "dspark": {"blocks": 5, "taps": [1, 2, 3, 5, 6], "slots": 7, "anchors": 256},
    "peagle": {"blocks": 4, "taps": [2, 4, 5], "depths": 8, "keep": 0.7, "train_lm_head": False},
}
BLOCK_SIZES = Sizes(8192, 512, 1408, 8, 4, 64)


def eagle1_rows(args: argparse.Namespace, texts: list[Text], target: str) -> Rows:
    """Rows of the published step and ours, on real texts cut at each length and on a text without padding."""
    for dtype, (sizes, batch), length in product(args.dtypes, EAGLE1_HEADS[args.size], args.lengths or [256, 1024]):
        sizes.target_config(sizes.vocab).save_pretrained(target)
        used = cut_all(texts, length)[: (4 if sizes.vocab < 100000 else 2) * batch]
        real = [used[i : i + batch] for i in range(0, len(used), batch)]
        for kind, batches in (("real", real), ("full", [[full(length)]])):
            work = Work(target, sizes.vocab, batches, dtype, device=args.device)
            row = measure("eagle1", work, sizes, {}, args.rounds)
            flat = [text for texts in batches for text in texts]
            row |= describe_batches(batches)
            row["limit"] = sum(length for length, _ in flat) * row["peak"] / eagle1_flops(sizes, flat)
            row |= {"ratio": row["ours"] / row["published"], "of_limit": row["ours"] / row["limit"]}
            about = {"texts": kind, "dtype": dtype, "length": length, "vocab": sizes.vocab, "batch": len(batches[0])}
            yield {**about, **rounded(row)}


def eagle3_rows(args: argparse.Namespace, texts: dict[str, Any], target: str) -> Rows:
    """Rows of the rivals' steps and ours, on a text that is supervised everywhere and on one that is in part."""
    LlamaForCausalLM(EAGLE3_HEAD.target_config(EAGLE3_TARGET_VOCAB)).save_pretrained(target)
    pythons = {"speculators": args.speculators, "modelopt": args.modelopt}
    lengths = args.lengths or [256, 1024, 2048]
    for dtype, supervised, length, steps in product(args.dtypes, [1.0, texts["share"]], lengths, args.steps):
        text = (length, answers(length, supervised))
        work = Work(target, EAGLE3_HEAD.vocab, [[text]], dtype, steps)
        row = measure("eagle3", work, EAGLE3_HEAD, pythons, args.rounds)
        mask = work.tokens_and_mask(text)[1].tolist()
        for name, train_lm_head in (("frozen", False), ("trained", True)):
            flops = eagle3_flops(EAGLE3_HEAD, mask, steps, train_lm_head)
            row[f"limit_{name}"] = length * row["peak"] / flops
        row["share"] = len(anchors(mask, steps)) / length
        yield {"dtype": dtype, "length": length, "steps": steps, "all": supervised == 1, **rounded(row)}


def level_rows(args: argparse.Namespace, texts: list[Text], target: str) -> Rows:
    """Rows of the released step and ours; tokens per second are supervised ones."""
    methods, vocabs = args.methods or LEVELS, args.vocabs or LEVEL_SIZES
    for vocab, dtype, method, kind in product(vocabs, args.dtypes, methods, args.texts):
        sizes, batch = LEVEL_SIZES[vocab]
        sizes.target_config(vocab).save_pretrained(target)
        batches = [[full(LEVEL_LENGTH)]] if kind == "full" else [cut_all(texts, LEVEL_LENGTH)[:batch]]
        work = Work(target, vocab, batches, dtype, head={"kind": method, **LEVELS[method]})
        row = measure("levels", work, sizes, {}, args.rounds) | describe_batches(batches)
        row |= {name: row[name] * row["share"] for name in ("released", "ours", "released_best", "ours_best")}
        with torch.device("meta"):
            head = PLAIN[method](sizes.target_config(vocab), LEVELS[method])
        row["gradients_mb"] = 4e-6 * sum(weight.numel() for weight in head.parameters())
        row["ratio"] = row["ours"] / row["released"]
        about = {"method": method, "dtype": dtype, "vocab": vocab, "texts": kind, "batch": len(batches[0])}
        yield {**about, **rounded(row)}


def block_rows(args: argparse.Namespace, texts: dict[str, Any], target: str) -> Rows:
    """Rows of both steps, on a text that is supervised everywhere and on one that is in part.

    Both draw as many anchors or elements of a text, compare the same probs and train as many weights.
    """
    LlamaForCausalLM(BLOCK_SIZES.target_config(BLOCK_SIZES.vocab)).save_pretrained(target)
    methods, lengths = args.methods or BLOCKS, args.lengths or [1024, 2048]
    for method, length, dtype, supervised in product(methods, lengths, args.dtypes, [1.0, texts["share"]]):
        text = (length, answers(length, supervised))
        head = {"kind": method, **BLOCKS[method]}
        work = Work(target, BLOCK_SIZES.vocab, [[text]], dtype, head=head)
        row = measure("blocks", work, BLOCK_SIZES, {"speculators": args.speculators}, args.rounds)
        mask = work.tokens_and_mask(text)[1].tolist()
        row["limit"] = length * row["peak"] / block_flops(BLOCK_SIZES, mask, head)
        row |= {"ratio": row["ours"] / row["speculators"], "of_limit": row["ours"] / row["limit"]}
        row |= {"memory": row["ours_mb"] / row["speculators_mb"], "share": sum(mask) / length}
        yield {"method": method, "dtype": dtype, "length": length, "all": supervised == 1, **rounded(row)}


class Study(NamedTuple):
    """What is compared, and where its result stands."""

    rows: Callable[[argparse.Namespace, Any, str], Rows]
    tables: tuple[Callable[[dict[str, Any]], str], ...]
    file: str  # in docs/results
    texts: str  # the file there that holds the lengths of texts
    needs: tuple[str, ...]  # options with the Python of a rival
    about: Callable[[argparse.Namespace], dict[str, Any]]  # what the result file tells beside the machine


STUDIES = {
    "eagle1": Study(
        eagle1_rows,
        (eagle1_table,),
        *("train_speed.json", "train_speed.json"),
        (),
        lambda args: {"device": args.device, "size": args.size},
    ),
    "eagle3": Study(
        eagle3_rows,
        (eagle3_table, eagle3_memory_table),
        *("unroll_speed.json", "unroll_speed.json"),
        ("speculators", "modelopt"),
        lambda args: {"rounds": args.rounds},
    ),
    "levels": Study(
        level_rows,
        (level_table,),
        *("level_speed.json", "train_speed.json"),
        (),
        lambda args: {"rounds": args.rounds, "length": LEVEL_LENGTH},
    ),
    "blocks": Study(
        block_rows,
        (block_table,),
        *("block_speed.json", "unroll_speed.json"),
        ("speculators",),
        lambda args: {"rounds": args.rounds, **BLOCK_SIZES._asdict()},
    ),
}


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


def describe_batches(batches: list[list[Text]]) -> dict[str, float]:
    """The share of supervised tokens, and that of padded places which hold a token."""
    flat = [text for texts in batches for text in texts]
    tokens = sum(length for length, _ in flat)
    supervised = sum(stop - start for _, spans in flat for start, stop in spans)
    places = sum(len(texts) * max(length for length, _ in texts) for texts in batches)
    return {"fill": tokens / places, "share": supervised / tokens}


def cut(text: Text, longest: int) -> Text | None:
    """A text's first tokens, without answers that no slot predicts; None where no answer is left."""
    length, spans = min(text[0], longest), [[max(start, 2), min(stop, longest)] for start, stop in text[1]]
    spans = [span for span in spans if span[0] < span[1]]
    return (length, spans) if spans else None


def cut_all(texts: list[Text], longest: int) -> list[Text]:
    """The first tokens of all texts that have an answer there."""
    return [text for text in (cut(text, longest) for text in texts) if text]


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
    parser.add_argument("study", choices=STUDIES, nargs="?", default="eagle1")
    parser.add_argument("--speculators", help="a Python that has speculators")
    parser.add_argument("--modelopt", help="a Python that has nvidia-modelopt")
    parser.add_argument("--device", default="cpu", help="of EAGLE-1's steps")
    parser.add_argument("--size", choices=EAGLE1_HEADS, default="small", help="of EAGLE-1's heads")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of a text")
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 7], help="of EAGLE-3's unroll")
    parser.add_argument("--methods", choices=[*LEVELS, *BLOCKS], nargs="+", help="of levels or blocks")
    parser.add_argument("--vocabs", type=int, choices=LEVEL_SIZES, nargs="+", help="of levels")
    parser.add_argument("--texts", choices=["real", "full"], nargs="+", default=["real", "full"], help="of levels")
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="conversations; without, the lengths and answers of the last result")
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer and a chat template, for --data")
    parser.add_argument("--out", type=Path, help="default: the file in docs/results")
    args = parser.parse_args(argv)
    study = STUDIES[args.study]
    if tuple(name for name in ("speculators", "modelopt") if getattr(args, name)) != study.needs:
        needed = " and ".join(f"--{name} PYTHON" for name in study.needs) or "neither --speculators nor --modelopt"
        parser.error(f"{args.study} takes {needed}")
    if bool(args.data) != bool(args.tokenizer):
        parser.error("expected both or neither of --data and --tokenizer")
    torch.set_num_threads(1)
    texts = (
        describe_texts(args) if args.data else json.loads((ROOT / "docs/results" / study.texts).read_text())["texts"]
    )
    results: dict[str, Any] = {"machine": made_on(**study.about(args)), "texts": texts, "rows": []}
    with TemporaryDirectory() as target:
        for row in study.rows(args, texts, target):
            results["rows"].append(row)
            print(row, file=sys.stderr, flush=True)
    print(*[table(results) for table in study.tables], sep="\n\n")
    write_results(args.out or ROOT / "docs/results" / study.file, results)


def describe_texts(args: argparse.Namespace) -> Any:
    """What a study keeps of real conversations: the share of supervised tokens, or 16 texts."""
    texts = [text for text in read_texts(args.data, args.tokenizer) if cut(text, 256)]
    return supervised_share(texts, 1024) if STUDIES[args.study].needs else Random(0).sample(texts, 16)


if __name__ == "__main__":
    script(main)
