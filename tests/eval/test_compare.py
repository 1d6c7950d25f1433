"""Comparisons: mistakes are named first, the table says what decoding gives, and finished parts are not redone."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from comparisons import small_comparison, written

from eagle.decoding.decode import generate
from eagle.disk import lock_folder
from eagle.formats.checkpoint import load_drafter
from eval import compare
from eval.compare import main
from eval.comparison import compare_table, compare_train
from eval.comparison.compare_plan import Comparison, digest_of
from eval.comparison.compare_rows import Rows
from eval.comparison.compare_table import ComparisonTable, markdown
from eval.load_run import load_target
from eval.prompts import cases, encode_prompt, questions
from eval.result_files.buckets import CONTEXT
from eval.result_files.statistics import estimate_difference
from tests.eval.jsonl_files import read_lines, write_lines

ROOT = Path(__file__).parents[2]
# the column of the first shape at the first temperature
TREE = "tree, T = 0"
Lengths = dict[Any, tuple[int, int]]  # committed tokens and cycles of an answer


NGRAM = {"untrained": "ngram"}
# changes of a comparison file, by words of the error
MISTAKES = yaml.safe_load(Path(__file__).with_name("comparison_mistakes.yaml").read_text())


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_named_before_anything_runs(words: str, tmp_path: Path) -> None:
    """The error names the key and what was expected, although there is no target yet."""
    values = small_comparison(tmp_path / "no target", tmp_path)
    with pytest.raises(ValueError) as error:
        Comparison.load(written({**values, **MISTAKES[words]}, tmp_path))
    assert words in str(error.value)


def test_options_decide_what_an_arm_is(tmp_path: Path) -> None:
    """Arms of one method with other options are measured separately; without options the digest is unchanged."""
    arms = {"a": NGRAM, "b": {**NGRAM, "options": {"longest": 2}}}
    values = small_comparison(tmp_path / "no target", tmp_path)
    comparison = Comparison.load(written(values, tmp_path, arms=arms))
    a, b = (one.digest for one in comparison.arms.values())
    assert a == digest_of(["ngram"], None, None) != b


def test_shipped_comparisons_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file in recipes/compare names recipes and methods that exist."""
    monkeypatch.chdir(ROOT)
    for path in sorted((ROOT / "recipes/compare").glob("*.yaml")):
        assert Comparison.load(path).arms


