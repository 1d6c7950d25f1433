"""Checks of the arguments of the public calls."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from eagle.core.budget import Budget
from eagle.core.drafter import Drafter
from eagle.core.sampling import Sampling, to_int, whole
from eagle.core.trace import Trace

TEXT_INPUTS = ("input_ids", "attention_mask")
# inputs with such a name in a processor's output hold images or videos
IMAGES = re.compile("pixel|image|video")
ONE_PROMPT = "one prompt at a time"


def check_call(target: Any, drafter: Any, sampling: Any, budget: Any) -> None:
    """Refuse a target, drafter, sampling or budget that is of a wrong type or does not fit the others.

    Every public call that decodes runs this first, so that a mistake is named before a forward runs. All four come from
    a user, so they may be of any type.
    """
    # a target is told by its attribute `reader`, because eagle.core must not import eagle.target
    if isinstance(target, Drafter) and hasattr(drafter, "reader"):
        raise ValueError(
            "the drafter stands where the target belongs: call generate(target, drafter, prompt)"
        )
    # the class Target itself, in place of a loaded target, is refused as well
    if not hasattr(target, "reader") or isinstance(target, type):
        hint = (
            "pass Target(model, tokenizer)"
            if hasattr(target, "get_input_embeddings")
            else "load one: Target.load"
        )
        raise ValueError(f"the target is {_describe(target)}, expected a Target: {hint}")
    if not isinstance(drafter, Drafter):
        name = repr(str(drafter)) if isinstance(drafter, str) else "name"
        raise ValueError(
            f"the drafter is {_describe(drafter)}, expected a Drafter: pass load_drafter({name}, target), or let "
            "a drafter of your own inherit from eagle.core.drafter.Drafter"
        )
    if not isinstance(sampling, Sampling):
        raise ValueError(
            f"sampling is {_describe(sampling)}, expected a Sampling: as Sampling(temperature=0.7)"
        )
    # a policy chooses a budget for each cycle; it is any object with these attributes of the `Policy` protocol
    is_policy = hasattr(budget, "within") and hasattr(budget, "nodes")
    if budget is not None and not isinstance(budget, Budget) and not is_policy:
        raise ValueError(
            f"budget is {_describe(budget)}, expected a Budget or a policy: as Budget(nodes=8, depth=4)"
        )
    if budget is None:
        budget = drafter.budget or Budget()
    _check_rule(sampling, budget, drafter)
    # taps are the indices of the target's layers whose inputs the drafter reads
    if drafter.taps:
        target.check_taps(drafter.taps)
    # `bound_to` holds the target's head that the drafter was bound to, or nothing
    for head in drafter.bound_to:
        # compare the embeddings: the LM head may be narrowed to a draft vocabulary, the embedding never is
        bound = head.embedding.get_parameter("weight").shape
        expected = target.head.embedding.get_parameter("weight").shape
        if bound != expected:
            raise ValueError(
                f"the head is bound to a target of {bound[0]} tokens and width {bound[1]}, this one has "
                f"{expected[0]} and {expected[1]}: load_drafter(folder, target) binds it"
            )


def _check_rule(sampling: Sampling, budget: Any, drafter: Drafter) -> None:
    """Refuse sampled drafts, or a confidence threshold, that this verification rule or drafter does not support.

    Args:
        sampling: How the target samples. Typical acceptance looks at the target's probabilities alone, so it has no use
            for the probabilities that sampled drafts were drawn from.
        budget: A `Budget`, or a policy, which may lack the fields `confidence` and `draw`.
        drafter: The drafter, which may or may not predict how likely its nodes are accepted (`rates_nodes`).
    """
    check_confidence(getattr(budget, "confidence", None), drafter)
    if getattr(budget, "draw", None) != "sampled":
        return
    if sampling.typical is not None:
        raise ValueError(
            "typical acceptance asks the target alone: got sampled drafts, use Budget(draw='likeliest')"
        )


def check_confidence(confidence: float | None, drafter: Drafter) -> None:
    """Refuse a budget's confidence threshold if the drafter does not predict how likely its nodes are accepted.

    A head that was trained with a confidence output has `rates_nodes`.

    Args:
        confidence: `Budget.confidence`, the least predicted probability of acceptance at which a node gets children;
            None for no threshold.
        drafter: The drafter.
    """
    if confidence is not None and not drafter.rates_nodes:
        raise ValueError(
            f"Budget.confidence is {confidence}, and {type(drafter).__name__} cannot tell how likely a node is kept: "
            "leave it out, or draft with a head that learned to tell"
        )


def refuse_options(unknown: Iterable[str], options: Iterable[str]) -> None:
    """Refuse the `unknown` options of a call; the message says where such an option belongs, or the nearest known one.

    Args:
        unknown: Names of options that the call was given and does not have.
        options: Names of the options that it has.
    """
    # most unknown options are fields of Sampling or Budget that were passed to the call itself
    options = sorted(options)
    for name in unknown:
        # each class whose fields are looked through, and the option of the call that takes an instance of it
        owners: tuple[tuple[Any, str], ...] = ((Sampling, "sampling"), (Budget, "budget"))
        for owner, option in owners:
            if name in {field.name for field in fields(owner)}:
                raise ValueError(
                    f"generate has no option {name}: pass {option}={owner.__name__}({name}=...)"
                )
        raise ValueError(
            f"generate has no option {name}{nearest(name, options)}: expected some of {', '.join(options)}"
        )


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a question such as "did you mean x?" with the most similar known name; "" if none is similar."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def list_values(name: str, value: Any, count: int) -> list[Any]:
    """Return an option of a call as a list with one value for each prompt.

    Args:
        name: The option, for the error message.
        value: One value for all prompts, or a list or tuple with one for each.
        count: The number of prompts.
    """
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(
            f"{name} holds {len(value)} values for {count} prompts: expected one for all, or one for each"
        )
    return list(value)


def list_traces(traces: Any, count: int) -> list[Trace]:
    """Return a list of `count` traces, to which answers are written: the caller's, one for each prompt, or new ones.

    A trace is the record of one answer: its tokens, its cycles and why it ended.

    Args:
        traces: The caller's list; None for new traces.
        count: The number of prompts.
    """
    if traces is None:
        return [Trace([]) for _ in range(count)]
    if not isinstance(traces, (list, tuple)) or len(traces) != count:
        got = (
            f"holds {len(traces)}"
            if isinstance(traces, (list, tuple))
            else f"is {_describe(traces)}"
        )
        raise ValueError(f"trace {got}, expected a list of {count}, one for each prompt")
    for trace in traces:
        if not isinstance(trace, Trace):
            raise ValueError(f"trace is {_describe(trace)}, expected a new Trace() for each prompt")
    # two prompts that write to one trace would mix their answers
    if len({id(trace) for trace in traces}) < count:
        raise ValueError(
            "one trace is given for several prompts, expected one for each: [Trace() for _ in prompts]"
        )
    for trace in traces:
        check_unused(trace)
    return list(traces)


def check_unused(trace: Trace) -> None:
    """Refuse a trace (the record of one answer) that holds an answer already."""
    if trace.tokens or trace.cycles or trace.finish != "running":
        raise ValueError(
            f"the trace records an answer of {len(trace.tokens)} tokens already: pass a new Trace()"
        )


def boolean(name: str, value: Any) -> bool:
    """Return the value of the option `name`; ValueError if it is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {_describe(value)}, expected True or False")
    return value


