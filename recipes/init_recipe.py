"""Write a recipe for one model and one file of conversations: `eagle init --model M --data F`."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from random import Random
from typing import Any

import yaml

from data_prep.conversations import Conversation, read_conversations
from eagle.disk import describe_bytes, write_text
from eagle.drafters import DRAFTERS
from eagle.log import script
from eagle.recipe import Recipe, TrainSection
from eagle.target.gguf import is_gguf
from eagle.web import make_opener
from recipes.forecast import GB, TOKENS, Sizes, forecast, sizes_of
from recipes.suggestions import (
    PUBLISHED_RATES,
    PUBLISHED_WIDTH,
    SHORT_FACTOR,
    suggest_batch,
    suggest_draft_vocab,
    suggest_epochs,
    suggest_rate,
)

FEW = 1000  # conversations, below which a head accepts little
HELD_OUT = 100  # conversations, at most, and at most one in twenty
SERVER = "http://localhost:8000/v1"  # where vLLM and SGLang listen by default


def main(argv: list[str]) -> None:
    """Write a recipe with comments for a model and a file of conversations."""
    parser = argparse.ArgumentParser(prog="eagle init", description=main.__doc__)
    parser.add_argument(
        "--model", "--target", required=True, help="a folder, a hub id or a GGUF file"
    )
    parser.add_argument("--data", required=True, metavar="FILE", help="conversations for training")
    parser.add_argument(
        "--method",
        default="eagle1",
        choices=sorted(PUBLISHED_RATES),
        help="method to train (default: eagle1)",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("head.yaml"),
        help="the recipe to write (default: head.yaml)",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code from the model's repository"
    )
    args = parser.parse_args(argv)
    if args.out.exists():
        raise ValueError(f"{args.out} is there already: name another file with -o, or delete it")
    sizes = sizes_of(args.model, trust_remote_code=args.trust_remote_code)
    conversations = list(read_conversations(args.data, answered=False))
    folder = Path("runs") / name_of(args.model)
    chosen, rest = split_held_out(conversations)
    write_conversations(folder / "heldout.jsonl", chosen)
    write_conversations(folder / "questions.jsonl", rest)

    text = render_recipe(args, sizes, len(rest), held_out=len(chosen), folder=folder)
    write_text(args.out, text)
    # what is written can be read
    Recipe.load(args.out)
    print(f"{args.out}: {args.method} for {args.model}, {len(rest):,} conversations to learn from")
    print(
        f"{folder}/heldout.jsonl: {len(chosen)} conversations from all over {args.data}, for measuring"
    )
    if len(rest) < FEW:
        print(
            f"fewer than {FEW:,} conversations teach a head little: expect a small speedup, if any"
        )
    print(f"next: eagle train {args.out} --check")


def name_of(model: str) -> str:
    """Return the last part of a path or a hub id, without the ending of a GGUF file."""
    name = model.rstrip("/").replace(":", "/").split("/")[-1]
    return name[: -len(".gguf")] if is_gguf(name) else name


def split_held_out(conversations: list[Conversation]) -> tuple[list[str], list[str]]:
    """Return the lines of the held-out conversations, and of those to learn from.

    Data are often sorted by kind: one conversation is drawn from each of equal stretches, so that all kinds are held
    out. A mix may hold a conversation several times; copies of a held-out one are not learned from.
    """
    count = min(HELD_OUT, len(conversations) // 20)
    if not count:
        raise ValueError(
            f"got {len(conversations)} conversations, expected 20 or more: one in twenty is held out for measuring"
        )
    lines = [write_line(conversation) for conversation in conversations]
    # the recipe leaves the seed at its default
    random = Random(TrainSection.model_fields["seed"].default)
    bounds = [i * len(lines) // count for i in range(count + 1)]
    held_out = [lines[random.randrange(*bounds[i : i + 2])] for i in range(count)]
    left_out = set(held_out)
    return held_out, [line for line in lines if line not in left_out]


def write_line(conversation: Conversation) -> str:
    """Return a conversation as a line of JSON."""
    record: dict[str, Any] = {"id": conversation.id, "messages": conversation.messages}
    if conversation.tools:
        record["tools"] = conversation.tools
    return json.dumps(record, ensure_ascii=False) + "\n"


def write_conversations(path: Path, lines: list[str]) -> None:
    """Write the lines into a file; refuse one that holds others, as an earlier recipe may use it."""
    text = "".join(lines)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ValueError(
            f"{path} holds other conversations than those of --data that belong there: delete it if no recipe uses "
            "it, or give the command in another folder"
        )
    write_text(path, text)


def render_recipe(
    args: argparse.Namespace, sizes: Sizes, conversations: int, held_out: int, folder: Path
) -> str:
    """Return the recipe, with a comment for each value that was chosen for this model."""
    kind = args.method
    width = sizes.hidden_size
    # before the answers exist, the data are counted as ShareGPT's mean conversation
    tokens = conversations * TOKENS
    rate = write_rate(suggest_rate(kind, width))
    published = write_rate(PUBLISHED_RATES[kind])
    endpoint = find_server(args.model)
    drafter = f"  kind: {kind}\n"
    # keys that only some methods have
    if kind in ("eagle1", "hass"):
        drafter += "  fc_bias: false  # vLLM's layout has none\n"
    # the key under which a method has its draft vocabulary
    key = {
        "eagle1": "loss_vocab",
        "hass": "loss_vocab",
        "mtp": "loss_vocab",
        "eagle3": "draft_vocab",
        "peagle": "draft_vocab",
    }.get(kind)
    if key is not None:
        size = suggest_draft_vocab(sizes.vocab_size)
        drafter += (
            f"  {key}: {quote(size)}  # the most frequent of {sizes.vocab_size:,}; null for all\n"
        )
    code = "  trust_remote_code: true\n" if args.trust_remote_code else ""
    short_run = f"in runs of about 200 steps, 3 to {SHORT_FACTOR} times as much"
    too_few = ""
    if held_out < 30:
        too_few = "  # few, so intervals will be wide: eval.prompts names a file with more"
    body = f"""\
