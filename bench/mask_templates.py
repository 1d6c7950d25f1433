"""Loss masks over published chat templates and real conversations, against an independent truth.

`python bench/mask_templates.py --templates DIR --tokenizers DIR --conversations FILE [--count 200] [--out JSON]`

The truth does not come from the code that makes the mask: each answer is rendered once more with a marker in the place
of its content, which shows where the template prints it; its end mark comes from a list made by hand; and the
supervised tokens are decoded, not looked up by their offsets.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, product
from pathlib import Path
from time import process_time
from typing import Any

import tokenizers
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from bench.machine import made_on, markdown, write_results
from bench.template_marks import hand_mark
from data_prep.chats.records import ROLES, Conversation
from data_prep.check_mask import unlike_served
from data_prep.conversations import Tally, read_conversations
from data_prep.tokens import examples_of
from eagle.core.examples import Example
from eagle.log import progress, script
from eagle.recipe import DataSection

EXACT, STRADDLING_START, STRADDLING_END = "exact", "token straddles the start", "token straddles the end"
MARKER = "\ue002marker\ue002"
DATA = DataSection(train="given", max_length=10_000_000)
PUBLISHED, OWN = "published templates × tokenizers", "tokenizers with their own template"
FASTCHAT = {  # its families, and the special tokens that it prints
    "vicuna_v1.1": {"bos_token": "", "eos_token": "</s>"},
    "llama-2": {"bos_token": "<s>", "eos_token": "</s>"},
    "llama-3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen-7b-chat": {"bos_token": "", "eos_token": "<|im_end|>"},
    "chatml(mpt-7b-chat)": {"bos_token": "", "eos_token": "<|im_end|>"},
}


def renders(messages: list[dict[str, Any]], tokenizer: Any, **special: str) -> str | None:
    """The text that the template makes of a conversation; None if it refuses."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **special)
    except Exception:  # a template may raise anything
        return None


def truth(conversation: Conversation, tokenizer: Any, mark: str) -> Iterator[tuple[str, bool]]:
    """(what the model says for an answer, its end mark included, whether the content is in there) of each answer."""
    for place, turn in enumerate(conversation.messages):
        if turn["role"] != "assistant":
            continue
        history = conversation.messages[:place]
        asked = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
        marked = tokenizer.apply_chat_template([*history, {**turn, "content": MARKER}], tokenize=False)
        finished = tokenizer.apply_chat_template([*history, turn], tokenize=False)
        around, behind = marked.split(MARKER)
        # what surrounds a marker surrounds the answer, but for white space that the template trims
        body = finished.removeprefix(around).removesuffix(behind)
        # of a mark that is printed only where another turn follows there is nothing at the end
        if finished != around + body + behind or not (behind.startswith(mark) or not behind.strip()):
            yield "the template prints something else around this answer", False
            continue
        # where the prompt of serving is no beginning of this text, it ends so that the content comes next
        header = around[len(asked) :] if marked.startswith(asked) else ""
        yield header + body + (mark or behind), same(body, turn["content"])


def same(printed: str, content: str) -> bool:
    """Whether an answer is printed as it was given, but for spaces, and for thinking that the template leaves out."""
    words = printed.split()
    return words == content.split() or words == content.split("</think>")[-1].split()


def supervised(example: Example, tokenizer: Any) -> Iterator[tuple[str, int, int]]:
    """(text, characters of its first token, of its last) of every supervised run, decoded where it stands."""
    tokens, place = example.tokens.tolist(), 0
    for is_supervised, group in groupby(example.loss_mask.tolist()):
        start, place = place, place + len(list(group))
        if is_supervised:
            before = max(0, start - 8)
            ends = [tokenizer.decode(tokens[before:end]) for end in (start, start + 1, place - 1, place)]
            yield ends[3][len(ends[0]) :], len(ends[1]) - len(ends[0]), len(ends[3]) - len(ends[2])


