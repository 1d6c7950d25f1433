"""What the pages tell a reader to type: programs parse it, recipes load with its overrides, Python compiles.

The guides also run, from the first command to the last. `python -m tests.test_guides` lists every command of theirs,
and why those that are not run here are not.
"""

from __future__ import annotations

import copy
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image

from eagle.drafters import DRAFTERS
from eagle.drafters.recurrent.eagle3 import Eagle3
from eagle.formats.checkpoint import save_head
from eagle.formats.export import export
from eagle.shipped import find_recipe
from eagle.target.target import Target
from tests.documents import (
    GUIDES,
    PAGES,
    ROOT,
    as_call,
    blocks,
    check_call,
    commands,
    make_checkout,
    messages_of_the_project,
    words_of,
    written_files,
)

# pages whose commands are run from the first to the last
WHOLE = [*GUIDES, *(ROOT / f"docs/{name}.md" for name in ("compare", "images", "quickstart"))]
# programs that are not parsed here, and why they are not run
OTHERS = {
    "pip": "downloads packages",
    "git": "downloads the repository",
    "make": "makes an environment first",
    "cd": "changes the reader's folder",
    "source": "sets the reader's shell",
    "export": "sets the reader's shell",
    "vllm": "needs vLLM and a GPU",
    "nvidia-smi": "needs a GPU",
    "curl": "needs a server",
    "python -m vllm": "needs vLLM",
    "python -m sglang": "needs SGLang and a GPU",
    "python -m pytest": "the suite has run it",
    "python -m tests.simulated_runs": "has a test of its own, and no parser",
    "python -m tests.engines.engine_builds": "asks the package index",
}
# commands of this project that are checked and not run here, and why
NOT_RUN = {
    "eagle demo": "takes minutes, and has a test of its own",
    "eagle chat": "downloads a model, and has a test of its own",
    "--server": "needs a server that drafts",
    "16k": "needs long prompts of the reader's",
    "train.init=runs/model": "needs a head that another guide trains",
    "make_long": "trains a target for minutes",
    "tiny/long": "needs that target",
    "tiny/hass": "needs features that the quick start stores",
    "HEAD": "stands for any head",
    "--yes": "needs a hub",
    "eagle pull": "needs a hub",
    "their/model": "needs a hub",
    "my-features": "needs features that the demo stores",
    "two_machines": "needs a second machine, which tests/test_nodes.py simulates",
    "eagle tiny-target": "trains a target for minutes; the fixture's is there",
    "recipes/compare/tiny.yaml": "trains for ten minutes, by arms with budgets of their own",
}
WITH_RECIPE = {
    "prepare",
    "regenerate",
    "inspect-mask",
    "extract",
    "train",
    "measure",
    "tune",
    "lossless",
}
HUB = "Qwen/Qwen2.5-0.5B-Instruct"  # the reader's model, which the tiny one stands in for
LESS = """
data.limit=8 data.max_length=96 train.batch_size=4 train.accumulation=2 train.max_steps=2 train.dtype=float32
eval.count=1 eval.max_new_tokens=4
"""
LESS_WRITTEN = "regenerate.max_new_tokens=8 regenerate.keep_truncated=true"
ANSWERS = f"regenerate.source=my/questions.jsonl regenerate.endpoint=null {LESS_WRITTEN}"
LESS_COMPARED = """
tokens=1000 seeds=[0] recipe.data.limit=40 recipe.eval.count=2 recipe.eval.max_new_tokens=4
"""


def program_of_others(line: str) -> str | None:
    """Return the program of another project that a command calls, if it is one of those."""
    line = " ".join(words_of(line))
    return next((name for name in OTHERS if f"{line} ".startswith((f"{name} ", f"{name}."))), None)


def reason_not_to_run(line: str) -> str | None:
    """Return why a command is not run here; None if it is."""
    other = program_of_others(line)
    if other:
        return OTHERS[other]
    return next((reason for word, reason in NOT_RUN.items() if word in line), None)


def check_page(page: Path, folder: Path) -> None:
    """Check every command of a page that is a program of this project."""
    written = {}
    for index, (name, text) in enumerate(written_files(page).items()):
        written[name] = folder / (name if name.endswith(".py") else f"{index}.yaml")
        written[name].write_text(text)
    for line in commands(page):
        if program_of_others(line) is None:
            check_call(as_call(line), written)


