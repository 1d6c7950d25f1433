"""The certificate compares with the untouched model, passes what is equal, and names what is not."""

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
from eagle.target.state import TargetState
from eval.lossless import (
    Divergence,
    Key,
    ModelAnswer,
    Truth,
    _compare_steps,
    decode_untouched,
    find_divergence,
    main,
    measure_rounding,
)
from tests import every_type
from tests.eval.jsonl_files import write_lines
from tests.families import RandomTrees, random_tokens
from tests.families import own_answer as uncached_answer

ROOT = Path(__file__).parents[2]
NAMES = ("none", "ngram", "eagle1")
KEY = ("set", "conversation", 0, 0.0, 0)
GREEDY = Choose(Sampling())
# the head alone, besides plain decoding
ONE_HEAD = "eval.drafters={eagle1: {}}"
# a prompt beyond the positions of the tiny target
LONG = {"turns": ["copy " * 3000, "And?"]}
QUESTIONS = [
    {"turns": ["What does copy do?", "How do I call it?"]},
    {"turns": ["What does chain do?"]},
]

Verdict = dict[str, Any]


def save_untrained(folder: Path, target_dir: Path) -> None:
    """Save an untrained head for a target."""
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(target_dir)
    save_head(folder, Eagle1.for_target(Eagle1.Settings(), config), "", {})


@pytest.fixture
def command(tiny_target_dir: Path, tmp_path: Path) -> list[str]:
    """The tiny recipe over two questions, one with a second turn, and an untrained head."""
    save_untrained(tmp_path / "run/head", tiny_target_dir / "target")
    asked = write_lines(tmp_path / "asked.jsonl", QUESTIONS)
    return [
        str(ROOT / "recipes/tiny/eagle1.yaml"),
        f"target.path={tiny_target_dir / 'target'}",
        "target.dtype=float32",
        f"train.out={tmp_path / 'run'}",
        f"eval.prompts={asked}",
        "eval.max_new_tokens=10",
    ]


@pytest.fixture
def mixing_command(command: list[str], mixing_target_dir: Path, tmp_path: Path) -> list[str]:
    """The same questions to a target whose answers any fault changes, and an untrained head for it."""
    save_untrained(tmp_path / "run/head", mixing_target_dir)
    return [*command, f"target.path={mixing_target_dir}"]


@pytest.fixture(scope="module")
def model(tiny_target_dir: Path) -> Any:
    """The stock model, which no code of this project has touched."""
    return AutoModelForCausalLM.from_pretrained(tiny_target_dir / "target", dtype=torch.float32)


def decode_own(
    model: Any,
    prompt: list[int],
    count: int,
    choose: Choose = GREEDY,
    stop: Sequence[int] = (),
    truth: Truth = "steps",
) -> ModelAnswer:
    """Return the untouched model's own answer, greedy and of a fixed length by default."""
    return decode_untouched(
        model,
        choose,
        prompt,
        stop=stop,
        count=count,
        truth=truth,
    )


def find(
    model: Any,
    own: ModelAnswer,
    drafted: list[int],
    key: Key = KEY,
    steps_differ: bool = False,
) -> Divergence:
    """Return the first difference of drafted tokens, which there is."""
    decoder = SimpleNamespace(decode=str)
    found = find_divergence(
        model, decoder, key, answer=own, drafted=drafted, steps_differ=steps_differ
    )

    assert found is not None
    return found


def read_verdicts(folder: Path) -> list[Verdict]:
    """Return the verdicts of the certificate."""
    return json.loads((folder / "run/lossless.json").read_text())["verdicts"]


def test_the_reference_is_the_stock_models_own_decoding(model: Any, tiny_target: Target) -> None:
    """Greedily it is transformers' `generate`; sampled, an uncached loop over transformers' own warper."""
    prompt = tiny_target.chat("What does copy do?")
    ids = torch.tensor([prompt])
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 24,
        "do_sample": False,
    }
    expected = model.generate(ids, **options)[0, len(prompt) :].tolist()
    own = decode_own(model, prompt, 24, stop=tiny_target.stop_tokens)

    assert own.tokens == expected

    # the noise of each position is the one thing that both share
    noise = Noise(seed=3, request=5)
    warp = LogitsProcessorList([TemperatureLogitsWarper(0.7)])

    def noise_at(position: int) -> torch.Tensor:
        return noise([position], model.config.vocab_size, ids.device)[0]

    expected = uncached_answer(model, prompt, 12, warp, noise_at)
    choose = Choose(Sampling(0.7, seed=3, request=5))

    assert decode_own(model, prompt, 12, choose).tokens == expected

    stop = expected[4]
    stopped = expected[: expected.index(stop) + 1]
    assert decode_own(model, prompt, 12, choose, [stop]).tokens == stopped


