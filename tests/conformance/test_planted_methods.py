"""Methods in files of their own, each with one fault, which the checks name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from eagle.__main__ import main
from eagle.conformance.checks import Outcome, Trial, run_check
from eagle.drafters import DRAFTERS
from eagle.formats.export import EXPORTERS
from eagle.formats.layout import Layout, tensors_of
from tests.outside_methods import METHOD

# lines of the method in docs/guides/own-method.md that faults replace
GROWN = "return grow(update.root, first, level, budget, self.noise, self.length + 1)"
VALIDATED = "return validate_batch(batch, states, logits, trees)"
STATES = "batch.select_taps(self.taps)[slots, 0]"
MIXED = '''
from eagle.core.drafter import PerSequenceState
from eagle.core.row_errors import run_rows


class Mixed(PerSequenceState):
    """Texts of which all are drafted for with what is kept of the first."""

    def propose(self, updates, budgets):
        return run_rows(updates, lambda row: self.sequences[min(self.sequences)].propose(updates[row], budgets[row]))


'''


@dataclass(frozen=True)
class Fault:
    """What is replaced in the method, the check that must name it, and words of its sentence."""

    changes: dict[str, str]
    about: str
    words: str


def shifted_states(count: int) -> dict[str, str]:
    """Return the change by which training reads states of later tokens."""
    return {STATES: f"batch.select_taps(self.taps)[(slots + {count}) % len(batch.tokens), 0]"}


FAULTS = {
    "rooted elsewhere": Fault(
        {"update.root, first": "update.root + 1, first"},
        "a tree is rooted",
        "a tree is rooted at 8, expected 7",
    ),
    "more nodes than the budget": Fault(
        {"level, budget, self.noise": "level, Budget(12, 4, 3), self.noise"},
        "a tree is rooted",
        "a tree has 12 nodes behind its root, expected at most 3",
    ),
    "kept on the drafter": Fault(
        {
            "return RecurrentSequence(self, noise)": (
                "self.text = getattr(self, 'text', RecurrentSequence(self, noise))\n"
                "        return self.text"
            )
        },
        "begin forgets",
        "a second sequence is not drafted as if it were the first",
    ),
    "looks into the future": Fault(
        shifted_states(3),
        "sees no future",
        "or looks into the future",
    ),
    "reads one state ahead": Fault(
        shifted_states(1),
        "accepted as far as validation says",
        "training reads other states or tokens than drafting has",
    ),
    "a level reads the token it guesses": Fault(
        {"places_behind(slots, step)": "places_behind(slots, step + (step > 1))"},
        "accepted as far as validation says",
        "chains that come to level 2",
    ),
    "counts masked tokens": Fault(
        {
            "batch.loss_mask.nonzero()[:, 0].to(batch.tokens.device) - 2": (
                "torch.arange(len(batch.tokens) - 6)"
            )
        },
        "supervised tokens alone",
        "it counts what loss_mask leaves out",
    ),
    "noise of the wrong position": Fault(
        {"self.noise, self.length + 1": "self.noise, self.length"},
        "the noise of its own position",
        "with the noise of the places [5, 6, 7], expected [6, 7, 8]",
    ),
    "validation of means": Fault(
        {
            VALIDATED: VALIDATED.replace("return", "sums =")
            + "\n        return {key: value / len(batch.lengths) for key, value in sums.items()}"
        },
        "validation adds up",
        "validate does not add up",
    ),
    "a weight that is not saved": Fault(
        {
            "        self.leave = nn": (
                "        self.gain = torch.rand(shape.hidden_size)\n        self.leave = nn"
            ),
            "return states + self.leave(": "return states * self.gain + self.leave(",
        },
        "from disk",
        "a head that was saved and loaded drafts",
    ),
    "sequences mixed up": Fault(
        {
            "class RecurrentSequence:": f"{MIXED}class RecurrentSequence:",
            "    def begin(self": "    def open(self):\n        return Mixed(self)\n\n    def begin(self",
        },
        "side by side",
        "in a batch is drafted otherwise than alone",
    ),
    "a bug": Fault(
        {"        self.length += len(update.tokens)": "        self.lenght += len(update.tokens)"},
        "a tree is rooted",
        "AttributeError: 'RecurrentSequence' object has no attribute 'lenght'",
    ),
}
# the probs of a draft are flat, whatever its tokens were sampled from
FLAT_PROBS = Fault(
    {
        GROWN: "tree = "
        + GROWN.removeprefix("return ")
        + """
        if tree.draft_probs is not None:
            tree = dataclasses.replace(tree, draft_probs=torch.ones_like(tree.draft_probs) / tree.draft_probs.shape[-1])
        return tree""",
        "import torch\n": "import dataclasses\n\nimport torch\n",
    },
    "the target's distribution, at temperature 1, a fixed tree of 4 nodes",
    "the target's law is changed",
)


@pytest.fixture(autouse=True)
def only_own_methods() -> Iterator[None]:
    """Forget the methods that a test registers."""
    names = set(DRAFTERS)
    yield
    for name in DRAFTERS.keys() - names:
        del DRAFTERS[name]


def write_method(changes: dict[str, str], folder: Path) -> str:
    """Write a file of the method with these changes; return the name of its class."""
    text = METHOD
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    # a method of the same name in another text would be refused
    DRAFTERS.pop("recurrent", None)
    (folder / "mine.py").write_text(text)
    return f"{folder / 'mine.py'}:Recurrent"


def check(
    changes: dict[str, str],
    about: str,
    folder: Path,
) -> list[Outcome]:
    """Return the outcomes of the checks whose descriptions match."""
    trial = Trial(write_method(changes, folder), folder)
    return [run_check(one) for one in trial.checks() if re.search(about, one.about)]


def assert_named(fault: Fault, folder: Path) -> None:
    """The check names the fault, and the method without it passes the check."""
    # several checks may match, as one of each budget; one that finds the fault is enough
    outcomes = check(fault.changes, fault.about, folder)
    assert any(fault.words in (outcome.fault or "") for outcome in outcomes), outcomes
    honest = check({}, fault.about, folder)
    assert [outcome.fault for outcome in honest if outcome.fault] == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, tmp_path: Path) -> None:
    """By the check that it is for, in words that tell what was found."""
    assert_named(FAULTS[name], tmp_path)


@pytest.mark.slow
def test_probs_that_drafts_were_not_sampled_by_are_named(tmp_path: Path) -> None:
    """They change the law of the target's output."""
    assert_named(FLAT_PROBS, tmp_path)


