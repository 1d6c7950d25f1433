"""The report's page: its figures agree with plain counting, and no generated text or path becomes markup."""

from __future__ import annotations

import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from synthetic import HOSTILE, RATES, answer, pieces, write

from eagle.core.budget import Budget
from eagle.decoding.forward_costs import Costs
from eagle.markup import Html, html, readable, tag
from eval.page.page_acceptance import (
    Rates,
    accepted_lengths,
    bin_confidences,
    break_even,
    by_position,
)
from eval.page.page_parts import ReportData, labels
from eval.page.page_speed import mean_milliseconds, points_by_size
from eval.report import SECTIONS, main, markdown, page
from eval.result_files.results import (
    ACCEPTANCE_LENGTH,
    MODELLED_SPEED_UP,
    SPEED_UP,
    TOKENS_PER_SECOND,
    Group,
    count_cycles,
    cycles,
    describe_tree,
    read_results,
    requests_per_step,
)
from eval.result_files.statistics import Row, estimate
from tests.eval.jsonl_files import read_lines, write_lines
from tests.modelled import seconds_of

ROOT = Path(__file__).parents[2]
Groups = dict[tuple[str, float], Group]

# figures of each section for three drafters at two temperatures
FIGURES = {
    "headline": 2,
    "task": 4,
    "position": 4,
    "length": 6,
    "calibration": 2,
    "answers": 2,
    "context": 4,
}

# elements and attributes that load something or run a script
ACTIVE_ELEMENTS = {"script", "img", "iframe", "object", "form", "input", "base"}
ACTIVE_ATTRIBUTES = {"src", "srcset", "style", "action"}

# bare costs of a head that costs nothing, for a target that reads any number of tokens at one price
FREE_HEAD = {
    "contexts": [100],
    "sizes": [1, 9],
    "target": [[0.01, 0.01]],
    "first": [[0.0, 0.0]],
    "level": [[0.0, 0.0]],
}


class Parsed(HTMLParser):
    """The elements of a page with their attributes, and the text and figures of every section."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = defaultdict(str)
        self.figures: dict[str, int] = defaultdict(int)
        self.section = "top"
        self.feed(source)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        """Record an element, and count figures."""
        self.elements.append((name, dict(attributes)))
        if name == "section":
            self.section = str(dict(attributes)["id"])
        if name == "figure":
            self.figures[self.section] += 1

    def handle_data(self, text: str) -> None:
        """Add words to the current section."""
        self.sections[self.section] += text


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Synthetic results of three drafters at two temperatures."""
    return write(tmp_path_factory.mktemp("report") / "results.jsonl")


@pytest.fixture(scope="module")
def groups(results: Path) -> Groups:
    """Their groups by drafter and temperature."""
    return {(group.drafter, group.temperature): group for group in read_results(results).groups()}


@pytest.fixture(scope="module")
def parsed(results: Path) -> Parsed:
    """Their page."""
    return Parsed(page([results]))


def add_batch_sizes(results: Path, path: Path, *sizes: int) -> Path:
    """Write the results with further answers at these batch sizes.

    Plain decoding gains the batch size in speed, drafters its square root. Each row has a session of its own.
    """
    alone = read_lines(results)
    lines = list(alone)
    for size in sizes:
        for i, row in enumerate(alone[1:]):
            gain = size if row["drafter"] == "none" else size**0.5
            seconds = row["seconds"] / gain
            in_batch = {
                "batch_size": size,
                "seconds": seconds,
                "latency": row["seconds"] * 2,
            }
            sums = {
                **row,
                **in_batch,
                "session": f"{size}-{i}",
                "step": 9,
                "steps": 10,
                # the last of the ten steps lacks five sequences
                "texts": 10 * size - 5,
                "cpu_seconds": 1.0,
            }
            lines += [{**row, **in_batch}, {"run": row["run"], "batch": sums}]

    return write_lines(path, lines)


