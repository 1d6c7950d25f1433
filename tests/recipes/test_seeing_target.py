"""The small vision target: pictures, questions about them, and a model with a processor that `Target` loads."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from eagle import Sampling, Target, generate, load_drafter
from recipes.tiny.make_seeing_target import (
    COLOURS,
    HELD_OUT,
    IGNORED,
    PATCH,
    PLACES,
    SHAPES,
    SIDE,
    TEMPLATE,
    Chat,
    Scene,
    ask,
    draw_chats,
    draw_scene,
    encode_batch,
    make_processor,
    make_seeing_target,
    paint,
    right_share,
)
from tests.eval.jsonl_files import read_lines

# hardly trained: what it answers does not matter here
STEPS = 2
IMAGES = 6


@pytest.fixture(scope="module")
def seeing_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the script writes, with a model of two training steps."""
    folder = tmp_path_factory.mktemp("seeing")
    make_seeing_target(folder, STEPS, IMAGES)
    return folder


@pytest.fixture(scope="module")
def target(seeing_dir: Path) -> Target:
    """The target, loaded as any other."""
    return Target.load(seeing_dir / "target", dtype="float32")


def test_records_name_images_that_exist(seeing_dir: Path) -> None:
    """Each image belongs to one record, whose first question begins with the mark of an image."""
    named = []
    for split in ("train", "heldout"):
        for record in read_lines(seeing_dir / f"data/{split}.jsonl"):
            question, answer = record["conversations"]
            assert (question["from"], answer["from"]) == ("human", "gpt")
            assert question["value"].startswith("<image>\n")
            named.append(record["image"])

    images = (seeing_dir / "data/images").iterdir()

    assert sorted(named) == sorted(path.name for path in images)
    assert len(named) == IMAGES + HELD_OUT

    # nothing else is written
    files = {path.name for path in seeing_dir.iterdir()}
    assert files == {"data", "target", "target_report.json"}


def test_it_is_a_target_that_sees(seeing_dir: Path, target: Target) -> None:
    """A prompt holds its image, and drafts leave the answer unchanged."""
    image = str(next((seeing_dir / "data/images").iterdir()))
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What do you see?"}]
    prompt: Any = target.chat([{"role": "user", "content": parts}])

    assert prompt.media["pixel_values"].shape == (1, 3, PATCH * SIDE, PATCH * SIDE)
    assert list(prompt).count(target.model.config.image_token_id) == SIDE**2

    # n-grams draft from the text of the prompt
    answers = []
    for name in ("none", "ngram"):
        drafter = load_drafter(name, target)
        trace = generate(
            target,
            drafter,
            prompt,
            sampling=Sampling(),
            max_new_tokens=12,
        )
        answers.append(trace.tokens)

    assert answers[0] == answers[1]
    assert target.stop_tokens == (target.tokenizer.convert_tokens_to_ids("<|end|>"),)


def test_the_template_prints_texts_and_parts(target: Target) -> None:
    """A text is printed as it is; an image in a list of parts as its mark."""
    parts = [{"type": "image"}, {"type": "text", "text": "\nHi"}]
    for content in ("<image>\nHi", parts):
        messages = [{"role": "user", "content": content}]
        text = target.tokenizer.apply_chat_template(messages, tokenize=False)
        assert text == "<|user|>\n<image>\nHi<|end|>\n"
    assert target.tokenizer.chat_template == TEMPLATE


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by their paths in it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_data_and_weights_are_the_same_for_the_same_seed(seeing_dir: Path, tmp_path: Path) -> None:
    """Records, images and model agree to the byte; another seed draws others."""
    made = {}
    for seed in (0, 1):
        make_seeing_target(tmp_path / str(seed), STEPS, IMAGES, seed)
        made[seed] = read_files(tmp_path / str(seed) / "data")
    first = read_files(seeing_dir / "data")
    weights = "target/model.safetensors"

    assert made[0] == first
    assert made[1]["train.jsonl"] != first["train.jsonl"]
    assert (tmp_path / "0" / weights).read_bytes() == (seeing_dir / weights).read_bytes()


def test_no_scene_is_drawn_twice() -> None:
    """Scenes differ from each other and from those that are held out."""
    heldout: set[Scene] = set()
    draw_chats(Random(0), 20, heldout)
    used = set(heldout)
    scenes = {scene for scene, *_ in draw_chats(Random(0), 40, used)}

    assert len(heldout) == 20
    assert len(scenes) == 40
    assert scenes.isdisjoint(heldout)
    assert used == scenes | heldout


def test_answers_name_only_what_is_in_the_picture() -> None:
    """Every question is answered with shapes and colours of its scene."""
    random = Random(0)
    words = {*COLOURS, *SHAPES}
    for _ in range(300):
        scene = draw_scene(random)
        names = [word for _, *name in scene for word in name]
        _, text = ask(scene, random)
        said = words & set(text.translate(str.maketrans(".,:", "   ")).split())
        assert said
        assert said <= set(names)


def test_a_scene_is_painted_where_it_says() -> None:
    """A red square at the bottom left of a white picture."""
    scene: Scene = ((6, "red", "square"),)
    picture = paint(scene)
    assert picture.getpixel((PATCH // 2, 2 * PATCH + PATCH // 2)) == (255, 0, 0)
    for patch in set(range(SIDE**2)) - {6}:
        corner = (PATCH * (patch % SIDE) + PATCH // 2, PATCH * (patch // SIDE) + PATCH // 2)
        assert picture.getpixel(corner) == (255, 255, 255)
    assert PLACES[6] == "at the bottom left"


def test_only_answers_and_their_ends_are_learned() -> None:
    """The labels of a conversation are its answer with the end of its turn."""
    chat: Chat = (((0, "red", "circle"),), "What is it?", "A red circle.")
    processor = make_processor(chat[1:])
    batch = encode_batch([chat], processor)
    learned = batch["labels"][batch["labels"] != IGNORED]
    assert processor.tokenizer.decode(learned) == "A red circle.<|end|>"

    # the tokens are those that the processor makes of the template
    parts = [{"type": "image"}, {"type": "text", "text": "\nWhat is it?"}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True
    )
    expected = processor(text=prompt, images=[paint(chat[0])], return_tensors="pt")
    num_learned = len(learned)
    assert torch.equal(batch["input_ids"][:, :-num_learned], expected["input_ids"])
    assert torch.equal(batch["pixel_values"], expected["pixel_values"])


def test_an_answer_is_right_word_for_word() -> None:
    """One of two answers is the right one."""
    chats: list[Chat] = [((), "Where?", "Here."), ((), "What?", "A red circle.")]
    assert right_share(chats, ["Here.", "A blue circle."]) == 0.5
