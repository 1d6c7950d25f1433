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
from eagle.core.tree import TargetOutput
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


class Bans(LogitsProcessor):
    """A processor of one's own that depends on the tokens alone: none twice in a row, nor one that is 7 times it."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores, written in place, as many such processors do."""
        rows = torch.arange(len(scores))
        scores[rows, input_ids[:, -1]] = -torch.inf
        scores[rows, input_ids[:, -1] * 7 % VOCAB_SIZE] = -torch.inf
        return scores


class Record(StoppingCriteria, BaseStreamer):
    """Records what it is called with, as criterion and as streamer; ends each row at one of its tokens."""

    def __init__(self, ends: list[int]) -> None:
        self.ends, self.calls = torch.tensor(ends), list[Any]()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Whether each row ends."""
        self.calls.append((input_ids.tolist(), None if scores is None else len(scores)))
        return torch.isin(input_ids[:, -1], self.ends)

    def put(self, value: Tensor) -> None:
        """New tokens."""
        self.calls.append(value.tolist())

    def end(self) -> None:
        """No more."""
        self.calls.append("end")


PROCESSORS: dict[str, dict[str, Any]] = {
    "min_length": {"min_length": 14, "eos_token_id": list(range(40))},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(40))},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(30)] + [[40, 41]]},
    "sequence_bias": {
        "sequence_bias": {(token,): 9.0 for token in range(5)} | {(1, 2): 30.0, (2, 1): 30.0}
    },
    "forced_bos_token_id": {"forced_bos_token_id": 7},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (2, 1.9),
        "eos_token_id": 3,
    },
    "suppress_tokens": {"suppress_tokens": list(range(50))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(90))},
    "renormalize_logits": {"renormalize_logits": True, "remove_invalid_values": True},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=9.0)},
    "selfhash": {"watermarking_config": WatermarkingConfig(bias=9.0, seeding_scheme="selfhash")},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_are_called_as_stock_calls_them(name: str) -> None:
    """In a batch with padding, at every node."""
    model, options = model_of("llama"), PROCESSORS[name]
    stock = stock_generate(model, BATCH, **options)
    ours, with_drafter = generate_knowing(model, stock, BATCH, **options)
    assert torch.equal(ours, stock) and with_drafter.acceptance_length > 2
    quiet = {key: value for key, value in options.items() if key == "eos_token_id"}
    changed = stock_generate(model, BATCH, **quiet)
    assert name in ("renormalize_logits", "forced_bos_token_id") or not torch.equal(stock, changed)


def test_a_processor_of_ones_own_is_served_where_it_is_said_to_be_stateless() -> None:
    """And otherwise refused by its name; a function of the tokens that are allowed, too."""
    model, mine = model_of("llama"), [Bans()]
    stock = stock_generate(model, BATCH, logits_processor=mine)
    given = {"logits_processor": LogitsProcessorList(mine)}
    ours, with_drafter = generate_knowing(model, stock, BATCH, **given, stateless=[Bans])
    assert torch.equal(ours, stock) and with_drafter.acceptance_length > 3
    with pytest.raises(
        ValueError, match=r"the logits processors Bans cannot be served .* stateless=.Bans"
    ):
        generate_knowing(model, stock, BATCH, **given)

    def allowed(row: int, text: Tensor) -> list[int]:
        return [(int(text[-1]) * 5 + row + number) % VOCAB_SIZE for number in range(20)]

    with_drafter = eagle.transformers.generate_with(
        "ngram", stateless=[PrefixConstrainedLogitsProcessor]
    )
    for more in ({}, {"num_beams": 3}):
        options = {**asked(), "prefix_allowed_tokens_fn": allowed, **more}
        stock = stock_generate(model, BATCH, **options)
        assert torch.equal(model.generate(**BATCH, **options, custom_generate=with_drafter), stock)


@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
@pytest.mark.parametrize("end", [None, "early"])
def test_criteria_of_ones_own_see_every_step_of_all_rows(inputs: dict[str, Any], end: Any) -> None:
    """Called as often, with the same tokens and scores, and with or without stop tokens beside them."""
    model = model_of("llama")
    free = stock_generate(model, inputs)
    ends, records = [int(row[-8 + 2 * number]) for number, row in enumerate(free)], []
    options: dict[str, Any] = {
        "eos_token_id": int(free[0, -10]) if end else None,
        "max_new_tokens": 14,
    }
    options |= {"return_dict_in_generate": True, "output_scores": True}
    for ask in (
        stock_generate,
        lambda *args, **kwargs: generate_knowing(model, free, inputs, **kwargs)[0],
    ):
        record, streamer = Record(ends), Record([])
        given = {"stopping_criteria": StoppingCriteriaList([record]), "streamer": streamer}
        records.append(
            (
                ask(model, inputs, **options, **given).sequences.tolist(),
                record.calls,
                streamer.calls,
            )
        )
    assert records[0] == records[1]
    assert records[0][2][0] == inputs["input_ids"].tolist() and records[0][2][-1] == "end"


def test_lengths_and_times() -> None:
    """A length of one's own, and a time that is over at once."""
    model = model_of("llama")
    free = stock_generate(model, ONE)
    for criterion in (MaxLengthCriteria(13), MaxLengthCriteria(5), MaxTimeCriteria(0.0, 0.0)):
        options = {"stopping_criteria": StoppingCriteriaList([criterion])}
        stock = stock_generate(model, ONE, **options)
        ours, with_drafter = generate_knowing(model, free, ONE, **options)
        assert torch.equal(ours, stock)
        assert [len(trace.tokens) for trace in with_drafter.traces] == [stock.shape[1] - 9]
    assert sum(cycle.committed for cycle in with_drafter.traces[0].cycles) == 0


