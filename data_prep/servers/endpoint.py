"""Answers of an OpenAI-compatible server, once it has shown that it runs the recipe's target and samples from it."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.error import HTTPError

from data_prep.chats.records import says_something
from data_prep.servers.answers import Answer, Dialogue, Outcome, Prompt
from data_prep.servers.replies import OddReply, answer_in, first_choice, models_in, whole_number
from data_prep.servers.sampler_check import CAUSE, LIKELIEST, PROBE_TOKENS, PROBES, SamplerCheck
from data_prep.servers.workers import run_in_threads
from eagle.core.noise import mix64
from eagle.recipe import RegenerateSection, TargetSection

TIMEOUT = 1800  # seconds that one answer may take
WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before a request is tried again
PROBE = [
    {
        "role": "user",
        "content": "Hello, wörld!  Count:\t1234567890 3.14\n\n\nПривет, 世界 こんにちは 안녕 مرحبا 🙂👩‍👩‍👧",
    },
    {"role": "assistant", "content": "def f(x_1: int) -> str:\n        return f'{x_1 ** 2:>10}'  # snake_case"},
    {"role": "user", "content": "  CamelCase, ÅNGSTRÖM, e\u0301, http://a.b/c?d=%20&e     and the rest?  "},
]


class Endpoint:
    """An OpenAI-compatible server that runs the recipe's target, with `in_flight` requests at a time."""

    def __init__(
        self,
        target: TargetSection,
        section: RegenerateSection,
        template_kwargs: dict[str, Any],
        waits: tuple[float, ...] = WAITS,
    ) -> None:
        assert section.endpoint is not None
        self.url, self.section, self.waits = section.endpoint.rstrip("/"), section, waits
        self.at_once = section.in_flight
        self.kwargs = {"chat_template_kwargs": template_kwargs} if template_kwargs else {}
        self.sampler: SamplerCheck | None = None
        self.patience, self.streak, self.lock = max(20, 2 * section.in_flight), 0, Lock()
        self.empty: int | None = 0  # answers so far, as long as each is empty
        entry = self._find_model(target)
        self.model: str = entry["id"]
        self.positions = whole_number(entry.get("max_model_len"))

    def check_tokenizer(self, ids: list[int]) -> None:
        """Refuse a server that reads the probe as another number of tokens than our tokenizer."""
        try:
            _, usage = self._ask(Prompt(PROBE, None, ids, 1, 0))
        except ConnectionError as error:
            raise ValueError(f"no answer to the probe conversation from {error}: see the server's log") from None
        counted = whole_number(usage.get("prompt_tokens"))
        if counted != len(ids):
            raise ValueError(
                f"{self.url} reads the probe conversation as {counted} tokens, the recipe's tokenizer and template as "
                f"{len(ids)}: start the server with the recipe's model, tokenizer and chat template, or correct "
                "target.path, data.template and data.template_kwargs"
            )

    def check_sampling(self, ids: list[int], vocab_size: int) -> None:
        """Refuse a server whose answers to the probe are unlikely by its own probabilities, or are nonsense."""
        if self.section.temperature == 0:
            return
        sampler = SamplerCheck(vocab_size, self.section.temperature)
        prompts = [Prompt(PROBE, None, ids, PROBE_TOKENS, number) for number in range(PROBES)]
        with suppress(ConnectionError):  # some servers refuse to tell probabilities
            sampler.add(self._ask(prompts.pop(), likeliest=True)[0], PROBE)
        sampler.tells_probs = bool(sampler.draws)
        if not sampler.tells_probs:
            print(f"{self.url} tells no probabilities: its answers are searched for broken characters alone")
        try:
            asked = run_in_threads(iter(prompts), partial(self._ask, likeliest=sampler.tells_probs), self.at_once)
            faults = [sampler.add(choice, PROBE) for _, (choice, _) in asked]
        except ConnectionError as error:
            raise ValueError(f"no answer to the probe conversation from {error}: see the server's log") from None
        if fault := faults[-1]:
            raise ValueError(f"{self.url} does not sample from its model: {fault}. {CAUSE}")
        self.sampler = sampler

    def run(self, dialogues: Iterator[tuple[str, Dialogue]]) -> Iterator[Outcome]:
        """The outcome of every conversation, as they end."""
        outcomes = run_in_threads(dialogues, lambda named: self._finish(named[1]), self.at_once)
        return ((name, outcome) for (name, _), outcome in outcomes)

    def _finish(self, dialogue: Dialogue) -> dict[str, Any] | str:
        if self.streak >= self.patience:
            return f"not tried, after {self.patience} failures in a row"
        answer: Any = None
        try:
            while True:
                with self.lock:  # tokenizers are not safe to share
                    prompt = dialogue.send(answer)
                answer = self._answer(prompt)
                self.streak = 0
        except StopIteration as end:
            return end.value
        except ConnectionError as error:
            self.streak += 1
            return str(error)

    def _answer(self, prompt: Prompt) -> Answer:
        choice, usage = self._ask(prompt, likeliest=self.sampler is not None and self.sampler.is_due())
        answer = self._read(answer_in, choice, usage)
        if self.sampler and (fault := self.sampler.add(choice, prompt.messages)):
            raise ValueError(
                f"{self.url} does not sample from its model any more: {fault}. What was written before stays; the last "
                f"of it may be as wrong: remove {self.section.out}.parts to have all asked for again. {CAUSE}"
            )
        if self.empty is not None:
            self.empty = None if says_something(answer.message) else self.empty + 1
        if self.empty == self.patience:
            raise ValueError(
                f"{self.url} gave {self.empty} answers, all empty: see how it answers by hand, correct it, and remove "
                f"{self.section.out}.parts to have all asked for again"
            )
        return answer

    def _ask(self, prompt: Prompt, *, likeliest: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        """The first choice of the server's reply, with the likeliest tokens at each place if wanted, and its usage."""
        section = self.section
        request = {
            "model": self.model,
            "messages": prompt.messages,
            **({"tools": prompt.tools} if prompt.tools else {}),
            "max_tokens": prompt.room,
            "temperature": section.temperature,
            "top_p": section.top_p,
            "seed": mix64(mix64(section.seed) ^ prompt.request) % 2**31,
            **self.kwargs,
            **({"logprobs": True, "top_logprobs": LIKELIEST} if likeliest else {}),
        }
        return self._read(first_choice, self._post("/chat/completions", request))

    def _read(self, read: Callable[..., Any], *reply: Any) -> Any:
        """Read a reply; an odd one is a failure of this server, and of one conversation alone."""
        try:
            return read(*reply)
        except OddReply as error:
            raise ConnectionError(f"{self.url} {error}") from None

    def _find_model(self, target: TargetSection) -> dict[str, Any]:
        """The server's entry for the recipe's target."""
        path = target.adapter or target.path
        names = {path, Path(path).name, str(Path(path).resolve())}
        try:
            models = self._read(models_in, self._post("/models"))
        except ConnectionError as error:
            raise ValueError(
                f"no answer from {error}: start a server of {path} there, correct regenerate.endpoint, or leave it out "
                "to decode here"
            ) from None
        for model in models:
            if model["id"] in names or model.get("root") in list(names):
                return model
        raise ValueError(
            f"{self.url} serves {[model.get('id') for model in models]}, expected {path} or {Path(path).name}: start "
            "it with the recipe's target, or correct target.path or regenerate.endpoint"
        )

    def _post(self, path: str, payload: dict[str, Any] | None = None) -> Any:
        """The server's reply to a POST, or to a GET without payload; tried again while the server is busy or away."""
        body = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        for wait in (*self.waits, None):
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                    return json.load(reply)
            except HTTPError as error:
                reason = f"{error.code} {error.reason}"
                with suppress(OSError, HTTPException):
                    reason += f" {error.read(200).decode(errors='replace')}"
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, HTTPException, ValueError, RecursionError) as error:
                reason = f"{type(error).__name__}: {error}"
            if wait is not None:
                time.sleep(wait)
        raise ConnectionError(f"{self.url}{path}: {reason}")
