"""What an EAGLE-3 step cannot do without."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """The sizes of a head that reads three states of its target."""

    vocab: int  # that it can draft
    width: int
    mlp: int
    heads: int
    key_heads: int
    head_width: int


def anchors(supervised: list[bool], steps: int) -> list[tuple[int, int]]:
    """Each slot that is trained, and how many of its steps count: a step does if it and all before it are supervised.

    Slot i names token i + 2, and token i + 2 + s in step s.
    """
    ahead = [0] * (len(supervised) + 1)  # how many supervised tokens lie one behind the other from here
    for place in reversed(range(len(supervised))):
        ahead[place] = (ahead[place + 1] + 1) * supervised[place]
    return [(place - 2, min(ahead[place], steps)) for place in range(2, len(supervised)) if supervised[place]]


def necessary(shape: Shape, supervised: list[bool], steps: int, head_trained: bool) -> int:
    """The floating-point operations of all matrix products in a step with exact gradients, attention included.

    Left out is what nothing asks for: queries and all behind them where no loss is, the token's half of a projection
    twice for one token, a teacher's law twice, and gradients of what is frozen. The gain of the norm of embeddings
    follows from the gradient of the weights behind it, so embeddings need no gradient at all.
    """
    found = anchors(supervised, steps)
    known = found[-1][0] + 1  # slots whose keys are seen
    counted = sum(count for _, count in found)
    drafted = counted - len(found)  # keys of later steps
    read = len({slot + step for slot, count in found for step in range(count)})  # tokens; their states are teachers
    pairs = sum(slot + 1 + step for slot, count in found for step in range(count))  # of a query and a key
    _, width, mlp, heads, key_heads, head_width = shape
    asks, keys = width * heads * head_width, 2 * width * key_heads * head_width
    weights_alone = known * 3 * width**2 + known * keys + read * asks
    weights_and_inputs = counted * asks + (known + drafted) * keys + counted * (asks + 3 * width * mlp)
    attention = pairs * 2 * heads * head_width
    law = shape.vocab * width
    products = 2 * weights_alone + 3 * (weights_and_inputs + attention) + read * law
    return 2 * (products + (3 if head_trained else 2) * counted * law)
