"""Possible faults of a head's conversion: each probe undoes one of them and nothing else."""

# H width, D tokens that can be drafted, w of an attention head

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn

from eagle.doctor.changes import (
    Change,
    map_tensors,
    on_head,
    reorder_rows,
    set_rope,
    set_setting,
    set_taps,
    swap_tensors,
)
from eagle.doctor.part_probes import (
    Found,
    probe_alike,
    probe_branches,
    probe_halves,
    probe_numbered_parts,
    probe_rows,
    probe_tap_order,
    probe_tokens,
)
from eagle.doctor.wiring import Wiring, draft_ids, find_tensors
from eagle.drafters.parts.decoder_block import Rotary
from eagle.target.target import Target

THETA = "rope_theta"
COUNTED = {1: " (outputs were counted)", -1: " (they were taken for outputs)"}  # the two conventions are one apart
GUESS = "another rope"  # of values that nothing speaks for
PROJECTIONS = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", **{part: f"self_attn.{part}_proj" for part in "qkv"}}


@dataclass(frozen=True, slots=True)
class Probe:
    """One change of a head or of its inputs, and the fault that it undoes."""

    kind: str
    fault: str
    change: Change


def list_probes(wiring: Wiring, target: Target) -> list[Probe]:
    """All single changes that apply to this head."""
    return [Probe(*probe) for check in CHECKS for probe in check(wiring.head, wiring, target)]


def list_missing(wiring: Wiring, target: Target) -> list[str]:
    """The probes that do not apply to this head."""
    checks = [check for check in CHECKS if next(check(wiring.head, wiring, target), None) is None]
    return [check.__name__.removeprefix("probe_").replace("_", " ") for check in checks]


def list_removals(wiring: Wiring, target: Target) -> list[Probe]:
    """The removal of each part that adds to a residual stream."""
    return [Probe(*probe) for probe in probe_branches(wiring.head, wiring, target)]


# -- what it reads of the target --------------------------------------------------------------------------------------


def probe_layer_ids(head: Any, wiring: Wiring, target: Target) -> Found:
    last = len(target.layers)
    sides = {(-1,): ("in front of", "behind", last), (last,): ("behind", "in front of", -1)}
    if head.taps in sides:
        trained, read, tap = sides[head.taps]
        yield "final norm", f"trained on the state {trained} the final norm, reads the one {read} it", set_taps((tap,))
        return
    layers = [last if tap == -1 else tap for tap in head.taps]
    for shift in (1, -1, 2, -2):
        taps = tuple(layer + shift for layer in layers)
        if min(taps) >= 0 and max(taps) <= last:
            amount = f"{abs(shift)} too {'low' if shift > 0 else 'high'}{COUNTED.get(shift, '')}"
            fault = f"layer ids {list(head.taps)} are {amount}: inputs of {list(taps)} were meant"
            yield "layer ids", fault, set_taps(taps)
    for place, shift in product(range(len(layers)), (1, -1)):
        tap = layers[place] + shift
        if 0 <= tap <= last and tap not in layers and len(layers) > 1:
            fault = f"layer id {layers[place]} of {list(head.taps)} is 1 too {'low' if shift > 0 else 'high'}"
            taps = (*layers[:place], tap, *layers[place + 1 :])
            yield "layer ids", f"{fault}: the input of {tap} was meant", set_taps(taps)


def probe_positions(head: Any, wiring: Wiring, target: Target) -> Found:
    # both could be served; a token or a state from further on would be the answer itself
    if wiring.token_back == wiring.state_back == 0:
        for field, what in (("token_back", "token"), ("state_back", "state")):
            change = lambda wiring, field=field: replace(wiring, **{field: 1})  # noqa: E731
            yield "position", f"trained with the {what} one place earlier than it is given", change


