"""The calls for users: text, messages and names where the modules below take tokens, drafters and recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from eagle.core.arguments import nearest
from eagle.core.budget import Budget, Policy
from eagle.core.drafter import Drafter
from eagle.core.sampling import Sampling
from eagle.decoding import decode
from eagle.decoding.decode import Stop
from eagle.formats.checkpoint import WEIGHTS, load_drafter
from eagle.recipe import OTHER_NAMES, Recipe, TrainSection
from eagle.shipped import reach_stages
from eagle.target.target import Target

SECTIONS = set(Recipe.model_fields) - {"target"}


def generate(
    target: Target,
    drafter: Drafter | str | Path,
    prompt: Any,
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    stop: Stop = None,
    budget: Budget | Policy | None = None,
    timing: bool = False,
    trace: Any = None,
    batch_size: int | None = None,
    max_tokens_in_cache: int | None = None,
    **unknown: Any,
) -> Any:
    """Return the target's answer to a prompt, accelerated by a drafter that does not change it.

    Args:
        target: The model that answers.
        drafter: A drafter, or its name: a head's folder or hub id, or a method without weights, such as "ngram".
        prompt: The text of a user's message, a list of messages, or token ids as a list, tensor or tokenizer's output.
            For several prompts, a list of these.
        temperature: Sampling temperature; 0, the default, is greedy.
        top_p: Sample only from the most probable tokens with this total probability.
        top_k: Sample only from this many of the most probable tokens.
        seed: Seed for sampling.
        sampling: A `Sampling`, in place of the four arguments above; one for all prompts, or a list with one per
            prompt. With one for all, each prompt has its own random numbers.
        max_new_tokens: Length limit of an answer; one for all prompts, or a list with one per prompt.
        stop: A token id, a string, or several; None means the target's stop tokens, an empty list none.
        budget: The draft tree, or a policy that chooses it; by default the drafter's budget.
        timing: Whether traces record the seconds of each cycle.
        trace: An empty `Trace` to write to, or one per prompt.
        batch_size: Maximum number of prompts decoded at once; the next prompt starts when one has ended.
        max_tokens_in_cache: Maximum number of tokens in the KV cache, including padding.

    Returns:
        A `Trace` with `text`, `tokens` and `acceptance_length`. For several prompts, or with a `batch_size`, a list of
        traces in the order of the prompts.

    Raises:
        Exception: If the only answer, or every answer, failed. If some of several fail, `trace.error` has the
            exception, and a warning counts them.

    Example:
        >>> target = Target.load("runs/demo/target")  # doctest: +SKIP
        >>> generate(target, "runs/demo/eagle1/head", "Hello", temperature=0.7).text  # doctest: +SKIP
    """
    # the decoder below takes tokens, a loaded drafter and one Sampling
    shortcuts = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    return decode.generate(
        target,
        open_drafter(drafter, target),
        encode_prompt(target, prompt),
        sampling=join_sampling(sampling, shortcuts),
        max_new_tokens=max_new_tokens,
        stop=stop,
        budget=budget,
        timing=timing,
        trace=trace,
        batch_size=batch_size,
        max_tokens_in_cache=max_tokens_in_cache,
        **unknown,
    )


def stream(
    target: Target,
    drafter: Drafter | str | Path,
    prompt: Any,
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    stop: Stop = None,
    budget: Budget | Policy | None = None,
    timing: bool = False,
    trace: Any = None,
    batch_size: int | None = None,
    max_tokens_in_cache: int | None = None,
    **unknown: Any,
) -> Iterator[Any]:
    """Yield new tokens as they are committed, as lists with a `text`.

    The arguments are those of `generate`. With several prompts, or a `batch_size`, items are pairs (index of the
    prompt, new tokens). Each forward pass of the target adds the accepted draft tokens and one more token.

    Example:
        >>> for new in stream(target, "ngram", "Count to ten."):  # doctest: +SKIP
        ...     print(new.text, end="")
    """
    # no generator itself, so that its arguments are checked at the call, before the first token is asked for
    shortcuts = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    return decode.stream(
        target,
        open_drafter(drafter, target),
        encode_prompt(target, prompt),
        sampling=join_sampling(sampling, shortcuts),
        max_new_tokens=max_new_tokens,
        stop=stop,
        budget=budget,
        timing=timing,
        trace=trace,
        batch_size=batch_size,
        max_tokens_in_cache=max_tokens_in_cache,
        **unknown,
    )


def train(
    model: Any,
    tokenizer: Any,
    conversations: Any,
    *,
    method: str = "eagle1",
    output_dir: str | Path,
    **settings: Any,
) -> Path:
    """Train a draft head for a model on conversations, as `eagle train` does, and return the head's folder.

    Args:
        model: A folder, a hub id or a GGUF file; or a model of transformers, which is saved into the output folder.
        tokenizer: The model's tokenizer; None if `model` is a path or hub id.
        conversations: A file, a hub dataset, or a list of records with `messages`. The answers should be the model's.
        method: The method to train, such as "eagle3".
        output_dir: Folder for checkpoints, metrics and the head, which is in `head`.
        settings: Keys of the section `train` of a recipe, such as `lr=1e-4, epochs=2`, and whole sections, such as
            `drafter={"draft_vocab": 8192}` or `data={"max_length": 1024}`.

    Returns:
        The folder of the head, which `generate` and `load_drafter` take.

    Raises:
        ValueError: For unknown settings, or if no token of the data contributes to the loss.

    Example:
        >>> head = train("my/model", None, "chats.jsonl", method="eagle3", output_dir="runs/mine")  # doctest: +SKIP
    """
    out = Path(output_dir)
    values = sort_settings(settings)
    values["target"] = {"path": _name_model(model, tokenizer, out), **values.get("target", {})}
    values["data"] = {"train": _name_data(conversations, out), **values["data"]}
    values["drafter"] = {"kind": method, **values["drafter"]}
    values["train"] = {"out": str(out), **values["train"]}
    reach_stages()
    # imported only now: it imports accelerate, which decoding does not need
    launch = import_module("eagle.training.launch")
    recipe = launch.resolve_dtype(Recipe.parse(values, "eagle.train"))
    # accelerate keeps one state for a process: without a separate one a later run could have no other precision
    with launch.isolated_accelerate_state():
        import_module("recipes.train_eagle").train_head(recipe, "eagle.train")
    return out / "head"


def measure(
    target: str | Path,
    drafters: str | Path | Mapping[str, Any],
    prompts: str | Path,
    *,
    output_dir: str | Path,
    **settings: Any,
) -> Any:
    """Measure drafters and plain decoding, as `eagle measure` does, and return the results.

    Args:
        target: A folder, a hub id or a GGUF file.
        drafters: The name of a drafter. For several, a dict from labels to names, or to dicts as in `eval.drafters`
            of a recipe.
        prompts: A file of prompts or conversations.
        output_dir: Folder for `results.jsonl`; answers that are already in this file are not measured again.
        settings: Keys of the section `eval` of a recipe, such as `count=40, temperatures=(0.0, 1.0)`.

    Returns:
        The results; `groups()` has the acceptance length and speed of each drafter.

    Example:
        >>> results = measure("my/model", "runs/mine/head", "prompts.jsonl", output_dir="runs/mine")  # doctest: +SKIP
    """
    if not isinstance(drafters, Mapping):
        drafters = {Path(drafters).name: drafters}
    measured = {}
    for name, drafter in drafters.items():
        measured[name] = drafter if isinstance(drafter, Mapping) else {"head": str(drafter)}
    out = str(output_dir)
    # a recipe must have the sections data and drafter, which measuring does not read
    values = {
        "target": {"path": str(target)},
        "data": {"train": str(prompts)},
        "drafter": {"kind": "eagle1"},
        "train": {"out": out},
        "eval": {"prompts": str(prompts), "drafters": measured, **settings},
    }
    recipe = Recipe.parse(values, "eagle.measure")
    reach_stages()
    path = import_module("eval.measure").measure(recipe, "eagle.measure")
    return import_module("eval.result_files.results").read_results(path)


def open_drafter(drafter: Any, target: Any) -> Any:
    """Return the drafter, loaded for this target if it is given by name.

    A loaded one is kept for later calls, until its weights file is rewritten or the target's LM head is replaced.

    Raises:
        ValueError: If the target is a path.
    """
    if isinstance(target, (str, Path)):
        raise ValueError(f"the target is a path, {target}: give Target.load({str(target)!r})")
    if not isinstance(drafter, (str, Path)) or not isinstance(target, Target):
        return drafter
    # if the caller's model was changed since, this replaces `target.head`
    target.refresh()
    name = str(drafter)
    weights = Path(name) / WEIGHTS
    written = weights.stat().st_mtime_ns if weights.is_file() else None
    # the target's LM head that it was bound to, the time of its weights file, and the drafter
    loaded = target.named_drafters.get(name)
    if loaded is None or loaded[0] is not target.head or loaded[1] != written:
        loaded = (target.head, written, load_drafter(name, target))
        target.named_drafters[name] = loaded
    return loaded[2]


def encode_prompt(target: Any, prompt: Any) -> Any:
    """Return the token ids of a text or messages, or of a list of these; anything else, as token ids, unchanged."""
    if not isinstance(target, Target):
        return prompt
    if isinstance(prompt, str) or _is_chat(prompt):
        return target.chat(prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(item, str) for item in prompt):
        return [target.chat(text) for text in prompt]
    if isinstance(prompt, list) and prompt and all(_is_chat(item) for item in prompt):
        return [target.chat(chat) for chat in prompt]
    return prompt


def _is_chat(prompt: Any) -> bool:
    """Return whether a prompt is a list of messages."""
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(item, Mapping) and "role" in item for item in prompt)


def join_sampling(sampling: Any, shortcuts: dict[str, Any]) -> Any:
    """Return `sampling`, or a `Sampling` of the settings that a call passes one by one; both together are refused.

    Args:
        sampling: What the caller passed as `sampling`, or None.
        shortcuts: Temperature, top_p, top_k and seed; None where the caller passed nothing.
    """
    passed = {name: value for name, value in shortcuts.items() if value is not None}
    if not passed:
        return sampling
    if sampling is not None:
        raise ValueError(
            f"got sampling and {', '.join(passed)}, expected one of them: Sampling takes {', '.join(passed)}, too"
        )
    return Sampling(**passed)


def sort_settings(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of a recipe from the keywords of `train`.

    A keyword that names a section holds keys of that section; any other is a key of the section `train`.
    """
    # these three always get keys from `train` itself
    values: dict[str, dict[str, Any]] = {"data": {}, "drafter": {}, "train": {}}
    keys = TrainSection.model_fields
    for name, value in settings.items():
        # names of other trainers are taken too, as `learning_rate` for `lr`
        key = OTHER_NAMES.get(name, name)
        if name in SECTIONS | {"target"}:
            values[name] = {**values.get(name, {}), **value}
        elif key in keys:
            values["train"][key] = value
        else:
            raise ValueError(
                f"eagle.train has no setting {name}{nearest(name, [*keys, *SECTIONS])}: expected a key of a recipe's "
                "section train, or a section"
            )
    return values


def _name_model(model: Any, tokenizer: Any, out: Path) -> str:
    """Return the path of a model, which a recipe needs; save one in memory with its tokenizer in `out` first."""
    if isinstance(model, (str, Path)):
        return str(model)
    if tokenizer is None:
        raise ValueError(
            "the model is in memory and the tokenizer is None: pass the model's tokenizer, or its path as model"
        )
    folder = out / "target"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _name_data(conversations: Any, out: Path) -> str:
    """Return the path or hub name of conversations, which a recipe needs; write records in memory to a file first."""
    if isinstance(conversations, (str, Path)):
        return str(conversations)
    path = out / "conversations.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for record in conversations:
            # a list of messages is a record, too
            whole = record if isinstance(record, Mapping) else {"messages": record}
            file.write(json.dumps(whole, ensure_ascii=False) + "\n")
    return str(path)
