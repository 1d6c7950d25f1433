"""The layers that a head reads and the tokens that it can draft, as other tools write them in configs and tensors."""

# D tokens that can be drafted, V vocabulary

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from eagle.formats.reading import faults
from eagle.formats.reading.faults import FoundFault, find
from eagle.formats.reading.head_folder import HeadFolder

SWITCHES = ("norm_before_residual", "fc_norm", "norm_output")  # of EAGLE-3's network
# most engines call the block so, and all of them know it by that name
MIDLAYER_NAMES = {"layers.0.*": "midlayer.*"}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MIN_VOCAB = 16  # tokens of a draft vocabulary, below which chance may look like ids

# -- layers, which configs count in two ways: inputs at the top, outputs in eagle_config ------------------------------


def choose_taps(
    head: HeadFolder, requested: tuple[int, ...] | None
) -> tuple[tuple[int, ...], list[str]]:
    """Return the layers whose inputs a head reads, with notes; two statements in its config must agree."""
    layers = head.target.layers if head.target else None
    # what the config says, by its two keys
    explicit = {}
    if head.inputs is not None:
        explicit[LAYER_IDS] = head.inputs
    if head.inputs_by_outputs is not None:
        explicit[f"eagle_config.{LAYER_IDS} + 1"] = head.inputs_by_outputs
    if requested is not None:
        taps = requested
        note = f"taps {taps} as asked; config.json says {explicit or 'nothing'}"
    elif len(set(explicit.values())) > 1:
        raise ValueError(
            f"the layer ids disagree: {explicit}. The first count inputs of layers and the others, one less, outputs: "
            "say which inputs the head was trained on, with --taps"
        )
    elif explicit:
        taps = next(iter(explicit.values()))
        note = f"taps {taps}, from {' and '.join(explicit)}"
    elif layers is None:
        raise ValueError(
            "no layer ids in config.json: say the inputs that the head was trained on with --taps, or the target with "
            "--target, so that they become 2, the middle and the last but two, as engines take them"
        )
    else:
        taps = usual_layers(layers)
        note = f"no layer ids: taps {taps}, as engines take them of a target with {layers} layers"
    _check_taps(taps, head.tap_count, layers)
    if list(taps) == sorted(taps):
        return taps, [note]
    return taps, [
        note,
        "the taps are not in ascending order; vLLM would sort them and feed fc the wrong way round",
    ]


def usual_layers(layers: int) -> tuple[int, int, int]:
    """Return the layers whose inputs EAGLE-3's own code reads, and engines where nothing else is said."""
    return 2, layers // 2, layers - 3


def _check_taps(taps: tuple[int, ...], count: int, layers: int | None) -> None:
    """Refuse taps that are not as many as the head reads, or not of this target."""
    end = max(taps, default=0) + 1
    valid = ""
    if layers is not None:
        end = layers
        valid = f" of 0 to {layers - 1}, the inputs of the layers of this target"
    # -1 is the state after the last layer
    if (
        len(taps) != count
        or len(set(taps)) != len(taps)
        or not all(-1 <= tap < end for tap in taps)
    ):
        expected = f"{count} different ones (fc.weight reads so many){valid}"
        raise ValueError(f"the taps are {taps}, expected {expected}: use --taps")


def find_wrong_ids(head: HeadFolder) -> Iterator[FoundFault]:
    """Yield layer ids that contradict each other, the tensors or the target."""
    # outer ones count inputs, inner ones outputs
    inputs = head.inputs
    by_outputs = head.inputs_by_outputs
    target = head.target
    if inputs and by_outputs and inputs != by_outputs:
        same = ""
        if inputs == head.outputs:
            same = " (they are the same numbers, but the inner ones count outputs)"
        yield find(faults.IDS_DISAGREE, inputs=inputs, outputs=head.outputs, same=same)
    ids = inputs or by_outputs
    if not ids:
        yield find(faults.NO_IDS)
        if target and len(set(usual_layers(target.layers))) < 3:
            yield find(faults.USUAL_IDS, layers=target.layers)
        return
    if len(ids) != head.tap_count or len(set(ids)) != len(ids):
        yield find(faults.IDS_COUNT, ids=ids, count=head.tap_count)
    if list(ids) != sorted(ids):
        yield find(faults.IDS_UNSORTED, ids=ids)
    if target and not all(-1 <= layer < target.layers for layer in ids):
        yield find(faults.IDS_OUTSIDE, ids=ids, layers=target.layers, last=target.layers - 1)


