"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): three fused layers of the target, distillation alone, own LM head."""

# N rows, S supervised slots, K steps, H width, D tokens that can be drafted, V vocabulary

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from eagle.core.drafter import TargetHead
from eagle.data.examples import Batch, most_frequent, token_counts
from eagle.drafters.parts.blocks import Cache, Norm, NormedBlock, Rotary, TwoNormBlock, head_shape
from eagle.drafters.parts.objectives import Kind, Objective, OwnHead, align_steps, distillation_loss, step_weights
from eagle.drafters.parts.reduced_vocab import load_draft_vocab
from eagle.drafters.parts.unroll import UnrolledDrafter
from eagle.drafters.parts.window import Window


class Eagle3Settings(BaseModel):
    """What a recipe may say about the head."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["eagle3"] = "eagle3"
    taps: tuple[int, ...] | None = None  # inputs of which layers it reads; 2, the middle one, the last but two
    steps: int = Field(7, ge=1)  # that it is trained to go on from its own states
    decay: float = Field(0.8, gt=0, le=1)  # of a step's weight
    draft_vocab: int | str | None = None  # so many of the most frequent tokens, or a file from data_prep.draft_vocab
    lm_head: Literal["target", "random"] = "target"  # from where its LM head starts
    train_lm_head: bool = True
    queries: Literal["keys", "random"] = "keys"  # what half of them start as: from random, few find their own token
    fc_norm: bool = False  # EAGLE-3.1: a norm on each tap
    norm_output: bool = False  # EAGLE-3.1: the next level reads the normed state
    norm_before_residual: bool = False  # attention is added to the normed state
    loss: Kind = "cross_entropy"
    intermediate_size: int | None = None  # of its MLP; that of the target, but for a mixture of experts
    window: Window | None = None  # {sinks: S, recent: R}: of a text it sees the first S rows and the latest R


class Eagle3(UnrolledDrafter):
    """(three states of token i, token i + 1) -> a state whose logits name token i + 2, and that the next step reads."""

    teacher_taps = (-1,)
    d2t: Tensor  # [D], what to add to a draft token's number to get the target's; missing where all can be drafted
    t2d: Tensor  # [V], which those are
    Settings = Eagle3Settings

    def __init__(self, settings: Eagle3Settings, shape: Any) -> None:
        super().__init__(settings, shape)
        assert settings.taps is not None
        self.taps = settings.taps
        width, norm = shape.hidden_size, lambda: Norm(shape.hidden_size, shape.rms_norm_eps)
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        self.fc_norm = nn.ModuleList([norm() for _ in self.taps if settings.fc_norm])
        further = [NormedBlock(shape) for _ in range(1, shape.num_hidden_layers)]
        self.layers = nn.ModuleList([TwoNormBlock(shape, settings.norm_before_residual), *further])
        self.norm = norm()
        draft_vocab_size = getattr(shape, "draft_vocab_size", None) or shape.vocab_size
        self.lm_head = nn.Linear(width, draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(settings.train_lm_head)
        if draft_vocab_size < shape.vocab_size:
            self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))
        self.rotary = Rotary(shape)
        self.cut: tuple[TargetHead, ...] = ()  # the target's head and its rows of those tokens, no part of this one

    @classmethod
    def taps_for(cls, settings: Eagle3Settings, target_config: Any) -> tuple[int, ...]:
        """The taps of the settings, else an early, a middle and a late layer as far as the target is deep enough."""
        layers = target_config.num_hidden_layers
        usual = (2, layers // 2, layers - 3) if layers > 6 else (1, layers // 2, layers - 1)
        taps = settings.taps or usual
        if len(set(taps)) < len(taps) or not all(-1 <= tap < layers for tap in taps):
            raise ValueError(
                f"drafter.taps is {taps} for a target of {layers} layers, expected different ones of 0 (the embedding) "
                f"to {layers - 1}, or -1 (behind the final norm): name them in the recipe"
            )
        return taps

    @classmethod
    def for_target(
        cls,
        settings: Eagle3Settings,
        target_config: Any,
        frozen: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> Eagle3:
        """A new head; its LM head starts from the target's rows of the draft vocabulary."""
        sizes = {"intermediate_size": settings.intermediate_size} if settings.intermediate_size else {}
        drafts = _draft_vocabulary(settings.draft_vocab, supervised, target_config.vocab_size)
        shape = head_shape(target_config, draft_vocab_size=len(drafts), **sizes)
        head = cls(settings.model_copy(update={"taps": cls.taps_for(settings, target_config)}), shape)
        if head.drafts is not None:
            head.d2t.copy_(drafts - torch.arange(len(drafts)))
            head.t2d[drafts] = True
        if settings.queries == "keys":
            head.layers[0].self_attn.start_from_keys()
        if settings.lm_head == "target":
            if frozen is None:
                raise ValueError("drafter.lm_head is 'target', whose head was not given: call for_target with `frozen`")
            rows = frozen.weight if head.drafts is None else frozen.weight[drafts.to(frozen.weight.device)]
            head.lm_head.weight.data.copy_(rows * frozen.logit_scale)
        return head

    @property
    def drafts(self) -> Tensor | None:  # type: ignore[override]
        """[D], the draft vocabulary; None for all tokens."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device) if "d2t" in self._buffers else None

    @property
    def network(self) -> dict[str, Any]:
        """What it reads, and where its norms stand."""
        named = ("taps", "norm_output", "norm_before_residual")
        further = {**self.further_blocks, **self.further_masks}
        return {"network": "fused", **further, **{name: getattr(self.settings, name) for name in named}}

    # -- one level ----------------------------------------------------------------------------------------------------

    def fuse_taps(self, features: Tensor) -> Tensor:
        """The taps fused."""
        if self.fc_norm:
            normed = [norm(features[..., tap, :]) for tap, norm in enumerate(self.fc_norm)]
            return self.fc(torch.cat(normed, dim=-1))
        return self.fc(features.flatten(-2))

    def first_block(
        self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """The block over token and state."""
        return self.layers[0].read_pair(embedded, hidden, rotary, mask, cache)

    def project_tokens(self, embedded: Tensor) -> Tensor:
        """The token's half of queries, keys and values."""
        return self.layers[0].project_tokens(embedded)

    def block_inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """The token's half, the state that attention reads, and the one that it is added to."""
        return tokens, *self.layers[0].norm_hidden(hidden)

    def next_input(self, state: Tensor) -> Tensor:
        """The state as it left the block, or normed."""
        return self.norm(state) if self.settings.norm_output else state

    def logits(self, state: Tensor, frozen: TargetHead) -> Tensor:
        """Its own LM head's logits."""
        return self.lm_head(self.norm(state))

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """The distillation loss of every step, at the slots that a draft can reach."""
        settings = self.settings
        unrolled = self.unroll(batch, frozen, settings.steps)
        in_draft_vocab = self.t2d[batch.tokens[unrolled.places + 2]] if self.drafts is not None else None
        weights = step_weights(unrolled.places, settings.steps, in_draft_vocab, settings.decay)
        student = align_steps(self.norm(state) for state in unrolled.states)
        true = batch.select_taps((-1,))[:, 0].index_select(0, unrolled.places + 1)
        own, dtype = OwnHead(self.lm_head.weight), frozen.weight.dtype  # that of the products, which autocast makes so
        teacher = self._narrow_to_draft_vocab(frozen)
        total, each = distillation_loss(student, true, weights, (own, teacher), Objective(settings.loss), dtype)
        return {"total": total, **{f"laws/{step}": value for step, value in enumerate(each)}}

    def _narrow_to_draft_vocab(self, frozen: TargetHead) -> TargetHead:
        """The target's head for the draft vocabulary alone, cut out once."""
        if self.drafts is None:
            return frozen
        if not self.cut or self.cut[0] is not frozen:
            self.cut = frozen, frozen.narrow(self.drafts)
        return self.cut[1]


def _draft_vocabulary(asked: int | str | None, supervised: Iterable[Tensor] | None, vocab_size: int) -> Tensor:
    """[D], the draft vocabulary in ascending order."""
    if asked is None:
        return torch.arange(vocab_size)
    if isinstance(asked, int):
        if supervised is None:
            raise ValueError(f"drafter.draft_vocab is {asked}, but no texts were given: call for_target with them")
        return most_frequent(token_counts(supervised, vocab_size), asked)
    _, t2d = load_draft_vocab(asked)
    if len(t2d) != vocab_size:
        raise ValueError(
            f"{asked} was made for a vocabulary of {len(t2d)}, this target has {vocab_size}: make it again with "
            "`python -m data_prep.draft_vocab`"
        )
    return t2d.nonzero()[:, 0]
