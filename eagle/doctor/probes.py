"""What a head may have got wrong on its way here: each probe undoes one such fault and nothing else."""

# H width, D tokens that can be drafted, w of an attention head

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, permutations, product
from typing import Any

import torch
from torch import Tensor

from eagle.doctor.changes import Change, interleaved, off, on_head, ordered, setting, tapped, turning, weight
from eagle.doctor.effects import Reading
from eagle.target.target import Target

THETA = "rope_theta"
COUNTED = {1: " (outputs were counted)", -1: " (they were taken for outputs)"}  # the two conventions are one apart
GUESS = "another rope"  # of values that nothing speaks for


@dataclass(frozen=True, slots=True)
class Probe:
    """One change of a head or of what it reads, and which fault it would have undone if it helps."""

    kind: str
    fault: str
    change: Change


def probes(reading: Reading, target: Target) -> list[Probe]:
    """All that can be asked of this head."""
    head = reading.head
    reads, parts = (_taps, _pairing, _embedding), (_fused, _bias, _halves, _norms, _states, _rope, _projections)
    kinds = (*reads, *parts, _vocabulary, _dtype)
    return [Probe(*found) for kind in kinds for found in kind(head, reading, target)]


Found = Iterator[tuple[str, str, Change]]


# -- what it reads of the target --------------------------------------------------------------------------------------


def _taps(head: Any, reading: Reading, target: Target) -> Found:
    last = len(target.layers)
    if head.taps == (-1,):
        yield "final norm", "trained on the state in front of the final norm, reads the one behind it", tapped((last,))
        return
    if head.taps == (last,):
        yield "final norm", "trained on the state behind the final norm, reads the one in front of it", tapped((-1,))
        return
    at = [last if tap == -1 else tap for tap in head.taps]
    for shift in (1, -1, 2, -2):
        taps = tuple(tap + shift for tap in at)
        if min(taps) >= 0 and max(taps) <= last:
            amount = f"{abs(shift)} too {'low' if shift > 0 else 'high'}{COUNTED.get(shift, '')}"
            what = f"layer ids {list(head.taps)} are {amount}: inputs of {list(taps)} were meant"
            yield "layer ids", what, tapped(taps)
    for place, shift in product(range(len(at)), (1, -1)):
        tap = at[place] + shift
        if 0 <= tap <= last and tap not in at and len(at) > 1:
            what = f"layer id {at[place]} of {list(head.taps)} is 1 too {'low' if shift > 0 else 'high'}"
            yield "layer ids", f"{what}: the input of {tap} was meant", tapped((*at[:place], tap, *at[place + 1 :]))


def _pairing(head: Any, reading: Reading, target: Target) -> Found:
    # both could be served; a token or a state from further on would be the answer itself
    if reading.token_back == reading.state_back == 0:
        for field, what in (("token_back", "token"), ("state_back", "state")):
            change = lambda reading, field=field: replace(reading, **{field: 1})  # noqa: E731
            yield "position", f"trained with the {what} one place earlier than it is given", change


def _embedding(head: Any, reading: Reading, target: Target) -> Found:
    usual, scale = target.head.embed_scale, target.head.scale
    if scale != 1.0:
        as_target = reading.frozen.embed_scale != usual
        other = usual if as_target else usual / scale
        what = f"trained {'with' if as_target else 'without'} the target's embedding scale of {scale:g}"
        change = lambda reading: replace(reading, frozen=replace(reading.frozen, embed_scale=other))  # noqa: E731
        yield "embedding", what, change


# -- how its parts are put together -----------------------------------------------------------------------------------


def _fused(head: Any, reading: Reading, target: Target) -> Found:
    count = len(head.taps)
    if count < 2 or not hasattr(head, "fc"):
        return
    for order in permutations(range(count)) if count <= 3 else _exchanges(count):
        if order != tuple(range(count)):
            change = weight("fc.weight", partial(ordered, order=order))
            yield "fc order", f"the blocks of fc stand in the order {list(order)} of the layers", on_head(change)


def _exchanges(count: int) -> Iterator[tuple[int, ...]]:
    """Orders in which two have changed places, and the reversed one."""
    for one, other in combinations(range(count), 2):
        order = list(range(count))
        order[one], order[other] = other, one
        yield tuple(order)
    yield tuple(reversed(range(count)))


def _bias(head: Any, reading: Reading, target: Target) -> Found:
    if getattr(head.fc, "bias", None) is not None:
        change = on_head(weight("fc.bias", torch.zeros_like))
        yield "fc.bias", "fc.bias is added, but was not there in training", change


def _halves(head: Any, reading: Reading, target: Target) -> Found:
    swapped = lambda matrix: torch.cat(matrix.chunk(2, dim=1)[::-1], dim=1)  # noqa: E731
    if head.taps in ((-1,), (len(target.layers),)):
        change = on_head(weight("fc.weight", swapped))
        yield "halves", "fc takes [state; embedding], expected [embedding; state]", change
        return

    def swap(head: Any) -> None:
        for part in "qkv":
            weight(f"layers.0.self_attn.{part}_proj.weight", swapped)(head)

    yield "halves", "q, k and v take [state; embedding], expected [embedding; state]", on_head(swap)


