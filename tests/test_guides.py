"""What the guides tell a reader to type: programs parse it, recipes load with its overrides, Python compiles.

`python -m tests.test_guides` lists every command, and why those that are not run here are not.
"""

from __future__ import annotations

import copy
import json
import shlex
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
    as_call,
    blocks,
    check_call,
    commands,
    make_checkout,
    messages_of_the_project,
    words_of,
    written_files,
)
from tests.seeing_folders import save_llava

# programs of others, and why they are not run here
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
}
# commands of this project that are checked and not run here, and why
NOT_RUN = {
    "eagle demo": "takes minutes, and has a test of its own",
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
    "eagle tiny-target": "trains a target for minutes; the fixture's is there",
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
HUB = "Qwen/Qwen2.5-0.5B-Instruct"  # the model of the reader, whose place the tiny one takes
LESS = "data.limit=8 data.max_length=96 train.batch_size=4 train.accumulation=2 train.max_steps=2 train.dtype=float32 "
LESS += "eval.count=1 eval.max_new_tokens=4"
ANSWERS = (
    "regenerate.source=my/questions.jsonl regenerate.endpoint=null regenerate.max_new_tokens=8 "
)
ANSWERS += "regenerate.keep_truncated=true"
LESS_COMPARED = (
    "tokens=1000 seeds=[0] recipe.data.limit=40 recipe.eval.count=2 recipe.eval.max_new_tokens=4"
)


def program_of_others(line: str) -> str | None:
    """The program of another project that a command calls, if it is one of those."""
    line = " ".join(words_of(line))
    return next((name for name in OTHERS if f"{line} ".startswith((f"{name} ", f"{name}."))), None)


def reason_not_to_run(line: str) -> str | None:
    """Why a command is not run here; None if it is."""
    if other := program_of_others(line):
        return OTHERS[other]
    return next((reason for part, reason in NOT_RUN.items() if part in line), None)


def check_page(page: Path, folder: Path) -> None:
    """Check every command of a page that is a program of this project."""
    written = {}
    for number, (name, text) in enumerate(written_files(page).items()):
        written[name] = folder / (name if name.endswith(".py") else f"{number}.yaml")
        written[name].write_text(text)
    for line in commands(page):
        if program_of_others(line) is None:
            check_call(as_call(line), written)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_commands_of_a_guide_are_accepted_by_their_programs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command is parsed by its program, and every recipe loads with the overrides beside it."""
    monkeypatch.chdir(tmp_path)  # where the reader's own files lie
    known = set(DRAFTERS)
    check_page(page, tmp_path)
    for name in DRAFTERS.keys() - known:
        del DRAFTERS[name]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_snippets_of_a_guide_compile(page: Path) -> None:
    """Python blocks are Python."""
    for text in blocks(page, "python"):
        compile(text, page.name, "exec")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_a_guide_runs_from_its_first_command_to_its_last(
    page: Path, tiny_target_dir: Path, tiny_target: Target, tmp_path: Path
) -> None:
    """Every command that needs no GPU, no server and no network runs, on the tiny model and less data."""
    make_checkout(tmp_path, tiny_target_dir, tiny_target)
    give_the_readers_files(tmp_path, tiny_target)
    for name, text in written_files(page).items():
        (tmp_path / name).write_text(text)
    for line in commands(page):
        if line.startswith("eagle prepare"):  # whose file the fixture wrote without settings
            (tmp_path / "runs/tiny/data/regenerated.jsonl").unlink(missing_ok=True)
        if line == "eagle demo":  # which leaves a store of features, too
            run(["-m", *words_here("eagle extract tiny/demo", tmp_path)], tmp_path)
        elif not reason_not_to_run(line):
            run(["-m", *words_here(line, tmp_path)], tmp_path)
    for text in blocks(page, "python"):
        if (
            "Drafter" not in text and "localhost" not in text
        ):  # a method that the reader writes, a server
            run(["-c", text.replace(HUB, "my/model")], tmp_path)


def run(program: list[str], folder: Path) -> None:
    """Run a program to its end; a doctor may call a head broken, which is status 1."""
    done = subprocess.run(
        [sys.executable, *program], cwd=folder, timeout=900, capture_output=True, text=True
    )
    fine = done.returncode == 0 or ("doctor" in program and "verdict:" in done.stdout)
    assert fine, f"{shlex.join(program)}\n{done.stdout}{done.stderr}"


def give_the_readers_files(folder: Path, target: Target) -> None:
    """The files that guides call the reader's own: a model and its adapter, questions, a head of another tool."""
    mine, tiny = folder / "my", folder / "runs/tiny"
    mine.mkdir(exist_ok=True)
    for name in ("model", "base"):
        (mine / name).symlink_to(tiny / "target")
    adapted = get_peft_model(
        copy.deepcopy(target.model), LoraConfig(r=2, target_modules="all-linear")
    )
    for name in ("adapter", "second-adapter"):
        adapted.save_pretrained(mine / name)
    records = (tiny / "data/heldout.jsonl").read_text().splitlines(keepends=True)
    for name, count in {"prompts": 6, "questions": 40, "conversations": 40}.items():
        (mine / f"{name}.jsonl").write_text("".join(records[:count]))
    save_llava(tiny / "target", mine / "seeing-model")
    (mine / "images").mkdir()
    for number in range(8):
        Image.new("RGB", (16 + 4 * number, 16), (30 * number, 90, 10)).save(
            mine / f"images/{number}.png"
        )
    for name, first in {"seeing-questions": 0, "seeing-prompts": 6}.items():
        seen = [seeing_record(number) for number in range(first, 8)]
        (mine / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in seen))
    head = Eagle3.for_target(
        Eagle3.Settings(draft_vocab=256), target.config, target.head, [torch.arange(256)]
    )
    save_head(folder / "made", head, "", {})
    export(head.bind(target.head), target.config, "vllm", mine / "published-head", folder / "made")


