"""Choose a draft vocabulary: `eagle prepare RECIPE --only draft-vocab --size D --out PATH`."""

# D draft vocabulary, V target vocabulary

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from data_prep.read_once import open_cache
from data_prep.tokens import vocab_size_of
from eagle.core.examples import Example, most_frequent, token_counts
from eagle.data.identity import data_identity
from eagle.drafters.parts.reduced_vocab import save_draft_vocab
from eagle.log import script
from eagle.recipe import Recipe
from eagle.recipe.command_lines import command_line


def counts_of(examples: Iterable[Example], vocab_size: int) -> Tensor:
    """Return how often each token is supervised, [V]."""
    return token_counts((example.tokens[example.loss_mask] for example in examples), vocab_size)


def coverage(counts: Tensor, size: int) -> float:
    """Return the fraction of supervised tokens that are among the `size` most frequent."""
    return float(counts[most_frequent(counts, size)].sum() / counts.sum())


def report(counts: Tensor, size: int) -> str:
    """Return lines that say how many supervised tokens this size covers, and others for comparison."""
    vocab_size = len(counts)
    distinct = int((counts > 0).sum())
    lines = [f"{counts.sum()} supervised tokens, {distinct} distinct of {vocab_size}"]
    for peer in sorted({size, *(max(1, vocab_size // divisor) for divisor in (16, 8, 4, 2))}):
        arrow = " <-" if peer == size else ""
        lines.append(f"{peer:>9} tokens cover {coverage(counts, peer):8.3%}{arrow}")
    if distinct < size:
        lines.append(
            f"only {distinct} tokens occur: the other {size - distinct} are the lowest ids that do not"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Count the supervised tokens, save the most frequent, and print how many they cover."""
    parser = command_line("eagle prepare --only draft-vocab", __doc__)
    parser.add_argument(
        "--size", type=int, required=True, help="number of tokens in the draft vocabulary"
    )
    parser.add_argument(
        "--out", required=True, help="the file to write, such as runs/tiny/draft_vocab.safetensors"
    )
    args = parser.parse_intermixed_args(argv)
    recipe = Recipe.load(args.recipe, args.overrides)
    examples = open_cache(recipe)
    counts = counts_of(examples, vocab_size_of(recipe.target.path, recipe.target.revision))
    save_draft_vocab(args.out, counts, args.size, data_identity(recipe))
    print(
        examples.tally.table(),
        report(counts, args.size),
        f"the draft vocabulary is in {args.out}",
        sep="\n",
    )


if __name__ == "__main__":
    script(main)
