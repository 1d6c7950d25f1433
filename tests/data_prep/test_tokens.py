"""The loss mask marks what the template prints for the assistant."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from data_prep import tokens
from data_prep.chats.records import Conversation
from data_prep.check_mask import faults
from data_prep.conversations import Tally
from data_prep.tokens import examples_of, load_tokenizer, tokenize_data
from eagle.core.examples import Example
from eagle.recipe import Recipe
from tests.chats import ASK, TEMPLATES, TWO, changed, chat, section

# what each template makes of the answers " One. \n" and "Two.", a list for each example
SPOKEN = {
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
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
ONLY_ANSWERS = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"


def decode_runs(examples: list[Example], tokenizer: Any) -> list[list[str]]:
    """Return what the supervised tokens of each example say, run by run."""
    texts = []
    for example in examples:
        pairs = zip(
            example.loss_mask.tolist(),
            example.tokens.tolist(),
            strict=True,
        )
        # neighbouring tokens of one kind are a run
        runs = []
        for is_supervised, group in groupby(pairs, lambda pair: pair[0]):
            if is_supervised:
                runs.append(tokenizer.decode([token for _, token in group]))
        texts.append(runs)
    return texts


def read_supervised(
    conversation: Conversation,
    tokenizer: Any,
    tally: Tally | None = None,
    **data: Any,
) -> list[list[str]]:
    """Return what is supervised of a conversation, in which the inspector finds no fault."""
    examples = examples_of(
        conversation,
        tokenizer,
        section(**data),
        tally or Tally(),
    )
    assert (
        faults(
            conversation,
            examples,
            tokenizer,
            section(**data),
        )
        == []
    )
    return decode_runs(examples, tokenizer)


def dropped_reason(conversation: Conversation, tokenizer: Any, **data: Any) -> str:
    """Return why a conversation gives no example."""
    tally = Tally()
    assert (
        examples_of(
            conversation,
            tokenizer,
            section(**data),
            tally,
        )
        == []
    )
    (reason,) = tally.dropped
    return reason


@pytest.mark.parametrize("name", SPOKEN)
def test_supervised_is_what_the_template_prints_for_the_assistant(
    using: Callable[[str], Any], name: str
) -> None:
    """It is written out by hand for each kind of template."""
    tally = Tally()
    assert read_supervised(TWO, using(name), tally) == SPOKEN[name]
    assert not tally.dropped
    is_rewritten = len(SPOKEN[name]) > 1
    assert tally.noted["history rewritten by the template: several examples"] == is_rewritten
    assert tally.noted[OPEN_THOUGHT] == (name == "opens a thought")


@pytest.mark.parametrize("name", SPOKEN)
def test_an_answer_that_was_cut_off_teaches_no_end_mark(
    using: Callable[[str], Any], name: str
) -> None:
    """What the template prints after it is not the target's; the inspector finds such a mark."""
    tokenizer = using(name)
    # a weight of 1 keeps a truncated answer
    last = {**TWO.messages[-1], "finish_reason": "length", "weight": 1}
    cut_off = Conversation(TWO.id, [*TWO.messages[:-1], last])
    # only the last answer has no end
    *whole, [*runs, spoken] = SPOKEN[name]
    without_mark = spoken[: spoken.index("Two.") + len("Two.")]
    assert read_supervised(cut_off, tokenizer) == [*whole, [*runs, without_mark]]
    ended = examples_of(TWO, tokenizer, section(), Tally())
    assert faults(cut_off, ended, tokenizer, section())


def test_an_example_is_the_very_prompt_of_serving(using: Callable[[str], Any]) -> None:
    """Where history is rewritten, an answer follows the history as it is printed then; no BOS is added."""
    tokenizer = using("thinks")
    examples = examples_of(TWO, tokenizer, section(), Tally())
    for example, num_turns in zip(examples, (1, 3), strict=True):
        history = TWO.messages[:num_turns]
        prompt = tokenizer.apply_chat_template(history, add_generation_prompt=True)["input_ids"]
        start = int(example.loss_mask.int().argmax())
        assert example.tokens[:start].tolist() == prompt
        assert tokenizer.bos_token_id not in prompt
    # called without the template it would add one
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id


def test_masks_equal_those_of_generation_tags(using: Callable[[str], Any]) -> None:
    """Where a template has tags, transformers' own mask is the truth."""
    tokenizer = using("tags")
    (example,) = examples_of(TWO, tokenizer, section(), Tally())
    expected = tokenizer.apply_chat_template(TWO.messages, return_assistant_tokens_mask=True)
    assert example.tokens.tolist() == expected["input_ids"]
    assert example.loss_mask.int().tolist() == expected["assistant_masks"]
    assert sum(expected["assistant_masks"]) > 0


