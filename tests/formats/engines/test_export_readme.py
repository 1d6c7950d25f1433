"""The README of an exported head: it serves from anywhere, claims what is known, and says what was not run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.__main__ import main
from eagle.core.budget import Budget
from eagle.core.drafter import Committed
from eagle.formats.checkpoint import load_head, save_head, write_budget
from eagle.formats.export import EXPORTERS, export
from eagle.formats.reading.foreign import import_head
from eagle.target.target import Target
from tests import foreign_heads as made
from tests.engines.engine_reference import fit_block
from tests.formats.make_heads import make_head, make_target, write_target

# engines whose answers tests/test_engines.py compares with this decoder
RUN = ("vllm", "openvino", "llamacpp")
ENGINES = (*RUN, "sglang", "trtllm", "portable", "eagle", "speculators")
PLACEHOLDERS = {"TARGET", "HEAD", "DEPTH", "NODES", "METHOD", "LAYERS", "MORE"}
# settings of a head, and the draft length that its README asks for
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "eagle1": ({}, 2),
    "eagle3": ({"draft_vocab": 30, "taps": (2, 4, 5)}, 2),
    "medusa": ({"levels": 3}, 2),
    "peagle": ({"depths": 6}, 2),
    "dflash": ({"slots": 6}, 5),
    "dspark": ({"slots": 7}, 7),
    "xpress": ({"slots": 6, "rank": 8}, 5),
    "mlp_speculator": ({"levels": 3}, 2),
    "hydra": ({"levels": 3}, 2),
    "falcon": ({}, 2),
    "mtp": ({}, 2),
}
# by which vLLM knows them; it serves no others
METHODS = {
    "eagle1": "eagle",
    "eagle3": "eagle3",
    "medusa": "medusa",
    "peagle": "eagle3",
    "dflash": "dflash",
    "dspark": "dspark",
    "xpress": "dflash",
    "mtp": "mtp",
}
# of levels: chains reach them with probability 0.6, 0.3, 0.06, 0.006, so that drafts of two are the best
RATES = [0.6, 0.5, 0.2, 0.1]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a head of each kind whose validation counted chains of four."""
    # a name that commands hold too
    folder = tmp_path_factory.mktemp("TARGET")
    target = write_target(folder / "target")
    validation = {f"chain/{level}": rate for level, rate in enumerate(RATES, start=1)}
    recipe = f"target: {{path: {folder / 'target'}}}\n"
    for kind, (settings, _) in KINDS.items():
        head = make_head({"kind": kind, **settings}, target)
        save_head(folder / kind, head, recipe, {"validation": validation})
    return folder


@pytest.fixture(scope="module")
def target(work: Path) -> Target:
    """The target of all of them."""
    return Target.load(work / "target", dtype="float32")


def export_head(
    folder: Path,
    engine: str,
    target: Target,
    out: Path,
) -> str:
    """Return the README of an export; "" where the engine reads no such head."""
    head = load_head(folder).bind(target.head)
    try:
        export(head, target.config, engine, out=out, head=folder)
    except ValueError:
        return ""
    return (out / "README.md").read_text()


