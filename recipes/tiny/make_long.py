"""Go on with the tiny target on conversations joined to 8,192 tokens: minutes, no network."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import AutoTokenizer, LlamaForCausalLM

from data_prep.chats.turns import ROLES
from eagle.device import fastest_dtype
from eagle.log import script
from recipes.tiny.make_target import make_once, perplexity, write_records
from recipes.tiny.train_target import update

LONG = 8192
SHORT = 512
STEPS = 16
LR = 5e-4
CONTEXTS = (512, 2048, 8000)  # tokens of the prompts
MARK = "<|{}|>\n{}<|end|>\n"  # a turn, as the target's chat template prints it
Turn = dict[str, str]


def read_turns(path: Path) -> list[list[Turn]]:
    """Return the turns of each conversation of a file."""
    return [
        json.loads(line)["conversations"] for line in path.read_text(encoding="utf-8").splitlines()
    ]


def join_turns(
    conversations: list[list[Turn]], tokenizer: Any, length: int
) -> Iterator[list[Turn]]:
    """Concatenate conversations up to `length` tokens; longer ones are left out."""
    joined: list[Turn] = []
    total = 1  # the token at the beginning
    for turns in conversations:
        count = len(tokenizer(render_turns(turns), add_special_tokens=False)["input_ids"])
        if joined and total + count > length:
            yield joined
            joined = []
            total = 1
        if count < length:
            joined = [*joined, *turns]
            total += count
    if joined:
        yield joined


def render_turns(turns: list[Turn]) -> str:
    """Return turns as the target's chat template prints them."""
    return "".join(MARK.format(ROLES[turn["from"]], turn["value"]) for turn in turns)


def write_prompts(texts: list[list[Turn]], tokenizer: Any, folder: Path) -> None:
    """Write the last question of each sequence after about `CONTEXTS` tokens of context, as one user message."""
    for context in CONTEXTS:
        records = []
        for number, turns in enumerate(texts):
            last = max(i for i, turn in enumerate(turns) if turn["from"] == "human")
            first = last
            # A question and its answer at a time, until the context is long enough.
            while (
                first > 1
                and len(tokenizer(render_turns(turns[first - 2 : last + 1]))["input_ids"]) < context
            ):
                first -= 2
            # The chat template will print the marks around a message again.
            text = (
                render_turns(turns[first : last + 1])
                .removeprefix("<|user|>\n")
                .removesuffix("<|end|>\n")
            )
            turn = {"from": "human", "value": text}
            records.append({"id": f"{context}-{number}", "conversations": [turn]})
        write_records(folder / f"prompts-{context}.jsonl", records)


def train(model: Any, rows: list[torch.Tensor], steps: int, bf16: bool) -> None:
    """Train in place on every token with a learning rate that falls linearly to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    for step in tqdm(range(steps), desc="training", unit="step"):
        row = rows[step % len(rows)][None]
        for group in optimizer.param_groups:
            group["lr"] = LR * (steps - step) / steps
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(input_ids=row, use_cache=False).logits
        loss = cross_entropy(logits[0, :-1].float(), row[0, 1:])
        update(model, loss, [optimizer])


def make_long(start: Path, out: Path, steps: int) -> dict[str, Any]:
    """Write `target/`, `data/` and `target_report.json` to `out`, unless they are there; return the report.

    It has the perplexity of a long held-out sequence before and after.
    """
    begun_with = json.loads((start / "target_report.json").read_text())["settings"]
    settings = {"start": begun_with, "steps": steps}
    return make_once(out, settings, lambda folder, _: build(start, folder, steps))


def build(start: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Make data and model in `folder`; return the figures of the report."""
    tokenizer = AutoTokenizer.from_pretrained(start / "target")
    model = LlamaForCausalLM.from_pretrained(
        start / "target", dtype=torch.float32, attn_implementation="sdpa"
    )
    conversations = read_turns(start / "data" / "train.jsonl")
    # Some tokens stay free for an answer.
    train_turns = join_turns(conversations, tokenizer, LONG - 64)
    heldout_turns = list(
        join_turns(read_turns(start / "data" / "heldout.jsonl"), tokenizer, LONG - 64)
    )
    rows = [encode_turns(turns, tokenizer) for turns in train_turns]
    heldout_row = encode_turns(heldout_turns[0], tokenizer)[None]
    model.config.max_position_embeddings = LONG
    before = perplexity(model, heldout_row)
    train(model, rows[::-1], steps, fastest_dtype("cpu") == torch.bfloat16)
    after = perplexity(model.eval(), heldout_row)

    shutil.copytree(start / "target", folder / "target")
    model.save_pretrained(folder / "target")
    raise_max_length(folder / "target" / "tokenizer_config.json")
    (folder / "data").mkdir()
    for length in (SHORT, LONG):
        joined = join_turns(conversations, tokenizer, length - 64)
        records = [{"id": str(i), "conversations": turns} for i, turns in enumerate(joined)]
        write_records(folder / "data" / f"train-{length}.jsonl", records)
    long_enough = [turns for turns in heldout_turns if len(turns) > 60]
    write_prompts(long_enough, tokenizer, folder / "data")
    return {"perplexity_before": before, "perplexity": after}


def raise_max_length(path: Path) -> None:
    """Write the new maximum length to a tokenizer's settings."""
    settings = json.loads(path.read_text())
    settings["model_max_length"] = LONG
    path.write_text(json.dumps(settings, indent=2) + "\n")


def encode_turns(turns: list[Turn], tokenizer: Any) -> torch.Tensor:
    """Return the tokens of turns, [T]."""
    return tokenizer(render_turns(turns), return_tensors="pt")["input_ids"][0]


def main(argv: list[str]) -> None:
    """Make the target and print the perplexities."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--start", type=Path, default=Path("runs/tiny"), help="the folder of the tiny target"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/tiny-long"), help="the folder to write"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    args = parser.parse_args(argv)
    report = make_long(args.start, args.out, args.steps)
    print(
        f"held-out perplexity at 8k {report['perplexity_before']:.1f} before, {report['perplexity']:.1f} after"
    )


if __name__ == "__main__":
    script(main)
