"""Train the small Llava of make_seeing_target: first its eyes to name what they see, then the whole to answer."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from eagle.disk import replacing
from recipes.tiny.scene_chats import IMAGE, TEXT_SHARE, Turns, ask_fact, ask_scene
from recipes.tiny.scenes import BACKGROUNDS, COLOURS, SHAPES, SIDE, SIZES, Scene, draw_scene, paint
from recipes.tiny.seeing_model import END, PROMPT, TEXT
from recipes.tiny.train_target import SAVE_EVERY, restore

EYE_STEPS, EYE_BATCH, EYE_LR = 300, 32, 2e-3
BATCH, GROUP, WARMUP = 24, 4, 40
SIMPLE_SHARE = 0.12  # of the steps, with one shape in a picture, and of those with two: where to look is learned first
MATRIX_LR, LR, WEIGHT_DECAY = 0.02, 5e-3, 0.1
PARTS = (len(SHAPES) + 1, len(COLOURS) + len(BACKGROUNDS), len(SIZES) + 1, SIDE, SIDE)  # classes of what is in a patch
IGNORED = -100  # as the label of what is not learned


class Chat(NamedTuple):
    """Questions with their answers about a picture, or about none."""

    turns: Turns
    scene: Scene | None


def draw_chat(random: Random, avoid: Container[Scene] = (), most: int = 3) -> Chat:
    """A random conversation; its scene has at most so many shapes and is none of those in `avoid`."""
    if random.random() < TEXT_SHARE:
        return Chat([ask_fact(random)], None)
    scene = draw_scene(random)
    while scene in avoid or len(scene.things) > most:
        scene = draw_scene(random)
    return Chat(ask_scene(scene, random), scene)


def encode_chat(chat: Chat, random: Random, words: Any) -> tuple[list[int], list[int]]:
    """The tokens of a conversation, and the labels: those of the answers and of their ends."""
    tokens, labels = list[int](), list[int]()
    for place, (question, answer) in enumerate(chat.turns):
        # with and without a line end behind the image, as datasets and chat templates have it
        image = SIDE**2 * IMAGE + random.choice(("\n", "")) if chat.scene and not place else ""
        prompt = words.encode(PROMPT.format(image + question))
        learned, behind = words.encode(answer + END), words.encode("\n")
        tokens += prompt + learned + behind
        labels += len(prompt) * [IGNORED] + learned + len(behind) * [IGNORED]
    return tokens, labels


def draw_batch(step: int, seed: int, avoid: Container[Scene], most: int, processor: Any) -> dict[str, torch.Tensor]:
    """Random conversations as a model's input with labels, padded on the right; the same for the same step and seed.

    Those of `GROUP` steps are drawn together and sorted by length, so that little is padded.
    """
    random, words = Random(f"{seed} {step // GROUP}"), processor.tokenizer
    chats = [draw_chat(random, avoid, most) for _ in range(GROUP * BATCH)]
    rows = [(*encode_chat(chat, random, words), chat.scene) for chat in chats]
    rows.sort(key=lambda row: len(row[0]))
    order = random.sample(range(GROUP), GROUP)
    rows = rows[order[step % GROUP] * BATCH :][:BATCH]
    width = len(rows[-1][0])
    ids = [tokens + (width - len(tokens)) * [words.pad_token_id] for tokens, _, _ in rows]
    labels = [labels + (width - len(labels)) * [IGNORED] for _, labels, _ in rows]
    batch = {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}
    if pictures := [paint(scene) for _, _, scene in rows if scene]:
        batch["pixel_values"] = processor.image_processor(pictures, return_tensors="pt")["pixel_values"]
    return batch


def optimizers(model: Any) -> list[Any]:
    """Muon for the matrices inside the layers, which learn much faster with it, and AdamW for all else."""
    outside = ("embed", "lm_head")
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    inside = {name for name, weight in named if weight.ndim == 2 and not any(part in name for part in outside)}
    matrices = [weight for name, weight in named if name in inside]
    others = [weight for name, weight in named if name not in inside]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(others, lr=LR, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True),
    ]


def decay(steps: int) -> Callable[[int], float]:
    """The share of the learning rate at a step: a warmup, then a linear decay to zero."""
    return lambda step: min((step + 1) / WARMUP, (steps - step) / max(1, steps - WARMUP))


def label_patches(scene: Scene) -> torch.Tensor:
    """What each patch of a picture holds, [patches, 5]: its form, colour, size, row and column as numbers."""
    ground = (len(SHAPES), len(COLOURS) + list(BACKGROUNDS).index(scene.background), len(SIZES))
    labels = torch.tensor([[[*ground, row, column] for column in range(SIDE)] for row in range(SIDE)])
    for thing in scene.things:
        parts = (SHAPES.index(thing.shape), list(COLOURS).index(thing.colour), list(SIZES).index(thing.size))
        labels[2 * thing.row, 2 * thing.column, :3] = torch.tensor(parts)
    return labels.view(-1, 5)


def train_eyes(model: Any, processor: Any, steps: int, seed: int, bf16: bool) -> None:
    """Train the vision tower and the projector alone, in place, to tell what each patch holds and where it is.

    Answers alone would teach this much later. The head that tells it is random and stays as it is, so that the
    projector's output holds form, colour, size and place in equal parts.
    """
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    head = torch.nn.init.orthogonal_(torch.empty(sum(PARTS), TEXT["hidden_size"]))  # [classes, width]
    weights = [*tower.parameters(), *projector.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=EYE_LR, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay(steps))
    for step in (bar := tqdm(range(steps), desc="learning to see", unit="step")):
        random = Random(f"{seed} eyes {step}")
        drawn = [draw_scene(random) for _ in range(EYE_BATCH)]
        labels = torch.cat([label_patches(scene) for scene in drawn])
        pixels = processor.image_processor([paint(scene) for scene in drawn], return_tensors="pt")["pixel_values"]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            seen = projector(tower(pixels).last_hidden_state[:, 1:])
        logits = (seen.float() @ head.T).flatten(0, 1).split(PARTS, -1)
        empty = labels[:, 0] == len(SHAPES)
        parts = [cross_entropy(part, labels[:, kind], reduction="none") for kind, part in enumerate(logits)]
        losses = torch.stack(parts).sum(0)
        loss = losses[~empty].mean() + 0.3 * losses[empty].mean()  # most patches are empty
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)


def train(
    model: Any, processor: Any, steps: int, seed: int, avoid: Container[Scene], bf16: bool, begun: Path
) -> list[float]:
    """Train the language model in place, on answers of conversations that are drawn anew; returns the losses.

    No scene is one of those in `avoid`. The state is kept in the file `begun`, from which a run that was stopped goes
    on.
    """
    for part in (model.model.vision_tower, model.model.multi_modal_projector):
        part.requires_grad_(False)  # answers are learned sooner on eyes that stay as they are
    steppers = optimizers(model)
    steppers += [torch.optim.lr_scheduler.LambdaLR(optimizer, decay(steps)) for optimizer in steppers]
    done, losses = restore(begun, [model, *steppers]), list[float]()
    for step in (bar := tqdm(range(done, steps), desc="training", unit="step", initial=done, total=steps)):
        most = min(3, 1 + int(step // GROUP * GROUP / (SIMPLE_SHARE * steps)))
        batch = draw_batch(step, seed, avoid, most, processor)
        labels = batch.pop("labels")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            logits = model(**batch, use_cache=False).logits
        learned = labels[:, 1:] != IGNORED
        loss = cross_entropy(logits[:, :-1][learned].float(), labels[:, 1:][learned])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
        model.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        if (step + 1) % SAVE_EVERY == 0:
            with replacing(begun) as path:
                torch.save({"done": step + 1, "states": [part.state_dict() for part in (model, *steppers)]}, path)
    model.eval()
    return losses