def test_an_export_that_loses_a_weight_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exporter that writes all weights passes."""

    def whole(head: Any, config: Any) -> Layout:
        return Layout(
            {"architectures": ["Recurrent"]},
            tensors_of(head),
            "`my-engine`",
        )

    def torn(head: Any, config: Any) -> Layout:
        layout = whole(head, config)
        # all the others are written
        tensors = dict(layout.tensors)
        del tensors["enter.bias"]
        return replace(layout, tensors=tensors)

    monkeypatch.setitem(EXPORTERS, "mine", whole)
    (outcome,) = check({}, "every export", tmp_path)
    assert outcome.fault is None
    assert outcome.note == "written for mine"
    monkeypatch.setitem(EXPORTERS, "mine", torn)
    (outcome,) = check({}, "every export", tmp_path)
    assert outcome.fault is not None
    assert "the export to mine loses the weights enter.bias" in outcome.fault


@pytest.mark.slow
def test_the_command_tells_each_check_and_its_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line a check, and status 1 where one fails; with weights and without."""
    for name in (write_method({}, tmp_path), "ngram"):
        main(["check-method", name, "--fast"])
        printed = capsys.readouterr().out
        assert "FAULT" not in printed
        assert "checks hold, as they must" in printed
    wrong = write_method(FAULTS["noise of the wrong position"].changes, tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["check-method", wrong, "--fast"])
    printed = capsys.readouterr().out
    assert ended.value.code == 1
    assert "FAULT" in printed
    assert "ok    validation adds up" in printed
