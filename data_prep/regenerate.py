"""Replace the answers in the data with answers of the target: `eagle prepare RECIPE --only answers`."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from time import perf_counter
from typing import Any

from data_prep.conversations import Tally, read_conversations
from data_prep.dialogues import (
    ENDED_EARLY,
    Jobs,
    Reader,
    converse,
    make_names_unique,
    sampling_of,
)
from data_prep.parts import begin, is_whole, join_parts, open_part, read_parts
from data_prep.servers.answers import Local
from data_prep.servers.endpoint import PROBE, Endpoint
from data_prep.servers.health import Backoff
from data_prep.servers.pool import Pool
from data_prep.tokens import load_tokenizer, read_options
from eagle.data.features import world
from eagle.data.identity import data_identity
from eagle.disk import lock_path
from eagle.drafters import DRAFTERS
from eagle.interrupts import interrupted_by_user
from eagle.log import progress, script
from eagle.recipe import Recipe, RegenerateSection
from eagle.recipe.command_lines import command_line
from eagle.target.target import Target

Answerer = Pool | Local
FEW_DISTINCT = 0.5  # share of the answers
MANY_TRUNCATED = 0.2  # share of the conversations
MIN_ANSWERS = 10  # fewer tell nothing


def settings_of(
    recipe: Recipe, section: RegenerateSection, source: dict[str, Any]
) -> dict[str, Any]:
    """Return all settings that determine the answers, which neither the device nor the drafter does."""
    target = recipe.target.model_dump(mode="json", exclude={"device_map"})
    sampling = {**sampling_of(section), "keep_truncated": section.keep_truncated}
    # Later keys are added only if they change something, so that older files can be resumed.
    if section.samples > 1:
        sampling["samples"] = section.samples
    if section.reasoning != "keep":
        sampling["reasoning"] = section.reasoning
    return {"target": target, "sampling": sampling, **source}


def answer_all(
    out: Path,
    jobs: Jobs,
    answerer: Answerer,
    reader: Reader,
    section: RegenerateSection,
    index: int = 0,
    count: int = 1,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Answer this process's share of the unfinished jobs, a line at a time; return why each failed one did."""
    done = set(read_parts(out))
    # All processes read the parts before any of them grows.
    wait()
    failed = {}
    share = set(jobs.names[index::count]) - done
    dialogues = (
        (name, converse(name, job, reader, section)) for name, job in jobs if name in share
    )
    with open_part(out, index) as part:
        outcomes = answerer.run(dialogues)
        for name, outcome in progress(
            outcomes,
            "regenerate",
            len(share),
            unit="conversations",
            show=index == 0,
            note=answerer.note,
        ):
            if isinstance(outcome, str):
                failed[name] = outcome
            else:
                part.write(json.dumps(outcome) + "\n")
                # A killed run loses only the answers that it was writing.
                part.flush()
    wait()
    return failed


def table(lines: Iterable[dict[str, Any]], missing: int) -> str:
    """Return the counts of conversations, answers and notes in the lines of the parts."""
    counts: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    distinct: set[bytes] = set()
    for line in lines:
        reasons: list[str] = []
        if line["record"]:
            reasons = line["record"]["finish_reasons"]
            # digests, as answers to millions of questions need not be in memory
            distinct |= digests_of(line["record"]["messages"])
        counts.update(
            {
                "conversations": bool(reasons),
                "without an answer": not reasons,
                "tokens": line["tokens"],
                "answers": len(reasons),
                "truncated answers": reasons.count("length"),
            }
        )
        notes.update(line["notes"])
    mean = 0.0
    if counts["answers"]:
        mean = counts.pop("tokens") / counts["answers"]
    rows = {
        **counts,
        "distinct answers": len(distinct),
        "tokens per answer": f"{mean:.1f}",
        "failed": missing,
        **notes,
    }
    text = [f"{value:>10}  {name}" for name, value in rows.items()]
    return "\n".join([*text, *warn_of_repeats(counts["answers"], len(distinct))])


