"""What every head must hold in training: what its loss depends on, that it falls, that validation tells of drafting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle.conformance.own_answers import own_answer
from eagle.conformance.trial import Fault, Make, begin_sequence
from eagle.core.budget import Budget
from eagle.core.drafter import Committed
from eagle.core.examples import Batch, Example
from eagle.core.tree import PUBLISHED_TREE, chain_paths
from eagle.core.verify import Choose, Sampling
from eagle.data.features import LiveFeatures
from eagle.drafters.parts.validation import add_sums, figures
from eagle.target.target import Target

TREES = {"chain": chain_paths(3), "tree": PUBLISHED_TREE}
CHAIN = TREES["chain"]
LEVELS = len(CHAIN)
PROMPT = 6  # tokens of a sequence before the first that is supervised
# the first position of a sequence that check_supervised_alone leaves unsupervised again
SUPERVISED_END = 12
STEPS = 30  # of the optimizer, in which a head learns one batch
TIES = 1  # slots of a batch whose near-tie rounding may decide otherwise
# shares of its first value that a loss term may have after these steps, if not 1
MAX_LOSS = {"regression": 0.7}
# terms that need not fall: confidence learns which drafts would be accepted, which changes with the head, and the
# lattice counts slots whose token is a candidate, of which a new head may have none
NOT_FALLING = {"confidence", "lattice"}


def make_examples(target: Target, taps: list[int], *, answered: bool = False) -> LiveFeatures:
    """Return two short sequences of different length, random or the target's answers, with features at all taps."""
    generator = torch.Generator().manual_seed(1)
    examples = []
    for length in (24, 17):
        tokens = torch.randint(5, target.vocab_size, (length,), generator=generator)
        if answered:
            answer = own_answer(target.model, tokens[:PROMPT].tolist(), length - PROMPT)
            tokens[PROMPT:] = torch.tensor(answer)
        examples.append(Example(tokens, torch.arange(length) >= PROMPT))
    return LiveFeatures(target, examples, {"taps": taps, "dtype": "float32"})


def divergence(head: Any, target: Target, batch: Batch) -> float:
    """Return KL(target || head) at the supervised slots, in nats: what a head can still learn of the cross-entropy."""
    # KL(p || q) = H(p, q) - H(p); a token is predicted by the target's state at the token before it
    previous = batch.loss_mask.nonzero()[:, 0] - 1
    # [S, D] at S supervised tokens, the input of the target's LM head (tap -1)
    hidden = batch.select_taps((-1,))[previous, 0]
    log_probs = target.head.logits(hidden).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean().item()
    validated = figures(head.validate(batch, target.head, TREES))
    return float(validated["cross_entropy"]) - entropy


