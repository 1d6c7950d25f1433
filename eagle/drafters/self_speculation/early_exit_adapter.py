"""Early exit with a trained adapter: a small network between the target's first layers and its LM head."""

# S supervised slots, H hidden, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from pydantic import Field
from torch import Tensor, nn

from eagle.core.drafter import HeadShape, Reads, TargetHead
from eagle.core.examples import Batch
from eagle.device import upload
from eagle.drafters.parts.decoder_block import Norm, head_shape
from eagle.drafters.parts.objectives import (
    Kind,
    Objective,
    distillation_loss,
    step_weights,
)
from eagle.drafters.parts.validation import ValidatedHead
from eagle.drafters.self_speculation.exit_state import ExitDrafter, exit_layer
from eagle.recipe import Section

FINAL_NORM = "model.norm.weight"  # in most families of transformers
OFFSET_NORMS = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
)  # model types whose norms multiply by 1 + weight


class EarlyExitAdapterSettings(Section):
    """Settings of the adapter in a recipe."""

    kind: Literal["early_exit_adapter"] = "early_exit_adapter"
    # number of the target's layers that draft; by default a third
    layers: int | None = Field(None, ge=1)
    # a norm, or a norm after a linear layer or an MLP
    adapter: Literal["norm", "linear", "mlp"] = "mlp"
    loss: Kind = "cross_entropy"  # divergence from the target's probabilities


class EarlyExitAdapter(ExitDrafter, ValidatedHead):
    """norm(x + rms(x) network(x / rms(x))) of a state x, the output of the target's first layers.

    At first the network is zero and the norm the target's, so that a new adapter changes nothing.
    """

    reads = Reads(view=True, kv_cache=True, weights=True)
    Settings = EarlyExitAdapterSettings
    settings: EarlyExitAdapterSettings

    def __init__(self, settings: EarlyExitAdapterSettings, shape: HeadShape) -> None:
        super().__init__(settings, shape)
        assert settings.layers is not None  # for_target decides
        width = shape.hidden_size
        self.layers = settings.layers
        # the states that training reads: the input of the layer after the drafting ones, and that of the LM head
        self.teacher_taps = (settings.layers, -1)
        # the last layer is zero, so that a new head drafts as the target's layers do without it
        linear = nn.Linear(width, width, bias=False)
        nn.init.zeros_(linear.weight)
        inner = (
            [nn.Linear(width, width, bias=False), nn.SiLU()] if settings.adapter == "mlp" else []
        )
        self.change = None if settings.adapter == "norm" else nn.Sequential(*inner, linear)
        self.norm = Norm(width, shape.rms_norm_eps)

    @classmethod
    def taps_for(cls, settings: EarlyExitAdapterSettings, target_config: Any) -> tuple[int, ...]:
        """Return the tap of the drafting layers' output, which training reads; a draft computes it itself."""
        layers = exit_layer(settings.layers, target_config.num_hidden_layers)
        if layers == target_config.num_hidden_layers:
            raise ValueError(
                f"drafter.layers is {layers}, expected fewer: these are all layers of this target"
            )
        return (layers,)

    @classmethod
    def context_taps(
        cls, settings: EarlyExitAdapterSettings, target_config: Any
    ) -> tuple[int, ...]:
        """Return the taps that training reads at every position: none, as the adapter reads one state at a time.

        A head with attention would need the states of all earlier tokens.
        """
        return ()

    @classmethod
    def for_target(
        cls,
        settings: EarlyExitAdapterSettings,
        target_config: Any,
        target_head: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
        weights: Callable[[str], Tensor] | None = None,
    ) -> EarlyExitAdapter:
        """Return a new adapter; with the target's weights it predicts at first what `early_exit` predicts.

        Args:
            settings: The adapter's settings, whose `layers` may be left to a default.
            target_config: The target's transformers config.
            target_head: Not used: the adapter borrows the LM head without a copy.
            supervised: Not used: the adapter drafts all tokens.
            weights: Returns a tensor of the target by its name; None leaves the norm's weights at their start.
        """
        # the drafting layers' output is the input of the layer of this number
        (layers,) = cls.taps_for(settings, target_config)
        head = cls(settings.model_copy(update={"layers": layers}), head_shape(target_config))
        # this norm multiplies by its weight, where some model types store the weight less one
        if weights is not None:
            # + True adds one
            head.norm.weight.data.copy_(
                weights(FINAL_NORM) + (target_config.model_type in OFFSET_NORMS)
            )
        return head

    @property
    def network(self) -> dict[str, Any]:
        """What decides the meaning of its weights: the number of layers before the adapter, and its kind."""
        return {
            "network": "early_exit_adapter",
            "layers": self.layers,
            "adapter": self.settings.adapter,
        }

    def adapt(self, state: Tensor) -> Tensor:
        """Return [.., H], the LM head's input, from the output [.., H] of the last drafting layer."""
        state = state.to(self.norm.weight.dtype)
        if self.change is not None:
            # x + rms(x) network(x / rms(x)), as states differ in size by token and layer; `size` is rms(x)
            size = state.float().square().mean(-1, keepdim=True).sqrt().to(state.dtype)
            state = state + size * self.change(state / size)
        normed: Tensor = self.norm(state)
        return normed

    # -- training -----------------------------------------------------------------------------------------------------

    def exit_states(self, batch: Batch, levels: int) -> tuple[Tensor, list[Tensor]]:
        """Return the indices [S] of the supervised slots among all tokens, and each level's LM head input [S, H].

        Level d of slot i, from 0 on, reads the drafting layers' output at token i + 1 + d, as a draft does. It predicts
        token i + 2 + d.
        """
        # the first token that a slot drafts is two after it
        slot_indices = upload(batch.loss_mask.nonzero()[:, 0] - 2, batch.tokens.device)
        # the first of the two taps: the drafting layers' output at every token
        states = batch.select_taps(self.teacher_taps[:1])[:, 0]
        level_states = []
        for level in range(levels):
            # every level reads the target's own states, as a draft runs the target's layers on its tokens
            following = batch.places_behind(slot_indices, 1 + level)
            level_states.append(self.adapt(states.index_select(0, following)))
        return slot_indices, level_states

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return the distillation loss of one level: all levels do the same, as each reads the target's own states."""
        # [S] and [S, H]
        slot_indices, (student,) = self.exit_states(batch, levels=1)
        # the target predicts token i + 2 from its state at token i + 1
        target_hidden = batch.select_taps((-1,))[:, 0].index_select(0, slot_indices + 1)
        # one step; adapter and target have the same LM head
        total, _ = distillation_loss(
            student[None],
            target_hidden,
            step_weights(slot_indices, 1),
            (target_head, target_head),
            objective=Objective(self.settings.loss),
            dtype=target_head.weight.dtype,
        )
        return {"total": total, "draft_probs/0": total.detach()}

    def draft_levels(
        self,
        batch: Batch,
        target_head: TargetHead,
        levels: int,
    ) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Return each level's LM head input [S, H] at the S supervised slots, and that head's `logits`.

        The LM head is the target's.
        """
        _, states = self.exit_states(batch, levels)
        return [(state, target_head.logits) for state in states]

    # -- drafting -----------------------------------------------------------------------------------------------------

    def exit_logits(self, hidden: Tensor, view: Any) -> Tensor:
        """Return the logits [.., V] of the last drafting layer's output [.., H], by the adapter and the LM head.

        The view, the target's layers, is not needed: the head is bound to the target's LM head.
        """
        return self.target_head.logits(self.adapt(hidden))
