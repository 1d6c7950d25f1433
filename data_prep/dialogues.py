"""Hold a conversation with whatever answers it: ask each question in turn, and keep the answers."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from data_prep.chats.images import MARK, Source, apply_template
from data_prep.chats.marks import CUT_OFF, is_broken
from data_prep.chats.records import Conversation, reason_to_drop, says_something
from data_prep.image_texts import as_text, with_images
from data_prep.servers.answers import FILTERED, TRUNCATED, Answer, Dialogue, Prompt
from data_prep.tokens import IMAGES
from eagle.recipe import DataSection, RegenerateSection

ENDED_EARLY = "its later turns are left out, as an answer reached max_new_tokens"  # a note
SHORTEST_ANSWER = 8  # tokens of data.max_length that a prompt must leave


@dataclass(frozen=True, slots=True)
class Reader:
    """The chat template and tokenizer by which the target reads a conversation, and how many tokens fit."""

    tokenizer: Any
    data: DataSection
    positions: int | None = None

    def render(self, messages: Sequence[dict[str, Any]], tools: Any, **options: Any) -> Any:
        """Apply the chat template to messages."""
        options = {"return_dict": False, **options}
        return apply_template(messages, tools, self.tokenizer, self.data, **options)

    def ids(
        self, messages: Sequence[dict[str, Any]], tools: Any, images: Sequence[Source] = ()
    ) -> list[int] | str:
        """Return the token ids up to where the assistant speaks, or the reason why there are none."""
        num_images = 0
        if images:
            num_images = sum(turn["content"].count(MARK) for turn in messages)
        try:
            if num_images:
                text = self.render(messages, tools, add_generation_prompt=True, tokenize=False)
                ids = self.tokenizer.init_kwargs[IMAGES].tokens(text, images[:num_images])
            else:
                ids = self.render(messages, tools, add_generation_prompt=True)
        except Exception as error:
            # A template is a program, and may raise anything.
            lines = str(error).splitlines() or [repr(error)]
            return f"cut where the template refuses: {lines[0]}"
        max_length = min(
            self.data.max_length - SHORTEST_ANSWER, (self.positions or sys.maxsize) - 1
        )
        if len(ids) > max_length:
            return "cut where the text fills data.max_length or the model"
        return ids

    def prints(self, messages: Sequence[dict[str, Any]], tools: Any) -> bool:
        """Return whether the template prints the last message's text as it is, but for space around it."""
        try:
            printed = self.render(messages, tools, tokenize=False)
        except Exception:
            # A template is a program, and may raise anything.
            return False
        return all(
            (messages[-1].get(key) or "").strip() in printed
            for key in ("content", "reasoning_content")
        )


def converse(
    name: str, conversation: Conversation, reader: Reader, section: RegenerateSection
) -> Dialogue:
    """Ask for every answer of a conversation, with the new answers as its history; return the line of a part."""
    messages: list[dict[str, Any]] = []
    reasons: list[str] = []
    notes: set[str] = set()
    tools = conversation.tools
    tokens = 0
    for i, turn in enumerate(conversation.messages):
        if turn["role"] == "tool":
            notes.add("cut at the first tool result, which belongs to another call")
            break
        if turn["role"] != "assistant":
            messages.append(turn)
            continue
        if messages and messages[-1]["role"] == "assistant":
            notes.add("two answers in a row: one is given")
            continue
        ids = reader.ids(messages, tools, conversation.images)
        if isinstance(ids, str):
            notes.add(ids)
            break
        max_tokens = min(section.max_new_tokens, (reader.positions or sys.maxsize) - len(ids))
        paths = (as_text(image, reader.data.images) for image in conversation.images)
        prompt = Prompt(
            with_images(messages, paths), tools, ids, max_tokens, request=request_key(name, i)
        )
        answer = yield prompt
        refusal = reason_to_cut(answer)
        if refusal:
            notes.add(f"cut at {refusal}")
            break
        messages.append(message_to_keep(answer, section, messages, notes))
        reasons.append(answer.finish)
        tokens += answer.tokens
        if not reader.prints(messages, tools):
            notes.add("the template prints an answer otherwise than the target wrote it")
        # The next question belongs to another answer, the next tool result to another call.
        if answer.finish == TRUNCATED:
            notes.add(ENDED_EARLY)
            break
        if answer.message.get("tool_calls"):
            notes.add("cut at a tool call of the target, which has no result")
            break
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    record = None
    if messages:
        record = make_record(name, conversation, messages)
        record |= {"sampling": sampling_of(section), "finish_reasons": reasons}
    return {"id": name, "record": record, "notes": sorted(notes), "tokens": tokens}


