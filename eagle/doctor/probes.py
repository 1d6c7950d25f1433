"""Possible faults of a head's conversion: each probe undoes one of them and nothing else."""

# H width, L taps, D tokens that can be drafted, w of an attention head

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations, permutations
from typing import Any

import torch
from torch import Tensor, nn

from eagle.doctor.changes import (
    Change,
    map_tensors,
    on_head,
    reorder_blocks,
    reorder_rows,
    set_rope,
    set_setting,
    set_taps,
    swap_rows,
    swap_tensors,
)
from eagle.doctor.wiring import Wiring, draft_ids, find_tensors
from eagle.drafters.parts.decoder_block import Rotary
from eagle.formats.reading.config_keys import USUAL_THETA
from eagle.target.target import Target

# What each check below yields: kind, fault and change, the fields of a `Probe`. It takes the head, the head with its
# inputs, and the target; most need only some of them.
ProbeFields = Iterator[tuple[str, str, Change]]
TensorPairs = list[tuple[str, str]]  # names of tensors that may have been exchanged

THETA = "rope_theta"
# notes on layer ids by the shift that mends them: ids of inputs and of outputs are one apart
COUNTED = {
    1: " (outputs were counted)",
    -1: " (they were taken for outputs)",
}
GUESS = "another rope"  # the kind of rope probes with values that no config suggests
ATTENTION = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
# the last matrix of each branch that adds to the residual stream
BRANCHES = {
    "mlp.down_proj": "MLP",
    "self_attn.o_proj": "attention",
}
LAST_TOKENS = 4  # of a vocabulary, which are often unused, as a mask token must be
MAX_TOKENS = 24  # that are tried as the mask token


@dataclass(frozen=True, slots=True)
class Probe:
    """One change of a head or of its inputs, and the fault that it undoes."""

    kind: str
    fault: str
    change: Change


def list_probes(wiring: Wiring, target: Target) -> list[Probe]:
    """Return a probe for each single change that applies to this head.

    A probe is a change of the head or of its inputs, and the fault of the head's conversion that it would undo.
    """
    probes = []
    for check in CHECKS:
        probes += [Probe(*found) for found in check(wiring.head, wiring, target)]
    return probes


def list_missing(wiring: Wiring, target: Target) -> list[str]:
    """Return in words the kinds of probes that do not apply to this head, such as "fc bias"."""
    checks = [check for check in CHECKS if next(check(wiring.head, wiring, target), None) is None]
    return [check.__name__.removeprefix("probe_").replace("_", " ") for check in checks]


def list_removals(wiring: Wiring) -> list[Probe]:
    """Return a probe for each branch that adds to a residual stream, an attention or an MLP, which removes it."""
    probes = []
    for ending, branch in BRANCHES.items():
        for name in find_tensors(wiring.head, f"{ending}.weight"):
            block = name.removesuffix(f".{ending}.weight")
            if block.startswith(tuple(f"{module}." for module in wiring.head.parts.choosing)):
                continue
            # with zeros in its last matrix a branch adds nothing
            fault = f"the {branch} of {block} does nothing that helps"
            probes.append(Probe("ablation", fault, map_tensors([name], torch.zeros_like)))
    return probes


# -- what it reads of the target --------------------------------------------------------------------------------------


