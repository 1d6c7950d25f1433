"""The released step of a head that guesses several tokens at once, as `bench.rivals.serve` describes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import LlamaConfig

from bench.rivals.eagle_step import random_examples, random_target_head
from bench.rivals.serve import DTYPES, Step, Work, serve, update_step
from tests.published_eagle1 import padded
from tests.released_levels import PLAIN


def side(work: Work) -> tuple[Step, Iterable[nn.Parameter]]:
    """The plain rendering, with all weights in fp32."""
    config = LlamaConfig.from_pretrained(work.target)
    frozen = random_target_head(work, config, DTYPES["fp32"])
    embedding = frozen.embedding.get_parameter("weight")
    head = PLAIN[work.head["kind"]](config, work.head).to(work.device)
    batches = [padded(batch, work.device) for batch in random_examples(work, 1, config.hidden_size)]
    parameters = [*head.parameters()]
    return update_step(lambda i: head.loss(batches[i], embedding, frozen.weight), parameters, work), parameters


if __name__ == "__main__":
    serve(side)
