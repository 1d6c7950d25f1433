"""Tables to draft from: `python -m data_prep.count_tokens RECIPE [key=value ...] --out FOLDER [--text FILE ...]`."""

# T tokens, V vocabulary

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.conversations import Tally
from data_prep.draft_vocab import vocab_size_of
from data_prep.tokens import encode, load_tokenizer, tokenize_each
from eagle.disk import lock_folder
from eagle.drafters.parts.counts import Tables, save_tables, tokenizer_identity
from eagle.log import progress, script
from eagle.recipe import Recipe, command_line

CHUNK = 1 << 22  # tokens that wait before their pairs are merged: 40 MB
PIECE = 1 << 20  # characters of a file that are tokenised at a time

Text = tuple[Tensor, Tensor]
"""Tokens [T], and which of them [T] are counted; the others are but what a counted one may follow."""


def counted(texts: Iterable[Text], vocab_size: int, *, pairs: bool = True, tokenizer: str | None = None) -> Tables:
    """The tables of some texts, in one pass that holds the pairs found so far and a part of the texts."""
    singles = torch.zeros(vocab_size, dtype=torch.int64)
    keys = counts = np.zeros(0, np.int64)
    for tokens, said, follows in parts(texts):
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise ValueError(
                f"a text holds the token {int(tokens.max())}, the target's vocabulary has {vocab_size}: the tokenizer "
                "is not this target's"
            )
        singles += torch.bincount(tokens[said], minlength=vocab_size)
        if pairs:
            found = (tokens[:-1] * vocab_size + tokens[1:])[follows[1:]]
            keys, counts = merged(keys, counts, found.numpy())
    before, successors = np.divmod(keys, vocab_size)
    starts = torch.from_numpy(before.searchsorted(np.arange(vocab_size + 1)))
    return Tables(singles, starts, torch.from_numpy(successors), torch.from_numpy(counts), tokenizer)


def parts(texts: Iterable[Text]) -> Iterator[list[Tensor]]:
    """Texts end to end, a few million tokens at a time: tokens, which count, which end a pair (no text's first)."""
    waiting: list[tuple[Tensor, Tensor, Tensor]] = []
    size = 0
    for tokens, said in texts:
        waiting.append((tokens, said, said & (torch.arange(len(said)) > 0)))
        size += len(tokens)
        if size >= CHUNK:
            yield [torch.cat(column) for column in zip(*waiting, strict=True)]
            waiting, size = [], 0
    if waiting:
        yield [torch.cat(column) for column in zip(*waiting, strict=True)]


def merged(keys: np.ndarray, counts: np.ndarray, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ascending keys and how often tokenize_each was found, once those in `found` are counted too."""
    new, times = np.unique(found, return_counts=True)
    keys, counts = np.concatenate([keys, new]), np.concatenate([counts, times])
    order = keys.argsort(kind="stable")  # of two ascending runs: that is to merge them
    keys, counts = keys[order], counts[order]
    firsts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[firsts], np.add.reduceat(counts, firsts) if len(firsts) else counts


def said_in_conversations(recipe: Recipe, tokenizer: Any, tally: Tally) -> Iterator[Text]:
    """The recipe's training examples; what the assistant said is counted, as that is what is drafted."""
    for _, examples in tokenize_each(recipe, tokenizer, tally):
        yield from ((example.tokens, example.loss_mask) for example in examples)
    if not tally.kept:
        raise ValueError(f"nothing is said in {recipe.data.train}; what became of its records:\n{tally.table()}")


def said_in_files(files: Iterable[Path], tokenizer: Any) -> Iterator[Text]:
    """Plain text files, piece by piece; every token is counted, and no pair reaches from one file into the next."""
    for file in files:
        last = torch.zeros(0, dtype=torch.long)
        size = file.stat().st_size
        for piece in progress(pieces(file), file.name, size, unit="bytes", size=lambda text: len(text.encode())):
            tokens = encode(piece, tokenizer)[0]
            told = torch.cat([last, tokens])
            yield told, torch.arange(len(told)) >= len(last)  # the last token of the piece before is counted already
            last = told[-1:]


def pieces(file: Path) -> Iterator[str]:
    """A file in parts that end with a line, where lines are not longer than a part."""
    rest = ""
    with file.open(encoding="utf-8", newline="") as opened:
        try:
            while part := opened.read(PIECE):
                rest += part
                end = rest.rfind("\n") + 1 or len(rest)
                yield rest[:end]
                rest = rest[end:]
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is no text in UTF-8: {error}; convert it, as by iconv") from error
    if rest:
        yield rest


def report(tables: Tables) -> str:
    """What was counted, and what is said most."""
    distinct, most = int((tables.singles > 0).sum()), int(tables.singles.max())
    lines = [f"{tables.tokens} tokens counted, {distinct} distinct of {tables.vocab_size}, one of them {most} times"]
    if len(tables.counts):
        pairs, once = int(tables.counts.sum()), int((tables.counts == 1).sum())
        lines.append(f"{pairs} pairs, {len(tables.counts)} distinct, {once} of them seen once")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Count, write and say what was counted."""
    parser = command_line("data_prep.count_tokens", __doc__)
    parser.add_argument("--out", required=True, help="the folder to write, as runs/tiny/bigram")
    parser.add_argument("--kind", choices=("bigram", "unigram"), default="bigram")
    parser.add_argument("--text", nargs="+", type=Path, help="plain text files, instead of the recipe's conversations")
    said = parser.parse_intermixed_args(argv)
    recipe, tally = Recipe.load(said.recipe, said.overrides), Tally()
    if absent := [str(file) for file in said.text or () if not file.is_file()]:
        raise ValueError(f"no text at {', '.join(absent)}: expected plain text files")
    tokenizer = load_tokenizer(recipe)
    texts = said_in_files(said.text, tokenizer) if said.text else said_in_conversations(recipe, tokenizer, tally)
    options = {"pairs": said.kind == "bigram", "tokenizer": tokenizer_identity(tokenizer)}
    with lock_folder(said.out):
        tables = counted(texts, vocab_size_of(recipe.target), **options)
        save_tables(said.out, tables, said.kind)
    print(*([] if said.text else [tally.table()]), report(tables), f"the tables are in {said.out}", sep="\n")


if __name__ == "__main__":
    script(main)