@pytest.mark.parametrize("page", [*GUIDES, *PAGES], ids=lambda page: page.name)
def test_commands_of_a_guide_are_accepted_by_their_programs(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every command is parsed by its program, every recipe loads with its overrides, and Python blocks compile."""
    monkeypatch.chdir(tmp_path)  # where the reader's own files lie
    known = set(DRAFTERS)
    check_page(page, tmp_path)
    # a page may have the reader write a method
    for name in DRAFTERS.keys() - known:
        del DRAFTERS[name]
    for text in blocks(page, "python"):
        compile(text, page.name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *(pytest.param(page, marks=pytest.mark.long) for page in WHOLE)],
    ids=lambda page: page.name,
)
def test_a_guide_runs_from_its_first_command_to_its_last(
    page: Path,
    tiny_target_dir: Path,
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    """Every command that needs no GPU, no server and no network runs, on the tiny model and less data."""
    make_checkout(tmp_path, tiny_target_dir, tiny_target)
    give_the_readers_files(tmp_path, tiny_target)
    for name, text in written_files(page).items():
        (tmp_path / name).write_text(text)
    for line in commands(page):
        # a file that the fixture wrote without settings
        answers = "runs/tiny/data/regenerated.jsonl"
        if line.startswith("eagle prepare") and answers in read_recipe(words_of(line)[2], tmp_path):
            (tmp_path / answers).unlink(missing_ok=True)
        # a path for one reader begins with this, without what the path for another reader made
        if line.endswith("--check"):
            remove_made(tmp_path / "runs/model")
        if line == "eagle demo --tiny":  # which leaves a store of features, too
            line = "eagle extract tiny/demo"
        if not reason_not_to_run(line):
            run(["-m", *words_here(line, tmp_path)], tmp_path)
    for text in blocks(page, "python"):
        # neither a method that the reader writes nor a server
        if "Drafter" not in text and "localhost" not in text:
            run(["-c", text.replace(HUB, "my/model")], tmp_path)


def remove_made(runs: Path) -> None:
    """Remove answers, features and heads of a model, and keep the questions that `eagle init` set apart."""
    for made in runs.glob("*"):
        if made.is_dir():
            shutil.rmtree(made)
        elif made.name not in ("questions.jsonl", "heldout.jsonl"):
            made.unlink()


def run(program: list[str], folder: Path) -> None:
    """Run a program to its end; a doctor may call a head broken, which is status 1."""
    done = subprocess.run(
        [sys.executable, *program],
        cwd=folder,
        timeout=900,
        stdin=subprocess.DEVNULL,  # where `eagle chat` reads that nothing is asked
        capture_output=True,
        text=True,
    )
    is_verdict = "doctor" in program and "verdict:" in done.stdout
    printed = f"{shlex.join(program)}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0 or is_verdict, printed


def give_the_readers_files(folder: Path, target: Target) -> None:
    """Write what guides call the reader's own: models, adapters, questions, images, a published head."""
    mine = folder / "my"
    tiny = folder / "runs/tiny"
    mine.mkdir(exist_ok=True)
    for name in ("model", "base"):
        (mine / name).symlink_to(tiny / "target")
    # as good as adapters of the reader's, which have learned nothing either
    lora = LoraConfig(r=2, target_modules="all-linear")
    adapted = get_peft_model(copy.deepcopy(target.model), lora)
    for name in ("adapter", "second-adapter"):
        adapted.save_pretrained(mine / name)
    records = (tiny / "data/heldout.jsonl").read_text().splitlines(keepends=True)
    for name, count in {"prompts": 6, "questions": 40, "conversations": 40}.items():
        (mine / f"{name}.jsonl").write_text("".join(records[:count]))
    # conversations about eight images, for the model with images of the checkout
    (mine / "images").mkdir()
    lines = []
    for index in range(8):
        image = Image.new("RGB", (16 + 4 * index, 16), (30 * index, 90, 10))
        image.save(mine / f"images/{index}.png")
        lines.append(json.dumps(seeing_record(index)) + "\n")
    (mine / "seeing-questions.jsonl").write_text("".join(lines))
    (mine / "seeing-prompts.jsonl").write_text("".join(lines[6:]))
    # a head in the layout of another tool
    settings = Eagle3.Settings(draft_vocab=256)
    head = Eagle3.for_target(
        settings,
        target.config,
        target.head,
        [torch.arange(256)],
    )
    save_head(folder / "made", head, "", {})
    head.bind(target.head)
    export(
        head,
        target.config,
        "vllm",
        mine / "published-head",
        head=folder / "made",
    )


def seeing_record(index: int) -> dict[str, Any]:
    """Return a conversation about an image."""
    turns = [
        {"from": "human", "value": "<image>\nWhat do you see?"},
        {"from": "gpt", "value": "A colour."},
    ]
    return {
        "id": str(index),
        "image": f"{index}.png",
        "conversations": turns,
    }


def read_recipe(name: str, folder: Path) -> str:
    """Return the text of a recipe that the page has the reader write, or that comes with the package."""
    path = folder / name if (folder / name).is_file() else find_recipe(name)
    return path.read_text()


def words_here(line: str, folder: Path) -> list[str]:
    """Return a command with the tiny model in place of the reader's, less data, one process and no server."""
    words = [word.replace(HUB, "my/model") for word in words_of(line)]
    if words[0] == "python":
        words = words[2:]
    if "--processes" in words:
        words[words.index("--processes") + 1] = "1"
    # eagle VERB RECIPE, or -m MODULE RECIPE
    stage, *arguments = words[1:] if words[0] == "eagle" else words
    if stage in ("compare", "eval.compare"):
        return [*words, *LESS_COMPARED.split()]
    if stage not in WITH_RECIPE:
        return words
    name = arguments[0]
    recipe = read_recipe(name, folder)
    less = LESS.split()
    if "qwen2.5-vl" in recipe:
        return [*words, *less, *LESS_WRITTEN.split()]
    is_tiny = name.removeprefix("recipes/").startswith("tiny/")
    if not is_tiny and "path: runs/tiny/target" not in recipe:
        less.append("target.path=my/model")
    if "regenerate=null" not in words:
        less += ANSWERS.split()
    # the tiny vocabulary is smaller than the usual draft vocabulary
    if "kind: eagle3" in recipe:
        less.append("drafter.draft_vocab=256")
    return [*words, *less]


@pytest.mark.slow
def test_messages_of_the_guides_are_the_projects_own() -> None:
    """A message in a text block of the troubleshooting page is one that the project prints."""
    known = messages_of_the_project()
    shown = [line.strip() for line in blocks(ROOT / "docs/guides/troubleshooting.md", "text")]
    assert shown
    assert [message for message in shown if message not in known] == []
    assert "the target has lost its keys" not in known


def page_of(line: str, folder: Path) -> Path:
    """Return a page with one command."""
    page = folder / "page.md"
    page.write_text(f"```bash\n{line}  # a comment\n```\n")
    return page


@pytest.mark.parametrize(
    "line",
    [
        "eagle recipes qwen3-8b/eagle3 --copy my/recipe.yaml",
        "eagle train tiny/eagle1 --check drafter.fc_bias=true",
        "eagle compare recipes/compare/tiny.yaml --report",
        "python -m data_prep.inspect_mask recipes/tiny/eagle1.yaml --count 3",
        "accelerate launch --num_processes 2 recipes/train_eagle.py recipes/tiny/eagle1.yaml --check",
        "VLLM_CPU_KVCACHE_SPACE=4 python -m vllm.entrypoints.openai.api_server --model my/model",
    ],
)
def test_a_right_command_is_accepted(line: str, tmp_path: Path) -> None:
    """The checker takes what the programs take."""
    check_page(page_of(line, tmp_path), tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        # one letter wrong, each in another place
        "eagle prepare tiny/eagle1 --forcast",
        "eagle extract tiny/eagle1 features.dtyp=float8",
        "eagle train tiny/eagle1 drafter.stepps=3",
        "eagle train tiny/eagle2 --check",
        "eagle export runs/head --target my/model --to vlm runs/vllm",
        "eagle serve my/model",
        "python -m eval.compare recipes/compare/tiny.yaml run.seed=1",
        "accelerate launch --num_processs 2 recipes/train_eagle.py recipes/tiny/eagle1.yaml",
        "tpu-smi",
    ],
)
def test_a_wrong_command_is_refused(line: str, tmp_path: Path) -> None:
    """The checker refuses unknown programs, verbs, options, recipes and keys."""
    with pytest.raises((ValueError, SystemExit)):
        check_page(page_of(line, tmp_path), tmp_path)


def test_a_command_may_name_a_file_that_the_page_has_written(tmp_path: Path) -> None:
    """YAML blocks that begin with `# PATH` and copies of recipes are files for the commands of their page."""
    page = tmp_path / "page.md"
    page.write_text(
        "```yaml\n# my/arms.yaml\nrecipe: recipes/tiny/eagle1.yaml\narms:\n  a: {}\n```\n"
        "```bash\neagle recipes tiny/eagle1 --copy my/own.yaml\n"
        "eagle train my/own.yaml \\\n  train.lr=1e-3\n```\n"
    )
    assert list(written_files(page)) == ["my/arms.yaml"]
    assert commands(page)[1] == "eagle train my/own.yaml train.lr=1e-3"
    check_page(page, tmp_path)


if __name__ == "__main__":
    for guide in WHOLE:
        print(guide.name)
        for command in commands(guide):
            reason = reason_not_to_run(command)
            print(f"  {f'not run, {reason}' if reason else 'run'}: {command}")
