"""Who is measured, and what the figures belong to: target, drafters with their budgets, packages, machine."""

from __future__ import annotations

import platform
import re
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from data_prep.tokens import load_tokenizer
from eagle.core.drafter import Budget, Drafter
from eagle.data.identity import fingerprint, folder_of, target_identity
from eagle.device import best_device, choose_threads
from eagle.drafters import DRAFTERS
from eagle.formats.checkpoint import load_drafter
from eagle.recipe import BudgetSection, MeasuredSection, Recipe
from eagle.target.target import Target
from eval.prompts import question_sets
from eval.results import commit

HEAD = ("config.json", "model.safetensors")


@dataclass(frozen=True)
class Measured:
    """A drafter, and how much it may draft."""

    drafter: Drafter
    budget: Budget
    head: str  # where it comes from: a folder, a hub id, the name of a method without weights, or several of these

    @property
    def drawn(self) -> bool:
        """Whether drafts at T > 0 carry their law: then the law of the output is the target's, not each token."""
        return self.budget.draw == "sampled"

    def made(self) -> dict[str, Any]:
        """What decides its drafts."""
        folders = [name for name in self.head.split(",") if name not in DRAFTERS]
        weights = fingerprint([folder_of(name, None, HEAD) / HEAD[1] for name in folders]) if folders else None
        return {"head": self.head, "weights": weights, "budget": asdict(self.budget)}


def load_target(recipe: Recipe) -> Target:
    """The recipe's target; on a CPU in fp32 unless the recipe names a precision, so that output can be compared."""
    section = recipe.target.model_dump()
    if section["dtype"] == "auto" and best_device() == "cpu":
        section["dtype"] = "float32"
    target = Target.load(**section)
    target.tokenizer = load_tokenizer(recipe)
    return target


def settle_threads(target: Target, header: dict[str, Any] | None = None) -> None:
    """Compute with as many threads as make this target fastest on a CPU, or as made the rows under this header."""
    earlier = re.search(r", (\d+) threads", str((header or {}).get("machine")))
    if earlier:
        torch.set_num_threads(int(earlier[1]))
    elif target.device.type == "cpu":
        tokens = torch.ones(1, 4, dtype=torch.long)
        with torch.inference_mode():
            choose_threads(lambda: target.model(input_ids=tokens, use_cache=False))


def load_drafters(recipe: Recipe, target: Target) -> dict[str, Measured]:
    """`none`, then the drafters that the recipe names, or ngram and its own head."""
    own = str(Path(recipe.train.out) / "head")
    named = recipe.eval.drafters or {"ngram": MeasuredSection(head="ngram"), recipe.drafter.kind: MeasuredSection()}
    if "none" in named:
        raise ValueError("eval.drafters names `none`, which is measured always: leave it out, or take another name")
    loaded: dict[str, Drafter] = {}
    measured = {"none": Measured(load_drafter("none", target), Budget(0, 0, 0), "none")}
    for name, section in named.items():
        head = section.head or own
        if head not in loaded:
            loaded[head] = load_drafter(head, target)
        measured[name] = Measured(loaded[head], _budget(recipe, section.budget, loaded[head]), head)
    return measured


def _budget(recipe: Recipe, given: BudgetSection | None, drafter: Drafter) -> Budget:
    """What the recipe says for this drafter or for all, else what the head was tuned to, else the recipe's defaults."""
    if given is not None:
        return budget_of(given)
    own = drafter.budget
    if own is not None and not {"nodes", "depth", "top_k"} & recipe.eval.model_fields_set:
        return own
    return Budget(recipe.eval.nodes, recipe.eval.depth, recipe.eval.top_k)


def budget_of(section: BudgetSection) -> Budget:
    """The budget that a recipe writes."""
    given = section.model_dump(exclude_none=True)
    paths = given.pop("paths", None)
    return Budget(**given) if paths is None else replace(Budget.fixed(paths), **given)


def made_by(recipe: Recipe, target: Target, drafters: dict[str, Measured]) -> dict[str, Any]:
    """What decides the answers and the time they take; rows of anything else do not go into the same file."""
    device = best_device()
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {
        "target": recipe.target.path,
        "weights": target_identity(recipe.target),
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "template": {"file": recipe.data.template, **recipe.data.template_kwargs},
        "drafters": {name: one.made() for name, one in drafters.items()},
        "sets": question_sets(recipe),
        "new_tokens": recipe.eval.max_new_tokens,
        "machine": f"{name}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "commit": commit(),
    }


def started(recipe: Recipe, path: str) -> dict[str, Any]:
    """What a run was asked for, and when; a run that is resumed may be asked for more."""
    asked = recipe.eval
    return {
        "recipe": path,
        "count": asked.count,
        "temperatures": list(asked.temperatures),
        "seeds": list(asked.seeds),
        "date": str(date.today()),
    }
