"""Load and describe what a run measures: target, drafters with their budgets, packages, machine."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from data_prep.tokens import load_tokenizer
from eagle.core.budget import Budget, Policy
from eagle.core.drafter import Drafter
from eagle.data.identity import fingerprint, folder_of, target_identity
from eagle.decoding.goodput import BATCH_SIZES, Goodput
from eagle.device import ThreadsOfLongWork, best_device, choose_threads
from eagle.drafters import DRAFTERS
from eagle.drafters.outside import describe_code
from eagle.drafters.several import FirstOf
from eagle.formats.checkpoint import load_drafter, method_without_files
from eagle.recipe import BudgetSection, MeasuredSection, Recipe
from eagle.shipped import commit
from eagle.target.target import Target
from eval.prompts import Question, encode_prompt, question_sets
from eval.result_files.results import device_name

HEAD = ("config.json", "model.safetensors")
# on which the costs of a policy are measured
POLICY_PROMPTS = 16


@dataclass(frozen=True)
class MeasuredDrafter:
    """A drafter, and how much it may draft."""

    drafter: Drafter
    budget: Budget
    head: str  # where it comes from: a folder, a hub id, the name of a method without weights, or several of these
    policy: Policy | None = None  # that chooses within the budget, cycle by cycle
    options: dict[str, Any] = field(default_factory=dict)  # that it was made from

    @property
    def plan(self) -> Budget | Policy:
        """Return the budget, or the policy that chooses one each cycle."""
        return self.policy or self.budget

    @property
    def is_sampled(self) -> bool:
        """Return whether drafts at T > 0 are sampled from q: output keeps the distribution, not each token."""
        return self.budget.draw == "sampled"

    def describe(self) -> dict[str, Any]:
        """Return the settings that decide its drafts, for the header of results."""
        folders = [name for name in self.head.split(",") if method_without_files(name) is None]
        weights = None
        if folders:
            weights = fingerprint([folder_of(name, None, HEAD) / HEAD[1] for name in folders])

        described: dict[str, Any] = {"head": self.head}
        if self.options:
            described["options"] = self.options
        parts = self.drafter.drafters if isinstance(self.drafter, FirstOf) else [self.drafter]
        codes = codes_of(*map(type, parts))
        if codes:
            described["code"] = codes
        described |= {"weights": weights, "budget": asdict(self.budget)}
        # a file beside the weights may say which tokens a head drafts
        for part in parts:
            restricted = getattr(part, "restricted", None)
            if restricted is not None:
                described["drafted tokens"] = len(restricted)
        if self.policy:
            described["policy"] = "goodput"
        return described


def codes_of(*methods: type[Any] | None) -> list[dict[str, str]]:
    """Return the code of methods from outside the package, since a file that was edited is another method."""
    codes = []
    for method in filter(None, methods):
        code = describe_code(method)
        if code is not None:
            codes.append(code)
    return codes


def load_target(recipe: Recipe, **options: Any) -> Target:
    """Load the recipe's target.

    Args:
        recipe: Names the target and its chat template.
        options: Of `Target.load`; they go before the recipe's.

    Raises:
        ValueError: The recipe makes a new target, which another recipe names.
    """
    if recipe.joint is not None:
        served = Path(recipe.train.out) / "head/recipe.yaml"
        raise ValueError(
            f"this recipe makes a new target of {recipe.target.path}: take {served}, which names the new one"
        )
    # a method may be a file of its own, which heads of it need
    DRAFTERS.find(recipe.drafter.kind)
    section = recipe.target.model_dump() | options
    # fp32 on a CPU, so that output can be compared
    if section["dtype"] == "auto" and best_device() == "cpu":
        section["dtype"] = "float32"
    target = Target.load(**section)
    target.tokenizer = load_tokenizer(recipe)
    return target


def settle_threads(
    target: Target, header: dict[str, Any] | None = None
) -> ThreadsOfLongWork | None:
    """Set the number of threads to that of an earlier run's header, else to the fastest for this target on a CPU.

    Args:
        target: Whose forwards are timed.
        header: That of the results that rows will be added to; None to choose again.

    Returns:
        What times the threads again, or None on another device.
    """
    max_threads = torch.get_num_threads()
    on_cpu = target.device.type == "cpu"
    tokens = torch.ones(1, 4, dtype=torch.long)

    @torch.inference_mode()
    def forward() -> None:
        target.model(input_ids=tokens, use_cache=False)

    machine = str((header or {}).get("machine"))
    earlier = re.search(r", (\d+) threads", machine)
    if earlier:
        # rows of one file are measured under the same conditions
        torch.set_num_threads(int(earlier[1]))
        print(
            f"threads: {earlier[1]}, with which these results were begun; --again chooses again",
            file=sys.stderr,
        )
    elif on_cpu:
        choose_threads(forward)
    return ThreadsOfLongWork(forward, most=max_threads) if on_cpu else None


def load_drafters(recipe: Recipe, target: Target) -> dict[str, MeasuredDrafter]:
    """Load `none`, then the drafters that the recipe names, or ngram and its own head.

    Raises:
        ValueError: The recipe gives the name `none` to a drafter.
    """
    default = {"ngram": MeasuredSection(head="ngram")}
    default[DRAFTERS.registered_name(recipe.drafter.kind)] = MeasuredSection()
    sections = recipe.eval.drafters or default
    if "none" in sections:
        raise ValueError(
            "eval.drafters names `none`, which is measured always: leave it out, or take another name"
        )
    loaded: dict[str, Drafter] = {}
    measured = {"none": MeasuredDrafter(load_drafter("none", target), Budget(0, 0, 0), "none")}
    for name, section in sections.items():
        head = section.head or str(Path(recipe.train.out) / "head")
        # budgets of one head share its weights
        key = json.dumps([head, section.options], sort_keys=True)
        if key not in loaded:
            loaded[key] = load_drafter(head, target, **section.options)
        budget = _choose_budget(recipe, section.budget, loaded[key])
        measured[name] = MeasuredDrafter(loaded[key], budget, head, options=section.options)
    return measured


def load_named(recipe: Recipe, target: Target, name: str) -> Drafter:
    """Load one of the drafters that the recipe measures, with its options."""
    drafters = load_drafters(recipe, target)
    if name not in drafters:
        raise ValueError(
            f"--drafter is {name!r}, expected one of eval.drafters: {', '.join(drafters)}"
        )
    return drafters[name].drafter


def add_policies(
    recipe: Recipe, target: Target, drafters: dict[str, MeasuredDrafter], asked: Sequence[Question]
) -> dict[str, MeasuredDrafter]:
    """Return the drafters, and each that drafts again as NAME+policy, with adaptive draft lengths."""
    prompts = []
    for question in asked[:POLICY_PROMPTS]:
        prompt = encode_prompt(recipe, target, question)
        if prompt is not None:
            prompts.append(prompt)

    # smaller sizes too: the end of a prompt set does not fill a batch
    largest = max(recipe.eval.batch_size)
    sizes = sorted({*recipe.eval.batch_size, *(size for size in BATCH_SIZES if size < largest)})

    added = dict(drafters)
    for name, measured in drafters.items():
        if not measured.budget.is_empty:
            policy = Goodput.measure(
                target, measured.drafter, prompts, measured.budget, batch_sizes=sizes
            )
            added[f"{name}+policy"] = replace(measured, policy=policy)
    return added


def _choose_budget(recipe: Recipe, section: BudgetSection | None, drafter: Drafter) -> Budget:
    """Return the recipe's budget for this drafter or for all, else the head's tuned one, else the recipe's defaults."""
    if section is not None:
        return budget_of(section)
    # a recipe that sets any of the three has chosen, even at the default values
    tuned = drafter.budget
    if tuned is not None and not {"nodes", "depth", "top_k"} & recipe.eval.model_fields_set:
        return tuned
    return Budget(recipe.eval.nodes, recipe.eval.depth, recipe.eval.top_k)


