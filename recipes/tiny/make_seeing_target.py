"""Train a small chat target that sees, on pictures of shapes, and let it answer questions: minutes, no network."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from random import Random
from typing import Any

import torch
from PIL import Image
from tqdm.auto import tqdm

from eagle.device import fastest_dtype
from eagle.disk import apply_umask
from eagle.log import script
from recipes.tiny import scene_chats, scenes, seeing_model, train_seeing
from recipes.tiny.make_target import make_once, phase
from recipes.tiny.scene_chats import IMAGE, Turns, make_record, words_seen
from recipes.tiny.scenes import BACKGROUNDS, PATCH, SIDE, Scene, paint
from recipes.tiny.seeing_model import END, PROMPT, new_model, new_processor, train_words
from recipes.tiny.train_seeing import BATCH, EYE_STEPS, Chat, draw_chat, train, train_eyes

OUT, STEPS, IMAGES, HELD_OUT = "runs/seeing", 900, 1350, 54
WORDS_FROM = 3000  # conversations that the tokenizer learns from
ANSWER_BATCH, NEW_TOKENS, TEMPERATURE = 64, 80, 0.7
BLANK = Image.new("RGB", (PATCH * SIDE, PATCH * SIDE), BACKGROUNDS["white"])


def make_seeing_target(
    out: str | Path = OUT, steps: int = STEPS, images: int = IMAGES, seed: int = 0
) -> dict[str, Any]:
    """Write `target/`, `data/` and `target_report.json` to `out`, unless they are there; returns the report.

    `data/images` has the pictures, `train.jsonl` the target's own answers, `blind.jsonl` the same without pictures,
    `heldout.jsonl` the right ones.
    """
    code = (__file__, scene_chats.__file__, scenes.__file__, seeing_model.__file__, train_seeing.__file__)
    made_with = {
        "code": hashlib.sha256(b"".join(Path(file).read_bytes() for file in code)).hexdigest()[:16],
        "python": python_version(),
        **{package: version(package) for package in ("torch", "transformers", "tokenizers", "pillow")},
    }
    settings = {"steps": steps, "images": images, "seed": seed, "made_with": made_with}
    return make_once(Path(out), settings, lambda folder, begun: build(folder, begun, settings))


def build(folder: Path, begun: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Make data, tokenizer and model in `folder`, and the images beside `begun`; returns the figures of the report."""
    steps, images, seed = settings["steps"], settings["images"], settings["seed"]
    seconds: dict[str, dict[str, float]] = {}
    with phase(seconds, "pictures"):
        heldout = draw_split("heldout", min(HELD_OUT, images), seed)
        avoid = frozenset(chat.scene for chat in heldout if chat.scene)
        chats = draw_split("train", images, seed, avoid)
        random = Random(f"{seed} words")
        texts = (text for _ in range(WORDS_FROM) for turn in draw_chat(random, avoid).turns for text in turn)
        processor = new_processor(train_words(texts))
        processor.save_pretrained(folder / "target")
    with phase(seconds, "training"):
        torch.manual_seed(seed)
        model, bf16 = new_model(processor.tokenizer), fastest_dtype("cpu") == torch.bfloat16
        if not begun.is_file():  # which holds what the eyes have learned
            train_eyes(model, processor, min(EYE_STEPS, steps), seed, bf16)
        losses = train(model, processor, steps, seed, avoid, bf16, begun)
        model.save_pretrained(folder / "target")
    with phase(seconds, "measuring"):
        shares = {
            "right_share": right_share(heldout, answer_chats(model, processor, heldout)),
            "blind_right_share": right_share(heldout, answer_chats(model, processor, heldout, blank=True)),
        }
    with phase(seconds, "answering"):
        torch.manual_seed(seed)
        own = answer_chats(model, processor, chats, TEMPERATURE)
        shares["own_right_share"] = right_share(chats, own)
    write_data(folder / "data", {"train": chats, "heldout": heldout}, own)
    place_images(folder / "data", begun.parent)
    return {
        **shares,
        "loss": sum(losses[-50:]) / max(1, len(losses[-50:])),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "vocabulary": len(processor.tokenizer),
        "conversations": {"train": len(chats), "heldout": len(heldout), "seen": steps * BATCH},
        "bf16": bf16,
        "seconds": seconds,
    }


def draw_split(split: str, images: int, seed: int, avoid: frozenset[Scene] = frozenset()) -> list[Chat]:
    """Conversations about so many pictures, each of its own scene, and those about none that come between them."""
    random, chats, seen = Random(f"{seed} {split}"), list[Chat](), set(avoid)
    while len(seen) < images + len(avoid):
        chats.append(draw_chat(random, seen))
        scene = chats[-1].scene
        seen |= {scene} if scene else set()
    return chats