def test_calls_are_supervised_and_their_results_never(using: Callable[[str], Any]) -> None:
    """The tools of a record reach every render: without them this template fails."""
    tokenizer = using("calls")
    messages = [
        {"role": "user", "content": "Hot?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "31 degrees"},
        {"role": "assistant", "content": "Yes."},
    ]
    conversation = Conversation("c", messages, TOOLS)
    call = '<call>weather{"city": "Rome"}</call><|end|>'
    assert read_supervised(conversation, tokenizer) == [[call, "Yes.<|end|>"]]
    (example,) = examples_of(
        conversation,
        tokenizer,
        section(),
        Tally(),
    )
    assert "Tool: weather" in tokenizer.decode(example.tokens)
    reason = "the template refuses: it needs tools, and the conversation has none"
    assert dropped_reason(Conversation("c", messages), tokenizer) == reason


WEIGHTLESS = Conversation("c", [{**turn, "weight": 0} for turn in TWO.messages])


@pytest.mark.parametrize(
    ("template", "conversation", "data", "reason"),
    [
        ("alternates", chat("Who?"), {}, "no assistant turn"),
        (
            "alternates",
            Conversation("c", [*TWO.messages, *TWO.messages[-1:]]),
            {},
            "the template refuses: roles must alternate",
        ),
        ("alternates", WEIGHTLESS, {}, "every answer has weight 0"),
        ("alternates", WEIGHTLESS, {"turns": "last"}, "the last answer has"),
        ("chatml", chat("Who?" * 40, "One."), {"max_length": 8}, "nothing supervised within"),
        ("chatml", chat("Who?", "half \ud83d"), {}, "half a surrogate pair"),
        # a template's arguments reach every render: this one fails without its date
        ("dated", TWO, {"template_kwargs": {}}, "the template refuses: 'date' is undefined"),
    ],
)
def test_a_drop_has_a_reason(
    using: Callable[[str], Any],
    template: str,
    conversation: Conversation,
    data: dict[str, Any],
    reason: str,
) -> None:
    """Nothing is dropped in silence."""
    assert dropped_reason(
        conversation,
        using(template),
        **data,
    ).startswith(reason)


RETELLS = (  # a result before a question for more is printed otherwise than one before an answer
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|user|>\n' + m.content + ('' if loop.last else ' (read)') }}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{{ '<|end|>\n' }}{% endfor %}"
    + ASK
)
FORGETS = "{% for m in messages %}{{ m.content + eos_token if loop.last or m.role == 'assistant' }}{% endfor %}"


def test_history_is_read_as_it_was_when_the_answer_was_asked_for(base: Any) -> None:
    """A template that prints it otherwise later gives the prompt of serving, or a reason."""
    roles = ("user", "assistant", "tool", "assistant")
    messages = [{"role": role, "content": role.title()} for role in roles]
    conversation = Conversation("c", messages)
    base.chat_template = RETELLS
    tally = Tally()
    assert read_supervised(
        conversation,
        base,
        tally,
    ) == [["Assistant<|end|>", "Assistant<|end|>"]]
    assert tally.noted["the turns before an answer are printed otherwise once it is given"] == 1
    prompt = base.apply_chat_template(
        messages[:3],
        tokenize=False,
        add_generation_prompt=True,
    )
    (example,) = examples_of(conversation, base, section(), Tally())
    assert base.decode(example.tokens) == prompt + "Assistant<|end|>\n"
    assert "(read)" not in prompt
    base.chat_template = FORGETS
    reason = "the template prints the turns before message 2 otherwise once it is answered"
    assert dropped_reason(TWO, base) == reason


def test_which_answers_are_learned(using: Callable[[str], Any]) -> None:
    """All of them, those that have a weight, or the last."""
    tokenizer = using("chatml")
    first, answer, *rest = TWO.messages
    # an answer of weight 0 is read as history
    unweighted = Conversation("c", [first, {**answer, "weight": 0}, *rest])
    assert read_supervised(unweighted, tokenizer) == [["Two.<|end|>"]]
    assert read_supervised(
        TWO,
        tokenizer,
        turns="last",
    ) == [["Two.<|end|>"]]


def test_what_is_remarkable_is_noted(using: Callable[[str], Any]) -> None:
    """Such conversations are kept, and counted."""
    tokenizer = using("chatml")
    tally = Tally()
    long = chat("Who?", "One. " * 30)
    read_supervised(long, tokenizer, tally, max_length=20)
    (example,) = examples_of(
        long,
        tokenizer,
        section(max_length=20),
        Tally(),
    )
    assert len(example.tokens) == 20
    examples_of(chat("What is <|end|>?", "A mark."), tokenizer, section(), tally)
    tokenizer.chat_template = ONLY_ANSWERS
    examples_of(chat("Who?", "One."), tokenizer, section(), tally)
    notes = (
        "cut at max_length",
        "special-token text inside content",
        "everything is supervised",
        "the template prints no end-of-turn mark",
    )
    assert [tally.noted[note] for note in notes] == [1] * 4


def test_a_token_across_the_start_is_supervised_and_noted(base: Any) -> None:
    """Serving tokenises the prompt alone, so it never shows such a token."""
    # "the" is a token, and the answer begins within it
    base.chat_template = "{% for m in messages %}{{ m.role + ' th' + m.content }}{% endfor %}"
    base.chat_template += "{% if add_generation_prompt %}assistant th{% endif %}"
    tally = Tally()
    assert read_supervised(
        chat("x", "e method"),
        base,
        tally,
    ) == [[" the method"]]
    assert tally.noted["a token straddles the start of an answer"] == 1


def test_offsets_that_leave_out_spaces_lose_no_token() -> None:
    """Some families' post-processors trim offsets, which an answer that begins with white space shows."""
    # a token for each byte, so that offsets are easy to follow
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: token for token, letter in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = TEMPLATES["vicuna"]
    assert tokenizer(" x", return_offsets_mapping=True)["offset_mapping"] == [(0, 0), (1, 2)]
    assert tokens.encode(" x", tokenizer)[1].tolist() == [[0, 1], [1, 2]]
    (example,) = examples_of(
        chat("Who?", " é\n"),
        tokenizer,
        section(),
        Tally(),
    )
    expected = tokens.encode("  é\n</s>", tokenizer)[0]
    assert example.tokens[example.loss_mask].tolist() == expected.tolist()


def test_slow_tokenizers_are_refused() -> None:
    """They cannot say which characters a token stands for."""
    with pytest.raises(ValueError, match="ByT5Tokenizer says no offsets: expected a fast"):
        examples_of(TWO, ByT5Tokenizer(), section(), Tally())


def test_a_recipe_names_the_template(recipe: Recipe, tmp_path: Path) -> None:
    """A file replaces the tokenizer's own; none at all, or no such file, is refused."""
    assert "<|" in load_tokenizer(recipe).chat_template
    (tmp_path / "mine.jinja").write_text(TEMPLATES["vicuna"])
    mine = changed(recipe, template=str(tmp_path / "mine.jinja"))
    assert load_tokenizer(mine).chat_template == TEMPLATES["vicuna"]
    with pytest.raises(ValueError, match=r"no chat template at data.template = nowhere"):
        load_tokenizer(changed(recipe, template="nowhere"))
    tokenizer = AutoTokenizer.from_pretrained(recipe.target.path)
    # as a base model's tokenizer
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "bare")
    bare = recipe.target.model_copy(update={"path": tmp_path / "bare"})
    message = r"has no chat template: name a Jinja file in data\.template"
    with pytest.raises(ValueError, match=message):
        load_tokenizer(recipe.model_copy(update={"target": bare}))


