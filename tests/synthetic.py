"""Made-up results in the format of `eval.measure`, with the acceptance and the seconds that a test asks for."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# texts that a report must show as they are: markup, control characters, long words
HOSTILE = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "</style></span></main><h1>owned</h1>",
    '" onmouseover=\'document.title="owned"\' x="',
    "a\x00b\x1b[31m\u202egnirts\u2066 \ud800 \u2028",
    "Donaudampfschifffahrt" * 40,
    "e" + "\u0301\u0330" * 60,
    "<!-- ]]> &lt;script&gt; &#x3c;",
)
# conversations are of these in turn
TASKS = (("mt_bench", "writing"), ("mt_bench", "maths"), ("gsm8k", None))
# the chance that a level is accepted, and the number of levels
RATES = {
    "ngram": (0.25, 4),
    "eagle1": (0.75, 5),
    "eagle1-chain": (0.7, 5),
}
# an answer in pieces, some of them drafted
PIECES = ["The ", "quick ", "fox ", "copies ", "a ", "file", ".\n"]


def answer(
    drafter: str,
    conversation: int,
    temperature: float,
    seed: int = 0,
    **changed: Any,
) -> dict[str, Any]:
    """Return one row; easy conversations are easy for every drafter.

    Args:
        drafter: one of RATES, or another, which has no drafts.
        conversation: a number, which also chooses the task.
        temperature: a higher one makes drafts worse.
        seed: draws the cycles.
        changed: fields that differ.
    """
    dice = random.Random(ascii((drafter, conversation, temperature, seed)))
    easy = random.Random(conversation).uniform(-0.15, 0.15) - 0.1 * temperature
    rate, levels = RATES.get(drafter, (0.0, 0))
    # cycles until 48 tokens after the prompt's own are committed
    cycles = []
    left = 48
    while left > 0:
        row = cycle(dice, min(levels, left - 1), rate + easy)
        row["committed"] = min(row["committed"], left)
        left -= row["committed"]
        cycles.append(row)
    name, task = TASKS[conversation % len(TASKS)]
    seconds = sum(sum(row["seconds"].values()) for row in cycles) + 0.02
    return {
        "run": "c0ffee00",
        "drafter": drafter,
        "set": name,
        "task": task,
        "conversation": str(conversation // 2),
        "turn": conversation % 2,
        "temperature": temperature,
        "seed": seed,
        "tokens": 49,
        "finish": "length",
        "seconds": seconds,
        "cpu_seconds": seconds,
        "identical": True,
        "loops": False,
        "text": "The quick fox",
        "cycles": cycles,
        **changed,
    }


def cycle(dice: random.Random, levels: int, rate: float) -> dict[str, Any]:
    """Return one cycle of a tree with three ranks a level."""
    path: list[int] = []
    confidence: list[list[Any]] = []
    while len(path) < levels:
        accepted = dice.random() < rate
        told = rate + dice.uniform(-0.3, 0.3)
        confidence.append([min(max(told, 0.01), 0.99), accepted])
        if not accepted:
            break
        path.append(dice.choices((0, 1, 2), (8, 2, 1))[0])
    milliseconds = {
        "draft": 0.7 * levels,
        "target": 9 + 0.3 * levels,
        "verify": 0.3,
        "other": 0.2,
    }
    seconds = {part: ms / 1000 * dice.uniform(0.9, 1.1) for part, ms in milliseconds.items()}
    # two nodes a level, whatever is accepted
    return {
        "nodes": 2 * levels,
        "depth": levels,
        "accepted": len(path),
        "committed": len(path) + 1,
        "context": 200,
        "seconds": seconds,
        "path": path,
        "confidence": confidence,
    }


def pieces(texts: Iterable[str] = PIECES) -> list[list[Any]]:
    """Return texts with whether each was drafted: two of three are."""
    return [[text, index % 3 != 0] for index, text in enumerate(texts)]


def write(
    path: Path,
    drafters: Iterable[str] = RATES,
    temperatures: Iterable[float] = (0.0, 1.0),
    **header: Any,
) -> Path:
    """Write a results file; two answers are in pieces, one of them hostile."""
    drafters = [*drafters]
    budget = {
        "nodes": 8,
        "depth": 5,
        "top_k": 3,
        "paths": None,
        "draw": "noise",
    }
    run = {
        "id": "c0ffee00",
        "target": "a/target",
        "machine": "x86_64, 1 threads",
        "commit": "abc1234",
        "date": "today",
        "drafters": {
            name: {"head": f"runs/{name}", "budget": budget} for name in ("none", *drafters)
        },
        **header,
    }
    # easy conversations are the same for all drafters
    rows = []
    for temperature in temperatures:
        for conversation in range(24):
            rows += [answer(name, conversation, temperature) for name in ("none", *drafters)]
    first, second, *_ = [row for row in rows if row["drafter"] == drafters[-1]]
    first["pieces"] = pieces(PIECES * 12)
    second["pieces"] = pieces(HOSTILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in ({"run": run}, *rows)))
    return path
