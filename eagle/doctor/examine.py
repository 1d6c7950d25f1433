"""Why a head accepts what it accepts: a few texts, many single changes, and a verdict with its figures."""

# M texts, K levels, N resamplings

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from eagle.data.examples import Batch
from eagle.device import in_dtype
from eagle.doctor.effects import Measured, Reading, measured
from eagle.doctor.own_token import first_level
from eagle.doctor.probes import Probe, probes
from eagle.doctor.server import served
from eagle.doctor.texts import answers, count_chains, prompts_of, rendered, split_texts
from eagle.doctor.verdict import Diagnosis, Effect, verdict
from eagle.drafters import DRAFTERS
from eagle.drafters.parts.blocks import TwoNormBlock
from eagle.drafters.parts.unroll import UnrolledDrafter
from eagle.formats.files import folder_at, read_json, read_tensors
from eagle.formats.foreign import Finding, inspect, read_head
from eagle.log import progress
from eagle.target.target import Target

LEVELS = 3  # of the chain that is judged
CHOOSING = 3  # a third of the texts chooses what is confirmed on the others
CANDIDATES = 3  # that are confirmed
ROUNDS = 3  # two faults at once are both named; the third round says that there is no more
RESAMPLED = 1000  # times, for an interval
TOKENS = 96  # of an answer
HEATS = (0.0, *[1.0] * 11)  # of the answers to each prompt; greedy ones repeat themselves
PLACES = 5760  # tokens of all answers, after which none is asked for again: twelve prompts, five full answers each


def examine(head: str | Path, target: str, prompts: str | None = None, server: str | None = None) -> Diagnosis:
    """Read a head of any layout, let the target answer some prompts, and tell what keeps the head from agreeing."""
    counted, asked = served(server) if server else None, prompts_of(prompts)
    _check_reads_features(head)
    found = inspect(head, target).findings
    drafter, refused = opened(head, target)
    if refused:
        return refused
    model, kwargs = Target.load(target), _template_kwargs(head)
    drafter = drafter.to(model.device)
    prompt_tokens = rendered(model, asked, **kwargs)
    texts = answers(model, prompt_tokens, TOKENS, HEATS, PLACES)
    about = diagnosed(drafter, model, texts, [one for one in found if one.fatal])
    assert about.figures is not None
    notes = [*map(str, found), *template(drafter, model, asked, kwargs, about.figures)]
    expected = _expected(head)
    if expected:
        notes.append(f"{expected[1]}: acceptance length {1 + sum(expected[0]):.3f} with chains of {len(expected[0])}")
    if counted:
        kept = count_chains(model, drafter, prompt_tokens, len(counted.per_position) or LEVELS, TOKENS)
        notes.append(counted.beside(kept, f"This decoder, greedy on {prompts or 'the built-in prompts'},"))
    return replace(about, notes=(*about.notes, *notes))


def _check_reads_features(head: str | Path) -> None:
    """Refuses what this project trains and is no head: its faults are of another kind."""
    folder = folder_at(head)
    settings = read_json(folder, "config.json").get("settings") if (folder / "config.json").is_file() else None
    kind = settings.get("kind") if isinstance(settings, dict) else None
    method = DRAFTERS.get(kind) if isinstance(kind, str) else None
    if method is not None and not issubclass(method, UnrolledDrafter):
        raise ValueError(
            f"{head} is a {kind}, expected a head that reads the target's features; eval.measure tells how "
            f"often a {kind} is right"
        )


def opened(head: str | Path, target: str) -> tuple[Any, Diagnosis | None]:
    """The head in the dtype that it is stored in, or what keeps it from being read."""
    try:
        return in_dtype(read_head(head, target), _stored(head)), None
    except ValueError as error:
        found = inspect(head, target).findings
        named = "; ".join(one.what for one in found if one.fatal) or str(error)
        return None, Diagnosis(f"broken: {named}", notes=tuple(map(str, found)))


def diagnosed(head: Any, target: Target, texts: Batch, fatal: Sequence[Finding] = ()) -> Diagnosis:
    """Which single changes raise the head's acceptance, one after the other, until none does.

    They are chosen on some of the texts and confirmed on the others, which had no part in choosing them.
    """
    reading, faults = Reading(head.eval(), target.head), []
    first, (choosing, confirming) = measured(reading, texts, target.head, LEVELS), split_texts(texts, CHOOSING)
    for _ in range(ROUNDS):
        tried = try_changes(reading, probes(reading, target), choosing, target)
        likely = try_changes(reading, [probe for _, probe in tried[:CANDIDATES]], confirming, target)
        best, mend = likely[0]
        if not best.sure:
            break
        faults.append(best)
        reading = mend.change(reading)
    elsewhere = [one.what for one in fatal if "target" in one.what and "rope" not in one.what]
    said = verdict(first, faults, elsewhere, _moved(head))
    nearest = (*(one for one, _ in likely), *(one for one, _ in tried[CANDIDATES:]))
    return Diagnosis(said, tuple(faults), first, nearest, tuple(_remarks(head, target, texts)))


def try_changes(reading: Reading, asked: Sequence[Probe], texts: Batch, target: Target) -> list[tuple[Effect, Probe]]:
    """What every single change does on these texts, the best first."""
    before, found = measured(reading, texts, target.head, LEVELS), []
    for probe in progress(asked, "single changes", len(asked)):
        changed = measured(probe.change(reading), texts, target.head, LEVELS)
        found.append((effect(probe.kind, probe.fault, before, changed), probe))
    return sorted(found, key=lambda pair: -pair[0].gain)


