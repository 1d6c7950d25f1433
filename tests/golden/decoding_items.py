"""Record what every drafter decodes, as hashes: of tokens, of accepted lengths by cycle, and of drafted trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from eagle import Budget, Sampling, Trace, beam_search, generate
from tests.golden import access
from tests.golden.digests import digest

LEGEND = {"what the values are": "hashes of tokens, lengths and trees; tokens a cycle"}
NEW_TOKENS = 16
PROMPT = [1, 2, 3, 4, 5, 1, 2, 3]
PROMPTS: dict[str, Any] = {
    "one": PROMPT,
    # as long as the first, shorter and longer: rows of a batch are padded
    "ragged": [PROMPT, [7, 8], [9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1]],
}

GREEDY = Sampling()
SAMPLED = Sampling(temperature=1.0, seed=3)
SAMPLINGS = {
    "T=0": GREEDY,
    "T=1": SAMPLED,
    "top-p": replace(SAMPLED, top_p=0.8),
    "typical": replace(SAMPLED, typical=(0.09, 0.3)),
}
FILTERED = Sampling(
    temperature=0.8,
    top_k=8,
    min_p=0.01,
    repetition_penalty=1.2,
    seed=3,
)

DYNAMIC = Budget(nodes=8, depth=4, top_k=3)
FIXED = Budget.fixed(access.PUBLISHED_TREE)
BUDGETS = {
    "chain": Budget(nodes=4, depth=4, top_k=1),
    "dynamic": DYNAMIC,
    "fixed": FIXED,
}
SAMPLED_TREE = Budget.fixed(access.PUBLISHED_TREE, "sampled")
SAMPLED_CHAIN = Budget.fixed(access.chain_paths(4), "sampled")

# one drafter of each way to keep a state, which beams copy
SEARCHED = ("none", "ngram", "eagle3", "medusa", "falcon", "draft_model")


@dataclass(frozen=True)
class Case:
    """How a target samples, and what may be drafted."""

    sampling: Sampling
    budget: Budget | None


CASES = {
    f"{sampling}, {budget}": Case(SAMPLINGS[sampling], BUDGETS[budget])
    for sampling, budget in product(SAMPLINGS, BUDGETS)
}
CASES |= {
    # what else can be asked of a target that samples: children by likelihood, and sampled ones under both rules
    "likeliest": Case(SAMPLED, replace(DYNAMIC, draw="likeliest")),
    "sampled": Case(SAMPLED, SAMPLED_TREE),
    "block": Case(replace(SAMPLED, rule="block"), SAMPLED_CHAIN),
    "filtered": Case(FILTERED, DYNAMIC),
    "default": Case(GREEDY, None),
}


def decoding_items(folder: Path) -> dict[str, Any]:
    """Return an item for each drafter and case: a prompt alone, and prompts of three lengths."""
    items: dict[str, Any] = dict(LEGEND)
    for name in (*access.UNTRAINED, *access.DECODED):
        items |= decoding_of(name, folder)
    return items


def decoding_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the items of one drafter."""
    # a target of its own: where drafts are sampled, a request gets other noise than those before it
    target = access.make_target()
    drafter = access.make_drafter(name, target, folder / name)
    items: dict[str, Any] = {}
    for case in CASES:
        found = {}
        for batch, prompt in PROMPTS.items():
            found[batch] = decode(target, drafter, prompt, CASES[case])
        items[f"{name}, {case}"] = found
    if name in SEARCHED:
        items[f"{name}, beams"] = search(target, drafter)
    return items


def family_items(folder: Path) -> dict[str, Any]:
    """Return an item for each family of targets, whichever way it reads trees."""
    items: dict[str, Any] = dict(LEGEND)
    for name in access.FAMILIES:
        items[name] = family_of(name)
    return items


def family_of(name: str) -> dict[str, str]:
    """Return what a family answers to drafts that are seldom right, and to some that often are."""
    target = access.make_family(name)
    counting = access.make_counting(target)
    seldom = {}
    for sampling in ("T=0", "T=1"):
        case = Case(SAMPLINGS[sampling], FIXED)
        seldom[sampling] = decode(target, counting, PROMPTS["ragged"], case)
    # what the target says, so that a drafter can know it
    plain = generate(
        target,
        counting,
        PROMPT,
        max_new_tokens=NEW_TOKENS,
        stop=[],
    )
    knowing = access.make_knowing([*PROMPT, *plain.tokens])
    often = decode(target, knowing, PROMPT, Case(GREEDY, FIXED))
    return {**seldom, "often right": often}


def decode(target: Any, drafter: Any, prompt: Any, case: Case) -> str:
    """Return the hashes of what is decoded, or that it is refused."""
    try:
        found: Any = generate(
            target,
            drafter,
            prompt,
            sampling=case.sampling,
            budget=case.budget,
            max_new_tokens=NEW_TOKENS,
            stop=[],
        )
    except ValueError:
        return "refused"
    return describe_traces(found if isinstance(found, list) else [found])


def describe_traces(traces: Sequence[Trace]) -> str:
    """Return hashes of tokens, of accepted lengths by cycle and of drafted trees, and the tokens a cycle."""
    tokens = []
    lengths = []
    trees = []
    for trace in traces:
        tokens.append(trace.tokens)
        lengths.append([(cycle.accepted, cycle.committed) for cycle in trace.cycles])
        trees.append([tree_paths(cycle.tree) for cycle in trace.cycles])
    committed = [pair[1] for pairs in lengths for pair in pairs]
    mean = sum(committed) / len(committed)
    return f"{digest(tokens)} {digest(lengths)} {digest(trees)} {mean:.2f}"


def tree_paths(tree: Any) -> list[list[int]]:
    """Return the tokens on the way to each node, sorted: the order of the nodes is the drafter's own affair."""
    tokens = tree.tokens.tolist()
    parents = tree.parents.tolist()
    paths: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        # the root comes first, and has no parent
        above = paths[parent] if paths else []
        paths.append([*above, token])
    return sorted(paths)


def search(target: Any, drafter: Any) -> str:
    """Return hashes of what a beam search finds."""
    found = beam_search(
        target,
        drafter,
        PROMPT,
        beams=3,
        max_new_tokens=10,
        stop=[],
        num_return_sequences=3,
    )
    # the last digits are the processor's own
    scores = [round(score, 6) for score in found.scores]
    return f"tokens {digest(found.tokens)}, scores {digest(scores)}, forwards {found.forwards}"
