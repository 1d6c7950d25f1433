"""Decodes, training steps and extraction on the CPU and on a simulated accelerator: `python -m tests.simulated_runs`.

It prints a line of JSON for each named run (for all without names): how far the results are apart, and which copies
and waits there were.
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
from eagle.data.stored_rows import DTYPES, parts_of, unpack_features
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.blocks import block_spans
from eagle.drafters.lookup.counts import CountDrafter
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.parts import spans
from eagle.drafters.several import FirstOf
from eagle.recipe import TrainSection
from eagle.target.trees.read_modes import TreeReadMode
from eagle.training.start import follow_head
from eagle.training.train import Run as TrainingRun
from tests import simulated
from tests.registry import BY_DEFAULT
from tests.tables import some_tables

CPU = torch.device("cpu")
# the context manager that records a run's waits; tests on CUDA put CUDA's own check here
watch: Any = simulated.crossings
# so small that random drafts are sometimes right
SIZE = 24  # of the vocabulary: so small that random drafts are sometimes right
SHARED = 6  # tokens with which the second text of an extraction begins as the first does
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
# losses that are computed by other code than cross-entropy
LOSSES = ("reverse_kl", "jsd", "tv", "acceptance", "hybrid", "likeliest")
HEADS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle1"},
    "eagle1 as published": {"kind": "eagle1", "fc_bias": False, "noise_as_published": True},
    "hass": {"kind": "hass"},
    "eagle3": {"kind": "eagle3", "steps": 3},
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
    "draft_model tokens": {"kind": "draft_model", "divergence": "tokens"},
    "draft_model jsd": {"kind": "draft_model", "divergence": "jsd"},
    "hydra++": {"kind": "hydra", "layers": 2, "prefix": True, "regression": 0.1},
    "medusa tokens": {
        "kind": "medusa",
        "lm_head": "target",
        "loss": "tokens",
        "weights": "falling",
    },
}
HEADS |= {f"eagle3 {loss}": {"kind": "eagle3", "steps": 2, "loss": loss} for loss in LOSSES}
# every other method as it is by default
HEADS |= {name: {"kind": name} for name in BY_DEFAULT}
ATTENTION = {
    "vocab_size": SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def new_target(device: torch.device) -> Target:
    """Return a random model, the same on every device."""
    torch.manual_seed(0)
    # so large that greedy tokens vary
    model = LlamaForCausalLM(LlamaConfig(**ATTENTION, bos_token_id=0))
    torch.nn.init.normal_(model.lm_head.weight, std=0.4)
    return Target(model.to(device))


def read_small_trees(target: Target) -> None:
    """Decode a little, as a target checks at its first use that it can read trees."""
    generate(target, load_drafter("none", target), PROMPTS, max_new_tokens=2)


def new_hybrid(device: torch.device, **means: bool) -> Target:
    """Return a random model with recurrent state in half its layers, which reads trees in the given mode."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        **ATTENTION,
        head_dim=8,
        # half of the layers keep a state, half have attention
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.init.normal_(model.lm_head.weight, std=0.4)
    target = Target(model.to(device))
    read_small_trees(target)
    target.reader.set_mode(TreeReadMode(**means))
    return target


def new_drafter(name: str, target: Target) -> Any:
    """Return a drafter with random weights, bound to a target."""
    if name == "several":
        return FirstOf([NgramDrafter(), new_drafter("eagle3", target)])
    if name == "curious":
        return Curious([new_drafter("eagle3", target)])
    section = HEADS[name] if name in ("hydra++", "eagle3, window") else {"kind": name}
    kind = DRAFTERS[section["kind"]]
    if issubclass(kind, CountDrafter):
        return kind(some_tables(SIZE), target.device)
    if not issubclass(kind, TrainableDrafter):
        return load_drafter(name, target)
    # a copy of the target's LM head would make random drafts too good
    if section["kind"] in ("eagle3", "peagle"):
        section = {**section, "lm_head": "random"}
    torch.manual_seed(0)
    head = kind.for_target(settings_of(section, "test"), target.config)
    return head.to(target.device).bind(target.head)


