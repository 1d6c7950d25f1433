"""The network of EAGLE-1 and HASS: one block that continues the target's last features."""

# N tokens of all sequences, S supervised slots, K steps, H hidden

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from eagle.core.drafter import HeadShape, Parts, TargetHead
from eagle.core.examples import Batch
from eagle.drafters.parts.decoder_block import (
    Block,
    Cache,
    NormedBlock,
    Rotary,
    head_shape,
)
from eagle.drafters.parts.objectives import (
    Objective,
    align_steps,
    distillation_loss,
    feature_regression,
    step_weights,
)
from eagle.drafters.parts.window import Window
from eagle.drafters.recurrent.unroll import UnrolledDrafter

# tokens: longer sequences get less noise than the setting, in proportion to their length
FULL_SPREAD = 512


class FeatureSettings(BaseModel):
    """Settings of any head with this network in a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    # bias in `fc`, the layer that combines token and feature; set it to false for vLLM
    fc_bias: bool = True
    # training noise on the features, U(-noise, noise) * 512 / T for T tokens, with T at least 512
    noise: float = 0.1
    # in `noise`, use the true T; a sequence of 16 tokens then gets 32 times the noise
    noise_as_published: bool = False
    # MLP width; by default the target's (set it for mixtures of experts)
    intermediate_size: int | None = None
    # {sinks: S, recent: R}: attend only to the first S and the latest R tokens
    window: Window | None = None
    regression: float = 1.0  # weight of the Smooth-L1 loss between predicted and true features
    cross_entropy: float = 0.1  # weight of the cross-entropy with the target's probabilities
    # learn and draft only this many tokens, the most frequent supervised ones; null: all
    loss_vocab: int | None = Field(default=None, ge=1)


class FeatureHead(UnrolledDrafter):
    """(feature of token i, token i + 1) -> feature of token i + 1, whose logits name token i + 2."""

    settings: FeatureSettings
    taps = (-1,)
    teacher_taps = (-1,)
    borrows_logits = True

    def __init__(self, settings: FeatureSettings, shape: HeadShape) -> None:
        """Make the network: a matrix that joins token and state, a block without input norm, and rotary tables."""
        super().__init__(settings, shape)
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=settings.fc_bias)
        # blocks after the first, which the published head does not have
        more_blocks = [NormedBlock(shape) for _ in range(1, shape.num_hidden_layers)]
        self.layers = nn.ModuleList([Block(shape), *more_blocks])
        self.rotary = Rotary(shape)
        self.add_loss_tokens()

    @property
    def parts(self) -> Parts:
        """The matrix whose halves read the embedding and the state; `eagle doctor` tests whether they were swapped."""
        return Parts(halves=(("fc.weight",),))

    @classmethod
    def for_target(
        cls,
        settings: FeatureSettings,
        target_config: Any,
        target_head: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> FeatureHead:
        """Return a new head with the target's sizes, but for the settings' MLP width.

        Args:
            settings: Of the recipe.
            target_config: The target's config.
            target_head: Not used, as the head has no LM head of its own.
            supervised: The supervised tokens of each sequence; with `loss_vocab` in the settings the loss compares
                probs of the most frequent ones.
        """
        sizes = (
            {"intermediate_size": settings.intermediate_size} if settings.intermediate_size else {}
        )
        head = cls(settings, head_shape(target_config, **sizes))
        head.count_loss_tokens(supervised)
        return head

    @property
    def network(self) -> dict[str, Any]:
        """The name of the network and its stack of blocks: the same for EAGLE-1 and HASS, which differ in training."""
        return {"network": "features", **self.stack}

    # -- one level ----------------------------------------------------------------------------------------------------

    def fuse_taps(self, features: Tensor) -> Tensor:
        """Return the state [.., width] that the head reads from the target's features [.., 1, width], of one layer."""
        return features[..., 0, :]

    def first_block(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """Return the first block's output [B, T, H] at T tokens of B sequences (H: the hidden size); drafting calls it.

        `rotary` are cosines and sines at the tokens' positions, `mask` is the additive attention mask (None: causal),
        and `cache` the block's KV cache.

        Args:
            embedded: The tokens' embeddings [B, T, H].
            hidden: The states that they are read with [B, T, H]. One matrix joins both.
        """
        fused = self.fc(torch.cat([embedded, hidden], dim=-1))
        return self.layers[0](fused, rotary, mask, cache)

    def project_tokens(self, embedded: Tensor) -> Tensor:
        """Return the tokens' part W_e e of the block's input [N, H], which serves all draft steps in training.

        `embedded` are the embeddings e [N, H] of N tokens, H the hidden size. W_e is the first half of the matrix `fc`,
        with its bias.
        """
        return F.linear(embedded, self.fc.weight[:, : embedded.shape[-1]], self.fc.bias)

    def block_inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the block's input W [e; f] = W_e e + W_f f [N, hidden size] twice, also as residual, in training.

        Args:
            tokens: W_e e [N, hidden size], which `project_tokens` returned for N tokens.
            hidden: The states f [N, hidden size].
        """
        fused = tokens + F.linear(hidden, self.fc.weight[:, -hidden.shape[-1] :])
        return fused, fused

    def logits(self, state: Tensor, target_head: TargetHead) -> Tensor:
        """Return the logits [.., V] that the target's LM head gives to the head's state [.., hidden size]."""
        return target_head.logits(state)

    # -- training -----------------------------------------------------------------------------------------------------

    def losses(
        self,
        batch: Batch,
        target_head: TargetHead,
        objective: Objective,
        steps: int = 1,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses of a batch over all draft steps.

        Args:
            batch: The sequences, with the target's states.
            target_head: The target's LM head, for student and teacher.
            objective: The divergence from the target's probs.
            steps: The number of draft steps: 1 trains on the target's features only (EAGLE-1).

        Returns:
            The Smooth-L1 loss of the features, and the distillation loss, each a mean over the supervised slots
            (tokens) and summed over the steps; and the distillation loss of each step [steps], for logs.
        """
        # no gradient flows from a step to the features that it reads, as published
        unrolled = self.unroll(
            batch, target_head, steps, detach=True, add_noise=partial(self._add_noise, batch)
        )
        # [S, width] at S supervised slots: slot i predicts the target's state i + 1; tap -1 is what its LM head reads
        target_hidden = batch.select_taps((-1,))[:, 0].index_select(0, unrolled.places + 1)
        student = align_steps(unrolled.states)  # [steps, S, hidden size]
        weights = step_weights(unrolled.places, steps)
        # Student and teacher are compared by the rows of one matrix, all or those of `loss_vocab`. The products with it
        # are most of a training step where the vocabulary is large.
        lm_head = self.narrow_once(target_head, self.loss_tokens)
        loss, step_losses = distillation_loss(
            student, target_hidden, weights, (lm_head, lm_head), objective
        )
        regression = feature_regression(student, target_hidden, weights)
        return regression, loss, step_losses

    def _add_noise(self, batch: Batch, features: Tensor) -> Tensor:
        """Return features [N, 1, width] at all N slots (tokens) plus uniform noise; unchanged outside of training.

        Noise makes the head robust to the errors of its own features (EAGLE-1).
        """
        if not (self.training and self.settings.noise):
            return features
        min_length = 1 if self.settings.noise_as_published else FULL_SPREAD
        return add_noise(batch, features, self.settings.noise, min_length)


def add_noise(
    batch: Batch,
    features: Tensor,
    spread: float,
    min_length: int = FULL_SPREAD,
) -> Tensor:
    """Return features plus uniform noise from each sequence's seed, which makes a head robust to its own errors.

    Args:
        batch: The sequences that the features belong to.
        features: [N, ..], at all N slots of the sequences: every token of a sequence but the last two.
        spread: The noise is U(-1, 1) * spread * 512 / T for a sequence of T tokens.
        min_length: The lowest T in this formula, so that short sequences do not get more noise than the setting.
    """
    noise = torch.empty_like(features, dtype=torch.float32)
    # the last two tokens of a sequence have no slot
    lengths = [max(length - 2, 0) for length in batch.lengths]
    for chunk, length, seed in zip(noise.split(lengths), batch.lengths, batch.seeds, strict=True):
        bound = spread * FULL_SPREAD / max(length, min_length)
        # its own generator, so that a sequence's noise does not depend on those in its batch
        generator = torch.Generator(noise.device).manual_seed(seed)
        chunk.uniform_(-bound, bound, generator=generator)
    return features + noise.to(features.dtype)