def _norms(head: Any, reading: Reading, target: Target) -> Found:
    width = head.shape.hidden_size
    names = [name for name, part in head.named_modules() if isinstance(getattr(part, "weight", None), Tensor)
             and part.weight.shape == (width,)]  # fmt: skip
    for one, other in combinations(names, 2):

        def change(head: Any, one: str = one, other: str = other) -> None:
            first, second = (head.get_submodule(name) for name in (one, other))
            first.weight.data, second.weight.data = second.weight.data, first.weight.data

        yield "norms", f"{one} and {other} are swapped", on_head(change)
    for name in names:
        yield "norm off", f"{name} is applied, but was not there in training", on_head(off(name))

    def raised(head: Any) -> None:
        for name in names:
            head.get_submodule(name).weight.data += 1

    if names:
        yield "norm gains", "the norms' gains are offsets from 1, as Gemma's, and are taken for gains", on_head(raised)


def _states(head: Any, reading: Reading, target: Target) -> Found:
    block = head.layers[0]
    if hasattr(block, "norm_before_residual"):
        kept = not block.norm_before_residual
        change = lambda head: setattr(head.layers[0], "norm_before_residual", kept)  # noqa: E731
        yield "norm_before_residual", f"norm_before_residual is {not kept}, expected {kept}", on_head(change)
    if hasattr(head.settings, "norm_output"):
        handed = not head.settings.norm_output
        yield "norm_output", f"norm_output is {not handed}, expected {handed}", setting(norm_output=handed)


def _rope(head: Any, reading: Reading, target: Target) -> Found:
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
            yield kind, f"{has}, expected {what}", turning(values)
    for parts, back in product(("qk", "q", "k"), (False, True)):
        order, rows = "interleaved" if back else "in halves", " and ".join(parts)
        yield "rope order", f"rows of {rows} are not {order}, as rope expects them", on_head(interleaved(back, parts))


def _projections(head: Any, reading: Reading, target: Target) -> Found:
    block = head.layers[0]

    def swap(head: Any, one: str, other: str) -> None:
        first, second = head.layers[0].get_submodule(one), head.layers[0].get_submodule(other)
        first.weight.data, second.weight.data = second.weight.data, first.weight.data

    parts = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", **{part: f"self_attn.{part}_proj" for part in "qkv"}}
    pairs = [(parts[one], parts[other]) for one, other in (("gate", "up"), ("q", "k"), ("k", "v"), ("q", "v"))]
    for one, other in pairs:
        if block.get_submodule(one).weight.shape == block.get_submodule(other).weight.shape:
            change = lambda head, one=one, other=other: swap(head, one, other)  # noqa: E731
            yield "projections", f"{one} and {other} are swapped", on_head(change)
    for name in (*parts.values(), "self_attn.o_proj"):
        rows, columns = block.get_submodule(name).weight.shape
        if rows == columns:
            turned = on_head(weight(f"layers.0.{name}.weight", lambda matrix: matrix.T.contiguous()))
            yield "transposed", f"{name} is transposed", turned


# -- what it says -----------------------------------------------------------------------------------------------------


def _vocabulary(head: Any, reading: Reading, target: Target) -> Found:
    if not hasattr(head, "lm_head"):
        return
    rows = target.head.weight.data * target.head.logit_scale

    def borrowed(head: Any) -> None:
        own = rows if head.drafts is None else rows[head.drafts.clamp(0, len(rows) - 1).to(rows.device)]
        head.lm_head.weight.data = own.to(head.lm_head.weight)

    what = "its LM head fits worse than the target's own rows: it is missing, or another's"
    yield "lm_head", what, on_head(borrowed)
    if head.drafts is not None:
        for what, drafts in _vocabularies(head):
            change = lambda head, drafts=drafts: head.d2t.copy_(drafts - torch.arange(len(drafts)).to(drafts))  # noqa: E731
            yield "d2t", f"d2t {what}", on_head(change)


def _vocabularies(head: Any) -> Iterator[tuple[str, Tensor]]:
    """Other tokens that its LM head's rows may stand for."""
    held, places = head.d2t, torch.arange(len(head.d2t), device=head.d2t.device)
    if int(held.min()) >= 0 and int(held.max()) < head.shape.vocab_size and not torch.equal(held, places + held):
        yield "holds token ids, expected offsets from the row's number", held.clone()
    marked = head.t2d.nonzero()[:, 0]
    if len(marked) == len(held) and not torch.equal(marked, head.drafts):
        yield "and t2d disagree: t2d was right", marked
    for shift in (1, -1):
        drafts = (head.drafts - shift).clamp(0, head.shape.vocab_size - 1)
        yield f"is 1 too {'high' if shift > 0 else 'low'}", drafts
    if bool(head.drafts.any()) and not torch.equal(places, head.drafts):
        yield "is not this head's: its rows stand for the first tokens", places


def _dtype(head: Any, reading: Reading, target: Target) -> Found:
    stored = head.layers[0].mlp.up_proj.weight.dtype
    if stored != torch.float32:
        name = str(stored).removeprefix("torch.")
        yield "dtype", f"it loses acceptance in {name}, and would not in float32", on_head(lambda head: head.float())
