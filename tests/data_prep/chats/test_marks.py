"""What a record says of itself beside its text is read in every spelling, and nothing unfinished is learned."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data_prep.chats.records import conversation_of
from data_prep.chats.turns import Dropped

QUESTION = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
NOT_LEARNED = "an answer is marked as not to be learned"
TRUNCATED = "a truncated answer is not learned"
NO_END = "a truncated answer is learned without an end mark"
BROKEN = "an answer with broken characters (U+FFFD) is not learned"


def weigh(*turns: dict[str, Any], **beside: Any) -> tuple[Any, set[str]]:
    """Return the weight of each answer of a record and its notes, or why it is dropped and no notes."""
    try:
        conversation, notes = conversation_of({"messages": [*turns], **beside}, "x:1")
    except Dropped as reason:
        return str(reason), set()
    answers = [turn for turn in conversation.messages if turn["role"] == "assistant"]
    return [turn.get("weight") for turn in answers], notes


def weigh_answer(**marks: Any) -> Any:
    """Return the weight of the only answer of a record, which has these marks, or why it is dropped."""
    weights, _ = weigh(QUESTION, {**ANSWER, **marks})
    return weights if isinstance(weights, str) else weights[0]


def weigh_history(**marks: Any) -> tuple[Any, set[str]]:
    """Return the weight of an answer with these marks after a good one and before another, and the notes."""
    weights, notes = weigh(
        QUESTION,
        ANSWER,
        QUESTION,
        {**ANSWER, **marks},
        QUESTION,
        ANSWER,
    )
    if isinstance(weights, list) and len(weights) == 3:
        assert weights[::2] == [None, None]
        return weights[1], notes
    return weights, notes


@pytest.mark.parametrize("reason", [None, "", 151645, "<|eot_id|>", "FinishReason.STOP"])
def test_an_answer_that_ended_is_learned(reason: Any) -> None:
    """No reason, a token's number or text and the name of an enumeration are ends, as are the known words."""
    assert weigh_answer(finish_reason=reason) is None


@pytest.mark.parametrize(
    ("reasons", "weight"),
    [
        ("stop STOP end_turn tool_calls eos FINISH_REASON_STOP stop_sequence toolUse", None),
        ("length MAX_TOKENS model_length max_length timeout maxTokens", 0),
        ("SAFETY refusal abort content_filter RECITATION pause_turn error odd", "broken off"),
    ],
)
def test_only_a_finished_answer_is_learned(reasons: str, weight: Any) -> None:
    """Any other word is no end: a truncated answer stays in the history, any other ends it."""
    for reason in reasons.split():
        expected = f"the first answer was {weight}: {reason.lower()}" if weight else weight
        assert weigh_answer(finish_reason=reason) == expected
        assert weigh(
            QUESTION,
            ANSWER,
            finish_reason=reason,
        )[0] in (expected, [expected])


@pytest.mark.parametrize(
    "key", ["finishReason", "FinishReason", "stop_reason", "done_reason", "finish-reason"]
)
def test_the_reason_has_many_names(key: str) -> None:
    """It may belong to the answer or to the record."""
    assert weigh_answer(**{key: "length"}) == 0
    assert weigh(
        QUESTION,
        ANSWER,
        **{key: "length"},
    ) == ([0], {TRUNCATED})


def test_an_answer_that_was_broken_off_ends_the_conversation() -> None:
    """The answers before it are learned."""
    weights, notes = weigh_history(finish_reason="abort")
    assert weights == [None]
    assert "cut at an answer that was broken off: abort" in notes


def test_a_stop_reason_beside_another_may_be_a_text() -> None:
    """A server names the text at which it stopped; a word that is known as no end counts all the same."""
    assert weigh_answer(finish_reason="stop", stop_reason="Human:") is None
    reason = weigh_answer(finish_reason="stop", stop_reason="refusal")
    assert reason == "the first answer was broken off: refusal"
    # the turn's own reason counts more than the record's
    finished = {**ANSWER, "finish_reason": "stop"}
    assert weigh(
        QUESTION,
        finished,
        stop_reason="max_tokens",
    )[0] == [None]
    assert weigh_answer(truncated=True) == 0
    assert weigh_answer(truncated=False) is None


def test_a_truncated_answer_with_a_weight_has_no_end() -> None:
    """The reason stays with it; a reason beside the messages is one without a weight."""
    truncated = {**ANSWER, "finish_reason": "length", "weight": 1}
    conversation, notes = conversation_of({"messages": [QUESTION, truncated]}, "x:1")
    assert conversation.messages[1] == truncated
    assert notes == {NO_END}
    # a limit of tokens that cut through a character: its first bytes are no text to learn
    torn = {**truncated, "content": truncated["content"] + "\ufffd\ufffd"}
    assert conversation_of({"messages": [QUESTION, torn]}, "x:1")[0].messages[1] == truncated
    beside = {"sampling": {"seed": 0}, "finish_reasons": ["stop", "length"]}
    messages = [QUESTION, ANSWER, QUESTION, ANSWER]
    # with a mark of its own it is learned, as `eagle prepare` writes it
    conversation, notes = conversation_of({"messages": [*messages[:3], truncated], **beside}, "x:1")
    assert [turn.get("weight") for turn in conversation.messages][1::2] == [None, 1]
    assert notes == {NO_END}
    assert weigh(*messages, **beside) == ([None, 0], {TRUNCATED})
    unlearned = {**ANSWER, "weight": 0}
    assert weigh(
        QUESTION,
        ANSWER,
        QUESTION,
        unlearned,
        **beside,
    )[0] == [None, 0]


