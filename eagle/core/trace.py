"""The record of a generation, cycle by cycle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp
from textwrap import shorten
from typing import Any

from eagle.core.spelling import Spelling
from eagle.core.tree import DraftTree
from eagle.markup import Html, tag

GREEN = "#2da44e"  # reads on white and on dark


@dataclass(frozen=True, slots=True)
class Cycle:
    """One target forward: the proposed tree, the accepted nodes, and the seconds of draft, target, verify and other."""

    tree: DraftTree = field(compare=False, repr=False)  # without its `draft_probs`
    kept: tuple[int, ...]  # accepted nodes of the tree
    committed: int  # new tokens of the output, after cutting at a stop
    context: int  # tokens in the target's cache before
    seconds: dict[str, float] | None = None  # of the whole cycle, which texts that are written side by side share
    number: int = field(default=0, compare=False)  # of that cycle
    rows: int = field(default=1, compare=False)  # texts in it

    @property
    def nodes(self) -> int:
        """Number of proposed tokens."""
        return len(self.tree) - 1

    @property
    def depth(self) -> int:
        """Levels of the proposed tree."""
        return max(self.tree.depths())

    @property
    def accepted(self) -> int:
        """Number of accepted tokens."""
        return len(self.kept)

    @property
    def path(self) -> list[int]:
        """The rank of each accepted token among its siblings."""
        children = self.tree.children()
        return [children[parent].index(node) for parent, node in pairwise((0, *self.kept))]

    @property
    def confidence(self) -> list[tuple[float, bool]]:
        """(drafter's probability, whether it was accepted) of each drafted token whose parent was accepted."""
        if self.tree.likelihoods is None:
            return []
        scores, children = self.tree.likelihoods.tolist(), self.tree.children()
        edges = [(parent, child) for parent in (0, *self.kept) for child in children[parent]]
        return [(min(exp(scores[child] - scores[parent]), 1.0), child in self.kept) for parent, child in edges]


@dataclass(slots=True, repr=False)
class Trace:
    """The record of one generation: its tokens, its cycles and why it ended."""

    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    finish: str = "running"  # at the end "stop", "length", or "error"
    tokenizer: Any = field(default=None, repr=False)
    stop_string: str | None = None
    error: Exception | None = field(default=None, compare=False)  # that ended this text alone, among several

    def __repr__(self) -> str:
        parts = [f"{len(self.prompt)} prompt tokens", f"{len(self.tokens)} tokens", f"{len(self.cycles)} cycles"]
        parts += [f"τ = {self.acceptance_length:.2f}"] if self.cycles else []
        parts.append(self.finish if self.error is None else f"error {self.error!r:.60}")
        if self.tokenizer is not None and self.tokens:
            parts.append(repr(shorten(self.text, 60, placeholder=" …")))
        return f"Trace({', '.join(parts)})"

    def checked(self) -> Trace:
        """This trace; raises the error that ended it, if there is one."""
        if self.error is not None:
            raise self.error
        return self

    def cut(self, count: int) -> None:
        """End the answer after its first `count` tokens; what is beyond them counts as cut off in its cycles."""
        cut_off = len(self.tokens) - count
        del self.tokens[count:]
        for place in reversed(range(len(self.cycles))):
            kept = max(self.cycles[place].committed - cut_off, 0)
            cut_off -= self.cycles[place].committed - kept
            self.cycles[place] = replace(self.cycles[place], committed=kept)
        self.finish = "stop"

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per target forward, bonus tokens included, prefill and tokens cut off excluded."""
        return sum(cycle.committed for cycle in self.cycles) / len(self.cycles) if self.cycles else 0.0

    @property
    def text(self) -> str:
        """The answer as text, up to a stop string."""
        text = self.need_tokenizer().decode(self.tokens, skip_special_tokens=True)
        return text.partition(self.stop_string)[0] if self.stop_string else text

    def need_tokenizer(self) -> Any:
        """The target's tokenizer; ValueError if it has none."""
        if self.tokenizer is None:
            raise ValueError("this target has no tokenizer, so the trace has no text: read trace.tokens")
        return self.tokenizer

    @property
    def drafted(self) -> list[bool]:
        """For each token, whether it was drafted; the target chose the others itself."""
        marks = [False] * min(len(self.tokens), 1)  # the token after the prompt
        for cycle in self.cycles:
            kept = min(cycle.accepted, cycle.committed)
            marks += [True] * kept + [False] * (cycle.committed - kept)
        return marks

    def _repr_html_(self) -> str:
        """The answer for a notebook: accepted drafts in green, the target's own tokens in the colour of text."""
        has_text = self.tokenizer is not None
        numbers = zip([f"{token} " for token in self.tokens], self.drafted, strict=True)
        pieces = self.pieces() if has_text else numbers
        spans = [tag("span", text, style=f"color:{GREEN}" if drafted else None) for text, drafted in pieces]
        facts = (
            f"{len(self.tokens)} tokens, {sum(self.drafted)} of them accepted drafts (green); "
            f"{len(self.cycles)} target forwards after the prompt's, τ = {self.acceptance_length:.2f}"
        )
        answer = tag("div", spans, style="white-space:pre-wrap;font-family:monospace")
        return Html(tag("div", answer, tag("small", facts)))

    def pieces(self) -> list[tuple[str, bool]]:
        """The text in pieces, each with a flag whether its last token was drafted."""
        spell, marks, remaining = Spelling(self.tokenizer), self.drafted, len(self.text)
        decoded = [(spell(token), mark) for token, mark in zip(self.tokens, marks, strict=True)]
        decoded += [(spell.rest(), mark) for mark in marks[-1:]]
        pieces = []
        for text, mark in decoded:
            if text := text[:remaining]:  # without the stop string
                pieces.append((text, mark))
            remaining -= len(text)
        return pieces
