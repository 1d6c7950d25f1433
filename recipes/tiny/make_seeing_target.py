"""Train a small chat target that sees, on pictures of shapes, and let it answer questions: minutes, no network."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import chain
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
from recipes.tiny import scene_chats, scenes, seeing_model, train_seeing, train_target
from recipes.tiny.make_target import Seconds, hash_files, make_once, phase
from recipes.tiny.scene_chats import IMAGE, Turns, make_record, words_seen
from recipes.tiny.scenes import BACKGROUNDS, PATCH, SIDE, Scene, paint
from recipes.tiny.seeing_model import END, PROMPT, new_model, new_processor, train_words
from recipes.tiny.train_seeing import BATCH, EYE_STEPS, Chat, draw_chat, train, train_eyes

OUT = "runs/seeing"
STEPS = 900
IMAGES = 1350
HELD_OUT = 54
WORDS_FROM = 3000  # conversations that the tokenizer learns from
ANSWER_BATCH = 64
NEW_TOKENS = 80
TEMPERATURE = 0.7
BLANK = Image.new("RGB", (PATCH * SIDE, PATCH * SIDE), BACKGROUNDS["white"])


def make_seeing_target(
    out: str | Path = OUT, steps: int = STEPS, images: int = IMAGES, seed: int = 0
) -> dict[str, Any]:
    """Write `target/`, `data/` and `target_report.json` to `out`, unless they are there; return the report.

    `data/images` has the pictures, `train.jsonl` the target's own answers, `blind.jsonl` the same without pictures,
    `heldout.jsonl` the right ones.
    """
    modules = (scene_chats, scenes, seeing_model, train_seeing, train_target)
    made_with = {
        "code": hash_files([__file__, *(str(module.__file__) for module in modules)]),
        "python": python_version(),
        **{
            package: version(package)
            for package in ("torch", "transformers", "tokenizers", "pillow")
        },
    }
    settings = {"steps": steps, "images": images, "seed": seed, "made_with": made_with}
    return make_once(Path(out), settings, lambda folder, begun: build(folder, begun, settings))


def build(folder: Path, begun: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Make data, tokenizer and model in `folder`, and the images beside `begun`; return the figures of the report."""
    steps = settings["steps"]
    images = settings["images"]
    seed = settings["seed"]
    bf16 = fastest_dtype("cpu") == torch.bfloat16
    seconds: Seconds = {}
    with phase(seconds, "pictures"):
        heldout = draw_split("heldout", min(HELD_OUT, images), seed)
        # Neither the target nor a head may be trained on a held-out scene.
        avoid = frozenset(chat.scene for chat in heldout if chat.scene)
        chats = draw_split("train", images, seed, avoid)
        processor = new_processor(train_words(draw_texts(seed, avoid)))
    with phase(seconds, "training"):
        model, losses = train_model(processor, steps, seed, avoid=avoid, bf16=bf16, begun=begun)
        processor.save_pretrained(folder / "target")
        model.save_pretrained(folder / "target")
    with phase(seconds, "measuring"):
        right = right_share(heldout, answer_chats(model, processor, heldout))
        # Without seeing anything, the model can still guess.
        blind = right_share(heldout, answer_chats(model, processor, heldout, blank=True))
    with phase(seconds, "answering"):
        torch.manual_seed(seed)
        answers = answer_chats(model, processor, chats, TEMPERATURE)
    write_data(folder / "data", {"train": chats, "heldout": heldout}, answers)
    place_images(folder / "data", begun.parent)
    last_losses = losses[-50:]
    return {
        "right_share": right,
        "blind_right_share": blind,
        "own_right_share": right_share(chats, answers),
        "loss": sum(last_losses) / max(1, len(last_losses)),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "vocabulary": len(processor.tokenizer),
        "conversations": {"train": len(chats), "heldout": len(heldout), "seen": steps * BATCH},
        "bf16": bf16,
        "seconds": seconds,
    }


def train_model(
    processor: Any, steps: int, seed: int, avoid: frozenset[Scene], bf16: bool, begun: Path
) -> tuple[Any, list[float]]:
    """Return a trained model and the losses of its language model."""
    torch.manual_seed(seed)
    model = new_model(processor.tokenizer)
    # The state of a stopped run has a trained vision tower.
    if not begun.is_file():
        train_eyes(model, processor, min(EYE_STEPS, steps), seed, bf16=bf16)
    losses = train(model, processor, steps, seed, avoid=avoid, bf16=bf16, begun=begun)
    return model, losses


def draw_texts(seed: int, avoid: frozenset[Scene]) -> Iterator[str]:
    """Yield questions and answers for the tokenizer."""
    random = Random(f"{seed} words")
    for _ in range(WORDS_FROM):
        yield from chain.from_iterable(draw_chat(random, avoid).turns)


def draw_split(
    split: str, images: int, seed: int, avoid: frozenset[Scene] = frozenset()
) -> list[Chat]:
    """Return conversations about `images` different scenes, and those without a picture that come between them."""
    random = Random(f"{seed} {split}")
    chats: list[Chat] = []
    used = set(avoid)
    while len(used) < images + len(avoid):
        chat = draw_chat(random, used)
        chats.append(chat)
        if chat.scene:
            used.add(chat.scene)
    return chats


