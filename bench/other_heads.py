"""Healthy heads, trained in ways that are not this project's: `python bench/other_heads.py OUT --set SET --seed N`.

The losses of other tools and their like, each written out as a plain loop over drafting steps. `bench/broken_heads.py`
asks the doctor about them: none is broken. TUNING heads may be looked at while a threshold is chosen, REPORTED ones
may not.
"""

# S slots, V tokens that the head may say, L taps, D width

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data_prep.tokens import load_tokenizer, tokenized
from eagle.core.drafter import TargetHead
from eagle.data.examples import Batch, Example, collate
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import save_pretrained
from eagle.log import progress, script
from eagle.recipe import Recipe
from eagle.target.target import Target

RECIPE = "recipes/tiny/eagle3.yaml"
TAPS = (0, 1, 2, 4, 5, 7, 8, 9, -1)  # all that any head below reads
TEXTS, WARMUP, CLIP = 3, 0.05, 0.5  # texts of a batch; of the steps; norm of the gradient
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # head's logits and target's [S, V], text's token [S] -> [S]


# -- what two laws are compared by ------------------------------------------------------------------------------------


def soft(logits: Tensor, true: Tensor, following: Tensor) -> Tensor:
    """Cross-entropy from the target's probabilities."""
    return -(true.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def kl(logits: Tensor, true: Tensor, following: Tensor) -> Tensor:
    """KL(target, head), as speculators has it."""
    return F.kl_div(logits.log_softmax(-1), true.log_softmax(-1), log_target=True, reduction="none").sum(-1)


def reverse_kl(logits: Tensor, true: Tensor, following: Tensor) -> Tensor:
    """KL(head, target)."""
    return kl(true, logits, following)


def hard(logits: Tensor, true: Tensor, following: Tensor) -> Tensor:
    """Cross-entropy from the target's likeliest token alone."""
    return F.cross_entropy(logits, true.argmax(-1), reduction="none")


def text(logits: Tensor, true: Tensor, following: Tensor) -> Tensor:
    """Cross-entropy from the token that stands in the text."""
    return F.cross_entropy(logits, following, reduction="none", ignore_index=-1)


def smoothed(logits: Tensor, true: Tensor, following: Tensor) -> Tensor:
    """Cross-entropy from the likeliest token with a tenth spread over all."""
    return F.cross_entropy(logits, true.argmax(-1), reduction="none", label_smoothing=0.1)


def sharpened(logits: Tensor, true: Tensor, following: Tensor) -> Tensor:
    """Cross-entropy from the target's probabilities at T = 0.5."""
    return soft(logits, 2 * true, following)


def focal(logits: Tensor, true: Tensor, following: Tensor) -> Tensor:
    """Cross-entropy from the likeliest token, less where the head is sure of it."""
    entropy = hard(logits, true, following)
    return (1 - (-entropy).exp()) ** 2 * entropy


def variation(logits: Tensor, true: Tensor, following: Tensor) -> Tensor:
    """Half the sum of |p - q|, with a little cross-entropy to begin with."""
    return (logits.softmax(-1) - true.softmax(-1)).abs().sum(-1) / 2 + 0.1 * soft(logits, true, following)


@dataclass(frozen=True)
class Way:
    """A kind of head, and how it is trained."""

    head: dict[str, Any]
    loss: Loss | None = None  # the head's own, which this project trains it with
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
    "eagle1-soft": Way(E1, soft, unroll=1, lr=1e-3, regression=1.0, noise=0.1),
    "eagle1-hard": Way(E1, hard, unroll=1, lr=1e-3, regression=1.0),
    "eagle1-text": Way({**E1, "fc_bias": True}, text, unroll=1, lr=2e-3),
    "eagle3-hard": Way(E3, hard),
    "eagle3-specforge": Way({**RANDOM, "draft_vocab": 512}, soft, unroll=7),
    "eagle3-speculators": Way({**RANDOM, "draft_vocab": 512, "norm_before_residual": True}, kl, unroll=3, decay=1.0),
    "eagle3-hard-512": Way({**E3, "draft_vocab": 512}, hard, decay=1.0),
    "eagle3-smoothed": Way(RANDOM, smoothed, lr=1e-3),
    "eagle3.1-hard": Way(NORMED, hard),
    "eagle3-texts": Way({**E3, "draft_vocab": 512}, text, texts="train"),
    "eagle3-overfit": Way(E3, hard, steps=400, answers=40),
    "eagle3-frozen": Way({**E3, "draft_vocab": 256, "train_lm_head": False}, soft, decay=1.0),
    "eagle3-decayed": Way(E3, soft, weight_decay=1.0, dropout=0.1),
    "eagle3-single": Way(E3, hard, unroll=1),
}
AGAIN = ("eagle1-hard", "eagle3-hard", "eagle3-speculators", "eagle3.1-hard")
REPORTED = {
    "eagle1": Way(E1, steps=600, lr=1e-3),
    "hass": Way({**E1, "kind": "hass", "top": 0}, steps=300, lr=1e-3),
    "eagle3-short": Way({**E3, "draft_vocab": 512, "steps": 4}),
    "eagle3-full-short": Way({**E3, "steps": 4}),
    "eagle3.1-short": Way({**NORMED, "steps": 4}),
    **{f"{name}-2": TUNING[name] for name in AGAIN},
    "eagle1-entropy": Way(E1, soft, unroll=1, lr=3e-3, steps=400, dropout=0.1),
    "eagle1-smoothed": Way({**E1, "fc_bias": True}, smoothed, unroll=3, decay=1.0, lr=1e-3, regression=0.1),
    "eagle3-text-512": Way({**RANDOM, "draft_vocab": 512}, text, noise=0.2),
    "eagle3-sharpened": Way(E3, sharpened, lr=1e-2),
    "eagle3-reverse": Way({**E3, "norm_before_residual": True}, reverse_kl),
    "eagle3-taps": Way({**E3, "taps": (0, 1, 5, 9)}, hard),
    "eagle3-focal": Way({**E3, "draft_vocab": 1024, "taps": (1, 4, 8)}, focal, decay=0.6),
    "eagle3.1-variation": Way({**NORMED, "draft_vocab": None}, variation, lr=1e-3),
    "eagle3-long": Way({**E3, "train_lm_head": False}, text, steps=350, answers=60, weight_decay=0.1),
}


