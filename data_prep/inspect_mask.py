"""Shows what is supervised, and checks it: `python -m data_prep.inspect_mask RECIPE [key=value ...]`."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from data_prep.conversations import Conversation, Tally
from data_prep.tokens import each, load_tokenizer
from eagle.disk import write_text
from eagle.examples import Example
from eagle.log import script
from eagle.recipe import DataSection, Recipe, command_line

PLACEHOLDER = "\ue001answer\ue001"
STYLE = """
:root { color-scheme: light dark; --said: light-dark(#c9f0d0, #14532d); --card: light-dark(#fff, #1c1c1f); }
body { font: 15px/1.6 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       background: light-dark(#f4f4f5, #111113); }
article { background: var(--card); border-radius: 8px; padding: .8rem 1.2rem; margin: 1rem 0; }
h2 { font-size: 1rem; margin: .2rem 0; overflow-wrap: anywhere; }
pre { font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext; }
mark { background: var(--said); color: inherit; border-radius: 3px; }
span:hover, mark:hover { outline: 1px solid #888; }
.br::before { content: "\\21b5"; opacity: .4; }
.fault { color: #dc2626; font-weight: 600; }
table { border-collapse: collapse; } td { padding: .1rem 1.5rem .1rem 0; }
"""


# ---- checks: what should be supervised, without the code that made the mask


def faults(conversation: Conversation, examples: Sequence[Example], tokenizer: Any, data: DataSection) -> list[str]:
    """What is wrong with the mask: every supervised run must be one answer, from its first token to its mark."""
    found = [(example.tokens.tolist(), run) for example in examples for run in runs(example.loss_mask.tolist())]
    answers = [texts for texts in answers_expected(conversation, tokenizer, data) if texts[1][0]]
    if missing := max(0, len(answers) - len(found)):
        gone = [place for place, _ in answers if beyond(conversation, place, tokenizer, data)][-missing:]
        answers = [answer for answer in answers if answer[0] not in gone]
    wrong = []
    for answer, run in zip_longest(answers, found):
        got = f"supervised is {short(text_of(run[0], run[1], tokenizer))}" if run else "nothing is supervised"
        if answer is None:
            wrong.append(f"{got}, which is no answer that is learned")
        elif not run or not any(covers(run[0], run[1], text, tokenizer, data.max_length) for text in answer[1]):
            wrong.append(f"message {answer[0] + 1}: {got}, expected {short(answer[1][0])}")
    return [f"{conversation.id}: {one}" for one in wrong]


def answers_expected(
    conversation: Conversation, tokenizer: Any, data: DataSection
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(place, what the template prints for it after a question of ours, and after its own history) of each answer."""
    places = [place for place, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
    for place in places[-1:] if data.turns == "last" else places:
        turn, history = conversation.messages[place], conversation.messages[:place]
        if turn.get("weight", 1) != 0:
            ours = expected([{"role": "user", "content": "Why?"}], turn, conversation.tools, tokenizer, data)
            plain = "tool_calls" not in turn and history and history[-1]["role"] == "user"
            own = None if plain else expected(history, turn, conversation.tools, tokenizer, data)
            yield place, tuple(text for text in (ours, own) if text is not None) or ("",)


def expected(history: list[dict[str, Any]], turn: dict[str, Any], tools: Any, tokenizer: Any, data: DataSection) -> Any:
    """What the template prints for one answer, header's end and end-of-turn mark included; None if it refuses."""

    def render(messages: list[dict[str, Any]], ask: bool = False) -> str:
        options = {"tools": tools or None, "tokenize": False, **data.template_kwargs}
        return tokenizer.apply_chat_template(messages, add_generation_prompt=ask, **options)

    try:
        asked, finished = render(history, True), render([*history, turn])
        alike = render([*history, {"role": "assistant", "content": PLACEHOLDER}])
    except Exception:  # a template may raise anything
        return None
    differ = (end for end, (one, two) in enumerate(zip(asked, finished, strict=False)) if one != two)
    head = next((end for end, (one, two) in enumerate(zip(asked, alike, strict=False)) if one != two), len(asked))
    start = len(asked) if finished.startswith(asked) else min(head, next(differ, len(asked)))
    mark = alike[alike.find(PLACEHOLDER) + len(PLACEHOLDER) :]
    return finished[start:].rstrip() if mark.strip() else finished[start:]


def covers(tokens: list[int], run: tuple[int, int], answer: str, tokenizer: Any, max_length: int) -> bool:
    """Whether a run is the fewest tokens that hold the answer; of one that was cut, its beginning."""
    start, end = run
    text, first, last = (text_of(tokens, part, tokenizer) for part in (run, (start, start + 1), (end - 1, end)))
    answer = tokenizer.decode(
        tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"]
    )  # as it comes back, normalised
    if end == max_length:
        whole = text.rstrip("\ufffd")
        return any(answer.startswith(whole[extra:]) for extra in range(max(1, len(first))))
    before = text.find(answer)
    return 0 <= before < max(1, len(first)) and len(text) - before - len(answer) < max(1, len(last))


def beyond(conversation: Conversation, place: int, tokenizer: Any, data: DataSection) -> bool:
    """Whether an answer begins only where `max_length` has cut."""
    options = {"tools": conversation.tools or None, "tokenize": False, **data.template_kwargs}
    asked = tokenizer.apply_chat_template(conversation.messages[:place], add_generation_prompt=True, **options)
    return len(tokenizer(asked, add_special_tokens=False, verbose=False)["input_ids"]) >= data.max_length


def runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Where every unbroken supervised run begins and ends."""
    found, place = [], 0
    for supervised, group in groupby(mask):
        length = len(list(group))
        found += [(place, place + length)] * supervised
        place += length
    return found


def text_of(tokens: list[int], run: tuple[int, int], tokenizer: Any) -> str:
    """What a run of tokens says where it stands: a decoder may treat the first token of all otherwise."""
    start, end = run
    before = max(0, start - 8)
    return tokenizer.decode(tokens[before:end])[len(tokenizer.decode(tokens[before:start])) :]


def short(text: str) -> str:
    """A text with its middle left out."""
    return repr(text if len(text) <= 90 else f"{text[:50]} ... {text[-35:]}")


# ---- what people look at


def pieces(example: Example, tokenizer: Any) -> Iterator[tuple[list[int], str, bool]]:
    """(ids, text, supervised) of the smallest groups of tokens that are whole characters."""
    tokens, mask, before, start = example.tokens.tolist(), example.loss_mask.tolist(), 0, 0
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[before:end])[len(tokenizer.decode(tokens[before:start])) :]
        if not text.endswith("\ufffd") or end == len(tokens) or end - start == 12:  # parts of a character, or many
            yield tokens[start:end], text, any(mask[start:end])
            before, start = start, end


def coloured(example: Example, tokenizer: Any) -> Text:
    """An example for the terminal, its supervised tokens in green."""
    text = Text()
    for _, piece, supervised in pieces(example, tokenizer):
        text.append(visible(piece), "black on green" if supervised else "")
    return text


def article(title: str, examples: Sequence[Example], wrong: Sequence[str], tokenizer: Any) -> str:
    """A conversation for the browser."""
    body = "".join(f"<pre>{''.join(map(tagged, pieces(example, tokenizer)))}</pre>" for example in examples)
    found = "".join(f'<p class="fault">{html.escape(one)}</p>' for one in wrong)
    return f"<article><h2>{html.escape(title)}</h2>{found}{body}</article>"


def tagged(piece: tuple[list[int], str, bool]) -> str:
    """One piece of text that tells its tokens where the mouse rests."""
    ids, text, supervised = piece
    name, shown = "mark" if supervised else "span", html.escape(visible(text))
    lines = shown.replace("\n", '<i class="br"></i>\n')
    return f'<{name} title="{" ".join(map(str, ids))}">{lines}</{name}>'


def visible(text: str) -> str:
    """Control characters as their pictures, so that they neither hide nor act."""
    return "".join(chr(0x2400 + ord(one)) if ord(one) < 32 and one not in "\n\t" else one for one in text)


def page(articles: Sequence[str], rows: Sequence[tuple[str, str]]) -> str:
    """All of it as one HTML file."""
    table = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in rows)
    legend = "<p><mark>Supervised</mark> tokens are learned, others only read. Rest on a token to see its id.</p>"
    head = f"<!doctype html><html><head><meta charset='utf-8'><title>Loss mask</title><style>{STYLE}</style></head>"
    return f"{head}<body><h1>Loss mask</h1>{legend}<table>{table}</table>{''.join(articles)}</body></html>\n"


def summary(examples: Sequence[Example], tally: Tally) -> list[tuple[str, str]]:
    """(what, how much) of all that was read."""
    tokens, supervised = sum(len(one.tokens) for one in examples), sum(int(one.loss_mask.sum()) for one in examples)
    spans = [end - start for one in examples for start, end in runs(one.loss_mask.tolist())]
    rows = [
        ("conversations", f"{tally.kept:,}"),
        ("examples", f"{len(examples):,}"),
        ("tokens", f"{tokens:,}"),
        ("supervised", f"{supervised / max(1, tokens):.1%}"),
        ("tokens of an example", spread([len(one.tokens) for one in examples])),
        ("tokens of a supervised run", spread(spans)),
    ]
    rows += [(f"dropped: {reason}", f"{count:,}") for reason, count in tally.dropped.most_common()]
    return rows + [(f"noted: {reason}", f"{count:,}") for reason, count in tally.noted.most_common()]


def spread(lengths: Sequence[int]) -> str:
    """Smallest, quartiles and largest."""
    if not lengths:
        return "none"
    middle = quantiles(lengths, n=4, method="inclusive") if len(lengths) > 1 else [*lengths] * 3
    return " / ".join(f"{value:,.0f}" for value in (min(lengths), *middle, max(lengths)))


def main(argv: list[str]) -> None:
    """Print and write what the recipe's data teach; end with an error if a check fails."""
    parser = command_line("data_prep.inspect_mask", __doc__)
    parser.add_argument("--count", type=int, default=3, help="conversations to show")
    parser.add_argument("--html", metavar="PATH", help="write them there, too")
    options = parser.parse_intermixed_args(argv)
    recipe = Recipe.load(options.recipe, options.overrides)
    tokenizer, tally, console = load_tokenizer(recipe), Tally(), Console()
    every: list[Example] = []
    wrong: list[str] = []
    articles: list[str] = []
    for conversation, examples in each(recipe, tokenizer, tally):
        every += examples
        found = faults(conversation, examples, tokenizer, recipe.data) if examples else []
        wrong += found
        if examples and (len(articles) < options.count or (found and len(wrong) < 20)):
            articles.append(article(conversation.id, examples, found, tokenizer))
            console.rule(conversation.id)
            for example in examples:
                console.print(coloured(example, tokenizer))
    rows = summary(every, tally)
    show(rows, console)
    if options.html:
        write_text(options.html, page(articles, rows))
        print(f"written to {options.html}")
    if wrong or not every:
        raise SystemExit("\n".join(wrong[:50]) or "no example: nothing to learn from")


def show(rows: Sequence[tuple[str, str]], console: Console) -> None:
    """The table, in the terminal."""
    table = Table(show_header=False, caption="lengths: least / quartiles / most; black on green is supervised")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    console.print(table)


if __name__ == "__main__":
    script(main)