def check_policy(policy: Any, samplings: Sequence[Sampling], batch_size: int) -> None:
    """Refuse a policy that cannot serve these requests or this batch size.

    A policy stands in place of a `Budget` and chooses the size of each draft (`eagle.core.budget.Policy`).

    Args:
        policy: A `Budget` or a policy; only policies may define `check_request`, which raises the error.
        samplings: Of each request.
        batch_size: The number of sequences in the batch.
    """
    check = getattr(policy, "check_request", None)
    if check is not None:
        check(samplings, batch_size)


def positive_int(name: str, value: Any) -> int:
    """Return the value of the option `name` as an int; ValueError if it is no whole number, or below 1."""
    number = whole(name, value)
    if number < 1:
        raise ValueError(f"{name} is {number}, expected 1 or more")
    return number


def positive_ints(name: str, values: Any) -> tuple[int, ...]:
    """Return the values of the option `name` as ints; ValueError if there are none, or one is below 1 or not whole."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(
            f"{name} is {_describe(values)}, expected whole numbers in a list, as (1, 4)"
        )
    numbers = tuple(positive_int(name, value) for value in values)
    if not numbers:
        raise ValueError(f"{name} is empty, expected whole numbers, as (1, 4)")
    return numbers


def prompt_rows(prompt: Any, batch_size: int | None = None) -> list[list[int]] | None:
    """Return several prompts as lists of token ids; None for a single prompt, which `token_ids` reads instead.

    A list of one prompt counts as several if the call has a `batch_size`.

    Args:
        prompt: Several prompts are a list of what `token_ids` takes, a tensor or array [B, T] of B prompts with T
            tokens each, or a tokenizer's output. The tokens that its `attention_mask` marks as padding are removed.
        batch_size: The caller's option, None if it was not passed. With a batch size even a list of one prompt returns
            a list.
    """
    is_output = isinstance(prompt, Mapping)
    rows = _list_rows(prompt.get("input_ids") if is_output else prompt)
    # one item without a batch size is a single prompt, as a tensor [1, T] is
    if batch_size is None and (rows is None or len(rows) <= 1):
        return None
    if rows is None:
        raise ValueError(
            f"batch_size is {batch_size}, expected several prompts beside it: pass a list of them"
        )
    if len(rows) > 1 and is_output and _media_in(prompt):
        raise ValueError(
            f"{len(rows)} prompts with images are one output of the processor, expected a list of outputs, one for each"
        )
    prompts = [token_ids(row) for row in rows]
    mask = prompt.get("attention_mask") if is_output else None
    # the mask of a prompt with images goes to the processor's own model inputs
    if mask is None or any(media_of(tokens) for tokens in prompts):
        return prompts

    # tokens that the attention mask marks with 0 are padding
    masks = [token_ids(row) for row in _list_rows(mask) or []]
    mask_lengths = [len(marks) for marks in masks]
    prompt_lengths = [len(tokens) for tokens in prompts]
    if mask_lengths != prompt_lengths:
        raise ValueError(
            f"attention_mask has rows of {mask_lengths} tokens, expected {prompt_lengths} as input_ids"
        )
    unpadded = []
    for tokens, marks in zip(prompts, masks, strict=True):
        unpadded.append([token for token, mark in zip(tokens, marks, strict=True) if mark])
    return unpadded


def _list_rows(value: Any) -> list[Any] | None:
    """Return the prompts of a value that can hold several, each in its own form, or None if it is a single prompt.

    `prompt` of the public calls may be either.
    """
    # a tensor or an array of any library: two dimensions are several prompts
    if hasattr(value, "tolist"):
        return list(value) if len(value.shape) == 2 else None
    if not isinstance(value, (list, tuple)):
        return None
    # a list holds prompts if its first item is a list of tokens or a processor's output; an empty list holds none
    if (
        not value
        or _is_row(value[0])
        or (isinstance(value[0], Mapping) and "input_ids" in value[0])
    ):
        return list(value)
    return None


def _is_row(item: Any) -> bool:
    """Return whether an item of a list is itself a list, tensor or array of tokens."""
    # a single number of numpy or torch has no dimensions
    return isinstance(item, (list, tuple)) or getattr(item, "ndim", 0) > 0


class PromptTokens(list[int]):
    """The tokens of a prompt with images, and what a processor gave beside them, as the model's forward takes it."""

    def __init__(self, tokens: Iterable[int], media: Mapping[str, Any]) -> None:
        """Hold the token ids as the items of the list, and the processor's other outputs, such as pixels, by name."""
        super().__init__(tokens)
        self.media = dict(media)


