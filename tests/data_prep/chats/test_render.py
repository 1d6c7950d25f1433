"""What a chat template leaves out of a conversation is counted by name, and teaches nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.chats.records import Conversation
from data_prep.chats.render import find_end_mark
from data_prep.conversations import Tally
from data_prep.tokens import STOP_IDS, examples_of, load_tokenizer
from eagle.recipe import Recipe
from tests.chats import TEMPLATES, TWO, chat, section
from tests.data_prep.test_tokens import CALL, TOOLS, dropped_reason, read_supervised

VICUNA = (  # only users and assistants are printed, and of them only text
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}{% elif m.role == 'assistant' %}"
    "{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
LLAMA = (  # a call or the text, never both; the last thought of a text is cut off
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
QUESTION = {"role": "user", "content": "Is it hot?"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "31 degrees Celsius"}
ANSWER = {"role": "assistant", "content": "Yes, it is."}
SYSTEM = {"role": "system", "content": "In Latin."}
THOUGHT = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "31 is hot.",
}
BLANK = {"role": "assistant", "content": " \n"}


@pytest.mark.parametrize(
    "turns",
    [
        [QUESTION, CALLING, RESULT, ANSWER],
        [QUESTION, THOUGHT, QUESTION, ANSWER],
        [QUESTION, BLANK, QUESTION, ANSWER],
    ],
    ids=["call", "thought", "blank"],
)
def test_an_answer_that_is_printed_empty_is_not_learned(
    base: Any, turns: list[dict[str, Any]]
) -> None:
    """Its end mark alone would teach to say nothing; the other answers are learned."""
    base.chat_template = VICUNA
    tally = Tally()
    conversation = Conversation("c", turns)
    assert read_supervised(
        conversation,
        base,
        tally,
    ) == [[" Yes, it is.</s>"]]
    assert tally.noted["an answer of which the template prints nothing: not learned"] == 1
    reason = "the template prints nothing of any answer"
    assert dropped_reason(Conversation("c", turns[:2]), base) == reason


@pytest.mark.parametrize(
    ("template", "turns", "tools", "part"),
    [
        (VICUNA, [{**THOUGHT, "content": "Yes."}], None, "reasoning of an answer"),
        (LLAMA, [{**ANSWER, "content": "<think>31.</think>Yes."}], None, "reasoning of an answer"),
        (LLAMA, [{**CALLING, "content": "Let me look."}], None, "text of an answer"),
        (VICUNA, [{**CALLING, "content": "Let me look."}], None, "a tool call of an answer"),
        (
            VICUNA,
            [
                ANSWER,
                SYSTEM,
                QUESTION,
                ANSWER,
            ],
            None,
            "a system turn",
        ),
        (VICUNA, [ANSWER, RESULT, ANSWER], None, "a tool turn"),
        (VICUNA, [ANSWER], TOOLS, "the list of tools"),
    ],
)
def test_what_the_template_leaves_out_is_named(
    base: Any,
    template: str,
    turns: list[dict[str, Any]],
    tools: Any,
    part: str,
) -> None:
    """It is counted once a conversation; the answers are learned as they are printed."""
    base.chat_template = template
    tally = Tally()
    read_supervised(
        Conversation("c", [QUESTION, *turns], tools),
        base,
        tally,
    )
    assert tally.noted == {f"the template leaves out {part}": 1}


def test_nothing_is_named_where_all_is_printed(base: Any) -> None:
    """White space that is trimmed and text inside JSON are printed, too."""
    trims = "{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content | trim | tojson) + '<|end|>' }}{% endfor %}"
    # trimming and JSON change the text, and lose nothing of it
    base.chat_template = trims + "{{ '<|assistant|>' if add_generation_prompt }}"
    tally = Tally()
    examples_of(
        chat(' "Who"\n is ü? ', " One\n\ttwo. \n"),
        base,
        section(),
        tally,
    )
    assert not tally.noted
    assert not tally.dropped


# what follows the last answer, what follows one before a question, a known stop token, and the end mark
# fmt: off
MARKS = [
    ("<|im_end|>\n", "<|im_end|>\n<|im_start|>user\n", "", "<|im_end|>"),
    ("<end_text><end_turn><turn><model>", "<end_text><end_turn><turn><user>", "<end_turn>", "<end_text><end_turn>"),
    ("<|end|>\n<|endoftext|>", "<|end|>\n<|user|>", "<|endoftext|>", "<|end|>"),
    ("<|end|>\n<|endoftext|>", "<|end|>\n<|endoftext|><|user|>", "<|end|>", "<|end|>"),
    ("\n<|end|>\n</s>", "\n<|end|>\n</s><|user|>", "</s>", "\n<|end|>\n</s>"),
    ("<|return|>", "<|end|><|start|>user", "<|return|>", "<|return|>"),
    ("</s>", "<|user|>", "</s>", "</s>"),
    ("<fin>\n<|user|>", "<fin>\n<|tool|>", "", "<fin>"),
    ("\n\n", "\n\nUser: ", "", "\n\n"),
    ("", "<|user|>", "", ""),
]
# fmt: on


@pytest.mark.parametrize(("tail", "following", "stop", "mark"), MARKS)
def test_the_end_mark_is_what_the_model_says_itself(
    tail: str,
    following: str,
    stop: str,
    mark: str,
) -> None:
    """The opening of the next turn is no part of it."""
    assert (
        find_end_mark(
            tail,
            following,
            [stop] if stop else [],
        )
        == mark
    )


def test_a_tool_call_ends_with_its_mark(base: Any) -> None:
    """The next turn's opening, which this template always prints, is not the model's."""
    # as Llama 4 and others print it, asked or not
    always = LLAMA.replace("{% if add_generation_prompt %}", "").removesuffix("{% endif %}")
    base.chat_template = always
    conversation = Conversation(
        "c",
        [
            QUESTION,
            CALLING,
            RESULT,
            ANSWER,
        ],
    )
    assert read_supervised(conversation, base) == [["weather<|end|>", "Yes, it is.<|end|>"]]


def test_the_generation_config_says_where_answers_end(recipe: Recipe, tmp_path: Path) -> None:
    """A template's own name for an end is a stop token if the model's generation config lists it."""
    tokenizer = load_tokenizer(recipe)
    assert tokenizer.convert_tokens_to_ids("<|end|>") in tokenizer.init_kwargs[STOP_IDS]
    # a folder with a tokenizer and no generation config
    tokenizer.save_pretrained(tmp_path / "bare")
    target = recipe.target.model_copy(update={"path": str(tmp_path / "bare")})
    bare = recipe.model_copy(update={"target": target})
    assert load_tokenizer(bare).init_kwargs[STOP_IDS] == []
    config = tmp_path / "bare/generation_config.json"
    config.write_text(json.dumps({"eos_token_id": 7}))
    tokenizer = load_tokenizer(bare)
    assert tokenizer.init_kwargs[STOP_IDS] == [7]
    stop = tokenizer.convert_ids_to_tokens(7)
    tokenizer.chat_template = TEMPLATES["next turn"].replace("<|end|>", f"<done>{stop}")
    spoken = [[f" One. \n<done>{stop}", f"Two.<done>{stop}"]]
    assert read_supervised(TWO, tokenizer) == spoken
