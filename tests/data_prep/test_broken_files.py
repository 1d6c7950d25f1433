"""A file that is damaged beyond a few lines is an error by name, unless the recipe allows it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.conversations import Tally, main, read_conversations
from data_prep.tokens import tokenize_data
from eagle.data.identity import data_identity
from eagle.recipe import Recipe
from tests.chats import changed
from tests.data_prep.test_records import record

RECORDS = [record(str(number)) for number in range(100)]
LINES = [json.dumps(each).encode() + b"\n" for each in RECORDS]
ARRAY = json.dumps(RECORDS, indent=1).encode()
CUT = "the file ends in the middle of a record"


def damaged(*places: int) -> bytes:
    """A hundred lines, of which these are no JSON."""
    return b"".join(b"<html>\n" if place in places else line for place, line in enumerate(LINES))


@pytest.mark.parametrize(
    ("content", "kept", "error"),
    [
        (ARRAY[: len(ARRAY) // 2], 50, rf"is damaged at line \d{{3}}, at its record 51: {CUT}"),
        (ARRAY.replace(b'"1"', b'"1', 1), 99, r"is damaged at line 1\d, at its record 2: not JSON"),
        (b"[" + LINES[0] + LINES[1], 2, None),
        (
            json.dumps(RECORDS).encode()[:-900],
            91,
            rf"is damaged at line 1, at its record \d+: {CUT}",
        ),
        (damaged(3, 7), 98, "2 of 100 lines of .* are damaged, the first is line 4: not JSON"),
        (
            damaged(*range(1, 100)),
            1,
            "99 of 100 lines of .* are damaged, the first is line 2: not JSON",
        ),
        (damaged(3), 99, None),
        (b"".join(LINES)[:-9], 99, None),
        (b"".join(LINES * 3)[:-9].replace(b'"7"', b'"7', 1), 298, None),
        (
            gzip.compress(b"".join(LINES))[:-9],
            None,
            "is damaged, at its record .*: the compressed file ends early",
        ),
    ],
    ids=[
        "half",
        "middle",
        "unclosed",
        "one line",
        "two lines",
        "99 lines",
        "a line",
        "cut",
        "2 of 300",
        "gzip",
    ],
)
def test_a_broken_file_is_refused(
    tmp_path: Path, content: bytes, kept: int | None, error: str | None
) -> None:
    """What is lost is not known, or is more than a line in a hundred; allowed, the rest is read and all is counted."""
    path, tally = tmp_path / "x.json", Tally()
    path.write_bytes(content)
    read = list(read_conversations(path, tally, allow_broken=True))
    assert len(read) == tally.kept and (kept is None or len(read) == kept)
    assert len(tally.broken) == (error is not None)
    if error is None:
        assert len(list(read_conversations(path))) == kept
        return
    with pytest.raises(ValueError, match=f"x.json.*{error}|{error}") as refused:
        list(read_conversations(path))
    assert "set data.allow_broken=true" in str(refused.value) and "x.json" in str(refused.value)


def test_what_stands_before_the_damage_may_be_enough(tmp_path: Path) -> None:
    """A limit that is met before it ends the reading."""
    path = tmp_path / "x.json"
    path.write_bytes(ARRAY[: len(ARRAY) // 2])
    assert len(list(read_conversations(path, limit=10))) == 10


def test_a_table_that_breaks_off_is_refused(tmp_path: Path) -> None:
    """As JSON is."""
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ValueError, match="the rest of the parquet file cannot be read"):
        list(read_conversations(tmp_path / "x.parquet"))


def test_a_recipe_may_allow_it(recipe: Recipe, tmp_path: Path) -> None:
    """The same data have the same identity either way."""
    path = tmp_path / "half.json"
    path.write_bytes(ARRAY[: len(ARRAY) // 2])
    refusing = changed(recipe, train=str(path))
    tokenizer = _tokenizer(refusing)
    with pytest.raises(ValueError, match=r"half\.json is damaged at line"):
        tokenize_data(refusing, tokenizer)
    allowing = changed(recipe, train=str(path), allow_broken=True)
    assert len(tokenize_data(allowing, tokenizer)[0]) == 50
    assert data_identity(allowing) == data_identity(refusing)


def _tokenizer(recipe: Recipe) -> Any:
    from data_prep.tokens import load_tokenizer

    return load_tokenizer(recipe)


@pytest.mark.parametrize(("content", "fails"), [(ARRAY[:500], True), (damaged(3), False)])
def test_the_counts_are_shown_before_the_error(
    tmp_path: Path,
    content: bytes,
    fails: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The script that counts a source shows what can be read, and ends with what no stage would read."""
    path = tmp_path / "x.json"
    path.write_bytes(content)
    if fails:
        with pytest.raises(SystemExit, match=r"x\.json is damaged .*\nno stage reads such files"):
            main([str(path)])
    else:
        main([str(path)])
    assert "kept" in capsys.readouterr().out
