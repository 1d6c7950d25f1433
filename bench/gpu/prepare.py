"""Make what `bench.gpu` decodes with, on a CPU: `python -m bench.gpu.prepare OUT --target MODEL --data FILE`.

OUT gets the small chat model, an EAGLE-1 head and a draft model trained on its states, and prompts. A machine that is
rented by the minute then trains nothing before it measures. Give the folder to the program by `--inputs OUT`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from data_prep import extract
from data_prep.conversations import read_conversations
from eagle.formats.checkpoint import load_head, save_head
from eagle.log import script
from recipes import train_eagle

PROMPTS = 8
MAX_CHARACTERS = 1000  # of a prompt
HEADS = {"head": "recipes/tiny/eagle1.yaml", "draft": "recipes/tiny/draft_model.yaml"}


def recipe_words(recipe: str, work: Path, args: argparse.Namespace) -> list[str]:
    """Return a recipe with this target and these conversations, as words of a command line."""
    return [
        recipe,
        f"target.path={args.target}",
        f"data.train={args.data}",
        f"data.heldout={args.prompts or args.data}",
        f"data.limit={args.limit}",
        "data.max_length=1024",
        f"features.store={work / 'features'}",
        f"train.out={work / Path(recipe).stem}",
        f"train.epochs={args.epochs}",
        "train.batch_size=8",
        "train.decode=0",
    ]


def write_prompts(source: str, count: int, out: Path) -> None:
    """Write the first questions of a file of conversations, one a line."""
    lines = []
    for conversation in read_conversations(source):
        first = conversation.messages[0]
        question = first["content"] if first["role"] == "user" else ""
        if 0 < len(question) < MAX_CHARACTERS:
            lines.append(json.dumps({"prompt": question}, ensure_ascii=False))
        if len(lines) == count:
            break
    if len(lines) < count:
        raise ValueError(f"{source} has {len(lines)} questions, expected {count}: name another file by --prompts")
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(argv: list[str]) -> None:
    """Train the heads, and gather all that the program needs in one folder."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.prepare", description=main.__doc__)
    parser.add_argument("out", type=Path, help="a folder; what is there already is kept")
    parser.add_argument("--target", required=True, help="a small chat model, as `make demo` leaves in runs/demo/target")
    parser.add_argument("--data", required=True, help="conversations to learn from")
    parser.add_argument("--prompts", help="conversations whose questions are asked (default: those of --data)")
    parser.add_argument("--model", type=Path, help="a published model for the whole path")
    parser.add_argument("--limit", type=int, default=1500, help="conversations (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over them (default: %(default)s)")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    work = args.out.with_name(f"{args.out.name}-work")  # beside it: features are large, and stay here
    for folder, recipe in HEADS.items():
        if (args.out / folder).exists():
            continue
        words = recipe_words(recipe, work, args)
        extract.main(words)
        train_eagle.main(words)
        trained = work / Path(recipe).stem / "head"
        # half the bytes: what a rented machine is sent is limited
        save_head(args.out / folder, load_head(trained).bfloat16(), (trained / "recipe.yaml").read_text(), {})
    shutil.copytree(args.target, args.out / "target", dirs_exist_ok=True)
    write_prompts(args.prompts or args.data, PROMPTS, args.out / "prompts.jsonl")
    if args.model and args.model.is_dir():
        shutil.copytree(args.model, args.out / "model", dirs_exist_ok=True)
    elif args.model:
        shutil.copy(args.model, args.out / "model")
    print(f"{args.out} is ready: python -m bench.gpu --inputs {args.out}")


if __name__ == "__main__":
    script(main)
