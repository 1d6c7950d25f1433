"""Train a target with adapters together with heads on its states (Medusa-2): the model and the joint loss."""

# B sequences, T tokens of the longest, N tokens of all, S supervised tokens, D target width

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


class StepPart(NamedTuple):
    """What a part of a step (the sequences of one forward) must know of the whole step."""

    seeds: tuple[int, ...] | None  # one of each sequence of the part
    divisors: tuple[float, ...] | None  # those of the heads' loss, summed over the whole step
    share: float  # of the step's supervised tokens that are in this part


class Joint(nn.Module):
    """A target's model with adapters, and heads. `forward` is their loss; the state dict holds only trained weights."""

    def __init__(
        self, model: Any, head: TrainableDrafter, target_head: TargetHead, settings: JointSection
    ) -> None:
        """Add LoRA adapters to the target's model, in place, to train it together with heads.

        Args:
            model: The target's transformers model.
            head: The heads, which may read tap -1 alone: the input of the target's LM head, and no other layer's.
            target_head: The target's embedding and LM head, which are not trained.
            settings: The section `joint` of the recipe.
        """
        super().__init__()
        if {*head.taps, *head.teacher_taps} != {-1}:
            raise ValueError(
                f"these heads read taps {head.taps} of the target, expected -1 alone, its LM head's input"
            )
        self.adapted = add_adapter(model, settings.rank, settings.alpha, settings.dropout)
        self.dropouts = _replace_dropouts(self.adapted)
        self.head = head
        self.target_head = target_head
        self.settings = settings
        # The model without its LM head. It is in a tuple so that torch does not register it as a submodule: it is one
        # of `adapted` already.
        self.body = (base_of(model),)
        self.register_state_dict_post_hook(_drop_frozen)
        # the frozen weights, which the state dict leaves out, are not missing
        self.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())

    def forward(
        self, examples: Sequence[Example], heads_weight: float, part: StepPart | None = None
    ) -> dict[str, Tensor]:
        """Return the target's loss plus `heads_weight` times that of the heads, and its terms.

        Args:
            examples: The sequences, without features.
            heads_weight: The weight of the heads' loss.
            part: What the sequences of this forward must know of the whole optimizer step; None where they are the
                whole step.

        Returns:
            "total", to be minimised; "target" and "heads", its two terms before the weight; the heads' logged losses.
        """
        part = part or StepPart(seeds=None, divisors=None, share=1.0)
        # without seeds the adapters draw plain dropout
        dropout = None
        if part.seeds:
            counts = [len(example.tokens) for example in examples]
            dropout = TextDropout(
                self.settings.dropout, part.seeds, counts, self.target_head.weight.device
            )
        for module in self.dropouts:
            module.dropout = dropout
        batch, original_states = self.read(examples, compare=self.settings.loss == "kl")
        target = part.share * self.target_loss(batch, original_states)
        batch = replace(batch, seeds=part.seeds or batch.seeds, divisors=part.divisors)
        # With the step's divisors the heads' loss is this part's share of the step's loss already. A part with share 0
        # only repeats an example, so that every process has a part, and counts nothing.
        share = part.share if part.divisors is None else float(part.share > 0)
        losses = {name: share * loss for name, loss in self.head(batch, self.target_head).items()}
        heads = losses.pop("total")
        return {"total": target + heads_weight * heads, "target": target, "heads": heads, **losses}

    def read(self, examples: Sequence[Example], *, compare: bool) -> tuple[Batch, Tensor | None]:
        """Let the adapted target read the sequences, and with `compare` the original target, too.

        The original target is the same model with its adapters switched off.

        Returns:
            A batch with the adapted target's states, with gradients; and the original target's states [N, D] at the
            batch's N tokens, or None.
        """
        tokens = pad_sequence([example.tokens for example in examples], batch_first=True)
        tokens = upload(tokens, self.target_head.weight.device)
        batch = self.collate(examples, self.states(tokens))
        if not compare:
            return batch, None
        with torch.no_grad(), self.adapted.disable_adapter():
            original = self.collate(examples, self.states(tokens))
        return batch, original.features[:, 0]

    def states(self, tokens: Tensor) -> Tensor:
        """Return [B, T, D], the LM head's input of width D at right-padded tokens [B, T].

        Gradients are kept, so that the heads' loss reaches the adapters. No attention mask is needed: padding follows
        the tokens, and attention is causal.
        """
        (body,) = self.body
        states: Tensor = body(input_ids=tokens, use_cache=False).last_hidden_state
        return states

    def collate(self, examples: Sequence[Example], states: Tensor) -> Batch:
        """Return a batch, concatenated without padding, of B examples with their states [B, T, D] as features."""
        with_features = []
        for example, padded in zip(examples, states, strict=True):
            # [T, 1, D] without the padding, one tap
            features = padded[: len(example.tokens), None]
            with_features.append(replace(example, features=features))
        return collate(with_features, (-1,)).to(states.device)

    def target_loss(self, batch: Batch, original_states: Tensor | None) -> Tensor:
        """Return the target's mean loss over the supervised tokens: their cross-entropy, or KL(original, adapted).

        Args:
            batch: N tokens with the adapted target's states, of width D.
            original_states: [N, D] of the original target, for the KL; None for the cross-entropy.
        """
        # [S], the indices of the supervised tokens
        slots = upload(batch.loss_mask.nonzero()[:, 0], batch.tokens.device)
        # [1, S, D], one draft step for `distillation_loss`; a token is predicted by the state at the token before it
        states = batch.features[:, 0].index_select(0, slots - 1)[None]
        dtype = torch.promote_types(states.dtype, torch.float32)
        # each of the S tokens counts alike; a batch without any has the loss 0
        weights = torch.full(
            states.shape[:2], 1 / max(len(slots), 1), dtype=dtype, device=states.device
        )
        # `distillation_loss` takes the student's and the teacher's LM head, and returns the total first; without a
        # teacher's head the teacher is the tokens
        if original_states is None:
            tokens = batch.tokens.index_select(0, slots)
            return distillation_loss(states, tokens, weights, (self.target_head, None))[0]
        original = original_states.index_select(0, slots - 1)
        heads = (self.target_head, self.target_head)
        with torch.no_grad():
            # KL(p, q) = cross-entropy(p, q) - entropy(p). The entropy is computed as cross-entropy(p, p), by the same
            # products, so that equal states give exactly 0.
            entropy = distillation_loss(original[None], original, weights, heads)[0]
        return distillation_loss(states, original, weights, heads)[0] - entropy

    @torch.no_grad()
    def validate(self, examples: Sequence[Example], trees: dict[str, Paths]) -> dict[str, Tensor]:
        """Return validation sums of the heads on the adapted target, and as "kl" its KL from the original target.

        Args:
            examples: Held-out sequences, without features.
            trees: Tree shapes by name, of which the acceptance is estimated.
        """
        batch, original_states = self.read(examples, compare=True)
        # a sum over the supervised tokens, like the heads' sums
        kl = self.target_loss(batch, original_states) * batch.slots
        return {**self.head.validate(batch, self.target_head, trees), "kl": kl}

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """Return the trained parameters in two groups for the optimizer, with their learning rates.

        The heads' matrices learn at `lr * joint.head_lr`; the adapters and the heads' vectors (biases, norms) at `lr`,
        as in Medusa's own code.
        """
        head_matrices = {id(weight) for weight in self.head.parameters() if weight.ndim > 1}
        slow: list[Tensor] = []
        fast: list[Tensor] = []
        for weight in self.parameters():
            if weight.requires_grad:
                group = fast if id(weight) in head_matrices else slow
                group.append(weight)
        return [{"params": slow, "lr": lr}, {"params": fast, "lr": lr * self.settings.head_lr}]

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


def heads_weight(settings: JointSection, step: int, steps: int) -> float:
    """Return the weight of the heads' loss in step `step`, counted from 0, of a run of `steps` steps.

    It is `joint.heads`, or with `joint.rise` it rises to that from 0 over the run: heads * sin(pi / 2 * step / steps).
    """
    if not settings.rise:
        return settings.heads
    return settings.heads * math.sin(math.pi / 2 * step / steps)


def _drop_frozen(joint: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Remove frozen weights from the state dict, in place: a checkpoint need not hold the whole target.

    torch calls it as a hook of `state_dict`, with the prefix of the module's names and its local metadata.
    """
    trained = {prefix + name for name, weight in joint.named_parameters() if weight.requires_grad}
    for name in list(state):
        if name.startswith(prefix) and name not in trained:
            del state[name]
