"""A checkpoint of any layout as a head of this project, with every choice that it left open told."""

# H width, D tokens that can be drafted, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.data.identity import folder_of
from eagle.drafters import DRAFTERS
from eagle.drafters.parts.blocks import head_shape
from eagle.formats.checkpoint import load_head
from eagle.formats.files import Tensors, folder_at, read_json, read_tensors
from eagle.formats.keys import Keys, rope_of
from eagle.formats.tensors import FEATURES, FUSED, OWN, Reading

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
HEADS = ("lm_head.weight", "embed_out.weight")
SOME = 16  # tokens of a draft vocabulary, below which chance may look like ids


@dataclass(frozen=True)
class Served:
    """The target that a head is said to be for, as its files have it."""

    path: str
    layers: int
    width: int
    vocab: int
    positions: int | None
    rope: dict[str, Any]  # empty where it is not one for all layers
    tied: bool
    tensors: Tensors

    @classmethod
    def at(cls, path: str) -> Served:
        """That of a folder, or of the hub."""
        folder = folder_at(folder_of(path, None, ("*.safetensors", "*.bin", "*.json")))
        config = read_json(folder, "config.json")
        text = config.get("text_config")
        keys = Keys(text if isinstance(text, dict) else config)
        layers, width, vocab = (keys.size(name) for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
        if layers is None or width is None or vocab is None:
            raise ValueError(
                f"the config.json of {path} does not tell layers, width and vocabulary: is it the target's?"
            )
        tied, rope = keys.flag("tie_word_embeddings"), rope_of(keys, [])
        rope = {} if keys.wrong else rope  # some targets turn each kind of layer in its own way
        positions = keys.size("max_position_embeddings")
        return cls(path, layers, width, vocab, positions, rope, bool(tied), read_tensors(folder, most=None))

    def matrix(self, names: tuple[str, ...]) -> Tensor | None:
        """Its embedding or its LM head, [V, H]."""
        found = [known for known in self.tensors.stored for name in names if known.endswith(name)]
        if not found and names is HEADS and self.tied:
            return self.matrix(EMBEDDINGS)
        return self.tensors.load(found[0]) if len(found) == 1 else None


def embedding_dtype(path: str) -> torch.dtype:
    """The precision in which a target's files hold its embedding; float32, which rounds none, if they do not tell."""
    try:
        folder = folder_at(folder_of(path, None, ("*.safetensors", "*.json")))
        stored = read_tensors(folder, most=None).stored
    except (OSError, ValueError):  # whoever loads the target says what is wrong with it
        return torch.float32
    dtypes = {tensor.dtype for name, tensor in stored.items() if name.endswith(EMBEDDINGS)}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16} else torch.float32


