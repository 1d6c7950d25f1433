"""MTP heads (DeepSeek-V3, arXiv 2412.19437; FastMTP, arXiv 2509.18362): one decoder block over token and state."""

# N tokens of all sequences, S supervised slots, H hidden

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from eagle.core.drafter import HeadShape, Parts, Reads, TargetHead
from eagle.core.examples import Batch
from eagle.drafters.parts.decoder_block import (
    Cache,
    Norm,
    NormedBlock,
    Rotary,
    head_shape,
)
from eagle.drafters.parts.objectives import (
    Loss,
    align_steps,
    choose_teacher,
    distillation_loss,
    step_weights,
)
from eagle.drafters.parts.target_blocks import (
    Weights,
    block_kind,
    copy_block,
    copy_target_blocks,
    copy_tensor,
    find_tensor,
)
from eagle.drafters.recurrent.unroll import UnrolledDrafter
from eagle.recipe import Section


class LayerLayout(NamedTuple):
    """Where a target's checkpoint has its MTP layer, and how its tensors are named there."""

    prefix: str  # begins the names of the layer's tensors
    names: tuple[str, str, str, str]  # of the modules that are enorm, hnorm, eh_proj and norm here
    block: str  # comes after the prefix in the names of the decoder block's tensors
    # the prefix that a second MTP layer has, by which a target with several is recognised
    second_prefix: str
    hidden_first: bool = False  # whether the projection reads the state before the token


