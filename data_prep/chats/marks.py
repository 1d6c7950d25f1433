"""Read marks beside the text of records and turns: why an answer ended, whether it is learned, media."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

# Names of keys, in small letters and digits alone.
FINISHES = ("finishreason", "donereason", "stopreason")
LISTED_FINISHES = ("finishreasons", "donereasons", "stopreasons")  # a list, one for each answer
# What is said of a record or a turn within it.
METADATA = ("metadata", "meta", "responsemetadata", "generationinfo")
# Every other reason is that of an answer without its end.
FINISHED = {
    # No reason at all.
    "",
    "none",
    "null",
    "nan",
    "unspecified",
    # A stop token, by whatever name.
    "stop",
    "stopped",
    "stopsequence",
    "stoptoken",
    "eos",
    "eostoken",
    "end",
    "endturn",
    "endofturn",
    "endoftext",
    "endofsequence",
    "endofmessage",
    # The answer is a call.
    "toolcall",
    "toolcalls",
    "tooluse",
    "functioncall",
    # A word for success.
    "done",
    "complete",
    "completed",
    "finish",
    "finished",
    "success",
}
# A message's key: why an answer that is learned has no end of its own.
CUT_OFF = "finish_reason"
TRUNCATED = re.compile("length|max|limit|timeout|timedout|truncat")
FILTERED = re.compile("filter|safety|refus|recitation|block|prohibit|spii|guardrail|moderat|polic")
BROKEN_OFF = re.compile(
    "abort|cancel|error|fail|pause|incomplete|malformed|unexpected|interrupt|disconnect"
)

# 0: not learned; any other number but 1 is refused.
WEIGHTS = ("weight", "lossweight", "lossscale", "lossmask")
# 0 or false: not learned.
SWITCHES = ("train", "training", "trainable", "traindetail", "trainonturn", "ktotag", "iscorrect")
# False: not learned; 0 of a record may stand for a measure or a class.
RATINGS = ("loss", "label", "correct")
# True: not learned.
MASKS = ("mask", "masked", "ismasked", "ignore", "ignored")
FALSE = ("false", "no", "off", "0", "0.0")

MEDIUM = "image|img|picture|photo|screenshot|pixelvalue|video|audio|sound|media"
MEDIA = re.compile(
    f"(?:input|user|has|base64)?(?:{MEDIUM})s?"
    "(?:path|url|uri|file|filename|name|id|base64|b64|data|bytes|list|link|src)?s?"
)
# A token that stands for a medium in any text.
SPECIAL_MEDIUM = re.compile(
    r"<\|[^|<>\s]*(?:image|img|vision|video|audio)[^|<>\s]*\|>|<img>[^<>]*</img>"
    r"|<(?:start_of_|end_of_)?(?:image|img|video|audio)_?(?:\d+|placeholder|pad|token|soft_token|here)>"
    r"|<(?:start|end)_of_(?:image|video|audio)>",
    re.IGNORECASE,
)
# At an edge of the text or of a line, and no element that is closed again.
PLACEHOLDER = re.compile(
    r"(?:^[ \t]*<(?:image|img|video|audio)>|<(?:image|img|video|audio)>[ \t]*$|^[ \t]*\[IMG\]|\[IMG\][ \t]*$)"
    r"(?![\s\S]*(?:</(?:image|video|audio)>|\[/IMG\]))",
    re.MULTILINE | re.IGNORECASE,
)
# An answer that says nothing beside it.
LONE_PLACEHOLDER = re.compile(r"\s*(?:<image>\s*)+", re.IGNORECASE)
TAG = re.compile(r"<(?:image|img|video|audio)>|\[IMG\]", re.IGNORECASE)
CLOSING_TAG = re.compile(r"</(?:image|video|audio)>|\[/IMG\]", re.IGNORECASE)
BROKEN = "\N{REPLACEMENT CHARACTER}"


@lru_cache(4096)
def simplify(name: Any) -> str:
    """Return a key or a reason in lower-case letters and digits: `finishreason` for `FINISH-REASON`."""
    return re.sub("[^a-z0-9]", "", str(name).lower())


def with_names(values: dict[str, Any], names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Return (key, value) of keys with one of these simplified names, if they have a value, in the order of names."""
    by_name = {simplify(key): key for key in values if values[key] is not None}
    return ((by_name[name], values[by_name[name]]) for name in names if name in by_name)


def unfinished_reason(values: dict[str, Any]) -> str | None:
    """Return why a record or an answer says that it has no end, in lower case; None if it says no such thing.

    Beside another reason, a stop reason may be the text at which a server stopped: then only a known word counts.
    """
    reasons = list(with_names(values, FINISHES))
    for _, inner in with_names(values, METADATA):
        if isinstance(inner, dict):
            reasons += with_names(inner, FINISHES)
    for i, (_, reason) in enumerate(reasons):
        word = simplify_reason(reason)
        is_known = bool(TRUNCATED.search(word) or FILTERED.search(word) or BROKEN_OFF.search(word))
        if word not in FINISHED and (is_known or i == 0):
            return str(reason).lower()
    for key, value in with_names(values, ("truncated", "istruncated")):
        if not is_false(value):
            return key.lower()
    return None