@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("more", [{}, {"no_repeat_ngram_size": 2}])
def test_scores_and_logits_are_the_stock_ones(
    inputs: dict[str, Any], drawn: bool, more: dict[str, Any]
) -> None:
    """At every place of an answer, up to rounding; and zeros where a row has ended."""
    model = model_of("qwen3")
    free = stock_generate(model, inputs, [] if drawn else None)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options |= {"eos_token_id": int(free[0, -7]), **more}
    warpers = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(20)] if drawn else None
    stock = stock_generate(model, inputs, warpers, **options)
    sampled = {"do_sample": True, "temperature": 0.8, "top_k": 20} if drawn else {}
    ours, _ = generate_knowing(model, stock, inputs, **options, **sampled)
    assert torch.equal(ours.sequences, stock.sequences) and len(ours.scores) == len(stock.scores)
    ended = (stock.sequences[:, 9:] == options["eos_token_id"]).cumsum(1)
    for step, (scores, logits) in enumerate(zip(ours.scores, ours.logits, strict=True)):
        runs = ended[:, step - 1] == 0 if step else torch.ones(len(ended), dtype=torch.bool)
        assert torch.allclose(logits[runs], stock.logits[step][runs], atol=1e-4)
        assert not logits[~runs].any() and not scores[~runs].any()
        if drawn:  # what stock calls scores has the noise
            scores = AddNoise(paddings_of(inputs))(stock.sequences[:, : 9 + step], scores)
        assert torch.allclose(scores[runs], stock.scores[step][runs], atol=1e-4)
    if inputs is ONE and not drawn:
        of_ours = model.compute_transition_scores(
            ours.sequences, ours.scores, normalize_logits=True
        )
        of_stock = model.compute_transition_scores(
            stock.sequences, stock.scores, normalize_logits=True
        )
        assert torch.allclose(of_ours, of_stock, atol=1e-4)


def test_several_answers_to_a_prompt_each_have_their_own_noise() -> None:
    """As the stock call, row by row."""
    model = model_of("llama")
    stock = stock_generate(model, BATCH, [], num_return_sequences=3)
    ours, _ = generate_knowing(model, stock, BATCH, do_sample=True, top_k=0, num_return_sequences=3)
    assert torch.equal(ours, stock) and len({tuple(row) for row in ours.tolist()}) == 9


def test_the_seed_is_torchs_own_where_none_is_given() -> None:
    """`torch.manual_seed` repeats a call, and two calls differ."""
    model, with_drafter = model_of("llama"), eagle.transformers.generate_with("ngram")
    options = {**asked(), "do_sample": True, "top_k": 0}
    torch.manual_seed(3)
    first, second = (
        model.generate(**ONE, **options, custom_generate=with_drafter) for _ in range(2)
    )
    torch.manual_seed(3)
    again = model.generate(**ONE, **options, custom_generate=with_drafter)
    assert torch.equal(first, again) and not torch.equal(first, second)


