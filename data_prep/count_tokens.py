"""Count tokens and pairs of tokens, to draft from: `eagle prepare RECIPE --only tokens --out FOLDER`."""

# T tokens, V vocabulary

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.read_once import open_cache
from data_prep.tokens import encode, load_tokenizer, vocab_size_of
from eagle.disk import lock_folder
from eagle.drafters.lookup.counts import Tables, save_tables, tokenizer_identity
from eagle.log import progress, script
from eagle.recipe import Recipe
from eagle.recipe.command_lines import command_line

# Tokens whose pairs are merged at a time: 40 MB.
CHUNK = 1 << 22
# Characters of a file that are tokenised at a time.
PIECE = 1 << 20

Text = tuple[Tensor, Tensor]
"""Tokens [T], and which of them [T] are counted; the others may only precede a counted one."""


def count_texts(
    texts: Iterable[Text], vocab_size: int, *, pairs: bool = True, tokenizer: str | None = None
) -> Tables:
    """Return the tables of texts, from one pass that holds only the distinct pairs and about `CHUNK` tokens.

    Args:
        texts: Tokens, and which of them are counted.
        vocab_size: The tokens of the target's vocabulary.
        pairs: Whether pairs of tokens are counted as well as single ones.
        tokenizer: The identity of the tokenizer, which the tables keep.

    Raises:
        ValueError: A token is not in the vocabulary.
    """
    singles = torch.zeros(vocab_size, dtype=torch.int64)
    keys = np.zeros(0, np.int64)
    counts = np.zeros(0, np.int64)
    for tokens, counted, ends_pair in join_texts(texts):
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise ValueError(
                f"a text holds the token {int(tokens.max())}, the target's vocabulary has {vocab_size}: the tokenizer "
                "is not this target's"
            )
        singles += torch.bincount(tokens[counted], minlength=vocab_size)
        if pairs:
            # A pair is one number, so that sorting brings equal pairs together.
            new_keys = tokens[:-1] * vocab_size + tokens[1:]
            keys, counts = add_counts(keys, counts, new_keys[ends_pair[1:]].numpy())
    first, second = np.divmod(keys, vocab_size)
    starts = torch.from_numpy(first.searchsorted(np.arange(vocab_size + 1)))
    return Tables(
        singles, starts, torch.from_numpy(second), torch.from_numpy(counts), tokenizer=tokenizer
    )


def join_texts(texts: Iterable[Text]) -> Iterator[list[Tensor]]:
    """Yield concatenated texts, about `CHUNK` tokens at a time: tokens, which of them count, and which end a pair."""
    pending: list[tuple[Tensor, Tensor, Tensor]] = []
    size = 0
    for tokens, counted in texts:
        # A text's first token ends no pair.
        ends_pair = counted & (torch.arange(len(counted)) > 0)
        pending.append((tokens, counted, ends_pair))
        size += len(tokens)
        if size >= CHUNK:
            yield [torch.cat(column) for column in zip(*pending, strict=True)]
            pending = []
            size = 0
    if pending:
        yield [torch.cat(column) for column in zip(*pending, strict=True)]


def add_counts(
    keys: np.ndarray, counts: np.ndarray, new_keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return ascending keys and how often each occurs, with those in `new_keys` added."""
    unique, unique_counts = np.unique(new_keys, return_counts=True)
    keys = np.concatenate([keys, unique])
    counts = np.concatenate([counts, unique_counts])
    # A stable sort of two ascending runs is a merge.
    order = keys.argsort(kind="stable")
    keys = keys[order]
    counts = counts[order]
    firsts = np.flatnonzero(np.diff(keys, prepend=-1))
    if len(firsts):
        counts = np.add.reduceat(counts, firsts)
    return keys[firsts], counts


def read_file_texts(files: Iterable[Path], tokenizer: Any) -> Iterator[Text]:
    """Yield the pieces of plain text files; every token is counted, and no pair reaches into the next file."""
    for file in files:
        last = torch.zeros(0, dtype=torch.long)
        size = file.stat().st_size
        for piece in progress(
            pieces(file), file.name, size, unit="bytes", size=lambda text: len(text.encode())
        ):
            tokens = torch.cat([last, encode(piece, tokenizer)[0]])
            # The last token of the piece before is counted already; here it only begins a pair.
            yield tokens, torch.arange(len(tokens)) >= len(last)
            last = tokens[-1:]


def pieces(file: Path) -> Iterator[str]:
    """Yield a file in pieces that end with a line, where lines are not longer than a piece."""
    rest = ""
    with file.open(encoding="utf-8", newline="") as stream:
        try:
            while part := stream.read(PIECE):
                rest += part
                end = rest.rfind("\n") + 1 or len(rest)
                yield rest[:end]
                rest = rest[end:]
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is no text in UTF-8: {error}; convert it, as by iconv"
            ) from error
    if rest:
        yield rest


def report(tables: Tables) -> str:
    """Return lines with the tokens and pairs that were counted, and the most frequent token's count."""
    distinct = int((tables.singles > 0).sum())
    max_count = int(tables.singles.max())
    text = f"{tables.tokens} tokens counted, {distinct} distinct of {tables.vocab_size}, one of them {max_count} times"
    if len(tables.counts):
        pairs = int(tables.counts.sum())
        once = int((tables.counts == 1).sum())
        text += f"\n{pairs} pairs, {len(tables.counts)} distinct, {once} of them seen once"
    return text


def main(argv: list[str]) -> None:
    """Count the tokens, save the tables, and print what was counted."""
    parser = command_line("eagle prepare --only tokens", __doc__)
    parser.add_argument(
        "--out", required=True, help="the folder to write, such as runs/tiny/bigram"
    )
    parser.add_argument(
        "--kind",
        choices=("bigram", "unigram"),
        default="bigram",
        help="count pairs of tokens, or only single tokens (default: bigram)",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        help="count plain text files instead of the recipe's conversations",
    )
    args = parser.parse_intermixed_args(argv)
    recipe = Recipe.load(args.recipe, args.overrides)
    absent = [str(file) for file in args.text or () if not file.is_file()]
    if absent:
        raise ValueError(f"no text at {', '.join(absent)}: expected plain text files")
    tokenizer = load_tokenizer(recipe)
    lines = []
    texts: Iterable[Text]
    if args.text:
        texts = read_file_texts(args.text, tokenizer)
    else:
        # Of conversations the assistant's tokens are counted, as only these are drafted.
        examples = open_cache(recipe)
        texts = ((example.tokens, example.loss_mask) for example in examples)
        lines.append(examples.tally.table())
    with lock_folder(args.out):
        tables = count_texts(
            texts,
            vocab_size_of(recipe.target.path, recipe.target.revision),
            pairs=args.kind == "bigram",
            tokenizer=tokenizer_identity(tokenizer),
        )
        save_tables(args.out, tables, args.kind)
    print(*lines, report(tables), f"the tables are in {args.out}", sep="\n")


if __name__ == "__main__":
    script(main)