def test_batches_have_a_table_and_plots(results: Path, parsed: Parsed, tmp_path: Path) -> None:
    """Speedup at a batch size is over plain decoding at that size; other sections show single sequences."""
    path = add_batch_sizes(results, tmp_path / "results.jsonl", 4, 16)
    made = Parsed(page([path]))

    # speedup and tokens per second, at two temperatures
    assert made.figures == {**parsed.figures, "batches": 4}

    for name in set(SECTIONS) - {"batches", "lossless", "made"}:
        assert made.sections[name] == parsed.sections[name]
    # speedups of the answers that were decoded alone
    report = ReportData.load([path])
    alone = {}
    for group in report.groups:
        alone[group.drafter, group.temperature] = group.estimate(SPEED_UP).value
    for group in report.every:
        expected = alone[group.drafter, group.temperature]
        if group.drafts:
            expected /= group.batch_size**0.5
            assert f"{group.estimate(SPEED_UP).value:.2f} ×" in made.sections["batches"]

        assert group.estimate(SPEED_UP).value == pytest.approx(expected)
        assert requests_per_step(group) == (1 if group.batch_size == 1 else group.batch_size - 0.5)

    eagle1 = [
        group for group in report.every if group.drafter == "eagle1" and group.temperature == 0
    ]

    assert [log_size for log_size, _ in points_by_size(eagle1, SPEED_UP)] == [0, 2, 4]
    table = markdown(path).split("\n\n")[1].splitlines()
    # two lines of heading, then four drafters at three sizes and two temperatures
    assert len(table) == 2 + 4 * 3 * 2


def test_results_of_one_large_batch_are_a_whole_page(results: Path, tmp_path: Path) -> None:
    """Without single sequences, all sections show the smallest batch size, and the page names it."""
    path = add_batch_sizes(results, tmp_path / "results.jsonl", 4)
    # only the rows of batches stay
    lines = [line for line in read_lines(path) if "drafter" not in line or "batch_size" in line]
    made = Parsed(page([write_lines(path, lines)]))
    # a plot over one batch size would be one point
    assert made.figures == FIGURES
    assert "requests a step" in made.sections["batches"]
    assert "batch size 4" in made.sections["top"]


def test_every_section_has_its_figures(parsed: Parsed) -> None:
    """All sections are on the page in their order, each with its figures."""
    shown = [name for name in SECTIONS if name != "batches"]
    assert list(parsed.sections)[1:] == [*shown, "missing"]
    assert parsed.figures == FIGURES


def test_missing_data_is_said_in_words() -> None:
    """Results that hold only the number of cycles have no sections on them, but a line that names what is missing."""
    # committed before rows recorded their cycles
    made = Parsed(page([ROOT / "docs/results/tiny_eagle1.jsonl"]))
    assert list(made.sections)[1:] == ["made", "headline", "comparison", "lossless", "missing"]
    titles = ("by position", "per cycle", "Predicted", "Calibration", "answers", "Time")
    for title in (*titles, "holds no cycles", "eval.batch_size=[1, 4, 16] adds batches"):
        assert title in made.sections["missing"]
    assert "eagle measure RECIPE --verify adds a certificate" in made.sections["lossless"]
    assert made.figures["headline"] == 2


def write_few(out: Path, drafters: list[str], conversations: int, **changed: Any) -> Path:
    """Write results of a few answers at T = 0, whose cycles have these fields."""
    write(out, drafters, (0.0,), new_tokens=49, dtype="bfloat16")
    rows = read_lines(out)[: 1 + 2 * conversations * (1 + len(drafters))]
    for row in rows[1:]:
        row["cycles"] = [{**cycle, **changed} for cycle in row["cycles"]]
    return write_lines(out, rows)


def test_no_section_is_empty_or_a_single_point(tmp_path: Path) -> None:
    """One drafter, one conversation, or nothing accepted: what would be a point or nothing is left out by name."""
    path = tmp_path / "results.jsonl"
    nothing = {
        "accepted": 0,
        "committed": 1,
        "path": [],
        "confidence": [[1.0, False]],
    }
    both = ["ngram", "eagle1"]
    # sections that are left out, drafters, conversations, fields of the cycles
    cases: list[tuple[set[str], list[str], int, dict[str, Any]]] = [
        ({"comparison"}, ["eagle1"], 9, {}),
        ({"comparison"}, both, 1, {}),
        ({"comparison"}, ["eagle1"], 1, {}),
        ({"position", "length", "context", "theory", "calibration"}, both, 9, nothing),
    ]

    for absent, drafters, conversations, changed in cases:
        source = page([write_few(path, drafters, conversations, **changed)])
        case = (absent, drafters, conversations)

        assert absent.isdisjoint(Parsed(source).sections), case

        # every section has a figure, a table or a list
        for section in re.findall(r"<section.*?</section>", source, re.DOTALL):
            assert re.search("<figure|<table|<li|<dl|identical to plain", section), (case, section)
        # all but bars and answers draw marks
        for figure in re.findall(r"<figure>.*?</figure>", source, re.DOTALL):
            drawn = len(re.findall('class="(?:point|bar|kept|own)"', figure))
            assert drawn > 1, (case, figure)


