"""What a chat template leaves out of a conversation is counted by name, and teaches nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chats import TEMPLATES, TWO, chat, section

from data_prep.chats.records import Conversation
from data_prep.chats.render import find_end_mark
from data_prep.check_mask import faults
from data_prep.conversations import Tally
from data_prep.tokens import STOP_IDS, examples_of, load_tokenizer
from eagle.recipe import Recipe
from tests.data_prep.test_tokens import CALL, TOOLS, run_texts

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
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "31 degrees Celsius"}
ANSWER = {"role": "assistant", "content": "Yes, it is."}
THOUGHT = {"role": "assistant", "content": "", "reasoning_content": "31 is hot."}
NOT_LEARNED = "an answer of which the template prints nothing: not learned"


@pytest.mark.parametrize(
    "turns",
    [
        [QUESTION, CALLS, RESULT, ANSWER],
        [QUESTION, THOUGHT, QUESTION, ANSWER],
        [QUESTION, {**ANSWER, "content": " \n"}, QUESTION, ANSWER],
        [QUESTION, {**ANSWER, "content": ""}, QUESTION, ANSWER],
    ],
    ids=["call", "thought", "blank", "empty"],
)
def test_an_answer_that_is_printed_empty_is_not_learned(
    base: Any, turns: list[dict[str, Any]]
) -> None:
    """Its end mark alone would teach to say nothing; the other answers of the conversation are learned."""
    base.chat_template, tally, conversation = VICUNA, Tally(), Conversation("c", turns)
    examples = examples_of(conversation, base, section(), tally)
    assert run_texts(examples, base) == [[" Yes, it is.</s>"]] and tally.noted[NOT_LEARNED] == 1
    assert faults(conversation, examples, base, section()) == []
    assert examples_of(Conversation("c", turns[:2]), base, section(), tally) == []
    assert tally.dropped == {"the template prints nothing of any answer": 1}


@pytest.mark.parametrize(
    ("template", "turns", "tools", "note"),
    [
        (VICUNA, [QUESTION, {**THOUGHT, "content": "Yes."}], None, "reasoning of an answer"),
        (
            LLAMA,
            [QUESTION, {**ANSWER, "content": "<think>31.</think>Yes."}],
            None,
            "reasoning of an answer",
        ),
        (LLAMA, [QUESTION, {**CALLS, "content": "Let me look."}], None, "text of an answer"),
        (
            VICUNA,
            [QUESTION, {**CALLS, "content": "Let me look."}],
            None,
            "a tool call of an answer",
        ),
        (
            VICUNA,
            [QUESTION, ANSWER, {"role": "system", "content": "In Latin."}, QUESTION, ANSWER],
            None,
            "a system turn",
        ),
        (VICUNA, [QUESTION, ANSWER, RESULT, ANSWER], None, "a tool turn"),
        (VICUNA, [QUESTION, ANSWER], TOOLS, "the list of tools"),
    ],
)
def test_what_the_template_leaves_out_is_named(
    base: Any, template: str, turns: list[dict[str, Any]], tools: Any, note: str
) -> None:
    """Counted once a conversation; the answers are learned as they are printed."""
    base.chat_template, tally = template, Tally()
    examples = examples_of(Conversation("c", turns, tools), base, section(), tally)
    assert tally.noted == {f"the template leaves out {note}": 1}
    assert faults(Conversation("c", turns, tools), examples, base, section()) == []


def test_nothing_is_named_where_all_is_printed(base: Any) -> None:
    """White space that is trimmed and text inside JSON are printed, too."""
    trims = "{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content | trim | tojson) + '<|end|>' }}{% endfor %}"
    base.chat_template, tally = trims + "{{ '<|assistant|>' if add_generation_prompt }}", Tally()
    examples_of(chat(' "Who"\n is ü? ', " One\n\ttwo. \n"), base, section(), tally)
    assert not tally.noted and not tally.dropped


@pytest.mark.parametrize(
    ("tail", "following", "stops", "mark"),
    [
        ("<|im_end|>\n", "<|im_end|>\n<|im_start|>user\n", (), "<|im_end|>"),
        (
            "<end_text><end_turn><turn><model>",
            "<end_text><end_turn><turn><user>",
            ("<end_turn>",),
            "<end_text><end_turn>",
        ),
        (
            "<done><closed><turn><model>",
            "<done><closed><turn><user>",
            ("<closed>",),
            "<done><closed>",
        ),
        ("<|end|>\n<|endoftext|>", "<|end|>\n<|user|>", ("<|endoftext|>",), "<|end|>"),
        ("<|end|>\n<|endoftext|>", "<|end|>\n<|endoftext|><|user|>", ("<|end|>",), "<|end|>"),
        ("\n<|end|>\n</s>", "\n<|end|>\n</s><|user|>", ("</s>",), "\n<|end|>\n</s>"),
        ("<|return|>", "<|end|><|start|>user", ("<|return|>",), "<|return|>"),
        ("</s>", "<|user|>", ("</s>",), "</s>"),
        ("<fin>\n<|user|>", "<fin>\n<|tool|>", (), "<fin>"),
        ("\n\n", "\n\nUser: ", (), "\n\n"),
        ("", "<|user|>", (), ""),
    ],
)
def test_the_end_mark_is_what_the_model_says_itself(
    tail: str, following: str, stops: tuple[str, ...], mark: str
) -> None:
    """Written out by hand: what follows the last answer, what follows one before a question, the known stop tokens."""
    assert find_end_mark(tail, following, stops) == mark


def test_a_tool_call_ends_with_its_mark(base: Any) -> None:
    """The next turn's opening behind it is the template's."""
    base.chat_template = LLAMA.replace("{% if add_generation_prompt %}", "").removesuffix(
        "{% endif %}"
    )
    conversation = Conversation("c", [QUESTION, CALLS, RESULT, ANSWER])
    examples = examples_of(conversation, base, section(), Tally())
    assert run_texts(examples, base) == [["weather<|end|>", "Yes, it is.<|end|>"]]
    assert faults(conversation, examples, base, section()) == []


def test_the_generation_config_says_where_answers_end(recipe: Recipe, tmp_path: Path) -> None:
    """A template's own name for an end is a stop token if the model's generation config lists it."""
    tokenizer = load_tokenizer(recipe)
    assert tokenizer.convert_tokens_to_ids("<|end|>") in tokenizer.init_kwargs[STOP_IDS]
    folder = tmp_path / "bare"
    tokenizer.save_pretrained(folder)
    bare = recipe.model_copy(
        update={"target": recipe.target.model_copy(update={"path": str(folder)})}
    )
    assert load_tokenizer(bare).init_kwargs[STOP_IDS] == []
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    tokenizer = load_tokenizer(bare)
    assert tokenizer.init_kwargs[STOP_IDS] == [7]
    stop = tokenizer.convert_ids_to_tokens(7)
    tokenizer.chat_template = TEMPLATES["next turn"].replace("<|end|>", f"<done>{stop}")
    texts = run_texts(examples_of(TWO, tokenizer, section(), Tally()), tokenizer)
    assert texts == [[f" One. \n<done>{stop}", f"Two.<done>{stop}"]]


def test_a_note_names_what_the_prompt_holds(base: Any) -> None:
    """A thought that the prompt opens and no answer closes: learned as printed, and the template is named for it."""
    base.chat_template, tally = TEMPLATES["opens a thought"], Tally()
    examples_of(TWO, base, section(), tally)
    assert tally.noted == {
        r"the generation prompt ends with '<think>\n', which the template prints before no answer": 1
    }


def test_a_template_that_needs_tools_says_so(base: Any) -> None:
    """A loop over tools that are not there is no mistake in the conversation."""
    base.chat_template, tally = TEMPLATES["calls"], Tally()
    assert examples_of(TWO, base, section(), tally) == []
    assert tally.dropped == {
        "the template refuses: it needs tools, and the conversation has none": 1
    }
