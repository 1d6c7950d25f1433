"""Every answer is learned up to the token at which a server stops, wherever the template prints that token."""

from __future__ import annotations

from itertools import groupby, product
from typing import Any

import pytest

from data_prep.chats.records import Conversation
from data_prep.check_mask import faults
from data_prep.conversations import Tally
from data_prep.tokens import STOP_IDS, examples_of
from eagle.core.examples import Example
from tests.chats import TWO, chat, section
from tests.data_prep.test_tokens import CALL, TOOLS, dropped_reason, read_supervised

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
        + "{% endfor %}{{ '<|assistant|>\n' if add_generation_prompt }}"
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
CALLING = [
    {"role": "user", "content": "Hot?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "31 degrees"},
    {"role": "assistant", "content": "Yes."},
]
TALKS = {
    "one answer": chat("Who?", "One."),
    "two answers": TWO,
    "a call": Conversation("c", CALLING, TOOLS),
    "thoughts": chat("Who?", "<think>hm</think>One.", "And?", "<think>hm</think>Two."),
}


def use_template(tokenizer: Any, template: str, is_known: bool) -> Any:
    """Return the tokenizer with a template whose stop tokens are known, or only named as ends."""
    tokenizer.chat_template = TEMPLATES[template]
    tokenizer.add_tokens(STOPS[template], special_tokens=True)
    # known from the generation config, else guessed from the names
    stop_ids = tokenizer.convert_tokens_to_ids(STOPS[template])
    tokenizer.init_kwargs[STOP_IDS] = stop_ids if is_known else []
    return tokenizer


KNOWN = [(*pair, True) for pair in product(TEMPLATES, TALKS)]
NAMED = [(name, "two answers", False) for name in ("closes later", "between turns")]


@pytest.mark.parametrize(("template", "talk", "is_known"), [*KNOWN, *NAMED])
def test_a_server_stops_where_an_answer_is_learned_to_end(
    base: Any,
    template: str,
    talk: str,
    is_known: bool,
) -> None:
    """A server that says the supervised tokens stops at the last of each answer, and at none before."""
    tokenizer = use_template(base, template, is_known)
    conversation = TALKS[talk]
    tally = Tally()
    # what a server would stop at is known from its tokens alone
    examples = examples_of(conversation, tokenizer, section(), tally)
    stops = tokenizer.convert_tokens_to_ids(STOPS[template])
    num_runs = 0
    for example in examples:
        pairs = zip(
            example.loss_mask.tolist(),
            example.tokens.tolist(),
            strict=True,
        )
        for is_supervised, group in groupby(pairs, lambda pair: pair[0]):
            if is_supervised:
                is_stop = [token in stops for _, token in group]
                assert is_stop == [False] * (len(is_stop) - 1) + [True]
                num_runs += 1
    assert num_runs == sum(turn["role"] == "assistant" for turn in conversation.messages)
    assert faults(conversation, examples, tokenizer, section()) == []
    assert "the template prints no end-of-turn mark" not in tally.noted
    # planted faults: no end marks, and a token too many
    short = [Example(each.tokens, each.loss_mask & each.loss_mask.roll(-1)) for each in examples]
    assert (
        len(
            faults(
                conversation,
                short,
                tokenizer,
                section(),
            )
        )
        >= num_runs
    )
    long = [Example(each.tokens, each.loss_mask | each.loss_mask.roll(1)) for each in examples]
    assert faults(conversation, long, tokenizer, section())


def test_a_mark_that_nothing_prints_is_noted(base: Any) -> None:
    """The opening of the next turn is no end where nothing says that it is a stop token."""
    tokenizer = use_template(base, "opens with a stop", is_known=False)
    tally = Tally()
    assert read_supervised(
        TWO,
        tokenizer,
        tally,
    ) == [[" One. \n", "Two."]]
    assert tally.noted == {"the template prints no end-of-turn mark": 1}


OPENS_UNASKED = (  # every print ends with an empty thought, which no answer has
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
    "{{ '<|answer|>' + m.content + '<|/answer|>' }}{% else %}{{ m.content }}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "<|assistant|><|start_thought|><|end_thought|>"
)
SHOWS_LAST_OTHERWISE = (  # the question that is to be answered, without an opening of the answer
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[SYS]' + m.content + '[/SYS]' if loop.last else "
    "'[INST]' + m.content + '[/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)


def test_an_opening_that_is_always_printed_is_no_turn(base: Any) -> None:
    """Answers follow the prompt of serving, its empty thought with them."""
    base.chat_template = OPENS_UNASKED
    conversation = chat("Who?", "One.", "And?", "Two.")
    spoken = [[f"<|answer|>{word}<|/answer|><|end|>"] for word in ("One.", "Two.")]
    assert read_supervised(conversation, base) == spoken
    # serving prints the question with the empty thought
    question = conversation.messages[:1]
    prompt = base.apply_chat_template(
        question,
        tokenize=False,
        add_generation_prompt=True,
    )
    examples = examples_of(conversation, base, section(), Tally())
    assert base.decode(examples[0].tokens).startswith(prompt)


def test_a_question_that_is_printed_otherwise_once_answered_is_named(base: Any) -> None:
    """The reason names what becomes what."""
    base.chat_template = SHOWS_LAST_OTHERWISE
    reason = dropped_reason(chat("Who?", "One."), base)
    assert reason.startswith("the template prints the turns before message 2 otherwise")
    assert reason.endswith("'[SYS]' becomes '[INST]'")
