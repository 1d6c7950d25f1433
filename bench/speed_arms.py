"""What decodes in the tables of speed: a target at the cost of a large one, drafters widened in step, transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import StoppingCriteria

from bench.widen import find_mlps, widen, widened_model
from eagle import Budget, Sampling, Target, stream
from eagle.core.budget import Policy
from eagle.core.drafter import Drafter
from eagle.core.trace import Trace
from eagle.decoding.cycle_times import bare_costs
from eagle.decoding.forward_costs import Costs
from eagle.decoding.goodput import Goodput
from eagle.drafters.draft_model import DraftModel
from eagle.log import progress
from eagle.recipe import Recipe
from eagle.target.weights.packed import pack_model
from eval.costs import NOT_DRAFTING
from eval.load_run import load_named, load_target
from eval.replay import answer
from eval.tune import Tuning, answer_prompts, chain, search

SHAPES = {
    "chain 3": chain(3),
    "chain 7": chain(7),
    "dynamic 8": Budget(8, 4, 4),
    "dynamic 25": Budget(25, 6, 6),
    "dynamic 60": Budget(60, 7, 10),
}
TUNED, POLICY = "tuned", "Goodput"
CANDIDATES = [
    *map(chain, range(1, 9)),
    *(
        Budget(nodes, depth, top_k)
        for nodes in (4, 6, 8, 12, 16, 25, 40)
        for depth in (2, 3, 4, 6)
        for top_k in (2, 4)
        if max(depth, top_k) <= nodes <= top_k + (depth - 1) * top_k**2
    ),
]
PLAIN, THEIRS = "none", "transformers"
LOOKUP, ASSISTED = f"{THEIRS}, prompt lookup", f"{THEIRS}, assisted"
# of `generate`; the default of assisted generation drafts until the draft model is unsure, at most 20 tokens
PEERS: dict[str, dict[str, Any]] = {
    THEIRS: {},
    LOOKUP: {"prompt_lookup_num_tokens": 10},
    ASSISTED: {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4},
    f"{ASSISTED} by 5": {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0},
}
HEAD_SHARE, MODEL_SHARE = 1 / 32, 1 / 16  # of the target's weights: an EAGLE head's of an 8B, a 0.5B's of an 8B
POLICY_CONTEXT = 128  # behind which the cycles of batches are timed
COST_SIZES = (1, 2, 3, 4, 5, 7, 9, 13, 17, 26, 41, 61)


class Setting(NamedTuple):
    """A target and how it is asked."""

    size: str  # as "1 B"; "" leaves the model as it is
    dtype: str
    threads: int
    context: int  # tokens of a prompt; 0: its own
    batch: int
    temperature: float


class Watch(StoppingCriteria):
    """Seconds from the moment at which every text has a token, which leaves reading the prompts out."""

    def __init__(self) -> None:
        self.opened, self.began = process_time(), (0.0, 0.0, 0)

    def begin(self, tokens: int) -> None:
        """Note that all requests have a token, and so many tokens together."""
        # assisted generation of older versions asks about drafts, too, before it knows which are kept
        if not self.began[2] or tokens < self.began[2]:
            self.began = process_time(), perf_counter(), tokens

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Transformers asks after each step whether to stop."""
        self.begin(input_ids.numel())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def figures(self, tokens: int) -> dict[str, Any]:
        """Tokens and seconds since then."""
        cpu, wall, before = self.began
        seconds = {"cpu": process_time() - cpu, "wall": perf_counter() - wall, "prefill": cpu - self.opened}
        return {"tokens": tokens - before, **{name: round(value, 4) for name, value in seconds.items()}}


Timed = tuple[dict[str, Any], list[list[int]]]  # figures and answers


def decode_here(
    target: Target, drafter: Drafter, prompts: list[list[int]], plan: Any, sampling: Sampling, limit: int
) -> Timed:
    """Figures and answers of this project's decoder; one text is decoded without a batch."""
    traces = [Trace() for _ in prompts]
    target.forget()
    rows: dict[str, Any] = {"batch_size": len(prompts)} if len(prompts) > 1 else {}
    prompt: Any = prompts if rows else prompts[0]
    written: Any = traces if rows else traces[0]
    watch = Watch()
    options = {"budget": plan, "sampling": sampling, "max_new_tokens": limit, "stop": [], **rows}
    for _ in stream(target, drafter, prompt, trace=written, **options):
        if all(trace.tokens for trace in traces):
            watch.begin(sum(len(trace.tokens) for trace in traces))
    answers = [trace.checked().tokens for trace in traces]
    cycles = [cycle for trace in traces for cycle in trace.cycles]
    counts = {"cycles": len(cycles), "committed": sum(cycle.committed for cycle in cycles)}
    return watch.figures(sum(map(len, answers))) | counts, answers


