"""Go on with the tiny target on conversations joined to 8,192 tokens: minutes, no network."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import AutoTokenizer, LlamaForCausalLM

from eagle.device import fastest_dtype
from eagle.disk import apply_umask, lock_folder
from eagle.log import script
from recipes.tiny.make_target import perplexity

LONG, SHORT, STEPS, LR = 8192, 512, 16, 5e-4
CONTEXTS = (512, 2048, 8000)  # tokens of the prompts
ROLES = {"human": "user", "gpt": "assistant"}
MARK = "<|{}|>\n{}<|end|>\n"  # a turn, as the target's chat template prints it
Turn = dict[str, str]


def read_turns(path: Path) -> list[list[Turn]]:
    """The turns of each conversation of a file."""
    return [json.loads(line)["conversations"] for line in path.read_text(encoding="utf-8").splitlines()]


def join_turns(conversations: list[list[Turn]], tokenizer: Any, length: int) -> Iterator[list[Turn]]:
    """Conversations end to end, of at most so many tokens together."""
    joined, total = list[Turn](), 1
    for turns in conversations:
        count = len(tokenizer(render_turns(turns), add_special_tokens=False)["input_ids"])
        if joined and total + count > length:
            yield joined
            joined, total = [], 1
        if count < length:
            joined, total = [*joined, *turns], total + count


def render_turns(turns: list[Turn]) -> str:
    """Turns as the target's chat template prints them."""
    return "".join(MARK.format(ROLES[turn["from"]], turn["value"]) for turn in turns)


def write_prompts(texts: list[list[Turn]], tokenizer: Any, folder: Path) -> None:
    """The last question of each text behind so many tokens of what stands before it, as one message of a user."""
    for context in CONTEXTS:
        lines = []
        for number, turns in enumerate(texts):
            asked = max(place for place, turn in enumerate(turns) if turn["from"] == "human")
            first = asked
            while first > 1 and len(tokenizer(render_turns(turns[first - 2 : asked + 1]))["input_ids"]) < context:
                first -= 2  # a question and its answer
            text = render_turns(turns[first : asked + 1]).removeprefix("<|user|>\n").removesuffix("<|end|>\n")
            lines.append(json.dumps({"id": f"{context}-{number}", "conversations": [{"from": "human", "value": text}]}))
        (folder / f"prompts-{context}.jsonl").write_text("\n".join(lines) + "\n")


def train(model: Any, rows: list[torch.Tensor], steps: int, bf16: bool) -> None:
    """Train in place on every token, with a rate that falls to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    for step in tqdm(range(steps), desc="training", unit="step"):
        row = rows[step % len(rows)][None]
        for group in optimizer.param_groups:
            group["lr"] = LR * (steps - step) / steps
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(input_ids=row, use_cache=False).logits
        cross_entropy(logits[0, :-1].float(), row[0, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()


def make_long(start: Path, out: Path, steps: int) -> dict[str, float]:
    """Write `target/` and `data/` to `out`; the perplexity of held-out texts of full length before and after."""
    tokenizer = AutoTokenizer.from_pretrained(start / "target")
    model = LlamaForCausalLM.from_pretrained(start / "target", dtype=torch.float32, attn_implementation="sdpa")
    data = {split: read_turns(start / "data" / f"{split}.jsonl") for split in ("train", "heldout")}
    texts = {split: list(join_turns(turns, tokenizer, LONG - 64)) for split, turns in data.items()}
    rows = {
        split: [tokenizer(render_turns(turns), return_tensors="pt")["input_ids"][0] for turns in some]
        for split, some in texts.items()
    }
    model.config.max_position_embeddings = LONG
    held = rows["heldout"][0][None]
    report = {"perplexity_before": perplexity(model, held)}
    train(model, rows["train"][::-1], steps, fastest_dtype("cpu") == torch.bfloat16)
    report["perplexity"] = perplexity(model.eval(), held)
    with lock_folder(out), tempfile.TemporaryDirectory(prefix=".unfinished-", dir=out) as name:
        folder = Path(name)
        shutil.copytree(start / "target", folder / "target")
        model.save_pretrained(folder / "target")
        settings = json.loads((folder / "target" / "tokenizer_config.json").read_text())
        settings["model_max_length"] = LONG
        (folder / "target" / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        (folder / "data").mkdir()
        for length in (SHORT, LONG):
            joined = join_turns(data["train"], tokenizer, length - 64)
            lines = [json.dumps({"id": str(place), "conversations": turns}) for place, turns in enumerate(joined)]
            (folder / "data" / f"train-{length}.jsonl").write_text("\n".join(lines) + "\n")
        write_prompts([turns for turns in texts["heldout"] if len(turns) > 60], tokenizer, folder / "data")
        apply_umask(folder)
        for part in ("data", "target"):
            shutil.rmtree(out / part, ignore_errors=True)
            shutil.move(folder / part, out / part)
    return report


def main(argv: list[str]) -> None:
    """Make the target and print the perplexities."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=Path, default=Path("runs/tiny"), help="the folder of the tiny target")
    parser.add_argument("--out", type=Path, default=Path("runs/tiny-long"), help="the folder to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    args = parser.parse_args(argv)
    report = make_long(args.start, args.out, args.steps)
    print(f"held-out perplexity at 8k {report['perplexity_before']:.1f} before, {report['perplexity']:.1f} after")


if __name__ == "__main__":
    script(main)