def probe_layer_ids(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield changes of the layers whose inputs are read: all ids one or two higher or lower, or one id by one.

    Where the head reads the target's last state alone, before or after the final norm, the other one is tried.
    """
    # an id (tap) names the input of a layer: this one is the last layer's output, and -1 that after the final norm
    last = len(target.layers)
    if head.taps == (-1,):
        fault = "trained on the state in front of the final norm, reads the one behind it"
        yield "final norm", fault, set_taps((last,))
    elif head.taps == (last,):
        fault = "trained on the state behind the final norm, reads the one in front of it"
        yield "final norm", fault, set_taps((-1,))
    else:
        yield from _shift_layer_ids(head.taps, last)


def _shift_layer_ids(taps: tuple[int, ...], last: int) -> ProbeFields:
    """Yield changes to layer ids near these.

    Args:
        taps: The ids that the head reads: of layers' inputs, or -1 for the output of the final norm.
        last: The id of the last layer's output, the number of layers.
    """
    # -1 counts as the last layer's output, so that it can be shifted like the others
    layers = [last if tap == -1 else tap for tap in taps]
    for shift in (1, -1, 2, -2):
        shifted = tuple(layer + shift for layer in layers)
        if min(shifted) >= 0 and max(shifted) <= last:
            amount = f"{abs(shift)} {_too(shift)}{COUNTED.get(shift, '')}"
            fault = f"layer ids {list(taps)} are {amount}: inputs of {list(shifted)} were meant"
            yield "layer ids", fault, set_taps(shifted)
    if len(layers) == 1:
        return
    for i, layer in enumerate(layers):
        for shift in (1, -1):
            meant = layer + shift
            if 0 <= meant <= last and meant not in layers:
                fault = f"layer id {layer} of {list(taps)} is 1 {_too(shift)}: the input of {meant} was meant"
                yield "layer ids", fault, set_taps((*layers[:i], meant, *layers[i + 1 :]))


def _too(shift: int) -> str:
    """Return in words what is wrong with a number to which `shift` must be added."""
    return "too low" if shift > 0 else "too high"


def probe_positions(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield changes that feed the token, or the state, of the position before."""
    # an engine could serve both; a token or a state of a later position would be the answer itself, so it is not tried;
    # nor is a second shift, where one of them was already found to help
    if wiring.token_back == wiring.state_back == 0:
        fault = "trained with the {} one place earlier than it is given"
        yield "position", fault.format("token"), lambda wiring: replace(wiring, token_back=1)
        yield "position", fault.format("state"), lambda wiring: replace(wiring, state_back=1)


def probe_embedding(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield a change to the target's embedding where the folder brings another, else to another embedding scale."""
    borrowed = wiring.target_head
    if borrowed.embedding is not target.head.embedding:
        fault = "its folder's embed_tokens are not the target's, with which it drafts better"
        yield "embedding", fault, lambda wiring: replace(wiring, target_head=target.head)
        return
    # the factor from a row of the embedding matrix to the embedding, as Gemma has one
    scale = target.head.scale
    if scale == 1.0:
        return
    # the part of that factor which the embedding module does not apply itself
    usual = target.head.embed_scale
    if borrowed.embed_scale == usual:
        fault = f"trained without the target's embedding scale of {scale:g}"
        rescaled = replace(borrowed, embed_scale=usual / scale)
    else:
        fault = f"trained with the target's embedding scale of {scale:g}"
        rescaled = replace(borrowed, embed_scale=usual)
    yield "embedding", fault, lambda wiring: replace(wiring, target_head=rescaled)


def probe_tap_order(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield changes of the order in which the target's states are fused.

    `parts.by_tap` names the matrices with a block of columns for each state, such as fc, or lists with a module for
    each.
    """
    names = head.parts.by_tap
    if not names:
        return
    # either the columns of fc are in another order, or the layer ids are
    for order in list_orders(len(head.taps)):
        if "fc.weight" in names:
            change = map_tensors(
                find_tensors(head, "fc.weight"), partial(reorder_blocks, order=order)
            )
            yield (
                "tap order",
                f"the blocks of fc stand in the order {list(order)} of the layers",
                change,
            )
        if names != ("fc.weight",):  # else the same as with another order of fc
            taps = tuple(head.taps[order.index(i)] for i in range(len(order)))
            yield (
                "tap order",
                f"layer ids {list(head.taps)} are out of order: {list(taps)} was meant",
                set_taps(taps),
            )


def list_orders(count: int) -> list[tuple[int, ...]]:
    """Return the orders of `count` taps to try, as permutations of 0 to `count` - 1, without the usual order.

    They are all of up to three taps, else swaps of two, rotations and the reverse.
    """
    usual = tuple(range(count))
    if count <= 3:
        return list(permutations(usual))[1:]
    orders = [usual[::-1]]
    orders += [usual[shift:] + usual[:shift] for shift in range(1, count)]
    for first, second in combinations(usual, 2):
        order = list(usual)
        order[first], order[second] = second, first
        orders.append(tuple(order))
    return list(dict.fromkeys(orders))


def probe_tokens(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield changes of the mask token: to one of the last tokens of the vocabulary, or a special token.

    Heads that draft several tokens at once read it in place of tokens that are not known yet.
    """
    special = getattr(target.tokenizer, "all_special_ids", None) or []
    last = reversed(range(target.vocab_size)[-LAST_TOKENS:])
    likely = [token for token in dict.fromkeys((*last, *special)) if 0 <= token < target.vocab_size]
    # settings of this head whose value is a token id
    for name in head.parts.tokens:
        read = getattr(head.settings, name)
        meant = [token for token in likely if token != read]
        for token in meant[:MAX_TOKENS]:
            yield "token", f"{name} is {read}, expected {token}", set_setting(name, token)


# -- how its modules are put together ---------------------------------------------------------------------------------


def probe_fc_bias(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield a change that drops the bias of fc, which fuses the target's states."""
    names = find_tensors(head, "fc.bias")
    if names:
        yield (
            "fc.bias",
            "fc.bias is added, but was not there in training",
            map_tensors(names, torch.zeros_like),
        )


def probe_halves(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield changes that exchange the two halves of the columns of a matrix that reads embedding and state.

    `parts.halves` groups the names of such matrices by their common input: one change exchanges all of a group.
    """
    # the order that the head expects, then the one that its file may have
    order = [
        "embedding; state",
        "state; embedding",
    ]
    if reads_state_first(head):
        order.reverse()
    for names in head.parts.halves:
        # "q" of "layers.0.self_attn.q_proj.weight"
        short = [name.split(".")[-2].removesuffix("_proj") for name in names]
        if short == ["eh"]:
            taking = "eh_proj takes"
        elif len(short) == 1:
            taking = f"{short[0]} takes"
        else:
            taking = f"{', '.join(short[:-1])} and {short[-1]} take"
        fault = f"{taking} [{order[1]}], expected [{order[0]}]"
        yield "halves", fault, map_tensors(list(names), partial(reorder_blocks, order=(1, 0)))


def reads_state_first(head: Any) -> bool:
    """Whether a head's config says that its state comes before the embedding in joint matrices."""
    return bool(head.network.get("hidden_first", False))


def probe_alike(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield changes that exchange two tensors that the head declares easy to mix up."""
    for pair in head.parts.alike:
        names = " and ".join(name.removesuffix(".weight") for name in pair)
        yield "alike", f"{names} are swapped", swap_tensors([pair])


def probe_norms(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield changes that exchange two norms, leave one out, or read their gains as offsets from 1."""
    width = (head.shape.hidden_size,)
    gains = [
        name
        for name, gain in head.named_parameters()
        if gain.shape == width and name.endswith(".weight")
    ]
    norms = [name.removesuffix(".weight") for name in gains]
    # all norms of the head's width have one shape, so that a conversion may mix them up
    for first, second in combinations(norms, 2):
        matches = [re.match(r"layers\.\d+\.", name) for name in (first, second)]
        blocks = {match[0] for match in matches if match}
        if (
            len(blocks) < 2
        ):  # a conversion may swap whole blocks, but hardly norms of two different blocks
            change = swap_tensors([(f"{first}.weight", f"{second}.weight")])
            yield "norms", f"{first} and {second} are swapped", change
    for name in norms:
        change = on_head(lambda head, name=name: head.set_submodule(name, nn.Identity()))  # type: ignore[misc]
        yield "norm off", f"{name} is applied, but was not there in training", change
    if gains:
        fault = "the norms' gains are offsets from 1, as Gemma's, and are taken for gains"
        yield "norm gains", fault, map_tensors(gains, lambda gain: gain + 1)


def probe_switches(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield changes that negate a switch of the network, such as `norm_before_residual`."""
    for name, value in head.network.items():
        if isinstance(value, bool):
            yield name, f"{name} is {value}, expected {not value}", set_setting(name, not value)


def probe_rope(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield changes of the rotary base and scaling, and of the order of the rows that are rotated."""
    rotaries = [name for name, module in head.named_modules() if isinstance(module, Rotary)]
    if not rotaries:
        return
    current = dict(head.shape.rope_parameters)
    theta = current[THETA]
    stated = f"rope theta is {theta:g} ({current.get('rope_type', 'default')})"
    # two of these may be the same, as where the target has no scaling
    tried = [current]
    for kind, meant, rope_parameters in _list_ropes(current, target):
        # `meant` is in words
        if rope_parameters not in tried:
            tried.append(rope_parameters)
            yield kind, f"{stated}, expected {meant}", set_rope(rotaries, rope_parameters)
    # some formats interleave the two halves of each attention head that are rotated together
    for projections in ("qk", "q", "k"):
        names = []
        for projection in projections:
            names += find_tensors(head, f"{ATTENTION[projection]}.weight")
        for interleaved, order in ((False, "in halves"), (True, "interleaved")):
            change = map_tensors(
                names, partial(reorder_rows, width=head.shape.head_dim, interleaved=interleaved)
            )
            yield (
                "rope order",
                f"rows of {' and '.join(projections)} are not {order}, as rope expects them",
                change,
            )


def _list_ropes(
    current: dict[str, Any], target: Target
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield rotary parameters that a head may have been trained with: kind of probe, description, parameters.

    Those of the target come first, with its base (theta), its scaling or both; then guesses that no config suggests.
    """
    theta = current[THETA]
    of_target = dict(getattr(target.config, "rope_parameters", None) or {})
    target_theta = of_target.get(THETA)
    if isinstance(target_theta, float | int):
        yield "rope", f"that of the target: {target_theta:g}", {**current, THETA: target_theta}
        yield "rope", "theta and scaling of the target", of_target
        yield "rope", "scaled as the target's", {**of_target, THETA: theta}
    # ModelOpt may train with it whatever the target has, and export the target's
    yield GUESS, f"that of a config without one: {USUAL_THETA:g}", {**current, THETA: USUAL_THETA}
    yield GUESS, f"ten times lower: {theta / 10:g}", {**current, THETA: theta / 10}
    yield GUESS, f"ten times higher: {theta * 10:g}", {**current, THETA: theta * 10}
    yield GUESS, "no scaling", {"rope_type": "default", THETA: theta}


def probe_projections(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield changes that exchange two projections in all blocks, where their shapes are the same."""
    for first, second in (
        ("mlp.gate_proj", "mlp.up_proj"),
        ("self_attn.q_proj", "self_attn.k_proj"),
        ("self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.q_proj", "self_attn.v_proj"),
    ):
        # one pair in each block
        names = find_tensors(head, f"{first}.weight")
        pairs = list(zip(names, find_tensors(head, f"{second}.weight"), strict=False))
        if pairs and all(_shape(head, one) == _shape(head, peer) for one, peer in pairs):
            yield "projections", f"{first} and {second} are swapped", swap_tensors(pairs)


def _shape(head: Any, name: str) -> torch.Size:
    """Return the shape of the head's parameter of this name."""
    shape: torch.Size = head.get_parameter(name).shape
    return shape


def probe_rows(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield changes that exchange equally many rows of two projections (query, key, value) of one attention."""
    # a conversion may have split a joint matrix into queries, keys and values at the wrong rows
    for projection, peer_projection in combinations(ATTENTION.values(), 2):
        names = find_tensors(head, f"{projection}.weight")
        peer_names = find_tensors(head, f"{peer_projection}.weight")
        for name, peer_name in zip(names, peer_names, strict=False):
            size = len(head.get_parameter(name))
            peer_size = len(head.get_parameter(peer_name))
            # with grouped heads keys have fewer rows than queries, and all are swapped with as many query rows; of
            # matrices of one size a half is swapped
            count = peer_size if size > peer_size else peer_size // 2
            for start in range(0, size - count + 1, count):
                peer_start = start if size == peer_size else 0
                rows = f"{start} to {start + count - 1} of {name}"
                peer_rows = f"{peer_start} to {peer_start + count - 1} of {peer_name}"
                change = swap_rows(name, peer_name, (start, peer_start), count)
                yield "rows", f"rows {rows} and {peer_rows} are swapped", change


def probe_square_matrices(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield changes that transpose a square matrix, whose shape does not tell whether it was stored transposed."""
    square: dict[str, list[str]] = {}
    for name, tensor in head.named_parameters():
        if tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]:
            # matrices of all blocks, or of a list, are transposed together: "self_attn.q_proj" stands for
            # "layers.0.self_attn.q_proj.weight" and for that of all other layers
            module = re.sub(r"(\.\d+)*(\.weight)?$", "", name)
            square.setdefault(re.sub(r"^.*\.\d+\.", "", module), []).append(name)
    for module, names in square.items():
        yield (
            "transposed",
            f"{module} is transposed",
            map_tensors(names, lambda matrix: matrix.T.contiguous()),
        )


def probe_numbered_parts(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield changes that exchange two blocks of a stack, or the modules of two levels."""
    # by stack and number, as in `layers.0`, the shapes of the module's tensors
    shapes: dict[tuple[str, str], dict[str, torch.Size]] = {}
    for name, tensor in head.named_parameters():
        # "layers", "0" and "mlp.up_proj.weight"
        match = re.match(r"(.*?)\.(\d+)\.(.*)", name)
        if match:
            stack, index, rest = match.groups()
            shapes.setdefault((stack, index), {})[rest] = tensor.shape
    # by two numbers, and by a stack in which these two modules have the same shapes, the pairs of their tensors
    alike: dict[tuple[str, str], dict[str, TensorPairs]] = {}
    for (stack, first), (peer_stack, second) in combinations(shapes, 2):
        tensors = shapes[stack, first]
        if stack != peer_stack or tensors != shapes[stack, second]:
            continue
        pairs = [(f"{stack}.{first}.{name}", f"{stack}.{second}.{name}") for name in tensors]
        alike.setdefault((first, second), {})[stack] = pairs
        if (
            max(map(len, tensors.values())) > 1
        ):  # modules with vectors alone are norms, which probe_norms swaps
            yield (
                "numbered parts",
                f"{stack}.{first} and {stack}.{second} are swapped",
                swap_tensors(pairs),
            )
    for (first, second), stacks in alike.items():
        if len(stacks) > 1:
            fault = f"{first} and {second} are swapped in all of {', '.join(stacks)}"
            yield "numbered parts", fault, swap_tensors([*chain.from_iterable(stacks.values())])


# -- what it says -----------------------------------------------------------------------------------------------------


def probe_lm_head(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield a change that replaces the rows of the LM head by the target's own."""
    # [V, D] for the vocabulary and the target's width; below, only the rows of the draft vocabulary if there is one
    rows = target.head.weight.data * target.head.logit_scale
    draft_tokens = draft_ids(head)
    if draft_tokens is not None:
        rows = rows[draft_tokens.clamp(0, len(rows) - 1).to(rows.device)]
    # other tables that a head declares easy to mix up may have the shape of an LM head
    tables = {name for pair in head.parts.alike for name in pair}
    names = [
        name
        for name, tensor in head.named_parameters()
        if tensor.shape == rows.shape and name not in tables
    ]
    if names:
        what = "its LM head fits" if len(names) == 1 else "its LM heads fit"
        fault = f"{what} worse than the target's own rows: it is missing, or another's"
        yield "lm_head", fault, map_tensors(names, lambda matrix: rows.to(matrix))


def probe_d2t(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield changes of the draft vocabulary: how d2t is read, or which tokens its rows are.

    The buffer d2t holds for each row of the head's logits the offset of its token from the row's index.
    """
    draft_tokens = draft_ids(head)
    if draft_tokens is None:
        return
    d2t = head.get_buffer("d2t")
    vocab_size = head.shape.vocab_size
    row_ids = torch.arange(len(draft_tokens)).to(draft_tokens)
    # what may be wrong, and the token of each row if so
    meant: list[tuple[str, Tensor]] = []
    may_be_ids = int(d2t.min()) >= 0 and int(d2t.max()) < vocab_size
    if may_be_ids and not torch.equal(d2t, draft_tokens):
        meant.append(("holds token ids, expected offsets from the row's number", d2t.clone()))
    # t2d marks in the target's vocabulary the tokens that can be drafted
    for t2d in find_tensors(head, "t2d"):
        marked = head.get_buffer(t2d).nonzero()[:, 0]
        if len(marked) == len(d2t) and not torch.equal(marked, draft_tokens):
            meant.append(("and t2d disagree: t2d was right", marked))
    for shift in (-1, 1):
        # the clamp keeps the ends within the vocabulary
        meant.append((f"is 1 {_too(shift)}", (draft_tokens + shift).clamp(0, vocab_size - 1)))
    # not where all rows stand for token 0, or for the first tokens already
    if bool(draft_tokens.any()) and not torch.equal(row_ids, draft_tokens):
        meant.append(("is not this head's: its rows stand for the first tokens", row_ids))
    for what, tokens in meant:
        offsets = tokens - row_ids
        change = on_head(lambda head, offsets=offsets: head.get_buffer("d2t").copy_(offsets))  # type: ignore[misc]
        yield "d2t", f"d2t {what}", change


def probe_precision(head: Any, wiring: Wiring, target: Target) -> ProbeFields:
    """Yield a change that computes in float32, where the head's weights are stored in a lower precision."""
    stored = next(head.parameters()).dtype
    if stored != torch.float32:
        fault = (
            f"it loses acceptance in {str(stored).removeprefix('torch.')}, and would not in float32"
        )
        yield "dtype", fault, on_head(lambda head: head.float())


CHECKS: tuple[Callable[[Any, Wiring, Target], ProbeFields], ...] = (
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
