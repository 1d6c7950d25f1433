"""A mix gives the conversations of its sources, each as often as it says, and is read wherever a source is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from data_prep.conversations import Tally, main, read_conversations
from data_prep.read_once import open_cache
from eagle.data.identity import data_identity
from eagle.recipe import Recipe
from tests.chats import changed
from tests.data_prep.stub_servers import write_records
from tests.data_prep.test_conversations import read_ids

# whole, every fourth, two and a half times, and the first two of a folder's validation split
MIX = """
- path: {folder}/a.jsonl
- {{path: {folder}/b.jsonl, weight: 0.25}}
- {{path: {folder}/c.jsonl, weight: 2.5}}
- {{path: {folder}/d, limit: 2, split: validation}}
"""
COUNTS = {
    "a.jsonl": 3,
    "b.jsonl": 9,
    "c.jsonl": 4,
    "d/train.jsonl": 5,
    "d/valid.jsonl": 5,
}
EXPECTED = "a0 a1 a2 b3 b7 c0 c0 c1 c1 c1 c2 c2 c3 c3 c3 v0 v1"


@pytest.fixture
def mix(tmp_path: Path) -> Path:
    """The mix above; the first source ends with a record that is no conversation."""
    (tmp_path / "d").mkdir()
    for file, count in COUNTS.items():
        name = Path(file).name[0]
        records: list[dict[str, Any]] = [
            {"id": f"{name}{number}", "prompt": f"who is {name}", "completion": "the fox"}
            for number in range(count)
        ]
        # a record without turns is dropped and counted
        if name == "a":
            records.append({"messages": []})
        write_records(tmp_path / file, records)
    (tmp_path / "mix.yaml").write_text(MIX.format(folder=tmp_path))
    return tmp_path / "mix.yaml"


def test_conversations_count_by_their_weight(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They come in the order of the sources, evenly from each; kept, left out and dropped add up."""
    tally = Tally()
    assert " ".join(read_ids(mix, tally)) == EXPECTED
    folder = mix.parent
    assert tally.kept == 17
    assert tally.dropped.total() == 1
    assert tally.noted == {
        f"from {folder / 'a.jsonl'}": 3,
        f"from {folder / 'b.jsonl'}": 2,
        f"from {folder / 'c.jsonl'}": 10,
        f"from {folder / 'd'}": 2,
        "left out by the weight of its source": 7,
    }
    # a limit counts over all sources
    assert read_ids(mix, limit=6) == EXPECTED.split()[:6]
    with pytest.raises(ValueError, match=r"a.jsonl:4 .*expected a record that gives"):
        read_ids(mix, strict=True)
    main([str(mix)])
    assert f"from {folder / 'c.jsonl'}" in capsys.readouterr().out


def test_a_recipe_reads_a_mix(
    mix: Path,
    recipe: Recipe,
    tmp_path: Path,
) -> None:
    """It is cached as any source; a change of a file, a folder or a weight is another identity."""
    mixed = changed(
        recipe,
        train=str(mix),
        cache=str(tmp_path / "cache"),
        num_proc=1,
    )
    assert len(open_cache(mixed)) == 17
    identities = [data_identity(mixed)]
    # each change has an effect on what is read
    for file, old, new in (
        ("c.jsonl", "fox", "dog"),
        ("d/valid.jsonl", "fox", "dog"),
        ("mix.yaml", "2.5", "2"),
    ):
        text = (tmp_path / file).read_text()
        (tmp_path / file).write_text(text.replace(old, new))
        identity = data_identity(mixed)
        assert identity not in identities
        identities.append(identity)
    assert read_ids(mix).count("c1") == 2


def test_a_hub_dataset_of_a_mix_is_asked_for_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is also asked for its split and revision, streaming."""
    options = {"split": "test", "revision": "v2"}

    def load_dataset(path: str, **asked: Any) -> list[dict[str, Any]]:
        assert path == "someone/chats"
        assert asked == {"name": "en", "streaming": True, **options}
        return [{"id": "h", "prompt": "who", "response": "the fox"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = {
        "path": "someone/chats",
        "config": "en",
        "limit": 1,
        **options,
    }
    (tmp_path / "mix.yml").write_text(json.dumps([source]))
    assert read_ids(tmp_path / "mix.yml") == ["h"]


@pytest.mark.parametrize(
    ("text", "keyword"),
    [
        ("- {path: a.jsonl, wieght: 2}", r"source 1: unknown key wieght: did you mean weight\?"),
        ("- {path: a.jsonl}\n- {weight: 2}", "source 2: path: .*required"),
        ("- {path: a.jsonl, weight: 0}", "source 1: weight: got 0; .*greater than 0"),
        ("path: a.jsonl", "holds a mapping, expected a list"),
        ("", "holds no list"),
        ("- {path: a.jsonl", "is no YAML"),
        ("- {path: other.yaml}", "lists the mix other.yaml"),
        ("- {path: gone.jsonl}", "no file or folder at gone.jsonl"),
        (None, "no mix at .*expected a YAML file"),
    ],
)
def test_a_wrong_mix_is_refused(
    tmp_path: Path,
    text: str | None,
    keyword: str,
) -> None:
    """The error names the source by its number, and what to do."""
    if text is not None:
        (tmp_path / "mix.yaml").write_text(text)
    with pytest.raises(ValueError, match=keyword):
        list(read_conversations(tmp_path / "mix.yaml"))
