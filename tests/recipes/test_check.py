"""`--check` runs every stage, forecasts what the run needs, and leaves no file."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from data_prep.conversations import read_conversations
from data_prep.inspect_mask import main as inspect_mask
from data_prep.read_once import read_examples
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import save_head
from eagle.recipe import Recipe
from eagle.target.target import Target
from recipes.check import check, describe_exports
from recipes.forecast import conversations_of, reading_bytes, sizes_of_config
from tests.eval.jsonl_files import write_lines
from tests.families import draw_weights
from tests.quantised import add_config
from tests.registry import BY_DEFAULT

ROOT = Path(__file__).parents[2]
STAGES = [
    "conversations",
    "tokens and masks",
    "target",
    "features",
    "loss and update",
    "save and load",
    "decode",
    "export",
]
# words of the forecast
FORECAST = ("h to train", "GB of memory while training")

# targets that keep a state, whose configs name no heads and no positions
STATEFUL: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "rwkv": {"attention_hidden_size": 32, "rescale_every": 2},
}


def with_data(folder: Path, out: Path, *overrides: str, method: str = "eagle1") -> Recipe:
    """Return the tiny recipe of a method on 40 conversations of the suite's own target."""
    return Recipe.load(
        ROOT / f"recipes/tiny/{method}.yaml",
        [
            f"target.path={folder / 'target'}",
            "target.dtype=float32",
            f"data.train={folder / 'data/train.jsonl'}",
            "data.limit=40",
            f"features.store={out / 'features'}",
            f"train.out={out / 'out'}",
            "train.dtype=float32",
            *overrides,
        ],
    )


