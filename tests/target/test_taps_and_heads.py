"""Taps and LM heads of every causal type, beside what the untouched model itself gives out."""

# B sequences, T tokens, S streams, D width, V vocabulary

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle import DraftTree, Sampling, Target, load_drafter
from eagle.core.examples import Example
from eagle.core.verify import Choose
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.parts.objectives import BiasedHead, distillation_loss
from eagle.formats.checkpoint import save_head
from eagle.recipe import Recipe
from eagle.target.borrowed import save_borrowed
from eagle.target.stock_head import StockHead
from eagle.target.structure import base_of, count_cache_layers, decoder_layers
from eagle.target.taps import Layout
from eagle.training.start import open_features
from tests.every_type import TYPES, build
from tests.target.decoded import is_close

# streams, wrong names of the base, two caches a layer, transforms and projections before the LM head
FEW = ["bert", "blenderbot", "deepseek_v4", "gemma3n_text", "opt", "qwen4_exp_text", "xlnet"]
SHAPES = [(2, 9), (4, 4)]  # of sequences and tokens; four is also the number of streams
SKIPPED = {"mllama": {3}}  # layers that only images run
REFUSED = {"cpmant": "no states", "prophetnet": "no function of its base's output alone"}


@cache
def target_of(model_type: str) -> Target:
    """Return a small model of this type as a target."""
    return Target(build(model_type))


def draw_tokens(sequences: int, count: int) -> Tensor:
    """Return [B, T], random tokens."""
    generator = torch.Generator().manual_seed(sequences)
    return torch.randint(4, 90, (sequences, count), generator=generator)


def find_stack(model: nn.Module) -> nn.ModuleList:
    """Return the model's list of layers as a reader of its print-out would find it: the outermost, or the last."""
    lists = []

    for name, module in model.named_modules():
        is_language = "vision" not in name and "audio" not in name
        if isinstance(module, nn.ModuleList) and len(module) > 1 and is_language:
            lists.append((name.count("."), module))

    outermost = min(depth for depth, _ in lists)
    stacks = [module for depth, module in lists if depth == outermost]
    # an encoder comes before its decoder; other lists, of norms perhaps, come after the layers
    return stacks[-1] if type(stacks[0][0]) is type(stacks[-1][0]) else stacks[0]


@torch.no_grad()
def read_with_hooks(model: Any, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the first tensor that each layer gets, in order, and the logits."""
    inputs: dict[nn.Module, Tensor] = {}

    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        candidates = (*args, kwargs.get("hidden_states"))
        inputs[module] = next(each for each in candidates if isinstance(each, Tensor))

    stack = find_stack(model)
    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in stack]
    logits = model(input_ids=tokens, use_cache=False).logits

    for handle in handles:
        handle.remove()

    return [inputs[layer] for layer in stack if layer in inputs], logits


def mean_of_streams(states: Tensor, tokens: Tensor, width: int) -> list[Tensor]:
    """Return the [B, T, D] that states may stand for, by loops over streams; several where shapes cannot tell."""
    sequences, count = tokens.shape
    # [S, B, T, D] or [B, T, S, D]
    if states.dim() == 4:
        by_axis = [sum(states.unbind(axis)) / states.shape[axis] for axis in (0, 2)]
        if sequences == count:
            return by_axis
        is_first = states.shape[1:3] == (sequences, count) and states.shape[0] == 4
        return by_axis[:1] if is_first else by_axis[1:]
    # [B, T, S * D]
    if states.shape[-1] > width and states.shape[:2] == (sequences, count):
        streams = states.split(width, dim=-1)
        return [sum(streams) / len(streams)]
    # [T, B, D], as XLNet has it
    transposed = states.transpose(0, 1)
    if sequences == count:
        return [states, transposed]
    return [states] if states.shape[:2] == (sequences, count) else [transposed]


def check_type(model_type: str) -> None:
    """Check that features are the inputs that hooks see, and the head's logits the model's."""
    target = target_of(model_type)
    model = copy.deepcopy(target.model)

    for shape in SHAPES:
        tokens = draw_tokens(*shape)
        inputs, logits = read_with_hooks(model, tokens)
        last = target.features(tokens, (-1,))[:, :, 0]
        assert is_close(target.head.logits(last), logits)
        # heads are called with and without an axis for sequences
        assert is_close(target.head.logits(last.flatten(0, 1)), logits.flatten(0, 1))
        taps = tuple(tap for tap in target.reader.layouts if tap != -1)
        if not taps:
            continue
        features = target.features(tokens, taps).unbind(2)
        # every layer that runs has a tap
        assert len(inputs) == len(target.layers) - len(SKIPPED.get(model_type, ()))
        for got, states in zip(features, inputs, strict=True):
            candidates = mean_of_streams(states, tokens, target.config.hidden_size)
            assert any(is_close(got, expected) for expected in candidates)


@pytest.mark.parametrize("model_type", FEW)
def test_taps_and_logits_are_the_models_own(model_type: str) -> None:
    """Types whose structure is unlike a llama's."""
    check_type(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*TYPES} - {*FEW}))
