"""The target's own answers in place of the data's: `python -m data_prep.regenerate RECIPE [key=value ...]`."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from time import perf_counter
from typing import Any

from data_prep.answers import Answer, Local, Prompt, Walk
from data_prep.conversations import Tally, read_conversations
from data_prep.endpoint import PROBE, Endpoint
from data_prep.messages import FILTERED, says_something
from data_prep.parts import begin, finished, is_whole, lines_of, open_part, put_together
from data_prep.records import Conversation
from data_prep.sampler_check import is_broken
from data_prep.tokens import load_tokenizer
from eagle.data.features import world
from eagle.data.identity import data_identity
from eagle.disk import lock_path
from eagle.log import interrupted_by_user, progress, script
from eagle.recipe import DataSection, Recipe, RegenerateSection, command_line
from eagle.target.target import Target

SHORTEST_ANSWER = 8  # tokens of data.max_length that a prompt must leave

AT_TOOLS = "cut at the first tool result, which belongs to another call"
AT_CALL = "cut at a tool call of the target, which has no result"
TRUNCATED = "cut at a truncated answer"
AT_EMPTY = "cut at an empty answer"
AT_FILTER = "cut at an answer that the server filtered"
BROKEN_TEXT = "an answer with broken characters (U+FFFD) is not learned"
TOO_LONG = "cut where the text fills data.max_length or the model"
TWO_ANSWERS = "two answers in a row: one is given"
PRINTED_OTHERWISE = "the template prints an answer otherwise than the target said it"


@dataclass(frozen=True, slots=True)
class Reader:
    """How the target reads a conversation, and how much of it."""

    tokenizer: Any
    data: DataSection
    positions: int | None = None

    def render(self, messages: Sequence[dict[str, Any]], tools: Any, **options: Any) -> Any:
        """The conversation through the chat template."""
        options = {"return_dict": False, **options, **self.data.template_kwargs}
        return self.tokenizer.apply_chat_template(list(messages), tools=tools, **options)

    def ids(self, messages: Sequence[dict[str, Any]], tools: Any) -> list[int] | str:
        """Token ids up to where the assistant speaks; or why it cannot."""
        try:
            ids = self.render(messages, tools, add_generation_prompt=True)
        except Exception as error:  # a template is a program, and may refuse in any way
            return f"cut where the template refuses: {str(error).splitlines()[0] if str(error) else error!r}"
        longest = min(self.data.max_length - SHORTEST_ANSWER, (self.positions or sys.maxsize) - 1)
        return ids if len(ids) <= longest else TOO_LONG

    def prints(self, messages: Sequence[dict[str, Any]], tools: Any) -> bool:
        """Whether the template prints the last message's text as it is, but for space around it."""
        said = (messages[-1].get(key) or "" for key in ("content", "reasoning_content"))
        try:
            text = self.render(messages, tools, tokenize=False)
        except Exception:  # as above
            return False
        return all(part.strip() in text for part in said)


def walk(name: str, conversation: Conversation, reader: Reader, section: RegenerateSection) -> Walk:
    """Ask for every answer, given the new answers so far; returned is one line of a part."""
    messages: list[dict[str, Any]] = []
    reasons: list[str] = []
    notes: set[str] = set()
    answered, tokens, tools = 0, 0, conversation.tools
    for place, turn in enumerate(conversation.messages):
        if turn["role"] == "tool":
            notes.add(AT_TOOLS)
            break
        if turn["role"] != "assistant":
            messages.append(turn)
            continue
        if messages and messages[-1]["role"] == "assistant":
            notes.add(TWO_ANSWERS)
            continue
        ids = reader.ids(messages, tools)
        if isinstance(ids, str):
            notes.add(ids)
            break
        room = min(section.max_new_tokens, (reader.positions or sys.maxsize) - len(ids))
        answer = yield Prompt(list(messages), tools, ids, room, _key(name, place))
        if left_out := _left_out(answer):
            notes.add(left_out)
            break
        cut = answer.finish == "length"
        broken = is_broken(answer.message["content"], answer.finish, messages)
        notes.update([BROKEN_TEXT] * broken)
        unlearned = broken or (cut and not section.keep_truncated)
        messages.append({**answer.message, **({"weight": 0} if unlearned else {})})
        reasons.append(answer.finish)
        answered, tokens = len(messages), tokens + answer.tokens
        if not reader.prints(messages, tools):
            notes.add(PRINTED_OTHERWISE)
        if cut or answer.message.get("tool_calls"):
            # what would follow belongs to another text, or is the result of another call
            notes.add(TRUNCATED if cut else AT_CALL)
            break
    record: dict[str, Any] = {"id": name, "messages": messages[:answered]}
    record |= {"tools": tools} if tools else {}
    record |= {"source_id": conversation.id} if name != conversation.id else {}
    record |= {"sampling": sampling_of(section), "finish_reasons": reasons}
    return {"id": name, "record": record if answered else None, "notes": sorted(notes), "tokens": tokens}


