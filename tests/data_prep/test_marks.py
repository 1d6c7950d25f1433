"""What a record says of itself beside its text is read in every spelling, and nothing unfinished is learned."""

from __future__ import annotations

from typing import Any

import pytest

from data_prep.chats.records import conversation_of
from data_prep.chats.turns import Dropped

QUESTION, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
NOT_LEARNED = "an answer is marked as not to be learned"


def weights(record: dict[str, Any]) -> list[int | None] | str:
    """The weight of each answer of a record that has any to learn, or why it is dropped."""
    try:
        conversation, _ = conversation_of(record, "x:1")
    except Dropped as reason:
        return str(reason)
    return [turn.get("weight") for turn in conversation.messages if turn["role"] == "assistant"]


def answered(**more: Any) -> dict[str, Any]:
    """A record of one answer that says this of itself."""
    return {"messages": [QUESTION, {**ANSWER, **more}]}


SPELLINGS = (
    "finish_reason",
    "finishReason",
    "FinishReason",
    "stop_reason",
    "stopReason",
    "done_reason",
    "finish-reason",
)


@pytest.mark.parametrize("key", SPELLINGS)
@pytest.mark.parametrize("of_record", [False, True])
@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        *(
            (reason, [None])
            for reason in (
                "stop",
                "STOP",
                "end_turn",
                "tool_calls",
                "eos",
                "FinishReason.STOP",
                None,
            )
        ),
        *(
            (reason, [None])
            for reason in (
                "FINISH_REASON_STOP",
                "<|eot_id|>",
                151645,
                "stop_sequence",
                "toolUse",
                "",
            )
        ),
        *(
            (reason, [0])
            for reason in (
                "length",
                "MAX_TOKENS",
                "model_length",
                "max_length",
                "timeout",
                "maxTokens",
            )
        ),
        *(
            (reason, f"the first answer was broken off: {reason.lower()}")
            for reason in (
                "SAFETY",
                "refusal",
                "abort",
                "content_filter",
                "RECITATION",
                "pause_turn",
                "error",
                "odd",
            )
        ),
    ],
)
def test_only_a_finished_answer_is_learned(
    key: str, of_record: bool, reason: Any, expected: Any
) -> None:
    """Reasons of an end are listed; whatever else a record or a turn says is no end."""
    record = {**answered(), key: reason} if of_record else answered(**{key: reason})
    assert weights(record) == expected


def test_a_stop_reason_beside_another_may_be_a_text() -> None:
    """A server says at which text it stopped; a word that is known as no end counts all the same."""
    assert weights(answered(finish_reason="stop", stop_reason="Human:")) == [None]
    assert (
        weights(answered(finish_reason="stop", stop_reason="refusal"))
        == "the first answer was broken off: refusal"
    )
    assert weights({**answered(finish_reason="stop"), "stop_reason": "max_tokens"}) == [
        None
    ]  # the turn's own counts
    assert weights(answered(truncated=True)) == [0] and weights(answered(truncated=False)) == [None]


@pytest.mark.parametrize(
    "key", ["train", "kto_tag", "loss_mask", "trainable", "ktoTag", "weight", "LossWeight"]
)
@pytest.mark.parametrize("value", [False, 0, 0.0, "false", "False", " no ", "0", "off"])
def test_a_mark_says_no_in_every_spelling(key: str, value: Any) -> None:
    """An answer that is marked stays in the history alone."""
    record = {"messages": [QUESTION, {**ANSWER, key: value}, QUESTION, ANSWER]}
    conversation, notes = conversation_of(record, "x:1")
    assert [turn.get("weight") for turn in conversation.messages] == [
        None,
        0,
        None,
        None,
    ] and notes == {NOT_LEARNED}
    yes = conversation_of(
        answered(**{key: "1" if key.lower().startswith(("w", "loss")) else "true"}), "x:1"
    )
    assert yes[0].messages[1].get("weight", 1) == 1 and not yes[1]


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ({"train": "false"}, "marked as not to be learned: train"),
        ({"kto_tag": False}, "marked as not to be learned: kto_tag"),
        ({"label": "False"}, "marked as not to be learned: label"),
        ({"loss_mask": 0}, "marked as not to be learned: loss_mask"),
        ({"loss_mask": [0, 1]}, [None]),
        ({"loss_mask": [1, 0]}, [0]),
        ({"loss_mask": [1]}, "loss_mask that is not one mark for each turn"),
        ({"kto_tag": True, "label": 0, "loss": 0.0, "train": "yes"}, [None]),
    ],
)
def test_a_records_marks_count(marks: dict[str, Any], expected: Any) -> None:
    """A label of 0 is a class, and a loss of 0 a measure."""
    assert weights({**answered(), **marks}) == expected


