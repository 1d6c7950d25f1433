"""Methods outside the package: in files, installed packages and the folders of heads."""

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

from eagle import Target, generate, load_drafter
from eagle.__main__ import PLUGINS, TRUST_CODE, admit_code, take_code_options
from eagle.command.share import pack
from eagle.conformance.trial import make_head
from eagle.drafters import DRAFTERS, outside, settings_of
from eagle.drafters.outside import METHOD_FILE, describe_code
from eagle.formats.card import model_card
from eagle.formats.checkpoint import (
    ON_HUB,
    from_pretrained,
    load_head,
    method_without_files,
    save_head,
)
from eagle.formats.custom_generate import write_custom_generate
from eagle.formats.reading.foreign import inspect
from eagle.recipe import Trust
from eval.comparison.compare_plan import Comparison
from tests.outside_methods import ARMS, LOOKUP, METHOD


@pytest.fixture(autouse=True)
def only_own_methods(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run each test in an empty folder, with the package's own methods registered alone."""
    monkeypatch.chdir(tmp_path)
    own = dict(DRAFTERS)
    yield
    forget()
    DRAFTERS.update(own)


def test_a_folder_is_no_class() -> None:
    """Though it is called as one of a module."""
    Path("absent:Head").mkdir()
    assert method_without_files("absent:Head") is None


def forget() -> None:
    """Forget every method outside, as a new process does not know it."""
    for name, method in list(DRAFTERS.items()):
        if method.__module__.split(".")[0] != "eagle":
            del DRAFTERS[name]
    for name in list(sys.modules):
        if name.startswith("outside_"):
            del sys.modules[name]
    DRAFTERS.trusts_heads = False
    Trust.in_recipes = False


def write(
    name: str,
    text: str = METHOD,
    **changes: str,
) -> Path:
    """Write a file of the method, in which each key is replaced by its value."""
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def save_in(target: Target, folder: str = "head") -> Path:
    """Save a head of the method in mine.py, and forget the method."""
    save_head(
        folder,
        make_head("mine.py:Recurrent", target),
        "",
        {},
    )
    forget()
    return Path(folder)


# -- files --------------------------------------------------------------------------------------


def test_a_class_in_a_file_is_registered_once() -> None:
    """By the kind of its Settings, however its path is written."""
    write("mine.py")
    write("deeper/copy.py")
    settings = settings_of({"kind": "./mine.py:Recurrent", "steps": 2}, "r.yaml")
    assert settings.kind == "recurrent"
    assert settings.steps == 2
    assert settings_of({"kind": "recurrent"}, "r.yaml").steps == 4
    method = DRAFTERS["recurrent"]
    # the same text is the same method
    for name in (
        "recurrent",
        f"{Path.cwd()}/mine.py:Recurrent",
        "deeper/copy.py:Recurrent",
    ):
        assert DRAFTERS.find(name) is method
    # where pickles look for it
    assert sys.modules[method.__module__].Recurrent is method
    with pytest.raises(ValueError, match=r"r\.yaml: drafter.*stepps"):
        settings_of({"kind": "mine.py:Recurrent", "stepps": 2}, "r.yaml")


def test_a_method_without_weights_drafts_by_its_path_and_its_name(tiny_target: Target) -> None:
    """Alone and after another drafter; the output is the target's own."""
    write("again.py", LOOKUP)
    prompt = tiny_target.chat("Hello")

    def answer(name: str) -> list[int]:
        drafter = load_drafter(name, tiny_target)
        return generate(
            tiny_target,
            drafter,
            prompt,
            max_new_tokens=8,
            stop=[],
        ).tokens

    expected = answer("none")
    for name in ("again.py:Again", "Again", "ngram,again.py:Again"):
        assert answer(name) == expected
    with pytest.raises(ValueError, match="has no option depth"):
        load_drafter("again.py:Again", tiny_target, depth=3)


KIND = 'kind: Literal["recurrent"] = "recurrent"'
TEXT = "class RecurrentSequence:"
MINE = "mine.py:Recurrent"
# the name in a recipe, what is changed in mine.py, and words of the error
WRONG: list[tuple[str, dict[str, str], str]] = [
    ("gone.py:Recurrent", {}, r"no file at gone\.py"),
    ("mine.py:Recurent", {}, r"did you mean Recurrent\?"),
    ("mine.py:RecurrentSequence", {}, "is no Drafter"),
    (MINE, {f"    {KIND}": "    # left out:"}, "has the name None"),
    (
        MINE,
        {KIND: 'kind: Literal["eagle1"] = "eagle1"'},
        "is called 'eagle1', as",
    ),
    (MINE, {TEXT: f"1 / 0\n\n\n{TEXT}"}, r"line \d+: Zero"),
    (MINE, {TEXT: "class RecurrentSequence"}, r"line \d+: Syntax"),
    (
        MINE,
        {"import torch\n": "import torch\nimport beside_it\n"},
        "ModuleNotFoundError",
    ),
    (
        "no_such_package.mine:Recurrent",
        {},
        "is no module that can be imported",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "words"), WRONG)
def test_what_is_no_method_is_refused(
    kind: str,
    changes: dict[str, str],
    words: str,
) -> None:
    """With the recipe that names it, and the second time as the first."""
    write("mine.py", **changes)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"r\.yaml: drafter\.kind: .*{words}"):
            settings_of({"kind": kind}, "r.yaml")
    assert "recurrent" not in DRAFTERS


