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
    """The logits of one text at every place of its answer, before and after the processors, as far as asked for."""

    def __init__(self, *, raw: bool, processed: bool) -> None:
        self.raw: list[Tensor] | None = [] if raw else None
        self.processed: list[Tensor] | None = [] if processed else None

    def observe(self, output: TargetOutput, path: list[int], choose: Choose) -> None:
        """Keep the logits after the accepted nodes of a forward."""
        if self.raw is not None:
            self.raw += pick_rows(output.logits, path).to(torch.float32, copy=True).unbind()
        if self.processed is not None:
            self.processed += choose.logits_after(output, path).to(torch.float32, copy=True).unbind()


class Stepwise:
    """The loop of `generate` over rows that a decoding writes: criteria and streamer see each step of all rows.

    A row that drafts well is written ahead of the others, and is cut where a criterion ends it.
    """

    def __init__(self, decoding: Decoding, request: Request, traces: list[Trace], logits: list[RowLogits]) -> None:
        self.decoding, self.request, self.traces, self.logits = decoding, request, traces, logits
        config = request.config
        self.has_ends = any(hasattr(criterion, "eos_token_id") for criterion in request.criteria)
        padding = getattr(config, "_pad_token_tensor", None)
        self.pad = config.pad_token_id if padding is None else int(padding)
        wants = config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if wants and config.output_scores else None
        self.raw: tuple[Tensor, ...] | None = () if wants and config.output_logits else None

    def run(self, streamer: Any) -> Tensor:
        """[R, T + new], the prompts and their answers."""
        tokens = self.request.input_ids
        unfinished = torch.ones(len(tokens), dtype=torch.long, device=tokens.device)
        step = 0
        while bool(unfinished.any()):
            writing = [row for row, runs in enumerate(unfinished.tolist()) if runs or not self.has_ends]
            self._write(writing, step)
            chosen = [self.traces[row].tokens[step] if row in writing else self.pad for row in range(len(tokens))]
            self._keep_logits(writing, step)
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

    def _write(self, rows: list[int], step: int) -> None:
        """Decode until each of these rows has a token for this step."""
        while any(len(self.traces[row].tokens) <= step for row in rows):
            assert not self.decoding.is_done
            self.decoding.step()
            for trace in self.traces:
                trace.checked()

    def _end(self, unfinished: list[int], count: int) -> None:
        """Cut the rows that have ended after `count` tokens; without stop tokens, all go on until the last one ends."""
        for row, runs in enumerate(unfinished):
            if runs or (not self.has_ends and any(unfinished)):
                continue
            if row in self.decoding.rows:
                self.decoding.end(row, count)
            elif len(self.traces[row].tokens) > count:
                self.traces[row].cut(count)

    def _keep_logits(self, rows: list[int], step: int) -> None:
        """Append the logits of a step; zeros for rows that have ended."""
        if self.raw is not None:
            self.raw += (self._stack([logits.raw for logits in self.logits], rows, step),)
        if self.scores is not None:
            self.scores += (self._stack([logits.processed for logits in self.logits], rows, step),)

    def _stack(self, kept: list[list[Tensor] | None], rows: list[int], step: int) -> Tensor:
        """[R, V], the logits of a step, which are then let go of."""
        found: dict[int, Tensor] = {}
        for row in rows:
            logits = kept[row]
            assert logits is not None
            found[row], logits[step] = logits[step], logits[step][:0]
        blank = torch.zeros_like(found[rows[0]])
        stacked = [found.get(row, blank) for row in range(len(kept))]
        return torch.stack(stacked).to(self.request.input_ids.device)
