"""One OpenAI-compatible server, once it has shown that it runs the recipe's target and samples from it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.chats.records import says_something
from data_prep.image_texts import for_server
from data_prep.servers.answers import Answer, Prompt
from data_prep.servers.health import IN_A_ROW, Backoff, Health, persist
from data_prep.servers.replies import OddReply, answer_in, first_choice, models_in, whole_number
from data_prep.servers.sampler_check import CAUSE, LIKELIEST, PROBE_TOKENS, PROBES, SamplerCheck
from data_prep.servers.transport import Failure, Kind, Transport
from data_prep.servers.usage import Usage
from data_prep.servers.workers import merge
from eagle.core.noise import mix64
from eagle.recipe import RegenerateSection, TargetSection

PROBE = [
    {
        "role": "user",
        "content": "Hello, wörld!  Count:\t1234567890 3.14\n\n\nПривет, 世界 こんにちは 안녕 مرحبا 🙂👩‍👩‍👧",
    },
    {
        "role": "assistant",
        "content": "def f(x_1: int) -> str:\n        return f'{x_1 ** 2:>10}'  # snake_case",
    },
    {
        "role": "user",
        "content": "  CamelCase, ÅNGSTRÖM, e\u0301, http://a.b/c?d=%20&e     and the rest?  ",
    },
]


class Endpoint:
    """An OpenAI-compatible server that runs the recipe's target."""

    def __init__(
        self,
        url: str,
        target: TargetSection,
        section: RegenerateSection,
        template_kwargs: dict[str, Any],
        backoff: Backoff,
        key: str = "",
    ) -> None:
        self.transport = Transport(url, section, key)
        self.url = self.transport.url
        self.target = target
        self.section = section
        self.backoff = backoff
        self.kwargs = {"chat_template_kwargs": template_kwargs} if template_kwargs else {}
        self.sampler: SamplerCheck | None = None
        self.probe_ids: list[int] | None = None
        # One bad batch of requests must not condemn a server.
        self.patience = max(20, 2 * section.in_flight)
        self.health = Health(max(section.attempts, IN_A_ROW), self.patience, backoff)
        self.usage = Usage()
        # The number of answers so far, as long as all of them are empty, then None.
        self.empty: int | None = 0
        try:
            entry = persist(self._find_model, section.attempts, backoff)
        except Failure as failure:
            raise ValueError(
                f"no answer from {failure}: start a server of {target.adapter or target.path} there, correct "
                "regenerate.endpoint, or set regenerate.endpoint=null to decode here"
            ) from None
        self.model: str = entry["id"]
        self.positions = whole_number(entry.get("max_model_len"))

    def check_tokenizer(self, ids: list[int]) -> None:
        """Refuse a server that reads the probe as another number of tokens than our tokenizer."""
        self.probe_ids = ids
        try:
            persist(self._count_probe, self.section.attempts, self.backoff)
        except Failure as failure:
            raise ValueError(
                f"no answer to the probe conversation from {failure}: see the server's log"
            ) from None

    def check_sampling(self, ids: list[int], vocab_size: int) -> None:
        """Refuse a server whose answers to the probe are unlikely by its own probabilities, or are nonsense."""
        if self.section.temperature == 0:
            return
        sampler = SamplerCheck(vocab_size, self.section.temperature)

        def ask(number: int, likeliest: bool) -> str | None:
            prompt = Prompt(PROBE, None, ids, PROBE_TOKENS, request=number)
            request = partial(self._ask, prompt, likeliest=likeliest)
            choice, _ = persist(request, self.section.attempts, self.backoff)
            return sampler.add(choice, PROBE)

        # Some servers refuse to return probabilities.
        with suppress(Failure):
            ask(PROBES - 1, True)
        sampler.tells_probs = bool(sampler.draws)
        if not sampler.tells_probs:
            print(
                f"{self.url} tells no probabilities: its answers are searched for broken characters alone"
            )
        num_streams = min(self.section.in_flight, PROBES - 1)
        streams = []
        for start in range(num_streams):
            numbers = range(start, PROBES - 1, num_streams)
            streams.append(map(partial(ask, likeliest=sampler.tells_probs), numbers))
        try:
            faults = list(merge(streams))
        except Failure as failure:
            raise ValueError(
                f"no answer to the probe conversation from {failure}: see the server's log"
            ) from None
        # The last check is of all answers together.
        if faults[-1]:
            raise ValueError(f"{self.url} does not sample from its model: {faults[-1]}. {CAUSE}")
        self.sampler = sampler

    def check_again(self) -> None:
        """Refuse a server that was started anew with another model or template; a Failure if it is not back."""
        self.model = self._find_model()["id"]
        if self.probe_ids is not None:
            self._count_probe()

    def answer(self, prompt: Prompt) -> Answer:
        """Return the server's answer."""
        choice, usage = self._ask(
            prompt, likeliest=self.sampler is not None and self.sampler.is_due()
        )
        answer = self._read(answer_in, choice, usage)
        fault = self.sampler.add(choice, prompt.messages) if self.sampler else None
        if fault:
            raise ValueError(
                f"{self.url} does not sample from its model any more: {fault}. What was written before stays; the last "
                f"of it may be as wrong: remove {self.section.out}.parts to have all asked for again. {CAUSE}"
            )
        if self.empty is not None:
            self.empty = None if says_something(answer.message) else self.empty + 1
        # One empty answer may be right; nothing but empty ones means a wrong set-up.
        if self.empty == self.patience:
            raise ValueError(
                f"{self.url} gave {self.empty} answers, all empty: see how it answers by hand, correct it, and remove "
                f"{self.section.out}.parts to have all asked for again"
            )
        return answer

    def _ask(
        self, prompt: Prompt, *, likeliest: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the first choice of the server's reply, with the likeliest tokens if asked for, and its usage."""
        section = self.section
        request: dict[str, Any] = {"model": self.model, "messages": for_server(prompt.messages)}
        if prompt.tools:
            request["tools"] = prompt.tools
        request |= {
            "max_tokens": prompt.room,
            "temperature": section.temperature,
            "top_p": section.top_p,
            # Some servers take only 31 bits.
            "seed": mix64(mix64(section.seed) ^ prompt.request) % 2**31,
            **self.kwargs,
        }
        if likeliest:
            request |= {"logprobs": True, "top_logprobs": LIKELIEST}
        return self._read(first_choice, self.transport.send("/chat/completions", request))

    def _read(self, read: Callable[..., Any], *reply: Any) -> Any:
        """Read a reply; an odd one is a failure of this server, and of one conversation alone."""
        try:
            return read(*reply)
        except OddReply as error:
            raise self.transport.failure(f" {error}", Kind.ODD) from None

    def _count_probe(self) -> None:
        """Refuse the server if the probe conversation has another number of tokens there."""
        ids = self.probe_ids or []
        _, usage = self._ask(Prompt(PROBE, None, ids, 1, 0))
        counted = whole_number(usage.get("prompt_tokens"))
        if counted != len(ids):
            raise ValueError(
                f"{self.url} reads the probe conversation as {counted} tokens, the recipe's tokenizer and template as "
                f"{len(ids)}: start the server with the recipe's model, tokenizer and chat template, or correct "
                "target.path, data.template and data.template_kwargs"
            )

    def _find_model(self) -> dict[str, Any]:
        """Return the server's entry for the recipe's target, or for the model that the recipe names for servers."""
        path = self.target.adapter or self.target.path
        name = self.section.model
        names = [path, Path(path).name, str(Path(path).resolve())]
        if name:
            names = [name]
        try:
            models = self._read(
                models_in, self.transport.send("/models", timeout=self.section.connect_timeout)
            )
        except Failure as failure:
            if name is None or failure.kind is not Kind.REFUSED:
                raise
            # A gateway need not list the models that it serves.
            models = []
        for model in models:
            if model["id"] in names or (name is None and model.get("root") in names):
                return model
        if name is not None:
            return {"id": name}
        raise ValueError(
            f"{self.url} serves {[model.get('id') for model in models]}, expected {path} or {Path(path).name}: start "
            "it with the recipe's target, correct target.path or regenerate.endpoint, or name its model by "
            "regenerate.model"
        )