target:
  path: {quote(args.model)}
{code}data:
  train: {folder}/regenerated.jsonl
  heldout: {folder}/heldout.jsonl
  max_length: 2048
regenerate:  # a head learns from the target's own answers
  source: {folder}/questions.jsonl  # {args.data} without what is held out
  out: {folder}/regenerated.jsonl
  endpoint: {quote(endpoint)}  # an OpenAI-compatible server of the target; null decodes the answers here
  temperature: 0.0  # greedy; 0.7 to 1.0 samples answers that vary more
  max_new_tokens: 1024  # shorter answers take less time
features:
  store: {folder}/features-{kind}
drafter:
{drafter}train:
  out: {folder}/{kind}
  epochs: {suggest_epochs(tokens)}
  batch_size: {suggest_batch(conversations)}
  lr: {rate}  # {published} at a width of {PUBLISHED_WIDTH:,}, here {width:,}; {short_run}
  schedule: cosine
  warmup: 0.03
eval:
  count: {min(held_out, 40)}{too_few}
  max_new_tokens: 256
  temperatures: [0.0, 1.0]  # greedy, and sampled
"""
    return describe(args, sizes, conversations, body) + body


def find_server(model: str) -> str | None:
    """Return the address of a server on this machine that lists the model; None if none answers within a second."""
    try:
        with make_opener().open(f"{SERVER}/models", timeout=1.0) as response:
            listed = {entry["id"] for entry in json.loads(response.read())["data"]}
    except (OSError, ValueError, LookupError, TypeError):
        # nothing there, or something else
        return None
    return SERVER if model in listed else None


def describe(args: argparse.Namespace, sizes: Sizes, conversations: int, body: str) -> str:
    """Return the comments above a recipe: what it is, what it will need, and the commands."""
    recipe = Recipe.model_validate(yaml.safe_load(body))
    # a forecast is made without weights, of which such a head copies some
    lines = [
        f"{args.method} for {args.model}, written by `eagle init`: read it, and edit what you know better.",
        'How each value was chosen: docs/recipes.md, "What eagle init writes".',
    ]
    if DRAFTERS[args.method].reads.weights:
        lines.append(
            "Forecast: `eagle train FILE --check`, as this head starts from the target's own weights."
        )
    else:
        run = forecast(recipe, sizes, conversations, cards=1)
        lines.append(
            f"Forecast: {describe_bytes(run.features)} of disk, {run.memory / GB:,.1f} GB to train, "
            f"{write_hours(run.extract_hours + run.train_hours)} of an H100; --check measures this machine."
        )
    out = args.out
    train = recipe.train.out
    lines += [
        f"  eagle train {out} --check",
        f"  eagle prepare {out}",
        f"  eagle extract {out}",
        f"  eagle train {out}",
        f"  eagle measure {out}",
        f"  eagle measure --tune {out} --write",
        f"  eagle export {train}/head --target {args.model} --to vllm {train}/vllm",
    ]
    return "".join(f"# {line}\n" for line in lines)


def write_rate(rate: float) -> str:
    """Return a learning rate as recipes spell it, as 2e-4."""
    return f"{rate:.0e}".replace("e-0", "e-")


def write_hours(hours: float) -> str:
    """Return a duration in hours, or in minutes if it is short."""
    if hours >= 1:
        return f"{hours:,.1f} hours"
    minutes = math.ceil(60 * hours)
    return "1 minute" if minutes == 1 else f"{minutes} minutes"


def quote(value: Any) -> str:
    """Return a value as YAML writes it: JSON is YAML, and plain paths need no quotes."""
    if (
        isinstance(value, str)
        and value.replace("/", "").replace("-", "").replace(".", "").isalnum()
    ):
        return value
    return json.dumps(value)


if __name__ == "__main__":
    script(main)
