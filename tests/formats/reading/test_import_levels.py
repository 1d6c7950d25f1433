"""Medusa, Hydra, MLP speculator and Falcon heads as other tools write them: what is read, and what is said of it."""

# H hidden, V vocabulary

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle.formats.checkpoint import load_head
from eagle.formats.reading.foreign import import_head, inspect, read_head
from tests import foreign_heads as made
from tests.formats.every_layout import (
    INNER,
    LEVELS,
    MEDUSA_BLOCKS,
    MEDUSA_CONFIGS,
    SPELLINGS,
    falcon,
    hydra,
    medusa,
    medusa_names,
    medusa_weights,
    speculator,
)
from tests.formats.make_heads import assert_equal, assert_refused, change_head

H = made.H
V = made.V


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_medusa_heads_are_read_in_every_spelling(spelling: str, tmp_path: Path) -> None:
    """Every tensor becomes the head's, bit by bit; ModelOpt's two spellings are one layout."""
    folder = made.write(tmp_path / "theirs", medusa(spelling))
    found = inspect(folder)
    assert found.kind == "Medusa heads"
    assert found.layout == spelling.split(",")[0]
    assert not found.fatal, found

    message = import_head(folder, tmp_path / "ours")
    head = load_head(tmp_path / "ours")
    assert head.settings.levels == LEVELS
    assert head.settings.layers == MEDUSA_BLOCKS
    assert head.settings.lm_head == "own"
    assert_equal(head.state_dict(), medusa_weights(medusa_names(spelling)))
    # published configs count too few heads, so that is a note and no error
    assert ("says 2 heads, the file holds 3" in message) == (spelling == "FasterDecoding/Medusa")


def test_medusa_heads_that_borrow_the_lm_head(tmp_path: Path) -> None:
    """The first published heads have none and tell no vocabulary; vLLM's folders hold a copy of the target's."""
    target = made.write_target(tmp_path / "target")
    names = medusa_names("FasterDecoding/Medusa", own=False)
    weights = medusa_weights(names)
    config = {
        **MEDUSA_CONFIGS["FasterDecoding/Medusa"],
        "version": "2",
        "medusa_num_heads": LEVELS,
    }
    tensors = {names[name]: tensor for name, tensor in weights.items()}
    published = made.write(tmp_path / "published", (config, tensors))

    with pytest.raises(ValueError, match=r"no vocab_size in config\.json"):
        read_head(published)

    vllm_names = medusa_names("vLLM")
    config = {**MEDUSA_CONFIGS["vLLM"], "original_lm_head": True}
    tensors = {vllm_names[name]: tensor for name, tensor in weights.items()}
    # the seed of the LM head that `write_target` writes
    tensors["lm_heads.0.weight"] = made.drawn(V, H, seed=8)
    vllm = made.write(tmp_path / "vllm", (config, tensors))
    for folder in (published, vllm):
        head = read_head(folder, target)
        assert head.settings.lm_head == "target"
        assert head.shape.vocab_size == V
        assert_equal(head.state_dict(), weights)

    assert "they are equal" in str(inspect(vllm, target))

    tensors["lm_heads.0.weight"] = made.drawn(V, H, seed=99)
    stale = made.write(tmp_path / "stale", (config, tensors))
    with pytest.raises(ValueError, match=f"differs from the target's in {V} of {V} rows"):
        read_head(stale, target)


def test_medusa_heads_in_one_file_with_their_target(tmp_path: Path) -> None:
    """ModelOpt saves the model with its heads: the target's tensors are named and left out."""
    config, tensors = medusa("ModelOpt")
    config = {
        "architectures": ["LlamaForCausalLM"],
        **made.LLAMA,
        **config,
    }
    target = {
        "model.embed_tokens.weight": made.embedding(),
        "model.norm.weight": made.drawn(H),
        "lm_head.weight": made.drawn(V, H),
    }
    folder = made.write(tmp_path / "theirs", (config, {**target, **tensors}))
    message = import_head(folder, tmp_path / "ours")

    assert "model.embed_tokens.weight, model.norm.weight left out" in message
    assert "lm_head.weight is left out, heads here use the target's; not compared" in message

    weights = medusa_weights(medusa_names("ModelOpt"))
    assert_equal(load_head(tmp_path / "ours").state_dict(), weights)