def test_an_edited_file_is_read_again_and_a_second_of_its_kind_refused(
    tiny_target: Target,
) -> None:
    """A head is loaded from its folder, not by its class; an unknown kind gets a list."""
    write("mine.py")
    write("other.py", **{"steps: int = Field(4": "steps: int = Field(3"})
    first = DRAFTERS.find("mine.py:Recurrent")
    with pytest.raises(ValueError, match=r"is called 'recurrent', as .*mine\.py is already"):
        DRAFTERS.find("other.py:Recurrent")
    write("mine.py", **{"steps: int = Field(4": "steps: int = Field(2"})
    second: Any = DRAFTERS.find("mine.py:Recurrent")
    assert second is not first
    assert second is DRAFTERS["recurrent"]
    assert second.Settings().steps == 2
    with pytest.raises(ValueError, match="expected the folder of a trained head"):
        load_drafter("mine.py:Recurrent", tiny_target)
    with pytest.raises(ValueError, match="expected a method with weights"):
        settings_of({"kind": "eagle9"}, "r.yaml")


def test_a_comparison_knows_files_by_their_text() -> None:
    """An arm whose file was edited is another arm, which is trained again."""

    def digests(comment: str) -> dict[str, str]:
        write("mine.py", METHOD + comment)
        write("again.py", LOOKUP + comment)
        forget()
        return {name: arm.digest for name, arm in Comparison.load("arms.yaml").arms.items()}

    write("arms.yaml", ARMS)
    first = digests("")
    second = digests("# edited\n")
    assert {name for name in first if first[name] != second[name]} == {"mine", "again"}


# -- heads that bring their file ----------------------------------------------------------------


def test_a_head_runs_its_file_only_where_it_is_trusted(tiny_target: Target) -> None:
    """An error tells what it would run; whoever loaded the same file needs no flag."""
    write("mine.py")
    head = save_in(tiny_target)
    code = json.loads((head / "config.json").read_text())["code"]
    assert code["file"] == "mine.py"
    assert code["class"] == "Recurrent"
    assert METHOD_FILE in ON_HUB
    assert (head / METHOD_FILE).read_text() == METHOD
    Path("mine.py").unlink()
    for load in (
        load_head,
        from_pretrained,
        lambda folder: load_drafter(folder, tiny_target),
    ):
        with pytest.raises(ValueError, match=r"would run code of its own: .* --trust-code"):
            load(head)
    found = inspect(head)
    assert not found.fatal
    assert "would run code" in str(found)
    assert not any(name.startswith("outside_") for name in sys.modules)
    trusted = load_head(head, trust_code=True)
    # the method is loaded now
    assert load_drafter(head, tiny_target).settings == trusted.settings
    forget()
    write("elsewhere/mine.py")
    settings_of({"kind": "elsewhere/mine.py:Recurrent"}, "r.yaml")
    weight = load_head(head).state_dict()["norm.weight"]
    assert torch.equal(weight, trusted.state_dict()["norm.weight"])


