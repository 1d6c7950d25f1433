"""Prompts and answers of a target as people write them: chat templates, images, stop tokens, the generation config."""

# T tokens

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from eagle.core.arguments import PromptTokens, is_setting, media_of, token_ids
from eagle.core.examples import Shown
from eagle.core.sampling import refuse_fields
from eagle.core.verify import Sampling
from eagle.disk import sha256

TYPES = "token_type_ids"  # in the names of what a processor gives by token
IMAGE_PARTS = ("image", "image_url")  # types of a message's parts, of transformers and of OpenAI


class Talk:
    """What a target makes of messages; `processor` is what prepares images for it, None where nothing does."""

    model: Any
    config: Any
    tokenizer: Any
    processor: Any
    vocab_size: int
    max_positions: Any

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
        if self.processor is not None:  # templates of models that see need not print a plain text
            messages = [{**turn, "content": parts_of(turn.get("content"))} for turn in messages]
        return self.tokenizer.apply_chat_template(messages, **{"return_dict": False, **kwargs})

    def _show(self, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> list[int]:
        """The tokens of a conversation with images, which they hold."""
        if self.processor is None:
            raise ValueError(
                f"the messages have images, and nothing prepares them for this {self.config.model_type}: expected a "
                "model that sees, with its preprocessor_config.json, and pillow (`pip install pillow`; types that see "
                "videos need torchvision, too); where its type has a class for text alone, load it with images=True"
            )
        images = [image_in(part) for turn in messages for part in images_of(turn)]
        parts = [{**turn, "content": parts_of(turn.get("content"))} for turn in messages]
        text = self.processor.apply_chat_template(parts, **{**kwargs, "tokenize": False})
        return token_ids(process(self.processor, text, images))

    def check_prompt(self, prompt: list[int]) -> None:
        """Refuse a prompt that the model cannot read."""
        if not prompt:
            raise ValueError("the prompt is empty: expected at least one token id")
        if wrong := [token for token in prompt if not 0 <= token < self.vocab_size]:
            raise ValueError(f"token ids {wrong[:5]} are outside the vocabulary: expected 0..{self.vocab_size - 1}")
        if self.max_positions is not None and len(prompt) > self.max_positions:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, this model has {self.max_positions} positions: shorten it"
            )
        self.check_images(torch.tensor(prompt), media_of(prompt))

    def check_images(self, tokens: Tensor, media: Mapping[str, Any] | None) -> None:
        """Refuse tokens that stand for an image without one: they would be read as text."""
        names = ("image_token_id", "image_token_index")
        token = next((getattr(self.model.config, name) for name in names if hasattr(self.model.config, name)), None)
        if self.processor is not None and not media and token is not None and bool((tokens == token).any()):
            raise ValueError(
                f"the text has the token {token}, which stands for an image, and no image: pass what target.chat or "
                "the processor gave, which holds it; a part or a copy of its tokens does not"
            )

    def default_sampling(self, **fields: Any) -> Sampling:
        """The sampling of the model's generation config with `fields` replaced; ValueError for unsupported settings."""
        refuse_fields(self.model.generation_config)
        config, _ = self.model._prepare_generation_config(None)  # with transformers' defaults, as a top-k of 50
        processors = self.model._get_logits_processor(generation_config=config, input_ids_seq_length=1)
        sampling = Sampling.from_processors(processors, **({} if config.do_sample else {"temperature": 0.0}))
        return replace(sampling, **fields)


def process(processor: Any, text: str, images: Sequence[Any]) -> Mapping[str, Any]:
    """The processor's output for a printed text and its images, which are PIL images, paths or data URLs.

    A template prints its own special tokens, so none are added.
    """
    opened = processor.image_processor.fetch_images(list(images))
    return processor(text=[text], images=[opened], return_tensors="pt", add_special_tokens=False)


def prepare_media(processor: Any, shown: Shown, tokens: Tensor) -> dict[str, Any]:
    """What stands beside the tokens [T] of a text with images, as the model's forward takes it.

    The images must be those that the text was tokenised with; of what stands behind the tokens nothing is given.
    """
    if processor is None:
        raise ValueError(
            "the data have images, and nothing prepares them for this target: expected a model that sees with its "
            "preprocessor_config.json, and target.images=true where its type has a class for text alone, too"
        )
    for path, checksum in shown.images:
        if sha256(Path(path)) != checksum:
            raise ValueError(
                f"the image {path} is not the one that was there when its text was tokenised: put that one back, or "
                "remove the cache of tokens (data.cache) and the feature store, which are made anew"
            )
    text = first_tokens(token_ids(process(processor, shown.text, [path for path, _ in shown.images])), len(tokens))
    if text != tokens.tolist():
        raise ValueError(
            f"the target's processor gives other tokens for the text {shown.text!r:.60} than when it was tokenised: "
            "remove the cache of tokens (data.cache) and the feature store, which are made anew"
        )
    return media_of(text)


def inputs_of(model: Any, prompt: list[int], answer: list[int]) -> dict[str, Any]:
    """What the model's own forward takes for a prompt, with its images, and the beginning of an answer."""
    text = with_answer(prompt, answer)
    inputs: dict[str, Any] = {"input_ids": torch.tensor([text], device=model.device)}
    for name, value in media_of(text).items():
        if is_setting(name, value):
            inputs[name] = value
        else:
            inputs[name] = value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)
    return inputs


def first_tokens(text: list[int], count: int) -> list[int]:
    """The first tokens of a text, among them those of all its images, which they hold."""
    media = {name: value[:, :count] if TYPES in name else value for name, value in media_of(text).items()}
    return PromptTokens(text[:count], media) if media else text[:count]


def with_answer(prompt: list[int], answer: list[int]) -> list[int]:
    """The tokens of a prompt and the beginning of an answer, which hold the prompt's images."""
    media = {  # the answer is text, whose type is 0
        name: pad(value, (0, len(answer))) if TYPES in name else value for name, value in media_of(prompt).items()
    }
    return PromptTokens([*prompt, *answer], media) if media else [*prompt, *answer]


def images_of(turn: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a message that are images."""
    content = turn.get("content")
    yield from filter(is_image, content if isinstance(content, list) else ())


def is_image(part: Any) -> bool:
    """Whether a part of a message is an image."""
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def parts_of(content: Any) -> list[Any]:
    """A message's content as the list of parts that templates of models that see print."""
    if not isinstance(content, list):
        return [{"type": "text", "text": content}] if content else []
    return [{"type": "image"} if is_image(part) else part for part in content]


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
