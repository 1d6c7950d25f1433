"""Every argument of every public call refuses odd values with an error of this project, never with a raw one."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from functools import partial
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
LARGE = 10**30
ODD: list[Any] = [
    None,
    "x",
    "",
    -1,
    0,
    1.5,
    math.nan,
    math.inf,
    True,
    LARGE,
    [],
    [None],
    ["x"],
    {},
    {1},
    object(),
    int,
    torch.ones(2, 2),
    b"x",
    lambda: 1,
]
# odd values that an argument takes nevertheless, by their representation: 1 and True are equal
DECODING: dict[str, list[Any]] = {
    "target": [],
    "drafter": [],
    "prompt": [],
    "sampling": [None],
    "max_new_tokens": [],
    "stop": [
        None,
        0,
        [],
        {},
        {1},
    ],
    "budget": [None],
    "timing": [True],
    "trace": [None],
    "batch_size": [None, LARGE],
    "max_tokens_in_cache": [None, LARGE],
}
SHARED = ("target", "drafter", "prompt", "max_new_tokens", "stop", "budget")
BEAMS: dict[str, list[Any]] = {
    **{name: DECODING[name] for name in SHARED},
    # as many as are asked for are made
    "beams": [LARGE],
    "length_penalty": [-1, 0, 1.5],
    "early_stopping": [True],
    "num_return_sequences": [],
    "processors": [[], {}],
}
SETTINGS: dict[Callable[..., Any], dict[str, list[Any]]] = {
    partial(Sampling, temperature=1.0): {
        "temperature": [0, 1.5, LARGE],
        "top_k": [0, LARGE],
        "top_p": [],
        "min_p": [0],
        "repetition_penalty": [1.5, LARGE],
        "seed": [-1, 0, LARGE],
        "request": [-1, 0, LARGE],
        "rule": [None],
        "lenience": [],
        "typical": [None],
    },
    Budget: {
        "nodes": [0, LARGE],
        "depth": [0, LARGE],
        "top_k": [0, LARGE],
        "paths": [None, [], {}],
        "draw": [],
        "sharpness": [None, 1.5, LARGE],
        "confidence": [None, 0],
    },
    partial(DraftTree, tokens=torch.tensor([1, 2]), parents=torch.tensor([-1, 0])): {
        "tokens": [],
        "parents": [],
        # one row for each node
        "draft_probs": [None, torch.ones(2, 2)],
        "likelihoods": [None],
    },
    partial(Goodput, draft=[0.0, 1.0], read=[1.0, 1.0]): {
        "draft": [],
        "read": [],
        "budget": [None],
        "share": [0],
        "memory": [LARGE],
        "costs": [None],
    },
}


def is_ours(error: Exception) -> bool:
    """Return whether the error comes from a `raise` of this project."""
    # the innermost one: a raw error of torch or Python ends elsewhere
    frame = traceback.extract_tb(error.__traceback__)[-1]
    is_inside = Path(eagle.__file__).parent in Path(frame.filename).parents
    return is_inside and "raise" in (frame.line or "")


def check_refused(
    call: Callable[[], Any],
    said: str,
) -> None:
    """Fail unless a call ends with a sentence of ours."""
    try:
        result = call()
        # a stream begins when it is read
        if isinstance(result, Iterator):
            list(result)
    except (ValueError, TypeError) as error:
        assert is_ours(error), f"{said}: {error!r}"
        assert len(str(error)) > 20, f"{said}: {error!r}"
        assert " " in str(error), f"{said}: {error!r}"
    else:
        pytest.fail(f"{said} is accepted: {result!r:.80}")


def check_argument(
    call: Callable[..., Any],
    name: str,
    right: list[Any],
) -> None:
    """Try all odd values of one argument of a call whose other arguments are right."""
    shown = [repr(value) for value in right]
    for value in ODD:
        if repr(value) not in shown:
            check_refused(partial(call, **{name: value}), f"{name}={value!r:.30}")


@pytest.fixture(scope="module")
def target() -> Target:
    """Return a llama of random weights."""
    return Target(build("llama"))


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("decode", [generate, stream])
def test_decoding(
    decode: Callable[..., Any],
    name: str,
    target: Target,
) -> None:
    """Of one prompt, and of several where lists are read otherwise."""
    call = partial(
        decode,
        target=target,
        drafter=NoDrafter(),
        prompt=PROMPT,
        max_new_tokens=2,
    )
    check_argument(call, name, DECODING[name])
    several = partial(
        call,
        prompt=[PROMPT, PROMPT[1:]],
    )
    if name == "prompt":
        for value in ODD:
            check_refused(partial(call, prompt=[PROMPT, value]), f"[..., {value!r:.30}]")
    elif name == "trace":
        check_refused(partial(several, trace=[]), "trace=[]")
    else:
        check_argument(several, name, DECODING[name])


@pytest.mark.parametrize("name", BEAMS)
def test_beam_search(name: str, target: Target) -> None:
    """Processors are called, and so are tried before."""
    call = partial(
        beam_search, target=target, drafter=NgramDrafter(), prompt=PROMPT, max_new_tokens=2
    )
    check_argument(call, name, BEAMS[name])


@pytest.mark.parametrize("make", SETTINGS)
def test_settings(make: Callable[..., Any]) -> None:
    """All fields of the classes that hold settings and drafts; odd values that make sense are taken."""
    for name, right in SETTINGS[make].items():
        check_argument(make, name, right)
        for value in right:
            make(**{name: value})


@pytest.mark.parametrize(
    "value",
    ODD,
    ids=lambda value: f"{value!r:.12}",
)
def test_targets_and_drafters(
    value: Any,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is loaded, and what it is loaded from."""
    # a name of no model is looked up on the hub, with retries
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    measure = partial(Goodput.measure, target, NoDrafter(), PROMPT)
    calls = [
        partial(Target, value),
        partial(Target.load, value),
        partial(Target.load, tmp_path, dtype=value),
        partial(Target.load, tmp_path, device=value),
        partial(load_drafter, value, target),
        partial(load_drafter, "ngram", value),
        partial(target.chat, value),
    ]
    # None stands for one prompt at a time
    if value is not None:
        calls.append(partial(measure, batch_sizes=value))
    # no processors are greedy decoding
    if repr(value) not in ("[]", "{}"):
        calls.append(partial(Sampling.from_processors, value))
    for call in calls:
        check_refused(call, f"{value!r:.30}")
