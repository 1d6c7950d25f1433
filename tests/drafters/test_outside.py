"""Methods from files, modules, installed packages and the folders of heads: found by name, or refused in a sentence."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle import Sampling, Target, generate, load_drafter
from eagle.__main__ import PLUGINS, TRUST_CODE, admit_code, take_code_options
from eagle.command.share import pack
from eagle.conformance.trial import make_head
from eagle.drafters import DRAFTERS, outside, settings_of
from eagle.drafters.outside import METHOD_FILE, describe_code, load_file
from eagle.formats.card import model_card
from eagle.formats.checkpoint import ON_HUB, from_pretrained, load_head, save_head
from eagle.formats.custom_generate import write_custom_generate
from eagle.formats.reading.foreign import inspect
from eagle.recipe import Trust
from eval.comparison.compare_plan import Comparison
from tests.outside_methods import ARMS, LOOKUP, METHOD


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process that knows the package's own methods alone, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    own = dict(DRAFTERS)
    yield
    forget()
    DRAFTERS.update(own)


def forget() -> None:
    """Forget every method outside, as another process has not heard of it."""
    for name in [
        name for name, method in DRAFTERS.items() if method.__module__.split(".")[0] != "eagle"
    ]:
        del DRAFTERS[name]
    for name in [name for name in sys.modules if name.startswith("outside_")]:
        del sys.modules[name]
    DRAFTERS.trusts_heads = False
    Trust.in_recipes = False


def write(name: str, text: str = METHOD, **changes: str) -> Path:
    """A file of the method, in which each key stands for its value."""
    for old, new in changes.items():
        text = text.replace(old, new)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return Path(name)


def saved(target: Target, folder: str = "head") -> Path:
    """A head of the method in mine.py, of which this process forgets again."""
    save_head(folder, make_head("mine.py:Recurrent", target), "", {})
    forget()
    return Path(folder)


def test_a_class_in_a_file_is_registered_once() -> None:
    """By its Settings' kind, however its path is written; the settings beside it are checked by it."""
    write("mine.py")
    write("deeper/copy.py")
    settings = settings_of({"kind": "./mine.py:Recurrent", "steps": 2}, "r.yaml")
    assert (settings.kind, settings.steps) == ("recurrent", 2)
    method = DRAFTERS["recurrent"]
    assert DRAFTERS.find("recurrent") is DRAFTERS.find(f"{Path.cwd()}/mine.py:Recurrent") is method
    assert DRAFTERS.find("deeper/copy.py:Recurrent") is method  # the same text is the same method
    assert sys.modules[method.__module__].Recurrent is method  # which pickles find
    assert settings_of({"kind": "recurrent"}, "r.yaml").steps == 4
    with pytest.raises(ValueError, match=r"r\.yaml: drafter.*stepps"):
        settings_of({"kind": "mine.py:Recurrent", "stepps": 2}, "r.yaml")


def test_a_method_without_weights_drafts_by_its_path_and_by_its_name(tiny_target: Target) -> None:
    """Behind another one too; the output is the target's own."""
    write("again.py", LOOKUP)
    prompt, options = (
        tiny_target.chat("Hello"),
        {"sampling": Sampling(), "max_new_tokens": 8, "stop": []},
    )
    plain = generate(tiny_target, load_drafter("none", tiny_target), prompt, **options)
    for name in ("again.py:Again", "Again", "ngram,again.py:Again"):
        drafter = load_drafter(name, tiny_target)
        assert generate(tiny_target, drafter, prompt, **options).tokens == plain.tokens
    with pytest.raises(
        ValueError, match=r"again\.py:Again has no option depth: expected one of none"
    ):
        load_drafter("again.py:Again", tiny_target, depth=3)