# -- training ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def with_features(target: Target, examples: list[Example]) -> list[Example]:
    """The examples with the target's states."""
    shown = progress(examples, "states", len(examples))
    return [replace(one, features=target.features(one.tokens[None], TAPS)[0]) for one in shown]


def loss_of(head: Any, batch: Batch, way: Way, frozen: TargetHead) -> Tensor:
    """The mean over slots of every step's loss, later steps less."""
    if way.loss is None:
        return head(batch, frozen)["total"]

    def noised(features: Tensor) -> Tensor:
        return F.dropout(features + way.noise * (2 * torch.rand_like(features) - 1), way.dropout)

    unrolled = head.unroll(batch, frozen, way.unroll, add_noise=noised)
    true, total = batch.tapped((-1,))[:, 0], torch.zeros(())
    owner = torch.repeat_interleave(torch.arange(len(batch.lengths)), torch.tensor(batch.lengths))
    for step, state in enumerate(unrolled.states):
        at = unrolled.places + 1 + step
        inside = at + 1 < len(owner)
        inside[inside.clone()] = owner[at[inside] + 1] == owner[unrolled.places[inside]]
        at, state = at[inside], state[inside]
        wanted, following = frozen.logits(true[at]), batch.tokens[at + 1]
        if head.drafts is not None:  # other tools narrow the target's law likewise, and leave out what cannot be said
            known = torch.isin(wanted.argmax(-1), head.drafts)
            at, state, following = at[known], state[known], following[known]
            place = torch.full((wanted.shape[-1],), -1).scatter(0, head.drafts, torch.arange(len(head.drafts)))
            wanted, following = wanted[known][:, head.drafts], place[following]
        loss = way.loss(head.logits(state, frozen), wanted, following).mean()
        if way.regression:
            loss = 0.1 * loss + way.regression * F.smooth_l1_loss(state, true[at])
        total = total + way.decay**step * loss
    return total


def trained(name: str, way: Way, target: Target, examples: list[Example], seed: int) -> Any:
    """A head that was trained in that way; healthy, whatever anybody says."""
    torch.manual_seed(seed)
    settings, said = settings_of(way.head, name), [one.tokens[one.loss_mask] for one in examples]
    head = DRAFTERS[settings.kind].for_target(settings, target.config, target.head, said).train()
    learned = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=way.lr, betas=(0.9, 0.95), weight_decay=way.weight_decay, fused=True)
    taps = tuple(dict.fromkeys((*head.taps, -1)))
    columns = [TAPS.index(tap) for tap in taps]
    few = [replace(one, features=one.features[:, columns]) for one in examples[: way.answers]]  # type: ignore[index]
    for step in progress(range(way.steps), name, way.steps, unit="steps"):
        done = step / way.steps
        optimizer.param_groups[0]["lr"] = way.lr * min((done + 1 / way.steps) / WARMUP, 1 - done)
        batch = collate([few[place] for place in torch.randint(len(few), (TEXTS,)).tolist()], taps)
        loss = loss_of(head, batch, way, target.head)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    print(f"{name}: loss {loss.item():.3f}", flush=True)
    return head.eval()


def main(argv: list[str]) -> None:
    """Train what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", default="runs/tiny", help="where the target and its data are")
    parser.add_argument("--set", choices=["tuning", "reported"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args(argv)
    target = Target.load(f"{args.runs}/target", dtype="float32")
    known: dict[str, list[Example]] = {}
    for number, (name, way) in enumerate((TUNING if args.set == "tuning" else REPORTED).items()):
        if (args.out / name / "config.json").is_file():
            continue
        if way.texts not in known:
            places = [f"target.path={args.runs}/target", f"data.train={args.runs}/data/{way.texts}.jsonl"]
            recipe = Recipe.load(RECIPE, places)
            examples, _ = tokenized(recipe, load_tokenizer(recipe))
            known[way.texts] = with_features(target, [one for one in examples if one.loss_mask[2:].any()])
        head = trained(name, way, target, known[way.texts], args.seed * 100 + number)
        save_pretrained(head, args.out / name)


if __name__ == "__main__":
    script(main)