def seeing_record(number: int) -> dict[str, Any]:
    """A conversation about an image."""
    turns = [
        {"from": "human", "value": "<image>\nWhat do you see?"},
        {"from": "gpt", "value": "A colour."},
    ]
    return {"id": str(number), "image": f"{number}.png", "conversations": turns}


def words_here(line: str, folder: Path) -> list[str]:
    """A command with the tiny model in place of the reader's, less data, one process and no server."""
    words = [word.replace(HUB, "my/model") for word in words_of(line)]
    words = words[2:] if words[0] == "python" else words
    if "--processes" in words:
        words[words.index("--processes") + 1] = "1"
    stage = words[1] if words[0] == "eagle" else words[0]
    if stage in ("compare", "eval.compare"):
        return [*words, *LESS_COMPARED.split()]
    if stage not in WITH_RECIPE:
        return words
    name = words[2] if words[0] == "eagle" else words[1]
    path = folder / name if (folder / name).is_file() else find_recipe(name)
    less = LESS.split()
    if "seeing-model" in path.read_text():
        return [*words, *less, "regenerate.max_new_tokens=8", "regenerate.keep_truncated=true"]
    is_tiny = (
        str(name).removeprefix("recipes/").startswith("tiny/")
        or "path: runs/tiny/target" in path.read_text()
    )
    if not is_tiny and "target.path=my/model" not in words:
        less.append("target.path=my/model")
    if "regenerate=null" not in words:
        less += ANSWERS.split()
    if "kind: eagle3" in path.read_text():
        less.append("drafter.draft_vocab=256")
    return [*words, *less]


@pytest.mark.slow
def test_messages_of_the_guides_are_the_projects_own() -> None:
    """A message in a text block of the troubleshooting page is one that the project prints."""
    known = messages_of_the_project()
    shown = [
        line
        for page in GUIDES
        if page.name == "troubleshooting.md"
        for line in blocks(page, "text")
    ]
    assert [message for message in shown if message.strip() not in known] == []
    assert "the target has lost its keys" not in known


@pytest.mark.parametrize(
    "line",
    [
        "eagle regenerate tiny/eagle1 --forecast",
        "eagle recipes qwen3-8b/eagle3 --copy my/recipe.yaml",
        "eagle extract tiny/eagle1 --verify",
        "eagle train tiny/eagle1 --processes 2 train.lr=1e-3",
        "eagle train tiny/eagle1 --check drafter.fc_bias=true",
        "eagle measure tiny/eagle1 --again 'eval.batch_size=[1, 4]'",
        "eagle compare recipes/compare/tiny.yaml --report",
        "eagle export runs/head --target my/model --to vllm runs/vllm",
        "python -m data_prep.inspect_mask recipes/tiny/eagle1.yaml --count 3",
        "accelerate launch --num_processes 2 recipes/train_eagle.py recipes/tiny/eagle1.yaml --check",
        "VLLM_CPU_KVCACHE_SPACE=4 python -m vllm.entrypoints.openai.api_server --model my/model",
    ],
)
def test_a_right_command_is_accepted(line: str, tmp_path: Path) -> None:
    """The checker takes what the programs take."""
    page = tmp_path / "page.md"
    page.write_text(f"```bash\n{line}  # a comment\n```\n")
    check_page(page, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
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
    page = tmp_path / "page.md"
    page.write_text(f"```bash\n{line}\n```\n")
    with pytest.raises((ValueError, SystemExit)):
        check_page(page, tmp_path)


def test_a_command_may_name_a_file_that_the_page_has_written(tmp_path: Path) -> None:
    """YAML blocks that begin with `# PATH` and copies of recipes are files for the commands of their page."""
    arms = "# my/arms.yaml\nrecipe: recipes/tiny/eagle1.yaml\narms:\n  a: {}\n"
    page = tmp_path / "page.md"
    lines = [
        "eagle recipes tiny/eagle1 --copy my/own.yaml",
        "eagle train my/own.yaml \\",
        "  train.lr=1e-3",
    ]
    page.write_text("\n".join(["```yaml", arms, "```", "```bash", *lines, "```\n"]))
    assert list(written_files(page)) == ["my/arms.yaml"]
    assert commands(page)[1] == "eagle train my/own.yaml train.lr=1e-3"
    check_page(page, tmp_path)


if __name__ == "__main__":
    for guide in GUIDES:
        print(guide.name)
        for command in commands(guide):
            reason = reason_not_to_run(command)
            print(f"  {f'not run, {reason}' if reason else 'run'}: {command}")