def decode(
    target: Target,
    name: str,
    sampling: str = "greedy",
    budget: str = "grown",
    batch: bool = False,
) -> tuple[Any, list[Any]]:
    """Return tokens and cycles of each answer, and what crossed between host and device.

    Args:
        target: on either device.
        name: a drafter, as `new_drafter` knows it.
        sampling: one of SAMPLINGS.
        budget: one of BUDGETS.
        batch: whether three prompts are answered together, or the first alone.
    """
    drafter = new_drafter(name, target)
    with watch() as crossed:
        traces = generate(
            target,
            drafter,
            PROMPTS if batch else PROMPTS[0],
            stop=[],
            sampling=SAMPLINGS[sampling],
            budget=BUDGETS[budget],
            max_new_tokens=10,
        )
    traces = traces if batch else [traces]
    return [(trace.tokens, trace.cycles) for trace in traces], crossed


def decode_hybrid(target: Target, name: str, means: dict[str, bool]) -> tuple[Any, list[Any]]:
    """Return the same of a hybrid model on the target's device."""
    return decode(new_hybrid(target.device, **means), name, batch=True)


def search(target: Target, name: str) -> tuple[Any, list[Any]]:
    """Return answers and scores of a beam search, a range as long as its forwards, and what crossed."""
    drafter = new_drafter(name, target)
    with watch() as crossed:
        found = beam_search(
            target, drafter, PROMPTS[0], beams=3, max_new_tokens=10, stop=[], num_return_sequences=3
        )
    # caches of other sizes round the scores otherwise
    scores = [round(score, 4) for score in found.scores]
    return [((found.tokens, scores), range(found.forwards))], crossed


class Curious(FirstOf):
    """A planted fault: it looks at its drafts before the target has read them."""

    def open_with(self, texts: Any) -> Any:
        """Return a state whose trees are read on the host."""
        state = super().open_with(texts)
        propose = state.propose

        def look(*given: Any) -> Any:
            # the trees of a device are handed on unread; their length asks for them
            trees = propose(*given)
            return {row: tree for row, tree in trees.items() if len(tree.tokens)}

        state.propose = look  # type: ignore[method-assign]
        return state


def some_texts() -> list[Example]:
    """Return texts of several lengths, in which the supervised tokens have gaps."""
    generator = torch.Generator().manual_seed(1)
    examples = []
    # one is too short to hold a supervised token
    for length in (24, 17, 9, 30, 5, 12):
        tokens = torch.randint(SIZE, (length,), generator=generator)
        position = torch.arange(length)
        examples.append(Example(tokens, (position >= 4) & (position % 7 != 6)))
    return examples


def start_run(
    head: dict[str, Any],
    target: Target,
    is_live: bool,
    settings: dict[str, Any],
) -> tuple[TrainingRun, Any]:
    """Return a training run of three steps that has not begun, and its network.

    Args:
        head: the settings of a head.
        target: on either device.
        is_live: whether features are the target's own, or the CPU's.
        settings: other keys of the recipe's train section.
    """
    # accelerate keeps one state a process, which both devices share, and knows no simulated device
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=settings.get("accumulation", 1))
    accelerator.state.device = PartialState().device = target.device
    section = TrainSection(
        out="none",
        batch_size=3,
        epochs=3,
        validation=0,
        **settings,
    )
    recipe: Any = SimpleNamespace(
        train=section,
        features=SimpleNamespace(store=None),
        data=SimpleNamespace(images=None),
    )
    # weights and stored features come from the CPU's model, so that both devices train on the same
    torch.manual_seed(0)
    cpu_target = new_target(CPU)
    head_settings = settings_of(head, "test")
    identity = {"taps": taps_of(head_settings, target.config), "dtype": "float32"}
    features: Any = LiveFeatures(target if is_live else cpu_target, some_texts(), identity)
    texts = [example.tokens[example.loss_mask] for example in features.examples]
    method = DRAFTERS[head_settings.kind]
    network = method.for_target(
        head_settings,
        target.config,
        cpu_target.head,
        texts,
    )
    features = follow_head(
        recipe, head_settings, target, features, head=network, weights_split=False
    )
    run = TrainingRun(
        accelerator=accelerator,
        recipe=recipe,
        head=network,
        target_head=target.head,
        features=features,
        decoding=None,
        commit="none",
    )
    return run, network