def budget_of(section: BudgetSection) -> Budget:
    """Return the budget that a recipe writes."""
    values = section.model_dump(exclude_none=True)
    paths = values.pop("paths", None)
    return Budget(**values) if paths is None else replace(Budget.fixed(paths), **values)


def describe_run(
    recipe: Recipe, target: Target, drafters: dict[str, MeasuredDrafter], processes: int = 1
) -> dict[str, Any]:
    """Return the settings that decide answers and their time. Rows made by others do not go into the same file."""
    machine = f"{device_name(best_device())}, {torch.get_num_threads()} threads"
    if processes > 1:
        machine += f", {processes} processes"
    settings: dict[str, Any] = {
        "target": recipe.target.path,
        "weights": target_identity(recipe.target),
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "template": {"file": recipe.data.template, **recipe.data.template_kwargs},
        "drafters": {name: measured.describe() for name, measured in drafters.items()},
    }
    # keys that early releases did not write are there only where they differ from what those did
    trees = target.describe()
    if trees != "mask":
        settings["trees"] = trees
    settings["sets"] = question_sets(recipe)
    settings["new_tokens"] = recipe.eval.max_new_tokens
    if recipe.eval.max_tokens_in_cache is not None:
        settings["max_tokens_in_cache"] = recipe.eval.max_tokens_in_cache
    return {
        **settings,
        "machine": machine,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "commit": commit(),
    }


def describe_start(recipe: Recipe, path: str) -> dict[str, Any]:
    """Return amount and date of a run. A resumed run may be asked for more."""
    return {
        "recipe": path,
        "count": recipe.eval.count,
        "temperatures": list(recipe.eval.temperatures),
        "seeds": list(recipe.eval.seeds),
        "batch_size": list(recipe.eval.batch_size),
        "date": str(date.today()),
    }
