"""The decoding loop, for any number of texts: draft a tree for each, read them, verify, commit the accepted paths."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch

from eagle.core.budget import Budget, Draw, Policy
from eagle.core.drafter import Committed, Drafter
from eagle.core.stops import Stops
from eagle.core.trace import Cycle, Trace
from eagle.core.tree import DraftTree, TargetOutput
from eagle.core.verify import Choose, Sampling, verify_rows
from eagle.target.target import Target

PROMPT_TOKENS = 256  # read in one forward while other texts wait for their next tokens


@dataclass(slots=True)
class Row:
    """A text that waits to be decoded or is being decoded."""

    number: int
    trace: Trace
    sampling: Sampling
    stops: Stops
    limit: int
    choose: Choose
    first: int | None = None  # the token after the prompt, where it is known
    draw: Draw | None = None  # how its drafts are drawn, the same in the whole text
    pending: list[Committed] = field(default_factory=list)  # since the drafter was asked last

    @property
    def left(self) -> int:
        """Draft levels that could still be committed before the answer's token limit."""
        return self.limit - len(self.trace.tokens) - 1

    def commit(self, new: list[int]) -> list[int]:
        """Append the new tokens that belong to the answer, and set `trace.finish` if it has ended."""
        trace = self.trace
        new = new[: self.limit - len(trace.tokens)]
        end, trace.stop_string = self.stops.first_end(trace.tokens, new)
        new = new[:end]
        trace.tokens += new
        if end is not None:
            trace.finish = "stop"
        elif len(trace.tokens) == self.limit:
            trace.finish = "length"
        return new


class Decoding:
    """Texts decoded side by side, up to `batch_size` at once: `add` prompts, then `step` until `is_done`."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        budget: Budget | Policy | None = None,
        batch_size: int = 1,
        max_tokens_in_cache: int | None = None,
        timing: bool = False,
    ) -> None:
        self.target, self.drafter, self.batch_size = target, drafter, batch_size
        self.budget: Budget | Policy = budget or drafter.budget or Budget()
        self.clock = _Clock(target.device, timing)
        self.waiting: deque[Row] = deque()
        self.rows: dict[int, Row] = {}  # admitted
        self.cycles = 0
        if drafter.reads.view:
            drafter.bind_target(target.view())
        self.state = target.open(drafter.taps, max_tokens_in_cache)
        self.drafts = drafter.open_with(self.state.lend()) if drafter.reads.texts else drafter.open()

    @property
    def is_done(self) -> bool:
        """Whether every text has ended."""
        return not self.waiting and not self.rows

    def add(
        self,
        number: int,
        prompt: list[int],
        sampling: Sampling,
        limit: int,
        trace: Trace,
        stop: Any = None,
        first: int | None = None,
    ) -> None:
        """Add a prompt that begins when there is room; ValueError if there never will be.

        The answer begins with the token `first`, if given.
        """
        target = self.target
        target.check_prompt(prompt)
        _check_length(target, len(prompt), limit)
        self.state.check_room(self._columns(prompt, limit))
        if stop is None:
            stop = [token for token in target.stop_tokens if 0 <= token < target.vocab_size]
        stops = Stops(stop, target.tokenizer, target.vocab_size)
        trace.prompt, trace.tokenizer = prompt, target.tokenizer
        draw = getattr(self.budget, "draw", None)
        choose = Choose(sampling, target.draws, drawn=draw == "sampled")
        self.waiting.append(Row(number, trace, sampling, stops, limit, choose, first, draw))

    def step(self) -> list[tuple[int, list[int]]]:
        """Run one step; returns new tokens by prompt: the first one of prompts read now, else a cycle's tokens."""
        self._admit()
        writing = [row for row in self.rows.values() if row.pending or row.trace.cycles]
        new = self._read_prompts(PROMPT_TOKENS if writing else None) if self.state.prompts else []
        if writing:
            new += self._cycle(writing)
        for number, _ in new:
            if self.rows[number].trace.finish != "running":
                del self.rows[number]
                self.state.release(number)
                self.drafts.release(number)
        return new

    def close(self) -> None:
        """Return the target's state, and release texts that are not finished."""
        for number in self.rows:
            self.drafts.release(number)
        self.rows.clear()
        self.target.close(self.state)

    def _columns(self, prompt: list[int], limit: int) -> int:
        return len(prompt) + limit + self.budget.nodes + 1

    def _admit(self) -> None:
        """Admit waiting prompts while there is room."""
        while self.waiting and len(self.rows) < self.batch_size:
            row = self.waiting[0]
            prompt, target = row.trace.prompt, self.target
            if not self.state.fits(self._columns(prompt, row.limit)):
                return
            self.state.admit(row.number, prompt, row.limit + self.budget.nodes + 1)
            self.drafts.admit(row.number, row.choose.offer(target.vocab_size, target.device))
            self.rows[row.number] = self.waiting.popleft()

    def _read_prompts(self, most: int | None) -> list[tuple[int, list[int]]]:
        """Read further in the prompts of the latest rows; returns the first token of each prompt read to its end."""
        new = []
        for number, output in self.state.read_prompts(most).items():
            row = self.rows[number]
            update = output.commit(row.choose)
            row.pending = [update if row.first is None else replace(update, root=row.first)]
            new.append((number, row.commit([row.pending[0].root])))
        return new

    def _cycle(self, rows: list[Row]) -> list[tuple[int, list[int]]]:
        """Run one cycle of these rows; returns the tokens that each of them commits."""
        clock, state = self.clock, self.state
        clock.start()
        trees = self._propose(rows)
        clock.lap("draft")
        outputs = state.read(trees)
        clock.lap("target")
        verified = verify_rows([(outputs[row.number], row.choose) for row in rows])
        clock.lap("verify")
        state.keep({row.number: path for row, (path, _) in zip(rows, verified, strict=True)})
        new = [
            self._commit(row, outputs[row.number], path, root) for row, (path, root) in zip(rows, verified, strict=True)
        ]
        clock.lap("other")
        cycles = {}
        for row, tokens, (path, _) in zip(rows, new, verified, strict=True):
            tree, context = trees[row.number], outputs[row.number].positions[0] - 1
            shape = replace(tree, laws=None)
            cycle = Cycle(shape, tuple(path[1:]), len(tokens), context, clock.seconds, self.cycles, len(rows))
            row.trace.cycles.append(cycle)
            cycles[row.number] = cycle
        self.cycles += 1
        self._learn(cycles)
        return [(row.number, tokens) for row, tokens in zip(rows, new, strict=True)]

    def _propose(self, rows: list[Row]) -> dict[int, DraftTree]:
        """A tree for each row; the root alone if nothing is to be drafted."""
        budgets = self._budgets({row.number: self.state.levels(row.number, row.left) for row in rows})
        for row in rows:
            row.draw = _check_draw(row.draw, budgets[row.number].draw)
            _check_confidence(budgets[row.number], self.drafter)
        asked = [row for row in rows if not budgets[row.number].is_empty]
        trees = {row.number: DraftTree.chain([row.pending[-1].root]) for row in rows}
        if asked:
            updates = {row.number: Committed.join(row.pending) for row in asked}
            trees |= self.drafts.propose(updates, {row.number: budgets[row.number] for row in asked})
            for row in asked:
                row.pending = []
        return trees

    def _budgets(self, levels: dict[int, int]) -> dict[int, Budget]:
        """The budget of each row, limited to its number of levels."""
        share = getattr(self.budget, "share", None)
        if callable(share):
            return share(levels, {number: self.state.length(number) for number in levels})
        return {number: self.budget.within(depth) for number, depth in levels.items()}

    def _learn(self, cycles: dict[int, Cycle]) -> None:
        """Pass the outcomes of the cycles to a policy."""
        if (learn_rows := getattr(self.budget, "learn_rows", None)) is not None:
            learn_rows(cycles)
        elif (learn := getattr(self.budget, "learn", None)) is not None:
            for cycle in cycles.values():
                learn(cycle)

    def _commit(self, row: Row, output: TargetOutput, path: list[int], root: int) -> list[int]:
        """Commit an accepted path; returns the new tokens of the answer, and prepares the drafter's next update."""
        tree, choices = output.tree, self.drafter.reads.choices
        last: tuple[Any, ...] = ()
        if choices:  # drafts beside drawn ones must not know of noise: it would decide which rule verifies them
            drawn = row.draw == "sampled"
            last = tree, output.likeliest(choices) if drawn else row.choose.rank_tokens(output, choices)
        row.pending.append(Committed(tree.tokens[path], output.features_at(path), root, *last))
        return row.commit([*row.pending[-1].tokens.tolist()[1:], root])


