"""Show which tokens contribute to the loss, and check the mask: `eagle prepare RECIPE --only masks`."""

from __future__ import annotations

import html
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from data_prep.check_mask import faults, runs_of, unlike_served
from data_prep.conversations import Tally
from data_prep.image_texts import data_url
from data_prep.tokens import explain_nothing, load_tokenizer, tokenize_each
from eagle.core.examples import Example
from eagle.disk import write_text
from eagle.log import script
from eagle.recipe import Recipe
from eagle.recipe.command_lines import command_line

SHOWN = 50  # faults
# So many equal pieces of a text with images are shown as one.
REPEATED = 4
UNLIKE_SERVED = "answers learned after another prompt than serving shows"
# Around supervised text where no colours are shown.
BEGIN = "⟦"
END = "⟧"
STYLE = """
:root { color-scheme: light dark; --learned: light-dark(#c9f0d0, #14532d); --card: light-dark(#fff, #1c1c1f); }
body { font: 15px/1.6 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       background: light-dark(#f4f4f5, #111113); }
article { background: var(--card); border-radius: 8px; padding: .8rem 1.2rem; margin: 1rem 0; }
h2 { font-size: 1rem; margin: .2rem 0; overflow-wrap: anywhere; }
pre { font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext; }
mark { background: var(--learned); color: inherit; border-radius: 3px; }
span:hover, mark:hover { outline: 1px solid #888; }
figure { display: inline-block; margin: .4rem 1rem .4rem 0; font-size: .8rem; }
figure img { display: block; min-width: 6rem; max-width: 24rem; max-height: 16rem; image-rendering: pixelated; }
.br::before { content: "\\21b5"; opacity: .4; }
.fault { color: #dc2626; font-weight: 600; }
table { border-collapse: collapse; } td { padding: .1rem 1.5rem .1rem 0; }
"""


def pieces(example: Example, tokenizer: Any) -> Iterator[tuple[list[int], str, bool]]:
    """Yield (ids, text, supervised) of the smallest groups of tokens that are whole characters."""
    tokens = example.tokens.tolist()
    mask = example.loss_mask.tolist()
    before = 0
    start = 0
    for end in range(1, len(tokens) + 1):
        # Some decoders treat a text's first token differently, so that the group before is decoded too.
        context = tokenizer.decode(tokens[before:start])
        text = tokenizer.decode(tokens[before:end])[len(context) :]
        # A group that ends inside a character goes on, but not for ever.
        if not text.endswith("\ufffd") or end == len(tokens) or end - start == 12:
            yield tokens[start:end], text, any(mask[start:end])
            before = start
            start = end


def fold_images(example: Example, tokenizer: Any) -> Iterator[tuple[list[int], str, bool]]:
    """Yield the pieces of an example; a run of the token that stands for an image is one piece with its count."""
    if example.shown is None:
        yield from pieces(example, tokenizer)
        return
    for (text, supervised), run in groupby(pieces(example, tokenizer), lambda piece: piece[1:]):
        groups = list(run)
        if len(groups) < REPEATED:
            yield from groups
        else:
            ids = list(chain.from_iterable(tokens for tokens, *_ in groups))
            yield ids, f"{text} × {len(groups)}", supervised


def show_images(example: Example) -> Iterator[str]:
    """Yield each image of an example in HTML, with the name of its file."""
    if not example.shown:
        return
    for path, _ in example.shown.images:
        source = html.escape(data_url(Path(path).read_bytes(), path))
        yield f'<figure><img src="{source}" alt=""><figcaption>{html.escape(Path(path).name)}</figcaption></figure>'


def colour_supervised(example: Example, tokenizer: Any, *, coloured: bool = True) -> Text:
    """Return an example for the terminal, its supervised tokens in green; without colours, between two marks."""
    heading = ""
    if example.shown:
        heading = "".join(f"[image {path}]\n" for path, _ in example.shown.images)
    text = Text(heading)
    for supervised, run in groupby(fold_images(example, tokenizer), lambda piece: piece[2]):
        content = "".join(show_controls(piece) for _, piece, _ in run)
        style = ""
        if supervised:
            style = "black on green"
            if not coloured:
                content = f"{BEGIN}{content}{END}"
        text.append(content, style)
    return text


def make_article(
    title: str, examples: Sequence[Example], wrong: Sequence[str], tokenizer: Any
) -> str:
    """Return a conversation in HTML; a piece of text shows its token ids on hover."""
    lines = [f"<article><h2>{html.escape(title)}</h2>"]
    lines += [f'<p class="fault">{html.escape(fault)}</p>' for fault in wrong]
    for example in examples:
        lines += [*show_images(example), "<pre>"]
        for ids, piece, supervised in fold_images(example, tokenizer):
            tag = "mark" if supervised else "span"
            text = html.escape(show_controls(piece)).replace("\n", '<i class="br"></i>\n')
            lines.append(f'<{tag} title="{" ".join(map(str, ids))}">{text}</{tag}>')
        lines.append("</pre>")
    lines.append("</article>")
    return "".join(lines)