OTHER = {"class Recurrent(": "class Other(", ") -> Recurrent:": ") -> Other:"}
WRONG: dict[str, tuple[str, dict[str, str], str]] = {
    "no file": (
        "gone.py:Recurrent",
        {},
        r"no file at gone\.py, looked for from .*: expected a name, PATH\.py:CLASS",
    ),
    "no such class": (
        "mine.py:Recurent",
        {},
        r"mine\.py has no Recurent; did you mean Recurrent\?: expected one of R",
    ),
    "no drafter": (
        "mine.py:RecurrentText",
        {},
        r"RecurrentText is no Drafter: expected a class that inherits",
    ),
    "no kind": (
        "mine.py:Recurrent",
        {'    kind: Literal["recurrent"] = "recurrent"\n': ""},
        r"Recurrent has the name None, expected a word: write a class Settings\(Section\) with kind",
    ),
    "the package's name": (
        "mine.py:Recurrent",
        {'Literal["recurrent"] = "recurrent"': 'Literal["eagle1"] = "eagle1"'},
        r"Recurrent is called 'eagle1', as eagle\.drafters\.recurrent\.eagle1\.Eagle1 is already: give it another name",
    ),
    "an error": (
        "mine.py:Recurrent",
        {"class RecurrentText:": "1 / 0\n\n\nclass RecurrentText:"},
        r"line \d+: Zero",
    ),
    "no Python": (
        "mine.py:Recurrent",
        {"class RecurrentText:": "class RecurrentText"},
        r"mine\.py, line \d+: Syntax",
    ),
    "a file beside it": (
        "mine.py:Recurrent",
        {"import torch\n": "import torch\nimport beside_it\n"},
        r"ModuleNotFoundError: .*beside_it.* \(a method of several files is an installed package with an entry point",
    ),
    "no module": (
        "no_such_package.mine:Recurrent",
        {},
        r"no_such_package\.mine is no module that can be imported",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_method_is_refused_in_a_sentence(case: str) -> None:
    """With the recipe that names it; and what failed once is not half there the next time."""
    kind, changes, words = WRONG[case]
    write("mine.py", **changes)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"r\.yaml: drafter\.kind: .*{words}"):
            settings_of({"kind": kind}, "r.yaml")
    assert "recurrent" not in DRAFTERS


def test_two_files_of_one_name_are_refused_and_an_edited_one_is_read_anew(
    tiny_target: Target,
) -> None:
    """A head with weights is not loaded by its class; a method that nobody knows gets a list."""
    write("mine.py")
    write("other.py", **{"steps: int = Field(4": "steps: int = Field(3"})
    first = DRAFTERS.find("mine.py:Recurrent")
    with pytest.raises(
        ValueError, match=r"other\.py: Recurrent is called 'recurrent', as .*mine\.py is already"
    ):
        DRAFTERS.find("other.py:Recurrent")
    write("mine.py", **{"steps: int = Field(4": "steps: int = Field(2"})
    second: Any = DRAFTERS.find("mine.py:Recurrent")
    assert second is not first and second is DRAFTERS["recurrent"] and second.Settings().steps == 2
    with pytest.raises(
        ValueError, match=r"has weights, expected the folder of a trained head: train it with"
    ):
        load_drafter("mine.py:Recurrent", tiny_target)
    with pytest.raises(
        ValueError, match=r"expected a method with weights: .*, or PATH\.py:CLASS of your own"
    ):
        settings_of({"kind": "eagle9"}, "r.yaml")


def test_a_head_brings_its_file_and_runs_it_only_where_it_is_trusted(tiny_target: Target) -> None:
    """What it would run, and how to look at it, is told; whoever has loaded the same file needs no flag."""
    write("mine.py")
    head = saved(tiny_target)
    code = json.loads((head / "config.json").read_text())["code"]
    assert code["file"] == "mine.py" and code["class"] == "Recurrent" and METHOD_FILE in ON_HUB
    assert (head / METHOD_FILE).read_text() == METHOD
    Path("mine.py").unlink()
    for load in (load_head, from_pretrained, lambda folder: load_drafter(folder, tiny_target)):
        with pytest.raises(
            ValueError, match=r"head would run code of its own: method\.py there, .* --trust-code"
        ):
            load(head)
    assert not inspect(head).fatal and "was not loaded: head would run code" in str(
        inspect(head)
    ).replace(str(Path.cwd()) + "/", "")
    assert not any(name.startswith("outside_") for name in sys.modules)
    trusted = load_head(head, trust_code=True)
    assert load_drafter(head, tiny_target).settings == trusted.settings  # it is loaded now
    forget()
    write("elsewhere/mine.py")
    settings_of({"kind": "elsewhere/mine.py:Recurrent"}, "r.yaml")
    assert torch.equal(
        load_head(head).state_dict()["norm.weight"], trusted.state_dict()["norm.weight"]
    )


def test_code_that_was_altered_is_refused_trusted_or_not(tiny_target: Target) -> None:
    """So is a folder without it; other code of one's own is used, with a warning."""
    write("mine.py")
    head = saved(tiny_target)
    write(str(head / METHOD_FILE), METHOD + "# altered\n")
    for trust in (False, True):
        with pytest.raises(
            ValueError, match=r"method\.py was altered after the head was saved: its SHA-256 is"
        ):
            load_head(head, trust_code=trust)
    (head / METHOD_FILE).unlink()
    with pytest.raises(ValueError, match=r"method\.py is missing, which holds the head's method"):
        load_head(head, trust_code=True)
    write("mine.py")
    first = saved(tiny_target, "first")
    write("mine.py", METHOD + "# another\n")
    second = saved(tiny_target, "second")
    load_head(first, trust_code=True)
    with pytest.raises(
        ValueError, match=r"second and first hold different code of the method 'recurrent'"
    ):
        load_head(second, trust_code=True)
    forget()
    settings_of({"kind": "mine.py:Recurrent"}, "r.yaml")
    with pytest.warns(
        UserWarning, match=r"first was saved with other code of 'recurrent' than .*mine\.py"
    ):
        load_head(first)


def test_code_that_is_not_what_it_says_is_refused(tiny_target: Target) -> None:
    """A config of an unknown hand: no mapping, another class, a kind of the package's own, which is not replaced."""
    write("mine.py")
    head = saved(tiny_target)
    config = json.loads((head / "config.json").read_text())
    for changes, words in (
        ({"code": ["x"]}, "expected what save_head writes"),
        ({"code": {**config["code"], "class": "Popen"}}, "has no Popen"),
        (
            {"settings": {"kind": "other"}},
            "names the method 'other', and method.py beside it has 'recurrent'",
        ),
    ):
        (head / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ValueError, match=words):
            load_head(head, trust_code=True)
    own = DRAFTERS["eagle1"]
    (head / "config.json").write_text(json.dumps({**config, "settings": {"kind": "eagle1"}}))
    with pytest.raises(ValueError, match="is not this head: missing tensors"):
        load_head(head, trust_code=True)
    assert DRAFTERS["eagle1"] is own


def test_a_plugin_registers_all_that_it_defines_in_every_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By an option anywhere on the line, which processes that begin here are told by the environment."""
    for name in (PLUGINS, TRUST_CODE):
        monkeypatch.setenv(name, "")
    write("both.py", METHOD + LOOKUP.partition("\n\n")[2])
    line = ["measure", "--plugin", "both.py", "tiny/eagle1", "eval.count=2", "--trust-code"]
    plugins, trusts, rest = take_code_options(line)
    assert (plugins, trusts) == ([f"{Path.cwd()}/both.py"], True) and rest == [
        "measure",
        "tiny/eagle1",
        "eval.count=2",
    ]
    admit_code(plugins, trusts)
    assert {"recurrent", "Again"} <= DRAFTERS.keys() and DRAFTERS.trusts_heads and Trust.in_recipes
    assert take_code_options(["measure"]) == (
        plugins,
        True,
        ["measure"],
    )  # as a process that begins here reads it
    with pytest.raises(
        ValueError, match=r"none\.py defines no method: expected a class that inherits from Drafter"
    ):
        DRAFTERS.load_plugin(write("none.py", "x = 1\n"))


def install(folder: Path, package: str, module: str, entries: str, text: str = METHOD) -> None:
    """An installed package, as far as Python looks: a module, and the metadata beside it."""
    write(str(folder / f"{module}.py"), text)
    about = folder / f"{package.replace('-', '_')}-1.2.dist-info"
    write(str(about / "METADATA"), f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    write(str(about / "top_level.txt"), f"{module}\n")
    write(str(about / "entry_points.txt"), f"[eagle.drafters]\n{entries}\n")


def test_an_installed_package_offers_methods_by_name(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read when a name is not known; a head of it names the package and needs no flag where that is installed."""
    site = tmp_path / "site"
    install(site, "my-heads", "my_heads_of_tests", "recurrent = my_heads_of_tests:Recurrent")
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(ValueError, match=r"expected a method with weights: .*recurrent, or"):
        settings_of({"kind": "eagle9"}, "r.yaml")
    assert "my_heads_of_tests" not in sys.modules  # a list loads nothing
    save_head("head", make_head("recurrent", tiny_target), "", {})
    assert json.loads(Path("head/config.json").read_text())["code"] == {
        "module": "my_heads_of_tests",
        "class": "Recurrent",
        "package": "my-heads 1.2",
    }
    assert not Path("head", METHOD_FILE).exists()
    forget()
    load_head("head")
    assert DRAFTERS.find("my_heads_of_tests:Recurrent") is DRAFTERS["recurrent"]
    forget()
    shutil.rmtree(site / "my_heads-1.2.dist-info")
    with pytest.raises(
        ValueError, match=r"'recurrent' is my_heads_of_tests:Recurrent of the package my-heads 1\.2"
    ):
        load_head("head")


@pytest.mark.parametrize(
    ("entries", "text", "words"),
    [
        (
            "recurrent = gone_from_tests:Recurrent",
            METHOD,
            r"my-heads 1\.2, which offers 'recurrent'.*cannot be loaded",
        ),
        (
            "other = my_wrong_heads:Recurrent",
            METHOD,
            r"my-heads 1\.2.*that method is called 'recurrent'",
        ),
        ("again = my_wrong_heads:METHOD", "METHOD = 3\n", r"my-heads 1\.2.* 3 is no Drafter"),
    ],
)
def test_what_is_wrong_with_a_package_names_it(
    entries: str, text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it runs into."""
    install(tmp_path / "site", "my-heads", "my_wrong_heads", entries, text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "my_wrong_heads", raising=False)
    with pytest.raises(ValueError, match=words):
        settings_of({"kind": entries.partition(" ")[0]}, "r.yaml")
    sys.modules.pop("my_wrong_heads", None)


def test_two_packages_with_one_name_are_both_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is taken."""
    for package in ("my-heads", "your-heads"):
        module = package.replace("-", "_")
        install(tmp_path / package, package, module, f"recurrent = {module}:Recurrent")
        monkeypatch.syspath_prepend(str(tmp_path / package))
    with pytest.raises(
        ValueError, match=r"my-heads 1\.2 and your-heads 1\.2 both offer a method 'recurrent'"
    ):
        settings_of({"kind": "recurrent"}, "r.yaml")


def test_a_comparison_takes_files_and_knows_them_by_their_text() -> None:
    """A file that was edited is another arm, which is trained anew."""
    write("mine.py")
    write("again.py", LOOKUP)
    write("arms.yaml", ARMS)
    first = {name: arm.digest for name, arm in Comparison.load("arms.yaml").arms.items()}
    forget()
    write("mine.py", METHOD + "# edited\n")
    write("again.py", LOOKUP + "# edited\n")
    second = {name: arm.digest for name, arm in Comparison.load("arms.yaml").arms.items()}
    assert {name for name in first if first[name] != second[name]} == {"mine", "again"}


def test_the_card_of_such_a_head_tells_whose_code_it_is(tiny_target: Target) -> None:
    """And how it is loaded."""
    write("mine.py")
    head = saved(tiny_target)
    recipe = "target: {path: t}\ndrafter: {kind: mine.py:Recurrent}\ndata: {}\ntrain: {}\n"
    (head / "recipe.yaml").write_text(recipe)
    card = model_card(head, "me/mine")
    assert (
        "of the kind `recurrent`" in card
        and 'load_drafter("me/mine", target, trust_code=True)' in card
    )
    assert "`method.py` beside the head, which was mine.py. Read it before you trust it." in card


def test_a_file_is_run_once(capsys: pytest.CaptureFixture[str]) -> None:
    """However often it is named."""
    write(
        "mine.py", "print('running')\n" + METHOD.replace("from __future__ import annotations\n", "")
    )
    assert load_file(Path("mine.py")) is load_file(Path("./mine.py"))
    assert capsys.readouterr().out == "running\n"


def test_a_head_that_brings_its_file_is_shared_with_it(tiny_target: Target) -> None:
    """As it is, once it is trusted; a file with a key in it stays here."""
    write("mine.py")
    folder = Path(saved(tiny_target))
    (folder / "README.md").write_text("a card")
    with pytest.raises(ValueError, match="would run code of its own"):
        pack(folder, "someone/head", [])
    DRAFTERS.trusts_heads = True
    assert pack(folder, "someone/head", []).files[METHOD_FILE].read() == METHOD.encode()
    forget()
    write("mine.py", METHOD + f"# hf_{'a' * 34}\n")
    other = Path(saved(tiny_target, "other"))
    (other / "README.md").write_text("a card")
    DRAFTERS.trusts_heads = True
    with pytest.raises(ValueError, match=r"method\.py holds what looks like a token of the hub"):
        pack(other, "someone/head", [])


def test_a_folder_that_generate_trusts_may_run_its_method(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trust_remote_code` is of the whole folder: the file that transformers runs, and the method's beside it."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(Path("modules").resolve())
    )
    write("mine.py")
    folder = Path(saved(tiny_target)).resolve()
    write_custom_generate(folder)
    model, prompt = copy.deepcopy(tiny_target.model), torch.tensor([tiny_target.chat("Hello")])
    options = {"max_new_tokens": 8, "do_sample": False}
    drafted = model.generate(prompt, **options, custom_generate=str(folder), trust_remote_code=True)
    assert torch.equal(drafted, model.generate(prompt, **options)) and "recurrent" in DRAFTERS


def test_only_methods_from_outside_are_looked_for_among_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading what is installed takes a second, and every arm, checkpoint and saved head asks for its code."""

    def read() -> dict[str, list[str]]:
        raise AssertionError("the packages were read")

    monkeypatch.setattr(outside, "packages_distributions", read)
    assert {describe_code(method) for method in DRAFTERS.values()} == {None}
