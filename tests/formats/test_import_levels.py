"""MLP speculators, Hydra and Falcon heads as their authors write them: what is read, told and refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle.formats.checkpoint import load_head
from eagle.formats.reading.foreign import import_head, inspect, read_head
from tests import foreign_heads as made

H, V, INNER, LEVELS = made.H, made.V, 8, 3


def speculator(prefix: str = "", tied: bool = False) -> made.Head:
    """One of fms-extras, which writes what is tied once for each level."""
    held: dict[str, Tensor] = {}
    for level in range(LEVELS):
        own = 0 if tied else level
        held |= {
            f"emb.{level}.weight": made.drawn(V, INNER, seed=own),
            f"proj.{level}.weight": made.drawn(
                INNER, INNER if level else H, seed=min(level, 1) if tied else level
            ),
            f"ln.{level}.weight": made.drawn(INNER, seed=own),
            f"ln.{level}.bias": made.drawn(INNER, seed=10 + own),
            f"head.{level}.weight": made.drawn(V, INNER, seed=20 + own),
        }
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": H,
        "inner_dim": INNER,
        "vocab_size": V,
        "n_predict": LEVELS,
        "n_candidates": 5,
        "top_k_tokens_per_head": [5, 4, 3],
        "tie_weights": tied,
        "scale_input": tied,
    }
    return config, {prefix + name: tensor for name, tensor in held.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prefix", ["", "speculator."])
def test_every_tensor_of_a_speculator_is_read(prefix: str, tied: bool, tmp_path: Path) -> None:
    """Of those that are tied, the first, and the others are told."""
    config, held = speculator(prefix, tied)
    folder = made.write(tmp_path / "theirs", (config, held))
    found = inspect(folder)
    assert not found.fatal and found.layout == "fms-extras" and "unknown" not in str(found), found
    told = import_head(folder, tmp_path / "ours")
    assert ("are left out: they are what other levels have too" in told) == tied
    head = load_head(tmp_path / "ours")
    assert (head.settings.levels, head.settings.tie_weights, head.settings.scale_input) == (
        LEVELS,
        tied,
        tied,
    )
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, held[prefix + name])
    assert len(head.state_dict()) == (6 if tied else 5 * LEVELS)


@pytest.mark.parametrize("kept", [0, 2])
def test_a_tied_speculator_whose_copies_were_dropped(kept: int, tmp_path: Path) -> None:
    """By safetensors, which writes a shared tensor once, under one name or another; the levels stand in the config."""
    config, held = speculator("speculator.", tied=True)
    names = {
        f"speculator.{part}.{kept}.{kind}"
        for part in ("emb", "ln", "head")
        for kind in ("weight", "bias")
    }
    names |= {"speculator.proj.0.weight", f"speculator.proj.{max(kept, 1)}.weight"}
    some = {name: tensor for name, tensor in held.items() if name in names}
    head = read_head(made.write(tmp_path / "theirs", (config, some)))
    assert head.settings.levels == LEVELS
    assert all(
        torch.equal(tensor, held[f"speculator.{name}"])
        for name, tensor in head.state_dict().items()
    )


def test_what_a_config_of_a_speculator_leaves_open_is_told(tmp_path: Path) -> None:
    """Whether the state is scaled stands nowhere else."""
    _, held = speculator()
    told = import_head(
        made.write(tmp_path / "theirs", ({"model_type": "mlp_speculator"}, held)), tmp_path / "ours"
    )
    assert "no scale_input: false" in told and "no tie_weights: false" in told
    assert load_head(tmp_path / "ours").settings.levels == LEVELS


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda config, held: held.pop("ln.1.bias"), "ln.1.bias is missing"),
        (lambda config, held: config.update(n_predict=4), "says 4 levels, the file holds 3"),
        (lambda config, held: config.update(n_predict=2**30), "expected at most 64"),
        (lambda config, held: config.update(inner_dim=H), "inner_dim is 16, the tensors have 8"),
        (lambda config, held: config.update(inner_dim="wide"), "inner_dim is 'wide'"),
        (lambda config, held: config.update(tie_weights=True), "differs from emb.0.weight"),
        (
            lambda config, held: config.update(tie_weights="yes"),
            "tie_weights is 'yes', expected true or false",
        ),
        (
            lambda config, held: held.update({"head.1.weight": made.drawn(V, 9)}),
            "is [61, 9], expected [61, 8]",
        ),
        (
            lambda config, held: held.update({"ln0.weight": made.drawn(H)}),
            "unknown tensors: ln0.weight",
        ),
    ],
)
def test_a_spoilt_speculator_is_refused(spoil: Any, words: str, tmp_path: Path) -> None:
    """By inspect and import alike."""
    config, held = speculator()
    spoil(config, held)
    refuses(made.write(tmp_path / "head", (config, held)), words)


def hydra(prefix: bool = True, layers: int = 3) -> made.Head:
    """Hydra heads of their authors, whose later blocks are one block by several names."""
    held: dict[str, Tensor] = {}
    for level in range(LEVELS):
        for place in range(layers):
            name, own = (
                f"hydra_mlp.{level}.{2 * place + 1 if prefix else place}",
                10 * level + min(place, 1),
            )
            wide = H if place else (level + 2) * H
            held |= {
                f"{name}.linear.weight": made.drawn(H, wide, seed=own),
                f"{name}.linear.bias": made.drawn(H, seed=own),
            }
            if not place:
                held[f"{name}.res_connection.weight"] = made.drawn(H, wide, seed=own + 5)
                held[f"{name}.res_connection.bias"] = made.drawn(H, seed=own + 5)
        name = f"hydra_lm_head.{level}.1" if prefix else f"hydra_lm_head.{level}"
        held |= {
            f"{name}.weight": made.drawn(V, H, seed=level),
            f"{name}.bias": made.drawn(V, seed=level),
        }
    if prefix:
        layer = "prefix_embeding_layer."
        held |= made.block(f"{layer}layers.0.", H)
        held |= {
            f"{layer}layers.0.input_layernorm.weight": made.drawn(H),
            f"{layer}norm.weight": made.drawn(H, seed=1),
        }
        held |= {f"{layer}layers.0.self_attn.rotary_emb.inv_freq": made.drawn(4)}
        held |= {
            f"{layer}embed_tokens.weight": made.drawn(V, H),
            "input_embed_fn.weight": made.embedding(),
        }
    config = {
        "hydra_num_heads": LEVELS,
        "hydra_num_layers": layers,
        "hydra_head_arch": "prefix-mlp" if prefix else "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": "some/target",
        "transformers_version": "4.31.0",
    }
    return config, held


@pytest.mark.parametrize("prefix", [False, True])
def test_every_tensor_of_hydra_is_read(prefix: bool, tmp_path: Path) -> None:
    """Those that its code has twice become two here, and what it never reads is told."""
    target = made.write_target(tmp_path / "target", rope_theta=5e5)
    config, held = hydra(prefix)
    folder = made.write(tmp_path / "theirs", (config, held))
    found = inspect(folder, target)
    assert not found.fatal and found.layout == "zankner/Hydra" and "unknown" not in str(found), (
        found
    )
    told = import_head(folder, tmp_path / "ours", target)
    assert "blocks 1 to 2 of a level share weights" in told
    head: Any = load_head(tmp_path / "ours")
    assert (head.settings.levels, head.settings.layers, head.settings.prefix) == (LEVELS, 3, prefix)
    step = 2 if prefix else 1
    for level in range(LEVELS):
        for place in range(3):
            theirs = held[f"hydra_mlp.{level}.{step * place + step - 1}.linear.weight"]
            assert torch.equal(head.blocks[level][place].weight, theirs)
        assert torch.equal(
            head.heads[level].bias, held[f"hydra_lm_head.{level}.{'1.' if prefix else ''}bias"]
        )
    if prefix:
        assert "embed_tokens.weight left out: their code never reads it" in told
        assert (
            "input_embed_fn.weight is left out, heads here use the target's; they are equal" in told
        )
        assert "rope_theta of the prefix layer: 10000" in told
        assert head.shape.rope_parameters["rope_theta"] == 1e4  # whatever the target has
        assert torch.equal(head.norm.weight, held["prefix_embeding_layer.norm.weight"])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda config, held: config.update(grounded_heads=False), "grounded_heads is false"),
        (
            lambda config, held: config.update(hydra_head_arch="eagle-attn"),
            "hydra_head_arch is 'eagle-attn'",
        ),
        (lambda config, held: config.update(hidden_state_offset=1), "hidden_state_offset is 1"),
        (
            lambda config, held: held.pop("hydra_mlp.1.1.res_connection.bias"),
            "blocks.1.0.residual.bias is missing",
        ),
        (lambda config, held: held.pop("hydra_lm_head.0.1.bias"), "heads.0.bias is missing"),
        (
            lambda config, held: held.update({"input_embed_fn.weight": made.drawn(V, H)}),
            "differs from the target's in 61",
        ),
        (
            lambda config, held: held.update({"hydra_mlp.0.3.linear.weight": made.drawn(H, 2)}),
            "is [16, 2], expected",
        ),
    ],
)
def test_spoilt_hydra_heads_are_refused(spoil: Any, words: str, tmp_path: Path) -> None:
    """And heads that no method here has."""
    config, held = hydra()
    spoil(config, held)
    refuses(
        made.write(tmp_path / "head", (config, held)), words, made.write_target(tmp_path / "target")
    )


def test_a_prefix_layer_needs_its_target(tmp_path: Path) -> None:
    """Its sizes stand in no file of the head."""
    refuses(
        made.write(tmp_path / "head", hydra()),
        "the sizes of the prefix layer are the target's. Name the target",
    )


def falcon(**changed: Any) -> made.Head:
    """A Falcon head of its authors: EAGLE-1's block, and an LSTM that was trained with all of its parts."""
    held = made.block("layers.0.", H) | {"embed_tokens.weight": made.embedding()}
    for layer, read in enumerate((2 * H, H)):
        held |= {
            f"lstm.weight_{side}_l{layer}": made.drawn(4 * H, size)
            for side, size in {"ih": read, "hh": H}.items()
        }
        held |= {
            f"lstm.bias_{side}_l{layer}": made.drawn(4 * H, seed=layer + len(side))
            for side in ("ih", "hh")
        }
    return {
        **made.LLAMA,
        "architectures": ["LlamaForCausalLM"],
        "bias": True,
        "k_mask": 3,
        **changed,
    }, held


