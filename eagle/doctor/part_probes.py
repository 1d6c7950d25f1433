"""Probes of what only some networks have, as heads declare it in `parts`; and of parts that may do nothing."""

# H width, L taps

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import combinations, permutations
from typing import Any

import torch

from eagle.doctor.changes import Change, map_tensors, reorder_blocks, set_setting, set_taps, swap_rows, swap_tensors
from eagle.doctor.wiring import Wiring, find_tensors
from eagle.target.target import Target

Found = Iterator[tuple[str, str, Change]]  # kind, fault and change
ABLATION = "ablation"
BRANCHES = {"mlp.down_proj": "MLP", "self_attn.o_proj": "attention"}  # what adds to a residual stream, in its last part
LAST = 4  # tokens at the end of a vocabulary, where those stand that no text has
MOST_TOKENS = 24  # that are tried in place of a mask token


def probe_tap_order(head: Any, wiring: Wiring, target: Target) -> Found:
    names, count = head.parts.by_tap, len(head.taps)
    if not names or count < 2:
        return
    for order in list_orders(count):
        if "fc.weight" in names:
            change = map_tensors(find_tensors(head, "fc.weight"), partial(reorder_blocks, order=order))
            yield "tap order", f"the blocks of fc stand in the order {list(order)} of the layers", change
        if names != ("fc.weight",):  # else the same as with another order of fc
            taps = tuple(head.taps[order.index(place)] for place in range(count))
            yield "tap order", f"layer ids {list(head.taps)} are out of order: {list(taps)} was meant", set_taps(taps)


def list_orders(count: int) -> list[tuple[int, ...]]:
    """All other orders of up to three; of more those with two exchanged, turned round, or reversed."""
    usual = tuple(range(count))
    if count <= 3:
        return [order for order in permutations(usual) if order != usual]
    orders = [usual[::-1], *(usual[shift:] + usual[:shift] for shift in range(1, count))]
    for first, second in combinations(usual, 2):
        order = list(usual)
        order[first], order[second] = second, first
        orders.append(tuple(order))
    return list(dict.fromkeys(orders))


def probe_halves(head: Any, wiring: Wiring, target: Target) -> Found:
    for names in head.parts.halves:
        short = [name.split(".")[-2].removesuffix("_proj") for name in names]
        verb = "takes" if len(short) == 1 else "take"
        what = "eh_proj" if short == ["eh"] else " and ".join(filter(None, [", ".join(short[:-1]), short[-1]]))
        given, expected = ("state; embedding", "embedding; state")[:: -1 if reads_state_first(head) else 1]
        fault = f"{what} {verb} [{given}], expected [{expected}]"
        yield "halves", fault, map_tensors(list(names), partial(reorder_blocks, order=(1, 0)))


def reads_state_first(head: Any) -> bool:
    """Whether a head is said to read the state before the embedding."""
    return bool(head.network.get("hidden_first", False))


def probe_alike(head: Any, wiring: Wiring, target: Target) -> Found:
    for first, second in head.parts.alike:
        fault = f"{first.removesuffix('.weight')} and {second.removesuffix('.weight')} are swapped"
        yield "alike", fault, swap_tensors([(first, second)])


def probe_tokens(head: Any, wiring: Wiring, target: Target) -> Found:
    special = getattr(target.tokenizer, "all_special_ids", None) or []
    last = range(target.vocab_size - 1, max(target.vocab_size - 1 - LAST, -1), -1)
    for name in head.parts.tokens:
        token_read = getattr(head.settings, name)
        tokens = [token for token in dict.fromkeys((*last, *special)) if 0 <= token < target.vocab_size]
        for token in [token for token in tokens if token != token_read][:MOST_TOKENS]:
            fault = f"{name} is {token_read}, expected {token}"
            yield "token", fault, set_setting(name, token)


def probe_numbered_parts(head: Any, wiring: Wiring, target: Target) -> Found:
    # blocks of a stack, or a part for each level; norms are asked about one by one
    shapes: dict[tuple[str, str], dict[str, torch.Size]] = {}
    for name, tensor in head.named_parameters():
        if numbered := re.match(r"(.*?)\.(\d+)\.(.*)", name):
            shapes.setdefault((numbered[1], numbered[2]), {})[numbered[3]] = tensor.shape
    alike: dict[tuple[str, str], dict[str, list[tuple[str, str]]]] = {}  # by numbers and stack, the pairs of tensors
    for ((stack, first), parts), ((other, second), others) in combinations(shapes.items(), 2):
        if stack == other and parts == others:
            pairs = [(f"{stack}.{first}.{part}", f"{stack}.{second}.{part}") for part in parts]
            alike.setdefault((first, second), {})[stack] = pairs
            if max(map(len, parts.values())) > 1:
                yield "numbered parts", f"{stack}.{first} and {stack}.{second} are swapped", swap_tensors(pairs)
    for (first, second), stacks in alike.items():
        if len(stacks) > 1:
            fault = f"{first} and {second} are swapped in all of {', '.join(stacks)}"
            yield "numbered parts", fault, swap_tensors([pair for pairs in stacks.values() for pair in pairs])


def probe_rows(head: Any, wiring: Wiring, target: Target) -> Found:
    # as where a joint matrix is cut into queries, keys and values by another split than it was made with
    for first, second in combinations(("q", "k", "v"), 2):
        ours, theirs = (find_tensors(head, f"self_attn.{part}_proj.weight") for part in (first, second))
        for one, other in zip(ours, theirs, strict=False):
            rows, fewer = (len(head.get_parameter(name)) for name in (one, other))
            count = fewer if rows > fewer else fewer // 2
            for start in range(0, rows - count + 1, count):
                at = start if rows == fewer else 0
                rows_of = (f"{begin} to {begin + count - 1} of {name}" for begin, name in ((start, one), (at, other)))
                fault = f"rows {' and '.join(rows_of)} are swapped"
                yield "rows", fault, swap_rows(one, other, (start, at), count)


def probe_branches(head: Any, wiring: Wiring, target: Target) -> Found:
    for ending, what in BRANCHES.items():
        for name in find_tensors(head, f"{ending}.weight"):
            block = name.removesuffix(f".{ending}.weight")
            yield ABLATION, f"the {what} of {block} does nothing that helps", map_tensors([name], torch.zeros_like)