def make_record(
    name: str, conversation: Conversation, messages: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the record of a conversation with new answers."""
    record: dict[str, Any] = {
        "id": name,
        "messages": with_images(messages, map(as_text, conversation.images)),
    }
    if conversation.tools:
        record["tools"] = conversation.tools
    if name != conversation.id:
        record["source_id"] = conversation.id
    return record


def request_key(name: str, turn: int) -> int:
    """Return the key of an answer's randomness, which is the same in every run."""
    digest = hashlib.sha256(f"{name}\0{turn}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def reason_to_cut(answer: Answer) -> str | None:
    """Return why a conversation ends before an answer, None if it does not."""
    if answer.finish == FILTERED:
        return "an answer that the server filtered"
    if not says_something(answer.message):
        return "an empty answer"
    # Only the target itself gives such answers here: a server is asked again.
    fault = reason_to_drop(answer.message)
    if not fault:
        return None
    return f"an answer that cannot be learned from: {fault}"


def message_to_keep(
    answer: Answer, section: RegenerateSection, history: Sequence[dict[str, Any]], notes: set[str]
) -> dict[str, Any]:
    """Return an answer's message as its record holds it."""
    broken = is_broken(answer.message["content"], answer.finish, history)
    message = {**answer.message, **weight_of(answer, section, broken=broken)}
    if section.reasoning == "drop" and "reasoning_content" in message:
        del message["reasoning_content"]
        notes.add("reasoning before an answer is dropped")
    if broken:
        notes.add("an answer with broken characters (U+FFFD) is not learned")
    return message


def weight_of(answer: Answer, section: RegenerateSection, *, broken: bool) -> dict[str, Any]:
    """Return what a record says about learning an answer; of a truncated one also why it has no end."""
    if answer.finish == TRUNCATED:
        return {CUT_OFF: TRUNCATED, "weight": int(section.keep_truncated and not broken)}
    if broken:
        return {"weight": 0}
    return {}


class Jobs:
    """Conversations by their unique names, kept in an unnamed file until they are read in their order."""

    def __init__(
        self, conversations: Iterable[tuple[str, Conversation]], folder: Path | None = None
    ) -> None:
        if folder is not None and not folder.is_dir():
            folder = None
        # The folder for temporary files may be in memory. The file goes with this object.
        self.file = TemporaryFile(dir=folder)  # noqa: SIM115
        self.names: list[str] = []
        for name, conversation in conversations:
            pickle.dump((name, conversation), self.file)
            self.names.append(name)

    def __iter__(self) -> Iterator[tuple[str, Conversation]]:
        # Each iterator has its own offset, so that several can be open.
        offset = 0
        for _ in self.names:
            self.file.seek(offset)
            job = pickle.load(self.file)
            offset = self.file.tell()
            yield job


def make_names_unique(
    conversations: Iterable[Conversation], samples: int = 1
) -> Iterator[tuple[str, Conversation]]:
    """Yield each conversation with its id, or `samples` times as `id#1`, `id#2`, ...; a repeated id gets its index."""
    used: set[str] = set()
    for i, conversation in enumerate(conversations):
        for sample in range(1, samples + 1):
            name = conversation.id
            if samples > 1:
                name += f"#{sample}"
            while name in used:
                name += f"#{i}"
            used.add(name)
            yield name, conversation


def sampling_of(section: RegenerateSection) -> dict[str, Any]:
    """Return the settings by which answers are sampled."""
    return {
        key: getattr(section, key) for key in ("temperature", "top_p", "seed", "max_new_tokens")
    }
