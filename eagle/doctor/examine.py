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
from torch import Tensor, nn

from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.device import in_dtype
from eagle.doctor.agreement import Agreement, TargetProbs, measure
from eagle.doctor.probes import Probe, list_missing, list_probes, list_removals
from eagle.doctor.server import read_server
from eagle.doctor.target_answers import (
    ENOUGH_TOKENS,
    answer_prompts,
    count_chains,
    limit_prompts,
    read_prompts,
    render_prompts,
    select_answers,
    split_answers,
)
from eagle.doctor.verdict import MAX_RATE_UNRELATED, MIN_NORM_SHIFT, Diagnosis, Effect, decide
from eagle.doctor.wiring import Wiring, draft_ids, find_tensors
from eagle.drafters.outside import UntrustedCode
from eagle.formats.reading.files import (
    CONFIG_BYTES,
    folder_at,
    has,
    read_json,
    read_tensors,
    read_text,
)
from eagle.formats.reading.foreign import Finding, inspect, read_head
from eagle.formats.reading.head_folder import EMBEDDING
from eagle.formats.reading.recognise import read_folder
from eagle.formats.reading.target_files import count_differing_rows
from eagle.log import describe_seconds, progress
from eagle.recipe.plain_yaml import parse_yaml
from eagle.target.target import Target
from eagle.training.reached import compare_with_curve, would_gain

LEVELS = 3  # of the chain that is examined; of a head that guesses several at once all
MAX_LEVELS = 8
CHOOSING = 3  # a third of the answers chooses what is confirmed on the others
GLANCE = 4  # a quarter of those tells which changes are looked at on all of them
LIKELY = 12  # changes that are looked at
CANDIDATES = 3  # changes that are confirmed
ROUNDS = 3  # two faults at once are both named; the third round says that there is no more


def examine(
    folder: str | Path,
    target_path: str,
    prompts: str | None = None,
    server: str | None = None,
    tokens: int | None = None,
) -> Diagnosis:
    """Read a head of any layout, let the target answer some prompts, and diagnose the head on the answers.

    Args:
        folder: The head's folder.
        target_path: The model that it drafts for.
        prompts: A JSONL file; the built-in prompts if it is None.
        server: The address of an engine whose acceptance is compared.
        tokens: Tokens that the target answers with in all, 5,760 by default. Fewer make an examination shorter and
            less sure.

    Raises:
        ValueError: The head, its target or the prompts cannot be read.
    """
    # what may be refused is read first, as an examination takes minutes
    counts = read_server(server) if server else None
    questions, enough = limit_prompts(read_prompts(prompts), tokens)
    head, refusal = open_head(folder, target_path)
    if refusal:
        return refusal
    findings = inspect(folder, target_path).findings
    target = Target.load(target_path)
    head = head.to(target.device)
    template_kwargs = read_template_kwargs(folder)
    prompt_tokens = render_prompts(target, questions, **template_kwargs)
    answers = answer_prompts(
        target,
        prompt_tokens,
        enough=enough,
        after_first=lambda *first: forecast(head, target, *first),
    )
    # faults that the files alone show
    fatal = [finding for finding in findings if finding.fatal]
    provenance = _read_provenance(folder)
    # the method, the supervised tokens that it was trained on, and the head, whose weights are counted
    trained = (head.settings.kind, _count_trained(provenance), head)
    diagnosis = diagnose(
        head,
        target,
        answers,
        fatal,
        target_head=borrow_embedding(folder, target),
        needs_more=would_gain(*trained),
    )
    assert diagnosis.figures is not None
    notes = [describe_prompts(len(questions), prompts)]
    notes += [str(finding) for finding in findings]
    notes += try_templates(
        head,
        target,
        questions,
        trained=template_kwargs,
        figures=diagnosis.figures,
        enough=enough,
    )
    # how often training or export saw a chain accepted down to each level
    rates, source = _read_expected(provenance)
    if rates:
        notes.append(
            f"{source}: acceptance length {1 + sum(rates):.3f} with chains of {len(rates)}"
        )
    comparison = compare_with_curve(*trained)
    if comparison:
        notes.append(comparison)
    if counts:
        decoded = count_chains(target, head, prompt_tokens, len(counts.per_position) or LEVELS)
        notes.append(
            counts.compare(decoded, f"This decoder, greedy on {prompts or 'the built-in prompts'},")
        )
    return replace(diagnosis, notes=(*diagnosis.notes, *notes))


