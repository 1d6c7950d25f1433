"""The small target that sees: pictures, questions about them, and a model with a processor that `Target` loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from eagle import Sampling, Target, generate, load_drafter
from recipes.tiny.make_seeing_target import draw_split, make_seeing_target, right_share, write_data
from recipes.tiny.scene_chats import KINDS, words_seen
from recipes.tiny.scenes import PATCH, SIDE, Scene, Thing, draw_scene, paint
from recipes.tiny.seeing_model import TEMPLATE, train_words
from recipes.tiny.train_seeing import IGNORED, Chat, encode_chat, label_patches

STEPS, IMAGES = 2, 6


@pytest.fixture(scope="module")
def seeing_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script writes, hardly trained."""
    folder = tmp_path_factory.mktemp("seeing")
    make_seeing_target(folder, STEPS, IMAGES)
    return folder


@pytest.fixture(scope="module")
def target(seeing_dir: Path) -> Target:
    """The target, loaded as any other."""
    return Target.load(seeing_dir / "target", dtype="float32")


def records(folder: Path, split: str) -> Iterator[dict[str, Any]]:
    """The records of a split."""
    return map(json.loads, (folder / "data" / f"{split}.jsonl").read_text().splitlines())


def test_records_name_images_that_are_there(seeing_dir: Path) -> None:
    """Each in one record, whose first question begins with the mark of an image; no other file is written."""
    images = seeing_dir / "data" / "images"
    chats = [record for split in ("train", "heldout") for record in records(seeing_dir, split)]
    named = [record["image"] for record in chats if "image" in record]
    assert sorted(named) == sorted(path.name for path in images.iterdir())
    assert len(named) == 2 * IMAGES == len(set(named))
    for record in chats:
        turns = record["conversations"]
        assert [turn["from"] for turn in turns] == ["human", "gpt"] * (len(turns) // 2)
        assert turns[0]["value"].startswith("<image>\n") == ("image" in record)
        assert "<image>" not in turns[0]["value"][8:] + "".join(turn["value"] for turn in turns[1:])
    assert sorted(path.name for path in seeing_dir.iterdir()) == [
        "data",
        "target",
        "target_report.json",
    ]


def test_a_second_call_finds_the_target(
    seeing_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same settings nothing is made again."""
    report = json.loads((seeing_dir / "target_report.json").read_text())
    assert make_seeing_target(seeing_dir, STEPS, IMAGES) == report
    assert "already there" in capsys.readouterr().out


def test_it_is_a_target_that_sees(seeing_dir: Path, target: Target) -> None:
    """A prompt with an image holds it, and drafts leave the answer as it is."""
    image = str(next((seeing_dir / "data" / "images").iterdir()))
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What do you see?"}]
    prompt = target.chat([{"role": "user", "content": parts}])
    assert prompt.media["pixel_values"].shape == (1, 3, PATCH * SIDE, PATCH * SIDE)  # type: ignore[attr-defined]
    assert list(prompt).count(target.model.config.image_token_id) == SIDE**2
    plain, drafted = (
        generate(
            target,
            load_drafter(name, target),
            prompt,
            sampling=Sampling(temperature=0),
            max_new_tokens=12,
        )
        for name in ("none", "ngram")
    )
    assert plain.tokens == drafted.tokens
    assert target.tokenizer.decode(target.chat("Hi")) == "<|user|>\nHi<|end|>\n<|assistant|>\n"
    assert target.stop_tokens == (target.tokenizer.convert_tokens_to_ids("<|end|>"),)


def test_the_template_prints_texts_and_parts(target: Target) -> None:
    """A text as it is; of a list of parts each image as its mark."""
    parts = [{"type": "image"}, {"type": "text", "text": "\nHi"}]
    for content in ("<image>\nHi", parts):
        text = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False
        )
        assert text == "<|user|>\n<image>\nHi<|end|>\n"
    assert target.tokenizer.chat_template == TEMPLATE


def test_data_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    """Records and images to the byte; another seed draws others, and no scene of one split is in the other."""
    files = []
    for name, seed in (("once", 0), ("again", 0), ("other", 1)):
        heldout = draw_split("heldout", 20, seed)
        train = draw_split(
            "train", 40, seed, frozenset(chat.scene for chat in heldout if chat.scene)
        )
        write_data(
            tmp_path / name, {"train": train, "heldout": heldout}, [chat.turns for chat in train]
        )
        files.append(
            {
                str(path.relative_to(tmp_path / name)): path.read_bytes()
                for path in tmp_path.rglob(f"{name}/*")
                if path.is_file()
            }
        )
        scenes = [chat.scene for chat in train + heldout if chat.scene]
        assert len(scenes) == 60 == len(set(scenes))
    assert files[0] == files[1] != files[2]


def test_answers_are_what_is_in_the_picture() -> None:
    """Every kind of question names only shapes that are there, in 8 to 50 words."""
    random = Random(0)
    for _ in range(300):
        scene = draw_scene(random)
        there = {word for thing in scene.things for word in (thing.colour, thing.shape)}
        for name, (_, ask) in KINDS.items():
            question, text = ask(scene, random)
            assert set(words_seen(question, text)) <= there, name
            assert 8 <= len(text.split()) <= 50, text
    scene = Scene((Thing(2, 0, "large", "red", "square", (0, 0)),), "white")
    assert KINDS["describe"][1](scene, random)[1].lower().count("at the bottom left") == 1
    assert paint(scene).getpixel((PATCH // 2, 4 * PATCH + PATCH // 2)) == (225, 45, 45)
    assert paint(scene).getpixel((2 * PATCH, 2 * PATCH)) == (250, 250, 250)
    labels = label_patches(scene).view(SIDE, SIDE, 5)
    assert labels[4, 0].tolist() == [1, 0, 1, 4, 0]
    assert labels[0, 3].tolist() == [4, 6, 2, 0, 3]


def test_answers_and_their_ends_are_learned_and_nothing_else() -> None:
    """The labels of a conversation are its answers, each with the end of its turn."""
    chat = Chat([("What is it?", "A red circle."), ("Where?", "On the left.")], None)
    words = train_words(text for turn in chat.turns for text in turn)
    tokens, labels = encode_chat(chat, Random(0), words)
    assert (
        words.decode([label for label in labels if label != IGNORED])
        == "A red circle.<|end|>On the left.<|end|>"
    )
    roles = ("user", "assistant")
    messages = [
        {"role": role, "content": text}
        for turn in chat.turns
        for role, text in zip(roles, turn, strict=True)
    ]
    assert tokens == words.apply_chat_template(messages, return_dict=False)


def test_the_share_that_is_right_counts_what_is_missing_and_what_is_too_much() -> None:
    """Words of the question count for nothing, and neither do questions without a picture."""
    scene = draw_scene(Random(0))
    chats = [Chat([("Where is the circle?", "The circle is red. A blue square is near.")], scene)]
    chats += [Chat([("What is green?", "Grass is green.")], None)]
    for text, share in (
        ("The circle is red. A blue square is near.", 1.0),
        ("The circle is green.", 0.0),
        ("It is red.", 1 / 3),
        ("It is red and blue and green, a square, a cross.", 3 / 5),
    ):
        assert right_share(chats, [[("", text)], [("", "Red.")]]) == pytest.approx(share)
