"""Convert a checkpoint of any layout to a head of this project, with a note for every assumption."""

# D tokens that can be drafted, V vocabulary

from __future__ import annotations

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.checkpoint import load_head
from eagle.formats.networks.head_parts import LAYER_IDS, build_drafter
from eagle.formats.reading.head_folder import OWN, HeadFolder
from eagle.formats.reading.target_files import LM_HEADS, TargetFiles, borrowed_tensors, count_differing_rows

SOME = 16  # tokens of a draft vocabulary, below which chance may look like ids


def convert_head(
    head: HeadFolder, target: TargetFiles | None, taps: tuple[int, ...] | None
) -> tuple[TrainableDrafter, list[str]]:
    """The head as one of this project, with notes on all that was assumed or left out."""
    head.refuse_problems()
    notes = [*head.notes]
    if head.unknown_keys:
        notes.append(f"unknown keys of config.json, not used: {', '.join(head.unknown_keys):.400}")
    width, vocab_size = head.shape["hidden_size"], head.shape["vocab_size"]
    if target and (target.width, target.vocab_size) != (width, vocab_size):
        raise ValueError(
            f"the head is for a target {width} wide with {vocab_size} tokens, {target.path} is {target.width} wide "
            f"with {target.vocab_size}: name the right target"
        )
    taps = _choose_taps(head, target.layers if target else None, taps, notes)
    if head.layout == OWN:
        try:
            return load_head(head.path), notes
        except Exception as error:  # of many kinds: settings and sizes go through pydantic and transformers
            raise ValueError(f"{head.path} is no head of this project: {error!r:.500}") from None
    weights = _load_weights(head, target, notes)
    if not head.is_fused:
        head.switches["fc_bias"] = "fc.bias" in weights
    sizes, ours = dict(head.shape), head.shape["max_position_embeddings"]
    theirs = target.positions if target else None
    if theirs not in (None, ours) and sizes["rope_parameters"]["rope_type"] == "default":
        change = f"{ours} became {theirs}, the target's"
        notes.append(f"max_position_embeddings {change}: it changes nothing that is computed")
        sizes["max_position_embeddings"] = theirs
    drafter = build_drafter(head, taps, sizes)
    if dtypes := {weight.dtype for weight in weights.values() if weight.is_floating_point()} - {torch.float32}:
        notes.append(f"weights in {', '.join(sorted(map(str, dtypes)))}, held here in torch.float32, which is exact")
    drafter.load_state_dict(weights)
    return drafter, notes


