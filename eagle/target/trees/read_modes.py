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

# what some models need in addition to a mask
TABLES = "tables by position"
ORIGIN = "the model's own first position"
OFFSETS = "offsets"
UNLIMITED = "windows unused"
ROWS = "attention as rows"

NEAR = 5  # tokens that windows and chunks of thousands of tokens are lowered to in a first probe
LONGEST_PROBE = 4096  # the most tokens of a prompt that is to cross a window
# copies of one node in a tree: a model that counts cache columns would give the last another position than the first
COPIES = 32
# share of a state's norm: a step by one token that differs by more has not seen all tokens that the forward has seen
FORGOTTEN = 0.2
# multiple of rounding beyond which a model's step by one token is taken to differ from its forward over a sequence
DIFFERENCE = 20.0


@dataclass(frozen=True, slots=True)
class TreeReadMode:
    """One way in which a model can be made to read draft trees."""

    grouped: bool = False  # attention by `grouped_attention`, else the model's own
    # modules that keep a state read one depth of a tree at a time, else all paths at once
    levels: bool = False
    cheaper: bool = False  # levels and paths are both right, and each forward takes the cheaper one
    whole: bool = False  # the whole model reads paths as rows of a batch, with its own cache
    singly: bool = False  # with `whole`: each row of one token is read in its own forward
    # attention by `invariant_attention`: in half precision, bits do not depend on rows, padding and columns
    invariant: bool = False
    # sums of products in fp64 throughout, where not all attention can be replaced by `invariant_attention`
    sums: bool = False
    extras: tuple[str, ...] = ()  # some of the constants above

    @property
    def keeps_bits(self) -> bool:
        """Whether a token's bits should not depend on what is read with it.

        A kernel may sum in another order for other shapes, which changes rounding. This mode avoids it by attention of
        its own, or by sums in fp64.
        """
        return self.invariant or self.sums

    def describe(self, *, has_mixers: bool = False) -> str:
        """Return the mode, a way to read draft trees, in words, as logs and result files name it.

        `has_mixers`: whether the model has modules that keep a recurrent state, which run over paths or levels.
        """
        way = "levels" if self.levels else "paths"
        if self.cheaper:
            way = "paths or levels by cost"
        if self.whole:
            steps = ", steps one by one" if self.singly else ""
            return f"the whole model over {way}{steps}"
        mixers = [f"mixers over {way}"] if has_mixers else []
        return " + ".join(["mask", *mixers, *self.extras])


def read_modes(reader: Any) -> Iterator[TreeReadMode]:
    """Yield the modes that may be right for a model, the cheapest first.

    A mode is a way to read draft trees with a model that was made for sequences.

    Args:
        reader: the `TreeReader` of the model.
    """
    # attention by `grouped_attention` is cheaper than the model's own
    grouped_or_not = [True, False] if can_group(reader.original, reader.config) else [False]
    # recurrent modules read all paths at once, or one depth of the tree at a time
    levels_or_not = [False, True] if reader.stateful else [False]
    # ALiBi biases by position instead of column
    extras = (TABLES,) if table_builders(reader.base) else ()
    for levels in levels_or_not:
        for grouped in grouped_or_not:
            yield TreeReadMode(grouped=grouped, levels=levels, extras=extras)
    # models that number positions from 2, say
    if first_position(reader):
        for grouped in grouped_or_not:
            yield TreeReadMode(grouped=grouped, extras=(*extras, ORIGIN))
    # a config may name a window that the model does not apply
    if any(reader.masks.windows.values()):
        yield TreeReadMode(extras=(*extras, UNLIMITED))
    # models that compute positions from the length of their cache
    if counts_columns(reader):
        for levels in levels_or_not:
            yield TreeReadMode(levels=levels, extras=(*extras, OFFSETS))
    # attention that no mask steers runs over paths
    for levels in levels_or_not:
        yield TreeReadMode(levels=levels, extras=(*extras, ROWS))
    # the whole model runs over paths, or by depth, or row by row
    yield TreeReadMode(whole=True)
    yield TreeReadMode(whole=True, levels=True)
    yield TreeReadMode(whole=True, singly=True)


