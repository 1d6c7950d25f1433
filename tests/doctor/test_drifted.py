"""What a head loses on a fine-tune of its target, and the verdict that follows."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle import Target
from eagle.__main__ import main
from eagle.doctor import Diagnosis, Drift, measure_drift
from eagle.doctor.drift import compare_cycles
from eagle.doctor.texts import PROMPTS
from eagle.doctor.verdict import Cycles
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import save_head


def counts(*lengths: float, cycles: int = 20, spread: float = 0.0) -> dict[float, Cycles]:
    """Twelve prompts that accept so much, at T = 0 and 1; every second one more, the others less."""
    ones = torch.ones(12).double()
    sides = spread * (2 * (torch.arange(12) % 2) - 1)
    return {
        float(heat): (cycles * (length * ones + sides), cycles * ones)
        for heat, length in enumerate(lengths)
    }


@pytest.mark.parametrize(
    ("tuned", "verdict"),
    [
        ((4.0, 4.0), "keep the head: its drafts add 100% "),
        ((3.8, 3.8), "keep the head: its drafts add 93% "),
        ((3.4, 3.4), "train the head on: its drafts add 80% "),
        ((2.0, 2.8), "train the head on: its drafts add 47% "),
        ((1.5, 1.7), "train a new head: its drafts add 20% "),
    ],
)
def test_the_verdict_follows_what_is_kept(tuned: tuple[float, float], verdict: str) -> None:
    """Planted acceptance lengths, of 4 tokens a forward on the base."""
    drift = compare_cycles(counts(4.0, 4.0), counts(*tuned))
    assert drift.verdict.startswith(verdict)
    assert f"T = 1: 4.000 -> {tuned[1]:.3f} (" in str(drift)


def test_a_loss_that_chance_explains_is_none() -> None:
    """The prompts differ among themselves by more than the loss."""
    drift = compare_cycles(counts(4.0, 4.0), counts(3.4, 3.4, spread=2.0))
    assert drift.verdict.startswith(
        "keep the head for now: its drafts add 80% of the tokens that they add on the base,"
    )
    assert "over 12 prompts; give more" in drift.verdict


def save_model(model: Any, tokenizer: Any, folder: Path) -> str:
    """A model with its tokenizer, as a fine-tune is given."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def parrot(mixing_target: Target, tmp_path: Path) -> Any:
    """A model in which layers add nothing: it repeats the last token, as a fresh Medusa head guesses."""
    model = copy.deepcopy(mixing_target.model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(2 * model.model.embed_tokens.weight)
    save_model(model, mixing_target.tokenizer, tmp_path / "base")
    return model


@pytest.fixture
def head(parrot: Any, tmp_path: Path) -> str:
    """That Medusa head."""
    target, settings = Target(parrot), settings_of({"kind": "medusa", "levels": 3}, "test")
    save_head(
        tmp_path / "head",
        DRAFTERS["medusa"].for_target(settings, target.config, target.head),
        "",
        {},
    )
    return str(tmp_path / "head")


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens show what is planted."""
    monkeypatch.setattr("eagle.doctor.drift.NEW_TOKENS", 16)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Four prompts."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:4]))
    return str(path)


def test_a_planted_drift_is_found(
    parrot: Any,
    mixing_target: Target,
    head: str,
    prompts: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A fine-tune that counts instead takes every guess away; the command ends with status 0, as nothing is broken."""
    with torch.no_grad():
        parrot.lm_head.weight.copy_(parrot.lm_head.weight.roll(1, 0))
    tuned, base = (
        save_model(parrot, mixing_target.tokenizer, tmp_path / "tuned"),
        str(tmp_path / "base"),
    )
    drift = measure_drift(head, base, base, prompts)
    assert isinstance(drift, Drift) and drift.verdict.startswith(
        "keep the head: its drafts add 100%"
    )
    assert drift.pooled.before > 3
    main(["doctor", head, "--target", tuned, "--base", base, "--prompts", prompts])
    said = capsys.readouterr().out
    assert said.startswith("verdict: train a new head: its drafts add 0%") and "T = 1: " in said


def test_an_adapter_is_measured_over_its_base(
    parrot: Any, head: str, prompts: str, tmp_path: Path
) -> None:
    """One without effect, and one of random weights."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    kept = []
    for name, fresh in {"idle": True, "loud": False}.items():
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=4, lora_alpha=64, target_modules="all-linear", init_lora_weights=fresh
        )
        peft.get_peft_model(copy.deepcopy(parrot), config).save_pretrained(tmp_path / name)
        drift = measure_drift(head, str(tmp_path / "base"), str(tmp_path / name), prompts)
        assert isinstance(drift, Drift)
        kept.append(drift.kept)
    assert kept[0] == 1 and kept[1] < 0.5


def test_another_model_is_no_fine_tune(
    parrot: Any, mixing_target: Target, head: str, prompts: str, tmp_path: Path
) -> None:
    """Fewer layers, more tokens, no head, and a server, which knows one target alone."""
    base = str(tmp_path / "base")
    parrot.model.layers, parrot.config.num_hidden_layers = parrot.model.layers[:2], 2
    other = save_model(parrot, mixing_target.tokenizer, tmp_path / "narrow")
    with pytest.raises(
        ValueError,
        match=r"narrow is no fine-tune of .*'num_hidden_layers': 2.*expected .*'num_hidden_layers': 3",
    ):
        measure_drift(head, base, other, prompts)
    config = json.loads((tmp_path / "narrow/config.json").read_text())
    config["vocab_size"] += 2
    (tmp_path / "narrow/config.json").write_text(json.dumps(config))
    assert str(measure_drift(head, base, other, prompts)).startswith(
        f"verdict: train a new head: {other} has other than"
    )
    (tmp_path / "head/model.safetensors").unlink()
    assert isinstance(measure_drift(head, base, base, prompts), Diagnosis)
    with pytest.raises(SystemExit):
        main(["doctor", head, "--target", other, "--base", base, "--server", "http://localhost:1"])
