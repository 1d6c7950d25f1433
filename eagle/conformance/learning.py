"""What every head must hold in training: what its loss depends on, that it falls, that validation adds up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle.conformance.own_answers import own_answer
from eagle.conformance.trial import Fault, Make
from eagle.core.examples import Batch, Example
from eagle.core.tree import PUBLISHED_TREE, chain_paths
from eagle.data.features import LiveFeatures
from eagle.drafters.parts.validation import add_sums, figures
from eagle.target.target import Target

TREES = {"chain": chain_paths(3), "tree": PUBLISHED_TREE}
PROMPT = 6  # tokens of a text before what is supervised
LAST = 12  # of a text with so many tokens before the first that counts for nothing


def make_examples(target: Target, taps: list[int], *, answered: bool = False) -> LiveFeatures:
    """Two short texts of different length, random or the target's answers, with its features at all taps."""
    generator = torch.Generator().manual_seed(1)
    examples = []
    for length in (24, 17):
        tokens = torch.randint(5, target.vocab_size, (length,), generator=generator)
        if answered:
            tokens[PROMPT:] = torch.tensor(own_answer(target.model, tokens[:PROMPT].tolist(), length - PROMPT))
        examples.append(Example(tokens, torch.arange(length) >= PROMPT))
    return LiveFeatures(target, examples, {"taps": taps, "dtype": "float32"})


def distance(head: Any, target: Target, batch: Batch) -> float:
    """How far its laws are from the target's: their cross-entropy without the part that no head can learn."""
    before = batch.loss_mask.nonzero()[:, 0] - 1
    law = target.head.logits(batch.select_taps((-1,))[before, 0]).log_softmax(-1)
    entropy = -(law.exp() * law).sum(-1).mean().item()
    return float(figures(head.validate(batch, target.head, TREES))["cross_entropy"]) - entropy


def teach(head: Any, target: Target, batch: Batch) -> list[dict[str, Tensor]]:
    """Thirty steps on one batch; the losses before each."""
    optimizer, losses = torch.optim.AdamW(head.train().parameters(), lr=1e-3), []
    for _ in range(30):
        losses.append(head(batch, target.head))
        optimizer.zero_grad()
        losses[-1]["total"].backward()
        optimizer.step()
    return losses


def check_loss_falls(make: Make, target: Target, batch: Batch) -> None:
    """Thirty steps on one batch teach a head half of what the target says there."""
    head = make().train()
    first_distance = distance(head, target, batch)
    losses = teach(head, target, batch)
    first, last = losses[0], losses[-1]
    # a confidence follows what would be accepted, which moves with the head
    for part in first.keys() - {"confidence"}:
        most = 0.7 if part == "regression" else 1.0
        if not last[part] < first[part] * most:
            raise Fault(
                f"after 30 steps on one batch the loss {part!r} is {last[part].item():.4g}, was "
                f"{first[part].item():.4g}: expected below {most:.0%} of that; does every part reach weights?"
            )
    left = distance(head, target, batch)
    if not 0 < left < first_distance / 2:
        raise Fault(
            f"after 30 steps on one batch the head's probs are {left:.4g} nats from the target's, before "
            f"{first_distance:.4g}: expected half of that at most, and more than none: does the loss teach the token "
            "that validate looks at?"
        )


def _loss_and_gradients(head: Any, batch: Batch, target: Target) -> tuple[float, list[Tensor | None]]:
    head.zero_grad()
    loss = head(batch, target.head)["total"]
    loss.backward()
    return loss.item(), [None if p.grad is None else p.grad.clone() for p in head.parameters()]


