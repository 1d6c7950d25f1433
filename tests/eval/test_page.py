"""The report's page: its figures against counts by hand, and nothing that a model or a path says can act in it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic import HOSTILE, RATES, answer, pieces, write

from eagle.core.budget import Budget
from eagle.decoding.forward_costs import Costs
from eagle.markup import Html, html, readable, tag
from eval.page.page_accepted import accepted_lengths, bin_confidences, by_position, most_used_nodes
from eval.page.page_batches import points_by_size, texts_in_a_step
from eval.page.page_parts import ReportData, labels
from eval.page.page_speed import mean_milliseconds
from eval.page.page_theory import Rates, break_even
from eval.report import SECTIONS, main, markdown, page
from eval.result_files.results import (
    ACCEPTANCE_LENGTH,
    MODELLED_SPEED_UP,
    SPEED_UP,
    Group,
    count_cycles,
    cycles,
    read_results,
)
from eval.result_files.statistics import Row, estimate
from tests.modelled import seconds_of

ROOT = Path(__file__).parents[2]
FIGURES = {
    "headline": 2, "speed": 2, "position": 4, "task": 2, "length": 6, "time": 2, "theory": 2, "calibration": 2,
    "nodes": 6, "answers": 2, "context": 2,
}  # fmt: skip


class Parsed(HTMLParser):
    """Elements with their attributes, and the text of every section."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {}
        self.figures: dict[str, int] = {}
        self.here = "top"
        self.feed(source)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        given = dict(attributes)
        self.elements.append((name, given))
        if name == "section":
            self.here = str(given["id"])
        self.figures[self.here] = self.figures.get(self.here, 0) + (name == "figure")

    def handle_data(self, text: str) -> None:
        """Note words."""
        self.sections[self.here] = self.sections.get(self.here, "") + text


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up results of three drafters at two temperatures."""
    return write(tmp_path_factory.mktemp("report") / "results.jsonl")


@pytest.fixture(scope="module")
def groups(results: Path) -> dict[tuple[str, float], Group]:
    """Its groups by drafter and temperature."""
    return {(group.drafter, group.temperature): group for group in read_results(results).groups()}


@pytest.fixture(scope="module")
def parsed(results: Path) -> Parsed:
    """Its page."""
    return Parsed(page([results]))


def batched(results: Path, path: Path, *sizes: int) -> Path:
    """The results with answers at further batch sizes: so many times as fast, and a session of steps for each row."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    for size in sizes:
        for number, row in enumerate(
            [line for line in lines if "drafter" in line and "batch_size" not in line]
        ):
            gain = size if row["drafter"] == "none" else size**0.5
            about = {
                name: row[name] for name in ("drafter", "set", "temperature", "seed", "tokens")
            }
            about |= {"batch_size": size, "session": f"{size}-{number}", "step": 9}
            lines.append(
                {
                    **row,
                    "batch_size": size,
                    "seconds": row["seconds"] / gain,
                    "latency": row["seconds"] * 2,
                }
            )
            sums = {
                "steps": 10,
                "texts": 10 * size - 5,
                "seconds": row["seconds"] / gain,
                "cpu_seconds": 1.0,
            }
            lines.append({"run": row["run"], "batch": {**about, **sums}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_batches_have_a_table_and_plots(results: Path, parsed: Parsed, tmp_path: Path) -> None:
    """Speed-up at each size is over plain decoding of that size; all other sections are those of one text at a time."""
    path = batched(results, tmp_path / "results.jsonl", 4, 16)
    made = Parsed(page([path]))
    assert {**made.figures, "batches": 0, "top": 0} == {**parsed.figures, "batches": 0, "top": 0}
    assert made.figures["batches"] == 4  # speed-up and tokens per second, at two temperatures
    for name in set(SECTIONS) - {"batches", "lossless", "made"}:
        assert made.sections[name] == parsed.sections[name]
    report = ReportData.load([path])
    alone = {
        (group.drafter, group.temperature): group.estimate(SPEED_UP).value
        for group in report.groups
    }
    for group in report.every:
        expected = alone[group.drafter, group.temperature]
        if group.drafter != "none":
            expected /= group.batch_size**0.5
        assert group.estimate(SPEED_UP).value == pytest.approx(expected)
        assert texts_in_a_step(group) == (1 if group.batch_size == 1 else group.batch_size - 0.5)
        assert (
            f"{group.estimate(SPEED_UP).value:.2f} ×" in made.sections["batches"]
            or group.drafter == "none"
        )
    points = points_by_size(
        [group for group in report.every if (group.drafter, group.temperature) == ("eagle1", 0)],
        SPEED_UP,
    )
    assert [place for place, _ in points] == [0, 2, 4]
    assert "3.5" in made.sections["batches"] and "15.5" in made.sections["batches"]
    table = markdown(path).split("\n\n")[1].splitlines()
    assert len(table) == 2 + 3 * 4 * 2 and sum("| 16 |" in line for line in table) == 8


def test_results_of_one_large_batch_are_a_whole_page(results: Path, tmp_path: Path) -> None:
    """Where no text was written alone, all sections show the smallest size, and say which."""
    path = batched(results, tmp_path / "results.jsonl", 4)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(
            json.dumps(line) + "\n"
            for line in lines
            if "drafter" not in line or "batch_size" in line
        )
    )
    made = Parsed(page([path]))
    assert {
        name: count for name, count in made.figures.items() if count and name != "batches"
    } == FIGURES
    assert "sections below are of 4 texts at a time" in made.sections["top"]


def test_every_section_has_its_figures(parsed: Parsed) -> None:
    """All sections are there, and each draws what it should."""
    assert list(parsed.sections)[1:] == list(SECTIONS)
    assert {name: count for name, count in parsed.figures.items() if count} == FIGURES


def test_what_the_results_lack_is_said_in_words(tmp_path: Path) -> None:
    """No figure is made up: results that only count cycles say section by section what they do not hold."""
    page_ = Parsed(page([ROOT / "docs/results/tiny_eagle1.jsonl"]))
    for name in ("position", "length", "theory", "calibration", "nodes", "answers", "time"):
        assert page_.figures[name] == 0
        assert "These results keep no" in page_.sections[name]
    assert "no lossless.json lies beside" in page_.sections["lossless"]
    assert page_.figures["headline"] == 2


def test_a_hostile_generation_stays_text(results: Path, parsed: Parsed) -> None:
    """Whatever a model says makes no element and no attribute, and is there to be read."""
    said = "".join(map(readable, HOSTILE))
    assert said in parsed.sections["answers"]
    names = {name for name, _ in parsed.elements}
    assert not names & {"script", "img", "iframe", "object", "form", "input", "base"}
    attributes = {name for _, given in parsed.elements for name in given}
    assert not [
        name
        for name in attributes
        if name.startswith("on") or name in {"src", "srcset", "style", "action"}
    ]
    assert [given["href"] for name, given in parsed.elements if name == "link"] == ["data:,"]
    assert all(given["href"].startswith("#") for name, given in parsed.elements if name == "a")  # type: ignore[union-attr]


@pytest.mark.parametrize("text", [HOSTILE[0], "".join(HOSTILE)])
def test_names_are_as_hostile_as_answers(text: str, tmp_path: Path) -> None:
    """Drafters, tasks, conversations, header and certificate: the page has the elements of a harmless one."""
    shapes = []
    for name in ("harmless", text):
        given: dict[str, Any] = {"target": name, "machine": name, name: {name: name}}
        path = write(tmp_path / "results.jsonl", ["eagle1"], (1.0,), **given)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines[1:]:
            drafter = line["drafter"].replace("eagle1", name)
            line |= {
                "drafter": drafter,
                "set": name,
                "task": name,
                "conversation": name + line["conversation"],
            }
        lines[-1]["pieces"] = pieces([name])
        path.write_text("\n".join(map(json.dumps, lines)))
        verdict = {
            "drafter": name,
            "temperature": 0,
            "answers": 3,
            "identical": 2,
            "lossless": False,
        }
        where = {
            "set": name,
            "conversation": name,
            "turn": 0,
            "position": 3,
            "texts": [name, name],
            "gap": 0.1,
        }
        verdict["divergences"] = [{**where, "rounding": 1e-6, "is_rounding": False}]
        path.with_name("lossless.json").write_text(json.dumps({"run": {}, "verdicts": [verdict]}))
        made = Parsed(page([path]))
        shapes.append([(element, sorted(given)) for element, given in made.elements])
    assert shapes[0] == shapes[1]
    assert readable(text) in made.sections["made"]
    page([path]).encode("utf-8")  # half characters would stop here


def test_what_is_not_markup_is_escaped() -> None:
    """Only `Html` passes, and adding plain text to it makes plain text."""
    assert (
        tag("p", "<b>", Html("<i></i>"), title='"><x')
        == '<p title="&quot;&gt;&lt;x">&lt;b&gt;<i></i></p>'
    )
    assert html(Html("<b>") + "<i>") == "&lt;b&gt;&lt;i&gt;"
    assert (
        readable("a\x00\u202e\ud800 \u2028\n\u00e9") == "a⟨U+0000⟩⟨U+202E⟩⟨U+D800⟩ ⟨U+2028⟩\n\u00e9"
    )


def test_intervals_are_clustered_by_conversation(groups: dict[tuple[str, float], Group]) -> None:
    """Both turns of a conversation are drawn together; another set's conversation of the same name is another one."""
    group = groups["eagle1", 0.0]
    rows: dict[tuple[str, str], list[Row]] = {}
    for one in group.answers:
        rows.setdefault((one["set"], one["conversation"]), []).append(count_cycles(one))
    assert len(group.answers) > len(rows) > len({one["conversation"] for one in group.answers})
    assert group.estimate(ACCEPTANCE_LENGTH) == estimate(rows)


def test_positions_are_counted_as_a_loop_counts_them(
    groups: dict[tuple[str, float], Group],
) -> None:
    """Of all cycles, and of those that got to the level of a tree that had it."""
    for group in groups.values():
        every = [cycle for one in group.answers for cycle in cycles(one)]
        levels = max(cycle["depth"] for cycle in every)
        shares, given = (dict(by_position(group, reached)) for reached in (False, True))
        for level in range(1, levels + 1):
            came = [c for c in every if c["accepted"] >= level - 1 and c["depth"] >= level]
            reached = [c for c in every if c["accepted"] >= level]
            assert shares[level].value == pytest.approx(len(reached) / len(every))
            assert given[level].value == pytest.approx(len(reached) / len(came))
            assert shares[level].low <= shares[level].value <= shares[level].high


def test_lengths_and_time_are_means_over_cycles(groups: dict[tuple[str, float], Group]) -> None:
    """The distribution's mean and τ agree where nothing was cut off; the time split adds up to the cycles' own."""
    group = groups["eagle1", 0.0]
    every = [cycle for one in group.answers for cycle in cycles(one)]
    assert sum(accepted_lengths(group)) == pytest.approx(1)
    mean = sum(place * share for place, share in enumerate(accepted_lengths(group)))
    assert mean == pytest.approx(sum(cycle["accepted"] for cycle in every) / len(every))
    whole = sum(sum(cycle["seconds"].values()) for cycle in every) / len(every)
    assert sum(milliseconds for _, milliseconds in mean_milliseconds(group)) == pytest.approx(
        1000 * whole
    )
    plain = [cycle for one in groups["none", 0.0].answers for cycle in cycles(one)]
    assert break_even(group) == pytest.approx(
        whole / (sum(sum(c["seconds"].values()) for c in plain) / len(plain))
    )


def test_rates_by_position_give_the_measured_length(tmp_path: Path) -> None:
    """With trees of one depth the theory by position is an identity: no cycle may be lost between the two."""
    group = read_results(write(tmp_path / "results.jsonl", temperatures=(0.0,))).groups()[2]
    whole = [[c for c in cycles(one) if c["depth"] == RATES["eagle1"][1]] for one in group.answers]
    answers = [{**one, "cycles": kept} for one, kept in zip(group.answers, whole, strict=True)]
    every = [cycle["accepted"] + 1 for one in answers for cycle in one["cycles"]]
    counted = Rates.count(Group("", group.drafter, 0.0, "", answers))
    assert counted.mean_depth == RATES["eagle1"][1]
    assert counted.by_position == pytest.approx(sum(every) / len(every))
    assert counted.alpha == pytest.approx(RATES["eagle1"][0], abs=0.05)
    alpha, levels = counted.alpha, RATES["eagle1"][1]
    assert counted.by_alpha == pytest.approx((1 - alpha ** (levels + 1)) / (1 - alpha))


def test_a_cycle_that_drafts_nothing_is_one_token(tmp_path: Path) -> None:
    """A drafter that is often silent is not credited with the levels of its deepest tree."""
    group = read_results(write(tmp_path / "results.jsonl", ["eagle1"], (0.0,))).groups()[1]
    silent = {"nodes": 0, "depth": 0, "accepted": 0, "committed": 1, "context": 9}
    answers = [
        {**one, "cycles": cycles(one) + [silent] * len(cycles(one))} for one in group.answers
    ]
    before, after = Rates.count(group), Rates.count(Group("", "eagle1", 0.0, "", answers))
    assert after.by_level == before.by_level
    assert after.by_alpha == pytest.approx((before.by_alpha + 1) / 2)
    assert after.by_position == pytest.approx((before.by_position + 1) / 2)


def test_calibration_counts_every_token_once(groups: dict[tuple[str, float], Group]) -> None:
    """Bins of equal size hold all pairs: their mean is the mean of all."""
    group = groups["eagle1", 1.0]
    pairs = [pair for one in group.answers for cycle in cycles(one) for pair in cycle["confidence"]]
    bins = bin_confidences(group)
    assert [at for at, _ in bins] == sorted(at for at, _ in bins)
    assert sum(at for at, _ in bins) / 8 == pytest.approx(
        sum(sure for sure, _ in pairs) / len(pairs), abs=0.01
    )
    assert sum(kept.value for _, kept in bins) / 8 == pytest.approx(
        sum(k for _, k in pairs) / len(pairs), abs=0.01
    )


def test_the_most_used_nodes_are_a_tree(groups: dict[tuple[str, float], Group]) -> None:
    """Shares are those of the cycles that passed the node, the most used ones are kept, and none lacks its parent."""
    group = groups["eagle1", 0.0]
    paths = [tuple(cycle["path"]) for one in group.answers for cycle in cycles(one)]
    shares = most_used_nodes(group)
    for node, share in shares.items():
        assert share == pytest.approx(sum(path[: len(node)] == node for path in paths) / len(paths))
        assert not node or node[:-1] in shares
    every = {path[:length] for path in paths for length in range(len(path) + 1)}
    left = [
        sum(path[: len(node)] == node for path in paths) / len(paths)
        for node in every - set(shares)
    ]
    assert len(shares) == 17
    assert max(left) <= min(shares.values())


def test_it_refuses_to_rank_what_it_cannot_tell_apart(results: Path, tmp_path: Path) -> None:
    """The same rates under another name are level, in both tables; what differs is said to differ."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    lines = [line for line in lines if line.get("temperature") != 1]
    lines += [answer("eagle1", n, 0.0, seed=1) | {"drafter": "twin", "seed": 0} for n in range(24)]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = Parsed(page([tmp_path / "results.jsonl"]))
    assert "level with" in made.sections["top"]
    rows = made.sections["comparison"]
    assert rows.count("no difference shown") >= 2
    assert "ngram" in rows and "longer" in rows and "faster" in rows


def test_two_runs_are_compared_by_prompt(results: Path, tmp_path: Path) -> None:
    """Each drafter against itself in the other run; runs of other prompts are refused."""
    slower = []
    for line in results.read_text().splitlines():
        row = json.loads(line)
        if row.get("drafter") in ("ngram", "eagle1-chain") or row.get("temperature") == 1:
            continue
        slower.append(
            row
            if row.get("drafter") in (None, "none")
            else {**row, "seconds": row["seconds"] * 1.5}
        )
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(map(json.dumps, slower)))
    made = Parsed(page([results, other]))
    assert "other · eagle1results · eagle1" in made.sections["comparison"]
    assert "+0.00" in made.sections["comparison"] and "slower" in made.sections["comparison"]
    other.write_text(
        "\n".join(json.dumps({**row, "set": "else"} if "set" in row else row) for row in slower)
    )
    with pytest.raises(ValueError, match="share no prompt"):
        page([results, other])


def test_runs_are_told_apart_by_their_paths() -> None:
    """By file names, else by folders, else by whole paths; the same one twice is an error."""
    assert labels(["a/results.jsonl"]) == [""]
    assert labels(["a/x.jsonl", "b/y.jsonl"]) == ["x", "y"]
    assert labels(["a/results.jsonl", "b/results.jsonl"]) == ["a", "b"]
    with pytest.raises(ValueError, match="given twice"):
        labels(["a/results.jsonl", "a/results.jsonl"])


def test_modelled_time_takes_the_headers_costs(tmp_path: Path) -> None:
    """A cycle costs its forwards: with a free head and reads at one price, modelled speed-up is τ."""
    flat = {
        "contexts": [100],
        "sizes": [1, 9],
        "target": [[0.01, 0.01]],
        "first": [[0.0, 0.0]],
        "level": [[0.0, 0.0]],
    }
    path = write(
        tmp_path / "results.jsonl", ["eagle1"], (0.0,), costs={"eagle1": flat}, new_tokens=49
    )
    report = ReportData.load([path])
    group = report.drafting[0]
    assert group.estimate(MODELLED_SPEED_UP) == pytest.approx(group.estimate(ACCEPTANCE_LENGTH))
    dear = {**flat, "first": [[0.002, 0.002]], "level": [[0.001, 0.001]]}
    path = write(
        tmp_path / "results.jsonl", ["eagle1"], (0.0,), costs={"eagle1": dear}, new_tokens=49
    )
    report = ReportData.load([path])
    costs = Costs.parse(dear)
    spent = sum(
        seconds_of(costs, cycles(one), Budget(8, 5, 3), 49) for one in report.drafting[0].answers
    )
    plain = sum(seconds_of(costs, cycles(one["baseline"])) for one in report.drafting[0].answers)
    assert report.drafting[0].estimate(MODELLED_SPEED_UP).value == pytest.approx(plain / spent)
    made = Parsed(page([path]))
    assert "modelled" in made.sections["headline"]
    assert "in modelled time" in made.sections["top"]
    assert (made.figures["speed"], made.figures["task"]) == (2, 1)


def test_the_table_has_intervals_where_rows_name_their_conversation(
    results: Path, groups: Any, tmp_path: Path
) -> None:
    """The README's columns; the figures are those of the groups."""
    table = markdown(results)
    group = groups["eagle1", 0.0]
    length, speed = group.estimate(ACCEPTANCE_LENGTH), group.estimate(SPEED_UP)
    assert f"{length.value:.2f} [{length.low:.2f}, {length.high:.2f}]" in table
    assert f"{speed.value:.2f} × [{speed.low:.2f}, {speed.high:.2f}]" in table
    nameless = {
        "drafter": "none",
        "temperature": 0.0,
        "prompt": 0,
        "tokens": 12,
        "cycles": 11,
        "committed": 11,
    }
    nameless |= {"seconds": 0.1, "identical": True, "loops": False}
    (tmp_path / "old.jsonl").write_text(
        f"{json.dumps({'run': {'prompts': 1}})}\n{json.dumps(nameless)}\n"
    )
    old = markdown(tmp_path / "old.jsonl").splitlines()
    assert old == [
        *table.splitlines()[:2],
        "| 0 | `none` | 1.00 | 120 | 1.00 × | identical | 0% |",
        "",
        "<sub>prompts 1</sub>",
    ]


def test_a_restarted_run_adds_up(tmp_path: Path) -> None:
    """Rows count once, whichever start measured them; a line torn at the end waits, one in the middle is an error."""
    path = tmp_path / "results.jsonl"
    header = json.dumps({"run": {"id": "a"}})
    none, drafted = (json.dumps(answer(name, 0, 0.0)) for name in ("none", "ngram"))
    path.write_text("\n".join([header, none, header, none, drafted, '{"run": "a", "dra']))
    results = read_results(path)
    assert (len(results.headers), len(results.answers)) == (2, 2)
    path.write_text("\n".join([header, '{"torn', none]))
    with pytest.raises(ValueError, match=r"results.jsonl:2 is not JSON .* remove that line"):
        read_results(path)
    path.write_text("\n".join([header, drafted]))
    with pytest.raises(ValueError, match="every figure needs its baseline"):
        page([path])


@pytest.mark.slow
def test_the_command_writes_the_page_or_prints_the_table(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page goes where it is told; the table alone writes nothing."""
    main([str(results), "--html", str(tmp_path / "deep" / "out.html")])
    assert (tmp_path / "deep" / "out.html").read_text().startswith("<!doctype html>")
    main([str(results), "--markdown"])
    assert "| 0 | `eagle1` |" in capsys.readouterr().out
    assert not results.with_name("report.html").exists()


def test_modelled_speed_is_compared_where_all_runs_have_it(results: Path, tmp_path: Path) -> None:
    """A run with bare costs beside one without: both are shown, and only measured speed is compared."""
    flat = {
        "contexts": [100],
        "sizes": [1, 9],
        "target": [[0.01, 0.01]],
        "first": [[0.0, 0.0]],
        "level": [[0.0, 0.0]],
    }
    costs = dict.fromkeys(("eagle1", "eagle1-chain", "ngram"), flat)
    path = write(tmp_path / "costs.jsonl", costs=costs, new_tokens=49)
    both, alone = Parsed(page([results, path])), Parsed(page([path]))
    assert "in modelled speed-up" in alone.sections["comparison"]
    assert "in modelled speed-up" not in both.sections["comparison"]
    assert "modelled" in both.sections["headline"]
