"""Falcon's network as its authors name it: EAGLE-1's block after an LSTM, which begins anew at every position."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import (
    Config,
    Layout,
    TargetConfig,
    check_family,
    embedding_of,
    llama_config,
    tensors_of,
)
from eagle.formats.networks.network import (
    ROTARY,
    Network,
    Size,
    keep_names,
    load_or_zeros,
    rename_tensors,
)
from eagle.formats.reading.head_folder import EMBEDDING, HeadFolder

FALCON = "falcon"
GATES = {"gates.#.weight": "lstm.weight_ih_l#", "gates.#.bias": "lstm.bias_ih_l#"}


def _read_falcon(head: HeadFolder) -> Config:
    """Return a block of k tokens; EAGLE-1's layer after an LSTM of two."""
    k = head.keys.read("k_mask")
    if k is None:
        head.problem(
            "config.json: no k_mask, the tokens of a block",
            "Take it from the config of the training run",
        )
    head.refuse({"hidden_act": head.keys.read("hidden_act") not in (None, "silu")})
    # a second layer and biases would be tensors that nothing here has
    head.take(
        "bias", "num_hidden_layers", "attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings"
    )
    head.notes.append(
        "the LSTM begins at zeros at every place, as it does there for one text: its forget gates change nothing, "
        "and their rows are left out"
    )
    return {"k": k or 1}


def _size_with_forget_gate(name: str, size: Size) -> Size:
    """Return the size in the file: an LSTM has a fourth gate, the second of its rows."""
    if not name.startswith("gates."):
        return size
    return size[0] // 3 * 4, *size[1:]


def _may_lack(head: HeadFolder, name: str) -> str:
    return "no biases of the LSTM: zeros" if re.fullmatch(r"gates\.\d\.bias", name) else ""


def _make_tensor(head: HeadFolder, name: str, size: torch.Size) -> Tensor:
    """Return the rows of input, cell and output gate; both biases of a gate are one."""
    tensor = load_or_zeros(head, name, size)
    if not name.startswith("gates.") or name not in head.names:
        return tensor
    if name.endswith(".bias"):
        recurrent = head.names[name].replace("_ih_", "_hh_")
        if recurrent in head.tensors.stored:
            tensor = tensor + _load_recurrent_bias(head, recurrent, tensor.shape)
    # in the order of torch
    input_gate, _, cell_gate, output_gate = tensor.chunk(4)
    return torch.cat([input_gate, cell_gate, output_gate])


def _load_recurrent_bias(head: HeadFolder, name: str, size: torch.Size) -> Tensor:
    """Return the second bias of a gate, which has no name here and which no other check has seen."""
    bias = head.tensors.load(name)
    is_plain = bias.is_floating_point() and bias.itemsize >= 2
    if bias.shape != size or not is_plain:
        raise ValueError(
            f"{name} is {list(bias.shape)} in {bias.dtype}, expected {list(size)} in plain weights: "
            "copy it again"
        )
    return bias


FALCON_HEADS = Network(
    name="a FALCON head",
    method=FALCON,
    methods=(FALCON,),
    tensors=r"lstm\.(weight|bias)",
    read_settings=_read_falcon,
    spellings=(("Bestpay-inc/Falcon", {**GATES, **keep_names("layers.0.*", EMBEDDING)}),),
    prefixes=(),
    spare={**ROTARY, r"lstm\.(weight|bias)_hh_l[01]": "the LSTM has no state that it could read"},
    size_of=_size_with_forget_gate,
    may_lack=_may_lack,
    make_tensor=_make_tensor,
)


def write_falcon(drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
    """Return Falcon's network as its authors' code names it."""
    check_family(drafter, target_config, ("llama", "qwen2"), engine)
    tensors = {EMBEDDING: embedding_of(drafter, engine)}
    for name, tensor in tensors_of(drafter).items():
        if not name.startswith("gates."):
            tensors[name] = tensor
            continue
        input_gate, cell_gate, output_gate = tensor.chunk(3)
        # from a state of zeros neither the forget gate nor the recurrent weights matter
        forget_gate = torch.zeros_like(input_gate)
        read = torch.cat([input_gate, forget_gate, cell_gate, output_gate])
        # [4 H, H], or of a bias [4 H]
        recurrent = torch.zeros_like(read)
        if read.ndim == 2:
            recurrent = read.new_zeros(len(read), len(input_gate))
        (theirs,) = rename_tensors({name: read}, GATES)
        tensors[theirs] = read
        tensors[theirs.replace("_ih_", "_hh_")] = recurrent
    more = {"architectures": ["LlamaForCausalLM"], "bias": True, "k_mask": drafter.settings.k}
    return Layout(llama_config(drafter, target_config, **more), tensors, file="pytorch_model.bin")
