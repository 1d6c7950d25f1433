"""The inspector shows the mask, and notices a wrong one without the code that made it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import TWO, chat, section
from template_marks import hand_mark
from transformers import AutoTokenizer

from data_prep import inspect_mask, tokens
from data_prep.chats.render import render_answers
from data_prep.chats.turns import Dropped
from data_prep.check_mask import faults, unlike_served
from data_prep.conversations import Tally, read_conversations
from data_prep.dialogues import Jobs
from data_prep.inspect_mask import pieces
from data_prep.tokens import examples_of
from eagle.core.examples import Example
from eagle.recipe import DataSection, Recipe

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared/data"


def shift_mask(mask: torch.Tensor, by: int) -> torch.Tensor:
    """The mask some tokens further on."""
    return mask.roll(by)


def without_last_of_runs(mask: torch.Tensor) -> torch.Tensor:
    """Each run without its end-of-turn mark."""
    return mask & torch.cat([mask[1:], mask[-1:] & False])


def without_first_run(mask: torch.Tensor) -> torch.Tensor:
    """One answer lost."""
    start = int(mask.int().argmax())
    end = start + int((~mask[start:]).int().argmax()) if not mask[start:].all() else len(mask)
    return mask & ((torch.arange(len(mask)) < start) | (torch.arange(len(mask)) >= end))


PLANTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shifted left": lambda mask: shift_mask(mask, -1),
    "shifted right": lambda mask: shift_mask(mask, 1),
    "end-of-turn mark lost": without_last_of_runs,
    "first token lost": lambda mask: without_last_of_runs(mask.flip(0)).flip(0),
    "header supervised": lambda mask: mask | shift_mask(mask, -1),
    "next turn's beginning supervised": lambda mask: mask | shift_mask(mask, 1),
    "one turn lost": without_first_run,
    "user supervised": lambda mask: ~mask,
    "everything supervised": torch.ones_like,
}
TRAILING = (
    "next turn",
    "next turn, unknown marks",
    "end of text",
)  # print something behind the last end mark


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize(
    "name", ["chatml", "vicuna", "thinks", "no mark", "closed thought", *TRAILING]
)
def test_planted_faults_are_caught(using: Callable[[str], Any], name: str, planted: str) -> None:
    """Every way in which masks are known to have gone wrong."""
    conversation = chat(
        "Who is it?", "It is one of them.", "And then who?", "Two of them.", "Why?", "For fun."
    )
    tokenizer, data = using(name), section()
    examples = examples_of(conversation, tokenizer, data, Tally())
    assert faults(conversation, examples, tokenizer, data) == []
    wrong = [Example(example.tokens, PLANTED[planted](example.loss_mask)) for example in examples]
    masks = [
        (example.loss_mask, other.loss_mask) for example, other in zip(examples, wrong, strict=True)
    ]
    assert any(not torch.equal(mask, other) for mask, other in masks)
    assert faults(conversation, wrong, tokenizer, data)


@pytest.mark.parametrize("name", TRAILING)
def test_what_the_template_prints_behind_the_end_mark_is_a_fault(
    using: Callable[[str], Any], name: str
) -> None:
    """All of it or its first token, as the next turn's opening: no answer of the model."""
    conversation, tokenizer, data = chat("Who?", "One."), using(name), section()
    (example,) = examples_of(conversation, tokenizer, data, Tally())
    ids = torch.tensor(tokenizer.apply_chat_template(conversation.messages)["input_ids"])
    size = len(example.tokens)
    assert ids[:size].equal(example.tokens) and example.loss_mask[-1] and len(ids) > size
    for trailing in (size, len(ids)):
        mask = torch.arange(len(ids)).lt(trailing) & torch.arange(len(ids)).ge(
            int(example.loss_mask.int().argmax())
        )
        assert bool(faults(conversation, [Example(ids, mask)], tokenizer, data)) == (
            trailing > size
        )


def test_answers_under_another_prompt_than_that_of_serving_are_counted(
    using: Callable[[str], Any],
) -> None:
    """A thought that the prompt opens; where history is printed otherwise, each answer still follows its prompt."""
    for name, unlike in (
        ("opens a thought", 2),
        ("closed thought", 0),
        ("thinks", 0),
        ("end of text", 0),
        ("chatml", 0),
    ):
        tokenizer = using(name)
        examples = examples_of(TWO, tokenizer, section(), Tally())
        assert unlike_served(TWO, examples, tokenizer, section()) == unlike


def test_an_answer_lost_before_the_cut_is_a_fault(using: Callable[[str], Any]) -> None:
    """An answer beyond `max_length` is excused, one before it is not."""
    conversation, data = (
        chat("Who?", "One.", "And?", "Two. " * 20, "Then?", "Three."),
        section(max_length=40),
    )
    tokenizer = using("chatml")
    (example,) = examples_of(conversation, tokenizer, data, Tally())
    assert faults(conversation, [example], tokenizer, data) == []
    assert faults(
        conversation,
        [Example(example.tokens, without_first_run(example.loss_mask))],
        tokenizer,
        data,
    )


def test_pieces_hold_whole_characters(base: Any) -> None:
    """Characters of several tokens come in one piece, and all pieces together are the text."""
    text = "ok 日本語 😀 👩‍👩‍👧 שלום é e\u0301 \ufffd end"
    ids = torch.tensor(base(text, add_special_tokens=False)["input_ids"])
    groups = list(pieces(Example(ids, torch.zeros(len(ids), dtype=torch.bool)), base))
    assert "".join(piece for _, piece, _ in groups) == text
    assert [token for part, _, _ in groups for token in part] == ids.tolist()
    assert sum("\ufffd" in piece for _, piece, _ in groups) == 1


