"""Falcon's network as its authors name it: EAGLE-1's block behind an LSTM, which begins anew at every place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Config, Layout, TargetConfig, check_family, embedding_of, llama_config, tensors_of
from eagle.formats.networks.network import FOLLOWS, ROTARY, Network, keep_names, rename_tensors
from eagle.formats.networks.network_layout import NetworkLayout
from eagle.formats.reading.head_folder import EMBEDDING, HeadFolder
from eagle.formats.reading.target_files import TargetFiles

FALCON = "falcon"
GATES = {"gates.#.weight": "lstm.weight_ih_l#", "gates.#.bias": "lstm.bias_ih_l#"}
NAMES = {**GATES, **keep_names("layers.0.*", EMBEDDING)}


class Falcon(Network):
    """Falcon heads of their authors."""

    name, method, methods = "a FALCON head", FALCON, (FALCON,)
    tensors = r"lstm\.(weight|bias)"
    spellings = (("Bestpay-inc/Falcon", NAMES),)
    prefixes = ()
    spare: Mapping[str, str] = {
        ROTARY: FOLLOWS,
        r"lstm\.(weight|bias)_hh_l[01]": "the LSTM has no state that it could read",
    }

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> Config:
        """A block of k tokens; EAGLE-1's layer behind an LSTM of two."""
        k = head.keys.read("k_mask")
        if k is None:
            head.problem("config.json: no k_mask, the tokens of a block", "Take it from the config of the training run")
        head.refuse({"hidden_act": head.keys.read("hidden_act") not in (None, "silu")})
        # a second layer and biases would be tensors that nothing here has
        head.take("bias", "num_hidden_layers", "attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings")
        head.notes.append(
            "the LSTM begins at zeros at every place, as it does there for one text: its forget gates change nothing, "
            "and their rows are left out"
        )
        return {"k": k or 1}

    def size_of(self, name: str, size: tuple[int, ...]) -> tuple[int, ...]:
        """An LSTM has a fourth gate, the second of its rows."""
        return (size[0] // 3 * 4, *size[1:]) if name.startswith("gates.") else size

    def may_lack(self, head: HeadFolder, name: str) -> str:
        """Biases of the gates."""
        return "no biases of the LSTM: zeros" if re.fullmatch(r"gates\.\d\.bias", name) else ""

    def make_tensor(self, head: HeadFolder, name: str, size: torch.Size) -> Tensor:
        """Input, cell and output gate; both biases of a gate are one."""
        read = super().make_tensor(head, name, size)
        if not name.startswith("gates.") or name not in head.names:
            return read
        if name.endswith(".bias") and (theirs := head.names[name].replace("_ih_", "_hh_")) in head.tensors.stored:
            read = read + head.tensors.load(theirs)
        entry, _, cell, output = read.chunk(4)
        return torch.cat([entry, cell, output])


@dataclass(frozen=True)
class PublishedFalcon(NetworkLayout):
    """Falcon's network as its authors' code names it."""

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """From a state of zeros neither the forget gate nor the recurrent weights matter: both are zeros."""
        check_family(drafter, target_config, ("llama", "qwen2"), engine)
        tensors = {EMBEDDING: embedding_of(drafter, engine)}
        for name, tensor in tensors_of(drafter).items():
            if name.startswith("gates."):
                entry, cell, output = tensor.chunk(3)
                read = torch.cat([entry, torch.zeros_like(entry), cell, output])  # in the order of torch
                recurrent = read.new_zeros(len(read), *[len(entry)] * (read.ndim - 1))
                (theirs,) = rename_tensors({name: read}, GATES)
                tensors |= {theirs: read, theirs.replace("_ih_", "_hh_"): recurrent}
            else:
                tensors[name] = tensor
        more = {"architectures": ["LlamaForCausalLM"], "bias": True, "k_mask": drafter.settings.k}
        config = llama_config(drafter, target_config, **more)
        return Layout(config, tensors, self.serve, "pytorch_model.bin")
