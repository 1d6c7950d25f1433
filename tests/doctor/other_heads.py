"""Train healthy heads in ways that are not this project's: `python -m tests.doctor.other_heads OUT --set reported`.

`broken_heads.py` asks the doctor about them. The losses of other tools are written out as a plain loop over drafting
steps.
"""

# S slots, V tokens that the head may draft, D width

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data_prep.tokens import load_tokenizer, tokenize_data
from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch, Example, collate
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import save_pretrained
from eagle.log import progress, script
from eagle.recipe import Recipe
from eagle.target.target import Target

RECIPE = "recipes/tiny/eagle3.yaml"
# all that any head below reads
TAPS = (1, 2, 4, 5, 7, 8, 9, -1)
BATCH_SIZE = 3
# conversations to train on
NUM_EXAMPLES = 300
# of the steps
WARMUP = 0.05
# norm of the gradient
CLIP = 0.5
# steps after which a head is under-trained, and not broken
EARLY = 50
# logits of head and target [S, V], and the text's tokens [S] -> a loss
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def smoothed(logits: Tensor, target_logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the cross-entropy from the target's likeliest token, with a part of it spread over all."""
    return F.cross_entropy(logits, target_logits.argmax(-1), label_smoothing=0.1)


def text(logits: Tensor, target_logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the cross-entropy from the text's own token."""
    return F.cross_entropy(logits, tokens, reduction="none", ignore_index=-1).mean()


def reverse_kl(logits: Tensor, target_logits: Tensor, tokens: Tensor) -> Tensor:
    """Return KL(head, target)."""
    log_probs = logits.log_softmax(-1)
    target_log_probs = target_logits.log_softmax(-1)
    return F.kl_div(target_log_probs, log_probs, log_target=True, reduction="batchmean")


def variation(logits: Tensor, target_logits: Tensor, tokens: Tensor) -> Tensor:
    """Return half the sum of |p - q|, with a little cross-entropy to begin with."""
    target_probs = target_logits.softmax(-1)
    distance = (logits.softmax(-1) - target_probs).abs().sum(-1) / 2
    entropy = -(target_probs * logits.log_softmax(-1)).sum(-1)
    return (distance + 0.1 * entropy).mean()


@dataclass(frozen=True)
class Training:
    """A kind of head, and how it is trained."""

    index: int  # of its seed
    head: dict[str, Any]
    loss: Loss | None = None  # if none, the head's own, which this project trains it with
    unroll: int = 4  # drafting steps in training
    decay: float = 0.8  # of a step's weight
    lr: float = 3e-3
    steps: int = 220
    regression: float = 0.0  # weight of EAGLE-1's smooth L1 of the features
    noise: float = 0.0  # U(-noise, noise) on the features


TAPPED = {"taps": (2, 4, 5, 7, 8)}
REPORTED = {
    "eagle1-smoothed": Training(
        10,
        {"kind": "eagle1", "fc_bias": True},
        smoothed,
        unroll=3,
        decay=1.0,
        lr=1e-3,
        regression=0.1,
    ),
    "eagle3-text-512": Training(
        11,
        {"kind": "eagle3", "lm_head": "random", "queries": "random", "draft_vocab": 512},
        text,
        noise=0.2,
    ),
    "eagle3-reverse": Training(13, {"kind": "eagle3", "norm_before_residual": True}, reverse_kl),
    "eagle3.1-variation": Training(
        16,
        {"kind": "eagle3", "fc_norm": True, "norm_output": True},
        variation,
        lr=1e-3,
    ),
    "medusa-tokens": Training(
        18,
        {"kind": "medusa", "levels": 3, "loss": "tokens"},
        lr=2e-3,
        steps=500,
    ),
    "peagle-gated": Training(
        19,
        {"kind": "peagle", "blocks": 3, "depths": 5, "norm_before_residual": True},
        lr=2e-3,
    ),
    "dflash-probs": Training(
        20,
        {
            "kind": "dflash",
            "blocks": 3,
            "slots": 5,
            "taps": (1, 4, 8),
        },
    ),
    "dspark-anchored": Training(
        21,
        {
            "kind": "dspark",
            "blocks": 2,
            "rank": 64,
            "slots": 5,
            "sample_from_anchor": False,
            "confidence": False,
            **TAPPED,
        },
        lr=2e-3,
        steps=120,
    ),
    "mtp-random": Training(
        22,
        {"kind": "mtp", "start": "random", "steps": 2},
        steps=150,
    ),
}


def read_features(target: Target, recipe: Recipe) -> list[Example]:
    """Return the recipe's conversations with the target's states."""
    examples, _ = tokenize_data(recipe, load_tokenizer(recipe))
    examples = [example for example in examples if example.loss_mask[2:].any()]
    featured = []
    with torch.no_grad():
        for example in progress(examples, "states", len(examples)):
            features = target.features(example.tokens[None], TAPS)[0]
            featured.append(replace(example, features=features))
    return featured


def find_positions(
    batch: Batch,
    slots: Tensor,
    step: int,
) -> tuple[Tensor, Tensor]:
    """Return the positions that a drafting step reads, without those whose next token is another sequence's."""
    lengths = torch.tensor(batch.lengths)
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    positions = slots + 1 + step
    following = (positions + 1).clamp(max=len(owner) - 1)
    inside = (positions + 1 < len(owner)) & (owner[following] == owner[slots])
    return positions[inside], inside


def sum_losses(
    head: Any,
    batch: Batch,
    training: Training,
    target_head: TargetHead,
) -> Tensor:
    """Return the sum over drafting steps of the mean loss over slots, later steps weighted less."""
    if training.loss is None:
        return head(batch, target_head)["total"]

    def add_noise(features: Tensor) -> Tensor:
        return features + training.noise * (2 * torch.rand_like(features) - 1)

    unrolled = head.unroll(batch, target_head, training.unroll, add_noise=add_noise)
    target_hidden = batch.select_taps((-1,))[:, 0]
    total = torch.zeros(())
    for step, states in enumerate(unrolled.states):
        positions, inside = find_positions(batch, unrolled.places, step)
        states = states[inside]
        tokens = batch.tokens[positions + 1]
        target_logits = target_head.logits(target_hidden[positions])
        if head.drafts is not None:
            # other tools leave out tokens that the head cannot draft, and narrow the target's logits likewise
            known = torch.isin(target_logits.argmax(-1), head.drafts)
            draft_ids = torch.full((target_logits.shape[-1],), -1)
            draft_ids[head.drafts] = torch.arange(len(head.drafts))
            tokens = draft_ids[tokens[known]]
            positions = positions[known]
            states = states[known]
            target_logits = target_logits[known][:, head.drafts]
        loss = training.loss(head.logits(states, target_head), target_logits, tokens)
        if training.regression:
            distance = F.smooth_l1_loss(states, target_hidden[positions])
            loss = 0.1 * loss + training.regression * distance
        total = total + training.decay**step * loss
    return total


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate in a step: linear warm-up, linear decay."""
    return min(
        (step + 1) / (steps * WARMUP),
        1 - step / steps,
    )


def select(example: Example, columns: list[int]) -> Tensor:
    """Return the features of some taps."""
    assert isinstance(example.features, Tensor)
    return example.features[:, columns]


def train(
    name: str, training: Training, target: Target, examples: list[Example], seed: int, out: Path
) -> None:
    """Train a healthy head and save it, the first time while it is still under-trained."""
    torch.manual_seed(seed)
    settings = settings_of(training.head, name)
    method = DRAFTERS[settings.kind]
    # a draft vocabulary holds the most frequent of these
    supervised = [example.tokens[example.loss_mask] for example in examples]
    # MTP heads begin with weights of the target
    borrowed = {"weights": target.tensor} if method.reads.weights else {}
    head = method.for_target(settings, target.config, target.head, supervised, **borrowed).train()
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        weights, lr=training.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    taps = tuple(dict.fromkeys((*head.taps, -1)))
    columns = [TAPS.index(tap) for tap in taps]
    used = [
        replace(example, features=select(example, columns)) for example in examples[:NUM_EXAMPLES]
    ]
    for step in progress(range(training.steps), name, training.steps, unit="steps"):
        optimizer.param_groups[0]["lr"] = training.lr * schedule(step, training.steps)
        indices = torch.randint(len(used), (BATCH_SIZE,)).tolist()
        batch = collate([used[index] for index in indices], taps)
        loss = sum_losses(head, batch, training, target.head)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == EARLY:
            save_pretrained(head, out / f"{name}-early")
    print(f"{name}: loss {loss.item():.3f}", flush=True)
    save_pretrained(head.eval(), out / name)


def main(argv: list[str]) -> None:
    """Train what is not there yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", default="runs/tiny", help="where the target and its data are")
    parser.add_argument("--set", choices=["reported"], help="the only set there is")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument(
        "--only",
        nargs="*",
        default=[*REPORTED],
        help="names of heads to train",
    )
    args = parser.parse_args(argv)
    target = Target.load(f"{args.runs}/target", dtype="float32")
    # the target's own answers
    overrides = [
        f"target.path={args.runs}/target",
        f"data.train={args.runs}/data/regenerated.jsonl",
    ]
    examples = read_features(target, Recipe.load(RECIPE, overrides))
    for name in args.only:
        if not (args.out / name / "config.json").is_file():
            training = REPORTED[name]
            seed = args.seed * 100 + training.index
            train(name, training, target, examples, seed, args.out)


if __name__ == "__main__":
    script(main)
