"""Every argument of every public call, given what it is not: refused in a sentence of ours, never by a raw error."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import eagle
from eagle import Budget, DraftTree, Sampling, Target, beam_search, generate, load_drafter, stream
from eagle.decoding.goodput import Goodput
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.none import NoDrafter
from tests.families import build

PROMPT = [5, 9, 11, 40]
NAN = float("nan")
ODD: list[Any] = [
    None,
    "x",
    "",
    -1,
    0,
    1.5,
    NAN,
    math.inf,
    True,
    10**30,
    [],
    [None],
    ["x"],
    {},
    {1},
    object(),
    int,
]
ODD += [torch.ones(2, 2), b"x", lambda: 1]
OK: dict[str, Callable[[Any], bool]] = {  # odd values that are right nevertheless
    "sampling": lambda value: value is None,
    "stop": lambda value: value is None or value == 0 or value in ([], {}, {1}),
    "budget": lambda value: value is None,
    "timing": lambda value: value is True,
    "trace": lambda value: value is None,
    "batch_size": lambda value: value is None or value == 10**30,
    "max_tokens_in_cache": lambda value: value is None or value == 10**30,
    "processors": lambda value: value in ([], {}),
    "early_stopping": lambda value: value is True,
    "temperature": lambda value: value in (0, 1.5, 10**30),
    "length_penalty": lambda value: value in (-1, 0, 1.5),
}


def is_right(name: str, value: Any) -> bool:
    """Whether an odd value is none for this argument."""
    return not isinstance(value, torch.Tensor) and bool(OK.get(name, lambda value: False)(value))


def is_ours(error: Exception) -> bool:
    """Whether it was raised on purpose: by a `raise` of this project, or by Python for an argument that is missing."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Path(eagle.__file__).parent in Path(frame.filename).parents and "raise" in (
        frame.line or ""
    )


def assert_refused(call: Callable[..., Any], arguments: dict[str, Any], name: str) -> None:
    """All odd values of one argument."""
    for value in ODD:
        if is_right(name, value) or (
            name == "beams" and repr(value) == repr(10**30)
        ):  # as many are made
            continue
        said = f"{name}={value!r:.30}"
        try:
            result = call(**{**arguments, name: value})
            if isinstance(result, Iterator):
                list(result)
        except (ValueError, TypeError) as error:
            assert is_ours(error), f"{said}: {error!r}"
            assert " " in str(error) and len(str(error)) > 20, f"{said}: {error!r}"
        except Exception as error:
            pytest.fail(f"{said}: {error!r}")
        else:
            pytest.fail(f"{said} is accepted: {result!r:.80}")


@pytest.fixture(scope="module")
def target() -> Target:
    """A llama of random weights."""
    return Target(build("llama"))


DECODING = [
    "target",
    "drafter",
    "prompt",
    "sampling",
    "max_new_tokens",
    "stop",
    "budget",
    "timing",
    "trace",
]
DECODING += ["batch_size", "max_tokens_in_cache"]
BEAMS = [
    "target",
    "drafter",
    "prompt",
    "beams",
    "length_penalty",
    "early_stopping",
    "num_return_sequences",
]
BEAMS += ["max_new_tokens", "stop", "processors", "budget"]


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("many", [False, True])
def test_decoding(name: str, many: bool, target: Target) -> None:
    """Of `generate` and `stream`, with one prompt and with several."""
    arguments: dict[str, Any] = {
        "target": target,
        "drafter": NoDrafter(),
        "prompt": PROMPT,
        "max_new_tokens": 2,
    }
    if many:
        arguments["prompt"] = [PROMPT, PROMPT[1:]]
    for call in (generate, stream):
        if name == "prompt" and many:
            for odd in ODD:
                if odd != [] and not isinstance(odd, torch.Tensor):
                    assert_one(call, {**arguments, "prompt": [PROMPT, odd]})
        elif (name, many) == ("trace", True):
            assert_one(call, {**arguments, "trace": []})
        elif name == "prompt":
            assert_refused(call, arguments, name)
        else:
            assert_refused(call, arguments, name)


