"""The inspector shows the mask, and notices a wrong one without the code that made it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from data_prep import inspect_mask, tokens
from data_prep.chats.render import render_answers
from data_prep.chats.turns import Dropped
from data_prep.check_mask import faults, unlike_served
from data_prep.conversations import Tally, read_conversations
from data_prep.inspect_mask import pieces
from data_prep.tokens import examples_of, load_tokenizer
from eagle.core.examples import Example
from eagle.recipe import DataSection, Recipe
from tests.chats import TWO, chat, section
from tests.data_prep.template_marks import hand_mark

REAL = Path(__file__).parents[3] / "shared/data"
TALK = chat(
    "Who is it?",
    "It is one of them.",
    "And then who?",
    "Two of them.",
    "Why?",
    "For fun.",
)


def drop_last_of_runs(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask whose runs have lost their last token."""
    return mask & torch.cat([mask[1:], torch.tensor([False])])


def drop_first_run(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask without its first run."""
    # runs are counted by their starts
    num_changes = (mask.int().diff(prepend=torch.tensor([0])) == 1).cumsum(0)
    return mask & (num_changes > 1)


Fault = Callable[[torch.Tensor], torch.Tensor]
# every way in which masks are known to have gone wrong
PLANTED: dict[str, Fault] = {
    "shifted left": lambda mask: mask.roll(-1),
    "shifted right": lambda mask: mask.roll(1),
    "end-of-turn mark lost": drop_last_of_runs,
    "first token lost": lambda mask: drop_last_of_runs(mask.flip(0)).flip(0),
    "header supervised": lambda mask: mask | mask.roll(-1),
    "next turn's beginning supervised": lambda mask: mask | mask.roll(1),
    "one turn lost": drop_first_run,
    "user supervised": lambda mask: ~mask,
    "everything supervised": torch.ones_like,
}
# templates that print something after the last end mark
TRAILING = ("next turn", "next turn, unknown marks", "end of text")


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize(
    "name",
    [
        "chatml",
        "vicuna",
        "thinks",
        "no mark",
        "closed thought",
        *TRAILING,
    ],
)
def test_planted_faults_are_caught(
    using: Callable[[str], Any],
    name: str,
    planted: str,
) -> None:
    """The right mask has no fault, and the wrong one has."""
    tokenizer = using(name)
    examples = examples_of(TALK, tokenizer, section(), Tally())
    assert faults(TALK, examples, tokenizer, section()) == []
    # a fault must change something, else the check says little
    wrong = [Example(example.tokens, PLANTED[planted](example.loss_mask)) for example in examples]
    pairs = zip(examples, wrong, strict=True)
    assert any(not torch.equal(one.loss_mask, other.loss_mask) for one, other in pairs)
    assert faults(TALK, wrong, tokenizer, section())


@pytest.mark.parametrize("end", ["\n   ", " ", "\n\n"])
@pytest.mark.parametrize("name", ["chatml", "trims", "vicuna", "no mark", *TRAILING])
def test_a_truncated_answer_may_end_in_white_space(
    using: Callable[[str], Any],
    name: str,
    end: str,
) -> None:
    """White space where `max_new_tokens` cut an answer is no fault, but a lost last word still is."""
    tokenizer = using(name)
    conversation = chat("Who?", f"It is one of them.{end}")
    conversation.messages[1]["finish_reason"] = "length"
    (example,) = examples_of(conversation, tokenizer, section(), Tally())
    assert faults(conversation, [example], tokenizer, section()) == []

    # the mask without its last tokens, up to the last word
    mask = example.loss_mask.clone()
    start = int(mask.nonzero()[0])
    while "them" in tokenizer.decode(example.tokens[start:][mask[start:]]):
        mask = drop_last_of_runs(mask)
    assert faults(conversation, [Example(example.tokens, mask)], tokenizer, section())


@pytest.mark.parametrize("name", TRAILING)
def test_what_the_template_prints_after_the_end_mark_is_a_fault(
    using: Callable[[str], Any], name: str
) -> None:
    """The next turn's opening is no answer of the model."""
    conversation = chat("Who?", "One.")
    tokenizer = using(name)
    (example,) = examples_of(
        conversation,
        tokenizer,
        section(),
        Tally(),
    )
    ids = torch.tensor(tokenizer.apply_chat_template(conversation.messages)["input_ids"])
    size = len(example.tokens)
    assert len(ids) > size
    assert torch.equal(ids[:size], example.tokens)
    # the same answers over all that the template prints
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[:size] = example.loss_mask
    assert not faults(
        conversation,
        [Example(ids, mask)],
        tokenizer,
        section(),
    )
    mask[size:] = True
    assert faults(
        conversation,
        [Example(ids, mask)],
        tokenizer,
        section(),
    )


@pytest.mark.parametrize(
    ("name", "num_unlike"),
    [
        ("opens a thought", 2),
        ("closed thought", 0),
        ("thinks", 0),
        ("chatml", 0),
    ],
)
def test_answers_after_another_prompt_than_that_of_serving_are_counted(
    using: Callable[[str], Any],
    name: str,
    num_unlike: int,
) -> None:
    """The prompt may open a thought; where history is printed otherwise, each answer still follows its prompt."""
    tokenizer = using(name)
    examples = examples_of(TWO, tokenizer, section(), Tally())
    assert (
        unlike_served(
            TWO,
            examples,
            tokenizer,
            section(),
        )
        == num_unlike
    )


def test_an_answer_lost_before_the_cut_is_a_fault(using: Callable[[str], Any]) -> None:
    """An answer beyond `max_length` is excused, one before it is not."""
    conversation = chat(
        "Who?",
        "One.",
        "And?",
        "Two. " * 20,
        "Then?",
        "Three.",
    )
    data = section(max_length=40)
    tokenizer = using("chatml")
    (example,) = examples_of(conversation, tokenizer, data, Tally())
    assert faults(conversation, [example], tokenizer, data) == []
    # the first answer stands before the cut
    lost = Example(example.tokens, drop_first_run(example.loss_mask))
    assert faults(conversation, [lost], tokenizer, data)


def test_pieces_hold_whole_characters(base: Any) -> None:
    """Characters of several tokens come in one piece, and all pieces together are the text."""
    text = "ok 日本語 😀 👩‍👩‍👧 שלום é e\u0301 \ufffd end"
    ids = base(text, add_special_tokens=False)["input_ids"]
    example = Example(torch.tensor(ids), torch.zeros(len(ids), dtype=torch.bool))
    texts = []
    read = []
    for tokens_of_piece, piece, _ in pieces(example, base):
        texts.append(piece)
        read += tokens_of_piece
    assert "".join(texts) == text
    assert read == ids
    # only the text's own replacement character, no half of another
    assert sum("\ufffd" in piece for piece in texts) == 1


def test_the_inspector_shows_and_escapes(
    recipe: Recipe,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A page and the terminal show texts and counts; nothing in a text becomes markup."""
    (tmp_path / "recipe.yaml").write_text(recipe.dump())
    html = tmp_path / "mask.html"
    options = ["data.limit=2", "--count", "2", "--html", str(html)]
    inspect_mask.main([str(tmp_path / "recipe.yaml"), *options])
    page = html.read_text(encoding="utf-8")
    for text in ("&lt;", "日", "😀", "<mark title=", "conversations</td><td>2<"):
        assert text in page
    assert "<b>" not in page
    assert "\ufffd" not in page
    shown = capsys.readouterr().out
    for text in ("日本語 😀", "supervised", "tokens of an example", "between ⟦ and ⟧"):
        assert text in shown


def test_brackets_mark_what_is_supervised_where_no_colour_is_shown(
    using: Callable[[str], Any],
) -> None:
    """A pipe gets one pair of brackets for each answer."""
    tokenizer = using("chatml")
    (example,) = examples_of(TWO, tokenizer, section(), Tally())
    shown = inspect_mask.colour_supervised(
        example,
        tokenizer,
        coloured=False,
    ).plain
    assert re.findall(
        "⟦(.*?)⟧",
        shown,
        re.DOTALL,
    ) == [" One. \n<|end|>", "Two.<|end|>"]
    assert re.sub(
        "[⟦⟧]",
        "",
        shown,
    ) == tokenizer.decode(example.tokens)


def test_conversations_are_read_as_they_are_shown(recipe: Recipe) -> None:
    """One is held at a time, however long the file is."""
    tally = Tally()
    # the counts grow with what was read so far
    reading = tokens.tokenize_each(
        recipe,
        load_tokenizer(recipe),
        tally,
    )
    for number, _ in enumerate(reading, 1):
        assert tally.kept + sum(tally.dropped.values()) <= number + 1


def test_the_inspector_fails_on_a_wrong_mask(
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The faults are listed, and the exit status is an error's."""
    example_of = tokens.example_of

    def shift_mask(*arguments: Any) -> Example | None:
        example = example_of(*arguments)
        return example and Example(example.tokens, example.loss_mask.roll(1))

    monkeypatch.setattr(tokens, "example_of", shift_mask)
    (tmp_path / "recipe.yaml").write_text(recipe.dump())
    message = r"data.jsonl:1: message 2: supervised is .*, expected 'One"
    with pytest.raises(SystemExit, match=message):
        inspect_mask.main([str(tmp_path / "recipe.yaml")])


real = pytest.mark.skipif(not REAL.is_dir(), reason="no real templates beside this checkout")


@real
@pytest.mark.slow
def test_real_templates_end_an_answer_with_the_mark_written_by_hand() -> None:
    """The content is followed by the model's own end mark and nothing else, whatever the template prints."""
    tokenizer = AutoTokenizer.from_pretrained(REAL / "tokenizers/gpt2-chatml")
    data = DataSection(train="-")
    num_checked = 0
    for file in sorted((REAL / "chat_templates").rglob("*.jinja")):
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        name = str(file.relative_to(REAL / "chat_templates"))
        mark = hand_mark(name, tokenizer.eos_token)
        try:
            parts = render_answers(
                TWO,
                tokenizer,
                data,
                [tokenizer.eos_token],
                set(),
            )
        except Dropped as refused:
            assert "the template refuses" in str(refused)
            continue
        if mark is None:
            continue
        spans = []
        for part in parts:
            spans += [part.text[start:end] for start, end in part.spans]
        words = ("One.", "Two.")
        # white space before the mark belongs to the answer
        marks = [
            span.rpartition(word)[2]
            for span, word in zip(
                spans,
                words,
                strict=True,
            )
        ]
        assert [each.lstrip() for each in marks] == [mark.lstrip()] * 2, name
        num_checked += 1
    assert num_checked >= 55


@real
@pytest.mark.slow
@pytest.mark.parametrize("folder", ["vicuna", "llama3.1-instruct"])
def test_real_templates_give_examples_without_a_fault(folder: str) -> None:
    """Every published template that prints a conversation gives examples that pass the inspector's checks."""
    tokenizer = AutoTokenizer.from_pretrained(REAL / "tokenizers" / folder)
    data = DataSection(train="-", max_length=4000)
    conversations = [*read_conversations(REAL / "train/sharegpt_real_train.jsonl", limit=40)]
    conversations.sort(key=lambda conversation: len(str(conversation.messages)))
    num_printed = 0
    for file in sorted((REAL / "chat_templates").rglob("*.jinja")):
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        for conversation in conversations[5:30:5]:
            tally = Tally()
            examples = examples_of(conversation, tokenizer, data, tally)
            if examples:
                assert (
                    faults(
                        conversation,
                        examples,
                        tokenizer,
                        data,
                    )
                    == []
                ), file.name
                num_printed += 1
            for reason in tally.dropped:
                assert "template refuses" in reason, file.name
    assert num_printed >= 250
