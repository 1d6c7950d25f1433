"""Examine a head: let the target answer a few prompts, try many single changes, and give a verdict with figures."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.device import in_dtype
from eagle.doctor.agreement import Agreement, Reference, measure
from eagle.doctor.contexts import examine_contexts
from eagle.doctor.own_embedding import borrow_embedding
from eagle.doctor.own_token import own_token_shares
from eagle.doctor.probes import Probe, list_missing, list_probes, list_removals
from eagle.doctor.server import read_server
from eagle.doctor.texts import answer_prompts, count_chains, read_prompts, render_prompts, select_texts, split_texts
from eagle.doctor.verdict import LOST, MOVED, Diagnosis, Effect, decide
from eagle.doctor.wiring import Wiring, draft_ids, find_tensors
from eagle.drafters.outside import UntrustedCode
from eagle.formats.reading.files import CONFIG_BYTES, folder_at, has, read_json, read_tensors, read_text
from eagle.formats.reading.foreign import Finding, inspect, read_head
from eagle.log import progress
from eagle.recipe.plain_yaml import parse_yaml
from eagle.target.target import Target
from eagle.training.reached import describe_reached

LEVELS = 3  # of the chain that is examined; of a head that guesses several at once all
MOST_LEVELS = 8
CHOOSING = 3  # a third of the texts chooses what is confirmed on the others
GLANCE = 4  # a quarter of those tells which changes are looked at on all of them
LIKELY, CANDIDATES = 12, 3  # that are looked at, and that are confirmed
ROUNDS = 3  # two faults at once are both named; the third round says that there is no more


def examine(folder: str | Path, target_path: str, prompts: str | None = None, server: str | None = None) -> Diagnosis:
    """Read a head of any layout, let the target answer some prompts, and diagnose the head on the answers."""
    counts, questions = read_server(server) if server else None, read_prompts(prompts)
    drafter, refusal = open_head(folder, target_path)
    if refusal:
        return refusal
    findings = inspect(folder, target_path).findings
    target, template_kwargs = Target.load(target_path), read_template_kwargs(folder)
    drafter, frozen = drafter.to(target.device), borrow_embedding(folder, target)
    prompt_tokens = render_prompts(target, questions, **template_kwargs)
    texts = answer_prompts(target, prompt_tokens)
    diagnosis = diagnose(drafter, target, texts, [finding for finding in findings if finding.fatal], frozen)
    assert diagnosis.figures is not None
    notes = [*map(str, findings), *try_templates(drafter, target, questions, template_kwargs, diagnosis.figures)]
    if expected := _read_expected(folder):
        rates, source = expected
        notes.append(f"{source}: acceptance length {1 + sum(rates):.3f} with chains of {len(rates)}")
    if reached := describe_reached(drafter.settings.kind, _read_tokens(folder), drafter):
        notes.append(reached)
    if counts:
        decoded_chains = count_chains(target, drafter, prompt_tokens, len(counts.per_position) or LEVELS)
        notes.append(counts.compare(decoded_chains, f"This decoder, greedy on {prompts or 'the built-in prompts'},"))
    return replace(diagnosis, notes=(*diagnosis.notes, *notes))


def open_head(folder: str | Path, target_path: str) -> tuple[Any, Diagnosis | None]:
    """The head in its stored dtype, or the reason why it cannot be read."""
    try:
        head = read_head(folder, target_path)
    except UntrustedCode:
        raise
    except ValueError as error:
        findings = inspect(folder, target_path).findings
        reason = "; ".join(finding.what for finding in findings if finding.fatal) or str(error)
        return None, Diagnosis(f"broken: {reason}", notes=tuple(map(str, findings)))
    if not head.taps:
        raise ValueError(
            f"{folder} is a {head.settings.kind}, expected a head that reads the target's features; eval.measure tells "
            f"how often a {head.settings.kind} is right"
        )
    if type(head).draft_levels is TrainableDrafter.draft_levels:
        raise ValueError(
            f"{folder} is a {head.settings.kind}, which has no draft_levels, expected a head whose levels can be seen: "
            "write draft_levels(batch, frozen, levels), as eagle/drafters/recurrent/unroll.py does"
        )
    stored = read_tensors(folder_at(folder)).stored.values()
    dtypes = Counter(tensor.dtype for tensor in stored if tensor.dtype.is_floating_point and len(tensor.shape) > 1)
    return in_dtype(head, dtypes.most_common(1)[0][0] if dtypes else torch.float32), None  # engines compute in it


def diagnose(
    head: TrainableDrafter,
    target: Target,
    texts: Batch,
    fatal: Sequence[Finding] = (),
    frozen: TargetHead | None = None,
) -> Diagnosis:
    """Find single changes that raise the head's acceptance in decoding, one after the other, until none does.

    Changes are chosen on some of the texts and confirmed on the others. `frozen` is what the head borrows where it is
    served, the target's own by default; `fatal` are findings of `inspect`, of which those that no draft refutes count.
    """
    wiring, faults = Wiring(head.eval(), frozen or target.head, levels=count_levels(head)), list[Effect]()
    wiring = replace(wiring, recurrent=wiring.reads_drafts(select_texts(texts, 0, 1)))
    notes = [f"does not apply to this head: {', '.join(list_missing(wiring, target))}"]
    figures, (choosing, confirming) = measure_timed(wiring, target, texts), split_texts(texts, CHOOSING)
    for _ in range(ROUNDS):
        tried = search_changes(wiring, target, choosing)
        likely = try_changes(wiring, [effect.probe for effect in tried[:CANDIDATES]], confirming, target)
        if not likely[0].is_sure or _is_untrained(head, figures):
            break
        faults.append(likely[0])
        wiring = likely[0].probe.change(wiring)
    tried = [*likely, *tried[CANDIDATES:]]
    idle = try_changes(wiring, list_removals(wiring, target), texts, target) if not faults else []
    faults += [effect for effect in idle if effect.is_idle or effect.is_sure]
    if same := [effect.probe.fault for effect in tried if effect.is_none]:
        notes.append(f"without any effect on what it guesses: {'; '.join(same)}")
    stands, refuted = weigh_findings(fatal, tried)
    notes += refuted
    verdict = decide(figures, faults, stands, _norm_shift(head))
    fading, contexts = examine_contexts(wiring, target, texts, LEVELS)
    verdict = verdict if fading is None else f"{verdict}; {fading}"
    notes += contexts
    if wiring.frozen is not target.head:
        other = measure(replace(wiring, frozen=target.head), texts, target.head, wiring.levels)
        notes.append(
            "its folder brings an embedding that is not the target's: all figures are with it, as engines read it; "
            f"with the target's greedy τ is {other.decoded_tau:.3f}, with drawn drafts {other.drawn_tau:.3f}"
        )
    nearest = tuple(effect for effect in tried if not effect.is_none)
    return Diagnosis(verdict, tuple(faults), figures, nearest, (*_describe(head, target, texts), *notes))


def count_levels(head: TrainableDrafter) -> int:
    """The number of levels that are examined."""
    return LEVELS if head.parts.levels is None else min(head.parts.levels, MOST_LEVELS)


def measure_timed(wiring: Wiring, target: Target, texts: Batch) -> Agreement:
    """The head's agreement, and on the screen a forecast of how long its examination takes."""
    start = perf_counter()
    figures = measure(wiring, texts, target.head, wiring.levels)
    seconds, count = perf_counter() - start, len(list_probes(wiring, target))
    whole = (count / (CHOOSING * GLANCE) + min(count, LIKELY) / CHOOSING + CANDIDATES) * seconds
    what = f"{count} single changes on {len(texts.lengths)} answers"
    print(f"{what}: about {whole:.0f} s, and as much again for each fault", file=sys.stderr, flush=True)
    return figures