def media_of(prompt: Sequence[int]) -> dict[str, Any]:
    """Return what a processor made of a prompt's images, such as pixel values, by name; {} for a text prompt."""
    return prompt.media if isinstance(prompt, PromptTokens) else {}


def is_setting(name: str, value: Any) -> bool:
    """Return whether an input that a processor gave with image data is a setting, such as a layer of the image encoder.

    A setting is passed to the model as it is. All other inputs are data, and are made tensors on the model's device.
    """
    # a list of ints may be a list of layers; under a name such as "image_sizes" it is data
    if isinstance(value, (list, tuple)):
        return not IMAGES.search(name) and all(type(item) is int for item in value)
    return isinstance(value, (bool, int, float, str))


def token_ids(prompt: Any) -> list[int]:
    """Return the prompt as a list of ints.

    Args:
        prompt: A list, tensor or array [T] or [1, T], or a tokenizer's output. A processor's output with images gives
            `PromptTokens`, a list that also holds the other inputs of the model, such as pixels.
    """
    if isinstance(prompt, PromptTokens):
        return prompt
    # strings and mappings can be iterated, too, and would pass for lists: treat them first
    if isinstance(prompt, (str, bytes)):
        raise ValueError(
            "the prompt is text, expected token ids: use target.chat(text) or target.tokenizer.encode"
        )
    if isinstance(prompt, Mapping):
        return _input_ids(prompt)
    if hasattr(prompt, "tolist"):
        # a tensor or an array: [T], or [1, T] with one prompt
        shape = tuple(prompt.shape)
        if shape == () or shape[:-1] not in ((), (1,)):
            raise ValueError(f"{ONE_PROMPT}: got a tensor of shape {shape}, expected [T] or [1, T]")
        prompt = prompt.reshape(-1).tolist()
    # a set has no order, so it cannot be a sequence of tokens
    if not isinstance(prompt, Iterable) or isinstance(prompt, (set, frozenset)):
        raise ValueError(
            f"the prompt is {_describe(prompt)}, expected token ids in a list or a tensor [T] or [1, T]"
        )
    items = list(prompt)
    # a nested list such as [[1, 2, 3]] is one prompt
    if items and _is_row(items[0]):
        if len(items) > 1:
            raise ValueError(
                f"{ONE_PROMPT}: got {len(items)} rows, expected token ids [T] or [1, T]"
            )
        return token_ids(items[0])
    return [_token_id(item) for item in items]