def assert_one(call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """A single wrong call."""
    with pytest.raises((ValueError, TypeError)) as caught:
        result = call(**arguments)
        assert not list(result)
    assert is_ours(caught.value), repr(caught.value)


@pytest.mark.parametrize("name", BEAMS)
def test_beam_search(name: str, target: Target) -> None:
    """Processors are called, and so are tried before."""
    arguments = {"target": target, "drafter": NgramDrafter(), "prompt": PROMPT, "max_new_tokens": 2}
    assert_refused(beam_search, arguments, name)


SETTINGS: dict[Callable[..., Any], tuple[dict[str, Any], dict[str, Callable[[Any], bool]]]] = {
    Sampling: (
        {"temperature": 1.0},
        {
            "temperature": lambda v: v in (0, 1.5, 10**30),
            "top_k": lambda v: v in (0, 10**30),
            "top_p": lambda v: False,
            "min_p": lambda v: v == 0,
            "repetition_penalty": lambda v: v in (1.5, 10**30),
            "seed": lambda v: v in (-1, 0, 10**30),
            "request": lambda v: v in (-1, 0, 10**30),
            "rule": lambda v: False,
            "lenience": lambda v: False,
            "typical": lambda v: v is None,
        },
    ),
    Budget: (
        {},
        {
            "nodes": lambda v: v in (0, 10**30),
            "depth": lambda v: v in (0, 10**30),
            "top_k": lambda v: v in (0, 10**30),
            "paths": lambda v: v is None or v in ([], {}),
            "draw": lambda v: False,
            "sharpness": lambda v: v is None or v in (1.5, 10**30),
            "confidence": lambda v: v is None or v == 0,
        },
    ),
    DraftTree: (
        {"tokens": torch.tensor([1, 2]), "parents": torch.tensor([-1, 0])},
        {
            "tokens": lambda v: False,
            "parents": lambda v: False,
            "draft_probs": lambda v: v is None,
            "likelihoods": lambda v: v is None,
        },
    ),
    Goodput: (
        {"draft": [0.0, 1.0], "read": [1.0, 1.0]},
        {
            "draft": lambda v: False,
            "read": lambda v: False,
            "budget": lambda v: v is None,
            "share": lambda v: v == 0,
            "memory": lambda v: v == 10**30,
            "costs": lambda v: v is None,
        },
    ),
}


@pytest.mark.parametrize(
    ("make", "name"), [(make, name) for make, (_, names) in SETTINGS.items() for name in names]
)
def test_settings(make: Callable[..., Any], name: str) -> None:
    """Of the classes that hold settings and drafts."""
    arguments, names = SETTINGS[make]
    right = names[name]
    for value in ODD:
        if isinstance(value, torch.Tensor) and (make, name) == (DraftTree, "draft_probs"):
            continue
        if isinstance(value, (torch.Tensor, bool)) or not right(value):
            try:
                make(**{**arguments, name: value})
            except (ValueError, TypeError) as error:
                assert is_ours(error) and (name in str(error) or "tree" in str(error)), (
                    f"{name}={value!r}: {error!r}"
                )
            else:
                pytest.fail(f"{make.__name__}({name}={value!r:.30}) is accepted")
        else:
            make(**{**arguments, name: value})


@pytest.mark.parametrize("value", ODD, ids=lambda value: f"{value!r:.12}")
def test_targets_and_drafters(
    value: Any, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded, and what it is loaded from; a name of no model is not asked for in the network, with pauses."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for call in (
        lambda: Target(value),
        lambda: Target.load(value),
        lambda: Target.load(tmp_path, dtype=value),
        lambda: Target.load(tmp_path, device=value),
        lambda: load_drafter(value, target),
        lambda: load_drafter("ngram", value),
        lambda: target.chat(value),
        lambda: Goodput.measure(
            target, NoDrafter(), PROMPT, batch_sizes=value if value is not None else 0
        ),
        lambda: Sampling.from_processors(value if value not in ([], {}) else 3),
    ):
        try:
            call()
        except (ValueError, TypeError) as error:
            assert is_ours(error), f"{error!r}"
        else:
            pytest.fail(f"{value!r:.30} is accepted")
