"""EAGLE heads in every engine's layout: the names, shapes and keys of that engine's own code and of published heads."""

# H hidden, V vocabulary, D draft vocabulary

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM

from eagle import Target
from eagle.formats.engines.registry import ENGINES, SERVERS
from eagle.formats.export import EXPORTERS, export
from eagle.formats.networks.eagle_layouts import FUSED
from tests.formats.make_heads import make_target, random_head

H = 32
V = 96
D = 40
SIZES = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# every other token but a few
DRAFTED = range(5, 5 + 2 * D, 2)
Shapes = dict[str, tuple[int, ...]]


def attention_shapes(reads: int, head_dim: int) -> Shapes:
    """Return the shapes of four queries and two keys of a width, which read so many numbers."""
    return {
        "self_attn.q_proj.weight": (4 * head_dim, reads),
        "self_attn.k_proj.weight": (2 * head_dim, reads),
        "self_attn.v_proj.weight": (2 * head_dim, reads),
        "self_attn.o_proj.weight": (H, 4 * head_dim),
    }


MLP: Shapes = {
    "mlp.gate_proj.weight": (48, H),
    "mlp.up_proj.weight": (48, H),
    "mlp.down_proj.weight": (H, 48),
    "post_attention_layernorm.weight": (H,),
}
NORMS: Shapes = {f"fc_norm.{tap}.weight": (H,) for tap in range(3)}
OFFSETS: Shapes = {"d2t": (V,), "t2d": (V,)}
EMBEDDING: Shapes = {"embed_tokens.weight": (V, H)}


def eagle1_shapes(head_dim: int = 16) -> Shapes:
    """Return EAGLE-1's tensors: a Llama's first layer without its first norm, and `fc`."""
    block = attention_shapes(H, head_dim) | MLP
    fc: Shapes = {"fc.weight": (H, 2 * H), "fc.bias": (H,)}
    return fc | {f"layers.0.{name}": shape for name, shape in block.items()}


def eagle3_shapes(
    layer: str = "midlayer",
    drafted: int = D,
    head_dim: int = 16,
    offsets: bool = True,
) -> Shapes:
    """Return EAGLE-3's tensors, whose attention reads the token's embedding and the state."""
    norms: Shapes = {"input_layernorm.weight": (H,), "hidden_norm.weight": (H,)}
    block = attention_shapes(2 * H, head_dim) | MLP | norms
    shapes = {f"{layer}.{name}": shape for name, shape in block.items()}
    shapes |= {
        "fc.weight": (H, 3 * H),
        "norm.weight": (H,),
        "lm_head.weight": (drafted, H),
    }
    if offsets:
        shapes |= {"d2t": (drafted,), "t2d": (V,)}
    return shapes


