"""The decoding loop, for any number of requests: draft trees, read them, verify, commit the accepted paths."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from eagle.core.arguments import check_confidence
from eagle.core.budget import Budget, Policy
from eagle.core.drafter import Committed, Drafter, DraftState, Followers
from eagle.core.grown import lies_on_device, read_walks, walk_outputs
from eagle.core.row_errors import FATAL, RowErrors
from eagle.core.sampling import rank_tokens
from eagle.core.trace import Cycle, Trace
from eagle.core.tree import DraftTree, TargetOutput, check_draft
from eagle.core.verify import Choose, Process, Sampling, check_choice, verify_rows
from eagle.decoding.rows import (
    Observe,
    Row,
    RowDrafts,
    check_draw,
    check_length,
    check_trace,
    find_budget,
    stops_for,
)
from eagle.target.target import Target

# the most prompt tokens that one forward reads while other rows are decoded: longer forwards would make them wait
PROMPT_TOKENS = 256


class Decoding:
    """Requests decoded in a batch, up to `batch_size` at once: `add` prompts, then `step` until `is_done`.

    An error that only one request causes ends that request: its trace's `finish` is "error", and its `error` says
    which.
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
        """Open the target's and the drafter's state for a batch of requests.

        Args:
            target: The target.
            drafter: Any drafter.
            budget: A budget or a policy; by default the drafter's.
            batch_size: The most requests at once.
            max_tokens_in_cache: The most tokens in the target's cache, padding included.
            timing: Whether to keep the seconds of cycles; or the clock that measures them, in place of wall time.
        """
        self.target = target
        self.drafter = drafter
        self.batch_size = batch_size
        self.budget: Budget | Policy = budget or drafter.budget or Budget()
        self.clock = _Clock(target.device, timing)
        self.waiting: deque[Row] = deque()
        self.rows: dict[int, Row] = {}  # row id -> admitted row
        self.cycles = 0  # how many were run
        if drafter.reads.view:
            drafter.bind_target(target.view())
        self.state = target.open(drafter.taps, max_tokens_in_cache)
        self.state.num_followers = drafter.reads.followers
        self.drafts = RowDrafts(self._open_draft_state, self._read_whole)

    def _open_draft_state(self) -> DraftState:
        """Return a new state of the drafter without sequences; some drafters get access to the target's KV cache."""
        if self.drafter.reads.kv_cache:
            return self.drafter.open_with(self.state.lend())
        return self.drafter.open()

    def _read_whole(self, row_id: int, update: Committed) -> Committed:
        """Return an update with all committed tokens of a row, for a drafter state that has read none of them.

        So it is after an error: `RowDrafts` then drops the drafter's state of the row and makes a new one.

        Args:
            row_id: The row.
            update: The row's newest update, with the tokens since the drafter's last proposal; its other fields stay.
        """
        features = self.state.features_at(row_id, range(self.state.length(row_id)))
        return replace(update, tokens=torch.tensor(self.state.sequence(row_id)), features=features)

    @property
    def is_done(self) -> bool:
        """Whether every request that was added has ended, and been released."""
        return not self.waiting and not self.rows

    def add(
        self,
        row_id: int,
        prompt: list[int],
        sampling: Sampling,
        limit: int,
        trace: Trace,
        stop: Any = None,
        first: int | None = None,
        process: Process | None = None,
        observe: Observe | None = None,
    ) -> None:
        """Add a request, which begins as soon as the batch and the cache have space for it.

        ValueError if the request is invalid or can never fit.

        Args:
            row_id: A number that no other request has.
            prompt: Its tokens.
            sampling: How the target samples.
            limit: The most new tokens.
            trace: Where the answer is written.
            stop: A token id, a string, or several; None for the target's stop tokens.
            first: The first token of the answer, if it is known already; it replaces the target's choice.
            process: Output and nodes -> changed logits, in place of the sampling's penalty and filters; None for none.
            observe: Called after each forward of the row.
        """
        # every fault of a request is found here, before it shares a forward with others
        target = self.target
        target.check_prompt(prompt)
        check_length(target, len(prompt), limit)
        check_trace(trace, [row.trace for row in (*self.waiting, *self.rows.values())])
        self.state.check_room(len(prompt) + self._columns_after_prompt(limit))
        stops = stops_for(target, stop)
        trace.prompt = prompt
        trace.tokenizer = target.tokenizer
        # A policy that samples drafts must say so now, by its attribute `draw`: a request with sampled drafts gets
        # noise that no earlier request had.
        draw = getattr(self.budget, "draw", None)
        choose = Choose(sampling, target.draws, drawn=draw == "sampled", process=process)
        self.waiting.append(
            Row(
                row_id=row_id,
                trace=trace,
                stops=stops,
                limit=limit,
                choose=choose,
                first=first,
                draw=draw,
                observe=observe,
            )
        )

    def _columns_after_prompt(self, limit: int) -> int:
        """Return how many positions of the KV cache an answer of `limit` tokens needs after its prompt."""
        # the whole draft tree with its root (the 1) is in the cache before rejected nodes are dropped
        return limit + self.budget.nodes + 1

    def step(self) -> list[tuple[int, list[int]]]:
        """Run one step: admit requests, read parts of prompts, and run one cycle of the rows whose prompts are read.

        A row is one request in the batch. A cycle is one draft, one forward of the target, and verification.

        Returns:
            Row ids and their new tokens: the first token of each answer whose prompt was read to its end now, and the
            tokens of a cycle. A row that an error has ended comes with an empty list.
        """
        self._admit()
        # a row is decoded from the step after its prompt was read: then it has an update for the drafter, or a cycle
        decoding = [
            row
            for row in self.rows.values()
            if row.is_running and (row.pending or row.trace.cycles)
        ]
        new = []
        if self.state.prompts:
            new += self._read_prompts(PROMPT_TOKENS if decoding else None)
        if decoding:
            new += self._run_cycle(decoding)
        returned = {row_id for row_id, _ in new}
        # rows that have ended make space for waiting requests; a failed row may have no new tokens
        for row in list(self.rows.values()):
            if not row.is_running:
                self._release(row)
                if row.row_id not in returned:
                    new.append((row.row_id, []))
        return new

    def end(self, row_id: int, count: int) -> None:
        """End an admitted request after the first `count` tokens of its answer; the trace drops the others.

        A caller that has enough of an answer ends it this way.
        """
        row = self.rows[row_id]
        row.trace.cut(count)
        self._release(row)

    def close(self) -> None:
        """Release all requests that have not ended, and give the state with its KV cache back to the target."""
        for row in list(self.rows.values()):
            self._release(row)
        self.target.close(self.state)

    def _release(self, row: Row) -> None:
        """Remove a request from the batch, the target's state and the drafter's, whether it ended well or not."""
        del self.rows[row.row_id]
        # the cache of a failed row may be faulty: no later request may reuse it as a prefix
        failed = row.trace.error is not None
        self.state.release(row.row_id, wipe=failed)
        with row.fail_alone():
            self.drafts.release(row.row_id, failed=failed)

    def _admit(self) -> None:
        """Move waiting requests to the batch, in order, while the batch and the target's KV cache have space."""
        while self.waiting and len(self.rows) < self.batch_size:
            row = self.waiting[0]
            prompt = row.trace.prompt
            columns = self._columns_after_prompt(row.limit)
            # in the order of requests: if short ones overtook a long one that waits for space, it might wait for ever
            if not self.state.fits(len(prompt) + columns):
                return
            self.state.admit(row.row_id, prompt, columns)
            self.rows[row.row_id] = self.waiting.popleft()
            # an error of the drafter ends this row alone; noise is None if the target is greedy
            with row.fail_alone():
                noise = row.choose.offer(self.target.vocab_size, self.target.device)
                self.drafts.admit(row.row_id, noise)

    def _read_prompts(self, max_tokens: int | None) -> list[tuple[int, list[int]]]:
        """Run one forward of the target over prompts, or parts of them, that it has not read to their ends.

        A row is one request of the batch.

        Args:
            max_tokens: The most tokens of the forward, padding included; None for the state's own limit.

        Returns:
            The id of each row whose prompt is now read to its end, and a list with the first token of its answer.
        """
        new = []
        # only prompts that are read to their ends by this forward are returned, with the target's output on them
        for row_id, prompt in self.state.read_prompts(max_tokens).items():
            row = self.rows[row_id]
            with row.fail_alone():
                update = prompt.commit(row.choose)
                if row.observe is not None:
                    # the prompt's last token is the only node of its tree, and so the accepted path
                    row.observe(prompt.output, [0], row.choose)
                # a caller that resumes an answer knows its first token: it replaces the one that the target chose
                if row.first is not None:
                    update = replace(update, root=row.first)
                # the drafter reads the prompt when it proposes its first tree
                row.pending = [update]
                new.append((row_id, row.commit([update.root])))
        return new

    def _run_cycle(self, rows: list[Row]) -> list[tuple[int, list[int]]]:
        """Run one cycle of these rows (requests): draft, one forward of the target, verify, commit.

        The cycle is recorded in the rows' traces, and a policy learns from it.

        Returns:
            Row ids, and the new tokens of each answer. Rows that have failed are left out.
        """
        clock = self.clock
        clock.start()
        trees = self._propose(rows)
        clock.lap("draft")
        # all rows have failed
        if not trees:
            return []
        outputs = self.state.read(trees)
        clock.lap("target")
        # rows without a tree have failed
        rows = [row for row in rows if row.row_id in trees]
        accepted = accept(self.state, rows, outputs)
        clock.lap("verify")
        new = self._commit(outputs, accepted)
        clock.lap("other")

        cycles = {}
        for row_id, tokens in new:
            # the trace keeps the tree without its probabilities [N, V], which would fill the memory
            cycle = Cycle(
                tree=replace(trees[row_id], draft_probs=None),
                kept=tuple(accepted[row_id].path[1:]),  # without the root
                committed=len(tokens),
                context=outputs[row_id].start,
                seconds=clock.seconds,
                number=self.cycles,
                rows=len(trees),
            )
            cycles[row_id] = cycle
            self.rows[row_id].trace.cycles.append(cycle)
        self.cycles += 1
        if cycles:
            self._learn(cycles)
        return new

    def _propose(self, rows: list[Row]) -> dict[int, DraftTree]:
        """Return a draft tree by row id, the root alone where nothing is drafted; rows that fail are left out.

        A row is one request of the batch. Its pending updates are what the drafter has not been told yet.
        """
        # how deep each row may draft: up to its token limit, and as far as the target can read
        levels = {row.row_id: self.state.levels(row.row_id, row.levels_left) for row in rows}
        budgets = self._find_budgets(levels)
        drafting = self._find_drafting(rows, budgets)
        drafting_ids = {row.row_id for row in drafting}
        trees = {}
        # a row that does not draft keeps its pending updates for the drafter; its tree is the root
        for row in rows:
            if row.is_running and row.row_id not in drafting_ids:
                trees[row.row_id] = DraftTree.chain([row.pending[-1].root])
        trees |= self._draft(drafting, budgets, stays_on_device=self._stay_on_device(rows))

        # some targets can read no tree, or chains alone
        for row_id, tree in trees.items():
            with self.rows[row_id].fail_alone():
                self.state.check_tree(row_id, tree)
        return {row_id: tree for row_id, tree in trees.items() if self.rows[row_id].is_running}

    def _find_budgets(self, levels: dict[int, int]) -> dict[int, Budget]:
        """Return the draft budget of each row (request) for this cycle, limited to its number of levels.

        A row whose budget raises an error is left out.

        Args:
            levels: Row id -> the most levels that the row may draft.
        """
        # a policy (which chooses budgets anew each cycle) for several rows has a method `share`, which decides for all
        # rows at once; a fixed `Budget` and other policies have `within`
        share = getattr(self.budget, "share", None)
        if callable(share):
            context_lengths = {row_id: self.state.length(row_id) for row_id in levels}
            return share(levels, context_lengths)
        budgets: dict[int, Budget] = {}
        for row_id, max_depth in levels.items():
            with self.rows[row_id].fail_alone():
                budgets[row_id] = self.budget.within(max_depth)
        return budgets

    def _find_drafting(self, rows: list[Row], budgets: dict[int, Budget]) -> list[Row]:
        """Return the rows whose budgets allow drafts; a missing or invalid budget ends its row with an error.

        Args:
            rows: The requests of the cycle. Their `draw`, how children are chosen where the target samples, is set to
                that of their budget.
            budgets: By row id.
        """
        drafting = []
        for row in rows:
            with row.fail_alone():
                budget = find_budget(budgets, row.row_id)
                row.draw = check_draw(row.draw, budget.draw)
                check_confidence(budget.confidence, self.drafter)
                if not budget.is_empty:
                    drafting.append(row)
        return drafting

    def _draft(
        self, rows: list[Row], budgets: dict[int, Budget], *, stays_on_device: bool
    ) -> dict[int, DraftTree]:
        """Return the drafter's trees for these rows (requests) by row id, checked; rows that fail are left out.

        Args:
            rows: The rows that draft in this cycle. Their pending updates are passed to the drafter and dropped.
            budgets: By row id.
            stays_on_device: Whether trees may stay on the device until they are verified. They are then checked after
                that (`_accept_on_device`), as a check now would make the host wait.
        """
        if not rows:
            return {}
        # a row that did not draft in the last cycles has several updates: the drafter gets them joined
        updates = {row.row_id: Committed.join(row.pending) for row in rows}
        proposed, errors = self.drafts.propose(
            updates, {row.row_id: budgets[row.row_id] for row in rows}
        )
        max_positions = self.target.max_positions or sys.maxsize
        trees = {}
        for row in rows:
            row_id = row.row_id
            row.pending = []
            with row.fail_alone():
                if row_id in errors:
                    raise errors[row_id]
                tree: Any = proposed.get(row_id)
                # a deeper node would lie after the model's last position
                max_depth = max_positions - self.state.length(row_id) - 1
                if not (stays_on_device and lies_on_device(tree) and tree.levels <= max_depth):
                    tree = check_draft(
                        tree, updates[row_id].root, max_depth, self.target.vocab_size
                    )
                trees[row_id] = tree
        return trees

    def _stay_on_device(self, rows: list[Row]) -> bool:
        """Return whether drafted trees may stay on the device until they are verified, as the host needs none before.

        The host then waits for the device only once in a cycle.
        """
        for row in rows:
            # only the greedy walk along the target's choices runs on the device; other rules, processors of logits and
            # observers run on the host
            is_walked = row.choose.sampling.is_lossless and row.draw != "sampled"
            if not is_walked or row.choose.process is not None or row.observe is not None:
                return False
        # a drafter that reads what the target computes at the nodes of a tree gets the tree on the host
        return not self.drafter.reads.trees and self.target.reader.reads_on_device

    def _commit(
        self, outputs: dict[int, TargetOutput], accepted: dict[int, Accepted]
    ) -> list[tuple[int, list[int]]]:
        """Add what each row (request) accepted to its updates for the drafter; return the new tokens of each answer.

        Args:
            outputs: Row id -> the target's output on the row's tree.
            accepted: Row id -> the accepted path and the update for the drafter, of the rows that have not failed.

        Returns:
            Pairs of row id and new tokens, which the row's trace then holds.
        """
        reads = self.drafter.reads
        new: list[tuple[int, list[int]]] = []
        for row_id, result in accepted.items():
            row = self.rows[row_id]
            output = outputs[row_id]
            update = result.update
            with row.fail_alone():
                if row.observe is not None:
                    row.observe(output, result.path, row.choose)
                # the drafter declares what it reads besides the accepted tokens: the target's best tokens after each
                # node (choices), its states there, its likeliest tokens after every token that it read (followers)
                if reads.choices:
                    # A drafter of sampled drafts must not see choices that depend on the target's noise: drafts that
                    # follow the noise would bias the output.
                    if row.draw == "sampled":
                        ranked = output.likeliest(reads.choices)
                    else:
                        ranked = row.choose.rank_tokens(output, reads.choices)
                    update = replace(update, tree=output.tree, choices=ranked)
                if reads.states:
                    update = replace(update, tree=output.tree, states=output.features)
                if reads.followers:
                    ranked = rank_tokens(output.logits, reads.followers)
                    update = replace(update, followers=Followers(output.tree.tokens, ranked))
                row.pending.append(update)
                # the path begins with the old root, which the answer holds already, and the new root follows the path
                new.append((row_id, row.commit([*update.tokens.tolist()[1:], update.root])))
        return new

    def _learn(self, cycles: dict[int, Cycle]) -> None:
        """Pass the rows' cycles to the policy that chooses budgets: all to `learn_rows`, else one by one to `learn`.

        A cycle is one draft and its verification, of one row (request), given by row id. A fixed `Budget` has neither
        method, and learns nothing.
        """
        learn_rows = getattr(self.budget, "learn_rows", None)
        learn = getattr(self.budget, "learn", None)
        if learn_rows is not None:
            learn_rows(cycles)
        elif learn is not None:
            for row_id, cycle in cycles.items():
                with self.rows[row_id].fail_alone():
                    learn(cycle)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The outcome of a cycle for one row."""

    path: list[int]  # the accepted nodes of its tree, the root first
    update: Committed  # for the drafter: their tokens and features, and the new root


def accept(
    state: Any, rows: Sequence[Row], outputs: dict[int, TargetOutput]
) -> dict[int, Accepted]:
    """Verify each row's tree, keep the accepted path in the target's KV cache, and return the outcomes by row id.

    A row is one request of the batch. A row that fails is left out, and its trace keeps the error.

    Args:
        state: The target's state (`eagle.target.state.TargetState`).
        rows: The rows whose trees the target has read.
        outputs: The target's outputs by row id.
    """
    # all trees of a cycle are verified in one place: if one is on the device, the others are uploaded
    on_device = any(lies_on_device(outputs[row.row_id].tree) for row in rows)
    accept_rows = _accept_on_device if on_device else _accept_on_host
    try:
        return accept_rows(state, rows, outputs)
    # an error of the machine, such as a lack of memory, ends all rows
    except FATAL:
        raise
    except Exception as error:
        # with several rows the error may be any row's, so it ends all of them
        if len(rows) > 1:
            raise
        rows[0].fail(error)
        return {}


def _accept_on_host(
    state: Any, rows: Sequence[Row], outputs: dict[int, TargetOutput]
) -> dict[int, Accepted]:
    """Verify trees on the host, and keep the accepted paths in the KV cache; return the outcomes by row id.

    `state` is the target's, `rows` are the requests, and `outputs` the target's outputs on their trees by row id. A row
    that fails is left out.
    """
    pairs = [(outputs[row.row_id], row.choose) for row in rows]
    try:
        results = dict(enumerate(verify_rows(pairs)))
    except RowErrors as failed:
        # despite its name, the error holds here the results of the rows that were verified
        results = failed.trees
        for index, error in failed.errors.items():
            rows[index].fail(error)
    # row id -> the accepted nodes, the root first, and the target's token after them
    verified = {rows[index].row_id: result for index, result in results.items()}
    # the cache keeps what is accepted, and drops the rest of each tree
    state.keep({row_id: path for row_id, (path, _) in verified.items()})
    accepted = {}
    for row_id, (path, following) in verified.items():
        output = outputs[row_id]
        update = Committed(output.tree.tokens[path], output.features_at(path), following)
        accepted[row_id] = Accepted(path, update)
    return accepted


@torch.inference_mode()
def _accept_on_device(
    state: Any, rows: Sequence[Row], outputs: dict[int, TargetOutput]
) -> dict[int, Accepted]:
    """Verify trees on the device, and keep the accepted paths in the KV cache; return the outcomes by row id.

    The host waits only once, after it has queued all kernels. `state` is the target's, `rows` are the requests, and
    `outputs` the target's outputs on their trees by row id. A row that fails is left out.
    """
    pairs = [(outputs[row.row_id], row.choose) for row in rows]
    # all of this is queued on the device, with shapes that do not depend on what is accepted
    walks = walk_outputs(pairs)
    # the keys and values of each accepted path move right after those of the sequence, in the KV cache
    state.cache.move([state.rows.index(row.row_id) for row in rows], walks.paths)
    features = []
    for (output, _), path in zip(pairs, walks.paths, strict=True):
        features.append(output.features_at(path))
    # the only wait of a cycle
    results = read_walks(pairs, walks)
    accepted: dict[int, Accepted] = {}
    for row, row_features, (path, following) in zip(rows, features, results, strict=True):
        with row.fail_alone():
            # `_draft` left these checks for now, as the host had not read the tree
            output = outputs[row.row_id]
            check_choice(following, output, len(path))
            tree = output.tree
            check_draft(tree, int(tree.tokens[0]), tree.levels, state.target.vocab_size)
            tokens = tree.tokens[path]
            state.commit(row.row_id, tokens.tolist())
            if row_features is not None:
                # the rest is padding to the longest path
                row_features = row_features[: len(path)]
            accepted[row.row_id] = Accepted(path, Committed(tokens, row_features, following))
    return accepted


class _Clock:
    """Records the seconds of each part of a cycle."""

    def __init__(self, device: torch.device, timing: bool | Callable[[], float]) -> None:
        """Make a clock for the cycles of one decoding; it has measured nothing yet.

        Args:
            device: The target's, which is waited for before the time is read.
            timing: Whether to record anything; or the clock to read, in place of wall time.
        """
        self.device = device
        self.timing = timing
        self.last = 0.0  # the time of the last `start` or `lap`
        self.seconds: dict[str, float] | None = None  # part -> seconds, of the current cycle

    def start(self) -> None:
        """Begin a cycle: `seconds` is a new dict from here on, as the last cycle's belongs to its trace."""
        if self.timing:
            self.seconds = {}
            self.last = self._now()

    def lap(self, name: str) -> None:
        """Record the seconds since the last `start` or `lap` as those of the part `name`, such as "draft"."""
        if self.seconds is not None:
            now = self._now()
            self.seconds[name] = now - self.last
            self.last = now

    def _now(self) -> float:
        """Return the time in seconds, once the device has done all work that was queued on it."""
        # a device works on after a call has returned: wait for it, so that its time counts for the right part
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return self.timing() if callable(self.timing) else perf_counter()
