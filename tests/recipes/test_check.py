"""`--check` goes through every stage, says what the run needs, and starts nothing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_prep.conversations import read_conversations
from data_prep.inspect_mask import main as inspect_mask
from data_prep.read_once import read_examples
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import save_head
from eagle.recipe import Recipe
from eagle.target.target import Target
from recipes.check import check, describe_exports
from recipes.forecast import conversations_of, reading_bytes, sizes_of_config
from tests.quantised import add_config
from tests.registry import BY_DEFAULT


def with_data(
    tiny_target_dir: Path, tmp_path: Path, *overrides: str, method: str = "eagle1"
) -> Recipe:
    """The tiny recipe of a method on the suite's own target and conversations."""
    data = tiny_target_dir / "data/train.jsonl"
    where = [
        f"target.path={tiny_target_dir / 'target'}",
        f"data.train={data}",
        f"train.out={tmp_path / 'out'}",
    ]
    where += [
        f"features.store={tmp_path / 'features'}",
        "target.dtype=float32",
        "train.dtype=float32",
    ]
    return Recipe.load(
        Path(__file__).parents[2] / f"recipes/tiny/{method}.yaml", [*where, *overrides]
    )


def ready_engines(printed: str) -> set[str]:
    """The engines that a head is ready for, which one line names."""
    return set(printed.partition("ready for ")[2].splitlines()[0].split(", "))


