"""Comparisons: the table says what decoding gives, budgets are kept, and a finished part is not made again."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comparisons import small_comparison, written
from scipy.stats import norm
from scipy.stats import t as student

from eagle.decoding.decode import generate
from eagle.disk import lock_folder
from eagle.formats.checkpoint import load_drafter
from eval import compare
from eval.compare import main
from eval.comparison import compare_table, compare_train
from eval.comparison.compare_plan import Comparison
from eval.comparison.compare_rows import Rows
from eval.comparison.compare_table import ComparisonTable, markdown
from eval.load_run import load_target
from eval.prompts import cases, encode_prompt, questions
from eval.result_files.buckets import CONTEXT

ROOT = Path(__file__).parents[2]


def without_seconds(folder: Path) -> dict[str, Any]:
    """The figures of a comparison but for times and for what made them."""
    figures = json.loads((folder / "comparison.json").read_text())
    for arm in figures["arms"]:
        del arm["seconds"]
    return {name: figures[name] for name in ("arms", "pairs")}


@pytest.fixture(scope="module")
def values(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The small comparison, which the first test of this file runs to its end."""
    folder = tmp_path_factory.mktemp("compare")
    values = small_comparison(tiny_target_dir, folder)
    main([written(values, folder)])
    return values


@pytest.fixture
def comparison(values: dict[str, Any], tmp_path: Path) -> Comparison:
    """The finished comparison."""
    return Comparison.load(written(values, tmp_path))


@pytest.fixture
def never_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes any training an error."""

    def refuse(*_: Any) -> None:
        raise AssertionError("it trains")

    monkeypatch.setattr(compare, "train_arm", refuse)


def test_the_table_says_what_decoding_gives(comparison: Comparison) -> None:
    """Every length in the table is that of decoding with the arm's last head, prompt by prompt."""
    table, target = (
        ComparisonTable(comparison, Rows(comparison.folder)),
        load_target(comparison.recipe),
    )
    recipe = comparison.recipe
    for arm, seed in [(comparison.arms["counts"], 0), (comparison.arms["longer"], 1)]:
        head = arm.section.untrained or arm.folder(comparison.folder, seed) / "last"
        for shape, budget in comparison.shapes.items():
            for temperature in recipe.eval.temperatures:
                expected = {}
                drafter = load_drafter(head, target)
                for case in cases(recipe, questions(recipe), [temperature]):
                    prompt = encode_prompt(recipe, target, case[2].turns[:1])
                    trace = generate(
                        target,
                        drafter,
                        prompt,
                        budget=budget,
                        sampling=case.sampling(0),
                        max_new_tokens=10,
                    )
                    committed = sum(cycle.committed for cycle in trace.cycles)
                    expected[case[2].id] = (committed, len(trace.cycles))
                lengths = table.lengths(arm, shape, temperature)
                assert {key[2]: row for key, row in lengths.items() if key[0] == seed} == expected


