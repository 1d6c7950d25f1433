"""Replaying is decoding, the search finds what trying everything would, and what is chosen is what gets used."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from safetensors.torch import save_file

from eagle import Budget, DraftTree, Sampling, Target, generate, load_drafter
from eagle.core.drafter import Committed, Noise
from eagle.core.tree import PUBLISHED_TREE
from eagle.decoding.cycle_times import bare_costs
from eagle.decoding.forward_costs import Costs
from eagle.device import ThreadsOfLongWork
from eagle.drafters.draft_model import DraftModel
from eagle.drafters.lookup.bigram import BigramDrafter
from eagle.drafters.lookup.ngram import NgramDrafter, NgramText
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import load_head, save_head, write_budget
from eagle.recipe import Recipe
from eval import tune
from eval.prompts import questions
from eval.replay import Answer, answer, plain, rates_by_rank, record_cycles, replay
from eval.result_files.answer_rows import cycle_of
from eval.tune import NOT_DRAFTING, Tuning, chain, search
from eval.tune_policy import replay_policy
from tests.drafters.recurrent.test_eagle1 import (
    head as head,
)  # the untrained head of the suite's tiny target
from tests.families import build, random_tokens
from tests.modelled import seconds_of
from tests.tables import some_tables
from tests.trained import RECIPE
from tests.unrolled_heads import causal_states

BUDGETS = [chain(4), Budget(8, 4, 3), Budget.fixed(PUBLISHED_TREE)]
SIZES = (1, 4, 16, 61)
CANDIDATES = [
    *map(chain, (1, 3)),
    *(
        Budget(nodes, depth, top_k)
        for nodes in (3, 8, 25)
        for depth, top_k in ((1, 3), (3, 2), (3, 4))
    ),
    Budget.fixed(PUBLISHED_TREE),
]


def prices(read: tuple[float, ...], level: tuple[float, ...]) -> Costs:
    """Costs that do not depend on the context."""
    return Costs((0,), SIZES, (read,), (level,), (level,))


FREE = prices(
    (1, 1, 1, 1), (0, 0, 0, 0)
)  # an accelerator that is never full, and a head that costs nothing
GPU = prices((1, 1.02, 1.05, 1.2), (0.06, 0.06, 0.06, 0.07))
CPU = prices((1, 1.4, 2.1, 4.8), (0.06, 0.09, 0.25, 0.9))
DEAR = prices((1, 4, 16, 61), (0.5, 2, 8, 30))  # every token at full price: nothing can pay


@pytest.fixture(scope="module")
def target() -> Target:
    """A random llama, whose few tokens are guessed now and then."""
    return Target(build("llama"))


@pytest.fixture(scope="module")
def guesser(target: Target) -> Eagle1:
    """An untrained head for it."""
    torch.manual_seed(0)
    return Eagle1.for_target(Eagle1.Settings(), target.config).bind(target.head)


@pytest.fixture(scope="module")
def answers(target: Target) -> list[Answer]:
    """Answers to random prompts, greedy and sampled; greedy ones loop, so that much is guessed right."""
    samplings = [Sampling(temperature=number % 2, request=number) for number in range(6)]
    prompts = [random_tokens(12 + number, seed=number) for number in range(6)]
    return [
        answer(target, (-1,), prompt, limit=16, sampling=s)
        for prompt, s in zip(prompts, samplings, strict=True)
    ]


@pytest.mark.quick("ngram-budget0-0.7")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    ("guess", "budget"), [("ngram", chain(6)), *(("head", budget) for budget in BUDGETS)]
)
def test_replay_is_decoding(
    tiny_target: Target, head: Eagle1, guess: str, budget: Budget, temperature: float
) -> None:
    """Cycle by cycle what the loop records, for answers that end by themselves and for those that are cut."""
    drafter: Any = {"head": head, "ngram": NgramDrafter()}[guess]
    for request, text in enumerate(("Who?", "def f(x):\n    return x\n" * 4)):
        prompt, sampling = (
            tiny_target.chat(text),
            Sampling(temperature=temperature, request=request),
        )
        told = answer(tiny_target, drafter.taps, prompt, limit=30, sampling=sampling)
        tiny_target.forget()
        trace = generate(
            tiny_target, drafter, prompt, sampling=sampling, budget=budget, max_new_tokens=30
        )
        cycles = record_cycles(told, replay(tiny_target, drafter, told, budget))
        names = ("nodes", "depth", "committed", "context")
        assert [[row[name] for name in names] for row in cycles] == [
            [getattr(cycle, name) for name in names] for cycle in trace.cycles
        ]
        accepted = [
            cycle.accepted for cycle in trace.cycles
        ]  # drafts behind the answer's end are nobody's
        assert [row["accepted"] for row in cycles[:-1]] == accepted[:-1]


def test_plain_cycles_are_those_of_no_draft(target: Target, answers: list[Answer]) -> None:
    """One token each, whose context grows."""
    told = answers[0]
    trace = generate(
        target, load_drafter("none", target), told.tokens[: told.prompt], max_new_tokens=16, stop=[]
    )
    names = ("nodes", "depth", "accepted", "committed", "context")
    assert [[row[name] for name in names] for row in plain(told)] == [
        [getattr(cycle, name) for name in names] for cycle in trace.cycles
    ]


def test_drafts_drawn_by_lot_are_not_replayed(
    target: Target, guesser: Eagle1, answers: list[Answer]
) -> None:
    """Which of them are kept is decided by coins that only decoding tosses."""
    with pytest.raises(ValueError, match="draw"):
        replay(target, guesser, answers[1], Budget.fixed(((0,),), "sampled"))


def test_rates_count_the_child_that_was_chosen() -> None:
    """By depth and rank, over the nodes that have a child of that rank; made by hand."""
    tree = DraftTree.from_paths(0, [(5,), (6,), (7,), (5, 8), (6, 8), (6, 9)])
    node = {tuple(tree.tokens[tree.path(n)[1:]].tolist()): n for n in range(len(tree))}
    cycles = [
        (tree, [0]),
        (tree, [0, node[6,]]),
        (tree, [0, node[6,], node[6, 9]]),
        (tree, [0, node[5,], node[5, 8]]),
    ]
    assert rates_by_rank(cycles) == [[1 / 4, 2 / 4, 0], [1 / 3, 1 / 2]]


def test_rates_at_the_root_are_the_heads_ranks(
    target: Target, guesser: Eagle1, answers: list[Answer]
) -> None:
    """Of the head's own causal pass over the greedy answers: where do the target's tokens stand in its logits."""
    cycles, ranks = [], []
    wide = Budget.fixed(
        tuple(path for rank in range(40) for path in ((rank,), (rank, 0), (rank, 1)))
    )
    for told in answers[::2]:
        found = replay(target, guesser, told, wide)
        with torch.inference_mode():
            tokens = torch.tensor(told.tokens)
            states = causal_states(
                guesser, tokens[None, 1:], told.features[None, :-1, 0], 0, target.head
            )[0]
        for row in record_cycles(told, found):
            root = row[
                "context"
            ]  # its slot reads the feature before it, and guesses the token behind it
            logits = target.head.logits(states[root - 1])
            ranks += [int((logits > logits[tokens[root + 1]]).sum())] if row["nodes"] else []
        cycles += found
    rates = rates_by_rank(cycles)[0]
    assert rates == [ranks.count(rank) / len(ranks) for rank in range(40)] and sum(rates) > 0.3


@pytest.fixture(scope="module")
def tuning(target: Target, guesser: Eagle1, answers: list[Answer]) -> Tuning:
    """What is replayed once serves under all prices."""
    return Tuning(target, guesser, answers, FREE)


@pytest.fixture(scope="module")
def decoded(
    target: Target, guesser: Eagle1, answers: list[Answer]
) -> dict[Budget, list[list[dict[str, Any]]]]:
    """The cycles of every candidate, and of no draft, by real decoding of every answer."""

    def cycles(told: Answer, budget: Budget) -> list[dict[str, Any]]:
        drafter = guesser if budget.nodes else load_drafter("none", target)
        options: dict[str, Any] = {
            "sampling": told.sampling,
            "max_new_tokens": told.limit,
            "budget": budget,
        }
        trace = generate(target, drafter, told.tokens[: told.prompt], **options)
        return list(map(cycle_of, trace.cycles))

    return {
        budget: [cycles(told, budget) for told in answers] for budget in [NOT_DRAFTING, *CANDIDATES]
    }


@pytest.mark.slow
@pytest.mark.parametrize("costs", [FREE, GPU, CPU, DEAR], ids=["free", "gpu", "cpu", "dear"])
def test_the_search_is_within_three_percent_of_trying_everything(
    tuning: Tuning, decoded: dict[Budget, list[list[dict[str, Any]]]], costs: Costs
) -> None:
    """Judged by real decoding of every candidate; what costs more than it could bring is not even replayed."""
    tuning = replace(tuning, costs=costs, records={} if costs is DEAR else tuning.records)
    found = search(tuning, CANDIDATES, note=lambda _: None)
    speeds = {}
    for budget, answers in decoded.items():
        paid, limits = budget if budget.nodes else None, [told.limit for told in tuning.answers]
        seconds = sum(
            seconds_of(costs, cycles, paid, limit)
            for cycles, limit in zip(answers, limits, strict=True)
        )
        speeds[budget] = sum(cycle["committed"] for cycles in answers for cycle in cycles) / seconds
    assert found.speed == pytest.approx(speeds[found.budget])
    assert found.speed >= 0.97 * max(speeds.values())
    if costs is FREE:
        assert found.budget.nodes == 25
    if costs is DEAR:
        assert found.budget == NOT_DRAFTING and set(tuning.records) == {NOT_DRAFTING}


class BusyDrafter(NgramDrafter):
    """Prompt lookup that takes its time for every draft, by a clock of its own."""

    SECONDS = 0.002

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0

    def begin(self, noise: Noise | None = None) -> NgramText:
        """An empty text."""
        return BusyText(self)

    def read_clock(self) -> float:
        """The seconds that all drafts took."""
        return self.clock


class BusyText(NgramText):
    """A text whose drafts take a while."""

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """The same tree, later."""
        self.drafter.clock += BusyDrafter.SECONDS
        return super().propose(update, budget)


@pytest.mark.parametrize("seconds_of_a_forward", [1.0, 1e-4])
def test_a_drafter_that_is_no_head_pays_for_its_drafts(
    target: Target, seconds_of_a_forward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its drafts took is in the modelled seconds, the break-even and the verdict; a dear target hides it."""
    costs = Costs((0,), SIZES, ((seconds_of_a_forward,) * 4,))
    loops, budget = [Answer("", [1, 2, 3] * 10, 9, None, Sampling(), 21)] * 3, chain(3)
    drafter = BusyDrafter()
    monkeypatch.setattr("eval.replay.clock_of", lambda _: drafter.read_clock)
    tuning = Tuning(target, drafter, loops, costs)
    trial = tuning.trial(budget)
    asked = trial.cycles - len(
        loops
    )  # at least: the last cycle of an answer may have no room for a draft
    drafting = trial.seconds - trial.cycles * seconds_of_a_forward
    assert (
        0.999 * BusyDrafter.SECONDS * asked
        <= drafting
        <= 1.001 * BusyDrafter.SECONDS * trial.cycles
    )
    assert tuning.break_even(budget) == pytest.approx(
        trial.seconds / trial.cycles / seconds_of_a_forward
    )
    best = search(tuning, [chain(1), budget], note=lambda _: None)
    pays = tune.verdict(tuning, best)[0] != NOT_DRAFTING
    assert pays == (seconds_of_a_forward == 1.0)


