"""Train a small chat model that sees, on pictures of shapes, and let it answer questions: minutes, no network."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from tqdm.auto import tqdm
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from eagle.device import fastest_dtype
from eagle.log import script
from recipes.tiny import train_target
from recipes.tiny.make_target import Record, hash_files, make_once, write_records
from recipes.tiny.train_target import decay, make_optimizers, update

OUT = "runs/seeing"
STEPS = 600
IMAGES = 1350
HELD_OUT = 62
BATCH = 24
LR = 5e-3
ANSWER_BATCH = 64
NEW_TOKENS = 64
# the label that cross entropy leaves out
IGNORED = -100
PATCH = 12  # pixels
SIDE = 3  # patches, each of which may hold a shape
COLOURS = ("red", "green", "blue", "yellow", "purple", "black")
# the number of corners, and by how many degrees the shape is turned
SHAPES = {"triangle": (3, 0), "square": (4, 0), "diamond": (4, 45), "circle": (24, 0)}
# of the patches
PLACES = (
    "at the top left",
    "at the top",
    "at the top right",
    "on the left",
    "in the centre",
    "on the right",
    "at the bottom left",
    "at the bottom",
    "at the bottom right",
)
IMAGE = "<image>"
END = "<|end|>"
PAD = "<pad>"
MARKS = ["<|system|>", "<|user|>", "<|assistant|>", IMAGE]
PROMPT = "<|user|>\n{}<|end|>\n<|assistant|>\n"  # a question, as the chat template prints it
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{{ '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TEXT: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "max_position_embeddings": 1024,
}
VISION: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": PATCH * SIDE,
    "patch_size": PATCH,
}
# the patch, the colour and the shape of each thing, in the order of patches
Scene = tuple[tuple[int, str, str], ...]
# a scene, a question about it, and the answer
Chat = tuple[Scene, str, str]


def draw_scene(random: Random) -> Scene:
    """Return a random scene of one to three things, no two of which have both colour and shape in common."""
    count = random.randint(1, 3)
    patches = sorted(random.sample(range(SIDE**2), count))
    names = random.sample(list(product(COLOURS, SHAPES)), count)
    return tuple((patch, *name) for patch, name in zip(patches, names, strict=True))


def paint(scene: Scene) -> Image.Image:
    """Return the picture of a scene, on white."""
    image = Image.new("RGB", (PATCH * SIDE, PATCH * SIDE), "white")
    draw = ImageDraw.Draw(image)
    for patch, colour, shape in scene:
        x = PATCH * (patch % SIDE + 0.5)
        y = PATCH * (patch // SIDE + 0.5)
        corners, degrees = SHAPES[shape]
        draw.regular_polygon((x, y, PATCH / 2), corners, rotation=degrees, fill=colour)
    return image


def ask(scene: Scene, random: Random) -> tuple[str, str]:
    """Return a question about a scene, and its answer."""
    names = [f"a {colour} {shape}" for _, colour, shape in scene]
    phrases = [f"{name} {PLACES[patch]}" for name, (patch, *_) in zip(names, scene, strict=True)]
    patch, colour, shape = random.choice(scene)
    filled = {filled_patch for filled_patch, *_ in scene}
    empty = random.choice(sorted(set(range(SIDE**2)) - filled))
    everything = " and ".join(names)
    answers = {
        "What do you see?": f"The picture shows {' and '.join(phrases)}.",
        "How many shapes are there?": f"I count {len(scene)}: {everything}.",
        f"Where is the {colour} {shape}?": f"The {colour} {shape} is {PLACES[patch]} of the picture.",
        f"What is {PLACES[patch]}?": f"There is a {colour} {shape} {PLACES[patch]}, of {everything}.",
        f"What is {PLACES[empty]}?": f"There is nothing {PLACES[empty]}. There is {everything}.",
    }
    return random.choice(list(answers.items()))


def draw_chats(random: Random, count: int, used: set[Scene]) -> list[Chat]:
    """Return questions about scenes that differ from each other and from those in `used`, to which they are added."""
    chats: list[Chat] = []
    while len(chats) < count:
        scene = draw_scene(random)
        if scene not in used:
            used.add(scene)
            chats.append((scene, *ask(scene, random)))
    return chats


def make_processor(texts: Sequence[str]) -> Any:
    """Return a processor of texts and pictures, with a byte-level BPE tokenizer that is trained on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=[*MARKS, END, PAD],
        # all bytes, so that no text has an unknown token
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    words = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=MARKS,
        model_max_length=TEXT["max_position_embeddings"],
        padding_side="left",
    )
    words.chat_template = TEMPLATE
    side = PATCH * SIDE
    pixels = CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    return LlavaProcessor(
        pixels,
        words,
        chat_template=TEMPLATE,
        image_token=IMAGE,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        # the class token of the vision tower, which the model drops
        num_additional_image_tokens=1,
    )


