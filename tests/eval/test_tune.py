"""Replaying is decoding, the search finds what trying everything would, and what is chosen gets used."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from safetensors.torch import save_file

from eagle import Budget, DraftTree, Sampling, Target, generate, load_drafter
from eagle.core.tree import PUBLISHED_TREE
from eagle.decoding.cycle_times import bare_costs
from eagle.decoding.forward_costs import Costs
from eagle.drafters.draft_model import DraftModel
from eagle.drafters.lookup.bigram import BigramDrafter
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import load_head, save_head, write_budget
from eagle.recipe import Recipe
from eval import tune
from eval.prompts import questions
from eval.replay import Answer, answer, plain, rates_by_rank, record_cycles, replay
from eval.result_files.write_results import cycle_of
from eval.tune import NOT_DRAFTING, Trial, Tuning, chain, search

# an untrained head of the suite's tiny target
from tests.drafters.recurrent.test_eagle1 import head as head
from tests.eval.jsonl_files import write_lines
from tests.families import build, random_tokens
from tests.modelled import seconds_of
from tests.tables import some_tables
from tests.trained import RECIPE

SIZES = (1, 4, 16, 61)
CANDIDATES = [
    chain(1),
    chain(3),
    *(
        Budget(nodes, depth, top_k)
        for nodes, (depth, top_k) in product((3, 8, 25), ((1, 3), (3, 2), (3, 4)))
    ),
    Budget.fixed(PUBLISHED_TREE),
]
# accepted drafts are not compared: those after the answer's end are dropped
COMPARED = ("nodes", "depth", "committed", "context")

# the smallest grid that has trees of each kind
FEW = {
    "NODES": (2, 4),
    "DEPTHS": (1, 2),
    "TOP_K": (2,),
    "CHAINS": (1, 2),
    "WIDE": ((0,), (1,), (0, 0)),
}

Cycles = list[dict[str, Any]]


def prices(read: tuple[float, ...], level: tuple[float, ...]) -> Costs:
    """Return costs of reading 1, 4, 16 and 61 tokens that do not depend on the context."""
    return Costs((0,), SIZES, (read,), first=(level,), level=(level,))


# an accelerator that is never full, with a head that costs nothing
FREE = prices((1, 1, 1, 1), (0, 0, 0, 0))
CPU = prices((1, 1.4, 2.1, 4.8), (0.06, 0.09, 0.25, 0.9))
# every token costs a whole forward, so that no draft can pay
DEAR = prices((1, 4, 16, 61), (0.5, 2, 8, 30))


def run_search(tuning: Tuning, candidates: Sequence[Budget]) -> Trial:
    """Search without progress notes."""
    return search(tuning, candidates, note=lambda _: None)


def figures(cycles: Sequence[Any], names: Sequence[str] = COMPARED) -> list[list[int]]:
    """Return these figures of recorded or decoded cycles."""
    rows = [cycle if isinstance(cycle, dict) else cycle_of(cycle) for cycle in cycles]
    return [[row[name] for name in names] for row in rows]


@pytest.fixture(scope="module")
def target() -> Target:
    """A random llama, a few of whose tokens are guessed right."""
    return Target(build("llama"))


@pytest.fixture(scope="module")
def guesser(target: Target) -> Eagle1:
    """An untrained head for it."""
    torch.manual_seed(0)
    return Eagle1.for_target(Eagle1.Settings(), target.config).bind(target.head)


@pytest.fixture(scope="module")
def answers(target: Target) -> list[Answer]:
    """Answers to random prompts, greedy and sampled in turn; greedy ones loop, so that much is guessed right."""
    made = []
    for seed in range(6):
        sampling = Sampling(temperature=seed % 2, request=seed)
        prompt = random_tokens(12 + seed, seed=seed)
        made.append(answer(target, (-1,), prompt, limit=16, sampling=sampling))
    return made


@pytest.fixture
def loops() -> list[Answer]:
    """Three answers that repeat three tokens, which n-grams guess right."""
    tokens = [1, 2, 3] * 30
    return [Answer("", tokens, prompt=9, features=None, sampling=Sampling(), limit=81)] * 3


@pytest.mark.quick("ngram-budget0-0.7")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    ("guess", "budget"),
    [("ngram", chain(6)), ("head", Budget(8, 4, 3)), ("head", Budget.fixed(PUBLISHED_TREE))],
)
def test_replay_is_decoding(
    tiny_target: Target,
    head: Eagle1,
    guess: str,
    budget: Budget,
    temperature: float,
) -> None:
    """Replayed cycles are those of decoding, for answers that end by themselves and for those that are cut."""
    drafter: Any = head if guess == "head" else NgramDrafter()
    for request, text in enumerate(("Who?", "def f(x):\n    return x\n" * 4)):
        prompt = tiny_target.chat(text)
        sampling = Sampling(temperature=temperature, request=request)
        told = answer(
            tiny_target,
            drafter.taps,
            prompt,
            limit=30,
            sampling=sampling,
        )
        tiny_target.forget()
        trace = generate(
            tiny_target, drafter, prompt, sampling=sampling, budget=budget, max_new_tokens=30
        )
        cycles = record_cycles(told, replay(tiny_target, drafter, told, budget))

        assert figures(cycles) == figures(trace.cycles)
        # the last cycle may accept drafts after the answer's end
        accepted = [cycle.accepted for cycle in trace.cycles]
        assert [row["accepted"] for row in cycles[:-1]] == accepted[:-1]


def test_plain_cycles_are_those_of_no_draft(target: Target, answers: list[Answer]) -> None:
    """Each commits one token, and the context grows."""
    told = answers[0]
    prompt = told.tokens[: told.prompt]
    trace = generate(
        target,
        load_drafter("none", target),
        prompt,
        max_new_tokens=16,
        stop=[],
    )
    names = (*COMPARED, "accepted")
    assert figures(plain(told), names) == figures(trace.cycles, names)


def test_sampled_drafts_are_not_replayed(
    target: Target,
    guesser: Eagle1,
    answers: list[Answer],
) -> None:
    """Random choices that only decoding makes decide which of them are accepted."""
    with pytest.raises(ValueError, match="draw"):
        replay(target, guesser, answers[1], Budget.fixed(((0,),), "sampled"))


def test_rates_count_the_child_that_was_chosen() -> None:
    """Rates by depth and rank are over the nodes that have a child of that rank; counted by hand."""
    tree = DraftTree.from_paths(0, [(5,), (6,), (7,), (5, 8), (6, 8), (6, 9)])
    node = {}
    for index in range(len(tree)):
        path = tree.path(index)[1:]
        node[tuple(tree.tokens[path].tolist())] = index
    cycles = [
        (tree, [0]),
        (tree, [0, node[6,]]),
        (tree, [0, node[6,], node[6, 9]]),
        (tree, [0, node[5,], node[5, 8]]),
    ]

    # at the root 5 was chosen once and 6 twice of four cycles; below, 8 once of three and 9 once of two
    assert rates_by_rank(cycles) == [[1 / 4, 2 / 4, 0], [1 / 3, 1 / 2]]


@pytest.fixture(scope="module")
def tuning(target: Target, guesser: Eagle1, answers: list[Answer]) -> Tuning:
    """A tuning whose replays serve under all prices."""
    return Tuning(target, guesser, answers, FREE)


@pytest.fixture(scope="module")
def decoded(target: Target, guesser: Eagle1, answers: list[Answer]) -> dict[Budget, list[Cycles]]:
    """The cycles of every candidate, and of no draft, by decoding every answer."""
    found: dict[Budget, list[Cycles]] = {}
    for budget in [NOT_DRAFTING, *CANDIDATES]:
        drafter: Any = guesser if budget.nodes else load_drafter("none", target)
        found[budget] = []
        for told in answers:
            trace = generate(
                target,
                drafter,
                told.tokens[: told.prompt],
                sampling=told.sampling,
                max_new_tokens=told.limit,
                budget=budget,
            )
            found[budget].append(list(map(cycle_of, trace.cycles)))

    return found


@pytest.mark.slow
@pytest.mark.parametrize("costs", [FREE, CPU, DEAR], ids=["free", "cpu", "dear"])
def test_the_search_is_within_three_percent_of_trying_everything(
    tuning: Tuning,
    decoded: dict[Budget, list[Cycles]],
    costs: Costs,
) -> None:
    """Decoding with every candidate is the judge; what costs more than it could bring is not even replayed."""
    records = {} if costs is DEAR else tuning.records
    # replays do not depend on prices, and serve again
    tuning = replace(tuning, costs=costs, records=records)
    found = run_search(tuning, CANDIDATES)
    speeds = {}
    for budget, answers in decoded.items():
        tokens = 0
        seconds = 0.0
        for told, cycles in zip(tuning.answers, answers, strict=True):
            seconds += seconds_of(
                costs,
                cycles,
                budget if budget.nodes else None,
                told.limit,
            )
            tokens += sum(cycle["committed"] for cycle in cycles)

        speeds[budget] = tokens / seconds

    assert found.speed == pytest.approx(speeds[found.budget])
    assert found.speed >= 0.97 * max(speeds.values())

    if costs is FREE:
        assert found.budget.nodes == 25
    if costs is DEAR:
        assert found.budget == NOT_DRAFTING
        assert set(tuning.records) == {NOT_DRAFTING}


@pytest.mark.parametrize("forward", [100.0, 0.05])
def test_a_drafter_that_is_no_head_pays_for_its_drafts(
    target: Target,
    loops: list[Answer],
    forward: float,
    ticking: None,
) -> None:
    """The recorded seconds of its drafts are in the modelled seconds, the break-even and the verdict."""
    tuning = Tuning(
        target,
        NgramDrafter(),
        loops,
        Costs((0,), SIZES, ((forward,) * 4,)),
    )
    trial = tuning.trial(chain(3))
    # every draft takes a second; the last cycle of an answer may have no room for one
    drafting = trial.seconds - trial.cycles * forward

    assert trial.cycles - len(loops) <= round(drafting, 6) <= trial.cycles

    expected = trial.seconds / trial.cycles / forward
    assert tuning.break_even(chain(3)) == pytest.approx(expected)

    best = run_search(tuning, [chain(1), chain(3)])
    pays = tune.verdict(tuning, best)[0] != NOT_DRAFTING
    assert pays == (forward == 100)


@pytest.mark.parametrize("kind", ["draft_model", "bigram", "suffix,ngram"])
def test_every_kind_of_drafter_has_a_price(
    target: Target,
    answers: list[Answer],
    kind: str,
    ticking: None,
) -> None:
    """A draft model, a table and a list of drafters: none drafts for nothing."""
    drafter: Any
    if kind == "draft_model":
        torch.manual_seed(0)
        settings = DraftModel.Settings(layers=1)
        drafter = DraftModel.for_target(settings, target.config).bind(target.head)
    elif kind == "bigram":
        drafter = BigramDrafter(some_tables(target.vocab_size))
    else:
        drafter = load_drafter(kind, target)

    costs = bare_costs(target, drafter, (16,), (1, 4), rounds=1)
    tuning = Tuning(target, drafter, answers, costs)
    trial = tuning.trial(chain(2))
    reading = 0.0
    for rows in tuning.records[chain(2)]:
        reading += sum(costs.read(row["nodes"] + 1, row["context"]) for row in rows)

    assert trial.seconds > reading


@pytest.fixture
def tuned(recipe: Recipe, head: Eagle1, tmp_path: Path) -> list[str]:
    """A command line for the untrained head in a folder of its own, with few questions of two tasks."""
    asked = []
    for name in ("os.path", "shutil", "oslo", "sh"):
        asked.append({"turns": [f"What does {name} do?"], "category": name[:2]})
    save_head(tmp_path / "run/head", head, recipe.dump(), {})
    return [
        RECIPE,
        f"target.path={recipe.target.path}",
        "target.dtype=float32",
        f"data.train={recipe.data.train}",
        f"train.out={tmp_path / 'run'}",
        f"eval.prompts={write_lines(tmp_path / 'asked.jsonl', asked)}",
        "eval.count=2",
        "eval.max_new_tokens=12",
        "eval.temperatures=[1.0]",
    ]


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try the smallest grid alone."""
    for name, values in FEW.items():
        monkeypatch.setattr(tune, name, values)


