"""Command lines without arguments, with `--help`, with wrong ones, on what is not there: a sentence, and no more."""

from __future__ import annotations

import ast
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eagle.__main__ import VERBS, main, printed_help
from eagle.command.launcher import SHARED

ROOT = Path(__file__).parent.parent
GONE, MISSING = (
    "no/such/folder",
    "missing/recipe.yaml",
)  # no id of a hub either, which would be asked for
RECIPES = (
    "data_prep.prepare",
    "data_prep.extract",
    "data_prep.regenerate",
    "data_prep.inspect_mask",
    "eval.measure",
    "eval.lossless",
)
RECIPES += ("eval.compare", "eval.tune", "recipes.forecast", "recipes.cards", "recipes.overlap")
JOINT = str(ROOT / "recipes/tiny/medusa2.yaml")  # which makes a new target
ENGINE = ["--engine", "vllm", "--target", GONE, "--environment", GONE]
# what each needs, and is not there; a command that begins to work without arguments has none in FREE
WRONG: dict[str, list[list[str]]] = {
    **{name: [[MISSING], [MISSING, "no override"]] for name in RECIPES},
    "data_prep.count_tokens": [[MISSING, "--out", "x"], [MISSING]],
    "data_prep.draft_vocab": [
        [MISSING, "--out", "x", "--size", "3"],
        [MISSING, "--out", "x", "--size", "few"],
    ],
    "data_prep.conversations": [[GONE], [GONE, "two"]],
    "eval.report": [["missing.jsonl"], [".", "--markdown"]],
    "tests.engines": [[GONE, *ENGINE], [GONE, "--engine", "unknown", "--target", GONE]],
    "tests.engines.layout_sources": [["trtllm=no/such/folder"], ["unknown=."], ["vllm"]],
    "tests.engines.engine_builds": [[GONE, "unknown"], ["--unknown"]],
    "eagle": [
        *(
            [verb]
            for verb in VERBS
            if verb not in ("demo", "recipes", "tiny-target", "train", "forecast")
        ),
        *([verb, "--help"] for verb in VERBS),
        ["unknown"],
        ["train", MISSING],
        ["train", MISSING, "--check"],
        ["measure", "tiny/eagl1"],
        ["recipes", "tiny/eagl1"],
        ["recipes", "--copy", "x.yaml"],
        ["generate", GONE, "Hello", "--target", GONE],
        ["chat", GONE, "--target", GONE],
        ["chat", GONE, "--target", GONE, "--temperature", "warm"],
        ["export", GONE, "out", "--target", GONE, "--to", "vllm"],
        ["export", GONE, "out", "--target", GONE, "--to", "unknown"],
        ["import", GONE, "out"],
        ["import", GONE, "out", "--taps", "a,b"],
        ["push", GONE, "someone/head"],
        ["push", GONE, "head"],
        ["pull", "head", "out"],
        ["inspect", GONE],
        ["doctor", GONE, "--target", GONE],
        ["check-method", "gone.py:Mine"],
        ["check-method", "unknown", "--fast"],
        ["measure", "tiny/eagle1", "--plugin", "gone.py"],
        ["extract", "tiny/eagle1", "drafter.kind=gone.py:Mine"],
        ["--plugin"],
    ],
    "recipes/train_eagle.py": [[MISSING], [MISSING, "--check"], [JOINT]],
    "recipes/train_medusa2.py": [[MISSING], [JOINT.replace("medusa2", "medusa")]],
    "recipes/tiny/make_target.py": [["--steps", "few"], ["unknown"]],
    "recipes/tiny/make_long.py": [["--steps", "few"], ["unknown"]],
    "recipes/tiny/make_seeing_target.py": [["--images", "few"], ["unknown"]],
    "recipes/tiny/demo.py": [["unknown"]],
    "tests/doctor/broken_heads.py": [
        ["--target", GONE, "--heads", GONE],
        ["--heads", GONE, "--rows", GONE, "--tokens", "few"],
    ],
    "bench/invariance.py": [[GONE], [GONE, "--dtype", "float64"]],
    "tests/recipes/training_memory.py": [["--out"], ["unknown"]],
    "tests/doctor/other_heads.py": [
        ["out", "--set", "unknown", "--seed", "1"],
        ["out", "--set", "tuning", "--seed", "few"],
    ],
    "bench/speed_tables.py": [[GONE], [GONE, "--dtype", "float16"]],
    "bench/rehearsal.py": [["--size", "unknown"], ["--methods", "unknown"], ["--folder", "."]],
    "bench/train_speed.py": [["--rounds", "few"], ["--dtypes", "unknown"]],
}
for measuring in ("eval.lossless", "eval.tune"):
    WRONG[measuring].append([JOINT])
FREE = {
    *("recipes.forecast", "recipes.cards", "recipes/train_eagle.py"),
    *("recipes/tiny/make_target.py", "recipes/tiny/make_long.py", "recipes/tiny/demo.py"),
    *("recipes/tiny/make_seeing_target.py", "tests.engines.layout_sources"),
    *("tests/recipes/training_memory.py", "bench/rehearsal.py"),
    "bench/train_speed.py",
}


