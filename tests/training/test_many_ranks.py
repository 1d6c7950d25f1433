"""Eight and more processes by a fake process group, one after the other: parts, bytes, and exchanges of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import CONFIG, made_target_head, on_ranks, train_made
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from eagle.drafters import DRAFTERS, settings_of
from eagle.recipe import Recipe
from eagle.shipped import STAGES
from eagle.target.target import Target
from eagle.training.launch import shard_head
from eagle.training.train import Run
from recipes.forecast import empty_head, sizes_of

NAMES = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
}


class Exchanges(TorchDispatchMode):
    """Counts exchanges between processes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Count, and compute."""
        if DTensor in types:
            return NotImplemented  # what it does with its local tensor is seen then
        space, name = str(function.overloadpacket).split(".")
        if "c10d" in space and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.counts[NAMES.get(name, name)] += 1
        return function(*args, **(kwargs or {}))


def become_rank(rank: int, count: int) -> None:
    """Become one of many processes, whose others are not there."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # collectives of this group return at once, with what they were given
    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())


def new_head() -> Any:
    """Return a small head, the same on each process."""
    torch.manual_seed(0)
    settings = settings_of({"kind": "eagle1"}, "test")
    return DRAFTERS["eagle1"].for_target(settings, CONFIG, made_target_head(), ())


def run_in_child(work: Callable[[], Any], folder: Path) -> Any:
    """Return the result of work that is done in a process of its own, which has a process group then."""
    path = folder / "result.pt"
    on_ranks(1, lambda _: torch.save(work(), path), folder, launched=False)
    return torch.load(path, weights_only=False)


def copy_parts(module: nn.Module) -> dict[str, Tensor]:
    """Return what this process holds of every weight."""
    parts = {}
    for name, weight in module.named_parameters():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        parts[name] = local.detach().clone()
    return parts


def count_local(weights: Iterable[nn.Parameter]) -> int:
    """Return how many numbers of these weights this process holds."""
    return sum(weight.to_local().numel() for weight in weights)  # type: ignore[attr-defined]


def shard_heads(count: int) -> list[dict[str, Tensor]]:
    """Return each process's parts of a head."""
    held = []

    for rank in range(count):
        # one process after the other becomes each rank
        become_rank(rank, count)
        head = new_head()
        shard_head(head)
        held.append(copy_parts(head))

    return held


def test_each_weight_of_a_sharded_head_is_on_one_process(tmp_path: Path) -> None:
    """In order, the parts are the head; none is larger than its share, rounded up to rows."""
    held = run_in_child(partial(shard_heads, 8), tmp_path)
    whole = copy_parts(new_head())

    for name, weight in whole.items():
        parts = [each[name] for each in held]
        assert torch.equal(torch.cat(parts), weight)
        assert max(len(part) for part in parts) == -(-len(weight) // 8)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("shard", ["false", "true"])
def test_exchanges_of_the_loop(shard: str, accumulation: int, tmp_path: Path) -> None:
    """Two real processes between two logs: what DDP or the sharded head needs, and nothing else.

    DDP sums the gradients once; a sharded head is gathered and its gradients scattered in each part, and its norm
    is summed.
    """

    def work(rank: int) -> None:
        counts: list[Counter[str]] = []
        # steps between two logs
        advance = Run._advance

        def count(*args: Any) -> None:
            with Exchanges() as exchanges:
                advance(*args)
            counts.append(exchanges.counts)

        Run._advance = count  # type: ignore[method-assign]
        asked = ["train.max_steps=6", f"train.shard_head={shard}"]
        asked.append(f"train.accumulation={accumulation}")
        train_made(tmp_path / "run", {"kind": "eagle1"}, *asked)
        torch.save(counts, tmp_path / f"counts-{rank}.pt")

    on_ranks(2, work, tmp_path / "prints")
    expected = {"all-reduce": 1}
    if shard == "true":
        expected |= {"all-gather": accumulation, "reduce-scatter": accumulation}

    for rank in (0, 1):
        counts = torch.load(tmp_path / f"counts-{rank}.pt", weights_only=False)
        assert counts[2:] == [expected] * 4  # DDP forms its buckets before


def count_numbers(target: str, count: int) -> tuple[int, int]:
    """Return the numbers that an EAGLE-3 head for a target learns, and those on the first of many processes."""
    recipe = Recipe.load(STAGES / "recipes/llama-3.1-8b/eagle3.yaml")
    settings = settings_of(recipe.drafter.model_dump(), "test")
    # weights of the real size, without memory
    head = empty_head(settings, sizes_of(target).config)
    learned = [weight for weight in head.parameters() if weight.requires_grad]
    whole = sum(weight.numel() for weight in learned)
    become_rank(0, count)
    fully_shard(head, mesh=init_device_mesh("cpu", (count,)))
    return whole, count_local(weight for weight in head.parameters() if weight.requires_grad)


@pytest.mark.parametrize(("size", "count"), [("8B", 8), ("8B", 64), ("70B", 8), ("70B", 64)])
def test_bytes_of_a_process(size: str, count: int, tmp_path: Path) -> None:
    """Weights, gradients and moments in fp32, as the table of the documentation has them."""
    target = f"meta-llama/Llama-3.1-{size}-Instruct"
    numbers, local = run_in_child(partial(count_numbers, target, count), tmp_path)
    whole = numbers / 1e9
    part = local / 1e9

    assert whole / count <= part < 1.01 * whole / count

    # ZeRO by its scheme: masters, moments and gradients are split; its weights are whole in ZeRO-2
    always = f"{16 * whole:.1f} GB | {4 * whole + 16 * part:.1f} GB"
    # weights and gradients are whole during a step alone
    step = f"{8 * whole:.1f} GB"
    row = f"| {size}, {count} processes | {always} | {20 * part:.1f} + {step} | {16 * part:.1f} + {step} |"

    assert row in (STAGES / "docs/training.md").read_text(), row


def shard_targets(count: int) -> tuple[list[dict[str, Tensor]], Any, Counter[str]]:
    """Return each process's parts of a target, all its weights, and the exchanges of a forward."""
    model = LlamaForCausalLM(CONFIG)
    state = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    held = []

    for rank in range(count):
        become_rank(rank, count)
        model = LlamaForCausalLM(CONFIG)
        model.load_state_dict(state)
        # every process keeps a part of each layer
        target = Target(model).shard()
        held.append(copy_parts(target.model))

    with Exchanges() as exchanges:
        # as the last process, which alone is left
        target.features(torch.arange(6)[None], (2, -1))

    return held, state, exchanges.counts


@pytest.mark.slow
def test_a_target_spread_over_many(tmp_path: Path) -> None:
    """Each weight of a layer is on one process, embedding and LM head on all; a forward gathers each layer once."""
    held, state, counts = run_in_child(partial(shard_targets, 8), tmp_path)

    assert counts == {"all-gather": CONFIG.num_hidden_layers}

    for name, weight in state.items():
        parts = [each[name] for each in held]
        if ".layers." in name:
            parts = [torch.cat(parts)]
        for part in parts:
            assert torch.equal(part, weight)

    sizes = [sum(part.numel() for part in each.values()) for each in held]

    assert max(sizes) - min(sizes) <= 0.1 * max(sizes)