def make_model(words: Any) -> Any:
    """Return an untrained Llava whose words and pictures enter the layers at about the same scale."""
    ids = {
        "bos_token_id": None,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    }
    config = LlavaConfig(
        text_config=LlamaConfig(vocab_size=len(words), **ids, **TEXT),
        vision_config=CLIPVisionConfig(**VISION),
        image_token_index=words.convert_tokens_to_ids(IMAGE),
        image_seq_length=SIDE**2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        **ids,
    )
    # at this size eager attention is faster on a CPU than the fused kernel; the choice is not saved
    model = LlavaForConditionalGeneration._from_config(config, attn_implementation="eager")
    for name, weight in model.named_parameters():
        if "projector" in name and weight.ndim == 2:
            # with the default, pictures would be much weaker than words
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        elif "embed_tokens" in name or "position_embedding" in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.generation_config = GenerationConfig(**ids)
    return model


def encode_batch(chats: Sequence[Chat], processor: Any) -> dict[str, torch.Tensor]:
    """Return conversations as a model's input with labels, padded on the right: only answers are learned."""
    words = processor.tokenizer
    tokens = []
    labels = []
    for _, question, answer in chats:
        # a mark for each patch of the picture, which a processor writes in place of one
        prompt = words.encode(PROMPT.format(f"{SIDE**2 * IMAGE}\n{question}"))
        learned = words.encode(answer + END)
        tokens.append(torch.tensor(prompt + learned))
        labels.append(torch.tensor(len(prompt) * [IGNORED] + learned))
    pictures = [paint(scene) for scene, *_ in chats]
    return {
        "input_ids": pad_sequence(tokens, batch_first=True, padding_value=words.pad_token_id),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        **processor.image_processor(pictures, return_tensors="pt"),
    }


def train(
    model: Any, processor: Any, steps: int, *, random: Random, heldout: set[Scene], bf16: bool
) -> None:
    """Train a model in place on the answers to questions about random scenes, none of which is held out."""
    matrices: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for name, weight in model.named_parameters():
        # what Muon is for; the rest gets AdamW
        is_inside = weight.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if is_inside else others).append(weight)
    steppers: list[Any] = list(make_optimizers(matrices, others, LR, bf16))
    steppers += [LambdaLR(optimizer, decay(steps)) for optimizer in steppers]
    bar = tqdm(range(steps), desc="training", unit="step")
    for _ in bar:
        batch = encode_batch(draw_chats(random, BATCH, set(heldout)), processor)
        labels = batch.pop("labels")[:, 1:]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            logits = model(**batch, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        update(model, loss, steppers)
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.eval()


def answer_chats(
    model: Any, processor: Any, chats: Sequence[Chat], *, blank: bool = False, **sampling: Any
) -> list[str]:
    """Return the answers that the model's own `generate` writes; `blank` hides the pictures."""
    answers: list[str] = []
    for start in tqdm(range(0, len(chats), ANSWER_BATCH), desc="answers", unit="batch"):
        batch = chats[start : start + ANSWER_BATCH]
        prompts = [PROMPT.format(f"{IMAGE}\n{question}") for _, question, _ in batch]
        pictures = [paint(() if blank else scene) for scene, *_ in batch]
        inputs = processor(text=prompts, images=pictures, padding=True, return_tensors="pt")
        output = model.generate(**inputs, **sampling, max_new_tokens=NEW_TOKENS)
        written = output[:, inputs["input_ids"].shape[1] :]
        answers += processor.batch_decode(written, skip_special_tokens=True)
    return answers


def right_share(chats: Sequence[Chat], answers: Sequence[str]) -> float:
    """Return the share of the answers that are the right ones, word for word."""
    return sum(chat[-1] == text for chat, text in zip(chats, answers, strict=True)) / len(chats)


def make_record(name: str, question: str, answer: str) -> Record:
    """Return a question with its answer in the format of LLaVA's data."""
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"id": name, "conversations": turns}