def test_right_padding_is_answered_as_no_padding() -> None:
    """Where stock goes on from the padding, and warns; the rows come back as they were given."""
    model, prompts = model_of("llama"), [random_tokens(length, length) for length in (4, 9)]
    inputs = [
        {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt))}
        for prompt in prompts
    ]
    alone = [stock_generate(model, one)[0, one["input_ids"].shape[1] :] for one in inputs]
    rows = torch.tensor([[*prompts[0], *[PAD] * 5], prompts[1]])
    mask = torch.tensor([[1] * 4 + [0] * 5, [1] * 9])
    with_drafter = eagle.transformers.generate_with("ngram")
    ours = model.generate(rows, attention_mask=mask, **asked(), custom_generate=with_drafter)
    assert torch.equal(ours, torch.cat([rows, torch.stack(alone)], dim=1))


def test_stop_strings(repeating_target: Target) -> None:
    """As a criterion, where transformers takes it, and by `generate`, which takes the tokenizer; with beams too."""
    model, tokenizer = copy.deepcopy(repeating_target.model), repeating_target.tokenizer
    prompt = torch.tensor([repeating_target.chat("What do you know about otters?")])
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    free = tokenizer.decode(model.generate(prompt, **options)[0, prompt.shape[1] :])
    strings = [free[15:22], "nothing that is said"]
    with_drafter = eagle.transformers.generate_with("ngram")
    for more in ({}, {"num_beams": 3}):
        stock = model.generate(prompt, **options, **more, stop_strings=strings, tokenizer=tokenizer)
        criterion = StoppingCriteriaList([StopStringCriteria(tokenizer, strings)])
        ours = model.generate(
            prompt, **options, **more, stopping_criteria=criterion, custom_generate=with_drafter
        )
        assert torch.equal(ours, stock)
        assert (
            more or stock.shape[1] < prompt.shape[1] + 40
        )  # the best beam may be one that says neither
        ours = with_drafter.generate(
            model, prompt, **options, **more, stop_strings=strings, tokenizer=tokenizer
        )
        assert torch.equal(ours, stock)
    config = GenerationConfig(**options, stop_strings=strings)
    stock = model.generate(prompt, generation_config=config, tokenizer=tokenizer)
    assert torch.equal(
        with_drafter.generate(model, prompt, generation_config=config, tokenizer=tokenizer), stock
    )
    assert config.stop_strings == strings
    with pytest.raises(ValueError, match="without their tokenizer"):
        with_drafter.generate(model, prompt, **options, stop_strings=strings)
    model.generation_config.stop_strings = strings
    for more in (options, {"generation_config": GenerationConfig(**options)}):
        stock = model.generate(prompt, **more, tokenizer=tokenizer)
        assert stock.shape[1] < prompt.shape[1] + 40
        assert torch.equal(with_drafter.generate(model, prompt, **more, tokenizer=tokenizer), stock)
    assert model.generation_config.stop_strings == strings