def simplify_reason(reason: Any) -> str:
    """Return the word of a reason, without the name of its type; nothing of a number or of a stop token's text."""
    if not isinstance(reason, str) or re.fullmatch(r"\s*<.*>\s*|\W*|\d+", reason):
        return ""
    return simplify(reason.rpartition(".")[2]).removeprefix("finishreason")


def is_truncated(reason: str) -> bool:
    """Return whether this reason is that of an answer that met a limit: it may be read, and is not learned."""
    return bool(TRUNCATED.search(simplify_reason(reason)))


def is_filtered(reason: str) -> bool:
    """Return whether this reason is that of an answer that a filter stopped, as it would another time."""
    return bool(FILTERED.search(simplify_reason(reason)))


def is_false(value: Any) -> bool:
    """Return whether a value says no, as a number or in words."""
    return value == 0 or (isinstance(value, str) and value.strip().lower() in FALSE)


def is_true(value: Any) -> bool:
    """Return whether a value says yes in a word; 1 of a mask may mean either."""
    return value is True or (isinstance(value, str) and value.strip().lower() in ("true", "yes"))


def excluding_mark(record: dict[str, Any]) -> str | None:
    """Return the key that marks a record as not to be learned."""
    for key, value in with_names(record, (*WEIGHTS, *SWITCHES)):
        if is_false(value):
            return key
    for key, value in with_names(record, MASKS):
        if is_true(value):
            return key
    for key, value in with_names(record, RATINGS):
        if (
            value is False
            or str(value).strip().lower() == "false"
            or (value == 0 and is_unpaired(record))
        ):
            return key
    for _, values in with_names(record, METADATA):
        if not isinstance(values, dict):
            continue
        if any(is_false(value) for _, value in with_names(values, ("iscorrect",))):
            return "is_correct"
    return None


def is_unpaired(record: dict[str, Any]) -> bool:
    """Return whether a record is one of unpaired preferences, whose label says if the completion is good."""
    return all(record.get(key) is not None for key in ("prompt", "completion", "label"))


def notes_of_marks(record: dict[str, Any], turns: list[Any]) -> set[str]:
    """Return notes on ambiguous marks, by which nothing is left out."""
    notes: set[str] = set()
    if any(value == 0 and value is not False for _, value in with_names(record, ("label",))):
        notes.add("a label of 0 beside a record may be a class: learned")
    for turn in turns:
        if not isinstance(turn, dict):
            continue
        for _, value in with_names(turn, ("mask",)):
            if isinstance(value, int | float) and not isinstance(value, bool):
                notes.add("a mask of 0 or 1 beside a turn may mean either: learned")
    return notes


def is_broken(text: str, finish: str, history: Sequence[dict[str, Any]]) -> bool:
    """Return whether an answer holds broken characters that were neither asked about nor cut through at its end."""
    if finish == "length":
        text = text.rstrip(BROKEN)
    asked = (turn for turn in history if turn.get("role") != "assistant")
    return BROKEN in text and not any(BROKEN in str(turn.get("content")) for turn in asked)


def weight_of(turn: dict[str, Any]) -> int | None:
    """0 where any mark excludes an answer from the loss, 1 where a weight includes it, None where it has no mark."""
    for key, value in with_names(turn, WEIGHTS):
        if (
            not is_false(value)
            and value != 1
            and str(value).strip().lower() not in ("1", "1.0", "true")
        ):
            raise ValueError(f"{key} that is neither 0 nor 1")
    if any(is_false(value) for _, value in with_names(turn, (*WEIGHTS, *SWITCHES, *RATINGS))):
        return 0
    if any(is_true(value) for _, value in with_names(turn, MASKS)):
        return 0
    if any(with_names(turn, WEIGHTS[:1])):
        return 1
    return None


def media_key(values: dict[str, Any]) -> str | None:
    """Return the key of a record or a turn that has images, videos or sound beside its text."""
    for key, value in values.items():
        # A list may hold empty entries only.
        has_media = any(value) if isinstance(value, list) else value
        if has_media and not is_false(has_media) and MEDIA.fullmatch(simplify(key)):
            return key
    return None


def medium_in(text: str, *, asked: bool) -> str | None:
    """Return the token in a text that stands for a medium; in a question (`asked`) at the edges of lines also a tag."""
    token = SPECIAL_MEDIUM.search(text)
    if token is None and asked:
        token = PLACEHOLDER.search(text)
    elif token is None:
        token = LONE_PLACEHOLDER.fullmatch(text)
    if token is None:
        return None
    return token[0].strip()


def tag_in(text: str) -> str | None:
    """Return a tag in a text that may stand for a medium, or may be what the text is about."""
    tag = TAG.search(text)
    if tag is None or CLOSING_TAG.search(text):
        return None
    return tag[0]
