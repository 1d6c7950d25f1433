"""What `norm_output` means in SpecForge's heads, by the formula that it trains with."""

# T tokens of a text, H hidden, D draft vocabulary, N attention heads, W width of an attention head

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.__main__ import main
from eagle.core.examples import Example, collate
from eagle.formats.checkpoint import load_head
from eagle.formats.reading.foreign import import_head, inspect
from tests import foreign_heads as made
from tests.formats.make_heads import borrow_from

STEPS = 3
LENGTH = 12
GROUP = made.HEADS // made.KEYS  # queries that share a key


def specforge31(norm_output: bool | None = True) -> made.Head:
    """Return an EAGLE-3.1 head as SpecForge writes it: a norm on each tap, `norm_output` in the config."""
    config, tensors = made.saying(made.specforge(), fc_norm=True, norm_output=norm_output)
    norms = {f"fc_norm.{tap}.weight": made.drawn(made.H, seed=tap + 1) for tap in range(3)}
    return config, {**tensors, **norms}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return a root mean square norm."""
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def rotate(x: Tensor, position: int) -> Tensor:
    """Return x [N, W] with each pair (j, j + W/2) rotated by position * 10000^(-2j/W)."""
    half = made.WIDE // 2
    angle = position * 10000.0 ** (-torch.arange(half) * 2.0 / made.WIDE)
    low = x[:, :half]
    high = x[:, half:]
    rotated_low = low * angle.cos() - high * angle.sin()
    rotated_high = high * angle.cos() + low * angle.sin()
    return torch.cat([rotated_low, rotated_high], dim=1)


def project(
    weights: dict[str, Tensor],
    token: Tensor,
    state: Tensor,
    position: int,
) -> list[Tensor]:
    """Return query, key and value [N, W] of a token's embedding and a state, both normed."""
    normed_token = rms_norm(token, weights["midlayer.input_layernorm.weight"])
    normed_state = rms_norm(state, weights["midlayer.hidden_norm.weight"])
    # EAGLE-3 reads the token first
    read = torch.cat([normed_token, normed_state])
    projected = []
    for name in "qkv":
        weight = weights[f"midlayer.self_attn.{name}_proj.weight"]
        projected.append((weight @ read).view(-1, made.WIDE))
    query, key, value = projected
    return [rotate(query, position), rotate(key, position), value]


