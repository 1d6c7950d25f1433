"""The command finds its stages and recipes, and a wheel holds all of them."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_prep.dataset_card import dataset_card
from eagle.__main__ import OLD_VERBS, VERBS, main
from eagle.command.launcher import launcher_options
from eagle.recipe import Recipe
from eagle.shipped import RECIPES, STAGES, find_recipe, recipe_names
from eval.comparison.compare_plan import Comparison
from tests.outside_methods import METHOD, go_the_road

ROOT = Path(__file__).parent.parent
LESS = """
data.limit=24 data.max_length=96 regenerate.max_new_tokens=8 regenerate.keep_truncated=true train.batch_size=4
train.max_steps=4 eval.count=2 eval.max_new_tokens=8
"""
TARGET = "--target runs/tiny/target"
# from nothing to a head in the layout of an engine
PIPELINE = [
    "demo --tiny-target --steps 30",
    f"prepare tiny/eagle1 {LESS} --count 1",
    f"extract tiny/eagle1 {LESS}",
    f"train tiny/eagle1 {LESS} --check",
    f"train tiny/eagle1 {LESS}",
    f"measure tiny/eagle1 {LESS}",
    f"measure tiny/eagle1 --verify {LESS}",
    f"lossless tiny/eagle1 {LESS} --json",
    "report runs/tiny/eagle1/results.jsonl",
    f"export runs/tiny/eagle1/head {TARGET} --to vllm runs/tiny/vllm",
    f"inspect runs/tiny/vllm {TARGET}",
    "push runs/tiny/eagle1/head --card",
    "card runs/tiny/features",
]


def test_a_verb_names_a_function_that_exists() -> None:
    """Read from the source, as importing all of them takes long."""
    for name, verb in VERBS.items():
        tree = ast.parse((STAGES / f"{verb.module.replace('.', '/')}.py").read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert verb.function in functions, name


def test_help_comes_at_once() -> None:
    """`eagle --help` names every verb and imports no torch; nor do the recipes, a typo, and the help of a verb."""
    # all that must be printed without torch
    lines = [["--help"], ["recipes"], ["--version"], ["extarct"]]
    lines += [[*verb.split(), "--help"] for verb in [*VERBS, *OLD_VERBS]]
    # one process for all, as each start takes a second
    code = f"""
import sys
from eagle.__main__ import main
for argv in {lines}:
    try:
        main(argv)
    except SystemExit as ended:
        assert ended.code == 2 if argv == ["extarct"] else not ended.code
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert all(f"  {verb} " in done.stdout for verb in VERBS if " " not in verb)
    assert "  tiny/eagle1 " in done.stdout


def test_every_recipe_has_a_name() -> None:
    """Names stand for the files of the package, from any folder."""
    assert {find_recipe(name) for name in recipe_names()} == set(RECIPES.glob("*/*.yaml"))


def test_a_name_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe, a comparison with its base, the path of a checkout; a real file wins; a wrong name gets near ones."""
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.load("tiny/eagle1")
    assert recipe == Recipe.load("recipes/tiny/eagle1.yaml")
    assert recipe == Recipe.load("tiny/eagle1.yaml")
    assert recipe.target == Comparison.load("compare/tiny").recipe.target
    with pytest.raises(ValueError, match=r"such as .*tiny/medusa"):
        Recipe.load("tiny/medusas")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/eagle1").write_text((RECIPES / "tiny/hass.yaml").read_text())
    assert Recipe.load("tiny/eagle1").drafter.kind == "hass"


def test_a_recipe_is_copied_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--copy` writes what is printed without it, and overwrites nothing."""
    copy = tmp_path / "mine/one.yaml"
    main(["recipes", "tiny/eagle1"])
    printed = capsys.readouterr().out
    main(["recipes", "tiny/eagle1", "--copy", str(copy)])
    assert copy.read_text() == printed == (RECIPES / "tiny/eagle1.yaml").read_text()
    with pytest.raises(SystemExit):
        main(["recipes", "tiny/eagle1", "--copy", str(copy)])
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "options", "rest"),
    [
        ("r.yaml train.lr=1", [], "r.yaml train.lr=1"),
        ("r.yaml --processes 8 train.lr=1", ["--num_processes=8", "ddp"], "r.yaml train.lr=1"),
        ("--config_file zero3 r.yaml", ["zero3"], "r.yaml"),
    ],
)
def test_the_launcher_gets_its_options_and_the_stage_the_rest(
    line: str,
    options: list[str],
    rest: str,
) -> None:
    """Several processes start with the shipped settings of DDP; without options nothing is added."""
    if options:
        options[-1] = f"--config_file={RECIPES}/accelerate/{options[-1]}.yaml"
    assert launcher_options(line.split()) == (options, rest.split())


