"""EAGLE-3's network: it reads a token and several fused states of the target, and has an LM head of its vocabulary."""

# L taps, H hidden, D draft vocabulary, V vocabulary, P width of a token's projection

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eagle.core.drafter import HeadShape, Parts, TargetHead
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
from eagle.drafters.parts.reduced_vocab import choose_draft_vocab, draft_vocab_size
from eagle.drafters.recurrent.unroll import UnrolledDrafter
from eagle.recipe import Section
from eagle.target.weights.packed import PackedHead, pack_head


class FusedSettings(Section):
    """Settings of such a network in a recipe."""

    # layers whose inputs the head reads; by default layer 2, the middle layer and the third layer from the end
    taps: tuple[int, ...] | None = None
    # draft only this many tokens, the most frequent ones, or those in a file; null: all
    draft_vocab: int | str | None = None
    # initial weights of the LM head: the target's, or random
    lm_head: Literal["target", "random"] = "target"
    train_lm_head: bool = True  # train the LM head
    # initial query weights: half of them as twice the key weights, or all random
    queries: Literal["keys", "random"] = "keys"
    # initial weights of the other linear layers: PyTorch's default, or "normal": N(0, 0.02)
    linears: Linears = "uniform"
    fc_norm: bool = False  # EAGLE-3.1: normalise each tap
    # the residual connection around attention starts from the normalised state
    norm_before_residual: bool = False
    loss: Kind = "cross_entropy"  # divergence from the target's probabilities
    # MLP width; by default the target's (set it for mixtures of experts)
    intermediate_size: int | None = None