def answer_chats(
    model: Any, processor: Any, chats: Sequence[Chat], temperature: float = 0.0, blank: bool = False
) -> list[Turns]:
    """Return the questions with the model's own answers, which later questions follow; `blank` hides the pictures."""
    answered: list[Turns] = [[] for _ in chats]
    for turn in range(max(len(chat.turns) for chat in chats)):
        # Shorter conversations are complete.
        with_turn = [i for i, chat in enumerate(chats) if turn < len(chat.turns)]
        starts = range(0, len(with_turn), ANSWER_BATCH)
        for start in tqdm(starts, desc=f"answers to question {turn + 1}", unit="batch"):
            indices = with_turn[start : start + ANSWER_BATCH]
            prompts = [render_prompt(chats[i], answered[i]) for i in indices]
            scenes = [chats[i].scene for i in indices]
            pictures = [BLANK if blank else paint(scene) for scene in scenes if scene]
            texts = generate_texts(model, processor, prompts, pictures, temperature=temperature)
            for i, text in zip(indices, texts, strict=True):
                question = chats[i].turns[turn][0]
                answered[i].append((question, text))
    return answered


def render_prompt(chat: Chat, before: Turns) -> str:
    """Return the next question of a conversation after the earlier turns, as the chat template prints them."""
    text = ""
    for question, answer in before:
        text += PROMPT.format(question) + answer + END + "\n"
    text += PROMPT.format(chat.turns[len(before)][0])
    if chat.scene:
        text = text.replace("<|user|>\n", f"<|user|>\n{IMAGE}\n", 1)
    return text


def generate_texts(
    model: Any, processor: Any, prompts: list[str], pictures: list[Image.Image], temperature: float
) -> list[str]:
    """Return what the model's own `generate` writes after each prompt."""
    inputs = processor(text=prompts, images=pictures or None, padding=True, return_tensors="pt")
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    output = model.generate(**inputs, **sampling, max_new_tokens=NEW_TOKENS)
    answers = output[:, inputs["input_ids"].shape[1] :]
    return processor.batch_decode(answers, skip_special_tokens=True)


def right_share(chats: Sequence[Chat], own: Sequence[Turns]) -> float:
    """Return the share of colours and forms in right or own answers that are in both, without words of the question."""
    right = 0
    total = 0
    for chat, turns in zip(chats, own, strict=True):
        if chat.scene is None:
            continue
        for (question, right_answer), (_, answer) in zip(chat.turns, turns, strict=True):
            expected = words_seen(question, right_answer)
            actual = words_seen(question, answer)
            right += (Counter(expected) & Counter(actual)).total()
            total += max(len(expected), len(actual))
    return right / max(1, total)


def write_data(folder: Path, splits: dict[str, Sequence[Chat]], own: Sequence[Turns]) -> None:
    """Write the records of both splits with their images, and those to train on without images too."""
    (folder / "images").mkdir(parents=True)
    num_images = 0
    for split, chats in splits.items():
        records = []
        for i, chat in enumerate(chats):
            name = None
            if chat.scene:
                name = f"{num_images:05d}.png"
                num_images += 1
                paint(chat.scene).save(folder / "images" / name)
            # Heads learn the target's own answers; held-out ones are only compared.
            turns = own[i] if split == "train" else chat.turns
            records.append(make_record(f"{split}-{i}", turns, name))
        write_lines(folder / f"{split}.jsonl", records)
    write_lines(
        folder / "blind.jsonl",
        [make_record(f"train-{i}", turns, None) for i, turns in enumerate(own)],
    )


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Write records as JSON Lines in ASCII."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def place_images(folder: Path, out: Path) -> None:
    """Move images and blind records to where the other files will be."""
    # From here on an earlier target is no longer complete.
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
    parser.add_argument(
        "--images", type=int, default=IMAGES, help=f"to train heads on; default: {IMAGES}"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    args = parser.parse_args(argv)
    if min(args.steps, args.images) < 1:
        parser.error(f"got --steps {args.steps} and --images {args.images}, expected at least 1")
    report = make_seeing_target(args.out, args.steps, args.images, args.seed)
    counts = ", ".join(f"{count:,} {name}" for name, count in report["conversations"].items())
    print(
        f"{report['parameters'] / 1e6:.1f} M parameters, {report['vocabulary']} tokens; conversations: {counts}"
    )
    print(f"loss {report['loss']:.3f} at the end")
    print(
        f"colours and forms in held-out answers: {report['right_share']:.0%} right, of blank pictures "
        f"{report['blind_right_share']:.0%}; in its own answers to learn from {report['own_right_share']:.0%}"
    )
    print(
        "CPU seconds: "
        + ", ".join(f"{name} {time['cpu']:.0f}" for name, time in report["seconds"].items())
    )


if __name__ == "__main__":
    script(main)
