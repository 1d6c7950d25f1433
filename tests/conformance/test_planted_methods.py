"""Methods in files of their own, each with one fault, which the checks name; without it they hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle.__main__ import main
from eagle.conformance.checks import Outcome, Trial, run_check
from eagle.drafters import DRAFTERS
from eagle.formats.export import EXPORTERS
from eagle.formats.layout import Layout, tensors_of
from tests.documents import blocks

ROOT = Path(__file__).parent.parent.parent
METHOD = next(
    text
    for text in blocks(ROOT / "docs/adding-a-method.md", "python")
    if "class Recurrent(" in text
)
GROWN = """return grow(
            update.root, frozen.logits(states)[0], level, budget, self.noise, self.length + 1
        )"""
VALIDATED = (
    "return validate_batch(batch, states, ([frozen.logits] * deepest, frozen.logits), trees)"
)
MIXED = '''
from eagle.core.drafter import EachText
from eagle.core.row_errors import run_rows


class Mixed(EachText):
    """Texts of which all are drafted for with what is kept of the first."""

    def propose(self, updates, budgets):
        return run_rows(updates, lambda row: self.texts[min(self.texts)].propose(updates[row], budgets[row]))
'''
# what is written instead of what, the check that names it, and words of its sentence
FAULTS: dict[str, tuple[dict[str, str], str, str]] = {
    "rooted elsewhere": (
        {"update.root, frozen.logits": "update.root + 1, frozen.logits"},
        "a tree is rooted",
        "a tree is rooted at 8, expected 7",
    ),
    "more nodes than the budget": (
        {"level, budget, self.noise": "level, Budget(12, 4, 3), self.noise"},
        "a tree is rooted",
        "with 3 nodes, 1 levels, top 3 a tree has 12 nodes behind its root, expected at most 3",
    ),
    "kept on the drafter": (
        {
            "return RecurrentText(self, noise)": "self.text = getattr(self, 'text', RecurrentText(self, noise))\n"
            "        return self.text"
        },
        "begin forgets",
        "a second text is not drafted as if it were the first",
    ),
    "looks into the future": (
        {
            "batch.select_taps(self.taps)[slots, 0]": "batch.select_taps(self.taps)[(slots + 3) % len(batch.tokens), 0]"
        },
        "sees no future",
        "or looks into the future",
    ),
    "sees one state ahead": (
        {
            "batch.select_taps(self.taps)[slots, 0]": "batch.select_taps(self.taps)[(slots + 1) % len(batch.tokens), 0]"
        },
        "what is drafted",
        "training reads other states or tokens than drafting has",
    ),
    "sees two states ahead": (
        {
            "batch.select_taps(self.taps)[slots, 0]": "batch.select_taps(self.taps)[(slots + 2) % len(batch.tokens), 0]"
        },
        "what is drafted",
        "training reads other states or tokens than drafting has",
    ),
    "a level reads the token it guesses": (
        {"places_behind(slots, step)": "places_behind(slots, step + (step > 1))"},
        "what is drafted",
        "chains that come to level 2",
    ),
    "counts masked tokens": (
        {
            "batch.loss_mask.nonzero()[:, 0].to(batch.tokens.device) - 2": "torch.arange(len(batch.tokens) - 6)"
        },
        "supervised tokens alone",
        "it counts what loss_mask leaves out",
    ),
    "noise of the wrong place": (
        {"self.noise, self.length + 1": "self.noise, self.length"},
        "noise is that of the places",
        "with the noise of the places [5, 6, 7], expected [6, 7, 8]",
    ),
    "validation of means": (
        {
            VALIDATED: VALIDATED.replace("return", "sums =")
            + "\n        return {key: value / len(batch.lengths) for key, value in sums.items()}"
        },
        "validation adds up",
        "validate does not add up",
    ),
    "a weight that is not saved": (
        {
            "        self.leave = nn": "        self.gain = torch.rand(shape.hidden_size)\n        self.leave = nn",
            "return states + self.leave(": "return states * self.gain + self.leave(",
        },
        "from disk",
        "a head that was saved and loaded drafts",
    ),
    "texts mixed up": (
        {
            "class RecurrentText:": f"{MIXED}\n\nclass RecurrentText:",
            "    def begin(self": "    def open(self):\n        return Mixed(self)\n\n    def begin(self",
        },
        "side by side",
        "in a batch is drafted otherwise than alone",
    ),
    "a bug": (
        {"        self.length += len(update.tokens)": "        self.lenght += len(update.tokens)"},
        "a tree is rooted",
        "AttributeError: 'RecurrentText' object has no attribute 'lenght'",
    ),
}
PROBS = (
    "tree = "
    + GROWN.removeprefix("return ")
    + """
        if tree.draft_probs is not None:
            tree = dataclasses.replace(tree, draft_probs=torch.ones_like(tree.draft_probs) / tree.draft_probs.shape[-1])
        return tree"""
)
SAMPLED = {GROWN: PROBS, "import torch\n": "import dataclasses\n\nimport torch\n"}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Methods of these files are in the registry as long as one test runs."""
    names = set(DRAFTERS)
    yield
    for name in DRAFTERS.keys() - names:
        del DRAFTERS[name]


