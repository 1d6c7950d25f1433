"""Prompts and answers of a target as people write them: chat templates, images, stop tokens, the generation config."""

# T tokens

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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

# part of the names of a processor's outputs that have an entry for each token
TYPES = "token_type_ids"
# the "type" of an image among a message's content parts, in transformers and in OpenAI's API
IMAGE_PARTS = ("image", "image_url")


class ChatMixin:
    """The part of `Target` that deals with messages, images and the generation config.

    `processor` prepares images for the model; it is None for a model without one.
    """

    model: Any
    config: Any
    tokenizer: Any
    processor: Any
    vocab_size: int
    max_positions: Any

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The ids of the tokens that end an answer: the EOS tokens of generation config, config and tokenizer."""
        tokens: list[int] = []
        for owner in (self.model.generation_config, self.config, self.tokenizer):
            # an id, a list of ids, or None
            eos = getattr(owner, "eos_token_id", None)
            if isinstance(eos, list):
                tokens += eos
            elif eos is not None:
                tokens.append(eos)
        return tuple(dict.fromkeys(tokens))

    def chat(self, messages: str | list[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """Return the prompt of a conversation: its token ids, which end with the generation prompt.

        Args:
            messages: dicts with role and content, or the content of one user message. A content may be a list of parts;
                its images, as {"type": "image", "image": path, data URL or PIL image} or OpenAI's `image_url`, are
                passed to a vision model. The tokens of such a prompt hold its images.
            template_kwargs: arguments of the chat template.
        """
        # a vision model may have its template in its processor
        if not getattr(self.tokenizer, "chat_template", None) and not getattr(
            self.processor, "chat_template", None
        ):
            raise ValueError(
                "this target has no chat template: pass token ids, or load a tokenizer that has one"
            )
        is_conversation = isinstance(messages, list) and all(
            isinstance(turn, dict) for turn in messages
        )
        if not (isinstance(messages, str) or is_conversation):
            raise ValueError(
                f"messages is {messages!r:.60}, expected a text, or a list of dicts with role and content"
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        kwargs = {"add_generation_prompt": True, **template_kwargs}
        image_parts = [part for turn in messages for part in images_of(turn)]
        if image_parts:
            return self._tokenize_with_images(messages, image_parts, kwargs)
        # the templates of some vision models print only contents that are lists of parts, and drop a plain string
        if self.processor is not None:
            messages = list_parts(messages)
        # `return_dict` False: token ids alone
        return self.tokenizer.apply_chat_template(messages, **{"return_dict": False, **kwargs})

    def _tokenize_with_images(
        self,
        messages: list[dict[str, Any]],
        image_parts: list[dict[str, Any]],
        kwargs: dict[str, Any],
    ) -> list[int]:
        """Return the token ids of a conversation with images, as a list that also holds what the model reads of them.

        Args:
            messages: the conversation.
            image_parts: the content parts of its messages that are images, in order.
            kwargs: arguments of the chat template.
        """
        if self.processor is None:
            raise ValueError(
                f"the messages have images, and nothing prepares them for this {self.config.model_type}: expected a "
                "model that sees, with its preprocessor_config.json, and pillow (`pip install pillow`; types that see "
                "videos need torchvision, too); where its type has a class for text alone, load it with images=True"
            )
        images = [image_in(part) for part in image_parts]
        # with an image token in the place of each image
        text = self.processor.apply_chat_template(
            list_parts(messages),
            **{**kwargs, "tokenize": False},
        )
        return token_ids(process(self.processor, text, images))

    def check_prompt(self, prompt: list[int]) -> None:
        """Refuse a prompt that is empty or too long, or that has unknown tokens or image tokens without images."""
        if not prompt:
            raise ValueError("the prompt is empty: expected at least one token id")
        wrong = [token for token in prompt if not 0 <= token < self.vocab_size]
        if wrong:
            raise ValueError(
                f"token ids {wrong[:5]} are outside the vocabulary: expected 0..{self.vocab_size - 1}"
            )
        if self.max_positions is not None and len(prompt) > self.max_positions:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, this model has {self.max_positions} positions: shorten it"
            )
        self.check_images(torch.tensor(prompt), media_of(prompt))

    def check_images(self, tokens: Tensor, media: Mapping[str, Any] | None) -> None:
        """Refuse image tokens without an image, which the model would read as text.

        `media` is what the processor gave for images, None or empty for none. `tokens` are token ids of any shape.
        """
        if self.processor is None or media:
            return
        config = self.model.config
        token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        if token is not None and bool((tokens == token).any()):
            raise ValueError(
                f"the text has the token {token}, which stands for an image, and no image: pass what target.chat or "
                "the processor gave, which holds it; a part or a copy of its tokens does not"
            )

    def default_sampling(self, **fields: Any) -> Sampling:
        """Return the sampling that the model's generation config asks for, with `fields` of `Sampling` replaced.

        Raises:
            ValueError: for unsupported settings.
        """
        refuse_fields(self.model.generation_config)
        # transformers fills in its own defaults, such as a top-k of 50; the second item is arguments of the forward
        config, _ = self.model._prepare_generation_config(None)
        # the config's settings as transformers' logits processors, from which `Sampling` reads them
        processors = self.model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=1,
        )
        greedy = {} if config.do_sample else {"temperature": 0.0}
        return replace(Sampling.from_processors(processors, **greedy), **fields)


def process(processor: Any, text: str, images: Sequence[Any]) -> Mapping[str, Any]:
    """Return the processor's tokens and image inputs for a text with images.

    Args:
        processor: the model's processor.
        text: as the chat template has printed it, with its special tokens, so that none are added.
        images: PIL images, paths or data URLs, in the order of their places in the text.
    """
    # paths and data URLs are opened
    opened = processor.image_processor.fetch_images(list(images))
    return processor(text=[text], images=[opened], return_tensors="pt", add_special_tokens=False)


def prepare_media(processor: Any, shown: Shown, tokens: Tensor) -> dict[str, Any]:
    """Return the inputs of the model's forward for a training sequence with images, except its tokens.

    Args:
        processor: the target's processor.
        shown: the sequence's text, and the paths and checksums of its images.
        tokens: [T], the T tokens that the feature store holds; the text may go on after them.

    Raises:
        ValueError: if the images or the processor are not those that the text was tokenised with.
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
                "remove the cache of tokens (data.cache) and the feature store: they are created again"
            )
    # the store may have cut the sequence after T tokens
    whole = token_ids(process(processor, shown.text, [path for path, _ in shown.images]))
    sequence = first_tokens(whole, len(tokens))
    if sequence != tokens.tolist():
        raise ValueError(
            f"the target's processor gives other tokens for the text {shown.text!r:.60} than when it was tokenised: "
            "remove the cache of tokens (data.cache) and the feature store: they are created again"
        )
    return media_of(sequence)


