"""Train the small Llava of make_seeing_target: first its vision tower to name shapes, then all of it to answer."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from recipes.tiny.scene_chats import IMAGE, TEXT_SHARE, Turns, ask_fact, ask_scene
from recipes.tiny.scenes import BACKGROUNDS, COLOURS, SHAPES, SIDE, SIZES, Scene, draw_scene, paint
from recipes.tiny.seeing_model import END, PROMPT, TEXT
from recipes.tiny.train_target import (
    SAVE_EVERY,
    WEIGHT_DECAY,
    decay,
    make_optimizers,
    restore,
    save,
    update,
)

EYE_STEPS = 300
EYE_BATCH = 32
EYE_LR = 2e-3
BATCH = 24
GROUP = 4
LR = 5e-3
# The share of the steps with one shape in a picture, and of those with two: where to look is learned first.
SIMPLE_SHARE = 0.12
# The number of classes of each property of a patch: form, colour, size, row and column.
CLASSES = (len(SHAPES) + 1, len(COLOURS) + len(BACKGROUNDS), len(SIZES) + 1, SIDE, SIDE)
# The label that cross entropy leaves out.
IGNORED = -100


class Chat(NamedTuple):
    """Questions with their answers about a picture, or about none."""

    turns: Turns
    scene: Scene | None


def draw_chat(random: Random, avoid: Container[Scene] = (), most: int = 3) -> Chat:
    """Return a random conversation; its scene has at most `most` shapes and is not in `avoid`."""
    if random.random() < TEXT_SHARE:
        return Chat([ask_fact(random)], None)
    scene = draw_scene(random)
    while scene in avoid or len(scene.things) > most:
        scene = draw_scene(random)
    return Chat(ask_scene(scene, random), scene)


def encode_chat(chat: Chat, random: Random, words: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation and its labels: only answers and their end tokens are learned."""
    tokens: list[int] = []
    labels: list[int] = []
    for turn, (question, answer) in enumerate(chat.turns):
        image = ""
        if chat.scene and turn == 0:
            # Datasets put a line break after the image, chat templates may not: the model learns both.
            image = SIDE**2 * IMAGE + random.choice(("\n", ""))
        prompt = words.encode(PROMPT.format(image + question))
        answer_tokens = words.encode(answer + END)
        separator = words.encode("\n")
        tokens += prompt + answer_tokens + separator
        labels += len(prompt) * [IGNORED] + answer_tokens + len(separator) * [IGNORED]
    return tokens, labels


def draw_batch(
    step: int, seed: int, avoid: Container[Scene], most: int, processor: Any
) -> dict[str, torch.Tensor]:
    """Return random conversations as a model's input with labels, padded on the right.

    The same step and seed give the same batch, so that a stopped run can be resumed.
    """
    # The batches of `GROUP` steps are sampled together and sorted by length, which saves padding.
    random = Random(f"{seed} {step // GROUP}")
    words = processor.tokenizer
    chats = [draw_chat(random, avoid, most) for _ in range(GROUP * BATCH)]
    rows = [(*encode_chat(chat, random, words), chat.scene) for chat in chats]
    rows.sort(key=lambda row: len(row[0]))
    order = random.sample(range(GROUP), GROUP)
    first = order[step % GROUP] * BATCH
    rows = rows[first : first + BATCH]
    tokens = [torch.tensor(row_tokens) for row_tokens, _, _ in rows]
    labels = [torch.tensor(row_labels) for _, row_labels, _ in rows]
    batch = {
        "input_ids": pad_sequence(tokens, batch_first=True, padding_value=words.pad_token_id),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }
    pictures = [paint(scene) for _, _, scene in rows if scene]
    if pictures:
        batch["pixel_values"] = processor.image_processor(pictures, return_tensors="pt")[
            "pixel_values"
        ]
    return batch