def test_altered_code_is_refused_even_where_it_is_trusted(tiny_target: Target) -> None:
    """So is a folder without its file, and other code of a kind that is loaded."""
    write("mine.py")
    head = save_in(tiny_target)
    write(str(head / METHOD_FILE), METHOD + "# altered\n")
    with pytest.raises(ValueError, match="was altered after the head was saved"):
        load_head(head, trust_code=True)
    (head / METHOD_FILE).unlink()
    with pytest.raises(ValueError, match="is missing, which holds the head's method"):
        load_head(head, trust_code=True)
    write("mine.py")
    first = save_in(tiny_target, "first")
    write("mine.py", METHOD + "# another\n")
    second = save_in(tiny_target, "second")
    load_head(first, trust_code=True)
    with pytest.raises(ValueError, match="hold different code of the method 'recurrent'"):
        load_head(second, trust_code=True)
    # the user's own file is used, with a warning
    forget()
    settings_of({"kind": "mine.py:Recurrent"}, "r.yaml")
    with pytest.warns(UserWarning, match="first was saved with other code"):
        load_head(first)


def test_code_that_is_not_what_a_config_says_is_refused(tiny_target: Target) -> None:
    """A config may come from anybody: it must not load another class or replace a method."""
    write("mine.py")
    head = save_in(tiny_target)
    config = json.loads((head / "config.json").read_text())
    own = DRAFTERS["eagle1"]
    for changes, words in (
        ({"code": ["x"]}, "expected what save_head writes"),
        ({"code": {**config["code"], "class": "Popen"}}, "has no Popen"),
        ({"settings": {"kind": "other"}}, "names the method 'other'"),
        ({"settings": {"kind": "eagle1"}}, "missing tensors"),
    ):
        (head / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ValueError, match=words):
            load_head(head, trust_code=True)
    assert DRAFTERS["eagle1"] is own


def test_the_card_of_such_a_head_tells_whose_code_it_is(tiny_target: Target) -> None:
    """It names the file, and shows how the head is loaded."""
    write("mine.py")
    head = save_in(tiny_target)
    recipe = "target: {path: t}\ndrafter: {kind: mine.py:Recurrent}\ndata: {}\ntrain: {}\n"
    (head / "recipe.yaml").write_text(recipe)
    card = model_card(head, "me/mine")
    assert "of the kind `recurrent`" in card
    assert 'load_drafter("me/mine", target, trust_code=True)' in card
    assert "`method.py` beside the head, which was mine.py" in card


def test_a_trusted_head_is_shared_with_its_file(tiny_target: Target) -> None:
    """A file that holds a token of the hub is not uploaded."""
    write("mine.py")
    head = save_in(tiny_target)
    (head / "README.md").write_text("a card")
    with pytest.raises(ValueError, match="would run code of its own"):
        pack(head, "someone/head", [])
    DRAFTERS.trusts_heads = True
    assert pack(head, "someone/head", []).files[METHOD_FILE].read() == METHOD.encode()
    forget()
    write("mine.py", METHOD + f"# hf_{'a' * 34}\n")
    leaking = save_in(tiny_target, "leaking")
    (leaking / "README.md").write_text("a card")
    DRAFTERS.trusts_heads = True
    with pytest.raises(ValueError, match="looks like a token of the hub"):
        pack(leaking, "someone/head", [])