def test_streamers_and_the_pipeline(
    repeating_target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both of transformers' streamers get what stock gives them; the pipeline's text is its own."""
    model, tokenizer = copy.deepcopy(repeating_target.model), repeating_target.tokenizer
    inputs = {"input_ids": torch.tensor([repeating_target.chat("What do you know about otters?")])}
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    with_drafter, printed, pieces = eagle.transformers.generate_with("ngram"), [], []
    for more in ({}, {"custom_generate": with_drafter}):
        model.generate(**inputs, **options, **more, streamer=TextStreamer(tokenizer))
        printed.append(capsys.readouterr().out)
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        Thread(
            target=model.generate, kwargs={**inputs, **options, **more, "streamer": streamer}
        ).start()
        pieces.append(list(streamer))
    assert printed[0] == printed[1] and len(printed[0]) > 40
    assert pieces[0] == pieces[1] and len(pieces[0]) > 3
    assert with_drafter.acceptance_length > 1
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    messages = [{"role": "user", "content": "What do you know about otters?"}]
    stock = write(messages, max_new_tokens=24, do_sample=False)
    assert (
        write(messages, max_new_tokens=24, do_sample=False, custom_generate=with_drafter) == stock
    )
    served = pipeline(
        "text-generation", model=model, tokenizer=tokenizer, custom_generate=with_drafter
    )
    assert served(messages, max_new_tokens=24, do_sample=False) == stock


@pytest.mark.slow
def test_the_model_is_left_as_it_was() -> None:
    """Its weights' gradients, training, config and answers; a copy begins anew, and nothing keeps it alive."""
    model = build("llama")
    model.train()
    model.lm_head.eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    before = (
        [weight.requires_grad for weight in model.parameters()],
        [module.training for module in model.modules()],
    )
    config, names = model.config.to_dict(), {*vars(model)}
    stock = stock_generate(model, ONE)
    with_drafter = eagle.transformers.generate_with("ngram", budget=Budget(8, 4))
    assert torch.equal(model.generate(**ONE, **asked(), custom_generate=with_drafter), stock)
    after = (
        [weight.requires_grad for weight in model.parameters()],
        [module.training for module in model.modules()],
    )
    assert (
        before == after
        and model.config.to_dict() == config
        and {*vars(model)} - names == {"_eagle_held"}
    )
    held = vars(model)["_eagle_held"]
    target, drafter = held.target, held.drafters[with_drafter]
    assert eagle.transformers.last_traces(model) is with_drafter.traces
    model.generate(**ONE, **asked(), custom_generate=with_drafter)
    assert held.target is target and held.drafters[with_drafter] is drafter
    assert vars(copy.deepcopy(model))["_eagle_held"].target is None
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn(model.lm_head.weight.shape))
    stock = stock_generate(model, ONE)
    assert torch.equal(model.generate(**ONE, **asked(), custom_generate=with_drafter), stock)
    model.to(torch.float64)
    model.generate(**ONE, **asked(), custom_generate=with_drafter)
    assert held.target is not target and held.target.model.dtype == torch.float64
    gone = weakref.ref(model)
    del model, held, target, drafter
    gc.collect()
    assert gone() is None


def test_a_drafter_may_be_made_beforehand_and_bound_later(repeating_target: Target) -> None:
    """A head in memory; its acceptance is readable after the call."""
    from eagle.drafters.recurrent.eagle1 import Eagle1

    model = copy.deepcopy(repeating_target.model)
    head = Eagle1.for_target(Eagle1.Settings(), repeating_target.config, repeating_target.head)
    with_drafter = eagle.transformers.generate_with(head)
    stock = stock_generate(model, ONE)
    assert torch.equal(model.generate(**ONE, **asked(), custom_generate=with_drafter), stock)
    assert with_drafter.acceptance_length >= 1 and len(with_drafter.traces) == 1
    assert not head.frozen and all(module.training for module in head.modules())
    model = copy.deepcopy(model).to(torch.float64)
    stock = stock_generate(model, ONE)
    assert torch.equal(model.generate(**ONE, **asked(), custom_generate=with_drafter), stock)
    assert head.fc.weight.dtype == torch.float32


def test_the_package_is_there_after_import_eagle() -> None:
    """And not among the names of a star import, where it would hide another package."""
    assert (
        eagle.__getattr__("transformers") is eagle.transformers
        and "transformers" not in eagle.__all__
    )


def forget_streamer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing looks for the streamer."""
    monkeypatch.setattr("eagle.transformers.with_drafter.arguments_of_generate", dict)


def read_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors see what was committed after the forward whose logits are kept."""

    def prefix(output: Any, node: int) -> list[int]:
        tokens = output.tree.tokens.tolist()
        return output.text + [tokens[step] for step in output.tree.path(node)]

    monkeypatch.setattr(TargetOutput, "prefix", prefix)


def keep_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows have the first one's noise."""
    monkeypatch.setattr(
        "eagle.transformers.with_drafter.sampling_of", partial(of_first_row, sampling_of)
    )


def of_first_row(sampling: Any, *args: Any, **kwargs: Any) -> Any:
    """The sampling of another row."""
    return sampling(*args, **{**kwargs, "request": 0})


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (forget_streamer, partial(test_criteria_of_ones_own_see_every_step_of_all_rows, ONE, None)),
        (
            read_further,
            partial(
                test_scores_and_logits_are_the_stock_ones, ONE, False, {"no_repeat_ngram_size": 2}
            ),
        ),
        (keep_one_seed, test_several_answers_to_a_prompt_each_have_their_own_noise),
    ],
)
def test_a_fault_of_an_option_is_seen(
    plant: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparisons can fail."""
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