@pytest.mark.parametrize(
    ("marks", "expected", "note"),
    [
        ({"label": 0}, [None], "a label of 0 beside a record may be a class: learned"),
        ({"is_correct": False}, "marked as not to be learned: is_correct", None),
        ({"isCorrect": 0}, "marked as not to be learned: isCorrect", None),
        ({"metadata": {"is_correct": False}}, "marked as not to be learned: is_correct", None),
        ({"correct": False}, "marked as not to be learned: correct", None),
        (
            {"correct": 0, "is_correct": None, "mask": "User"},
            [None],
            None,
        ),  # the right choice's number; a role
        ({"mask": True}, "marked as not to be learned: mask", None),
        ({"metadata": {"finish_reason": "length"}}, [0], "a truncated answer is not learned"),
        (
            {"metadata": {"train": False, "source": "x"}, "meta": "y"},
            [None],
            None,
        ),  # of which split it is
        ({"finish_reasons": ["length"]}, [0], "a truncated answer is not learned"),
        ({"finish_reasons": ["stop"]}, [None], None),
        ({"finish_reasons": ["abort"]}, "the first answer was broken off: abort", None),
        (
            {"finish_reasons": ["stop", "stop"]},
            [None],
            None,
        ),  # of several answers, of which one was taken
        (
            {"finish_reasons": ["stop", "length"]},
            [None],
            "finish reasons that are not one for each answer: not read",
        ),
        # kept on purpose, by `eagle regenerate`: learned without an end mark
        (
            {"finish_reasons": ["length"], "sampling": {"seed": 0}},
            [1],
            "a truncated answer is learned without an end mark",
        ),
    ],
)
def test_what_a_record_says_is_read_or_told(
    marks: dict[str, Any], expected: Any, note: str | None
) -> None:
    """Nothing that may speak against an answer is passed over without a word."""
    assert weights({**answered(), **marks}) == expected
    if isinstance(expected, list):
        assert conversation_of({**answered(), **marks}, "x:1")[1] == ({note} if note else set())


def test_an_unpaired_preference_says_which_completion_is_good() -> None:
    """There a label of 0 is no class."""
    for label, expected in ((0, "marked as not to be learned: label"), (1, [None]), (None, [None])):
        assert weights({"prompt": "a", "completion": "b", "label": label}) == expected


@pytest.mark.parametrize(
    ("marks", "expected", "note"),
    [
        ({"mask": True}, 0, NOT_LEARNED),
        ({"is_masked": "true"}, 0, NOT_LEARNED),
        ({"ignore": True}, 0, NOT_LEARNED),
        ({"mask": False}, None, None),
        ({"mask": 1}, None, "a mask of 0 or 1 beside a turn may mean either: learned"),
        ({"is_correct": False}, 0, NOT_LEARNED),
        (
            {"response_metadata": {"finish_reason": "length"}},
            0,
            "a truncated answer is not learned",
        ),
        ({"content": "b\ufffd"}, 0, "an answer with broken characters (U+FFFD) is not learned"),
        (
            {"reasoning_content": "\ufffd"},
            0,
            "an answer with broken characters (U+FFFD) is not learned",
        ),
    ],
)
def test_what_a_turn_says_is_read_or_told(
    marks: dict[str, Any], expected: int | None, note: str | None
) -> None:
    """Such an answer is read as history, and the next one is learned."""
    record = {"messages": [QUESTION, {**ANSWER, **marks}, QUESTION, ANSWER]}
    conversation, notes = conversation_of(record, "x:1")
    assert [turn.get("weight") for turn in conversation.messages] == [None, expected, None, None]
    assert notes == ({note} if note else set())


