"""How a model is brought to read trees: modes are tried from the cheapest on, each verified on a small tree.

There are three:

- by mask: attention sees a node's ancestors alone. Some models need more, which `extras` name;
- mixers by path: modules that keep a state, or attention that no mask steers, run over root-to-leaf paths;
- the whole model by path, with its own cache.
"""

# B sequences, P prompt tokens of the check, D width

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from eagle.target.attention import (
    attention_limits,
    can_group,
    layer_windows,
    near_limits,
    observing,
)
from eagle.target.cache import TreeCache
from eagle.target.structure import FAILURES, base_of, describe_failure
from eagle.target.trees.positions import counts_columns, first_position, table_builders

# what a mask may need, too
TABLES = "tables by position"
ORIGIN = "the model's own first position"
OFFSETS = "offsets"
UNLIMITED = "windows unused"
ROWS = "attention as rows"

NEAR = 5  # tokens after which windows and chunks of thousands begin in a first probe
LONGEST_PROBE = 4096  # tokens of a prompt that crosses a window
COPIES = 32  # of one node of the tree: a model that counts rows would give the last another position than the first
# of a state's norm: a step that differs by more has not seen all that the forward has
FORGOTTEN = 0.2
# times rounding: beyond it a model's step by one token is not its forward over a sequence
DIFFERENCE = 20.0


@dataclass(frozen=True, slots=True)
class TreeReadMode:
    """One way in which a model reads trees."""

    grouped: bool = False  # attention by `grouped_attention`, else the model's own
    # modules that keep a state read one depth at a time, else all paths at once
    levels: bool = False
    cheaper: bool = False  # both are right, and each forward takes the cheaper one
    whole: bool = False  # the whole model reads paths as rows, with its own cache
    singly: bool = False  # and rows of one token by themselves
    # half precision whose bits do not depend on rows, padding and columns
    invariant: bool = False  # attention by `invariant_attention`
    # all sums of products in fp64, where attention cannot be replaced, or not everywhere
    sums: bool = False
    extras: tuple[str, ...] = ()

    @property
    def keeps_bits(self) -> bool:
        """Whether a token's bits should not depend on what is read with it."""
        return self.invariant or self.sums

    def describe(self, *, has_mixers: bool = False) -> str:
        """Return it in words, as logs and result files name it."""
        way = "levels" if self.levels else "paths"
        if self.cheaper:
            way = "paths or levels by cost"
        if self.whole:
            steps = ", steps one by one" if self.singly else ""
            return f"the whole model over {way}{steps}"
        mixers = [f"mixers over {way}"] if has_mixers else []
        return " + ".join(["mask", *mixers, *self.extras])


def read_modes(reader: Any) -> Iterator[TreeReadMode]:
    """Yield the modes that may serve a model, from the cheapest on."""
    grouped_or_not = [True, False] if can_group(reader.original, reader.config) else [False]
    levels_or_not = [False, True] if reader.stateful else [False]
    extras = (TABLES,) if table_builders(reader.base) else ()
    for levels in levels_or_not:
        for grouped in grouped_or_not:
            yield TreeReadMode(grouped=grouped, levels=levels, extras=extras)
    if first_position(reader):
        for grouped in grouped_or_not:
            yield TreeReadMode(grouped=grouped, extras=(*extras, ORIGIN))
    # a config may name a window that the model does not apply
    if any(reader.masks.windows.values()):
        yield TreeReadMode(extras=(*extras, UNLIMITED))
    if counts_columns(reader):
        for levels in levels_or_not:
            yield TreeReadMode(levels=levels, extras=(*extras, OFFSETS))
    for levels in levels_or_not:
        yield TreeReadMode(levels=levels, extras=(*extras, ROWS))
    yield TreeReadMode(whole=True)
    yield TreeReadMode(whole=True, levels=True)
    yield TreeReadMode(whole=True, singly=True)


def choose_mode(reader: Any) -> str | None:
    """Let a reader take the cheapest mode that reads trees right.

    Right is what the untouched model's forwards over whole sequences give. Where its own steps by one token give
    something else, right is what these give, as in `generate`; the modes that read by levels take such steps.

    Returns:
        None if a mode was found, else why the first one misreads.
    """
    probe = Probe(reader)
    reasons: list[str] = []
    for follows_steps in [True] if _follows_steps(reader, probe) else [False, True]:
        reader.follows_steps = follows_steps
        for mode in read_modes(reader):
            if follows_steps and not mode.levels:
                continue
            reason = _try_mode(reader, mode, probe)
            if reason is None:
                _allow_levels_and_paths(reader, probe)
                _allow_invariant(reader, probe)
                return None
            reasons.append(reason)
    return reasons[0]


