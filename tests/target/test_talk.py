"""Messages with images: from paths to the tokens of a prompt, by the model's own processor."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from eagle import Target, generate
from eagle.core.arguments import PromptTokens
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.target.loading import choose_loader
from tests.families import build as build_text
from tests.seeing_folders import save_llava

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")


@pytest.fixture(scope="module")
def folder(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llava with a processor whose tokenizer is the tiny target's."""
    return save_llava(tiny_target_dir / "target", tmp_path_factory.mktemp("sees"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two drawn images of different sizes."""
    paths = []
    for number, size in enumerate(((16, 16), (24, 16))):
        image = Image.new("RGB", size, (200, 30 * number, 10))
        image.paste((0, 0, 255), (2, 2, 9, 9))
        paths.append(tmp_path_factory.mktemp("images") / f"{number}.png")
        image.save(paths[-1])
    return paths


def test_images_are_shown(folder: Path, pictures: list[Path]) -> None:
    """By a path, a data URL, OpenAI's form and an object alike; the answer is the stock model's.

    Special tokens are those that the template prints, as without images and as servers do it.
    """
    target, data = (
        Target.load(folder, dtype="float32"),
        base64.b64encode(pictures[1].read_bytes()).decode(),
    )
    url = f"data:image/png;base64,{data}"
    forms: list[dict[str, Any]] = [
        {"type": "image", "image": str(pictures[1])},
        {"type": "image", "path": pictures[1]},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": f"file://{pictures[1]}"},
        {"type": "image", "image": Image.open(pictures[1])},
    ]
    first = {"type": "image", "image": str(pictures[0])}
    prompts = []
    for form in forms:
        turns = [
            {"role": "user", "content": [first, {"type": "text", "text": "What is this?"}]},
            {"role": "assistant", "content": "A square."},
            {"role": "user", "content": [{"type": "text", "text": "And this?"}, form]},
        ]
        prompts.append(target.chat(turns))
    for prompt in prompts:
        assert isinstance(prompt, PromptTokens) and prompt == prompts[0]
        assert all(
            torch.equal(prompt.media[name], value) for name, value in prompts[0].media.items()
        )
    assert prompts[0].media["pixel_values"].shape == (2, 3, 16, 16)
    stock, processor = (
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32),
        target.processor,
    )
    printed = processor.apply_chat_template(
        [{**turn, "content": [forms[0] if part is forms[-1] else part for part in turn["content"]]}
         if isinstance(turn["content"], list) else {**turn, "content": [{"type": "text", "text": turn["content"]}]}
         for turn in turns],
        add_generation_prompt=True,
    )  # fmt: skip
    shown = [Image.open(path) for path in pictures]
    asked = processor(text=printed, images=shown, return_tensors="pt", add_special_tokens=False)
    assert asked["input_ids"][0].tolist() == prompts[0]
    said = stock.generate(
        **asked, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    trace = generate(target, NgramDrafter(), prompts[0], max_new_tokens=12, stop=[])
    assert trace.tokens == said[0, len(prompts[0]) :].tolist()


def test_what_cannot_be_shown_is_refused(
    folder: Path, pictures: list[Path], tiny_target: Target
) -> None:
    """In words: nothing is downloaded, and a model that is blind says so."""
    target = Target.load(folder, dtype="float32")
    wrong = {
        "nothing is downloaded: save it": {
            "type": "image_url",
            "image_url": {"url": "https://example.com/a.png"},
        },
        "no image at /no/such.png: expected a file": {"type": "image", "image": "/no/such.png"},
        "an image without a path": {"type": "image"},
    }
    for said, part in wrong.items():
        with pytest.raises(ValueError, match=said):
            target.chat([{"role": "user", "content": [part]}])
    shown = [{"role": "user", "content": [{"type": "image", "image": str(pictures[0])}]}]
    with pytest.raises(
        ValueError, match=r"nothing prepares them for this llama: expected a model that sees"
    ):
        tiny_target.chat(shown)


def test_a_plain_question_is_text(folder: Path) -> None:
    """It is tokenised as for a target that is blind, and has nothing beside its tokens."""
    target = Target.load(folder, dtype="float32")
    asked = [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}]
    prompt = target.chat(asked)
    assert (
        not isinstance(prompt, PromptTokens)
        and target.tokenizer.decode(prompt) == "<|user|>Who?<|assistant|>"
    )


def test_which_class_loads_a_model(folder: Path, tmp_path: Path) -> None:
    """The one for text where there is one, unless images are asked for."""
    assert (
        choose_loader(folder) is choose_loader(folder, images=True) is AutoModelForImageTextToText
    )
    build_text("llama").save_pretrained(tmp_path)
    assert choose_loader(tmp_path) is AutoModelForCausalLM
    with pytest.raises(ValueError, match="is a llama, which sees none: leave images out"):
        choose_loader(tmp_path, images=True)


def test_a_text_alone_is_printed_as_a_part(folder: Path) -> None:
    """A template of parts prints nothing of a plain text, which would be lost without a word."""
    target = Target.load(folder, dtype="float32")
    assert "What is a box?" in target.tokenizer.decode(target.chat("What is a box?"))
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is a box?"}]}]
    assert target.chat("What is a box?") == target.chat(parts)
