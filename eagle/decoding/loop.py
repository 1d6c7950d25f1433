"""The decoding loop, for any number of texts: draft a tree for each, read them, verify, commit the accepted paths."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from eagle.core.budget import Budget, Policy
from eagle.core.drafter import Committed, Drafter
from eagle.core.grown import lies_on_device
from eagle.core.trace import Cycle, Trace
from eagle.core.tree import DraftTree, TargetOutput, check_draft
from eagle.core.verify import Choose, Process, Sampling
from eagle.decoding.accept import accept
from eagle.decoding.decoding_row import (
    Observe,
    Row,
    check_confidence,
    check_draw,
    check_length,
    check_trace,
    find_budget,
)
from eagle.decoding.row_drafts import RowDrafts
from eagle.decoding.stops import stops_for
from eagle.target.target import Target

PROMPT_TOKENS = 256  # read in one forward while other texts wait for their next tokens


class Decoding:
    """Texts decoded side by side, up to `batch_size` at once: `add` prompts, then `step` until `is_done`.

    An error that only one text causes ends that text: its trace's `finish` is "error", and its `error` says which.
    `timing` keeps the seconds of cycles, by the wall's clock or by one that is given.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        budget: Budget | Policy | None = None,
        batch_size: int = 1,
        max_tokens_in_cache: int | None = None,
        timing: bool | Callable[[], float] = False,
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
        reads_texts = drafter.reads.texts
        self.drafts = RowDrafts(
            (lambda: drafter.open_with(self.state.lend())) if reads_texts else drafter.open, self._whole_update
        )

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
        process: Process | None = None,
        observe: Observe | None = None,
    ) -> None:
        """Add a prompt that begins when there is room; ValueError if there never will be.

        The answer begins with the token `first`, if given. `process` changes the target's logits (`Choose`).
        """
        target = self.target
        target.check_prompt(prompt)
        check_length(target, len(prompt), limit)
        check_trace(trace, [row.trace for row in (*self.waiting, *self.rows.values())])
        self.state.check_room(self._columns(prompt, limit))
        stops = stops_for(target, stop)
        trace.prompt, trace.tokenizer = prompt, target.tokenizer
        draw = getattr(self.budget, "draw", None)
        choose = Choose(sampling, target.draws, drawn=draw == "sampled", process=process)
        self.waiting.append(Row(number, trace, sampling, stops, limit, choose, first, draw, observe))

    def step(self) -> list[tuple[int, list[int]]]:
        """Run one step; returns new tokens by prompt: the first one of prompts read now, else a cycle's tokens.

        A text that an error has ended comes with no tokens.
        """
        self._admit()
        writing = [row for row in self.rows.values() if row.is_running and (row.pending or row.trace.cycles)]
        new = self._read_prompts(PROMPT_TOKENS if writing else None) if self.state.prompts else []
        if writing:
            new += self._cycle(writing)
        listed = {number for number, _ in new}
        ended = [row for row in self.rows.values() if not row.is_running]
        for row in ended:
            self._release(row)
        return new + [(row.number, []) for row in ended if row.number not in listed]

    def end(self, number: int, count: int) -> None:
        """End an admitted text after the first `count` tokens of its answer, which `trace` then holds alone."""
        row = self.rows[number]
        row.trace.cut(count)
        self._release(row)

    def close(self) -> None:
        """Return the target's state, and release texts that are not finished."""
        for row in [*self.rows.values()]:
            self._release(row)
        self.target.close(self.state)

    def _columns(self, prompt: list[int], limit: int) -> int:
        return len(prompt) + limit + self.budget.nodes + 1

    def _release(self, row: Row) -> None:
        """Release an admitted row."""
        del self.rows[row.number]
        failed = row.trace.error is not None
        self.state.release(row.number, wipe=failed)
        with row.fail_alone():
            self.drafts.release(row.number, failed=failed)

    def _whole_update(self, number: int, update: Committed) -> Committed:
        """A row's update for a drafter that has read nothing of its text."""
        features = self.state.features_at(number, range(self.state.length(number)))
        return replace(update, tokens=torch.tensor(self.state.text(number)), features=features)

    def _admit(self) -> None:
        """Admit waiting prompts while there is room."""
        while self.waiting and len(self.rows) < self.batch_size:
            row = self.waiting[0]
            prompt, target = row.trace.prompt, self.target
            if not self.state.fits(self._columns(prompt, row.limit)):
                return
            self.state.admit(row.number, prompt, row.limit + self.budget.nodes + 1)
            self.rows[row.number] = self.waiting.popleft()
            with row.fail_alone():
                self.drafts.admit(row.number, row.choose.offer(target.vocab_size, target.device))

    def _read_prompts(self, max_tokens: int | None) -> list[tuple[int, list[int]]]:
        """Read further in the prompts of the latest rows; returns the first token of each prompt read to its end."""
        new = []
        for number, output in self.state.read_prompts(max_tokens).items():
            row = self.rows[number]
            with row.fail_alone():
                update = output.commit(row.choose)
                if row.observe is not None:
                    row.observe(output.output, [0], row.choose)
                row.pending = [update if row.first is None else replace(update, root=row.first)]
                new.append((number, row.commit([row.pending[0].root])))
        return new

    def _cycle(self, rows: list[Row]) -> list[tuple[int, list[int]]]:
        """Run one cycle of these rows; returns the tokens that each of them commits."""
        clock, state = self.clock, self.state
        clock.start()
        trees = self._propose(rows)
        clock.lap("draft")
        if not trees:
            return []
        outputs = state.read(trees)
        clock.lap("target")
        rows = [row for row in rows if row.number in trees]
        accepted = accept(state, rows, outputs)
        clock.lap("verify")
        new: list[tuple[int, list[int]]] = []
        for number, part in accepted.items():
            with (row := self.rows[number]).fail_alone():
                if row.observe is not None:
                    row.observe(outputs[number], part.path, row.choose)
                new.append((number, self._commit(row, outputs[number], part.update)))
        clock.lap("other")
        cycles = {}
        for number, tokens in new:
            shape, kept = replace(trees[number], draft_probs=None), tuple(accepted[number].path[1:])
            context = outputs[number].start
            cycles[number] = Cycle(shape, kept, len(tokens), context, clock.seconds, self.cycles, len(trees))
            self.rows[number].trace.cycles.append(cycles[number])
        self.cycles += 1
        if cycles:
            self._learn(cycles)
        return new

    def _propose(self, rows: list[Row]) -> dict[int, DraftTree]:
        """A tree for each row whose drafts do not fail; the root alone if nothing is to be drafted."""
        budgets = self._budgets({row.number: self.state.levels(row.number, row.left) for row in rows})
        drafting = self._find_drafting(rows, budgets)
        trees = {row.number: DraftTree.chain([row.pending[-1].root]) for row in rows if row.is_running}
        for row in drafting:
            del trees[row.number]
        trees |= self._draft(drafting, budgets, stays=self._stays_on_device(rows))
        for number, tree in trees.items():
            with self.rows[number].fail_alone():
                self.state.check_tree(number, tree)
        return {number: tree for number, tree in trees.items() if self.rows[number].is_running}

    def _find_drafting(self, rows: list[Row], budgets: dict[int, Budget]) -> list[Row]:
        """The rows whose budgets allow drafts."""
        drafting = []
        for row in rows:
            with row.fail_alone():
                budget = find_budget(budgets, row.number)
                row.draw = check_draw(row.draw, budget.draw)
                check_confidence(budget, self.drafter)
                if not budget.is_empty:
                    drafting.append(row)
        return drafting

    def _draft(self, rows: list[Row], budgets: dict[int, Budget], *, stays: bool) -> dict[int, DraftTree]:
        """The drafter's trees for these rows, checked; those that stay on the device are checked once they are read."""
        if not rows:
            return {}
        updates = {row.number: Committed.join(row.pending) for row in rows}
        proposed, errors = self.drafts.propose(updates, {row.number: budgets[row.number] for row in rows})
        positions = self.target.max_positions or sys.maxsize
        trees = {}
        for row in rows:
            row.pending = []
            with row.fail_alone():
                if row.number in errors:
                    raise errors[row.number]
                tree: Any = proposed.get(row.number)
                max_depth = positions - self.state.length(row.number) - 1
                if not (stays and lies_on_device(tree) and tree.levels <= max_depth):
                    tree = check_draft(tree, updates[row.number].root, max_depth, self.target.vocab_size)
                trees[row.number] = tree
        return trees

    def _stays_on_device(self, rows: list[Row]) -> bool:
        """Whether nothing on the host needs a tree before the target has read it."""
        is_walked = all(row.choose.sampling.is_lossless and row.draw != "sampled" for row in rows)
        is_walked = is_walked and all(row.choose.process is None and row.observe is None for row in rows)
        reads = self.drafter.reads
        return is_walked and not reads.choices and not reads.states and self.target.reader.reads_on_device

    def _budgets(self, levels: dict[int, int]) -> dict[int, Budget]:
        """The budget of each row, limited to its number of levels."""
        share = getattr(self.budget, "share", None)
        if callable(share):
            return share(levels, {number: self.state.length(number) for number in levels})
        budgets = dict[int, Budget]()
        for number, depth in levels.items():
            with self.rows[number].fail_alone():
                budgets[number] = self.budget.within(depth)
        return budgets

    def _learn(self, cycles: dict[int, Cycle]) -> None:
        """Pass the outcomes of the cycles to a policy."""
        if (learn_rows := getattr(self.budget, "learn_rows", None)) is not None:
            learn_rows(cycles)
        elif (learn := getattr(self.budget, "learn", None)) is not None:
            for number, cycle in cycles.items():
                with self.rows[number].fail_alone():
                    learn(cycle)

    def _commit(self, row: Row, output: TargetOutput, update: Committed) -> list[int]:
        """Prepare the drafter's next update; returns the new tokens of the answer."""
        if choices := self.drafter.reads.choices:
            # drafts beside drawn ones must not know of noise: it would decide which rule verifies them
            drawn = row.draw == "sampled"
            ranked = output.likeliest(choices) if drawn else row.choose.rank_tokens(output, choices)
            update = replace(update, tree=output.tree, choices=ranked)
        if self.drafter.reads.states:
            update = replace(update, tree=output.tree, states=output.features)
        row.pending.append(update)
        return row.commit([*update.tokens.tolist()[1:], update.root])


class _Clock:
    """Records the seconds of each part of a cycle, if `on`, which may be a clock to read."""

    def __init__(self, device: torch.device, on: bool | Callable[[], float]) -> None:
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
        return self.on() if callable(self.on) else perf_counter()