@pytest.fixture
def say(
    tiny_target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """Check a recipe on the tiny target, and return what is printed."""

    def run(*overrides: str, method: str = "eagle1") -> str:
        check(with_data(tiny_target_dir, tmp_path, *overrides, method=method))
        return capsys.readouterr().out

    return run


def assert_all_in(words: tuple[str, ...], said: str) -> None:
    """Check that all of these words are printed."""
    for word in words:
        assert word in said


def find_ready_engines(said: str) -> set[str]:
    """Return the engines that a head is ready for, which one line names."""
    return set(said.partition("ready for ")[2].splitlines()[0].split(", "))


@pytest.mark.slow
def test_every_stage_runs_and_nothing_is_left(say: Callable[..., str], tmp_path: Path) -> None:
    """Stages are named in their order, and no file is written."""
    said = say()
    starts = [said.index(f"{stage} ...") for stage in STAGES]
    assert starts == sorted(starts)
    assert_all_in(("identical", "of disk for features if each conversation has", *FORECAST), said)
    assert "vllm" in find_ready_engines(said)
    assert not list(tmp_path.iterdir())


def test_an_engine_that_cannot_serve_the_head_is_named(say: Callable[..., str]) -> None:
    """The check says before training that an engine has no bias for `fc`; and the steps, for a budget of time."""
    # vLLM has an `fc` without a bias
    said = say("drafter.fc_bias=true", "train.max_steps=7")
    assert re.search("epochs, about 7 steps; one process of this machine needs", said)
    assert re.search("h to train, [0-9.e-]+ s a step; divide by", said)
    assert "vllm" not in find_ready_engines(said)
    assert re.search(r"not for [^:]*\bvllm\b[^:]*: .*fc", said)


@pytest.mark.quick("eagle1-*")
@pytest.mark.parametrize(
    ("method", "changed", "engines"),
    [
        ("eagle1", [], {"vllm", "sglang", "eagle"}),
        # llama.cpp reads a copy of the target's embedding
        (
            "eagle3",
            ["drafter.taps=[2,3,4]", "drafter.steps=2"],
            {"vllm", "speculators", "llamacpp"},
        ),
    ],
)
def test_every_engine_that_has_a_layout_is_ready(
    method: str,
    changed: list[str],
    engines: set[str],
    say: Callable[..., str],
) -> None:
    """The line names the engines whose layouts hold all of the head."""
    said = say(*changed, method=method)
    assert engines <= find_ready_engines(said)
    assert "bind" not in said


@pytest.mark.parametrize(
    "method",
    [
        "dflash",  # the fast tests forecast a method with the attention of blocks
        *(
            pytest.param(method, marks=pytest.mark.slow)
            for method in ("draft_model", *BY_DEFAULT)
            if method != "dflash"
        ),
    ],
)
def test_further_methods_go_through_all_stages(method: str, say: Callable[..., str]) -> None:
    """Their own recipes are checked and forecast; engines that cannot read them are named."""
    said = say(method=method)
    assert_all_in(("identical", "total", "sglang", *FORECAST), said)
    if method == "draft_model":
        ready = find_ready_engines(said)
        assert "transformers" in ready
        assert "vllm" not in ready


@pytest.mark.slow
def test_a_missing_first_head_is_said(
    say: Callable[..., str],
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    """HASS starts from the head of another recipe; a head of another network is refused."""
    head = tmp_path / "head"
    said = say(f"train.init={head}", method="hass")

    assert f"{head} is not there yet: checked with fresh weights" in said
    assert "draft_probs/2" in said

    settings = settings_of({"kind": "eagle3"}, "test")
    other: Any = DRAFTERS["eagle3"]
    save_head(
        head,
        other.for_target(settings, tiny_target.config, tiny_target.head),
        "",
        {},
    )
    with pytest.raises(ValueError, match=r"the head in .*head does not fit"):
        say(f"train.init={head}", method="hass")


@pytest.mark.slow
def test_live_features_need_the_target_in_memory(
    say: Callable[..., str],
    tiny_target: Target,
    tiny_target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a store nothing is on disk, and memory holds the target's layers and a few batches of features."""
    # figures are printed in bytes
    monkeypatch.setattr("recipes.check.GB", 1)
    needs = []
    for store in ("null", "somewhere"):
        said = say("drafter.steps=3", f"features.store={store}", method="eagle3")
        assert ("of disk for features if each conversation has" in said) == (store == "somewhere")
        assert "draft_probs/2" in said

        figure = said.split(" GB of memory")[0].rpartition(" ")[2]
        needs.append(float(figure.replace(",", "")))

    model = tiny_target.model
    # both cases hold what the head borrows
    layers = model.num_parameters()
    for borrowed in (model.get_input_embeddings(), model.get_output_embeddings()):
        layers -= borrowed.weight.numel()
    recipe = with_data(tiny_target_dir, tmp_path, method="eagle3")
    tokens = recipe.train.batch_size * recipe.data.max_length
    reading = reading_bytes(
        sizes_of_config(model.config), recipe.train.batch_size, recipe.data.max_length
    )
    # three batches of four states in fp32
    states = 3 * tokens * 4 * model.config.hidden_size * 4

    assert needs[0] - needs[1] == 4 * layers + states + reading


@pytest.mark.slow
def test_too_little_data_is_refused(say: Callable[..., str]) -> None:
    """Two steps need two batches."""
    with pytest.raises(ValueError, match="2 steps need 32"):
        say("train.batch_size=16", "data.limit=5")


QUESTION = {"role": "user", "content": "Why?"}
CUT_OFF = {
    "role": "assistant",
    "content": "Becau",
    "finish_reason": "length",
}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([QUESTION], "questions without an answer.*eagle prepare"),
        ([QUESTION, CUT_OFF], "cut off.*max_new_tokens"),
    ],
)
def test_data_without_supervised_tokens_are_refused_with_the_cause(
    tiny_target_dir: Path,
    tmp_path: Path,
    messages: list[dict[str, str]],
    words: str,
) -> None:
    """All commands that read the data say so."""
    data = write_lines(tmp_path / "data.jsonl", [{"messages": messages}])
    overrides = [f"data.train={data}", f"data.cache={tmp_path / 'cache'}"]
    recipe = with_data(tiny_target_dir, tmp_path, *overrides)
    for read in (check, read_examples):
        with pytest.raises(ValueError, match=words):
            read(recipe)

    with pytest.raises(SystemExit, match=words):
        inspect_mask(["tiny/eagle1", f"target.path={tiny_target_dir / 'target'}", *overrides])


def test_a_target_that_does_not_fit_here_is_still_forecast(
    say: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory, disk and hours come from the config, before anything is loaded."""
    # bytes, less than any model has
    monkeypatch.setattr("recipes.check.memory_here", lambda: 1_000)
    said = say()
    expected = (
        "on the GPU or CPU that trains",
        "hours for features",
        "of disk for features if each conversation has",
        "not checked here",
    )
    assert_all_in((*expected, "supervised"), said)

    assert "target ..." not in said


def test_a_target_without_weights_is_still_forecast(
    say: Callable[..., str],
    tiny_target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The forecast comes first, and the error follows."""
    bare = tmp_path / "bare"
    # config and tokenizer stay
    no_weights = shutil.ignore_patterns("*.safetensors*")
    shutil.copytree(tiny_target_dir / "target", bare, ignore=no_weights)
    with pytest.raises(ValueError, match="no model at"):
        say(f"target.path={bare}")

    expected = ("on the GPU or CPU that trains", "the forecast above needs its config alone")
    assert_all_in(expected, capsys.readouterr().out)


def test_a_quantised_target_that_cannot_be_loaded_is_named_early(
    say: Callable[..., str],
    tiny_target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The forecast counts its bits and says that its kernels run on CUDA, before the target's own stage fails."""
    target = tmp_path / "quantised"
    shutil.copytree(tiny_target_dir / "target", target)
    add_config(target, {"quant_method": "eetq"})
    with pytest.raises(ValueError, match="whose kernels run on cuda alone: got the device cpu"):
        say(f"target.path={target}")

    said = capsys.readouterr().out

    assert "quantised by eetq: the weights of its layers are counted as 8 bits" in said
    assert said.index("it is quantised by eetq, whose kernels") < said.index("tokens and masks ...")


@pytest.mark.slow
def test_a_local_file_is_counted_before_the_forecast(
    say: Callable[..., str], tiny_target_dir: Path
) -> None:
    """A batch of 64 is not computed whole to know the time of a step."""
    said = say("data.limit=null", "train.batch_size=64", "train.processes=1")
    data = tiny_target_dir / "data/train.jsonl"
    count = sum(1 for _ in read_conversations(data))

    assert said.startswith("conversations ...")
    assert f"{count:,} in {data}" in said
    assert "not known" not in said
    assert said.index("GB of memory while training") < said.index("features ...")
    assert "2 steps of 8 sequences, of 64 in a batch" in said


def test_a_forecast_counts_a_local_file(tiny_target_dir: Path, tmp_path: Path) -> None:
    """It counts the data, or the prompts whose answers are still to come; a limit holds."""
    data = tiny_target_dir / "data/train.jsonl"
    count = sum(1 for _ in read_conversations(data))
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "Who?"}] * 3)
    # answers that are still to be generated
    again = f'regenerate={{"source": "{prompts}", "out": "out.jsonl"}}'
    for overrides, expected in (
        (["data.limit=null"], count),
        (["data.limit=7"], 7),
        ([again, "data.train=out.jsonl"], 3),
    ):
        recipe = with_data(tiny_target_dir, tmp_path, *overrides)
        assert conversations_of(recipe) == expected


