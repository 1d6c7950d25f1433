"""Chat templates of every kind that a mask has to fit, and conversations to print with them."""

from __future__ import annotations

from typing import Any

from data_prep.chats.records import Conversation
from eagle.recipe import DataSection, Recipe

ASK = "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
TEMPLATES = {
    # marks around every turn, whose end belongs to the answer
    "chatml": "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    + ASK,
    # an answer's spaces at both ends are not printed
    "trims": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content | trim + '<|end|>\n' }}{% endfor %}"
    + ASK,
    # no marks of turns but words, and the end-of-text token after answers
    "vicuna": "{% for m in messages %}{{ 'USER: ' + m.content + ' ' if m.role == 'user' else "
    "'ASSISTANT: ' + m.content + eos_token }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    # nothing ends an answer but two line breaks
    "no mark": "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}",
    # an empty thought before the last answer alone
    "thinks": "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if loop.last and m.role == 'assistant' %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|end|>\n' }}{% endfor %}" + ASK,
    # the prompt opens a thought that the answer goes on with
    "opens a thought": "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}",
    # the prompt holds a whole empty thought
    "closed thought": "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n</think>' }}{% endif %}",
    # answers close a thought that the prompt opens
    "skipped thought": "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{{ '</think>' if m.role == 'assistant' }}{{ m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}",
    # the next answer's mark stands after every conversation
    "next turn": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>' }}{% endfor %}"
    "{{ '<|assistant|>\n' }}",
    # the same, with marks that the tokenizer does not know
    "next turn, unknown marks": "{% for m in messages %}{{ '<turn><' + m.role + '>' + m.content }}"
    "{{ '<end_text><end_turn>' }}{% endfor %}{{ '<turn><assistant>' }}",
    # a conversation ends with its own token, which no answer has
    "end of text": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}",
    # only the last answer ends with the end-of-text token
    "another mark for the last": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{{ eos_token if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}" + ASK,
    # what is printed depends on an argument of the template
    "dated": "{{ 'Today: ' + date + '\n' }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>' }}"
    "{% endfor %}" + ASK,
    # roles that do not alternate are refused
    "alternates": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>' }}"
    "{% endfor %}" + ASK,
    # the template itself marks what is generated
    "tags": "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|end|>\n' }}{% endif %}"
    "{% endfor %}" + ASK,
    # tools are listed first, and their calls are part of answers
    "calls": "{% for t in tools %}{{ 'Tool: ' + t.function.name + '\n' }}{% endfor %}{% for m in messages %}"
    "{{ '<|' + m.role + '|>\n' + m.content }}{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + "
    "(c.function.arguments | tojson) + '</call>' }}{% endfor %}{{ '<|end|>\n' }}{% endfor %}" + ASK,
}
DATED: dict[str, Any] = {"template_kwargs": {"date": "Monday"}}


def chat(*said: str, **more: Any) -> Conversation:
    """A conversation of alternating turns."""
    turns = [
        {"role": ("user", "assistant")[place % 2], "content": text}
        for place, text in enumerate(said)
    ]
    return Conversation("c", turns, **more)


TWO = chat("Who?", " One. \n", "And?", "Two.")


def section(**values: Any) -> DataSection:
    """Settings of the data."""
    return DataSection(train="-", **{**DATED, **values})


def changed(recipe: Recipe, **data: Any) -> Recipe:
    """The recipe with other settings of its data."""
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=data)})
