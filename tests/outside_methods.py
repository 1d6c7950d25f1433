"""A method in a file outside the package, and the road that it goes there: by commands, in an empty folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.documents import blocks

PAGE = Path(__file__).parent.parent / "docs/guides/own-method.md"
METHOD = next(text for text in blocks(PAGE, "python") if "class Recurrent(" in text)
LOOKUP = '''"""The last token, again and again."""

from eagle.core.drafter import Drafter
from eagle.core.tree import DraftTree


class Again(Drafter):
    """Drafts the root's own token."""

    def begin(self, noise=None):
        return self

    def propose(self, update, budget):
        return DraftTree.chain([update.root] * (1 + min(budget.nodes, budget.depth, budget.top_k and 9)))
'''
ARMS = """out: runs/compared
base: tiny/eagle1
recipe:
  features: {store: runs/compared/features}
  data: {train: runs/tiny/data/train.jsonl, limit: 40, max_length: 96}
  train: {validation: 0}
  eval: {count: 2, max_new_tokens: 8}
tokens: 1000
shapes:
  chain of 3: {nodes: 3, depth: 3, top_k: 1}
arms:
  eagle1: {}
  mine: {recipe: {drafter: {kind: mine.py:Recurrent}}}
  again: {untrained: again.py:Again}
"""
LESS = "data.train=runs/tiny/data/train.jsonl data.limit=24 data.max_length=96 train.batch_size=4 train.max_steps=4 "
LESS += "train.dtype=float32 eval.count=2 eval.max_new_tokens=8 features.store=runs/mine/features train.out=runs/mine"
MINE = f"tiny/eagle1 {LESS} 'drafter={{kind: mine.py:Recurrent}}'"
HEAD = "runs/mine/head"
TARGET = "--target runs/tiny/target --max-new-tokens 4"

Run = Callable[[str], tuple[int, str]]
"""Runs `eagle` with these arguments; its status, and all that it said."""


def go_the_road(run: Run, folder: Path) -> None:
    """Train on two processes, measure, compare, and load the head with and without its code being trusted."""
    for name, text in {"mine.py": METHOD, "again.py": LOOKUP, "arms.yaml": ARMS}.items():
        (folder / name).write_text(text)

    # most commands must hold; what is refused has a run of its own
    def holds(line: str) -> str:
        status, said = run(line)
        assert status == 0, f"eagle {line}\n{said}"
        return said

    holds(f"extract {MINE}")
    holds(f"train {MINE} --processes 2")
    assert (folder / HEAD / "method.py").read_text() == METHOD
    assert "| `recurrent` |" in holds(f"measure {MINE} --processes 2")
    said = holds("compare arms.yaml")
    assert "mine" in said
    assert "again" in said
    status, said = run(f"generate {HEAD} Hello {TARGET}")
    assert status == 1
    code = "method.py there, which is the class Recurrent of mine.py"
    assert f"would run code of its own: {code}" in said
    holds(f"generate {HEAD} Hello {TARGET} --trust-code")
    holds(f"--plugin mine.py generate {HEAD},again.py:Again Hello {TARGET}")
    second = f"train tiny/eagle1 {LESS} 'drafter={{kind: recurrent}}' train.out=runs/second"
    holds(f"{second} --plugin mine.py --processes 2")
    assert (folder / "runs/second/head/method.py").read_text() == METHOD