@pytest.fixture(scope="module")
def values(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The small comparison, run to its end."""
    folder = tmp_path_factory.mktemp("compare")
    values = small_comparison(tiny_target_dir, folder)
    main([written(values, folder)])
    return values


@pytest.fixture
def comparison(values: dict[str, Any], tmp_path: Path) -> Comparison:
    """The finished comparison."""
    return Comparison.load(written(values, tmp_path))


@pytest.fixture
def table(comparison: Comparison) -> ComparisonTable:
    """Its table."""
    return ComparisonTable(comparison, Rows(comparison.folder))


def test_the_table_says_what_decoding_gives(table: ComparisonTable) -> None:
    """Every length is that of decoding here with the arm's last head, prompt by prompt."""
    comparison = table.comparison
    recipe = comparison.recipe
    target = load_target(recipe)
    # one arm without weights, and one that goes on from another arm
    for name, seed in (("counts", 0), ("longer", 1)):
        one = comparison.arms[name]
        head = one.section.untrained or one.folder(comparison.folder, seed) / "last"
        drafter = load_drafter(head, target)
        for shape, temperature in product(comparison.shapes, recipe.eval.temperatures):
            expected = {}
            for case in cases(recipe, questions(recipe), [temperature]):
                trace = generate(
                    target,
                    drafter,
                    encode_prompt(recipe, target, case.question),
                    budget=comparison.shapes[shape],
                    sampling=case.sampling(0),
                    max_new_tokens=10,
                )
                committed = sum(cycle.committed for cycle in trace.cycles)
                expected[case.question.id] = (committed, len(trace.cycles))

            lengths = table.lengths(one, shape, temperature)

            assert {key[2]: row for key, row in lengths.items() if key[0] == seed} == expected


def test_a_finished_comparison_is_reported_and_not_made_again(
    values: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The table comes from the results file, which does not grow; nothing is trained."""
    # any training would now be an error
    monkeypatch.delattr(compare, "train_arm")
    path = written(values, tmp_path)
    out = Path(values["out"])
    results = (out / "results.jsonl").read_bytes()
    shown = (out / "comparison.md").read_text()
    (out / "comparison.md").unlink()
    main([path, "--report"])

    assert capsys.readouterr().out == shown == (out / "comparison.md").read_text()

    main([path])
    assert capsys.readouterr().out.endswith(shown)
    main([path, "--report", "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads((out / "comparison.json").read_text())
    assert (out / "results.jsonl").read_bytes() == results

    header = read_lines(out / "results.jsonl")[0]["run"]
    assert header["commit"]
    assert header["machine"]
    assert len(header["prompts"]) == 3


def test_budgets_count_the_start(table: ComparisonTable) -> None:
    """An arm learns from its tokens, to within a step, including those of the arm that it starts from."""
    for name, budget in {"head": 150, "longer": 300}.items():
        training = table.training(table.comparison.arms[name], 0)
        assert training is not None
        # a step holds up to four conversations of 96 tokens
        assert budget <= training["tokens"] < budget + 4 * 96


def test_equal_time_is_within_a_step(values: dict[str, Any], tmp_path: Path) -> None:
    """By known seconds of a step; the seconds of an arm's start count too."""
    arms = {
        **values["arms"],
        "slow": {"recipe": {"train": {"lr": 2e-3}}, "tokens": 150},
        "fast": {"as_long_as": "slow", "recipe": {"train": {"lr": 3e-3}}},
        "goes on": {"as_long_as": "slow", "start": "head"},
    }
    comparison = Comparison.load(written(values, tmp_path, arms=arms))
    digests = {name: one.digest for name, one in comparison.arms.items()}
    seconds = {"slow": 4.0, "fast": 1.0, "head": 2.0, "goes on": 3.0}
    rows = Rows(tmp_path)
    rows.add("clock", [{digests[name]: value for name, value in seconds.items()}])
    for name, steps in (("slow", 5), ("head", 4)):
        rows.add("trained", [{"arm": name, "digest": digests[name], "seed": 0, "steps": steps}])
    # 20 seconds of `slow`, of which `goes on` has spent 8 in its start
    for name, steps in (("fast", 20), ("goes on", 4)):
        one = comparison.arms[name]
        assert compare_train.steps_in_time(comparison, rows, one, 0) == steps


def test_a_changed_arm_alone_is_trained_again(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arms that start from it are trained again too."""
    trained: list[tuple[str, int]] = []

    def train_arm(_comparison: Any, _rows: Any, one: Any, seed: int) -> None:
        trained.append((one.name, seed))

    monkeypatch.setattr(compare, "train_arm", train_arm)
    monkeypatch.setattr(compare.Decoder, "measure", lambda *_: None)
    changed = {"tokens": 150, "recipe": {"train": {"lr": 3e-3}}}
    out = tmp_path / "out"
    write_lines(out / "results.jsonl", read_lines(Path(values["out"]) / "results.jsonl"))
    # the results of the unchanged arm are in the file already
    arms = {**values["arms"], "head": changed}
    main([written(values, tmp_path, arms=arms, out=str(out), seeds=[0])])

    assert trained == [("head", 0), ("longer", 0)]


def test_a_torn_line_is_cut_off_and_a_foreign_one_named(tmp_path: Path) -> None:
    """Whole lines stay; a line of another kind is an error with its number."""
    path = tmp_path / "results.jsonl"
    Rows(tmp_path).add("clock", [{"a": 1.0}])
    with path.open("a") as file:
        file.write('{"clock": {"b": 2')

    Rows(tmp_path).add("clock", [{"c": 3.0}])

    assert Rows(tmp_path).of("clock") == [{"a": 1.0}, {"c": 3.0}]
    write_lines(path, [{"clock": {}}, []])
    with pytest.raises(ValueError, match=r"results.jsonl:2 is no row of a comparison"):
        Rows(tmp_path)


def test_differences_are_resampled_by_conversation(
    table: ComparisonTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both arms' answers to a prompt, with any seed, are resampled together; bold figures exclude zero."""
    names = [str(i) for i in range(12)]
    generator = random.Random(0)
    by_arm: dict[str, Lengths] = {"counts": {}, "head": {}, "longer": {}}
    for name, length in (("counts", 1.5), ("head", 1.8), ("longer", 1.5)):
        for seed, conversation in product((0, 1), names):
            cycles = generator.randint(5, 15)
            key = (seed, "set", conversation, 0, 0)
            by_arm[name][key] = (round(cycles * length), cycles)

    monkeypatch.setattr(ComparisonTable, "lengths", lambda _, one, *more: by_arm[one.name])
    monkeypatch.setattr(ComparisonTable, "contexts", defaultdict(int))
    figures = table.figures()
    for pair in figures["pairs"]:
        found = pair["tau"][TREE]
        # both seeds of a conversation are one cluster
        expected, answers = estimate_difference(
            by_arm[pair["first"]], by_arm[pair["second"]], lambda key: key[2]
        )
        assert found["answers"] == answers == 24
        assert [found["value"], found["low"], found["high"]] == pytest.approx(expected)

    clear, unclear = markdown(figures).splitlines()[-4:-2]

    assert clear.startswith("| head over counts")
    assert clear.count("**") == 8
    assert unclear.startswith("| longer over counts")
    assert "**" not in unclear


def figures_by_context(table: ComparisonTable) -> dict[str, Any]:
    """Return the acceptance length of n-grams in each range of contexts, with its interval."""
    [found] = [row for row in table.figures()["arms"] if row["arm"] == "counts"]
    return found["tau"][TREE]["by_context"]


def read_greedy(comparison: Comparison) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the target's greedy answers, and the rows of n-grams on them, by conversation."""
    digest = comparison.row_digest(comparison.arms["counts"], "tree")
    answers = {}
    rows = {}
    for entry in read_lines(comparison.folder / "results.jsonl"):
        answer = entry.get("answer")
        if answer is not None and answer["temperature"] == 0:
            answers[answer["conversation"]] = answer
        row = entry.get("row")
        if row is not None and row["digest"] == digest and row["temperature"] == 0:
            rows[row["conversation"]] = row

    return answers, rows


def test_the_table_by_context_against_plain_counting(
    comparison: Comparison, table: ComparisonTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer counts where its middle lies; planted fault: short and long answers change places."""
    answers, rows = read_greedy(comparison)
    middles = {name: (one["prompt"] + len(one["tokens"])) / 2 for name, one in answers.items()}
    # one answer lies below this edge, two at it or above
    first, *others = sorted(middles, key=lambda name: middles[name])
    edge = int(middles[others[0]])
    monkeypatch.setattr(compare_table, "ENOUGH", 1)
    monkeypatch.setattr(compare_table, "CONTEXT", replace(CONTEXT, first=edge))
    expected = []
    for names in ([first], others):
        committed = sum(rows[name]["committed"] for name in names)
        expected.append(committed / sum(rows[name]["cycles"] for name in names))

    found = figures_by_context(table)
    assert list(found) == [f"below {edge}", f"{edge} to {2 * edge}"]
    assert [length["value"] for length in found.values()] == pytest.approx(expected)

    shown = markdown(table.figures()).split("| τ by tokens of context |")[1].splitlines()
    assert [line.split(" | ")[0] for line in shown[2:5]] == ["| counts", "| head", "| longer"]

    buckets: dict[Any, int] = defaultdict(int)
    for name, one in answers.items():
        buckets[one["set"], name, 0, one["sampling_seed"], 0.0] = int(name == first)
    monkeypatch.setattr(ComparisonTable, "contexts", buckets)

    # the lengths may agree by chance, but one answer has no interval, and two have one
    planted = ComparisonTable(comparison, Rows(comparison.folder))
    assert figures_by_context(planted) != found


def test_a_folder_belongs_to_one_run_and_target(values: dict[str, Any], tmp_path: Path) -> None:
    """A second run is refused while one writes, and so are results of another target."""
    path = written(values, tmp_path)
    with lock_folder(values["out"]), pytest.raises(ValueError, match="another run is writing"):
        main([path])
    with pytest.raises(ValueError, match="another target: its dtype is 'float32', now 'bfloat16'"):
        main([path, "recipe.target.dtype=bfloat16"])


def test_what_is_missing_is_prepared(values: dict[str, Any], tmp_path: Path) -> None:
    """Each missing file is made by its command; a command that does not make its file is named."""
    made = tmp_path / "made"
    # commands run under this Python
    command = f"-c 'from pathlib import Path; Path(\"{made}\").touch()'"
    compare.prepare(Comparison.load(written(values, tmp_path, prepare={str(made): command})))

    assert made.exists()
    useless = written(values, tmp_path, prepare={str(tmp_path / "other"): "-c pass"})
    with pytest.raises(ValueError, match="other is still missing after `python -c pass`"):
        compare.prepare(Comparison.load(useless))


def without_seconds(folder: Path) -> list[Any]:
    """Return the figures of a comparison but for times."""
    figures = json.loads((folder / "comparison.json").read_text())
    for one in figures["arms"]:
        del one["seconds"]
    return [figures["arms"], figures["pairs"]]


@pytest.mark.slow
def test_a_killed_comparison_ends_in_the_same_table(values: dict[str, Any], tmp_path: Path) -> None:
    """Killed once while a head is trained and once while arms are measured, only times differ."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "eval.compare", written(values, tmp_path, out=str(out))]
    results = out / "results.jsonl"

    def is_training() -> bool:
        return any(out.glob("runs/head-1-*/checkpoints/step-[12]"))

    def is_measuring() -> bool:
        return results.exists() and b'{"done"' in results.read_bytes()

    for is_time in (is_training, is_measuring):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as run:
            while not is_time():
                assert run.poll() is None
                time.sleep(0.002)

            run.kill()

    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)

    assert without_seconds(out) == without_seconds(Path(values["out"]))
