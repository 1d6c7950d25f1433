"""The small vision target: pictures, questions about them, and a model with a processor that `Target` loads."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from eagle import Sampling, Target, generate, load_drafter
from recipes.tiny.make_seeing_target import draw_split, make_seeing_target, right_share, write_data
from recipes.tiny.scene_chats import KINDS, words_seen
from recipes.tiny.scenes import PATCH, SIDE, Scene, Thing, draw_scene, paint
from recipes.tiny.seeing_model import TEMPLATE, train_words
from recipes.tiny.train_seeing import IGNORED, Chat, encode_chat, label_patches
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
            turns = record["conversations"]
            assert [turn["from"] for turn in turns] == ["human", "gpt"] * (len(turns) // 2)

            texts = "".join(turn["value"] for turn in turns)
            has_image = "image" in record
            assert texts.startswith("<image>\n") == has_image
            assert texts.count("<image>") == has_image

            if has_image:
                named.append(record["image"])

    images = (seeing_dir / "data/images").iterdir()

    assert sorted(named) == sorted(path.name for path in images)
    assert len(named) == 2 * IMAGES

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
        trace = generate(target, drafter, prompt, sampling=Sampling(), max_new_tokens=12)
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


def write_splits(folder: Path, seed: int) -> dict[str, bytes]:
    """Write data of a seed, check that no scene is in both splits, and return the files."""
    # training avoids the scenes that are held out
    heldout = draw_split("heldout", 20, seed)
    avoided = frozenset(chat.scene for chat in heldout if chat.scene)
    train = draw_split("train", 40, seed, avoided)
    scenes = [chat.scene for chat in train + heldout if chat.scene]

    assert len(scenes) == len(set(scenes)) == 60

    write_data(folder, {"train": train, "heldout": heldout}, [chat.turns for chat in train])
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_data_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    """Records and images agree to the byte; another seed draws others."""
    first = write_splits(tmp_path / "first", 0)
    assert write_splits(tmp_path / "again", 0) == first
    assert write_splits(tmp_path / "other", 1) != first


def test_answers_name_only_what_is_in_the_picture() -> None:
    """Every kind of question is answered with shapes and colours of its scene, in 8 to 50 words."""
    random = Random(0)
    for _ in range(300):
        scene = draw_scene(random)
        words = {thing.colour for thing in scene.things} | {thing.shape for thing in scene.things}
        for name, (_, ask) in KINDS.items():
            question, text = ask(scene, random)
            assert set(words_seen(question, text)) <= words, name
            assert 8 <= len(text.split()) <= 50, text


def test_a_scene_is_painted_and_labelled_where_it_says() -> None:
    """A large red square at the bottom left of a white picture."""
    scene = Scene((Thing(2, 0, "large", "red", "square", (0, 0)),), "white")
    _, text = KINDS["describe"][1](scene, Random(0))

    assert text.lower().count("at the bottom left") == 1

    picture = paint(scene)
    red = picture.getpixel((PATCH // 2, 4 * PATCH + PATCH // 2))
    assert red == (225, 45, 45)
    assert picture.getpixel((2 * PATCH, 2 * PATCH)) == (250, 250, 250)

    # [row of patches, column, label]
    labels = label_patches(scene).view(SIDE, SIDE, 5)
    expected = torch.tensor([[1, 0, 1, 4, 0], [4, 6, 2, 0, 3]])
    assert torch.equal(labels[[4, 0], [0, 3]], expected)


def test_only_answers_and_their_ends_are_learned() -> None:
    """The labels of a conversation are its answers, each with the end of its turn."""
    chat = Chat([("What is it?", "A red circle."), ("Where?", "On the left.")], None)
    messages = []
    for question, text in chat.turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": text})

    words = train_words(message["content"] for message in messages)
    tokens, labels = encode_chat(chat, Random(0), words)
    learned = [label for label in labels if label != IGNORED]

    assert words.decode(learned) == "A red circle.<|end|>On the left.<|end|>"
    assert tokens == words.apply_chat_template(messages, return_dict=False)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("The circle is red. A blue square is near.", 1.0),
        ("The circle is green.", 0.0),
        ("It is red.", 1 / 3),
        ("It is red and blue and green, a square, a cross.", 3 / 5),
    ],
)
def test_the_share_that_is_right_counts_missing_and_extra_words(text: str, share: float) -> None:
    """Words of the question do not count, and neither do questions without a picture."""
    question = ("Where is the circle?", "The circle is red. A blue square is near.")
    about_a_picture = Chat([question], draw_scene(Random(0)))
    chats = [about_a_picture, Chat([("What is green?", "Grass is green.")], None)]
    assert right_share(chats, [[("", text)], [("", "Red.")]]) == pytest.approx(share)
