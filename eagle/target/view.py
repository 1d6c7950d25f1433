"""A target's layers for drafters that draft with them: any run of layers, with a cache of the drafter's own."""

# N new tokens, S rows in the cache, D width, V vocabulary

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from eagle.device import upload
from eagle.target.borrowed import is_close
from eagle.target.cache import TreeCache
from eagle.target.reader import FAILURES, TreeReader


class TargetView:
    """Embedding, layers and head over the target's weights; the target's own text and cache are never touched."""

    def __init__(self, target: Any) -> None:
        self.head, self.device = target.head, target.device
        self.lock = target.lock  # layers are switched off while they run
        self.reader = TreeReader(target.model, target.config)
        self.reader.use(target.reader.masks.grouped)
        self.decoder_layers = list(self.reader.layers)
        self._check(target)

    def __len__(self) -> int:
        """How many layers there are."""
        return len(self.decoder_layers)

    def new_cache(self) -> TreeCache:
        """An empty cache: forwards write behind its `length`, which its owner moves on, or commits by `keep`."""
        return TreeCache(len(self))

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """[N, D], the first layer's input at tokens [N]."""
        return self.head.embed(upload(tokens, self.device))

    @torch.inference_mode()
    def run_layers(
        self, hidden: Tensor, positions: list[int], start: int, end: int, cache: TreeCache, mask: Tensor | None = None
    ) -> Tensor:
        """[N, D], what the layers `start` to `end` (which is not run) make of hidden states [N, D] at these positions.

        `mask` [N, S + N] marks the rows of the cache, and of the new ones behind it, that each new row sees; None:
        all that is cached, and the new rows up to itself.
        """
        if not 0 <= start <= end <= len(self):
            raise ValueError(
                f"layers {start}..{end} are none of this target: expected 0 <= start <= end <= {len(self)}"
            )
        with self.lock, self._only(hidden[None], start, end) as output:
            self._forward(hidden, positions, cache, mask)
        return output[0][0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V], the target's logits by final norm and LM head, from what any layer left [N, D]."""
        with self.lock, self._only(hidden[None], len(self), len(self)):
            normed = self._forward(hidden, [0] * len(hidden), self.new_cache(), None)
        return self.head.logits(normed[0])

    def _forward(self, hidden: Tensor, positions: list[int], cache: TreeCache, mask: Tensor | None) -> Tensor:
        """[1, N, D], the LM head's input by the layers that are not switched off."""
        masks = self.reader.masks
        cache.aim([0])
        additive: Any = masks(cache.starts, torch.tensor([positions]), None)
        if mask is not None:
            additive = torch.zeros(mask.shape, dtype=masks.dtype, device=masks.device)
            additive = additive.masked_fill_(~upload(mask, masks.device), torch.finfo(masks.dtype).min)[None, None]
            additive = additive if len(masks.windows) == 1 else dict.fromkeys(masks.windows, additive)
        return self.reader.model.base_model(
            inputs_embeds=hidden[None],
            position_ids=upload(torch.tensor([positions]), self.device),
            attention_mask=additive,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

    @contextmanager
    def _only(self, hidden: Tensor, start: int, end: int) -> Iterator[list[Tensor]]:
        """While open, layers `start` to `end` alone run, from `hidden` on; what leaves the last lands in the list."""
        layers, output = self.reader.layers, list[Tensor]()
        try:
            for place, layer in enumerate(self.decoder_layers):
                runs = layer if start <= place < end else None
                layers[place] = _Layer(runs, hidden if place == min(start, len(self) - 1) else None, output)
            yield output
        finally:
            for place, layer in enumerate(self.decoder_layers):
                layers[place] = layer

    def _check(self, target: Any) -> None:
        """Refuse a model whose forward is more than its layers one after the other."""
        tokens = torch.arange(1, 5) % target.vocab_size
        expected = target.model(input_ids=tokens[None].to(self.device), use_cache=False).logits[0]
        try:
            hidden = self.run_layers(self.embed(tokens), [0, 1, 2, 3], 0, len(self), self.new_cache())
            fault = "" if is_close(self.logits(hidden), expected) else "give other logits than the model"
        except FAILURES as error:
            fault = f"fail ({type(error).__name__}: {str(error)[:200]})"
        if fault:
            raise ValueError(f"the layers of {target.config.model_type}, run one by one, {fault}: it cannot be viewed")


class _Layer(nn.Module):
    """A layer's place in a forward: the layer or nothing, from given hidden states or from those before it."""

    def __init__(self, layer: nn.Module | None, hidden: Tensor | None, output: list[Tensor]) -> None:
        super().__init__()
        self.layer, self.hidden, self.output = layer, hidden, output

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[1, N, D]; layers that return more than that return it first."""
        hidden = hidden_states if self.hidden is None else self.hidden
        result = hidden if self.layer is None else self.layer(hidden, *args, **kwargs)
        self.output[:] = [result if isinstance(result, Tensor) else result[0]]
        return result
