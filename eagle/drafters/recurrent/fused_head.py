"""EAGLE-3's network: several states of the target fused, a token beside them, an LM head for a draft vocabulary."""

# L taps, H hidden, D tokens that can be drafted, V vocabulary, P what a token is projected to

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eagle.core.drafter import HeadShape, Parts, TargetHead
from eagle.core.examples import most_frequent, token_counts
from eagle.drafters.parts.decoder_block import (
    Cache,
    Linears,
    Norm,
    NormedBlock,
    Rotary,
    TwoNormBlock,
    check_taps,
    draw_linears,
    head_shape,
)
from eagle.drafters.parts.objectives import Kind
from eagle.drafters.recurrent.reduced_vocab import load_draft_vocab
from eagle.drafters.recurrent.unroll import UnrolledDrafter
from eagle.recipe import Section
from eagle.target.weights.packed import PackedHead, pack_head


class FusedSettings(Section):
    """Settings of such a network in a recipe."""

    # layers whose inputs it reads; by default 2, the middle one, the last but two
    taps: tuple[int, ...] | None = None
    # so many of the most frequent tokens, or a file of data_prep.draft_vocab
    draft_vocab: int | str | None = None
    lm_head: Literal["target", "random"] = "target"  # what its LM head starts from
    train_lm_head: bool = True  # train its LM head
    # what half of them start as: from random, few find their own token
    queries: Literal["keys", "random"] = "keys"
    # how its other linear layers start: as torch draws them, or "normal": N(0, 0.02)
    linears: Linears = "uniform"
    fc_norm: bool = False  # EAGLE-3.1: a norm on each tap
    norm_before_residual: bool = False  # attention is added to the normed state
    loss: Kind = "cross_entropy"  # how far its probs are from the target's
    # of its MLP; by default the target's, but for mixtures of experts
    intermediate_size: int | None = None