def teach(head: Any, target: Target, batch: Batch) -> list[dict[str, Tensor]]:
    """Train the head, in place, for `STEPS` steps on one batch; return the loss terms of each step."""
    optimizer = torch.optim.AdamW(head.train().parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        losses.append(head(batch, target.head))
        optimizer.zero_grad()
        losses[-1]["total"].backward()
        optimizer.step()
    return losses


def check_loss_falls(make: Make, target: Target, batch: Batch) -> None:
    """Check that training on one batch lowers every loss term, and halves the KL divergence from the target."""
    head = make().train()
    first_divergence = divergence(head, target, batch)
    losses = teach(head, target, batch)
    first = losses[0]
    last = losses[-1]
    # a term that does not fall trains nothing
    for term in first.keys() - NOT_FALLING:
        max_share = MAX_LOSS.get(term, 1.0)
        if not last[term] < first[term] * max_share:
            raise Fault(
                f"after {STEPS} steps on one batch the loss {term!r} is {last[term].item():.4g}, was "
                f"{first[term].item():.4g}: expected below {max_share:.0%} of that; does every part reach weights?"
            )
    left = divergence(head, target, batch)
    if not 0 < left < first_divergence / 2:
        raise Fault(
            f"after {STEPS} steps on one batch the head's probs are {left:.4g} nats from the target's, before "
            f"{first_divergence:.4g}: expected half of that at most, and more than none: does the loss teach the token "
            "that validate looks at?"
        )


def _loss_and_gradients(
    head: Any, batch: Batch, target: Target
) -> tuple[float, dict[str, Tensor | None]]:
    """Return the loss of a batch and the gradient of each weight by name, None where a weight has none."""
    head.zero_grad()
    loss = head(batch, target.head)["total"]
    loss.backward()
    gradients = {}
    for name, weight in head.named_parameters():
        gradients[name] = None if weight.grad is None else weight.grad.clone()
    return loss.item(), gradients


def check_supervised_alone(make: Make, target: Target, batch: Batch) -> None:
    """Check that tokens and states after the last supervised token change neither the loss nor a gradient.

    A head fails that trains on masked tokens, or that sees tokens after those it predicts.
    """
    head = make().eval()
    # [N], of each token of the batch its position in its sequence
    positions = torch.cat([torch.arange(length) for length in batch.lengths])
    is_after = positions >= SUPERVISED_END
    batch = replace(batch, loss_mask=batch.loss_mask & ~is_after)
    tokens = batch.tokens.clone()
    tokens[is_after] = 9  # any other token
    features = batch.features.clone()
    features[is_after] += 1  # the target's states
    loss, gradients = _loss_and_gradients(head, batch, target)
    changed = replace(batch, tokens=tokens, features=features)
    changed_loss, changed_gradients = _loss_and_gradients(head, changed, target)
    if loss != changed_loss:
        raise Fault(
            f"the loss is {changed_loss:.6g} once tokens and states behind the last supervised token are others, "
            f"expected {loss:.6g} as before: it counts what loss_mask leaves out, or looks into the future"
        )
    for name, gradient in gradients.items():
        changed_gradient = changed_gradients[name]
        if gradient is None or changed_gradient is None:
            raise Fault(
                f"the weight {name} gets no gradient: the loss must reach it, or it is a buffer"
            )
        # equal losses may hide what reaches a gradient alone, as through a detached target
        if not torch.equal(gradient, changed_gradient):
            raise Fault(
                f"the gradient of {name} depends on what follows the last supervised token: it counts what loss_mask "
                "leaves out, or looks into the future"
            )


def check_supervised_counts(make: Make, target: Target, batch: Batch) -> None:
    """Check that a changed state in the supervised part changes the loss, so that `check_supervised_alone` can fail."""
    head = make().eval()
    # position 8 is in the supervised part of the first sequence, which begins at 6; features are the target's states
    features = batch.features.clone()
    features[8] += 1
    changed = replace(batch, features=features)
    if head(changed, target.head)["total"] == head(batch, target.head)["total"]:
        raise Fault(
            "the loss is the same once a state that is supervised is another: expected one that reads it"
        )


def check_progress(make: Make, target: Target, batch: Batch) -> None:
    """Check that the loss does not depend on the progress of the run, unless the head sets `follows_progress`."""
    head = make().train()
    losses = []
    for progress in (0.0, 0.9):
        # both draw the same random numbers
        torch.manual_seed(1)
        losses.append(head(replace(batch, progress=progress), target.head)["total"].item())
    if not head.follows_progress and losses[0] != losses[1]:
        raise Fault(
            f"the loss is {losses[1]:.6g} late in a run and {losses[0]:.6g} at its start, expected the same: set "
            "follows_progress = True if that is meant, and draw nothing but by batch.seeds"
        )


def check_validation(
    make: Make, target: Target, batch: Batch, part: Callable[[int], Batch]
) -> None:
    """Check that validation gives sums, the loss terms of training, and no random numbers.

    Args:
        make: Makes a head.
        target: The head's target.
        batch: Two sequences.
        part: Returns a batch with the sequence of this index alone.
    """
    head = make()
    # once in training mode and once not: dropout and noise of training must not change a validation
    whole = head.train().validate(batch, target.head, TREES)
    sums: dict[str, Tensor] = {}
    for index in (0, 1):
        sums = add_sums(sums, head.eval().validate(part(index), target.head, TREES))
    if sums.keys() != whole.keys():
        raise Fault(
            f"validate gives other sums for one sequence than for two: {sorted(sums.keys() ^ whole.keys())}"
        )
    for key, value in whole.items():
        total = sums[key]
        same_shape = total.shape == value.shape
        if not same_shape or not torch.allclose(
            total.double(), value.double(), rtol=1e-6, atol=1e-6
        ):
            raise Fault(
                f"validate does not add up: {key!r} of two sequences is {value.tolist()}, and {total.tolist()} as the "
                "sum of each: give sums, no means, and nothing that is drawn at random or depends on train()"
            )
    slots = int(whole["slots"])
    if slots != batch.slots:
        raise Fault(
            f"validate counts {slots} slots, expected {batch.slots}: one a supervised token"
        )
    losses = {term: loss.item() for term, loss in head(batch, target.head).items()}
    _check_figures(figures(whole), losses)


def _check_figures(validated: dict[str, float], losses: dict[str, float]) -> None:
    """Check the figures of a validation: its loss terms against those of training, and the tree against the chain.

    Args:
        validated: Means over the supervised slots, and for each tree "NAME/tau", its acceptance length.
        losses: The loss terms of a forward on the same batch.
    """
    for term in validated.keys() & losses.keys():
        if abs(validated[term] - losses[term]) > 1e-5 * abs(losses[term]):
            raise Fault(
                f"validate has {validated[term]:.6g} for the loss {term!r}, and forward {losses[term]:.6g}"
            )
    missing = {"cross_entropy", "agreement", "overlap", "chain/tau", "tree/5"} - validated.keys()
    if missing:
        raise Fault(
            f"validate lacks {sorted(missing)}: return what eagle.drafters.parts.validation makes"
        )
    # the tree contains the chain, so it accepts at least as much; 6 is its five levels and the target's own token
    if not 1 <= validated["chain/tau"] <= validated["tree/tau"] <= 6:
        raise Fault(
            f"validate says that a chain keeps {validated['chain/tau']:.3g} and the tree that holds it "
            f"{validated['tree/tau']:.3g} tokens a cycle, expected 1 to 6, and no fewer of the tree"
        )


def check_drafted_as_validated(make: Make, target: Target, batch: Batch) -> None:
    """Check that chains drafted after each slot are accepted as far as `validate` says, by a head that was trained.

    `validate` takes the inputs of training, and counts at each level how many chains reach it and how many are accepted
    there. If drafting counts others, a head is trained on other states or tokens than it drafts with.
    """
    head = make()
    # drafts of an untrained head are hardly ever accepted, so counts of 0 would agree whatever it reads
    teach(head, target, batch)
    head.eval().bind(target.head)
    sums = head.validate(batch, target.head, {"chain": CHAIN})
    reached, accepted = count_drafts(head, target, batch)
    # level 0 is the first drafted token
    for level in range(LEVELS):
        validated_reached = int(sums["chain/reached"][level])
        validated_accepted = int(sums["chain/accepted"][level])
        difference = max(
            abs(validated_reached - reached[level]), abs(validated_accepted - accepted[level])
        )
        # rounding may decide a near-tie of two tokens otherwise, and one slot's chain then counts differently
        if difference > TIES:
            raise Fault(
                f"validate says that of {validated_reached} chains that come to level {level + 1} {validated_accepted} "
                f"are accepted there, and of {reached[level]} that are drafted {accepted[level]} are: training reads "
                "other states or tokens than drafting has; behind a root at place n the states end at n - 1, and the "
                "tokens at n"
            )


@torch.no_grad()
def count_drafts(head: Any, target: Target, batch: Batch) -> tuple[list[int], list[int]]:
    """Return how many drafted chains reach each level, and how many are accepted there.

    For each slot the drafter reads its sequence from the start. A chain is followed as long as the sequence is
    supervised and goes on as the target would, since only there the target's choice is known.
    """
    reached = [0] * LEVELS
    accepted = [0] * LEVELS
    budget = Budget.fixed(CHAIN)
    for tokens, is_supervised in zip(batch.tokens.split(batch.lengths), batch.masks, strict=True):
        # what the target chooses after each token
        hidden = target.features(tokens[None], (-1,))[0, :, 0]
        choices = target.head.logits(hidden).argmax(-1)
        # the position of the first token that is drafted
        for first in range(2, len(tokens)):
            if not is_supervised[first]:
                continue
            # the last token of the sequence, which the target has chosen and not read
            root = first - 1
            sequence, update = begin_sequence(
                head, target, tokens[:root].tolist(), Choose(Sampling())
            )
            chain = sequence.propose(
                Committed(update.tokens, update.features, int(tokens[root])), budget
            )
            for level, guess in enumerate(chain.tokens[1:].tolist()):
                position = first + level  # of the token that is guessed
                if position >= len(tokens) or not is_supervised[position]:
                    break
                # choices[i] is the token after token i
                if level and tokens[position - 1] != choices[position - 2]:
                    break
                reached[level] += 1
                if guess != int(choices[position - 1]):
                    break
                accepted[level] += 1
    return reached, accepted