def _check_draw(draw: Draw | None, asked: Draw) -> Draw:
    """The budget's `draw`; it must not change between cycles, or the verification rule would depend on drafts."""
    if draw is None and asked == "sampled":
        raise ValueError(
            "this policy asks for drafts that are 'sampled' without saying so beforehand: give it an attribute "
            "draw = 'sampled', and the same in all its budgets"
        )
    if draw not in (None, asked):
        raise ValueError(
            f"the policy asks for draw {asked!r}, expected {draw!r} in the whole request: a change that depends on "
            "what was drawn would bias the output; keep one draw per policy"
        )
    return asked


def _check_confidence(budget: Budget, drafter: Drafter) -> None:
    """Refuse a budget with a confidence threshold if the drafter gives no confidence."""
    if budget.confidence is not None and not drafter.rates_nodes:
        raise ValueError(
            f"Budget.confidence is {budget.confidence}, and {type(drafter).__name__} cannot tell how likely a node is "
            "kept: leave it out, or draft with a head that learned to tell"
        )


class _Clock:
    """Records the seconds of each part of a cycle, if `on`."""

    def __init__(self, device: torch.device, on: bool) -> None:
        self.device, self.on, self.last = device, on, 0.0
        self.seconds: dict[str, float] | None = None

    def start(self) -> None:
        """Begin a cycle."""
        if self.on:
            self.seconds, self.last = {}, self._now()

    def lap(self, part: str) -> None:
        """Record the time since the last call as spent on this part."""
        if self.seconds is not None:
            now = self._now()
            self.seconds[part], self.last = now - self.last, now

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return perf_counter()


def _check_length(target: Target, prompt: int, new: int) -> None:
    if target.max_positions is not None and prompt + new > target.max_positions:
        raise ValueError(
            f"{prompt} prompt tokens and {new} new ones exceed the model's {target.max_positions} positions: "
            f"lower max_new_tokens to {max(target.max_positions - prompt, 0)} or shorten the prompt"
        )