@pytest.mark.parametrize(
    "key", ["train", "trainable", "training", "ktoTag", "loss_mask", "weight", "LossWeight"]
)
def test_a_mark_says_no_in_every_spelling(key: str) -> None:
    """An answer that is marked stays in the history alone."""
    for value in (False, 0, 0.0, "false", "False", " no ", "0", "off"):
        assert weigh_history(**{key: value}) == (0, {NOT_LEARNED})
    # 1 and "true" say yes
    yes = "1" if "weight" in key.lower() or key == "loss_mask" else "true"
    assert weigh_history(**{key: yes})[0] in (None, 1)


# fmt: off
RECORDS = [
    # a label of 0 is a class, a loss of 0 a measure, a `correct` of 0 a choice, a mask may be a role
    ('{"train": "false"}', "marked as not to be learned: train", None),
    ('{"kto_tag": false}', "marked as not to be learned: kto_tag", None),
    ('{"label": "False"}', "marked as not to be learned: label", None),
    ('{"label": 0}', [None], "a label of 0 beside a record may be a class: learned"),
    ('{"kto_tag": true, "loss": 0.0, "train": "yes"}', [None], None),
    ('{"isCorrect": 0}', "marked as not to be learned: isCorrect", None),
    ('{"metadata": {"is_correct": false}}', "marked as not to be learned: is_correct", None),
    ('{"correct": false}', "marked as not to be learned: correct", None),
    ('{"correct": 0, "is_correct": null, "mask": "User"}', [None], None),
    ('{"mask": true}', "marked as not to be learned: mask", None),
    # `metadata.train` is the split that the record belongs to
    ('{"metadata": {"train": false, "source": "x"}, "meta": "y"}', [None], None),
    # a list of marks has one for each turn
    ('{"loss_mask": 0}', "marked as not to be learned: loss_mask", None),
    ('{"loss_mask": [0, 1]}', [None], None),
    ('{"loss_mask": [1, 0]}', [0], NOT_LEARNED),
    ('{"loss_mask": [1]}', "loss_mask that is not one mark for each turn", None),
    # a list of finish reasons has one for each answer, or belongs to several samples of which one was taken
    ('{"metadata": {"finish_reason": "length"}}', [0], TRUNCATED),
    ('{"finish_reasons": ["length"]}', [0], TRUNCATED),
    ('{"finish_reasons": ["stop"]}', [None], None),
    ('{"finish_reasons": ["abort"]}', "the first answer was broken off: abort", None),
    ('{"finish_reasons": ["stop", "stop"]}', [None], None),
    ('{"finish_reasons": ["stop", "length"]}', [None], "finish reasons that are not one for each answer: not read"),
]
# fmt: on


@pytest.mark.parametrize(("beside", "expected", "note"), RECORDS)
def test_what_a_record_says_is_read_or_noted(
    beside: str,
    expected: Any,
    note: str | None,
) -> None:
    """Nothing that may speak against an answer is passed over without a word."""
    notes = {note} if note else set()
    assert weigh(
        QUESTION,
        ANSWER,
        **json.loads(beside),
    ) == (expected, notes)


@pytest.mark.parametrize(("label", "is_dropped"), [(0, True), (1, False), (None, False)])
def test_a_label_of_an_unpaired_preference_is_no_class(label: int | None, is_dropped: bool) -> None:
    """It says whether the completion is good."""
    # TRL's unpaired preferences have no other key
    record = {"prompt": "a", "completion": "b", "label": label}
    if is_dropped:
        with pytest.raises(Dropped, match="marked as not to be learned: label"):
            conversation_of(record, "x:1")
    else:
        assert "weight" not in conversation_of(record, "x:1")[0].messages[1]


@pytest.mark.parametrize(
    ("marks", "weight", "note"),
    [
        ('{"mask": true}', 0, NOT_LEARNED),
        ('{"is_masked": "true"}', 0, NOT_LEARNED),
        ('{"ignore": true}', 0, NOT_LEARNED),
        ('{"label": false}', 0, NOT_LEARNED),
        ('{"mask": false, "label": "good", "loss": 1.5}', None, None),
        ('{"mask": 1}', None, "a mask of 0 or 1 beside a turn may mean either: learned"),
        ('{"is_correct": false}', 0, NOT_LEARNED),
        ('{"response_metadata": {"finish_reason": "length"}}', 0, TRUNCATED),
        ('{"content": "b\\ufffd"}', 0, BROKEN),
        ('{"reasoning_content": "\\ufffd"}', 0, BROKEN),
    ],
)
def test_what_a_turn_says_is_read_or_noted(
    marks: str,
    weight: int | None,
    note: str | None,
) -> None:
    """Such an answer is read as history, and the next one is learned."""
    assert weigh_history(**json.loads(marks)) == (weight, {note} if note else set())


