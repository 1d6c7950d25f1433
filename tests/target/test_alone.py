"""Targets that read one text at a time: each row of a batch has a forward of its own, and all functions serve them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle import Sampling, Target, beam_search, generate
from eagle.recipe import Recipe
from eagle.target.reader import TreeReader
from eval.measure import measure
from tests.eval.test_measure_batches import ask, key_of, lines_of
from tests.families import random_tokens
from tests.own_answers import answer_naively, search_naively
from tests.target.test_masks import build_small
from tests.target.test_means import CHANGED, DRAFTERS, assert_own, own

# one of each mechanism: offsets, mixers and offsets, a table without a row for each text, the whole model, its steps
TYPES = ["llama4_text", "inkling_text", "mpt", "roformer", "doge"]
EVERY = [
    pytest.param(name, marks=() if name in ("llama4_text", "roformer") else pytest.mark.slow)
    for name in TYPES
]


@contextmanager
def counting_texts(target: Target) -> Iterator[list[int]]:
    """A context that notes the number of texts of every forward."""
    counts, call = list[int](), TreeReader.__call__

    def count(self: TreeReader, tokens: torch.Tensor, *args: Any) -> Any:
        counts.extend([len(tokens)] if self is target.reader else [])
        return call(self, tokens, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeReader, "__call__", count)
        yield counts


@pytest.mark.quick("roformer")
@pytest.mark.parametrize("model_type", EVERY)
def test_a_batch_reads_each_text_by_itself(model_type: str) -> None:
    """Ragged batches of known trees, heads, and the target's own model as draft model, which reads alone as well."""
    bench, dice = own(model_type), random.Random(0)
    assert "one text at a time" in bench.target.describe()
    with counting_texts(bench.target) as counts:
        for seed, kind in enumerate(["trees", "eagle3", "draft_model", "ngram"]):
            found = assert_own(bench, kind, bench.draw(5, seed + 40), 3, dice if seed % 2 else None)
            assert found["shared"]
    assert set(counts) == {1}


@pytest.mark.parametrize("model_type", EVERY)
def test_public_functions_serve_batches(model_type: str) -> None:
    """Many prompts in one call, and a search whose beams are one text."""
    bench = own(model_type)
    prompts = [random_tokens(length, seed=length) for length in (9, 1, 17)]
    expected = [answer_naively(bench.logits(), prompt, 6, Sampling()) for prompt in prompts]
    for kind in ("none", "ngram"):
        traces = generate(
            bench.target, DRAFTERS[kind](bench.target, []), prompts, max_new_tokens=6, stop=[]
        )
        assert [trace.tokens for trace in traces] == expected
    beams, scores = search_naively(bench.logits, prompts[0], 3, 4)
    options: dict[str, Any] = {
        "beams": 3,
        "max_new_tokens": 4,
        "stop": [],
        "num_return_sequences": 3,
    }
    found = beam_search(bench.target, DRAFTERS["ngram"](bench.target, []), prompts[0], **options)
    assert found.near_ties or found.tokens == beams
    assert torch.tensor(found.scores).allclose(torch.tensor(scores), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_answers_are_measured_in_batches(
    model_type: str, recipe: Recipe, tmp_path: Path, base: Any
) -> None:
    """Each answer of a batch is the one of its text alone."""
    model = build_small(model_type, **{**CHANGED.get(model_type, {}), "vocab_size": len(base)})
    model.save_pretrained(tmp_path / "target")
    base.save_pretrained(tmp_path / "target")
    asked = {
        "prompts": {"few": ask(tmp_path, 4)},
        "max_new_tokens": 6,
        "temperatures": [0],
        "batch_size": [1, 3],
    }
    values = {**recipe.model_dump(), "eval": asked | {"drafters": {"ngram": {"head": "ngram"}}}}
    values["target"] = {**values["target"], "path": str(tmp_path / "target"), "dtype": "float32"}
    values["train"] = {**values["train"], "out": str(tmp_path / "run")}
    rows, _ = lines_of(measure(Recipe.parse(values, "alone"), "alone.yaml"))
    answers = {
        size: {key_of(row): row["digest"] for row in rows if row.get("batch_size", 1) == size}
        for size in (1, 3)
    }
    assert answers[1] == answers[3] and len(answers[1]) == 10  # five turns by two drafters
