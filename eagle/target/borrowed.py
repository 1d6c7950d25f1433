"""What a head borrows of its target, on disk: training on stored features then does without the target."""

# V vocabulary, D target width

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, cached_file

from eagle.core.drafter import TargetHead
from eagle.disk import sha256, write_tensors, write_whole

HEAD, CONFIG = "head.safetensors", "config.json"
SCALES = ("embed_scale", "logit_scale", "softcap")
PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A target of which no more is here than its text config, its embedding and its LM head."""

    config: Any
    head: TargetHead

    def tensor(self, name: str) -> Tensor:
        """Refused: a head that is made from the target's weights needs them."""
        raise ValueError(f"{name} is not stored beside the features: set train.decode=1, which loads the whole target")


def save_borrowed(folder: str | Path, head: TargetHead, config: Any) -> dict[str, str]:
    """Write head and config, and tell the checksums of the files; nothing where plain matrices would not do."""
    folder = Path(folder)
    tensors, scales = _parts(head)
    if config.model_type not in CONFIG_MAPPING or not _says_the_same(tensors, scales, head):
        return {}
    told = {"scales": json.dumps(scales)}  # one entry: several are written in another order each time
    write_tensors(folder / HEAD, tensors, told)
    write_whole(folder / CONFIG, [config.to_json_string().encode()])
    return {name: sha256(folder / name) for name in (HEAD, CONFIG)}


def load_borrowed(folder: str | Path, device: str = "cpu") -> Borrowed:
    """What `save_borrowed` left in a folder."""
    with safe_open(Path(folder) / HEAD, "pt") as file:
        tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118, it is no dict
        scales = json.loads(file.metadata()["scales"])
    return Borrowed(AutoConfig.from_pretrained(folder), _plain(tensors, scales))


def target_config(path: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """The text config of a target, without its weights."""
    return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code).get_text_config()


def is_here(path: str, revision: str | None = None) -> bool:
    """Whether a target's files can be read without a download: from its folder, or from a hub's cache."""
    if Path(path).exists():
        return True
    flags = dict.fromkeys(("missing_entries", "gated_repo", "connection_errors"), False)
    quiet = {f"_raise_exceptions_for_{name}": value for name, value in flags.items()}
    names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    try:
        return any(cached_file(path, name, revision=revision, local_files_only=True, **quiet) for name in names)
    except OSError:  # a folder's name, which no hub's id can be
        return False


def _parts(head: TargetHead) -> tuple[dict[str, Tensor], dict[str, float | None]]:
    """The matrices, one where they are tied, and the scales with which they say what the head says."""
    embedding, bias = head.embedding.get_parameter("weight"), getattr(head.output, "bias", None)
    tensors = {"embedding": embedding.data}
    if head.weight.data_ptr() != embedding.data_ptr():
        tensors["output"] = head.weight.data
    if bias is not None:
        tensors["bias"] = bias.data
    return tensors, {**{name: getattr(head, name) for name in SCALES}, "embed_scale": head.scale}


def _plain(tensors: dict[str, Tensor], scales: dict[str, Any]) -> TargetHead:
    embedding = nn.Embedding.from_pretrained(tensors["embedding"])
    weight = tensors.get("output", tensors["embedding"])
    output = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in tensors, device="meta")
    output.weight = nn.Parameter(weight, requires_grad=False) if "output" in tensors else embedding.weight
    if "bias" in tensors:
        output.bias = nn.Parameter(tensors["bias"], requires_grad=False)
    return TargetHead(embedding, output, **scales)


@torch.no_grad()
def _says_the_same(tensors: dict[str, Tensor], scales: dict[str, Any], head: TargetHead) -> bool:
    """Whether plain matrices are all there is to a head: not where they are quantised, offloaded or transformed."""
    if any(tensor.is_meta or tensor.dtype not in PLAIN for tensor in tensors.values()):
        return False
    plain, tokens = _plain(tensors, scales), torch.arange(min(64, len(tensors["embedding"])))
    embedded = head.embed(tokens.to(tensors["embedding"].device))
    hidden = embedded.to(head.weight.device)
    expected, got = head.logits(hidden), plain.logits(hidden)
    # other products may round otherwise; a missing scale or transform shows far above
    near = (got - expected).norm() <= 1e-2 * expected.norm()
    return torch.equal(plain.embed(tokens.to(embedded.device)), embedded) and bool(near)
