"""Eight and 64 processes by a fake process group, one after the other: parts, bytes, and exchanges of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import CONFIG, MadeFeatures, made_target_head, on_ranks, train_made
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from eagle.core.examples import collate
from eagle.drafters import DRAFTERS, settings_of
from eagle.recipe import Recipe
from eagle.shipped import STAGES
from eagle.target.target import Target
from eagle.training.launch import gather, shard_head
from eagle.training.train import _Run
from recipes.forecast import empty_head, sizes_of

LLAMA_70B = {
    "vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
NAMES = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter",
         "all_reduce": "all-reduce"}  # fmt: skip


class Exchanges(TorchDispatchMode):
    """Counts exchanges between processes, and the bytes of the whole that each makes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Counts, and computes."""
        if DTensor in types:
            return NotImplemented  # what it does with its local tensor is seen then
        space, name = str(function.overloadpacket).split(".")
        if "c10d" in space and name not in ("wait_tensor", "_wrap_tensor_autograd"):
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
    return DRAFTERS[kind].for_target(
        settings_of({"kind": kind}, "test"), CONFIG, made_target_head(), ()
    )


def in_child(work: Callable[[], Any], folder: Path) -> Any:
    """What some work gives that is done in a process of its own, which has a process group then."""
    on_ranks(1, lambda _: torch.save(work(), folder / "result.pt"), folder, launched=False)
    return torch.load(folder / "result.pt", weights_only=False)


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


@pytest.mark.parametrize("count", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_each_weight_of_a_sharded_head_is_on_one_process(count: int, tmp_path: Path) -> None:
    """In order, the parts are the head; none is larger than its share, rounded up to rows."""
    parts, whole = (
        in_child(partial(parts_of_head, count), tmp_path),
        dict(made_head().named_parameters()),
    )
    assert parts.keys() == whole.keys()
    for name, each in parts.items():
        assert len(each) == count and torch.equal(torch.cat(each), whole[name])
        assert max(len(part) for part in each) == -(-len(whole[name]) // count)


def exchanges_of(
    launcher: str, count: int, accumulation: int = 1
) -> tuple[Counter[str], Counter[str], int]:
    """Of one step of the last process: its exchanges, their bytes, and those of the head."""
    as_rank(count - 1, count)
    head, frozen, features = made_head(), made_target_head(), MadeFeatures((-1,))
    total, model = sum(weight.nbytes for weight in head.parameters()), head
    if launcher == "sharded":
        shard_head(head)
    else:
        model = DistributedDataParallel(head, broadcast_buffers=False, gradient_as_bucket_view=True)
    exchanges = Exchanges()

    def count_bucket(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        exchanges.counts["all-reduce"] += 1
        exchanges.bytes["all-reduce"] += bucket.buffer().nbytes
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    if launcher == "ddp":  # whose own exchange ends in what a fake group cannot answer under a mode
        count_bucket.__annotations__.clear()  # which are words here, and DDP asks for the class
        model.register_comm_hook(None, count_bucket)
    for _ in range(3):  # DDP finds its buckets in the first step
        exchanges.counts.clear()
        exchanges.bytes.clear()
        with exchanges:
            for part in range(accumulation):
                with (
                    model.no_sync()
                    if launcher == "ddp" and part + 1 < accumulation
                    else nullcontext()
                ):
                    model(collate(features.read([part]), (-1,)), frozen)["total"].backward()
            gather(nn.utils.clip_grad_norm_(list(head.parameters()), 0.5))
            head.zero_grad()
    return exchanges.counts, exchanges.bytes, total


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_exchanges_of_a_step(count: int, tmp_path: Path) -> None:
    """DDP sums the gradients once; a sharded head is gathered and its gradients scattered once, and its norm summed."""
    counts, moved, total = in_child(partial(exchanges_of, "ddp", count), tmp_path)
    assert counts == {"all-reduce": 1} and moved == {"all-reduce": total}
    assert in_child(partial(exchanges_of, "ddp", count, accumulation=3), tmp_path)[0] == {
        "all-reduce": 1
    }
    counts, moved, total = in_child(partial(exchanges_of, "sharded", count), tmp_path)
    assert counts == {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 1}
    assert (
        moved["all-gather"] == moved["reduce-scatter"] >= total and moved["all-reduce"] == 4 * 10
    )  # norms
    counts, _, _ = in_child(partial(exchanges_of, "sharded", count, accumulation=3), tmp_path)
    assert counts == {"all-gather": 3, "reduce-scatter": 3, "all-reduce": 1}


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["false", "true"])
def test_exchanges_of_the_loop(shard: str, tmp_path: Path) -> None:
    """Two real processes between two logs: what DDP or the sharded head needs, and nothing else."""

    def work(rank: int) -> None:
        seen: list[Counter[str]] = []
        advance = _Run._advance

        def watched(*asked: Any) -> None:
            with Exchanges() as exchanges:
                advance(*asked)
            seen.append(exchanges.counts)

        _Run._advance = watched  # type: ignore[method-assign]
        train_made(
            tmp_path / "run", {"kind": "eagle1"}, "train.max_steps=6", f"train.shard_head={shard}"
        )
        torch.save(seen, tmp_path / f"seen-{rank}.pt")

    on_ranks(2, work, tmp_path / "prints")
    expected = {"all-reduce": 1} | (
        {"all-gather": 1, "reduce-scatter": 1} if shard == "true" else {}
    )
    for rank in (0, 1):
        assert (
            torch.load(tmp_path / f"seen-{rank}.pt", weights_only=False)[2:] == [expected] * 4
        )  # buckets are formed before


def held_numbers(target: str, count: int) -> dict[str, int]:
    """Numbers that an EAGLE-3 head for a target learns, and those of them on the first of many processes."""
    recipe = Recipe.load(STAGES / "recipes/llama-3.1-8b/eagle3.yaml")
    head = empty_head(settings_of(recipe.drafter.model_dump(), "test"), sizes_of(target).config)
    whole = sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
    as_rank(0, count)
    fully_shard(head, mesh=init_device_mesh("cpu", (count,)))
    parts = [weight.to_local() for weight in head.parameters() if weight.requires_grad]  # type: ignore[attr-defined]
    return {"whole": whole, "part": sum(part.numel() for part in parts)}


@pytest.mark.parametrize("size", ["8B", "70B"])
@pytest.mark.parametrize("count", [8, 64])
def test_bytes_of_a_process(size: str, count: int, tmp_path: Path) -> None:
    """Weights, gradients and moments in fp32, as the table of the documentation has them."""
    held = in_child(partial(held_numbers, f"meta-llama/Llama-3.1-{size}-Instruct", count), tmp_path)
    whole, part = held["whole"] / 1e9, held["part"] / 1e9
    assert whole / count <= part < 1.01 * whole / count
    # ZeRO by its scheme: masters, moments and gradients are split; its weights are whole in ZeRO-2
    columns = (16 * whole, 4 * whole + 16 * part, 20 * part, 16 * part)
    row = f"| {size}, {count} processes | {' | '.join(f'{column:.1f} GB' for column in columns)} |"
    assert row in (STAGES / "docs/training.md").read_text(), row


def parts_of_target(count: int) -> tuple[list[int], Counter[str], int]:
    """Numbers of a target on each process, a forward's exchanges, and numbers that are no layer's; checks the parts."""
    torch.manual_seed(1)
    parts: dict[str, list[torch.Tensor]] = {}
    held: list[int] = []
    state = {name: tensor.clone() for name, tensor in LlamaForCausalLM(CONFIG).state_dict().items()}
    for rank in range(count):
        as_rank(rank, count)
        model = LlamaForCausalLM(CONFIG)
        model.load_state_dict(state)
        target = Target(model).shard()
        held.append(0)
        for name, weight in target.model.named_parameters():
            part = (weight.to_local() if isinstance(weight, DTensor) else weight).detach().clone()
            parts.setdefault(name, []).append(part)
            held[-1] += part.numel()
    with Exchanges() as exchanges:
        target.features(torch.arange(6)[None], (2, -1))
    for name, each in parts.items():
        whole = [torch.cat(each)] if ".layers." in name else each
        assert all(torch.equal(tensor, state[name]) for tensor in whole)
    outside = sum(tensor.numel() for name, tensor in state.items() if ".layers." not in name)
    return held, exchanges.counts, outside


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_a_target_spread_over_many(count: int, tmp_path: Path) -> None:
    """Each weight of a layer is on one process, embedding and LM head on all; a forward gathers each layer once."""
    held, counts, outside = in_child(partial(parts_of_target, count), tmp_path)
    assert counts == {"all-gather": CONFIG.num_hidden_layers}
    weights = LlamaForCausalLM(CONFIG).named_parameters()
    assert (
        sum(held)
        == sum(weight.numel() for name, weight in weights if ".layers." in name) + count * outside
    )
    assert max(held) - min(held) <= 0.1 * max(held)


def numbers_of_70b(count: int) -> tuple[int, int]:
    """Numbers of one layer of a 70B target, and those on the first of many processes."""
    with torch.device("meta"):
        layer = LlamaDecoderLayer(LlamaConfig(**LLAMA_70B), 0)
    whole = sum(weight.numel() for weight in layer.parameters())
    as_rank(0, count)
    fully_shard(layer, mesh=init_device_mesh("cpu", (count,)))
    return whole, sum(weight.to_local().numel() for weight in layer.parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [8, 16])
def test_a_70b_target_spread_over_many(count: int, tmp_path: Path) -> None:
    """Layers are split evenly: 17.1 or 8.6 GB of them in bf16, beside 4.2 GB of embedding and LM head."""
    whole, part = in_child(partial(numbers_of_70b, count), tmp_path)
    assert part * count == whole and f"{80 * 2 * part / 1e9:.1f}" == {8: "17.1", 16: "8.6"}[count]
    assert f"{2 * 2 * LLAMA_70B['vocab_size'] * LLAMA_70B['hidden_size'] / 1e9:.1f}" == "4.2"