def search_changes(wiring: Wiring, target: Target, texts: Batch) -> list[Effect]:
    """The effects of all single changes, best first; those that look promising on a part of the texts stand in front.

    What does nothing at all on that part is not looked at again.
    """
    glance = select_texts(texts, 0, max(len(texts.lengths) // GLANCE, min(len(texts.lengths), CANDIDATES)))
    tried = try_changes(wiring, list_probes(wiring, target), glance, target)
    likely = [effect.probe for effect in tried if not effect.is_none][:LIKELY]
    others = [effect for effect in tried if effect.probe not in likely]
    return [*try_changes(wiring, likely, texts, target), *others]


def try_changes(wiring: Wiring, probes: Sequence[Probe], texts: Batch, target: Target) -> list[Effect]:
    """The effect of every single change on these texts, best first."""
    reference = Reference(texts, target.head)
    before = measure(wiring, texts, target.head, wiring.levels, reference)
    shown = progress(probes, f"changes on {len(texts.lengths)} answers", len(probes), unit="changes")
    after = (measure(probe.change(wiring), texts, target.head, wiring.levels, reference) for probe in shown)
    effects = [Effect(probe, before, agreement) for probe, agreement in zip(probes, after, strict=True)]
    return sorted(effects, key=lambda effect: -effect.least)


def weigh_findings(fatal: Sequence[Finding], tried: Sequence[Effect]) -> tuple[list[str], list[str]]:
    """The findings of `inspect` that count, and a note where drafts refute the one that drafts can refute."""
    stands, refuted = list[str](), list[str]()
    as_target = next((effect for effect in tried if effect.probe.kind == "rope"), None)
    for what in (finding.what for finding in fatal):
        if what.startswith("rope_theta") and as_target is not None and as_target.is_harmful:
            refuted.append(f"{what}, which is no fault here: with the target's it drafts worse; {as_target}")
        else:
            stands.append(what)
    return stands, refuted


def try_templates(
    head: Any, target: Target, questions: Sequence[str], trained: dict[str, Any], figures: Agreement
) -> list[str]:
    """The acceptance if a server renders the prompts with other arguments of the chat template."""
    template = str(getattr(target.tokenizer, "chat_template", None) or "")
    others: list[dict[str, Any]] = [{}] if trained else []
    if "enable_thinking" in template:
        others += [{**trained, "enable_thinking": on} for on in (True, False)]
    usual, notes = render_prompts(target, questions, **trained), []
    for other in others:
        prompts = render_prompts(target, questions, **other)
        if prompts != usual:
            after = measure(Wiring(head, target.head), answer_prompts(target, prompts), target.head, len(figures.hits))
            notes.append(
                f"prompts rendered with {json.dumps(other)} instead of {json.dumps(trained)}: τ "
                f"{figures.decoded_tau:.3f} becomes {after.decoded_tau:.3f}, drawn drafts {figures.drawn_tau:.3f} "
                f"becomes {after.drawn_tau:.3f}"
            )
    return notes


def _is_untrained(head: Any, figures: Agreement) -> bool:
    """Whether a head knows nothing and its norms stand where training starts: what helps it is chance."""
    has_norms = any(part.dim() == 1 and "norm" in name for name, part in head.named_parameters())
    return has_norms and figures.rates()[0] < LOST and _norm_shift(head) <= MOVED


def _norm_shift(head: Any) -> float:
    """The mean distance of the norms' gains from 1, their initial value; 0 for a head without norms."""
    gains = [part.detach().float() for name, part in head.named_parameters() if part.dim() == 1 and "norm" in name]
    return float((torch.cat(gains) - 1).square().mean().sqrt()) if gains else 0.0


@torch.no_grad()
def _describe(head: Any, target: Target, texts: Batch) -> list[str]:
    """Figures that explain without being a fault."""
    notes, drafts, rows = [], draft_ids(head), target.head.weight
    if drafts is not None:
        drafts = drafts.clamp(0, target.vocab_size - 1)
        rows = rows[drafts]
        in_vocab = torch.isin(texts.tokens[texts.loss_mask.to(texts.tokens.device)], drafts)
        share = float(in_vocab.float().mean())
        notes.append(f"its {len(drafts)} draft tokens are {share:.1%} of what the target said")
    shares = own_token_shares(head, target.head, texts)
    if shares is not None:
        notes.append(
            f"the part of its attention that looks at its own token most spends {float(shares.mean(-1).max()):.0%} on "
            "it: what it knows of that token comes from there, and heads that agree well spend half or more"
        )
    for name in find_tensors(head, "lm_head.weight"):
        weight = head.get_parameter(name).float()
        if weight.shape == rows.shape:
            alike = float(torch.cosine_similarity(weight, rows.float()).mean())
            notes.append(
                f"its LM head's rows and the target's are alike by {alike:.2f}: 1 where they are the target's own, "
                "near 0 where they are another target's or started at random"
            )
    return notes


def read_template_kwargs(folder: str | Path) -> dict[str, Any]:
    """The chat template's arguments of the head's training, if its folder has the recipe."""
    path = Path(folder)
    try:
        recipe = parse_yaml(read_text(path, "recipe.yaml", CONFIG_BYTES), str(path)) if has(path, "recipe.yaml") else {}
        template_kwargs = recipe["data"]["template_kwargs"]
    except (ValueError, TypeError, KeyError):
        return {}
    return template_kwargs if isinstance(template_kwargs, dict) else {}


def _read_tokens(folder: str | Path) -> int:
    """The supervised tokens that its training learned from, if its folder says so."""
    tokens = _read_provenance(folder).get("tokens")
    return tokens if type(tokens) is int else 0


def _read_provenance(folder: str | Path) -> dict[str, Any]:
    there = (Path(folder) / "provenance.json").is_file()
    return read_json(folder_at(folder), "provenance.json") if there else {}


def _read_expected(folder: str | Path) -> tuple[list[float], str] | None:
    """The acceptance at each place of a chain, as the export or training recorded it."""
    provenance = _read_provenance(folder)
    sections = (provenance.get(name) for name in ("acceptance", "validation"))
    exported, validation = (section if isinstance(section, dict) else {} for section in sections)
    rates = exported.get("per_position")
    if isinstance(rates, list) and rates and all(isinstance(rate, float) for rate in rates):
        return rates[:LEVELS], "when it was exported"
    levels = [validation.get(f"chain/{depth}") for depth in range(1, LEVELS + 1)]
    stated = [level for level in levels if isinstance(level, float)]
    return ([*accumulate(stated, mul)], "in training's last validation") if stated else None
