"""A target's own MTP layer drafts here what it drafts in transformers; other layers are refused by name."""

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
IGNORED = MellumForCausalLM._keys_to_ignore_on_load_unexpected or ()
drafts_there = pytest.mark.skipif(
    not any("mtp" in name for name in IGNORED),
    reason="this transformers drafts by no MTP layer of Mellum",
)
PROMPT = [5, 9, 33, 2, 17, 40, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random target of dense blocks, with an MTP layer beside its own."""
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
    for tensor in model.parameters():
        torch.nn.init.normal_(
            tensor,
            mean=float(tensor.ndim == 1),
            std=0.2,
        )
    path = tmp_path_factory.mktemp("mtp")
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")

    # the layer is near the target's first, so that its drafts are sometimes right
    layer = {"fc.weight": torch.zeros(32, 64)}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        layer[f"{name}.weight"] = torch.ones(32)
    for name, tensor in tensors.items():
        if name.startswith("model.layers.0."):
            layer[name.removeprefix("model.")] = tensor
    for name, tensor in layer.items():
        tensors[f"mtp.{name}"] = tensor + 0.2 * torch.randn(tensor.shape)
    save_file(
        tensors,
        path / "model.safetensors",
        {"format": "pt"},
    )
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    """Return the target as it is loaded."""
    return Target.load(folder, dtype=torch.float32)


def own_head(target: Target) -> Any:
    """Return the target's own MTP layer as a drafter."""
    # tensors that transformers leaves out come from the files
    head = Mtp.for_target(
        MtpSettings(),
        target.config,
        target.head,
        weights=target.tensor,
    )
    return head.bind(target.head)


def draft(
    head: Any,
    target: Target,
    text: list[int],
    levels: int,
) -> list[int]:
    """Return the chain that a head drafts after a text, whose last token the target has not read."""
    tokens = torch.tensor(text)
    features = target.features(tokens[None, :-1], head.taps)[0]
    update = Committed(tokens[:-1], features, text[-1])
    tree = head.begin().propose(update, Budget(levels, levels, 1))
    return list(tree.tokens.tolist()[1:])


@torch.no_grad()
def draft_in_transformers(
    target: Target,
    text: list[int],
    levels: int,
) -> list[int]:
    """Return the chain of transformers' layer, of which each level reads the token and the state of the last."""
    # the first level reads the whole text, later ones a token each
    layer = MtpModel.from_pretrained(target.model)
    cache = MtpCache()
    tokens = torch.tensor([text])
    states = target.features(tokens[:, :-1], (-1,))[:, :, 0]
    positions = torch.arange(1, len(text))[None]
    read = tokens[:, 1:]
    chain = []
    for _ in range(levels):
        states = layer.forward_layer(
            0,
            states,
            positions,
            cache,
            input_ids=read,
        )[:, -1:]
        read = layer.shared_head(states).argmax(-1)
        positions = positions[:, -1:] + 1
        chain.append(int(read))
    return chain


@drafts_there
def test_it_drafts_as_generate_with_use_mtp_does(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every token that transformers drafts while it generates is ours, and so is the answer."""
    # transformers returns no drafts, only what was accepted
    recorded: list[Tensor] = []
    get_candidates = MTPCandidateGenerator.get_candidates

    def record(*args: Any, **options: Any) -> Any:
        candidates, logits = get_candidates(*args, **options)
        if logits is not None:
            recorded.append(candidates[0])
        return candidates, logits

    monkeypatch.setattr(
        MTPCandidateGenerator,
        "get_candidates",
        record,
    )
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
    }
    answer = target.model.generate(
        torch.tensor([PROMPT]),
        use_mtp=True,
        **options,
    )[0].tolist()
    head = own_head(target)
    assert len(recorded) > 4
    for candidates in recorded:
        # the last token is the layer's draft
        *text, drafted = candidates.tolist()
        assert draft(head, target, text, 1) == [drafted]
    ours = generate(target, head, PROMPT, max_new_tokens=12, stop=[])
    assert ours.tokens == answer[len(PROMPT) :]


@drafts_there
def test_further_levels_are_the_layers_own(target: Target) -> None:
    """A level reads the normed state of the last; with the halves exchanged the drafts are others."""
    head = own_head(target)
    texts = [PROMPT[:length] for length in range(2, len(PROMPT) + 1)]
    expected = [draft_in_transformers(target, text, 4) for text in texts]
    assert [draft(head, target, text, 4) for text in texts] == expected
    head.settings = head.settings.model_copy(update={"hidden_first": True})
    assert [draft(head, target, text, 4) for text in texts] != expected


# -- where a head starts ----------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}
TARGETS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=2)),
}
# our names; in each layout the layer's prefix, its names for these, and the prefix of its block
OURS = ("enorm", "hnorm", "eh_proj", "norm")
LAYOUTS = {
    "deepseek": (
        "model.layers.3.",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        "",
    ),
    "mimo": (
        "model.mtp_layers.0.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        "",
    ),
    "qwen": (
        "mtp.",
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        "layers.0.",
    ),
}


def random_weights(family: str) -> Weights:
    """Return the tensors of a random target."""
    torch.manual_seed(1)
    make, config = TARGETS[family]
    return {name: torch.randn_like(tensor) for name, tensor in make(config).state_dict().items()}


def add_layer(weights: Weights, layout: str) -> Weights:
    """Return a target's tensors and those of an MTP layer, whose block is like the target's last."""
    prefix, (enorm, hnorm, projection, norm), block = LAYOUTS[layout]
    # blocks of a layer have the names of the target's own
    whole = dict(weights)
    for name, tensor in weights.items():
        if name.startswith("model.layers.2."):
            renamed = name.replace("model.layers.2.", prefix + block)
            whole[renamed] = torch.randn_like(tensor)
    for name in (enorm, hnorm, norm):
        whole[f"{prefix}{name}.weight"] = torch.randn(32)
    whole[f"{prefix}{projection}.weight"] = torch.randn(32, 64)
    return whole


def start_head(
    family: str,
    weights: Weights,
    **settings: Any,
) -> Any:
    """Return a head for a target with these tensors."""
    config = TARGETS[family][1]
    return Mtp.for_target(
        MtpSettings(**settings),
        config,
        weights=weights.__getitem__,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
def test_every_tensor_of_an_own_layer_is_read(family: str, layout: str) -> None:
    """Its name depends on the layout; MiMo puts the state before the token."""
    weights = add_layer(random_weights(family), layout)
    head = start_head(family, weights)
    prefix, theirs, block = LAYOUTS[layout]
    renamed = dict(zip(OURS, theirs, strict=True))
    tensors = head.state_dict()
    assert len(tensors) == sum(name.startswith(prefix) for name in weights)
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        their_name = name.replace(stem, renamed.get(stem, stem)).replace("layers.0.", block)
        assert tensor.equal(weights[prefix + their_name]), name
    assert head.settings.hidden_first == head.network["hidden_first"] == (layout == "mimo")


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
def test_a_head_starts_as_the_last_block(family: str) -> None:
    """Norms of queries and keys, and biases, are copied too; the projection starts as a mean."""
    weights = random_weights(family)
    head = start_head(family, weights)
    tensors = head.state_dict()
    assert head.settings.start == "last_block"
    assert tensors["norm.weight"].equal(weights["model.norm.weight"])
    assert tensors["eh_proj.weight"].equal(torch.cat([torch.eye(32) / 2] * 2, dim=1))
    copied = 0
    for name, tensor in tensors.items():
        if name.startswith("layers.0."):
            assert tensor.equal(weights[name.replace("layers.0.", "model.layers.2.")])
            copied += 1
    assert copied == sum(name.startswith("model.layers.2.") for name in weights)


def test_a_head_can_leave_an_own_layer_out() -> None:
    """It can start from the last block all the same, or from random weights."""
    weights = add_layer(random_weights("llama"), "mimo")
    key = "layers.0.self_attn.k_proj.weight"
    last = start_head("llama", weights, start="last_block").state_dict()[key]
    assert last.equal(weights["model.layers.2.self_attn.k_proj.weight"])
    random = start_head("llama", weights, start="random").state_dict()[key]
    assert not any(random.equal(tensor) for tensor in weights.values())


EIGHT_BITS = torch.ones(32, 64).to(torch.float8_e4m3fn)
# family, tensors beside those of a good layer, keyword of the message
REFUSED: dict[str, tuple[str, Weights, str]] = {
    "several": ("llama", {"model.layers.4.input_layernorm.weight": torch.ones(32)}, "several"),
    "experts": ("mixtral", {}, "no Llama block"),
    "latent attention": (
        "llama",
        {"model.layers.3.self_attn.q_proj.weight": torch.ones(8, 32)},
        "q_proj",
    ),
    "eight bits": ("llama", {"model.layers.3.eh_proj.weight": EIGHT_BITS}, "float8_e4m3fn"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_layers_are_refused_by_name(case: str) -> None:
    """The message names what stands in the way."""
    family, more, keyword = REFUSED[case]
    weights = {
        **add_layer(random_weights(family), "deepseek"),
        **more,
    }
    with pytest.raises(ValueError, match=keyword):
        start_head(family, weights)


def test_a_layer_is_found_in_a_sharded_checkpoint(
    folder: Path,
    target: Target,
    tmp_path: Path,
) -> None:
    """The index names the shard of each tensor."""
    # the same target, its tensors in two files
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    shards: dict[str, Weights] = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    index = {}
    for name, tensor in tensors.items():
        index[name] = f"model-{1 + name.startswith('mtp.fc')}.safetensors"
        shards[index[name]][name] = tensor
    for file, shard in shards.items():
        save_file(shard, tmp_path / file, {"format": "pt"})
    text = json.dumps({"metadata": {}, "weight_map": index})
    (tmp_path / "model.safetensors.index.json").write_text(text)

    head = own_head(target)
    sharded = own_head(Target.load(tmp_path, dtype=torch.float32)).state_dict()
    for name, tensor in head.state_dict().items():
        assert tensor.equal(sharded[name])
    assert head.eh_proj.weight.equal(tensors["mtp.fc.weight"])
    with pytest.raises(ValueError, match="mellum has no tensor mtp"):
        target.tensor("mtp.nothing")
