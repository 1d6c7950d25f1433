"""Count the tables to draft from: `eagle count-tokens RECIPE [key=value ...] --out FOLDER`."""

# T tokens, V vocabulary

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.draft_vocab import vocab_size_of
from data_prep.read_once import open_cache
from data_prep.tokens import encode, load_tokenizer
from eagle.disk import lock_folder
from eagle.drafters.lookup.counts import Tables, save_tables, tokenizer_identity
from eagle.log import progress, script
from eagle.recipe import Recipe, command_line

CHUNK = 1 << 22  # tokens that wait before their pairs are merged: 40 MB
PIECE = 1 << 20  # characters of a file that are tokenised at a time

Text = tuple[Tensor, Tensor]
"""Tokens [T], and which of them [T] are counted; the others are but what a counted one may follow."""


def count_texts(texts: Iterable[Text], vocab_size: int, *, pairs: bool = True, tokenizer: str | None = None) -> Tables:
    """The tables of some texts, in one pass that holds the distinct pairs so far and a part of the texts."""
    singles = torch.zeros(vocab_size, dtype=torch.int64)
    keys = counts = np.zeros(0, np.int64)
    for tokens, counted, ends_pair in join_texts(texts):
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise ValueError(
                f"a text holds the token {int(tokens.max())}, the target's vocabulary has {vocab_size}: the tokenizer "
                "is not this target's"
            )
        singles += torch.bincount(tokens[counted], minlength=vocab_size)
        if pairs:
            new_keys = (tokens[:-1] * vocab_size + tokens[1:])[ends_pair[1:]]
            keys, counts = add_counts(keys, counts, new_keys.numpy())
    before, successors = np.divmod(keys, vocab_size)
    starts = torch.from_numpy(before.searchsorted(np.arange(vocab_size + 1)))
    return Tables(singles, starts, torch.from_numpy(successors), torch.from_numpy(counts), tokenizer)


def join_texts(texts: Iterable[Text]) -> Iterator[list[Tensor]]:
    """Texts joined, a few million tokens at a time: tokens, which count, which end a pair (not a text's first)."""
    pending: list[tuple[Tensor, Tensor, Tensor]] = []
    size = 0
    for tokens, counted in texts:
        pending.append((tokens, counted, counted & (torch.arange(len(counted)) > 0)))
        size += len(tokens)
        if size >= CHUNK:
            yield [torch.cat(column) for column in zip(*pending, strict=True)]
            pending, size = [], 0
    if pending:
        yield [torch.cat(column) for column in zip(*pending, strict=True)]


def add_counts(keys: np.ndarray, counts: np.ndarray, new_keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ascending keys and how often each occurs, with those in `new_keys` added."""
    new, times = np.unique(new_keys, return_counts=True)
    keys, counts = np.concatenate([keys, new]), np.concatenate([counts, times])
    order = keys.argsort(kind="stable")  # of two ascending runs: that is to merge them
    keys, counts = keys[order], counts[order]
    firsts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[firsts], np.add.reduceat(counts, firsts) if len(firsts) else counts


def read_file_texts(files: Iterable[Path], tokenizer: Any) -> Iterator[Text]:
    """Plain text files, piece by piece; every token is counted, and no pair reaches from one file into the next."""
    for file in files:
        last = torch.zeros(0, dtype=torch.long)
        size = file.stat().st_size
        for piece in progress(pieces(file), file.name, size, unit="bytes", size=lambda text: len(text.encode())):
            tokens = torch.cat([last, encode(piece, tokenizer)[0]])
            yield tokens, torch.arange(len(tokens)) >= len(last)  # the last token before is counted already
            last = tokens[-1:]


def pieces(file: Path) -> Iterator[str]:
    """A file in pieces that end with a line, where lines are not longer than a piece."""
    rest = ""
    with file.open(encoding="utf-8", newline="") as stream:
        try:
            while part := stream.read(PIECE):
                rest += part
                end = rest.rfind("\n") + 1 or len(rest)
                yield rest[:end]
                rest = rest[end:]
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is no text in UTF-8: {error}; convert it, as by iconv") from error
    if rest:
        yield rest


def report(tables: Tables) -> str:
    """Lines with the tokens and pairs that were counted, and the most frequent token's count."""
    distinct, most = int((tables.singles > 0).sum()), int(tables.singles.max())
    lines = [f"{tables.tokens} tokens counted, {distinct} distinct of {tables.vocab_size}, one of them {most} times"]
    if len(tables.counts):
        pairs, once = int(tables.counts.sum()), int((tables.counts == 1).sum())
        lines.append(f"{pairs} pairs, {len(tables.counts)} distinct, {once} of them seen once")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Count the tokens, save the tables, and print what was counted."""
    parser = command_line("eagle count-tokens", __doc__)
    parser.add_argument("--out", required=True, help="the folder to write, as runs/tiny/bigram")
    parser.add_argument(
        "--kind", choices=("bigram", "unigram"), default="bigram", help="pairs, or single tokens (default: bigram)"
    )
    parser.add_argument("--text", nargs="+", type=Path, help="plain text files, instead of the recipe's conversations")
    args = parser.parse_intermixed_args(argv)
    recipe = Recipe.load(args.recipe, args.overrides)
    if absent := [str(file) for file in args.text or () if not file.is_file()]:
        raise ValueError(f"no text at {', '.join(absent)}: expected plain text files")
    tokenizer = load_tokenizer(recipe)
    # of examples the assistant's tokens are counted, as those are drafted
    examples = None if args.text else open_cache(recipe)
    if examples is None:
        texts = read_file_texts(args.text, tokenizer)
    else:
        texts = ((example.tokens, example.loss_mask) for example in examples)
    options = {"pairs": args.kind == "bigram", "tokenizer": tokenizer_identity(tokenizer)}
    with lock_folder(args.out):
        tables = count_texts(texts, vocab_size_of(recipe.target), **options)
        save_tables(args.out, tables, args.kind)
    print(
        *([] if examples is None else [examples.tally.table()]),
        report(tables),
        f"the tables are in {args.out}",
        sep="\n",
    )


if __name__ == "__main__":
    script(main)
