"""The layers that a head reads and the tokens that it can draft, as other tools write them in configs and tensors."""

# D tokens that can be drafted, V vocabulary

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from eagle.formats.reading import faults
from eagle.formats.reading.faults import FoundFault, report
from eagle.formats.reading.head_folder import HeadFolder

INDICES = ("d2t", "t2d")  # tensors that hold no weights
SWITCHES = ("norm_before_residual", "fc_norm", "norm_output")  # of EAGLE-3's network
JOINT_NORM = "norm_before_fc"  # another, which configs name only if it is true
INPUT_NORM = "input_norm.weight"  # [taps x H], the weights of that norm over all taps
# our name of EAGLE-3's block, and the usual name, which all engines know
MIDLAYER_NAMES = {"layers.0.*": "midlayer.*"}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MIN_VOCAB = 16  # tokens of a draft vocabulary, below which chance may look like ids

# -- layers, which configs count in two ways: inputs at the top, outputs in eagle_config ------------------------------


def choose_taps(
    head: HeadFolder, requested: tuple[int, ...] | None
) -> tuple[tuple[int, ...], list[str]]:
    """Choose the head's taps at an import: the target's layers whose inputs it reads.

    The user's choice comes first, then the config, whose two keys must agree, then what engines take by default.

    Args:
        head: The checkpoint.
        requested: The layers that the user names, if any.

    Returns:
        The taps, in the order in which `fc` reads them, and notes on them for the user.

    Raises:
        ValueError: if they are unknown or cannot be right.
    """
    layers = head.target.layers if head.target else None  # the target's number of layers
    # what the config says: at the top as inputs, in eagle_config as outputs, one less
    explicit = {}  # where the config names the layers -> their inputs
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
    """Return the layers whose inputs EAGLE-3's authors read, and engines too where a config does not name them.

    Args:
        layers: The number of the target's layers.

    Returns:
        Three layers, counted from 0: a low one, the middle one and a high one.
    """
    return 2, layers // 2, layers - 3


def _check_taps(taps: tuple[int, ...], count: int, layers: int | None) -> None:
    """Raise ValueError for taps that are not as many as the head reads, or not layers of this target.

    Args:
        taps: The layers whose inputs are read; -1 is the state after the last layer.
        count: The number of layers that the head's `fc` reads.
        layers: The number of the target's layers; None if there is no target to compare with.
    """
    # without a target any layer is accepted
    end = max(taps, default=0) + 1
    valid = ""
    if layers is not None:
        end = layers
        valid = f" of 0 to {layers - 1}, the inputs of the layers of this target"
    if (
        len(taps) != count
        or len(set(taps)) != len(taps)
        or not all(-1 <= tap < end for tap in taps)
    ):
        expected = f"{count} different ones (fc.weight reads so many){valid}"
        raise ValueError(f"the taps are {taps}, expected {expected}: use --taps")


def find_wrong_ids(head: HeadFolder) -> Iterator[FoundFault]:
    """Yield a fault for layer ids of the config that are missing, or contradict each other, the tensors or the target.

    Layer ids name the layers of the target whose states the head reads.
    """
    # ids at the top of the config count inputs of layers, those in eagle_config outputs
    inputs = head.inputs
    by_outputs = head.inputs_by_outputs
    target = head.target
    if inputs and by_outputs and inputs != by_outputs:
        same = ""  # a likely cause of the contradiction
        if inputs == head.outputs:
            same = " (they are the same numbers, but the inner ones count outputs)"
        yield report(faults.IDS_DISAGREE, inputs=inputs, outputs=head.outputs, same=same)
    ids = inputs or by_outputs
    if not ids:
        yield report(faults.NO_IDS)
        # of a target with few layers the three usual ones are not different, so engines cannot take them
        if target and len(set(usual_layers(target.layers))) < 3:
            yield report(faults.USUAL_IDS, layers=target.layers)
        return
    if len(ids) != head.tap_count or len(set(ids)) != len(ids):
        yield report(faults.IDS_COUNT, ids=ids, count=head.tap_count)
    if list(ids) != sorted(ids):
        yield report(faults.IDS_UNSORTED, ids=ids)
    if target and not all(-1 <= layer < target.layers for layer in ids):
        yield report(faults.IDS_OUTSIDE, ids=ids, layers=target.layers, last=target.layers - 1)


# -- tokens: `d2t`, offsets, and `t2d`, a mask ------------------------------------------------------------------------


