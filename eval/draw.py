"""Draw one decoding step as a picture: `python -m eval.draw DRAFTER --target T --prompt TEXT --out FILE.svg`."""

from __future__ import annotations

import argparse
from html import escape
from itertools import accumulate
from pathlib import Path

from eagle.core.budget import Budget
from eagle.core.tree import DraftTree
from eagle.decoding.decode import generate
from eagle.disk import write_text
from eagle.formats.checkpoint import load_drafter
from eagle.log import script
from eagle.target.target import Target

COLUMN, ROW, BOX, MARGIN = 132, 38, 26, 16
ACCEPTED, DROPPED, CHOSEN, LINE = "#1a7f37", "#8c959f", "#0969da", "#d0d7de"


def svg(tree: DraftTree, words: list[str], path: list[int], choice: str) -> str:
    """The tree from left to right: the accepted path in green, the target's own next token in blue."""
    depths, rows = tree.depths(), _rows(tree, path)
    place = {node: (MARGIN + depths[node] * COLUMN, MARGIN + row * ROW) for node, row in rows.items()}
    below = depths.count(len(path))  # drafted where the target's own token stands, and not chosen
    end = (place[path[-1]][0] + COLUMN, MARGIN + below * ROW)
    places = [*place.values(), end]
    width, height = max(x for x, _ in places) + COLUMN, max(y for _, y in places) + ROW + MARGIN
    edges = list(enumerate(tree.parents.tolist()))[1:]
    parts = [_edge(place[parent], place[node], node in path) for node, parent in edges]
    parts.append(_edge(place[path[-1]], end, True, CHOSEN))
    parts += [_box(place[node], word, ACCEPTED if node in path else DROPPED) for node, word in enumerate(words)]
    parts.append(_box(end, choice, CHOSEN))
    style = "font: 13px ui-monospace, monospace"
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" style="{style}">'
    return "\n".join([start, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *parts, "</svg>\n"])


def _rows(tree: DraftTree, path: list[int]) -> dict[int, int]:
    """A row for every node: each level from the top, the accepted node first, then by the parents' rows."""
    depths, parents, rows = tree.depths(), tree.parents.tolist(), {0: 0}
    for depth in range(1, max(depths) + 1):
        level = [node for node, at in enumerate(depths) if at == depth]
        level.sort(key=lambda node: (node not in path, rows[parents[node]]))
        rows |= {node: row for row, node in enumerate(level)}
    return rows


def _edge(start: tuple[int, int], end: tuple[int, int], accepted: bool, colour: str = ACCEPTED) -> str:
    (x, y), (u, v) = start, end
    x, y, v = x + COLUMN - 20, y + BOX // 2, v + BOX // 2
    stroke, width = (colour, 2.5) if accepted else (LINE, 1.5)
    return (
        f'<path d="M{x} {y} C{x + 14} {y} {u - 14} {v} {u} {v}" stroke="{stroke}" stroke-width="{width}" fill="none"/>'
    )


def _box(at: tuple[int, int], word: str, colour: str) -> str:
    (x, y), text = at, word if len(word) <= 12 else word[:11] + "…"
    return (
        f'<rect x="{x}" y="{y}" width="{COLUMN - 20}" height="{BOX}" rx="6" fill="#ffffff" stroke="{colour}" '
        f'stroke-width="1.5"/><text x="{x + 8}" y="{y + 17}" fill="{colour}" xml:space="preserve">{escape(text)}</text>'
    )


def best_step(target: Target, drafter_name: str, prompt: str, budget: Budget, steps: int) -> str:
    """Decode some steps and draw the one in which most was accepted."""
    tokens = (steps + 1) * (budget.depth + 1)  # enough that no draft is cut short
    drafter = load_drafter(drafter_name, target)
    trace = generate(target, drafter, target.chat(prompt), budget=budget, max_new_tokens=tokens, stop=[])
    ends = accumulate(cycle.committed for cycle in trace.cycles)
    best, end = max(zip(trace.cycles[:steps], ends, strict=False), key=lambda pair: pair[0].accepted)
    words = [_spell(target, token) for token in best.tree.tokens.tolist()]
    return svg(best.tree, words, [0, *best.kept], _spell(target, trace.tokens[end]))


def _spell(target: Target, token: int) -> str:
    """A token with visible spaces and line ends."""
    text = target.tokenizer.convert_ids_to_tokens(token).replace("▁", " ").replace("<0x0A>", "⏎")
    return text.replace(" ", "␣") or "∅"


def main(argv: list[str]) -> None:
    """Draw the best of the first steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafter")
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompt", default="What do you know about otters?")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("tree.svg"))
    args = parser.parse_args(argv)
    target = Target.load(args.target, dtype="float32")
    write_text(args.out, best_step(target, args.drafter, args.prompt, Budget(12, 5, 3), args.steps))
    print(f"drawn in {args.out}")


if __name__ == "__main__":
    script(main)
