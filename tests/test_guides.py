"""What the guides tell a reader to type: programs parse it, recipes load with its overrides, Python compiles.

`python -m tests.test_guides` lists every command, and why those that are not run here are not.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents import (
    GUIDES,
    as_call,
    blocks,
    check_call,
    commands,
    messages_of_the_project,
    words_of,
    written_files,
)

# programs of others, and why they are not run here
OTHERS = {
    "pip": "downloads packages",
    "git": "downloads the repository",
    "make": "makes an environment first",
    "cd": "changes the reader's folder",
    "export": "sets the reader's shell",
    "vllm": "needs vLLM and a GPU",
    "nvidia-smi": "needs a GPU",
    "curl": "needs a server",
    "python -m vllm": "needs vLLM",
    "python -m sglang": "needs SGLang and a GPU",
}


def program_of_others(line: str) -> str | None:
    """The program of another project that a command calls, if it is one of those."""
    line = " ".join(words_of(line))
    return next((name for name in OTHERS if f"{line} ".startswith((f"{name} ", f"{name}."))), None)


def check_page(page: Path, folder: Path) -> None:
    """Check every command of a page that is a program of this project."""
    written = {}
    for number, (name, text) in enumerate(written_files(page).items()):
        written[name] = folder / f"{number}.yaml"
        written[name].write_text(text)
    for line in commands(page):
        if program_of_others(line) is None:
            check_call(as_call(line), written)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_commands_of_a_guide_are_accepted_by_their_programs(page: Path, tmp_path: Path) -> None:
    """Every command is parsed by its program, and every recipe loads with the overrides beside it."""
    check_page(page, tmp_path)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_snippets_of_a_guide_compile(page: Path) -> None:
    """Python blocks are Python."""
    for text in blocks(page, "python"):
        compile(text, page.name, "exec")


def test_messages_of_the_guides_are_the_projects_own() -> None:
    """A message in a text block of the troubleshooting page is one that the project prints."""
    known = messages_of_the_project()
    shown = [line for page in GUIDES if page.name == "troubleshooting.md" for line in blocks(page, "text")]
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
    lines = ["eagle recipes tiny/eagle1 --copy my/own.yaml", "eagle train my/own.yaml \\", "  train.lr=1e-3"]
    page.write_text("\n".join(["```yaml", arms, "```", "```bash", *lines, "```\n"]))
    assert list(written_files(page)) == ["my/arms.yaml"]
    assert commands(page)[1] == "eagle train my/own.yaml train.lr=1e-3"
    check_page(page, tmp_path)


if __name__ == "__main__":
    for guide in GUIDES:
        print(guide.name)
        for command in commands(guide):
            other = program_of_others(command)
            print(f"  {'not run: ' + OTHERS[other] if other else 'checked'}: {command}")