def test_broken_characters_that_were_asked_about_are_text() -> None:
    """Those of another answer's history are not."""
    # a replacement character is half of a character that a sampler tore
    broken = {**ANSWER, "content": "\ufffd"}
    asked = {"role": "user", "content": "What is \ufffd?"}
    assert weigh(asked, broken) == ([None], set())
    turns = [QUESTION, broken, QUESTION, broken, QUESTION, ANSWER]
    assert weigh(*turns)[0] == [0, 0, None]


def test_a_tool_may_return_nothing() -> None:
    """Its empty result belongs to the conversation; what is odd after a cut is cut away, too."""
    # an empty turn of anyone else ends the conversation
    call = {"role": "assistant", "tool_calls": [{"name": "look", "arguments": {}}]}
    result = {"role": "tool", "content": ""}
    record = {"messages": [QUESTION, call, result, result, ANSWER]}
    roles = [turn["role"] for turn in conversation_of(record, "x:1")[0].messages]
    assert roles[2:] == ["tool", "tool", "assistant"]
    odd: list[Any] = [{"role": "user", "content": ""}, {"role": "narrator", "content": "x"}, 7]
    assert weigh(QUESTION, ANSWER, *odd)[1] == {"cut at an empty turn"}


MEDIA_KEYS = (
    "image_path image_url imageUrl img media images input_image video_file audioPaths pixel_values "
    "has_image image_base64 screenshot"
)


@pytest.mark.parametrize("key", MEDIA_KEYS.split())
def test_media_are_known_by_any_name(key: str) -> None:
    """They belong to the record or to a turn; an empty one is none."""
    assert (
        weigh(
            QUESTION,
            ANSWER,
            **{key: "a.png"},
        )[0]
        == f"{key} beside the text"
    )
    assert weigh({**QUESTION, key: ["a.png"]}, ANSWER)[0] == f"{key} beside the text"
    for empty in ("", None, [], [None], False, 0):
        assert weigh(QUESTION, ANSWER, **{key: empty})[0] == [None]


def test_keys_that_only_speak_of_media_are_none() -> None:
    """A topic or a count is no picture."""
    keys = {
        "image_count": 3,
        "video_title": "x",
        "media_type": "text",
        "imagery": "y",
    }
    assert weigh(QUESTION, ANSWER, **keys)[0] == [None]


TOKENS = "<|image_pad|> <|vision_start|> <|IMAGE_1|> <img>a.png</img> <image_soft_token> <start_of_image>"


@pytest.mark.parametrize("token", TOKENS.split())
def test_a_token_of_a_medium_is_found_in_any_text(token: str) -> None:
    """It is found in the middle of a line, in questions and answers."""
    text = f"see {token} here"
    reason = f"a placeholder in the text: {token}"
    assert weigh({**QUESTION, "content": text}, ANSWER)[0] == reason
    assert weigh(QUESTION, {**ANSWER, "content": text})[0] == reason


@pytest.mark.parametrize(
    ("question", "is_medium"),
    [
        ("<img>\nWhat is it?", True),
        ("What is it? <img>", True),
        ("[IMG] what?", True),
        ("<IMAGE>\nWhat?", True),
        # an element that is closed, has attributes, or is the question's matter is markup
        ("<image><url>a</url></image>", False),
        ("`<imagen>`", False),
        ("<image href='a'/>", False),
        ("Why is <img> not closed?", False),
        ("<img src='a'>", False),
        ("[IMG]http://a.b[/IMG] what?", False),
        ("an <|im_end|> mark", False),
    ],
)
def test_a_tag_alone_is_a_placeholder_and_markup_is_text(question: str, is_medium: bool) -> None:
    """A tag at the edge of a question's line stands for an image."""
    weights, _ = weigh({**QUESTION, "content": question}, ANSWER)
    assert str(weights).startswith("a placeholder in the text: ") == is_medium
    assert is_medium or weights == [None]


@pytest.mark.parametrize(
    ("question", "answer", "is_noted"),
    [
        ("Is <image> a tag?", "b", True),
        ("a", "It is <image> of SVG.", True),
        ("Why <audio src=x></audio> and <audio>?", "b", False),
    ],
)
def test_a_tag_that_is_taken_as_text_is_noted(
    question: str,
    answer: str,
    is_noted: bool,
) -> None:
    """In the middle of a text it may be the text's matter; an answer of nothing else shows an image."""
    weights, notes = weigh({**QUESTION, "content": question}, {**ANSWER, "content": answer})
    assert weights == [None]
    note = "a tag that may stand for a medium is taken as text: <image>"
    assert notes == ({note} if is_noted else set())
    lone = weigh(QUESTION, {**ANSWER, "content": "<image>\n"})[0]
    assert lone == "a placeholder in the text: <image>"