def _choose_taps(
    head: HeadFolder, layers: int | None, asked: tuple[int, ...] | None, notes: list[str]
) -> tuple[int, ...]:
    """The layers whose inputs a head reads; two statements in its config must agree."""
    if not head.is_fused:
        if asked not in (None, (-1,)):
            raise ValueError(f"taps are {asked}, but a head with EAGLE-1's network reads (-1,): leave them out")
        return (-1,)
    both = {LAYER_IDS: head.inputs, f"eagle_config.{LAYER_IDS} + 1": head.inputs_by_outputs}
    stated = {name: ids for name, ids in both.items() if ids is not None}
    if asked is not None:
        taps = asked
        notes.append(f"taps {taps} as asked; config.json says {stated or 'nothing'}")
    elif len(set(stated.values())) > 1:
        raise ValueError(
            f"the layer ids disagree: {stated}. The first count inputs of layers and the others, one less, outputs: "
            "say which inputs the head was trained on, with --taps"
        )
    elif stated:
        taps = next(iter(stated.values()))
        notes.append(f"taps {taps}, from {' and '.join(stated)}")
    elif layers is None:
        raise ValueError(
            "no layer ids in config.json: say the inputs that the head was trained on with --taps, or the target with "
            "--target, so that they become 2, the middle and the last but two, as engines take them"
        )
    else:
        taps = (2, layers // 2, layers - 3)
        notes.append(f"no layer ids: taps {taps}, as engines take them of a target with {layers} layers")
    end = layers if layers is not None else max(taps, default=0) + 1
    if len(taps) != head.tap_count or len(set(taps)) != len(taps) or not all(-1 <= tap < end for tap in taps):
        known = "" if layers is None else f" of 0 to {layers - 1}, the inputs of the layers of this target"
        expected = f"{head.tap_count} different ones (fc.weight reads so many){known}"
        raise ValueError(f"the taps are {taps}, expected {expected}: use --taps")
    if list(taps) != sorted(taps):
        notes.append("the taps are not in ascending order; vLLM would sort them and feed fc the wrong way round")
    return taps


def _load_weights(head: HeadFolder, target: TargetFiles | None, notes: list[str]) -> dict[str, Tensor]:
    """The tensors that the head keeps; others are compared with the target's and noted."""
    borrowed = borrowed_tensors(head.is_fused)
    weights = {}
    for name in sorted(head.names):
        if name.endswith("inv_freq"):
            notes.append(f"{head.names[name]} is left out: it follows from the rotary parameters")
        elif name in borrowed:
            _compare_borrowed(head, name, target, borrowed[name], notes)
        else:
            weights[name] = head.load(name)
            if weights[name].is_floating_point() and not bool(weights[name].float().isfinite().all()):
                raise ValueError(f"{head.names[name]} holds numbers that are not finite: take an earlier checkpoint")
    bias = weights.get("fc.bias")
    if bias is not None and not bool(bias.any()):
        weights.pop("fc.bias")
        notes.append("fc.bias is all zeros and left out: it changes nothing")
    elif bias is not None and head.is_fused:
        raise ValueError("fc.bias is not zero, and EAGLE-3 has no bias in fc: no engine would add it")
    elif bias is not None and head.keys.values.get("bias") is False:
        raise ValueError("config.json: bias is false, and fc.bias is there and not zero: correct the one that is wrong")
    if head.is_fused:
        _convert_vocabulary(head, weights, notes)
    return weights


def _compare_borrowed(
    head: HeadFolder, name: str, target: TargetFiles | None, known_as: tuple[str, ...], notes: list[str]
) -> None:
    """Compare the checkpoint's copies of target tensors with the target's, which a head here borrows."""
    stored = head.names[name]
    theirs = target.matrix(known_as) if target else None
    left_out = f"{stored} is left out, heads here use the target's"
    if theirs is None:
        why = ", the target has none by that name" if target else ": no --target"
        notes.append(f"{left_out}; not compared{why}")
        return
    ours = head.load(name)
    if not ours.is_floating_point():
        raise ValueError(f"{stored} is in {ours.dtype}, expected plain weights: copy it again")
    if ours.shape != theirs.shape:
        raise ValueError(f"{stored} is {list(ours.shape)}, the target's is {list(theirs.shape)}: another target?")
    differing = count_differing_rows(ours, theirs)
    if differing and known_as is LM_HEADS:
        raise ValueError(f"{stored} differs from the target's in {differing} rows: EAGLE-1 has none of its own")
    notes.append(f"{left_out}; {f'{differing} of {len(ours)} rows DIFFER from it' if differing else 'they are equal'}")


def _convert_vocabulary(head: HeadFolder, weights: dict[str, Tensor], notes: list[str]) -> None:
    """`d2t` as offsets and `t2d` as a mask for a draft vocabulary; neither for the full vocabulary."""
    vocab_size, d2t, t2d = head.shape["vocab_size"], weights.pop("d2t", None), weights.pop("t2d", None)
    if head.draft_vocab_size == vocab_size:
        if d2t is not None and bool(d2t.any()):
            raise ValueError(
                "d2t is not zero though the head says all tokens: correct draft_vocab_size, or leave it out"
            )
        notes += [f"{name} is left out: the head says all tokens" for name in ("d2t", "t2d") if name in head.names]
        return
    assert d2t is not None
    tokens, why = read_draft_tokens(d2t.long(), vocab_size)
    if tokens is None:
        raise ValueError(why)
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[tokens] = True
    if t2d is None:
        notes.append("no t2d: made from d2t")
    elif not torch.equal(t2d.bool(), mask):
        raise ValueError(f"t2d marks {int(t2d.bool().sum())} tokens, and not those of d2t: one of them is wrong")
    weights |= {"d2t": d2t.long(), "t2d": mask}


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
