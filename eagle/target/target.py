"""Any frozen causal language model of transformers, able to read a draft tree in one forward."""

# N tree nodes, A accepted nodes, S committed tokens, B batch, T tokens, L taps, D target width

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from eagle.core.drafter import Committed
from eagle.core.ownership import Turn
from eagle.core.sampling import refuse_fields
from eagle.core.tree import DraftTree, TargetOutput
from eagle.core.verify import Choose, Sampling
from eagle.device import best_device, fastest_dtype, in_dtype
from eagle.target.attention import Masks, TreeCache, rope_border
from eagle.target.borrowed import borrow_head
from eagle.target.loading import check_model, load_model, parse_dtype, tokenizer_of
from eagle.target.reader import TreeReader
from eagle.target.view import TargetView

PREFILL_CHUNK = 1024
ONE_TEXT = (
    "this target has begun another text or forgotten this one, and a target reads one text at a time: finish one "
    "stream before the next begins, or make a second target over the same weights, "
    "Target(target.model, target.tokenizer)"
)


class Target:
    """A causal language model that reads trees: `begin` a prompt, `read` a tree, `keep` the accepted path."""

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        check_model(model)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.reader = TreeReader(model, self.config)
        self.turn = Turn(ONE_TEXT)
        self.device = model.get_input_embeddings().weight.device
        self.vocab_size = model.get_output_embeddings().weight.shape[0]  # may be more than the tokenizer knows
        tokens = torch.arange(1, 5, device=self.device)[None] % self.vocab_size
        self.head = borrow_head(model, self.config, tokens, self.features(tokens, (0, -1))[0])
        self.border = rope_border(self.config)  # no text may grow across it
        self.sharded = False
        self.viewed: TargetView | None = None
        self.taps: tuple[int, ...] = ()
        self.text: list[int] = []
        self.draws = Counter[tuple[int, int]]()  # uses of private random numbers, by seed and request
        self.cache = TreeCache(self.config.num_hidden_layers)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        device_map: str | dict[str, Any] | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        adapter: str | None = None,
    ) -> Target:
        """A target from a folder or a hub id; dtype "auto" takes bf16 only where it is faster on this device."""
        device = best_device() if device == "auto" else device
        dtype = fastest_dtype(device) if dtype == "auto" else parse_dtype(dtype)
        source = {"revision": revision, "trust_remote_code": trust_remote_code}
        model = load_model(path, dtype, adapter, device_map=device_map, **source)
        if device_map is None and not getattr(model, "is_quantized", False):
            mixed = model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict
            model = (model if mixed else in_dtype(model, dtype)).to(device)
        return cls(model, tokenizer_of(path, **source))

    def shard(self) -> Target:
        """Shard this target's layers over the devices of all processes, which must then run its forwards together."""
        if not dist.is_initialized():  # one process
            return self
        self.device = torch.device(best_device())
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for layer in self.layers:  # one at a time moves to the device, where only its shard stays
            fully_shard(layer, mesh=mesh)
        for model in (self.reader.model, self.model):  # they share weights, but not buffers
            model.to(self.device)
        self.sharded = True
        return self

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers as this target runs them: the model's weights, hooks of their own."""
        return self.reader.layers

    def view(self) -> TargetView:
        """Its layers, for a drafter that reads them."""
        if self.viewed is None:
            self.viewed = TargetView(self)
        return self.viewed

    def tensor(self, name: str) -> Tensor:
        """One of the model's tensors by its name there, for heads that are made from them."""
        state = self.model.state_dict()
        if name not in state:
            raise ValueError(
                f"{self.config.model_type} has no tensor {name}: expected one as {', '.join([*state][:3])}"
            )
        return state[name]

    @property
    def masks(self) -> Masks:
        """The attention masks of tree forwards."""
        return self.reader.masks

    @property
    def max_positions(self) -> int | None:
        """The model's number of positions, None where its config names none."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The EOS tokens of the generation config, the config and the tokenizer."""
        tokens: list[int] = []
        for owner in (self.model.generation_config, self.config, self.tokenizer):
            eos = getattr(owner, "eos_token_id", None)
            tokens += eos if isinstance(eos, list) else [] if eos is None else [eos]
        return tuple(dict.fromkeys(tokens))

    def chat(self, messages: str | list[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """Token ids of a conversation, or of one user message, with the generation prompt."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("this target has no chat template: pass token ids, or load a tokenizer that has one")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        kwargs = {"add_generation_prompt": True, "return_dict": False, **template_kwargs}
        return self.tokenizer.apply_chat_template(messages, **kwargs)

    def default_sampling(self, **fields: Any) -> Sampling:
        """The sampling of the model's generation config with `fields` replaced; ValueError for unsupported settings."""
        refuse_fields(self.model.generation_config)
        config, _ = self.model._prepare_generation_config(None)  # with transformers' defaults, as a top-k of 50
        processors = self.model._get_logits_processor(generation_config=config, input_ids_seq_length=1)
        sampling = Sampling.from_processors(processors, **({} if config.do_sample else {"temperature": 0.0}))
        return replace(sampling, **fields)

    @torch.inference_mode()
    def begin(
        self, prompt: list[int], choose: Choose, taps: tuple[int, ...] = (), room: int = 0, stream: Any = None
    ) -> Committed:
        """Prefill a prompt (less the prefix in the cache) and choose its next token; reserve `room` more cache rows.

        From here on the target serves this `stream` (any object) alone; calls with another one are refused.
        """
        self._check_prompt(prompt)
        self._check_taps(taps)
        with self.turn.take(stream):
            self.reader.check()
            hidden = self._prefill(prompt[self._rewind(prompt, taps, room) :])
            logits = self.head.logits(hidden[-1:])
            features = self.cache.tapped.buffer[0, :, : len(prompt)].transpose(0, 1).clone() if taps else None
        output = TargetOutput(DraftTree.chain(prompt[-1:]), logits, None, [len(prompt)], prompt[:-1])
        return Committed(torch.tensor(prompt), features, choose(output, [0])[0])

    def _rewind(self, text: list[int], taps: tuple[int, ...], room: int) -> int:
        """Cut the cache back to the longest prefix that it shares with `text`; returns the prefix's length."""
        beyond = len(text) > self.border
        if taps != self.taps or beyond != (len(self.text) > self.border):
            self.taps = taps
            self.text = []
            self.cache = TreeCache(self.config.num_hidden_layers)
        shared = min(_common_prefix(self.text, text), len(text) - 1)
        self.text = self.text[:shared]
        self.cache.length = shared
        self.cache.reserve(len(text) + room)
        return shared

    @torch.inference_mode()
    def extend(self, tokens: list[int], stream: Any = None) -> Tensor:
        """Read and commit these tokens; returns [V], the logits after the last of them."""
        with self.turn.hold(stream):
            self._check_border(len(self.text), len(self.text) + len(tokens))
            return self.head.logits(self._prefill(tokens)[-1])

    def _prefill(self, tokens: list[int]) -> Tensor:
        """Read and commit tokens in chunks; returns the LM head's input at the last chunk."""
        step = len(tokens) if len(self.text) + len(tokens) > self.border else PREFILL_CHUNK
        for first in range(0, len(tokens), step):
            chunk, start = tokens[first : first + step], len(self.text)
            hidden, _ = self._forward(torch.tensor(chunk), list(range(start, start + len(chunk))), None)
            self.text += chunk
            self.cache.length += len(chunk)
        return hidden

    @torch.inference_mode()
    def ahead(self, tokens: Tensor, depths: list[int], seen: Tensor, stream: Any = None) -> Tensor:
        """[K, V] logits of a draft's last K rows, which attend to `seen` [K, R] of its R rows; none is committed.

        Row i stands `depths[i]` positions behind the text, and the rows before the last K were read by earlier calls.
        """
        with self.turn.hold(stream):
            start = len(self.text)
            self.cache.length = start + len(depths) - len(tokens)
            try:
                return self.head.logits(self._forward(tokens, [start + depth for depth in depths], seen)[0])
            finally:
                self.cache.length = start

    @torch.inference_mode()
    def read(self, tree: DraftTree, stream: Any = None) -> TargetOutput:
        """One forward over a tree: each node attends to the committed text, its ancestors and itself."""
        with self.turn.hold(stream):
            start = len(self.text)
            positions = [start + depth for depth in tree.depths()]
            self._check_border(start, max(positions) + 1)
            hidden, states = self._forward(tree.tokens, positions, None if len(tree) == 1 else tree.ancestors())
            next_positions = [position + 1 for position in positions]
            return TargetOutput(tree, self.head.logits(hidden), states, next_positions, self.text)

    def keep(self, tree: DraftTree, path: list[int], stream: Any = None) -> None:
        """Commit the path's tokens and drop all other nodes from the cache, in place."""
        with self.turn.hold(stream):
            self.cache.keep(path)
            tokens = tree.tokens.tolist()
            self.text += [tokens[node] for node in path]

    def forget(self) -> None:
        """Drop the prefix cache, which is kept between answers; needed after the model's weights have changed."""
        with self.turn.take(None):
            self.text = []
            self.cache.length = 0

    def levels(self, wanted: int) -> int:
        """How many of the wanted draft levels fit: no draft may cross the border of longrope frequencies."""
        start = len(self.text)
        return wanted if start > self.border or start + 1 + wanted <= self.border else int(self.border) - start - 1

    @torch.no_grad()
    def features(self, tokens: Tensor, taps: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """[B, T, L, D], tapped states of right-padded tokens [B, T], by one plain forward without a cache."""
        self._check_taps(taps)
        with self.turn.lock, self.reader.tapping(taps) as tapped:
            tapped[-1] = self.reader.read_texts(tokens.to(self.device))
        states = [tapped[tap].to(self.device, dtype) for tap in taps if tap in tapped]
        if len(states) < len(taps) or any(state.shape != states[0].shape for state in states):
            shapes = {tap: tuple(state.shape) for tap, state in tapped.items()}
            raise ValueError(
                f"{self.config.model_type} hands states of different shapes from layer to layer, {shapes}, expected "
                f"[batch, tokens, width] at taps {taps} (-1 is the LM head's input): its layers cannot be tapped"
            )
        return torch.stack(states, dim=2)

    def _forward(self, tokens: Tensor, positions: list[int], seen: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The LM head's input [N, D] and the tapped states [N, L, D] at the N last rows; `seen` as in Masks."""
        tapping: Any = self.reader.tapping(self.taps) if self.taps else nullcontext({})
        with tapping as tapped:
            tapped[-1] = self.reader(tokens, positions, seen, len(self.text), self.cache)
        if not self.taps:
            return tapped[-1][0], None
        states = torch.stack([tapped[tap].to(self.device) for tap in self.taps], dim=1)  # [1, L, N, D]
        self.cache.tapped.write(self.cache.length, states)
        return tapped[-1][0], states[0].transpose(0, 1)

    def _check_taps(self, taps: tuple[int, ...]) -> None:
        count = len(self.layers)
        if wrong := [tap for tap in taps if not -1 <= tap < count]:
            raise ValueError(
                f"taps {wrong} are no layer inputs of this target: expected 0..{count - 1}, or -1 for the LM head's "
                f"input ({count} would be ambiguous: with or without the final norm)"
            )

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise ValueError("the prompt is empty: expected at least one token id")
        if wrong := [token for token in prompt if not 0 <= token < self.vocab_size]:
            raise ValueError(f"token ids {wrong[:5]} are outside the vocabulary: expected 0..{self.vocab_size - 1}")
        if self.max_positions is not None and len(prompt) > self.max_positions:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, this model has {self.max_positions} positions: shorten it"
            )

    def _check_border(self, start: int, end: int) -> None:
        if 0 < start <= self.border < end:  # one set of frequencies must read the whole text
            raise ValueError(
                f"{self.config.model_type} reads texts of more than {self.border} tokens with other rotary frequencies "
                f"throughout, and so cannot grow from {start} tokens to {end}: keep prompt and max_new_tokens within "
                f"{self.border} together, or begin with a prompt that is longer than that"
            )


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