def runs(path: Path) -> bool:
    """Whether a file is a command."""
    return '__name__ == "__main__"' in path.read_text()


def test_every_command_is_here() -> None:
    """A new one is tested too; what an engine's own Python runs is none."""
    rooms = (
        "data_prep",
        "eval",
        "recipes",
        "recipes/tiny",
        "bench",
        "tests/engines",
        "tests/doctor",
        "tests/recipes",
    )
    found = {
        str(path.relative_to(ROOT))
        for room in rooms
        for path in (ROOT / room).glob("*.py")
        if runs(path)
    }
    asked = {name if name.endswith(".py") else f"{name.replace('.', '/')}.py" for name in WRONG}
    asked = {name.replace("tests/engines.py", "tests/engines/__main__.py") for name in asked}
    engines = {f"tests/engines/engine_{name}.py" for name in ("vllm", "openvino", "llamacpp")}
    assert found - engines == asked - {"eagle.py"}


COMMON: list[list[str]] = [["--help"], ["--no-such-option"]]
CASES = [(name, argv) for name, cases in WRONG.items() for argv in [*COMMON, *cases]]
CASES += [(name, []) for name in WRONG if name not in FREE]
SECONDS = 20  # then a command has begun to work


def shown_as(value: object) -> str:
    """The name of a case."""
    return " ".join(value) if isinstance(value, list) else str(value)


def too_long(*_: object) -> None:
    """Ends a command that works instead of refusing."""
    raise AssertionError("it has begun to work")


@pytest.mark.filterwarnings(
    "ignore:.*found in sys.modules:RuntimeWarning"
)  # what runpy says of modules in use
@pytest.mark.parametrize(("name", "argv"), CASES, ids=shown_as)
def test_a_wrong_command_line_ends_in_a_sentence(
    name: str,
    argv: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Usage with status 0 or 2, or an error with status 1; no traceback, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *argv])
    monkeypatch.syspath_prepend(str(ROOT))
    run = runpy.run_path if name.endswith(".py") else runpy.run_module
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    with pytest.raises(SystemExit) as ended:
        run(str(ROOT / name) if name.endswith(".py") else name, run_name="__main__")
    signal.alarm(0)
    shown = capsys.readouterr()
    if "--help" in argv:
        assert ended.value.code in (0, None) and "usage: " in shown.out
    elif ended.value.code == (2 if argv[:1] in (["inspect"], ["doctor"]) and GONE in argv else 1):
        assert len(shown.err) > 20 and re.fullmatch(r"error: [^\n]+\n", shown.err)
    else:
        assert (
            ended.value.code == 2
            and shown.err.startswith("usage: ")
            and ("error: " in shown.err or not argv)
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["train", "--lr", "1e-3"], "unrecognized arguments: --lr: did you mean train.lr=1e-3?"),
        (["train", "tiny/eagle1", "--learning_rate=1"], "did you mean train.lr=1?"),
        (["extract", "tiny/eagle1", "--max-length", "64"], "did you mean data.max_length=64?"),
        (
            ["regenerate", "tiny/eagle1", "--seed", "3"],
            "did you mean regenerate.seed=3 or train.seed=3?",
        ),
        (["forecast", "tiny/eagle1", "--train.lr", "3"], "did you mean train.lr=3?"),
        (
            ["measure", "tiny/eagle1", "--no-such"],
            "--no-such: keys of the recipe are given as section.key=value",
        ),
    ],
)
def test_a_key_that_is_given_as_an_option_is_told_as_an_override(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every verb with usage and status 2."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and "usage: eagle" in shown and told in shown


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_a_drafter_that_is_none_is_refused_before_the_target_is_loaded(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong target beside it is not reached."""
    with pytest.raises(SystemExit):
        main([verb, "nosuch", *["Hello"] * (verb == "generate"), "--target", GONE])
    assert "error: no drafter nosuch" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], ["doctor", "--help"], ["recipes", "--help"]], ids=shown_as
)
def test_a_reader_that_has_seen_enough_gets_no_traceback(argv: list[str]) -> None:
    """As `head`, which closes the pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "eagle", *argv]
    run = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert run.stderr == ""


def arguments_without_help(path: Path) -> list[str]:
    """The arguments of a file's parsers that are not explained."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    added = [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
    ]
    return [
        ast.unparse(call)
        for call in added
        if "help" not in {keyword.arg for keyword in call.keywords}
    ]


@pytest.mark.parametrize(
    "folder", ["eagle/command", "eagle/recipe", "data_prep", "eval", "recipes", "recipes/tiny"]
)
def test_every_argument_is_explained(folder: str) -> None:
    """Those of the launcher in a text of its own."""
    paths = [path for path in (ROOT / folder).glob("*.py") if path.name != "launcher.py"]
    assert [line for path in paths for line in arguments_without_help(path)] == []


@pytest.mark.parametrize("verb", ["train", *sorted(SHARED)])
def test_help_tells_how_processes_share_the_work(verb: str) -> None:
    """Of every verb whose stage asks for them."""
    assert "--processes N" in (printed_help(verb) or "")