class FusedHead(UnrolledDrafter):
    """(states of token i, token i + 1) -> a state whose logits predict token i + 2."""

    settings: FusedSettings
    teacher_taps = (-1,)
    d2t: Tensor  # [D], what to add to a draft token's number to get the target's; missing where all can be drafted
    t2d: Tensor  # [V], which those are

    def __init__(self, settings: FusedSettings, shape: HeadShape) -> None:
        super().__init__(settings, shape)
        assert settings.taps is not None
        self.taps = settings.taps
        width = shape.hidden_size
        eps = shape.rms_norm_eps
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        tap_norms = [Norm(width, eps) for _ in self.taps] if settings.fc_norm else []
        self.fc_norm = nn.ModuleList(tap_norms)
        further = [NormedBlock(shape) for _ in range(1, shape.num_hidden_layers)]
        self.layers = nn.ModuleList([TwoNormBlock(shape, settings.norm_before_residual), *further])
        self.norm = Norm(width, eps)
        # engines read both tables, and only of heads whose vocabulary is smaller than the target's
        draft_vocab_size = getattr(shape, "draft_vocab_size", None) or shape.vocab_size
        self.lm_head = nn.Linear(width, draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(settings.train_lm_head)
        if draft_vocab_size < shape.vocab_size:
            self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))
        self.rotary = Rotary(shape)
        # the target's head and its rows for the draft vocabulary; in a tuple, so that it is no module of this one
        self.narrowed: tuple[TargetHead, ...] = ()

    @property
    def parts(self) -> Parts:
        """A matrix and norms by tap, and queries, keys and values of the first block over embedding and state."""
        by_tap = ("fc.weight", "fc_norm") if self.fc_norm else ("fc.weight",)
        halves = tuple(f"layers.0.self_attn.{name}_proj.weight" for name in "qkv")
        return Parts(by_tap=by_tap, halves=(halves,))

    @classmethod
    def taps_for(cls, settings: FusedSettings, target_config: Any) -> tuple[int, ...]:
        """Return the taps of the settings, else an early, a middle and a late layer."""
        layers = target_config.num_hidden_layers
        # the published taps, as far as the target is deep enough
        usual = (2, layers // 2, layers - 3) if layers > 6 else (1, layers // 2, layers - 1)
        return check_taps(settings.taps or usual, layers)

    @classmethod
    def for_target(
        cls,
        settings: Any,
        target_config: Any,
        frozen: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> FusedHead:
        """Return a new head; its LM head starts from the target's rows of the draft vocabulary."""
        drafts = _draft_vocabulary(settings.draft_vocab, supervised, target_config.vocab_size)
        shape = head_shape(target_config, draft_vocab_size=len(drafts), **cls.sizes(settings))
        head = cls(
            settings.model_copy(update={"taps": cls.taps_for(settings, target_config)}), shape
        )
        draw_linears(head, settings.linears)
        if head.drafts is not None:
            head.d2t.copy_(drafts - torch.arange(len(drafts)))
            head.t2d[drafts] = True
        # queries that start as keys let a token find itself, which random ones learn late
        if settings.queries == "keys":
            head.layers[0].self_attn.start_from_keys()
        if settings.lm_head == "target":
            if frozen is None:
                raise ValueError(
                    "drafter.lm_head is 'target', whose head was not given: call for_target with `frozen`"
                )
            rows = frozen.start_matrix()
            if head.drafts is not None:
                rows = rows[drafts.to(rows.device)]
            head.lm_head.weight.data.copy_(rows)
        return head

    @classmethod
    def sizes(cls, settings: Any) -> dict[str, int]:
        """Return the sizes that settings decide; all others are the target's, with one block."""
        return (
            {"intermediate_size": settings.intermediate_size} if settings.intermediate_size else {}
        )

    @property
    def drafts(self) -> Tensor | None:  # type: ignore[override]
        """[D], the draft vocabulary; None for all tokens."""
        if "d2t" not in self._buffers:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def bind(self, frozen: TargetHead) -> FusedHead:
        """Give the head what it borrows; its own LM head is packed where the target's is."""
        if isinstance(frozen.output, PackedHead):
            pack_head(self.lm_head)
        super().bind(frozen)
        return self

    # -- one level ----------------------------------------------------------------------------------------------------

    def fuse_taps(self, features: Tensor) -> Tensor:
        """Return the taps, fused."""
        if self.fc_norm:
            normed = [norm(features[..., tap, :]) for tap, norm in enumerate(self.fc_norm)]
            return self.fc(torch.cat(normed, dim=-1))
        return self.fc(features.flatten(-2))

    def first_block(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """Return the block's output over token and state."""
        return self.layers[0].read_pair(embedded, hidden, rotary, mask, cache)

    def project_tokens(self, embedded: Tensor) -> Tensor:
        """Return the token's half of queries, keys and values."""
        return self.layers[0].project_tokens(embedded)

    def block_inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the token's half, the state that attention reads, and the one that it is added to."""
        return tokens, *self.layers[0].norm_hidden(hidden)

    def logits(self, state: Tensor, frozen: TargetHead) -> Tensor:
        """Return its own LM head's logits."""
        return self.lm_head(self.norm(state))

    def narrow_to_draft_vocab(self, frozen: TargetHead) -> TargetHead:
        """Return the target's head for the draft vocabulary alone, cut out once."""
        if self.drafts is None:
            return frozen
        if not self.narrowed or self.narrowed[0] is not frozen:
            self.narrowed = frozen, frozen.narrow(self.drafts)
        return self.narrowed[1]


def _draft_vocabulary(
    requested: int | str | None, supervised: Iterable[Tensor] | None, vocab_size: int
) -> Tensor:
    """Return [D], the draft vocabulary in ascending order: all tokens, the most frequent ones, or those of a file."""
    if requested is None:
        return torch.arange(vocab_size)
    if isinstance(requested, int):
        if supervised is None:
            raise ValueError(
                f"drafter.draft_vocab is {requested}, but no texts were given: call for_target with them"
            )
        return most_frequent(token_counts(supervised, vocab_size), requested)
    _, t2d = load_draft_vocab(requested)
    if len(t2d) != vocab_size:
        raise ValueError(
            f"{requested} was made for a vocabulary of {len(t2d)}, this target has {vocab_size}: make it again with "
            "`eagle prepare --only draft-vocab`"
        )
    return t2d.nonzero()[:, 0]