def check_supervised_alone(make: Make, target: Target, batch: Batch) -> None:
    """What follows the last supervised token of a text changes neither the loss nor a gradient."""
    head = make().eval()
    places = torch.cat([torch.arange(length) for length in batch.lengths])
    mask = batch.loss_mask & (places < LAST)
    assert batch.features is not None
    changed_tokens, changed_features = batch.tokens.clone(), batch.features.clone()
    changed_tokens[places >= LAST] = 9
    changed_features[places >= LAST] += 1
    results = [
        _loss_and_gradients(head, replace(batch, tokens=tokens, features=features, loss_mask=mask), target)
        for tokens, features in ((batch.tokens, batch.features), (changed_tokens, changed_features))
    ]
    (loss, gradients), (changed_loss, changed_gradients) = results
    if loss != changed_loss:
        raise Fault(
            f"the loss is {changed_loss:.6g} once tokens and states behind the last supervised token are others, "
            f"expected {loss:.6g} as before: it counts what loss_mask leaves out, or looks into the future"
        )
    named = [name for name, _ in head.named_parameters()]
    for name, one, other in zip(named, gradients, changed_gradients, strict=True):
        if one is None or other is None:
            raise Fault(f"the weight {name} gets no gradient: the loss must reach it, or it is a buffer")
        if not torch.equal(one, other):
            raise Fault(
                f"the gradient of {name} depends on what follows the last supervised token: it counts what loss_mask "
                "leaves out, or looks into the future"
            )


def check_supervised_counts(make: Make, target: Target, batch: Batch) -> None:
    """A change inside the supervised part does change the loss: the check above can fail."""
    head = make().eval()
    assert batch.features is not None
    features = batch.features.clone()
    features[8] += 1
    changed = replace(batch, features=features)
    if head(changed, target.head)["total"] == head(batch, target.head)["total"]:
        raise Fault("the loss is the same once a state that is supervised is another: expected one that reads it")


def check_progress(make: Make, target: Target, batch: Batch) -> None:
    """A step of a longer run is the same step, unless the head says otherwise."""
    head, losses = make().train(), []
    for progress in (0.0, 0.9):
        torch.manual_seed(1)
        losses.append(head(replace(batch, progress=progress), target.head)["total"].item())
    if not head.follows_progress and losses[0] != losses[1]:
        raise Fault(
            f"the loss is {losses[1]:.6g} late in a run and {losses[0]:.6g} at its start, expected the same: set "
            "follows_progress = True if that is meant, and draw nothing but by batch.seeds"
        )


def check_validation(make: Make, target: Target, batch: Batch, part: Callable[[int], Batch]) -> None:
    """Sums of two texts are those of each; the loss terms are those of training; nothing is drawn at random."""
    head = make()
    whole = head.train().validate(batch, target.head, TREES)
    sums: dict[str, Tensor] = {}
    for place in (0, 1):
        sums = add_sums(sums, head.eval().validate(part(place), target.head, TREES))
    if sums.keys() != whole.keys():
        raise Fault(f"validate gives other sums for one text than for two: {sorted(sums.keys() ^ whole.keys())}")
    for key, value in whole.items():
        if sums[key].shape != value.shape or not torch.allclose(
            sums[key].double(), value.double(), rtol=1e-6, atol=1e-6
        ):
            raise Fault(
                f"validate does not add up: {key!r} of two texts is {value.tolist()}, and {sums[key].tolist()} as the "
                "sum of each: give sums, no means, and nothing that is drawn at random or depends on train()"
            )
    found, losses = figures(whole), head(batch, target.head)
    for term in found.keys() & losses.keys():
        if abs(found[term] - losses[term].item()) > 1e-5 * abs(losses[term].item()):
            raise Fault(f"validate has {found[term]:.6g} for the loss {term!r}, and forward {losses[term].item():.6g}")
    if int(whole["slots"]) != batch.slots:
        raise Fault(f"validate counts {int(whole['slots'])} slots, expected {batch.slots}: one a supervised token")
    if missing := {"cross_entropy", "agreement", "overlap", "chain/tau", "tree/5"} - found.keys():
        raise Fault(f"validate lacks {sorted(missing)}: return what eagle.drafters.parts.validation makes")
    if not 1 <= found["chain/tau"] <= found["tree/tau"] <= 6:
        raise Fault(
            f"validate says that a chain keeps {found['chain/tau']:.3g} and the tree that holds it "
            f"{found['tree/tau']:.3g} tokens a cycle, expected 1 to 6, and no fewer of the tree"
        )
