"""Forwards of a model over draft trees, and the check that a tree gives the same states as its paths as plain texts."""

# B texts, N new tokens, R not committed, P prompt tokens of the check, D width

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eagle.device import upload
from eagle.target.attention import GROUPED, SWITCH, Masks, can_group, layer_windows, why_no_trees
from eagle.target.cache import TreeCache
from eagle.target.structure import base_of, count_cache_layers, decoder_layers
from eagle.target.taps import PLAIN, Layout, find_layout
from eagle.target.twin import share_weights

LONGEST_PROBE = 4096  # tokens of a prompt that crosses a window
COPIES = 32  # of one node of the tree: a model that counts rows would give the last another position than the first
# config keys that may bound attention; max_window_layers is a number of layers
WINDOW_NAMES = re.compile("window(?!_layers)|chunk|block_size|local_attention")
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, NotImplementedError)


class TreeReader:
    """Runs a model under any mask through a second set of modules over its weights; the model itself is unchanged."""

    def __init__(self, model: Any, config: Any) -> None:
        self.original = model
        self.config = config
        self.checked, self.tolerance = False, 0.0
        self.reads_rows: bool | None = None  # None: not tried yet
        self.layouts: dict[int, Layout] = {}  # of the taps that a text has shown
        self.build_model(can_group(model, config))

    def build_model(self, grouped: bool) -> None:
        """Run the model with `grouped_attention`, or with its own attention."""
        layers = decoder_layers(base_of(self.original), self.config.num_hidden_layers)
        self.model, twin_config = share_weights(self.original, self.config, layers)
        self.base = base_of(self.model)
        self.layers = decoder_layers(self.base, len(layers))
        self.masks = Masks(self.original, self.config, grouped)
        self.settings = vars(twin_config)
        if grouped:
            self.settings[SWITCH] = GROUPED  # past the property, of which other configs would hear

    def new_cache(self) -> TreeCache:
        """An empty cache for this model."""
        return TreeCache(count_cache_layers(self.config, self.layers))

    def read_texts(self, tokens: Tensor) -> Tensor:
        """[B, T, D], the LM head's input at right-padded tokens [B, T], by the model's own plain forward."""
        attention = self.settings.get(SWITCH)
        self.settings[SWITCH] = vars(self.config).get(SWITCH)
        try:
            return self.base(input_ids=upload(tokens, self.masks.device), use_cache=False).last_hidden_state
        finally:
            self.settings[SWITCH] = attention

    def __call__(
        self, tokens: Tensor, positions: Tensor, seen: Tensor | None, cache: Any, columns: Tensor | None = None
    ) -> Any:
        """[B, N, D], the LM head's input at tokens [B, N], where the cache aims.

        The tokens are the last N of R uncommitted ones at positions [B, R]; `seen` and `columns` are as in `Masks`.
        """
        device, count = self.masks.device, tokens.shape[1]
        starts = [start - (positions.shape[1] - count) for start in cache.starts]
        return self.base(
            input_ids=upload(tokens, device),
            position_ids=upload(positions[:, -count:], device),
            attention_mask=self.masks(starts, positions, seen, columns),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

    def read_text(
        self, tokens: Tensor, start: int, cache: TreeCache, depths: Sequence[int] = (), seen: Tensor | None = None
    ) -> Any:
        """[1, N, D], the LM head's input at tokens [N] of one text, a chain or a tree after `start` committed ones."""
        cache.length = start
        positions = start + torch.tensor([depths or range(len(tokens))])
        return self(tokens[None], positions, None if seen is None else seen[None], cache)

    def find_layouts(self, tokens: Tensor) -> dict[int, Tensor]:
        """The states [1, T, D] of a text [1, T] at all taps that can be read, whose layouts are known from here on."""
        with self.tapping(tuple(range(len(self.layers)))) as tapped:
            last = self.read_texts(tokens)
        found = {tap: find_layout(states, tokens.shape[1], self.config.hidden_size) for tap, states in tapped.items()}
        self.layouts = {tap: layout for tap, layout in found.items() if layout} | {-1: Layout(PLAIN, last.shape[-1])}
        tapped[-1] = last
        return {tap: layout.read(tapped[tap]) for tap, layout in self.layouts.items()}

    @contextmanager
    def tapping(self, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """A dict that receives the inputs [B, T, D] of the tapped layers while the block runs."""
        tapped: dict[int, Tensor] = {}

        def record(tap: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            tapped[tap] = self.layouts[tap].read(states) if tap in self.layouts else states

        handles = [
            self.layers[tap].register_forward_pre_hook(partial(record, tap), with_kwargs=True)
            for tap in taps
            if tap != -1
        ]
        try:
            yield tapped
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def check(self, rows: int = 1) -> None:
        """Refuse a model that cannot read trees: by its type, or by a test on a small tree, run once.

        With several `rows`, test once whether texts can be read side by side; otherwise each is read by itself.
        """
        reason = why_no_trees(self.original, self.config)
        if reason is None and not self.checked:
            reason = self._find_misreading()
            if reason and self.masks.grouped:  # it may need the masks that grouped attention does without
                self.build_model(grouped=False)
                reason = self._find_misreading()
        if reason:
            raise ValueError(
                f"{self.config.model_type} cannot read a tree: it {reason}. Taps, extraction and training work; "
                "decoding does not."
            )
        self.checked = True
        if rows > 1 and self.reads_rows is None:
            self.reads_rows = self._compare_rows()

    def _compare_rows(self) -> bool:
        """Whether trees after two texts of different lengths give the same states side by side as alone."""
        tokens = self._probe_tokens(12)
        texts, nodes = [tokens[:7], tokens[7:10]], tokens[10:16].view(2, 3)
        expected = torch.cat([self._read_rows([text], nodes[row : row + 1]) for row, text in enumerate(texts)])
        try:
            difference = self._read_rows(texts, nodes) - expected
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            return False
        return bool(difference.norm() <= self.tolerance * expected.norm())

    def _read_rows(self, texts: list[Tensor], nodes: Tensor) -> Tensor:
        """[B, 3, D] hidden states of a root and two children [B, 3] after each text."""
        cache, lengths = self.new_cache(), torch.tensor([len(text) for text in texts])
        rows = list(range(len(texts)))
        cache.lengths = [0] * len(texts)
        cache.reserve(len(texts), int(lengths.max()) + 3)
        cache.aim(rows)
        padded = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        self(padded, torch.minimum(torch.arange(padded.shape[1])[None], lengths[:, None] - 1), None, cache)
        cache.lengths = lengths.tolist()
        cache.aim(rows)
        seen = torch.eye(3, dtype=torch.bool).repeat(len(texts), 1, 1)
        seen[:, :, 0] = True
        return self(nodes, lengths[:, None] + torch.tensor([0, 1, 1]), seen, cache)

    def _probe_tokens(self, count: int) -> Tensor:
        """[count + 6] tokens: a prompt and six new ones."""
        size = self.original.get_input_embeddings().weight.shape[0]
        order = torch.randperm(min(size, 4096), generator=torch.Generator().manual_seed(0))
        # a long prompt repeats itself, so that attention to only the best few of its tokens meets ties
        return order[torch.cat([torch.arange(count) % 5, torch.arange(5, 11)]) % len(order)]

    def _find_misreading(self) -> str | None:
        """How hidden states of a small tree differ from plain forwards over its paths; None if they agree."""
        count = self._prompt_length()
        tokens = self._probe_tokens(count)
        cache = self.new_cache()
        try:
            expected, limit = self._read_paths(tokens, count)
            self.tolerance = limit
            nodes = self._read_tree(tokens, count, cache)
            copies = self._read_copies(tokens, count, cache)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            return f"fails under a tree's mask and positions ({type(error).__name__}: {str(error)[:200]})"
        if not (nodes - expected).norm() <= limit * expected.norm():
            return "reads a small tree unlike the texts along its paths, for it masks or places tokens by itself"
        limit = max(limit, torch.finfo(copies.dtype).eps)  # copies differ by rounding, however little a token makes out
        if not (copies - copies[0]).norm(dim=-1).max() <= limit * copies[0].norm():
            return "attends by the order of rows in its cache, which in a tree is not that of positions"
        return None

    def _read_paths(self, tokens: Tensor, count: int) -> tuple[Tensor, float]:
        """[7, D] hidden states of nodes r, a, c and r, b, d, e by plain forwards, and the tolerated difference."""
        prompt, (r, a, b, c, d, e) = tokens[:count].tolist(), tokens[count:].tolist()
        paths = torch.tensor([[*prompt, r, a, c, e], [*prompt, r, b, d, e], [*prompt, r, a, b, d]])
        base = base_of(self.original)
        hidden = base(input_ids=paths.to(self.masks.device), use_cache=False).last_hidden_state
        first, second, mixed = hidden[:, count:]
        # the difference that seeing its parent's sibling would make to a node
        misread = float((mixed[3] - second[2]).norm() / second[2].norm())
        exact = hidden.dtype in (torch.float32, torch.float64)
        return torch.cat([first[:3], second]), max(1e-5, min(misread / 10, 1e-3)) if exact else max(misread / 3, 1e-3)

    def _read_tree(self, tokens: Tensor, count: int, cache: TreeCache) -> Tensor:
        """[7, D] hidden states of nodes r, a, c and r, b, d of one tree, and of a token e after keeping r, b, d."""
        r, a, b, c, d, e = tokens[count:].tolist()
        self.read_text(tokens[:count], 0, cache)
        seen = torch.eye(5, dtype=torch.bool)
        seen[:, 0] = seen[3, 1] = seen[4, 2] = True
        hidden = self.read_text(torch.tensor([r, a, b, c, d]), count, cache, (0, 1, 1, 2, 2), seen)[0]
        cache.keep({0: [0, 2, 4]})
        last = self.read_text(torch.tensor([e]), count + 3, cache)[0]
        return torch.cat([hidden[[0, 1, 3, 0, 2, 4]], last])

    def _read_copies(self, tokens: Tensor, count: int, cache: TreeCache) -> Tensor:
        """[COPIES, D] hidden states of copies of one token at one position, after large artificial values."""
        for rows in cache.buffers[1:-1:2]:
            values = rows.buffer[:, :, :count]  # large: else a row more or less is lost in rounding
            values.copy_(torch.arange(values.numel()).sin().view_as(values) * 100)
        seen = torch.eye(1 + COPIES, dtype=torch.bool)
        seen[:, 0] = True
        copies = torch.cat([tokens[count : count + 1], tokens[count + 1 : count + 2].expand(COPIES)])
        return self.read_text(copies, count, cache, [0, *[1] * COPIES], seen)[0, 1:]

    def _prompt_length(self) -> int:
        """A test prompt's length: long enough to cross every window in the config that the masks do not handle."""
        known = {*layer_windows(self.config).values()}
        named = {value for name, value in vars(self.config).items() if WINDOW_NAMES.search(name) and type(value) is int}
        max_positions = getattr(self.config, "max_position_embeddings", None) or LONGEST_PROBE
        longest = min(LONGEST_PROBE, max_positions - COPIES - 8)
        return max([6, *(window + 2 for window in named - known if window + 2 <= longest)])
