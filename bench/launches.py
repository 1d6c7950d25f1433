"""How many kernels a draft level, a draft and a cycle launch: `python bench/launches.py`.

On an accelerator each launch costs microseconds of the host, whatever the size of its tensors, and a head's are small.
Counted on a CPU with small random models, as the number does not depend on sizes: every operation that is no view and
no mere allocation, composed ones taken apart. Operations on tensors of the host count too: figures are upper bounds.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from bench.machine import made_on, markdown, write_results
from eagle import Budget, Sampling, Target
from eagle.core.drafter import Committed
from eagle.core.trace import Trace
from eagle.core.tree import PUBLISHED_TREE, chain_paths
from eagle.decoding.loop import Decoding
from eagle.drafters import DRAFTERS
from eagle.log import script

BUDGETS = {
    "chain of 4": Budget.fixed(chain_paths(4)),
    "published tree": Budget.fixed(PUBLISHED_TREE),
    "60 nodes": Budget(60, 6, 10),
}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "EAGLE-1": ("eagle1", {}),
    "HASS": ("hass", {}),
    "EAGLE-3": ("eagle3", {}),
    "EAGLE-3.1": ("eagle3", {"fc_norm": True, "norm_output": True}),
    "draft_model": ("draft_model", {"layers": 2}),
}
PROMPT, NEW = 20, 2  # tokens of the prompt, and of the update that the counted draft reads
# each is one kernel where there is an accelerator, and composed of several on a CPU
WHOLE = {"scaled_dot_product_attention", "rms_norm", "linear", "matmul", "embedding", "silu", "dropout"}
WEIGHTS = {"constant_pad_nd": 2, "eye": 2}  # these fill before they write
ALLOCATE = ("empty", "new_empty", "resize", "sym_", "_unsafe_view", "detach", "alias", "is_same_size")


class Launches(TorchDispatchMode):
    """Counts what would be launched, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name not in WHOLE:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if not is_free(func, name):
            self.names[name] += WEIGHTS.get(name, 1)
        return func(*args, **kwargs)


def is_free(func: Any, name: str) -> bool:
    """Whether an operation is a view or an allocation, which launches nothing."""
    returns = func._schema.returns
    is_view = bool(returns) and all(value.alias_info and not value.alias_info.is_write for value in returns)
    return is_view or name.startswith(ALLOCATE)


@contextmanager
def count() -> Iterator[Counter[str]]:
    """The launches of what is done inside, by name."""
    with Launches() as counted:
        yield counted.names


def small_target() -> Target:
    """Random weights: 8 layers x 64, heads in groups of two, as those of today's targets."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return Target(LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval())


def make_head(target: Target, name: str) -> Any:
    """A random head of this name, ready to draft."""
    kind, settings = HEADS[name]
    torch.manual_seed(1)
    method = DRAFTERS[kind]
    return method.for_target(method.Settings(**settings), target.config, target.head).bind(target.head)


def count_draft(head: Any, target: Target, budget: Budget, texts: int) -> Counter[str]:
    """The launches of a draft that reads a few new tokens of each text; texts differ in length."""
    state, width = head.open(), target.config.hidden_size
    for row in range(texts):
        state.admit(row)
    for turn in range(2):
        counts = [NEW if turn else PROMPT + 3 * row for row in range(texts)]
        updates = {
            row: Committed(torch.arange(size), torch.zeros(size, len(head.taps), width), 1)
            for row, size in enumerate(counts)
        }
        with count() as names:
            state.propose(updates, dict.fromkeys(range(texts), budget))
    return names


def count_cycle(head: Any, target: Target, budget: Budget, texts: int) -> Counter[str]:
    """The launches of a whole cycle of so many texts."""
    decoding = Decoding(target, head, budget=budget, batch_size=texts)
    for row in range(texts):
        decoding.add(row, list(range(PROMPT + 3 * row)), Sampling(), 64, Trace([]), stop=[])
    for _ in range(3):
        with count() as names:
            decoding.step()
    decoding.close()
    return names


def measure(target: Target, heads: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each head, budget and number of texts; a level is what a draft of one level more launches more."""
    rows = []
    for name in heads:
        head = make_head(target, name)
        for shape, budget in BUDGETS.items():
            for texts in (1, 4):
                draft = count_draft(head, target, budget, texts)
                shorter = count_draft(head, target, budget.within(budget.depth - 1), texts)
                level, cycle = draft.total() - shorter.total(), count_cycle(head, target, budget, texts).total()
                counts = {"level": level, "draft": draft.total(), "cycle": cycle}
                rows.append({"head": name, "budget": shape, "texts": texts, **counts, "names": dict(draft - shorter)})
    return rows


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    header = ("head", "budget", "texts", "launches a level", "a draft", "a cycle")
    rows = [[row[key] for key in ("head", "budget", "texts", "level", "draft", "cycle")] for row in results["rows"]]
    return markdown(header, rows, results["machine"])


def main(argv: list[str]) -> None:
    """Count, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--out", type=Path, default=Path("docs/results/launches.json"))
    args = parser.parse_args(argv)
    results = {"machine": made_on(), "rows": measure(small_target(), args.heads)}
    print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    script(main)
