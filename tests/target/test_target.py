"""A target reads what is new, keeps what was accepted, and says plainly what it cannot do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Sampling, Target, Trace
from eagle.core.tree import DraftTree, TargetOutput
from eagle.core.verify import Choose
from eagle.decoding.loop import Decoding
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.none import NoDrafter
from eagle.target.state import TargetState
from eagle.transformers import generate_with
from tests.families import (
    FAMILIES,
    VOCAB_SIZE,
    PlantedTrees,
    build,
    own_answer,
    own_logits,
    random_tokens,
)
from tests.target.decoded import decode, is_close

GREEDY = Choose(Sampling())
PROMPT = random_tokens(20, seed=3)
NONE = NoDrafter()
# 5 -> 6, 7; 7 -> 8, 9
TREE = DraftTree(torch.tensor([5, 6, 7, 8, 9]), torch.tensor([-1, 0, 0, 2, 2]))


def load_counted(name: str) -> Target:
    """Return a new model of a family, whose attribute `counts` lists how many tokens each forward read."""
    model = build(name)
    counts: list[int] = []
    embedding = model.get_input_embeddings()
    # before the target is made: a hook that is added later would make it read its prompt again
    embedding.register_forward_pre_hook(lambda _, args: counts.append(args[0].numel()))
    target: Any = Target(model)
    target.counts = counts
    return target


@pytest.fixture
def target() -> Target:
    """Return a new llama."""
    return load_counted("llama")


@contextmanager
def counting(target: Any) -> Iterator[list[int]]:
    """Yield the list of the tokens that each forward reads while the context is open."""
    target.counts.clear()
    yield target.counts


def begin_again(target: Target, prompt: list[int], taps: tuple[int, ...] = ()) -> Any:
    """Read a prompt in the state that was closed last, or in a new one, and close it."""
    state = target.open(taps)
    update = state.begin(prompt, GREEDY)
    target.close(state)
    return update


def read_tree(state: TargetState, tree: DraftTree) -> TargetOutput:
    """Return what the target says about a tree after the only sequence."""
    return state.read({0: tree})[0]


def list_buffers(state: TargetState) -> list[Tensor]:
    """Return the cache's tensors."""
    return [rows.tensor for rows in state.cache.buffers]


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ([*PROMPT, 1, 2, 3], [3]),
        (PROMPT, [1]),
        (PROMPT[:10], [1]),
        ([*PROMPT[:10], (PROMPT[10] + 1) % VOCAB_SIZE, *PROMPT[11:]], [10]),
        ([(PROMPT[0] + 1) % VOCAB_SIZE], [1]),
    ],
    ids=["extended", "repeated", "cut", "changed in the middle", "another"],
)
def test_a_shared_prefix_is_not_read_again(
    target: Target,
    prompt: list[int],
    read: list[int],
) -> None:
    """Only what follows the common start is read, and the answer and the features are those of the whole prompt."""
    begin_again(target, PROMPT, (0, -1))

    with counting(target) as counts:
        update = begin_again(target, prompt, (0, -1))

    assert counts == read
    # the drafter is told of the whole prompt, whatever was read
    assert update.tokens.tolist() == prompt
    assert [update.root] == own_answer(target.model, prompt, 1)
    assert is_close(update.features, target.features(torch.tensor([prompt]), (0, -1))[0])


@pytest.mark.parametrize("taps", [(0,), (), (-1, 2)])
def test_other_taps_read_the_whole_prompt_again(target: Target, taps: tuple[int, ...]) -> None:
    """States that were not recorded take a forward, whatever number of them was recorded before."""
    begin_again(target, PROMPT, (2, -1))

    with counting(target) as counts:
        update = begin_again(target, PROMPT, taps)

    assert counts == [len(PROMPT)]
    if taps:
        assert is_close(update.features, target.features(torch.tensor([PROMPT]), taps)[0])
    else:
        assert update.features is None


def up_proj(model: Any) -> Any:
    """Return the linear whose weights the tests of this file change."""
    return model.base_model.layers[0].mlp.up_proj


def write_data(model: Any) -> None:
    """Write through `.data`, which counts no version."""
    up_proj(model).weight.data *= -1


def put_data(model: Any) -> None:
    """Put other values in other memory."""
    # new memory: the version of the old tensor does not change
    up_proj(model).weight.data = -up_proj(model).weight.data


@torch.no_grad()
def write_in_place(model: Any) -> None:
    """Write as an optimizer does."""
    up_proj(model).weight.neg_()


@torch.inference_mode()
def write_in_inference(model: Any) -> None:
    """Write without autograd."""
    up_proj(model).weight.neg_()


def replace_parameter(model: Any) -> None:
    """Put another parameter in the place of the old one."""
    weight = torch.nn.Parameter(-up_proj(model).weight, requires_grad=False)
    up_proj(model).weight = weight


def load_weights(model: Any) -> None:
    """Load a state dict, which is written in place."""
    weights = dict(model.state_dict())
    name = "model.layers.0.mlp.up_proj.weight"
    model.load_state_dict(weights | {name: -weights[name]})


