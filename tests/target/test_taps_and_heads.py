"""Taps and LM heads of every causal type, beside what the untouched model itself gives out."""

# B texts, T tokens, L layers, D width, V vocabulary

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle import DraftTree, Sampling, Target, generate, load_drafter
from eagle.core.examples import Example, collate
from eagle.core.verify import Choose
from eagle.data.features import taps_of
from eagle.data.open import open_features
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.parts.objectives import BiasedHead, distillation_loss
from eagle.formats.checkpoint import save_head
from eagle.recipe import Recipe
from eagle.target.borrowed import save_borrowed
from eagle.target.stock_head import StockHead
from eagle.target.structure import base_of, count_cache_layers, decoder_layers
from eagle.target.taps import Layout
from tests.every_type import TYPES, build
from tests.families import own_answer

FEW = [
    "bert",
    "blenderbot",
    "deepseek_v4",
    "gemma3n_text",
    "llama4_text",
    "opt",
    "qwen4_exp_text",
    "xlnet",
]
SHAPES = [(2, 9), (4, 4)]  # of texts and tokens; four is also the number of streams
SKIPPED = {"mllama": {3}}  # layers that only images run
LEFT = {"cpmant": "no states", "prophetnet": "no function of its base's output alone"}


@cache
def target_of(model_type: str) -> Target:
    """A small model of this type as a target."""
    return Target(build(model_type))


def tokens_of(texts: int, count: int) -> Tensor:
    """[B, T], random tokens."""
    return torch.randint(4, 90, (texts, count), generator=torch.Generator().manual_seed(texts))


def hooked(model: Any, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
    """The first tensor that each item of the model's longest list of modules gets, in order, and the logits."""
    inputs: dict[nn.Module, Tensor] = {}

    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs[module] = next(
            part for part in (*args, kwargs.get("hidden_states")) if isinstance(part, Tensor)
        )

    lists = [
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) > 1
    ]
    lists = [(name, part) for name, part in lists if "vision" not in name and "audio" not in name]
    depth = min(name.count(".") for name, _ in lists)
    stacks = [part for name, part in lists if name.count(".") == depth]
    stack = stacks[-1] if type(stacks[0][0]) is type(stacks[-1][0]) else stacks[0]
    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in stack]
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return [inputs[layer] for layer in stack if layer in inputs], logits