def _follows_steps(reader: Any, probe: Probe) -> bool:
    """Return whether a model's own steps by one token, as in `generate`, differ from its forward over a sequence.

    Then the steps are what trees are compared with. A layer's state may be updated otherwise by a step. A cache may
    leave out what lies before a window that the forward over a sequence does not apply, as Moshi's does.
    """
    if reader.stateful:
        return probe.steps_differ()
    with near_limits(reader.original, reader.config, NEAR) as is_far:
        return is_far and Probe(reader).steps_differ(FORGOTTEN)


def _try_mode(reader: Any, mode: TreeReadMode, probe: Probe) -> str | None:
    """Return how a reader misreads trees in this mode; None if it does not."""
    try:
        # far limits are brought near first, where a short probe crosses them
        with near_limits(reader.original, reader.config, NEAR) as is_far:
            if is_far:
                reader.set_mode(mode)
                reason = Probe(reader).find_misreading()
                if reason:
                    return reason
        if is_far or mode != reader.mode:
            reader.set_mode(mode)
    except FAILURES as error:
        return f"cannot be read by {mode.describe()} ({describe_failure(error)})"
    return probe.find_misreading()


def _allow_levels_and_paths(reader: Any, probe: Probe) -> None:
    """Let a reader choose between paths and levels by their costs, if it reads trees right by both."""
    mode = reader.mode
    if not reader.mixers.mixers or mode.levels or mode.whole or ROWS in mode.extras:
        return
    reader.set_mode(replace(mode, cheaper=True))
    if any(probe.find_misreading() for _ in reader.mixers.each_way()):
        _take_back(reader, mode, probe)


def _allow_invariant(reader: Any, probe: Probe) -> None:
    """Let a reader in half precision read so that bits do not depend on what is read together, if that is right."""
    mode = reader.mode
    if not reader.can_be_invariant or mode.whole:
        return
    attended: set[int] = set()
    reader.set_mode(replace(mode, invariant=True))
    with observing(reader.settings, lambda layer, *_: attended.add(layer)):
        is_right = _reads_right(reader, probe)
    # the other layers call kernels by themselves
    if is_right and len(attended) < reader.count_attending():
        reader.set_mode(replace(mode, invariant=True, sums=True))
        is_right = _reads_right(reader, probe)
    # as attention that chooses keys by an index
    if not is_right:
        reader.set_mode(replace(mode, grouped=False, sums=True))
        is_right = _reads_right(reader, probe)
    if not is_right:
        _take_back(reader, mode, probe)


def _take_back(reader: Any, mode: TreeReadMode, probe: Probe) -> None:
    """Read by this mode again."""
    reader.set_mode(mode)
    probe.find_misreading()  # which measures the states


def _reads_right(reader: Any, probe: Probe) -> bool:
    """Return whether a reader reads the small tree right in its mode, by each way that it may take."""
    try:
        faults = [probe.find_misreading() for _ in reader.mixers.each_way()]
    except FAILURES:
        return False
    return not any(faults)


