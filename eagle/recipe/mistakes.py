"""Values that become a section of a recipe, or an error that names every mistake in them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from textwrap import shorten
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from eagle.web import hide_users


def parse_section(model: type[BaseModel], values: Any, source: str) -> Any:
    """The values as an instance of `model`; the error names each mistake, and the nearest key to an unknown one."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        mistakes = "\n".join(_explain(model, mistake, source) for mistake in error.errors())
        raise ValueError(hide_users(mistakes)) from None


def _explain(model: type[BaseModel], mistake: Any, source: str) -> str:
    path = ".".join(map(str, mistake["loc"]))
    if mistake["type"] != "extra_forbidden":
        reason = mistake["msg"].removeprefix("Value error, ")  # which pydantic puts before a sentence of this project
        return f"{source}: {path}: got {_shorten(mistake['input'])}; {reason}"
    owner: Any = model
    for key in mistake["loc"][:-1]:
        owner = type_of_key(owner, key)
    known = ", ".join(owner.model_fields)
    near = _nearest_key(str(mistake["loc"][-1]), owner.model_fields)
    return f"{source}: unknown key {path}{f': did you mean {near}? Known' if near else '. Known'} here are {known}"


def _shorten(value: Any) -> str:
    """A value as an error shows it: a section by its keys alone."""
    if isinstance(value, dict):
        return f"the keys {', '.join(map(str, value)) or 'of an empty section'}"
    return "nothing" if value is None else shorten(repr(value), 80, placeholder=" ...")


# keys of other trainers that resemble a wrong key here
OTHER_NAMES = {
    **{"learning_rate": "lr", "max_grad_norm": "clip", "gradient_clipping": "clip"},
    **{"warmup_steps": "warmup", "warmup_ratio": "warmup", "lr_scheduler_type": "schedule", "scheduler": "schedule"},
    **{"gradient_accumulation_steps": "accumulation", "num_train_epochs": "epochs", "num_epochs": "epochs"},
    **{"per_device_train_batch_size": "batch_size", "output_dir": "out", "save_total_limit": "keep"},
    **{"save_steps": "checkpoint_every", "eval_steps": "validate_every", "model_name_or_path": "path"},
    **{"max_seq_length": "max_length", "torch_dtype": "dtype"},
}


def _nearest_key(name: str, keys: Iterable[str]) -> str | None:
    """The known key that a name resembles, or that other trainers call by it; None where none is near."""
    names = {other: key for other, key in OTHER_NAMES.items() if key in keys} | {key: key for key in keys}
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return names[near[0]] if near else None


def type_of_key(owner: Any, key: Any) -> Any:
    """The section or mapping type that a section or a mapping holds under this key."""
    annotation = get_args(owner)[1] if get_origin(owner) is dict else owner.model_fields[key].annotation
    if get_origin(annotation) is dict:
        return annotation
    return next((kind for kind in get_args(annotation) if kind is not type(None)), annotation)
