"""Decodes, training steps and extraction, on the CPU and on a simulated accelerator: `python -m tests.simulated_runs`.

Prints a line of JSON for each run that is named (all without): whether the results are the same, and what crossed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from eagle import Budget, Sampling, Target, beam_search, generate, load_drafter
from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Example
from eagle.core.tree import PUBLISHED_TREE, chain_paths
from eagle.data.features import LiveFeatures, extract, taps_of
from eagle.data.open import follow_head
from eagle.data.stored_rows import DTYPES, parts_of, unpack_features
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.blocks import block_spans
from eagle.drafters.lookup.counts import CountDrafter
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.parts import spans
from eagle.drafters.several import FirstOf
from eagle.recipe import TrainSection
from eagle.target.trees.read_modes import TreeReadMode
from eagle.training.train import _Run
from tests import simulated
from tests.registry import BY_DEFAULT
from tests.tables import some_tables

CPU = torch.device("cpu")
watch: Any = simulated.crossings  # what a run is watched by
SIZE = 24  # of the vocabulary: small, so that random drafts are now and then right
SHARED = 6  # tokens with which the second text to extract begins as the first does
PROMPTS = [[1, 2, 3, 4, 5, 1, 2, 3], [7, 8], [9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1]]
FILTERED = {
    "temperature": 1.0,
    "top_k": 8,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "seed": 3,
}
SAMPLINGS = {
    "greedy": Sampling(),
    "T=1": Sampling(**FILTERED),
    "block": Sampling(temperature=0.7, rule="block", seed=3),
    "lenient": Sampling(lenience=0.5),
    "typical": Sampling(temperature=1.0, typical=(0.02, 0.3), seed=3),
}
BUDGETS = {
    "grown": Budget(8, 4, 3),
    "likeliest": Budget(8, 4, 3, draw="likeliest"),
    "fixed": Budget.fixed(PUBLISHED_TREE),
    "drawn": Budget.fixed(PUBLISHED_TREE, "sampled"),
    "drawn chain": Budget.fixed(chain_paths(4), "sampled"),
}
LOSSES = ("reverse_kl", "jsd", "tv", "acceptance", "hybrid", "likeliest")
HEADS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle1"},
    "eagle1 as published": {"kind": "eagle1", "fc_bias": False, "noise_as_published": True},
    "hass": {"kind": "hass"},
    "eagle3": {"kind": "eagle3", "steps": 3},
    **{f"eagle3 {loss}": {"kind": "eagle3", "steps": 2, "loss": loss} for loss in LOSSES},
    "eagle3.1": {
        "kind": "eagle3",
        "fc_norm": True,
        "norm_output": True,
        "draft_vocab": 12,
        "steps": 3,
    },
    "eagle3, window": {"kind": "eagle3", "steps": 3, "window": {"sinks": 1, "recent": 3}},
    "eagle3 of other taps": {
        "kind": "eagle3",
        "taps": [0, 1, 2, -1],
        "norm_before_residual": True,
        "steps": 2,
    },
    "eagle3 frozen": {
        "kind": "eagle3",
        "steps": 2,
        "train_lm_head": False,
        "draft_vocab": 12,
        "loss": "hybrid",
    },
    "falcon": {"kind": "falcon", "k": 3},
    **{
        f"draft_model {loss}": {"kind": "draft_model", "divergence": loss}
        for loss in ("tokens", "jsd")
    },
    **{name: {"kind": name} for name in BY_DEFAULT},
    "hydra++": {"kind": "hydra", "layers": 2, "prefix": True, "regression": 0.1},
    "medusa tokens": {
        "kind": "medusa",
        "lm_head": "target",
        "loss": "tokens",
        "weights": "falling",
    },
}


def new_target(device: torch.device) -> Target:
    """A random model, the same on every device."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=SIZE, num_hidden_layers=4, bos_token_id=0, **sizes)
    )
    torch.nn.init.normal_(model.lm_head.weight, std=0.4)
    return Target(model.to(device))