def answer_chats(
    model: Any, processor: Any, chats: Sequence[Chat], temperature: float = 0.0, blank: bool = False
) -> list[Turns]:
    """The questions with the model's own answers, a later one behind its earlier ones; `blank` hides the pictures."""
    own: list[Turns] = [[] for _ in chats]
    for turn in range(max(len(chat.turns) for chat in chats)):
        places = [place for place, chat in enumerate(chats) if turn < len(chat.turns)]
        starts = range(0, len(places), ANSWER_BATCH)
        for start in tqdm(starts, desc=f"answers to question {turn + 1}", unit="batch"):
            batch = places[start : start + ANSWER_BATCH]
            prompts = [render_prompt(chats[place], own[place]) for place in batch]
            scenes = [chats[place].scene for place in batch]
            pictures = [BLANK if blank else paint(scene) for scene in scenes if scene]
            texts = generate_texts(model, processor, prompts, pictures, temperature)
            for place, text in zip(batch, texts, strict=True):
                own[place].append((chats[place].turns[turn][0], text))
    return own


def render_prompt(chat: Chat, before: Turns) -> str:
    """The next question of a conversation behind earlier ones with their answers, as the chat template prints them."""
    question = chat.turns[len(before)][0]
    text = "".join(PROMPT.format(asked) + answered + END + "\n" for asked, answered in before) + PROMPT.format(question)
    return text.replace("<|user|>\n", f"<|user|>\n{IMAGE}\n", 1) if chat.scene else text


def generate_texts(
    model: Any, processor: Any, prompts: list[str], pictures: list[Image.Image], temperature: float
) -> list[str]:
    """What the model's own `generate` writes behind each prompt."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    inputs = processor(text=prompts, images=pictures or None, padding=True, return_tensors="pt")
    output = model.generate(**inputs, **sampling, max_new_tokens=NEW_TOKENS)[:, inputs["input_ids"].shape[1] :]
    return processor.batch_decode(output, skip_special_tokens=True)


def right_share(chats: Sequence[Chat], own: Sequence[Turns]) -> float:
    """The share of colours and forms, named in right or own answers and not in questions, that both have."""
    right, total = 0, 0
    for chat, turns in zip(chats, own, strict=True):
        for (question, truth), (_, text) in zip(chat.turns, turns, strict=True):
            if chat.scene:
                true, said = words_seen(question, truth), words_seen(question, text)
                right += sum((Counter(true) & Counter(said)).values())
                total += max(len(true), len(said))
    return right / max(1, total)


def write_data(folder: Path, splits: dict[str, Sequence[Chat]], own: Sequence[Turns]) -> None:
    """Write the records of both splits and the images that they name, and the former without images."""
    (folder / "images").mkdir(parents=True)
    count = 0
    for split, chats in splits.items():
        lines = []
        for number, chat in enumerate(chats):
            name = None
            if chat.scene:
                name, count = f"{count:05d}.png", count + 1
                paint(chat.scene).save(folder / "images" / name)
            turns = own[number] if split == "train" else chat.turns
            lines.append(json.dumps(make_record(f"{split}-{number}", turns, name)) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines))
    blind = [json.dumps(make_record(f"train-{number}", turns, None)) + "\n" for number, turns in enumerate(own)]
    (folder / "blind.jsonl").write_text("".join(blind))


def place_images(folder: Path, out: Path) -> None:
    """Move images and blind records to where the others will be; with them an earlier target is no longer whole."""
    (out / "target_report.json").unlink(missing_ok=True)
    shutil.rmtree(out / "data" / "images", ignore_errors=True)
    (out / "data").mkdir(exist_ok=True)
    apply_umask(folder)
    for name in ("images", "blind.jsonl"):
        os.replace(folder / name, out / "data" / name)


def main(argv: list[str]) -> None:
    """Make the target and print its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=OUT, help=f"default: {OUT}")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    parser.add_argument("--images", type=int, default=IMAGES, help=f"to train heads on; default: {IMAGES}")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    args = parser.parse_args(argv)
    if min(args.steps, args.images) < 1:
        parser.error(f"got --steps {args.steps} and --images {args.images}, expected at least 1")
    report = make_seeing_target(args.out, args.steps, args.images, args.seed)
    counts = ", ".join(f"{count:,} {name}" for name, count in report["conversations"].items())
    print(f"{report['parameters'] / 1e6:.1f} M parameters, {report['vocabulary']} tokens; conversations: {counts}")
    print(f"loss {report['loss']:.3f} at the end")
    print(
        f"colours and forms in held-out answers: {report['right_share']:.0%} right, of blank pictures "
        f"{report['blind_right_share']:.0%}; in its own answers to learn from {report['own_right_share']:.0%}"
    )
    print("CPU seconds: " + ", ".join(f"{name} {part['cpu']:.0f}" for name, part in report["seconds"].items()))


if __name__ == "__main__":
    script(main)