def verdicts(conversation: Conversation, examples: Sequence[Example], tokenizer: Any, mark: str | None) -> list[str]:
    """Of each answer: whether its supervised tokens are exactly the model's text, its end mark included."""
    if mark is None:
        return ["no end mark in the list made by hand"]
    wanted = [(text, known) for text, known in truth(conversation, tokenizer, mark) if text]
    runs = [run for example in examples for run in supervised(example, tokenizer)]
    if len(wanted) != len(runs):
        return [f"{len(runs)} runs for {len(wanted)} answers"]
    pairs = zip(runs, wanted, strict=True)
    return [compare_run(run, text, tokenizer) if known else "content changed" for run, (text, known) in pairs]


def compare_run(run: tuple[str, int, int], wanted: str, tokenizer: Any) -> str:
    """Exact; or with the rest of a token that reaches out of the answer; or not."""
    text, first, last = run
    wanted = tokenizer.decode(
        tokenizer(wanted, add_special_tokens=False, verbose=False)["input_ids"]
    )  # tokenizers may normalise
    before = text.find(wanted)
    after = len(text) - before - len(wanted)
    if before < 0 or before >= max(1, first) or after >= max(1, last):
        return "other text"
    return STRADDLING_START if before else STRADDLING_END if after else EXACT


def refusal(conversation: Conversation, tokenizer: Any) -> str:
    """The first message up to which the template prints nothing."""
    messages = conversation.messages
    refused = (place for place in range(1, len(messages) + 1) if renders(messages[:place], tokenizer) is None)
    return f"message {place}" if (place := next(refused, None)) else "only a prompt"


def measure(name: str, tokenizer: Any, conversations: Sequence[Conversation]) -> dict[str, Any]:
    """One row: a template with a tokenizer over all conversations."""
    counts, answers, refused = Counter[str](renders=0, served=0, exact=0), Counter[str](), Counter[str]()
    tally, seconds, mark = Tally(), 0.0, hand_mark(name, tokenizer.eos_token)
    for conversation in conversations:
        printable = renders(conversation.messages, tokenizer) is not None
        before = process_time()
        examples = examples_of(conversation, tokenizer, DATA, tally)
        seconds += process_time() - before
        refused.update([] if examples else [refusal(conversation, tokenizer)])
        results = verdicts(conversation, examples, tokenizer, mark) if examples else []
        answers.update(results)
        counts.update(renders=printable, served=bool(examples) and printable)
        counts.update(exact=bool(results) and set(results) <= {EXACT, STRADDLING_START, STRADDLING_END})
        counts.update(tokens=sum(len(one.tokens) for one in examples), examples=len(examples))
        counts.update(supervised=sum(int(one.loss_mask.sum()) for one in examples))
        counts.update(unlike_served=unlike_served(conversation, examples, tokenizer, DATA))
    row = {"template": name, "conversations": len(conversations), **counts, "answers": dict(answers)}
    row |= {"dropped": dict(tally.dropped), "refused_at": dict(refused), "noted": dict(tally.noted)}
    return row | {"ms_per_conversation": round(1e3 * seconds / len(conversations), 2)}


def generation_tags(
    name: str, folder: str, tokenizer: Any, conversations: Sequence[Conversation]
) -> list[dict[str, Any]]:
    """How our mask differs from that of the template's own tags; no row if it has none."""
    if "endgeneration" not in tokenizer.chat_template:
        return []
    differing, row = Counter[str](), Counter[str]()
    for conversation in conversations:
        if renders(conversation.messages, tokenizer) is None:
            continue
        rendered = tokenizer.apply_chat_template(conversation.messages, return_assistant_tokens_mask=True)
        ours = examples_of(conversation, tokenizer, DATA, Tally())
        tokens, mask = ours[0].tokens.tolist(), ours[0].loss_mask.int().tolist()
        tagged = rendered["assistant_masks"]
        row.update(conversations=1, same_tokens=tokens == rendered["input_ids"], same_mask=mask == tagged)
        for token, mine, theirs in zip(tokens, mask, tagged, strict=True):
            if mine != theirs:
                differing[f"{tokenizer.convert_ids_to_tokens(token)!r} only in {'ours' if mine else 'theirs'}"] += 1
    return [{"template": name, "tokenizer": folder, **row, "differing_tokens": dict(differing)}]