EAGLE1 = {"kind": "eagle1"}
NO_BIAS = {"kind": "eagle1", "fc_bias": False}
PLAIN = {"kind": "eagle3", "draft_vocab": D}
FULL = {"kind": "eagle3"}
NEWER = {**PLAIN, "fc_norm": True, "norm_output": True}
JOINT = {
    **PLAIN,
    "norm_before_fc": True,
    "norm_before_residual": True,
    "norm_output": True,
}
NORMED = {**PLAIN, "norm_before_residual": True}
SPECULATORS = eagle3_shapes("layers.0") | EMBEDDING
# engines, settings of a head, and the tensors that the engines get
LAYOUTS: list[tuple[str, dict[str, Any], Shapes]] = [
    ("vllm sglang portable", NO_BIAS, eagle1_shapes()),
    ("vllm", {**NO_BIAS, "kind": "hass"}, eagle1_shapes()),
    ("sglang", EAGLE1, eagle1_shapes()),
    # SafeAILab's code takes heads that together are as wide as the state
    ("eagle", EAGLE1, eagle1_shapes(head_dim=8) | EMBEDDING),
    ("eagle", PLAIN, eagle3_shapes(head_dim=8) | EMBEDDING),
    ("eagle", FULL, eagle3_shapes(drafted=V, head_dim=8, offsets=False) | EMBEDDING),
    ("vllm sglang trtllm openvino llamacpp portable", PLAIN, eagle3_shapes()),
    ("vllm sglang trtllm llamacpp", FULL, eagle3_shapes(drafted=V, offsets=False)),
    ("openvino", FULL, eagle3_shapes(drafted=V)),
    ("speculators", PLAIN, SPECULATORS),
    ("vllm sglang trtllm", NEWER, eagle3_shapes() | NORMS),
    ("speculators", NEWER, SPECULATORS | NORMS),
    ("vllm", JOINT, eagle3_shapes() | {"input_norm.weight": (3 * H,)}),
    ("speculators", JOINT, SPECULATORS | {"input_norm.weight": (3 * H,)}),
    ("vllm llamacpp", NORMED, eagle3_shapes()),
    ("speculators", NORMED, SPECULATORS),
]
ALL = "vllm sglang trtllm openvino llamacpp speculators eagle portable"
# engines, settings of a head, and a word of their refusals
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("trtllm openvino llamacpp speculators", NO_BIAS, "no layout for 'eagle1'"),
    ("vllm portable", EAGLE1, "drafter.fc_bias=false"),
    ("sglang trtllm openvino eagle portable", NORMED, "drafter.norm_before_residual"),
    ("openvino llamacpp eagle portable", NEWER, "drafter.fc_norm"),
    ("sglang trtllm", {**PLAIN, "norm_before_fc": True}, "drafter.norm_before_fc"),
    ("openvino llamacpp eagle", {**PLAIN, "norm_output": True}, "drafter.norm_output"),
    ("portable", FULL, "drafter.draft_vocab"),
    ("eagle", {**PLAIN, "taps": (1, 6, 9)}, "drafter.taps"),
    (ALL, {**PLAIN, "taps": (2, 6, -1)}, "drafter.taps"),
    (ALL, {**PLAIN, "taps": (2, 9)}, "drafter.taps"),
]


def target_for(engine: str) -> Target:
    """Return a random target whose attention heads are as wide as an engine takes them."""
    head_dim = 8 if engine == "eagle" else 16
    return make_target(**{**SIZES, "head_dim": head_dim}, rope_theta=5e5)


@pytest.fixture(scope="module")
def target() -> Target:
    """A random target of twelve layers."""
    return target_for("any")


def head_for(settings: dict[str, Any], target: Target) -> Any:
    """Return a random head for a target."""
    return random_head(settings, target, DRAFTED)


@pytest.mark.parametrize(("engines", "settings", "expected"), LAYOUTS)
def test_every_layout_has_the_names_and_shapes_of_its_engine(
    engines: str,
    settings: dict[str, Any],
    expected: Shapes,
) -> None:
    """No tensor more, none less; offsets are whole numbers, the rest as the head is."""
    for engine in engines.split():
        target = target_for(engine)
        tensors = EXPORTERS[engine](head_for(settings, target), target.config).tensors
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
        # offsets are whole numbers, masks yes or no
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        assert dtypes.pop("d2t", torch.int64) == torch.int64
        assert dtypes.pop("t2d", torch.bool) == torch.bool
        assert set(dtypes.values()) == {torch.float32}


@pytest.mark.parametrize(("engines", "settings", "words"), REFUSED)
def test_what_an_engine_cannot_serve_is_refused(
    engines: str,
    settings: dict[str, Any],
    words: str,
    target: Target,
) -> None:
    """The message names engine and setting."""
    head = head_for(settings, target)
    for engine in engines.split():
        with pytest.raises(ValueError, match=f"^{engine}: .*{words}"):
            EXPORTERS[engine](head, target.config)


@pytest.mark.parametrize(
    ("engine", "architectures"),
    [
        ("vllm", ["LlamaForCausalLMEagle", "LlamaForCausalLM"]),
        ("sglang", ["LlamaForCausalLMEagle"]),
        ("eagle", ["LlamaForCausalLM"]),
        ("portable", ["LlamaForCausalLMEagle", "LlamaForCausalLM"]),
    ],
)
def test_eagle1_configs(engine: str, architectures: list[str]) -> None:
    """Architectures and keys that the engines look for."""
    target = target_for(engine)
    config = EXPORTERS[engine](head_for(NO_BIAS, target), target.config).config
    expected = {
        **SIZES,
        "num_hidden_layers": 1,
        "head_dim": 8 if engine == "eagle" else 16,
        "architectures": architectures,
        "rope_theta": 5e5,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if engine == "eagle":
        expected["bias"] = False
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "openvino", "llamacpp", "portable"])
def test_layer_ids_stand_in_both_conventions(engine: str, target: Target) -> None:
    """Inputs of layers at the top, outputs in the section; the offsets lead from draft ids to the target's."""
    layout = EXPORTERS[engine](head_for(PLAIN, target), target.config)
    config = layout.config
    section = config["eagle_config"]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]
    assert section["eagle_aux_hidden_state_layer_ids"] == [1, 5, 8]
    assert section["use_aux_hidden_state"] is True
    assert config["draft_vocab_size"] == D
    assert config["norm_before_residual"] is False

    if engine == "portable":
        titles = "vLLM, SGLang, TensorRT-LLM, OpenVINO, llama.cpp"
        assert layout.serve.startswith(f"One folder for {titles}. ")

    # engines add the offset to a draft id
    drafted = torch.arange(D) + layout.tensors["d2t"]
    assert drafted.tolist() == list(DRAFTED)
    assert layout.tensors["t2d"].nonzero()[:, 0].tolist() == list(DRAFTED)