@torch.no_grad()
def test_every_tensor_of_falcon_is_read(tmp_path: Path) -> None:
    """What a state of zeros makes of them; torch's LSTM with all of its weights gives the same."""
    config, held = falcon()
    target = made.write_target(tmp_path / "target")
    told = import_head(made.write(tmp_path / "theirs", (config, held)), tmp_path / "ours", target)
    assert (
        "its forget gates change nothing" in told
        and "the LSTM has no state that it could read" in told
    )
    assert "embed_tokens.weight is left out, heads here use the target's; they are equal" in told
    head: Any = load_head(tmp_path / "ours")
    assert head.settings.k == 3 and head.shape.rms_norm_eps == made.LLAMA["rms_norm_eps"]
    lstm = torch.nn.LSTM(2 * H, H, num_layers=2).eval()
    lstm.load_state_dict(
        {name.removeprefix("lstm."): tensor for name, tensor in held.items() if "lstm" in name}
    )
    embedded, hidden = made.drawn(5, H), made.drawn(5, H, seed=1)
    theirs = lstm(torch.cat([embedded, hidden], dim=-1)[None])[0][0]
    wrong = lstm(torch.cat([embedded, hidden], dim=-1)[:, None])[0][
        :, 0
    ]  # as one text, whose state goes on
    torch.testing.assert_close(head.enter(embedded, hidden), theirs, rtol=0, atol=1e-6)
    assert (wrong - theirs).abs().max() > 1e-2
    assert torch.equal(head.layers[0].mlp.up_proj.weight, held["layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda config, held: config.pop("k_mask"), "no k_mask"),
        (lambda config, held: held.pop("lstm.weight_ih_l1"), "gates.1.weight is missing"),
        (
            lambda config, held: held.pop("layers.0.mlp.up_proj.weight"),
            "layers.0.mlp.up_proj.weight is missing",
        ),
        (
            lambda config, held: held.update({"lstm.weight_ih_l0": made.drawn(3 * H, 2 * H)}),
            "expected [64, 32]",
        ),
        (
            lambda config, held: held.update({"fc.weight": made.drawn(H, 2 * H)}),
            "unknown tensors: fc.weight",
        ),
        (lambda config, held: config.update(hidden_act="relu"), "hidden_act is 'relu'"),
        (lambda config, held: held["lstm.bias_hh_l0"].fill_(torch.inf), "not finite"),
    ],
)
def test_a_spoilt_falcon_head_is_refused(spoil: Any, words: str, tmp_path: Path) -> None:
    """By inspect and import alike."""
    config, held = falcon()
    spoil(config, held)
    refuses(made.write(tmp_path / "head", (config, held)), words)


def refuses(folder: Path, words: str, target: str | None = None) -> None:
    """An import says these words, and inspect does."""
    with pytest.raises(ValueError, match=re.escape(words)):
        read_head(folder, target)
    assert words.replace(". Name", "") in str(inspect(folder, target)).replace(". Name", "")
