"""What else a call of `model.generate` asks for: criteria, streamers, outputs, several answers; the model after it."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TextStreamer,
    TopKLogitsWarper,
    WatermarkingConfig,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import eagle.transformers
from eagle import Budget, Target
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.transformers.node_processors import sampling_of
from tests.families import VOCAB_SIZE, build, random_tokens
from tests.stock_generate import (
    PAD,
    AddNoise,
    asked,
    generate_knowing,
    left_padded,
    model_of,
    paddings_of,
    stock_generate,
)

ONE = {"input_ids": torch.tensor([random_tokens(9, 1)])}
BATCH = left_padded((4, 9, 7))
QUESTION = "What do you know about otters?"
GREEDY: dict[str, Any] = {
    "max_new_tokens": 40,
    "do_sample": False,
    "pad_token_id": 0,
}


class Bans(LogitsProcessor):
    """A user's processor that depends on tokens alone: it bans the last one, and seven times it."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Write into the scores, as many processors do."""
        rows = torch.arange(len(scores))
        last = input_ids[:, -1]
        scores[rows, last] = -torch.inf
        scores[rows, last * 7 % VOCAB_SIZE] = -torch.inf
        return scores


class Record(StoppingCriteria, BaseStreamer):
    """A criterion and a streamer that records its calls; as a criterion it ends rows at some tokens."""

    def __init__(self, ends: list[int]) -> None:
        self.ends = torch.tensor(ends)
        self.calls: list[Any] = []

    def __call__(
        self,
        input_ids: Tensor,
        scores: Any,
        **kwargs: Any,
    ) -> Any:
        """Return whether each row ends."""
        steps = None if scores is None else len(scores)
        self.calls.append((input_ids.tolist(), steps))
        return torch.isin(input_ids[:, -1], self.ends)

    def put(self, value: Tensor) -> None:
        """Record new tokens."""
        self.calls.append(value.tolist())

    def end(self) -> None:
        """Record the end."""
        self.calls.append("end")


# -- processors -------------------------------------------------------------------------------------------------------

# each changes the tokens of the batch
PROCESSORS: list[dict[str, Any]] = [
    {"min_length": 14, "eos_token_id": [*range(40)]},
    {"encoder_repetition_penalty": 3.0},
    {"no_repeat_ngram_size": 1},
    {"encoder_no_repeat_ngram_size": 1},
    {"bad_words_ids": [[token] for token in range(30)]},
    {"sequence_bias": {(1, 2): 30.0, (2, 1): 30.0, (3,): 9.0}},
    {"forced_eos_token_id": 7},
    {
        "exponential_decay_length_penalty": (2, 1.9),
        "eos_token_id": 3,
    },
    {"begin_suppress_tokens": [*range(90)]},
    {"repetition_penalty": 1.5},
    {"watermarking_config": WatermarkingConfig(bias=9.0, seeding_scheme="selfhash")},
]


@pytest.mark.parametrize(
    "options",
    PROCESSORS,
    ids=lambda options: next(iter(options)),
)
def test_processors_are_called_as_stock_calls_them(options: dict[str, Any]) -> None:
    """They are called at every node, in a batch with padding."""
    model = model_of("llama")
    stock = stock_generate(model, BATCH, **options)
    ours, with_drafter = generate_knowing(model, stock, BATCH, **options)
    assert torch.equal(ours, stock)
    assert with_drafter.acceptance_length > 2
    ends = {name: value for name, value in options.items() if name == "eos_token_id"}
    assert not torch.equal(stock, stock_generate(model, BATCH, **ends))


def test_a_users_processor_is_served_if_it_is_declared_stateless() -> None:
    """So is a function of the tokens that are allowed."""
    model = model_of("llama")
    stock = stock_generate(model, BATCH, logits_processor=[Bans()])
    given = {"logits_processor": LogitsProcessorList([Bans()])}
    ours, with_drafter = generate_knowing(
        model,
        stock,
        BATCH,
        **given,
        stateless=[Bans],
    )
    assert torch.equal(ours, stock)
    assert with_drafter.acceptance_length > 3

    # each token allows twenty others, which differ from row to row
    def allow(row: int, text: Tensor) -> list[int]:
        return [(int(text[-1]) * 5 + row + index) % VOCAB_SIZE for index in range(20)]

    with_drafter = eagle.transformers.generate_with(
        "ngram", stateless=[PrefixConstrainedLogitsProcessor]
    )
    for beams in (1, 3):
        options = {
            **asked(),
            "prefix_allowed_tokens_fn": allow,
            "num_beams": beams,
        }
        stock = stock_generate(model, BATCH, **options)
        assert torch.equal(
            model.generate(
                **BATCH,
                **options,
                custom_generate=with_drafter,
            ),
            stock,
        )


