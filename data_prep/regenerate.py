"""Replace the data's answers by the target's own: `eagle regenerate RECIPE [key=value ...]`."""

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

from data_prep.chats.records import Conversation, says_something
from data_prep.conversations import Tally, read_conversations
from data_prep.parts import begin, is_whole, join_parts, open_part, read_parts
from data_prep.servers.answers import FILTERED, TRUNCATED, Dialogue, Local, Prompt
from data_prep.servers.endpoint import PROBE, Endpoint
from data_prep.servers.sampler_check import is_broken
from data_prep.tokens import load_tokenizer
from eagle.data.features import world
from eagle.data.identity import data_identity
from eagle.disk import lock_path
from eagle.log import interrupted_by_user, progress, script
from eagle.recipe import DataSection, Recipe, RegenerateSection, command_line
from eagle.target.target import Target

SHORTEST_ANSWER = 8  # tokens of data.max_length that a prompt must leave
Answerer = Endpoint | Local


@dataclass(frozen=True, slots=True)
class Reader:
    """The chat template and tokenizer by which the target reads a conversation, and how many tokens fit."""

    tokenizer: Any
    data: DataSection
    positions: int | None = None

    def render(self, messages: Sequence[dict[str, Any]], tools: Any, **options: Any) -> Any:
        """The conversation through the chat template."""
        options = {"return_dict": False, **options, **self.data.template_kwargs}
        return self.tokenizer.apply_chat_template(list(messages), tools=tools, **options)

    def ids(self, messages: Sequence[dict[str, Any]], tools: Any) -> list[int] | str:
        """The token ids up to where the assistant speaks, or the reason for which there are none."""
        try:
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
        ids = reader.ids(messages, tools)
        if isinstance(ids, str):
            notes.add(ids)
            break
        room = min(section.max_new_tokens, (reader.positions or sys.maxsize) - len(ids))
        digest = hashlib.sha256(f"{name}\0{place}".encode(errors="surrogatepass")).digest()
        answer = yield Prompt(list(messages), tools, ids, room, request=int.from_bytes(digest[:8], "big"))
        if answer.finish == FILTERED or not says_something(answer.message):
            kind = "an answer that the server filtered" if answer.finish == FILTERED else "an empty answer"
            notes.add(f"cut at {kind}")
            break
        truncated = answer.finish == TRUNCATED
        broken = is_broken(answer.message["content"], answer.finish, messages)
        unlearned = broken or (truncated and not section.keep_truncated)
        messages.append({**answer.message, **({"weight": 0} if unlearned else {})})
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
    record: dict[str, Any] = {"id": name, "messages": messages, **({"tools": tools} if tools else {})}
    record |= {"source_id": conversation.id} if name != conversation.id else {}
    record |= {"sampling": sampling_of(section), "finish_reasons": reasons}
    return {"id": name, "record": record if messages else None, "notes": sorted(notes), "tokens": tokens}


def make_names_unique(conversations: Iterable[Conversation]) -> Iterator[tuple[str, Conversation]]:
    """Each conversation with its id, to which its place is added where the source repeats one."""
    seen: set[str] = set()
    for place, conversation in enumerate(conversations):
        name = conversation.id
        while name in seen:
            name += f"#{place}"
        seen.add(name)
        yield name, conversation


def sampling_of(section: RegenerateSection) -> dict[str, Any]:
    """The settings by which answers are drawn."""
    return {key: getattr(section, key) for key in ("temperature", "top_p", "seed", "max_new_tokens")}


def settings_of(recipe: Recipe, section: RegenerateSection, source: dict[str, Any]) -> dict[str, Any]:
    """All settings that determine the answers; where they are decoded and who drafts are not among them."""
    target = recipe.target.model_dump(mode="json", exclude={"device_map"})
    return {"target": target, "sampling": {**sampling_of(section), "keep_truncated": section.keep_truncated}, **source}


