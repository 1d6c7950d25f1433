"""Replace the data's answers by the target's own: `eagle regenerate RECIPE [key=value ...]`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from time import perf_counter
from typing import Any

from data_prep.conversations import Tally, read_conversations
from data_prep.dialogues import Jobs, Reader, converse, make_names_unique, sampling_of
from data_prep.parts import begin, is_whole, join_parts, open_part, read_parts, read_settings
from data_prep.servers.answers import Local
from data_prep.servers.endpoint import PROBE, Endpoint
from data_prep.servers.health import Backoff
from data_prep.servers.pool import Pool
from data_prep.tokens import load_tokenizer, read_options
from eagle.data.features import world
from eagle.data.identity import data_identity
from eagle.disk import lock_path
from eagle.drafters import DRAFTERS
from eagle.log import interrupted_by_user, progress, script
from eagle.recipe import Recipe, RegenerateSection, command_line
from eagle.target.target import Target

Answerer = Pool | Local


def settings_of(recipe: Recipe, section: RegenerateSection, source: dict[str, Any]) -> dict[str, Any]:
    """All settings that determine the answers; where they are decoded and who drafts are not among them."""
    target = recipe.target.model_dump(mode="json", exclude={"device_map"})
    sampling = {**sampling_of(section), "keep_truncated": section.keep_truncated}
    # keys that came later are noted where they change something: what was made before goes on
    sampling |= {"samples": section.samples} if section.samples > 1 else {}
    sampling |= {"reasoning": section.reasoning} if section.reasoning != "keep" else {}
    return {"target": target, "sampling": sampling, **source}


def as_begun(section: RegenerateSection, out: Path) -> RegenerateSection:
    """The section, with `keep_truncated` as the file was begun where the recipe does not say: once it was false."""
    begun = (read_settings(out) or {}).get("sampling", {}).get("keep_truncated")
    if begun is None or "keep_truncated" in section.model_fields_set:
        return section
    return section.model_copy(update={"keep_truncated": begun})


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
    """Answer this process's share of the jobs that are not done, a line at a time; return why each failed one did."""
    done = set(read_parts(out))
    wait()  # the parts are read before any grows
    failed = {}
    mine = set(jobs.names[index::count]) - done
    dialogues = ((name, converse(name, job, reader, section)) for name, job in jobs if name in mine)
    with open_part(out, index) as part:
        outcomes = answerer.run(dialogues)
        shown = progress(outcomes, "regenerate", len(mine), unit="conversations", show=index == 0, note=answerer.note)
        for name, outcome in shown:
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


def forecast(jobs: Jobs, done: Collection[str], answerer: Answerer, reader: Reader, section: RegenerateSection) -> str:
    """How much there is to do, and how long it takes, by the first answers of a few conversations."""
    names = [name for name in jobs.names if name not in done]
    chosen = set(names[:: max(1, len(names) // answerer.at_once)][: answerer.at_once])
    dialogues = []
    for name, job in ((name, job) for name, job in jobs if name in chosen):
        places = [place for place, turn in enumerate(job.messages) if turn["role"] == "assistant"]
        first_only = replace(job, messages=job.messages[: places[0] + 1 if places else 0])
        dialogues.append((name, converse(name, first_only, reader, section)))
    start = perf_counter()
    outcomes = [outcome for _, outcome in answerer.run(iter(dialogues))]
    seconds = perf_counter() - start
    tokens = [outcome["tokens"] for outcome in outcomes if not isinstance(outcome, str) and outcome["record"]]
    if not tokens:
        raise ValueError(f"no answer to forecast from: {outcomes[:3]}; correct what they name")
    left = (job for name, job in jobs if name not in done)
    reached = (takewhile(lambda turn: turn["role"] != "tool", job.messages) for job in left)
    answers = sum(turn["role"] == "assistant" for turns in reached for turn in turns)
    return (
        f"{len(names)} conversations, at most {answers} answers; {len(tokens)} first answers took {seconds:.1f} s "
        f"({sum(tokens) / len(tokens):.0f} tokens each, {sum(tokens) / seconds:.0f} tokens/s): "
        f"about {answers / len(tokens) * seconds / 3600:.2f} h for one process"
    )


def make_answerer(recipe: Recipe, section: RegenerateSection) -> tuple[Answerer, Reader]:
    """The servers or the target that answer, once they are known to be the recipe's target."""
    tokenizer = load_tokenizer(recipe)
    answerer: Answerer
    if not section.endpoint:
        DRAFTERS.find(recipe.drafter.kind)  # a file, it may be, that `section.drafter` needs
        answerer = Local(Target.load(**recipe.target.model_dump()), tokenizer, section)
    else:
        key, backoff = os.environ.get(section.key_variable, ""), Backoff(section.seed)
        addresses = [section.endpoint] if isinstance(section.endpoint, str) else section.endpoint
        kwargs = recipe.data.template_kwargs
        endpoints = [Endpoint(address, recipe.target, section, kwargs, backoff, key) for address in addresses]
        ids = Reader(tokenizer, recipe.data).render(PROBE, None, add_generation_prompt=True)
        for endpoint in endpoints:
            endpoint.check_tokenizer(ids)
            endpoint.check_sampling(ids, len(tokenizer))
        answerer = Pool(endpoints)
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


def regenerate(recipe: Recipe, section: RegenerateSection, args: argparse.Namespace) -> None:
    """Answer this process's share of the conversations; the first process joins the parts."""
    index, count, wait = world()
    out, say = Path(section.out), print if index == 0 else lambda *_: None
    check_section(section)
    source = recipe.data.model_copy(update={"train": section.source, "turns": "all"})  # learned from: decided later
    section = as_begun(section, out)
    settings = settings_of(recipe, section, data_identity(recipe.model_copy(update={"data": source})))
    if is_whole(out, settings):
        return say(f"{out} is whole already, with the same settings: nothing to do")
    tally = Tally()
    read = read_conversations(source.train, tally, answered=False, **read_options(source))
    jobs = Jobs(make_names_unique(read, section.samples), out.parent)
    say("\n".join([tally.table(), *tally.where()]))
    answerer, reader = make_answerer(recipe, section)
    if args.forecast:
        return say(forecast(jobs, read_parts(out), answerer, reader, section))
    if index == 0:
        begin(out, settings)
    failed = answer_all(out, jobs, answerer, reader, section, index, count, wait)
    for name, reason in list(failed.items())[:5]:
        print(f"failed: {name}: {reason}", file=sys.stderr)
    print(f"process {index + 1} of {count}: {answerer.summary()}" if count > 1 else answerer.summary())
    if index == 0:
        conclude(out, jobs.names, args.without_failed)
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