def describe_prompts(count: int, file: str | None) -> str:
    """Return a note on whose prompts the target answered: acceptance differs from one kind of prompts to another."""
    if file is None:
        return (
            f"measured on the doctor's own {count} prompts, which may differ from your data: --prompts FILE takes "
            "yours"
        )
    return f"measured on {count} prompts of {file}"


def open_head(folder: str | Path, target_path: str) -> tuple[Any, Diagnosis | None]:
    """Return the head in its stored dtype, and None; or None, and a diagnosis that says why it cannot be read.

    Raises:
        ValueError: It is a method whose levels cannot be examined.
    """
    try:
        head = read_head(folder, target_path)
    # the user must decide on this; it is no fault of the head
    except UntrustedCode:
        raise
    except ValueError as error:
        findings = inspect(folder, target_path).findings
        reason = "; ".join(finding.what for finding in findings if finding.fatal) or str(error)
        return None, Diagnosis(f"broken: {reason}", notes=tuple(map(str, findings)))
    kind = head.settings.kind
    if not head.taps:
        raise ValueError(
            f"{folder} is a {kind}, expected a head that reads the target's features; eval.measure tells "
            f"how often a {kind} is right"
        )
    if type(head).draft_levels is TrainableDrafter.draft_levels:
        raise ValueError(
            f"{folder} is a {kind}, which has no draft_levels, expected a head whose levels can be seen: "
            "write draft_levels(batch, target_head, levels), as eagle/drafters/recurrent/unroll.py does"
        )
    # engines compute in the dtype of the matrices, so the head is examined in the commonest one
    tensors = read_tensors(folder_at(folder)).stored.values()
    dtypes = [
        tensor.dtype
        for tensor in tensors
        if tensor.dtype.is_floating_point and len(tensor.shape) > 1
    ]
    commonest = Counter(dtypes).most_common(1)
    return in_dtype(head, commonest[0][0] if commonest else torch.float32), None


def borrow_embedding(folder: str | Path, target: Target) -> TargetHead:
    """Return the target's embedding and LM head; if a head's folder has a different embedding, with that one.

    Engines read the embedding in the folder, so that figures with the target's would not be those of serving.
    """
    stored, _ = read_folder(folder_at(folder))
    weight = target.head.embedding.get_parameter("weight")
    entry = stored.entry(EMBEDDING)
    # no embedding, or one that engines cannot use in place of the target's
    if entry is None or entry.shape != tuple(weight.shape) or not entry.dtype.is_floating_point:
        return target.head
    rows = stored.load(EMBEDDING)
    token_ids = torch.arange(len(weight), device=weight.device)
    target_rows = target.head.embed(token_ids).detach().cpu()
    if not count_differing_rows(rows, target_rows):
        return target.head
    embedding = nn.Embedding.from_pretrained(rows.to(weight))
    # engines scale only the target's own embedding
    return replace(target.head, embedding=embedding, embed_scale=1.0)


def diagnose(
    head: TrainableDrafter,
    target: Target,
    answers: Batch,
    fatal: Sequence[Finding] = (),
    target_head: TargetHead | None = None,
    needs_more: bool = False,
) -> Diagnosis:
    """Find single changes that raise the head's acceptance in decoding, one after the other, until none does.

    Changes are chosen on some of the answers and confirmed on the others. Each undoes one possible fault of the head's
    conversion, such as swapped weights; one that helps beyond doubt names a fault.

    Args:
        head: The head as it is.
        target: The model that it drafts for.
        answers: The target's answers, with its states of all layers.
        fatal: Findings of `inspect`; those that drafts refute do not count.
        target_head: What the head borrows where it is served, the target's own by default.
        needs_more: Whether it was trained on so few tokens that what does not help yet is no fault.
    """
    wiring = make_wiring(head, target_head or target.head, answers, needs_more=needs_more)
    # `figures` are of the unchanged head; find_faults returns a wiring without the faults that it found
    notes = _describe(head, target, answers)
    notes.append(f"does not apply to this head: {', '.join(list_missing(wiring, target))}")
    figures = measure_timed(wiring, target, answers)
    wiring, faults, tried = find_faults(wiring, target, answers, figures)
    unchanged = [effect.probe.fault for effect in tried if effect.is_unchanged]
    if unchanged:
        notes.append(f"without any effect on what it guesses: {'; '.join(unchanged)}")
    stands, refuted = weigh_findings(fatal, tried)
    notes += refuted
    verdict = decide(figures, faults, stands, _norm_shift(head), needs_more=needs_more)
    # what it borrows has the embedding of its folder: measure it once with the target's own
    if wiring.target_head is not target.head:
        borrowing = measure(replace(wiring, target_head=target.head), answers, target.head)
        notes.append(
            "its folder brings an embedding that is not the target's: all figures are with it, as engines read it; "
            f"with the target's greedy τ is {borrowing.greedy_tau:.3f}, with sampled drafts {borrowing.sampled_tau:.3f}"
        )
    nearest = [effect for effect in tried if not effect.is_unchanged]
    return Diagnosis(verdict, tuple(faults), figures, tuple(nearest), tuple(notes))


