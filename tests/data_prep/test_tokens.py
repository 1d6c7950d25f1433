"""The loss mask marks what the template prints for the assistant."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from chats import ASK, TEMPLATES, TWO, changed, chat, section
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from data_prep import tokens
from data_prep.chats.records import Conversation
from data_prep.check_mask import faults
from data_prep.conversations import Tally
from data_prep.tokens import examples_of, load_tokenizer, tokenize_data
from eagle.core.examples import Example
from eagle.recipe import Recipe

SPOKEN = {  # what each template makes of answers " One. \n" and "Two.", an example a list
    "chatml": [[" One. \n<|end|>", "Two.<|end|>"]],
    "trims": [["One.<|end|>", "Two.<|end|>"]],
    "vicuna": [["  One. \n</s>", " Two.</s>"]],
    "no mark": [[" One. \n\n\n", "Two.\n\n"]],
    "thinks": [["<think>\n\n</think>\n\n One. \n<|end|>"], ["<think>\n\n</think>\n\nTwo.<|end|>"]],
    "opens a thought": [[" One. \n<|end|>", "Two.<|end|>"]],
    "closed thought": [[" One. \n<|end|>"], ["Two.<|end|>"]],
    "skipped thought": [["</think> One. \n<|end|>"], ["</think>Two.<|end|>"]],
    "next turn": [[" One. \n<|end|>", "Two.<|end|>"]],
    "next turn, unknown marks": [[" One. \n<end_text><end_turn>", "Two.<end_text><end_turn>"]],
    "end of text": [[" One. \n<|end|>", "Two.<|end|>"]],
    "another mark for the last": [[" One. \n</s>"], ["Two.</s>"]],
    "dated": [[" One. \n<|end|>", "Two.<|end|>"]],
    "alternates": [[" One. \n<|end|>", "Two.<|end|>"]],
    "tags": [[" One. \n<|end|>", "Two.<|end|>"]],
}


OPEN_THOUGHT = (
    r"the generation prompt ends with '<think>\n', which the template prints before no answer"
)


def run_texts(examples: list[Example], tokenizer: Any) -> list[list[str]]:
    """What the supervised tokens of each example say, run by run."""
    texts = []
    for example in examples:
        ids = iter(example.tokens.tolist())
        runs = [
            (on, [next(ids) for _ in group]) for on, group in groupby(example.loss_mask.tolist())
        ]
        texts.append([tokenizer.decode(run) for on, run in runs if on])
    return texts


@pytest.mark.parametrize("name", SPOKEN)
def test_supervised_is_what_the_template_prints_for_the_assistant(
    using: Callable[[str], Any], name: str
) -> None:
    """Written out by hand for each kind of template; the inspector agrees."""
    tokenizer, tally = using(name), Tally()
    examples = examples_of(TWO, tokenizer, section(), tally)
    assert run_texts(examples, tokenizer) == SPOKEN[name]
    assert not tally.dropped and faults(TWO, examples, tokenizer, section()) == []
    assert tally.noted["history rewritten by the template: several examples"] == (
        len(SPOKEN[name]) > 1
    )
    assert tally.noted[OPEN_THOUGHT] == (name == "opens a thought")


@pytest.mark.parametrize("name", SPOKEN)
def test_an_answer_that_was_cut_off_teaches_no_end_mark(
    using: Callable[[str], Any], name: str
) -> None:
    """What the template prints behind it is not the target's; the inspector agrees, and finds a mark that is there."""
    tokenizer, tally = using(name), Tally()
    last = {**TWO.messages[-1], "finish_reason": "length", "weight": 1}
    cut_off = Conversation(TWO.id, [*TWO.messages[:-1], last])
    examples = examples_of(cut_off, tokenizer, section(), tally)
    *whole, [*runs, spoken] = SPOKEN[name]
    assert run_texts(examples, tokenizer) == [
        *whole,
        [*runs, spoken[: spoken.index("Two.") + len("Two.")]],
    ]
    assert not tally.dropped and faults(cut_off, examples, tokenizer, section()) == []
    assert faults(cut_off, examples_of(TWO, tokenizer, section(), Tally()), tokenizer, section())


def test_an_example_is_the_very_prompt_that_serving_shows(using: Callable[[str], Any]) -> None:
    """Where history is rewritten, an answer follows the history as shown when it is asked for; no BOS is added."""
    tokenizer = using("thinks")
    first, second = examples_of(TWO, tokenizer, section(), Tally())
    for example, place in ((first, 1), (second, 3)):
        prompt = tokenizer.apply_chat_template(TWO.messages[:place], add_generation_prompt=True)[
            "input_ids"
        ]
        before = int(example.loss_mask.int().argmax())
        assert example.tokens[:before].tolist() == prompt and tokenizer.bos_token_id not in prompt
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id