def warn_of_truncated(lines: Mapping[str, bytes]) -> str:
    """Return a sentence if many conversations end at an answer that reached the limit; "" if few do.

    `lines` are those of the parts, by conversation.
    """
    ended = sum(ENDED_EARLY.encode() in line for line in lines.values())
    if ended <= MANY_TRUNCATED * len(lines):
        return ""
    return (
        f"{ended} of {len(lines)} conversations end at an answer that reached regenerate.max_new_tokens, so their "
        "later turns are left out: raise it for more data"
    )


def digests_of(messages: Sequence[dict[str, Any]]) -> set[bytes]:
    """Return a digest of each answer of a conversation, of what it says and calls."""
    digests = set()
    for message in messages:
        if message["role"] == "assistant":
            said = [message.get(key) for key in ("content", "reasoning_content", "tool_calls")]
            digests.add(hashlib.sha256(json.dumps(said).encode()).digest()[:16])
    return digests


def warn_of_repeats(answers: int, distinct: int) -> Iterator[str]:
    """Yield a warning where few answers are distinct, of which a head learns little."""
    if answers < MIN_ANSWERS or distinct >= FEW_DISTINCT * answers:
        return
    yield (
        f"warning: only {distinct} of {answers} answers are distinct ({distinct / answers:.0%}), and a head learns "
        "little from repeated ones: ask more and other questions, or set regenerate.temperature=1"
    )