def test_taps_and_logits_of_every_type(model_type: str) -> None:
    """They are equal to the model's own, or the type is refused in words."""
    try:
        model = build(model_type)
        model(input_ids=draw_tokens(1, 5), use_cache=False)
    except Exception as error:  # of transformers alone
        pytest.skip(f"not built: {error}")

    try:
        target_of(model_type)
    except ValueError as error:
        assert re.search(REFUSED[model_type], str(error))
        return

    check_type(model_type)


@pytest.mark.parametrize("model_type", ["deepseek_v4", "gemma3n_text", "xlnet"])
def test_four_sequences_of_four_tokens_keep_their_streams_apart(model_type: str) -> None:
    """Where sequences, tokens and streams are as many, a batch gives what its sequences give one by one."""
    target = target_of(model_type)
    tokens = draw_tokens(4, 4)
    alone = [target.features(sequence[None], (0, 1)) for sequence in tokens]
    assert is_close(target.features(tokens, (0, 1)), torch.cat(alone))


def test_a_wrong_axis_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the mean over another axis than the streams'."""
    reader = target_of("gemma3n_text").reader
    wrong = {tap: Layout("[B, T, S, D]", 32) for tap in reader.layouts}
    monkeypatch.setattr(reader, "layouts", wrong)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check_type("gemma3n_text")


@pytest.mark.parametrize(
    ("model_type", "base", "layers", "caches"),
    [
        ("llama4_text", "model", 4, 4),
        ("mllama", "model", 4, 4),
        ("blenderbot", "model.decoder", 4, 4),
        ("prophetnet", "prophetnet.decoder", 4, 4),
        ("longcat_flash", "model", 4, 8),
        ("hrm_text", "model", 2, 12),
        ("xlm", "transformer", 4, 4),
    ],
)
def test_the_structure_of_models_that_name_it_wrongly(
    model_type: str,
    base: str,
    layers: int,
    caches: int,
) -> None:
    """The base is what runs, the layers are what it runs, and a cache has room for all that they keep."""
    model = build(model_type)
    config = model.config.get_text_config()

    assert base_of(model) is model.get_submodule(base)

    found = decoder_layers(base_of(model), config.num_hidden_layers)

    assert count_cache_layers(config, found) == caches
    assert len(found) == layers
    # XLM has no module for a layer: its attentions get the layers' inputs
    assert model_type != "xlm" or found is model.transformer.attentions


def test_a_model_without_a_base_is_refused() -> None:
    """Nothing then gives the LM head's input."""
    headless = build("llama")
    headless.set_input_embeddings(nn.Embedding(96, 32))
    headless.get_input_embeddings = lambda: nn.Embedding(2, 2)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="keeps no base model apart from its LM head"):
        base_of(headless)


@torch.inference_mode()
def test_taps_at_tree_nodes_are_those_of_plain_sequences() -> None:
    """What a drafter reads while decoding is what extraction gives for the same sequence."""
    target = target_of("gemma3n_text")
    taps = (0, 2, -1)
    prompt = draw_tokens(1, 11)[0].tolist()
    state = target.open(taps)
    update = state.begin(prompt, Choose(Sampling(temperature=0.0)))
    assert is_close(update.features, target.features(torch.tensor([prompt]), taps)[0])

    tree = DraftTree.from_paths(update.root, [[5, 6], [7, 8, 9], [7, 10]])
    output = state.read({0: tree})[0]

    # the oracle reads each node's path as a plain sequence
    for node in range(len(tree)):
        path = tree.path(node)
        tokens = torch.tensor([[*prompt, *tree.tokens[path].tolist()]])
        assert is_close(output.features[path], target.features(tokens, taps)[0, len(prompt) :])


