"""Marks of records and turns beside their text: why an answer ended, whether it is learned, media."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

FINISHES = ("finishreason", "donereason", "stopreason")  # names of keys, in small letters and digits alone
LISTED_FINISHES = ("finishreasons", "donereasons", "stopreasons")  # a list, one for each answer
METADATA = ("metadata", "meta", "responsemetadata", "generationinfo")  # what is said of a record or a turn within it
FINISHED = {  # every other reason is that of an answer without its end
    *("", "none", "null", "nan", "unspecified", "stop", "stopped", "stopsequence", "stoptoken", "eos", "eostoken"),
    *("end", "endturn", "endofturn", "endoftext", "endofsequence", "endofmessage", "toolcall", "toolcalls", "tooluse"),
    *("functioncall", "done", "complete", "completed", "finish", "finished", "success"),
}
CUT_OFF = "finish_reason"  # of a message: why an answer that is learned has no end of its own
TRUNCATED = re.compile("length|max|limit|timeout|timedout|truncat")
FILTERED = re.compile("filter|safety|refus|recitation|block|prohibit|spii|guardrail|moderat|polic")
BROKEN_OFF = re.compile("abort|cancel|error|fail|pause|incomplete|malformed|unexpected|interrupt|disconnect")

WEIGHTS = ("weight", "lossweight", "lossscale", "lossmask")  # 0: not learned; any other number but 1 is refused
# 0 or false: not learned
SWITCHES = ("train", "training", "trainable", "traindetail", "trainonturn", "ktotag", "iscorrect")
RATINGS = ("loss", "label", "correct")  # false: not learned; 0 of a record may stand for a measure or a class
MASKS = ("mask", "masked", "ismasked", "ignore", "ignored")  # true: not learned
FALSE = ("false", "no", "off", "0", "0.0")

MEDIUM = "image|img|picture|photo|screenshot|pixelvalue|video|audio|sound|media"
MEDIA = re.compile(
    f"(?:input|user|has|base64)?(?:{MEDIUM})s?"
    "(?:path|url|uri|file|filename|name|id|base64|b64|data|bytes|list|link|src)?s?"
)
SPECIAL_MEDIUM = re.compile(  # a token that stands for a medium in any text
    r"<\|[^|<>\s]*(?:image|img|vision|video|audio)[^|<>\s]*\|>|<img>[^<>]*</img>"
    r"|<(?:start_of_|end_of_)?(?:image|img|video|audio)_?(?:\d+|placeholder|pad|token|soft_token|here)>"
    r"|<(?:start|end)_of_(?:image|video|audio)>",
    re.IGNORECASE,
)
PLACEHOLDER = re.compile(  # at an edge of the text or of a line, and no element that is closed again
    r"(?:^[ \t]*<(?:image|img|video|audio)>|<(?:image|img|video|audio)>[ \t]*$|^[ \t]*\[IMG\]|\[IMG\][ \t]*$)"
    r"(?![\s\S]*(?:</(?:image|video|audio)>|\[/IMG\]))",
    re.MULTILINE | re.IGNORECASE,
)


LONE_PLACEHOLDER = re.compile(r"\s*(?:<image>\s*)+", re.IGNORECASE)  # an answer that says nothing beside it
TAG = re.compile(r"<(?:image|img|video|audio)>|\[IMG\]", re.IGNORECASE)
CLOSING_TAG = re.compile(r"</(?:image|video|audio)>|\[/IMG\]", re.IGNORECASE)
BROKEN = "\N{REPLACEMENT CHARACTER}"


@lru_cache(4096)
def simplify(name: Any) -> str:
    """A key or a reason in small letters and digits alone: `finishReason`, `finish_reason` and `FINISH-REASON`."""
    return re.sub("[^a-z0-9]", "", str(name).lower())


def with_names(values: dict[str, Any], names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The (key, value) of keys with one of these simplified names, where they have a value, in the names' order."""
    by_name = {simplify(key): key for key in values if values[key] is not None}
    return ((by_name[name], values[by_name[name]]) for name in names if name in by_name)


def unfinished_reason(values: dict[str, Any]) -> str | None:
    """Why a record or an answer says that it has no end, in small letters; None where it says no such thing.

    Beside another reason a stop reason may be the text at which a server stopped: any but a known word is one.
    """
    inner = [value for _, value in with_names(values, METADATA) if isinstance(value, dict)]
    reasons = [reason for part in (values, *inner) for reason in with_names(part, FINISHES)]
    for place, (_, reason) in enumerate(reasons):
        word = simplify_reason(reason)
        is_known = bool(TRUNCATED.search(word) or FILTERED.search(word) or BROKEN_OFF.search(word))
        if word not in FINISHED and (is_known or place == 0):
            return str(reason).lower()
    cut = next((key for key, value in with_names(values, ("truncated", "istruncated")) if not is_false(value)), None)
    return cut and cut.lower()