def one_state(states: Tensor, tokens: Tensor, width: int) -> Tensor:
    """[B, T, D], the mean of streams, by loops over them."""
    texts, count = tokens.shape
    if states.shape[:-1] == (texts, count) and states.shape[-1] > width:
        return sum(states.split(width, dim=-1)) / (states.shape[-1] // width)  # type: ignore[return-value]
    if (
        states.dim() == 4
    ):  # tokens of one text differ, streams of one token do not if they have just been copied
        streams = (
            states.unbind(0)
            if states.shape[1:3] == (texts, count) and states.shape[0] == 4
            else states.unbind(2)
        )
        return sum(streams) / len(streams)  # type: ignore[return-value]
    return states if states.shape[:2] == (texts, count) else states.transpose(0, 1)


def check_type(model_type: str) -> None:
    """Features are the inputs that hooks see, and the head's logits the model's."""
    target = target_of(model_type)
    model = copy.deepcopy(target.model)
    for shape in SHAPES:
        tokens = tokens_of(*shape)
        inputs, logits = hooked(model, tokens)
        taps = tuple(tap for tap in target.reader.layouts if tap != -1)
        last = target.features(tokens, (-1,))[:, :, 0]
        assert close(target.head.logits(last), logits)
        assert close(target.head.logits(last.flatten(0, 1)), logits.flatten(0, 1))
        if taps:
            features = target.features(tokens, taps).unbind(2)
            assert (
                len(features)
                == len(inputs)
                == len(target.layers) - len(SKIPPED.get(model_type, ()))
            )
            for got, states in zip(features, inputs, strict=True):
                width = target.config.hidden_size
                by_axis = [one_state(states, tokens, width)]
                if (
                    shape[0] == shape[1] and states.dim() == 4
                ):  # here hooks cannot tell the axes: either may be right
                    by_axis = [states.mean(0), states.mean(2)]
                elif shape[0] == shape[1] and model_type == "xlnet":
                    by_axis = [states.transpose(0, 1)]
                assert any(close(got, expected) for expected in by_axis)


def close(got: Tensor, expected: Tensor) -> bool:
    """Equal up to rounding."""
    return got.shape == expected.shape and bool((got - expected).norm() <= 1e-5 * expected.norm())


@pytest.mark.parametrize("model_type", FEW)
def test_taps_and_logits_are_the_models_own(model_type: str) -> None:
    """Streams, wrong names of the base, two caches a layer, transforms and projections before the LM head."""
    check_type(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_taps_and_logits_of_every_type(model_type: str) -> None:
    """Equal to the model's own, or refused in words."""
    try:
        model = build(model_type)
        model(input_ids=tokens_of(1, 5), use_cache=False)
    except Exception as error:  # of transformers alone
        pytest.skip(f"not built: {error}")
    try:
        target_of(model_type)
    except ValueError as error:
        assert model_type in LEFT and re.search(LEFT[model_type], str(error))
        return
    check_type(model_type)


def test_four_texts_of_four_tokens_keep_their_streams_apart() -> None:
    """Where texts, tokens and streams are as many, a batch gives what its texts give one by one."""
    for model_type in ("deepseek_v4", "gemma3n_text", "xlnet"):
        target, tokens = target_of(model_type), tokens_of(4, 4)
        alone = [target.features(text[None], (0, 1)) for text in tokens]
        assert close(target.features(tokens, (0, 1)), torch.cat(alone))


@pytest.mark.parametrize("wrong", ["[S, B, T, D]", "[B, T, S, D]"])
def test_a_wrong_axis_and_a_single_stream_are_seen(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults: the comparison of this file fails on them."""
    target = target_of("gemma3n_text")
    layouts = target.reader.layouts
    if wrong == "[S, B, T, D]":
        monkeypatch.setattr(
            Layout, "read", lambda self, states: states[0] if states.dim() == 4 else states
        )
    else:
        monkeypatch.setattr(target.reader, "layouts", {tap: Layout(wrong, 32) for tap in layouts})
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check_type("gemma3n_text")


def test_the_structure_of_models_that_name_it_wrongly() -> None:
    """The base is what runs, the layers are what it runs, and a cache has room for all that they keep."""
    for model_type, base, caches in (
        ("llama4_text", "model", 4),
        ("mllama", "model", 4),
        ("blenderbot", "model.decoder", 4),
        ("prophetnet", "prophetnet.decoder", 4),
        ("longcat_flash", "model", 8),
        ("hrm_text", "model", 12),
        ("xlm", "transformer", 4),
    ):
        model = build(model_type)
        assert base_of(model) is model.get_submodule(base)
        layers = decoder_layers(base_of(model), model.config.get_text_config().num_hidden_layers)
        assert count_cache_layers(model.config.get_text_config(), layers) == caches
        assert len(layers) == (2 if model_type == "hrm_text" else 4)
    assert layers is model.transformer.attentions  # whose inputs are the layers'
    headless = build("llama")
    headless.set_input_embeddings(nn.Embedding(96, 32))
    headless.get_input_embeddings = lambda: nn.Embedding(2, 2)  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match="LlamaForCausalLM keeps no base model apart from its LM head"
    ):
        base_of(headless)


@pytest.mark.parametrize(
    "model_type", ["gemma3n_text", pytest.param("longcat_flash", marks=pytest.mark.slow)]
)
@torch.inference_mode()
def test_taps_at_tree_nodes_are_those_of_plain_texts(model_type: str) -> None:
    """What a drafter reads while decoding is what extraction gives for the same text."""
    target, taps, prompt = target_of(model_type), (0, 2, -1), tokens_of(1, 11)[0].tolist()
    state = target.open(taps)
    update = state.begin(prompt, Choose(Sampling(temperature=0.0)))
    assert close(update.features, target.features(torch.tensor([prompt]), taps)[0])
    paths = [[5, 6], [7, 8, 9], [7, 10]]
    tree = DraftTree.from_paths(update.root, paths)
    output = state.read({0: tree})[0]
    for path in paths:
        text = torch.tensor([[*prompt, update.root, *path]])
        assert close(
            output.features[find_nodes(tree, path)], target.features(text, taps)[0, len(prompt) :]
        )


def find_nodes(tree: DraftTree, path: list[int]) -> list[int]:
    """The nodes of a path of tokens after the root."""
    nodes, parents, tokens = [0], tree.parents.tolist(), tree.tokens.tolist()
    for token in path:
        nodes.append(
            next(
                i for i, parent in enumerate(parents) if parent == nodes[-1] and tokens[i] == token
            )
        )
    return nodes


# -- heads that transform states ------------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("model_type", ["bert", "xlstm"])
def test_gradients_go_through_the_models_forward(model_type: str, biased: bool) -> None:
    """The loss of training and its gradient, beside softmaxes and autograd over the stock forward."""
    target = Target(build(model_type).double())
    stock, width = target.head, target.config.hidden_size
    assert isinstance(stock, StockHead)
    drawn = torch.Generator().manual_seed(1)
    student, teacher = (
        torch.randn(6, width, generator=drawn, dtype=torch.float64) for _ in range(2)
    )
    weights = torch.rand(1, 6, generator=drawn, dtype=torch.float64)
    code, matrix = (
        torch.randn(6, 3, generator=drawn).double(),
        torch.randn(96, 3, generator=drawn).double(),
    )
    states = [torch.cat([student, code], -1) if biased else student, student, code]
    given = states[0].clone().requires_grad_()
    head: Any = BiasedHead(stock, matrix) if biased else stock
    total, _ = distillation_loss(given[None], teacher, weights, (head, stock))
    total.backward()  # type: ignore[no-untyped-call]
    naive, beside = student.clone().requires_grad_(), code.clone().requires_grad_()
    logits = stock.model(input_ids=naive[None]).logits[0] + (beside @ matrix.T if biased else 0)
    probs = stock.model(input_ids=teacher[None]).logits[0].softmax(-1)
    expected = -(weights[0] * (probs * logits.log_softmax(-1)).sum(-1)).sum()
    expected.backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([naive.grad, beside.grad], -1) if biased else naive.grad  # type: ignore[list-item]
    assert close(given.grad, gradient)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle1", "medusa"])
def test_a_head_learns_and_drafts_where_states_are_transformed(kind: str) -> None:
    """Its loss reaches its weights, and what it drafts changes nothing of the model's answer."""
    target, tokens = target_of("bert"), tokens_of(1, 20)
    settings, method = settings_of({"kind": kind}, "test"), DRAFTERS[kind]
    head: Any = method.for_target(settings, target.config, target.head, [tokens[0]])
    taps = taps_of(settings, target.config)
    example = Example(tokens[0], torch.arange(20) > 5, target.features(tokens, taps)[0])
    head(collate([example], taps), target.head)["total"].backward()
    assert all(
        bool(weight.grad.norm() > 0)
        for weight in head.parameters()
        if weight.requires_grad and weight.ndim > 1
    )
    prompt = tokens[0].tolist()
    expected = own_answer(target.model, prompt, 8)
    options: dict[str, Any] = {
        "sampling": Sampling(temperature=0.0),
        "max_new_tokens": 8,
        "stop": [],
    }
    assert generate(target, head.bind(target.head), prompt, **options).tokens == expected


def test_a_subset_another_precision_and_a_copy_of_such_a_head() -> None:
    """Logits of some tokens, memory that is given, double precision; a copied head shares the target."""
    target = target_of("bert")
    hidden = target.features(tokens_of(1, 7), (-1,))[0, :, 0]
    logits = target.head.logits(hidden)
    some, room = torch.tensor([3, 5, 90]), torch.empty(7, 96)
    assert close(target.head.narrow(some).logits(hidden), logits[:, some])
    assert target.head.narrow(some).weight.shape == (3, 32)
    assert target.head.logits(hidden, out=room) is room and torch.equal(room, logits)
    assert close(target.head.cast(torch.float64).logits(hidden).float(), logits)
    assert (
        target.head.logits(hidden).dtype == torch.float32
        and copy.deepcopy(target.head) is target.head
    )


def test_what_no_plain_matrix_says_is_not_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store keeps no copy of such a head, and says what training needs; widths that no head joins are refused."""
    target = target_of("bert")
    assert save_borrowed(tmp_path, target.head, target.config) == {} and not list(
        tmp_path.iterdir()
    )
    assert (
        "transforms states: training on this store loads the whole target"
        in capsys.readouterr().out
    )
    opt = target_of("opt")
    assert (opt.width_of((0, 2)), opt.width_of((-1,))) == (32, 16)
    with pytest.raises(
        ValueError, match=r"opt hands on states of different widths, \{2: 32, -1: 16\} by tap"
    ):
        opt.features(tokens_of(1, 5), (2, -1))
    with pytest.raises(ValueError, match="embeds tokens in width 16 and its layers have width 32"):
        opt.head.embed(torch.tensor([5]))
    with pytest.raises(
        ValueError, match=r"taps \[3\] of mllama_text_model are inputs of layers that"
    ):
        target_of("mllama").check_taps((3, -1))


@pytest.mark.parametrize("model_type", ["longcat_flash", "hrm_text", "mllama"])
def test_default_taps_outside_a_target_are_told_before_it_reads(
    model_type: str, tmp_path: Path
) -> None:
    """By `load_drafter` and when training opens its target: the configs of these types count other layers."""
    target = target_of(model_type)
    settings = settings_of({"kind": "eagle3", "draft_vocab": None}, "test")
    head: Any = DRAFTERS["eagle3"].for_target(settings, target.config, target.head)
    save_head(tmp_path / "head", head, "", {})
    with pytest.raises(ValueError, match=r"taps \[.*drafter\.taps"):
        load_drafter(tmp_path / "head", target)
    if model_type == "mllama":  # whose text model has no class of its own
        return
    target.model.save_pretrained(tmp_path / "target")
    changes = [f"target.path={tmp_path / 'target'}", "target.dtype=float32", "features.store=null"]
    recipe = Recipe.load(Path(__file__).parents[2] / "recipes/tiny/eagle3.yaml", changes)

    def read_examples() -> list[Example]:
        raise AssertionError("texts are read before the taps are refused")

    with pytest.raises(ValueError, match=r"taps \[.*drafter\.taps"):
        open_features(recipe, settings, read_examples)
