"""Train a target with adapters together with heads on its states (Medusa-2): the model and the joint loss."""

# B texts, T tokens of the longest, S supervised slots, D target width

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.examples import Batch, Example, collate
from eagle.core.tree import Paths
from eagle.device import upload
from eagle.drafters.parts.objectives import distillation_loss
from eagle.drafters.parts.text_dropout import TextDropout
from eagle.recipe import JointSection
from eagle.target.loading import add_adapter
from eagle.target.structure import base_of


class AdapterDropout(nn.Dropout):
    """An adapter's dropout: of padded texts [B, T, ..] as their seeds decide, of other rows at random."""

    texts: TextDropout | None = None  # of the batch that is read

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, ..]."""
        if (
            self.texts is None
            or not self.training
            or x.ndim != 3
            or len(x) != len(self.texts.counts)
        ):
            return super().forward(x)
        return self.texts.drop_padded(x)


class StepPart(NamedTuple):
    """The facts of a step that its parts need."""

    seeds: tuple[int, ...] | None  # of its texts
    divisors: tuple[float, ...] | None  # of the heads, over the whole step
    share: float  # of the step's supervised slots


class Joint(nn.Module):
    """A target's model with adapters, and heads. `forward` is their loss; the state dict holds only trained weights."""

    def __init__(
        self, model: Any, head: TrainableDrafter, frozen: TargetHead, settings: JointSection
    ) -> None:
        super().__init__()
        if {*head.taps, *head.teacher_taps} != {-1}:
            raise ValueError(
                f"these heads read taps {head.taps} of the target, expected -1 alone, its LM head's input"
            )
        self.adapted = add_adapter(model, settings.rank, settings.alpha, settings.dropout)
        self.dropouts = _replace_dropouts(self.adapted)
        self.head = head
        self.frozen = frozen
        self.settings = settings
        # in a tuple, as it is a part of `adapted` already
        self.body = (base_of(model),)
        self.register_state_dict_post_hook(_drop_frozen)
        self.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())

    def forward(
        self, examples: Sequence[Example], heads_weight: float, part: StepPart | None = None
    ) -> dict[str, Tensor]:
        """Return the target's loss plus `heads_weight` times that of the heads, and its terms.

        Args:
            examples: The texts, without features.
            heads_weight: The weight of the heads' loss.
            part: What the texts count in their step; None where they are a whole one.
        """
        part = part or StepPart(seeds=None, divisors=None, share=1.0)
        dropout = None
        if part.seeds:
            counts = [len(example.tokens) for example in examples]
            dropout = TextDropout(
                self.settings.dropout, part.seeds, counts, self.frozen.weight.device
            )
        for module in self.dropouts:
            module.texts = dropout
        batch, original_states = self.read(examples, compare=self.settings.loss == "kl")
        target = part.share * self.target_loss(batch, original_states)
        batch = replace(batch, seeds=part.seeds or batch.seeds, divisors=part.divisors)
        # a loss that is divided by the step's divisors is a share already; what is repeated still weighs nothing
        share = part.share if part.divisors is None else float(part.share > 0)
        losses = {name: share * loss for name, loss in self.head(batch, self.frozen).items()}
        heads = losses.pop("total")
        return {"total": target + heads_weight * heads, "target": target, "heads": heads, **losses}

    def read(self, examples: Sequence[Example], *, compare: bool) -> tuple[Batch, Tensor | None]:
        """Return a batch with the adapted target's states, and the original target's [N, D] for comparison."""
        tokens = pad_sequence([example.tokens for example in examples], batch_first=True)
        tokens = upload(tokens, self.frozen.weight.device)
        batch = self.collate(examples, self.states(tokens))
        if not compare:
            return batch, None
        with torch.no_grad(), self.adapted.disable_adapter():
            original = self.collate(examples, self.states(tokens))
        return batch, original.features[:, 0]

    def states(self, tokens: Tensor) -> Tensor:
        """Return [B, T, D], the LM head's input at right-padded tokens [B, T]."""
        (body,) = self.body
        states: Tensor = body(input_ids=tokens, use_cache=False).last_hidden_state
        return states

    def collate(self, examples: Sequence[Example], states: Tensor) -> Batch:
        """Return a batch of examples with these states [B, T, D]."""
        texts = []
        for example, padded in zip(examples, states, strict=True):
            texts.append(replace(example, features=padded[: len(example.tokens), None]))
        return collate(texts, (-1,)).to(states.device)

    def target_loss(self, batch: Batch, original_states: Tensor | None) -> Tensor:
        """Return the target's loss at the supervised tokens: their cross-entropy, or KL(original, adapted)."""
        slots = upload(batch.loss_mask.nonzero()[:, 0], batch.tokens.device)
        # [1, S, D], one level of states, each of which predicts the token of the next slot
        states = batch.features[:, 0].index_select(0, slots - 1)[None]
        dtype = torch.promote_types(states.dtype, torch.float32)
        weights = torch.full(
            states.shape[:2], 1 / max(len(slots), 1), dtype=dtype, device=states.device
        )
        if original_states is None:
            tokens = batch.tokens.index_select(0, slots)
            return distillation_loss(states, tokens, weights, (self.frozen, None))[0]
        original = original_states.index_select(0, slots - 1)
        heads = (self.frozen, self.frozen)
        with torch.no_grad():
            # by the same products as the cross-entropy, so that equal states give exactly 0
            entropy = distillation_loss(original[None], original, weights, heads)[0]
        return distillation_loss(states, original, weights, heads)[0] - entropy

    @torch.no_grad()
    def validate(self, examples: Sequence[Example], trees: dict[str, Paths]) -> dict[str, Tensor]:
        """Return validation sums of the heads on the adapted target, and of its KL from the original target."""
        batch, original_states = self.read(examples, compare=True)
        kl = self.target_loss(batch, original_states) * batch.slots
        return {**self.head.validate(batch, self.frozen, trees), "kl": kl}

    def groups(self, lr: float) -> list[dict[str, Any]]:
        """Return the trained parameters in groups, with the learning rates of a step."""
        head_matrices = {id(weight) for weight in self.head.parameters() if weight.ndim > 1}
        slow: list[Tensor] = []
        fast: list[Tensor] = []
        for weight in self.parameters():
            if weight.requires_grad:
                (fast if id(weight) in head_matrices else slow).append(weight)
        return [{"params": slow, "lr": lr}, {"params": fast, "lr": lr * self.settings.head_lr}]

    def merge(self) -> Any:
        """Return the new target: the model with its adapters merged into its weights."""
        return self.adapted.merge_and_unload()


def _replace_dropouts(adapted: nn.Module) -> tuple[AdapterDropout, ...]:
    """Give the adapters dropouts that know texts."""
    for layer in adapted.modules():
        dropouts: Any = getattr(layer, "lora_dropout", {})
        for name, module in dropouts.items():
            if isinstance(module, nn.Dropout):
                # an adapter without dropout has an identity here
                dropouts[name] = AdapterDropout(module.p)
    return tuple(module for module in adapted.modules() if isinstance(module, AdapterDropout))


def heads_weight(settings: JointSection, step: int, steps: int) -> float:
    """Return the weight of the heads' loss in a step: 1, or a share that rises as a quarter sine over the run."""
    if not settings.rise:
        return settings.heads
    return settings.heads * math.sin(math.pi / 2 * step / steps)


def _drop_frozen(joint: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Remove frozen weights from the state dict, or a checkpoint would hold the whole target."""
    trained = {prefix + name for name, weight in joint.named_parameters() if weight.requires_grad}
    for name in list(state):
        if name.startswith(prefix) and name not in trained:
            del state[name]