def compare_with_fastchat(folder: Path, files: Sequence[Path], tokenizer: Any) -> dict[str, Any]:
    """Of FastChat's families, the templates that print what FastChat prints, and in how many conversations."""
    path, equal = folder / "fastchat_rendered.json", Counter[tuple[str, str]]()
    records = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    for file in files:
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        for record, (name, special) in product(records, FASTCHAT.items()):
            messages = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in record["conversations"]]
            equal[name, str(file.relative_to(folder))] += renders(messages, tokenizer, **special) == record[name]
    shared = {name: {file: count for (one, file), count in equal.items() if one == name and count} for name in FASTCHAT}
    return {"conversations": len(records), "equal": shared}


def console_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for the console."""
    table = Table("template", "tokenizer", "renders", "served", "exact", "supervised", "ms", "answers, and what else")
    for row in rows:
        reasons = {**row["answers"], **row["dropped"], **row["refused_at"]}
        table.add_row(
            *(row["template"], row["tokenizer"], f"{row['renders']}/{row['conversations']}", str(row["served"])),
            *(str(row["exact"]), f"{row['supervised'] / max(1, row['tokens']):.0%}", str(row["ms_per_conversation"])),
            "; ".join(f"{why}: {count}" for why, count in reasons.items()),
        )
    return table


def totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures that count, over pairs of template and conversation, and over answers."""
    sums = {key: sum(row[key] for row in rows) for key in ("renders", "served", "exact", "unlike_served")}
    answers = sum((Counter(row["answers"]) for row in rows), Counter[str]())
    return {**sums, "share_served": sums["served"] / max(1, sums["renders"]), "answers": dict(answers)}


def table(results: dict[str, Any]) -> str:
    """The summary as Markdown."""
    header = ["conversations ×", "render", "served", "exact", "answers", "a token straddles their start / end"]
    rows = []
    for name, row in results["summary"].items():
        straddling = " / ".join(str(row["answers"].get(key, 0)) for key in (STRADDLING_START, STRADDLING_END))
        counts = [row[key] for key in ("renders", "served", "exact")]
        rows.append([name, *counts, sum(row["answers"].values()), straddling, row["unlike_served"]])
    return markdown([*header, "after another prompt than serving shows"], rows, results["made_with"])


def main(argv: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--templates", type=Path, required=True, help="a folder of Jinja files")
    parser.add_argument("--tokenizers", type=Path, required=True, help="a folder of tokenizer folders")
    parser.add_argument("--models", type=Path, nargs="*", default=[], help="folders measured with their template alone")
    parser.add_argument("--conversations", required=True)
    parser.add_argument("--count", type=int, default=200, help="conversations with the first tokenizer")
    parser.add_argument("--others", type=int, default=40, help="conversations with each other tokenizer")
    parser.add_argument("--out", type=Path, default=Path("docs/results/mask_templates.json"))
    options = parser.parse_args(argv)
    conversations = list(read_conversations(options.conversations, limit=options.count))
    files = sorted(options.templates.rglob("*.jinja"))
    rows, own, tagged = [], [], []
    folders = sorted(path for path in options.tokenizers.iterdir() if path.is_dir())
    for place, folder in enumerate([*folders, *options.models]):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        own.append({"tokenizer": folder.name, **measure("its own", tokenizer, conversations)})
        tagged += generation_tags("its own", folder.name, tokenizer, conversations)
        some = conversations if place == 0 else conversations[: options.others]
        for file in progress(files, folder.name, len(files)) if folder in folders else ():
            name, tokenizer.chat_template = str(file.relative_to(options.templates)), file.read_text(encoding="utf-8")
            rows.append({"tokenizer": folder.name, **measure(name, tokenizer, some)})
            tagged += generation_tags(name, folder.name, tokenizer, some)
    rendered = compare_with_fastchat(options.templates, files, tokenizer)
    Console(width=200).print(console_table([*own, *rows]))
    summary = {PUBLISHED: totals(rows), OWN: totals(own)}
    about = made_on(templates=len(files), tokenizers=tokenizers.__version__)
    result = {"made_with": about, "summary": summary, "generation_tags": tagged, "fastchat": rendered}
    write_results(options.out, {**result, "rows": [*own, *rows]})
    print(json.dumps({key: result[key] for key in ("generation_tags", "fastchat")}, indent=1), table(result), sep="\n")


if __name__ == "__main__":
    script(main)