def written(changes: dict[str, str], folder: Path) -> str:
    """The file of the method with these changes, and its class."""
    text = METHOD
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "mine.py").write_text(text)
    return f"{folder / 'mine.py'}:Recurrent"


def checked(changes: dict[str, str], about: str, folder: Path) -> list[Outcome]:
    """The outcomes of the checks whose words these are."""
    trial = Trial(written(changes, folder), folder)
    return [run_check(check) for check in trial.checks() if re.search(about, check.about)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, tmp_path: Path) -> None:
    """By the check that it is for, in words that tell what was found; the method without it holds that check."""
    changes, about, words = FAULTS[fault]
    assert any(words in (outcome.fault or "") for outcome in checked(changes, about, tmp_path)), (
        fault
    )
    DRAFTERS.pop("recurrent", None)
    assert [outcome.fault for outcome in checked({}, about, tmp_path) if outcome.fault] == []


def test_an_export_that_loses_a_weight_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted in a layout of one's own, which holds all the others; the whole one passes."""

    def whole(head: Any, config: Any) -> Layout:
        return Layout({"architectures": ["Recurrent"]}, tensors_of(head), "`my-engine`")

    def torn(head: Any, config: Any) -> Layout:
        layout = whole(head, config)
        return replace(
            layout,
            tensors={name: part for name, part in layout.tensors.items() if name != "enter.bias"},
        )

    monkeypatch.setitem(EXPORTERS, "mine", whole)
    (outcome,) = checked({}, "every export", tmp_path)
    assert outcome.fault is None and outcome.note == "written for mine"
    monkeypatch.setitem(EXPORTERS, "mine", torn)
    (outcome,) = checked({}, "every export", tmp_path)
    assert (
        outcome.fault is not None
        and "the export to mine loses the weights enter.bias" in outcome.fault
    )


@pytest.mark.slow
def test_probs_that_drafts_were_not_drawn_by_are_named(tmp_path: Path) -> None:
    """They change the law of the target's output, which the honest method keeps."""
    about = "the target's law, at temperature 1, a fixed tree of 4 nodes"
    (wrong,) = checked(SAMPLED, about, tmp_path)
    assert wrong.fault is not None and "the target's law is changed" in wrong.fault
    DRAFTERS.pop("recurrent")
    (honest,) = checked({}, about, tmp_path)
    assert honest.fault is None


@pytest.mark.slow
def test_the_verb_tells_each_check_and_its_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line a check, status 1 where one does not hold; a method without weights, and one of the package."""
    for name in (written({}, tmp_path), "ngram"):
        main(["check-method", name, "--fast"])
        assert (
            "FAULT" not in (said := capsys.readouterr().out) and "checks hold, as they must" in said
        )
    DRAFTERS.pop("recurrent")
    with pytest.raises(SystemExit) as ended:
        main(["check-method", written(FAULTS["noise of the wrong place"][0], tmp_path), "--fast"])
    said = capsys.readouterr().out
    assert ended.value.code == 1 and said.count("FAULT") >= 1 and "ok    validation adds up" in said
