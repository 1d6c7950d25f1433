"""Learning rates, draft vocabularies and sizes of a run by the target's shape: what `eagle init` writes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from eagle.recipe import Recipe
from recipes.forecast import Sizes

# The highest learning rate of each method at a width of 4,096, as published or as its recipes here have it.
PUBLISHED_WIDTH = 4096
PUBLISHED_RATES = {
    "eagle1": 3e-5,
    "hass": 3e-5,
    "eagle3": 5e-5,
    "mtp": 5e-5,
    "peagle": 1e-4,
    "hydra": 5e-4,
    "dflash": 6e-4,
    "dspark": 6e-4,
    "xpress": 6e-4,
    "dflash2": 6e-4,
    "lilicorr": 6e-4,
    "medusa": 1e-3,
    "mlp_speculator": 1e-3,
}
# of the comparisons on a width of 128, where 3e-3 beat 1e-3 and 6e-3 for every head
MAX_RATE = 3e-3
# what published EAGLE-3 heads draft of vocabularies of 128,256 to 201,088 tokens
MAX_DRAFT_VOCAB = 32_000
# smaller vocabularies cost a draft level little
MIN_VOCAB = 16_384
FACTOR = 3  # from the suggested rate, beyond which `--check` warns
# steps of a run that is so short that it trains best at several times the rate; measured at about 200
SHORT_RUN = 600
SHORT_FACTOR = 5


def suggest_rate(kind: str, width: int) -> float:
    """Return the learning rate for a target of this width: inverse to it, to one digit, at most `MAX_RATE`."""
    rate = PUBLISHED_RATES.get(kind, 1e-4) * PUBLISHED_WIDTH / width
    return float(f"{min(rate, MAX_RATE):.0e}")


def suggest_draft_vocab(vocab_size: int) -> int | None:
    """Return the draft vocabulary for a target of this vocabulary: a quarter in thousands; None for all tokens."""
    if vocab_size <= MIN_VOCAB:
        return None
    return min(vocab_size // 4 // 1024 * 1024, MAX_DRAFT_VOCAB)


def suggest_batch(conversations: int) -> int:
    """Return the conversations in a step: 4 to 32, and about 200 steps a pass between these limits."""
    return min(max(2 ** round(math.log2(max(conversations, 1) / 200)), 4), 32)


def suggest_epochs(tokens: int) -> int:
    """Return the passes over the data: ten, as on ShareGPT, and fewer where there is more."""
    return 10 if tokens < 100_000_000 else 4


def find_unusual(recipe: Recipe, sizes: Sizes, steps: int) -> Iterator[str]:
    """Yield a sentence for each setting that is far from what is suggested.

    Args:
        recipe: the settings.
        sizes: of the target.
        steps: the training steps of the run; a short run may take a higher rate.
    """
    # a head that goes on from another takes a lower rate
    kind = recipe.drafter.kind
    rate = recipe.train.lr
    if kind in PUBLISHED_RATES and recipe.train.init is None:
        suggested = suggest_rate(kind, sizes.hidden_size)
        factor = FACTOR if steps > SHORT_RUN else SHORT_FACTOR
        if not suggested / FACTOR <= rate <= suggested * factor:
            yield (
                f"train.lr is {rate:g}; {kind} for a width of {sizes.hidden_size:,} usually trains best near "
                f"{suggested:g}, see docs/recipes.md"
            )
    draft_vocab = getattr(recipe.drafter, "draft_vocab", None)
    if isinstance(draft_vocab, int) and 2 * draft_vocab > sizes.vocab_size:
        yield (
            f"drafter.draft_vocab is {draft_vocab:,} of {sizes.vocab_size:,} tokens: more than half saves little; "
            f"take {suggest_draft_vocab(sizes.vocab_size) or 'null'}"
        )
