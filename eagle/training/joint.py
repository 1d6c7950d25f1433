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
        if self.texts is None or not self.training or x.ndim != 3 or len(x) != len(self.texts.counts):
            return super().forward(x)
        return self.texts.drop_padded(x)


class StepPart(NamedTuple):
    """The facts of a step that its parts need."""

    seeds: tuple[int, ...] | None  # of its texts
    divisors: tuple[float, ...] | None  # of the heads, over the whole step
    share: float  # of the step's supervised slots


class Joint(nn.Module):
    """A target's model with adapters, and heads. `forward` is their loss; the state dict holds only trained weights."""

    def __init__(self, model: Any, head: TrainableDrafter, frozen: TargetHead, settings: JointSection) -> None:
        super().__init__()
        if {*head.taps, *head.teacher_taps} != {-1}:
            raise ValueError(f"these heads read taps {head.taps} of the target, expected -1 alone, its LM head's input")
        self.adapted = add_adapter(model, settings.rank, settings.alpha, settings.dropout)
        self.dropouts = _replace_dropouts(self.adapted)
        self.head, self.frozen, self.settings = head, frozen, settings
        self.body = (base_of(model),)  # in a tuple, as it is a part of `adapted` already
        self.register_state_dict_post_hook(_drop_frozen)
        self.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())

    def forward(self, examples: Sequence[Example], heads: float, part: StepPart | None = None) -> dict[str, Tensor]:
        """The target's loss plus `heads` times that of the heads: of whole steps, or what a part counts in its step."""
        part = part or StepPart(None, None, 1.0)
        counts, device = [len(example.tokens) for example in examples], self.frozen.weight.device
        texts = part.seeds and TextDropout(self.settings.dropout, part.seeds, counts, device)
        for dropout in self.dropouts:
            dropout.texts = texts or None
        batch, before = self.read(examples, compare=self.settings.loss == "kl")
        target = part.share * self.target_loss(batch, before)
        batch = replace(batch, seeds=part.seeds or batch.seeds, divisors=part.divisors)
        share = part.share if part.divisors is None else float(part.share > 0)
        losses = {name: share * loss for name, loss in self.head(batch, self.frozen).items()}
        total = losses.pop("total")
        return {"total": target + heads * total, "target": target, "heads": total, **losses}

    def read(self, examples: Sequence[Example], *, compare: bool) -> tuple[Batch, Tensor | None]:
        """A batch with the adapted target's states, and the states [N, D] of the original target for comparison."""
        tokens = pad_sequence([example.tokens for example in examples], batch_first=True)
        tokens = upload(tokens, self.frozen.weight.device)
        batch = self.collate(examples, self.states(tokens))
        if not compare:
            return batch, None
        with torch.no_grad(), self.adapted.disable_adapter():
            return batch, self.collate(examples, self.states(tokens)).features[:, 0]

    def states(self, tokens: Tensor) -> Tensor:
        """[B, T, D], the LM head's input at right-padded tokens [B, T]."""
        (body,) = self.body
        states: Tensor = body(input_ids=tokens, use_cache=False).last_hidden_state
        return states

    def collate(self, examples: Sequence[Example], states: Tensor) -> Batch:
        """A batch of examples with these states [B, T, D]."""
        rows = [states[row, : len(example.tokens), None] for row, example in enumerate(examples)]
        texts = [replace(example, features=features) for example, features in zip(examples, rows, strict=True)]
        return collate(texts, (-1,)).to(states.device)

    def target_loss(self, batch: Batch, before: Tensor | None) -> Tensor:
        """The target's loss at the supervised tokens: their cross-entropy, or KL(original target, adapted target)."""
        slots = upload(batch.loss_mask.nonzero()[:, 0], batch.tokens.device)
        states = batch.features[:, 0].index_select(0, slots - 1)[None]
        wide = torch.promote_types(states.dtype, torch.float32)
        weights = torch.full(states.shape[:2], 1 / max(len(slots), 1), dtype=wide, device=states.device)
        if before is None:
            return distillation_loss(states, batch.tokens.index_select(0, slots), weights, (self.frozen, None))[0]
        taught, heads = before.index_select(0, slots - 1), (self.frozen, self.frozen)
        with torch.no_grad():  # by the same products as the cross-entropy, so that equal states give exactly 0
            entropy = distillation_loss(taught[None], taught, weights, heads)[0]
        return distillation_loss(states, taught, weights, heads)[0] - entropy

    @torch.no_grad()
    def validate(self, examples: Sequence[Example], trees: dict[str, Paths]) -> dict[str, Tensor]:
        """Validation sums of the heads on the adapted target, and of its KL from the original target."""
        batch, before = self.read(examples, compare=True)
        kl = self.target_loss(batch, before) * batch.slots
        return {**self.head.validate(batch, self.frozen, trees), "kl": kl}

    def groups(self, lr: float) -> list[dict[str, Any]]:
        """The trained parameters in groups, with the learning rates of a step."""
        trained = [part for part in self.parameters() if part.requires_grad]
        matrices = {id(part) for part in self.head.parameters() if part.ndim > 1}
        fast, slow = ([part for part in trained if (id(part) in matrices) == wanted] for wanted in (True, False))
        return [{"params": slow, "lr": lr}, {"params": fast, "lr": lr * self.settings.head_lr}]

    def merge(self) -> Any:
        """The new target: the model with its adapters merged into its weights."""
        return self.adapted.merge_and_unload()


def _replace_dropouts(adapted: nn.Module) -> tuple[AdapterDropout, ...]:
    """Give the adapters dropouts that know texts."""
    for layer in adapted.modules():
        dropouts: Any = getattr(layer, "lora_dropout", {})
        for name, part in dropouts.items():
            if isinstance(part, nn.Dropout):  # else there is none
                dropouts[name] = AdapterDropout(part.p)
    return tuple(part for part in adapted.modules() if isinstance(part, AdapterDropout))


def heads_weight(settings: JointSection, step: int, steps: int) -> float:
    """The weight of the heads' loss in a step: 1, or a share that rises as a quarter sine over the run."""
    return settings.heads * (math.sin(math.pi / 2 * step / steps) if settings.rise else 1.0)


def _drop_frozen(joint: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Remove frozen weights from the state dict, or a checkpoint would hold the whole target."""
    trained = {prefix + name for name, part in joint.named_parameters() if part.requires_grad}
    for name in [name for name in state if name.startswith(prefix) and name not in trained]:
        del state[name]
