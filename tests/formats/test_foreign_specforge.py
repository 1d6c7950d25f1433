"""SpecForge's heads: what its `norm_output` means, by the formula that it trains with."""

# T tokens of a text, H width, D tokens that can be drafted, n heads, w of a head

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.__main__ import main
from eagle.core.drafter import TargetHead
from eagle.core.examples import Example, collate
from eagle.formats.checkpoint import load_head
from eagle.formats.reading.foreign import import_head, inspect
from tests import foreign_heads as made

STEPS, LENGTH = 3, 12


def specforge31(norm_output: bool | None = True) -> made.Head:
    """EAGLE-3.1 as SpecForge writes it: a norm on each tap, `norm_output` in the config."""
    config, tensors = made.saying(made.specforge(), fc_norm=True, norm_output=norm_output)
    return config, tensors | {
        f"fc_norm.{tap}.weight": made.drawn(made.H, seed=tap + 1) for tap in range(3)
    }


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """Root mean square norm."""
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def turned(x: Tensor, position: int) -> Tensor:
    """x [n, w] at a position, each pair (j, j + w/2) turned by position * 10000^(-2j/w)."""
    half = made.WIDE // 2
    angle = position * 10000.0 ** (-torch.arange(half) * 2.0 / made.WIDE)
    low, high = x[:, :half], x[:, half:]
    return torch.cat(
        [low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], dim=1
    )


def slot_parts(
    weights: dict[str, Tensor], token: Tensor, state: Tensor, position: int
) -> tuple[Tensor, ...]:
    """Query, key and value of one slot: attention reads [norm(token's embedding); norm(state)]."""
    read = torch.cat(
        [
            rms(token, weights["midlayer.input_layernorm.weight"]),
            rms(state, weights["midlayer.hidden_norm.weight"]),
        ]
    )
    query, key, value = (
        (weights[f"midlayer.self_attn.{name}_proj.weight"] @ read).view(-1, made.WIDE)
        for name in "qkv"
    )
    return turned(query, position), turned(key, position), value