def test_the_command_says_what_pays_and_writes_it(
    tuned: list[str],
    tiny_target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    few_candidates: None,
    ticking: None,
) -> None:
    """A head of zeros does not pay: the command says so, and the head is loaded with what it writes."""
    folder = tmp_path / "run/head"
    # a head of zeros guesses one token for ever
    zeros = {}
    for name, weight in load_head(folder).state_dict().items():
        zeros[name] = torch.zeros_like(weight)
    save_file(zeros, folder / "model.safetensors")
    options = ["eval.temperatures=[0.0]", "--write", "--exhaustive"]
    tune.main([*tuned, *options])
    said = capsys.readouterr().out
    for words in (
        "does not pay on this machine",
        "break-even",
    ):
        assert words in said

    assert re.search(r"num_speculative_tokens = [12]\n", said)

    # a shape that gains less than the margin is not worth drafting
    share = re.search(r"the choice has ([0-9.]+)% of it", said)
    assert share is not None
    assert float(share[1]) > 100 / tune.MARGIN
    assert load_drafter(folder, tiny_target).budget == NOT_DRAFTING
    assert "the head drafts nothing until `budget` is deleted there" in said


def test_the_search_forecasts_and_counts_its_shapes(target: Target, loops: list[Answer]) -> None:
    """What is tried and what is not are all shapes, and the time that it takes is told before."""
    notes: list[str] = []
    # four tokens cost more than four forwards, so that only the longest chain may pay
    costs = prices((1, 4.3, 4.4, 4.5), (0, 0, 0, 0))
    shapes = [chain(1), chain(2), chain(3), chain(8)]
    tuning = Tuning(
        target,
        NgramDrafter(),
        loops,
        costs,
    )
    search(tuning, shapes, note=notes.append)
    left, tried = (re.search(r"[0-9]+", line) for line in notes)
    assert left is not None
    assert tried is not None
    assert int(left[0]) + int(tried[0]) == len(shapes)
    assert notes[0].startswith(f"{left[0]} of {len(shapes)} shapes are not tried")
    assert re.search(r"are tried: at most about [0-9]:[0-9]{2}:[0-9]{2}; --trees", notes[1])