def effect(kind: str, fault: str, before: Measured, after: Measured) -> Effect:
    """The head with a change beside the head as it was, paired by text."""
    drawn, along = (before.soft(), after.soft()), (before.greedy(), after.greedy())
    gain, count = drawn[1] - drawn[0], len(drawn[0])
    again = torch.randint(count, (RESAMPLED, count), generator=torch.Generator().manual_seed(0))
    tau_gain = _lengths(after.counts()[again].sum(1)) - _lengths(before.counts()[again].sum(1))
    return Effect(
        kind,
        fault,
        (float(drawn[0].mean()), float(drawn[1].mean())),
        _interval(gain[again].mean(1)),
        (before.tau, after.tau),
        _interval(tau_gain),
        (float(along[0].mean()), float(along[1].mean())),
        (_standard_errors(gain), _standard_errors(along[1] - along[0])),
        (before.rates()[0], after.rates()[0]),
        after.held,
    )


def _standard_errors(gain: Tensor) -> float:
    """How many of its standard errors the mean of [M] is above zero."""
    return float(gain.mean() / (gain.std() / len(gain) ** 0.5).clamp(min=1e-12))


def _interval(values: Tensor) -> tuple[float, float]:
    low, high = values.quantile(values.new_tensor([0.025, 0.975])).tolist()
    return low, high


def _lengths(counts: Tensor) -> Tensor:
    """[N], acceptance lengths from how many slots reach and pass each level, [N, 2, K]."""
    return 1 + (counts[:, 1] / counts[:, 0].clamp(min=1)).cumprod(-1).sum(-1)


def template(head: Any, target: Target, asked: Sequence[str], trained: dict[str, Any], figures: Any) -> list[str]:
    """What acceptance becomes where a server renders the prompts with other arguments of the chat template."""
    known = str(getattr(target.tokenizer, "chat_template", None) or "")
    others: list[dict[str, Any]] = [{}] if trained else []
    if "enable_thinking" in known:
        others += [{**trained, "enable_thinking": on} for on in (True, False)]
    usual, notes = rendered(target, asked, **trained), []
    for other in others:
        prompts = rendered(target, asked, **other)
        if prompts != usual:
            texts = answers(target, prompts, TOKENS, HEATS, PLACES)
            found = measured(Reading(head, target.head), texts, target.head, LEVELS)
            was, becomes = float(figures.soft().mean()), float(found.soft().mean())
            notes.append(
                f"prompts rendered with {json.dumps(other)} instead of {json.dumps(trained)}: τ {figures.tau:.3f} "
                f"becomes {found.tau:.3f}, drawn drafts {was:.3f} becomes {becomes:.3f}"
            )
    return notes


def _moved(head: Any) -> float:
    """How far its norms' gains are from 1 in the mean, where they start."""
    gains = [part.detach().float() for name, part in head.named_parameters() if part.dim() == 1 and "norm" in name]
    return float((torch.cat(gains) - 1).square().mean().sqrt())


@torch.no_grad()
def _remarks(head: Any, target: Target, texts: Batch) -> list[str]:
    """Figures that explain without being a fault."""
    notes, drafts = [], head.drafts
    if drafts is not None:
        drafts = drafts.clamp(0, target.vocab_size - 1)
        said = torch.isin(texts.tokens[texts.loss_mask.to(texts.tokens.device)], drafts)
        notes.append(f"its {len(drafts)} draft tokens are {float(said.float().mean()):.1%} of what the target said")
    if isinstance(head.layers[0], TwoNormBlock):
        own = float(first_level(head, target.head, texts)[0].mean(-1).max())
        notes.append(
            f"the part of its attention that looks at its own token most spends {own:.0%} on it: what it knows of that "
            "token comes from there, and heads that agree well spend half or more"
        )
    if hasattr(head, "lm_head"):
        rows = target.head.weight if drafts is None else target.head.weight[drafts]
        alike = float(torch.cosine_similarity(head.lm_head.weight.float(), rows.float()).mean())
        notes.append(
            f"its LM head's rows and the target's are alike by {alike:.2f}: 1 where they are the target's own, near 0 "
            "where they are another target's or started at random"
        )
    return notes


def _stored(head: str | Path) -> torch.dtype:
    """The dtype that a head's weights were written in, and that engines compute in."""
    stored = read_tensors(folder_at(head)).stored
    return next((one.dtype for name, one in stored.items() if name.endswith("fc.weight")), torch.float32)


def _template_kwargs(head: str | Path) -> dict[str, Any]:
    """The chat template's arguments that the head was trained under, where its folder has the recipe."""
    path = Path(head) / "recipe.yaml"
    try:
        recipe = yaml.safe_load(path.read_text()) if path.is_file() else None
        found = recipe["data"]["template_kwargs"]  # type: ignore[index]
    except (yaml.YAMLError, TypeError, KeyError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _expected(head: str | Path) -> tuple[list[float], str] | None:
    """How often a chain was kept up to each place, as export or training wrote it down."""
    made = read_json(folder_at(head), "provenance.json") if (Path(head) / "provenance.json").is_file() else {}
    sections = (made.get(name) for name in ("acceptance", "validation"))
    exported, validation = (section if isinstance(section, dict) else {} for section in sections)
    rates = exported.get("per_position")
    if isinstance(rates, list) and rates and all(isinstance(rate, float) for rate in rates):
        return rates[:LEVELS], "when it was exported"
    levels = [validation.get(f"chain/{depth}") for depth in range(1, LEVELS + 1)]
    known = [level for level in levels if isinstance(level, float)]
    return ([*accumulate(known, mul)], "in training's last validation") if known else None