@pytest.mark.parametrize("engine", ENGINES)
def test_its_commands_run_from_anywhere(
    engine: str,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Paths are absolute though the command's were not, no placeholder is left, and what was not run is said."""
    monkeypatch.chdir(work)
    main(["export", "eagle3", "--target", "target", "--to", engine, f"out/{engine}"])
    readme = (work / "out" / engine / "README.md").read_text()
    assert str(work / "out" / engine) in readme
    assert str(work / "target") in readme
    assert "where it lies now" in readme

    # what stands between fences, where quotes hold JSON
    code = "\n".join(readme.split("```")[1::2]).replace("'", " ")
    assert not PLACEHOLDERS & set(shlex.split(code, comments=True))
    assert ("not run" in readme.lower()) == (engine not in RUN)


@pytest.mark.parametrize("engine", ["vllm", "speculators", "portable"])
def test_vllm_on_a_cpu(
    engine: str,
    work: Path,
    target: Target,
    tmp_path: Path,
) -> None:
    """Memory for its cache, the precision, which would be bf16, and a module for `vllm serve`; nothing else differs."""
    readme = export_head(
        work / "eagle3",
        engine,
        target,
        tmp_path / "out",
    ).replace("\\\n", "")
    commands = re.findall(r"```sh\n([^`]*vllm[^`]*)```", readme)
    plain = shlex.split(commands[0])
    on_cpu = shlex.split(commands[1])
    program = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"]

    assert plain[:2] == ["vllm", "serve"]

    options = [plain[2], "--dtype", "float32", *plain[3:]]
    assert on_cpu == ["VLLM_CPU_KVCACHE_SPACE=4", *program, *options]


def test_nothing_is_claimed_of_an_imported_head(tmp_path: Path) -> None:
    """Nobody knows its template; a target that nobody named is a placeholder with an explanation."""
    folder = tmp_path / "head"
    import_head(made.write(tmp_path / "foreign", made.eagle1()), folder)
    target = make_target(**{**made.LLAMA, "num_hidden_layers": 2})
    readme = export_head(folder, "vllm", target, tmp_path / "out")

    for claim in ("for unknown", "vllm serve unknown", "the target’s own", "given no arguments"):
        assert claim not in readme
    for words in ("imported", "`TARGET`", "vllm serve TARGET"):
        assert words in readme


@pytest.mark.parametrize(
    "recipe",
    [
        "target: {path: t}\n",
        "target: {path: t}\ndata: {train: x}\n",
        "target: t\ndata: [1]\ntrain:\n",
    ],
)
def test_a_recipe_that_does_not_speak_of_templates(
    recipe: str,
    work: Path,
    target: Target,
    tmp_path: Path,
) -> None:
    """Nothing is claimed there either."""
    save_head(tmp_path / "head", load_head(work / "eagle3"), recipe, {})
    readme = export_head(tmp_path / "head", "vllm", target, tmp_path / "out")
    assert "the target’s own" not in readme
    assert "Unknown" in readme


@pytest.mark.quick("medusa", "mlp_speculator")
@pytest.mark.parametrize("kind", KINDS)
def test_no_command_of_any_export_holds_a_placeholder(
    kind: str,
    work: Path,
    target: Target,
    tmp_path: Path,
) -> None:
    """Of any kind of head for any engine; what is asked of vLLM is JSON, with the method's own name."""
    readmes = {
        engine: export_head(work / kind, engine, target, tmp_path / engine) for engine in EXPORTERS
    }
    assert any(readmes.values())
    placeholders = "|".join([*PLACEHOLDERS, "EAGLE3"])
    for engine, readme in readmes.items():
        code = "\n".join(readme.split("```")[1::2])
        # the name of SGLang's algorithm
        code = code.replace("EAGLE3 \\", "")
        assert not re.search(rf"\b({placeholders})\b", code)
        asked = set(re.findall(r"--speculative-config '([^']*)'", readme))
        # vLLM reads the folders of three exporters
        serves_vllm = engine in ("vllm", "speculators", "portable") and bool(readme)
        # vLLM takes XPress's tensors by its own names alone
        if (kind, engine) == ("xpress", "speculators"):
            serves_vllm = False
        assert len(asked) == serves_vllm
        for text in asked:
            config = json.loads(text)
            assert config["method"] == METHODS[kind]
            assert config.get("parallel_drafting", False) == (kind == "peagle")


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "speculators"])
@pytest.mark.parametrize("kind", METHODS)
def test_the_draft_length_is_that_of_the_head(
    kind: str,
    engine: str,
    work: Path,
    target: Target,
    tmp_path: Path,
) -> None:
    """Blocks guess otherwise where they are shorter than trained; of chains only levels that exist are counted."""
    readme = export_head(work / kind, engine, target, tmp_path / "out")
    if not readme:
        pytest.skip(f"{engine} reads no {kind}")
    settings, length = KINDS[kind]
    assert f"{length} tokens: " in readme
    assert set(re.findall(r'"num_speculative_tokens": (\d+)', readme)) <= {str(length)}

    levels = settings.get("levels", len(RATES))
    assert (
        f"Predicted by training's validation on held-out texts, for chains of {levels}: " in readme
    )

    record = json.loads((tmp_path / "out/provenance.json").read_text())
    assert len(record["acceptance"]["per_position"]) == levels


