"""How long one chain of tokens takes to draft, by each method: `python bench/draft_time.py TARGET`.

New heads of the target's sizes draft behind the same text, each cycle after three committed tokens; all take turns.
Beside what a draft took stands what it is charged: the bare forwards that `forwards`, `unread` and `probe` tell of.
One thread, CPU seconds, medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.machine import made_on, markdown, write_results
from eagle import Budget, Target
from eagle.core.drafter import Committed
from eagle.core.tree import chain_paths
from eagle.drafters import DRAFTERS, settings_of
from eagle.log import script
from eval.costs import time_action

CONTEXTS, LEVELS, COMMITTED = (128, 1024), 7, 3
BLOCK = {"slots": LEVELS + 1}
HEADS: dict[str, dict[str, Any]] = {
    "EAGLE-3": {"kind": "eagle3"},
    "MTP": {"kind": "mtp"},
    "P-EAGLE, 1 block": {"kind": "peagle", "blocks": 1, "depths": LEVELS},
    "P-EAGLE, 4 blocks": {"kind": "peagle", "blocks": 4, "depths": LEVELS},
    "DFlash, 2 blocks": {"kind": "dflash", "blocks": 2, **BLOCK},
    "DFlash, 5 blocks": {"kind": "dflash", "blocks": 5, **BLOCK},
    "JetSpec, 5 blocks": {"kind": "dflash", "blocks": 5, "causal": True, **BLOCK},
    "DSpark, 2 blocks": {"kind": "dspark", "blocks": 2, "slots": LEVELS},
    "DSpark, 5 blocks": {"kind": "dspark", "blocks": 5, "slots": LEVELS},
}


def new_head(name: str, target: Target) -> Any:
    """A head as it starts, ready to draft."""
    settings = settings_of(HEADS[name], "bench")
    torch.manual_seed(0)
    head = DRAFTERS[settings.kind].for_target(settings, target.config, target.head)  # type: ignore[attr-defined]
    return head.to(target.head.weight.dtype).bind(target.head)


class Draft:
    """A text that a head drafts for, cycle after cycle, and the bare forwards of such a draft."""

    def __init__(self, head: Any, context: int) -> None:
        self.head, self.text, self.budget = head, head.begin(), Budget.fixed(chain_paths(LEVELS))
        self.text.propose(self.committed(context), self.budget)
        first = head.unread(COMMITTED - 1, LEVELS)
        self.forwards = [head.probe(context, first, 1)]
        self.forwards += [head.probe(context, rows, rows) for rows in head.forwards(self.budget)]

    def committed(self, count: int) -> Committed:
        """So many tokens, and states of the target at them."""
        weight = self.head.frozen[0].weight
        features = torch.randn(count, len(self.head.taps), weight.shape[1], dtype=weight.dtype)
        return Committed(torch.ones(count, dtype=torch.long), features, 1)

    def time_cycle(self) -> tuple[float, float]:
        """Seconds of a draft, and of its bare forwards."""
        update, device = self.committed(COMMITTED), torch.device("cpu")
        drafted = time_action(lambda: self.text.propose(update, self.budget), device)
        return drafted, sum(time_action(forward, device) for forward in self.forwards)


def measure(target: Target, names: Sequence[str], cycles: int) -> list[dict[str, Any]]:
    """Of each head behind each context: milliseconds of a draft and of its forwards, and how a draft compares."""
    rows = []
    for context in CONTEXTS:
        heads = {name: new_head(name, target) for name in names}
        drafts = {name: Draft(head, context) for name, head in heads.items()}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for cycle in range(cycles + 3):  # the first ones warm up
            for name, draft in drafts.items():
                timed = draft.time_cycle()
                if cycle >= 3:
                    seconds[name].append(timed)
        medians = {name: [median(part) for part in zip(*pairs, strict=True)] for name, pairs in seconds.items()}
        for name, (drafted, charged) in medians.items():
            weights = sum(weight.numel() for weight in heads[name].parameters())
            row = {"context": context, "head": name, "parameters": weights, "forwards": len(drafts[name].forwards)}
            row |= {"ms": round(1000 * drafted, 3), "charged_ms": round(1000 * charged, 3)}
            row |= {"charged": round(charged / drafted, 3), "of_first": round(drafted / medians[names[0]][0], 3)}
            rows.append(row)
            print(row, flush=True)
    return rows


def table(results: dict[str, Any]) -> str:
    """A draft of each head, beside that of the first one, and what it is charged."""
    header = ["head", "parameters", "forwards"]
    contexts = list(dict.fromkeys(row["context"] for row in results["rows"]))
    header += [f"{part}, behind {context:,}" for context in contexts for part in ("a draft", "of EAGLE-3's", "charged")]
    lines: dict[str, list[object]] = {}
    for row in results["rows"]:
        line = lines.setdefault(row["head"], [row["head"], f"{row['parameters'] / 1e6:.1f} M", row["forwards"]])
        line += [f"{row['ms']:.2f} ms", f"{row['of_first']:.2f}", f"{row['charged']:.0%}"]
    return markdown(header, lines.values(), results["machine"])


def main(argv: list[str]) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="its folder")
    parser.add_argument("--heads", choices=HEADS, nargs="+", default=list(HEADS))
    parser.add_argument("--cycles", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("docs/results/draft_time.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    target = Target.load(args.target)
    results = {"machine": made_on(), "levels": LEVELS, "rows": measure(target, args.heads, args.cycles)}
    print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    script(main)