def test_refusals_keep_the_names_of_programs(tiny_target: Target, tmp_path: Path) -> None:
    """Engines that refuse a head for one reason share a line; `trtllm-build` is no engine."""
    method: Any = DRAFTERS["medusa"]
    head = method.for_target(settings_of({"kind": "medusa"}, "test"), tiny_target.config)
    lines = list(describe_exports(head.bind(tiny_target.head), tiny_target.config, str(tmp_path)))
    assert len(lines) < 6
    assert any("not for" in line and "`trtllm-build`" in line for line in lines)
    assert not any("it-" in line for line in lines)


@pytest.mark.quick("rwkv")
@pytest.mark.parametrize("family", STATEFUL)
def test_every_stage_runs_for_a_target_that_keeps_a_state(
    family: str,
    say: Callable[..., str],
    tiny_target_dir: Path,
    tmp_path: Path,
) -> None:
    """A random model of the type decodes identically with a head, and the run is forecast."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir / "target")
    config = AutoConfig.for_model(
        family,
        **STATEFUL[family],
        hidden_size=32,
        num_hidden_layers=4,
        vocab_size=len(tokenizer),
        bos_token_id=0,
        eos_token_id=0,
    )
    # weights that are drawn at random, not zero, so that states matter
    target = tmp_path / "stateful"
    draw_weights(AutoModelForCausalLM.from_config(config)).save_pretrained(target)
    tokenizer.save_pretrained(target)
    assert_all_in(("identical", FORECAST[1]), say(f"target.path={target}"))