def test_unknown_settings_of_the_launcher_are_refused() -> None:
    """By the name that was given."""
    with pytest.raises(ValueError, match="no recipe at nowhere"):
        launcher_options(["--config_file", "nowhere", "r.yaml"])


def test_a_card_of_conversations_tells_whose_answers_they_are(tmp_path: Path) -> None:
    """The model with its revision, the counts, how to load them; without the settings beside them no card is made."""
    path = tmp_path / "answers.jsonl"
    path.write_text('{"finish_reasons": ["stop"]}\n{"finish_reasons": ["stop", "length"]}\n')
    with pytest.raises(ValueError, match=r"answers\.jsonl\.settings beside it"):
        dataset_card(path, "me/answers")
    settings = {
        "target": {"path": "org/model", "revision": "abc"},
        "sampling": {"seed": 3},
        "data": {"source": "f00"},
    }
    Path(f"{path}.settings").write_text(json.dumps(settings))
    card = dataset_card(path, "me/answers")
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "org/model"
    assert "`org/model`, revision `abc`" in card
    for text in ("conversations: 2", "answers: 3", "cut off: 1", '("me/answers"', "## Licence"):
        assert text in card


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of this checkout, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.long
def test_the_wheel_holds_the_stages_inside_the_package(built: Path) -> None:
    """Nothing but `eagle` at the top; every source file, recipe and text, and the head; also from the sdist."""
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0].split("-")[0] for name in names} == {"eagle", "eagle_heads"}
    packed = {path.relative_to(ROOT).as_posix() for path in (ROOT / "eagle").rglob("*.py")}
    for room in ("data_prep", "eval", "recipes", "heads"):
        for path in (ROOT / room).rglob("*.*"):
            # all of a head's files are read, and of recipes the texts that the demo takes
            if room == "heads" or path.suffix in (".py", ".yaml", ".css", ".jsonl"):
                packed.add(f"eagle/stages/{path.relative_to(ROOT).as_posix()}")
    assert packed | {"eagle/py.typed"} <= names
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "CITATION.cff", "constraints.txt"} <= inside


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which does not know this checkout."""
    environment = tmp_path_factory.mktemp("installed") / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin/python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", *built.glob("*.whl")]
    subprocess.run(pip, check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    # the dependencies of this environment and of those that it borrows from by .pth files; such files in there,
    # as that of an editable install, are not read
    folders = [sysconfig.get_path("purelib")]
    folders += [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(dict.fromkeys(folders)))
    found = run_clean([python, "-c", "import eagle; print(eagle.__file__)"], environment)
    assert Path(found.stdout.strip()).is_relative_to(site)
    return environment


def run_clean(command: list[Any], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without the variables by which Python would find this checkout."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        command,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.long
def test_the_installed_wheel_goes_from_nothing_to_an_export(
    installed: Path, tmp_path: Path
) -> None:
    """In an empty folder, with an environment that does not know this checkout: every stage by its verb."""
    for line in PIPELINE:
        done = run_clean([installed / "bin/eagle", *line.split()], tmp_path)
        assert done.returncode == 0, f"eagle {line}\n{done.stdout}{done.stderr}"
    assert (tmp_path / "runs/tiny/vllm/model.safetensors").is_file()
    assert "conversations were kept" in (tmp_path / "runs/tiny/features/README.md").read_text()
    # the package is typed for its users
    (tmp_path / "mine.py").write_text("from eagle import Target\n\nreveal_type(Target.load)\n")
    # mypy of this environment reads the package of the other
    python = ["--python-executable", installed / "bin/python"]
    typed = run_clean([sys.executable, "-m", "mypy", *python, "mine.py"], tmp_path)
    assert "-> eagle.target.target.Target" in typed.stdout, typed.stdout


@pytest.mark.slow
@pytest.mark.long
def test_a_method_outside_goes_its_road_with_the_installed_wheel(
    installed: Path, tmp_path: Path
) -> None:
    """In an empty folder, without pytest's files or a checkout: checked, trained, measured, compared, loaded."""

    def run(line: str) -> tuple[int, str]:
        done = run_clean([installed / "bin/eagle", *shlex.split(line)], tmp_path)
        return done.returncode, done.stdout + done.stderr

    assert run("tiny-target --steps 30")[0] == 0
    go_the_road(run, tmp_path)
    status, printed = run("check-method mine.py:Recurrent --fast")
    assert status == 0, printed
    assert "checks hold, as they must" in printed
    wrong = METHOD.replace("self.length + 1)", "self.length)")
    (tmp_path / "wrong.py").write_text(wrong)
    status, printed = run("check-method wrong.py:Recurrent --fast")
    assert status == 1, printed
    assert "FAULT each level of a draft uses the noise of its own position" in printed