@pytest.mark.parametrize(
    "change",
    [write_in_place, put_data, write_in_inference, write_data, replace_parameter, load_weights],
)
def test_changed_weights_are_noticed(change: Callable[[Any], None], target: Target) -> None:
    """What was read with other weights is read again; after a write through `.data`, `forget` has to say so."""
    # three times, since the second change restores the weights and the third is the first again
    for _ in range(3):
        decode(target, NONE, PROMPT, 12)
        change(target.model)
        if change is write_data:
            target.forget()
        expected = own_answer(target.model, PROMPT, 12)
        assert decode(target, NONE, PROMPT, 12) == expected

    with counting(target) as counts:
        decode(target, NONE, PROMPT, 1)

    # what was read with the weights as they are now is not read again
    assert counts == [1]


def test_weights_without_versions_are_read_again_each_time() -> None:
    """Tensors made in inference mode count no changes: nothing is kept from one answer to the next."""
    with torch.inference_mode():
        model = build("llama")

    target = Target(model)

    for _ in range(2):
        assert decode(target, NONE, PROMPT, 6) == own_answer(model, PROMPT, 6)
        write_in_inference(model)


@pytest.mark.parametrize("name", ["mistral-sliding", "gpt2"])
def test_prompts_are_read_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt read in chunks leaves what one forward leaves."""
    monkeypatch.setattr("eagle.target.state.PREFILL_CHUNK", 6)
    chunked = load_counted(name)
    chunked.reader.check()  # whose forwards are not those of the prompt
    taps = (0, 2, -1)
    state = chunked.open(taps)

    with counting(chunked) as counts:
        update = state.begin(PROMPT, GREEDY)

    assert counts == [6, 6, 6, 2]
    assert [update.root] == own_answer(chunked.model, PROMPT, 1)
    assert is_close(update.features, chunked.features(torch.tensor([PROMPT]), taps)[0])

    logits = read_tree(state, TREE).logits

    assert is_close(logits[3:4], own_logits(chunked.model, [*PROMPT, 5, 7, 8])[-1:])


def test_a_tree_that_is_not_kept_leaves_no_trace(target: Target) -> None:
    """Neither what the target says next nor what it said before changes."""
    state = target.open((0, -1))
    state.begin(PROMPT, GREEDY)
    first = read_tree(state, TREE)
    features = first.features.clone()
    chain = [50, 51, 52]
    # the oracle reads the chain with no tree before it
    second = read_tree(state, DraftTree.chain(chain))

    assert is_close(second.logits, own_logits(target.model, [*PROMPT, *chain])[-3:])
    assert torch.equal(first.features, features)
    assert torch.equal(read_tree(state, TREE).logits, first.logits)


@pytest.mark.parametrize("path", [[0], [0, 1], [0, 2, 4]])
def test_keep_leaves_only_the_path(target: Target, path: list[int]) -> None:
    """Whichever path is kept, the next tree is read after exactly its tokens, and its features stay its own."""
    state = target.open((0, -1))
    state.begin(PROMPT, GREEDY)
    output = read_tree(state, TREE)
    state.keep({0: path})
    sequence = PROMPT + TREE.tokens[path].tolist()
    features = target.features(torch.tensor([sequence]), (0, -1))[0]

    assert is_close(output.features_at(path), features[len(PROMPT) :])

    logits = read_tree(state, DraftTree.chain([50, 51])).logits

    assert is_close(logits, own_logits(target.model, [*sequence, 50, 51])[-2:])


def test_the_cache_grows_beyond_its_room(target: Target) -> None:
    """Reserved room only saves time: a sequence that outgrows it several times is read right."""
    state = target.open((1,))
    state.begin(PROMPT, GREEDY)
    before = list_buffers(state)
    sequence = list(PROMPT)

    for step in range(60):
        read_tree(state, TREE)
        # accepted paths of different lengths, with gaps between their nodes
        path = [[0], [0, 2, 4], [0, 1]][step % 3]
        state.keep({0: path})
        sequence += TREE.tokens[path].tolist()

    # the room was outgrown, or this test shows nothing
    for now, then in zip(list_buffers(state), before, strict=True):
        assert now.shape[2] > then.shape[2]

    sequence.append(50)
    logits = read_tree(state, DraftTree.chain([50])).logits

    assert is_close(logits, own_logits(target.model, sequence)[-1:])

    with counting(target) as counts:
        # what the 60 cycles committed is still there: one token is left to read
        features = state.begin(sequence, GREEDY).features

    assert counts == [1]
    assert is_close(features, target.features(torch.tensor([sequence]), (1,))[0])


def test_the_cache_is_not_moved_while_room_suffices(target: Target) -> None:
    """No cycle allocates or copies the cache."""
    answer = own_answer(target.model, PROMPT, 120)
    decoding = Decoding(target, PlantedTrees(PROMPT + answer, taps=(0, -1)))
    trace = Trace([])
    decoding.add(0, PROMPT, Sampling(), limit=120, trace=trace, stop=[])
    buffers = []

    while not decoding.is_done:
        decoding.step()
        buffers.append(list_buffers(decoding.state))

    assert trace.tokens == answer
    assert len(buffers) > 10

    for cycle in buffers:
        # the same tensors, not equal ones
        for now, then in zip(cycle, buffers[0], strict=True):
            assert now is then


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 40,
}
LONGROPE_SIZES = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 40}


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_longrope_is_read_with_one_set_of_frequencies(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences longer than the limit are read whole with the long factors; no cache mixes both."""
    # phi3 keeps the limit in its config, llama in its rope parameters
    monkeypatch.setitem(FAMILIES, "longrope", (family, LONGROPE_SIZES))
    monkeypatch.setattr("eagle.target.state.PREFILL_CHUNK", 6)
    target = Target(build("longrope"))
    long = PROMPT + random_tokens(30, seed=4)

    # back and forth over the limit, so that what one side cached meets the other's frequencies
    for prompt in (long, PROMPT, long, long[:45], long[:15]):
        answer = own_answer(target.model, prompt, 16)
        assert decode(target, PlantedTrees(prompt + answer), prompt, 16) == answer

    with pytest.raises(ValueError, match="cannot grow from 40 tokens to 41"):
        decode(target, NONE, long[:30], 20)
    state = target.open()
    state.begin(long[:40], GREEDY)
    with pytest.raises(ValueError, match="cannot grow from 40 tokens to 41"):
        state.extend({0: [5]})
    # 30 tokens and 11 new ones are 40 that are read, since the last one is not
    assert len(decode(target, NONE, long[:30], 11)) == 11