# -- tokens: `d2t`, offsets, and `t2d`, a mask ------------------------------------------------------------------------


def find_wrong_vocabulary(head: HeadFolder) -> Iterator[FoundFault]:
    """Yield the faults of `d2t` and `t2d`."""
    entry = head.entry("d2t")
    vocab_size = head.shape["vocab_size"]
    if entry is None or entry.shape != (head.draft_vocab_size,) or entry.dtype.is_floating_point:
        return  # which is a problem of its own
    offsets = head.load("d2t").long()  # [D]
    if head.draft_vocab_size == vocab_size:
        yield find(faults.FULL_D2T, fatal=not head.has_block("midlayer."))
        if bool(offsets.any()):
            yield find(faults.FULL_D2T_NOT_ZERO)
        return
    # ids instead of offsets are the usual mistake
    tokens, reason = read_draft_tokens(offsets, vocab_size)
    if tokens is None:
        yield find(faults.NO_OFFSETS, why=reason)
        return
    if not bool((tokens.diff() > 0).all()):
        yield find(faults.D2T_UNSORTED)
    mask = head.entry("t2d")
    if mask is not None and mask.shape == (vocab_size,):
        yield from _find_wrong_mask(head.load("t2d").bool(), tokens, offsets)


def _find_wrong_mask(mask: Tensor, tokens: Tensor, offsets: Tensor) -> Iterator[FoundFault]:
    """Yield that `t2d` [V] marks other tokens [D] than the offsets [D] lead to."""
    if bool(mask[tokens].all()) and int(mask.sum()) == len(tokens):
        return
    # offsets that are all marked themselves may be ids
    reason = ""
    if bool(((offsets >= 0) & (offsets < len(mask))).all()) and bool(mask[offsets].all()):
        reason = ": d2t holds token ids, expected offsets"
    yield find(faults.OTHER_T2D, ids=reason)


def check_draft_vocab(head: HeadFolder) -> list[str]:
    """Refuse a draft vocabulary whose `d2t` holds no offsets, or whose `t2d` marks other tokens; else return notes."""
    vocab_size = head.shape["vocab_size"]
    if head.draft_vocab_size == vocab_size:
        if "d2t" in head.names and bool(head.load("d2t").any()):
            raise ValueError(
                "d2t is not zero though the head says all tokens: correct draft_vocab_size, or leave it out"
            )
        # without a draft vocabulary both say nothing
        return [
            f"{name} is left out: the head says all tokens"
            for name in ("d2t", "t2d")
            if name in head.names
        ]
    tokens, reason = read_draft_tokens(head.load("d2t").long(), vocab_size)
    if tokens is None:
        raise ValueError(reason)
    if "t2d" in head.names:
        mask = head.load("t2d").bool()
        if not torch.equal(mask, mark_tokens(tokens, vocab_size)):
            raise ValueError(
                f"t2d marks {int(mask.sum())} tokens, and not those of d2t: one of them is wrong"
            )
    return []


def mark_tokens(tokens: Tensor, vocab_size: int) -> Tensor:
    """Return a mask [V] of the tokens that can be drafted."""
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, tokens, True)


def read_draft_tokens(d2t: Tensor, vocab_size: int) -> tuple[Tensor | None, str]:
    """Return the tokens [D] given by offsets, or None and the reason why they cannot be offsets."""
    tokens = d2t + torch.arange(len(d2t))
    # ids rise at every position; offsets stay where two tokens that follow each other are both said, as some always are
    rises = bool((d2t.diff() > 0).all())
    if (
        len(d2t) >= MIN_VOCAB
        and rises
        and bool((d2t >= 0).all())
        and bool((d2t < vocab_size).all())
    ):
        return (
            None,
            "d2t holds token ids, expected offsets, id - place: subtract 0, 1, 2, ... from it",
        )
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        return (
            None,
            f"d2t leads to token {int(outside[0])} of {vocab_size}: expected offsets, id - place",
        )
    if len(tokens.unique()) < len(tokens):
        return (
            None,
            "d2t leads to some tokens twice: expected offsets, id - place, of different tokens",
        )
    return tokens, ""