def test_rounds_of_the_search_halve_the_candidates() -> None:
    """The better half is tried on twice as many answers, until all answers are used."""
    assert tune.plan_rounds(168, 32) == [
        (168, 4),
        (84, 8),
        (42, 16),
        (21, 32),
    ]
    assert tune.plan_rounds(5, 3) == [(5, 2), (5, 3)]
    assert tune.plan_rounds(5, 1) == [(5, 1)]


def test_few_trees_are_taken_from_all_sizes(tuned: list[str]) -> None:
    """`--trees` limits what is tried."""
    shapes = [chain(length) for length in range(1, 9)]
    assert tune.spread(shapes, 3) == [
        chain(1),
        chain(3),
        chain(6),
    ]
    assert tune.spread(shapes[:1], 3) == [chain(1)]
    with pytest.raises(ValueError, match="--trees is -1, expected a number of tree shapes"):
        tune.main([*tuned, "--trees", "-1"])


def test_the_best_so_far_is_of_what_was_tried(target: Target, loops: list[Answer]) -> None:
    """It tells how to use it, and that nothing was written."""
    tuning = Tuning(target, NgramDrafter(), loops, FREE)
    assert tune.best_so_far(tuning) == "no shape was tried yet, and nothing was written"
    tuning.trial(chain(1), 2)
    tuning.trial(chain(3), 2)
    said = tune.best_so_far(tuning)
    assert said.startswith("the fastest of 2 candidates on 2 of 3 answers is chain of 3: tau ")
    assert said.endswith("Nothing was written: use it with eval.nodes=3 eval.depth=3 eval.top_k=1")


