"""The target's embedding and LM head, from the model or from disk, so that training on a store loads no target."""

# T tokens, V vocabulary, D target width

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from eagle.core.drafter import TargetHead
from eagle.disk import open_tensors, sha256, write_tensors, write_whole
from eagle.target.gguf import is_gguf, model_folder
from eagle.target.stock_head import StockHead, stock_head
from eagle.target.structure import FAILURES, base_of, describe_failure
from eagle.target.weights.dense import PLAIN

HEAD, CONFIG = "head.safetensors", "config.json"
SCALES = ("embed_scale", "logit_scale", "softcap")


@torch.no_grad()
def borrow_head(
    model: Any,
    layers: tuple[nn.Module, nn.Module],
    tokens: Tensor,
    first: Tensor | None,
    last: Tensor,
) -> TargetHead:
    """Return the target's embedding and LM head, which draft heads borrow, checked against the model's own logits.

    It is a `TargetHead` with the scales of the config. If the model transforms states before its last matrix, it is a
    `StockHead`, which runs the model's own forward over them.

    Args:
        model: the target's model.
        layers: its embedding and LM head, with plain matrices.
        tokens: [1, T], some tokens.
        first: [T, D], the first layer's input of width D at these T tokens; None if it is unknown.
        last: [T, D'], the base model's output at these, whose width D' may be another one.

    Raises:
        ValueError: if neither gives the model's logits.
    """
    config = model.config.get_text_config()
    embedding, output = layers
    head = TargetHead(
        embedding,
        output,
        embed_scale=_embed_scale(config, embedding(tokens[0]), first),
        logit_scale=_logit_scale(config),
        softcap=getattr(config, "final_logit_softcapping", None),
        width=config.hidden_size,
    )
    expected = model(input_ids=tokens, use_cache=False).logits[0]
    # logits may be as coarse as the weights, or as fp32, which some models with wider weights return
    coarsest = max(torch.finfo(head.weight.dtype).eps, torch.finfo(torch.float32).eps)
    if torch.finfo(expected.dtype).eps > coarsest:
        raise ValueError(
            f"the forward of {type(model).__name__} is wrapped: got logits in {expected.dtype} of weights in "
            f"{head.weight.dtype}, as under autocast, expected those of the model by itself, by which trees are read. "
            "Load it in the lower precision (dtype=...) and leave the wrapper out, or put autocast around the call"
        )
    # the LM head is one matrix product with the config's scales
    if last.shape[-1] == head.weight.shape[1] and is_close(head.logits(last), expected):
        return head
    # the head transforms states before its matrix
    base_output = base_of(model)(input_ids=tokens, use_cache=False)
    fault = ""
    try:
        stock = stock_head(model, config, head, base_output)
        if not is_close(stock.logits(last), expected):
            fault = "gives other logits"
    except FAILURES as error:
        fault = f"fails ({describe_failure(error)})"
    if fault and "forward" in vars(model):
        fault += "; that forward was put in the place of its class's, as by accelerate's mixed precision: take it off"
    if fault:
        raise ValueError(
            f"the logits of {config.model_type} are no function of its base's output alone: its own forward over given "
            f"states {fault}, and its LM head cannot be borrowed"
        )
    return stock


def _embed_scale(config: Any, embedded: Tensor, first: Tensor | None) -> float:
    """Return the factor by which a model multiplies embeddings, from its first layer's input.

    With learned positions no factor matches, and the embedding is borrowed without a scale.

    Args:
        config: the target's text config.
        embedded: [T, D], the embeddings of T tokens.
        first: [T, D], the first layer's input at these; None if it is unknown.
    """
    # the factors that models use: none, a config's own, or the root of the width as in Gemma
    if first is not None:
        for scale in (1.0, getattr(config, "embedding_multiplier", 1.0), config.hidden_size**0.5):
            if is_close(first, embedded * scale):
                return float(scale)
    return 1.0


def _logit_scale(config: Any) -> float:
    """Return the factor by which a model multiplies its logits, under the names that configs have for it.

    1 for models without such a factor.
    """
    factor = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
    divisor = getattr(config, "logits_scaling", None) or 1
    return factor or 1 / divisor