def test_the_headline_says_what_was_measured(results: Path, tmp_path: Path) -> None:
    """Speed in tokens per second, tree, head, dtype, prompts; one conversation has no interval."""
    top = Parsed(page([write_few(tmp_path / "results.jsonl", ["eagle1"], 9)])).sections["top"]
    group = ReportData.load([tmp_path / "results.jsonl"]).drafting[0]
    for metric, unit in ((SPEED_UP, ".2f} ×"), (TOKENS_PER_SECOND, ".1f} tokens/s")):
        assert f"{{:{unit}".format(group.estimate(metric).value) in top

    words = "tree of 8 nodes, depth 5, top-k 3 · head runs/eagle1 · bfloat16 · 18 prompts"
    assert words in top
    assert "95% interval" in top

    alone = page([write_few(tmp_path / "results.jsonl", ["eagle1"], 1)])
    assert "one conversation has no interval" in Parsed(alone).sections["top"]
    assert "inf" not in Parsed(alone).sections["top"]
    # settings stand above all figures
    assert list(Parsed(alone).sections)[1] == "made"
    assert "tree of 8 nodes, depth 5, top-k 3" in Parsed(alone).sections["made"]


def test_trees_are_described_by_their_shape() -> None:
    """A chain, a fixed tree and a policy are named; early results say nothing."""
    budget = {"nodes": 4, "depth": 4, "top_k": 1, "paths": None}

    assert describe_tree({"budget": budget}) == "chain of 4 tokens"

    fixed = {**budget, "nodes": 2, "depth": 1, "paths": [[0], [1]]}
    assert describe_tree({"budget": fixed}) == "fixed tree of 2 nodes, depth 1"
    fixed = {**budget, "nodes": 2, "depth": 2, "paths": [[0], [0, 0]]}
    assert describe_tree({"budget": fixed}) == "chain of 2 tokens"
    shown = describe_tree({"budget": {**budget, "top_k": 2}, "policy": "goodput"})
    assert shown == "tree of 4 nodes, depth 4, top-k 2 at most, chosen each cycle"
    assert describe_tree({}) == ""


def test_a_hostile_generation_stays_text(parsed: Parsed) -> None:
    """Generated markup is shown letter for letter, and makes no element or attribute."""
    assert "".join(map(readable, HOSTILE)) in parsed.sections["answers"]

    for name, attributes in parsed.elements:
        assert name not in ACTIVE_ELEMENTS
        assert ACTIVE_ATTRIBUTES.isdisjoint(attributes)
        assert not [key for key in attributes if key.startswith("on")]

        if name == "link":
            assert attributes["href"] == "data:,"
        if name == "a":
            assert str(attributes["href"]).startswith("#")


def write_named(folder: Path, name: str) -> Path:
    """Write results and a certificate in which everything that has a name has this one."""
    # keys of the header are names too
    header: dict[str, Any] = {
        "target": name,
        "machine": name,
        name: {name: name},
    }
    path = write(folder / "results.jsonl", ["eagle1"], (1.0,), **header)
    lines = read_lines(path)
    for line in lines[1:]:
        line["drafter"] = line["drafter"].replace("eagle1", name)
        line["conversation"] = name + line["conversation"]
        line |= {"set": name, "task": name}

    lines[-1]["pieces"] = pieces([name])
    divergence = {
        "set": name,
        "conversation": name,
        "turn": 0,
        "position": 3,
        "texts": [name, name],
        "gap": 0.1,
        "rounding": 1e-6,
        "is_rounding": False,
    }
    verdict = {
        "drafter": name,
        "temperature": 0,
        "answers": 3,
        "identical": 2,
        "lossless": False,
        "divergences": [divergence],
    }
    write_lines(folder / "lossless.json", [{"run": {}, "verdicts": [verdict]}])
    return write_lines(path, lines)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    """Drafters, tasks, conversations, header and certificate: the page has the elements of a harmless one."""
    hostile = "".join(HOSTILE)
    shapes = []
    for name in ("harmless", hostile):
        made = Parsed(page([write_named(tmp_path, name)]))
        shapes.append([(element, sorted(attributes)) for element, attributes in made.elements])

    assert shapes[0] == shapes[1]
    assert readable(hostile) in made.sections["made"]

    # a lone surrogate would stop here
    page([tmp_path / "results.jsonl"]).encode("utf-8")


