"""A mix gives the conversations of its sources, each as often as it says, and stands wherever a source does."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chats import changed

from data_prep.conversations import Tally, main, read_conversations
from data_prep.read_once import open_cache
from eagle.data.identity import data_identity
from eagle.recipe import Recipe


def write(path: Path, name: str, count: int, *more: str) -> str:
    """A file of so many conversations with ids of their own, and further lines."""
    path.parent.mkdir(exist_ok=True)
    turns = [("user", f"who is {name}"), ("assistant", "the fox")]
    messages = [{"role": role, "content": text} for role, text in turns]
    records = [
        json.dumps({"id": f"{name}{number}", "messages": messages}) for number in range(count)
    ]
    path.write_text("\n".join([*records, *more]))
    return str(path)


@pytest.fixture
def mix(tmp_path: Path) -> str:
    """Whole, every fourth, two and a half times, and the first two of a folder's training split."""
    sources: list[dict[str, Any]] = [
        {"path": write(tmp_path / "a.jsonl", "a", 3, '{"messages": []}')},
        {"path": write(tmp_path / "b.jsonl", "b", 9), "weight": 0.25},
        {"path": write(tmp_path / "c.jsonl", "c", 4), "weight": 2.5},
        {"path": str(tmp_path / "d"), "limit": 2, "split": "validation"},
    ]
    write(tmp_path / "d/train.jsonl", "t", 5)
    write(tmp_path / "d/valid.jsonl", "v", 5)
    (tmp_path / "mix.yaml").write_text(json.dumps(sources))
    return str(tmp_path / "mix.yaml")


EXPECTED = [
    *("a0", "a1", "a2", "b3", "b7"),
    *("c0", "c0", "c1", "c1", "c1", "c2", "c2", "c3", "c3", "c3", "v0", "v1"),
]


def test_conversations_count_by_their_weight(mix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the sources, evenly over each; what is kept, left out and dropped adds up."""
    tally = Tally()
    assert [conversation.id for conversation in read_conversations(mix, tally)] == EXPECTED
    folder = Path(mix).parent
    counts = {"a.jsonl": 3, "b.jsonl": 2, "c.jsonl": 10, "d": 2}
    per_source = {f"from {folder / name}": count for name, count in counts.items()}
    assert tally.kept == len(EXPECTED) and sum(tally.dropped.values()) == 1
    assert tally.noted == {**per_source, "left out by the weight of its source": 7}
    assert [conversation.id for conversation in read_conversations(mix, limit=6)] == EXPECTED[:6]
    with pytest.raises(
        ValueError, match=r"a.jsonl:4 .*expected a record that gives a conversation"
    ):
        list(read_conversations(mix, strict=True))
    main([mix])
    assert f"from {folder / 'c.jsonl'}" in capsys.readouterr().out


def test_a_recipe_reads_a_mix(mix: str, recipe: Recipe, tmp_path: Path) -> None:
    """Through the cache of tokens; a change of any file, weight or folder is another identity."""
    mixed = changed(recipe, train=mix, cache=str(tmp_path / "cache"), num_proc=1)
    cache = open_cache(mixed)
    assert len(cache) == len(EXPECTED) and cache.tally.noted[f"from {tmp_path / 'c.jsonl'}"] == 10
    seen = [data_identity(mixed)]
    for path in (tmp_path / "c.jsonl", tmp_path / "d/valid.jsonl"):
        path.write_text(path.read_text().replace("fox", "dog"))
        seen.append(data_identity(mixed))
    Path(mix).write_text(Path(mix).read_text().replace("2.5", "2"))
    seen.append(data_identity(mixed))
    assert all(one not in seen[:place] for place, one in enumerate(seen))
    assert Counter(conversation.id for conversation in read_conversations(mix))["c1"] == 2


def test_a_hub_dataset_of_a_mix_is_asked_for_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its split and revision, streaming."""
    import datasets

    asked: list[tuple[str, dict[str, Any]]] = []

    def hub(path: str, **options: Any) -> list[dict[str, Any]]:
        asked.append((path, options))
        return [{"id": "h", "prompt": "who", "response": "the fox"}]

    monkeypatch.setattr(datasets, "load_dataset", hub)
    source = {
        "path": "someone/chats",
        "config": "en",
        "split": "test",
        "revision": "v2",
        "limit": 1,
    }
    (tmp_path / "mix.yml").write_text(json.dumps([source]))
    assert [conversation.id for conversation in read_conversations(tmp_path / "mix.yml")] == ["h"]
    assert asked == [
        ("someone/chats", {"name": "en", "split": "test", "revision": "v2", "streaming": True})
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- {path: a.jsonl, wieght: 2}", r"source 1: unknown key wieght: did you mean weight\?"),
        ("- {path: a.jsonl}\n- {weight: 2}", "source 2: path: got the keys weight; Field required"),
        ("- {path: a.jsonl, weight: 0}", "source 1: weight: got 0; Input should be greater than 0"),
        ("path: a.jsonl", "holds a mapping, expected a list of sources"),
        ("", "holds no list"),
        ("- {path: a.jsonl", "is no YAML: while parsing"),
        ("- {path: other.yaml}", "lists the mix other.yaml: list its sources instead"),
        ("- {path: gone.jsonl}", "no file or folder at gone.jsonl"),
        (None, "no mix at .*expected a YAML file"),
    ],
)
def test_a_wrong_mix_is_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    """By its file, the place in it, and what to do."""
    if text is not None:
        (tmp_path / "mix.yaml").write_text(text)
    with pytest.raises(ValueError, match=reason):
        list(read_conversations(tmp_path / "mix.yaml"))