def inputs_of(model: Any, prompt: list[int], answer: list[int]) -> dict[str, Any]:
    """Return the arguments of the model's own forward for a prompt with its images and the beginning of an answer."""
    sequence = with_answer(prompt, answer)
    inputs: dict[str, Any] = {"input_ids": torch.tensor([sequence], device=model.device)}
    for name, value in media_of(sequence).items():
        if not is_setting(name, value):
            # pixels take the model's dtype, and indices stay integers
            dtype = model.dtype if value.is_floating_point() else value.dtype
            value = value.to(model.device, dtype)
        inputs[name] = value
    return inputs


def first_tokens(sequence: list[int], count: int) -> list[int]:
    """Return the first `count` tokens of a sequence, with its images, all of whose tokens must be among them.

    A feature store may cut sequences, and then needs the images of the rest.
    """
    return _with_media(sequence[:count], media_of(sequence), lambda types: types[:, :count])


def with_answer(prompt: list[int], answer: list[int]) -> list[int]:
    """Return the tokens of a prompt and the beginning of an answer, with the prompt's images.

    Reading it shows what the target would answer next.
    """
    # token types are padded by 0, the type of text, for the answer
    return _with_media(
        [*prompt, *answer],
        media_of(prompt),
        lambda types: pad(types, (0, len(answer))),
    )


def _with_media(
    tokens: list[int],
    media: Mapping[str, Any],
    fit: Callable[[Tensor], Tensor],
) -> list[int]:
    """Return tokens as a list that holds image inputs, or plainly if there are none.

    Args:
        tokens: the token ids.
        media: a processor's inputs for images.
        fit: cuts or pads an input [1, T] that has an entry for each token, to the number of these tokens.
    """
    if not media:
        return tokens
    fitted = {name: fit(value) if TYPES in name else value for name, value in media.items()}
    return PromptTokens(tokens, fitted)


def images_of(turn: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the content parts of a chat message that are images."""
    content = turn.get("content")
    if isinstance(content, list):
        yield from filter(is_image, content)


def is_image(part: Any) -> bool:
    """Return whether a content part of a chat message is an image, in transformers' or OpenAI's form."""
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def list_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are lists of parts, as the chat templates of vision models need them.

    An image becomes a part without its data, for which the template prints the image token.
    """
    listed = []
    for turn in messages:
        content = turn.get("content")
        if isinstance(content, list):
            parts = [{"type": "image"} if is_image(part) else part for part in content]
        elif content:
            parts = [{"type": "text", "text": content}]
        else:
            parts = []
        listed.append({**turn, "content": parts})
    return listed


def image_in(part: dict[str, Any]) -> Any:
    """Return the image of a message's content part: a file's path, a data URL, or an object such as a PIL image."""
    images = [
        part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None
    ]
    image = images[0] if images else None
    # OpenAI's parts hold the address in a dict: {"image_url": {"url": ..}}
    if isinstance(image, dict):
        image = image.get("url")
    if image is None:
        raise ValueError(
            f"a message has an image without a path: got {part!r:.80}, expected 'image': path or data URL"
        )
    if isinstance(image, Path):
        image = str(image)
    if not isinstance(image, str) or image.startswith("data:image/"):
        return image
    if "://" in image and not image.startswith("file://"):
        raise ValueError(
            f"the image {image:.80} is on a server, and nothing is downloaded: save it, and pass its path"
        )
    path = image.removeprefix("file://")
    if not Path(path).is_file():
        raise ValueError(f"no image at {path}: expected a file")
    return path