# -- criteria and streamers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "has_end"),
    [(ONE, False), (BATCH, True)],
    ids=["one", "batch"],
)
def test_a_users_criteria_see_every_step_of_all_rows(inputs: dict[str, Any], has_end: bool) -> None:
    """Criterion and streamer are called as often, with the same tokens and scores."""
    model = model_of("llama")
    free = stock_generate(model, inputs)
    # each row ends at another step
    ends = [int(row[-8 + 2 * index]) for index, row in enumerate(free)]
    options: dict[str, Any] = {
        "eos_token_id": int(free[0, -10]) if has_end else None,
        "max_new_tokens": 14,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    records = []
    for is_stock in (True, False):
        criterion = Record(ends)
        streamer = Record([])
        # new ones for each of the two calls
        options |= {
            "stopping_criteria": StoppingCriteriaList([criterion]),
            "streamer": streamer,
        }
        if is_stock:
            answer = stock_generate(model, inputs, **options)
        else:
            answer, _ = generate_knowing(model, free, inputs, **options)
        records.append((answer.sequences.tolist(), criterion.calls, streamer.calls))
    assert records[0] == records[1]
    assert records[0][2][0] == inputs["input_ids"].tolist()
    assert records[0][2][-1] == "end"


@pytest.mark.parametrize(
    "criterion",
    # the last time is over at once
    [
        MaxLengthCriteria(13),
        MaxLengthCriteria(5),
        MaxTimeCriteria(0.0, 0.0),
    ],
    ids=["13", "5", "time"],
)
def test_lengths_and_times(criterion: StoppingCriteria) -> None:
    """A trace has the tokens that the answer has."""
    model = model_of("llama")
    free = stock_generate(model, ONE)
    options = {"stopping_criteria": StoppingCriteriaList([criterion])}
    stock = stock_generate(model, ONE, **options)
    ours, with_drafter = generate_knowing(model, free, ONE, **options)
    assert torch.equal(ours, stock)
    assert len(with_drafter.traces[0].tokens) == stock.shape[1] - 9


def test_stop_strings(repeating_target: Target) -> None:
    """They work as a criterion, and as an option where `generate` gets the tokenizer; with beams too."""
    model = copy.deepcopy(repeating_target.model)
    tokenizer = repeating_target.tokenizer
    prompt = torch.tensor([repeating_target.chat(QUESTION)])
    length = prompt.shape[1]
    answer = tokenizer.decode(model.generate(prompt, **GREEDY)[0, length:])
    strings = [answer[15:22], "nothing that is said"]
    criterion = StoppingCriteriaList([StopStringCriteria(tokenizer, strings)])
    with_drafter = eagle.transformers.generate_with("ngram")
    generate = partial(
        with_drafter.generate,
        model,
        prompt,
        tokenizer=tokenizer,
    )
    for beams in (1, 3):
        options = {**GREEDY, "num_beams": beams}
        stock = model.generate(
            prompt,
            **options,
            stop_strings=strings,
            tokenizer=tokenizer,
        )
        # the best beam may be one that says neither string
        assert beams > 1 or stock.shape[1] < length + 40
        options["custom_generate"] = with_drafter
        assert torch.equal(model.generate(prompt, **options, stopping_criteria=criterion), stock)
        del options["custom_generate"]
        assert torch.equal(generate(**options, stop_strings=strings), stock)

    # strings may stand in a config that is passed, or in the model's own
    stock = model.generate(
        prompt,
        **GREEDY,
        stop_strings=strings,
        tokenizer=tokenizer,
    )
    config = GenerationConfig(**GREEDY, stop_strings=strings)
    assert torch.equal(generate(generation_config=config), stock)
    assert config.stop_strings == strings
    with pytest.raises(ValueError, match="without their tokenizer"):
        with_drafter.generate(
            model,
            prompt,
            **GREEDY,
            stop_strings=strings,
        )
    model.generation_config.stop_strings = strings
    assert torch.equal(generate(**GREEDY), stock)
    assert model.generation_config.stop_strings == strings


def test_streamers(
    repeating_target: Target,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both of transformers' streamers get what stock gives them."""
    model = copy.deepcopy(repeating_target.model)
    tokenizer = repeating_target.tokenizer
    prompt = torch.tensor([repeating_target.chat(QUESTION)])
    with_drafter = eagle.transformers.generate_with("ngram")
    printed = []
    chunks = []
    for more in ({}, {"custom_generate": with_drafter}):
        options = {**GREEDY, **more}
        model.generate(
            prompt,
            **options,
            streamer=TextStreamer(tokenizer),
        )
        printed.append(capsys.readouterr().out)
        # this streamer is read while another thread writes
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        options["streamer"] = streamer
        Thread(target=model.generate, args=(prompt,), kwargs=options).start()
        chunks.append([*streamer])
    assert printed[0] == printed[1]
    assert len(printed[0]) > 40
    assert chunks[0] == chunks[1]
    assert len(chunks[0]) > 3
    assert with_drafter.acceptance_length > 1


def test_the_pipeline(repeating_target: Target) -> None:
    """It takes the drafter when it is made, or at a call."""
    model = copy.deepcopy(repeating_target.model)
    make = partial(
        pipeline,
        "text-generation",
        model=model,
        tokenizer=repeating_target.tokenizer,
    )
    with_drafter = eagle.transformers.generate_with("ngram")
    messages = [{"role": "user", "content": QUESTION}]
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    stock = make()(messages, **options)
    assert make()(messages, **options, custom_generate=with_drafter) == stock
    assert make(custom_generate=with_drafter)(messages, **options) == stock


# -- outputs and noise ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "is_sampled", "more"),
    [
        (ONE, False, {}),
        (BATCH, True, {}),
        (BATCH, False, {"no_repeat_ngram_size": 2}),
    ],
    ids=["one", "sampled", "processor"],
)
def test_scores_and_logits_are_the_stock_ones(
    inputs: dict[str, Any],
    is_sampled: bool,
    more: dict[str, Any],
) -> None:
    """At every position of an answer up to rounding, with zeros where a row has ended."""
    model = model_of("qwen3")
    free = stock_generate(model, inputs, [] if is_sampled else None)
    end = int(free[0, -7])
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "eos_token_id": end,
        **more,
    }
    warpers = None
    sampled = {}
    if is_sampled:
        warpers = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(20)]
        sampled = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    stock = stock_generate(model, inputs, warpers, **options)
    ours, _ = generate_knowing(model, stock, inputs, **options, **sampled)
    assert torch.equal(ours.sequences, stock.sequences)
    assert len(ours.scores) == len(ours.logits) == len(stock.scores)

    # prompts have 9 columns; a row runs up to its first end
    ends = (stock.sequences[:, 9:] == end).cumsum(1)
    for step, (scores, logits) in enumerate(zip(ours.scores, ours.logits, strict=True)):
        runs = ends[:, step] - (stock.sequences[:, 9 + step] == end).long() == 0
        assert torch.allclose(
            logits[runs],
            stock.logits[step][runs],
            atol=1e-4,
        )
        assert not logits[~runs].any()
        assert not scores[~runs].any()
        # what stock calls scores has the noise
        if is_sampled:
            scores = AddNoise(paddings_of(inputs))(stock.sequences[:, : 9 + step], scores)
        assert torch.allclose(
            scores[runs],
            stock.scores[step][runs],
            atol=1e-4,
        )