def test_all_data_become_examples_or_reasons(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing learned is an error with the counts, and everything learned a warning."""
    tokenizer = load_tokenizer(recipe)
    examples, tally = tokenize_data(recipe, tokenizer)
    assert len(examples) == tally.kept == 3
    assert "warning" not in capsys.readouterr().out
    _, tally = tokenize_data(changed(recipe, max_length=12), tokenizer)
    assert tally.kept + tally.dropped.total() == 3
    tokenizer.chat_template = TEMPLATES["dated"]
    with pytest.raises(ValueError, match=r"nothing to learn from(.|\n)*'date' is undefined +3"):
        tokenize_data(recipe, tokenizer)
    with pytest.raises(ValueError, match=r"data.jsonl:1: .*'date' is undefined"):
        tokenize_data(recipe, tokenizer, strict=True)
    tokenizer.chat_template = ONLY_ANSWERS
    tokenize_data(recipe, tokenizer)
    assert "every token is supervised" in capsys.readouterr().out


def test_answers_that_are_not_there_yet_are_asked_for(tmp_path: Path) -> None:
    """Whoever skips a stage is told which."""
    answers = str(tmp_path / "answers.jsonl")
    overrides = [f"data.train={answers}", f"regenerate.out={answers}"]
    recipe = Recipe.load("recipes/tiny/eagle1.yaml", overrides)
    with pytest.raises(ValueError, match=r"answers\.jsonl is not there: run `eagle prepare"):
        tokenize_data(recipe, None)
