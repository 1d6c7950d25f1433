"""Whether the newest engines still read what exports write: `python -m tests.engines.layout_sources [ENGINE=DIR ...]`.

Each engine's newest Python package is fetched without being installed or run. The class that a layout names must be
defined there, and the words of its tensors' names must stand in that class's file or in one that it imports. A config
key must be read by one of the engines, as layouts write what several call by different names, or be off. An engine that
is not on the package index is read from a checkout, `trtllm=DIR`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM

from eagle.conformance.trial import make_head
from eagle.core.drafter import TrainableDrafter
from eagle.disk import write_text
from eagle.drafters import DRAFTERS
from eagle.formats.engines.registry import name_reader
from eagle.formats.export import EXPORTERS
from eagle.formats.layout import Layout
from eagle.log import script
from eagle.target.target import Target
from tests.documents import ROOT

OUT = ROOT / "docs/results/layout_sources.json"
# of an exporter, on the package index
PACKAGES = {"vllm": "vllm", "sglang": "sglang"}
# whose own loader is run with its layout; it shares config keys with the engines
OTHERS = ("speculators",)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 12,
}
# config keys that any reader knows
PLAIN = frozenset(LlamaConfig().to_dict()) | {"rope_theta", "rope_scaling", "torch_dtype"}
WORD = re.compile(r"[A-Za-z_]\w*")


class Reading(NamedTuple):
    """What one engine's source says of a layout."""

    engine: str
    version: str
    method: str
    reader: str  # the class that the config names; empty if there is none
    words: int  # of tensor names and config keys
    missing: list[str]  # of these, what the source does not name
    until: str = ""  # the last version that reads such heads, where this one is not to


def write_layouts(engine: str) -> Iterator[tuple[str, Layout, str]]:
    """Yield every method's layout for an engine, of new heads, with the last version that reads it."""
    config = LlamaConfig(vocab_size=96, bos_token_id=1, eos_token_id=2, **SIZES)
    target = Target(LlamaForCausalLM(config))
    for name, method in DRAFTERS.items():
        if not issubclass(method, TrainableDrafter):
            continue
        for settings in ({"fc_bias": False}, {}):
            try:
                head = make_head(name, target, **settings)
                layout = EXPORTERS[engine](head.bind(target.head), target.config)
            except ValueError:
                # no such setting, or no layout
                continue

            _, _, until = name_reader(engine, head).partition("up to ")
            yield name, layout, until.rstrip(")")
            break


def parse_checkout(word: str) -> tuple[str, Path]:
    """Return the engine and the folder of `ENGINE=DIR`."""
    engine, _, folder = word.partition("=")
    if engine not in EXPORTERS or not folder or not Path(folder).is_dir():
        raise ValueError(
            f"got {word!r}, expected ENGINE=DIR, an engine of {', '.join(EXPORTERS)} and a folder"
        )
    return engine, Path(folder)


def read_sources(folder: Path) -> dict[str, str]:
    """Return the text of every Python file in a folder, by its path there."""
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in sorted(folder.rglob("*.py"))
    }


def fetch_sources(package: str) -> tuple[str, dict[str, str]]:
    """Return the version of a package's newest wheel for this Python, and the text of its Python files."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"-m pip download --quiet --no-deps -d {folder} {package}".split()
        done = subprocess.run([sys.executable, *options], capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if not wheels:
            raise ValueError(
                f"no wheel of {package} was fetched, expected its newest: {done.stderr.strip()[-500:]}"
            )

        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".py")]
            return wheels[0].name.split("-")[1], {name: wheel.read(name).decode() for name in names}


def near_files(path: str, sources: dict[str, str]) -> list[str]:
    """Return a file and those of the package that it imports."""
    modules = re.findall(r"^\s*from +(\.*[\w.]*) +import", sources[path], re.MULTILINE)
    endings = [module.lstrip(".").replace(".", "/") for module in modules if module.strip(".")]
    return [
        path,
        *(name for name in sources if name.removesuffix(".py").endswith(tuple(endings) or ("\0",))),
    ]


def find_reader(names: Iterable[str], sources: dict[str, str]) -> tuple[str, str] | None:
    """Return the class that reads the first of these names that the sources know, and the file that defines it."""
    every = "\n".join(sources.values())
    for name in names:
        # vLLM puts Eagle before the name of a model of EAGLE-1's
        classes = [f"Eagle{name}", name]
        # an entry of an engine's registry: "Name": ("module", "Class")
        for entry in re.findall(rf'"{name}": *\(([^)]*)\)', every):
            classes += re.findall(r'"(\w+)"', entry)[1:]
        for each in classes:
            for path, text in sources.items():
                if re.search(rf"^class {each}\b", text, re.MULTILINE):
                    return each, path

    return None


def compare_layout(
    layout: Layout,
    sources: dict[str, str],
    read: set[str],
) -> tuple[str, int, list[str]]:
    """Return the class that reads a layout, how many names it has, and those that neither sources nor `read` hold."""
    names = set()
    for name in layout.tensors:
        names |= {word for word in name.split(".") if not word.isdigit()}
    # torch gives these
    names -= {"weight", "bias", "layers"}
    keys = {key for key in layout.config.keys() - PLAIN if layout.config[key]}
    reader = ""
    near: set[str] = set()
    found = find_reader(layout.config.get("architectures") or (), sources)
    if found is not None:
        reader, path = found
        for each in near_files(path, sources):
            near |= set(WORD.findall(sources[each]))

    return reader, len(names) + len(keys), sorted((names - near) | (keys - read))


def source_table(rows: Iterable[dict[str, Any]]) -> str:
    """Return the readings as Markdown."""
    lines = ["| engine | version | method | read by | names | not found |", "|---" * 6 + "|"]
    for row in rows:
        missing = ", ".join(f"`{name}`" for name in row["missing"]) or "none"
        reader = f"`{row['reader']}`" if row["reader"] else "nothing"
        cells = [reader, str(row["words"]), missing]
        if row["until"]:
            cells = [f"nothing since {row['until']}, as exports say", "", ""]
        cells = [row["engine"], row["version"], f"`{row['method']}`", *cells]
        lines.append(f"| {' | '.join(cells)} |")

    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Read every engine's newest source, print what of the layouts it names; status 1 if something is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.engines.layout_sources", description=main.__doc__
    )
    parser.add_argument(
        "checkouts", nargs="*", metavar="ENGINE=DIR", help="an engine's source, as trtllm=DIR"
    )
    checkouts = [parse_checkout(word) for word in parser.parse_args(argv).checkouts]
    sources = {engine: fetch_sources(package) for engine, package in PACKAGES.items()}
    shared = [*sources.values(), *map(fetch_sources, OTHERS)]
    for engine, folder in checkouts:
        sources[engine] = ("a checkout", read_sources(folder))
        shared.append(sources[engine])

    # a config key counts as read if any of them has the word
    known: set[str] = set()
    for _, files in shared:
        for text in files.values():
            known |= set(WORD.findall(text))

    rows = []
    is_whole = True
    for engine, (version, files) in sources.items():
        for method, layout, until in write_layouts(engine):
            is_past = until and version != "a checkout" and Version(version) > Version(until)
            ended = until if is_past else ""
            reader, words, missing = compare_layout(layout, files, known)
            reading = Reading(
                engine,
                version,
                method,
                reader,
                words,
                missing,
                ended,
            )
            rows.append(reading._asdict())
            is_whole &= bool(ended or (reader and not missing))

    write_text(OUT, json.dumps(rows, indent=2) + "\n")
    print(source_table(rows))
    sys.exit(0 if is_whole else 1)


if __name__ == "__main__":
    script(main)
