"""Every answer is learned up to the token at which a server stops, wherever the template prints that token."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import TWO, chat, section
from transformers import AutoTokenizer

from data_prep.chats.records import Conversation
from data_prep.chats.render import render_answers
from data_prep.chats.turns import Dropped
from data_prep.check_mask import faults
from data_prep.conversations import Tally
from data_prep.tokens import STOP_IDS, examples_of
from eagle.core.examples import Example
from tests.data_prep.test_tokens import CALL, TOOLS, run_texts

REAL = Path(__file__).parents[3] / "shared/data"
CALLS = "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}{% endfor %}"
TEMPLATES = {  # the end of an answer is printed only where another turn follows
    "closes later": (
        "{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '<|model_end|>' if ns.open }}{% set ns.open = false %}{{ '<|user_start|>' + m.content + '<|user_end|>' }}"
        "{% elif m.role == 'tool' %}{{ '[' + m.content + ']' }}{% else %}{{ '<|model_start|>' if not ns.open }}"
        "{% set ns.open = true %}{{ m.content }}" + CALLS + "{% endif %}{% endfor %}"
        "{{ '<|model_start|>' if add_generation_prompt }}"
    ),
    "opens with a stop": (
        "{% for m in messages %}{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\n' }}"
        "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
        + CALLS
        + "{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt }}"
    ),
    "between turns": (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
        + CALLS
        + "{{ '\n<|end|>\n' "
        "if not loop.last and m.role == 'assistant' }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
    ),
}
STOPS = {
    "closes later": ["<|model_end|>", "</call>"],
    "opens with a stop": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "between turns": ["<|end|>"],
}
RESULT = {"role": "tool", "content": "31 degrees"}
TALKS = {
    "one answer": chat("Who?", "One."),
    "two answers": TWO,
    "a call": Conversation(
        "c",
        [
            {"role": "user", "content": "Hot?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            RESULT,
            {"role": "assistant", "content": "Yes."},
        ],
        TOOLS,
    ),
    "thoughts": chat("Who?", "<think>hm</think>One.", "And?", "<think>hm</think>Two."),
}


@pytest.fixture
def stopping(base: Any, template: str, known: bool) -> Any:
    """The tiny tokenizer with the template; its stop tokens are known, or are but named as ends."""
    base.chat_template = TEMPLATES[template]
    base.add_tokens(STOPS[template], special_tokens=True)
    base.init_kwargs[STOP_IDS] = base.convert_tokens_to_ids(STOPS[template]) if known else []
    return base


def runs_of_ids(examples: list[Example]) -> list[list[int]]:
    """The ids of every supervised run."""
    runs = []
    for example in examples:
        pairs = zip(example.loss_mask.tolist(), example.tokens.tolist(), strict=True)
        runs += [
            [token for _, token in group]
            for on, group in groupby(pairs, lambda pair: pair[0])
            if on
        ]
    return runs


KNOWN = [(name, talk, True) for name in TEMPLATES for talk in TALKS]
NAMED = [(name, "two answers", False) for name in ("closes later", "between turns")]


@pytest.mark.parametrize(("template", "talk", "known"), [*KNOWN, *NAMED])
def test_a_server_stops_where_an_answer_is_learned_to_end(
    stopping: Any, template: str, talk: str
) -> None:
    """A server that says the supervised tokens stops at the last of each answer, and at none before."""
    conversation, tally = TALKS[talk], Tally()
    examples = examples_of(conversation, stopping, section(), tally)
    stops = set(stopping.convert_tokens_to_ids(STOPS[template]))
    runs = runs_of_ids(examples)
    assert len(runs) == sum(turn["role"] == "assistant" for turn in conversation.messages)
    assert [[token in stops for token in run] for run in runs] == [
        [False] * (len(run) - 1) + [True] for run in runs
    ]
    assert faults(conversation, examples, stopping, section()) == []
    assert "the template prints no end-of-turn mark" not in tally.noted
    without = [Example(each.tokens, each.loss_mask & each.loss_mask.roll(-1)) for each in examples]
    assert len(faults(conversation, without, stopping, section())) >= len(runs)
    beyond = [Example(each.tokens, each.loss_mask | each.loss_mask.roll(1)) for each in examples]
    if any(
        not torch.equal(one.loss_mask, other.loss_mask)
        for one, other in zip(beyond, examples, strict=True)
    ):
        assert faults(conversation, beyond, stopping, section())


@pytest.mark.parametrize(("template", "known"), [("opens with a stop", False)])
def test_a_mark_that_nothing_prints_is_noted(stopping: Any) -> None:
    """The opening of the next turn is no end where nothing says that it is a stop token."""
    tally = Tally()
    examples = examples_of(TWO, stopping, section(), tally)
    assert run_texts(examples, stopping) == [[" One. \n", "Two."]]
    assert tally.noted == {"the template prints no end-of-turn mark": 1}
    assert faults(TWO, examples, stopping, section()) == []


OPENS_UNASKED = (  # every print ends with an empty thought, which no answer has
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
    "{{ '<|answer|>' + m.content + '<|/answer|>' }}{% else %}{{ m.content }}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "<|assistant|><|start_thought|><|end_thought|>"
)
SHOWS_LAST_OTHERWISE = (  # the question that is to be answered, but for an opening of the answer
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[SYS]' + m.content + '[/SYS]' if loop.last else "
    "'[INST]' + m.content + '[/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)


def test_an_opening_that_is_always_printed_is_no_turn(base: Any) -> None:
    """Answers follow the prompt of serving, its empty thought with them."""
    base.chat_template, tally = OPENS_UNASKED, Tally()
    conversation = chat("Who?", "One.", "And?", "Two.")
    examples = examples_of(conversation, base, section(), tally)
    assert run_texts(examples, base) == [
        [f"<|answer|>{word}<|/answer|><|end|>"] for word in ("One.", "Two.")
    ]
    assert not tally.dropped and faults(conversation, examples, base, section()) == []
    prompt = base.apply_chat_template(
        conversation.messages[:1], tokenize=False, add_generation_prompt=True
    )
    assert base.decode(examples[0].tokens).startswith(prompt)


def test_a_question_that_is_printed_otherwise_once_answered_is_named(base: Any) -> None:
    """The reason says what becomes what."""
    base.chat_template, tally = SHOWS_LAST_OTHERWISE, Tally()
    assert examples_of(chat("Who?", "One."), base, section(), tally) == []
    reason = "the template prints the turns before message 2 otherwise once it is answered: '[SYS]' becomes '[INST]'"
    assert tally.dropped == {reason: 1}


@pytest.mark.slow
@pytest.mark.skipif(
    not REAL.is_dir(), reason="no folder of real templates and conversations beside this checkout"
)
def test_real_templates_print_a_stop_token_of_theirs() -> None:
    """Where a stop token opens the next turn, the last answer ends with it as the first does."""
    tokenizer = AutoTokenizer.from_pretrained(REAL / "tokenizers/gpt2-chatml")
    stops = {"GLM": ["<|endoftext|>", "<|user|>", "<|observation|>"], "Apriel-1.6": ["<|end|>"]}
    checked = 0
    for file in sorted((REAL / "chat_templates").rglob("*.jinja")):
        for known in (marks for name, marks in stops.items() if name in file.name):
            tokenizer.chat_template = file.read_text(encoding="utf-8")
            for conversation in TALKS.values():
                try:
                    texts = render_answers(conversation, tokenizer, section(), known, set())
                except Dropped:
                    continue
                answers = [part.text[start:end] for part in texts for start, end in part.spans]
                assert all(answer.endswith(tuple(known)) for answer in answers), (
                    file.name,
                    answers,
                )
                checked += 1
    assert checked >= 10