def test_ctrl_c_prints_the_best_so_far_and_writes_nothing(
    tuned: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    few_candidates: None,
) -> None:
    """Minutes of replays are not lost, and the head keeps its config; without trees only chains are tried."""
    before = (tmp_path / "run/head/config.json").read_text()
    replay_answer = tune.Tuning._replay_answer
    replayed = count()
    tried: list[Budget] = []

    def record(_: Tuning, budget: Budget) -> bool:
        tried.append(budget)
        return True

    # in the first round, after no draft and one chain were tried
    def stop(tuning: Tuning, target_answer: Answer, budget: Budget) -> Cycles:
        if next(replayed) == 3:
            raise KeyboardInterrupt
        return replay_answer(tuning, target_answer, budget)

    monkeypatch.setattr(tune.Tuning, "could_pay", record)
    monkeypatch.setattr(tune.Tuning, "_replay_answer", stop)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as stopped:
            tune.main([*tuned, "--write", "--trees", "0"])
    finally:
        signal.signal(signal.SIGINT, handler)

    assert tried == [chain(1), chain(2)]
    assert stopped.value.code == 130
    said = capsys.readouterr().err
    assert "stopped; the fastest of " in said
    assert "Nothing was written" in said
    assert (tmp_path / "run/head/config.json").read_text() == before


