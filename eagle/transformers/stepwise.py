"""The loop of `model.generate` over answers that a decoding with drafts writes several tokens at a time."""

# R rows, T tokens, V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle.core.trace import Trace
from eagle.core.tree import TargetOutput
from eagle.core.verify import Choose
from eagle.decoding.loop import Decoding
from eagle.device import pick_rows
from eagle.transformers.request import Request


class RowLogits:
    """Collects the logits [V] of one row at every position of its answer.

    Args:
        raw: Whether to collect them before the processors (`output_logits`).
        processed: Whether to collect them after the processors (`output_scores`).
    """

    def __init__(self, *, raw: bool, processed: bool) -> None:
        # [V] of each position of the answer; None where they are not requested
        self.raw: list[Tensor] | None = [] if raw else None
        self.processed: list[Tensor] | None = [] if processed else None

    def observe(self, output: TargetOutput, path: list[int], choose: Choose) -> None:
        """Keep the logits after the accepted nodes of a forward: one row of logits for each new token.

        Args:
            output: The draft tree, with the target's logits [N, V] at its N nodes.
            path: The root and the accepted nodes, each of which is followed by a new token.
            choose: How the target chooses tokens; it applies the row's processors.
        """
        if self.raw is not None:
            raw = pick_rows(output.logits, path)
            self.raw += raw.to(torch.float32, copy=True).unbind()
        if self.processed is not None:
            processed = choose.logits_after(output, path)
            self.processed += processed.to(torch.float32, copy=True).unbind()


class Stepwise:
    """Runs the loop of `generate` with the tokens of a decoding: criteria and streamer get a token a row in each step.

    The decoding may have written more tokens of a row than the loop has passed on. They are cut off where a criterion
    ends the row.
    """

    def __init__(
        self,
        decoding: Decoding,
        request: Request,
        traces: list[Trace],
        logits: list[RowLogits],
    ) -> None:
        """Prepare the loop of `generate` over the tokens of a decoding.

        Args:
            decoding: With all rows of the request added.
            request: The call of `generate`.
            traces: Of each row, to which the decoding writes.
            logits: Of each row, which the decoding fills.
        """
        self.decoding = decoding
        self.request = request
        self.traces = traces
        self.logits = logits
        config = request.config
        # transformers fills ended rows with padding only if some criterion has a stop token
        self.has_ends = any(hasattr(criterion, "eos_token_id") for criterion in request.criteria)
        padding = getattr(config, "_pad_token_tensor", None)
        # the token of rows that have ended
        self.pad = config.pad_token_id if padding is None else int(padding)
        # logits [R, V] of each step, as transformers passes them to criteria: a tuple that grows, or None
        self.scores: tuple[Tensor, ...] | None = None
        self.raw: tuple[Tensor, ...] | None = None
        if config.return_dict_in_generate:
            self.scores = () if config.output_scores else None
            self.raw = () if config.output_logits else None

    def run(self, streamer: Any) -> Tensor:
        """Return the R prompts of T tokens with their answers, [R, T + new], as `generate` returns them.

        Args:
            streamer: Gets the tokens [R] of each step; None for none.
        """
        tokens = self.request.input_ids
        # [R], 1 for a row that goes on, 0 for one that a criterion has ended
        unfinished = torch.ones(len(tokens), dtype=torch.long, device=tokens.device)
        step = 0
        while bool(unfinished.any()):
            # this is the body of transformers' own loop, except that tokens come from the decoding
            # the rows that get a token of the decoding in this step; the others get padding
            writing = []
            for row, runs in enumerate(unfinished.tolist()):
                if runs or not self.has_ends:
                    writing.append(row)
            self._decode(writing, step)
            chosen = [self.pad] * len(tokens)
            for row in writing:
                chosen[row] = self.traces[row].tokens[step]
            self._collect_logits(writing, step)
            new = torch.tensor(chosen, dtype=tokens.dtype, device=tokens.device)
            tokens = torch.cat([tokens, new[:, None]], dim=-1)
            unfinished = unfinished & ~self.request.criteria(tokens, self.scores)
            step += 1
            self._end(unfinished.tolist(), step)
            if streamer is not None:
                streamer.put(new.cpu())
        if streamer is not None:
            streamer.end()
        return tokens

    def _decode(self, rows: list[int], step: int) -> None:
        """Run decoding cycles until each of these rows has a token for the loop's step `step`, the answer's position.

        The decoding writes the tokens to the rows' traces. An error of any row is raised.
        """
        # a cycle commits several tokens of a row, so in most steps nothing is left to do
        while min(len(self.traces[row].tokens) for row in rows) <= step:
            assert not self.decoding.is_done
            self.decoding.step()
            for trace in self.traces:
                trace.checked()

    def _end(self, unfinished: list[int], count: int) -> None:
        """End the rows that have ended after `count` tokens, and drop the tokens that were decoded beyond.

        Args:
            unfinished: Of each row whether it goes on.
            count: The number of steps so far.
        """
        for row, runs in enumerate(unfinished):
            # without stop tokens, transformers writes all rows until the last one ends
            if runs or (not self.has_ends and any(unfinished)):
                continue
            # the decoding may have ended the row already, at its own stop tokens or limit
            if row in self.decoding.rows:
                self.decoding.end(row, count)
            elif len(self.traces[row].tokens) > count:
                self.traces[row].cut(count)

    def _collect_logits(self, rows: list[int], step: int) -> None:
        """Append the logits [R, V] of a step, before and after processors, to `raw` and `scores` if they are requested.

        Args:
            rows: The rows that have not ended; the others get zeros.
            step: The index of the step.
        """
        if self.raw is not None:
            raw = [logits.raw for logits in self.logits]
            self.raw = (*self.raw, self._pop_step(raw, rows, step))
        if self.scores is not None:
            processed = [logits.processed for logits in self.logits]
            self.scores = (*self.scores, self._pop_step(processed, rows, step))

    def _pop_step(self, by_row: list[list[Tensor] | None], rows: list[int], step: int) -> Tensor:
        """Return the logits [R, V] of a step, and free those of the rows.

        Args:
            by_row: The logits of each row at all positions of its answer; their entries of this step are emptied.
            rows: The rows that have not ended; the others get zeros.
            step: The index of the step.
        """
        row_logits: dict[int, Tensor] = {}
        for row in rows:
            logits = by_row[row]
            assert logits is not None
            row_logits[row] = logits[step]
            # an empty tensor takes its place, so that later steps keep their indices
            logits[step] = logits[step][:0]
        # for rows that have ended
        blank = torch.zeros_like(row_logits[rows[0]])
        stacked = [row_logits.get(row, blank) for row in range(len(by_row))]
        return torch.stack(stacked).to(self.request.input_ids.device)