def attend(
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
) -> Tensor:
    """Return [N * W], what each attention head reads of all keys."""
    heads = []
    for n in range(made.HEADS):
        scores = torch.stack([key[n // GROUP] @ query[n] for key in keys])
        probs = (scores / made.WIDE**0.5).softmax(0)
        heads.append(probs @ torch.stack([value[n // GROUP] for value in values]))
    return torch.cat(heads)


def apply_block(
    weights: dict[str, Tensor],
    state: Tensor,
    attention: Tensor,
) -> Tensor:
    """Return the block's output, not normed."""
    # the residual is the state before its norm
    middle = state + weights["midlayer.self_attn.o_proj.weight"] @ attention
    normed = rms_norm(middle, weights["midlayer.post_attention_layernorm.weight"])
    gate = weights["midlayer.mlp.gate_proj.weight"] @ normed
    up = weights["midlayer.mlp.up_proj.weight"] @ normed
    return middle + weights["midlayer.mlp.down_proj.weight"] @ (F.silu(gate) * up)


def compute_specforge_logits(weights: dict[str, Tensor], text: Example) -> list[Tensor]:
    """Return [T - 2 - s, D] of each step s, by loops over slots, steps and attention heads.

    Slot i of step s reads token i + 1 + s and the un-normed output of its step before. `norm_output` is true: the LM
    head, and nothing else, reads the output through the last norm.
    """
    embedded = made.embedding()[text.tokens]
    taps = [rms_norm(text.features[:, tap], weights[f"fc_norm.{tap}.weight"]) for tap in range(3)]
    fused = torch.cat(taps, dim=-1) @ weights["fc.weight"].T
    first = [project(weights, embedded[i + 1], fused[i], i) for i in range(LENGTH - 1)]
    logits: list[list[Tensor]] = [[] for _ in range(STEPS)]
    for i in range(LENGTH - 2):
        # a slot sees the first step of the slots before it, and its own later steps
        keys = [key for _, key, _ in first[: i + 1]]
        values = [value for _, _, value in first[: i + 1]]
        query = first[i][0]
        state = fused[i]
        for step in range(min(STEPS, LENGTH - 2 - i)):
            if step > 0:
                query, key, value = project(weights, embedded[i + 1 + step], state, i + step)
                keys.append(key)
                values.append(value)
            state = apply_block(weights, state, attend(query, keys, values))
            normed = rms_norm(state, weights["norm.weight"])
            logits[step].append(weights["lm_head.weight"] @ normed)
    return [torch.stack(rows) for rows in logits]


def make_example() -> Example:
    """Return a random text with random states of three layers, all of it supervised."""
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(made.V, (LENGTH,), generator=generator)
    features = torch.randn(LENGTH, 3, made.H, generator=generator)
    return Example(tokens, torch.ones(LENGTH, dtype=torch.bool), features)


@torch.no_grad()
def compare_logits(folder: Path, weights: dict[str, Tensor]) -> list[float]:
    """Return the largest difference of each step from SpecForge's logits, as a share of how far those spread."""
    head: Any = load_head(folder)
    text = make_example()
    # of which only the embedding decides logits: the head has its own LM head
    target = borrow_from(None).head
    theirs = compute_specforge_logits(weights, text)
    states = head.unroll(collate([text], head.taps), target, STEPS).states
    spread = torch.cat(theirs).std()
    differences = []
    for state, rows in zip(states, theirs, strict=True):
        ours = head.logits(state, target)[: len(rows)]
        # later slots of a step have no token to read
        differences.append(float((ours - rows).abs().max() / spread))
    return differences


@pytest.mark.parametrize("norm_output", [True, None])
def test_an_imported_head_has_the_logits_that_specforge_trained(
    norm_output: bool | None, tmp_path: Path
) -> None:
    """All logits of three steps; SpecForge takes a missing switch for true."""
    head = specforge31(norm_output)
    folder = made.write(tmp_path / "head", head)
    target = made.write_target(tmp_path / "target")
    out = tmp_path / "out"
    options = ["--target", target, "--norm-output", "lm-head"]
    main(["import", str(folder), str(out), *options])

    assert max(compare_logits(out, head[1])) < 1e-4
    assert load_head(out).settings.norm_output is False


def test_engines_mean_something_else(tmp_path: Path) -> None:
    """They feed the normed state back, so that logits agree in the first step alone."""
    head = specforge31()
    out = tmp_path / "out"
    import_head(made.write(tmp_path / "head", head), out, norm_output="next-step")
    first, *later = compare_logits(out, head[1])

    assert first < 1e-4
    assert min(later) > 0.1
    assert load_head(out).settings.norm_output is True


@pytest.mark.parametrize("norm_output", [True, False])
def test_a_meaning_that_nobody_can_know_is_asked_for(norm_output: bool, tmp_path: Path) -> None:
    """Import writes nothing until it is told, and inspect names both meanings."""
    folder = made.write(tmp_path / "head", specforge31(norm_output))
    message = made.refused(folder)
    assert "--norm-output=lm-head" in message
    assert "--norm-output=next-step" in message
    assert "SpecForge" in message

    (finding,) = [one for one in inspect(folder).findings if "SpecForge" in one.what]
    assert not finding.fatal
    assert "--norm-output" in finding.fix


def test_a_head_whose_lm_head_reads_the_bare_state_is_refused(tmp_path: Path) -> None:
    """No head here computes SpecForge's `norm_output: false`."""
    folder = made.write(tmp_path / "head", specforge31(False))
    with pytest.raises(ValueError, match="LM head reads the un-normed state"):
        import_head(folder, tmp_path / "out", norm_output="lm-head")


@pytest.mark.parametrize("name", ["speculators EAGLE-3.1", "speculators trainer", "Automodel"])
def test_layouts_of_one_meaning_are_not_asked(name: str, tmp_path: Path) -> None:
    """Speculators and Automodel feed the normed state back, as engines do."""
    folder = made.write(tmp_path / "head", made.saying(made.LAYOUTS[name], norm_output=True))
    import_head(folder, tmp_path / "out", made.write_target(tmp_path / "target"))
    assert load_head(tmp_path / "out").settings.norm_output is True
    assert "SpecForge" not in str(inspect(folder))