def test_a_finished_comparison_is_reported_and_not_made_again(
    values: dict[str, Any], tmp_path: Path, never_train: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its table comes from the file, which does not grow."""
    path, out = written(values, tmp_path), Path(values["out"])
    results, table = (out / "results.jsonl").read_bytes(), (out / "comparison.md").read_text()
    (out / "comparison.md").unlink()
    main([path, "--report"])
    assert capsys.readouterr().out == table == (out / "comparison.md").read_text()
    main([path])
    assert capsys.readouterr().out.endswith(table)
    assert (out / "results.jsonl").read_bytes() == results
    header, *_ = (json.loads(line)["run"] for line in results.splitlines()[:1])
    assert header["commit"] and header["machine"] and len(header["prompts"]) == 3


def test_budgets_count_the_start(comparison: Comparison) -> None:
    """Heads learn from as many tokens as they were given, to within a step, with what their start learned from."""
    table = ComparisonTable(comparison, Rows(comparison.folder))
    for name, budget in {"head": 150, "longer": 300}.items():
        for seed in (0, 1):
            training = table.training(comparison.arms[name], seed)
            assert training is not None and budget <= training["tokens"] < budget + 4 * 96
    assert (
        table.training(comparison.arms["longer"], 0)["steps"]
        > table.training(comparison.arms["head"], 0)["steps"]
    )


def test_equal_time_is_within_a_step(values: dict[str, Any], tmp_path: Path) -> None:
    """By a known clock, starts included; an arm whose start has used its time up is refused."""
    arms = {
        **values["arms"],
        "slow": {"recipe": {"train": {"lr": 2e-3}}, "tokens": 150},
        "fast": {"as_long_as": "slow", "recipe": {"train": {"lr": 3e-3}}},
        "goes on": {"as_long_as": "slow", "start": "head"},
    }
    comparison = Comparison.load(written(values, tmp_path, arms=arms))
    parts = {name: arm.digest for name, arm in comparison.arms.items()}
    rows = Rows(tmp_path)
    rows.add(
        "clock",
        [{parts["slow"]: 4.0, parts["fast"]: 1.0, parts["head"]: 2.0, parts["goes on"]: 3.0}],
    )
    rows.add("trained", [{"arm": "slow", "digest": parts["slow"], "seed": 0, "steps": 5}])
    rows.add("trained", [{"arm": "head", "digest": parts["head"], "seed": 0, "steps": 4}])
    steps = [
        compare_train.steps_in_time(comparison, rows, comparison.arms[name], 0)
        for name in ("fast", "goes on")
    ]
    assert steps == [20, 4]


def test_a_changed_arm_alone_is_trained_again(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what goes on from it."""
    trained: list[tuple[str, int]] = []
    monkeypatch.setattr(
        compare, "train_arm", lambda _comparison, _rows, arm, seed: trained.append((arm.name, seed))
    )
    monkeypatch.setattr(compare.Decoder, "measure", lambda *_: None)
    changed = {**values["arms"], "head": {"tokens": 150, "recipe": {"train": {"lr": 3e-3}}}}
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.jsonl").write_bytes((Path(values["out"]) / "results.jsonl").read_bytes())
    main([written(values, tmp_path, arms=changed, out=str(out), seeds=[0])])
    assert trained == [("head", 0), ("longer", 0)]


def test_a_torn_line_is_cut_off_and_a_foreign_one_named(tmp_path: Path) -> None:
    """What was whole stays."""
    Rows(tmp_path).add("clock", [{"a": 1.0}])
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"clock": {"b": 2')
    Rows(tmp_path).add("clock", [{"c": 3.0}])
    assert Rows(tmp_path).of("clock") == [{"a": 1.0}, {"c": 3.0}]
    (tmp_path / "results.jsonl").write_text('{"clock": {}}\n[]\n')
    with pytest.raises(ValueError, match=r"results.jsonl:2 is no row of a comparison"):
        Rows(tmp_path)


def naive_difference(
    less: dict[Any, Any], more: dict[Any, Any], conversations: list[str]
) -> tuple[float, ...]:
    """The second's ratio minus the first's and its bootstrap interval, one draw of whole conversations at a time."""

    def difference(chosen: list[int]) -> float:
        totals = [
            [
                sum(
                    rows[key][column]
                    for place in chosen
                    for key in rows
                    if key[2] == conversations[place]
                )
                for column in (0, 1)
            ]
            for rows in (less, more)
        ]
        return totals[1][0] / totals[1][1] - totals[0][0] / totals[0][1]

    count = len(conversations)
    picks = torch.randint(count, (2000, count), generator=torch.Generator().manual_seed(0)).tolist()
    drawn = sorted(difference(chosen) for chosen in picks)
    tail = norm.cdf(
        -student.ppf(0.975, count - 1) * (count / (count - 1)) ** 0.5
    )  # expanded, Hesterberg 2015
    ends = torch.quantile(
        torch.tensor(drawn, dtype=torch.float64), torch.tensor([tail, 1 - tail]).double()
    )
    return difference(list(range(count))), *ends.tolist()


def test_differences_against_a_naive_bootstrap(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of both arms to a prompt, with whatever seed, are drawn together; bold is what excludes zero."""
    conversations, numbers = [str(number) for number in range(12)], random.Random(0)

    def lengths(longer: float) -> dict[Any, tuple[int, int]]:
        counts = {(seed, name): numbers.randint(5, 15) for seed in (0, 1) for name in conversations}
        return {
            (seed, "set", name, 0, 0): (round(n * longer), n) for (seed, name), n in counts.items()
        }

    by_arm = {"counts": lengths(1.5), "head": lengths(1.8), "longer": lengths(1.5)}
    monkeypatch.setattr(
        ComparisonTable, "lengths", lambda _table, arm, _shape, _temperature: by_arm[arm.name]
    )
    monkeypatch.setattr(ComparisonTable, "contexts", defaultdict(int))
    figures = ComparisonTable(comparison, Rows(comparison.folder)).figures()
    for pair in figures["pairs"]:
        found = pair["tau"]["tree, T = 0"]
        value, low, high = naive_difference(
            by_arm[pair["first"]], by_arm[pair["second"]], conversations
        )
        assert found["value"] == pytest.approx(value) and found["answers"] == 24
        assert (found["low"], found["high"]) == (
            pytest.approx(low, abs=2e-3),
            pytest.approx(high, abs=2e-3),
        )
    clear, unclear = markdown(figures).splitlines()[-4:-2]
    assert clear.startswith("| head over counts") and clear.count("**") == 8
    assert unclear.startswith("| longer over counts") and "**" not in unclear


def test_the_table_by_context_against_plain_counting(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every answer counts where its middle stands; planted: the prompt's length alone, which another bucket holds."""
    entries = [
        json.loads(line) for line in (comparison.folder / "results.jsonl").read_text().splitlines()
    ]
    answers = [
        entry["answer"]
        for entry in entries
        if "answer" in entry and entry["answer"]["temperature"] == 0
    ]
    middles = {
        row["conversation"]: row["prompt"] + (len(row["tokens"]) - row["prompt"]) / 2
        for row in answers
    }
    edge = int(sorted(middles.values())[1])  # one answer lies below it, two at it or above

    def tables() -> tuple[dict[str, Any], str]:
        figures = ComparisonTable(comparison, Rows(comparison.folder)).figures()
        return {
            row["arm"]: row["tau"]["tree, T = 0"]["by_context"] for row in figures["arms"]
        }, markdown(figures)

    monkeypatch.setattr(compare_table, "ENOUGH", 1)
    assert (
        all(part.keys() == {"below 512"} for part in tables()[0].values())
        and "τ by tokens" not in tables()[1]
    )
    monkeypatch.setattr(compare_table, "CONTEXT", replace(CONTEXT, first=edge))
    found, table = tables()
    digest = comparison.row_digest(comparison.arms["counts"], "tree")
    rows = [
        entry["row"] for entry in entries if "row" in entry and entry["row"]["digest"] == digest
    ]
    rows = [row for row in rows if row["temperature"] == 0]
    parts = [
        [row for row in rows if (middles[row["conversation"]] >= edge) == above]
        for above in (False, True)
    ]
    expected = [
        sum(row["committed"] for row in part) / sum(row["cycles"] for row in part) for part in parts
    ]
    assert [len(part) for part in parts] == [1, 2]
    assert [value["value"] for value in found["counts"].values()] == pytest.approx(expected)
    names = list(found["counts"])
    assert names == [f"below {edge}", f"{edge} to {2 * edge}"]
    heading, _, *lines = table.split("| τ by tokens of context |")[1].splitlines()
    assert (
        heading.count(names[0]) == heading.count(names[1]) == 4 and "inf" not in table
    )  # of one answer alone
    assert [line.split(" | ")[0] for line in lines[:3]] == ["| counts", "| head", "| longer"]
    names_of = ("set", "conversation", "turn", "sampling_seed")
    prompts = {
        (*(row[name] for name in names_of), 0.0): int(row["prompt"] >= edge) for row in answers
    }
    monkeypatch.setattr(ComparisonTable, "contexts", defaultdict(int, prompts))
    assert tables()[0]["counts"] != found["counts"]


def test_a_second_run_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    """While another one writes the same folder."""
    with lock_folder(values["out"]), pytest.raises(ValueError, match="another run is writing"):
        main([written(values, tmp_path)])


def test_results_of_another_target_are_refused(values: dict[str, Any], tmp_path: Path) -> None:
    """A folder belongs to one target."""
    with pytest.raises(
        ValueError, match="results of another target: its dtype is 'float32', now 'bfloat16'"
    ):
        main([written(values, tmp_path), "recipe.target.dtype=bfloat16"])


def test_what_is_missing_is_prepared(values: dict[str, Any], tmp_path: Path) -> None:
    """By its command; one that leaves nothing is named."""
    made = tmp_path / "made"
    command = f"-c 'from pathlib import Path; Path(\"{made}\").touch()'"
    comparison = Comparison.load(written(values, tmp_path, prepare={str(made): command}))
    compare.prepare(comparison)
    assert made.exists()
    comparison = Comparison.load(
        written(values, tmp_path, prepare={str(tmp_path / "other"): "-c pass"})
    )
    with pytest.raises(
        ValueError, match="other is still missing after `python -c pass` \\(status 0\\)"
    ):
        compare.prepare(comparison)


@pytest.mark.slow
def test_a_killed_comparison_ends_in_the_same_table(values: dict[str, Any], tmp_path: Path) -> None:
    """Killed once while a head is trained and once while arms are measured; only times differ."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "eval.compare", written(values, tmp_path, out=str(out))]
    results = out / "results.jsonl"

    def trains() -> bool:
        return any(out.glob("runs/head-1-*/checkpoints/step-[12]"))

    def measures() -> bool:
        return results.exists() and b'{"done"' in results.read_bytes()

    for is_time in (trains, measures):
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as run:
            while not is_time():
                assert run.poll() is None
                time.sleep(0.002)
            run.kill()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert without_seconds(out) == without_seconds(Path(values["out"]))