class Probe:
    """Reads a small tree with a reader, and its paths with the untouched model.

    The tree is a root r with children a and b, of which c is a child of a, and d of b. Token e comes after d.
    """

    def __init__(self, reader: Any) -> None:
        self.reader = reader
        self.config = reader.config
        self.base = base_of(reader.original)
        dtype = reader.original.dtype  # of its layers, which may hand on states in fp32
        self.is_exact = dtype in (torch.float32, torch.float64)
        self.eps = torch.finfo(dtype).eps
        self.count = self._prompt_length()
        self.tokens = self._make_tokens(self.count)

    def find_misreading(self) -> str | None:
        """Return how hidden states of a small tree differ from the model's own over its paths; None if they agree."""
        reader = self.reader
        cache = reader.new_cache()
        try:
            expected, limit = self.read_expected()
            reader.tolerance = limit
            nodes = self.read_tree(cache)
            cache.measure()
            # and a batch of steps by one token
            if reader.mixers.mixers:
                nodes = torch.cat([nodes, self._read_roots(cache)])
                expected = torch.cat([expected, expected[[0, 0]]])
            copies = self._read_copies(cache)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            return f"fails under a tree's mask and positions ({describe_failure(error)})"
        if nodes.shape != expected.shape:
            return f"hands on {len(nodes)} states for {len(expected)} nodes: not one for each token"
        # not `>`, so that nan is a fault
        if not (nodes - expected).norm() <= limit * expected.norm():
            return "reads a small tree unlike the texts along its paths, for it masks or places tokens by itself"
        # copies of one token may differ by rounding, even where `limit` is smaller
        limit = max(limit, self.eps)
        worst = (copies - copies[0]).norm(dim=-1).max() / copies[0].norm()
        if not worst <= limit or (worst > self._copies_limit() and counts_columns(reader)):
            return "attends by the order of rows in its cache, which in a tree is not that of positions"
        return None

    def _copies_limit(self) -> float:
        """Return how far copies may be apart in a model that may count columns.

        In half precision a comparison with paths shows only large differences.
        """
        if OFFSETS in self.reader.mode.extras or self.is_exact:
            return float("inf")
        return 4 * self.eps

    def read_expected(self) -> tuple[Tensor, float]:
        """Return the true states [7, D] of nodes r, a, c and r, b, d, e, and the tolerated difference."""
        expected, limit = self._read_paths()
        if self.reader.follows_steps:
            expected = self._read_steps()
        return expected, limit

    def steps_differ(self, limit: float | None = None) -> bool:
        """Return whether the model's own step by one token gives something else than its forward over the sequence.

        The first step after the prompt is compared, for rounding adds up from there on.

        Args:
            limit: a difference that is tolerated, as a share of the state's norm; None: rounding.
        """
        try:
            expected = self._read_paths()[0][0]
            stepped = self._read_steps()[0]
            if limit is None:
                two_tokens = self.tokens[self.count :][[0, 1]][None]
                at_once = self._go_on(self._read_prompt(), two_tokens)[0][0, 0]
                rounding = max(float((at_once - expected).norm() / expected.norm()), 16 * self.eps)
                limit = DIFFERENCE * rounding
        except FAILURES:
            return False
        return bool((stepped - expected).norm() > limit * expected.norm())

    def _read_steps(self) -> Tensor:
        """Return [7, D], states of nodes r, a, c and r, b, d, e by the untouched model's own steps by one token."""
        hidden = []
        for path in ([0, 1, 3], [0, 2, 4, 5]):
            cache = self._read_prompt()
            for node in path:
                token = self.tokens[self.count + node].view(1, 1)
                states, cache = self._go_on(cache, token)
                hidden.append(states[0])
        return torch.cat(hidden)

    def _read_prompt(self) -> Any:
        """Return the untouched model's own cache after the prompt."""
        return self._go_on(None, self.tokens[None, : self.count])[1]

    def _go_on(self, cache: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """Return the untouched model's states [1, T, D] at tokens [1, T] after its own cache, and that cache."""
        name = self.reader.cache_name
        output = self.base(
            input_ids=tokens.to(self.reader.masks.device),
            use_cache=True,
            **{name: cache},
        )
        return output.last_hidden_state, getattr(output, name)

    def compare_rows(self) -> bool:
        """Return whether trees after two prompts of different lengths give the same states in a batch as alone."""
        tokens = self._make_tokens(12)
        prompts = [tokens[:7], tokens[7:10]]
        trees = tokens[10:16].view(2, 3)
        alone = [self._read_batch([prompts[i]], trees[i : i + 1]) for i in range(2)]
        expected = torch.cat(alone)
        try:
            difference = self._read_batch(prompts, trees) - expected
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            return False
        return bool(difference.norm() <= self.reader.tolerance * expected.norm())

    def _read_batch(self, prompts: list[Tensor], trees: Tensor) -> Tensor:
        """Return [B, 3 or 4, D], states of a root and two children [B, 3] after each prompt."""
        reader = self.reader
        cache_rows = list(range(len(prompts)))
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        cache = reader.new_cache()
        cache.lengths = [0] * len(prompts)
        cache.reserve(len(prompts), int(lengths.max()) + 3)
        cache.set_write_offset(cache_rows, sizes=lengths.tolist(), commits=True)
        padded = nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        # padding takes the position of the last token
        positions = torch.minimum(torch.arange(padded.shape[1])[None], lengths[:, None] - 1)
        reader(padded, positions, None, cache)
        cache.lengths = lengths.tolist()
        cache.set_write_offset(cache_rows)
        tree_mask = torch.eye(3, dtype=torch.bool).repeat(len(prompts), 1, 1)
        tree_mask[:, :, 0] = True
        hidden = reader(trees, lengths[:, None] + torch.tensor([0, 1, 1]), tree_mask, cache)
        if not reader.mixers.mixers:
            return hidden
        # and a step by one token
        cache.set_write_offset(cache_rows)
        step = reader(trees[:, :1], lengths[:, None], None, cache)
        return torch.cat([hidden, step], dim=1)

    def _make_tokens(self, count: int) -> Tensor:
        """Return [count + 6] tokens: a prompt and six new ones."""
        size = self.reader.original.get_input_embeddings().weight.shape[0]
        order = torch.randperm(min(size, 4096), generator=torch.Generator().manual_seed(0))
        # a long prompt repeats itself, so that attention to only the best few of its tokens meets ties
        indices = torch.cat([torch.arange(count) % 5, torch.arange(5, 11)])
        return order[indices % len(order)]

    def _read_paths(self) -> tuple[Tensor, float]:
        """Return [7, D], states of nodes r, a, c and r, b, d, e by plain forwards, and the tolerated difference."""
        count = self.count
        prompt = self.tokens[:count].tolist()
        r, a, b, c, d, e = self.tokens[count:].tolist()
        # the last token of the first path only makes it as long as the others; the third has d after a, which is no
        # ancestor of it
        paths = torch.tensor([[*prompt, r, a, c, e], [*prompt, r, b, d, e], [*prompt, r, a, b, d]])
        hidden = self.base(
            input_ids=paths.to(self.reader.masks.device), use_cache=False
        ).last_hidden_state
        first, second, mixed = hidden[:, count:]  # [4, D] each
        # the difference that seeing its parent's sibling would make to a node
        misread = float((mixed[3] - second[2]).norm() / second[2].norm())
        limit = max(misread / 3, 8 * self.eps)
        if self.is_exact:
            limit = max(1e-5, min(misread / 10, 1e-3))
        return torch.cat([first[:3], second]), limit

    def read_tree(self, cache: TreeCache) -> Tensor:
        """Return [7, D], states of nodes r, a, c and r, b, d of one tree, and of token e after keeping r, b, d."""
        reader = self.reader
        count = self.count
        reader.read_text(self.tokens[:count], 0, cache)
        tree_mask = torch.eye(5, dtype=torch.bool)
        tree_mask[:, 0] = tree_mask[3, 1] = tree_mask[4, 2] = True
        nodes = self.tokens[count : count + 5]
        hidden = reader.read_text(nodes, count, cache, depths=(0, 1, 1, 2, 2), tree_mask=tree_mask)[
            0
        ]
        cache.keep({0: [0, 2, 4]})
        last = reader.read_text(self.tokens[count + 5 :], count + 3, cache)[0]
        return torch.cat([hidden[[0, 1, 3, 0, 2, 4]], last])

    def _read_copies(self, cache: TreeCache) -> Tensor:
        """Return [COPIES, D], states of copies of one token at one position, after large artificial values."""
        layers: Any = cache.layers
        for layer in layers:
            # large: else a row more or less is lost in rounding
            values = layer.value_buffer.tensor[:, :, : self.count]
            values.copy_(torch.arange(values.numel()).sin().view_as(values) * 100)
        tree_mask = torch.eye(1 + COPIES, dtype=torch.bool)
        tree_mask[:, 0] = True
        root, child = self.tokens[self.count :].split(1)[:2]
        nodes = torch.cat([root, child.expand(COPIES)])
        depths = [0, *[1] * COPIES]
        return self.reader.read_text(nodes, self.count, cache, depths, tree_mask)[0, 1:]

    def _read_roots(self, cache: TreeCache) -> Tensor:
        """Return [2, D], states of token r after the prompt, read twice in a batch."""
        roots = self.tokens[self.count : self.count + 1].expand(2)
        return self.reader.read_text(
            roots, self.count, cache, [0, 0], torch.eye(2, dtype=torch.bool)
        )[0]

    def _prompt_length(self) -> int:
        """Return a prompt's length that crosses every window in the config that the masks do not handle."""
        windows = attention_limits(self.config) - {*layer_windows(self.config).values()}
        max_positions = getattr(self.config, "max_position_embeddings", None) or LONGEST_PROBE
        longest = min(LONGEST_PROBE, max_positions - COPIES - 8)
        return max([6, *(window + 2 for window in windows if window + 2 <= longest)])