def test_several_answers_to_a_prompt_each_have_their_own_noise() -> None:
    """Rows are those of the stock call with the same noise."""
    model = model_of("llama")
    # nine rows, each with the noise of its index
    stock = stock_generate(model, BATCH, [], num_return_sequences=3)
    options = {
        "do_sample": True,
        "top_k": 0,
        "num_return_sequences": 3,
    }
    ours, _ = generate_knowing(model, stock, BATCH, **options)
    assert torch.equal(ours, stock)
    assert len({tuple(row) for row in ours.tolist()}) == 9


def test_shared_noise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails if all rows have the first one's noise."""

    def share_noise(
        sampling: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return sampling_of(sampling, *args, **{**kwargs, "request": 0})

    monkeypatch.setattr("eagle.transformers.with_drafter.sampling_of", share_noise)
    with pytest.raises(AssertionError):
        test_several_answers_to_a_prompt_each_have_their_own_noise()


def test_the_seed_is_torchs_own_where_none_is_given() -> None:
    """`torch.manual_seed` repeats a call, and two calls differ."""
    with_drafter = eagle.transformers.generate_with("ngram")
    options = {
        **asked(),
        "do_sample": True,
        "top_k": 0,
        "custom_generate": with_drafter,
    }
    # the second call goes on with torch's generator
    answers = []
    for seed in (3, None, 3):
        if seed is not None:
            torch.manual_seed(seed)
        answers.append(model_of("llama").generate(**ONE, **options))
    assert torch.equal(answers[0], answers[2])
    assert not torch.equal(answers[0], answers[1])


def test_right_padding_is_answered_as_no_padding() -> None:
    """Stock goes on from the padding, and warns; here rows come back as they were given, with their answers."""
    model = model_of("llama")
    prompts = [random_tokens(4, 4), random_tokens(9, 9)]
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
        }
        answers.append(stock_generate(model, inputs)[0, len(prompt) :])
    rows = torch.tensor([[*prompts[0], *[PAD] * 5], prompts[1]])
    mask = torch.tensor([[1] * 4 + [0] * 5, [1] * 9])
    with_drafter = eagle.transformers.generate_with("ngram")
    ours = model.generate(
        rows,
        attention_mask=mask,
        **asked(),
        custom_generate=with_drafter,
    )
    assert torch.equal(ours, torch.cat([rows, torch.stack(answers)], dim=1))