def choose_mode(reader: Any) -> str | None:
    """Set a reader's mode, a way to read trees, to the cheapest one that reads a small trial tree right.

    The reference is the untouched model's forward over each path of the tree. Where the model's own steps by one token
    differ from that, the reference is those steps, as `generate` takes them; modes by levels take such steps too.

    Args:
        reader: the `TreeReader`, which reads in the mode from then on.

    Returns:
        None if a mode was found, else why the first one misreads the tree.
    """
    probe = Probe(reader)
    reasons: list[str] = []
    # without a known difference the forward is tried as the reference first, and the steps after it
    for follows_steps in [True] if _follows_steps(reader, probe) else [False, True]:
        reader.follows_steps = follows_steps
        for mode in read_modes(reader):
            # only modes by levels take steps by one token
            if follows_steps and not mode.levels:
                continue
            reason = _try_mode(reader, mode, probe)
            if reason is None:
                # both may replace the mode by a better one
                _allow_levels_and_paths(reader, probe)
                _allow_invariant(reader, probe)
                return None
            reasons.append(reason)
    # the cheapest mode's reason tells most about the model
    return reasons[0]


def _follows_steps(reader: Any, probe: Probe) -> bool:
    """Return whether a model's own steps by one token, as in `generate`, differ from its forward over a sequence.

    Trees are then compared with the steps. A step may update a layer's state differently from a forward. A cache may
    drop tokens before a window that the forward over a sequence does not apply, as Moshi's does.
    """
    if reader.stateful:
        return probe.steps_differ()
    # attention alone: a short prompt crosses a window that is lowered to a few tokens
    with near_limits(reader.original, reader.config, NEAR) as is_far:
        return is_far and Probe(reader).steps_differ(FORGOTTEN)


def _try_mode(reader: Any, mode: TreeReadMode, probe: Probe) -> str | None:
    """Set a mode, a way to read trees, and return how a small tree is then misread; None if it is read right."""
    try:
        # windows and chunks of thousands of tokens are lowered first, so that a short probe crosses them
        with near_limits(reader.original, reader.config, NEAR) as is_far:
            if is_far:
                reader.set_mode(mode)
                reason = Probe(reader).find_misreading()
                if reason:
                    return reason
        # the modules are made again, as those above have read lowered limits
        if is_far or mode != reader.mode:
            reader.set_mode(mode)
    except FAILURES as error:
        return f"cannot be read by {mode.describe()} ({describe_failure(error)})"
    return probe.find_misreading()


def _allow_levels_and_paths(reader: Any, probe: Probe) -> None:
    """Let a reader choose in each forward between paths and levels by their costs, if trees are read right by both.

    Paths run all ways from the root to a leaf in one call of a module; levels need one call for each depth.
    """
    mode = reader.mode
    # there is no choice: no module keeps a state, or paths are wrong, or attention or the whole model runs over them
    if not reader.mixers.mixers or mode.levels or mode.whole or ROWS in mode.extras:
        return
    reader.set_mode(replace(mode, cheaper=True))
    # each_way sets the mixers (the modules that keep a state) to read by levels, then by paths
    if any(probe.find_misreading() for _ in reader.mixers.each_way()):
        _restore_mode(reader, mode, probe)


def _allow_invariant(reader: Any, probe: Probe) -> None:
    """Let a reader in half precision keep a token's bits the same whatever is read with it, if trees stay right.

    Three ways are tried: attention replaced by `invariant_attention`; the same with all other sums in fp64; and all
    sums in fp64 with the model's own attention.
    """
    mode = reader.mode
    if not reader.can_be_invariant or mode.whole:
        return
    attended: set[int] = set()  # layers whose attention was replaced
    reader.set_mode(replace(mode, invariant=True))
    # called for every layer's attention, with queries, keys and scale after the layer's index
    with observing(reader.settings, lambda layer, *_: attended.add(layer)):
        is_right = _reads_right(reader, probe)
    # layers that were not seen call kernels directly, so their sums must be in fp64
    if is_right and len(attended) < reader.count_attending():
        reader.set_mode(replace(mode, invariant=True, sums=True))
        is_right = _reads_right(reader, probe)
    # attention that chooses keys by an index cannot be replaced
    if not is_right:
        reader.set_mode(replace(mode, grouped=False, sums=True))
        is_right = _reads_right(reader, probe)
    if not is_right:
        _restore_mode(reader, mode, probe)


def _restore_mode(reader: Any, mode: TreeReadMode, probe: Probe) -> None:
    """Set a mode, a way to read trees, again that was found right, after another one was tried."""
    reader.set_mode(mode)
    # not for its result: it measures the bytes of the new modules' states and sets the tolerance
    probe.find_misreading()


