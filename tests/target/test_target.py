"""A target reads what is new, keeps what was accepted, and says plainly what it cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Sampling, Target, Trace, generate
from eagle.core.tree import DraftTree, TargetOutput
from eagle.core.verify import Choose
from eagle.decoding.loop import Decoding
from eagle.drafters.none import NoDrafter
from eagle.target.state import TargetState
from tests.families import (
    COMMON,
    FAMILIES,
    VOCAB_SIZE,
    PlantedTrees,
    build,
    own_answer,
    own_logits,
    random_tokens,
)

GREEDY = Choose(Sampling())
PROMPT = random_tokens(20, seed=3)
TREE = DraftTree(
    torch.tensor([5, 6, 7, 8, 9]), torch.tensor([-1, 0, 0, 2, 2])
)  # 5 -> 6, 7; 7 -> 8, 9


def counted(name: str) -> Target:
    """Return a fresh model of a family, which counts the tokens of each forward in its attribute `counts`.

    A hook that is added later would make it read its text again.
    """
    model, counts = build(name), list[int]()
    embedding = model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, args: counts.append(args[0].numel()))
    target: Any = Target(model)
    target.counts = counts
    return target


@pytest.fixture
def target() -> Target:
    """Return a fresh llama."""
    return counted("llama")


@contextmanager
def counting(target: Any) -> Iterator[list[int]]:
    """Give the number of tokens of each forward while it is open."""
    target.counts.clear()
    yield target.counts


def close(got: Tensor, expected: Tensor) -> bool:
    """Equal up to 1e-5 of the expected norm."""
    return got.shape == expected.shape and bool((got - expected).norm() < 1e-5 * expected.norm())


def begin_again(target: Target, prompt: list[int], taps: tuple[int, ...] = ()) -> Any:
    """Read a prompt in the state that was closed last, or a new one, and close it."""
    state = target.open(taps)
    update = state.begin(prompt, GREEDY)
    target.close(state)
    return update


def read_one(state: TargetState, tree: DraftTree) -> TargetOutput:
    """What the target says about a tree behind the only text."""
    return state.read({0: tree})[0]


def buffers(state: TargetState) -> list[Tensor]:
    """The cache's tensors."""
    return [rows.buffer for rows in state.cache.buffers]


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
def test_what_a_prompt_shares_with_the_text_is_not_read_again(
    target: Target, prompt: list[int], read: list[int]
) -> None:
    """Only what follows the common start is read, and the answer and the features are those of the whole prompt."""
    begin_again(target, PROMPT, (0, -1))
    with counting(target) as counts:
        update = begin_again(target, prompt, (0, -1))
    assert counts == read
    assert update.tokens.tolist() == prompt
    assert [update.root] == own_answer(target.model, prompt, 1)
    assert close(update.features, target.features(torch.tensor([prompt]), (0, -1))[0])


@pytest.mark.parametrize("taps", [(0,), (0, 1, 2), (), (-1, 2)])
def test_other_taps_read_the_whole_prompt_again(target: Target, taps: tuple[int, ...]) -> None:
    """States that were not caught take a forward, whatever number of them was caught before."""
    begin_again(target, PROMPT, (2, -1))
    with counting(target) as counts:
        update = begin_again(target, PROMPT, taps)
    assert counts == [len(PROMPT)]
    assert (
        update.features is None
        if not taps
        else close(update.features, target.features(torch.tensor([PROMPT]), taps)[0])
    )


def test_forget_reads_the_whole_prompt_again(target: Target) -> None:
    """After `forget` nothing is shared."""
    begin_again(target, PROMPT)
    target.forget()
    with counting(target) as counts:
        begin_again(target, PROMPT)
    assert counts == [len(PROMPT)]


def write_data(weight: Any) -> None:
    """Through `.data`, of which no version tells."""
    weight.data *= -1


def put_another(weight: Any) -> None:
    """Other values in other memory."""
    weight.data = -weight.data


@torch.no_grad()
def write_in_place(weight: Any) -> None:
    """As an optimizer does."""
    weight *= -1


