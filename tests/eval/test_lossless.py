"""The certificate: it compares with the untouched model, passes what is equal, and names what is not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
)

from eagle import Target, generate
from eagle.core.noise import Noise
from eagle.core.tree import DraftTree, TargetOutput
from eagle.core.verify import Choose, Sampling
from eagle.decoding import loop
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import save_head
from eagle.recipe import Recipe
from eagle.target.state import TargetState
from eval.load_run import load_drafters
from eval.lossless import (
    Divergence,
    _compare_steps,
    certify,
    decode_untouched,
    find_divergence,
    main,
    measure_rounding,
)
from tests import every_type
from tests.families import RandomTrees, random_tokens
from tests.families import own_answer as uncached_answer

ROOT = Path(__file__).parents[2]
NEW = 10


@pytest.fixture
def command(tiny_target_dir: Path, tiny_target: Target, tmp_path: Path) -> list[str]:
    """The tiny recipe over two questions, one with a second turn, and an untrained head."""
    torch.manual_seed(3)
    save_head(
        tmp_path / "run/head", Eagle1.for_target(Eagle1.Settings(), tiny_target.config), "", {}
    )
    asked = [
        {"turns": ["What does copy do?", "How do I call it?"]},
        {"turns": ["What does chain do?"]},
    ]
    (tmp_path / "asked.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in asked)
    )
    return [
        str(ROOT / "recipes/tiny/eagle1.yaml"),
        f"target.path={tiny_target_dir / 'target'}",
        "target.dtype=float32",
        f"train.out={tmp_path / 'run'}",
        f"eval.prompts={tmp_path / 'asked.jsonl'}",
        f"eval.max_new_tokens={NEW}",
    ]


@pytest.fixture
def mixing_command(command: list[str], mixing_target_dir: Path, tmp_path: Path) -> list[str]:
    """The same questions to a target whose answers any fault changes, and an untrained head of it."""
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(mixing_target_dir)
    save_head(tmp_path / "run/head", Eagle1.for_target(Eagle1.Settings(), config), "", {})
    return [*command, f"target.path={mixing_target_dir}"]


@pytest.fixture(scope="module")
def model(tiny_target_dir: Path) -> Any:
    """The stock model, which nothing of ours has touched."""
    return AutoModelForCausalLM.from_pretrained(tiny_target_dir / "target", dtype=torch.float32)


def test_the_truth_is_the_stock_models_own_decoding(model: Any, tiny_target: Target) -> None:
    """Greedily transformers' `generate`; sampled, an uncached loop over its own warper and the noise of each place."""
    prompt = tiny_target.chat("What does copy do?")
    ids = torch.tensor([prompt])
    given = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )[0].tolist()
    own = decode_untouched(model, Choose(Sampling()), prompt, tiny_target.stop_tokens, 24)
    assert own.tokens == given[len(prompt) :]
    noise = Noise(seed=3, request=5)
    warp = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    expected = uncached_answer(
        model, prompt, 12, warp, lambda at: noise([at], model.config.vocab_size, ids.device)[0]
    )
    sampling = Sampling(0.7, seed=3, request=5)
    assert decode_untouched(model, Choose(sampling), prompt, [], 12).tokens == expected
    stop = expected[4]
    first = expected.index(stop)
    assert (
        decode_untouched(model, Choose(sampling), prompt, [stop], 12).tokens
        == expected[: first + 1]
    )


