"""A conversation as a dialogue with whoever answers: what is asked in turn, and what is kept of the answers."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from data_prep.chats.images import MARK, Source, for_template
from data_prep.chats.marks import CUT_OFF, is_broken
from data_prep.chats.records import Conversation, reason_to_drop, says_something
from data_prep.image_texts import as_text, with_images
from data_prep.servers.answers import FILTERED, TRUNCATED, Answer, Dialogue, Prompt
from data_prep.tokens import IMAGES
from eagle.recipe import DataSection, RegenerateSection

SHORTEST_ANSWER = 8  # tokens of data.max_length that a prompt must leave


@dataclass(frozen=True, slots=True)
class Reader:
    """The chat template and tokenizer by which the target reads a conversation, and how many tokens fit."""

    tokenizer: Any
    data: DataSection
    positions: int | None = None

    def render(self, messages: Sequence[dict[str, Any]], tools: Any, **options: Any) -> Any:
        """The conversation through the chat template."""
        options = {"return_dict": False, **options, **self.data.template_kwargs}
        return self.tokenizer.apply_chat_template(for_template(messages, self.data.images), tools=tools, **options)

    def ids(self, messages: Sequence[dict[str, Any]], tools: Any, images: Sequence[Source] = ()) -> list[int] | str:
        """The token ids up to where the assistant speaks, or the reason for which there are none."""
        count = sum(turn["content"].count(MARK) for turn in messages) if images else 0
        try:
            if count:
                text = self.render(messages, tools, add_generation_prompt=True, tokenize=False)
                ids = self.tokenizer.init_kwargs[IMAGES].tokens(text, images[:count])
            else:
                ids = self.render(messages, tools, add_generation_prompt=True)
        except Exception as error:  # a template is a program, and may refuse in any way
            return f"cut where the template refuses: {str(error).splitlines()[0] if str(error) else error!r}"
        longest = min(self.data.max_length - SHORTEST_ANSWER, (self.positions or sys.maxsize) - 1)
        return ids if len(ids) <= longest else "cut where the text fills data.max_length or the model"

    def prints(self, messages: Sequence[dict[str, Any]], tools: Any) -> bool:
        """Whether the template prints the last message's text as it is, but for space around it."""
        try:
            printed = self.render(messages, tools, tokenize=False)
        except Exception:  # as above
            return False
        return all((messages[-1].get(key) or "").strip() in printed for key in ("content", "reasoning_content"))


def converse(name: str, conversation: Conversation, reader: Reader, section: RegenerateSection) -> Dialogue:
    """Ask for every answer of a conversation, with the new answers as its history; return the line of a part."""
    messages: list[dict[str, Any]] = []
    reasons: list[str] = []
    notes: set[str] = set()
    tools = conversation.tools
    tokens = 0
    for place, turn in enumerate(conversation.messages):
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
        room = min(section.max_new_tokens, (reader.positions or sys.maxsize) - len(ids))
        digest = hashlib.sha256(f"{name}\0{place}".encode(errors="surrogatepass")).digest()
        shown = with_images(messages, (as_text(image, reader.data.images) for image in conversation.images))
        answer = yield Prompt(shown, tools, ids, room, request=int.from_bytes(digest[:8], "big"))
        if answer.finish == FILTERED or not says_something(answer.message):
            kind = "an answer that the server filtered" if answer.finish == FILTERED else "an empty answer"
            notes.add(f"cut at {kind}")
            break
        if reason := reason_to_drop(answer.message):  # of the target itself: a server's is asked for again
            notes.add(f"cut at an answer that cannot be learned from: {reason}")
            break
        truncated = answer.finish == TRUNCATED
        broken = is_broken(answer.message["content"], answer.finish, messages)
        message = {**answer.message, **weight_of(answer, section, broken=broken)}
        if section.reasoning == "drop" and "reasoning_content" in message:
            message = {key: part for key, part in message.items() if key != "reasoning_content"}
            notes.add("reasoning before an answer is dropped")
        messages.append(message)
        reasons.append(answer.finish)
        tokens += answer.tokens
        if broken:
            notes.add("an answer with broken characters (U+FFFD) is not learned")
        if not reader.prints(messages, tools):
            notes.add("the template prints an answer otherwise than the target wrote it")
        if truncated or answer.message.get("tool_calls"):
            # what would follow belongs to another text, or is the result of another call
            kind = "a truncated answer" if truncated else "a tool call of the target, which has no result"
            notes.add(f"cut at {kind}")
            break
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    messages = with_images(messages, map(as_text, conversation.images))
    record: dict[str, Any] = {"id": name, "messages": messages, **({"tools": tools} if tools else {})}
    record |= {"source_id": conversation.id} if name != conversation.id else {}
    record |= {"sampling": sampling_of(section), "finish_reasons": reasons}
    return {"id": name, "record": record if messages else None, "notes": sorted(notes), "tokens": tokens}


def weight_of(answer: Answer, section: RegenerateSection, *, broken: bool) -> dict[str, Any]:
    """What a record says of how an answer is learned; of one that was cut off also why it has no end."""
    if answer.finish == TRUNCATED:
        return {CUT_OFF: TRUNCATED, "weight": int(section.keep_truncated and not broken)}
    return {"weight": 0} if broken else {}


class Jobs:
    """Conversations by their unique names, kept in a file without a name until they are asked for in their order."""

    def __init__(self, conversations: Iterable[tuple[str, Conversation]], folder: Path | None = None) -> None:
        # not where temporary files go, which may be memory; it goes with this object
        self.file = TemporaryFile(dir=folder if folder is not None and folder.is_dir() else None)  # noqa: SIM115
        self.names: list[str] = []
        for name, conversation in conversations:
            pickle.dump((name, conversation), self.file)
            self.names.append(name)

    def __iter__(self) -> Iterator[tuple[str, Conversation]]:
        place = 0
        for _ in self.names:
            self.file.seek(place)
            job = pickle.load(self.file)
            place = self.file.tell()
            yield job


def make_names_unique(conversations: Iterable[Conversation], samples: int = 1) -> Iterator[tuple[str, Conversation]]:
    """Each conversation with its id, or several times as `id#1`, `id#2`, ...; its place is added to a repeated one."""
    seen: set[str] = set()
    for place, conversation in enumerate(conversations):
        for sample in range(1, samples + 1):
            name = conversation.id if samples == 1 else f"{conversation.id}#{sample}"
            while name in seen:
                name += f"#{place}"
            seen.add(name)
            yield name, conversation


def sampling_of(section: RegenerateSection) -> dict[str, Any]:
    """The settings by which answers are drawn."""
    return {key: getattr(section, key) for key in ("temperature", "top_p", "seed", "max_new_tokens")}
