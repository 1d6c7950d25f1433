"""Texts that are written ahead with drafts, read step by step as the loop of `model.generate` reads its own."""

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
    """The logits of one row at every position of its answer, before and after the processors, as far as asked for."""

    def __init__(self, *, raw: bool, processed: bool) -> None:
        self.raw: list[Tensor] | None = [] if raw else None
        self.processed: list[Tensor] | None = [] if processed else None

    def observe(self, output: TargetOutput, path: list[int], choose: Choose) -> None:
        """Keep the logits after the accepted nodes of a forward."""
        if self.raw is not None:
            raw = pick_rows(output.logits, path)
            self.raw += raw.to(torch.float32, copy=True).unbind()
        if self.processed is not None:
            processed = choose.logits_after(output, path)
            self.processed += processed.to(torch.float32, copy=True).unbind()


class Stepwise:
    """The loop of `generate` over rows that a decoding writes: criteria and streamer see each step of all rows.

    A row that drafts well is written ahead of the others, and is cut where a criterion ends it.
    """

    def __init__(
        self,
        decoding: Decoding,
        request: Request,
        traces: list[Trace],
        logits: list[RowLogits],
    ) -> None:
        self.decoding = decoding
        self.request = request
        self.traces = traces
        self.logits = logits
        config = request.config
        # without a stop token or string, transformers keeps no record of which rows have ended
        self.has_ends = any(hasattr(criterion, "eos_token_id") for criterion in request.criteria)
        padding = getattr(config, "_pad_token_tensor", None)
        self.pad = config.pad_token_id if padding is None else int(padding)
        # as criteria see them: a tuple that grows, or None
        self.scores: tuple[Tensor, ...] | None = None
        self.raw: tuple[Tensor, ...] | None = None
        if config.return_dict_in_generate:
            self.scores = () if config.output_scores else None
            self.raw = () if config.output_logits else None

    def run(self, streamer: Any) -> Tensor:
        """Return the prompts and their answers, [R, T + new]."""
        tokens = self.request.input_ids
        unfinished = torch.ones(len(tokens), dtype=torch.long, device=tokens.device)
        step = 0
        while bool(unfinished.any()):
            # the body of transformers' own loop, with tokens that may have been written ahead
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
        """Decode until each of these rows has a token for this step."""
        # a cycle commits several tokens of a row, so most steps find theirs written
        while min(len(self.traces[row].tokens) for row in rows) <= step:
            assert not self.decoding.is_done
            self.decoding.step()
            for trace in self.traces:
                trace.checked()

    def _end(self, unfinished: list[int], count: int) -> None:
        """Cut the rows that have ended after `count` tokens; without stop tokens, all go on until the last one ends."""
        # what a row wrote ahead of its end is no part of the answer
        for row, runs in enumerate(unfinished):
            if runs or (not self.has_ends and any(unfinished)):
                continue
            if row in self.decoding.rows:
                self.decoding.end(row, count)
            elif len(self.traces[row].tokens) > count:
                self.traces[row].cut(count)

    def _collect_logits(self, rows: list[int], step: int) -> None:
        """Append the logits of a step; zeros for rows that have ended."""
        if self.raw is not None:
            raw = [logits.raw for logits in self.logits]
            self.raw = (*self.raw, self._pop_step(raw, rows, step))
        if self.scores is not None:
            processed = [logits.processed for logits in self.logits]
            self.scores = (*self.scores, self._pop_step(processed, rows, step))

    def _pop_step(self, by_row: list[list[Tensor] | None], rows: list[int], step: int) -> Tensor:
        """Return the logits [R, V] of a step, which are then let go of."""
        of_step: dict[int, Tensor] = {}
        for row in rows:
            logits = by_row[row]
            assert logits is not None
            of_step[row] = logits[step]
            # an empty tensor in its place, so that steps keep their indices
            logits[step] = logits[step][:0]
        blank = torch.zeros_like(of_step[rows[0]])
        stacked = [of_step.get(row, blank) for row in range(len(by_row))]
        return torch.stack(stacked).to(self.request.input_ids.device)