@torch.inference_mode()
def write_in_inference(weight: Any) -> None:
    """Without autograd."""
    weight.neg_()


@pytest.mark.parametrize("change", [write_in_place, put_another, write_in_inference, write_data])
def test_changed_weights_are_noticed(change: Callable[[Any], None], target: Target) -> None:
    """What was read with other weights is read again; writing through `.data` has to be told."""
    options: dict[str, Any] = {"max_new_tokens": 12, "stop": []}
    for sign in range(3):  # at any time, and back again
        generate(target, NoDrafter(), PROMPT, **options)
        change(target.model.base_model.layers[0].mlp.up_proj.weight)
        if change is write_data:
            target.forget()
        expected = own_answer(target.model, PROMPT, 12)
        assert generate(target, NoDrafter(), PROMPT, **options).tokens == expected, sign
    with counting(target) as counts:
        generate(target, NoDrafter(), PROMPT, max_new_tokens=1, stop=[])
    assert counts == [1]  # and what was read with these is not


def test_loaded_weights_are_noticed(target: Target) -> None:
    """A state dict is loaded in place, and a parameter may be replaced."""
    other = build("llama")
    with torch.no_grad():
        for weight in other.parameters():
            weight.neg_()
    generate(target, NoDrafter(), PROMPT, max_new_tokens=12, stop=[])
    target.model.load_state_dict(other.state_dict())
    expected = own_answer(other, PROMPT, 12)
    assert generate(target, NoDrafter(), PROMPT, max_new_tokens=12, stop=[]).tokens == expected
    layer = target.model.base_model.layers[1].mlp.down_proj
    layer.weight = torch.nn.Parameter(-layer.weight, requires_grad=False)
    expected = own_answer(target.model, PROMPT, 12)
    assert generate(target, NoDrafter(), PROMPT, max_new_tokens=12, stop=[]).tokens == expected