@pytest.mark.parametrize("kind", ["draft_model", "bigram", "suffix,ngram"])
def test_every_kind_of_drafter_has_a_price(
    target: Target, answers: list[Answer], kind: str, ticking: None
) -> None:
    """A draft model, a table and a list: none drafts for nothing."""
    if kind == "draft_model":
        torch.manual_seed(0)
        drafter: Any = DraftModel.for_target(DraftModel.Settings(layers=1), target.config).bind(
            target.head
        )
    elif kind == "bigram":
        drafter = BigramDrafter(some_tables(target.vocab_size))
    else:
        drafter = load_drafter(kind, target)
    tuning = Tuning(target, drafter, answers, bare_costs(target, drafter, (16,), (1, 4), rounds=1))
    trial = tuning.trial(chain(2))
    forwards = sum(
        tuning.costs.read(row["nodes"] + 1, row["context"])
        for rows in tuning.records[chain(2)]
        for row in rows
    )
    assert trial.seconds > forwards


def test_a_policy_is_charged_for_its_cycles(target: Target, answers: list[Answer]) -> None:
    """Where drafting is free it drafts and wins, and where nothing can pay it is within a few cycles of no draft."""
    loops = [Answer("", [1, 2, 3] * 30, 9, None, Sampling(), 81)] * 3
    dear = prices((1, 4, 16, 61), (0, 0, 0, 0))
    for costs, told, least, most in ((FREE, loops, 5.0, 9.0), (dear, answers, 0.8, 1.01)):
        tokens, seconds = replay_policy(target, NgramDrafter(), told, costs, chain(8), 0.0)
        assert tokens == sum(one.length - 1 for one in told)
        assert least < tokens / seconds < most