def forecast(
    jobs: Jobs,
    done: Collection[str],
    answerer: Answerer,
    reader: Reader,
    section: RegenerateSection,
) -> str:
    """Return how much there is to do, and how long it takes, by the first answers of a few conversations."""
    names = [name for name in jobs.names if name not in done]
    step = max(1, len(names) // answerer.at_once)
    sample = set(names[::step][: answerer.at_once])
    dialogues = []
    max_answers = 0
    for name, job in jobs:
        if name in done:
            continue
        roles = [turn["role"] for turn in job.messages]
        # A tool result ends a conversation, as it belongs to another call.
        max_answers += list(takewhile(lambda role: role != "tool", roles)).count("assistant")
        if name in sample:
            end = 0
            if "assistant" in roles:
                end = roles.index("assistant") + 1
            first_only = replace(job, messages=job.messages[:end])
            dialogues.append((name, converse(name, first_only, reader, section)))
    start = perf_counter()
    outcomes = [outcome for _, outcome in answerer.run(iter(dialogues))]
    seconds = perf_counter() - start
    tokens = [
        outcome["tokens"]
        for outcome in outcomes
        if not isinstance(outcome, str) and outcome["record"]
    ]
    if not tokens:
        raise ValueError(f"no answer to forecast from: {outcomes[:3]}; correct what they name")
    return (
        f"{len(names)} conversations, at most {max_answers} answers; {len(tokens)} first answers took {seconds:.1f} s "
        f"({sum(tokens) / len(tokens):.0f} tokens each, {sum(tokens) / seconds:.0f} tokens/s): "
        f"about {max_answers / len(tokens) * seconds / 3600:.2f} h for one process"
    )


def make_answerer(recipe: Recipe, section: RegenerateSection) -> tuple[Answerer, Reader]:
    """Return the target or the servers that answer, after a check that they are the recipe's target."""
    tokenizer = load_tokenizer(recipe)
    if not section.endpoint:
        # The recipe's method may be a file, which defines what `section.drafter` names.
        DRAFTERS.find(recipe.drafter.kind)
        # Training answers need not equal plain decoding to the last bit, so the fastest kernels write them.
        target = Target.load(**recipe.target.model_dump(), invariant=False)
        local = Local(target, tokenizer, section)
        return local, Reader(tokenizer, recipe.data, local.positions)
    key = os.environ.get(section.key_variable, "")
    backoff = Backoff(section.seed)
    urls: Sequence[str] = section.endpoint
    if isinstance(urls, str):
        urls = [urls]
    template_kwargs = recipe.data.template_kwargs
    endpoints = [
        Endpoint(url, recipe.target, section, template_kwargs, backoff=backoff, key=key)
        for url in urls
    ]
    ids = Reader(tokenizer, recipe.data).render(PROBE, None, add_generation_prompt=True)
    for endpoint in endpoints:
        endpoint.check_tokenizer(ids)
        endpoint.check_sampling(ids, len(tokenizer))
    pool = Pool(endpoints)
    return pool, Reader(tokenizer, recipe.data, pool.positions)


def main(argv: list[str]) -> None:
    """Replace every answer, keep what is done, and print a summary."""
    warning = run(argv)
    if warning:
        print(warning)


def run(argv: list[str]) -> str:
    """Do what `main` does, and return a warning that is to be printed last; "" for none."""
    parser = command_line("eagle prepare --only answers", __doc__)
    parser.add_argument(
        "--estimate",
        "--forecast",
        dest="forecast",
        action="store_true",
        help="only print how long it would take",
    )
    parser.add_argument(
        "--without-failed", action="store_true", help="finish without the conversations that failed"
    )
    args = parser.parse_intermixed_args(argv)
    recipe = Recipe.load(args.recipe, args.overrides)
    section = recipe.regenerate
    if section is None:
        raise ValueError(
            f"{args.recipe} has no section `regenerate`: expected one with `source` and `out`"
        )
    is_first = world()[0] == 0
    hint = "finished answers are kept, and the same command goes on"
    with (
        interrupted_by_user(lambda: hint),
        lock_path(section.out, hold=is_first and not args.forecast),
    ):
        return regenerate(recipe, section, args)


def check_section(section: RegenerateSection) -> None:
    """Refuse settings that cannot be meant together."""
    if Path(section.out).resolve().is_relative_to(Path(section.source).resolve()):
        raise ValueError(
            f"regenerate.out is {section.out}, within regenerate.source {section.source}: write it elsewhere"
        )
    if section.samples > 1 and section.temperature == 0:
        raise ValueError(
            f"regenerate.samples is {section.samples} at temperature 0, where all answers to a prompt are one: raise "
            "regenerate.temperature, or set regenerate.samples=1"
        )
    if section.reasoning == "drop" and not section.endpoint:
        raise ValueError(
            "regenerate.reasoning is drop without a server: only a server tells reasoning and answer apart. Name "
            "regenerate.endpoint, or set regenerate.reasoning=keep"
        )


def regenerate(recipe: Recipe, section: RegenerateSection, args: argparse.Namespace) -> str:
    """Answer this process's share of the conversations; the first process joins the parts.

    What is returned is to be printed last, by the first process; "" for nothing.
    """
    index, count, wait = world()
    out = Path(section.out)
    say = print if index == 0 else lambda *_: None
    check_section(section)
    # Every answer is written; `data.turns` decides later which of them are learned.
    source = recipe.data.model_copy(update={"train": section.source, "turns": "all"})
    settings = settings_of(
        recipe, section, data_identity(recipe.model_copy(update={"data": source}))
    )
    if is_whole(out, settings):
        say(f"{out} is whole already, with the same settings: nothing to do")
        return ""
    tally = Tally()
    conversations = read_conversations(source.train, tally, answered=False, **read_options(source))
    jobs = Jobs(make_names_unique(conversations, section.samples), out.parent)
    say("\n".join([tally.table(), *tally.where()]))
    answerer, reader = make_answerer(recipe, section)
    if args.forecast:
        say(forecast(jobs, read_parts(out), answerer, reader, section=section))
        return ""
    if index == 0:
        begin(out, settings)
    failed = answer_all(
        out, jobs, answerer, reader, section=section, index=index, count=count, wait=wait
    )
    for name, reason in list(failed.items())[:5]:
        print(f"failed: {name}: {reason}", file=sys.stderr)
    summary = answerer.summary()
    if count > 1:
        summary = f"process {index + 1} of {count}: {summary}"
    print(summary)
    if index:
        return ""
    warning = conclude(out, jobs.names, args.without_failed)
    if recipe.data.train != section.out:
        print(f"data.train is {recipe.data.train}: point it to {out} to learn from these answers")
    return warning


def conclude(out: Path, names: list[str], without_failed: bool) -> str:
    """Print a summary, join the parts where nothing is missing, and return what to say last; "" for nothing."""
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
    return warn_of_truncated(lines)


if __name__ == "__main__":
    script(main)