WRONG_CALLS: list[tuple[Callable[[Target], Any], str]] = [
    (lambda target: target.open().begin([], GREEDY), "prompt is empty"),
    (lambda target: target.open().begin([1] * 257, GREEDY), "model has 256 positions"),
    (lambda target: target.open().begin([1, 96, -1], GREEDY), r"\[96, -1\] are outside"),
    (lambda target: decode(target, NONE, [1] * 200, 57), "lower max_new_tokens to 56"),
    (lambda _: Target.load(Path(__file__).parent), "folder without config.json"),
    (lambda _: Target.load("/no/such/folder"), "no model at"),
]


@pytest.mark.parametrize(("call", "message"), WRONG_CALLS)
def test_what_cannot_be_answered_is_refused(
    target: Target,
    call: Callable[[Target], Any],
    message: str,
) -> None:
    """Errors name what was given, what is expected and what to do."""
    with pytest.raises(ValueError, match=message):
        call(target)


def test_load_reads_a_saved_folder(tmp_path: Path) -> None:
    """What save_pretrained wrote answers as before; "auto" takes one of two dtypes on a CPU."""
    model = build("llama")
    model.save_pretrained(tmp_path)
    loaded = Target.load(tmp_path, dtype="float32", device="cpu")

    assert loaded.model.dtype == torch.float32
    assert loaded.tokenizer is None

    prompt = torch.tensor([PROMPT])

    assert decode(loaded, NONE, prompt, 20) == own_answer(model, PROMPT, 20)

    # which of both depends on the processor
    loaded = Target.load(tmp_path, dtype="auto", device="cpu")

    assert loaded.model.dtype in (torch.float32, torch.bfloat16)


def test_default_sampling_is_what_generate_does(target: Target) -> None:
    """Greedy or the generation config's warpers, with transformers' own top-k of 50 where it names none."""
    config = target.model.generation_config

    assert target.default_sampling(seed=3) == Sampling(seed=3)

    config.do_sample = True

    assert target.default_sampling() == Sampling(temperature=1.0, top_k=50)

    requested = {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }
    config.update(**requested)

    assert target.default_sampling() == Sampling(**requested)


# -- threads ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Let threads take turns after a few instructions, so that a test meets what holds only for a moment."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.quick("llama-rope-yarn")
@pytest.mark.parametrize("family", ["mistral-sliding", "llama-rope-yarn"])
def test_the_model_answers_as_ever_while_a_target_probes_it(
    family: str, frequent_switches: None
) -> None:
    """What a target finds out about a model changes nothing that another thread reads of it."""
    model = build(family)
    expected = own_answer(model, PROMPT, 4)
    is_probed = Event()

    def probe() -> None:
        # the first call of a target lowers windows and rotary limits, of a copy
        for _ in range(2):
            decode(Target(model), NgramDrafter(), PROMPT, 2)
        is_probed.set()

    with ThreadPoolExecutor(1) as threads:
        probing = threads.submit(probe)
        answers = []
        while not (is_probed.is_set() or probing.done()):
            # the oracle is the very model that is being probed
            answers.append(own_answer(model, PROMPT, 4))
        probing.result()

    assert answers
    assert all(answer == expected for answer in answers)


def test_first_calls_of_several_threads_make_one_target(frequent_switches: None) -> None:
    """All of them answer as the model does."""
    model: Any = build("llama")
    prompt = torch.tensor([PROMPT])
    options: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
    }
    expected = model.generate(prompt, **options).tolist()
    # all threads find no target yet, and each would make one
    options["custom_generate"] = generate_with("ngram")

    with ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(model.generate, prompt, **options) for _ in range(6)]

    for call in calls:
        assert call.result().tolist() == expected
