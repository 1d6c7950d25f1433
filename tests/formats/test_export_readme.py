"""The README of an exported head: it serves from anywhere, claims what is known, and says what was not run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle.__main__ import main
from eagle.core.budget import Budget
from eagle.core.drafter import Committed
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.export import EXPORTERS, export
from eagle.formats.reading.foreign import import_head
from eagle.target.target import Target
from tests import foreign_heads as made
from tests.engines.engine_reference import fit_block
from tests.formats.test_export_verb import write_head, write_target

RUN = ("vllm", "openvino", "llamacpp")  # compared with this decoder in tests/test_engines.py
READ = ("sglang", "trtllm", "portable", "eagle")
ENGINES = (*RUN, *READ, "speculators")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a head for it."""
    folder = tmp_path_factory.mktemp("TARGET")  # a name that commands hold too
    write_target(folder / "target", torch.float32)
    write_head(folder / "head", folder / "target", taps=(2, 4, 5), draft_vocab=30)
    return folder


def readme(work: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What stands beside an export whose paths were all said relative to where the command ran."""
    monkeypatch.chdir(work)
    main(["export", "head", "--target", "target", "--to", engine, f"out/{engine}"])
    return (work / "out" / engine / "README.md").read_text()


@pytest.mark.parametrize("engine", ENGINES)
def test_its_commands_run_from_anywhere(
    engine: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head and target are absolute, no placeholder is left, and it is said what to change after a move."""
    said = readme(work, engine, monkeypatch)
    assert str(work / "out" / engine) in said and str(work / "target") in said
    code = "\n".join(said.split("```")[1::2])
    assert not {"TARGET", "HEAD", "DEPTH", "NODES", "METHOD", "LAYERS"} & set(
        shlex.split(code.replace("'", " "), comments=True)
    )
    assert "where it lies now" in said


@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_not_run_is_said(engine: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of SGLang, TensorRT-LLM and SafeAILab/EAGLE, and of the folder for all."""
    assert ("not run" in readme(work, engine, monkeypatch).lower()) == (engine not in RUN)


@pytest.mark.parametrize("engine", ["vllm", "speculators", "portable"])
def test_vllm_on_a_cpu(engine: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for its cache, the precision, which would be bf16, and a module for `vllm serve`; nothing else differs."""
    said = readme(work, engine, monkeypatch).replace("\\\n", "")
    plain, on_cpu = [
        shlex.split(command) for command in re.findall(r"```sh\n([^`]*vllm[^`]*)```", said)
    ][:2]
    assert plain[:2] == ["vllm", "serve"]
    module = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    assert on_cpu == [
        "VLLM_CPU_KVCACHE_SPACE=4",
        *module,
        plain[2],
        "--dtype",
        "float32",
        *plain[3:],
    ]


def test_nothing_is_claimed_of_an_imported_head(tmp_path: Path) -> None:
    """Nobody knows its template; a target that nobody named is a placeholder with an explanation."""
    folder = made.write(tmp_path / "foreign", made.eagle1())
    import_head(folder, tmp_path / "head")
    torch.manual_seed(0)
    config: dict[str, Any] = {**made.LLAMA, "num_hidden_layers": 2}
    target = Target(LlamaForCausalLM(LlamaConfig(**config)))
    export(
        load_head(tmp_path / "head").bind(target.head),
        target.config,
        "vllm",
        tmp_path / "out",
        tmp_path / "head",
    )
    said = (tmp_path / "out/README.md").read_text()
    assert "for unknown" not in said and "vllm serve unknown" not in said
    assert "the target’s own" not in said and "given no arguments" not in said
    assert "imported" in said and "`TARGET`" in said and "vllm serve TARGET" in said


def test_a_recipe_that_does_not_speak_of_templates(work: Path, tmp_path: Path) -> None:
    """Nothing is claimed there either."""
    target = Target.load(work / "target", dtype="float32")
    head = load_head(work / "head")
    for recipe in (
        "target: {path: t}\n",
        "target: {path: t}\ndata: {train: x}\n",
        "target: t\ndata: [1]\ntrain:\n",
    ):
        save_head(tmp_path / "head", head, recipe, {})
        export(
            load_head(tmp_path / "head").bind(target.head),
            target.config,
            "vllm",
            tmp_path / "out",
            tmp_path / "head",
        )
        said = (tmp_path / "out/README.md").read_text()
        assert "the target’s own" not in said and "Unknown" in said


KINDS: dict[str, tuple[dict[str, Any], int]] = {  # settings, and how long a draft is asked for
    "eagle1": ({}, 2),
    "eagle3": ({"draft_vocab": 30}, 2),
    "medusa": ({"levels": 3}, 2),
    "peagle": ({"depths": 6}, 2),
    "dflash": ({"slots": 6}, 5),
    "dspark": ({"slots": 7}, 7),
    "mlp_speculator": ({"levels": 3}, 2),
    "hydra": ({"levels": 3}, 2),
    "falcon": ({}, 2),
    "mtp": ({}, 2),
}
RATES = [0.6, 0.5, 0.2, 0.1]  # of levels, which make chains of two the best: 0.6, 0.3, 0.06, 0.006
METHODS = {kind: kind for kind in ("eagle3", "medusa", "dflash", "dspark", "mtp")} | {
    "eagle1": "eagle",
    "peagle": "eagle3",
}


@pytest.fixture(scope="module")
def target(work: Path) -> Target:
    """The target of all of them."""
    return Target.load(work / "target", dtype="float32")


@pytest.fixture(scope="module")
def heads(work: Path, target: Target) -> Path:
    """A head of each kind, whose validation counted chains of four."""
    validation = {f"chain/{level}": rate for level, rate in enumerate(RATES, start=1)}
    for kind, (more, _) in KINDS.items():
        settings, method = settings_of({"kind": kind, **more}, "test"), DRAFTERS[kind]
        weights = {"weights": target.tensor} if method.reads.weights else {}
        head = method.for_target(
            settings, target.config, target.head, [torch.arange(40)], **weights
        )
        save_head(
            work / kind, head, f"target: {{path: {work / 'target'}}}\n", {"validation": validation}
        )
    return work


def export_kind(kind: str, engine: str, heads: Path, target: Target, out: Path) -> str:
    """The README of an export; "" where the engine reads no such head."""
    try:
        export(load_head(heads / kind).bind(target.head), target.config, engine, out, heads / kind)
    except ValueError:
        return ""
    return (out / "README.md").read_text()


@pytest.mark.quick("medusa", "mlp_speculator")
@pytest.mark.parametrize("kind", KINDS)
def test_no_command_of_any_export_holds_a_placeholder(
    kind: str, heads: Path, target: Target, tmp_path: Path
) -> None:
    """Of any kind of head for any engine; what is asked of vLLM is JSON, with the method's own name."""
    written = {
        engine: export_kind(kind, engine, heads, target, tmp_path / engine) for engine in EXPORTERS
    }
    assert any(written.values())
    for engine, said in written.items():
        code = "\n".join(said.split("```")[1::2])
        assert not re.search(
            r"\b(TARGET|HEAD|DEPTH|NODES|METHOD|LAYERS|MORE|EAGLE3)\b",
            code.replace("EAGLE3 \\", ""),
        )
        asked = [json.loads(found) for found in re.findall(r"--speculative-config '([^']*)'", said)]
        assert {one["method"] for one in asked} <= {METHODS.get(kind)}
        assert all(one.get("parallel_drafting", False) == (kind == "peagle") for one in asked)
        assert len({json.dumps(one) for one in asked}) <= 1
        assert bool(asked) == (engine in ("vllm", "speculators", "portable") and bool(said))


@pytest.mark.parametrize("kind", METHODS)
def test_the_draft_length_is_that_of_the_head(
    kind: str, heads: Path, target: Target, tmp_path: Path
) -> None:
    """Blocks guess otherwise where they are shorter than trained; of chains nothing is told of levels that are none."""
    for engine in ("vllm", "llamacpp", "speculators"):
        if not (said := export_kind(kind, engine, heads, target, tmp_path / engine)):
            continue
        length = KINDS[kind][1]
        assert f"{length} tokens: " in said
        if "num_speculative_tokens" in said:
            assert set(re.findall(r'"num_speculative_tokens": (\d+)', said)) == {str(length)}
        most = KINDS[kind][0].get("levels", len(RATES))
        assert f"chains of {most}: " in said
        rates = json.loads((tmp_path / engine / "provenance.json").read_text())["acceptance"][
            "per_position"
        ]
        assert len(rates) == most


def test_a_version_that_drops_a_method_is_named(
    heads: Path, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the verb, by the README, and where another engine's refusal names the readers."""
    main(
        [
            "export",
            str(heads / "medusa"),
            "--target",
            str(heads / "target"),
            "--to",
            "vllm",
            str(tmp_path / "out"),
        ]
    )
    assert "is ready for vllm (up to 0.32.0); " in capsys.readouterr().out
    said = (tmp_path / "out/README.md").read_text()
    assert "0.32.0 is the last that reads Medusa" in said and "0.33.0" in said
    with pytest.raises(
        ValueError, match=r"sglang: no layout .*export to vllm \(up to 0.32.0\) or medusa"
    ):
        EXPORTERS["sglang"](load_head(heads / "medusa"), target.config)


BLOCKS: dict[str, dict[str, Any]] = {
    "peagle": {"kind": "peagle", "depths": 6},
    "dflash": {"kind": "dflash", "slots": 7, "blocks": 2},
    "causal dflash": {"kind": "dflash", "slots": 7, "blocks": 2, "causal": True},
    "dspark": {"kind": "dspark", "slots": 6, "blocks": 2},
}


@pytest.mark.quick("dspark")
@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_a_layout_says_whether_shorter_drafts_are_others(name: str, target: Target) -> None:
    """Engines read as many slots as they are asked for: two guesses are six's first where none reads later ones."""
    torch.manual_seed(0)
    settings = settings_of(BLOCKS[name], "test")
    head: Any = DRAFTERS[settings.kind].for_target(
        settings, target.config, target.head, [torch.arange(40)]
    )
    for weight in head.parameters():
        weight.add_(torch.randn_like(weight), alpha=0.3)
    layout = EXPORTERS["vllm"](head.bind(target.head), target.config)
    drafts = []
    for depth in (6, 2):
        fit_block(head, depth)
        drafts.append([])
        for prompt in torch.randint(0, 48, (24, 9), generator=torch.Generator().manual_seed(1)):
            state = head.open()
            state.admit(0)
            update = Committed(
                prompt[:-1], target.features(prompt[None, :-1], head.taps)[0], int(prompt[-1])
            )
            tree = state.propose({0: update}, {0: Budget(depth, depth, 1)})[0]
            drafts[-1].append(tree.tokens[1:3].tolist())
    assert layout.whole == (drafts[0] != drafts[1])
    assert layout.whole == (name in ("dflash", "dspark"))
