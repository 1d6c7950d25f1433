"""Healthy heads, trained in ways that are not this project's: `python -m tests.doctor.other_heads OUT --set SET`.

The losses of other tools and their like, each written out as a plain loop over drafting steps. `broken_heads.py`
asks the doctor about them: none is broken. TUNING heads may be looked at while a threshold is chosen, REPORTED ones
may not.
"""

# S slots, V tokens that the head may say, L taps, D width

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
TAPS = (0, 1, 2, 4, 5, 7, 8, 9, -1)  # all that any head below reads
TEXTS, WARMUP, CLIP = 3, 0.05, 0.5  # texts of a batch; of the steps; norm of the gradient
EARLY = 50  # steps after which a head is under-trained, and not broken
Loss = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # logits of head and target [S, V], the text's tokens [S] -> [S]


def soft(logits: Tensor, true: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy from the target's probabilities."""
    return -(true.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def hard(logits: Tensor, true: Tensor, tokens: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy from the target's likeliest token, with a part of it spread over all."""
    return F.cross_entropy(logits, true.argmax(-1), reduction="none", label_smoothing=smoothing)


def kl(logits: Tensor, true: Tensor, tokens: Tensor) -> Tensor:
    """KL(target, head), as speculators has it."""
    return F.kl_div(
        logits.log_softmax(-1), true.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)


def focal(logits: Tensor, true: Tensor, tokens: Tensor) -> Tensor:
    """Hard cross-entropy, less where the head is sure of the token."""
    entropy = hard(logits, true, tokens)
    return (1 - (-entropy).exp()) ** 2 * entropy


LOSSES: dict[str, Loss] = {
    "soft": soft,
    "hard": hard,
    "kl": kl,
    "focal": focal,
    "smoothed": partial(hard, smoothing=0.1),
    "sharpened": lambda logits, true, tokens: soft(logits, 2 * true, tokens),  # T = 0.5
    "reverse_kl": lambda logits, true, tokens: kl(true, logits, tokens),
    "text": lambda logits, true, tokens: F.cross_entropy(
        logits, tokens, reduction="none", ignore_index=-1
    ),
    # half the sum of |p - q|, with a little cross-entropy to begin with
    "variation": lambda logits, true, tokens: (
        (logits.softmax(-1) - true.softmax(-1)).abs().sum(-1) / 2 + 0.1 * soft(logits, true, tokens)
    ),
}


@dataclass(frozen=True)
class Training:
    """A kind of head, and how it is trained."""

    head: dict[str, Any]
    loss: str | None = None  # of LOSSES; the head's own, which this project trains it with, if none
    unroll: int = 4  # drafting steps in training
    decay: float = 0.8  # of a step's weight
    lr: float = 3e-3
    steps: int = 220
    regression: float = 0.0  # smooth-L1 of the features, EAGLE-1's
    noise: float = 0.0  # U(-noise, noise) on the features
    dropout: float = 0.0  # of the features
    weight_decay: float = 0.0
    texts: str = "regenerated"  # or "train": not the target's own answers
    answers: int = 300  # conversations


E1, E3 = {"kind": "eagle1", "fc_bias": False}, {"kind": "eagle3"}
RANDOM = {**E3, "lm_head": "random", "queries": "random"}
NORMED = {**E3, "fc_norm": True, "norm_output": True, "draft_vocab": 512}
TUNING = {
    "eagle1-soft": Training(E1, "soft", unroll=1, lr=1e-3, regression=1.0, noise=0.1),
    "eagle1-hard": Training(E1, "hard", unroll=1, lr=1e-3, regression=1.0),
    "eagle1-text": Training({**E1, "fc_bias": True}, "text", unroll=1, lr=2e-3),
    "eagle3-hard": Training(E3, "hard"),
    "eagle3-specforge": Training({**RANDOM, "draft_vocab": 512}, "soft", unroll=7),
    "eagle3-speculators": Training(
        {**RANDOM, "draft_vocab": 512, "norm_before_residual": True}, "kl", unroll=3, decay=1.0
    ),
    "eagle3-hard-512": Training({**E3, "draft_vocab": 512}, "hard", decay=1.0),
    "eagle3-smoothed": Training(RANDOM, "smoothed", lr=1e-3),
    "eagle3.1-hard": Training(NORMED, "hard"),
    "eagle3-texts": Training({**E3, "draft_vocab": 512}, "text", texts="train"),
    "eagle3-overfit": Training(E3, "hard", steps=400, answers=40),
    "eagle3-frozen": Training(
        {**E3, "draft_vocab": 256, "train_lm_head": False}, "soft", decay=1.0
    ),
    "eagle3-decayed": Training(E3, "soft", weight_decay=1.0, dropout=0.1),
    "eagle3-single": Training(E3, "hard", unroll=1),
}
FIVE = {"taps": (2, 4, 5, 7, 8)}
BLOCKS, MTP = (
    {"kind": "dspark", "blocks": 2, "rank": 64, **FIVE},
    {"kind": "mtp", "start": "last_block"},
)
OTHER_TUNING = {  # kinds of other families, with their own losses
    "medusa-probs": Training({"kind": "medusa", "levels": 4}),
    "peagle-own": Training({"kind": "peagle", "blocks": 2, "depths": 4, "draft_vocab": 512}),
    "dflash-tokens": Training(
        {"kind": "dflash", "blocks": 2, "slots": 6, "loss": "tokens", **FIVE}
    ),
    "dspark-own": Training(BLOCKS),
    "mtp-tokens": Training({**MTP, "loss": "tokens"}, lr=1e-3),
}
AGAIN = ("eagle1-hard", "eagle3-hard", "eagle3-speculators", "eagle3.1-hard")
REPORTED = {
    "eagle1": Training(E1, steps=600, lr=1e-3),
    "hass": Training({**E1, "kind": "hass", "top": 0}, steps=300, lr=1e-3),
    "eagle3-short": Training({**E3, "draft_vocab": 512, "steps": 4}),
    "eagle3-full-short": Training({**E3, "steps": 4}),
    "eagle3.1-short": Training({**NORMED, "steps": 4}),
    **{f"{name}-2": TUNING[name] for name in AGAIN},
    "eagle1-entropy": Training(E1, "soft", unroll=1, lr=3e-3, steps=400, dropout=0.1),
    "eagle1-smoothed": Training(
        {**E1, "fc_bias": True}, "smoothed", unroll=3, decay=1.0, lr=1e-3, regression=0.1
    ),
    "eagle3-text-512": Training({**RANDOM, "draft_vocab": 512}, "text", noise=0.2),
    "eagle3-sharpened": Training(E3, "sharpened", lr=1e-2),
    "eagle3-reverse": Training({**E3, "norm_before_residual": True}, "reverse_kl"),
    "eagle3-taps": Training({**E3, "taps": (0, 1, 5, 9)}, "hard"),
    "eagle3-focal": Training({**E3, "draft_vocab": 1024, "taps": (1, 4, 8)}, "focal", decay=0.6),
    "eagle3.1-variation": Training({**NORMED, "draft_vocab": None}, "variation", lr=1e-3),
    "eagle3-long": Training(
        {**E3, "train_lm_head": False}, "text", steps=350, answers=60, weight_decay=0.1
    ),
}
OTHER_REPORTED = {
    "medusa-tokens": Training(
        {"kind": "medusa", "levels": 3, "loss": "tokens"}, lr=2e-3, steps=500
    ),
    "peagle-gated": Training(
        {"kind": "peagle", "blocks": 3, "depths": 5, "norm_before_residual": True}, lr=2e-3
    ),
    "dflash-probs": Training({"kind": "dflash", "blocks": 3, "slots": 5, "taps": (1, 4, 8)}),
    "dspark-anchored": Training(
        {**BLOCKS, "slots": 5, "sample_from_anchor": False, "confidence": False}, lr=2e-3, steps=120
    ),
    "mtp-random": Training({**MTP, "start": "random", "steps": 2}, steps=150),
}


def read_features(target: Target, recipe: Recipe) -> list[Example]:
    """The recipe's conversations with the target's states."""
    examples, _ = tokenize_data(recipe, load_tokenizer(recipe))
    examples = [example for example in examples if example.loss_mask[2:].any()]
    shown = progress(examples, "states", len(examples))
    with torch.no_grad():
        return [
            replace(example, features=target.features(example.tokens[None], TAPS)[0])
            for example in shown
        ]


def sum_losses(head: Any, batch: Batch, training: Training, frozen: TargetHead) -> Tensor:
    """The mean over slots of every step's loss, later steps less."""
    if training.loss is None:
        return head(batch, frozen)["total"]

    def add_noise(features: Tensor) -> Tensor:
        return F.dropout(
            features + training.noise * (2 * torch.rand_like(features) - 1), training.dropout
        )

    unrolled = head.unroll(batch, frozen, training.unroll, add_noise=add_noise)
    true, total = batch.select_taps((-1,))[:, 0], torch.zeros(())
    owner = torch.repeat_interleave(torch.arange(len(batch.lengths)), torch.tensor(batch.lengths))
    for step, states in enumerate(unrolled.states):
        places = unrolled.places + 1 + step
        inside = places + 1 < len(owner)
        inside[inside.clone()] = owner[places[inside] + 1] == owner[unrolled.places[inside]]
        places, states = places[inside], states[inside]
        target_logits, tokens = frozen.logits(true[places]), batch.tokens[places + 1]
        if (
            head.drafts is not None
        ):  # other tools narrow the target's probs likewise, and leave out other tokens
            known = torch.isin(target_logits.argmax(-1), head.drafts)
            places, states, tokens = places[known], states[known], tokens[known]
            row = torch.full((target_logits.shape[-1],), -1).scatter(
                0, head.drafts, torch.arange(len(head.drafts))
            )
            target_logits, tokens = target_logits[known][:, head.drafts], row[tokens]
        loss = LOSSES[training.loss](head.logits(states, frozen), target_logits, tokens).mean()
        if training.regression:
            loss = 0.1 * loss + training.regression * F.smooth_l1_loss(states, true[places])
        total = total + training.decay**step * loss
    return total


def train(
    name: str, training: Training, target: Target, examples: list[Example], seed: int, out: Path
) -> None:
    """Train a healthy head in this way and save it, the first time while it is still under-trained."""
    torch.manual_seed(seed)
    settings, supervised = (
        settings_of(training.head, name),
        [example.tokens[example.loss_mask] for example in examples],
    )
    kind = DRAFTERS[settings.kind]
    borrowed = {"weights": target.tensor} if kind.reads.weights else {}
    head = kind.for_target(settings, target.config, target.head, supervised, **borrowed).train()
    weights, decay = (
        [weight for weight in head.parameters() if weight.requires_grad],
        training.weight_decay,
    )
    optimizer = torch.optim.AdamW(
        weights, lr=training.lr, betas=(0.9, 0.95), weight_decay=decay, fused=True
    )
    taps = tuple(dict.fromkeys((*head.taps, -1)))
    columns = [TAPS.index(tap) for tap in taps]
    used = [
        replace(example, features=example.features[:, columns])
        for example in examples[: training.answers]
    ]  # type: ignore[index]
    for step in progress(range(training.steps), name, training.steps, unit="steps"):
        done = step / training.steps
        optimizer.param_groups[0]["lr"] = training.lr * min(
            (done + 1 / training.steps) / WARMUP, 1 - done
        )
        batch = collate(
            [used[place] for place in torch.randint(len(used), (TEXTS,)).tolist()], taps
        )
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
    parser.add_argument("--set", choices=["tuning", "reported"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument(
        "--only", nargs="*", help="names of those to train; by default all of the set"
    )
    args = parser.parse_args(argv)
    target = Target.load(f"{args.runs}/target", dtype="float32")
    examples: dict[str, list[Example]] = {}
    trainings = (
        {**TUNING, **OTHER_TUNING} if args.set == "tuning" else {**REPORTED, **OTHER_REPORTED}
    )
    for number, (name, training) in enumerate(trainings.items()):
        if name in (args.only or trainings) and not (args.out / name / "config.json").is_file():
            if training.texts not in examples:
                paths = [
                    f"target.path={args.runs}/target",
                    f"data.train={args.runs}/data/{training.texts}.jsonl",
                ]
                examples[training.texts] = read_features(target, Recipe.load(RECIPE, paths))
            train(
                name, training, target, examples[training.texts], args.seed * 100 + number, args.out
            )


if __name__ == "__main__":
    script(main)