def train(
    head: dict[str, Any],
    target: Target,
    source: str = "stored",
    plant: bool = False,
    **settings: Any,
) -> tuple[Any, list[Any]]:
    """Return the logged losses and the weights of three training steps, and what crossed in these steps.

    Args:
        head: the settings of a head.
        target: on either device.
        source: "stored" features of the CPU, or "live" ones of the target.
        plant: whether the loss is read in every step.
        settings: other keys of the recipe's train section.
    """
    run, network = start_run(head, target, source == "live", settings)
    if plant:
        # a hook that reads the loss in every step
        run.model.register_forward_hook(lambda *given: given[-1]["total"].item() and None)
    batches: Any = run.dealer.batches(0, run.pins)
    is_bf16 = settings.get("dtype") == "bfloat16"
    autocast = torch.autocast(target.device.type, torch.bfloat16, enabled=is_bf16)
    with watch() as crossed, autocast:
        for step in range(3):
            run._advance(step, batches)
    batches.close()
    logged = [losses for _, losses in run.unlogged_steps]
    return [tensor.detach().cpu() for tensor in [*logged, *network.parameters()]], crossed


class Writer:
    """What extraction writes, kept in memory."""

    def __init__(self, written: list[Tensor]) -> None:
        self.written = written

    def append(self, packed: Any) -> None:
        """Keep the rows of a text."""
        self.written.extend(unpack_features(*tensors).float() for tensors in packed)

    def close(self) -> int:
        """Return the size of what was written: nothing on disk."""
        return 0

    discard = close


def fill(dtype: str, target: Target) -> tuple[Any, list[Any]]:
    """Return what extraction writes of some texts in two shards, and what crossed.

    Args:
        dtype: that features are stored in.
        target: on either device.
    """
    written: list[Tensor] = []
    texts = some_texts()
    # rows of a shared beginning are stored once
    texts[1].tokens[:SHARED] = texts[0].tokens[:SHARED]
    store: Any = SimpleNamespace(
        plan=[[[0, 1], [2]], [[3, 4, 5]]],
        parts=parts_of({"taps": [0, 2, -1], "inputs": [0, 2]}),
        dtype=dtype,
        folder=".",
        shown=lambda index: None,
        shared=torch.tensor([0, SHARED, 0, 0, 0, 0]),
        writer=lambda shard: Writer(written),
        shard_bytes=lambda shard: 0,
        stored_tokens=lambda index: (texts[index].tokens, texts[index].loss_mask),
    )
    with watch() as crossed:
        tokens = list(extract(target, store, [0, 1]))
    return [torch.tensor(tokens), *written], crossed