def test_a_drafter_without_weights_is_tuned(
    tuned: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    few_candidates: None,
) -> None:
    """It is named in `eval.drafters`; its own budget is a candidate, and no head keeps the result."""
    # n-grams recommend no budget of their own
    monkeypatch.setattr(NgramDrafter, "budget", Budget(7, 5, 1))
    tried: list[Budget] = []

    def record(_: Tuning, budget: Budget) -> bool:
        tried.append(budget)
        return True

    monkeypatch.setattr(tune.Tuning, "could_pay", record)
    asked = [*tuned, "eval.drafters={copies: {head: ngram, options: {longest: 2}}}"]
    tune.main([*asked, "--drafter", "copies", "--json"])

    assert tried[0] == Budget(7, 5, 1)
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["reason"] in printed.err
    assert result["budget"].keys() == asdict(Budget()).keys()

    with pytest.raises(ValueError, match=r"put the budget into eval\.drafters\.copies\.budget"):
        tune.main([*asked, "--drafter", "copies", "--write"])
    with pytest.raises(ValueError, match=r"expected one of eval\.drafters: none, copies"):
        tune.main([*asked, "--drafter", "ngram"])


def test_tuning_asks_what_is_not_measured(
    tuned: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its questions follow the measured ones; where none are left it says so and takes the measured ones."""
    recipe = Recipe.load(tuned[0], tuned[1:])
    everything = Recipe.load(tuned[0], [*tuned[1:], "eval.count=4"])
    later = [question.turns for question in questions(everything)[2:]]

    assert [question.turns for question in tune.tuning_questions(recipe)] == later
    assert tune.tuning_questions(everything) == questions(everything)
    assert "tuned on, too" in capsys.readouterr().out


@pytest.mark.parametrize("budget", [Budget(12, 4, 3), Budget.fixed(((0,), (0, 0)), "sampled")])
def test_a_written_budget_is_what_the_head_comes_back_with(
    budget: Budget,
    recipe: Recipe,
    head: Eagle1,
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    """A head that was never tuned has none; the rest of its config stays."""
    folder = tmp_path / "head"
    save_head(folder, head, recipe.dump(), {})
    before = json.loads((folder / "config.json").read_text())

    assert load_drafter(folder, tiny_target).budget is None

    write_budget(folder, budget)
    assert load_drafter(folder, tiny_target).budget == budget
    assert json.loads((folder / "config.json").read_text()) == {**before, "budget": ANY}
