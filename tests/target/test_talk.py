"""Messages with images: from paths to the tokens of a prompt, by the model's own processor."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from eagle import Target
from eagle.core.arguments import PromptTokens
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.target.loading import choose_loader
from tests.families import build as build_text
from tests.seeing_folders import save_llava
from tests.target.decoded import decode

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")


@pytest.fixture(scope="module")
def folder(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random Llava with a processor whose tokenizer is the tiny target's."""
    return save_llava(tiny_target_dir / "target", tmp_path_factory.mktemp("sees"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    """Return that Llava as a target."""
    return Target.load(folder, dtype="float32")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two images of different sizes."""
    paths = []

    for number, width in enumerate((16, 24)):
        image = Image.new("RGB", (width, 16), (200, 30 * number, 10))
        # something to tell apart, or a resized image would be all one colour
        image.paste((0, 0, 255), (2, 2, 9, 9))
        paths.append(tmp_path_factory.mktemp("images") / f"{number}.png")
        image.save(paths[-1])

    return paths


def ask_about(pictures: list[Path], second: dict[str, Any]) -> list[dict[str, Any]]:
    """Return two turns, of which the second shows an image in some form."""
    first = {"type": "image", "image": str(pictures[0])}
    answer = {"type": "text", "text": "A square."}
    return [
        {"role": "user", "content": [first, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": [answer]},
        {"role": "user", "content": [{"type": "text", "text": "And this?"}, second]},
    ]


@pytest.mark.parametrize("form", ["image", "path", "data URL", "file URL", "object"])
def test_an_image_is_shown_in_any_form(form: str, pictures: list[Path], target: Target) -> None:
    """The tokens and the pixels are those of the stock processor for the same template."""
    path = pictures[1]
    data = base64.b64encode(path.read_bytes()).decode()
    part = {
        "image": {"type": "image", "image": str(path)},
        "path": {"type": "image", "path": path},
        "data URL": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        "file URL": {"type": "image_url", "image_url": f"file://{path}"},
        "object": {"type": "image", "image": Image.open(path)},
    }[form]
    prompt = target.chat(ask_about(pictures, part))
    assert isinstance(prompt, PromptTokens)
    assert prompt.media["pixel_values"].shape == (2, 3, 16, 16)

    processor = target.processor
    turns = ask_about(pictures, {"type": "image", "image": str(path)})
    printed = processor.apply_chat_template(turns, add_generation_prompt=True)
    images = [Image.open(each) for each in pictures]
    # the template prints the special tokens, and servers add none
    options = {"return_tensors": "pt", "add_special_tokens": False}
    expected = processor(text=printed, images=images, **options)
    # the stock processor is the oracle
    assert prompt == expected["input_ids"][0].tolist()
    assert torch.equal(prompt.media["pixel_values"], expected["pixel_values"])
    if form == "image":
        stock = AutoModelForImageTextToText.from_pretrained(target.model.name_or_path)
        ends = {"eos_token_id": None, "pad_token_id": 0}
        tokens = stock.generate(
            **expected,
            max_new_tokens=12,
            do_sample=False,
            **ends,
        )
        answer = decode(target, NgramDrafter(), prompt, 12)
        assert answer == tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
            "nothing is downloaded",
        ),
        ({"type": "image", "image": "/no/such.png"}, "no image at /no/such.png"),
        ({"type": "image"}, "an image without a path"),
    ],
)
def test_what_cannot_be_shown_is_refused(part: Any, message: str, target: Target) -> None:
    """Errors name what is missing."""
    with pytest.raises(ValueError, match=message):
        target.chat([{"role": "user", "content": [part]}])


def test_images_for_a_text_model_are_refused(pictures: list[Path], tiny_target: Target) -> None:
    """Nothing would look at them."""
    part = {"type": "image", "image": str(pictures[0])}
    with pytest.raises(ValueError, match="expected a model that sees"):
        tiny_target.chat([{"role": "user", "content": [part]}])


def test_a_question_without_images_is_text(target: Target) -> None:
    """It has nothing beside its tokens, and a plain string means the same as one part.

    A template of parts prints nothing of a plain string, which would be lost without a word.
    """
    prompt = target.chat([{"role": "user", "content": [{"type": "text", "text": "Who?"}]}])
    assert not isinstance(prompt, PromptTokens)
    assert target.tokenizer.decode(prompt) == "<|user|>Who?<|assistant|>"
    # the template prints parts, and a string has none
    assert target.chat("Who?") == prompt


def test_which_class_loads_a_model(folder: Path, tmp_path: Path) -> None:
    """The one for text where there is one, unless images are asked for."""
    assert choose_loader(folder) is AutoModelForImageTextToText
    assert choose_loader(folder, images=True) is AutoModelForImageTextToText

    build_text("llama").save_pretrained(tmp_path)

    assert choose_loader(tmp_path) is AutoModelForCausalLM
    with pytest.raises(ValueError, match="is a llama, which sees none"):
        choose_loader(tmp_path, images=True)


def test_a_list_of_texts_is_no_conversation(target: Target) -> None:
    with pytest.raises(
        ValueError, match="expected a text, or a list of dicts with role and content"
    ):
        target.chat(["Hello", "again"])  # type: ignore[list-item]