def is_close(got: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors differ only by rounding.

    The norm of the difference may be 1e-4 of that of `expected` in fp32 or fp64, and 2e-2 in half precision.
    """
    if got.shape != expected.shape:
        return False
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 2e-2
    return bool((got - expected).norm() <= tolerance * expected.norm())


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A target of which only the text config, the embedding and the LM head are loaded, for training on a store.

    The feature store holds the target's hidden states, so that the layers are not needed.
    """

    config: Any
    head: TargetHead

    def tensor(self, name: str) -> Tensor:
        """Raise, because a head that copies the target's weights needs the whole target.

        Only the embedding and the LM head are loaded here. `name` is the tensor's.
        """
        raise ValueError(
            f"{name} is not stored beside the features: set train.decode=1, which loads the whole target"
        )


def save_borrowed(folder: str | Path, head: TargetHead, config: Any) -> dict[str, str]:
    """Write a target's embedding, LM head and config beside a feature store, so that training need not load the target.

    Args:
        folder: the store's.
        head: the target's embedding and LM head.
        config: its text config.

    Returns:
        Checksums by file name; {} if nothing was written, as plain matrices do not give the head's logits.
    """
    folder = Path(folder)
    if isinstance(head, StockHead):
        print(
            f"the LM head of {config.model_type} transforms states: training on this store loads the whole target"
        )
        return {}
    tensors, scales = _split_head(head)
    # a config of a type unknown to transformers could not be read back
    if config.model_type not in CONFIG_MAPPING or not _reproduce_head(tensors, scales, head):
        return {}
    # the scales are one entry: safetensors writes several in any order, and the file's checksum would differ
    write_tensors(folder / HEAD, tensors, {"scales": json.dumps(scales)})
    write_whole(folder / CONFIG, [config.to_json_string().encode()])
    return {name: sha256(folder / name) for name in (HEAD, CONFIG)}


def load_borrowed(folder: str | Path, device: str = "cpu") -> Borrowed:
    """Read the embedding, the LM head and the config that `save_borrowed` wrote into a folder."""
    with open_tensors(Path(folder) / HEAD) as file:
        tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118, it is no dict
        scales = json.loads(file.metadata()["scales"])
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return Borrowed(config, replace(_build_head(tensors, scales), width=config.hidden_size))


def target_config(
    path: str,
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> Any:
    """Return the text config of a target, without loading its weights.

    `path` is a folder, a hub id or a GGUF file, which is unpacked first. Its sizes decide those of a head.
    """
    config = AutoConfig.from_pretrained(
        model_folder(path, revision), revision=revision, trust_remote_code=trust_remote_code
    ).get_text_config()
    # heads record the file that the user named, not the folder that it was unpacked into
    if is_gguf(path):
        config.name_or_path = path
    return config


def is_local_model(path: str, revision: str | None = None) -> bool:
    """Return whether a target's weights can be read without a download: from a folder, or from the hub's cache."""
    if Path(path).exists():
        return True
    # a GGUF file on the hub: the tensors that are needed come with the whole file, which counts as a download
    if is_gguf(path):
        return False
    # with these arguments `cached_file` returns None instead of raising errors
    faults = ("missing_entries", "gated_repo", "connection_errors")
    quiet: dict[str, Any] = {f"_raise_exceptions_for_{fault}": False for fault in faults}
    names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    try:
        return any(
            cached_file(path, name, revision=revision, local_files_only=True, **quiet)
            for name in names
        )
    # a path that cannot be a hub id
    except OSError:
        return False


def _split_head(head: TargetHead) -> tuple[dict[str, Tensor], dict[str, float | None]]:
    """Return the matrices of a head, and its scales by their names in `TargetHead`, for `save_borrowed`.

    The scales are factors on embeddings and logits, and the softcap.
    """
    embedding = head.embedding.get_parameter("weight")
    bias = getattr(head.output, "bias", None)
    tensors = {"embedding": embedding.data}
    # a tied LM head is the embedding's matrix, which is written once
    if head.weight.data_ptr() != embedding.data_ptr():
        tensors["output"] = head.weight.data
    if bias is not None:
        tensors["bias"] = bias.data
    scales = {name: getattr(head, name) for name in SCALES}
    # `scale` is the whole factor on embeddings: the embedding module may apply a part of it by itself, and only its
    # matrix is written
    return tensors, {**scales, "embed_scale": head.scale}


def _build_head(tensors: dict[str, Tensor], scales: dict[str, Any]) -> TargetHead:
    """Return a head made of the matrices and scales that `_split_head` returns.

    The scales are factors on embeddings and logits, and the softcap.
    """
    embedding = nn.Embedding.from_pretrained(tensors["embedding"])
    weight = tensors.get("output", tensors["embedding"])
    # made on the meta device, without memory, as its parameters are replaced
    output = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in tensors, device="meta")
    # without a matrix of its own the LM head is tied to the embedding
    output.weight = embedding.weight
    if "output" in tensors:
        output.weight = nn.Parameter(weight, requires_grad=False)
    if "bias" in tensors:
        output.bias = nn.Parameter(tensors["bias"], requires_grad=False)
    return TargetHead(embedding, output, **scales)


@torch.no_grad()
def _reproduce_head(tensors: dict[str, Tensor], scales: dict[str, Any], head: TargetHead) -> bool:
    """Return whether plain matrices and scales give the head's embeddings and logits, by a trial on some tokens.

    They do not if the head is quantised, offloaded, or transforms states.

    Args:
        tensors: "embedding" and, unless it is tied, "output" of the LM head, and its "bias".
        scales: the factors on embeddings and logits and the softcap, by their names in `TargetHead`.
        head: the target's head, which they must reproduce.
    """
    # offloaded or quantised
    if any(tensor.is_meta or tensor.dtype not in PLAIN for tensor in tensors.values()):
        return False
    plain = _build_head(tensors, scales)
    # without a width `embed` does not refuse embeddings of another width than the states
    head = replace(head, width=None)
    tokens = torch.arange(min(64, len(tensors["embedding"])))
    embedded = head.embed(tokens.to(tensors["embedding"].device))
    # embeddings serve as arbitrary states
    hidden = embedded.to(head.weight.device)
    expected = head.logits(hidden)
    # kernels may round differently; a missing scale or transform differs by far more
    is_near = (plain.logits(hidden) - expected).norm() <= 1e-2 * expected.norm()
    return bool(is_near) and torch.equal(plain.embed(tokens.to(embedded.device)), embedded)
