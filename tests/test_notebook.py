"""What a notebook shows of an answer, of results and of a feature store."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import torch

from eagle import Sampling, Target, Trace, generate, load_drafter
from eagle.core.examples import Example
from eagle.core.trace import GREEN, Cycle
from eagle.core.tree import DraftTree
from eagle.data.store import FeatureStore
from eagle.markup import readable
from eval.page.page_parts import ReportData
from eval.result_files.results import read_results


class Shown(HTMLParser):
    """What a browser would read: its elements, its texts, which texts are green, and the cells of tables."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.styles: list[str] = []
        self.texts: list[str] = []
        self.green: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element."""
        self.elements.append(tag)
        self.styles.append(dict(attrs).get("style") or "")
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        """Close an element."""
        self.styles.pop()

    def handle_data(self, data: str) -> None:
        """Read a text."""
        self.texts.append(data)
        if self.styles and self.styles[-1] == f"color:{GREEN}":
            self.green.append(data)
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_an_answer_shows_what_was_accepted(tiny_target: Target) -> None:
    """The text is whole, with as many green tokens as the cycles accepted, and the acceptance length by hand."""
    trace = generate(
        tiny_target,
        load_drafter("suffix", tiny_target),
        tiny_target.chat("What does copy do?"),
        sampling=Sampling(0.0),
        max_new_tokens=24,
    )
    shown = Shown(trace._repr_html_())
    accepted = sum(min(len(cycle.kept), cycle.committed) for cycle in trace.cycles)
    tau = sum(cycle.committed for cycle in trace.cycles) / len(trace.cycles)
    # the line below the text counts what is green
    *texts, summary = shown.texts
    assert "".join(texts) == readable(trace.text)
    assert summary == (
        f"{len(trace.tokens)} tokens, {accepted} of them accepted drafts (green); "
        f"{len(trace.cycles)} target forwards after the prompt's, τ = {tau:.2f}"
    )


def test_a_token_that_is_markup_stays_text() -> None:
    """`<script>` opens no element; the accepted token alone is green; control characters are spelt out."""
    texts = ["<script>alert(1)</script>", " & so", " on\x1b[0m"]
    tokenizer = SimpleNamespace(
        convert_ids_to_tokens=lambda token: texts[token],
        decode=lambda tokens, **_: "".join(texts[token] for token in tokens),
    )
    # one draft, which the target accepted
    cycle = Cycle(DraftTree.chain([0, 1]), kept=(1,), committed=2, context=3)
    trace = Trace([0], tokens=[0, 1, 2], cycles=[cycle], tokenizer=tokenizer)
    shown = Shown(trace._repr_html_())
    assert "script" not in shown.elements
    assert shown.green == [" & so"]
    expected = "<script>alert(1)</script> & so on⟨U+001B⟩[0m3 tokens, 1 of them"
    assert "".join(shown.texts).startswith(expected)


def test_an_answer_without_a_tokenizer_shows_its_tokens() -> None:
    """Token ids stand for the text."""
    cycle = Cycle(DraftTree.chain([7]), kept=(), committed=1, context=1)
    shown = Shown(Trace([0], tokens=[7, 9], cycles=[cycle])._repr_html_())
    assert shown.texts[:2] == ["7 ", "9 "]
    assert shown.green == []


def write_results(path: Path) -> None:
    """Write two answers of a drafter with a name that is markup, and of `none`."""
    lines: list[dict[str, object]] = [{"run": {"id": "1"}}]
    # 20 cycles of one token, and 8 of two
    asked = {
        "set": "s",
        "turn": 0,
        "seed": 0,
        "temperature": 0.0,
        "run": "1",
    }
    cycle = {"nodes": 1, "depth": 1, "accepted": 1, "context": 9}
    for prompt in ("a", "b"):
        for drafter, seconds, count in (("none", 2.0, 20), ("<b>head</b>", 1.0, 8)):
            lines.append(
                {
                    **asked,
                    "conversation": prompt,
                    "drafter": drafter,
                    "tokens": 21,
                    "seconds": seconds,
                    "cycles": [{**cycle, "committed": 20 // count}] * count,
                    "loops": False,
                    "identical": True,
                }
            )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_results_are_a_table(tmp_path: Path) -> None:
    """A row for each drafter: tokens per cycle, tokens per second and their ratio; one row alone is the same."""
    path = tmp_path / "results.jsonl"
    write_results(path)
    rows = Shown(read_results(path)._repr_html_()).rows
    # 2.00 tokens a cycle and twice the speed, by hand
    head, none, drafter = rows
    assert head == ["T", "drafter", "answers", "τ", "tokens/s", "speedup", "identical"]
    assert none[:3] == ["0", "none", "2"]
    assert none[5] == "1.00 ×"
    assert drafter[:3] == ["0", "<b>head</b>", "2"]
    assert [cell.split()[0] for cell in drafter[3:]] == ["2.00", "21", "2.00", "2"]
    _, group = read_results(path).groups()
    assert Shown(group._repr_html_()).rows == [head, drafter]
    assert sorted(Shown(ReportData.load([path])._repr_html_()).rows) == sorted(rows)


def test_a_feature_store_is_a_table(tmp_path: Path) -> None:
    """What was stored, counted by hand: 5 tokens, 3 of them supervised, in fp32 at two layers of width 4."""
    examples = []
    # 5 tokens, of which 3 are supervised
    for tokens, mask in (([1, 2, 3], [False, True, True]), ([4, 5], [False, True])):
        features = torch.zeros(len(tokens), 2, 4)
        examples.append(Example(torch.tensor(tokens), torch.tensor(mask), features))
    identity = {
        "target": {"path": "my/<model>"},
        "taps": [1, 3],
        "dtype": "float32",
    }
    store = FeatureStore.create(
        tmp_path,
        examples,
        identity,
        [[[0]], [[1]]],
        width=4,
    )
    rows = dict(Shown(store._repr_html_()).rows)
    assert rows["target"] == "my/<model>"
    assert rows["features"] == "2 layers (1, 3) × 4, float32"
    assert rows["conversations"] == "2, 5 tokens, 3 learned"
    assert rows["shards"] == "0 of 2 complete"
    assert rows["size when complete"] == f"{5 * 2 * 4 * 4 / 1e6:.1f} MB, 32 bytes a token"