def test_weights_without_versions_are_read_anew() -> None:
    """Tensors made in inference mode count no changes: no text is kept from one answer to the next."""
    with torch.inference_mode():
        model = build("llama")
    target = Target(model)
    for _ in range(2):
        assert generate(
            target, NoDrafter(), PROMPT, max_new_tokens=6, stop=[]
        ).tokens == own_answer(model, PROMPT, 6)
        with torch.inference_mode():
            model.base_model.layers[0].mlp.up_proj.weight.neg_()


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3", "gpt2"])
def test_prompts_are_read_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt read in pieces leaves what one forward leaves."""
    monkeypatch.setattr("eagle.target.state.PREFILL_CHUNK", 6)
    chunked = counted(name)
    chunked.reader.check()  # once, at the first text
    state = chunked.open((0, 2, -1))
    with counting(chunked) as counts:
        update = state.begin(PROMPT, GREEDY)
    assert counts == [6, 6, 6, 2]
    assert [update.root] == own_answer(chunked.model, PROMPT, 1)
    assert close(update.features, chunked.features(torch.tensor([PROMPT]), (0, 2, -1))[0])
    assert close(
        read_one(state, TREE).logits[3:4], own_logits(chunked.model, [*PROMPT, 5, 7, 8])[-1:]
    )


def test_reading_again_does_not_see_the_tree_before(target: Target) -> None:
    """Without `keep` a tree leaves no trace, neither in what the target says next nor in what it said."""
    state = target.open((0, -1))
    state.begin(PROMPT, GREEDY)
    first = read_one(state, TREE)
    features = first.features.clone()
    second = read_one(state, DraftTree.chain([50, 51, 52]))
    assert close(second.logits, own_logits(target.model, [*PROMPT, 50, 51, 52])[-3:])
    assert torch.equal(first.features, features)
    assert torch.equal(read_one(state, TREE).logits, first.logits)


@pytest.mark.parametrize("path", [[0], [0, 1], [0, 2], [0, 2, 4]])
def test_keep_leaves_the_path_alone(target: Target, path: list[int]) -> None:
    """Whichever path is kept, the next tree is read after exactly its tokens, and its features stay its own."""
    state = target.open((0, -1))
    state.begin(PROMPT, GREEDY)
    output = read_one(state, TREE)
    state.keep({0: path})
    text = PROMPT + TREE.tokens[path].tolist()
    assert close(
        output.features_at(path), target.features(torch.tensor([text]), (0, -1))[0, len(PROMPT) :]
    )
    assert close(
        read_one(state, DraftTree.chain([50, 51])).logits,
        own_logits(target.model, [*text, 50, 51])[-2:],
    )


def test_the_cache_grows_beyond_its_room(target: Target) -> None:
    """Room is a promise about speed alone: a text that outgrows it several times is read right."""
    state = target.open((1,))
    state.begin(PROMPT, GREEDY)
    before, text = buffers(state), list(PROMPT)
    for step in range(60):
        read_one(state, TREE)
        state.keep({0: (path := [[0], [0, 2, 4], [0, 1]][step % 3])})
        text += TREE.tokens[path].tolist()
    assert all(
        now.shape[2] > then.shape[2] for now, then in zip(buffers(state), before, strict=True)
    )
    assert close(
        read_one(state, DraftTree.chain([50])).logits, own_logits(target.model, [*text, 50])[-1:]
    )
    with counting(target) as counts:
        kept = state.begin([*text, 50], GREEDY).features
    assert counts == [1]
    assert close(kept, target.features(torch.tensor([[*text, 50]]), (1,))[0])


def test_the_cache_stays_where_it_is_while_room_suffices(target: Target) -> None:
    """No cycle allocates or copies the cache."""
    answer = own_answer(target.model, PROMPT, 120)
    decoding, trace = Decoding(target, PlantedTrees(PROMPT + answer, taps=(0, -1))), Trace([])
    decoding.add(0, PROMPT, Sampling(), 120, trace, stop=[])
    seen = []
    while not decoding.is_done:
        decoding.step()
        seen.append(buffers(decoding.state))
    assert trace.tokens == answer
    assert len(seen) > 10 and all(
        now is then for step in seen for now, then in zip(step, seen[0], strict=True)
    )


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 40,
}


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_longrope_is_read_with_one_set_of_frequencies(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts longer than the border are read whole with the long factors; no cache mixes both."""
    monkeypatch.setitem(
        FAMILIES,
        "longrope",
        (family, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 40}),
    )
    monkeypatch.setattr("eagle.target.state.PREFILL_CHUNK", 6)
    target = Target(build("longrope"))
    long = PROMPT + random_tokens(30, seed=4)
    for prompt in (long, PROMPT, long, long[:45], long[:15]):
        answer = own_answer(target.model, prompt, 16)
        assert (
            generate(
                target, PlantedTrees(prompt + answer), prompt, max_new_tokens=16, stop=[]
            ).tokens
            == answer
        )
    with pytest.raises(
        ValueError, match=r"texts of more than 40 tokens .* cannot grow from 40 tokens to 41: keep"
    ):
        generate(target, NoDrafter(), long[:30], max_new_tokens=20, stop=[])
    assert generate(target, NoDrafter(), long[:30], max_new_tokens=11, stop=[]).finish == "length"


