"""Stage 1, what must hold on the device: where the host waits, what every method must hold, lossless decoding."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.gpu.worker import Context, Figures, Unit
from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.conformance.checks import run_checks
from eagle.conformance.trial import make_head
from eagle.core.trace import Trace
from eagle.core.verify import Choose
from eagle.drafters import DRAFTERS
from eval.lossless import ModelAnswer, decode_untouched, find_divergence
from tests.families import build, random_tokens
from tests.simulated_runs import HEADS

# each of many processes at once compiles attention
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
# grouped heads, windows with soft caps, experts, sinks, latent attention, learned positions, and a hybrid
CHECKED_FAMILIES = [
    "llama",
    "qwen3",
    "gemma3",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "gpt2",
    "qwen3_next",
]
HEAD_KINDS = ("eagle1", "eagle3", "dflash", "draft_model")
PROMPT_LENGTHS = (9, 23, 4)
SEED = 3


def units(context: Context) -> dict[str, Unit]:
    """Return the checks, those that find most first."""
    families = context.pick(CHECKED_FAMILIES, ["llama", "qwen3_next"])
    methods = context.pick(list(DRAFTERS), ["ngram", "eagle1"])
    new_tokens = context.pick(24, 6)
    checks: dict[str, Unit] = {
        "waits, decoding": partial(check_waits, "cycle or extraction or planted")
    }
    for dtype in (torch.float32, torch.bfloat16):
        for family in families:
            name = f"lossless, {family}, {str(dtype).removeprefix('torch.')}"
            checks[name] = partial(
                check_lossless, family, dtype, device=context.device, new_tokens=new_tokens
            )
    for method in methods:
        checks[f"conformance, {method}"] = partial(check_method, method, context.device)
    if not context.rehearse:
        # each kind compiles attention, which takes most of the time
        for kind in dict.fromkeys(name.replace(",", " ").split()[0] for name in HEADS):
            checks[f"waits, training {kind}"] = partial(check_waits, f"training_step and {kind}")
    return checks


def check_waits(expression: str) -> Figures:
    """Run the tests of the host's waits that an expression chooses; without CUDA they are skipped.

    Args:
        expression: As `pytest -k` takes it.

    Raises:
        RuntimeError: pytest itself failed, or found no such test.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/test_waits_on_cuda.py",
        "-k",
        expression,
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    # 1: tests failed, which the last lines name
    if done.returncode not in (0, 1):
        raise RuntimeError(
            f"pytest ended with status {done.returncode}: {done.stdout[-1000:]}{done.stderr[-1000:]}"
        )
    lines = done.stdout.splitlines()
    return {
        "line": lines[-1].strip("= "),
        "failed": [line for line in lines if line.startswith("FAILED")],
    }


def check_method(kind: str, device: torch.device) -> Figures:
    """Run what every method must hold, with target and head on the device."""
    # one check compares gradients bit by bit, which sums by atomic additions would spoil
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    outcomes = list(run_checks(kind, fast=True, device=device))
    torch.use_deterministic_algorithms(False)
    faults = {outcome.about: outcome.fault for outcome in outcomes if outcome.fault is not None}
    line = f"{len(outcomes) - len(faults)} of {len(outcomes)} checks hold"
    return {"line": line, "checks": len(outcomes), "faults": faults}


def check_lossless(
    family: str, dtype: torch.dtype, device: torch.device, new_tokens: int
) -> Figures:
    """Compare drafted answers, alone and in a batch, with those of the untouched model token by token.

    Args:
        family: A small random model of `tests.families`.
        dtype: Its precision.
        device: Where both decode.
        new_tokens: The length of every answer.

    Returns:
        The counts, and every difference with what may explain it.
    """
    model = build(family, dtype).to(device)
    target = Target(copy.deepcopy(model))
    # untrained heads are right now and then, as the vocabulary is small
    drafters = {name: load_drafter(name, target) for name in ("none", "ngram")}
    drafters |= {kind: make_head(kind, target).bind(target.head) for kind in HEAD_KINDS}
    # prompts repeat themselves, so that n-grams draft
    prompts = [2 * random_tokens(length, seed=length) for length in PROMPT_LENGTHS]

    # one answer of the model is compared with those of all drafters
    @cache
    def decode_model(i: int, sampling: Sampling) -> ModelAnswer:
        return decode_untouched(model, Choose(sampling), prompts[i], stop=[], count=new_tokens)

    answers = 0
    accepted = 0
    differences = []
    for temperature, name in product((0.0, 1.0), drafters):
        for i, sampling, trace in decode(
            target, drafters[name], prompts, temperature, new_tokens=new_tokens
        ):
            answers += 1
            accepted += sum(cycle.accepted for cycle in trace.checked().cycles)
            difference = find_divergence(
                model,
                SimpleNamespace(decode=str),  # there is no text to show
                (family, name, i, temperature, SEED),
                decode_model(i, sampling),
                drafted=trace.tokens,
                steps_differ=target.reader.follows_steps,
            )
            if difference is not None:
                differences.append(difference)

    identical = answers - len(differences)
    gaps = [difference.gap or 0.0 for difference in differences if difference.is_rounding]
    line = f"{identical} of {answers} identical, {len(gaps)} near-ties of at most {max(gaps, default=0.0):.2g}"
    line += f", {len(differences) - len(gaps)} other differences; {accepted} drafts accepted"
    rows = [difference.to_json() for difference in differences]
    return {
        "line": line,
        "identical": identical,
        "answers": answers,
        "accepted": accepted,
        "differences": rows,
    }


def decode(
    target: Target, drafter: Any, prompts: list[list[int]], temperature: float, new_tokens: int
) -> Iterator[tuple[int, Sampling, Trace]]:
    """Yield the index of a prompt, its sampling and its answer: the first alone, then all in a batch."""
    samplings = [Sampling(temperature, seed=SEED, request=i) for i in range(len(prompts))]
    options: dict[str, Any] = {"budget": Budget(8, 4, 3), "max_new_tokens": new_tokens, "stop": []}
    yield 0, samplings[0], generate(target, drafter, prompts[0], sampling=samplings[0], **options)
    batch = generate(
        target, drafter, prompts, sampling=samplings, batch_size=len(prompts), **options
    )
    for i, trace in enumerate(batch):
        yield i, samplings[i], trace