def test_masks_equal_those_of_generation_tags(using: Callable[[str], Any]) -> None:
    """Where a template has tags, transformers' own mask is the truth."""
    tokenizer = using("tags")
    (example,) = examples_of(TWO, tokenizer, section(), Tally())
    expected = tokenizer.apply_chat_template(TWO.messages, return_assistant_tokens_mask=True)
    assert example.tokens.tolist() == expected["input_ids"]
    assert (
        example.loss_mask.int().tolist() == expected["assistant_masks"]
        and sum(expected["assistant_masks"]) > 0
    )


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def test_calls_are_supervised_and_their_results_never(using: Callable[[str], Any]) -> None:
    """The tools of a record reach every render: without them this template fails."""
    turns = [
        {"role": "user", "content": "Hot?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]
    turns += [{"role": "tool", "content": "31 degrees"}, {"role": "assistant", "content": "Yes."}]
    tokenizer, tally = using("calls"), Tally()
    conversation = Conversation("c", turns, TOOLS)
    examples = examples_of(conversation, tokenizer, section(), tally)
    assert run_texts(examples, tokenizer) == [
        ['<call>weather{"city": "Rome"}</call><|end|>', "Yes.<|end|>"]
    ]
    assert faults(conversation, examples, tokenizer, section()) == []
    assert "Tool: weather" in tokenizer.decode(examples[0].tokens)
    assert examples_of(Conversation("c", turns), tokenizer, section(), tally) == []
    assert "the template refuses" in next(iter(tally.dropped))


def test_template_arguments_reach_every_render(using: Callable[[str], Any]) -> None:
    """This template fails without its date."""
    tokenizer, tally = using("dated"), Tally()
    (example,) = examples_of(TWO, tokenizer, section(), tally)
    assert tokenizer.decode(example.tokens).startswith("Today: Monday")
    assert examples_of(TWO, tokenizer, section(template_kwargs={}), tally) == []
    assert list(tally.dropped) == ["the template refuses: 'date' is undefined"]


@pytest.mark.parametrize(
    ("conversation", "data", "reason"),
    [
        (
            Conversation("c", [*TWO.messages, *TWO.messages[-1:]]),
            {},
            "the template refuses: roles must alternate",
        ),
        (
            Conversation("c", [{**turn, "weight": 0} for turn in TWO.messages]),
            {},
            "every answer has weight 0",
        ),
        (
            Conversation("c", [{**turn, "weight": 0} for turn in TWO.messages]),
            {"turns": "last"},
            "the last answer has",
        ),
        (chat("Who?" * 40, "One."), {"max_length": 8}, "nothing supervised within max_length"),
        (chat("Who?", "half \ud83d"), {}, "half a surrogate pair"),
        (chat("Who?"), {}, "no assistant turn"),
    ],
)
def test_a_drop_has_a_reason(
    using: Callable[[str], Any], conversation: Conversation, data: dict[str, Any], reason: str
) -> None:
    """Nothing is dropped in silence."""
    tally = Tally()
    assert examples_of(conversation, using("alternates"), section(**data), tally) == []
    assert sum(tally.dropped.values()) == 1 and next(iter(tally.dropped)).startswith(reason)


RETELLS = (  # a result before a question for more is printed otherwise than one before an answer
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|user|>\n' + m.content + ('' if loop.last else ' (read)') }}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{{ '<|end|>\n' }}{% endfor %}"
    + ASK
)
FORGETS = "{% for m in messages %}{{ m.content + eos_token if loop.last or m.role == 'assistant' }}{% endfor %}"


def test_turns_before_are_read_as_they_were_when_the_answer_was_asked_for(base: Any) -> None:
    """A template that prints them otherwise later gives the prompt of serving, or a reason."""
    turns = [
        {"role": role, "content": role.title()}
        for role in ("user", "assistant", "tool", "assistant")
    ]
    conversation, tally = Conversation("c", turns), Tally()
    base.chat_template = RETELLS
    examples = examples_of(conversation, base, section(), tally)
    prompt = base.apply_chat_template(turns[:3], tokenize=False, add_generation_prompt=True)
    assert [base.decode(example.tokens) for example in examples] == [prompt + "Assistant<|end|>\n"]
    assert "(read)" not in prompt
    assert run_texts(examples, base) == [["Assistant<|end|>", "Assistant<|end|>"]]
    assert tally.noted["the turns before an answer are printed otherwise once it is given"] == 1
    assert faults(conversation, examples, base, section()) == []
    base.chat_template = FORGETS
    assert examples_of(TWO, base, section(), tally) == []
    assert list(tally.dropped) == [
        "the template prints the turns before message 2 otherwise once it is answered"
    ]


def test_which_answers_are_learned(using: Callable[[str], Any]) -> None:
    """All of them, those that have a weight, or the last."""
    tokenizer = using("chatml")
    unweighted = Conversation("c", [dict(turn) for turn in TWO.messages])
    unweighted.messages[1]["weight"] = 0
    for conversation, data in ((TWO, section(turns="last")), (unweighted, section())):
        examples = examples_of(conversation, tokenizer, data, Tally())
        assert run_texts(examples, tokenizer) == [["Two.<|end|>"]]
        assert faults(conversation, examples, tokenizer, data) == []


def test_what_is_remarkable_is_noted(using: Callable[[str], Any]) -> None:
    """Kept, and counted."""
    tokenizer, tally = using("chatml"), Tally()
    (example,) = examples_of(chat("Who?", "One. " * 30), tokenizer, section(max_length=20), tally)
    assert len(example.tokens) == 20 and tally.noted["cut at max_length"] == 1
    assert faults(chat("Who?", "One. " * 30), [example], tokenizer, section(max_length=20)) == []
    examples_of(chat("What is <|end|>?", "A mark."), tokenizer, section(), tally)
    assert tally.noted["special-token text inside content"] == 1
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    )
    examples_of(chat("Who?", "One."), tokenizer, section(), tally)
    assert (
        tally.noted["everything is supervised"]
        == tally.noted["the template prints no end-of-turn mark"]
        == 1
    )


def test_a_token_across_the_start_is_supervised_and_noted(base: Any) -> None:
    """Serving tokenises the prompt alone, so such a token is one that it never shows."""
    base.chat_template = "{% for m in messages %}{{ m.role + ' th' + m.content }}{% endfor %}"
    base.chat_template += "{% if add_generation_prompt %}assistant th{% endif %}"
    tally = Tally()
    examples = examples_of(chat("x", "e method"), base, section(), tally)
    assert tally.noted["a token straddles the start of an answer"] == 1
    assert run_texts(examples, base) == [[" the method"]]
    assert faults(chat("x", "e method"), examples, base, section()) == []


def test_offsets_that_leave_out_spaces_lose_no_token() -> None:
    """Some families' post-processors trim them; an answer that begins with white space shows it."""
    letters = {
        letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = TEMPLATES["vicuna"]
    assert tokenizer(" x", return_offsets_mapping=True)["offset_mapping"] == [(0, 0), (1, 2)]
    assert tokens.encode(" x", tokenizer)[1].tolist() == [[0, 1], [1, 2]]
    (example,) = examples_of(chat("Who?", " é\n"), tokenizer, section(), Tally())
    assert (
        tokens.encode("  é\n</s>", tokenizer)[0].tolist()
        == example.tokens[example.loss_mask].tolist()
    )


def test_slow_tokenizers_are_refused() -> None:
    """They cannot say which characters a token stands for."""
    with pytest.raises(ValueError, match="ByT5Tokenizer says no offsets: expected a fast"):
        examples_of(TWO, ByT5Tokenizer(), section(), Tally())


def test_a_recipe_names_the_template(recipe: Recipe, tmp_path: Path) -> None:
    """A file replaces the tokenizer's own; none at all, or no such file, is refused."""
    assert "<|" in load_tokenizer(recipe).chat_template
    (tmp_path / "mine.jinja").write_text(TEMPLATES["vicuna"])
    assert (
        load_tokenizer(changed(recipe, template=str(tmp_path / "mine.jinja"))).chat_template
        == TEMPLATES["vicuna"]
    )
    with pytest.raises(ValueError, match=r"no chat template at data.template = nowhere"):
        load_tokenizer(changed(recipe, template="nowhere"))
    AutoTokenizer.from_pretrained(recipe.target.path, chat_template="x").save_pretrained(
        tmp_path / "bare"
    )
    (tmp_path / "bare/chat_template.jinja").unlink()
    with pytest.raises(
        ValueError, match=r"has no chat template: name a Jinja file in data\.template"
    ):
        load_tokenizer(
            recipe.model_copy(
                update={"target": recipe.target.model_copy(update={"path": tmp_path / "bare"})}
            )
        )


def test_all_data_become_examples_or_reasons(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kept and dropped add up; nothing learned is an error with the table, everything learned a warning."""
    tokenizer = load_tokenizer(recipe)
    examples, tally = tokenize_data(recipe, tokenizer)
    assert (len(examples), tally.kept) == (3, 3) and "warning" not in capsys.readouterr().out
    _, tally = tokenize_data(changed(recipe, max_length=12), tokenizer)
    assert (tally.kept, tally.dropped) == (3 - tally.dropped.total(), tally.dropped)
    tokenizer.chat_template = TEMPLATES["dated"]
    with pytest.raises(
        ValueError, match=r"gives nothing to learn from(.|\n)*'date' is undefined +3"
    ):
        tokenize_data(recipe, tokenizer)
    with pytest.raises(
        ValueError, match=r"data.jsonl:1: the template refuses: 'date' is undefined"
    ):
        tokenize_data(recipe, tokenizer, strict=True)
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    )
    tokenize_data(recipe, tokenizer)
    assert "every token is supervised" in capsys.readouterr().out


def test_answers_that_are_not_there_yet_are_asked_for(tmp_path: Path) -> None:
    """Who skips a stage is told which."""
    missing = str(tmp_path / "answers.jsonl")
    recipe = Recipe.load(
        "recipes/tiny/eagle1.yaml", [f"data.train={missing}", f"regenerate.out={missing}"]
    )
    with pytest.raises(ValueError, match=r"answers\.jsonl is not there: run `eagle regenerate"):
        tokenize_data(recipe, None)