def new_hybrid(device: torch.device, **means: bool) -> Target:
    """A random model of which half the layers keep a state, read by these means."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    states = {f"linear_{part}_head_dim": 8 for part in ("key", "value")}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 8}
    kinds = ["linear_attention", "full_attention"] * 2
    config = Qwen3_5TextConfig(
        vocab_size=SIZE, num_hidden_layers=4, layer_types=kinds, **sizes, **states, **heads
    )
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.init.normal_(model.lm_head.weight, std=0.4)
    target = Target(model.to(device))
    generate(
        target, load_drafter("none", target), PROMPTS, max_new_tokens=2
    )  # reads small trees once
    target.reader.take(TreeReadMode(**means))
    return target


def new_drafter(name: str, target: Target) -> Any:
    """A drafter that is bound to a target, of random weights."""
    if name == "several":
        return FirstOf([NgramDrafter(), new_drafter("eagle3", target)])
    if name == "planted":
        return Impatient()
    if name == "curious":
        return Curious([new_drafter("eagle3", target)])
    section = HEADS[name] if name in ("hydra++", "eagle3, window") else {"kind": name}
    kind = DRAFTERS[section["kind"]]
    if issubclass(kind, CountDrafter):
        return kind(some_tables(SIZE), target.device)
    if not issubclass(kind, TrainableDrafter):
        return load_drafter(name, target)
    torch.manual_seed(0)
    settings = {
        **section,
        **({"lm_head": "random"} if section["kind"] in ("eagle3", "peagle") else {}),
    }
    return (
        kind.for_target(settings_of(settings, "test"), target.config)
        .to(target.device)
        .bind(target.head)
    )


def decode(
    name: str, sampling: str, budget: str, batch: bool, target: Target
) -> tuple[Any, list[Any]]:
    """Tokens and cycles of answers, and what crossed meanwhile."""
    drafter = new_drafter(name, target)
    options: dict[str, Any] = {
        "sampling": SAMPLINGS[sampling],
        "budget": BUDGETS[budget],
        "max_new_tokens": 10,
    }
    with watch() as crossed:
        answer = generate(target, drafter, PROMPTS if batch else PROMPTS[0], stop=[], **options)
    traces = answer if batch else [answer]
    return [(trace.tokens, trace.cycles) for trace in traces], crossed


def decode_hybrid(means: dict[str, bool], name: str, target: Target) -> tuple[Any, list[Any]]:
    """Tokens and cycles of a hybrid's answers, and what crossed meanwhile."""
    return decode(name, "greedy", "grown", True, new_hybrid(target.device, **means))


def search(name: str, target: Target) -> tuple[Any, list[Any]]:
    """Answers and scores of a beam search, as many numbers as it took forwards, and what crossed meanwhile."""
    drafter = new_drafter(name, target)
    with watch() as crossed:
        found = beam_search(
            target, drafter, PROMPTS[0], beams=3, max_new_tokens=10, stop=[], num_return_sequences=3
        )
    scores = [round(score, 4) for score in found.scores]  # caches of other sizes round otherwise
    return [((found.tokens, scores), range(found.forwards))], crossed


class Impatient(NgramDrafter):
    """Reads a value of the target's features in every cycle."""

    taps = (1,)

    def begin(self, noise: Any = None) -> Any:
        """A text that is read so."""
        text = super().begin(noise)
        propose = text.propose
        text.propose = lambda update, budget: (
            propose(update, budget) if update.features.sum().item() else None
        )
        return text


class Curious(FirstOf):
    """Looks at its drafts before the target has read them."""

    def open_with(self, texts: Any) -> Any:
        """A state that does."""
        state = super().open_with(texts)
        propose = state.propose

        def look(*given: Any) -> Any:
            trees = propose(*given)
            return {row: tree for row, tree in trees.items() if len(tree.tokens)}

        state.propose = look  # type: ignore[method-assign]
        return state


class Stored:
    """Features in memory, as a store would give them."""

    together = sampled = False

    def __init__(self, live: LiveFeatures) -> None:
        self.taps, self.identity, self.examples = (
            live.taps,
            live.identity,
            live.read(range(len(live))),
        )

    def __len__(self) -> int:
        return len(self.examples)

    def mask(self, index: int) -> Tensor:
        """The loss mask of an example."""
        return self.examples[index].loss_mask

    def read(self, indices: list[int]) -> list[Example]:
        """The examples at these indices."""
        return [self.examples[index] for index in indices]


def some_texts() -> list[Example]:
    """Texts of several lengths; what is supervised has gaps."""
    generator = torch.Generator().manual_seed(1)
    texts = [
        torch.randint(SIZE, (length,), generator=generator) for length in (24, 17, 9, 30, 5, 12)
    ]
    places = [torch.arange(len(tokens)) for tokens in texts]
    return [
        Example(text, (at >= 4) & (at % 7 != 6)) for text, at in zip(texts, places, strict=True)
    ]