def test_the_inspector_shows_and_escapes(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script over a recipe: pages, ids, a table; nothing said becomes markup."""
    source = tmp_path / "recipe.yaml"
    source.write_text(recipe.dump())
    inspect_mask.main(
        [str(source), "data.limit=2", "--count", "2", "--html", str(tmp_path / "mask.html")]
    )
    page = (tmp_path / "mask.html").read_text(encoding="utf-8")
    assert "&lt;" in page and "<b>" not in page and "\ufffd" not in page
    assert all(text in page for text in ("日", "😀", "<mark title=", "conversations</td><td>2<"))
    shown = capsys.readouterr().out
    assert all(
        text in shown
        for text in ("日本語 😀", "supervised", "tokens of an example", "⟦", "between ⟦ and ⟧")
    )


def test_marks_stand_around_what_is_supervised_where_no_colour_is_shown(
    using: Callable[[str], Any],
) -> None:
    """As in a pipe; one pair for each answer."""
    tokenizer = using("chatml")
    (example,) = examples_of(TWO, tokenizer, section(), Tally())
    shown = inspect_mask.colour_supervised(example, tokenizer, coloured=False).plain
    assert re.findall("⟦(.*?)⟧", shown, re.DOTALL) == [" One. \n<|end|>", "Two.<|end|>"]
    assert shown.translate({ord(mark): None for mark in "⟦⟧"}) == tokenizer.decode(example.tokens)


def test_conversations_are_read_as_they_are_shown(recipe: Recipe) -> None:
    """One is held at a time, however long the file: the count so far is that of what was given out."""
    tally = Tally()
    for place, _ in enumerate(
        tokens.tokenize_each(recipe, tokens.load_tokenizer(recipe), tally), 1
    ):
        assert tally.kept + sum(tally.dropped.values()) <= place + 1
        if place == 5:
            break


def test_jobs_are_kept_on_the_disk(tmp_path: Path) -> None:
    """They come back as they were and in their order, twice at once, and their file has no name."""
    talks = (chat(f"question {n}", "x", images=(b"\0", "a.png")) for n in range(5))
    given = [(f"c{n}", one) for n, one in enumerate(talks)]
    jobs = Jobs(iter(given), tmp_path)
    assert jobs.names == [name for name, _ in given] and not list(tmp_path.iterdir())
    assert list(zip(jobs, jobs, strict=True)) == list(zip(given, given, strict=True))


def test_the_inspector_fails_on_a_wrong_mask(
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The faults are listed, and the exit status tells."""
    right = tokens.example_of

    def wrong(*given: Any) -> Example | None:
        example = right(*given)
        return example and Example(example.tokens, example.loss_mask.roll(1))

    monkeypatch.setattr(tokens, "example_of", wrong)
    (tmp_path / "recipe.yaml").write_text(recipe.dump())
    with pytest.raises(
        SystemExit, match=r"data.jsonl:1: message 2: supervised is .*, expected 'One"
    ):
        inspect_mask.main([str(tmp_path / "recipe.yaml")])


# ---- real templates, where they are at hand

real = pytest.mark.skipif(
    not REAL.is_dir(), reason="no folder of real templates and conversations beside this checkout"
)


@real
@pytest.mark.slow
def test_real_templates_end_an_answer_with_the_mark_written_by_hand() -> None:
    """Behind the content stands the model's own end mark and nothing else, whatever the template prints behind it."""
    tokenizer, checked = AutoTokenizer.from_pretrained(REAL / "tokenizers/gpt2-chatml"), 0
    for file in sorted((REAL / "chat_templates").rglob("*.jinja")):
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        mark = hand_mark(str(file.relative_to(REAL / "chat_templates")), tokenizer.eos_token)
        try:
            parts = render_answers(
                TWO, tokenizer, DataSection(train="-"), [tokenizer.eos_token], set()
            )
        except Dropped as refused:
            assert "the template refuses" in str(refused)
            continue
        spans = [part.text[start:end] for part in parts for start, end in part.spans]
        behind = [
            span.rpartition(word)[2].lstrip()
            for span, word in zip(spans, ("One.", "Two."), strict=True)
        ]
        assert mark is None or behind == [mark.lstrip()] * 2, file.name
        checked += mark is not None
    assert checked >= 55


@real
@pytest.mark.slow
@pytest.mark.parametrize("folder", ["vicuna", "llama3.1-instruct"])
def test_real_templates_are_served_without_a_fault(folder: str) -> None:
    """Every published template that prints a conversation gives examples that pass the inspector's checks."""
    tokenizer, data = (
        AutoTokenizer.from_pretrained(REAL / "tokenizers" / folder),
        DataSection(train="-", max_length=4000),
    )
    conversations = [*read_conversations(REAL / "train/sharegpt_real_train.jsonl", limit=40)]
    conversations = sorted(conversations, key=lambda conversation: len(str(conversation.messages)))[
        5:30:5
    ]
    printed, wrong = 0, []
    for file in sorted((REAL / "chat_templates").rglob("*.jinja")):
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        for conversation in conversations:
            tally = Tally()
            examples = examples_of(conversation, tokenizer, data, tally)
            printed += bool(examples)
            refused = str(next(iter(tally.dropped), ""))
            wrong += (
                [f"{file.name}: {refused}"] if refused and "template refuses" not in refused else []
            )
            wrong += [
                f"{file.name}: {fault}"
                for fault in (examples and faults(conversation, examples, tokenizer, data))
            ]
    assert wrong == [] and printed >= 250