def answer_all(
    out: Path,
    jobs: list[tuple[str, Conversation]],
    answerer: Answerer,
    reader: Reader,
    section: RegenerateSection,
    index: int = 0,
    count: int = 1,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Answer this process's share of the jobs that are not done, a line at a time; return why each failed one did."""
    done = set(read_parts(out))
    wait()  # the parts are read before any grows
    failed = {}
    mine = [(name, conversation) for name, conversation in jobs[index::count] if name not in done]
    dialogues = ((name, converse(name, conversation, reader, section)) for name, conversation in mine)
    with open_part(out, index) as part:
        for name, outcome in progress(answerer.run(dialogues), "regenerate", len(mine), show=index == 0):
            if isinstance(outcome, str):
                failed[name] = outcome
            else:
                part.write(json.dumps(outcome) + "\n")
                part.flush()
    wait()
    return failed


def table(lines: Iterable[dict[str, Any]], missing: int) -> str:
    """The counts of conversations, answers and notes in the lines of the parts."""
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
    jobs: list[tuple[str, Conversation]], answerer: Answerer, reader: Reader, section: RegenerateSection
) -> str:
    """How much there is to do, and how long it takes, by the first answers of a few conversations."""
    few = jobs[:: max(1, len(jobs) // answerer.at_once)][: answerer.at_once]
    dialogues = []
    for name, job in few:
        places = [place for place, turn in enumerate(job.messages) if turn["role"] == "assistant"]
        first_only = Conversation(job.id, job.messages[: places[0] + 1 if places else 0], job.tools)
        dialogues.append((name, converse(name, first_only, reader, section)))
    start = perf_counter()
    outcomes = [outcome for _, outcome in answerer.run(iter(dialogues))]
    seconds = perf_counter() - start
    tokens = [outcome["tokens"] for outcome in outcomes if not isinstance(outcome, str) and outcome["record"]]
    if not tokens:
        raise ValueError(f"no answer to forecast from: {outcomes[:3]}; correct what they name")
    reached = (takewhile(lambda turn: turn["role"] != "tool", job.messages) for _, job in jobs)
    answers = sum(turn["role"] == "assistant" for turns in reached for turn in turns)
    return (
        f"{len(jobs)} conversations, at most {answers} answers; {len(tokens)} first answers took {seconds:.1f} s "
        f"({sum(tokens) / len(tokens):.0f} tokens each, {sum(tokens) / seconds:.0f} tokens/s): "
        f"about {answers / len(tokens) * seconds / 3600:.2f} h for one process"
    )


def make_answerer(recipe: Recipe, section: RegenerateSection) -> tuple[Answerer, Reader]:
    """The server or the target that answers, once it is known to be the recipe's target."""
    tokenizer = load_tokenizer(recipe)
    answerer: Answerer
    if section.endpoint:
        answerer = Endpoint(recipe.target, section, recipe.data.template_kwargs)
        ids = Reader(tokenizer, recipe.data).render(PROBE, None, add_generation_prompt=True)
        answerer.check_tokenizer(ids)
        answerer.check_sampling(ids, len(tokenizer))
    else:
        answerer = Local(Target.load(**recipe.target.model_dump()), tokenizer, section)
    return answerer, Reader(tokenizer, recipe.data, answerer.positions)


def main(argv: list[str]) -> None:
    """Replace every answer, keep what is done, and print a summary."""
    parser = command_line("eagle regenerate", __doc__)
    parser.add_argument("--forecast", action="store_true", help="say how long it would take, and stop")
    parser.add_argument("--without-failed", action="store_true", help="finish without the conversations that failed")
    args = parser.parse_intermixed_args(argv)
    recipe = Recipe.load(args.recipe, args.overrides)
    if (section := recipe.regenerate) is None:
        raise ValueError(f"{args.recipe} has no section `regenerate`: expected one with `source` and `out`")
    is_first = world()[0] == 0
    hint = "finished answers are kept, and the same command goes on"
    with interrupted_by_user(lambda: hint), lock_path(section.out, hold=is_first and not args.forecast):
        regenerate(recipe, section, args)


def regenerate(recipe: Recipe, section: RegenerateSection, args: argparse.Namespace) -> None:
    """Answer this process's share of the conversations; the first process joins the parts."""
    index, count, wait = world()
    out, say = Path(section.out), print if index == 0 else lambda *_: None
    if out.resolve().is_relative_to(Path(section.source).resolve()):
        raise ValueError(f"regenerate.out is {out}, within regenerate.source {section.source}: write it elsewhere")
    source = recipe.data.model_copy(update={"train": section.source, "turns": "all"})  # learned from: decided later
    settings = settings_of(recipe, section, data_identity(recipe.model_copy(update={"data": source})))
    if is_whole(out, settings):
        return say(f"{out} is whole already, with the same settings: nothing to do")
    tally = Tally()
    options = {key: getattr(source, key) for key in ("limit", "split", "revision", "allow_broken")}
    read = read_conversations(source.train, tally, answered=False, **options)
    jobs = list(make_names_unique(read))
    say("\n".join([tally.table(), *tally.where()]))
    answerer, reader = make_answerer(recipe, section)
    if args.forecast:
        done = read_parts(out)
        return say(forecast([job for job in jobs if job[0] not in done], answerer, reader, section))
    if index == 0:
        begin(out, settings)
    failed = answer_all(out, jobs, answerer, reader, section, index, count, wait)
    for name, reason in list(failed.items())[:5]:
        print(f"failed: {name}: {reason}", file=sys.stderr)
    if index == 0:
        conclude(out, [name for name, _ in jobs], args.without_failed)
        if recipe.data.train != section.out:
            print(f"data.train is {recipe.data.train}: point it to {out} to learn from these answers")


def conclude(out: Path, names: list[str], without_failed: bool) -> None:
    """Print a summary, and join the parts where nothing is missing."""
    lines = read_parts(out)
    missing = len(set(names) - lines.keys())
    print(table((json.loads(lines[name]) for name in names if name in lines), missing))
    if missing and not without_failed:
        sys.exit(
            f"{missing} of {len(names)} conversations failed: run the same command again to try these alone, "
            "or with --without-failed to finish without them"
        )
    if not any(json.loads(line)["record"] for line in lines.values()):
        sys.exit(
            f"no conversation has an answer, for the reasons counted above: nothing is written to {out}. Correct what "
            f"answers, and remove {out}.parts to have all asked for again"
        )
    join_parts(out, names)
    print(f"the answers are in {out}")


if __name__ == "__main__":
    script(main)