def test_a_folder_that_generate_trusts_may_run_its_method(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trust_remote_code` covers both files of a folder: transformers' and the method's."""
    cache = str(Path("modules").resolve())
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    write("mine.py")
    folder = save_in(tiny_target).resolve()
    write_custom_generate(folder)
    model = copy.deepcopy(tiny_target.model)
    prompt = torch.tensor([tiny_target.chat("Hello")])
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(prompt, **options)
    drafted = model.generate(
        prompt,
        **options,
        custom_generate=str(folder),
        trust_remote_code=True,
    )
    assert torch.equal(drafted, expected)
    assert "recurrent" in DRAFTERS


# -- plugins and packages -----------------------------------------------------------------------


def test_a_plugin_registers_its_methods_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an option anywhere on the line, which new processes read from the environment."""
    for name in (PLUGINS, TRUST_CODE):
        monkeypatch.setenv(name, "")
    # both methods in one file
    write("both.py", METHOD + LOOKUP.partition("\n\n")[2])
    line = [
        "measure",
        "--plugin",
        "both.py",
        "tiny/eagle1",
        "eval.count=2",
        "--trust-code",
    ]
    plugins, trusts, rest = take_code_options(line)
    assert plugins == [f"{Path.cwd()}/both.py"]
    assert trusts is True
    assert rest == ["measure", "tiny/eagle1", "eval.count=2"]
    admit_code(plugins, trusts)
    assert {"recurrent", "Again"} <= DRAFTERS.keys()
    assert DRAFTERS.trusts_heads
    assert Trust.in_recipes
    assert take_code_options(["measure"]) == (plugins, True, ["measure"])
    with pytest.raises(ValueError, match=r"none\.py defines no method"):
        DRAFTERS.load_plugin(write("none.py", "x = 1\n"))


def install(
    folder: Path,
    package: str,
    module: str,
    entries: str,
    text: str = METHOD,
) -> None:
    """Write a package as Python sees it when it is installed: a module and its metadata."""
    write(str(folder / f"{module}.py"), text)
    metadata = folder / f"{package.replace('-', '_')}-1.2.dist-info"
    write(str(metadata / "METADATA"), f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    write(str(metadata / "top_level.txt"), f"{module}\n")
    write(str(metadata / "entry_points.txt"), f"[eagle.drafters]\n{entries}\n")


def test_an_installed_package_offers_methods_by_name(
    tiny_target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head of it names the package, and needs no flag where that is installed."""
    site = tmp_path / "site"
    install(
        site,
        "my-heads",
        "my_heads_of_tests",
        "recurrent = my_heads_of_tests:Recurrent",
    )
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(ValueError, match=r"expected a method with weights: .*recurrent, or"):
        settings_of({"kind": "eagle9"}, "r.yaml")
    # listing methods imports none of them
    assert "my_heads_of_tests" not in sys.modules
    save_head(
        "head",
        make_head("recurrent", tiny_target),
        "",
        {},
    )
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
    with pytest.raises(ValueError, match=r"of the package my-heads 1\.2"):
        load_head("head")


@pytest.mark.parametrize(
    ("name", "entry", "text", "words"),
    [
        (
            "recurrent",
            "gone_from_tests:Recurrent",
            METHOD,
            "cannot be loaded",
        ),
        (
            "other",
            "my_wrong_heads:Recurrent",
            METHOD,
            "that method is called 'recurrent'",
        ),
        (
            "again",
            "my_wrong_heads:METHOD",
            "METHOD = 3\n",
            "3 is no Drafter",
        ),
    ],
)
def test_what_is_wrong_with_a_package_names_it(
    name: str,
    entry: str,
    text: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A module that is gone, another name, and something that is no method."""
    site = Path("site").resolve()
    install(
        site,
        "my-heads",
        "my_wrong_heads",
        f"{name} = {entry}",
        text,
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(
        sys.modules,
        "my_wrong_heads",
        raising=False,
    )
    with pytest.raises(ValueError, match=rf"my-heads 1\.2.*{words}"):
        settings_of({"kind": name}, "r.yaml")
    sys.modules.pop("my_wrong_heads", None)


def test_two_packages_with_one_name_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is taken."""
    for package in ("my-heads", "your-heads"):
        module = package.replace("-", "_")
        site = Path(package).resolve()
        install(
            site,
            package,
            module,
            f"recurrent = {module}:Recurrent",
        )
        monkeypatch.syspath_prepend(str(site))
    with pytest.raises(ValueError, match=r"my-heads 1\.2 and your-heads 1\.2 both offer"):
        settings_of({"kind": "recurrent"}, "r.yaml")


def test_own_methods_do_not_read_the_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes a second, and every arm, checkpoint and saved head asks for its code."""

    def refuse() -> dict[str, list[str]]:
        raise AssertionError("the packages were read")

    monkeypatch.setattr(
        outside,
        "packages_distributions",
        refuse,
    )
    assert {describe_code(method) for method in DRAFTERS.values()} == {None}
