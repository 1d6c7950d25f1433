"""Train the small chat model of the demo on generated conversations: a minute on a CPU, no network."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from eagle.device import fastest_dtype
from eagle.log import script
from recipes.tiny import make_target as tiny
from recipes.tiny import stories
from recipes.tiny.train_target import train

STEPS, CONVERSATIONS, HELD_OUT = 150, 3000, 24


def make_demo_target(out: str | Path = "runs/demo", steps: int = STEPS) -> dict[str, Any]:
    """Write `target/`, `data/` and `target_report.json` to `out`, unless they are there; returns the report."""
    code = Path(str(stories.__file__)).read_bytes()
    settings = {"steps": steps, "stories": hashlib.sha256(code).hexdigest()[:16], "made_with": tiny.list_versions()}
    return tiny.make_once(Path(out), settings, lambda folder, begun: build(folder, begun, steps))


def build(folder: Path, begun: Path, steps: int) -> dict[str, Any]:
    """Make conversations, tokenizer and model in `folder`; returns the figures of the report."""
    asked: dict[str, tiny.Record] = {}
    for record in islice(stories.make_conversations(seed=1), HELD_OUT):  # a question that is drawn twice counts once
        asked[record["conversations"][0]["value"]] = record
    held_out = list(asked.values())
    training = list(islice(stories.make_conversations(seed=0, avoid=asked), CONVERSATIONS))
    (folder / "data").mkdir()
    for split, records in (("train", training), ("heldout", held_out)):
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / "data" / f"{split}.jsonl").write_text("".join(lines))
    tokenizer = tiny.train_tokenizer(training, folder / "target")
    random.Random(0).shuffle(training)
    rows, held_out_rows = (tiny.pack_conversations(records, tokenizer) for records in (training, held_out))
    torch.manual_seed(0)
    model = tiny.new_model(tokenizer)
    train(model, rows, steps, seed=0, bf16=fastest_dtype("cpu") == torch.bfloat16, begun=begun)
    model.save_pretrained(folder / "target")
    return {
        "perplexity": tiny.perplexity(model, held_out_rows),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "conversations": {"train": len(training), "heldout": len(held_out)},
    }


def main(argv: list[str]) -> None:
    """Make the target and print its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/demo")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args(argv)
    report = make_demo_target(args.out, args.steps)
    conversations = report["conversations"]["train"]
    print(f"{report['parameters'] / 1e6:.1f} M parameters, trained on {conversations:,} conversations")
    print(f"held-out perplexity {report['perplexity']:.2f}")


if __name__ == "__main__":
    script(main)