def test_equal_output_is_certified(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All drafters pass at T = 0 and 1 over all turns; a prompt without room is counted."""
    # the long prompt is left out of all six verdicts
    write_lines(tmp_path / "asked.jsonl", [*QUESTIONS, LONG])
    main([*command, "--json"])
    printed = capsys.readouterr()
    said = printed.err
    verdicts = read_verdicts(tmp_path)
    assert json.loads(printed.out)["verdicts"] == verdicts
    expected = {
        "answers": 3,
        "identical": 3,
        "lossless": True,
        "divergences": [],
        "left_out": 1,
        "to_plain": 3,
        "to_float32": None,
        "dtype": "float32",
    }
    names = set()
    for verdict in verdicts:
        assert {name: verdict[name] for name in expected} == expected

        name = f"{verdict['drafter']} at T = {verdict['temperature']:g}"
        assert f"{name}: identical to plain decoding here in 3 of 3, to" in said
        names.add(name)

    assert len(names) == len(verdicts) == len(NAMES) * 2


@pytest.mark.slow
def test_batches_are_certified(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Batch sizes come from the recipe or the command line, which counts first."""
    main([*command, "eval.batch_size=[1, 3]"])
    verdicts = read_verdicts(tmp_path)
    for verdict in verdicts:
        assert (verdict["answers"], verdict["identical"], verdict["lossless"]) == (3, 3, True)

    assert sorted(verdict["batch_size"] for verdict in verdicts) == [1] * 6 + [3] * 6
    assert "eagle1 at T = 1, 3 at a time: identical to plain" in capsys.readouterr().out

    main([*command, "eval.batch_size=[1, 3]", "--batch-size", "2", ONE_HEAD])
    assert {verdict["batch_size"] for verdict in read_verdicts(tmp_path)} == {2}


def test_a_fault_of_batches_alone_is_named(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Planted fault: the first row's noise serves all rows. Only sampled batches fail."""
    verify = loop.verify_rows

    def first_noise(rows: Sequence[tuple[TargetOutput, Choose]]) -> Any:
        return verify([(output, rows[0][1]) for output, _ in rows])

    monkeypatch.setattr(loop, "verify_rows", first_noise)
    with pytest.raises(SystemExit, match="the output of a drafter is not the model's own"):
        main([*command, "eval.batch_size=[1, 3]", "eval.max_new_tokens=24", ONE_HEAD])

    wrong = [verdict for verdict in read_verdicts(tmp_path) if not verdict["lossless"]]

    assert {(verdict["temperature"], verdict["batch_size"]) for verdict in wrong} == {(1, 3)}
    assert "3 at a time: identical to plain decoding here in" in capsys.readouterr().out


def last_node_kept(patch: pytest.MonkeyPatch) -> None:
    """Keep the last drafted node in the cache in place of the last accepted one."""

    def keep(state: TargetState, paths: Mapping[int, Sequence[int]]) -> None:
        tokens = {}
        columns = {}
        for row, path in paths.items():
            tree = state.trees[row]
            tokens[row] = tree.tokens[list(path)].tolist()
            columns[row] = [*path[:-1], len(tree) - 1]

        state.keep_columns(columns, tokens)

    patch.setattr(TargetState, "keep", keep)


def whole_tree_seen(patch: pytest.MonkeyPatch) -> None:
    """Let every node attend to the whole tree."""

    def all_nodes(tree: DraftTree) -> torch.Tensor:
        return torch.ones(len(tree), len(tree), dtype=torch.bool)

    patch.setattr(DraftTree, "ancestors", all_nodes)


def noise_of_the_next_position(patch: pytest.MonkeyPatch) -> None:
    """Choose after drafted nodes with the noise of the next position, which only sampled output shows."""
    # plain decoding has trees of one node, whose noise stays right
    choose = Choose.__call__

    def wrong(self: Choose, output: TargetOutput, nodes: Sequence[int]) -> list[int]:
        shift = int(len(output.tree) > 1)
        return choose(self, replace(output, start=output.start + shift), nodes)

    patch.setattr(Choose, "__call__", wrong)


@pytest.mark.quick("noise_of_the_next_position")
@pytest.mark.parametrize("fault", [last_node_kept, whole_tree_seen, noise_of_the_next_position])
def test_a_planted_fault_is_named(
    fault: Callable[[pytest.MonkeyPatch], None],
    mixing_command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The report has the position, both tokens and a gap far above rounding, and the exit status is 1."""
    # plain decoding commits no drafted node, so that none of these faults shows in it
    fault(monkeypatch)
    with pytest.raises(SystemExit, match="the output of a drafter is not the model's own"):
        main([*mixing_command, "eval.max_new_tokens=24", ONE_HEAD])

    wrong = [verdict for verdict in read_verdicts(tmp_path) if not verdict["lossless"]]

    assert {verdict["drafter"] for verdict in wrong} == {"eagle1"}

    if fault is noise_of_the_next_position:
        assert [verdict["temperature"] for verdict in wrong] == [1]
    assert wrong[0]["identical"] < wrong[0]["answers"]

    found = next(one for one in wrong[0]["divergences"] if not one["is_rounding"])
    assert found["gap"] > 2 * found["rounding"]

    drafted = found["drafted"]
    assert drafted != found["own"]
    sentence = f"drafted {drafted} {found['texts'][0]!r}, the model's own {found['own']}"
    assert sentence in capsys.readouterr().out


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_the_gap_is_the_models_own_preference(
    model: Any,
    tiny_target: Target,
    temperature: float,
) -> None:
    """The gap at the first difference is that of an uncached forward, with the noise in units of plain logits."""
    prompt = tiny_target.chat("What does chain do?")
    own = decode_own(model, prompt, 8, Choose(Sampling(temperature, seed=1)))
    right = own.tokens[5]
    # any other token will do
    other = (right + 1) % model.config.vocab_size
    drafted = [*own.tokens[:5], other, *own.tokens[:2]]
    key = ("set", "conversation", 0, temperature, 1)
    found = find(model, own, drafted, key)

    assert (found.position, found.drafted, found.own) == (5, other, right)

    # an uncached forward of the stock model is the independent oracle
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([prompt + own.tokens[:5]])).logits[0, -1]
    if temperature:
        noise = Noise(1, 0)([len(prompt) + 5], len(scores), scores.device)[0]
        scores = scores + temperature * noise

    assert found.gap == pytest.approx(float(scores[right] - scores[other]), abs=1e-4)
    assert found.gap > 0
    assert not found.is_rounding

    same = find_divergence(
        model,
        tiny_target.tokenizer,
        key,
        answer=own,
        drafted=list(own.tokens),
    )
    assert same is None


def test_an_answer_that_ends_early_differs(model: Any, tiny_target: Target) -> None:
    """A missing token has no gap, so rounding cannot excuse it."""
    own = decode_own(model, tiny_target.chat("What?"), 6)
    found = find(model, own, own.tokens[:4])
    assert (found.position, found.drafted, found.gap) == (4, None, None)
    assert not found.is_rounding
    assert "no gap to tell" in str(found)


def test_rounding_is_how_far_the_model_differs_from_itself(model: Any, tiny_target: Target) -> None:
    """It is small in fp32 and large in bf16; a gap within twice of it is rounding."""
    prompt = tiny_target.chat("What does copy do?")
    # the same weights in bf16 round more coarsely
    folder = model.config._name_or_path
    coarse = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    in_fp32 = measure_rounding(model, decode_own(model, prompt, 8))
    in_bf16 = measure_rounding(coarse, decode_own(coarse, prompt, 8))

    assert 0 < in_fp32 < 1e-3
    assert in_bf16 > 100 * in_fp32
    # rounding may move both logits, so that twice of it is excused
    for gap, is_rounding in ((-1e-6, True), (2e-5, True), (3e-5, False)):
        divergence = Divergence(
            KEY, position=3, drafted=1, own=2, texts=("a", "b"), gap=gap, rounding=1e-5
        )
        assert divergence.is_rounding is is_rounding


@pytest.mark.slow
def test_sampled_drafts_are_compared_greedily_alone(command: list[str], tmp_path: Path) -> None:
    """Above T = 0 sampled drafts keep the output's distribution, not its tokens."""
    main([*command, "eval.drafters={drawn: {budget: {paths: [[0], [0, 0]], draw: sampled}}}"])
    verdicts = read_verdicts(tmp_path)
    assert all(verdict["lossless"] and verdict["answers"] == 3 for verdict in verdicts)
    names = [(verdict["drafter"], verdict["temperature"]) for verdict in verdicts]
    assert names == [("none", 0), ("drawn", 0), ("none", 1)]


def test_a_model_that_differs_from_itself_is_told_from_a_fault() -> None:
    """Zamba2's step by one token clamps where its forward over a sequence does not; `generate` follows its steps."""
    # a copy, since the target changes how its model reads
    model = every_type.build("zamba2")
    target = Target(copy.deepcopy(model))
    prompt = random_tokens(9, seed=4)
    ids = torch.tensor([prompt])
    generated = model.generate(
        ids,
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
    )
    steps = decode_own(model, prompt, 24)
    whole = decode_own(model, prompt, 24, truth="whole texts")
    drafter = RandomTrees(steps.tokens)
    drafted = generate(target, drafter, prompt, max_new_tokens=24, stop=[]).tokens

    assert drafted == steps.tokens == generated[0, len(prompt) :].tolist()
    assert whole.tokens != steps.tokens
    assert target.describe() == "mask + mixers over levels; the truth is its own steps by one token"

    # the same steps are the model's own; one other token at their end is not
    wrong = [*drafted[:-1], drafted[-1] ^ 1]
    for tokens, is_own in ((drafted, True), (wrong, False)):
        found = find(model, whole, tokens, steps_differ=True)
        compared = _compare_steps(
            target,
            model,
            found,
            answer=whole,
            drafted=tokens,
        )
        assert compared.is_models_own == is_own

    wrong = [*drafted[:5], drafted[5] ^ 1, *drafted[6:]]

    assert not find(model, steps, wrong, steps_differ=True).is_rounding
