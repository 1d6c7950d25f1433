"""Command lines without arguments, with `--help`, with wrong ones, on what is not there: a sentence, and no more."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from eagle.__main__ import (
    ALIASES,
    OLD_VERBS,
    VERBS,
    find_program,
    find_verb,
    main,
    overview,
    printed_help,
    refuse_unknown_options,
)
from eagle.command.environment import main as environment
from eagle.command.launcher import SHARED
from eagle.log import as_json, progress

ROOT = Path(__file__).parent.parent
# no id of a hub either, which would be asked for
GONE = "no/such/folder"
MISSING = "missing/recipe.yaml"
JOINT = str(ROOT / "recipes/tiny/medusa2.yaml")  # a recipe that makes a new target
ENGINE = f"--target {GONE} --environment {GONE} --engine"
# verbs that do something without arguments, or end with status 0
WORKING = (
    "demo",
    "recipes",
    "demo --tiny-target",
    "train",
    "train --estimate",
    "env",
    "generate",
)
# the commands, and wrong arguments of each beside those that all get
WRONG: dict[str, list[str]] = {
    # stages whose recipe is not there
    "data_prep.prepare": [MISSING],
    "data_prep.extract": [MISSING],
    "data_prep.regenerate": [MISSING],
    "data_prep.inspect_mask": [MISSING],
    "eval.measure": [MISSING],
    "eval.lossless": [MISSING, JOINT],
    "eval.compare": [MISSING],
    "eval.tune": [MISSING, JOINT],
    "recipes.forecast": [f"{MISSING} 'no override'"],
    "recipes.cards": [MISSING],
    "recipes.init_recipe": [f"--model {GONE} --data {GONE}"],
    "recipes.overlap": [MISSING],
    "data_prep.count_tokens": [f"{MISSING} --out x", MISSING],
    "data_prep.draft_vocab": [f"{MISSING} --out x --size 3", f"{MISSING} --out x --size few"],
    "data_prep.conversations": [GONE, f"{GONE} two"],
    "eval.report": ["missing.jsonl", ". --markdown"],
    # commands for real engines, none of which is here
    "tests.engines": [f"{GONE} {ENGINE} vllm", f"{GONE} --engine unknown --target {GONE}"],
    "tests.engines.layout_sources": [f"trtllm={GONE}", "unknown=.", "vllm"],
    "tests.engines.engine_builds": [f"{GONE} unknown"],
    "tests.engines.engine_speed": [
        f"{GONE} --engine vllm --environment x --target {GONE} --prompts {GONE} --out x",
        f"{GONE} --engine unknown",
    ],
    "tests.core.compare_rules": [
        f"--target {GONE} --head x --prompts x --out x",
        "--out x --head x",
    ],
    "eagle": [
        *(verb for verb in VERBS if verb not in WORKING),
        *(old for old, verb in OLD_VERBS.items() if verb not in WORKING),
        "unknown",
        # what each verb reads is not there, or is named wrongly
        f"train {MISSING}",
        f"train {MISSING} --check",
        "measure tiny/eagl1",
        "recipes tiny/eagl1",
        "recipes --copy x.yaml",
        f"generate {GONE} Hello --target {GONE}",
        f"chat {GONE} --target {GONE} --temperature warm",
        f"export {GONE} out --target {GONE} --to vllm",
        f"export {GONE} out --target {GONE} --to unknown",
        f"import {GONE} out",
        f"import {GONE} out --taps a,b",
        f"push {GONE} someone/head",
        f"push {GONE} head",
        "pull head out",
        f"inspect {GONE}",
        f"doctor {GONE} --target {GONE}",
        # methods of the user's own that are not there
        "check-method gone.py:Mine",
        "check-method unknown --fast",
        "measure tiny/eagle1 --plugin gone.py",
        "extract tiny/eagle1 drafter.kind=gone.py:Mine",
        "--plugin",
        "prepare tiny/eagle1 --only unknown",
        f"generate {GONE} --target {GONE} --compare",
        # both or neither
        f"generate {GONE}",
        f"generate --target {GONE}",
        "generate --compare",
    ],
    # a joint recipe belongs to the other script, and the reverse
    "recipes/train_eagle.py": [MISSING, f"{MISSING} --check", JOINT],
    "recipes/train_medusa2.py": [MISSING, JOINT.replace("medusa2", "medusa")],
    "recipes/tiny/make_target.py": ["--steps few", "unknown"],
    "recipes/tiny/make_long.py": ["--steps few"],
    "recipes/tiny/make_seeing_target.py": ["--images few"],
    "recipes/tiny/demo.py": ["unknown"],
    "tests/recipes/training_memory.py": ["--out"],
    "bench/invariance.py": [GONE, f"{GONE} --dtype float64"],
    "bench/speed_tables.py": [GONE, f"{GONE} --dtype float16", f"{GONE} --threads 0"],
    "bench/rehearsal.py": ["--size unknown", "--methods unknown", "--folder ."],
    "bench/llamacpp.py": ["a b c", f"{GONE} b c d --prompts {GONE}"],
    "bench/train_speed.py": ["--rounds few", "--dtypes unknown"],
}
# commands that do something without arguments
FREE = {
    "recipes.forecast",
    "recipes.cards",
    "recipes/train_eagle.py",
    "recipes/tiny/make_target.py",
    "recipes/tiny/make_long.py",
    "recipes/tiny/make_seeing_target.py",
    "recipes/tiny/demo.py",
    "tests.engines.layout_sources",
    "tests/recipes/training_memory.py",
    "bench/rehearsal.py",
    "bench/train_speed.py",
}
ENGINES = ("vllm", "openvino", "llamacpp")
FOLDERS = ("data_prep", "eval", "recipes", "recipes/tiny", "bench")
FOLDERS += ("tests/core", "tests/engines", "tests/recipes")
CASES = [(name, line) for name, lines in WRONG.items() for line in ("--help", "--no-such", *lines)]
CASES += [(name, "") for name in WRONG if name not in FREE]
SECONDS = 20  # after which a command has begun to work


def test_every_command_is_here() -> None:
    """A new command is tested too; what an engine's own Python runs is none."""
    files = {path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")}
    files -= {ROOT / f"tests/engines/engine_{name}.py" for name in ENGINES}
    commands = {path for path in files if '__name__ == "__main__"' in path.read_text()}
    known = set()
    for name in WRONG.keys() - {"eagle"}:
        path = ROOT / (name if name.endswith(".py") else name.replace(".", "/"))
        known.add(path / "__main__.py" if path.is_dir() else path.with_suffix(".py"))
    assert commands == known


def end_it(*_: object) -> None:
    """End a command that works instead of refusing."""
    raise AssertionError("it has begun to work")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # runpy's
@pytest.mark.parametrize(("name", "line"), CASES)
def test_a_wrong_command_line_ends_in_a_sentence(
    name: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Usage with status 0 or 2, or an error with status 1; no traceback, and nothing is written."""
    argv = shlex.split(line)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *argv])
    monkeypatch.syspath_prepend(str(ROOT))
    signal.signal(signal.SIGALRM, end_it)
    signal.alarm(SECONDS)
    with pytest.raises(SystemExit) as ended:
        if name.endswith(".py"):
            runpy.run_path(str(ROOT / name), run_name="__main__")
        else:
            runpy.run_module(name, run_name="__main__")
    signal.alarm(0)
    status = ended.value.code
    printed = capsys.readouterr()
    # of an old verb, the line on what is written instead
    complaint = re.sub(r"^eagle .* now; the old name works too\n", "", printed.err)
    assert list(tmp_path.iterdir()) == []
    if line == "--help":
        assert status in (0, None)
        assert "usage: " in printed.out
    elif complaint.startswith("usage: "):
        assert status == 2
        assert "error: " in complaint or not argv
    else:
        # inspect and doctor have 1 for the verdict that a head is broken
        is_verdict = argv[:1] in (["inspect"], ["doctor"])
        assert status == (2 if is_verdict else 1)
        assert len(complaint) > 20
        assert re.fullmatch(r"error: [^\n]+\n", complaint)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("train --lr 1e-3", "unrecognized arguments: --lr: did you mean train.lr=1e-3?"),
        ("train tiny/eagle1 --learning_rate=1", "did you mean train.lr=1?"),
        ("regenerate tiny/eagle1 --seed 3", "mean regenerate.seed=3 or train.seed=3?"),
        ("forecast tiny/eagle1 --train.lr 3", "did you mean train.lr=3?"),
        ("measure tiny/eagle1 --agian", "did you mean --again?"),
        ("measure tiny/eagle1 --no-such", "keys of the recipe are given as section.key=value"),
    ],
)
def test_a_key_that_is_given_as_an_option_is_told_as_an_override(
    line: str,
    hint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By every verb, with usage and status 2."""
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert "usage: eagle" in printed
    assert hint in printed


@pytest.mark.parametrize(
    "line", ["generate head Hello --no-such", "train --lr 1e-3", "doctor head --tagret x"]
)
def test_an_unknown_option_is_refused_before_torch_is_imported(line: str) -> None:
    """Which takes seconds."""
    code = f"""
import sys
from eagle.__main__ import main
try:
    main({line.split()!r})
finally:
    print("torch" in sys.modules)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert run.stdout == "False\n"
    assert run.stderr.startswith(f"usage: eagle {line.split()[0]} ")
    assert f"eagle {line.split()[0]}: error: unrecognized arguments: --" in run.stderr


def test_the_page_on_generate_lists_every_option() -> None:
    """Those of the verb, and those that all verbs take."""
    options = set(re.findall(r"--[a-z][\w-]*", printed_help("generate") or ""))
    options |= {"--quiet", "--plugin", "--trust-code"}
    listed = set(re.findall(r"--[a-z][\w-]*", (ROOT / "docs/chat.md").read_text()))
    assert options - {"--help"} <= listed


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_a_verb_is_known_by_its_help(verb: str) -> None:
    """Also where it is abbreviated, and those of the launcher."""
    options = set(re.findall(r"^  (?:-\w.*?, )?(--[\w-]+)", printed_help(verb) or "", re.MULTILINE))
    assert options
    for option in {*options, "--processes", "--config_file"}:
        refuse_unknown_options(verb, ["RECIPE", option, f"{option[:5]}=3"])


@pytest.mark.parametrize("line", ["generate nosuch Hello", "chat nosuch"])
def test_a_drafter_that_is_none_is_refused_before_the_target_is_loaded(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target, which is wrong too, is not looked for."""
    with pytest.raises(SystemExit):
        main([*line.split(), "--target", GONE])
    assert "error: no drafter nosuch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train joint={}", "name a recipe with a section `joint`"),
        ("train joint={} --check", "recipes/tiny/demo.yaml with a section `joint` trains the"),
    ],
)
def test_the_demos_target_is_not_trained(
    line: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A section `joint` needs a recipe, which names another target."""
    with pytest.raises(SystemExit):
        main(line.split())
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("line", ["--help", "doctor --help"])
def test_a_reader_that_has_seen_enough_gets_no_traceback(line: str) -> None:
    """As `head`, which closes the pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "eagle", *line.split()]
    run = subprocess.run(
        command,
        cwd=ROOT,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert run.stderr == ""


@pytest.mark.parametrize(
    "folder", ["eagle/command", "eagle/recipe", "data_prep", "eval", "recipes", "recipes/tiny"]
)
def test_every_argument_is_explained(folder: str) -> None:
    """Each has a help text; the launcher's are explained in a text of their own."""
    bare = []
    for path in (ROOT / folder).glob("*.py"):
        if path.name == "launcher.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            # a call such as parser.add_argument("--out", help="...")
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            has_help = "help" in {keyword.arg for keyword in node.keywords}
            if node.func.attr == "add_argument" and not has_help:
                bare.append(ast.unparse(node))
    assert bare == []


@pytest.mark.parametrize("verb", ["train", *sorted(SHARED)])
def test_help_tells_how_processes_share_the_work(verb: str) -> None:
    """Of every verb whose stage runs on several processes."""
    assert "--processes N" in (printed_help(verb) or "")


def test_the_environment_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Versions of what matters, and of packages that are not installed that they are not."""
    environment([])
    facts = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert facts["transformers"] == version("transformers")
    assert facts["torch"].startswith(torch.__version__)
    assert {"eagle", "python", "processor", "device", "gguf"} <= facts.keys()


def test_help_of_a_verb_has_two_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    """`eagle help measure` and `eagle measure --help`; `eagle help` lists all verbs."""
    printed = []
    for words in (["help", "measure"], ["measure", "--help"], ["help"]):
        with pytest.raises(SystemExit):
            find_verb(words)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "usage: eagle measure" in printed[0]
    assert printed[2].strip() == overview()


def test_the_overview_fits_a_screen() -> None:
    """All verbs by group, without those of old names."""
    lines = overview().splitlines()
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 80
    assert not {line.split()[0] for line in lines if line} & (OLD_VERBS.keys() - {"train"})


@pytest.mark.parametrize("old", OLD_VERBS)
def test_an_old_verb_is_its_new_spelling(
    old: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wherever its option stands; a line on stderr says what to write, unless quiet is wanted."""
    monkeypatch.setenv("EAGLE_QUIET", "")
    monkeypatch.delenv("EAGLE_QUIET")
    words = ["RECIPE", "-o", "x"]
    verb, *option = OLD_VERBS[old].split()
    program = find_program([old, *words])
    assert program == (OLD_VERBS[old], words)
    # before the other words, after them, and as one word
    spellings = [
        [verb, *option, *words],
        [verb, *words, *option],
        [verb, *words, *filter(None, ["=".join(option)])],
    ]
    for spelled in spellings:
        assert find_program(spelled) == program
        assert find_verb(spelled)[1] == words
        assert capsys.readouterr().err == ""
    run, rest, _ = find_verb([old, *words])
    assert run.args == (OLD_VERBS[old], VERBS[OLD_VERBS[old]])
    assert rest == words
    printed = capsys.readouterr()
    assert printed.out == ""
    told = f"eagle {old} is `eagle {OLD_VERBS[old]}` now; the old name works too\n"
    # `eagle chat` is said as well as `eagle generate`
    assert printed.err == ("" if old in ALIASES else told)
    assert printed_help(OLD_VERBS[old]) in main_help([old], capsys)
    find_verb([old, *words, "--quiet"])
    assert capsys.readouterr().err == ""


def main_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `eagle help` prints of some words."""
    with pytest.raises(SystemExit):
        find_verb(["help", *words])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "prepare tiny/eagle1 --on masks",
            "eagle prepare --only masks",
        ),
        (
            "measure tiny/eagle1 --tun",
            "eagle measure --tune",
        ),
        (
            "train tiny/eagle1 --est",
            "eagle train --estimate",
        ),
        (
            "push head me/head --car",
            "eagle push --card",
        ),
    ],
)
def test_an_option_that_chooses_a_program_is_written_in_full(
    line: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An abbreviation, which argparse would take, is refused before anything runs."""
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert f"expected `{expected} ...`, written in full" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("env", {"eagle", "torch", "gguf"}),
        ("recipes", {"tiny/eagle1", "vicuna-7b/eagle1"}),
        ("recipes tiny/eagle1", {"target", "train"}),
        ("train --estimate llama-3.1-8b/eagle3 --processes 4", {"runs", "states"}),
    ],
)
def test_a_result_is_one_json_object(
    line: str,
    keys: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It alone is on stdout; what is printed without `--json` is on stderr, and with `-q` nowhere."""
    main(line.split())
    text = capsys.readouterr().out
    main([*line.split(), "--json"])
    printed = capsys.readouterr()
    assert keys <= json.loads(printed.out).keys()
    assert printed.out.count("\n") == 1
    assert printed.err == text
    monkeypatch.setenv("EAGLE_QUIET", "1")
    main([*line.split(), "--json"])
    assert tuple(capsys.readouterr()) == (printed.out, "")


def test_json_holds_no_infinite_number() -> None:
    """Which JSON has no word for; other values are texts."""
    assert as_json({0.5: [float("inf"), float("nan"), 1.5]}) == {"0.5": [None, None, 1.5]}
    assert as_json([True, None]) == [True, None]
    assert as_json(Path("x")) == "x"


def test_recipes_of_models_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Then those of the tiny model, comparisons and settings of accelerate."""
    main(["recipes"])
    folders = re.findall(r"^([^ \n:]+)", capsys.readouterr().out, re.MULTILINE)
    assert folders[-3:] == ["tiny", "compare", "accelerate"]
    assert folders[:-3] == sorted(folders[:-3])


def test_quiet_shows_no_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither here nor in processes that begin here, nor bars of Hugging Face's libraries."""
    assert list(progress("ab", "work", 2)) == ["a", "b"]
    assert "work: 2 of 2" in capsys.readouterr().err
    names = (
        "EAGLE_QUIET",
        "HF_HUB_DISABLE_PROGRESS_BARS",
        "HF_DATASETS_DISABLE_PROGRESS_BARS",
    )
    for name in names:
        monkeypatch.setenv(name, "0")
    find_verb(["extract", "-q", "RECIPE"])
    assert [os.environ[name] for name in names] == ["1", "1", "1"]
    assert list(progress("ab", "work", 2)) == ["a", "b"]
    assert capsys.readouterr().err == ""