def _input_ids(prompt: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a tokenizer's or processor's output with one prompt, in which padding is refused.

    With images among the outputs, the list is a `PromptTokens`, which keeps them for the model's forward.
    """
    if "input_ids" not in prompt:
        raise ValueError(
            f"the prompt holds {', '.join(map(str, prompt))}, expected input_ids as a tokenizer returns them; of a "
            "message use target.chat([message])"
        )
    mask = prompt.get("attention_mask")
    if mask is not None and not all(token_ids(mask)):
        raise ValueError(
            "the prompt's attention_mask hides padding: pass input_ids without padding, one prompt"
        )
    tokens = token_ids(prompt["input_ids"])
    media = _media_in(prompt)
    return PromptTokens(tokens, media) if media else tokens


def _media_in(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Return all outputs of a processor but tokens and mask, by name, if images are among them, else an empty dict.

    A vision model's forward takes them beside the tokens.
    """
    # inputs such as token types are needed only to tell image tokens from text, so they are dropped without images
    media = {
        name: value
        for name, value in prompt.items()
        if name not in TEXT_INPUTS and value is not None
    }
    return media if any(IMAGES.search(name) for name in media) else {}


def _token_id(item: Any) -> int:
    """Return an item of a prompt as an int; ValueError, with advice, if it is no token id."""
    # a frequent mistake: chat messages in place of their tokens
    if isinstance(item, Mapping) and {"role", "content"} & set(item):
        raise ValueError(
            "the prompt is a list of messages, expected token ids: use target.chat(messages)"
        )
    token = to_int(item)
    if token is None:
        raise ValueError(
            f"the prompt holds {_describe(item)}, expected token ids, which are whole numbers: of text and messages "
            "target.chat makes them"
        )
    return token


def _describe(value: Any) -> str:
    """Return how an error message names a value: classes by name, None, text and numbers by repr, others by type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    return f"of type {type(value).__name__}"