def test_openvino_has_offsets_of_zero_for_a_full_vocabulary(target: Target) -> None:
    """Its converter reads uninitialised memory where none are given."""
    tensors = EXPORTERS["openvino"](head_for(FULL, target), target.config).tensors
    assert not tensors["d2t"].any()
    assert tensors["t2d"].all()


def test_trtllm_finds_the_switches_where_it_looks(target: Target) -> None:
    """In the section alone, and the layers in its own settings."""
    layout = EXPORTERS["trtllm"](head_for(NEWER, target), target.config)
    assert layout.config["eagle_config"]["fc_norm"] is True
    assert layout.config["eagle_config"]["norm_output"] is True
    assert "eagle3_layers_to_capture: [1, 5, 8]" in layout.serve


def test_speculators_config_has_sections(target: Target) -> None:
    """Every switch is written, because readers assume different things where one is missing."""
    config = EXPORTERS["speculators"](head_for(NORMED, target), target.config).config
    expected = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
    }
    assert {key: config[key] for key in expected} == expected

    block = config["transformer_layer_config"]
    assert block["model_type"] == "llama"
    assert block["vocab_size"] == V
    assert block["rope_parameters"]["rope_theta"] == 5e5
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]


@pytest.fixture(scope="module")
def gemma() -> Target:
    """A target that scales its embedding, which no engine does for a head."""
    torch.manual_seed(0)
    return Target(GemmaForCausalLM(GemmaConfig(**SIZES)))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "portable"])
def test_the_scale_of_an_embedding_goes_into_fc(engine: str, gemma: Target) -> None:
    """Bare rows times the exported `fc` are scaled rows times the head's."""
    head = head_for(NO_BIAS, gemma)
    tensors = EXPORTERS[engine](head, gemma.config).tensors
    # rows as engines look them up, not scaled
    rows = gemma.model.get_input_embeddings().weight
    assert gemma.head.scale == pytest.approx(H**0.5, rel=1e-3)

    exported = rows @ tensors["fc.weight"][:, :H].T
    expected = gemma.head.embed(torch.arange(V)) @ head.fc.weight[:, :H].T
    assert torch.allclose(exported, expected, rtol=1e-4, atol=1e-5)


def test_a_scaled_embedding_travels_with_eagle3_where_engines_read_it(gemma: Target) -> None:
    """Elsewhere the norm after it would see other numbers."""
    head = head_for(PLAIN, gemma)
    expected = gemma.head.embed(torch.arange(V))
    for engine in ("vllm", "llamacpp", "speculators"):
        tensors = EXPORTERS[engine](head, gemma.config).tensors
        assert torch.equal(tensors["embed_tokens.weight"], expected)
    for engine in ("sglang", "eagle"):
        with pytest.raises(ValueError, match=r"multiplies its embedding|is a gemma"):
            EXPORTERS[engine](head, gemma.config)