def known_layouts(layers: int) -> tuple[LayerLayout, ...]:
    """Return the known layouts of a multi-token prediction layer in the checkpoint of a target with so many layers.

    They are those of DeepSeek-V3, MiMo and Qwen3-Next. Each tells how the layer's tensors are named.
    """
    deepseek = LayerLayout(
        prefix=f"model.layers.{layers}.",
        names=("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        block="",
        # the MTP layers are numbered after the target's layers
        second_prefix=f"model.layers.{layers + 1}.",
    )
    mimo = LayerLayout(
        prefix="model.mtp_layers.0.",
        names=("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        block="",
        second_prefix="model.mtp_layers.1.",
        hidden_first=True,
    )
    qwen = LayerLayout(
        prefix="mtp.",
        names=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        block="layers.0.",
        second_prefix="mtp.layers.1.",
    )
    return deepseek, mimo, qwen


class MtpSettings(Section):
    """Settings of the head in a recipe."""

    kind: Literal["mtp"] = "mtp"
    steps: int = Field(3, ge=1)  # number of tokens that training drafts from each position
    # weight of each step in the loss, relative to the step before; the weights sum to 1
    decay: float = Field(0.6, gt=0, le=1)
    # the layer's input is the state followed by the embedding, as in MiMo
    hidden_first: bool = False
    # `tokens`: cross-entropy with the tokens of the data; otherwise a divergence from the target's probabilities
    loss: Loss = "cross_entropy"
    # initial weights: the target's MTP layer (if there is none, its last decoder block), its last block, or random
    start: Literal["target", "last_block", "random"] = "target"
    # learn and draft only this many tokens, the most frequent supervised ones; null: all
    loss_vocab: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_loss_vocab(self) -> MtpSettings:
        """Refuse a part of the vocabulary beside a loss of the sequence's own tokens, some of which it lacks."""
        if self.loss_vocab is not None and self.loss == "tokens":
            raise ValueError(
                f"loss_vocab is {self.loss_vocab} and loss is tokens, expected a loss towards the target's probs, as "
                "cross_entropy: a sequence has tokens outside the most frequent ones; or set loss_vocab to null"
            )
        return self


class Mtp(UnrolledDrafter):
    """(state of token i, token i + 1) -> a normed state, which predicts token i + 2 and which the next step reads."""

    taps = (-1,)
    teacher_taps = (-1,)
    borrows_logits = True
    reads = Reads(weights=True)
    Settings = MtpSettings
    settings: MtpSettings

    def __init__(self, settings: MtpSettings, shape: HeadShape) -> None:
        """Make the layer: norms of embedding and state, their projection, a block, and the norm before the LM head."""
        super().__init__(settings, shape)
        width = shape.hidden_size
        self.enorm = Norm(width, shape.rms_norm_eps)
        self.hnorm = Norm(width, shape.rms_norm_eps)
        self.norm = Norm(width, shape.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([NormedBlock(shape)])
        self.rotary = Rotary(shape)
        self.add_loss_tokens()

    @property
    def parts(self) -> Parts:
        """The matrix whose halves read the embedding and the state; `eagle doctor` tests whether they were swapped."""
        return Parts(halves=(("eh_proj.weight",),))

    @classmethod
    def for_target(
        cls,
        settings: MtpSettings,
        target_config: Any,
        target_head: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
        weights: Weights | None = None,
    ) -> Mtp:
        """Return a new head that starts from the target's MTP layer, from its last block, or randomly.

        Args:
            settings: Of the recipe.
            target_config: The target's config.
            target_head: Not used.
            supervised: The supervised tokens of each sequence; with `loss_vocab` in the settings the loss compares
                probs of the most frequent ones.
            weights: Returns a target's tensor by its name; None for a random head.
        """
        head = cls._start_head(settings, target_config, weights)
        head.count_loss_tokens(supervised)
        return head

    @classmethod
    def _start_head(cls, settings: MtpSettings, config: Any, weights: Weights | None) -> Mtp:
        """Return a head with the weights that the setting `start` names; `config` is the target's.

        They are those of the target's own multi-token prediction layer, of its last block, or random. `weights` returns
        a target's tensor by its name.
        """
        if weights is None or settings.start == "random":
            return cls(settings, head_shape(config))
        layout = _find_mtp_layer(weights, config) if settings.start == "target" else None
        # `start` is "last_block", or it is "target" and the target has no MTP layer
        if layout is None:
            return cls._from_last_block(settings, config, weights)
        return cls._from_mtp_layer(settings, config, weights, layout)

    @classmethod
    def _from_last_block(cls, settings: MtpSettings, config: Any, weights: Weights) -> Mtp:
        """Return a head that starts with the target's last decoder block and final norm.

        Its projection starts as the mean of the normed token embedding and the normed state. `weights` returns a
        target's tensor by its name, and `config` is the target's.
        """
        # This start is the best of those that were tried. On the tiny target, after 2 epochs, the acceptance length is
        # 2.96; with a random projection it is 2.62, with the state alone 2.36, and with a random head 2.49.
        prefix = f"model.layers.{config.num_hidden_layers - 1}."
        shape = head_shape(config, **block_kind(weights, prefix))
        # the checkpoint of a head says how it did start
        head = cls(settings.model_copy(update={"start": "last_block"}), shape)
        copy_target_blocks(head.layers, head.norm, weights, config)
        # half of each of the two inputs
        head.eh_proj.weight.data.copy_(torch.eye(config.hidden_size).repeat(1, 2) / 2)
        return head

    @classmethod
    def _from_mtp_layer(
        cls,
        settings: MtpSettings,
        config: Any,
        weights: Weights,
        layout: LayerLayout,
    ) -> Mtp:
        """Return a head with the weights of the MTP layer in the target's checkpoint.

        Args:
            settings: Of the recipe.
            config: The target's.
            weights: Returns a target's tensor by its name.
            layout: How the tensors of the MTP layer are named.
        """
        prefix = layout.prefix + layout.block
        # the weights decide the order of token and state, whatever the recipe says
        settings = settings.model_copy(update={"hidden_first": layout.hidden_first})
        head = cls(settings, head_shape(config, **block_kind(weights, prefix)))
        copy_block(head.layers[0], weights, prefix, config)
        for module, name in zip(("enorm", "hnorm", "eh_proj", "norm"), layout.names, strict=True):
            copy_tensor(
                head.get_parameter(f"{module}.weight"),
                weights,
                f"{layout.prefix}{name}.weight",
                config,
            )
        return head

    @property
    def network(self) -> dict[str, Any]:
        """The network's name, and whether its projection reads the state before the token.

        Heads of one network can start from one another. Biases and norms by head are in the config.
        """
        return {"network": "mtp", "hidden_first": self.settings.hidden_first}

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
        """Return the block's output [B, T, H] at T tokens of B sequences (H: the hidden size); drafting calls it.

        It is h = Block(M [norm(e); norm(h')]), as in DeepSeek-V3: e are the embedded tokens, h' the states of the level
        before (`hidden`), [B, T, H] each, and M is `eh_proj`. MiMo has [norm(h'); norm(e)]. `rotary` are cosines and
        sines at the tokens' positions, `mask` is the additive attention mask (None: causal), and `cache` the block's KV
        cache.
        """
        halves = [self.enorm(embedded), self.hnorm(hidden)]
        if self.settings.hidden_first:
            halves.reverse()
        return self.layers[0](self.eh_proj(torch.cat(halves, dim=-1)), rotary, mask, cache)

    def project_tokens(self, embedded: Tensor) -> Tensor:
        """Return the tokens' part of the projection [N, hidden size], computed once for all draft steps in training.

        `embedded` are the embeddings [N, hidden size] of N tokens.
        """
        # the first half reads tokens
        return F.linear(self.enorm(embedded), self._halves()[0])

    def block_inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return attention's input, normed, and the residual, [N, hidden size] each, at N tokens; training calls it.

        Args:
            tokens: What `project_tokens` returned for the tokens [N, hidden size], to which the state's part is added.
            hidden: The states that the tokens are read with [N, hidden size].
        """
        return self.layers[0].inputs(tokens + F.linear(self.hnorm(hidden), self._halves()[1]))

    def _halves(self) -> tuple[Tensor, Tensor]:
        """Return the columns of `eh_proj` for tokens and those for states, [hidden size, hidden size] each.

        `eh_proj` joins the embedding of a token (e) and a state (h).
        """
        first, second = self.eh_proj.weight.chunk(2, dim=1)
        return (second, first) if self.settings.hidden_first else (first, second)

    def next_input(self, state: Tensor) -> Tensor:
        """Return the normed state [.., hidden size], which the next level reads in place of the target's."""
        return self.norm(state)

    def logits(self, state: Tensor, target_head: TargetHead) -> Tensor:
        """Return the logits [.., V] that the target's LM head gives to the head's states [.., width], normed first."""
        return target_head.logits(self.norm(state))

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return the distillation loss over all draft steps, a weighted mean.

        A slot i has the target's state of token i and token i + 1, and predicts token i + 2. It counts in step s if a
        draft that began s slots earlier reaches it. "total" is minimised, the losses of the steps are logged.
        """
        settings = self.settings
        unrolled = self.unroll(batch, target_head, settings.steps)
        # FastMTP's L = sum_s decay^s L_s / sum_s decay^s
        weights = step_weights(unrolled.places, settings.steps, decay=settings.decay)
        weights = weights / sum(settings.decay**step for step in range(settings.steps))
        student = align_steps(self.norm(state) for state in unrolled.states)
        # student and teacher are compared by the rows of one matrix, all or those of `loss_vocab`
        lm_head = self.narrow_once(target_head, self.loss_tokens)
        # the target's states or the sequences' tokens, the LM head that maps states to logits, and the divergence
        teacher, teacher_head, objective = choose_teacher(
            settings.loss, batch, unrolled.places, lm_head
        )
        heads = lm_head, teacher_head
        total, step_losses = distillation_loss(
            student, teacher, weights, heads, objective=objective, dtype=lm_head.weight.dtype
        )
        return {
            "total": total,
            **{f"draft_probs/{step}": value for step, value in enumerate(step_losses)},
        }


def _find_mtp_layer(weights: Weights, config: Any) -> LayerLayout | None:
    """Return the layout of the multi-token prediction (MTP) layer in the target's checkpoint, None without one.

    ValueError if it has several, because this head uses one layer for all levels.
    """
    for layout in known_layouts(config.num_hidden_layers):
        # every layout has a projection of another name, by which it is recognised
        # the names are of enorm, hnorm, eh_proj and norm
        _, _, projection, _ = layout.names
        if find_tensor(weights, f"{layout.prefix}{projection}.weight") is None:
            continue
        second = layout.second_prefix
        # every block has an input norm, so this tensor tells if there is a second MTP layer
        if find_tensor(weights, f"{second}input_layernorm.weight") is not None:
            raise ValueError(
                f"{config.model_type} has several MTP layers, as {second}, of which each drafts one level: got "
                "drafter.start=target, expected one layer for all levels: take drafter.start=last_block"
            )
        return layout
    return None