# -- heads that transform states ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model_type", "biased"), [("bert", True), ("xlstm", False)])
def test_gradients_go_through_the_models_forward(model_type: str, biased: bool) -> None:
    """The loss of training and its gradient, beside softmaxes and autograd over the stock forward."""
    target = Target(build(model_type).double())
    stock = target.head
    assert isinstance(stock, StockHead)

    width = target.config.hidden_size
    # in fp64 only what is wrong differs
    torch.set_default_dtype(torch.float64)

    try:
        student = torch.randn(6, width, requires_grad=True)
        code = torch.randn(6, 3, requires_grad=True)
        teacher = torch.randn(6, width)
        weights = torch.rand(1, 6)
        matrix = torch.randn(96, 3)
    finally:
        torch.set_default_dtype(torch.float32)

    head: Any = BiasedHead(stock, matrix) if biased else stock
    states = torch.cat([student, code], -1) if biased else student
    learned = [student, code] if biased else [student]
    total, _ = distillation_loss(states[None], teacher, weights, (head, stock))

    # the oracle: whole softmaxes of the model's own forward
    logits = stock.model(input_ids=student[None]).logits[0]
    if biased:
        logits = logits + code @ matrix.T
    probs = stock.model(input_ids=teacher[None]).logits[0].softmax(-1)
    expected = -(weights[0] * (probs * logits.log_softmax(-1)).sum(-1)).sum()
    got = torch.autograd.grad(total, learned)

    for one, other in zip(got, torch.autograd.grad(expected, learned), strict=True):
        assert is_close(one, other)


def test_a_subset_another_precision_and_a_copy_of_such_a_head() -> None:
    """Logits of some tokens, memory that is given, double precision; a copied head shares the target."""
    head = target_of("bert").head
    hidden = target_of("bert").features(draw_tokens(1, 7), (-1,))[0, :, 0]
    logits = head.logits(hidden)
    narrow = head.narrow(torch.tensor([3, 5, 90]))

    assert is_close(narrow.logits(hidden), logits[:, [3, 5, 90]])
    assert narrow.weight.shape == (3, 32)

    room = torch.empty(7, 96)

    assert head.logits(hidden, out=room) is room
    assert torch.equal(room, logits)
    assert is_close(head.cast(torch.float64).logits(hidden).float(), logits)
    assert head.logits(hidden).dtype == torch.float32  # the cast was of a copy
    assert copy.deepcopy(head) is head


def test_what_no_plain_matrix_says_is_not_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store keeps no copy of such a head, and says what training needs."""
    target = target_of("bert")
    assert save_borrowed(tmp_path, target.head, target.config) == {}
    assert not list(tmp_path.iterdir())
    assert "training on this store loads the whole target" in capsys.readouterr().out


def test_widths_and_layers_that_taps_cannot_have_are_refused() -> None:
    """Widths that no head joins, and layers that the model does not run."""
    opt = target_of("opt")

    assert opt.width_of((0, 2)) == 32
    assert opt.width_of((-1,)) == 16
    with pytest.raises(ValueError, match="states of different widths"):
        opt.features(draw_tokens(1, 5), (2, -1))
    with pytest.raises(ValueError, match="its layers have width 32"):
        opt.head.embed(torch.tensor([5]))
    with pytest.raises(ValueError, match=r"taps \[3\] of mllama_text_model"):
        target_of("mllama").check_taps((3, -1))


def test_default_taps_outside_a_target_are_told_before_it_reads(tmp_path: Path) -> None:
    """`load_drafter` refuses them, and training when it opens its target: this config counts other layers."""
    target = target_of("longcat_flash")
    settings = settings_of({"kind": "eagle3", "draft_vocab": None}, "test")
    head: Any = DRAFTERS["eagle3"].for_target(settings, target.config, target.head)
    save_head(tmp_path / "head", head, "", {})

    with pytest.raises(ValueError, match=r"taps \[.*drafter\.taps"):
        load_drafter(tmp_path / "head", target)

    # training opens its target from disk
    target.model.save_pretrained(tmp_path / "target")
    changes = [f"target.path={tmp_path / 'target'}", "target.dtype=float32", "features.store=null"]
    recipe = Recipe.load(Path(__file__).parents[2] / "recipes/tiny/eagle3.yaml", changes)

    def read_examples() -> list[Example]:
        raise AssertionError("texts are read before the taps are refused")

    with pytest.raises(ValueError, match=r"taps \[.*drafter\.taps"):
        open_features(recipe, settings, read_examples)