def write_split(data: Path, split: str, chats: Sequence[Chat], answers: Sequence[str]) -> None:
    """Write the records of a split and their pictures; each question begins with the mark of its picture."""
    records = []
    for i, ((scene, question, _), answer) in enumerate(zip(chats, answers, strict=True)):
        picture = f"{split}-{i}.png"
        paint(scene).save(data / "images" / picture)
        record = make_record(f"{split}-{i}", f"{IMAGE}\n{question}", answer)
        records.append({**record, "image": picture})
    write_records(data / f"{split}.jsonl", records)


def build(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Make data and model in `folder`; return the figures of the report."""
    seed = settings["seed"]
    bf16 = fastest_dtype("cpu") == torch.bfloat16
    # neither the target nor a head may be trained on a held-out scene
    held_out_scenes: set[Scene] = set()
    heldout = draw_chats(Random(f"{seed} heldout"), HELD_OUT, held_out_scenes)
    chats = draw_chats(Random(f"{seed} train"), settings["images"], set(held_out_scenes))
    processor = make_processor([f"{question}\n{answer}" for _, question, answer in chats])
    torch.manual_seed(seed)
    model = make_model(processor.tokenizer)
    random = Random(f"{seed} steps")
    train(model, processor, settings["steps"], random=random, heldout=held_out_scenes, bf16=bf16)
    processor.save_pretrained(folder / "target")
    model.save_pretrained(folder / "target")

    right_answers = [answer for *_, answer in heldout]
    answers = answer_chats(model, processor, heldout, do_sample=False)
    # without seeing anything, the model can still guess
    guessed = answer_chats(model, processor, heldout, blank=True, do_sample=False)
    torch.manual_seed(seed)
    samples = answer_chats(model, processor, chats, do_sample=True, temperature=0.7, top_k=0)
    data = folder / "data"
    (data / "images").mkdir(parents=True)
    write_split(data, "heldout", heldout, right_answers)
    # heads learn the target's own answers
    write_split(data, "train", chats, samples)
    questions = [question for _, question, _ in chats]
    pairs = enumerate(zip(questions, samples, strict=True))
    write_records(data / "blind.jsonl", [make_record(f"train-{i}", *pair) for i, pair in pairs])
    return {
        "right_share": right_share(heldout, answers),
        "blind_right_share": right_share(heldout, guessed),
        "own_right_share": right_share(chats, samples),
        "parameters": model.num_parameters(),
    }


def make_seeing_target(
    out: str | Path = OUT, steps: int = STEPS, images: int = IMAGES, seed: int = 0
) -> dict[str, Any]:
    """Write `target/`, `data/` and `target_report.json` to `out`, unless they are there; return the report.

    `data/images` has the pictures, `train.jsonl` the target's own answers, `blind.jsonl` the same without pictures,
    `heldout.jsonl` the right ones.
    """
    packages = ("torch", "transformers", "tokenizers", "pillow")
    made_with = {package: version(package) for package in packages}
    made_with["code"] = hash_files([__file__, str(train_target.__file__)])
    settings = {"steps": steps, "images": images, "seed": seed, "made_with": made_with}
    # training takes minutes, so that a stopped one begins again
    return make_once(Path(out), settings, lambda folder, _: build(folder, settings))


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
    print(
        f"{report['parameters'] / 1e6:.1f} M parameters; held-out answers: {report['right_share']:.0%} right, of blank "
        f"pictures {report['blind_right_share']:.0%}; its own answers to learn from: {report['own_right_share']:.0%}"
    )


if __name__ == "__main__":
    script(main)
