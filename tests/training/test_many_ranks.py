"""Eight and 64 processes by a fake process group, one after the other: parts, bytes, and exchanges of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import CONFIG, MadeFeatures, made_target_head, on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

from eagle.data.examples import collate
from eagle.drafters import DRAFTERS, settings_of
from eagle.recipe import Recipe
from eagle.target.target import Target
from eagle.training.sharded import keep_state_whole, shard_head
from recipes.forecast import ROOT, empty_head, sizes_of

NAMES = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter",
         "all_reduce": "all-reduce"}  # fmt: skip


class Exchanges(TorchDispatchMode):
    """Counts exchanges between processes, and the bytes that each process gives."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts, and computes."""
        if DTensor in types:
            return NotImplemented  # what it does with its local tensor is seen then
        space, name = str(function.overloadpacket).split(".")
        if "c10d" in space and name != "wait_tensor":
            kind = NAMES.get(name, name)
            tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
            self.counts[kind] += 1
            self.bytes[kind] += max(tensor.nbytes for tensor in tensors)
        return function(*args, **(kwargs or {}))


def as_rank(rank: int, count: int) -> None:
    """Become one of many processes, whose others are not there."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())


def made_head(kind: str = "eagle1") -> Any:
    """A small head, the same on each process."""
    torch.manual_seed(0)
    return DRAFTERS[kind].for_target(settings_of({"kind": kind}, "test"), CONFIG, made_target_head(), ())


def in_child(work: Callable[[], Any], folder: Path) -> Any:
    """What some work gives that is done in a process of its own, which has a process group then."""
    on_ranks(1, lambda _: torch.save(work(), folder / "result.pt"), folder, launched=False)
    return torch.load(folder / "result.pt")


def parts_of_head(count: int) -> dict[str, list[torch.Tensor]]:
    """Each process's part of every weight."""
    parts: dict[str, list[torch.Tensor]] = {}
    for rank in range(count):
        as_rank(rank, count)
        head = made_head()
        shard_head(head)
        for name, weight in head.named_parameters():
            assert isinstance(weight, DTensor)
            parts.setdefault(name, []).append(weight.to_local().detach().clone())
    return parts


