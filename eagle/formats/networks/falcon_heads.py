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
    is_plain,
    keep_names,
    load_or_zeros,
    rename_tensors,
)
from eagle.formats.reading.head_folder import EMBEDDING, HeadFolder

FALCON = "falcon"
GATES = {"gates.#.weight": "lstm.weight_ih_l#", "gates.#.bias": "lstm.bias_ih_l#"}


def _read_falcon(head: HeadFolder) -> Config:
    """Return FALCON's setting `k`, the number of tokens that one forward drafts, and note what is left out of the LSTM.

    Without the number in the config there is a problem, and any valid one is returned.
    """
    k = head.keys.read("k_mask")
    if k is None:
        head.problem(
            "config.json: no k_mask, the tokens of a block",
            "Take it from the config of the training run",
        )
    head.refuse({"hidden_act": head.keys.read("hidden_act") not in (None, "silu")})
    # these keys are not read: a second layer or a bias would be an unknown tensor, which is refused
    head.mark_handled(
        "bias", "num_hidden_layers", "attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings"
    )
    head.notes.append(
        "the LSTM begins at zeros at every place, as it does there for one sequence: its forget gates change nothing, "
        "and their rows are left out"
    )
    return {"k": k or 1}


def _size_with_forget_gate(name: str, size: Size) -> Size:
    """Return the size that our tensor has in the file: torch's LSTM has a fourth gate, the forget gate.

    Args:
        name: Our name of the tensor.
        size: Its size in a head of this project, whose gates are three: input, cell and output.
    """
    if not name.startswith("gates."):
        return size
    # the gates' rows are stacked: here there are 3 H of them with H the width, in the file 4 H
    return size[0] // 3 * 4, *size[1:]


def _may_lack(head: HeadFolder, name: str) -> str:
    """Return why the tensor of our name `name` may be absent, "" if it may not: only biases of the LSTM may."""
    return "no biases of the LSTM: zeros" if re.fullmatch(r"gates\.\d\.bias", name) else ""


def _make_tensor(head: HeadFolder, name: str, size: torch.Size) -> Tensor:
    """Return one of our tensors for an import: as the file has it, but for those of the LSTM.

    The LSTM starts from zeros at every position, so its forget gate has nothing to forget, and that gate's rows are
    left out. torch adds two biases to the gates, one of the input and one of the state: here they are one.

    Args:
        head: The checkpoint.
        name: Our name of the tensor.
        size: Its size in the head that is built.
    """
    tensor = load_or_zeros(head, name, size)
    # a bias that the file lacks is zeros in our size already
    if not name.startswith("gates.") or name not in head.names:
        return tensor
    if name.endswith(".bias"):
        recurrent = head.names[name].replace("_ih_", "_hh_")
        if recurrent in head.tensors.stored:
            tensor = tensor + _load_recurrent_bias(head, recurrent, tensor.shape)
    # torch's order: input, forget, cell, output
    input_gate, _, cell_gate, output_gate = tensor.chunk(4)
    return torch.cat([input_gate, cell_gate, output_gate])


def _load_recurrent_bias(head: HeadFolder, name: str, size: torch.Size) -> Tensor:
    """Return torch's second bias of the gates (`bias_hh`); its dtype and size are checked here.

    The usual check goes by our names, and this tensor has none.

    Args:
        head: The checkpoint.
        name: The tensor's name in the file.
        size: The size of the first bias, which it must have too.
    """
    bias = head.tensors.load(name)
    if bias.shape != size or not is_plain(bias.dtype):
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
    ignored={**ROTARY, r"lstm\.(weight|bias)_hh_l[01]": "the LSTM has no state that it could read"},
    stored_size=_size_with_forget_gate,
    may_lack=_may_lack,
    make_tensor=_make_tensor,
)


def write_falcon(drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
    """Return a FALCON head as its authors' code reads it, with the LSTM's fourth gate and its recurrent weights."""
    check_family(drafter, target_config, ("llama", "qwen2"), engine)
    tensors = {EMBEDDING: embedding_of(drafter, engine)}
    for name, tensor in tensors_of(drafter).items():
        # all but the LSTM's tensors keep our names
        if not name.startswith("gates."):
            tensors[name] = tensor
            continue
        input_gate, cell_gate, output_gate = tensor.chunk(3)
        # neither the forget gate nor the recurrent weights matter, as the LSTM always starts from a state of zeros
        forget_gate = torch.zeros_like(input_gate)
        gates = torch.cat([input_gate, forget_gate, cell_gate, output_gate])
        # zeros for the recurrent weights, [4 H, H], or the second bias, [4 H], with H the width
        recurrent = torch.zeros_like(gates)
        if gates.ndim == 2:
            recurrent = gates.new_zeros(len(gates), len(input_gate))
        (theirs,) = rename_tensors({name: gates}, GATES)  # the only name in the result
        tensors[theirs] = gates
        tensors[theirs.replace("_ih_", "_hh_")] = recurrent
    more = {"architectures": ["LlamaForCausalLM"], "bias": True, "k_mask": drafter.settings.k}
    return Layout(llama_config(drafter, target_config, **more), tensors, file="pytorch_model.bin")
