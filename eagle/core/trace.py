"""The record of a generation, cycle by cycle, and the text that its tokens spell."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp
from textwrap import shorten
from typing import Any

from eagle.core.tree import DraftTree
from eagle.markup import Html, tag

# the name of a byte token, in a vocabulary that spells unknown characters byte by byte
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
GREEN = "#2da44e"  # legible on a white and on a dark page


@dataclass(frozen=True, slots=True)
class Cycle:
    """One cycle of one sequence: the proposed tree, the accepted nodes, and the time of each part."""

    # the proposed tree, without `draft_probs`, which would need much memory
    tree: DraftTree = field(compare=False, repr=False)
    kept: tuple[int, ...]  # accepted nodes of the tree, without the root
    committed: int  # number of new tokens of the answer, up to a stop
    context: int  # number of tokens in the target's KV cache before the cycle
    # seconds of "draft", "target", "verify" and "other", for the whole batch; None without timing
    seconds: dict[str, float] | None = None
    number: int = field(default=0, compare=False)  # index of the cycle
    rows: int = field(default=1, compare=False)  # number of sequences in the batch

    @property
    def nodes(self) -> int:
        """The number of proposed tokens: the nodes of the tree, the root not counted."""
        return len(self.tree) - 1

    @property
    def depth(self) -> int:
        """The number of levels of the proposed tree below its root, which is the longest path of draft tokens."""
        return max(self.tree.depths())

    @property
    def accepted(self) -> int:
        """The number of accepted draft tokens, those after the end of the answer included."""
        return len(self.kept)

    @property
    def path(self) -> list[int]:
        """The rank of each accepted token among its siblings, from 0: which of the drafter's proposals was right.

        Tuning counts these ranks, to find the tree shape with the most accepted tokens.
        """
        children = self.tree.children()
        edges = pairwise((0, *self.kept))
        return [children[parent].index(node) for parent, node in edges]

    @property
    def confidence(self) -> list[tuple[float, bool]]:
        """(drafter's probability, whether it was accepted) of each drafted token whose parent was accepted.

        From these pairs a report tells whether the drafter is calibrated. Empty if it gave no probabilities.
        """
        if self.tree.likelihoods is None:
            return []
        # likelihoods are log-probabilities of whole paths: child minus parent is the log-probability of the child alone
        scores = self.tree.likelihoods.tolist()
        children = self.tree.children()
        outcomes = []
        # the root, node 0, counts as accepted
        for parent in (0, *self.kept):
            for child in children[parent]:
                # rounding may give a probability slightly above 1
                prob = min(exp(scores[child] - scores[parent]), 1.0)
                outcomes.append((prob, child in self.kept))
        return outcomes


@dataclass(slots=True, repr=False)
class Trace:
    """The record of one generation: its tokens, its cycles and why it ended."""

    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    finish: str = "running"  # why it ended: "stop", "length" or "error"
    tokenizer: Any = field(default=None, repr=False)
    stop_string: str | None = None  # the stop string that ended the answer
    # the error that ended this sequence, but not the others of the batch
    error: Exception | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """Return a short summary of the generation; τ is its acceptance length."""
        facts = [
            f"{len(self.prompt)} prompt tokens",
            f"{len(self.tokens)} tokens",
            f"{len(self.cycles)} cycles",
        ]
        if self.cycles:
            facts.append(f"τ = {self.acceptance_length:.2f}")
        facts.append(self.finish if self.error is None else f"error {self.error!r:.60}")
        if self.tokenizer is not None and self.tokens:
            facts.append(repr(shorten(self.text, 60, placeholder=" …")))
        return f"Trace({', '.join(facts)})"

    def checked(self) -> Trace:
        """Return this trace; if an error ended it, raise that error."""
        if self.error is not None:
            raise self.error
        return self

    def cut(self, count: int) -> None:
        """End the answer after its first `count` tokens, and lower `committed` of the cycles that wrote the others.

        The trace is changed in place, and its `finish` becomes "stop". `committed` is the number of tokens that a
        cycle, one draft and its verification, has added to the answer.
        """
        excess = len(self.tokens) - count
        del self.tokens[count:]
        # the last cycles wrote the tokens that are cut off
        for index in reversed(range(len(self.cycles))):
            cycle = self.cycles[index]
            committed = max(cycle.committed - excess, 0)
            excess -= cycle.committed - committed
            self.cycles[index] = replace(cycle, committed=committed)
        self.finish = "stop"

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens per cycle, usually one forward pass of the target; 0 without cycles.

        The token that the target adds to each draft counts. The prefill, its token, and tokens that were cut off at the
        end of the answer do not.
        """
        if not self.cycles:
            return 0.0
        return sum(cycle.committed for cycle in self.cycles) / len(self.cycles)

    @property
    def text(self) -> str:
        """The answer as text, up to a stop string that ended it; ValueError if there is no tokenizer."""
        # all tokens are decoded together, because one token may be a part of a character
        text = self.need_tokenizer().decode(self.tokens, skip_special_tokens=True)
        if self.stop_string:
            text = text.partition(self.stop_string)[0]
        return text

    def need_tokenizer(self) -> Any:
        """Return the target's tokenizer; ValueError if it has none."""
        if self.tokenizer is None:
            raise ValueError(
                "this target has no tokenizer, so the trace has no text: read trace.tokens"
            )
        return self.tokenizer

    @property
    def drafted(self) -> list[bool]:
        """For each token of the answer, whether it is an accepted draft; the target chose the others itself.

        The target chose the others after each accepted draft.
        """
        # the first token is chosen after the prompt, before any draft; there may be none yet
        marks = [False] * min(len(self.tokens), 1)
        for cycle in self.cycles:
            # a cycle commits its accepted drafts, then the target's token; the end of the answer may cut either off
            drafted = min(cycle.accepted, cycle.committed)
            marks += [True] * drafted
            marks += [False] * (cycle.committed - drafted)
        return marks

    def _repr_html_(self) -> str:
        """Return the answer for a notebook: accepted drafts in green, the target's own tokens in the colour of text.

        Without a tokenizer, token ids stand in place of the text.
        """
        if self.tokenizer is not None:
            pieces = self.pieces()
        else:
            pieces = list(zip([f"{token} " for token in self.tokens], self.drafted, strict=True))
        spans = [
            tag("span", text, style=f"color:{GREEN}" if drafted else None)
            for text, drafted in pieces
        ]
        facts = (
            f"{len(self.tokens)} tokens, {sum(self.drafted)} of them accepted drafts (green); "
            f"{len(self.cycles)} target forwards after the prompt's, τ = {self.acceptance_length:.2f}"
        )
        answer = tag("div", spans, style="white-space:pre-wrap;font-family:monospace")
        return Html(tag("div", answer, tag("small", facts)))

    def pieces(self) -> list[tuple[str, bool]]:
        """Return the answer's text in pieces, each with a flag whether the last token of the piece was drafted.

        A piece is the text that one token completes; a character of several tokens comes with the last of them.
        """
        spell = Spelling(self.tokenizer)
        marks = self.drafted
        decoded = [(spell(token), mark) for token, mark in zip(self.tokens, marks, strict=True)]
        # what is still held back, such as an incomplete character, belongs to the last token
        if marks:
            decoded.append((spell.rest(), marks[-1]))
        # `text` ends before a stop string, and the tokens include it: pieces are cut at the end of `text`
        remaining = len(self.text)
        pieces = []
        for text, mark in decoded:
            text = text[:remaining]
            remaining -= len(text)
            if text:
                pieces.append((text, mark))
        return pieces


class Spelling:
    """Decodes tokens one by one; incomplete characters are held back until their remaining bytes arrive.

    A run of byte tokens is held back to its end, because an invalid byte changes how the whole run is decoded.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Begin a text without tokens; each call adds one token, decoded by `tokenizer`."""
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        # tokens[begin:end] is decoded as context: it decides whether the next token begins with a space
        self.begin = self.end = 0
        self.in_bytes = False  # whether the last tokens are a run of byte tokens

    def __call__(self, token: int) -> str:
        """Add a token to the text and return the text that it completes, which may be empty."""
        self.tokens.append(token)
        if BYTE.fullmatch(str(self.tokenizer.convert_ids_to_tokens(token))):
            self.in_bytes = True
        elif self.in_bytes:  # tokens that print nothing do not end a run
            self.in_bytes = not self.tokenizer.decode([token], skip_special_tokens=True)
        # nothing is returned yet where the last character is incomplete, which is decoded as U+FFFD
        new = self.rest()
        if not new or new.endswith("\ufffd") or self.in_bytes:
            return ""
        # the tokens of this piece become the context of the next
        self.begin = self.end
        self.end = len(self.tokens)
        return new

    def rest(self) -> str:
        """Return the text of the tokens that were not returned yet, such as a part of a character."""
        context = self._decode(self.begin, self.end)
        text = self._decode(self.begin, len(self.tokens))
        return text[len(context) :]

    def _decode(self, begin: int, end: int) -> str:
        """Return the text of the tokens from index `begin` to `end`, the latter excluded, without special tokens."""
        return self.tokenizer.decode(self.tokens[begin:end], skip_special_tokens=True)
