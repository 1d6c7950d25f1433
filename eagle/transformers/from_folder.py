"""What the `custom_generate/generate.py` beside a head calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle.transformers.calling_frame import arguments_of_generate
from eagle.transformers.held_targets import held_by
from eagle.transformers.with_drafter import WithDrafter

OPTIONS = ("seed", "budget", "stateless")  # of `generate_with`, which a call may name beside those of `generate`


def generate_from_folder(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`model.generate` with the head in the folder, or of the hub id, that `custom_generate` names."""
    folder = arguments_of_generate().get("custom_generate")
    if not isinstance(folder, str):
        raise ValueError(
            f"custom_generate is {folder!r}, expected the folder or the hub id of a head: call "
            "model.generate(.., custom_generate=FOLDER, trust_remote_code=True)"
        )
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    revision = kwargs.pop("revision", None)
    files = [path.stat().st_mtime_ns for path in sorted(Path(folder).glob("*")) if path.is_file()]
    key, callables = (folder, revision, tuple(files)), held_by(model).callables
    if key not in callables:  # another head, or one that was written anew
        callables.clear()
        # whoever trusts this file trusts the method's beside it
        callables[key] = WithDrafter(folder, revision=revision, trust_code=True)
    callables[key].set_options(**options)
    return callables[key].generate(model, *args, **kwargs)