def test_what_is_not_markup_is_escaped() -> None:
    """Only `Html` passes unescaped; plain text added to it gives plain text."""
    paragraph = tag("p", "<b>", Html("<i></i>"), title='"><x')
    assert paragraph == '<p title="&quot;&gt;&lt;x">&lt;b&gt;<i></i></p>'
    assert html(Html("<b>") + "<i>") == "&lt;b&gt;&lt;i&gt;"
    shown = readable("a\x00\u202e\ud800 \u2028\n\u00e9")
    assert shown == "a⟨U+0000⟩⟨U+202E⟩⟨U+D800⟩ ⟨U+2028⟩\n\u00e9"


def test_intervals_are_clustered_by_conversation(groups: Groups) -> None:
    """Both turns of a conversation are resampled together; a conversation belongs to its set."""
    group = groups["eagle1", 0.0]
    rows: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for one in group.answers:
        rows[one["set"], one["conversation"]].append(count_cycles(one))
    # some conversations have two turns, and some names occur in both sets
    assert len(group.answers) > len(rows) > len({name for _, name in rows})
    assert group.estimate(ACCEPTANCE_LENGTH) == estimate(rows)


def test_acceptance_by_position_agrees_with_a_loop(groups: Groups) -> None:
    """One share is of all cycles, the other of those that reached the level and had one more."""
    for group in groups.values():
        of_all = dict(by_position(group, reached=False))
        of_reached = dict(by_position(group, reached=True))
        for level in range(1, 1 + max(cycle["depth"] for cycle in group.cycles)):
            reached = 0
            accepted = 0
            for cycle in group.cycles:
                reached += cycle["accepted"] >= level - 1 and cycle["depth"] >= level
                accepted += cycle["accepted"] >= level

            share = of_all[level]

            assert share.value == pytest.approx(accepted / len(group.cycles))
            assert of_reached[level].value == pytest.approx(accepted / reached)
            assert share.low <= share.value <= share.high


def test_lengths_and_time_are_means_over_cycles(groups: Groups) -> None:
    """The distribution of accepted lengths has the cycles' mean; the parts of a cycle add up to its seconds."""
    group = groups["eagle1", 0.0]
    shares = accepted_lengths(group)

    assert sum(shares) == pytest.approx(1)

    mean = sum(length * share for length, share in enumerate(shares))
    assert mean == pytest.approx(fmean(cycle["accepted"] for cycle in group.cycles))

    drafting, plain = (
        fmean(sum(cycle["seconds"].values()) for cycle in groups[name, 0.0].cycles)
        for name in ("eagle1", "none")
    )
    assert sum(mean_milliseconds(group)) == pytest.approx(1000 * drafting)
    assert break_even(group) == pytest.approx(drafting / plain)


def test_rates_by_position_give_the_measured_length(groups: Groups) -> None:
    """For trees of one depth, acceptance by position and mean length are the same figure; no cycle may get lost."""
    rate, depth = RATES["eagle1"]
    # cycles that the end of an answer cut short have shallower trees
    answers = []
    for one in groups["eagle1", 0.0].answers:
        full = [cycle for cycle in cycles(one) if cycle["depth"] == depth]
        answers.append({**one, "cycles": full})

    group = Group("", "eagle1", 0.0, "", answers)
    counted = Rates.count(group)

    assert counted.mean_depth == depth
    assert counted.by_position == pytest.approx(
        1 + fmean(cycle["accepted"] for cycle in group.cycles)
    )
    assert counted.alpha == pytest.approx(rate, abs=0.05)

    # the geometric sum of Leviathan et al., equation 1
    geometric = (1 - counted.alpha ** (depth + 1)) / (1 - counted.alpha)
    assert counted.by_alpha == pytest.approx(geometric)


