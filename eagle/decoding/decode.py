"""The public calls: `generate` returns whole answers, `stream` yields tokens as they are committed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from eagle.core.arguments import (
    boolean,
    check_call,
    check_policy,
    list_traces,
    list_values,
    positive_int,
    prompt_rows,
    refuse_options,
    token_ids,
)
from eagle.core.budget import Budget, Policy
from eagle.core.drafter import Drafter
from eagle.core.trace import Spelling, Trace
from eagle.core.verify import Sampling
from eagle.decoding.loop import Decoding
from eagle.decoding.rows import stop_strings
from eagle.target.target import Target

Stop = int | str | Sequence[int | str] | Tensor | None
# the most prompts of a batch, if the call has several prompts and no batch_size
DEFAULT_BATCH_SIZE = 16
# the options of `generate` and `stream`, for the error message about an unknown one
OPTIONS = (
    "sampling",
    "max_new_tokens",
    "stop",
    "budget",
    "timing",
    "trace",
    "batch_size",
    "max_tokens_in_cache",
)


def generate(
    target: Target,
    drafter: Drafter,
    prompt: Any,
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    stop: Stop = None,
    budget: Budget | Policy | None = None,
    timing: bool = False,
    trace: Any = None,
    batch_size: int | None = None,
    max_tokens_in_cache: int | None = None,
    **unknown: Any,
) -> Any:
    """Return the target's answer to a prompt, accelerated by `drafter`.

    Args:
        target: The model whose answers these are.
        drafter: Any drafter; the answer does not depend on it.
        prompt: Token ids in a list, tensor or array, or a tokenizer's output; or several of these.
        sampling: How the target samples; one for all prompts or one for each. With one for all, each prompt gets the
            next request number, so that each has its own noise.
        max_new_tokens: For all prompts or for each.
        stop: A token id, a string, or several; None means the target's stop tokens, an empty list none.
        budget: What is drafted, or a policy that decides; by default the drafter's.
        timing: Whether traces keep the seconds of cycles.
        trace: An empty `Trace` to write to, or one for each prompt.
        batch_size: The most prompts at once; a prompt begins when an earlier one has ended.
        max_tokens_in_cache: The most tokens of prompts, answers and drafts at once, padded to the longest.

    Returns:
        A `Trace`; for several prompts, or any list with a `batch_size`, a list of traces in the prompts' order.

    Raises:
        Exception: An error that ends the only answer, or every answer. One that ends some of several stays on its
            trace, `trace.error`, and a warning counts them.
    """
    refuse_options(unknown, OPTIONS)
    # the token ids of each prompt; None for a single prompt without a batch size
    rows = prompt_rows(prompt, batch_size)
    traces = _find_traces(trace, rows)
    if batch_size is None and rows is not None:
        batch_size = DEFAULT_BATCH_SIZE
    # the traces hold the answers, so the tokens that `stream` yields are not needed
    pieces = stream(
        target,
        drafter,
        prompt if rows is None else rows,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop=stop,
        budget=budget,
        timing=timing,
        trace=traces[0] if rows is None else traces,
        batch_size=batch_size,
        max_tokens_in_cache=max_tokens_in_cache,
    )
    for _ in pieces:
        pass
    return traces[0] if rows is None else traces


def stream(
    target: Target,
    drafter: Drafter,
    prompt: Any,
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    stop: Stop = None,
    budget: Budget | Policy | None = None,
    timing: bool = False,
    trace: Any = None,
    batch_size: int | None = None,
    max_tokens_in_cache: int | None = None,
    **unknown: Any,
) -> Iterator[Any]:
    """Yield new tokens as they are committed, as lists with a `text` (`NewTokens`).

    The arguments are those of `generate`. With several prompts, or a `batch_size`, items are pairs (index of the
    prompt, new tokens).
    """
    refuse_options(unknown, OPTIONS)
    # the token ids of each prompt; None for a single prompt without a batch size
    rows = prompt_rows(prompt, batch_size)
    prompts = [token_ids(prompt)] if rows is None else rows
    count = len(prompts)
    # this is no generator function: it checks all arguments when it is called, not when the first token is read
    samplings = list_values("sampling", Sampling() if sampling is None else sampling, count)
    limits = list_values("max_new_tokens", max_new_tokens, count)
    # without prompts, target and drafter are checked all the same
    for row_sampling in samplings or [Sampling()]:
        check_call(target, drafter, row_sampling, budget)
    timing = boolean("timing", timing)
    if not isinstance(sampling, (list, tuple)):
        # prompts that share a sampling get different request numbers, and so different noise
        samplings = [
            replace(shared, request=shared.request + i) for i, shared in enumerate(samplings)
        ]
    traces = _find_traces(trace, rows)

    if max_tokens_in_cache is not None:
        max_tokens_in_cache = positive_int("max_tokens_in_cache", max_tokens_in_cache)
    if batch_size is None:
        batch_size = 1 if rows is None else DEFAULT_BATCH_SIZE
    batch_size = positive_int("batch_size", batch_size)
    # how many rows will share a batch; a limit on the cache may leave a single one
    check_policy(
        budget, samplings, 1 if max_tokens_in_cache is not None else min(batch_size, count)
    )
    decoding = Decoding(
        target,
        drafter,
        budget=budget,
        batch_size=batch_size,
        max_tokens_in_cache=max_tokens_in_cache,
        timing=timing,
    )
    try:
        for i, tokens in enumerate(prompts):
            limit = positive_int("max_new_tokens", limits[i])
            decoding.add(
                i,
                tokens,
                sampling=samplings[i],
                limit=limit,
                trace=traces[i],
                stop=stop,
            )
    # a request was refused: the target's state is given back first
    except ValueError:
        decoding.close()
        raise
    return _write(decoding, traces, stop_strings(stop), alone=rows is None)


def _find_traces(trace: Any, rows: list[list[int]] | None) -> list[Trace]:
    """Return the traces that the answers are written to, one for each prompt: the caller's, or new ones.

    A trace is the record of one answer.

    Args:
        trace: The option of the call: a trace for a single prompt, a list of traces for several, or None.
        rows: The token ids of each prompt; None for a single prompt.
    """
    if rows is not None:
        return list_traces(trace, len(rows))
    return list_traces(None if trace is None else [trace], 1)


def _write(
    decoding: Decoding, traces: list[Trace], strings: list[str], *, alone: bool
) -> Iterator[Any]:
    """Run a decoding and yield the new tokens of each step.

    The error of a single prompt is raised. With several prompts, errors stay on their traces and are counted in a
    warning; the first error is raised if every prompt has one.

    Args:
        decoding: The decoding loop, to which all prompts were added, by their index.
        traces: Of each prompt.
        strings: The stop strings.
        alone: Whether the call has a single prompt, whose tokens are yielded without its index.
    """
    answers = [_AnswerText(trace, strings) for trace in traces]
    try:
        while not decoding.is_done:
            for i, tokens in decoding.step():
                # raises the error that ended the only answer, if any
                if alone:
                    traces[0].checked()
                if tokens:
                    new = answers[i].add(tokens)
                    yield new if alone else (i, new)
    finally:
        decoding.close()
    # a caller of many prompts still gets the answers that did not fail
    failed = [i for i, trace in enumerate(traces) if trace.error is not None]
    if not failed:
        return
    # every prompt has failed: this raises the first error
    if len(failed) == len(traces):
        traces[0].checked()
    error = traces[failed[0]].error
    warnings.warn(
        f"{len(failed)} of {len(traces)} sequences ended with an error, see trace.error; prompt {failed[0]}: {error!r}",
        RuntimeWarning,
        stacklevel=2,
    )


class NewTokens(list[int]):
    """New tokens of an answer, as a list of ids."""

    def __init__(self, tokens: Iterable[int], answer: _AnswerText, index: int) -> None:
        """Hold new tokens, whose text is decoded only if it is asked for.

        Args:
            tokens: The token ids.
            answer: The text of their answer.
            index: Of these tokens among the pieces of the answer.
        """
        super().__init__(tokens)
        self._answer = answer
        self._index = index

    @property
    def text(self) -> str:
        """The text that these tokens add to the answer. Joined, all these texts are `Trace.text`.

        A character of several tokens is returned with its last token. Text that may be the start of a stop string is
        held back until this is certain.
        """
        return self._answer.piece(self._index)


class _AnswerText:
    """An answer's text in pieces, each decoded when it is first asked for."""

    def __init__(self, trace: Trace, strings: Sequence[str]) -> None:
        """Begin the text of an answer, which is decoded only as far as it is read.

        Args:
            trace: Of the answer, which is still being written.
            strings: The stop strings.
        """
        self.trace = trace
        self.stop_strings = strings
        # tokens of each piece, and whether the answer ends with it
        self.pieces: list[tuple[list[int], bool]] = []
        self.texts: list[str] = []  # of the pieces that were decoded so far
        self.spelling: Spelling | None = None
        self.pending = ""  # text that is held back, as it may be the beginning of a stop string
        self.emitted = 0  # the number of characters in `texts`

    def add(self, tokens: list[int]) -> NewTokens:
        """Append the tokens that a step has committed as a piece, and return them as a list with a lazy `text`."""
        self.pieces.append((tokens, self.trace.finish != "running"))
        return NewTokens(tokens, self, len(self.pieces) - 1)

    def piece(self, index: int) -> str:
        """Return the text of the piece with this index, decoded once.

        The pieces before it are decoded first, because its text depends on them. A piece is the text of the tokens that
        one decoding step has committed.
        """
        while len(self.texts) <= index:
            tokens, is_last = self.pieces[len(self.texts)]
            text = self._decode(tokens, is_last)
            self.texts.append(text)
            self.emitted += len(text)
        return self.texts[index]

    def _decode(self, tokens: list[int], is_last: bool) -> str:
        """Return the text that the next piece (tokens of one step) completes; hold back what may become a stop string.

        Args:
            tokens: Of the piece, the next after those that were decoded.
            is_last: Whether the answer ends with them.
        """
        if is_last:
            # the rest of the whole answer, with everything that was held back
            return self.trace.text[self.emitted :]
        if self.spelling is None:
            self.spelling = Spelling(self.trace.need_tokenizer())
        text = self.pending + "".join(map(self.spelling, tokens))
        # text from this index on may be the beginning of a stop string
        end = self._find_stop(text)
        self.pending = text[end:]
        return text[:end]

    def _find_stop(self, text: str) -> int:
        """Return the index in the text from which on it may be the beginning of a stop string, or the text's length.

        That part is held back: it must not be shown if a stop string ends the answer there.
        """
        # from the left, so that the longest such end is found
        longest = max(map(len, self.stop_strings), default=0)
        for start in range(max(len(text) - longest, 0), len(text)):
            if any(string.startswith(text[start:]) for string in self.stop_strings):
                return start
        return len(text)
