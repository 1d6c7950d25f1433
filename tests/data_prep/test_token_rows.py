"""Records of token ids and a loss mask are examples as they are, beside records of conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep import inspect_mask
from data_prep.chats.records import conversation_of
from data_prep.chats.token_rows import IDS_NOTE
from data_prep.chats.turns import Dropped
from data_prep.conversations import Tally, read_conversations
from data_prep.read_once import read_examples
from data_prep.tokens import examples_of, load_tokenizer, tokenize_data
from eagle.recipe import Recipe
from tests.chats import changed
from tests.data_prep.stub_servers import write_records

TURNS = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The fox."}]
SPECULATORS = {
    "input_ids": [5, 6, 7, 8],
    "loss_mask": [0, 0, 1, 1],
}
MODELOPT = {
    "conversation_id": "talk-3",
    "messages": TURNS,
    "token_ids": [9, 8, 7, 6, 5],
    "loss_mask": [0, 1, 1, 0, 1],
}
PLAIN = {"conversation_id": "talk-4", "messages": TURNS}


@pytest.fixture
def own(recipe: Recipe, tmp_path: Path) -> Recipe:
    """The recipe with a cache and data of its own."""
    train = str(tmp_path / "rows.jsonl")
    return changed(
        recipe,
        cache=str(tmp_path / "cache"),
        num_proc=1,
        train=train,
        max_length=4,
    )


def read(own: Recipe, *records: dict[str, Any]) -> tuple[list[tuple[list[int], list[int]]], Tally]:
    """Return the tokens and masks of these records, and what became of them."""
    write_records(Path(own.data.train), list(records))
    examples, tally = tokenize_data(own, load_tokenizer(own))
    pairs = [(example.tokens.tolist(), example.loss_mask.long().tolist()) for example in examples]
    return pairs, tally


def test_rows_of_both_forms_are_taken_as_they_are(own: Recipe) -> None:
    """In one file with a conversation; both lists are cut together, and rows without a label are dropped."""
    own = changed(own, max_length=64)
    late = {
        "input_ids": [*range(60), 5, 6, 7, 8, 9],
        "loss_mask": [0] * 64 + [1],
    }
    unlabelled = {
        "input_ids": [5, 6],
        "loss_mask": [0, 0],
        "messages": TURNS,
    }
    # tables have all columns in all records
    null = {
        **PLAIN,
        "input_ids": None,
        "token_ids": None,
        "loss_mask": None,
    }
    flags = {
        "input_ids": [1, 2],
        "loss_mask": [False, True],
    }
    pairs, tally = read(
        own,
        SPECULATORS,
        MODELOPT,
        null,
        PLAIN,
        late,
        unlabelled,
        flags,
    )
    assert pairs[0] == ([5, 6, 7, 8], [0, 0, 1, 1])
    assert pairs[1] == ([9, 8, 7, 6, 5], [0, 1, 1, 0, 1])
    # both conversations are tokenised by the chat template
    assert pairs[2] == pairs[3]
    assert 0 < sum(pairs[2][1]) < len(pairs[2][0])
    assert pairs[4] == ([1, 2], [0, 1])
    assert tally.kept == len(pairs) == 5
    assert tally.dropped == {"nothing supervised within max_length": 2}
    assert tally.noted[IDS_NOTE] == 5
    assert tally.noted["cut at max_length"] == 0

    pairs, tally = read(changed(own, max_length=3), SPECULATORS, MODELOPT)
    assert pairs == [([5, 6, 7], [0, 0, 1]), ([9, 8, 7], [0, 1, 1])]
    assert tally.noted["cut at max_length"] == 2


def test_a_cache_holds_the_same(own: Recipe) -> None:
    """Rows reach training through the token cache, where only rows with equal prompts are duplicates."""
    other = {
        "input_ids": [5, 7, 8],
        "loss_mask": [0, 0, 1],
    }
    again = {
        "input_ids": [5, 6, 9],
        "loss_mask": [0, 0, 1],
    }
    # the third record has the first one's prompt
    expected, _ = read(own, SPECULATORS, other, again)
    cached = read_examples(own)
    assert [example.tokens.tolist() for example in cached] == [tokens for tokens, _ in expected]
    assert [example.loss_mask.long().tolist() for example in cached] == [
        mask for _, mask in expected
    ]
    distinct = read_examples(changed(own, drop_duplicates=True))
    assert [example.tokens.tolist() for example in distinct] == [[5, 6, 7, 8], [5, 7, 8]]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"loss_mask": [1, 0, 1]},
            r"rows.jsonl:2: loss_mask has 3 entries, expected 4, .*input_ids",
        ),
        ({"loss_mask": [0, 0, 1, 2]}, r"rows.jsonl:2: loss_mask holds 2 at 3, expected 0 or 1"),
        (
            {"loss_mask": [0, 0, 1, 0.5]},
            r"rows.jsonl:2: loss_mask holds float at 3, expected 0 and 1",
        ),
        ({"loss_mask": "0011"}, r"rows.jsonl:2: loss_mask is a str, expected a list of 0 and 1"),
        (
            {"input_ids": [1, 2, "3", 4]},
            r"rows.jsonl:2: input_ids holds 3 at 2, expected token ids",
        ),
        (
            {"input_ids": {"1": 2}},
            r"rows.jsonl:2: input_ids is a dict, expected a list of token ids",
        ),
    ],
)
def test_lists_that_do_not_fit_are_refused(
    record: dict[str, Any],
    message: str,
    own: Recipe,
) -> None:
    """The error names the file and the record; a mask is checked past the cut, too."""
    with pytest.raises(ValueError, match=message):
        read(own, SPECULATORS, {**SPECULATORS, **record})
    # the wrong value comes after max_length
    late = {
        "input_ids": [5] * 9,
        "loss_mask": [0, 1] * 4 + [3],
    }
    with pytest.raises(ValueError, match="loss_mask holds 3 at 8"):
        read(own, late)


def test_ids_outside_the_targets_vocabulary_are_refused(own: Recipe) -> None:
    """The target's config says how large it is; without a target it is the tokenizer's."""
    config = json.loads((Path(own.target.path) / "config.json").read_text())
    size = config["vocab_size"]
    # the last row of the LM head, then one more
    last = {
        "id": "last",
        "input_ids": [0, size - 1],
        "loss_mask": [0, 1],
    }
    assert len(read(own, last)[0]) == 1
    for wrong in (size, -1):
        with pytest.raises(ValueError, match=rf"far: .* hold \[{wrong}\], expected 0..{size - 1}"):
            read(
                own,
                {
                    "id": "far",
                    "input_ids": [0, 1, 2, 3, wrong],
                    "loss_mask": [0, 1, 1, 1, 1],
                },
            )
    # a tokenizer that was loaded without a target
    tokenizer = load_tokenizer(own)
    tokenizer.init_kwargs.clear()
    conversation, _ = conversation_of({**SPECULATORS, "input_ids": [1, 2, 3, len(tokenizer)]}, "x")
    with pytest.raises(ValueError, match=f"expected 0..{len(tokenizer) - 1}"):
        examples_of(conversation, tokenizer, own.data, Tally())


def test_without_both_lists_a_record_is_a_conversation_or_nothing() -> None:
    """Ids without a mask, and a mask without ids, leave the messages; questions are read from messages alone."""
    for key in ("input_ids", "token_ids", "loss_mask"):
        # a mask without ids weights the messages
        conversation, notes = conversation_of({"messages": TURNS, key: [0, 1]}, "x")
        assert conversation.row is None
        assert [turn["content"] for turn in conversation.messages] == ["Who?", "The fox."]
        assert IDS_NOTE not in notes
    with pytest.raises(Dropped, match="unknown layout: keys input_ids"):
        conversation_of({"input_ids": [1, 2]}, "x")
    # its mask is none of turns
    conversation, _ = conversation_of(MODELOPT, "x", answered=False)
    assert (conversation.row, conversation.messages[0]) == (None, TURNS[0])
    assert conversation.id == "talk-3"


def test_a_row_that_is_marked_as_unwanted_is_dropped(tmp_path: Path) -> None:
    """Marks that exclude a conversation exclude a row of ids."""
    write_records(tmp_path / "rows.jsonl", [{**SPECULATORS, "weight": 0}, SPECULATORS])
    tally = Tally()
    (kept,) = read_conversations(tmp_path / "rows.jsonl", tally)
    assert kept.id == "rows.jsonl:2"
    assert sum(tally.dropped.values()) == 1


def test_the_inspector_shows_the_given_mask(
    own: Recipe,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The page marks the supervised ids; a mask that fits no chat template is no fault."""
    write_records(Path(own.data.train), [SPECULATORS, PLAIN])
    page = tmp_path / "mask.html"
    recipe_file = tmp_path / "recipe.yaml"
    # JSON is YAML
    recipe_file.write_text(json.dumps(own.model_dump(mode="json")))
    inspect_mask.main([str(recipe_file), "data.max_length=64", "--html", str(page)])
    # by the ids that a piece of text shows
    text = page.read_text()
    assert "rows.jsonl:1" in text
    assert '<mark title="7">' in text
    assert '<mark title="6">' not in text
    assert f"noted: {IDS_NOTE}" in text
    assert "rows.jsonl:1" in capsys.readouterr().out


def test_masks_are_labels(own: Recipe) -> None:
    """mask[i] = 1 says that token i is learned, as in the examples of conversations."""
    write_records(Path(own.data.train), [PLAIN])
    own = changed(own, max_length=64)
    tokenizer = load_tokenizer(own)
    ((example,), _) = tokenize_data(own, tokenizer)
    row = {
        "input_ids": example.tokens.tolist(),
        "loss_mask": example.loss_mask.long().tolist(),
    }
    conversation, _ = conversation_of(row, "x")
    (taken,) = examples_of(conversation, tokenizer, own.data, Tally())
    assert torch.equal(taken.tokens, example.tokens)
    assert torch.equal(taken.loss_mask, example.loss_mask)
    assert tokenizer.decode(taken.tokens[taken.loss_mask]).startswith("The fox.")