def show_controls(text: str) -> str:
    """Return the text with control characters as their pictures, so that they neither hide nor act."""
    return "".join(
        chr(0x2400 + ord(char)) if ord(char) < 32 and char not in "\n\t" else char for char in text
    )


def make_page(articles: Sequence[str], rows: Sequence[tuple[str, str]]) -> str:
    """Return the table and all articles as one HTML file."""
    table = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    legend = "<p><mark>Supervised</mark> tokens are learned, others only read. Rest on a token to see its id.</p>"
    head = f"<!doctype html><html><head><meta charset='utf-8'><title>Loss mask</title><style>{STYLE}</style></head>"
    return f"{head}<body><h1>Loss mask</h1>{legend}<table>{table}</table>{''.join(articles)}</body></html>\n"


class Lengths:
    """The lengths of examples and of their supervised runs: a few bytes of each, as there may be millions."""

    def __init__(self) -> None:
        self.examples = array("I")
        self.runs = array("I")

    def add(self, examples: Sequence[Example]) -> None:
        """Note the lengths of some examples."""
        self.examples.extend(len(example.tokens) for example in examples)
        self.runs.extend(end - start for _, (start, end) in runs_of(examples))

    def summarise(self, tally: Tally) -> list[tuple[str, str]]:
        """Return (name, value) of the counts and lengths of all that was read."""
        tokens = sum(self.examples)
        rows = [
            ("conversations", f"{tally.kept:,}"),
            ("examples", f"{len(self.examples):,}"),
            ("tokens", f"{tokens:,}"),
            ("supervised", f"{sum(self.runs) / max(1, tokens):.1%}"),
            ("tokens of an example", quartiles(self.examples)),
            ("tokens of a supervised run", quartiles(self.runs)),
        ]
        rows += [
            (f"dropped: {reason}", f"{count:,}") for reason, count in tally.dropped.most_common()
        ]
        rows += [(f"noted: {reason}", f"{count:,}") for reason, count in tally.noted.most_common()]
        return rows


def quartiles(lengths: Sequence[int]) -> str:
    """Return the minimum, the three quartiles and the maximum of some lengths."""
    if not lengths:
        return "none"
    return " / ".join(f"{value:,.0f}" for value in np.percentile(lengths, (0, 25, 50, 75, 100)))


def main(argv: list[str]) -> None:
    """Print and write what the recipe's data teach; end with an error if a check fails."""
    parser = command_line("eagle prepare --only masks", __doc__)
    parser.add_argument("--count", type=int, default=3, help="number of conversations to show")
    parser.add_argument("--html", metavar="PATH", help="also write them to an HTML page")
    args = parser.parse_intermixed_args(argv)
    recipe = Recipe.load(args.recipe, args.overrides)
    tokenizer = load_tokenizer(recipe)
    tally = Tally()
    console = Console()
    coloured = console.is_terminal and not console.no_color
    lengths = Lengths()
    wrong: list[str] = []
    articles: list[str] = []
    for conversation, examples in tokenize_each(recipe, tokenizer, tally):
        if not examples:
            continue
        lengths.add(examples)
        faults_here = faults(conversation, examples, tokenizer, recipe.data)
        wrong += faults_here[: SHOWN - len(wrong)]
        num_unlike = unlike_served(conversation, examples, tokenizer, recipe.data)
        # A count of 0 would be a row of the table.
        if num_unlike:
            tally.noted[UNLIKE_SERVED] += num_unlike
        if len(articles) < args.count or (faults_here and len(wrong) < 20):
            articles.append(make_article(conversation.id, examples, faults_here, tokenizer))
            console.rule(conversation.id)
            for example in examples:
                console.print(colour_supervised(example, tokenizer, coloured=coloured))
    rows = lengths.summarise(tally)
    console.print(make_table(rows, coloured))
    if args.html:
        write_text(args.html, make_page(articles, rows))
        print(f"written to {args.html}")
    if wrong or not lengths.examples:
        raise SystemExit("\n".join(wrong) or explain_nothing(recipe.data.train, tally))


def make_table(rows: Sequence[tuple[str, str]], coloured: bool) -> Table:
    """Return counts and lengths as a table for the terminal."""
    legend = "black on green" if coloured else f"between {BEGIN} and {END}"
    table = Table(
        show_header=False, caption=f"lengths: least / quartiles / most; {legend} is supervised"
    )
    for name, value in rows:
        # As `Text`, so that brackets in a reason are no markup.
        table.add_row(Text(name), Text(value))
    return table


if __name__ == "__main__":
    script(main)
