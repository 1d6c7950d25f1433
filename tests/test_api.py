"""The calls for users take text, messages, names and records, and do what the longer way does."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import eagle
from eagle import Sampling, Target, generate, load_drafter, measure, stream, train
from eagle.decoding import decode
from eagle.formats.checkpoint import WEIGHTS, save_pretrained
from tests.batches import new_head

QUESTION = "What is it?"
CHAT = [{"role": "user", "content": QUESTION}]


def make_records(count: int) -> list[dict[str, Any]]:
    """Return short conversations."""
    records = []
    for number in range(count):
        answer = {"role": "assistant", "content": f"It is the number {number}, which comes next."}
        records.append({"id": str(number), "messages": [*CHAT, answer]})
    return records


@pytest.mark.parametrize("prompt", (QUESTION, CHAT))
def test_text_and_messages_are_prompts(prompt: Any, tiny_target: Target) -> None:
    """Both are one user message; a drafter is named, and loaded once for a target."""
    expected = decode.generate(
        tiny_target,
        load_drafter("ngram", tiny_target),
        tiny_target.chat(QUESTION),
        max_new_tokens=12,
    )
    trace = generate(tiny_target, "ngram", prompt, max_new_tokens=12)
    assert trace.tokens == expected.tokens
    pieces = list(stream(tiny_target, "ngram", prompt, max_new_tokens=12))
    assert [token for piece in pieces for token in piece] == expected.tokens
    assert eagle.api.open_drafter("ngram", tiny_target) is eagle.api.open_drafter(
        "ngram", tiny_target
    )


@pytest.mark.parametrize("prompts", ([QUESTION, "Who?"], [CHAT, CHAT]))
def test_several_prompts_give_several_traces(prompts: Any, tiny_target: Target) -> None:
    """Texts, or chats, in a list."""
    traces = generate(tiny_target, "ngram", prompts, max_new_tokens=6)
    alone = generate(tiny_target, "ngram", prompts[0], max_new_tokens=6)
    assert len(traces) == 2
    assert traces[0].tokens == alone.tokens


def test_settings_of_the_sampling_may_be_named_alone(tiny_target: Target) -> None:
    """They make the Sampling that is meant, and do not stand beside one."""
    options = {"max_new_tokens": 12, "stop": []}
    sampling = Sampling(0.9, top_p=0.8, top_k=20, seed=3)
    expected = generate(
        tiny_target,
        "none",
        QUESTION,
        sampling=sampling,
        **options,
    )
    trace = generate(
        tiny_target, "ngram", QUESTION, temperature=0.9, top_p=0.8, top_k=20, seed=3, **options
    )
    assert trace.tokens == expected.tokens
    with pytest.raises(ValueError, match="expected one of them"):
        generate(tiny_target, "none", QUESTION, sampling=sampling, temperature=0.5)


def test_a_path_is_no_target() -> None:
    """The error says how to load it."""
    with pytest.raises(ValueError, match=r"give Target\.load\('my/model'\)"):
        generate("my/model", "ngram", "Hello")  # type: ignore[arg-type]


def test_the_signature_names_every_option() -> None:
    """`help(eagle.generate)` shows what the decoder takes, with a line for each."""
    ours = inspect.signature(generate).parameters
    for name in inspect.signature(decode.generate).parameters:
        assert name in ours
    for name in set(ours) - {"unknown"}:
        assert f"        {name}: " in (generate.__doc__ or "")


def test_help_opens_with_a_map() -> None:
    """Every public function that a beginner needs stands in the first lines of `help(eagle)`."""
    top = "\n".join((eagle.__doc__ or "").splitlines()[:12])
    for name in ("Target.load", "load_drafter", "generate", "train", "measure", "generate_with"):
        assert name in top
    assert Target.from_pretrained == Target.load


@pytest.mark.slow
def test_a_head_is_trained_and_measured_in_python(tiny_target_dir: Path, tmp_path: Path) -> None:
    """From a model in memory and records to results; twice in one process, with another precision."""
    folder = tiny_target_dir / "target"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    heads = []
    # accelerate keeps the precision of a run for the whole process, unless it is told to forget
    for dtype in ("float32", "bfloat16"):
        head = train(
            model,
            tokenizer,
            make_records(16),
            output_dir=tmp_path / dtype,
            drafter={"fc_bias": False},
            learning_rate=1e-3,
            max_steps=2,
            dtype=dtype,
            validation=0.25,
            decode=2,
        )
        heads.append(head)
    assert json.loads((heads[0] / "config.json").read_text())["settings"]["kind"] == "eagle1"

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in make_records(3)))
    results = measure(
        tmp_path / "float32/target",
        {"head": heads[0], "ngram": "ngram"},
        prompts,
        output_dir=tmp_path / "float32",
        count=2,
        max_new_tokens=8,
    )
    assert {group.drafter for group in results.groups()} == {"none", "head", "ngram"}
    target = Target.from_pretrained(folder, dtype="float32")
    assert generate(target, heads[0], "Who?", max_new_tokens=8).tokens


def test_a_named_head_is_loaded_again_when_it_was_written_anew(
    tiny_target: Target, tmp_path: Path
) -> None:
    """A notebook that trains a head twice into one folder decodes with the second."""
    save_pretrained(new_head("eagle1", tiny_target), tmp_path)
    first = eagle.api.open_drafter(tmp_path, tiny_target)
    assert eagle.api.open_drafter(tmp_path, tiny_target) is first
    os.utime(tmp_path / WEIGHTS, ns=(1, 1))
    assert eagle.api.open_drafter(tmp_path, tiny_target) is not first


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"learning_rat": 1e-3}, "did you mean learning_rate|has no setting"),
    ({"lr": -1}, "train.lr"),
    ({"drafter": {"fc_bais": True}}, "fc_bias"),
    ({"method": "eagle7"}, "eagle7"),
]


@pytest.mark.parametrize(("settings", "keyword"), WRONG)
def test_wrong_settings_are_refused(
    settings: dict[str, Any],
    keyword: str,
    tiny_target_dir: Path,
    tmp_path: Path,
) -> None:
    """As in a recipe, before anything is trained."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in make_records(4)))
    with pytest.raises(ValueError, match=keyword):
        train(
            str(tiny_target_dir / "target"),
            None,
            data,
            output_dir=tmp_path / "out",
            **settings,
        )


def test_a_model_in_memory_needs_its_tokenizer(tiny_target: Target, tmp_path: Path) -> None:
    """It is saved with the model."""
    with pytest.raises(ValueError, match="tokenizer is None"):
        train(tiny_target.model, None, make_records(4), output_dir=tmp_path)