# -- the model afterwards ---------------------------------------------------------------------------------------------


def describe(model: Any) -> tuple[Any, ...]:
    """Return what a call could change in a model."""
    return (
        [weight.requires_grad for weight in model.parameters()],
        [module.training for module in model.modules()],
        model.config.to_dict(),
    )


@pytest.mark.slow
def test_the_model_is_left_as_it_was() -> None:
    """A call changes nothing in the model but what it holds for later calls, which does not keep it alive."""
    model = build("llama")
    model.train()
    model.lm_head.eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    with_drafter = eagle.transformers.generate_with("ngram", budget=Budget(8, 4))

    call = {**ONE, **asked(), "custom_generate": with_drafter}
    before = describe(model)
    names = {*vars(model)}
    stock = stock_generate(model, ONE)
    assert torch.equal(model.generate(**call), stock)
    assert describe(model) == before
    assert {*vars(model)} - names == {"_eagle_held"}
    assert eagle.transformers.last_traces(model) is with_drafter.traces

    # a second call finds its target and drafter, a copy of the model does not
    held = vars(model)["_eagle_held"]
    target = held.target
    drafter = held.drafters[with_drafter]
    model.generate(**call)
    assert held.target is target
    assert held.drafters[with_drafter] is drafter
    assert vars(copy.deepcopy(model))["_eagle_held"].target is None

    # other weights give other answers, another dtype another target
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn(model.lm_head.weight.shape))
    assert torch.equal(model.generate(**call), stock_generate(model, ONE))
    model.to(torch.float64)
    model.generate(**call)
    assert held.target is not target
    assert held.target.model.dtype == torch.float64

    reference = weakref.ref(model)
    del model, held, target, drafter
    gc.collect()
    assert reference() is None


def test_a_drafter_may_be_made_beforehand_and_bound_later(repeating_target: Target) -> None:
    """A head in memory serves models of any dtype, and stays as it was."""
    head = Eagle1.for_target(
        Eagle1.Settings(),
        repeating_target.config,
        repeating_target.head,
    )
    with_drafter = eagle.transformers.generate_with(head)
    for dtype in (torch.float32, torch.float64):
        model = copy.deepcopy(repeating_target.model).to(dtype)
        stock = stock_generate(model, ONE)
        assert torch.equal(model.generate(**ONE, **asked(), custom_generate=with_drafter), stock)
        assert len(with_drafter.traces) == 1
    assert with_drafter.acceptance_length >= 1
    assert not head.bound_to
    assert all(module.training for module in head.modules())
    assert head.fc.weight.dtype == torch.float32


def test_the_package_is_there_after_import_eagle() -> None:
    """A star import leaves it out, as it would hide another package."""
    assert eagle.__getattr__("transformers") is eagle.transformers
    assert "transformers" not in eagle.__all__