def train(
    head: dict[str, Any],
    target: Target,
    source: str = "stored",
    plant: bool = False,
    **settings: Any,
) -> tuple[Any, list[Any]]:
    """What three steps of the training loop log, and the weights behind them; what crossed in these steps."""
    AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    about, device = settings_of(head, "test"), target.device
    features: Any = LiveFeatures(
        target, some_texts(), {"taps": taps_of(about, target.config), "dtype": "float32"}
    )
    texts = [example.tokens[example.loss_mask] for example in features.examples]
    network = DRAFTERS[about.kind].for_target(about, target.config, new_target(CPU).head, texts)
    if source == "stored":
        features = Stored(LiveFeatures(new_target(CPU), some_texts(), features.identity))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=settings.get("accumulation", 1))
    accelerator.state.device = PartialState().device = device
    recipe: Any = SimpleNamespace(
        train=TrainSection(out="none", batch_size=3, epochs=3, validation=0, **settings)
    )
    recipe.features = SimpleNamespace(store=None)
    features = follow_head(recipe, about, target, features, network, weights_split=False)
    run = _Run(accelerator, recipe, network, target.head, features, None, "none")
    if plant:
        run.model.register_forward_hook(
            lambda model, given, losses: losses["total"].item() and None
        )
    batches: Any = run.dealer.batches(0, run.pins)
    reduced = torch.autocast(
        device.type, torch.bfloat16, enabled=settings.get("dtype") == "bfloat16"
    )
    with watch() as crossed, reduced:
        for number in range(3):
            run._advance(number, batches)
    batches.close()
    return [
        part.detach().cpu() for part in [*(row for _, row in run.window), *network.parameters()]
    ], crossed


def fill(dtype: str, target: Target) -> tuple[Any, list[Any]]:
    """What extraction writes of some texts, in two shards."""
    written: list[Tensor] = []

    class Writer:
        def append(self, packed: Any) -> None:
            written.extend(unpack_features(*tensors).float() for tensors in packed)

        def close(self) -> int:
            return 0

        discard = close

    texts = some_texts()
    texts[1].tokens[:SHARED] = texts[0].tokens[:SHARED]
    parts = parts_of({"taps": [0, 2, -1], "inputs": [0, 2]})
    store: Any = SimpleNamespace(
        plan=[[[0, 1], [2]], [[3, 4, 5]]], parts=parts, dtype=dtype, folder="."
    )
    store.shown = lambda number: None
    store.shared = torch.tensor([0, SHARED, 0, 0, 0, 0])
    store.writer, store.shard_bytes = lambda shard: Writer(), lambda shard: 0
    store.text = lambda number: (texts[number].tokens, texts[number].loss_mask)
    with watch() as crossed:
        tokens = list(extract(target, store, [0, 1]))
    return [torch.tensor(tokens), *written], crossed


def attend_densely(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, **asked: Any
) -> tuple[Tensor, Any]:
    """What flex attention computes, whose kernels no simulation has."""
    rows, columns = (torch.arange(part.shape[-2], device=query.device) for part in (query, key))
    seen = block_mask.mask_mod(0, 0, rows[:, None], columns)
    key, value = (
        part.repeat_interleave(query.shape[1] // key.shape[1], 1) for part in (key, value)
    )
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).to(query.dtype), SimpleNamespace(
        lse=scores.float().logsumexp(-1)
    )


Run = Callable[[Target], tuple[Any, list[Any]]]


def every_run() -> dict[str, Run]:
    """The runs by name; those of decoding, of training, and of extraction."""
    runs: dict[str, Run] = {}
    for name, sampling, batch in product((*DRAFTERS, "hydra++"), ("greedy", "T=1"), (False, True)):
        runs[f"decode {name}, {sampling}, grown{', batch' * batch}"] = partial(
            decode, name, sampling, "grown", batch
        )
    of_budgets = {
        "greedy": ["fixed"],
        "T=1": ["likeliest", "fixed", "drawn"],
        "block": ["drawn chain"],
    }
    for name, (sampling, budgets) in product(
        ("bigram", "draft_model", "eagle3"), of_budgets.items()
    ):
        for budget in budgets:
            batch = name == "eagle3"
            runs[f"decode {name}, {sampling}, {budget}{', batch' * batch}"] = partial(
                decode, name, sampling, budget, batch
            )
    for name in ("several", "planted", "curious"):
        runs[f"decode {name}, greedy, grown"] = partial(decode, name, "greedy", "grown", False)
    runs["decode several, greedy, grown, batch"] = partial(
        decode, "several", "greedy", "grown", True
    )
    runs["decode eagle3, window, greedy, grown, batch"] = partial(
        decode, "eagle3, window", "greedy", "grown", True
    )
    runs["decode eagle3, lenient, grown"] = partial(decode, "eagle3", "lenient", "grown", False)
    runs["decode eagle3, typical, grown, batch"] = partial(
        decode, "eagle3", "typical", "grown", True
    )
    for way, means in (("paths", {}), ("levels", {"levels": True})):
        for name in ("ngram", "eagle3"):
            runs[f"decode {name}, greedy, grown, batch, hybrid by {way}"] = partial(
                decode_hybrid, means, name
            )
    for name in ("ngram", "eagle3", "medusa", "falcon", "draft_model", "several"):
        runs[f"search {name}"] = partial(search, name)
    for name, head in HEADS.items():
        runs[f"train {name}"] = partial(train, head)
        runs[f"train {name}, bf16"] = partial(train, head, dtype="bfloat16")
    runs["train eagle3.1, accumulated"] = partial(
        train, HEADS["eagle3.1"], accumulation=2, clip_by="value"
    )
    runs["train eagle3, live"] = partial(train, HEADS["eagle3"], source="live")
    runs["train draft_model, own"] = partial(
        train, {"kind": "draft_model", "samples": "own"}, source="live"
    )
    runs["train eagle1, planted"] = partial(train, HEADS["eagle1"], plant=True)
    return runs | {f"extract {dtype}": partial(fill, dtype) for dtype in DTYPES}