def apart(own: Tensor, its: Tensor) -> int:
    """How many rows differ, both rounded to the coarser of their dtypes."""
    coarse = max(own.dtype, its.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    return int((own.to(coarse) != its.to(coarse)).any(1).sum())


def taps_of(reading: Reading, layers: int | None, asked: tuple[int, ...] | None, notes: list[str]) -> tuple[int, ...]:
    """The layers whose inputs a head reads; what its config says in two ways must be the same."""
    if reading.network == FEATURES:
        if asked not in (None, (-1,)):
            raise ValueError(f"taps are {asked}, but a head with EAGLE-1's network reads (-1,): leave them out")
        return (-1,)
    stated = {"eagle_aux_hidden_state_layer_ids": reading.inputs}
    if reading.outputs is not None:
        stated["eagle_config.eagle_aux_hidden_state_layer_ids + 1"] = tuple(layer + 1 for layer in reading.outputs)
    known = {name: layers_ for name, layers_ in stated.items() if layers_ is not None}
    if asked is not None:
        taps = asked
        notes.append(f"taps {taps} as asked; config.json says {known or 'nothing'}")
    elif len(set(known.values())) > 1:
        raise ValueError(
            f"the layer ids disagree: {known}. The first count inputs of layers and the others, one less, outputs: "
            "say which inputs the head was trained on, with --taps"
        )
    elif known:
        taps = next(iter(known.values()))
        notes.append(f"taps {taps}, from {' and '.join(known)}")
    elif layers is None:
        raise ValueError(
            "no layer ids in config.json: say the inputs that the head was trained on with --taps, or the target with "
            "--target, so that they become 2, the middle and the last but two, as engines take them"
        )
    else:
        taps = (2, layers // 2, layers - 3)
        notes.append(f"no layer ids: taps {taps}, as engines take them of a target with {layers} layers")
    most = layers if layers is not None else max(taps, default=0) + 1
    if len(taps) != reading.taps or len(set(taps)) != len(taps) or not all(-1 <= tap < most for tap in taps):
        raise ValueError(
            f"the taps are {taps}, expected {reading.taps} different ones (fc.weight reads so many)"
            f"{'' if layers is None else f' of 0 to {layers - 1}, the inputs of the layers of this target'}: use --taps"
        )
    if list(taps) != sorted(taps):
        notes.append("the taps are not in ascending order; vLLM would sort them and feed fc the wrong way round")
    return taps


def converted(
    reading: Reading, served: Served | None, taps: tuple[int, ...] | None
) -> tuple[TrainableDrafter, list[str]]:
    """The head, and all that was left open or left out."""
    if reading.problems:
        told = "\n".join(f"- {one.what}{f'. {one.fix}' if one.fix else ''}" for one in reading.problems)
        raise ValueError(f"{reading.folder} cannot become a head of this project:\n{told}")
    notes = [*reading.notes]
    if reading.unknown:
        notes.append(f"unknown keys of config.json, not used: {', '.join(reading.unknown):.400}")
    if served and (served.width, served.vocab) != (reading.shape["hidden_size"], reading.shape["vocab_size"]):
        raise ValueError(
            f"the head is for a target {reading.shape['hidden_size']} wide with {reading.shape['vocab_size']} tokens, "
            f"{served.path} is {served.width} wide with {served.vocab}: name the right target"
        )
    found = taps_of(reading, served.layers if served else None, taps, notes)
    if reading.layout == OWN:
        try:
            return load_head(reading.folder), notes
        except Exception as error:  # of many kinds: settings and sizes go through pydantic and transformers
            raise ValueError(f"{reading.folder} is no head of this project: {error!r:.500}") from None
    weights = _weights(reading, served, notes)
    head = _empty(reading, found, weights, served, notes)
    missing, left = head.state_dict().keys() - weights.keys(), weights.keys() - head.state_dict().keys()
    assert not missing and not left, (missing, left)
    if dtypes := {weight.dtype for weight in weights.values() if weight.is_floating_point()} - {torch.float32}:
        notes.append(f"weights in {', '.join(sorted(map(str, dtypes)))}, held here in torch.float32, which is exact")
    head.load_state_dict(weights)
    return head, notes


def _empty(
    reading: Reading, taps: tuple[int, ...], weights: dict[str, Tensor], served: Served | None, notes: list[str]
) -> TrainableDrafter:
    """A head of that network and those sizes."""
    sizes, given = dict(reading.shape), reading.switches
    positions = served.positions if served else None
    if positions not in (None, sizes["max_position_embeddings"]) and sizes["rope_parameters"]["rope_type"] == "default":
        was = sizes["max_position_embeddings"]
        notes.append(
            f"max_position_embeddings {was} became {positions}, the target's: it changes nothing that is computed"
        )
        sizes["max_position_embeddings"] = positions
    wide = {"intermediate_size": sizes["intermediate_size"]}
    if reading.network == FUSED:
        sizes["draft_vocab_size"] = reading.said
        said = reading.said if reading.said < sizes["vocab_size"] else None
        settings = {"taps": taps, "draft_vocab": said, **given, **wide}
    else:
        settings = {"fc_bias": "fc.bias" in weights, **wide}
    method: Any = DRAFTERS["eagle3" if reading.network == FUSED else "eagle1"]
    try:  # transformers judges the rotary parameters
        shape = head_shape(SimpleNamespace(**sizes), **{k: v for k, v in sizes.items() if k == "draft_vocab_size"})
        head: TrainableDrafter = method(method.Settings(**settings), shape)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{reading.folder}: no head of these sizes can be made: {error!r:.300}") from None
    return head


def _weights(reading: Reading, served: Served | None, notes: list[str]) -> dict[str, Tensor]:
    """The tensors that the head keeps, the rest compared and told."""
    spare = ("embed_tokens.weight", "lm_head.weight") if reading.network == FEATURES else ("embed_tokens.weight",)
    weights = {}
    for name in sorted(reading.names):
        if name.endswith("inv_freq"):
            notes.append(f"{reading.names[name]} is left out: it follows from the rotary parameters")
        elif name in spare:
            _compare(reading, name, served, notes)
        else:
            weights[name] = reading.load(name)
            if weights[name].is_floating_point() and not bool(weights[name].isfinite().all()):
                raise ValueError(f"{reading.names[name]} holds numbers that are not finite: take an earlier checkpoint")
    bias = weights.get("fc.bias")
    if bias is not None and not bool(bias.any()):
        weights.pop("fc.bias")
        notes.append("fc.bias is all zeros and left out: it changes nothing")
    elif bias is not None and reading.network == FEATURES and reading.keys.values.get("bias") is False:
        raise ValueError("config.json: bias is false, and fc.bias is there and not zero: correct the one that is wrong")
    elif bias is not None and reading.network == FUSED:
        raise ValueError("fc.bias is not zero, and EAGLE-3 has no bias in fc: no engine would add it")
    if reading.network == FUSED:
        _vocabulary(reading, weights, notes)
    return weights


def _compare(reading: Reading, name: str, served: Served | None, notes: list[str]) -> None:
    """What the head will borrow of the target, beside what the checkpoint holds of it."""
    its = served.matrix(EMBEDDINGS if name.startswith("embed") else HEADS) if served else None
    told = f"{reading.names[name]} is left out, heads here use the target's"
    if served is None or its is None:
        notes.append(
            f"{told}; not compared{': no --target' if served is None else ', the target has none by that name'}"
        )
        return
    own = reading.load(name)
    if own.shape != its.shape:
        raise ValueError(
            f"{reading.names[name]} is {list(own.shape)}, the target's is {list(its.shape)}: another target?"
        )
    differing = apart(own, its)
    if differing and name.startswith("lm_head"):
        raise ValueError(
            f"{reading.names[name]} differs from the target's in {differing} rows: EAGLE-1 has none of its own"
        )
    notes.append(f"{told}; {'they are equal' if not differing else f'{differing} of {len(own)} rows DIFFER from it'}")


def _vocabulary(reading: Reading, weights: dict[str, Tensor], notes: list[str]) -> None:
    """`d2t` as offsets and `t2d` as a mask where the head says some tokens alone; neither where it says all."""
    vocab, d2t, t2d = reading.shape["vocab_size"], weights.pop("d2t", None), weights.pop("t2d", None)
    if reading.said == vocab:
        if d2t is not None and bool(d2t.any()):
            raise ValueError(
                "d2t is not zero though the head says all tokens: correct draft_vocab_size, or leave it out"
            )
        notes += [f"{name} is left out: the head says all tokens" for name in ("d2t", "t2d") if name in reading.names]
        return
    assert d2t is not None
    tokens, why = drafted(d2t.long(), vocab)
    if tokens is None:
        raise ValueError(why)
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[tokens] = True
    if t2d is None:
        notes.append("no t2d: made from d2t")
    elif not torch.equal(t2d.bool(), mask):
        raise ValueError(f"t2d marks {int(t2d.bool().sum())} tokens, and not those of d2t: one of them is wrong")
    weights |= {"d2t": d2t.long(), "t2d": mask}


def drafted(d2t: Tensor, vocab: int) -> tuple[Tensor | None, str]:
    """[D], the tokens that offsets stand for, or None and why they cannot be offsets."""
    tokens = d2t + torch.arange(len(d2t))
    # ids rise at every place; offsets stay where two tokens that follow each other are both said, as some always are
    if len(d2t) >= SOME and bool((d2t.diff() > 0).all()) and bool((d2t >= 0).all()) and bool((d2t < vocab).all()):
        return None, "d2t holds token ids, expected offsets, id - place: subtract 0, 1, 2, ... from it"
    if bool((tokens < 0).any() | (tokens >= vocab).any()):
        worst = int(tokens[(tokens < 0) | (tokens >= vocab)][0])
        return None, f"d2t leads to token {worst} of {vocab}: expected offsets, id - place"
    if len(tokens.unique()) < len(tokens):
        return None, "d2t leads to some tokens twice: expected offsets, id - place, of different tokens"
    return tokens, ""


def folder_for(out: str | Path, source: Path) -> Path:
    """A place for a new head that is empty and not mixed with its source."""
    folder = Path(out)
    aside = folder.with_name(folder.name + ".part")
    for path in (folder, aside):
        if path.is_symlink() or (path.exists() and (path is aside or not path.is_dir() or any(path.iterdir()))):
            raise ValueError(f"{path} is there already: name a new folder, or take it away")
    real = folder.resolve()
    if real == source or real.is_relative_to(source) or source.is_relative_to(real):
        raise ValueError(f"{out} lies in {source}, or around it: name another folder for the head")
    return folder
