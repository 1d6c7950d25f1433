"""The public calls: `generate` returns whole answers, `stream` yields tokens as they are committed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

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
from eagle.core.trace import Trace
from eagle.core.verify import Sampling
from eagle.decoding.loop import Decoding
from eagle.decoding.new_tokens import NewTokens, SpokenText
from eagle.decoding.stops import stop_strings
from eagle.target.target import Target

Stop = int | str | Sequence[int | str] | Tensor | None
TOGETHER = 16  # prompts that are written side by side, where the call does not say how many
OPTIONS = ("sampling", "max_new_tokens", "stop", "budget", "timing", "trace", "batch_size", "max_tokens_in_cache")


@overload
def generate(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int = 128,
    stop: Stop = None,
    budget: Budget | Policy | None = None,
    timing: bool = False,
    trace: Trace | None = None,
    batch_size: None = None,
    max_tokens_in_cache: int | None = None,
) -> Trace: ...


@overload
def generate(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[Sequence[int]] | Sequence[Tensor],
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    stop: Stop = None,
    budget: Budget | Policy | None = None,
    timing: bool = False,
    trace: Sequence[Trace] | None = None,
    batch_size: int | None = None,
    max_tokens_in_cache: int | None = None,
) -> list[Trace]: ...


@overload
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
    trace: Trace | Sequence[Trace] | None = None,
    batch_size: int | None = None,
    max_tokens_in_cache: int | None = None,
) -> Any: ...


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
    """The target's answer to a prompt as a `Trace`, accelerated by `drafter`; the options are those of `stream`.

    Several prompts, or any list with a `batch_size`, give a list of traces in the prompts' order. An error that ends
    one of several texts stays on its trace, `trace.error`; a warning counts them. If all texts end so, or the only one,
    the error is raised.
    """
    refuse_options(unknown, OPTIONS)
    rows = prompt_rows(prompt, batch_size)
    traces = list_traces([trace] if rows is None and trace is not None else trace, 1 if rows is None else len(rows))
    pieces: Any = stream(
        target,
        drafter,
        prompt if rows is None else rows,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop=stop,
        budget=budget,
        timing=timing,
        trace=traces[0] if rows is None else traces,
        batch_size=TOGETHER if batch_size is None and rows is not None else batch_size,
        max_tokens_in_cache=max_tokens_in_cache,
    )
    for _ in pieces:
        pass
    return traces[0] if rows is None else traces


@overload
def stream(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int = 128,
    stop: Stop = None,
    budget: Budget | Policy | None = None,
    timing: bool = False,
    trace: Trace | None = None,
    batch_size: None = None,
    max_tokens_in_cache: int | None = None,
) -> Iterator[NewTokens]: ...


@overload
def stream(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[Sequence[int]] | Sequence[Tensor],
    *,
    sampling: Sampling | Sequence[Sampling] | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    stop: Stop = None,
    budget: Budget | Policy | None = None,
    timing: bool = False,
    trace: Sequence[Trace] | None = None,
    batch_size: int | None = None,
    max_tokens_in_cache: int | None = None,
) -> Iterator[tuple[int, NewTokens]]: ...


@overload
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
    trace: Trace | Sequence[Trace] | None = None,
    batch_size: int | None = None,
    max_tokens_in_cache: int | None = None,
) -> Iterator[Any]: ...


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
    """Yield new tokens as they are committed, a list with a `text`; with several prompts, pairs (number, new tokens).

    The prompt is token ids in a list, tensor or array, or a tokenizer's output. `stop` is a token id, a string, or
    several; None means the target's stop tokens, an empty list none.

    Up to `batch_size` prompts are decoded side by side, as far as their texts and drafts fit in
    `max_tokens_in_cache`, padded to the longest; a prompt begins when an earlier one has ended. `sampling` and
    `max_new_tokens` are one value for all prompts or one for each. With one sampling for all, each prompt gets the next
    request number, so that each has its own noise. `trace` is an empty `Trace` to write to, or one for each prompt.
    """
    refuse_options(unknown, OPTIONS)
    rows = prompt_rows(prompt, batch_size)
    prompts = [token_ids(prompt)] if rows is None else rows
    samplings = list_values("sampling", Sampling() if sampling is None else sampling, len(prompts))
    limits = list_values("max_new_tokens", max_new_tokens, len(prompts))
    for row_sampling in samplings or [Sampling()]:
        check_call(target, drafter, row_sampling, budget)
    timing = boolean("timing", timing)
    if not isinstance(sampling, (list, tuple)):
        samplings = [replace(shared, request=shared.request + number) for number, shared in enumerate(samplings)]
    traces = list_traces([trace] if rows is None and trace is not None else trace, len(prompts))
    most = None if max_tokens_in_cache is None else positive_int("max_tokens_in_cache", max_tokens_in_cache)
    size = 1 if rows is None else positive_int("batch_size", TOGETHER if batch_size is None else batch_size)
    check_policy(budget, samplings, 1 if most is not None else min(size, len(prompts)))
    decoding = Decoding(target, drafter, budget=budget, batch_size=size, max_tokens_in_cache=most, timing=timing)
    try:
        for number, (row, row_sampling, limit, written) in enumerate(
            zip(prompts, samplings, limits, traces, strict=True)
        ):
            decoding.add(number, row, row_sampling, positive_int("max_new_tokens", limit), written, stop=stop)
    except ValueError:
        decoding.close()
        raise
    return _write(decoding, traces, stop_strings(stop), alone=rows is None)


def _write(decoding: Decoding, traces: list[Trace], strings: list[str], *, alone: bool) -> Iterator[Any]:
    """Yield the tokens of each step, with their prompt's number if there are several.

    A single prompt's error is raised. Of several prompts, errors stay on their traces and are counted in a warning; the
    first is raised if every prompt has one.
    """
    spoken = [SpokenText(trace, strings) for trace in traces]
    try:
        while not decoding.is_done:
            for number, tokens in decoding.step():
                if alone:
                    traces[0].checked()
                if tokens:
                    new = spoken[number].add(tokens)
                    yield new if alone else (number, new)
    finally:
        decoding.close()
    failed = [number for number, trace in enumerate(traces) if trace.error is not None]
    if failed and len(failed) == len(traces):
        traces[0].checked()
    if failed:
        error = traces[failed[0]].error
        warnings.warn(
            f"{len(failed)} of {len(traces)} texts ended with an error, see trace.error; prompt {failed[0]}: {error!r}",
            RuntimeWarning,
            stacklevel=2,
        )