@pytest.mark.parametrize(
    "name", ["medusa_lm_head.pt", "pytorch_model.bin", "medusa_lm_head.safetensors"]
)
def test_the_files_that_heads_come_in(name: str, tmp_path: Path) -> None:
    """Pickled ones are read as weights alone."""
    made.write(tmp_path, medusa("FasterDecoding/Medusa"))
    written = tmp_path / "model.safetensors"
    if name.endswith(".safetensors"):
        written.rename(tmp_path / name)
    else:
        torch.save(load_file(written), tmp_path / name)
        written.unlink()
    weights = medusa_weights(medusa_names("FasterDecoding/Medusa"))
    assert_equal(read_head(tmp_path).state_dict(), weights)


def test_a_single_safetensors_file_is_preferred_to_a_pickle(tmp_path: Path) -> None:
    """Whatever its name is: nothing of a pickle is read without need."""
    made.write(tmp_path, medusa("FasterDecoding/Medusa"))
    (tmp_path / "model.safetensors").rename(tmp_path / "heads.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    weights = medusa_weights(medusa_names("FasterDecoding/Medusa"))
    assert_equal(read_head(tmp_path).state_dict(), weights)


def test_medusa_heads_without_biases_get_zeros(tmp_path: Path) -> None:
    """vLLM's have none unless their config says so; one that is missing among others is missing."""
    config, tensors = made.saying(medusa("vLLM"), medusa_fc_bias=None)
    biased = made.write(tmp_path / "biased", (config, tensors))
    assert "drops them in silence" in str(inspect(biased))

    # their layers compute the same with biases of zeros
    biases = [name for name in tensors if name.endswith("bias")]
    head = made.without((config, tensors), *biases)
    message = import_head(made.write(tmp_path / "theirs", head), tmp_path / "ours")
    assert "no biases: zeros" in message
    for name, tensor in load_head(tmp_path / "ours").state_dict().items():
        assert tensor.any() != name.endswith("bias")

    head = made.without((config, tensors), *biases[1:])
    with pytest.raises(ValueError, match=r"blocks\.1\.0\.bias is missing"):
        read_head(made.write(tmp_path / "some", head))


def test_what_vllm_reads_otherwise_in_medusa_heads(tmp_path: Path) -> None:
    """It drops biases, and takes any key with `num` and `heads` for a count; such heads have no taps to name."""
    changes = {
        "medusa_fc_bias": False,
        "num_attention_heads": 4,
        "odd_key": 1,
    }
    made.write(tmp_path, change_head(medusa("vLLM"), changes))
    found = inspect(tmp_path)
    assert found.fatal
    assert "drops them in silence [vLLM]" in str(found)
    assert "unknown keys of config.json: num_attention_heads, odd_key" in str(found)
    with pytest.raises(ValueError, match=r"taps are \(2,\)"):
        read_head(tmp_path, taps=(2,))


@pytest.mark.parametrize(
    ("prefix", "tied"),
    [
        ("", False),
        ("speculator.", True),
    ],
)
def test_every_tensor_of_a_speculator_is_read(
    prefix: str,
    tied: bool,
    tmp_path: Path,
) -> None:
    """Of tensors that levels share, the first is kept, and the message names the others."""
    config, tensors = speculator(prefix, tied)
    folder = made.write(tmp_path / "theirs", (config, tensors))
    found = inspect(folder)
    assert found.layout == "fms-extras"
    assert not found.fatal, found
    assert "unknown" not in str(found)

    message = import_head(folder, tmp_path / "ours")
    assert ("are left out: each equals another tensor" in message) == tied

    head = load_head(tmp_path / "ours")
    assert head.settings.levels == LEVELS
    assert head.settings.tie_weights == tied
    assert head.settings.scale_input == tied

    ours = head.state_dict()
    # five tensors a level; tied, the first level's and the second projection
    assert len(ours) == (6 if tied else 5 * LEVELS)
    assert_equal(ours, {name: tensors[prefix + name] for name in ours})


@pytest.mark.parametrize("level", [0, 2])
def test_a_tied_speculator_whose_copies_were_dropped(level: int, tmp_path: Path) -> None:
    """Safetensors writes a shared tensor once, under the name of any level; the config tells how many levels."""
    config, tensors = speculator("speculator.", tied=True)
    kept = {"speculator.proj.0.weight", f"speculator.proj.{max(level, 1)}.weight"}
    for module in ("emb", "ln", "head"):
        kept |= {f"speculator.{module}.{level}.weight", f"speculator.{module}.{level}.bias"}
    some = {name: tensor for name, tensor in tensors.items() if name in kept}
    head = read_head(made.write(tmp_path / "theirs", (config, some)))

    assert head.settings.levels == LEVELS

    ours = head.state_dict()
    assert_equal(ours, {name: tensors[f"speculator.{name}"] for name in ours})


def test_defaults_of_a_speculators_config_are_named(tmp_path: Path) -> None:
    """Whether the state is scaled stands nowhere else."""
    head = ({"model_type": "mlp_speculator"}, speculator()[1])
    message = import_head(made.write(tmp_path / "theirs", head), tmp_path / "ours")
    assert "no scale_input: false" in message
    assert "no tie_weights: false" in message
    assert load_head(tmp_path / "ours").settings.levels == LEVELS


@pytest.mark.parametrize("prefix", [False, True])
def test_every_tensor_of_hydra_is_read(prefix: bool, tmp_path: Path) -> None:
    """A block that their code has twice becomes two here, and what it never reads is named."""
    # another theta than the one that Hydra's code has for every target
    target = made.write_target(tmp_path / "target", rope_theta=5e5)
    tensors = hydra(prefix)[1]
    folder = made.write(tmp_path / "theirs", hydra(prefix))
    found = inspect(folder, target)

    assert found.layout == "zankner/Hydra"
    assert not found.fatal, found
    assert "unknown" not in str(found)

    message = import_head(folder, tmp_path / "ours", target)
    assert "blocks 1 to 2 of a level share weights" in message

    head: Any = load_head(tmp_path / "ours")
    assert head.settings.levels == LEVELS
    assert head.settings.layers == 3
    assert head.settings.prefix == prefix

    for level in range(LEVELS):
        for block in range(3):
            index = 2 * block + 1 if prefix else block
            theirs = tensors[f"hydra_mlp.{level}.{index}.linear.weight"]
            assert torch.equal(head.blocks[level][block].weight, theirs)
        name = f"hydra_lm_head.{level}.1" if prefix else f"hydra_lm_head.{level}"
        assert torch.equal(head.heads[level].bias, tensors[f"{name}.bias"])
    if prefix:
        assert "embed_tokens.weight left out: their code never reads it" in message
        assert "input_embed_fn.weight is left out" in message
        assert "they are equal" in message
        assert "rope_theta of the prefix layer: 10000" in message
        assert head.shape.rope_parameters["rope_theta"] == 1e4
        assert torch.equal(head.norm.weight, tensors["prefix_embeding_layer.norm.weight"])


def test_a_prefix_layer_needs_its_target(tmp_path: Path) -> None:
    """Its sizes stand in no file of the head."""
    folder = made.write(tmp_path / "head", hydra())
    assert_refused(folder, "the sizes of the prefix layer are the target's")


@torch.no_grad()
def test_every_tensor_of_falcon_is_read(tmp_path: Path) -> None:
    """The head keeps what an LSTM without a state reads of its weights; torch's LSTM gives the same output."""
    target = made.write_target(tmp_path / "target")
    tensors = falcon()[1]
    folder = made.write(tmp_path / "theirs", falcon())
    message = import_head(folder, tmp_path / "ours", target)

    assert "its forget gates change nothing" in message
    assert "the LSTM has no state that it could read" in message
    assert "embed_tokens.weight is left out" in message
    assert "they are equal" in message

    head: Any = load_head(tmp_path / "ours")
    assert head.settings.k == 3
    assert head.shape.rms_norm_eps == made.LLAMA["rms_norm_eps"]
    assert torch.equal(head.layers[0].mlp.up_proj.weight, tensors["layers.0.mlp.up_proj.weight"])

    # the oracle: the whole LSTM, whose forget gates meet a state of zeros
    lstm = torch.nn.LSTM(2 * H, H, num_layers=2).eval()
    weights = {name.removeprefix("lstm."): tensors[name] for name in tensors if "lstm" in name}
    lstm.load_state_dict(weights)
    embedded = made.drawn(5, H)
    hidden = made.drawn(5, H, seed=1)
    read = torch.cat([embedded, hidden], dim=-1)
    # five sequences of one token each: the first axis of torch's LSTM is time
    theirs = lstm(read[None])[0][0]
    # as one sequence of five tokens the state would go on, and the outputs would differ
    continued = lstm(read[:, None])[0][:, 0]

    torch.testing.assert_close(
        head.enter(embedded, hidden),
        theirs,
        rtol=0,
        atol=1e-6,
    )
    assert (continued - theirs).abs().max() > 1e-2


# three columns, where all layers are as wide as the state
WRONG_BLOCK = made.drawn(H, 3)
# what is changed in a head, and a word of the refusal
DAMAGED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "medusa": [
        ({"1.0.linear.weight": None}, "blocks.1.0.weight is missing"),
        ({"medusa_num_heads": 5}, "says 5 heads, the file holds 3"),
        ({"medusa_num_layers": 3}, "says 3 layers of each, the file holds 2"),
        ({"extra.weight": made.drawn(2)}, "unknown tensors: extra.weight"),
        ({"token_map": torch.arange(4)}, "token_map"),
        ({"0.1.linear.weight": WRONG_BLOCK}, "is [16, 3], expected [16, 16]"),
        ({"0.3.weight": made.drawn(V, H, seed=50)}, "0.3.weight differs from 0.2.weight"),
        ({"0.0.linear.bias": torch.arange(H)}, "expected plain weights"),
        ({"0.0.linear.bias": lambda bias: bias.fill_(torch.nan)}, "not finite"),
        ({"hidden_size": 8}, "hidden_size is 8, the tensors have 16"),
    ],
    "speculator": [
        ({"n_predict": 4}, "says 4 levels, the file holds 3"),
        ({"n_predict": 2**30}, "expected at most 64"),
        ({"inner_dim": H}, "inner_dim is 16, the tensors have 8"),
        ({"inner_dim": "wide"}, "inner_dim is 'wide'"),
        ({"tie_weights": True}, "differs from emb.0.weight"),
        ({"tie_weights": "yes"}, "tie_weights is 'yes', expected true or false"),
        ({"head.1.weight": made.drawn(V, INNER + 1)}, "is [61, 9], expected [61, 8]"),
        ({"ln0.weight": made.drawn(H)}, "unknown tensors: ln0.weight"),
    ],
    "hydra": [
        ({"grounded_heads": False}, "grounded_heads is false"),
        ({"hydra_head_arch": "eagle-attn"}, "hydra_head_arch is 'eagle-attn'"),
        ({"hidden_state_offset": 1}, "hidden_state_offset is 1"),
        ({"hydra_mlp.1.1.res_connection.bias": None}, "blocks.1.0.residual.bias is missing"),
        ({"hydra_lm_head.0.1.bias": None}, "heads.0.bias is missing"),
        ({"input_embed_fn.weight": made.drawn(V, H)}, "differs from the target's in 61"),
        ({"hydra_mlp.0.3.linear.weight": WRONG_BLOCK}, "is [16, 3], expected"),
    ],
    "falcon": [
        ({"k_mask": None}, "no k_mask"),
        ({"lstm.weight_ih_l1": None}, "gates.1.weight is missing"),
        ({"lstm.weight_ih_l0": WRONG_BLOCK}, "expected [64, 32]"),
        ({"fc.weight": WRONG_BLOCK}, "unknown tensors: fc.weight"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ],
}
HEADS = {
    "medusa": medusa("FasterDecoding/Medusa"),
    "speculator": speculator(),
    "hydra": hydra(),
    "falcon": falcon(),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_head_is_refused(kind: str, tmp_path: Path) -> None:
    """By inspect and import alike, with what is wrong in it."""
    target = made.write_target(tmp_path / "target")
    for number, (changes, words) in enumerate(DAMAGED[kind]):
        head = change_head(HEADS[kind], changes)
        assert_refused(made.write(tmp_path / f"head{number}", head), words, target)