def decode_there(model: Any, prompts: list[list[int]], sampling: Sampling, limit: int, **options: Any) -> Timed:
    """Figures and answers of transformers' `generate`, prompts padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    draws = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
    options |= draws if sampling.temperature else {"do_sample": False}
    torch.manual_seed(sampling.request)
    watch = Watch()
    ends = {"max_new_tokens": limit, "eos_token_id": None, "pad_token_id": 0}
    ids, mask = ids.to(model.device), mask.to(model.device)
    text = model.generate(ids, attention_mask=mask, stopping_criteria=[watch], **ends, **options)
    return watch.figures(text.numel()), text[:, width:].tolist()


def widen_drafter(drafter: Drafter, weights: float) -> float:
    """Widen a head or a draft model to the share of a target of so many weights that is usual; the share that it has.

    A head without an MLP, or a larger one, stays as it is.
    """
    if not isinstance(drafter, nn.Module):
        return 0.0
    goal = weights * (MODEL_SHARE if isinstance(drafter, DraftModel) else HEAD_SHARE)
    if find_mlps(drafter) and count_weights(drafter) < goal:
        widen(drafter, goal)
    return count_weights(drafter) / weights


def count_weights(module: nn.Module) -> int:
    """Numbers in all parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def cycle_cost(costs: Costs, drafter: Drafter, budget: Budget) -> float | None:
    """A cycle over a forward of one token, by bare forwards; None for drafters that take none."""
    rows, context = costs.rows(drafter, budget, 2) if budget.nodes else (), costs.contexts[0]
    return None if rows is None else round(costs.cycle(budget.nodes, rows, context) / costs.read(1, context), 3)