def probe_embedding(head: Any, wiring: Wiring, target: Target) -> Found:
    usual, scale = target.head.embed_scale, target.head.scale
    if wiring.frozen.embedding is not target.head.embedding:
        change = lambda wiring: replace(wiring, frozen=target.head)  # noqa: E731
        yield "embedding", "its folder's embed_tokens are not the target's, with which it drafts better", change
    elif scale != 1.0:
        as_target = wiring.frozen.embed_scale != usual
        other = usual if as_target else usual / scale
        fault = f"trained {'with' if as_target else 'without'} the target's embedding scale of {scale:g}"
        change = lambda wiring: replace(wiring, frozen=replace(wiring.frozen, embed_scale=other))  # noqa: E731
        yield "embedding", fault, change


# -- how its parts are put together -----------------------------------------------------------------------------------


def probe_fc_bias(head: Any, wiring: Wiring, target: Target) -> Found:
    if names := find_tensors(head, "fc.bias"):
        yield "fc.bias", "fc.bias is added, but was not there in training", map_tensors(names, torch.zeros_like)


def probe_norms(head: Any, wiring: Wiring, target: Target) -> Found:
    gains = [name for name, part in head.named_parameters() if part.shape == (head.shape.hidden_size,)]
    names = [name.removesuffix(".weight") for name in gains if name.endswith(".weight")]
    for first, second in combinations(names, 2):
        blocks = {found[0] for name in (first, second) if (found := re.match(r"layers\.\d+\.", name))}
        if len(blocks) > 1:
            continue  # other than whole blocks, no conversion mixes two of them up
        change = swap_tensors([(f"{first}.weight", f"{second}.weight")])
        yield "norms", f"{first} and {second} are swapped", change
    for name in names:
        change = on_head(lambda head, name=name: head.set_submodule(name, nn.Identity()))  # type: ignore[misc]
        yield "norm off", f"{name} is applied, but was not there in training", change
    if names:
        change = map_tensors([f"{name}.weight" for name in names], lambda gain: gain + 1)
        yield "norm gains", "the norms' gains are offsets from 1, as Gemma's, and are taken for gains", change


def probe_switches(head: Any, wiring: Wiring, target: Target) -> Found:
    for name, value in head.network.items():
        if value is True or value is False:
            yield name, f"{name} is {value}, expected {not value}", set_setting(name, not value)


def probe_rope(head: Any, wiring: Wiring, target: Target) -> Found:
    names = [name for name, part in head.named_modules() if isinstance(part, Rotary)]
    if not names:
        return
    own, its = dict(head.shape.rope_parameters), dict(getattr(target.config, "rope_parameters", None) or {})
    theta = own[THETA]
    wanted: list[tuple[str, str, dict[str, Any]]] = []
    if isinstance(its.get(THETA), float | int):
        wanted.append(("rope", f"that of the target: {its[THETA]:g}", {**own, THETA: its[THETA]}))
        wanted.append(("rope", "theta and scaling of the target", its))
        wanted.append(("rope", "scaled as the target's", {**its, THETA: theta}))
    wanted.append((GUESS, f"ten times lower: {theta / 10:g}", {**own, THETA: theta / 10}))
    wanted.append((GUESS, f"ten times higher: {theta * 10:g}", {**own, THETA: theta * 10}))
    wanted.append((GUESS, "no scaling", {"rope_type": "default", THETA: theta}))
    seen = [own]
    for kind, what, values in wanted:
        if values not in seen:
            seen.append(values)
            has = f"rope theta is {theta:g} ({own.get('rope_type', 'default')})"
            yield kind, f"{has}, expected {what}", set_rope(names, values)
    for parts, interleaved in product(("qk", "q", "k"), (False, True)):
        order = "interleaved" if interleaved else "in halves"
        names = [name for part in parts for name in find_tensors(head, f"{PROJECTIONS[part]}.weight")]
        change = map_tensors(names, partial(reorder_rows, width=head.shape.head_dim, interleaved=interleaved))
        yield "rope order", f"rows of {' and '.join(parts)} are not {order}, as rope expects them", change


