"""Train a target with adapters together with heads on its states (Medusa-2): the model and the joint loss."""

# B sequences, T tokens of the longest, N tokens of all, S supervised tokens, D target width

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.core.tree import Paths
from eagle.device import upload
from eagle.drafters.parts.objectives import distillation_loss
from eagle.drafters.parts.text_dropout import TextDropout
from eagle.recipe import JointSection
from eagle.target.loading import add_adapter
from eagle.target.structure import base_of


class AdapterDropout(nn.Dropout):
    """An adapter's dropout, which is drawn by each sequence's seed, so that a resumed run repeats it.

    An input that is no padded batch of these sequences gets plain dropout.
    """

    dropout: TextDropout | None = None  # draws for the sequences of the batch that is read now

    def forward(self, x: Tensor) -> Tensor:
        """Return a LoRA adapter's input with dropout: [B, T, ..] of B sequences of the batch, padded to T tokens.

        Any other input gets plain dropout.
        """
        # an expert of a mixture, for one, reads the rows that were routed to it, and no padded sequences
        if (
            self.dropout is None
            or not self.training
            or x.ndim != 3
            or len(x) != len(self.dropout.counts)
        ):
            return super().forward(x)
        return self.dropout.drop_padded(x)


class Joint(TrainableDrafter):
    """A target's model with adapters, and a head: the training loop trains them as it trains a head.

    `forward` is the loss of both. It reads tokens alone, as the states of a target that trains change with every step.
    The state dict holds only trained weights.
    """

    def __init__(self, model: Any, head: TrainableDrafter, section: JointSection) -> None:
        """Add LoRA adapters to the target's model, in place, to train it together with a head.

        Args:
            model: The target's transformers model.
            head: The head, which may read tap -1 alone: the input of the target's LM head, and no other layer's.
            section: The section `joint` of the recipe.
        """
        super().__init__(head.settings, head.shape)
        if {*head.taps, *head.teacher_taps} != {-1}:
            raise ValueError(
                f"these heads read taps {head.taps} of the target, expected -1 alone, its LM head's input"
            )
        self.adapted = add_adapter(model, section.rank, section.alpha, section.dropout)
        self.dropouts = _replace_dropouts(self.adapted)
        self.head = head
        self.section = section
        # The model without its LM head. It is in a tuple so that torch does not register it as a submodule: it is one
        # of `adapted` already.
        self.body = (base_of(model),)
        self.register_state_dict_post_hook(_drop_frozen)
        # the frozen weights, which the state dict leaves out, are not missing
        self.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return the target's loss plus that of the head times its weight, and the terms.

        Args:
            batch: The sequences, whose features are not read.
            target_head: The target's embedding and LM head, which are not trained.

        Returns:
            "total", to be minimised; "target" and "heads", its two terms before the weight; the head's logged losses.
        """
        # an adapter draws by each sequence's seed
        dropout = TextDropout(self.section.dropout, batch.seeds, batch.lengths, batch.tokens.device)
        for module in self.dropouts:
            module.dropout = dropout
        batch, original_states = self.read(batch, compare=self.section.loss == "kl")
        divisor: float = batch.slots
        # those of the whole step, as `divisors` returns them: the target's, then the head's
        if batch.divisors is not None:
            divisor, *head_divisors = batch.divisors
            batch = replace(batch, divisors=tuple(head_divisors))
        target = self.target_loss(batch, original_states, target_head) / max(divisor, 1)
        losses = self.head(batch, target_head)
        heads = losses.pop("total")
        total = target + heads_weight(self.section, batch.progress) * heads
        return {"total": total, "target": target, "heads": heads, **losses}

    def divisors(self, masks: Sequence[Tensor], seeds: Sequence[int]) -> tuple[float, ...] | None:
        """Return the number of supervised tokens, which divides the target's loss, and the head's own divisors.

        None if the head's loss is a mean over supervised tokens, as the target's is.
        """
        head_divisors = self.head.divisors(masks, seeds)
        if head_divisors is None:
            return None
        return (sum(int(mask.sum()) for mask in masks), *head_divisors)

    def read(self, batch: Batch, *, compare: bool) -> tuple[Batch, Tensor | None]:
        """Let the adapted target read the sequences, and with `compare` the original target, too.

        The original target is the same model with its adapters switched off.

        Returns:
            The batch with the adapted target's states as features, with gradients; and the original target's states
            [N, D] at the batch's N tokens, or None.
        """
        batch = replace(batch, features=self.states(batch)[:, None])
        if not compare:
            return batch, None
        with torch.no_grad(), self.adapted.disable_adapter():
            return batch, self.states(batch)

    def states(self, batch: Batch) -> Tensor:
        """Return [N, D], the LM head's input of width D at the N tokens of a batch.

        Gradients are kept, so that the head's loss reaches the adapters.
        """
        # no attention mask is needed: padding follows the tokens, and attention is causal
        tokens = pad_sequence(batch.tokens.split(batch.lengths), batch_first=True)
        (body,) = self.body
        states: Tensor = body(input_ids=tokens, use_cache=False).last_hidden_state  # [B, T, D]
        return torch.cat([seq[:count] for seq, count in zip(states, batch.lengths, strict=True)])

    def target_loss(
        self, batch: Batch, original_states: Tensor | None, target_head: TargetHead
    ) -> Tensor:
        """Return the target's loss, summed over the supervised tokens: cross-entropy, or KL(original, adapted).

        Args:
            batch: N tokens with the adapted target's states, of width D.
            original_states: [N, D] of the original target, for the KL; None for the cross-entropy.
            target_head: The target's LM head.
        """
        # [S], the indices of the supervised tokens
        slots = upload(batch.loss_mask.nonzero()[:, 0], batch.tokens.device)
        # [1, S, D], one draft step for `distillation_loss`; a token is predicted by the state at the token before it
        states = batch.features[:, 0].index_select(0, slots - 1)[None]
        dtype = torch.promote_types(states.dtype, torch.float32)
        weights = torch.ones(states.shape[:2], dtype=dtype, device=states.device)
        # `distillation_loss` takes the student's and the teacher's LM head, and returns the total first; without a
        # teacher's head the teacher is the tokens
        if original_states is None:
            tokens = batch.tokens.index_select(0, slots)
            return distillation_loss(states, tokens, weights, (target_head, None))[0]
        original = original_states.index_select(0, slots - 1)
        heads = (target_head, target_head)
        with torch.no_grad():
            # KL(p, q) = cross-entropy(p, q) - entropy(p). The entropy is computed as cross-entropy(p, p), by the same
            # products, so that equal states give exactly 0.
            entropy = distillation_loss(original[None], original, weights, heads)[0]
        return distillation_loss(states, original, weights, heads)[0] - entropy

    @torch.no_grad()
    def validate(
        self, batch: Batch, target_head: TargetHead, trees: dict[str, Paths]
    ) -> dict[str, Tensor]:
        """Return validation sums of the head on the adapted target, and as "kl" its KL from the original target.

        Args:
            batch: Held-out sequences, whose features are not read.
            target_head: The target's embedding and LM head.
            trees: Tree shapes by name, of which the acceptance is estimated.
        """
        batch, original_states = self.read(batch, compare=True)
        kl = self.target_loss(batch, original_states, target_head)
        return {**self.head.validate(batch, target_head, trees), "kl": kl}

    def weight_groups(self) -> list[tuple[float, list[Tensor]]]:
        """Return the trained weights in two groups, each with its factor of the learning rate.

        The head's matrices learn at `joint.head_lr` times the rate of the adapters and of the head's vectors (biases,
        norms), as in Medusa's own code.
        """
        head_matrices = {id(weight) for weight in self.head.parameters() if weight.ndim > 1}
        slow: list[Tensor] = []
        fast: list[Tensor] = []
        for weight in self.parameters():
            if weight.requires_grad:
                group = fast if id(weight) in head_matrices else slow
                group.append(weight)
        return [(1.0, slow), (self.section.head_lr, fast)]

    def merge(self) -> Any:
        """Return the new target: the model with its LoRA adapters merged into its weights."""
        return self.adapted.merge_and_unload()


def _replace_dropouts(adapted: nn.Module) -> tuple[AdapterDropout, ...]:
    """Replace the dropout modules of LoRA adapters, in place, by ones that sample by sequence; return the new ones."""
    for layer in adapted.modules():
        # PEFT keeps in each adapted layer a dropout module by name of adapter; other modules have no such attribute
        dropouts: Any = getattr(layer, "lora_dropout", {})
        for name, module in dropouts.items():
            # an adapter without dropout has an nn.Identity here, which stays
            if isinstance(module, nn.Dropout):
                dropouts[name] = AdapterDropout(module.p)
    return tuple(module for module in adapted.modules() if isinstance(module, AdapterDropout))


def heads_weight(section: JointSection, progress: float) -> float:
    """Return the weight of the heads' loss once `progress` of the run is done, from 0 to 1.

    It is `joint.heads`, or with `joint.rise` it rises to that from 0 over the run: heads * sin(pi / 2 * progress).
    """
    if not section.rise:
        return section.heads
    return section.heads * math.sin(math.pi / 2 * progress)


def _drop_frozen(joint: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Remove frozen weights from the state dict, in place: a checkpoint need not hold the whole target.

    torch calls it as a hook of `state_dict`, with the prefix of the module's names and its local metadata.
    """
    trained = {prefix + name for name, weight in joint.named_parameters() if weight.requires_grad}
    for name in list(state):
        if name.startswith(prefix) and name not in trained:
            del state[name]
