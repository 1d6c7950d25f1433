"""How much of its attention an EAGLE-3 head spends on the token it stands on, and how often it then agrees.

`python bench/own_token.py --target T --store FEATURES --heads NAME=FOLDER ...` tells of each head the query head that
looks at its own row most, over the supervised slots of some conversations.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from bench.machine import made_on
from eagle.checkpoint import load_head
from eagle.drafters.blocks import Attention
from eagle.examples import Batch, collate
from eagle.log import progress
from eagle.store import FeatureStore
from eagle.target import Target


def own_shares(attention: Attention, read: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """[heads, T], what a query gives to its own row, of a causal pass over rows [1, T, width]."""
    query, key = (
        projection(read).unflatten(-1, (-1, attention.width)).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *rotary)
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(-1, -2)
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    laws = (scores * attention.width**-0.5).masked_fill(unseen, -torch.inf).softmax(-1)
    return laws[0].diagonal(dim1=-2, dim2=-1)


@torch.no_grad()
def of_text(head: Any, target: Target, batch: Batch) -> tuple[Tensor, Tensor]:
    """[heads, S] and [S], the shares and whether the first level agrees, at the supervised slots of one text."""
    caught: list[Tensor] = []

    def catch(attention: Attention, given: tuple[Any, ...]) -> None:
        caught.append(own_shares(attention, *given[:2]))

    hook = head.layers[0].self_attn.register_forward_pre_hook(catch)
    state = head.states(
        batch.tokens[None, 1:-1], head.first(batch.tapped(head.taps)[None, :-2].float()), 0, target.head
    )
    hook.remove()
    said = head.law(state[0], target.head).argmax(-1)
    said = said if head.drafts is None else head.drafts[said]
    true = target.head.logits(batch.tapped((-1,))[1:-1, 0].float()).argmax(-1)
    counted = batch.loss_mask[2:]
    return caught[0][:, counted], (said == true)[counted]


def measured(target: Target, store: FeatureStore, folder: str, texts: int) -> dict[str, float]:
    """Of one head: the share of the query head that has most, and its agreement."""
    head = load_head(folder).eval()
    batches = (collate(store.read([place]), store.taps, [place]) for place in range(texts))
    found = [of_text(head, target, batch) for batch in batches if len(batch.tokens) > 2]
    shares, agreed = (torch.cat(columns, dim=-1).float() for columns in zip(*found, strict=True))
    return {"own": shares.mean(-1).max().item(), "agreement": agreed.mean().item(), "slots": agreed.numel()}


def table(results: dict[str, Any]) -> str:
    """Shares and agreement, head by head, as Markdown."""
    lines = ["| head | attention on its own token | agreement |", "|---|---|---|"]
    for name, row in results["heads"].items():
        lines.append(f"| {name} | {row['own']:.2f} | {row['agreement']:.3f} |")
    machine = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    return "\n".join([*lines, "", f"<sub>{machine}</sub>"])


def main() -> None:
    """Measure every head and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--heads", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("docs/results/own_token.json"))
    args = parser.parse_args()
    target, store = Target.load(args.target, dtype="float32"), FeatureStore(args.store)
    named = dict(one.split("=", 1) for one in args.heads)
    rows = {
        name: measured(target, store, folder, args.texts)
        for name, folder in progress(named.items(), "heads", len(named))
    }
    about = made_on(target=Path(args.target).name, texts=args.texts)
    args.out.write_text(json.dumps({"machine": about, "heads": rows}) + "\n")
    print(table({"machine": about, "heads": rows}))


if __name__ == "__main__":
    main()