def _reads_right(reader: Any, probe: Probe) -> bool:
    """Return whether a reader reads a small tree right in its mode, by levels and by paths if both may be used.

    A mode is a way to read draft trees. The probe is the trial on that tree.
    """
    try:
        faults = [probe.find_misreading() for _ in reader.mixers.each_way()]
    except FAILURES:
        return False
    return not any(faults)


class Probe:
    """A trial: a reader reads a small tree, and the untouched model reads its paths.

    The tree is a root r with children a and b. Node c is a child of a, and node d of b. Token e comes after d once path
    r, b, d is committed.
    """

    def __init__(self, reader: Any) -> None:
        """Choose the tokens of the prompt and of the tree with which a reader's modes are tried on its model.

        A mode is a way to read draft trees with the model.

        Args:
            reader: the reader, whose mode the caller sets before each trial.
        """
        self.reader = reader
        self.config = reader.config
        # the user's model without its LM head, whose own forwards give the states to compare with
        self.base = base_of(reader.original)
        dtype = reader.original.dtype  # of the layers; the states that they return may be in fp32
        # whether rounding is so small that states must agree closely; in half precision only large differences tell
        self.is_exact = dtype in (torch.float32, torch.float64)
        self.eps = torch.finfo(dtype).eps  # the relative rounding error of one operation
        self.count = self._prompt_length()  # tokens of the prompt before the tree
        # [count + 6], the prompt and then the nodes r, a, b, c, d, e
        self.tokens = self._make_tokens(self.count)

    def find_misreading(self) -> str | None:
        """Return in words how the reader misreads the small tree, compared with the model's own states; None if right.

        It also measures the bytes of the model's states, and sets the reader's tolerance.
        """
        reader = self.reader
        cache = reader.new_cache()
        try:
            # [7, D] both, the states of width D at seven nodes
            expected, limit = self.read_expected()
            reader.tolerance = limit
            nodes = self.read_tree(cache)
            cache.measure()
            # mixers must also be right in a step by one token of several rows
            if reader.mixers.mixers:
                nodes = torch.cat([nodes, self._read_root_twice(cache)])
                expected = torch.cat([expected, expected[[0, 0]]])  # node r twice
            copies = self._read_copies(cache)
        # no fault of the mode, although it is a RuntimeError
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            return f"fails under a tree's mask and positions ({describe_failure(error)})"
        if nodes.shape != expected.shape:
            return f"hands on {len(nodes)} states for {len(expected)} nodes: not one for each token"
        # not `>`, so that nan is a fault
        if not (nodes - expected).norm() <= limit * expected.norm():
            return "reads a small tree unlike the sequences along its paths, for it masks or places tokens by itself"
        # copies of one token at one position must have equal states, but for rounding, which may exceed `limit`
        limit = max(limit, self.eps)
        worst = (copies - copies[0]).norm(dim=-1).max() / copies[0].norm()
        if not worst <= limit or (worst > self._copies_limit() and counts_columns(reader)):
            return "attends by the order of rows in its cache, which in a tree is not that of positions"
        return None

    def _copies_limit(self) -> float:
        """Return how far copies of a token may differ, relative to their norm, in a model that may count cache columns.

        In half precision the comparison with paths shows only large differences, so copies must agree more closely. In
        fp32, or with right offsets, the comparison is enough. Copies are equal tokens at one position of a tree, which
        must have equal states.
        """
        if OFFSETS in self.reader.mode.extras or self.is_exact:
            return float("inf")
        return 4 * self.eps

    def read_expected(self) -> tuple[Tensor, float]:
        """Return the reference states [7, D] of nodes r, a, c and r, b, d, e, and the tolerated relative difference.

        Each is of width D. They come from the model's forward over sequences, or from its steps by one token if the
        reader follows these.
        """
        expected, limit = self._read_paths()
        if self.reader.follows_steps:
            expected = self._read_steps()
        return expected, limit

    def steps_differ(self, limit: float | None = None) -> bool:
        """Return whether the model's own step by one token differs from its forward over the sequence.

        Only the first step after the prompt is compared, as rounding adds up over later ones.

        Args:
            limit: the difference to tolerate, as a share of the state's norm; None: some multiple of rounding.
        """
        try:
            # [D], both of node r
            expected = self._read_paths()[0][0]
            stepped = self._read_steps()[0]
            if limit is None:
                # two tokens at once after the prompt differ from the forward by rounding alone
                two_tokens = self.tokens[self.count :][[0, 1]][None]  # [1, 2], nodes r and a
                at_once = self._continue_from(self._read_prompt(), two_tokens)[0][0, 0]
                rounding = max(float((at_once - expected).norm() / expected.norm()), 16 * self.eps)
                limit = DIFFERENCE * rounding
        # a model whose own steps fail has none to follow
        except FAILURES:
            return False
        return bool((stepped - expected).norm() > limit * expected.norm())

    def _read_steps(self) -> Tensor:
        """Return [7, D], states of nodes r, a, c and r, b, d, e by the untouched model's own steps by one token.

        The trial tree is a root r with children a and b; c is a child of a, d of b, and e comes after d.
        """
        hidden = []
        # paths r, a, c and r, b, d, e, as places after the prompt, where the nodes are in the order r, a, b, c, d, e
        for path in ([0, 1, 3], [0, 2, 4, 5]):
            cache = self._read_prompt()
            for node in path:
                token = self.tokens[self.count + node].view(1, 1)
                states, cache = self._continue_from(cache, token)
                hidden.append(states[0])
        return torch.cat(hidden)

    def _read_prompt(self) -> Any:
        """Return the cache, of the untouched model's own kind, after the prompt of the trial."""
        return self._continue_from(None, self.tokens[None, : self.count])[1]

    def _continue_from(self, cache: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """Run the untouched model over T tokens [1, T] with its own cache; return their states [1, T, D] and the cache.

        The model writes to the cache. With None it makes a new one.
        """
        name = self.reader.cache_name
        output = self.base(
            input_ids=tokens.to(self.reader.masks.device),
            use_cache=True,
            **{name: cache},
        )
        return output.last_hidden_state, getattr(output, name)

    def compare_rows(self) -> bool:
        """Return whether two sequences of different lengths have the same states in a batch as when read alone."""
        # prompts of 7 and 3 tokens, and a tree of three nodes for each
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
        # the tolerance that the trial of the mode has set
        return bool(difference.norm() <= self.reader.tolerance * expected.norm())

    def _read_batch(self, prompts: list[Tensor], trees: Tensor) -> Tensor:
        """Read prompts in a batch and a tree after each; return the states of the trees' nodes.

        `compare_rows` reads every prompt once alone and once together with the others, and compares the states.

        Args:
            prompts: B prompts of any lengths.
            trees: [B, 3], the tokens of a root and its two children.

        Returns:
            [B, 3, D], states of width D, or [B, 4, D] for a model with mixers (modules that keep a state or read trees
            by paths): the root is then also read as a step by one token.
        """
        reader = self.reader
        cache_rows = list(range(len(prompts)))
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        cache = reader.new_cache()
        cache.lengths = [0] * len(prompts)
        cache.reserve(len(prompts), int(lengths.max()) + 3)
        # the prompts are committed as they are read; their sizes keep padding out of states
        cache.set_write_offset(cache_rows, sizes=lengths.tolist(), commits=True)
        padded = nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        # padding takes the position of the last token
        positions = torch.minimum(torch.arange(padded.shape[1])[None], lengths[:, None] - 1)
        reader(padded, positions, None, cache)
        # a forward does not move the lengths: from here on columns are written after each row's own prompt
        cache.lengths = lengths.tolist()
        cache.set_write_offset(cache_rows)
        # every node sees the root and itself
        tree_mask = torch.eye(3, dtype=torch.bool).repeat(len(prompts), 1, 1)
        tree_mask[:, :, 0] = True
        hidden = reader(trees, lengths[:, None] + torch.tensor([0, 1, 1]), tree_mask, cache)
        if not reader.mixers.mixers:
            return hidden
        # mixers may take another path for a single token, which must be right, too. The tree was not committed, so the
        # root is written over it.
        cache.set_write_offset(cache_rows)
        step = reader(trees[:, :1], lengths[:, None], None, cache)
        return torch.cat([hidden, step], dim=1)

    def _make_tokens(self, count: int) -> Tensor:
        """Return [count + 6] arbitrary tokens for a trial: a prompt of `count`, and six for a tree's nodes."""
        size = self.reader.original.get_input_embeddings().weight.shape[0]
        order = torch.randperm(min(size, 4096), generator=torch.Generator().manual_seed(0))
        # a prompt repeats five tokens: attention that keeps only the best few columns must then choose among ties
        indices = torch.cat([torch.arange(count) % 5, torch.arange(5, 11)])
        return order[indices % len(order)]

    def _read_paths(self) -> tuple[Tensor, float]:
        """Return [7, D], states of nodes r, a, c and r, b, d, e by forwards over whole sequences, and the tolerance.

        The tolerance is relative to the norm of the states. They are what a tree's reading is compared with. The tree
        is a root r with children a and b; c is a child of a, d of b, and e comes after d.
        """
        count = self.count
        prompt = self.tokens[:count].tolist()
        r, a, b, c, d, e = self.tokens[count:].tolist()
        # The last token of the first path only makes it as long as the others. The third path has node a before b and
        # d, which is wrong: it shows how much a misread tree changes a state.
        paths = torch.tensor([[*prompt, r, a, c, e], [*prompt, r, b, d, e], [*prompt, r, a, b, d]])
        hidden = self.base(
            input_ids=paths.to(self.reader.masks.device), use_cache=False
        ).last_hidden_state
        first, second, mixed = hidden[:, count:]  # [4, D] each
        # the relative difference to node d if it attended to its parent's sibling
        misread = float((mixed[3] - second[2]).norm() / second[2].norm())
        # the tolerance lies above rounding, and well below that difference
        limit = max(misread / 3, 8 * self.eps)
        if self.is_exact:
            limit = max(1e-5, min(misread / 10, 1e-3))
        return torch.cat([first[:3], second]), limit

    def read_tree(self, cache: TreeCache) -> Tensor:
        """Read the small tree with the reader after the prompt, commit path r, b, d, and read token e after it.

        The tree is a root r with children a and b, of which c is a child of a, and d of b.

        Args:
            cache: an empty cache of the reader.

        Returns:
            [7, D], the states of nodes r, a, c and r, b, d, and of token e, in the order of `read_expected`.
        """
        reader = self.reader
        count = self.count
        reader.read_text(self.tokens[:count], 0, cache)
        # nodes r, a, b, c, d: all see r, c sees a, and d sees b
        tree_mask = torch.eye(5, dtype=torch.bool)
        tree_mask[:, 0] = tree_mask[3, 1] = tree_mask[4, 2] = True
        nodes = self.tokens[count : count + 5]
        hidden = reader.read_text(nodes, count, cache, depths=(0, 1, 1, 2, 2), tree_mask=tree_mask)[
            0
        ]
        # of the only sequence, nodes r, b, d
        cache.keep({0: [0, 2, 4]})
        last = reader.read_text(self.tokens[count + 5 :], count + 3, cache)[0]
        return torch.cat([hidden[[0, 1, 3, 0, 2, 4]], last])  # r, a, c and r, b, d, then e

    def _read_copies(self, cache: TreeCache) -> Tensor:
        """Return [COPIES, D], the states of copies of one token that share a parent and a position.

        They are equal unless the model attends by the order of columns. The prompt's cached values are overwritten by
        large numbers, as one column more or less would else be lost in rounding. A tree's siblings lie in other columns
        (places in the cache) than their positions say.
        """
        layers: Any = cache.layers
        for layer in layers:
            values = layer.value_buffer.tensor[:, :, : self.count]
            values.copy_(torch.arange(values.numel()).sin().view_as(values) * 100)
        # a root and its copied children, each of which sees the root and itself
        tree_mask = torch.eye(1 + COPIES, dtype=torch.bool)
        tree_mask[:, 0] = True
        root, child = self.tokens[self.count :].split(1)[:2]
        nodes = torch.cat([root, child.expand(COPIES)])
        depths = [0, *[1] * COPIES]
        return self.reader.read_text(nodes, self.count, cache, depths, tree_mask)[0, 1:]

    def _read_root_twice(self, cache: TreeCache) -> Tensor:
        """Return [2, D], states of token r (the tree's root) after the prompt, read twice in a batch."""
        # two nodes without parents, each of which sees itself alone: two rows for modules that read paths or levels
        roots = self.tokens[self.count : self.count + 1].expand(2)
        return self.reader.read_text(
            roots, self.count, cache, [0, 0], torch.eye(2, dtype=torch.bool)
        )[0]

    def _prompt_length(self) -> int:
        """Return the length of the trial's prompt in tokens.

        It is beyond every limit of attention in the config that the masks do not apply.
        """
        # in tokens; sliding windows are left out, as the masks apply them
        windows = attention_limits(self.config) - {*layer_windows(self.config).values()}
        max_positions = getattr(self.config, "max_position_embeddings", None) or LONGEST_PROBE
        # the tree and the copies come after the prompt
        longest = min(LONGEST_PROBE, max_positions - COPIES - 8)
        return max([6, *(window + 2 for window in windows if window + 2 <= longest)])
