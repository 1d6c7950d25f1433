"""The means by which a model reads trees: tried from the cheapest on, each verified on a small tree."""

# B texts, P prompt tokens of the check, D width

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from eagle.target.attention import attention_limits, can_group, layer_windows, near_limits, observing
from eagle.target.cache import TreeCache
from eagle.target.structure import base_of
from eagle.target.trees.means import FAILURES, OFFSETS, ORIGIN, ROWS, TABLES, UNLIMITED, Means
from eagle.target.trees.positions import counts_columns, first_position, table_builders

NEAR = 5  # tokens after which windows and chunks of thousands begin in a first probe
LONGEST_PROBE = 4096  # tokens of a prompt that crosses a window
COPIES = 32  # of one node of the tree: a model that counts rows would give the last another position than the first
FORGOTTEN = 0.2  # of a state's norm: a step that differs by more has not seen all that the forward has
DIFFERENCE = 20.0  # times rounding: beyond it a model's step by one token is not its forward over a text


def means_of(reader: Any) -> Iterator[Means]:
    """The means that may serve a model, from the cheapest on."""
    kinds = [True, False] if can_group(reader.original, reader.config) else [False]
    needed = (TABLES,) if table_builders(reader.base) else ()
    ways = [False, True] if reader.stateful else [False]
    yield from (Means(grouped=grouped, levels=levels, extras=needed) for levels in ways for grouped in kinds)
    if first_position(reader):
        yield from (Means(grouped=grouped, extras=(*needed, ORIGIN)) for grouped in kinds)
    if any(reader.masks.windows.values()):  # a config may name a window that the model does not apply
        yield Means(extras=(*needed, UNLIMITED))
    if counts_columns(reader):
        yield from (Means(levels=levels, extras=(*needed, OFFSETS)) for levels in ways)
    yield from (Means(levels=levels, extras=(*needed, ROWS)) for levels in ways)
    yield from (Means(whole=True), Means(whole=True, levels=True), Means(whole=True, singly=True))


def climb(reader: Any) -> str | None:
    """Let a reader take the cheapest means that read trees right; else, why the first ones do not.

    Right is what the untouched model's forwards over whole texts give. Where its own steps by one token give something
    else, right is what these give, as in `generate`; the means that read by levels take such steps.
    """
    probe, reasons = Probe(reader), list[str]()
    for follows_steps in [True] if _follows_steps(reader, probe) else [False, True]:
        reader.follows_steps = follows_steps
        for means in means_of(reader):
            if follows_steps and not means.levels:
                continue
            if (reason := _try_means(reader, means, probe)) is None:
                _try_cheaper(reader, probe)
                _try_invariant(reader, probe)
                return None
            reasons.append(reason)
    return reasons[0]


def _follows_steps(reader: Any, probe: Probe) -> bool:
    """Whether the truth is the model's own steps by one token, as in `generate`, for they are not its forward.

    A layer's state may be updated otherwise by a step. A cache may leave out what lies before a window that the forward
    over a text does not apply, as Moshi's does.
    """
    if reader.stateful:
        return probe.steps_differ()
    with near_limits(reader.original, reader.config, NEAR) as is_far:
        return is_far and Probe(reader).steps_forget()


def _try_cheaper(reader: Any, probe: Probe) -> None:
    """Let a reader choose between paths and levels by their costs, if it reads trees right by both."""
    mixers, means = reader.mixers, reader.means
    if not mixers.mixers or means.levels or means.whole or ROWS in means.extras:
        return
    reader.take(replace(means, cheaper=True))
    if any(probe.find_misreading() for _ in reader.mixers.each_way()):
        reader.take(means)
        probe.find_misreading()  # which measures the states


def _try_invariant(reader: Any, probe: Probe) -> None:
    """Let a reader in half precision read so that bits do not depend on what is read together, if that is right."""
    means = reader.means
    if not reader.can_be_invariant or means.whole:
        return
    attended = set[int]()
    reader.take(replace(means, invariant=True))
    with observing(reader.settings, lambda layer, *_: attended.add(layer)):
        is_right = _reads_right(reader, probe)
    if is_right and len(attended) < reader.count_attending():  # the others call kernels by themselves
        reader.take(replace(means, invariant=True, sums=True))
        is_right = _reads_right(reader, probe)
    if not is_right:  # attention that chooses keys by an index, say
        reader.take(replace(means, grouped=False, sums=True))
        is_right = _reads_right(reader, probe)
    if not is_right:
        reader.take(means)
        probe.find_misreading()  # which measures the states


def _reads_right(reader: Any, probe: Probe) -> bool:
    """Whether a reader reads the small tree right by the means that it has taken."""
    try:
        return not any([probe.find_misreading() for _ in reader.mixers.each_way()])
    except FAILURES:
        return False


def _try_means(reader: Any, means: Means, probe: Probe) -> str | None:
    """How a reader misreads trees by these means; None if it does not."""
    try:
        with near_limits(reader.original, reader.config, NEAR) as is_far:
            if is_far:
                reader.take(means)
                if reason := Probe(reader).find_misreading():
                    return reason
        if is_far or means != reader.means:
            reader.take(means)
    except FAILURES as error:
        return f"cannot be read by {means.describe()} ({type(error).__name__}: {str(error)[:200]})"
    return probe.find_misreading()