def find_wrong_vocabulary(head: HeadFolder) -> Iterator[FoundFault]:
    """Yield the faults of the tensors that state the draft vocabulary, the tokens that a head can draft.

    `d2t` [D] has an offset for each draft token, its id less its index; `t2d` [V] is a mask of them. D is the number of
    draft tokens, V the whole vocabulary.
    """
    entry = head.entry("d2t")
    vocab_size = head.shape["vocab_size"]
    if entry is None or entry.shape != (head.draft_vocab_size,) or entry.dtype.is_floating_point:
        return  # reported already as a missing or wrong tensor
    offsets = head.load("d2t").long()  # [D]
    # if all tokens can be drafted, d2t is superfluous and must be zero
    if head.draft_vocab_size == vocab_size:
        # under the name `midlayer` the head may be an export for OpenVINO, which needs d2t in any case
        yield report(faults.FULL_D2T, fatal=not head.has_block("midlayer."))
        if bool(offsets.any()):
            yield report(faults.FULL_D2T_NOT_ZERO)
        return
    # the usual mistake is to write token ids in place of offsets
    tokens, reason = read_draft_tokens(offsets, vocab_size)
    if tokens is None:
        yield report(faults.NO_OFFSETS, why=reason)
        return
    if not bool((tokens.diff() > 0).all()):
        yield report(faults.D2T_UNSORTED)
    mask = head.entry("t2d")
    if mask is not None and mask.shape == (vocab_size,):
        yield from _find_wrong_mask(head.load("t2d").bool(), tokens, offsets)


def _find_wrong_mask(mask: Tensor, tokens: Tensor, offsets: Tensor) -> Iterator[FoundFault]:
    """Yield a fault if the mask `t2d` does not mark exactly the draft tokens.

    Args:
        mask: `t2d` [V], one value for each token of the vocabulary.
        tokens: [D], the ids of the draft tokens, made from the offsets.
        offsets: `d2t` [D], the id of each draft token less its index.
    """
    if bool(mask[tokens].all()) and int(mask.sum()) == len(tokens):
        return
    # if `t2d` marks the offsets themselves, they are probably token ids
    reason = ""
    if bool(((offsets >= 0) & (offsets < len(mask))).all()) and bool(mask[offsets].all()):
        reason = ": d2t holds token ids, expected offsets"
    yield report(faults.OTHER_T2D, ids=reason)


def check_draft_vocab(head: HeadFolder) -> list[str]:
    """Raise ValueError at an import if `d2t` and `t2d` cannot be right; else return notes on what is left out.

    `d2t` has the offset of each draft token, its id less its index; `t2d` is a mask of the draft tokens.
    """
    vocab_size = head.shape["vocab_size"]
    if head.draft_vocab_size == vocab_size:
        if "d2t" in head.names and bool(head.load("d2t").any()):
            raise ValueError(
                "d2t is not zero though the head says all tokens: correct draft_vocab_size, or leave it out"
            )
        # both are superfluous if every token can be drafted
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
    """Return a mask [vocab_size], true at the ids `tokens`, which are those that can be drafted: the tensor `t2d`."""
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, tokens, True)


def read_draft_tokens(d2t: Tensor, vocab_size: int) -> tuple[Tensor | None, str]:
    """Return the ids [D] of the draft tokens, made from their offsets.

    Args:
        d2t: [D], the offset of each draft token: its id less its index. D is the size of the draft vocabulary.
        vocab_size: The size of the whole vocabulary.

    Returns:
        The ids and ""; or None and the reason, for the user, why `d2t` cannot hold offsets.
    """
    tokens = d2t + torch.arange(len(d2t))
    # some tools write token ids in place of offsets. Ids rise at every index. Offsets are equal for two draft tokens
    # with consecutive ids, and any draft vocabulary of some size has such.
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


def make_vocab_tensor(head: HeadFolder, name: str, size: torch.Size) -> Tensor:
    """Return one of our tensors for an import: `d2t` as int64, `t2d` made from `d2t`, any other as the file has it.

    Args:
        head: The checkpoint.
        name: Our name of the tensor.
        size: Its size in the head that is built, which has been compared with the file already.
    """
    if name not in INDICES:
        return head.load(name)
    # draft token i is token i + offsets[i]
    offsets = head.load("d2t").long()  # [D]
    if name == "d2t":
        return offsets
    return mark_tokens(offsets + torch.arange(len(offsets)), head.shape["vocab_size"])


def may_lack_mask(head: HeadFolder, name: str) -> str:
    """Return why the tensor of this name may be absent from the file, "" if it may not: `t2d` follows from `d2t`."""
    return "no t2d: made from d2t" if name == "t2d" else ""