def test_a_head_tuned_to_no_draft_gets_a_length_all_the_same(
    work: Path,
    target: Target,
    tmp_path: Path,
) -> None:
    """What pays on one machine is no length for an engine, which takes 1 or more."""
    head = tmp_path / "head"
    shutil.copytree(work / "eagle3", head)
    write_budget(head, Budget(0, 0, 0))
    assert load_head(head).budget == Budget(0, 0, 0)
    readme = export_head(head, "vllm", target, tmp_path / "out")
    untuned = export_head(work / "eagle3", "vllm", target, tmp_path / "untuned")
    lengths = re.findall(r'"num_speculative_tokens": (\d+)', readme)
    assert lengths == re.findall(r'"num_speculative_tokens": (\d+)', untuned)
    assert lengths and "0" not in lengths


def test_a_version_that_drops_a_method_is_named(
    work: Path,
    target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the command, by the README, and where another engine's refusal names the readers."""
    out = tmp_path / "out"
    options = ["--target", str(work / "target"), "--to", "vllm", str(out)]
    main(["export", str(work / "medusa"), *options])
    assert "is ready for vllm (up to 0.32.0); " in capsys.readouterr().out

    readme = (out / "README.md").read_text()
    assert "0.32.0 is the last that reads Medusa" in readme
    assert "0.33.0" in readme

    words = r"sglang: no layout .*export to vllm \(up to 0.32.0\) or medusa"
    with pytest.raises(ValueError, match=words):
        EXPORTERS["sglang"](load_head(work / "medusa"), target.config)


# a head, and whether a block of two guesses has other guesses than the first two of six
BLOCKS: dict[str, tuple[dict[str, Any], bool]] = {
    "peagle": ({"kind": "peagle", "depths": 6}, False),
    "dflash": ({"kind": "dflash", "slots": 7, "blocks": 2}, True),
    "causal dflash": ({"kind": "dflash", "slots": 7, "blocks": 2, "causal": True}, False),
    "dspark": ({"kind": "dspark", "slots": 6, "blocks": 2}, True),
}


@torch.no_grad()
def draft_tokens(
    head: Any,
    depth: int,
    target: Target,
) -> list[list[int]]:
    """Return the first two tokens that a head drafts after each of 24 prompts, from blocks of a depth."""
    fit_block(head, depth)
    prompts = torch.randint(
        0,
        48,
        (24, 9),
        generator=torch.Generator().manual_seed(1),
    )
    drafts = []
    for prompt in prompts:
        features = target.features(prompt[None, :-1], head.taps)[0]
        state = head.open()
        state.admit(0)
        news = Committed(prompt[:-1], features, int(prompt[-1]))
        tree = state.propose({0: news}, {0: Budget(depth, depth, 1)})[0]
        drafts.append(tree.tokens[1:3].tolist())
    return drafts


@pytest.mark.quick("dspark")
@pytest.mark.parametrize("name", BLOCKS)
def test_a_layout_says_whether_shorter_blocks_guess_otherwise(name: str, target: Target) -> None:
    """Engines read as many slots as they are asked for: two guesses are six's first where none reads later ones."""
    settings, expected = BLOCKS[name]
    torch.manual_seed(0)
    head = make_head(settings, target)
    for weight in head.parameters():
        # away from the initial weights, where all slots guess alike
        weight.data.add_(torch.randn_like(weight), alpha=0.3)
    layout = EXPORTERS["vllm"](head.bind(target.head), target.config)

    assert layout.fixed_length == expected

    differ = draft_tokens(head, 6, target) != draft_tokens(head, 2, target)
    assert differ == expected