def attend_densely(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_mask: Any,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Return what flex attention computes, as the simulation has none of its kernels."""
    queries = torch.arange(query.shape[-2], device=query.device)
    keys = torch.arange(key.shape[-2], device=query.device)
    visible = block_mask.mask_mod(0, 0, queries[:, None], keys)
    # queries that share a key
    group = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group, 1)
    value = value.repeat_interleave(group, 1)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    output = (scores.softmax(-1) @ value).to(query.dtype)
    return output, SimpleNamespace(lse=scores.float().logsumexp(-1))


Run = Callable[[Target], tuple[Any, list[Any]]]


def decoding_runs() -> dict[str, Run]:
    """Return every drafter and kind of draft, by a name that says what is run."""
    runs: dict[str, Run] = {}

    def add(
        name: str,
        sampling: str = "greedy",
        budget: str = "grown",
        batch: bool = False,
    ) -> None:
        suffix = ", batch" if batch else ""
        runs[f"decode {name}, {sampling}, {budget}{suffix}"] = partial(
            decode, name=name, sampling=sampling, budget=budget, batch=batch
        )

    # every drafter, alone and in a batch
    for name, sampling in product((*DRAFTERS, "hydra++"), ("greedy", "T=1")):
        add(name, sampling)
        add(name, sampling, batch=True)
    # shapes that are grown by other code than the default
    shapes = [("greedy", "fixed"), ("block", "drawn chain")]
    shapes += [("T=1", budget) for budget in ("likeliest", "fixed", "drawn")]
    for name, (sampling, budget) in product(("bigram", "draft_model", "eagle3"), shapes):
        add(name, sampling, budget, batch=name == "eagle3")
    for name in ("several", "curious"):
        add(name)
    add("several", batch=True)
    add("eagle3, window", batch=True)
    add("eagle3", "lenient")
    add("eagle3", "typical", batch=True)
    for mode, name in product(("paths", "levels"), ("ngram", "eagle3")):
        means = {"levels": True} if mode == "levels" else {}
        runs[f"decode {name}, greedy, grown, batch, hybrid by {mode}"] = partial(
            decode_hybrid, name=name, means=means
        )
    return runs


def every_run() -> dict[str, Run]:
    """Return the runs of decoding, of training and of extraction by name."""
    runs = decoding_runs()
    # one drafter of each kind of state that beams copy
    for name in ("ngram", "eagle3", "medusa", "falcon", "draft_model", "several"):
        runs[f"search {name}"] = partial(search, name=name)
    for name, head in HEADS.items():
        runs[f"train {name}"] = partial(train, head)
        runs[f"train {name}, bf16"] = partial(train, head, dtype="bfloat16")
    # the paths of training that other heads do not take
    accumulated = {"accumulation": 2, "clip_by": "value"}
    runs["train eagle3.1, accumulated"] = partial(train, HEADS["eagle3.1"], **accumulated)
    runs["train eagle3, live"] = partial(train, HEADS["eagle3"], source="live")
    own = {"kind": "draft_model", "samples": "own"}
    runs["train draft_model, own"] = partial(train, own, source="live")
    runs["train eagle1, planted"] = partial(train, HEADS["eagle1"], plant=True)
    return runs | {f"extract {dtype}": partial(fill, dtype) for dtype in DTYPES}


def difference(expected: Any, got: Any) -> float:
    """Return 0 for equal results; of tensors the largest relative difference."""
    if not all(isinstance(item, Tensor) for item in expected):
        return 0.0 if expected == got else float("inf")
    errors = []
    for own, other in zip(expected, got, strict=True):
        exact = own.double()
        error = (exact - other.double()).norm()
        # a result of zeros has no size to compare with
        errors.append(float(error / exact.norm().clamp(min=1e-9)))
    return max(errors)


# operations on a row of three zeros of the device; "nothing" names those that neither wait nor are refused
FAULTS: dict[str, Callable[[Tensor], Any]] = {
    "a value": lambda row: row[0].item(),
    "a list": lambda row: row.tolist(),
    "a mask as an index": lambda row: row[row > 0],
    "what a mask selects": lambda row: row.masked_select(row > 0),
    "nonzero": lambda row: row.nonzero(),
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
    "numpy": lambda row: row.numpy(),
    "nothing: an upload": lambda row: torch.ones(3).to(row.device, non_blocking=True),
    "nothing: a number of the host": lambda row: row + torch.tensor(1.0),
    "nothing: a product": lambda row: (row[:, None] @ row[None]).softmax(-1).topk(2).values,
}


def show_fault(name: str, device: torch.device) -> dict[str, Any]:
    """Return what the simulation records of an operation, and the error by which it refuses it."""
    row = torch.zeros(3, device=device)
    refused = ""
    with simulated.crossings() as crossed, torch.inference_mode(name.startswith("nothing")):
        try:
            FAULTS[name](row)
        except (RuntimeError, TypeError) as error:
            refused = str(error)
    return {"kinds": [crossing.kind for crossing in crossed], "refused": refused}


def describe_run(name: str, run: Run, targets: tuple[Target, Target]) -> dict[str, Any]:
    """Run on both devices; return the difference, the number of cycles, and what crossed where."""
    expected, _ = run(targets[0])
    got, crossed = run(targets[1])
    cycles = []
    if name.startswith(("decode", "search")):
        cycles = [len(cycles) for _, cycles in got]
    counts = Counter((crossing.kind, crossing.op, *crossing.callers[:2]) for crossing in crossed)
    return {
        "name": name,
        "difference": difference(expected, got),
        "cycles": sum(cycles),
        "steps": max(cycles, default=0),
        "crossed": [[*key, count] for key, count in counts.items()],
    }


def main(requested: list[str]) -> None:
    """Print a line for each fault and for each requested run."""
    torch.set_num_threads(1)
    device = simulated.install()
    runs = every_run()
    # the simulation has none of the fused kernels
    for module in (spans, block_spans):
        module.compile_flex = lambda: attend_densely  # type: ignore[attr-defined]
    targets = (new_target(CPU), new_target(device))
    # what is read once is not counted to the first run
    for target in targets:
        read_small_trees(target)
    for name in FAULTS:
        print(json.dumps({"name": name, **show_fault(name, device)}))
    for name in requested or runs:
        print(json.dumps(describe_run(name, runs[name], targets)))


if __name__ == "__main__":
    main(sys.argv[1:])