@pytest.mark.slow
def test_every_stage_runs_and_nothing_is_left(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each stage is named with its time, the forecast follows, and no file is written."""
    check(with_data(tiny_target_dir, tmp_path))
    said = capsys.readouterr().out
    stages = ["conversations", "tokens and masks", "target", "features", "loss and update"]
    places = [
        said.index(f"{stage} ...") for stage in [*stages, "save and load", "decode", "export"]
    ]
    assert places == sorted(places)
    assert "identical" in said and "vllm" in ready_engines(said)
    assert "GB of disk" in said and "GB of memory while training" in said and "h to train" in said
    assert not list(tmp_path.iterdir())


def test_an_engine_that_cannot_serve_the_head_is_named(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What would only be noticed after days of training is said before."""
    check(with_data(tiny_target_dir, tmp_path, "drafter.fc_bias=true", "data.limit=40"))
    said = capsys.readouterr().out
    assert "vllm" not in ready_engines(said) and re.search(
        r"not for [^:]*\bvllm\b[^:]*: .*fc", said
    )


@pytest.mark.quick("eagle1-changed0")
@pytest.mark.parametrize(
    ("method", "changed"), [("eagle1", []), ("eagle3", ["drafter.taps=[2,3,4]", "drafter.steps=2"])]
)
def test_every_engine_that_has_a_layout_is_ready(
    method: str,
    changed: list[str],
    tiny_target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those that hold a copy of the target's embedding too."""
    wanted = (
        ["vllm", "sglang", "eagle"] if method == "eagle1" else ["vllm", "speculators", "llamacpp"]
    )
    check(with_data(tiny_target_dir, tmp_path, "data.limit=40", *changed, method=method))
    said = capsys.readouterr().out
    assert set(wanted) <= ready_engines(said)
    assert "bind" not in said


@pytest.mark.slow
def test_a_draft_model_goes_through_all_stages(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of its own has one exporter, and a forecast as any head has."""
    check(with_data(tiny_target_dir, tmp_path, "data.limit=40", method="draft_model"))
    said = capsys.readouterr().out
    assert (
        "identical" in said
        and "transformers" in ready_engines(said)
        and "vllm" not in ready_engines(said)
    )
    assert "h to train" in said and "GB of memory while training" in said


@pytest.mark.slow
@pytest.mark.parametrize("method", BY_DEFAULT)
def test_further_heads_go_through_all_stages(
    method: str, tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their own recipes; what no engine reads is named."""
    check(with_data(tiny_target_dir, tmp_path, "data.limit=40", method=method))
    said = capsys.readouterr().out
    assert "identical" in said and "total" in said and "sglang" in said
    assert "h to train" in said and "GB of memory while training" in said


@pytest.mark.slow
def test_a_head_that_is_not_there_yet_is_said(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """HASS starts from the head of another recipe; one of another network is refused."""
    few, head = ["data.limit=40"], tmp_path / "head"
    check(with_data(tiny_target_dir, tmp_path, *few, f"train.init={head}", method="hass"))
    said = capsys.readouterr().out
    assert (
        f"{head} is not there yet: checked with fresh weights" in said and "draft_probs/2" in said
    )
    other = with_data(tiny_target_dir, tmp_path, *few, method="eagle3")
    target = Target.load(**other.target.model_dump())
    settings = settings_of(other.drafter.model_dump(), "test")
    save_head(
        head,
        DRAFTERS["eagle3"].for_target(settings, target.config, target.head, supervised=()),
        "",
        {},
    )
    with pytest.raises(ValueError, match=r"the head in .*head does not fit"):
        check(with_data(tiny_target_dir, tmp_path, *few, f"train.init={head}", method="hass"))


@pytest.mark.slow
def test_what_is_computed_while_training_needs_the_target_in_memory(
    tiny_target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three taps and the teacher's states on no disk, three steps, a draft vocabulary counted from the examples."""
    monkeypatch.setattr("recipes.check.GB", 1)
    needs = []
    for store in ("null", "somewhere"):
        changed = ["data.limit=40", "drafter.steps=3", f"features.store={store}"]
        check(with_data(tiny_target_dir, tmp_path, *changed, method="eagle3"))
        said = capsys.readouterr().out
        assert "draft_probs/2" in said and ("GB of disk" in said) == (store == "somewhere")
        needs.append(float(said.split(" GB of memory")[0].rpartition(" ")[2].replace(",", "")))
    weights = Target.load(str(tiny_target_dir / "target")).model
    borrowed = {weights.get_input_embeddings(), weights.get_output_embeddings()}
    rest = sum(part.numel() for part in weights.parameters()) - sum(
        part.weight.numel() for part in borrowed
    )
    # beside the weights its batches of four states, three at a time, and what it holds while it reads
    recipe = with_data(tiny_target_dir, tmp_path, method="eagle3")
    reading = reading_bytes(
        sizes_of_config(weights.config), recipe.train.batch_size, recipe.data.max_length
    )
    states = (
        3 * recipe.train.batch_size * recipe.data.max_length * 4 * weights.config.hidden_size * 4
    )
    assert needs[0] - needs[1] == 4 * rest + states + reading > 0


@pytest.mark.slow
def test_data_that_are_too_few_are_refused(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Two steps need two batches."""
    with pytest.raises(ValueError, match="2 steps need 32"):
        check(with_data(tiny_target_dir, tmp_path, "train.batch_size=16", "data.limit=5"))


QUESTION = {"role": "user", "content": "Why?"}
CUT_OFF = {"role": "assistant", "content": "Becau", "finish_reason": "length"}


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([QUESTION], "questions without an answer.*eagle regenerate"),
        ([QUESTION, CUT_OFF], "cut off.*max_new_tokens"),
    ],
)
def test_data_of_which_nothing_is_learned_are_refused_with_the_cause(
    tiny_target_dir: Path, tmp_path: Path, messages: list[dict[str, str]], told: str
) -> None:
    """Whichever command reads them."""
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": messages}) + "\n")
    overrides = [f"data.train={data}", f"data.cache={tmp_path / 'cache'}"]
    recipe = with_data(tiny_target_dir, tmp_path, *overrides)
    with pytest.raises(ValueError, match=told):
        check(recipe)
    with pytest.raises(ValueError, match=told):
        read_examples(recipe)
    with pytest.raises(SystemExit, match=told):
        inspect_mask(["tiny/eagle1", f"target.path={tiny_target_dir / 'target'}", *overrides])


def test_a_target_that_does_not_fit_here_is_forecast_all_the_same(
    tiny_target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory, disk and hours come before anything is loaded, from a config alone."""
    monkeypatch.setattr("recipes.check.memory_here", lambda: 1_000)
    check(with_data(tiny_target_dir, tmp_path, "data.limit=40"))
    said = capsys.readouterr().out
    assert "on the GPU or CPU that trains" in said and "GPU hours" in said and "GB of disk" in said
    assert "not checked here" in said and "target ..." not in said and "supervised" in said


@pytest.mark.slow
def test_a_target_without_weights_is_forecast_all_the_same(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be loaded is said, and that the forecast holds."""
    bare = tmp_path / "bare"
    shutil.copytree(
        tiny_target_dir / "target", bare, ignore=shutil.ignore_patterns("*.safetensors*")
    )
    with pytest.raises(ValueError, match="no model at"):
        check(with_data(tiny_target_dir, tmp_path, "data.limit=40", f"target.path={bare}"))
    said = capsys.readouterr().out
    assert (
        "on the GPU or CPU that trains" in said
        and "the forecast above needs its config alone" in said
    )


def test_a_quantised_target_that_cannot_be_loaded_is_told_of_early(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the forecast, which counts its bits; its stage ends with the same words."""
    target = tmp_path / "quantised"
    shutil.copytree(tiny_target_dir / "target", target)
    add_config(target, {"quant_method": "eetq"})
    with pytest.raises(ValueError, match="whose kernels run on cuda alone: got the device cpu"):
        check(with_data(tiny_target_dir, tmp_path, "data.limit=40", f"target.path={target}"))
    said = capsys.readouterr().out
    assert "quantised by eetq: the weights of its layers are counted as 8 bits" in said
    assert said.index("it is quantised by eetq, whose kernels") < said.index("tokens and masks ...")


@pytest.mark.slow
def test_a_local_file_is_counted_before_the_forecast(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What can be read is no guess; a whole batch of 128 is not computed to know how fast a text is."""
    recipe = with_data(
        tiny_target_dir, tmp_path, "data.limit=null", "train.batch_size=64", "train.processes=1"
    )
    check(recipe)
    said = capsys.readouterr().out
    count = sum(1 for _ in read_conversations(recipe.data.train))
    assert said.startswith("conversations ...") and f"{count:,} in {recipe.data.train}" in said
    assert "not known" not in said and said.index("GB of memory while training") < said.index(
        "features ..."
    )
    assert "2 steps of 8 texts, of 64 in a batch" in said


def test_a_forecast_counts_a_local_file(tiny_target_dir: Path, tmp_path: Path) -> None:
    """The source of answers to come, or the data; a limit holds."""
    data = tiny_target_dir / "data/train.jsonl"
    count = sum(1 for _ in read_conversations(data))
    assert conversations_of(with_data(tiny_target_dir, tmp_path, "data.limit=null")) == count > 7
    assert conversations_of(with_data(tiny_target_dir, tmp_path, "data.limit=7")) == 7
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "Who?"}\n' * 3)
    again = f'regenerate={{"source": "{questions}", "out": "out.jsonl"}}'
    assert (
        conversations_of(with_data(tiny_target_dir, tmp_path, again, "data.train=out.jsonl")) == 3
    )


def test_refusals_keep_the_names_of_programs(tiny_target: Target, tmp_path: Path) -> None:
    """Engines that refuse a head for one reason share a line; `trtllm-build` is no engine."""
    head: Any = DRAFTERS["medusa"].for_target(
        settings_of({"kind": "medusa"}, "test"), tiny_target.config
    )
    lines = list(describe_exports(head.bind(tiny_target.head), tiny_target.config, str(tmp_path)))
    assert any("not for" in line and "`trtllm-build`" in line for line in lines)
    assert not any("it-" in line for line in lines) and len(lines) < 6