def test_what_stands_beside_an_export(target: Target, tmp_path: Path) -> None:
    """The serve command with its numbers, the template's arguments, and the acceptance that is known."""
    folder = tmp_path / "run/head"
    out = tmp_path / "out"
    folder.mkdir(parents=True)
    recipe = "target: {path: some/target}\ndata: {train: some/chats.jsonl, template_kwargs: {enable_thinking: false}}\n"
    (folder / "recipe.yaml").write_text(recipe)
    # each level's rate counts what the level before accepted: 0.8, 0.4, 0.2, 0.1
    rates = {
        "chain/1": 0.8,
        "chain/2": 0.5,
        "chain/3": 0.5,
        "chain/4": 0.5,
        "chain/tau": 2.5,
    }
    record = {"validation": rates, "target": {"weights": "abc"}}
    # as validation counted them
    (folder / "provenance.json").write_text(json.dumps(record))
    export(head_for(PLAIN, target), target.config, "vllm", out=out, head=folder)
    readme = (out / "README.md").read_text()

    for words in (
        f'"method": "eagle3", "model": "{out}", "num_speculative_tokens": 3',
        "vllm serve some/target",
        '{"enable_thinking": false}',
        "0.80, 0.40, 0.20, 0.10",
        "τ = 2.50",
    ):
        assert words in readme

    written = json.loads((out / "provenance.json").read_text())
    assert written["engine"] == "vllm"
    assert written["target"]["weights"] == "abc"
    assert written["num_speculative_tokens"] == 3
    predicted = written["acceptance"]
    assert predicted["tau"] == pytest.approx(2.5)
    assert predicted["per_position"] == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert predicted["prompts"] == "some/chats.jsonl"


def draft_cycle(depth: int, accepted: int) -> dict[str, int]:
    """Return a cycle as `eagle measure` writes it."""
    return {"depth": depth, "accepted": accepted, "committed": accepted + 1}


def test_an_export_tells_programs_what_was_measured(target: Target, tmp_path: Path) -> None:
    """The acceptance per position and in all, counted by hand, and the prompts."""
    folder = tmp_path / "run/head"
    folder.mkdir(parents=True)
    # of four drafts three keep a token, and one keeps two; a cycle without a draft is none
    answers = [
        {"run": 1, "set": "mt_bench", "temperature": 0, "drafter": "head", "cycles": cycles}
        for cycles in (
            [draft_cycle(2, 1), draft_cycle(2, 2), draft_cycle(0, 0)],
            [draft_cycle(2, 0), draft_cycle(1, 1)],
        )
    ]
    lines = [{"run": {"id": 1, "prompts": 2}}, *answers]
    (tmp_path / "run/results.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out"
    export(head_for(PLAIN, target), target.config, "vllm", out=out, head=folder)
    (measured,) = json.loads((out / "provenance.json").read_text())["measured"]
    assert measured["per_position"] == [0.75, 0.25]
    assert measured["tau"] == pytest.approx(9 / 5)
    assert (measured["prompts"], measured["sets"], measured["temperature"]) == (2, ["mt_bench"], 0)


def test_a_head_is_not_overwritten_by_its_export(target: Target, tmp_path: Path) -> None:
    """Its own folder is refused."""
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(ValueError, match="name another folder"):
        export(
            head_for(PLAIN, target),
            target.config,
            "vllm",
            out=tmp_path,
            head=tmp_path,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_only_an_earlier_export_is_replaced(target: Target, tmp_path: Path) -> None:
    """What else a folder holds stays as it is, and the message says what to do."""
    head = head_for(PLAIN, target)
    out = tmp_path / "out"
    assert not export(head, target.config, "vllm", out)
    # another engine's files may take its place
    assert export(head, target.config, "sglang", out)
    assert json.loads((out / "provenance.json").read_text())["engine"] == "sglang"
    for name, text in (("notes.txt", "mine"), ("provenance.json", "{}")):
        other = tmp_path / name / "folder"
        other.mkdir(parents=True)
        (other / name).write_text(text)
        with pytest.raises(ValueError, match="no export of this project: name a new folder"):
            export(head, target.config, "vllm", other)
        assert {path.name: path.read_text() for path in other.iterdir()} == {name: text}


def test_an_unknown_engine_is_named(target: Target, tmp_path: Path) -> None:
    """With those that are known."""
    with pytest.raises(ValueError, match="no exporter for 'vlm': expected one of portable, vllm"):
        export(head_for(PLAIN, target), target.config, "vlm", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_fault_of_an_engine_stands_in_its_table_once() -> None:
    """And every engine reads some network under a name of its own."""
    assert len({engine.name for engine in ENGINES}) == len(ENGINES)
    for engine in SERVERS:
        assert len(set(engine.faults)) == len(engine.faults)
        assert FUSED in engine.networks