@pytest.fixture
def tuned(recipe: Recipe, tiny_target: Target, head: Eagle1, tmp_path: Path) -> list[str]:
    """A command line for the untrained head in a folder of its own, with few questions of two tasks."""
    asked = [
        {"turns": [f"What does {name} do?"], "category": name[:2]}
        for name in ("os.path", "shutil", "oslo", "sh")
    ]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    save_head(tmp_path / "run/head", head, recipe.dump(), {})
    where = {
        "target.path": recipe.target.path,
        "target.dtype": "float32",
        "data.train": recipe.data.train,
    }
    where |= {
        "train.out": tmp_path / "run",
        "eval.prompts": tmp_path / "asked.jsonl",
        "eval.count": 2,
    }
    where |= {"eval.max_new_tokens": 12, "eval.temperatures": "[1.0]"}
    return [RECIPE, *(f"{key}={value}" for key, value in where.items())]


def test_the_command_says_what_pays_and_writes_it(
    tuned: list[str],
    tiny_target: Target,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ticking: None,
) -> None:
    """A head of zeros does not pay: the command says so, and what it writes is what the head is loaded with."""
    for name, few in (
        ("NODES", (2, 4)),
        ("DEPTHS", (1, 2)),
        ("TOP_K", (2,)),
        ("CHAINS", (1, 2)),
        ("WIDE", ((0,), (1,), (0, 0))),
    ):
        monkeypatch.setattr(tune, name, few)
    folder = (
        Path(
            next(part for part in tuned if part.startswith("train.out=")).removeprefix("train.out=")
        )
        / "head"
    )
    zeros = {
        name: torch.zeros_like(weight) for name, weight in load_head(folder).state_dict().items()
    }
    save_file(zeros, folder / "model.safetensors")
    tune.main(
        [*tuned, "eval.temperatures=[0.0]", "eval.goodput_policy=true", "--write", "--exhaustive"]
    )
    said = capsys.readouterr().out
    assert "does not pay on this machine" in said and re.search(
        r"num_speculative_tokens = [12]\n", said
    )
    found = re.search(r"the choice has ([0-9.]+)% of it", said)
    # a shape that gains less than the margin is not worth drafting
    assert found and float(found[1]) > 100 / tune.MARGIN and "break-even" in said
    assert "policy, chains of 0 to 2: modelled speed-up" in said
    assert load_drafter(folder, tiny_target).budget == NOT_DRAFTING


