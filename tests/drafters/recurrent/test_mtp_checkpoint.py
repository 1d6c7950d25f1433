"""A target's own MTP layer drafts here what it drafts in transformers; other layers are refused in words."""

# T tokens of a text, H width

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from eagle import Budget, Target, generate
from eagle.core.drafter import Committed
from eagle.drafters.recurrent.mtp import Mtp, MtpSettings
from tests.unrolled_heads import Weights

# the names of layers that transformers leaves to `MtpModel`; an older one knows none of this type
KNOWN = any("mtp" in name for name in MellumForCausalLM._keys_to_ignore_on_load_unexpected or ())
drafts_there = pytest.mark.skipif(
    not KNOWN, reason="this transformers drafts by no MTP layer of Mellum"
)
OURS = "enorm", "hnorm", "eh_proj", "norm"
PROMPT = [5, 9, 33, 2, 17, 40, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of dense blocks with norms by head, and an MTP layer beside its own."""
    torch.manual_seed(0)
    config = MellumConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        mlp_layer_types=["dense"] * 2,
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        num_mtp_layers=1,
        mtp_layer_types=["full_attention"],
        mtp_mlp_layer_types=["dense"],
    )
    model = MellumForCausalLM(config)
    for part in model.parameters():
        torch.nn.init.normal_(part, mean=float(part.ndim == 1), std=0.2)
    path = tmp_path_factory.mktemp("mtp")
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    block = {
        name.removeprefix("model."): part
        for name, part in tensors.items()
        if name.startswith("model.layers.0.")
    }
    norms = {
        f"{name}.weight": torch.ones(32)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    layer = {**block, **norms, "fc.weight": torch.zeros(32, 64)}
    own = {f"mtp.{name}": part + 0.2 * torch.randn(part.shape) for name, part in layer.items()}
    save_file({**tensors, **own}, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    """The target as it is loaded."""
    return Target.load(folder, dtype=torch.float32)


def own_head(target: Target) -> Any:
    """The target's own MTP layer as a drafter."""
    head = Mtp.for_target(MtpSettings(), target.config, target.head, weights=target.tensor)
    return head.bind(target.head)


def drafted(head: Any, target: Target, text: list[int], levels: int) -> list[int]:
    """The chain that a head drafts behind a text, whose last token the target has not read."""
    tokens = torch.tensor(text)
    features = target.features(tokens[None, :-1], head.taps)[0]
    tree = head.begin().propose(
        Committed(tokens[:-1], features, text[-1]), Budget(levels, levels, 1)
    )
    return list(tree.tokens.tolist()[1:])


def drafted_there(target: Target, text: list[int], levels: int) -> list[int]:
    """The chain that transformers' layer drafts, each level reading the token and the state of the one before."""
    layer, cache, tokens = MtpModel.from_pretrained(target.model), MtpCache(), torch.tensor([text])
    states, positions, chain = (
        target.features(tokens[:, :-1], (-1,))[:, :, 0],
        torch.arange(1, len(text))[None],
        [],
    )
    read = tokens[:, 1:]
    with torch.no_grad():
        for _ in range(levels):
            states = layer.forward_layer(0, states, positions, cache, input_ids=read)[:, -1:]
            read = layer.shared_head(states).argmax(-1)
            positions = positions[:, -1:] + 1
            chain.append(int(read))
    return chain


@drafts_there
def test_it_drafts_as_generate_with_use_mtp_does(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token that transformers drafts while it generates, and the text that comes out."""
    kept: list[Tensor] = []
    honest = MTPCandidateGenerator.get_candidates

    def keep(*given: Any, **options: Any) -> Any:
        candidates, logits = honest(*given, **options)
        if logits is not None:
            kept.append(candidates[0])
        return candidates, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", keep)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    answer = target.model.generate(torch.tensor([PROMPT]), use_mtp=True, **options)[0].tolist()
    head = own_head(target)
    assert len(kept) > 4
    for candidates in kept:
        assert drafted(head, target, candidates[:-1].tolist(), 1) == [int(candidates[-1])]
    assert (
        generate(target, head, PROMPT, max_new_tokens=12, stop=[]).tokens == answer[len(PROMPT) :]
    )


@drafts_there
def test_further_levels_are_the_layers_own(target: Target) -> None:
    """The normed state of a level is what the next one reads; by another order of halves it is another draft."""
    head = own_head(target)
    texts = [PROMPT[:length] for length in range(2, len(PROMPT) + 1)]
    there = [drafted_there(target, text, 4) for text in texts]
    assert [drafted(head, target, text, 4) for text in texts] == there
    head.settings = head.settings.model_copy(update={"hidden_first": True})
    assert [drafted(head, target, text, 4) for text in texts] != there


# -- where a head starts ----------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
}
TARGETS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, num_key_value_heads=2)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, num_key_value_heads=2)),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2),
    ),
}
LAYOUTS = {  # where the layer stands, then its norms of token and state, its projection, its last norm, its block
    "deepseek": ("model.layers.3.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), ""),
    "mimo": (
        "model.mtp_layers.0.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        "",
    ),
    "qwen": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "layers.0."),
}


def weights_of(name: str) -> Weights:
    """The tensors of a random target."""
    torch.manual_seed(1)
    make, config = TARGETS[name]
    return {name: torch.randn_like(part) for name, part in make(config).state_dict().items()}


def with_layer(weights: Weights, layout: str) -> Weights:
    """A target's tensors and those of an MTP layer like its blocks."""
    prefix, (enorm, hnorm, projection, norm), block = LAYOUTS[layout]
    last = {
        name.split(".", 3)[3]: part
        for name, part in weights.items()
        if name.startswith("model.layers.2.")
    }
    layer = {block + name: torch.randn_like(part) for name, part in last.items()}
    layer |= {f"{name}.weight": torch.randn(32) for name in (enorm, hnorm, norm)}
    layer[f"{projection}.weight"] = torch.randn(32, 64)
    return {**weights, **{prefix + name: part for name, part in layer.items()}}


def started(name: str, weights: Weights, **settings: Any) -> Any:
    """A head for a target with these tensors."""
    return Mtp.for_target(MtpSettings(**settings), TARGETS[name][1], weights=weights.__getitem__)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2"])
def test_every_tensor_of_an_own_layer_is_read(name: str, layout: str) -> None:
    """By its name in each layout; MiMo's state stands before the token."""
    weights = with_layer(weights_of(name), layout)
    head = started(name, weights)
    prefix, names, block = LAYOUTS[layout]
    read = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in zip(OURS, names, strict=True)}
    tensors = head.state_dict()
    assert len(tensors) == len(weights) - len(weights_of(name))
    for ours, part in tensors.items():
        theirs = read.get(ours, ours.replace("layers.0.", block))
        assert part.equal(weights[prefix + theirs]), ours
    assert head.settings.hidden_first == head.network["hidden_first"] == (layout == "mimo")


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2"])
def test_a_head_starts_as_the_last_block(name: str) -> None:
    """Its norms by head and its biases too."""
    weights = weights_of(name)
    head = started(name, weights)
    tensors = head.state_dict()
    assert head.settings.start == "last_block"
    assert tensors["norm.weight"].equal(weights["model.norm.weight"])
    assert tensors["eh_proj.weight"].equal(torch.cat([torch.eye(32) / 2] * 2, dim=1))
    block = {ours: part for ours, part in tensors.items() if ours.startswith("layers.")}
    assert len(block) == sum(theirs.startswith("model.layers.2.") for theirs in weights)
    assert all(
        part.equal(weights[f"model.{ours.replace('.0.', '.2.', 1)}"])
        for ours, part in block.items()
    )


def test_a_head_can_leave_an_own_layer_out() -> None:
    """And the target's weights altogether."""
    weights = with_layer(weights_of("llama"), "mimo")
    key = "layers.0.self_attn.k_proj.weight"
    last, drawn = (
        started("llama", weights, start=start).state_dict() for start in ("last_block", "random")
    )
    assert last[key].equal(weights["model.layers.2.self_attn.k_proj.weight"])
    assert not any(drawn[key].equal(part) for part in weights.values())


REFUSED: dict[str, tuple[str, Weights, str]] = {
    "several": (
        "llama",
        {"model.layers.4.input_layernorm.weight": torch.ones(32)},
        "several MTP layers",
    ),
    "experts": ("mixtral", {}, "mixtral has no Llama blocks|which no Llama block has"),
    "latent attention": (
        "llama",
        {"model.layers.3.self_attn.q_proj.weight": torch.ones(8, 32)},
        "q_proj",
    ),
    "eight bits": (
        "llama",
        {"model.layers.3.eh_proj.weight": torch.ones(32, 64).to(torch.float8_e4m3fn)},
        r"eh_proj.weight is .* in torch.float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_layers_are_refused_in_words(case: str) -> None:
    """What stands in the way, by its name."""
    name, further, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        started(name, {**with_layer(weights_of(name), "deepseek"), **further})


def test_a_layer_is_found_in_files_of_several_parts(
    folder: Path, target: Target, tmp_path: Path
) -> None:
    """By the index; what a model has no layer for is in no file of its own."""
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    parts = {name: f"model-{1 + name.startswith('mtp.fc')}.safetensors" for name in tensors}
    for part in set(parts.values()):
        save_file(
            {name: tensors[name] for name in tensors if parts[name] == part},
            tmp_path / part,
            {"format": "pt"},
        )
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": parts})
    )
    head, other = own_head(target), own_head(Target.load(tmp_path, dtype=torch.float32))
    assert all(part.equal(other.state_dict()[name]) for name, part in head.state_dict().items())
    assert head.eh_proj.weight.equal(tensors["mtp.fc.weight"])
    with pytest.raises(ValueError, match="mellum has no tensor mtp"):
        target.tensor("mtp.nothing")
