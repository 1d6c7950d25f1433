"""Turn conversations into tokens and loss masks, from what the chat template prints for the assistant."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoProcessor, AutoTokenizer

from data_prep.chats.records import NO_ANSWER, TRUNCATED_NOTE, Conversation
from data_prep.chats.render import RenderedText, render_answers
from data_prep.chats.turns import SURROGATE, Dropped
from data_prep.conversations import Tally, read_conversations
from data_prep.image_texts import ImageReader, ShownText
from eagle.core.examples import Example, count_shared
from eagle.data.identity import folder_of, stop_ids
from eagle.formats.reading.files import parse_json
from eagle.log import progress
from eagle.recipe import DataSection, Recipe
from eagle.target.gguf import model_folder

# Keys of a loaded tokenizer's `init_kwargs`: what puts images into texts, the target's stop tokens, its path and
# revision. All but the first can be written as JSON, as `save_pretrained` does.
IMAGES = "image_reader"
STOP_IDS = "stop_ids"
TARGET = "target"
VOCAB_SIZE = "vocab_size"  # of the target, once a record of token ids has asked for it


def load_tokenizer(recipe: Recipe) -> Any:
    """Return the target's tokenizer, with the recipe's chat template if it names one."""
    target = recipe.target
    template = recipe.data.template
    folder = model_folder(target.path, target.revision)
    tokenizer = AutoTokenizer.from_pretrained(
        folder, revision=target.revision, trust_remote_code=target.trust_remote_code
    )
    if template:
        if not Path(template).is_file():
            raise ValueError(
                f"no chat template at data.template = {template}: expected a Jinja file"
            )
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {target.path} has no chat template: name a Jinja file in data.template"
        )
    tokenizer.init_kwargs[STOP_IDS] = stop_ids(target)
    tokenizer.init_kwargs[IMAGES] = load_image_reader(recipe)
    tokenizer.init_kwargs[TARGET] = [str(target.path), target.revision]
    return tokenizer


def vocab_size_of(target: str, revision: str | None) -> int:
    """Return the rows of the target's LM head by its config, which may be more than its tokenizer knows."""
    path = folder_of(target, revision, ("config.json",)) / "config.json"
    config = parse_json(path.read_bytes(), str(path))
    size = config.get("text_config", config).get("vocab_size")
    if not isinstance(size, int):
        raise ValueError(f"the config of {target} has vocab_size {size!r}, expected a number")
    return size


def load_image_reader(recipe: Recipe) -> ImageReader | None:
    """Return what puts images into the texts of a recipe; None where it reads none."""
    target, folder = recipe.target, recipe.data.images
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise ValueError(
            f"no folder at data.images = {folder}: expected the one that the paths of images begin in"
        )
    try:
        processor = AutoProcessor.from_pretrained(
            target.path, revision=target.revision, trust_remote_code=target.trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"data.images is {folder}, and nothing prepares images for {target.path}: {error}; expected a model that "
            "sees, with its preprocessor_config.json, and pillow (types that see videos need torchvision, too)"
        ) from None
    if not hasattr(processor, "image_processor"):
        raise ValueError(
            f"data.images is {folder}, and {target.path} is blind: expected a model that sees"
        )
    return ImageReader(processor, Path(folder))


def stop_texts(tokenizer: Any) -> list[str]:
    """Return the text of every token that is known to end an answer."""
    stops = tokenizer.convert_ids_to_tokens(tokenizer.init_kwargs.get(STOP_IDS, []))
    return [token for token in (tokenizer.eos_token, *stops) if token]


def tokenize_data(
    recipe: Recipe, tokenizer: Any, *, strict: bool = False
) -> tuple[list[Example], Tally]:
    """Return the recipe's training examples and the tally of its conversations, without a cache."""
    tally = Tally()
    examples: list[Example] = []
    for _, group in tokenize_each(recipe, tokenizer, tally, strict=strict):
        examples += group
    supervised = sum(int(example.loss_mask.sum()) for example in examples)
    tokens = sum(len(example.tokens) for example in examples)
    check_supervision(supervised, tokens, recipe.data.train, tally)
    return examples, tally