class FusedHead(UnrolledDrafter):
    """(states of token i, token i + 1) -> a state whose logits predict token i + 2."""

    settings: FusedSettings
    teacher_taps = (-1,)

    def __init__(self, settings: FusedSettings, shape: HeadShape) -> None:
        """Make the network: a matrix that joins the tapped layers' states, decoder blocks, a norm and an LM head.

        Args:
            settings: Of the recipe, with the taps filled in.
            shape: The head's sizes, with `draft_vocab_size`.
        """
        super().__init__(settings, shape)
        # `for_target` fills in the default
        assert settings.taps is not None
        self.taps = settings.taps
        width = shape.hidden_size
        eps = shape.rms_norm_eps
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        tap_norms = [Norm(width, eps) for _ in self.taps] if settings.fc_norm else []
        self.fc_norm = nn.ModuleList(tap_norms)
        # made before the first block, as the first random weights follow from the order
        more_blocks = [NormedBlock(shape) for _ in range(1, shape.num_hidden_layers)]
        first_block = TwoNormBlock(shape, settings.norm_before_residual)
        self.layers = nn.ModuleList([first_block, *more_blocks])
        self.norm = Norm(width, eps)
        self.lm_head = nn.Linear(width, draft_vocab_size(shape), bias=False)
        self.lm_head.weight.requires_grad_(settings.train_lm_head)
        self.add_tables(shape)
        self.rotary = Rotary(shape)

    @property
    def parts(self) -> Parts:
        """The weights that a faulty conversion may have in a wrong order, which `eagle doctor` checks.

        `fc` and its norms have a part for each tap (target layer whose input is read). The matrices of the first
        block's queries, keys and values have two halves, which read the embedding and the state.
        """
        by_tap = ("fc.weight", "fc_norm") if self.fc_norm else ("fc.weight",)
        halves = tuple(f"layers.0.self_attn.{name}_proj.weight" for name in "qkv")
        return Parts(by_tap=by_tap, halves=(halves,))

    @classmethod
    def taps_for(cls, settings: FusedSettings, target_config: Any) -> tuple[int, ...]:
        """Return the taps, the target's layers whose inputs the head reads.

        They are those of the settings, by default an early, a middle and a late layer. ValueError if the target lacks
        one.
        """
        layers = target_config.num_hidden_layers
        # EAGLE-3's published taps if the target is deep enough for them to differ
        usual = (2, layers // 2, layers - 3) if layers > 6 else (1, layers // 2, layers - 1)
        return check_taps(settings.taps or usual, layers)

    @classmethod
    def for_target(
        cls,
        settings: Any,
        target_config: Any,
        target_head: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> FusedHead:
        """Return a new head with the target's sizes.

        Args:
            settings: Of the recipe.
            target_config: The target's config.
            target_head: The target's LM head. The head's own LM head starts from its rows of the draft vocabulary, if
                the settings say so.
            supervised: The supervised tokens of each sequence; the most frequent become the draft vocabulary if the
                settings give its size.
        """
        drafts = choose_draft_vocab(settings.draft_vocab, supervised, target_config.vocab_size)
        shape = head_shape(target_config, draft_vocab_size=len(drafts), **cls.sizes(settings))
        head = cls(
            settings.model_copy(update={"taps": cls.taps_for(settings, target_config)}), shape
        )
        draw_linears(head, settings.linears)
        head.fill_tables(drafts)  # the tables between the ids of draft tokens and of the target's
        # queries that start as keys let a token attend to itself, which random queries learn late
        if settings.queries == "keys":
            head.layers[0].self_attn.start_from_keys()
        if settings.lm_head == "target":
            if target_head is None:
                raise ValueError(
                    "drafter.lm_head is 'target', whose head was not given: call for_target with `target_head`"
                )
            rows = target_head.start_matrix()
            if head.drafts is not None:
                rows = rows[drafts.to(rows.device)]
            head.lm_head.weight.data.copy_(rows)
        return head

    @classmethod
    def sizes(cls, settings: Any) -> dict[str, int]:
        """Return the keys of the head's config that the settings decide; all other sizes are the target's."""
        return (
            {"intermediate_size": settings.intermediate_size} if settings.intermediate_size else {}
        )

    def bind(self, target_head: TargetHead) -> FusedHead:
        """Give the head the target's embedding and LM head, which it needs to draft, and return the head.

        If the target's LM head is packed in oneDNN's layout, which is faster on CPUs, the head's own LM head is packed
        too, in place.
        """
        if isinstance(target_head.output, PackedHead):
            pack_head(self.lm_head)
        super().bind(target_head)
        return self

    # -- one level ----------------------------------------------------------------------------------------------------

    def fuse_taps(self, features: Tensor) -> Tensor:
        """Return the state [.., H] that the first level reads: the target's states at L layers, joined by a matrix.

        `features` are these states [.., L, H], H the hidden size.
        """
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
        """Return the first block's output [B, T, H] at T tokens of B sequences (H: the hidden size); drafting calls it.

        A token's embedding is read with a state `hidden`, [B, T, H] each. `rotary` are cosines and sines at the tokens'
        positions, `mask` is the additive attention mask (None: causal), and `cache` the block's KV cache.
        """
        return self.layers[0].read_pair(embedded, hidden, rotary, mask, cache)

    def project_tokens(self, embedded: Tensor) -> Tensor:
        """Return the tokens' part [N, P] of queries, keys and values, computed once for all draft steps in training.

        `embedded` are the embeddings [N, hidden size] of N tokens. P is the width of queries, keys and values together.
        """
        return self.layers[0].project_tokens(embedded)

    def block_inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of the first block in training, at N slots (tokens that are read with a state).

        Args:
            tokens: What `project_tokens` returned for the slots' tokens [N, ..].
            hidden: The states that the slots read [N, hidden size].

        Returns:
            The projected tokens, the normed states and the residual, as `TwoNormBlock.key_value` takes them.
        """
        return tokens, *self.layers[0].norm_hidden(hidden)

    def logits(self, state: Tensor, target_head: TargetHead) -> Tensor:
        """Return the logits [.., D] of states [.., hidden size] by the head's own LM head.

        They are over the D tokens that the head can draft. `target_head` is not used: heads of other methods need it.
        """
        return self.lm_head(self.norm(state))