@pytest.mark.parametrize("count", [8, 64])
def test_each_weight_of_a_sharded_head_is_on_one_process(count: int, tmp_path: Path) -> None:
    """In order, the parts are the head; none is larger than its share, rounded up to rows."""
    parts, whole = in_child(partial(parts_of_head, count), tmp_path), dict(made_head().named_parameters())
    assert parts.keys() == whole.keys()
    for name, each in parts.items():
        assert len(each) == count and torch.equal(torch.cat(each), whole[name])
        assert max(len(part) for part in each) == -(-len(whole[name]) // count)


def exchanges_of(launcher: str, count: int, accumulation: int = 1, steps: int = 3) -> tuple[dict, dict, int]:
    """Of one step of the last process: its exchanges, their bytes, and those of the head."""
    as_rank(count - 1, count)
    head, frozen = made_head(), made_target_head()
    total = sum(weight.nbytes for weight in head.parameters())
    if launcher == "sharded":
        shard_head(head)
    optimizer = torch.optim.AdamW(head.parameters(), fused=True)
    model = DistributedDataParallel(head) if launcher == "ddp" else head
    features = MadeFeatures((-1,))
    for _ in range(steps):  # DDP finds its buckets in the first
        with Exchanges() as exchanges:
            for part in range(accumulation):
                with model.no_sync() if launcher == "ddp" and part + 1 < accumulation else torch.enable_grad():
                    model(collate(features.read([part]), (-1,)), frozen)["total"].backward()
            norm = nn.utils.clip_grad_norm_([weight for weight in head.parameters()], 0.5)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
    return dict(exchanges.counts), dict(exchanges.bytes), total


@pytest.mark.parametrize("count", [8, 64])
def test_exchanges_of_a_step(count: int, tmp_path: Path) -> None:
    """DDP sums the gradients once; a sharded head is gathered and its gradients scattered once, and its norm summed."""
    counts, moved, total = in_child(partial(exchanges_of, "ddp", count), tmp_path)
    assert counts == {"all-reduce": 1} and moved == {"all-reduce": total}
    assert in_child(partial(exchanges_of, "ddp", count, accumulation=3), tmp_path)[0] == {"all-reduce": 1}
    counts, moved, total = in_child(partial(exchanges_of, "sharded", count), tmp_path)
    assert counts == {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 1}
    assert total <= moved["all-gather"] < 1.5 * total + 4 * count * 32 * 20 and moved["all-reduce"] == 4
    counts, _, _ = in_child(partial(exchanges_of, "sharded", count, accumulation=3), tmp_path)
    assert counts == {"all-gather": 3, "reduce-scatter": 3, "all-reduce": 1}


def held_bytes(path: str, kind: str, count: int) -> dict[str, int]:
    """Between steps, on the first process of many: bytes of weights and moments, of a target's head at its real size."""
    recipe = Recipe.load(ROOT / path)
    settings = settings_of(recipe.drafter.model_dump(), path)
    head = empty_head(settings, sizes_of(recipe.target.path).config)
    whole = sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
    as_rank(0, count)
    shard_head(head)
    optimizer = torch.optim.AdamW([weight for weight in head.parameters() if weight.requires_grad])
    keep_state_whole(optimizer)
    part = sum(weight.to_local().numel() for weight in head.parameters() if weight.requires_grad)  # type: ignore[attr-defined]
    return {"whole": whole, "part": part}


@pytest.mark.parametrize("path", ["recipes/llama-3.1-8b/eagle3.yaml", "recipes/llama-3.1-70b/eagle3.yaml"])
@pytest.mark.parametrize("count", [8, 64])
def test_bytes_of_a_process(path: str, count: int, tmp_path: Path) -> None:
    """Weights, gradients and moments in fp32 as the table of the documentation says."""
    held = in_child(partial(held_bytes, path, "eagle3", count), tmp_path)
    assert held["whole"] / count <= held["part"] < held["whole"] / count * 1.01
    ddp, sharded, step = (16 * held["whole"] / 1e9, 16 * held["part"] / 1e9, 8 * held["whole"] / 1e9)
    zero2, zero3 = 4 * held["whole"] / 1e9 + 12 * held["part"] / 1e9, sharded
    name = path.split("/")[1].removeprefix("llama-3.1-").upper()
    row = f"| {name}, {count} processes | {ddp:.1f} GB | {zero2:.1f} GB | {zero3:.1f} GB | {sharded:.1f} GB | {step:.1f} GB |"
    assert row in (ROOT / "docs/training.md").read_text(), row


def parts_of_target(count: int) -> tuple[list[int], dict[str, list[torch.Tensor]], dict[str, int], int]:
    """Parameters of the target on each process, every process's part of its layers, and a forward's exchanges."""
    torch.manual_seed(1)
    parts: dict[str, list[torch.Tensor]] = {}
    held: list[int] = []
    model = LlamaForCausalLM(CONFIG)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for rank in range(count):
        as_rank(rank, count)
        model = LlamaForCausalLM(CONFIG)
        model.load_state_dict(state)
        target = Target(model).shard()
        local = {
            name: weight.to_local() if isinstance(weight, DTensor) else weight
            for name, weight in target.model.named_parameters()
        }
        held.append(sum(weight.numel() for weight in local.values()))
        for name, weight in local.items():
            parts.setdefault(name, []).append(weight.detach().clone())
    with Exchanges() as exchanges:
        target.features(torch.arange(6)[None], (2, -1))
    for name, each in parts.items():
        if ".layers." in name:
            assert torch.equal(torch.cat(each), state[name])
        else:
            assert all(torch.equal(part, state[name]) for part in each)
    return (
        held,
        {},
        dict(exchanges.counts),
        sum(tensor.numel() for name, tensor in state.items() if ".layers." not in name),
    )


@pytest.mark.parametrize("count", [8, 16])
def test_a_target_spread_over_many(count: int, tmp_path: Path) -> None:
    """Each weight of a layer is on one process, embedding and LM head on all; a forward gathers each layer once."""
    held, _, counts, outside = in_child(partial(parts_of_target, count), tmp_path)
    assert counts == {"all-gather": CONFIG.num_hidden_layers}
    layers = sum(weight.numel() for name, weight in LlamaForCausalLM(CONFIG).named_parameters() if ".layers." in name)
    assert sum(held) == layers + count * outside