class Costly:
    """A model widened to a size, and whatever decodes with it."""

    def __init__(self, recipe: Recipe, size: str, dtype: str, plans: Path) -> None:
        section = recipe.target.model_copy(update={"dtype": dtype})
        self.recipe, self.name = recipe.model_copy(update={"target": section}), f"{size}, {dtype}"
        self.small = load_target(self.recipe, packed=False)
        self.plans, self.target, self.plain = plans, self.small, self.small.model
        if size:
            self.plain = widened_model(self.small.model, 1e9 * float(size.split()[0]))
            self.target = Target(self.plain, self.small.tokenizer)
        if section.packed or (section.packed is None and dtype == "bfloat16"):  # as Target.load does
            model = copy.deepcopy(self.plain)
            pack_model(model)
            self.target = Target(model, self.small.tokenizer)
        self.weights = count_weights(self.plain)
        self.shares: dict[str, float] = {}
        self.drafter = lru_cache(maxsize=None)(self._load_drafter)
        self.policy = lru_cache(maxsize=None)(self._measure_policy)

    def _load_drafter(self, name: str) -> Drafter:
        drafter = load_named(self.recipe, self.target, name)
        if self.plain is not self.small.model:
            self.shares[name] = widen_drafter(drafter, self.weights)
        return drafter

    def side(self, arm: str, setting: Setting, prompts: Sequence[list[int]]) -> Callable[..., Timed]:
        """The arm as a function of prompts, a sampling and a limit of tokens; what it needs is made and warmed up."""
        if arm in PEERS:
            return lambda *asked: self._ask_peer(arm, *asked)
        name, _, shape = arm.partition(", ")
        drafter = self.drafter(name) if shape else load_named(self.recipe, self.target, PLAIN)
        plan = self.plan(name, shape, setting, prompts) if shape else None
        return lambda *asked: decode_here(self.target, drafter, asked[0], plan, *asked[1:])

    def _ask_peer(self, arm: str, *asked: Any) -> Timed:
        if not arm.startswith(ASSISTED):
            return decode_there(self.plain, *asked, **PEERS[arm])
        assistant = self._assistant()
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        for key, value in PEERS[arm].items():
            setattr(assistant.generation_config, key, value)
        return decode_there(self.plain, *asked, assistant_model=assistant)

    def plan(self, name: str, shape: str, setting: Setting, prompts: Sequence[list[int]]) -> Budget | Policy:
        """The budget of that name, or a policy that has learned nothing yet."""
        if shape in SHAPES:
            return SHAPES[shape]
        if shape == TUNED:
            return Budget(**self.tuning(name, setting)["tuned"])
        costs, budget = self.policy(
            name, setting._replace(temperature=0.0), tuple(map(tuple, prompts[: setting.batch]))
        )
        return Goodput.of_costs(costs, budget)

    def _measure_policy(self, name: str, setting: Setting, prompts: tuple[tuple[int, ...], ...]) -> Any:
        """Costs of cycles and the budget within which a policy stays: one text the tuned one, several a chain of 3."""
        alone = setting.batch == 1
        tuned = Budget(**self.tuning(name, setting)["tuned"]) if alone else chain(3)
        budget = tuned if tuned.nodes else chain(3)
        asked: Any = list(prompts[0]) if alone else [list(prompt) for prompt in prompts]
        options: Any = {} if alone else {"batch_sizes": (1, setting.batch), "contexts": (POLICY_CONTEXT,)}
        return Goodput.measure(self.target, self.drafter(name), asked, budget, **options).costs, budget

    def tuning(self, name: str, setting: Setting) -> dict[str, Any]:
        """The fastest budget for one text, costs of cycles and the drafter's share, kept in a file.

        The model and the drafter as they were before widening answer and draft: their tokens are the same.
        """
        key = f"{self.name}, {setting.threads}, {name}"
        known = json.loads(self.plans.read_text()) if self.plans.exists() else {}
        if key not in known:
            drafter, wide = load_named(self.recipe, self.small, name), self.drafter(name)
            answers = answer_prompts(self.recipe, self.small, drafter.taps)
            context = (min(known.prompt for known in answers) + max(len(known.tokens) for known in answers)) // 2
            costs = bare_costs(self.target, wide, (context,), COST_SIZES, rounds=3)
            best = search(Tuning(self.small, drafter, answers, costs), CANDIDATES).budget
            cycles = {shape: cycle_cost(costs, wide, budget) for shape, budget in {**SHAPES, TUNED: best}.items()}
            known[key] = {"tuned": asdict(best), "cycles": cycles, "share": self.shares.get(name)}
            self.plans.write_text(json.dumps(known))
        return known[key]

    def check_tuned(self, name: str, setting: Setting, prompts: Sequence[list[int]]) -> None:
        """Add to the file how fast the tuned budget is beside the best candidate, modelled on prompts not tuned on.

        Costs are measured anew: what they vary by is a part of what the tuner misses.
        """
        tuned, drafter = Budget(**self.tuning(name, setting)["tuned"]), load_named(self.recipe, self.small, name)
        limit, answers = self.recipe.eval.max_new_tokens, []
        for number, prompt in enumerate(prompts):
            sampling = Sampling(setting.temperature, request=number)
            answers.append(answer(self.small, drafter.taps, prompt, limit=limit, sampling=sampling))
        context = sum(known.prompt + known.length // 2 for known in answers) // len(answers)
        costs = bare_costs(self.target, self.drafter(name), (context,), COST_SIZES, rounds=3)
        measured = Tuning(self.small, drafter, answers, costs)
        asked = list(dict.fromkeys([tuned, NOT_DRAFTING, *CANDIDATES, *SHAPES.values()]))
        speeds = {budget: measured.trial(budget).speed for budget in progress(asked, f"{name}, budgets", len(asked))}
        best = max(speeds, key=lambda budget: speeds[budget])
        figures = {"tuned / best": round(speeds[tuned] / speeds[best], 4), "best": asdict(best), "of": len(asked)}
        figures["best over plain"] = round(speeds[best] / speeds[NOT_DRAFTING], 3)
        known = json.loads(self.plans.read_text())
        known[f"{self.name}, {setting.threads}, {name}"][f"T = {setting.temperature:g}"] = figures
        self.plans.write_text(json.dumps(known))

    def _assistant(self) -> Any:
        """The model of the first draft model that the recipe names."""
        for name in self.recipe.eval.drafters:
            drafter = self.drafter(name)
            if isinstance(drafter, DraftModel):
                return drafter.model
        raise ValueError("assisted generation needs a draft model: name one in eval.drafters, or leave the arm out")
