"""Stage 1, what must hold on the device: where the host waits, what every method must hold, lossless decoding."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import torch

from bench.gpu.common import Context, Figures, Unit
from eagle import Budget, Sampling, Target, generate
from eagle.conformance.checks import run_checks
from eagle.conformance.trial import make_head
from eagle.core.verify import Choose
from eagle.drafters import DRAFTERS
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.none import NoDrafter
from eval.lossless import decode_untouched, find_divergence
from tests.families import FAMILIES, OTHER_MEANS, build, random_tokens
from tests.simulated_runs import HEADS

# each of many processes at once compiles attention
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
ROOT = Path(__file__).parent.parent.parent
# grouped heads, windows with soft caps, experts, sinks, latent attention, learned positions, and a hybrid
CHECKED_FAMILIES = ("llama", "qwen3", "gemma3", "mixtral", "gpt_oss", "deepseek_v3", "gpt2", "qwen3_next")
DTYPES = ("float32", "bfloat16")
HEAD_KINDS = ("eagle1", "eagle3", "dflash", "draft_model")
BUDGET = Budget(8, 4, 3)
PROMPT_LENGTHS = (9, 23, 4)


def units(context: Context) -> dict[str, Unit]:
    """Return the checks, those that find most first."""
    families = CHECKED_FAMILIES[::7] if context.rehearse else CHECKED_FAMILIES
    methods = ["ngram", "eagle1"] if context.rehearse else list(DRAFTERS)
    assert set(families) <= FAMILIES.keys() | OTHER_MEANS.keys()
    new_tokens = 6 if context.rehearse else 24
    listed: dict[str, Unit] = {"waits, decoding": partial(check_waits, "cycle or extraction or planted", context.work)}
    for dtype in DTYPES:
        for family in families:
            check = partial(check_lossless, family, dtype, context.device, new_tokens)
            listed[f"lossless, {family}, {dtype}"] = check
    for method in methods:
        listed[f"conformance, {method}"] = partial(check_method, method, context.device)
    if context.rehearse:
        return listed
    # each kind compiles attention, which takes most of the time
    for kind in dict.fromkeys(name.replace(",", " ").split()[0] for name in HEADS):
        listed[f"waits, training {kind}"] = partial(check_waits, f"training_step and {kind}", context.work)
    return listed


def check_waits(expression: str, work: Path) -> Figures:
    """Run the tests of the host's waits that an expression chooses; without CUDA they are skipped."""
    report = work / f"waits-{os.getpid()}.xml"
    command = [sys.executable, "-m", "pytest", "tests/test_waits_on_cuda.py", "-k", expression]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: tests failed, which the report tells
        raise RuntimeError(f"pytest ended with status {done.returncode}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    cases = list(ElementTree.parse(report).iter("testcase"))
    skipped = [case for case in cases if case.find("skipped") is not None]
    failed = {case.get("name"): fault.get("message") for case in cases if (fault := case.find("failure")) is not None}
    passed = len(cases) - len(skipped) - len(failed)
    line = f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped"
    return {"line": line, "passed": passed, "skipped": len(skipped), "failed": failed}


def check_method(kind: str, device: torch.device) -> Figures:
    """Run what every method must hold, with target and head on the device."""
    # check_supervised_alone compares gradients bit by bit, which sums by atomic additions would spoil
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    outcomes = list(run_checks(kind, fast=True, device=device))
    torch.use_deterministic_algorithms(False)
    faults = {outcome.about: outcome.fault for outcome in outcomes if outcome.fault is not None}
    line = f"{len(outcomes) - len(faults)} of {len(outcomes)} checks hold"
    return {"line": line, "checks": len(outcomes), "faults": faults}


def make_drafters(target: Target) -> dict[str, Any]:
    """Return the drafters by name: untrained heads are right now and then, as the vocabulary is small."""
    drafters: dict[str, Any] = {"none": NoDrafter(), "ngram": NgramDrafter()}
    for kind in HEAD_KINDS:
        drafters[kind] = make_head(kind, target).bind(target.head)
    return drafters


def make_prompts() -> list[list[int]]:
    """Return prompts of several lengths that repeat themselves, so that n-grams draft."""
    halves = [random_tokens(length, seed=length) for length in PROMPT_LENGTHS]
    return [half + half for half in halves]


def check_lossless(family: str, dtype: str, device: torch.device, new_tokens: int) -> Figures:
    """Compare drafted answers, alone and in a batch, with those of the untouched model token by token."""
    model = build(family, getattr(torch, dtype)).to(device)
    target = Target(copy.deepcopy(model))
    drafters, prompts = make_drafters(target), make_prompts()
    identical = answers = accepted = 0
    differences = []
    for temperature in (0.0, 1.0):
        samplings = [Sampling(temperature, seed=3, request=row) for row in range(len(prompts))]
        expected = [
            decode_untouched(model, Choose(sampling), prompt, [], new_tokens)
            for sampling, prompt in zip(samplings, prompts, strict=True)
        ]
        for name, drafter in drafters.items():
            options: dict[str, Any] = {"budget": BUDGET, "max_new_tokens": new_tokens, "stop": []}
            alone = generate(target, drafter, prompts[0], sampling=samplings[0], **options)
            batch = generate(target, drafter, prompts, sampling=samplings, batch_size=len(prompts), **options)
            for row, trace in [(0, alone), *enumerate(batch)]:
                answers += 1
                accepted += sum(cycle.accepted for cycle in trace.checked().cycles)
                fault = find_divergence(
                    model,
                    SimpleNamespace(decode=str),  # there is no text to show
                    (family, name, row, temperature, 3),
                    expected[row],
                    trace.tokens,
                    steps_differ=target.reader.follows_steps,
                )
                identical += fault is None
                if fault is not None:
                    how = {"drafter": name, "temperature": temperature, "gap": fault.gap, "rounding": fault.rounding}
                    differences.append(how | {"near_tie": fault.is_rounding, "batch": trace is not alone})
    ties = [each for each in differences if each["near_tie"]]
    widest = max((each["gap"] for each in ties), default=0.0)
    line = f"{identical} of {answers} identical, {len(ties)} near-ties of at most {widest:.2g}"
    line += f", {len(differences) - len(ties)} other differences; {accepted} drafts accepted"
    return {"line": line, "identical": identical, "answers": answers, "accepted": accepted, "differences": differences}