def simplify_reason(reason: Any) -> str:
    """The word of a reason, without the name of its type; nothing of a number or of a stop token's text."""
    if not isinstance(reason, str) or re.fullmatch(r"\s*<.*>\s*|\W*|\d+", reason):
        return ""
    return simplify(reason.rpartition(".")[2]).removeprefix("finishreason")


def is_truncated(reason: str) -> bool:
    """Whether this reason is that of an answer that met a limit: it may be read, and is not learned."""
    return bool(TRUNCATED.search(simplify_reason(reason)))


def is_filtered(reason: str) -> bool:
    """Whether this reason is that of an answer that a filter stopped, as it would another time."""
    return bool(FILTERED.search(simplify_reason(reason)))


def is_false(value: Any) -> bool:
    """Whether a value says no, as a number or in words."""
    return value == 0 or (isinstance(value, str) and value.strip().lower() in FALSE)


def is_true(value: Any) -> bool:
    """Whether a value says yes in a word; 1 of a mask may mean either."""
    return value is True or (isinstance(value, str) and value.strip().lower() in ("true", "yes"))


def excluding_mark(record: dict[str, Any]) -> str | None:
    """The key that marks a record as not to be learned."""
    for key, value in with_names(record, (*WEIGHTS, *SWITCHES)):
        if is_false(value):
            return key
    for key, value in with_names(record, MASKS):
        if is_true(value):
            return key
    for key, value in with_names(record, RATINGS):
        if value is False or str(value).strip().lower() == "false" or (value == 0 and is_unpaired(record)):
            return key
    for _, values in with_names(record, METADATA):
        judged = with_names(values, ("iscorrect",)) if isinstance(values, dict) else ()
        if any(is_false(value) for _, value in judged):
            return "is_correct"
    return None


def is_unpaired(record: dict[str, Any]) -> bool:
    """Whether a record is one of unpaired preferences, whose label says if the completion is good."""
    return all(record.get(key) is not None for key in ("prompt", "completion", "label"))


def notes_of_marks(record: dict[str, Any], turns: list[Any]) -> set[str]:
    """Notes on marks that may mean either, by which nothing is left out."""
    notes = set[str]()
    if any(value == 0 and value is not False for _, value in with_names(record, ("label",))):
        notes.add("a label of 0 beside a record may be a class: learned")
    marks = (value for turn in turns if isinstance(turn, dict) for _, value in with_names(turn, ("mask",)))
    if any(isinstance(value, int | float) and not isinstance(value, bool) for value in marks):
        notes.add("a mask of 0 or 1 beside a turn may mean either: learned")
    return notes


def is_broken(text: str, finish: str, history: Sequence[dict[str, Any]]) -> bool:
    """Whether an answer holds broken characters that were neither asked about nor cut through at its end."""
    text = text.rstrip(BROKEN) if finish == "length" else text
    asked = (turn for turn in history if turn.get("role") != "assistant")
    return BROKEN in text and not any(BROKEN in str(turn.get("content")) for turn in asked)


def weight_of(turn: dict[str, Any]) -> int | None:
    """0 where any mark excludes an answer from the loss, 1 where a weight includes it, None where it has no mark."""
    for key, value in with_names(turn, WEIGHTS):
        if not is_false(value) and value != 1 and str(value).strip().lower() not in ("1", "1.0", "true"):
            raise ValueError(f"{key} that is neither 0 nor 1")
    if any(is_false(value) for _, value in with_names(turn, (*WEIGHTS, *SWITCHES, *RATINGS))):
        return 0
    if any(is_true(value) for _, value in with_names(turn, MASKS)):
        return 0
    return 1 if any(with_names(turn, WEIGHTS[:1])) else None


def media_key(values: dict[str, Any]) -> str | None:
    """The key of a record or a turn that has images, videos or sound beside its text."""
    for key, value in values.items():
        held = any(value) if isinstance(value, list) else value
        if held and not is_false(held) and MEDIA.fullmatch(simplify(key)):
            return key
    return None


def medium_in(text: str, *, asked: bool) -> str | None:
    """The token in a text that stands for a medium; in a question (`asked`) at the edges of lines also a tag."""
    token = SPECIAL_MEDIUM.search(text) or (PLACEHOLDER.search(text) if asked else LONE_PLACEHOLDER.fullmatch(text))
    return token[0].strip() if token else None


def tag_in(text: str) -> str | None:
    """A tag in a text that may stand for a medium, or may be what the text is about."""
    tag = TAG.search(text)
    return tag[0] if tag and not CLOSING_TAG.search(text) else None
