"""What users pass to the public calls, refused in a sentence where it is something else."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from eagle.core.drafter import Budget, Drafter
from eagle.core.sampling import Sampling, whole

AT_ONCE = "one prompt at a time"


def check_call(target: Any, drafter: Any, sampling: Any, budget: Any) -> None:
    """Refuse a target, drafter, sampling or budget that is something else, and say how to make one."""
    if isinstance(target, Drafter) and hasattr(drafter, "read"):
        raise ValueError("the drafter stands where the target belongs: call generate(target, drafter, prompt)")
    if not hasattr(target, "read") or isinstance(target, type):
        hint = "pass Target(model, tokenizer)" if hasattr(target, "get_input_embeddings") else "load one: Target.load"
        raise ValueError(f"the target is {_shown(target)}, expected a Target: {hint}")
    if not isinstance(drafter, Drafter):
        name = repr(str(drafter)) if isinstance(drafter, str) else "name"
        raise ValueError(
            f"the drafter is {_shown(drafter)}, expected a Drafter: pass load_drafter({name}, target), or let "
            "a drafter of your own inherit from eagle.core.drafter.Drafter"
        )
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling is {_shown(sampling)}, expected a Sampling: as Sampling(temperature=0.7)")
    is_policy = hasattr(budget, "within") and hasattr(budget, "nodes")
    if budget is not None and not isinstance(budget, Budget) and not is_policy:
        raise ValueError(f"budget is {_shown(budget)}, expected a Budget or a policy: as Budget(nodes=8, depth=4)")
    bound = [head.weight.shape for head in drafter.frozen]
    if bound and bound[0] != target.head.weight.shape:
        raise ValueError(
            f"the head is bound to a target of {bound[0][0]} tokens and width {bound[0][1]}, this one has "
            f"{target.head.weight.shape[0]} and {target.head.weight.shape[1]}: load_drafter(folder, target) binds it"
        )


def refuse_options(unknown: Iterable[str], known: Iterable[str]) -> None:
    """Name the place of an option that belongs to Sampling or Budget, else the nearest option."""
    known = sorted(known)
    for name in unknown:
        owners: tuple[tuple[Any, str], ...] = ((Sampling, "sampling"), (Budget, "budget"))
        for owner, place in owners:
            if name in {field.name for field in fields(owner)}:
                raise ValueError(f"generate has no option {name}: pass {place}={owner.__name__}({name}=...)")
        raise ValueError(f"generate has no option {name}{nearest(name, known)}: expected some of {', '.join(known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The question whether one of the known names was meant, or nothing where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def positive_int(name: str, value: Any) -> int:
    """A whole number of 1 or more, numpy's among them."""
    number = whole(name, value)
    if number < 1:
        raise ValueError(f"{name} is {number}, expected 1 or more")
    return number


def token_ids(prompt: Any) -> list[int]:
    """The prompt as a list, from a list, tensor or array [T] or [1, T], or what a tokenizer returns."""
    if isinstance(prompt, (str, bytes)):
        raise ValueError("the prompt is text, expected token ids: use target.chat(text) or target.tokenizer.encode")
    if isinstance(prompt, Mapping):
        return _encoded_ids(prompt)
    if hasattr(prompt, "tolist"):
        if (shape := tuple(prompt.shape))[:-1] not in ((), (1,)) or shape == ():
            raise ValueError(f"{AT_ONCE}: got a tensor of shape {shape}, expected [T] or [1, T]")
        prompt = prompt.reshape(-1).tolist()
    if not isinstance(prompt, Iterable):
        raise ValueError(f"the prompt is {_shown(prompt)}, expected token ids in a list or a tensor [T] or [1, T]")
    items = list(prompt)
    if items and (isinstance(items[0], (list, tuple)) or getattr(items[0], "ndim", 0) > 0):
        if len(items) > 1:
            raise ValueError(f"{AT_ONCE}: got {len(items)} rows, expected token ids [T] or [1, T]")
        return token_ids(items[0])
    return [_token_id(item) for item in items]


def _encoded_ids(prompt: Mapping[str, Any]) -> list[int]:
    """The token ids of what a tokenizer or `apply_chat_template` returns, without padding."""
    if "input_ids" not in prompt:
        raise ValueError(
            f"the prompt holds {', '.join(map(str, prompt))}, expected input_ids as a tokenizer returns them; of a "
            "message use target.chat([message])"
        )
    mask = prompt.get("attention_mask")
    if mask is not None and not all(token_ids(mask)):
        raise ValueError("the prompt's attention_mask hides padding: pass input_ids without padding, one prompt")
    return token_ids(prompt["input_ids"])


def _token_id(item: Any) -> int:
    """One token id as an int."""
    if isinstance(item, Mapping) and {"role", "content"} & set(item):
        raise ValueError("the prompt is a list of messages, expected token ids: use target.chat(messages)")
    try:
        if isinstance(item, bool):
            raise TypeError
        return operator.index(item)
    except (TypeError, ValueError):
        raise ValueError(
            f"the prompt holds {_shown(item)}, expected token ids, which are whole numbers: of text and messages "
            "target.chat makes them"
        ) from None


def _shown(value: Any) -> str:
    """A value as an error shows it: short, or by its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    return f"of type {type(value).__name__}"