def difference(expected: Any, got: Any) -> float:
    """0 for equal results; of numbers the largest difference, relative to the tensor that they stand in."""
    if all(isinstance(part, Tensor) for part in expected):
        pairs = [(one.double(), other.double()) for one, other in zip(expected, got, strict=True)]
        return max(float((one - other).norm() / one.norm().clamp(min=1e-9)) for one, other in pairs)
    return 0.0 if expected == got else float("inf")


FAULTS: dict[str, Callable[[Tensor], Any]] = {  # of a row of three zeros on the device
    "a value": lambda row: row[0].item(),
    "a branch": lambda row: bool(row[0] > 0),
    "a list": lambda row: row.tolist(),
    "a tensor as a number": lambda row: row[torch.zeros((), dtype=torch.long, device=row.device)],
    "a mask as an index": lambda row: row[row > 0],
    "what a mask selects": lambda row: row.masked_select(row > 0),
    "nonzero": lambda row: row.nonzero(),
    "unique": lambda row: row.unique(),
    "repeats by a tensor": lambda row: row.repeat_interleave(torch.ones_like(row).long()),
    "a list as an index": lambda row: row[[0, 1]],
    "an index of the host": lambda row: row[torch.tensor([0, 1])],
    "a blocking upload": lambda row: torch.ones(3).to(row.device),
    "a copy from the host": lambda row: row.copy_(torch.ones(3)),
    "a blocking download": lambda row: row.cpu(),
    "a tensor of a list": lambda row: torch.tensor([1, 2], device=row.device),
    "a new tensor of a list": lambda row: row.new_tensor([1.0]),
    "a download nobody waits for": lambda row: row.to("cpu", non_blocking=True),
    "a sum over both sides": lambda row: row + torch.ones(3),
    "both sides in one": lambda row: torch.cat([row, torch.ones(3)]),
    "rows picked by the host": lambda row: row.index_select(0, torch.tensor([1])),
    "numpy": lambda row: row.numpy(),
    "nothing: an upload": lambda row: torch.ones(3).to(row.device, non_blocking=True),
    "nothing: a number of the host": lambda row: row + torch.tensor(1.0),
    "nothing: a product": lambda row: (row[:, None] @ row[None]).softmax(-1).topk(2).values,
    "nothing: a row set": lambda row: row.__setitem__(0, 1.0),
}


def show_fault(name: str, device: torch.device) -> dict[str, Any]:
    """What is written down, or refused, of a fault."""
    row, refused = torch.zeros(3, device=device), ""
    with simulated.crossings() as crossed, torch.inference_mode(name.startswith("nothing")):
        try:
            FAULTS[name](row)
        except (RuntimeError, TypeError) as error:
            refused = str(error)
    return {"kinds": [crossing.kind for crossing in crossed], "refused": refused}


def main(asked: list[str]) -> None:
    """Run what is asked for, on both devices."""
    torch.set_num_threads(1)
    device, runs = simulated.install(), every_run()
    for module in (spans, block_spans):
        module.compile_flex = lambda: attend_densely  # type: ignore[attr-defined]
    targets = new_target(CPU), new_target(device)
    for target in targets:
        generate(
            target, load_drafter("none", target), PROMPTS, max_new_tokens=2
        )  # reads small trees once
    for name in FAULTS:
        print(json.dumps({"name": name, **show_fault(name, device)}))
    for name in asked or runs:
        (expected, _), (got, crossed) = (runs[name](target) for target in targets)
        cycles = (
            sum(len(cycles) for _, cycles in got) if name.startswith(("decode", "search")) else 0
        )
        steps = max(len(cycles) for _, cycles in got) if cycles else 0
        counts = Counter(
            (crossing.kind, crossing.op, *crossing.callers[:2]) for crossing in crossed
        )
        line = {
            "name": name,
            "difference": difference(expected, got),
            "cycles": cycles,
            "steps": steps,
        }
        print(json.dumps({**line, "crossed": [[*key, count] for key, count in counts.items()]}))


if __name__ == "__main__":
    main(sys.argv[1:])
