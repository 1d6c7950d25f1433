"""One tiny target, trained at a fraction of its steps, for the whole suite; its tokenizer, and a recipe for it."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import Any

# read at the first import of huggingface_hub
os.environ.setdefault("HF_ASSETS_CACHE", tempfile.mkdtemp(prefix="eagle-tests-"))

import pytest
import torch
from chats import TEMPLATES
from hypothesis import settings
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from eagle import Target
from eagle.recipe import Recipe
from tests.fixture_target import make_fixture_target
from tests.trained import FIXTURE_SEED, fixture_seed

# the fast suite draws the same cases every time; with --hypothesis-profile=new others, and a failure says how to pin it
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.register_profile(
    "new",
    derandomize=False,
    deadline=None,
    database=None,
    print_blob=True,
)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options that stand for another machine: weights that no test can know, and another order."""
    seed = "seed of all that fixtures train (default: 0)"
    parser.addoption("--fixture-seed", type=int, default=0, help=seed)
    parser.addoption("--reversed", action="store_true", help="run the last test first")


def pytest_configure(config: pytest.Config) -> None:
    """Hand the seed on to processes that tests begin, and let Ctrl-C reach them."""
    gc.freeze()
    os.environ[FIXTURE_SEED] = str(config.getoption("fixture_seed"))
    # a shell lets what runs in its background ignore Ctrl-C
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave what is imported out of all later searches for garbage."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup() -> None:
    """Seed torch, so that random numbers do not depend on the tests before."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Mark the cases that `quick` and `not_long` do not name; reverse the order where asked."""
    for named, mark in (("quick", "slow"), ("not_long", "long")):
        # the patterns of each test, and whether they name a case
        patterns: dict[tuple[str, str], bool] = {}
        for item in items:
            marker = item.get_closest_marker(named)
            if marker is None:
                continue
            test = item.nodeid.partition("[")[0]
            matches = {text: fnmatchcase(item.callspec.id, text) for text in marker.args}
            for text, is_match in matches.items():
                patterns[test, text] = patterns.get((test, text), False) or is_match
            if not any(matches.values()):
                item.add_marker(mark)
        unused = [f"{test}: {text!r}" for (test, text), is_used in patterns.items() if not is_used]
        # a command line that names single cases collects no others
        if unused and not any("::" in argument for argument in config.args):
            raise pytest.UsageError(f"the mark {named} names no case by {', '.join(unused)}")
    if config.getoption("reversed"):
        items.reverse()


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A folder with `target/` and `data/`, as `recipes/tiny/make_target.py` leaves it."""
    folder = tmp_path_factory.mktemp("tiny")
    # trained once for all runs, and copied, as tests write into it
    cache = getattr(pytestconfig, "cache", None)
    made = cache.mkdir(f"tiny-{fixture_seed()}-{torch.__version__}") if cache else folder
    make_fixture_target(made, fixture_seed())
    if made != folder:
        shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def mixing_target_dir(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of random weights so large that each of its tokens depends on all that it has read.

    A fault in what it reads changes its answers, whatever a training run came to, and at T = 1 many tokens are likely.
    It never ends.
    """
    folder = tmp_path_factory.mktemp("mixing") / "target"
    shutil.copytree(tiny_target_dir / "target", folder)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "head_dim": 32,
    }
    config = AutoConfig.from_pretrained(folder, **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.3, generator=generator)
        model.lm_head.weight *= 0.8
        model.lm_head.weight[model.generation_config.eos_token_id] = 0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def mixing_target(mixing_target_dir: Path) -> Target:
    """The mixing target in fp64, where no rounding decides between two of its tokens."""
    return Target.load(mixing_target_dir, dtype=torch.float64)


@pytest.fixture(scope="session")
def eight_token_dir(mixing_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target that says eight tokens in turn, so that lookup drafts some of them; it never ends."""
    folder = tmp_path_factory.mktemp("eight") / "target"
    target = Target.load(mixing_target_dir, dtype=torch.float32)
    weight = target.model.lm_head.weight
    with torch.no_grad():
        # pairs of opposite rows: one of each pair has a larger logit than all other tokens
        rows = 8 * weight[-4:]
        weight.zero_()
        weight[-8:] = torch.cat([rows, -rows])
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tiny_target_dir: Path) -> Target:
    """The tiny target in fp32, shared by all tests, as each `generate` begins anew."""
    return Target.load(tiny_target_dir / "target", dtype=torch.float32)


@pytest.fixture(scope="module")
def base(tiny_target_dir: Path) -> Any:
    """The tiny tokenizer."""
    return AutoTokenizer.from_pretrained(tiny_target_dir / "target")


@pytest.fixture
def using(base: Any) -> Callable[[str], Any]:
    """The tiny tokenizer with one of the templates of chats.py."""

    def chosen(name: str) -> Any:
        base.chat_template = TEMPLATES[name]
        return base

    return chosen


@pytest.fixture
def same_threads() -> Iterator[None]:
    """Leave torch with as many threads as it had."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks that go on by a second whenever they are read: what is timed takes one, whatever the machine does."""
    ticks = count()
    for module in ("eagle.decoding.cycle_times", "eval.replay"):
        monkeypatch.setattr(f"{module}.clock_of", lambda _: lambda: float(next(ticks)))
    monkeypatch.setattr("eagle.decoding.loop.perf_counter", lambda: float(next(ticks)))


@pytest.fixture
def recipe(tiny_target_dir: Path, tmp_path: Path) -> Recipe:
    """The tiny recipe over three short records of its own."""
    lines = []
    for answer in ("One <b>&</b>.", "日本語 😀 ü \u202b שלום", "Three."):
        turns = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": answer}]
        lines.append(json.dumps({"conversations": turns}) + "\n")
    (tmp_path / "data.jsonl").write_text("".join(lines))
    where = [
        f"target.path={tiny_target_dir / 'target'}",
        f"data.train={tmp_path / 'data.jsonl'}",
        "target.dtype=float32",
    ]
    return Recipe.load(Path(__file__).parent.parent / "recipes/tiny/eagle1.yaml", where)
