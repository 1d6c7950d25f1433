"""A model made able to read trees, and the check that it reads one as it reads the texts that are in it."""

# N new tokens, R rows behind S committed tokens, P prompt tokens of the check, D width

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from eagle.target.attention import SWITCH, Masks, TreeCache, can_group, why_no_trees, windows_of
from eagle.target.twin import share_weights

LONGEST_PROBE = 4096  # tokens of a prompt that crosses a window
COPIES = 32  # of one node of the tree: whoever counts rows takes the last for another than the first
WINDOW_NAMES = re.compile("window|chunk|block_size|local_attention")  # of numbers in configs, whatever they do
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, NotImplementedError)


class TreeReader:
    """Reads tokens under any mask, by modules of its own over the model's weights: the model stays as it is."""

    def __init__(self, model: Any, config: Any) -> None:
        self.original, self.config, self.checked = model, config, False
        self.use(can_group(model, config))

    def use(self, grouped: bool) -> None:
        """Attend by `grouped_attention`, or as the model does."""
        layers = decoder_layers(self.original, self.config.num_hidden_layers)
        self.model, own_config = share_weights(self.original, self.config, layers)
        self.layers = decoder_layers(self.model, len(layers))
        self.masks, self.settings = Masks(self.original, self.config, grouped), vars(own_config)
        if grouped:
            self.settings[SWITCH] = "eagle_grouped"  # past the property, of which other configs would hear

    def read_texts(self, tokens: Tensor) -> Tensor:
        """[B, T, D], the LM head's input at right-padded tokens [B, T], by a forward that any causal model can do."""
        attention, self.settings[SWITCH] = self.settings.get(SWITCH), vars(self.config).get(SWITCH)
        try:
            return self.model.base_model(input_ids=tokens.to(self.masks.device), use_cache=False).last_hidden_state
        finally:
            self.settings[SWITCH] = attention

    def __call__(self, tokens: Tensor, positions: list[int], seen: Tensor | None, start: int, cache: TreeCache) -> Any:
        """[1, N, D], the LM head's input at the last N of the R rows at these positions; `seen` as in Masks."""
        device = self.masks.device
        return self.model.base_model(
            input_ids=tokens[None].to(device),
            position_ids=torch.tensor([positions[-len(tokens) :]], device=device),
            attention_mask=self.masks(start, positions, seen),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

    @contextmanager
    def tapping(self, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """While open, the tapped layers' inputs [B, T, D] land in the dict; no other layer's are held."""
        tapped: dict[int, Tensor] = {}

        def catch(tap: int) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                tapped[tap] = args[0] if args else kwargs["hidden_states"]

            return self.layers[tap].register_forward_pre_hook(hook, with_kwargs=True)

        handles = [catch(tap) for tap in taps if tap != -1]
        try:
            yield tapped
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def check(self) -> None:
        """Refuse a model that cannot read a tree, by what it is or by how it reads one; once, at the first text."""
        if reason := why_no_trees(self.original, self.config):
            raise ValueError(_refusal(self.config, reason))
        if self.checked:
            return
        reason = self._misreading()
        if reason and self.masks.grouped:  # it may need the masks that grouped attention does without
            self.use(grouped=False)
            reason = self._misreading()
        if reason:
            raise ValueError(_refusal(self.config, reason))
        self.checked = True

    def _misreading(self) -> str | None:
        """What is wrong with how this reader reads a small tree, beside the model's own forward over its paths."""
        count = self._prompt_length()
        size = self.original.get_input_embeddings().weight.shape[0]
        order = torch.randperm(min(size, 4096), generator=torch.Generator().manual_seed(0))
        # a long prompt repeats itself, so that whoever picks the best few of its tokens meets ties
        places = torch.cat([torch.arange(count) % 5, torch.arange(5, 11)]) % len(order)
        tokens, cache = order[places], TreeCache(self.config.num_hidden_layers)
        try:
            expected, limit = self._read_paths(tokens, count)
            nodes = self._read_tree(tokens, count, cache)
            copies = self._read_copies(tokens, count, cache)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            return f"fails under a tree's mask and positions ({type(error).__name__}: {str(error)[:200]})"
        if not (nodes - expected).norm() <= limit * expected.norm():
            return "reads a small tree otherwise than the texts that are in it, for it masks or places tokens by itself"
        if not (copies - copies[0]).norm(dim=-1).max() <= limit * copies[0].norm():
            return "attends by the order of rows in its cache, which in a tree is not that of positions"
        return None

    def _read_paths(self, tokens: Tensor, count: int) -> tuple[Tensor, float]:
        """[7, D] of a tree's nodes r, a, c and r, b, d, e by plain forwards, and the difference that is tolerated."""
        prompt, (r, a, b, c, d, e) = tokens[:count].tolist(), tokens[count:].tolist()
        paths = torch.tensor([[*prompt, r, a, c, e], [*prompt, r, b, d, e], [*prompt, r, a, b, d]])
        hidden = self.original.base_model(input_ids=paths.to(self.masks.device), use_cache=False).last_hidden_state
        first, second, mixed = hidden[:, count:]
        # how far a node is from where it would be if it saw its parent's sibling
        misread = float((mixed[3] - second[2]).norm() / second[2].norm())
        exact = hidden.dtype in (torch.float32, torch.float64)
        return torch.cat([first[:3], second]), max(1e-5, min(misread / 10, 1e-3)) if exact else max(misread / 3, 1e-3)

    def _read_tree(self, tokens: Tensor, count: int, cache: TreeCache) -> Tensor:
        """[7, D] of nodes r, a, c and r, b, d of one tree, and of a token e behind its path r, b, d."""
        r, a, b, c, d, e = tokens[count:].tolist()
        self(tokens[:count], list(range(count)), None, 0, cache)
        cache.length = count
        seen = torch.eye(5, dtype=torch.bool)
        seen[:, 0] = seen[3, 1] = seen[4, 2] = True
        positions = [count + depth for depth in (0, 1, 1, 2, 2)]
        hidden = self(torch.tensor([r, a, b, c, d]), positions, seen, count, cache)[0]
        cache.keep([0, 2, 4])
        last = self(torch.tensor([e]), [count + 3], None, count + 3, cache)[0]
        return torch.cat([hidden[[0, 1, 3, 0, 2, 4]], last])

    def _read_copies(self, tokens: Tensor, count: int, cache: TreeCache) -> Tensor:
        """[COPIES, D] of one token that stands many times in one place, behind a prompt of large and random values."""
        for rows in cache.every[1:-1:2]:
            values = rows.buffer[:, :, :count]  # else a row more or less drowns in rounding
            values.copy_(torch.arange(values.numel()).sin().view_as(values) * 100)
        cache.length = count
        seen = torch.eye(1 + COPIES, dtype=torch.bool)
        seen[:, 0] = True
        copies = torch.cat([tokens[count : count + 1], tokens[count + 1 : count + 2].expand(COPIES)])
        return self(copies, [count, *[count + 1] * COPIES], seen, count, cache)[0, 1:]

    def _prompt_length(self) -> int:
        """A few tokens, or enough to look behind each window that the config names and the masks do not know."""
        known, longest = {*windows_of(self.config).values()}, getattr(self.config, "max_position_embeddings", None)
        named = {value for name, value in vars(self.config).items() if WINDOW_NAMES.search(name) and type(value) is int}
        most = min(LONGEST_PROBE, (longest or LONGEST_PROBE) - COPIES - 8)
        return max([6, *(window + 2 for window in named - known if window + 2 <= most)])


def decoder_layers(model: Any, count: int) -> nn.ModuleList:
    """The model's stack of decoder layers: its outermost list of that length, behind any tower."""
    lists = [(name, module) for name, module in model.base_model.named_modules() if isinstance(module, nn.ModuleList)]
    stacks = [(name.count("."), module) for name, module in lists if len(module) == count]
    if not stacks:
        kind = type(model.base_model).__name__
        raise ValueError(f"{kind} has no module list of {count} layers: its layers cannot be tapped")
    return min(reversed(stacks), key=lambda stack: stack[0])[1]


def _refusal(config: Any, reason: str) -> str:
    """The sentence in which a model is refused."""
    return (
        f"{config.model_type} cannot read a tree: it {reason}. Taps, extraction and training work; decoding does not."
    )
