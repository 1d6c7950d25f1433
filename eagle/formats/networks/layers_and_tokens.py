"""The layers that a head reads and the tokens that it can draft, as other tools write them in configs and tensors."""

# D tokens that can be drafted, V vocabulary

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from eagle.formats.reading import traps
from eagle.formats.reading.head_folder import HeadFolder
from eagle.formats.reading.target_files import TargetFiles
from eagle.formats.reading.traps import Strike, strike

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
SOME = 16  # tokens of a draft vocabulary, below which chance may look like ids

# -- layers, which configs count in two ways: inputs at the top, outputs in eagle_config ------------------------------


def choose_taps(
    head: HeadFolder, layers: int | None, wanted: tuple[int, ...] | None
) -> tuple[tuple[int, ...], list[str]]:
    """The layers whose inputs a head reads, with notes; two statements in its config must agree."""
    both = {LAYER_IDS: head.inputs, f"eagle_config.{LAYER_IDS} + 1": head.inputs_by_outputs}
    stated = {name: ids for name, ids in both.items() if ids is not None}
    if wanted is not None:
        taps, note = wanted, f"taps {wanted} as asked; config.json says {stated or 'nothing'}"
    elif len(set(stated.values())) > 1:
        raise ValueError(
            f"the layer ids disagree: {stated}. The first count inputs of layers and the others, one less, outputs: "
            "say which inputs the head was trained on, with --taps"
        )
    elif stated:
        taps = next(iter(stated.values()))
        note = f"taps {taps}, from {' and '.join(stated)}"
    elif layers is None:
        raise ValueError(
            "no layer ids in config.json: say the inputs that the head was trained on with --taps, or the target with "
            "--target, so that they become 2, the middle and the last but two, as engines take them"
        )
    else:
        taps = (2, layers // 2, layers - 3)
        note = f"no layer ids: taps {taps}, as engines take them of a target with {layers} layers"
    end = layers if layers is not None else max(taps, default=0) + 1
    if len(taps) != head.tap_count or len(set(taps)) != len(taps) or not all(-1 <= tap < end for tap in taps):
        valid = "" if layers is None else f" of 0 to {layers - 1}, the inputs of the layers of this target"
        expected = f"{head.tap_count} different ones (fc.weight reads so many){valid}"
        raise ValueError(f"the taps are {taps}, expected {expected}: use --taps")
    unsorted = "the taps are not in ascending order; vLLM would sort them and feed fc the wrong way round"
    return taps, [note] if list(taps) == sorted(taps) else [note, unsorted]


def list_wrong_ids(head: HeadFolder, target: TargetFiles | None) -> Iterator[Strike]:
    """Layer ids that contradict each other, the tensors or the target: outer ones count inputs, inner ones outputs."""
    inputs, inner = head.inputs, head.inputs_by_outputs
    if inputs and inner and inputs != inner:
        same = " (they are the same numbers, but the inner ones count outputs)" if inputs == head.outputs else ""
        yield strike(traps.IDS_DISAGREE, inputs=inputs, outputs=head.outputs, same=same)
    ids = inputs or inner
    if not ids:
        yield strike(traps.NO_IDS)
        if target and len({2, target.layers // 2, target.layers - 3}) < 3:
            yield strike(traps.USUAL_IDS, layers=target.layers)
        return
    if len(ids) != head.tap_count or len(set(ids)) != len(ids):
        yield strike(traps.IDS_COUNT, ids=ids, count=head.tap_count)
    if list(ids) != sorted(ids):
        yield strike(traps.IDS_UNSORTED, ids=ids)
    if target and not all(-1 <= layer < target.layers for layer in ids):
        yield strike(traps.IDS_OUTSIDE, ids=ids, layers=target.layers, last=target.layers - 1)


# -- tokens: `d2t`, offsets, and `t2d`, a mask ------------------------------------------------------------------------


def list_vocabulary(head: HeadFolder) -> Iterator[Strike]:
    """The faults of `d2t` and `t2d`."""
    entry, size, vocab_size = head.entry("d2t"), head.draft_vocab_size, head.shape["vocab_size"]
    if entry is None or entry.shape != (size,) or entry.dtype.is_floating_point:
        return
    offsets = head.load("d2t").long()
    if size == vocab_size:
        yield strike(traps.FULL_D2T, fatal=not head.has_block("midlayer."))
        if bool(offsets.any()):
            yield strike(traps.FULL_D2T_NOT_ZERO)
        return
    tokens, why = read_draft_tokens(offsets, vocab_size)
    if tokens is None:
        yield strike(traps.NO_OFFSETS, why=why)
        return
    if not bool((tokens.diff() > 0).all()):
        yield strike(traps.D2T_UNSORTED)
    mask = head.entry("t2d")
    if mask is not None and mask.shape == (vocab_size,):
        marked = head.load("t2d").bool()
        if not bool(marked[tokens].all()) or int(marked.sum()) != len(tokens):
            are_ids = bool(((offsets >= 0) & (offsets < vocab_size)).all()) and bool(marked[offsets].all())
            yield strike(traps.OTHER_T2D, ids=": d2t holds token ids, expected offsets" if are_ids else "")


def check_draft_vocab(head: HeadFolder) -> list[str]:
    """Refuse a draft vocabulary whose `d2t` holds no offsets, or whose `t2d` marks other tokens; else notes."""
    vocab_size = head.shape["vocab_size"]
    if head.draft_vocab_size == vocab_size:
        if "d2t" in head.names and bool(head.load("d2t").any()):
            raise ValueError(
                "d2t is not zero though the head says all tokens: correct draft_vocab_size, or leave it out"
            )
        return [f"{name} is left out: the head says all tokens" for name in ("d2t", "t2d") if name in head.names]
    tokens, why = read_draft_tokens(head.load("d2t").long(), vocab_size)
    if tokens is None:
        raise ValueError(why)
    if "t2d" in head.names and not torch.equal(marked := head.load("t2d").bool(), mark_tokens(head, tokens)):
        raise ValueError(f"t2d marks {int(marked.sum())} tokens, and not those of d2t: one of them is wrong")
    return []


def mark_tokens(head: HeadFolder, tokens: Tensor) -> Tensor:
    """[V], which tokens can be drafted."""
    return torch.zeros(head.shape["vocab_size"], dtype=torch.bool).index_fill_(0, tokens, True)


def read_draft_tokens(d2t: Tensor, vocab_size: int) -> tuple[Tensor | None, str]:
    """The tokens [D] given by offsets, or None and the reason why they cannot be offsets."""
    tokens = d2t + torch.arange(len(d2t))
    # ids rise at every place; offsets stay where two tokens that follow each other are both said, as some always are
    rises = bool((d2t.diff() > 0).all())
    if len(d2t) >= SOME and rises and bool((d2t >= 0).all()) and bool((d2t < vocab_size).all()):
        return None, "d2t holds token ids, expected offsets, id - place: subtract 0, 1, 2, ... from it"
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        return None, f"d2t leads to token {int(outside[0])} of {vocab_size}: expected offsets, id - place"
    if len(tokens.unique()) < len(tokens):
        return None, "d2t leads to some tokens twice: expected offsets, id - place, of different tokens"
    return tokens, ""