def test_drafts_end_where_longrope_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What plain decoding ends in time, drafts end too: none reaches across the border."""
    overrides = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 40}
    monkeypatch.setitem(FAMILIES, "longrope", ("llama", overrides))
    target = Target(build("longrope"))
    prompts = [random_tokens(30, seed=seed) for seed in range(20)]
    answers = [own_answer(target.model, prompt, 11) for prompt in prompts]
    ends = [
        (*pair, pair[1][-1])
        for pair in zip(prompts, answers, strict=True)
        if pair[1][-1] not in pair[1][:-1]
    ]
    for prompt, answer, last in ends[:3]:
        options: dict[str, Any] = {"max_new_tokens": 40, "stop": [last]}
        drafter = PlantedTrees(prompt + answer + [1] * 8, right=8)
        plain, drafted = (
            generate(target, which, prompt, **options) for which in (NoDrafter(), drafter)
        )
        assert drafted.tokens == plain.tokens == answer and drafted.finish == plain.finish == "stop"
        assert drafted.acceptance_length > 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda target: target.open().begin([], GREEDY),
            "prompt is empty: expected at least one token id",
        ),
        (
            lambda target: target.open().begin([1] * 257, GREEDY),
            r"has 257 tokens, this model has 256 positions: shorten it",
        ),
        (
            lambda target: target.open().begin([1, 96, -1], GREEDY),
            r"\[96, -1\] are outside the vocabulary: expected 0..95",
        ),
        (
            lambda target: target.chat("hello"),
            "no chat template: pass token ids, or load a tokenizer that has one",
        ),
        (
            lambda target: generate(target, NoDrafter(), [1] * 200, max_new_tokens=57),
            "200 prompt tokens and 57 new ones exceed the model's 256 positions: lower max_new_tokens to 56",
        ),
        (
            lambda target: generate(target, NoDrafter(), [1], max_new_tokens=0),
            "max_new_tokens is 0, expected 1 or more",
        ),
        (
            lambda target: generate(target, NoDrafter(), "hello"),
            r"prompt is text, expected token ids: use target.chat",
        ),
        (
            lambda target: generate(target, NoDrafter(), torch.ones(2, 2, 3)),
            r"one prompt at a time: got a tensor of shape \(2, 2, 3\), expected \[T\] or \[1, T\]",
        ),
        (
            lambda target: generate(target, NoDrafter(), [1], stop=["x"]),
            "stop strings .*need a tokenizer: .*or pass ids",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(
    target: Target, call: Callable[[Target], Any], message: str
) -> None:
    """Errors name what was got, what is expected and what to do."""
    with pytest.raises(ValueError, match=message):
        call(target)


def test_a_place_without_a_model_is_refused(tmp_path: Path) -> None:
    """An empty folder, and a path where there is nothing."""
    with pytest.raises(
        ValueError,
        match=r"is no model: got a folder without config.json, expected one of save_pretr",
    ):
        Target.load(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"no model at .*nothing: expected a folder of save_pretrained, or a hub id",
    ):
        Target.load(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("asked", "got"), [("float32", [torch.float32]), ("auto", [torch.float32, torch.bfloat16])]
)
def test_load_reads_a_saved_folder(tmp_path: Path, asked: str, got: list[torch.dtype]) -> None:
    """What save_pretrained wrote answers as before; "auto" takes one of two dtypes on a CPU."""
    model = build("llama")
    model.save_pretrained(tmp_path)
    loaded = Target.load(tmp_path, dtype=asked, device="cpu")
    assert loaded.model.dtype in got and loaded.tokenizer is None
    answer = generate(
        loaded, NoDrafter(), torch.tensor([PROMPT]), max_new_tokens=20, stop=[]
    ).tokens
    assert answer == own_answer(model, PROMPT, 20) or asked == "auto"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_borrowed_head_says_what_the_model_says(name: str) -> None:
    """Hidden -> logits with scales and soft caps; tokens -> layer 0's input, but for learned positions."""
    target, text = Target(build(name)), torch.tensor([PROMPT])
    states = target.features(text, (0, -1))[0]
    assert close(target.head.logits(states[:, 1]), own_logits(target.model, PROMPT))
    assert close(target.head.embed(text[0]), states[:, 0]) or name in ("gpt2", "opt")
    assert target.head.weight.shape == (VOCAB_SIZE, COMMON["hidden_size"])


def test_default_sampling_is_what_generate_does(target: Target) -> None:
    """Greedy or the generation config's warpers, with transformers' own top-k of 50 where it names none."""
    config = target.model.generation_config
    assert target.default_sampling(seed=3) == Sampling(seed=3)
    config.do_sample = True
    assert target.default_sampling() == Sampling(temperature=1.0, top_k=50)
    asked = {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }
    config.update(**asked)
    assert target.default_sampling() == Sampling(**asked)
    assert target.default_sampling(temperature=0.5) == Sampling(**{**asked, "temperature": 0.5})
    config.no_repeat_ngram_size = 3
    with pytest.raises(
        ValueError, match=r"NoRepeatNGramLogitsProcessor.*cannot be verified.*remove them"
    ):
        target.default_sampling()
