"""Prompts and answers of a target as people write them: chat templates, images, stop tokens, the generation config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle.core.arguments import token_ids
from eagle.core.sampling import refuse_fields
from eagle.core.verify import Sampling

IMAGE_PARTS = ("image", "image_url")  # types of a message's parts, of transformers and of OpenAI


class Talk:
    """What a target makes of messages; `processor` is what prepares images for it, None where nothing does."""

    model: Any
    config: Any
    tokenizer: Any
    processor: Any

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The EOS tokens of the generation config, the config and the tokenizer."""
        tokens: list[int] = []
        for owner in (self.model.generation_config, self.config, self.tokenizer):
            eos = getattr(owner, "eos_token_id", None)
            tokens += eos if isinstance(eos, list) else [] if eos is None else [eos]
        return tuple(dict.fromkeys(tokens))

    def chat(self, messages: str | list[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """Token ids of a conversation, or of one user message, with the generation prompt.

        A message's content may be a list of parts, of which {"type": "image", "image": path, data URL or PIL image} and
        OpenAI's `image_url` are shown to a target that sees. The tokens of such a prompt hold its images.
        """
        if not getattr(self.tokenizer, "chat_template", None) and not getattr(self.processor, "chat_template", None):
            raise ValueError("this target has no chat template: pass token ids, or load a tokenizer that has one")
        if not isinstance(messages, (str, list)) or not all(isinstance(turn, (str, dict)) for turn in messages):
            raise ValueError(f"messages is {messages!r:.60}, expected a text, or a list of dicts with role and content")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        kwargs = {"add_generation_prompt": True, **template_kwargs}
        if any(True for turn in messages for _ in images_of(turn)):
            return self._show(messages, kwargs)
        return self.tokenizer.apply_chat_template(messages, **{"return_dict": False, **kwargs})

    def _show(self, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> list[int]:
        """The tokens of a conversation with images, which they hold."""
        if self.processor is None:
            raise ValueError(
                f"the messages have images, and nothing prepares them for this {self.config.model_type}: expected a "
                "model that sees, with its preprocessor_config.json, and pillow (`pip install pillow`); where its type "
                "has a class for text alone, load it with images=True"
            )
        shown = [{**turn, "content": with_images(turn)} for turn in messages]
        kwargs = {"tokenize": True, "return_dict": True, "return_tensors": "pt", **kwargs}
        return token_ids(self.processor.apply_chat_template(shown, **kwargs))

    def default_sampling(self, **fields: Any) -> Sampling:
        """The sampling of the model's generation config with `fields` replaced; ValueError for unsupported settings."""
        refuse_fields(self.model.generation_config)
        config, _ = self.model._prepare_generation_config(None)  # with transformers' defaults, as a top-k of 50
        processors = self.model._get_logits_processor(generation_config=config, input_ids_seq_length=1)
        sampling = Sampling.from_processors(processors, **({} if config.do_sample else {"temperature": 0.0}))
        return replace(sampling, **fields)


def images_of(turn: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a message that are images."""
    content = turn.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
            yield part


def with_images(turn: dict[str, Any]) -> Any:
    """A message's content with every image in the form that processors take."""
    content, images = turn.get("content"), list(images_of(turn))
    if not isinstance(content, list):
        return [{"type": "text", "text": content or ""}]
    return [{"type": "image", "image": image_in(part)} if part in images else part for part in content]


def image_in(part: dict[str, Any]) -> Any:
    """The image of a part: a path that is there, a data URL, or an object that holds it."""
    image = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)
    image = image.get("url") if isinstance(image, dict) else image
    if image is None:
        raise ValueError(f"a message has an image without a path: got {part!r:.80}, expected 'image': path or data URL")
    if isinstance(image, Path):
        image = str(image)
    if not isinstance(image, str) or image.startswith("data:image/"):
        return image
    if "://" in image and not image.startswith("file://"):
        raise ValueError(f"the image {image:.80} is on a server, and nothing is downloaded: save it, and pass its path")
    path = image.removeprefix("file://")
    if not Path(path).is_file():
        raise ValueError(f"no image at {path}: expected a file")
    return path