def check_supervision(supervised: int, tokens: int, source: str, tally: Tally) -> None:
    """Refuse examples of which nothing is supervised; warn where everything is."""
    if not supervised:
        raise ValueError(
            f"{explain_nothing(source, tally)}\nWhat became of its records:\n{tally.table()}"
        )
    if supervised == tokens:
        print("warning: every token is supervised; look at `eagle prepare RECIPE --only masks`")


def explain_nothing(source: str, tally: Tally) -> str:
    """Return why nothing is learned from a source, by what became of its records, and what to do."""
    if not tally.kept and tally.noted[TRUNCATED_NOTE]:
        return (
            f"{source} gives nothing to learn from: its answers were cut off ({tally.noted[TRUNCATED_NOTE]:,}), and "
            "none is learned. Raise regenerate.max_new_tokens, or set regenerate.keep_truncated=true to learn what "
            "they say; either needs another regenerate.out"
        )
    if not tally.kept and tally.dropped[NO_ANSWER]:
        return (
            f"{source} gives nothing to learn from: its records are questions without an answer "
            f"({tally.dropped[NO_ANSWER]:,}). Let the target answer first: name the file in regenerate.source, and run "
            "`eagle prepare`"
        )
    return f"{source} gives nothing to learn from: look at `eagle prepare RECIPE --only masks`"


def reading_options(recipe: Recipe) -> dict[str, Any]:
    """Return how the recipe's conversations are read; an error if they are answers that do not exist yet."""
    data = recipe.data
    if recipe.regenerate and data.train == recipe.regenerate.out and not Path(data.train).exists():
        raise ValueError(
            f"{data.train} is not there: run `eagle prepare RECIPE` first, which makes it"
        )
    return read_options(data)


def read_options(data: DataSection) -> dict[str, Any]:
    """Return how conversations are read with these settings."""
    options = {key: getattr(data, key) for key in ("limit", "split", "revision", "allow_broken")}
    return {**options, "images": data.images is not None}


def tokenize_each(
    recipe: Recipe, tokenizer: Any, tally: Tally, *, strict: bool = False
) -> Iterator[tuple[Conversation, list[Example]]]:
    """Yield every conversation of the recipe with its examples; one without examples is counted as dropped."""
    data = recipe.data
    conversations: Iterable[Conversation]
    conversations = read_conversations(data.train, tally, strict=strict, **reading_options(recipe))
    if strict:
        # Records that cannot be read are reported before those that cannot be learned. Else memory is bounded.
        conversations = list(conversations)
    for conversation in progress(conversations, "tokenise", None, unit="conversations"):
        dropped_before = tally.dropped.copy()
        examples = examples_of(conversation, tokenizer, data, tally)
        if not examples:
            tally.kept -= 1
            if strict:
                reason = next(iter(tally.dropped - dropped_before))
                raise ValueError(f"{conversation.id}: {reason}")
        yield conversation, examples


def examples_of(
    conversation: Conversation, tokenizer: Any, data: DataSection, tally: Tally
) -> list[Example]:
    """Return the examples of a conversation: several if the template rewrites history, none if it is dropped."""
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} says no offsets: expected a fast tokenizer (a tokenizer.json)"
        )
    notes: set[str] = set()
    examples: list[Example] = []
    texts: list[RenderedText] = []
    try:
        if conversation.row is not None:
            examples += examples_of_row(conversation, tokenizer, data.max_length, notes)
        else:
            texts = render_answers(
                conversation, tokenizer, data, stop_texts(tokenizer), notes=notes
            )
        shown = [show_text(text, conversation, tokenizer) for text in texts]
        for text, text_shown in zip(texts, shown, strict=True):
            example = example_of(text, text_shown, tokenizer, data.max_length, notes)
            if example is not None:
                examples.append(example)
        if not examples:
            raise Dropped("nothing supervised within max_length")
    except Dropped as reason:
        tally.dropped[str(reason)] += 1
        return []
    # The target reads what an example shares with the one before only once.
    for i, (before, example) in enumerate(pairwise(examples), start=1):
        shared = 0 if example.shown else count_shared(before.tokens, example.tokens)
        examples[i] = replace(example, shared=shared)
    if all(example.loss_mask.all() for example in examples):
        notes.add("everything is supervised")
    contents = "\0".join(str(turn.get("content") or "") for turn in conversation.messages)
    _, special_texts = backend_of(tokenizer, len(tokenizer))
    if any(text in contents for text in special_texts):
        notes.add("special-token text inside content")
    tally.noted.update(notes)
    count_images(examples, shown, tally)
    return examples