def logits_of_specforge(
    weights: dict[str, Tensor], text: Example, norm_output: bool
) -> list[Tensor]:
    """[T - 2 - s, D] of step s: slot i reads token i + 1 + s and the un-normed output of its step before.

    Its `norm_output` tells whether the LM head reads the output through the last norm, and nothing else.
    """
    embedded = made.embedding()[text.tokens]
    taps = [rms(text.features[:, tap], weights[f"fc_norm.{tap}.weight"]) for tap in range(3)]
    fused = torch.cat(taps, dim=-1) @ weights["fc.weight"].T
    first = [slot_parts(weights, embedded[i + 1], fused[i], i) for i in range(LENGTH - 1)]
    found: list[list[Tensor]] = [[] for _ in range(STEPS)]
    for i in range(LENGTH - 2):
        keys, values = [part[1] for part in first[: i + 1]], [part[2] for part in first[: i + 1]]
        state, query = fused[i], first[i][0]
        for step in range(min(STEPS, LENGTH - 2 - i)):
            if step:
                query, key, value = slot_parts(weights, embedded[i + 1 + step], state, i + step)
                keys, values = [*keys, key], [*values, value]
            shared = made.HEADS // made.KEYS
            scores = [
                torch.stack([key[n // shared] @ query[n] for key in keys])
                for n in range(made.HEADS)
            ]
            heads = [
                (score / made.WIDE**0.5).softmax(0)
                @ torch.stack([value[n // shared] for value in values])
                for n, score in enumerate(scores)
            ]
            middle = state + weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
            normed = rms(middle, weights["midlayer.post_attention_layernorm.weight"])
            gate, up, down = (
                weights[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            state = middle + down @ (F.silu(gate @ normed) * (up @ normed))
            read = rms(state, weights["norm.weight"]) if norm_output else state
            found[step].append(weights["lm_head.weight"] @ read)
    return [torch.stack(rows) for rows in found]


def logits_of(folder: Path, text: Example) -> list[Tensor]:
    """[T - 2, D] of each step, as the imported head computes them."""
    head: Any = load_head(folder)
    embedding = torch.nn.Embedding.from_pretrained(made.embedding())
    frozen = TargetHead(embedding, torch.nn.Linear(made.H, made.V, bias=False))
    with torch.no_grad():
        return [
            head.logits(state, frozen)
            for state in head.unroll(collate([text], head.taps), frozen, STEPS).states
        ]


def example() -> Example:
    """A random text with random states of three layers, all of it supervised."""
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(made.V, (LENGTH,), generator=generator)
    return Example(
        tokens,
        torch.ones(LENGTH, dtype=torch.bool),
        torch.randn(LENGTH, 3, made.H, generator=generator),
    )


def differences(folder: Path, head: made.Head, norm_output: bool) -> list[float]:
    """The largest of each step."""
    true = logits_of_specforge(head[1], example(), norm_output)
    own = logits_of(folder, example())
    spread = float(torch.cat(true).std())
    return [
        float((mine[: len(its)] - its).abs().max()) / spread
        for mine, its in zip(own, true, strict=True)
    ]


@pytest.mark.parametrize("norm_output", [True, None])
def test_an_imported_head_says_what_specforge_trained_it_to_say(
    norm_output: bool | None, tmp_path: Path
) -> None:
    """In every logit of three steps; SpecForge takes a missing switch for true."""
    head = specforge31(norm_output)
    folder, target = made.write(tmp_path / "head", head), made.write_target(tmp_path / "target")
    main(
        [
            "import",
            str(folder),
            str(tmp_path / "out"),
            "--target",
            target,
            "--norm-output",
            "lm-head",
        ]
    )
    assert max(differences(tmp_path / "out", head, True)) < 1e-4
    assert load_head(tmp_path / "out").settings.norm_output is False


def test_the_engines_meaning_is_another_one(tmp_path: Path) -> None:
    """They feed the normed state back, so that logits agree in the first step alone."""
    head = specforge31()
    import_head(made.write(tmp_path / "head", head), tmp_path / "out", norm_output="next-step")
    first, *later = differences(tmp_path / "out", head, True)
    assert first < 1e-4 < 0.1 < min(later)
    assert load_head(tmp_path / "out").settings.norm_output is True


@pytest.mark.parametrize("norm_output", [True, False])
def test_a_meaning_that_nobody_can_know_is_asked_for(norm_output: bool, tmp_path: Path) -> None:
    """Import writes nothing until it is told, and inspect names both meanings."""
    folder = made.write(tmp_path / "head", specforge31(norm_output))
    said = made.refused(folder)
    assert (
        "--norm-output=lm-head" in said
        and "--norm-output=next-step" in said
        and "SpecForge" in said
    )
    named = [finding for finding in inspect(folder).findings if "SpecForge" in finding.what]
    assert len(named) == 1 and not named[0].fatal and "--norm-output" in named[0].fix


def test_a_head_whose_lm_head_reads_the_bare_state_has_no_counterpart(tmp_path: Path) -> None:
    """SpecForge's `norm_output: false`."""
    folder = made.write(tmp_path / "head", specforge31(False))
    with pytest.raises(ValueError, match="LM head reads the un-normed state"):
        import_head(folder, tmp_path / "out", norm_output="lm-head")


@pytest.mark.parametrize("name", ["speculators EAGLE-3.1", "speculators trainer", "Automodel"])
def test_layouts_of_one_meaning_are_not_asked(name: str, tmp_path: Path) -> None:
    """Speculators and Automodel feed the normed state back, as engines do."""
    config, tensors = made.LAYOUTS[name]
    folder = made.write(tmp_path / "head", ({**config, "norm_output": True}, tensors))
    import_head(folder, tmp_path / "out", made.write_target(tmp_path / "target"))
    assert load_head(tmp_path / "out").settings.norm_output is True
    assert "SpecForge" not in str(inspect(folder))
