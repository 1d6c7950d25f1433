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
from eagle.doctor.target_answers import PROMPTS
from eagle.doctor.verdict import Cycles
from eagle.formats.checkpoint import save_head
from tests.doctor.small_heads import make_head

NUM_PROMPTS = 12
NUM_CYCLES = 20


def count_cycles(
    *lengths: float,
    spread: float = 0.0,
) -> dict[float, Cycles]:
    """Return tokens and cycles of twelve prompts with these acceptance lengths at T = 0 and T = 1."""
    # half of the prompts accept more, half accept less
    signs = torch.tensor([-1.0, 1.0] * (NUM_PROMPTS // 2)).double()
    cycles = torch.full((NUM_PROMPTS,), float(NUM_CYCLES)).double()
    counts = {}
    for temperature, length in enumerate(lengths):
        counts[float(temperature)] = (
            cycles * (length + spread * signs),
            cycles,
        )
    return counts


@pytest.mark.parametrize(
    ("tuned", "verdict"),
    [
        ((4.0, 4.0), "keep the head: its drafts add 100% "),
        ((3.8, 3.8), "keep the head: its drafts add 93% "),
        ((3.4, 3.4), "train the head further: its drafts add 80% "),
        ((2.0, 2.8), "train the head further: its drafts add 47% "),
        ((1.5, 1.7), "train a new head: its drafts add 20% "),
    ],
)
def test_the_verdict_follows_what_is_kept(tuned: tuple[float, float], verdict: str) -> None:
    """Of an acceptance length of 4 on the base."""
    # drafts add length - 1 tokens to each forward
    drift = compare_cycles(count_cycles(4.0, 4.0), count_cycles(*tuned))
    assert drift.verdict.startswith(verdict)
    assert f"T = 1: 4.000 -> {tuned[1]:.3f} (" in str(drift)


def test_a_loss_that_chance_explains_is_none() -> None:
    """The prompts differ among themselves by more than the loss."""
    drift = compare_cycles(
        count_cycles(4.0, 4.0),
        count_cycles(3.4, 3.4, spread=2.0),
    )
    assert drift.verdict.startswith("keep the head for now: its drafts add 80%")
    assert "over 12 prompts; give more" in drift.verdict


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit answers: a few tokens show what is planted."""
    monkeypatch.setattr("eagle.doctor.drift.NEW_TOKENS", 16)


@pytest.fixture
def parrot(mixing_target: Target) -> Any:
    """Return a model whose layers add nothing: it repeats the last token, as a new Medusa head guesses."""
    model = copy.deepcopy(mixing_target.model)
    with torch.no_grad():
        for layer in model.model.layers:
            # what is left is the embedding, which the LM head reads
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(2 * model.model.embed_tokens.weight)
    return model


@pytest.fixture
def files(
    parrot: Any,
    mixing_target: Target,
    tmp_path: Path,
) -> dict[str, str]:
    """Return the folders of a base and of a head for it, and a file of four prompts."""
    save_model(parrot, mixing_target, tmp_path / "base")
    head = make_head({"kind": "medusa", "levels": 3}, Target(parrot))
    save_head(tmp_path / "head", head, "", {})
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:4]]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    return {name: str(tmp_path / name) for name in ("head", "base", "prompts.jsonl")}


def save_model(model: Any, target: Target, folder: Path) -> str:
    """Save a model with the target's tokenizer, as a fine-tune is given."""
    model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_planted_drift_is_found(
    parrot: Any,
    mixing_target: Target,
    files: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A fine-tune that counts instead makes every guess wrong; the exit status is 0, as nothing is broken."""
    head, base, prompts = files.values()
    drift = measure_drift(head, base, base, prompts)
    assert isinstance(drift, Drift)
    assert drift.verdict.startswith("keep the head: its drafts add 100%")
    assert drift.pooled.before > 3
    with torch.no_grad():
        # the next token of the vocabulary in place of the same one
        parrot.lm_head.weight.copy_(parrot.lm_head.weight.roll(1, 0))
    tuned = save_model(parrot, mixing_target, tmp_path / "tuned")
    main(["doctor", head, "--target", tuned, "--base", base, "--prompts", prompts, "--json"])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["by_temperature"].keys() == {"0.0", "1.0"}
    report = printed.err
    assert "verdict: train a new head: its drafts add 0%" in report
    assert "T = 1: " in report


@pytest.mark.parametrize("is_idle", [True, False])
def test_an_adapter_is_measured_over_its_base(
    is_idle: bool,
    parrot: Any,
    files: dict[str, str],
    tmp_path: Path,
) -> None:
    """One without effect, and one of random weights."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    head, base, prompts = files.values()
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=64, target_modules="all-linear", init_lora_weights=is_idle
    )
    peft.get_peft_model(parrot, config).save_pretrained(tmp_path / "adapter")
    drift = measure_drift(head, base, str(tmp_path / "adapter"), prompts)
    assert isinstance(drift, Drift)
    if is_idle:
        assert drift.kept == 1
    else:
        assert drift.kept < 0.5


def test_another_model_is_no_fine_tune(
    parrot: Any,
    mixing_target: Target,
    files: dict[str, str],
    tmp_path: Path,
) -> None:
    """One with fewer layers, and one with more tokens; a server knows one target alone."""
    head, base, prompts = files.values()
    # a model of other layers is not a fine-tune
    parrot.model.layers = parrot.model.layers[:2]
    parrot.config.num_hidden_layers = 2
    other = save_model(parrot, mixing_target, tmp_path / "other")
    with pytest.raises(ValueError, match=r"other is no fine-tune of .*'num_hidden_layers': 2"):
        measure_drift(head, base, other, prompts)
    file = tmp_path / "other/config.json"
    config = json.loads(file.read_text())
    config["vocab_size"] += 2
    file.write_text(json.dumps(config))
    report = str(measure_drift(head, base, other, prompts))
    assert report.startswith(f"verdict: train a new head: {other} has other than")
    with pytest.raises(SystemExit):
        main(["doctor", head, "--target", other, "--base", base, "--server", "http://localhost:1"])


def test_a_head_that_cannot_be_read_is_diagnosed(files: dict[str, str]) -> None:
    """As without a base."""
    head, base, prompts = files.values()
    (Path(head) / "model.safetensors").unlink()
    assert isinstance(measure_drift(head, base, base, prompts), Diagnosis)