def find_faults(
    wiring: Wiring, target: Target, answers: Batch, figures: Agreement
) -> tuple[Wiring, list[Effect], list[Effect]]:
    """Return the wiring with all found faults mended, these faults, and all further changes, the best first.

    Args:
        wiring: The head and what it borrows from the target, as changes are applied to them.
        target: The model that it drafts for.
        answers: The target's answers, a part to choose changes on, the rest to confirm them.
        figures: The agreement of the unchanged head with the target.
    """
    faults: list[Effect] = []
    is_untrained = _is_untrained(wiring.head, figures)
    choosing, confirming = split_answers(answers, CHOOSING)
    # greedily: the best change is kept before the next one is searched
    for _ in range(ROUNDS):
        tried = search_changes(wiring, target, choosing)
        likely = try_changes(
            wiring, [effect.probe for effect in tried[:CANDIDATES]], confirming, target
        )
        # what helps an untrained head is chance
        if is_untrained or not likely[0].is_sure:
            break
        fault, *likely = likely
        faults.append(fault)
        wiring = fault.probe.change(wiring)
    if not faults:
        # if no change helps, the fault may be a branch whose removal costs nothing
        removals = try_changes(wiring, list_removals(wiring), answers, target)
        faults = [effect for effect in removals if effect.is_idle or effect.is_sure]
    return wiring, faults, [*likely, *tried[CANDIDATES:]]


def count_levels(head: TrainableDrafter) -> int:
    """Return the number of levels that are examined: of a head that drafts several at once all, else a short chain."""
    return LEVELS if head.parts.levels is None else min(head.parts.levels, MAX_LEVELS)


def make_wiring(
    head: Any, target_head: TargetHead, answers: Batch, *, needs_more: bool = False
) -> Wiring:
    """Return the unchanged head as changes are tried on it; one of the answers shows whether it reads its drafts.

    Args:
        head: The head, which is set to evaluation.
        target_head: What it borrows.
        answers: Answers of the target.
        needs_more: Whether it was trained on so few tokens that what does not help yet is no fault.
    """
    wiring = Wiring(head.eval(), target_head, levels=count_levels(head), needs_more=needs_more)
    return replace(wiring, recurrent=wiring.reads_drafts(select_answers(answers, 0, 1)))


def measure_timed(wiring: Wiring, target: Target, answers: Batch) -> Agreement:
    """Return the unchanged head's agreement with the target on all answers, and print how long the search will take.

    The forecast multiplies the seconds of this one pass by the number of passes.
    """
    start = perf_counter()
    figures = measure(wiring, answers, target.head)
    count = len(list_probes(wiring, target))
    seconds = count_passes(count) * (perf_counter() - start)
    what = f"{count} single changes on {len(answers.lengths)} answers"
    print(
        f"{what}: about {describe_seconds(seconds)}, and as much again for each fault",
        file=sys.stderr,
        flush=True,
    )
    return figures


def count_passes(num_probes: int) -> float:
    """Return how often all answers are read in a search without faults, as a number of whole passes."""
    # each probe reads a glance, the likely ones the choosing third, the candidates the rest
    return num_probes / (CHOOSING * GLANCE) + min(num_probes, LIKELY) / CHOOSING + CANDIDATES