def test_a_cycle_that_drafts_nothing_is_one_token(groups: Groups) -> None:
    """A drafter that is often silent gets no credit for the levels of its deepest tree."""
    group = groups["eagle1", 0.0]
    silent = {
        "nodes": 0,
        "depth": 0,
        "accepted": 0,
        "committed": 1,
        "context": 9,
    }
    answers = []
    for one in group.answers:
        answers.append({**one, "cycles": cycles(one) + [silent] * len(cycles(one))})
    before = Rates.count(group)
    after = Rates.count(Group("", "eagle1", 0.0, "", answers))

    assert after.by_level == before.by_level
    assert after.by_alpha == pytest.approx((before.by_alpha + 1) / 2)
    assert after.by_position == pytest.approx((before.by_position + 1) / 2)


def test_calibration_counts_every_token_once(groups: Groups) -> None:
    """Bins of equal size hold all tokens, so that their mean is the mean of all."""
    group = groups["eagle1", 1.0]
    tokens = []
    for cycle in group.cycles:
        tokens += cycle["confidence"]
    bins = bin_confidences(group)
    confidences = [confidence for confidence, _ in bins]

    assert confidences == sorted(confidences)
    assert fmean(confidences) == pytest.approx(fmean(prob for prob, _ in tokens), abs=0.01)

    accepted = fmean(accepted.value for _, accepted in bins)
    assert accepted == pytest.approx(fmean(accepted for _, accepted in tokens), abs=0.01)


def test_equal_drafters_are_not_ranked(results: Path, tmp_path: Path) -> None:
    """A drafter with the same rates under another name is level; others are said to differ."""
    lines = [line for line in read_lines(results) if line.get("temperature") != 1]
    for conversation in range(24):
        twin = answer("eagle1", conversation, 0.0, seed=1)
        lines.append({**twin, "drafter": "twin", "seed": 0})

    made = Parsed(page([write_lines(tmp_path / "results.jsonl", lines)]))

    assert "level with" in made.sections["top"]

    comparison = made.sections["comparison"]
    # in both tables, of length and of speed
    assert comparison.count("no difference shown") >= 2

    for word in ("ngram", "longer", "faster"):
        assert word in comparison


def test_two_runs_are_compared_by_prompt(results: Path, tmp_path: Path) -> None:
    """Each drafter is compared with itself in the other run; runs over other prompts are refused."""
    slower = read_lines(results)[:1]
    for row in read_lines(results)[1:]:
        if row["drafter"] in ("none", "eagle1") and row["temperature"] == 0:
            factor = 1.5 if row["drafter"] == "eagle1" else 1
            slower.append({**row, "seconds": row["seconds"] * factor})

    other = write_lines(tmp_path / "other.jsonl", slower)
    comparison = Parsed(page([results, other])).sections["comparison"]
    for words in ("other · eagle1results · eagle1", "+0.00", "slower"):
        assert words in comparison
    write_lines(other, [slower[0], *({**row, "set": "else"} for row in slower[1:])])
    with pytest.raises(ValueError, match="share no prompt"):
        page([results, other])


def test_runs_are_told_apart_by_their_paths() -> None:
    """Labels are file names, else folders; one file given twice is an error."""
    assert labels(["a/results.jsonl"]) == [""]
    assert labels(["a/x.jsonl", "b/y.jsonl"]) == ["x", "y"]
    assert labels(["a/results.jsonl", "b/results.jsonl"]) == ["a", "b"]
    with pytest.raises(ValueError, match="given twice"):
        labels(["a/results.jsonl", "a/results.jsonl"])


def write_with_costs(path: Path, costs: dict[str, Any]) -> Path:
    """Write results of one drafter with bare costs in the header."""
    return write(path, ["eagle1"], (0.0,), costs={"eagle1": costs}, new_tokens=49)