def _left_out(answer: Answer) -> str | None:
    """Why an answer is none that a conversation could go on from."""
    if answer.finish == FILTERED:
        return AT_FILTER
    return None if says_something(answer.message) else AT_EMPTY


def _key(name: str, place: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{name}\0{place}".encode(errors="surrogatepass")).digest()[:8], "big")


def named(conversations: Iterable[Conversation]) -> Iterator[tuple[str, Conversation]]:
    """Each conversation with its id, made unique by its place where the source repeats one."""
    seen: set[str] = set()
    for place, conversation in enumerate(conversations):
        name = conversation.id
        while name in seen:
            name += f"#{place}"
        seen.add(name)
        yield name, conversation


def sampling_of(section: RegenerateSection) -> dict[str, Any]:
    """How the answers are drawn."""
    return {key: getattr(section, key) for key in ("temperature", "top_p", "seed", "max_new_tokens")}


def settings_of(recipe: Recipe, section: RegenerateSection, source: dict[str, Any]) -> dict[str, Any]:
    """All that decides the answers; where they are decoded does not."""
    target = recipe.target.model_dump(mode="json", exclude={"device_map"})
    return {"target": target, "sampling": {**sampling_of(section), "keep_truncated": section.keep_truncated}, **source}


def answer_all(
    out: Path,
    jobs: list[tuple[str, Conversation]],
    answerer: Endpoint | Local,
    reader: Reader,
    section: RegenerateSection,
    index: int = 0,
    count: int = 1,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Answer this process's share of what is not done yet, a line at a time; why which failed is returned."""
    done = finished(out)
    wait()  # the parts are read before any grows
    failed = {}
    mine = [(name, conversation) for name, conversation in jobs[index::count] if name not in done]
    walks = ((name, walk(name, conversation, reader, section)) for name, conversation in mine)
    with open_part(out, index) as part:
        for name, outcome in progress(answerer.run(walks), "regenerate", len(mine), show=index == 0):
            if isinstance(outcome, str):
                failed[name] = outcome
            else:
                part.write(json.dumps(outcome) + "\n")
                part.flush()
    wait()
    return failed


def table(lines: Iterable[dict[str, Any]], missing: int) -> str:
    """What became of the conversations."""
    counts: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    for line in lines:
        reasons = line["record"]["finish_reasons"] if line["record"] else []
        counts.update({"conversations": bool(reasons), "without an answer": not reasons, "tokens": line["tokens"]})
        counts.update({"answers": len(reasons), "truncated answers": reasons.count("length")})
        notes.update(line["notes"])
    mean = counts.pop("tokens") / counts["answers"] if counts["answers"] else 0.0
    rows = {**counts, "tokens per answer": f"{mean:.1f}", "failed": missing, **notes}
    return "\n".join(f"{value:>10}  {name}" for name, value in rows.items())


def forecast(
    jobs: list[tuple[str, Conversation]], answerer: Endpoint | Local, reader: Reader, section: RegenerateSection
) -> str:
    """How much there is to do, and how long it takes, by the first answers of a few conversations."""
    few = jobs[:: max(1, len(jobs) // answerer.at_once)][: answerer.at_once]
    begun = perf_counter()
    outcomes = [outcome for _, outcome in answerer.run((n, walk(n, _first(c), reader, section)) for n, c in few)]
    seconds = perf_counter() - begun
    done = [outcome for outcome in outcomes if not isinstance(outcome, str) and outcome["record"]]
    if not done:
        raise ValueError(f"no answer to forecast from: {outcomes[:3]}; correct what they name")
    answers, tokens = sum(map(_answers, (conversation for _, conversation in jobs))), sum(o["tokens"] for o in done)
    return (
        f"{len(jobs)} conversations, at most {answers} answers; {len(done)} first answers took {seconds:.1f} s "
        f"({tokens / len(done):.0f} tokens each, {tokens / seconds:.0f} tokens/s): "
        f"about {answers / len(done) * seconds / 3600:.2f} h for one process"
    )


def _first(conversation: Conversation) -> Conversation:
    places = [place for place, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
    return Conversation(conversation.id, conversation.messages[: places[0] + 1 if places else 0], conversation.tools)


def _answers(conversation: Conversation) -> int:
    turns = takewhile(lambda turn: turn["role"] != "tool", conversation.messages)
    return sum(turn["role"] == "assistant" for turn in turns)


def arguments(argv: list[str]) -> argparse.Namespace:
    """What the command line says."""
    parser = command_line("data_prep.regenerate", __doc__)
    parser.add_argument("--forecast", action="store_true", help="say how long it would take, and stop")
    parser.add_argument("--without-failed", action="store_true", help="finish without the conversations that failed")
    return parser.parse_intermixed_args(argv)


def prepared(recipe: Recipe, section: RegenerateSection) -> tuple[Endpoint | Local, Reader]:
    """Who answers, once it is known to be the recipe's target."""
    tokenizer = load_tokenizer(recipe)
    answerer: Endpoint | Local
    if section.endpoint:
        answerer = Endpoint(recipe.target, section, recipe.data.template_kwargs)
        probed = Reader(tokenizer, recipe.data).render(PROBE, None, add_generation_prompt=True)
        answerer.check_tokenizer(probed)
        answerer.check_sampling(probed, len(tokenizer))
    else:
        answerer = Local(Target.load(**recipe.target.model_dump()), tokenizer, section)
    return answerer, Reader(tokenizer, recipe.data, answerer.positions)


def main(argv: list[str]) -> None:
    """Answer anew, keep what is done, and say what came of it."""
    said = arguments(argv)
    recipe = Recipe.load(said.recipe, said.overrides)
    if (section := recipe.regenerate) is None:
        raise ValueError(f"{said.recipe} has no section `regenerate`: expected one with `source` and `out`")
    index, count, wait = world()
    goes_on = "finished answers are kept, and the same command goes on"
    with interrupted_by_user(lambda: goes_on), lock_path(section.out, hold=index == 0 and not said.forecast):
        regenerate(recipe, section, said, index, count, wait)


def regenerate(
    recipe: Recipe,
    section: RegenerateSection,
    said: argparse.Namespace,
    index: int,
    count: int,
    wait: Callable[[], None],
) -> None:
    """This process's share of the answers; the first process puts them together."""
    out, say = Path(section.out), print if index == 0 else lambda *_: None
    if out.resolve().is_relative_to(Path(section.source).resolve()):
        raise ValueError(f"regenerate.out is {out}, within regenerate.source {section.source}: write it elsewhere")
    source = recipe.data.model_copy(update={"train": section.source, "turns": "all"})  # learned from: decided later
    settings = settings_of(recipe, section, data_identity(recipe.model_copy(update={"data": source})))
    if is_whole(out, settings):
        return say(f"{out} is whole already, with the same settings: nothing to do")
    tally = Tally()
    limit, split, revision = recipe.data.limit, recipe.data.split, recipe.data.revision
    read = read_conversations(section.source, tally, limit=limit, split=split, revision=revision, answered=False)
    jobs = list(named(read))
    say("\n".join([tally.table(), *tally.where()]))
    answerer, reader = prepared(recipe, section)
    if said.forecast:
        return say(forecast([job for job in jobs if job[0] not in finished(out)], answerer, reader, section))
    if index == 0:
        begin(out, settings)
    failed = answer_all(out, jobs, answerer, reader, section, index, count, wait)
    for name, reason in list(failed.items())[:5]:
        print(f"failed: {name}: {reason}", file=sys.stderr)
    if index == 0:
        conclude(out, [name for name, _ in jobs], said.without_failed)
        if recipe.data.train != section.out:
            print(f"data.train is {recipe.data.train}: point it to {out} to learn from these answers")


def conclude(out: Path, names: list[str], without_failed: bool) -> None:
    """Say what came of it, and put the parts together where nothing is missing."""
    missing = len(set(names) - finished(out).keys())
    print(table(lines_of(out, names), missing))
    if missing and not without_failed:
        sys.exit(
            f"{missing} of {len(names)} conversations failed: run the same command again to try these alone, "
            "or with --without-failed to finish without them"
        )
    put_together(out, names)
    print(f"the answers are in {out}")


if __name__ == "__main__":
    script(main)