def test_what_is_equal_is_certified(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All drafters at T = 0 and 1 over all turns, with the certificate beside the results; what has no room is said."""
    with (tmp_path / "asked.jsonl").open("a") as file:
        file.write(json.dumps({"turns": ["copy " * 3000, "And?"]}) + "\n")
    main(command)
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "run/lossless.json").read_text())
    assert {(one["drafter"], one["temperature"]) for one in found["verdicts"]} == {
        (name, temperature) for name in ("none", "ngram", "eagle1") for temperature in (0, 1)
    }
    for one in found["verdicts"]:
        assert (one["answers"], one["identical"], one["lossless"], one["divergences"]) == (
            3,
            3,
            True,
            [],
        )
        assert one["left_out"] == 1
        assert (
            f"{one['drafter']} at T = {one['temperature']:g}: identical to plain decoding here in 3 of 3, to"
            in said
        )
        assert (one["to_plain"], one["to_float32"], one["dtype"]) == (3, None, "float32")
    assert found["run"]["target"] and found["run"]["commit"]


@pytest.mark.slow
def test_batches_are_certified(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each size that the recipe or the command line names, all turns, against the model's single decoding."""
    main([*command, "eval.batch_size=[1, 3]"])
    verdicts = json.loads((tmp_path / "run/lossless.json").read_text())["verdicts"]
    assert {(one["drafter"], one["temperature"], one["batch_size"]) for one in verdicts} == {
        (name, heat, size)
        for name in ("none", "ngram", "eagle1")
        for heat in (0, 1)
        for size in (1, 3)
    }
    assert {(one["answers"], one["identical"], one["lossless"]) for one in verdicts} == {
        (3, 3, True)
    }
    assert (
        "eagle1 at T = 1, 3 at a time: identical to plain decoding here in 3 of 3"
        in capsys.readouterr().out
    )
    main([*command, "eval.batch_size=[1, 3]", "--batch-size", "2", "eval.drafters={eagle1: {}}"])
    verdicts = json.loads((tmp_path / "run/lossless.json").read_text())["verdicts"]
    assert {one["batch_size"] for one in verdicts} == {2}


def test_a_fault_of_batches_alone_is_named(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Noise of the first row for all rows: single texts are certified, sampled batches are not."""
    verify = loop.verify_rows

    def first_noise(rows: Sequence[tuple[TargetOutput, Choose]]) -> Any:
        return verify([(output, rows[0][1]) for output, _ in rows])

    monkeypatch.setattr(loop, "verify_rows", first_noise)
    with pytest.raises(SystemExit, match="the output of a drafter is not the model's own"):
        main(
            [
                *command,
                "eval.batch_size=[1, 3]",
                "eval.max_new_tokens=24",
                "eval.drafters={eagle1: {}}",
            ]
        )
    verdicts = json.loads((tmp_path / "run/lossless.json").read_text())["verdicts"]
    wrong = {(one["temperature"], one["batch_size"]) for one in verdicts if not one["lossless"]}
    assert wrong == {(1, 3)}
    assert "3 at a time: identical to plain decoding here in" in capsys.readouterr().out


def last_node_kept(patch: pytest.MonkeyPatch) -> None:
    """In place of the last accepted node the last drafted one stays in the cache."""

    def keep(state: TargetState, paths: Mapping[int, Sequence[int]]) -> None:
        tokens = {row: state.trees[row].tokens[list(path)].tolist() for row, path in paths.items()}
        state.keep_columns(
            {row: [*path[:-1], len(state.trees[row]) - 1] for row, path in paths.items()}, tokens
        )

    patch.setattr(TargetState, "keep", keep)


def whole_tree_seen(patch: pytest.MonkeyPatch) -> None:
    """Every node sees the whole tree."""
    patch.setattr(
        DraftTree, "ancestors", lambda tree: torch.ones(len(tree), len(tree), dtype=torch.bool)
    )


def noise_of_the_next_place(patch: pytest.MonkeyPatch) -> None:
    """The choices after drafted nodes use noise that is not theirs: only sampled output can tell."""
    choose = Choose.__call__

    def wrong(self: Choose, output: TargetOutput, nodes: Sequence[int]) -> list[int]:
        shift = int(len(output.tree) > 1)
        return choose(self, replace(output, start=output.start + shift), nodes)

    patch.setattr(Choose, "__call__", wrong)


@pytest.mark.quick("noise_of_the_next_place")
@pytest.mark.parametrize(
    "fault",
    [
        last_node_kept,
        pytest.param(whole_tree_seen, marks=pytest.mark.slow),
        noise_of_the_next_place,
    ],
)
def test_a_planted_fault_is_named(
    fault: Callable[[pytest.MonkeyPatch], None],
    mixing_command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Output differs: the place, both tokens and a gap far above rounding are said, and the status is one."""
    fault(monkeypatch)
    with pytest.raises(SystemExit, match="the output of a drafter is not the model's own"):
        main([*mixing_command, "eval.max_new_tokens=24", "eval.drafters={eagle1: {}}"])
    verdicts = json.loads((tmp_path / "run/lossless.json").read_text())["verdicts"]
    by_name = {(one["drafter"], one["temperature"]): one for one in verdicts}
    assert by_name["none", 0]["lossless"] and by_name["none", 1]["lossless"]
    wrong = next(
        by_name["eagle1", heat] for heat in (0, 1) if not by_name["eagle1", heat]["lossless"]
    )
    if fault is noise_of_the_next_place:
        assert wrong["temperature"] == 1
    assert not wrong["lossless"] and wrong["identical"] < wrong["answers"]
    divergence = next(one for one in wrong["divergences"] if not one["is_rounding"])
    assert (
        divergence["gap"] > 2 * divergence["rounding"]
        and divergence["drafted"] != divergence["own"]
    )
    said = capsys.readouterr().out
    assert (
        f"drafted {divergence['drafted']} {divergence['texts'][0]!r}, the model's own {divergence['own']}"
        in said
    )


def test_the_gap_is_the_models_own_preference(model: Any, tiny_target: Target) -> None:
    """At the first difference, from an uncached forward; at T > 0 with the noise, in units of plain logits."""
    prompt = tiny_target.chat("What does chain do?")
    for temperature in (0.0, 0.5):
        sampling = Sampling(temperature, seed=1)
        own = decode_untouched(model, Choose(sampling), prompt, [], 8)
        other = (own.tokens[5] + 1) % model.config.vocab_size
        drafted = [*own.tokens[:5], other, *own.tokens[:2]]
        found = find_divergence(
            model, tiny_target.tokenizer, ("s", "c", 0, temperature, 1), own, drafted
        )
        assert found is not None and (found.position, found.drafted, found.own) == (
            5,
            other,
            own.tokens[5],
        )
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([prompt + own.tokens[:5]])).logits[0, -1]
        if temperature:
            place = len(prompt) + 5
            scores = scores + 0.5 * Noise(1, 0)([place], len(scores), scores.device)[0]
        assert found.gap == pytest.approx(float(scores[own.tokens[5]] - scores[other]), abs=1e-4)
        assert found.gap > 0 and not found.is_rounding
        assert (
            find_divergence(
                model, tiny_target.tokenizer, ("s", "c", 0, temperature, 1), own, own.tokens
            )
            is None
        )


def test_an_answer_that_ends_early_differs(model: Any, tiny_target: Target) -> None:
    """There is no other token to compare with, and so no gap that could excuse it."""
    own = decode_untouched(model, Choose(Sampling()), tiny_target.chat("What?"), [], 6)
    found = find_divergence(
        model, tiny_target.tokenizer, ("s", "c", 0, 0.0, 0), own, own.tokens[:4]
    )
    assert found is not None and (found.position, found.drafted, found.gap) == (4, None, None)
    assert not found.is_rounding and "no gap to tell" in str(found)


def test_rounding_is_what_the_model_differs_by_from_itself(model: Any, tiny_target: Target) -> None:
    """Small in fp32, large in bf16; a flip within it is told from a fault."""
    prompt = tiny_target.chat("What does copy do?")
    exact = measure_rounding(model, decode_untouched(model, Choose(Sampling()), prompt, [], 8))
    assert 0 < exact < 1e-3
    coarse = AutoModelForCausalLM.from_pretrained(model.config._name_or_path, dtype=torch.bfloat16)
    assert (
        measure_rounding(coarse, decode_untouched(coarse, Choose(Sampling()), prompt, [], 8))
        > 100 * exact
    )
    told = [
        Divergence(("s", "c", 0, 0.0, 0), 3, 1, 2, ("a", "b"), gap, 1e-5)
        for gap in (-1e-6, 2e-5, 3e-5)
    ]
    assert [one.is_rounding for one in told] == [True, True, False]


@pytest.mark.slow
def test_drafts_that_carry_their_law_are_compared_greedily_alone(
    command: list[str], tiny_target: Target, model: Any
) -> None:
    """Above T = 0 they keep the law of the output and not its tokens."""
    drawn = "eval.drafters={drawn: {budget: {paths: [[0], [0, 0]], draw: sampled}}}"
    recipe = Recipe.load(command[0], [*command[1:], drawn])
    verdicts = certify(recipe, tiny_target, model, load_drafters(recipe, tiny_target))
    assert [(one.drafter, one.temperature) for one in verdicts] == [
        ("none", 0),
        ("drawn", 0),
        ("none", 1),
    ]
    assert all(one.is_lossless and one.answers == 3 for one in verdicts)


def test_a_model_that_differs_from_itself_is_told_from_a_fault() -> None:
    """Zamba2's step by one token clamps where its forward over a text does not: `generate` follows its steps."""
    model = every_type.build("zamba2")
    target, prompt, choose = (
        Target(copy.deepcopy(model)),
        random_tokens(9, seed=4),
        Choose(Sampling()),
    )
    given = model.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    steps = decode_untouched(model, choose, prompt, [], 24)
    assert steps.tokens == given[0, len(prompt) :].tolist()
    drafted = generate(target, RandomTrees(steps.tokens), prompt, max_new_tokens=24, stop=[]).tokens
    assert drafted == steps.tokens
    assert target.describe() == "mask + mixers over levels; the truth is its own steps by one token"
    whole = decode_untouched(model, choose, prompt, [], 24, "whole texts")
    assert whole.tokens != steps.tokens
    decoder = SimpleNamespace(decode=str)
    for tokens, is_own in ((drafted, True), ([*drafted[:-1], drafted[-1] ^ 1], False)):
        found = find_divergence(
            model, decoder, ("s", "c", 0, 0.0, 0), whole, tokens, steps_differ=True
        )
        assert found is not None
        assert _compare_steps(target, model, found, whole, tokens).is_models_own == is_own
    wrong = [*drafted[:5], drafted[5] ^ 1, *drafted[6:]]
    found = find_divergence(model, decoder, ("s", "c", 0, 0.0, 0), steps, wrong, steps_differ=True)
    assert found is not None
    assert not found.is_rounding