def optimizers(model: Any, bf16: bool) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the trainable weights."""
    matrices: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        is_inside = "embed" not in name and "lm_head" not in name
        (matrices if weight.ndim == 2 and is_inside else others).append(weight)
    return make_optimizers(matrices, others, LR, bf16)


def label_patches(scene: Scene) -> torch.Tensor:
    """Return the class of each property of what a patch holds, [patches, 5]: form, colour, size, row and column."""
    # The last classes of form and size mean an empty patch; its colour is that of the background.
    background = len(COLOURS) + list(BACKGROUNDS).index(scene.background)
    empty = torch.tensor([len(SHAPES), background, len(SIZES)])
    positions = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE))
    labels = torch.cat([empty.expand(SIDE**2, -1), positions], dim=1)
    for thing in scene.things:
        shape = SHAPES.index(thing.shape)
        colour = list(COLOURS).index(thing.colour)
        size = list(SIZES).index(thing.size)
        patch = 2 * thing.row * SIDE + 2 * thing.column
        labels[patch, :3] = torch.tensor([shape, colour, size])
    return labels


def train_eyes(model: Any, processor: Any, steps: int, seed: int, bf16: bool) -> None:
    """Train the vision tower and the projector in place to tell what each patch holds and where it is.

    Answers alone would teach this much later.
    """
    tower = model.model.vision_tower
    projector = model.model.multi_modal_projector
    # The classifier is random and stays so: the projector must then encode each property equally strongly.
    classifier = torch.nn.init.orthogonal_(torch.empty(sum(CLASSES), TEXT["hidden_size"]))
    weights = [*tower.parameters(), *projector.parameters()]
    optimizer = torch.optim.AdamW(
        weights, lr=EYE_LR, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay(steps))
    bar = tqdm(range(steps), desc="learning to see", unit="step")
    for step in bar:
        random = Random(f"{seed} eyes {step}")
        scenes = [draw_scene(random) for _ in range(EYE_BATCH)]
        labels = torch.cat([label_patches(scene) for scene in scenes])
        pixels = processor.image_processor([paint(scene) for scene in scenes], return_tensors="pt")[
            "pixel_values"
        ]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            # The tower's first output is that of its class token.
            states = projector(tower(pixels).last_hidden_state[:, 1:])
        loss = patch_loss(states.float() @ classifier.T, labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)


def patch_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross entropies of all properties, averaged over patches."""
    by_property = logits.flatten(0, 1).split(CLASSES, -1)
    losses = [
        cross_entropy(part, labels[:, i], reduction="none") for i, part in enumerate(by_property)
    ]
    total = torch.stack(losses).sum(0)
    is_empty = labels[:, 0] == len(SHAPES)
    # Most patches are empty, so that these count for less.
    return total[~is_empty].mean() + 0.3 * total[is_empty].mean()


def train(
    model: Any,
    processor: Any,
    steps: int,
    seed: int,
    avoid: Container[Scene],
    bf16: bool,
    begun: Path,
) -> list[float]:
    """Train the language model in place on the answers of random conversations; return the losses.

    No scene is one of those in `avoid`. The state is saved in the file `begun`, from which a stopped run is resumed.
    """
    # Answers are learned sooner if what the language model sees does not change.
    model.model.vision_tower.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(False)
    steppers: list[Any] = list(optimizers(model, bf16))
    steppers += [
        torch.optim.lr_scheduler.LambdaLR(optimizer, decay(steps)) for optimizer in steppers
    ]
    done = restore(begun, [model, *steppers])
    losses: list[float] = []
    bar = tqdm(range(done, steps), desc="training", unit="step", initial=done, total=steps)
    for step in bar:
        # First one shape in a picture, then two, then three; the steps of one group are alike.
        group_start = step // GROUP * GROUP
        max_shapes = min(3, 1 + int(group_start / (SIMPLE_SHARE * steps)))
        batch = draw_batch(step, seed, avoid, max_shapes, processor=processor)
        labels = batch.pop("labels")[:, 1:]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            logits = model(**batch, use_cache=False).logits[:, :-1]
        is_learned = labels != IGNORED
        loss = cross_entropy(logits[is_learned].float(), labels[is_learned])
        update(model, loss, steppers)
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        if (step + 1) % SAVE_EVERY == 0:
            save(begun, step + 1, [model, *steppers])
    model.eval()
    return losses
