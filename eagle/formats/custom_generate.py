"""The file beside a head by which `model.generate(custom_generate=FOLDER, trust_remote_code=True)` decodes with it."""

from __future__ import annotations

from pathlib import Path

from eagle.disk import write_text

CUSTOM_GENERATE = "custom_generate/generate.py"
# The import stands in a `try`: transformers names packages of other imports itself, by the wrong name. For the same
# reason there is no requirements.txt, which it would check before this file can say what to install.
CODE = '''"""Decode with the draft head of this folder: the model's own tokens, several a forward.

    model.generate(**inputs, custom_generate="FOLDER OR HUB ID", trust_remote_code=True)
"""


def generate(model, *args, **kwargs):
    """What `model.generate` gives by itself, in fewer forwards."""
    try:
        from eagle.transformers import generate_from_folder
    except ImportError as error:
        raise ImportError(
            "this head decodes with the package eagle-heads, which is missing or too old here (the package named eagle "
            "is another one): `pip install --upgrade eagle-heads`"
        ) from error
    return generate_from_folder(model, *args, **kwargs)
'''


def write_custom_generate(folder: str | Path) -> None:
    """Write `custom_generate/generate.py` into a head's folder; ValueError if there is no such folder.

    By it transformers' `model.generate(custom_generate=...)` decodes with the head, from the folder or from the hub.
    """
    if not Path(folder).is_dir():
        raise ValueError(
            f"no folder at {folder}: expected a head's, which training leaves in train.out"
        )
    path = Path(folder) / CUSTOM_GENERATE
    path.parent.mkdir(exist_ok=True)
    write_text(path, CODE)