def probe_projections(head: Any, wiring: Wiring, target: Target) -> Found:
    tensors = dict(head.named_parameters())
    for parts in (("gate", "up"), ("q", "k"), ("k", "v"), ("q", "v")):
        first, second = (PROJECTIONS[part] for part in parts)
        pairs = list(zip(*(find_tensors(head, f"{name}.weight") for name in (first, second)), strict=False))
        if pairs and all(tensors[one].shape == tensors[other].shape for one, other in pairs):
            yield "projections", f"{first} and {second} are swapped", swap_tensors(pairs)


def probe_square_matrices(head: Any, wiring: Wiring, target: Target) -> Found:
    square: dict[str, list[str]] = {}
    for name, tensor in head.named_parameters():
        if tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]:
            part = re.sub(r"(\.\d+)*(\.weight)?$", "", name)  # a list's parts are called as the list
            square.setdefault(re.sub(r"^.*\.\d+\.", "", part), []).append(name)
    for part, names in square.items():
        yield "transposed", f"{part} is transposed", map_tensors(names, lambda matrix: matrix.T.contiguous())


# -- what it says -----------------------------------------------------------------------------------------------------


def probe_lm_head(head: Any, wiring: Wiring, target: Target) -> Found:
    rows, drafts = target.head.weight.data * target.head.logit_scale, draft_ids(head)
    if drafts is not None:
        rows = rows[drafts.clamp(0, len(rows) - 1).to(rows.device)]
    tables = {name for pair in head.parts.alike for name in pair}
    names = [name for name, part in head.named_parameters() if part.shape == rows.shape and name not in tables]
    if names:
        what = "its LM head fits" if len(names) == 1 else "its LM heads fit"
        fault = f"{what} worse than the target's own rows: it is missing, or another's"
        yield "lm_head", fault, map_tensors(names, lambda matrix: rows.to(matrix))


def probe_d2t(head: Any, wiring: Wiring, target: Target) -> Found:
    drafts = draft_ids(head)
    if drafts is None:
        return
    d2t, size, places = head.get_buffer("d2t"), head.shape.vocab_size, torch.arange(len(drafts)).to(drafts)
    others: list[tuple[str, Tensor]] = []
    if int(d2t.min()) >= 0 and int(d2t.max()) < size and not torch.equal(d2t, drafts):
        others.append(("holds token ids, expected offsets from the row's number", d2t.clone()))
    for t2d in find_tensors(head, "t2d"):
        marked = head.get_buffer(t2d).nonzero()[:, 0]
        if len(marked) == len(d2t) and not torch.equal(marked, drafts):
            others.append(("and t2d disagree: t2d was right", marked))
    others += [(f"is 1 too {'high' if shift > 0 else 'low'}", (drafts - shift).clamp(0, size - 1)) for shift in (1, -1)]
    if bool(drafts.any()) and not torch.equal(places, drafts):
        others.append(("is not this head's: its rows stand for the first tokens", places))
    for what, tokens in others:
        change = on_head(lambda head, tokens=tokens: head.get_buffer("d2t").copy_(tokens - places))  # type: ignore[misc]
        yield "d2t", f"d2t {what}", change


def probe_precision(head: Any, wiring: Wiring, target: Target) -> Found:
    stored = next(head.parameters()).dtype
    if stored != torch.float32:
        fault = f"it loses acceptance in {str(stored).removeprefix('torch.')}, and would not in float32"
        yield "dtype", fault, on_head(lambda head: head.float())


CHECKS: tuple[Callable[[Any, Wiring, Target], Found], ...] = (
    probe_layer_ids,
    probe_positions,
    probe_embedding,
    probe_tap_order,
    probe_fc_bias,
    probe_halves,
    probe_alike,
    probe_tokens,
    probe_norms,
    probe_switches,
    probe_rope,
    probe_projections,
    probe_rows,
    probe_square_matrices,
    probe_numbered_parts,
    probe_lm_head,
    probe_d2t,
    probe_precision,
)