def test_broken_characters_that_were_asked_about_are_text() -> None:
    """Or those of another answer's history; at a cut end they are half of a character."""
    asked = {"role": "user", "content": "What is \ufffd?"}
    assert (
        conversation_of({"messages": [asked, {**ANSWER, "content": "\ufffd"}]}, "x:1")[1] == set()
    )
    twice = [QUESTION, {**ANSWER, "content": "\ufffd"}, QUESTION, {**ANSWER, "content": "\ufffd"}]
    conversation, _ = conversation_of({"messages": [*twice, QUESTION, ANSWER]}, "x:1")
    assert [turn.get("weight") for turn in conversation.messages] == [None, 0, None, 0, None, None]


def test_a_tool_may_give_nothing() -> None:
    """Its empty result belongs to the conversation; what is odd behind a cut is cut away, too."""
    call = {"role": "assistant", "tool_calls": [{"name": "look", "arguments": {}}]}
    answer = {"role": "assistant", "content": "Nothing there."}
    result = {"role": "tool", "content": ""}
    conversation, _ = conversation_of({"messages": [QUESTION, call, result, result, answer]}, "x:1")
    assert [turn["role"] for turn in conversation.messages][2:] == ["tool", "tool", "assistant"]
    odd = [
        QUESTION,
        ANSWER,
        {"role": "user", "content": ""},
        {"role": "narrator", "content": "x"},
        7,
    ]
    assert conversation_of({"messages": odd}, "x:1")[1] == {"cut at an empty turn"}


def test_a_tag_in_a_text_is_told() -> None:
    """In the middle of a question it may be the question's matter; an answer of nothing else shows an image."""
    assert (
        weights({"prompt": "a", "completion": "<image>\n"}) == "a placeholder in the text: <image>"
    )
    for question, answer in (("Is <image> a tag?", "b"), ("a", "It is <image> of SVG.")):
        conversation, notes = conversation_of({"prompt": question, "completion": answer}, "x:1")
        assert notes == {"a tag that may stand for a medium is taken as text: <image>"}
        assert [turn["content"] for turn in conversation.messages] == [question, answer]
    assert not conversation_of(
        {"prompt": "Why <audio src=x></audio> and <audio>?", "completion": "b"}, "x:1"
    )[1]


KEYS = (
    "image_path",
    "image_url",
    "imageUrl",
    "img",
    "media",
    "images",
    "input_image",
    "video_file",
    "audioPaths",
)


@pytest.mark.parametrize("key", [*KEYS, "pixel_values", "has_image", "image_base64", "screenshot"])
def test_media_are_known_by_any_name(key: str) -> None:
    """Of the record or of a turn; an empty one is none."""
    for record in (
        {**answered(), key: "a.png"},
        {"messages": [{**QUESTION, key: ["a.png"]}, ANSWER]},
    ):
        assert weights(record) == f"{key} beside the text"
    for empty in ("", None, [], [None], False, 0):
        assert weights({**answered(), key: empty}) == [None]


def test_keys_that_but_speak_of_media_are_none() -> None:
    """A topic or a count is no picture."""
    assert weights(
        {**answered(), "image_count": 3, "video_title": "x", "media_type": "text", "imagery": "y"}
    ) == [None]


TAGS = (
    "<|image_pad|>",
    "<|vision_start|>",
    "<|IMAGE_1|>",
    "<img>a.png</img>",
    "<image_soft_token>",
    "<start_of_image>",
)


@pytest.mark.parametrize("tag", TAGS)
def test_a_token_of_a_medium_is_found_in_any_text(tag: str) -> None:
    """In the middle of a line, of either side."""
    for question, answer in ((f"see {tag} here", "b"), ("a", f"see {tag} here")):
        assert (
            weights({"prompt": question, "completion": answer})
            == f"a placeholder in the text: {tag}"
        )


def test_a_tag_alone_is_a_placeholder_and_markup_is_text() -> None:
    """At the edge of a question's line; HTML that one asks about is text."""
    for text in ("<img>\nWhat is it?", "What is it? <img>", "[IMG] what?", "<IMAGE>\nWhat?"):
        assert str(weights({"prompt": text, "completion": "b"})).startswith(
            "a placeholder in the text: "
        )
    for text in (
        "Why is <img> not closed?",
        "<img src='a'>",
        "[IMG]http://a.b[/IMG] what?",
        "an <|im_end|> mark",
    ):
        assert weights({"prompt": text, "completion": "<img>"}) == [None]