def show_text(text: RenderedText, conversation: Conversation, tokenizer: Any) -> ShownText | None:
    """Return a rendered text with its images in it; None if it has none."""
    reader: ImageReader | None = tokenizer.init_kwargs.get(IMAGES)
    if reader is None or not text.images:
        return None
    return reader.show(text.text, conversation.images[: text.images])


def count_images(
    examples: Sequence[Example], shown: Sequence[ShownText | None], tally: Tally
) -> None:
    """Count the images of a conversation, and the tokens that stand for them in all of its examples."""
    texts = [text for text in shown if text is not None]
    if examples and texts:
        tally.noted["images"] += max(len(text.shown.images) for text in texts)
        tally.noted["tokens of images"] += sum(text.image_tokens for text in texts)


def example_of(
    rendered: RenderedText,
    shown: ShownText | None,
    tokenizer: Any,
    max_length: int,
    notes: set[str],
) -> Example | None:
    """Return the tokens of a text, supervised in its answers; None if no answer starts before `max_length`."""
    text = rendered.text
    spans = rendered.spans
    if shown is not None:
        text, spans = shown.place(spans)
    tokens, offsets = encode(text, tokenizer)
    if shown is not None:
        shown.check(tokens, offsets, max_length)
    first, last = offsets[:max_length].unbind(1)
    mask = torch.zeros(len(first), dtype=torch.bool)
    for start, end in spans:
        # A token that overlaps an answer is supervised, even if it starts before it.
        mask |= (first < end) & (last > start)
        if ((first < start) & (last > start)).any():
            notes.add("a token straddles the start of an answer")
    if len(tokens) > max_length:
        notes.add("cut at max_length")
    if not mask.any():
        return None
    return Example(tokens[:max_length], mask, shown=None if shown is None else shown.shown)


def examples_of_row(
    conversation: Conversation, tokenizer: Any, max_length: int, notes: set[str]
) -> list[Example]:
    """Return the example of a record of token ids, cut at `max_length`; none if nothing before is supervised."""
    row = conversation.row
    assert row is not None
    vocab_size = tokenizer.init_kwargs.get(VOCAB_SIZE)
    if vocab_size is None:
        target = tokenizer.init_kwargs.get(TARGET)
        # A tokenizer that was not loaded with a target knows no larger vocabulary than its own.
        vocab_size = len(tokenizer) if target is None else vocab_size_of(*target)
        tokenizer.init_kwargs[VOCAB_SIZE] = vocab_size
    wrong = [token for token in row.tokens if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(
            f"{conversation.id}: its token ids hold {wrong[:5]}, expected 0..{vocab_size - 1}, the target's "
            "vocabulary: write the record with the target's own tokenizer"
        )
    if len(row.tokens) > max_length:
        notes.add("cut at max_length")
    mask = torch.tensor(row.mask[:max_length], dtype=torch.bool)
    if not mask.any():
        return []
    return [Example(torch.tensor(row.tokens[:max_length]), mask)]


def encode(text: str, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [T] of a text and the characters [T, 2] of each, without adding special tokens."""
    if SURROGATE.search(text):
        raise Dropped("half a surrogate pair: no valid text")
    # Chat templates print special tokens themselves.
    encoder, _ = backend_of(tokenizer, len(tokenizer))
    encoding = encoder.encode(text, add_special_tokens=False)
    tokens = np.fromiter(encoding.ids, np.int64)
    offsets = np.fromiter(chain(*encoding.offsets), np.int64)
    return torch.from_numpy(tokens), torch.from_numpy(offsets).view(-1, 2)


@lru_cache(maxsize=4)
def backend_of(tokenizer: Any, size: int) -> tuple[Any, tuple[str, ...]]:
    """Return the encoder without the step that adds special tokens and may trim offsets, and the special texts.

    `size` is the tokenizer's, so that tokens added later are not missed.
    """
    encoder = copy.deepcopy(tokenizer.backend_tokenizer)
    encoder.post_processor = None
    encoder.no_truncation()
    encoder.no_padding()
    return encoder, tuple(
        token.content for token in tokenizer.added_tokens_decoder.values() if token.special
    )