def test_a_drafter_without_weights_is_tuned(
    tuned: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name among those that are measured, its own budget among the candidates; no head keeps what was found."""
    few = {
        "NODES": (2,),
        "DEPTHS": (1,),
        "TOP_K": (2,),
        "CHAINS": (1, 2),
        "WIDE": ((0,), (1,), (0, 0)),
    }
    for name, values in few.items():
        monkeypatch.setattr(tune, name, values)
    monkeypatch.setattr(NgramDrafter, "budget", Budget(7, 5, 1))
    asked = [*tuned, "eval.drafters={copies: {head: ngram, options: {longest: 2}}}"]
    tried = list[Budget]()
    monkeypatch.setattr(tune.Tuning, "could_pay", lambda _, budget: not tried.append(budget))
    tune.main([*asked, "--drafter", "copies"])
    assert tried[0] == Budget(7, 5, 1) and "decode with" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"put the budget into eval\.drafters\.copies\.budget"):
        tune.main([*asked, "--drafter", "copies", "--write"])
    with pytest.raises(
        ValueError, match=r"--drafter is 'ngram', expected one of eval\.drafters: none, copies"
    ):
        tune.main([*asked, "--drafter", "ngram"])


def test_threads_are_timed_again_between_tuning_questions(
    tuned: list[str], tiny_target: Target
) -> None:
    """Answering them is the long part; what is timed and compared follows on the number that was set last."""
    recipe = Recipe.load(tuned[0], tuned[1:])
    before, timed = torch.get_num_threads(), list[int]()
    try:
        torch.set_num_threads(2)
        clock, processes = count(step=60), count()
        threads = ThreadsOfLongWork(
            lambda: timed.append(1), lambda: next(clock), lambda: next(processes)
        )
        answers = tune.answer_prompts(recipe, tiny_target, (), threads)
        assert len(answers) == threads.times == 2
    finally:
        torch.set_num_threads(before)


def test_tuning_asks_what_is_not_measured(
    tuned: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The questions behind the measured ones; where there are none left it says so and takes those."""
    recipe = Recipe.load(tuned[0], tuned[1:])
    assert [one.turns for one in tune.tuning_questions(recipe)] == [
        one.turns for one in questions(Recipe.load(tuned[0], [*tuned[1:], "eval.count=4"]))[2:]
    ]
    everything = Recipe.load(tuned[0], [*tuned[1:], "eval.count=4"])
    assert tune.tuning_questions(everything) == questions(everything)
    assert "tuned on, too" in capsys.readouterr().out


@pytest.mark.parametrize(
    "budget", [Budget(12, 4, 3), Budget.fixed(PUBLISHED_TREE), Budget.fixed(((0,),), "sampled")]
)
def test_a_written_budget_is_what_the_head_comes_back_with(
    budget: Budget, recipe: Recipe, head: Eagle1, tiny_target: Target, tmp_path: Path
) -> None:
    """Whatever its shape; a head that was never tuned has none, and the rest of its config stays."""
    save_head(tmp_path / "head", head, recipe.dump(), {})
    before = json.loads((tmp_path / "head/config.json").read_text())
    assert load_drafter(tmp_path / "head", tiny_target).budget is None
    write_budget(tmp_path / "head", budget)
    assert load_drafter(tmp_path / "head", tiny_target).budget == budget
    assert json.loads((tmp_path / "head/config.json").read_text()) == {**before, "budget": ANY}
