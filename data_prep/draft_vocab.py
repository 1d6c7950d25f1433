"""The tokens that a head may say: `python -m data_prep.draft_vocab RECIPE [key=value ...] --size D --out PATH`."""

# D draft vocabulary, V target vocabulary

from __future__ import annotations

import json
from collections.abc import Iterable

from torch import Tensor

from data_prep.tokens import load_tokenizer, tokenize_data
from eagle.data.examples import Example, most_frequent, token_counts
from eagle.data.identity import data_identity, folder_of
from eagle.drafters.parts.reduced_vocab import save_draft_vocab
from eagle.log import script
from eagle.recipe import Recipe, TargetSection, command_line


def counts_of(examples: Iterable[Example], vocab_size: int) -> Tensor:
    """[V], how often each token is supervised."""
    return token_counts((example.tokens[example.loss_mask] for example in examples), vocab_size)


def coverage(counts: Tensor, size: int) -> float:
    """The share of supervised tokens that the `size` most frequent ones make up."""
    return float(counts[most_frequent(counts, size)].sum() / counts.sum())


def vocab_size_of(target: TargetSection) -> int:
    """The rows of the target's LM head by its config, which may be more than its tokenizer knows."""
    config = json.loads((folder_of(target.path, target.revision, ("config.json",)) / "config.json").read_text())
    size = config.get("text_config", config).get("vocab_size")
    if not isinstance(size, int):
        raise ValueError(f"the config of {target.path} has vocab_size {size!r}, expected a number")
    return size


def report(counts: Tensor, size: int) -> str:
    """How much of what is supervised this size, and others beside it, can say."""
    vocab_size, distinct = len(counts), int((counts > 0).sum())
    sizes = sorted({size, *(max(1, vocab_size // part) for part in (16, 8, 4, 2))})
    lines = [f"{counts.sum()} supervised tokens, {distinct} distinct of {vocab_size}"]
    lines += [f"{each:>9} tokens cover {coverage(counts, each):8.3%}{' <-' * (each == size)}" for each in sizes]
    if distinct < size:
        lines.append(f"only {distinct} tokens occur: the other {size - distinct} are the lowest ids that do not")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Count, choose, write and say how much is covered."""
    parser = command_line("data_prep.draft_vocab", __doc__)
    parser.add_argument("--size", type=int, required=True, help="tokens that the head may say")
    parser.add_argument("--out", required=True, help="the file to write, as runs/tiny/draft_vocab.safetensors")
    said = parser.parse_intermixed_args(argv)
    recipe = Recipe.load(said.recipe, said.overrides)
    examples, tally = tokenize_data(recipe, load_tokenizer(recipe))
    counts = counts_of(examples, vocab_size_of(recipe.target))
    save_draft_vocab(said.out, counts, said.size, data_identity(recipe))
    print(tally.table(), report(counts, said.size), f"the draft vocabulary is in {said.out}", sep="\n")


if __name__ == "__main__":
    script(main)