class Probe:
    """Reads a small tree with a reader, and its paths with the untouched model."""

    def __init__(self, reader: Any) -> None:
        self.reader, self.config = reader, reader.config
        self.base = base_of(reader.original)
        dtype = reader.original.dtype  # of its layers, which may hand on states in fp32
        self.is_exact, self.eps = dtype in (torch.float32, torch.float64), torch.finfo(dtype).eps
        self.count = self._prompt_length()
        self.tokens = self._tokens(self.count)

    def find_misreading(self) -> str | None:
        """How hidden states of a small tree differ from the model's own over its paths; None if they agree."""
        reader, tokens, count = self.reader, self.tokens, self.count
        cache = reader.new_cache()
        try:
            expected, limit = self._read_paths(tokens, count)
            if reader.follows_steps:
                expected = self._read_steps()
            reader.tolerance = limit
            nodes = self._read_tree(tokens, count, cache)
            cache.measure()
            if reader.mixers.mixers:  # a batch of steps by one token
                nodes, expected = torch.cat([nodes, self._read_roots(cache)]), torch.cat([expected, expected[[0, 0]]])
            copies = self._read_copies(tokens, count, cache)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            return f"fails under a tree's mask and positions ({type(error).__name__}: {str(error)[:200]})"
        if nodes.shape != expected.shape:
            return f"hands on {len(nodes)} states for {len(expected)} nodes: not one for each token"
        if not (nodes - expected).norm() <= limit * expected.norm():
            return "reads a small tree unlike the texts along its paths, for it masks or places tokens by itself"
        limit = max(limit, self.eps)  # copies differ by rounding, however little a token makes out
        worst = (copies - copies[0]).norm(dim=-1).max() / copies[0].norm()
        if not worst <= limit or (worst > self._copies_limit() and counts_columns(reader)):
            return "attends by the order of rows in its cache, which in a tree is not that of positions"
        return None

    def _copies_limit(self) -> float:
        """How far copies may be apart in a model that may count columns, in half precision, where paths tell little."""
        is_told = OFFSETS in self.reader.means.extras or self.is_exact
        return float("inf") if is_told else 4 * self.eps

    @torch.inference_mode()
    def measure_worst(self) -> float:
        """The largest relative difference of a node's states from the model's own."""
        expected, _ = self._read_paths(self.tokens, self.count)
        if self.reader.follows_steps:
            expected = self._read_steps()
        nodes = self._read_tree(self.tokens, self.count, self.reader.new_cache())
        return float(((nodes - expected).norm(dim=-1) / expected.norm(dim=-1)).max())

    def steps_differ(self) -> bool:
        """Whether the model's own step by one token gives something else than its forward over the text.

        The first step behind the prompt is compared, for rounding adds up from there on.
        """
        try:
            expected = self._read_paths(self.tokens, self.count)[0][0]
            stepped = self._read_steps()[0]
            at_once = self._go_on(self._start(), self.tokens[self.count :][[0, 1]][None])[0][0, 0]
        except FAILURES:
            return False
        rounding = max(float((at_once - expected).norm() / expected.norm()), 16 * self.eps)
        return bool((stepped - expected).norm() > DIFFERENCE * rounding * expected.norm())

    def steps_forget(self) -> bool:
        """Whether the model's own step by one token differs from its forward by far more than rounding."""
        try:
            expected = self._read_paths(self.tokens, self.count)[0][0]
            stepped = self._read_steps()[0]
        except FAILURES:
            return False
        return bool((stepped - expected).norm() > FORGOTTEN * expected.norm())

    def _read_steps(self) -> Tensor:
        """[7, D] hidden states of nodes r, a, c and r, b, d, e by the untouched model's own steps by one token."""
        hidden = []
        for path in ([0, 1, 3], [0, 2, 4, 5]):
            cache = self._start()
            for place in path:
                token = self.tokens[self.count + place].view(1, 1)
                states, cache = self._go_on(cache, token)
                hidden.append(states[0])
        return torch.cat(hidden)

    def _start(self) -> Any:
        """The untouched model's own cache behind the prompt."""
        return self._go_on(None, self.tokens[None, : self.count])[1]

    def _go_on(self, cache: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """The untouched model's hidden states [1, T, D] at tokens [1, T] behind its own cache, and that cache."""
        name = self.reader.cache_name
        output = self.base(input_ids=tokens.to(self.reader.masks.device), use_cache=True, **{name: cache})
        return output.last_hidden_state, getattr(output, name)

    def compare_rows(self) -> bool:
        """Whether trees after two texts of different lengths give the same states side by side as alone."""
        tokens = self._tokens(12)
        texts, nodes = [tokens[:7], tokens[7:10]], tokens[10:16].view(2, 3)
        expected = torch.cat([self._read_rows([text], nodes[row : row + 1]) for row, text in enumerate(texts)])
        try:
            difference = self._read_rows(texts, nodes) - expected
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            return False
        return bool(difference.norm() <= self.reader.tolerance * expected.norm())

    def _read_rows(self, texts: list[Tensor], nodes: Tensor) -> Tensor:
        """[B, 3 or 4, D] hidden states of a root and two children [B, 3] after each text."""
        cache, lengths = self.reader.new_cache(), torch.tensor([len(text) for text in texts])
        rows = list(range(len(texts)))
        cache.lengths = [0] * len(texts)
        cache.reserve(len(texts), int(lengths.max()) + 3)
        cache.aim(rows, sizes=lengths.tolist(), commits=True)
        padded = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        self.reader(padded, torch.minimum(torch.arange(padded.shape[1])[None], lengths[:, None] - 1), None, cache)
        cache.lengths = lengths.tolist()
        cache.aim(rows)
        seen = torch.eye(3, dtype=torch.bool).repeat(len(texts), 1, 1)
        seen[:, :, 0] = True
        hidden = self.reader(nodes, lengths[:, None] + torch.tensor([0, 1, 1]), seen, cache)
        if not self.reader.mixers.mixers:
            return hidden
        cache.aim(rows)  # and a step by one token
        return torch.cat([hidden, self.reader(nodes[:, :1], lengths[:, None], None, cache)], dim=1)

    def _tokens(self, count: int) -> Tensor:
        """[count + 6] tokens: a prompt and six new ones."""
        size = self.reader.original.get_input_embeddings().weight.shape[0]
        order = torch.randperm(min(size, 4096), generator=torch.Generator().manual_seed(0))
        # a long prompt repeats itself, so that attention to only the best few of its tokens meets ties
        return order[torch.cat([torch.arange(count) % 5, torch.arange(5, 11)]) % len(order)]

    def _read_paths(self, tokens: Tensor, count: int) -> tuple[Tensor, float]:
        """[7, D] hidden states of nodes r, a, c and r, b, d, e by plain forwards, and the tolerated difference."""
        prompt, (r, a, b, c, d, e) = tokens[:count].tolist(), tokens[count:].tolist()
        paths = torch.tensor([[*prompt, r, a, c, e], [*prompt, r, b, d, e], [*prompt, r, a, b, d]])
        hidden = self.base(input_ids=paths.to(self.reader.masks.device), use_cache=False).last_hidden_state
        first, second, mixed = hidden[:, count:]
        # the difference that seeing its parent's sibling would make to a node
        misread = float((mixed[3] - second[2]).norm() / second[2].norm())
        limit = max(1e-5, min(misread / 10, 1e-3)) if self.is_exact else max(misread / 3, 8 * self.eps)
        return torch.cat([first[:3], second]), limit

    def _read_tree(self, tokens: Tensor, count: int, cache: TreeCache) -> Tensor:
        """[7, D] hidden states of nodes r, a, c and r, b, d of one tree, and of a token e after keeping r, b, d."""
        r, a, b, c, d, e = tokens[count:].tolist()
        reader = self.reader
        reader.read_text(tokens[:count], 0, cache)
        seen = torch.eye(5, dtype=torch.bool)
        seen[:, 0] = seen[3, 1] = seen[4, 2] = True
        hidden = reader.read_text(torch.tensor([r, a, b, c, d]), count, cache, (0, 1, 1, 2, 2), seen)[0]
        cache.keep({0: [0, 2, 4]})
        last = reader.read_text(torch.tensor([e]), count + 3, cache)[0]
        return torch.cat([hidden[[0, 1, 3, 0, 2, 4]], last])

    def _read_copies(self, tokens: Tensor, count: int, cache: TreeCache) -> Tensor:
        """[COPIES, D] hidden states of copies of one token at one position, after large artificial values."""
        layers: Any = cache.layers
        for layer in layers:
            values = layer.value_rows.buffer[:, :, :count]  # large: else a row more or less is lost in rounding
            values.copy_(torch.arange(values.numel()).sin().view_as(values) * 100)
        seen = torch.eye(1 + COPIES, dtype=torch.bool)
        seen[:, 0] = True
        copies = torch.cat([tokens[count : count + 1], tokens[count + 1 : count + 2].expand(COPIES)])
        return self.reader.read_text(copies, count, cache, [0, *[1] * COPIES], seen)[0, 1:]

    def _read_roots(self, cache: TreeCache) -> Tensor:
        """[2, D] hidden states of token r behind the prompt, read twice side by side."""
        roots = self.tokens[self.count : self.count + 1].expand(2)
        return self.reader.read_text(roots, self.count, cache, [0, 0], torch.eye(2, dtype=torch.bool))[0]

    def _prompt_length(self) -> int:
        """A test prompt's length: long enough to cross every window in the config that the masks do not handle."""
        masked = {*layer_windows(self.config).values()}
        named = attention_limits(self.config)
        max_positions = getattr(self.config, "max_position_embeddings", None) or LONGEST_PROBE
        longest = min(LONGEST_PROBE, max_positions - COPIES - 8)
        return max([6, *(window + 2 for window in named - masked if window + 2 <= longest)])
