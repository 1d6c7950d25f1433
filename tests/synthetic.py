"""Made-up results in the format of `eval.measure`, with the acceptance and the seconds that a test asks for."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
TASKS = (("mt_bench", "writing"), ("mt_bench", "maths"), ("gsm8k", None))
RATES = {
    "ngram": (0.25, 4),
    "eagle1": (0.75, 5),
    "eagle1-chain": (0.7, 5),
}  # chance per level, levels
PIECES = ["The ", "quick ", "fox ", "copies ", "a ", "file", ".\n"]


def answer(
    drafter: str, conversation: int, temperature: float, seed: int = 0, **changed: Any
) -> dict[str, Any]:
    """One row; easy conversations are easy for every drafter."""
    drawn = random.Random(ascii((drafter, conversation, temperature, seed)))
    easy = random.Random(conversation).uniform(-0.15, 0.15) - 0.1 * temperature
    rate, levels = RATES.get(drafter, (0.0, 0))
    cycles, left = [], 48
    while left > 0:
        cycles.append(cycle(drawn, min(levels, left - 1), rate + easy))
        cycles[-1]["committed"] = min(cycles[-1]["committed"], left)
        left -= cycles[-1]["committed"]
    name, task = TASKS[conversation % len(TASKS)]
    seconds = sum(sum(one["seconds"].values()) for one in cycles) + 0.02
    return {
        "run": "c0ffee00", "drafter": drafter, "set": name, "task": task, "conversation": str(conversation // 2),
        "turn": conversation % 2, "temperature": temperature, "seed": seed, "tokens": 49, "finish": "length",
        "seconds": seconds, "cpu_seconds": seconds, "identical": True, "loops": False, "text": "The quick fox",
        "cycles": cycles, **changed,
    }  # fmt: skip


def cycle(drawn: random.Random, levels: int, rate: float) -> dict[str, Any]:
    """One cycle of a tree with three ranks a level."""
    path: list[int] = []
    sure: list[list[Any]] = []
    while len(path) < levels:
        kept = drawn.random() < rate
        sure.append([min(max(rate + drawn.uniform(-0.3, 0.3), 0.01), 0.99), kept])
        if not kept:
            break
        path.append(drawn.choices((0, 1, 2), (8, 2, 1))[0])
    milliseconds = {"draft": 0.7 * levels, "target": 9 + 0.3 * levels, "verify": 0.3, "other": 0.2}
    return {
        "nodes": 2 * levels, "depth": levels, "accepted": len(path), "committed": len(path) + 1, "context": 200,
        "seconds": {part: ms / 1000 * drawn.uniform(0.9, 1.1) for part, ms in milliseconds.items()},
        "path": path, "confidence": sure,
    }  # fmt: skip


def pieces(texts: Iterable[str] = PIECES) -> list[list[Any]]:
    """Texts, two of three of them drafted."""
    return [[text, place % 3 != 0] for place, text in enumerate(texts)]


def write(
    path: Path,
    drafters: Iterable[str] = RATES,
    temperatures: Iterable[float] = (0.0, 1.0),
    **header: Any,
) -> Path:
    """A results file; two answers are in pieces, one of them hostile."""
    made = {
        "id": "c0ffee00",
        "target": "a/target",
        "machine": "x86_64, 1 threads",
        "commit": "abc1234",
        "date": "today",
    }
    drafters = [*drafters]
    budget = {"nodes": 8, "depth": 5, "top_k": 3, "paths": None, "draw": "noise"}
    settings = {name: {"head": f"runs/{name}", "budget": budget} for name in drafters}
    lines: list[dict[str, Any]] = [{"run": {**made, "drafters": settings, **header}}]
    for temperature in temperatures:
        for conversation in range(24):
            lines += [answer(name, conversation, temperature) for name in ("none", *drafters)]
    drafted = [line for line in lines if line.get("drafter") == drafters[-1]]
    drafted[0] |= {"pieces": pieces(PIECES * 12)}
    drafted[1] |= {"pieces": pieces(HOSTILE)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