def forecast(head: Any, target: Target, first: Batch, seconds: float, num_rounds: int) -> None:
    """Print about how long an examination takes, after the first round of answers.

    Args:
        head: The head that is examined.
        target: The model that answers.
        first: The answers of the first round.
        seconds: What the round took.
        num_rounds: The rounds of answers that there will be.
    """
    wiring = make_wiring(head, target.head, first)
    start = perf_counter()
    # run only to be timed
    measure(wiring, first, target.head)
    # the seconds of a pass over the answers of all rounds
    a_pass = (perf_counter() - start) * num_rounds
    searching = a_pass * count_passes(len(list_probes(wiring, target)))
    print(
        f"about {describe_seconds(num_rounds * seconds + searching)} in all: {describe_seconds(num_rounds * seconds)} "
        f"until the target has answered, {describe_seconds(searching)} for the changes, and as much again for each "
        "fault; --tokens makes it shorter",
        file=sys.stderr,
        flush=True,
    )


def search_changes(wiring: Wiring, target: Target, answers: Batch) -> list[Effect]:
    """Return the effects of all single changes, best first.

    All are tried on a few answers, at a glance. The best of them are tried on all these answers and come first, unless
    they had no effect at the glance.
    """
    count = len(answers.lengths)
    # a quarter of the answers, at least three where there are as many
    glance = select_answers(answers, 0, max(count // GLANCE, min(count, CANDIDATES)))
    # there may be a hundred changes: a few answers show of most that they do not help
    tried = try_changes(wiring, list_probes(wiring, target), glance, target)
    likely = [effect.probe for effect in tried if not effect.is_unchanged][:LIKELY]
    unlikely = [effect for effect in tried if effect.probe not in likely]
    return [*try_changes(wiring, likely, answers, target), *unlikely]


def try_changes(
    wiring: Wiring, probes: Sequence[Probe], answers: Batch, target: Target
) -> list[Effect]:
    """Return the effect of each single change on the acceptance in these answers, best first.

    Each is tried alone, on a copy of the head in `wiring`; the smaller of its gains with greedy and with sampled drafts
    decides the order.
    """
    # the target's probs, which are the same for all changes
    reference = TargetProbs(answers, target.head)
    before = measure(wiring, answers, target.head, reference)
    effects = []
    for probe in progress(
        probes, f"changes on {len(answers.lengths)} answers", len(probes), unit="changes"
    ):
        after = measure(probe.change(wiring), answers, target.head, reference)
        effects.append(Effect(probe, before, after, needs_more=wiring.needs_more))
    return sorted(effects, key=lambda effect: -effect.min_share)


def weigh_findings(
    fatal: Sequence[Finding], tried: Sequence[Effect]
) -> tuple[list[str], list[str]]:
    """Return the fatal findings of `inspect` that stay, and notes on those that measured drafts refute.

    Only a finding on rope_theta can be refuted, by the effect of a change to the target's theta.
    """
    stands = []
    refuted = []
    with_target_rope = next((effect for effect in tried if effect.probe.kind == "rope"), None)
    # a config may state another theta than the target's because the head was trained with it
    for finding in fatal:
        is_rope = finding.what.startswith("rope_theta")
        if is_rope and with_target_rope is not None and with_target_rope.is_harmful:
            note = f"{finding.what}, which is no fault here: with the target's it drafts worse; {with_target_rope}"
            refuted.append(note)
        else:
            stands.append(finding.what)
    return stands, refuted


def try_templates(
    head: Any,
    target: Target,
    questions: Sequence[str],
    trained: dict[str, Any],
    figures: Agreement,
    enough: int = ENOUGH_TOKENS,
) -> list[str]:
    """Return notes on the acceptance length if a server renders the prompts with other chat template arguments.

    Args:
        head: The head as it is.
        target: The model that answers.
        questions: The texts of the prompts.
        trained: The arguments of the head's training, with which `figures` were measured.
        figures: The head's agreement on the usual prompts.
        enough: Tokens of all answers to a variant, after which no further round of answers begins.
    """
    template = str(getattr(target.tokenizer, "chat_template", None) or "")
    # no arguments at all, and thinking switched on or off where the template knows that switch
    variants: list[dict[str, Any]] = [{}] if trained else []
    if "enable_thinking" in template:
        variants += [{**trained, "enable_thinking": True}, {**trained, "enable_thinking": False}]
    usual = render_prompts(target, questions, **trained)
    notes = []
    for template_kwargs in variants:
        prompts = render_prompts(target, questions, **template_kwargs)
        # a template may ignore an argument
        if prompts != usual:
            answers = answer_prompts(target, prompts, enough=enough)
            after = measure(
                Wiring(head, target.head, levels=len(figures.hits)), answers, target.head
            )
            notes.append(
                f"prompts rendered with {json.dumps(template_kwargs)} instead of {json.dumps(trained)}: τ "
                f"{figures.greedy_tau:.3f} becomes {after.greedy_tau:.3f}, sampled drafts {figures.sampled_tau:.3f} "
                f"becomes {after.sampled_tau:.3f}"
            )
    return notes


def _is_untrained(head: Any, figures: Agreement) -> bool:
    """Return whether a head is hardly ever right and its norms are where training starts: what helps it is chance."""
    return (
        bool(_norm_gains(head))
        and figures.rates()[0] < MAX_RATE_UNRELATED
        and _norm_shift(head) <= MIN_NORM_SHIFT
    )


def _norm_gains(head: Any) -> list[Tensor]:
    """Return the gains (weight vectors) of the head's norms, in float32."""
    named = head.named_parameters()
    gains = [gain for name, gain in named if gain.dim() == 1 and "norm" in name]
    return [gain.detach().float() for gain in gains]


def _norm_shift(head: Any) -> float:
    """Return the root mean square distance of the norms' gains from 1, their initial value; 0 without norms."""
    gains = _norm_gains(head)
    if not gains:
        return 0.0
    distances = torch.cat(gains) - 1
    return float(distances.square().mean().sqrt())


@torch.no_grad()
def _describe(head: Any, target: Target, answers: Batch) -> list[str]:
    """Return notes that explain a low acceptance without being a fault: on the draft vocabulary and the LM head."""
    notes = []
    target_rows = target.head.weight
    draft_tokens = draft_ids(head)
    if draft_tokens is not None:
        # a damaged draft vocabulary may name tokens that do not exist
        draft_tokens = draft_tokens.clamp(0, target.vocab_size - 1)
        target_rows = target_rows[draft_tokens]
        answered = answers.tokens[answers.loss_mask.to(answers.tokens.device)]
        share = float(torch.isin(answered, draft_tokens).float().mean())
        notes.append(
            f"its {len(draft_tokens)} draft tokens are {share:.1%} of what the target said"
        )
    for name in find_tensors(head, "lm_head.weight"):
        weight = head.get_parameter(name).float()
        if weight.shape == target_rows.shape:
            similarity = float(torch.cosine_similarity(weight, target_rows.float()).mean())
            notes.append(
                f"its LM head's rows and the target's are alike by {similarity:.2f}: 1 where they are the target's "
                "own, near 0 where they are another target's or started at random"
            )
    return notes


def read_template_kwargs(folder: str | Path) -> dict[str, Any]:
    """Return the chat template's arguments of the head's training, if its folder has the recipe."""
    path = Path(folder)
    if not has(path, "recipe.yaml"):
        return {}
    try:
        recipe = parse_yaml(read_text(path, "recipe.yaml", CONFIG_BYTES), str(path))
        template_kwargs = recipe["data"]["template_kwargs"]
    except (ValueError, TypeError, KeyError):
        return {}
    return template_kwargs if isinstance(template_kwargs, dict) else {}


def _read_provenance(folder: str | Path) -> dict[str, Any]:
    """Return what the head's folder says of its training and export; {} where it says nothing."""
    is_there = (Path(folder) / "provenance.json").is_file()
    return read_json(folder_at(folder), "provenance.json") if is_there else {}


def _count_trained(provenance: dict[str, Any]) -> int:
    """Return the supervised tokens of the head's training, 0 if its folder does not tell."""
    tokens = provenance.get("tokens")
    # the file may be of another tool; `type`, as a bool is an instance of int
    return tokens if type(tokens) is int else 0


def _read_expected(provenance: dict[str, Any]) -> tuple[list[float], str]:
    """Return how often a chain was accepted down to each of its positions when that was recorded, and by what in words.

    The record is of the export, else of training's last validation. The list is empty where nothing was recorded.
    """
    exported = provenance.get("acceptance")
    rates = exported.get("per_position") if isinstance(exported, dict) else None
    if isinstance(rates, list) and rates and all(isinstance(rate, float) for rate in rates):
        return rates[:LEVELS], "when it was exported"
    validation = provenance.get("validation")
    if not isinstance(validation, dict):
        return [], ""
    levels = [validation.get(f"chain/{level}") for level in range(1, LEVELS + 1)]
    # a level's rate is that after the levels before it were accepted
    rates = list(accumulate((level for level in levels if isinstance(level, float)), mul))
    return rates, "in training's last validation"