def test_modelled_time_takes_the_headers_costs(results: Path, tmp_path: Path) -> None:
    """A cycle costs its forwards; a run without bare costs is compared by measured speed alone."""
    path = write_with_costs(tmp_path / "results.jsonl", FREE_HEAD)
    group = ReportData.load([path]).drafting[0]

    # all reads have one price and drafts have none, so that cycles alone count
    assert group.estimate(MODELLED_SPEED_UP) == pytest.approx(group.estimate(ACCEPTANCE_LENGTH))

    mixed = Parsed(page([results, path]))
    dear = {
        **FREE_HEAD,
        "first": [[0.002, 0.002]],
        "level": [[0.001, 0.001]],
    }
    write_with_costs(path, dear)
    group = ReportData.load([path]).drafting[0]
    costs = Costs.parse(dear)
    plain = 0.0
    spent = 0.0
    for one in group.answers:
        plain += seconds_of(costs, cycles(one["baseline"]))
        spent += seconds_of(costs, cycles(one), Budget(8, 5, 3), 49)

    assert group.estimate(MODELLED_SPEED_UP).value == pytest.approx(plain / spent)

    alone = Parsed(page([path]))
    assert "in modelled time" in alone.sections["top"]
    assert alone.figures["task"] == 3
    # two drafters without costs would not be ranked by it
    assert "in modelled speedup" not in mixed.sections["comparison"]

    for made in (alone, mixed):
        assert "modelled" in made.sections["headline"]


def test_drafters_that_all_have_costs_are_compared_by_modelled_time(tmp_path: Path) -> None:
    """In the comparison, in figures by task and in the table, where one without costs leaves all of it out."""
    names = ["eagle1", "hass"]
    for costly in (names, names[:1]):
        costs = dict.fromkeys(["none", *costly], FREE_HEAD)
        path = write(
            tmp_path / "results.jsonl",
            names,
            (0.0,),
            costs=costs,
            new_tokens=49,
        )
        made = Parsed(page([path]))
        is_modelled = costly == names
        assert ("in modelled speedup" in made.sections["comparison"]) == is_modelled
        assert ("odelled speedup" in made.sections["task"]) == is_modelled
        assert ("in modelled time" in markdown(path)) == is_modelled


def test_the_table_has_the_groups_intervals(results: Path, groups: Groups, tmp_path: Path) -> None:
    """Figures have intervals where rows name their conversation, and stand alone where they do not."""
    table = markdown(results)
    for metric, unit in ((ACCEPTANCE_LENGTH, ""), (SPEED_UP, " ×")):
        value, low, high = groups["eagle1", 0.0].estimate(metric)
        assert f"{value:.2f}{unit} [{low:.2f}, {high:.2f}]" in table

    # a figure belongs to a tree, which stands below it
    assert "`eagle1`: tree of 8 nodes, depth 5, top-k 3" in table

    nameless = {
        "drafter": "none",
        "temperature": 0.0,
        "prompt": 0,
        "tokens": 12,
        "cycles": 11,
        "committed": 11,
        "seconds": 0.1,
        "identical": True,
        "loops": False,
    }
    old = write_lines(tmp_path / "old.jsonl", [{"run": {"prompts": 1}}, nameless])

    assert markdown(old).splitlines() == [
        *table.splitlines()[:2],
        "| 0 | `none` | 1.00 | 120 | 1.00 × | identical | 0% |",
        "",
        "<sub>prompts 1</sub>",
    ]


def test_a_restarted_run_adds_up(tmp_path: Path) -> None:
    """Each answer counts once; a line torn at the end is skipped, one in the middle is an error."""
    path = tmp_path / "results.jsonl"
    header = {"run": {"id": "a"}}
    none = answer("none", 0, 0.0)
    drafted = answer("ngram", 0, 0.0)
    write_lines(path, [header, none, header, none, drafted])
    with path.open("a") as file:
        file.write('{"run": "a", "dra')

    results = read_results(path)

    assert (len(results.headers), len(results.answers)) == (2, 2)

    write_lines(path, [header, drafted])
    with pytest.raises(ValueError, match="every figure needs its baseline"):
        page([path])

    torn = path.read_text().splitlines()[0] + '\n{"torn\n{}\n'
    path.write_text(torn)
    with pytest.raises(ValueError, match=r"results.jsonl:2 is not JSON .* remove that line"):
        read_results(path)


def test_the_command_writes_the_page_or_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page goes where `--html` says; `--markdown` writes no file."""
    results = write(tmp_path / "results.jsonl", ["eagle1"], (0.0,))
    out = tmp_path / "deep/out.html"
    main([str(results), "--html", str(out)])

    assert out.read_text().startswith("<!doctype html>")

    main([str(results), "--markdown"])
    assert "| 0 | `eagle1` |" in capsys.readouterr().out
    assert not results.with_name("report.html").exists()
