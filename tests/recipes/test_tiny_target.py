"""The embedded default target: a small real chat model, made the same way every time, that engines can read."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from sentencepiece import SentencePieceProcessor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from recipes.tiny.corpora import (
    C_MODULES,
    call_answer,
    docstring_conversations,
    extract_prose,
    parse_source,
)
from recipes.tiny.make_long import join_turns
from recipes.tiny.make_target import (
    make_once,
    make_target,
    new_model,
    pack_conversations,
    read_report,
)
from recipes.tiny.train_target import SAVE_EVERY, train
from recipes.tiny.train_tokenizer import END, SPECIAL
from tests.eval.jsonl_files import read_lines

# what tokenizers get wrong: spaces, line ends, combining characters, bytes outside of the vocabulary
ODD = [
    "",
    " ",
    "  two  spaces   three ",
    "\n leading and trailing\n\n",
    "tab\tand\r\nreturn",
    "def f(x: int = 1) -> int:\n    return x  # twice\n\n\n",
    "naïve Übergröße, Zażółć, русский, 日本語のテキスト",
    "😀 👩‍👩‍👧 🏳️‍🌈 ﬁ e\u0301 a\u00a0b \u200b",
    "1234567890 3.14e-10 0xff <0x0A> | > < {{ x }}",
]
SOURCE = '''
class Box:
    """Keep a value for :class:`~shop.Reader` to find.

    Args:
        value: anything
    """

    def __init__(self, value, *, lid=None): ...

    def open(self, slowly: bool = False, *keys) -> int:
        """Open the ``box`` and look
        at what is inside. For example::

            >>> box.open()
        """

def _hidden(x):
    """Say nothing about this to anyone at all."""
'''
# what a finished build leaves
FILES = (
    "target/model.safetensors",
    "target/tokenizer.model",
    "data/train.jsonl",
    "data/heldout.jsonl",
)

MAKE = """
from recipes.tiny.make_target import make_target
make_target("made", steps=3, max_conversations=1500)
"""


@pytest.fixture(scope="module")
def tokenizer(tiny_target_dir: Path) -> Any:
    """The tokenizer as transformers loads it."""
    return AutoTokenizer.from_pretrained(tiny_target_dir / "target")


@pytest.fixture(scope="module")
def pieces(tiny_target_dir: Path) -> SentencePieceProcessor:
    """The tokenizer as SentencePiece loads it, which llama.cpp converts."""
    return SentencePieceProcessor(model_file=str(tiny_target_dir / "target" / "tokenizer.model"))


def read_split(folder: Path, split: str) -> list[dict[str, Any]]:
    """Return the conversations of a data file."""
    return read_lines(folder / "data" / f"{split}.jsonl")


@pytest.fixture(scope="module")
def texts(tiny_target_dir: Path) -> list[str]:
    """Odd texts and all turns that are held out."""
    found = list(ODD)
    for record in read_split(tiny_target_dir, "heldout"):
        found += [turn["value"] for turn in record["conversations"]]
    return found


def test_both_tokenizers_give_the_same_ids_and_the_text_back(
    tokenizer: Any,
    pieces: SentencePieceProcessor,
    texts: list[str],
) -> None:
    """SentencePiece and transformers agree on every id, and decoding returns what was encoded."""
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert pieces.encode(texts) == ids
    assert pieces.decode(ids) == texts
    assert [tokenizer.decode(row) for row in ids] == texts
    assert pieces.get_piece_size() == len(tokenizer)


def test_special_tokens_are_control_symbols_of_the_same_id(
    tokenizer: Any, pieces: SentencePieceProcessor
) -> None:
    """Each is one token in both tokenizers, and skipped when text is decoded."""
    for token in ["<s>", "</s>", "<pad>", *SPECIAL]:
        index = pieces.piece_to_id(token)
        assert pieces.is_control(index)
        assert tokenizer(token, add_special_tokens=False)["input_ids"] == [index]

    ids = tokenizer("<|user|>hi<|end|>")["input_ids"]

    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi"


def test_offsets_point_into_the_text(tokenizer: Any) -> None:
    """The characters of all tokens are the text."""
    # two spaces and a line end, which normalisation must not merge
    text = "def  f(x):\n    return `x`"
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert "".join(text[first:last] for first, last in encoded["offset_mapping"]) == text


def test_the_template_marks_every_turn(tokenizer: Any) -> None:
    """Each turn has its role before it and an end after it."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}]
    answered = [*chat, {"role": "assistant", "content": "Yes."}]
    # engines are given this very text
    prompt = "<s><|system|>\nBe brief.<|end|>\n<|user|>\nHi?<|end|>\n<|assistant|>\n"
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    assert render(chat, add_generation_prompt=True) == prompt
    assert render(answered) == prompt + "Yes.<|end|>\n"


def test_the_folder_says_what_engines_ask(tiny_target_dir: Path, tokenizer: Any) -> None:
    """Architecture, sizes and stop tokens are those that serving engines require."""
    folder = tiny_target_dir / "target"
    config = AutoConfig.from_pretrained(folder)

    assert config.architectures == ["LlamaForCausalLM"]
    assert config.vocab_size == len(tokenizer)
    assert min(config.vocab_size, config.max_position_embeddings) >= 2048
    # methods tap early, middle and late layers; engines have kernels for these widths of a head
    assert config.num_hidden_layers >= 10
    assert config.head_dim % 32 == 0
    assert not config.tie_word_embeddings

    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)]
    assert GenerationConfig.from_pretrained(folder).eos_token_id == stops


def check_splits(folder: Path) -> None:
    """Check that the splits share no module, and that no memory address is in the data."""
    train = read_split(folder, "train")
    heldout = read_split(folder, "heldout")
    modules = {record["module"] for record in heldout}
    assert modules
    assert modules.isdisjoint(record["module"] for record in train)
    assert not re.search(r"\bat 0x[0-9a-fA-F]", json.dumps(train + heldout))


def test_the_splits_share_no_module_and_no_address(tiny_target_dir: Path) -> None:
    """A held-out question is about a module that training has not seen."""
    check_splits(tiny_target_dir)


def test_parsing_keeps_what_is_public() -> None:
    """Public classes and methods give prose and a call; sections, examples and markup are left out."""
    box, opened = parse_source("shop._boxes", SOURCE.encode())
    assert (box.name, box.kind) == ("shop.Box", "class")
    assert (opened.name, opened.kind) == ("shop.Box.open", "method")
    assert extract_prose(box.docstring) == "Keep a value for `shop.Reader` to find."
    assert extract_prose(opened.docstring) == "Open the `box` and look at what is inside."

    call = "```python\nBox(value, *, lid=None)\n```\n"
    assert call_answer(box) == call + "It takes 2 arguments: `value` and `lid`."
    assert "open(slowly=False, *keys)" in str(call_answer(opened))


def test_harvesting_imports_only_modules_written_in_c() -> None:
    """Modules in Python are parsed, so that nothing in them runs."""
    # a module in C can only be imported
    loaded = set(sys.modules)
    conversations = islice(docstring_conversations(False, set(), Counter()), 600)
    assert len(list(conversations)) == 600
    assert set(sys.modules) - loaded <= set(C_MODULES)


def test_a_finished_target_is_kept_and_an_unfinished_one_is_not(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    """A report with the same settings marks a finished target."""
    report = json.loads((tiny_target_dir / "target_report.json").read_text())
    settings = report["settings"]
    names = ("steps", "seed", "max_conversations")
    again = make_target(tiny_target_dir, *(settings[name] for name in names))

    assert again == report
    assert read_report(tiny_target_dir, {**settings, "seed": settings["seed"] + 1}) is None

    (tmp_path / "target").mkdir()
    assert read_report(tmp_path, settings) is None


def test_half_of_a_hybrid_is_linear_attention(tokenizer: Any) -> None:
    """Every second layer keeps a state; its size is that of the Llama to a twentieth, and it generates by itself."""
    llama, hybrid = (new_model(tokenizer, model).eval() for model in ("llama", "hybrid"))
    # transformers' own generate shows what the cache keeps
    output = hybrid.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=4, return_dict_in_generate=True
    )
    kept = [hasattr(layer, "recurrent_states") for layer in output.past_key_values.layers]

    assert kept == 5 * [True, False]
    assert hybrid.num_parameters() == pytest.approx(llama.num_parameters(), rel=0.05)
    assert hybrid.generation_config.to_dict() == llama.generation_config.to_dict()


def test_a_training_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """Stopped at any step and started again, it ends with the weights of a run that was not stopped."""
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    rows = torch.randint(40, (10, 12), generator=torch.Generator().manual_seed(0))
    steps = 2 * SAVE_EVERY + 3

    def run(begun: Path, stop: int | None = None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        forwards = iter(range(steps))

        def interrupt(*_: Any) -> None:
            if next(forwards) == stop:
                raise KeyboardInterrupt

        model.register_forward_pre_hook(interrupt)
        train(model, rows, steps, seed=0, bf16=False, begun=begun)
        return model.state_dict()

    whole = run(tmp_path / "whole.pt")
    # before the first state is saved, after it, and before the next
    for stop in (3, SAVE_EVERY + 5, 2):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "stopped.pt", stop)

    torch.testing.assert_close(run(tmp_path / "stopped.pt"), whole, rtol=0, atol=0)


def test_the_state_of_a_stopped_build_is_kept_for_its_settings_alone(tmp_path: Path) -> None:
    """A stopped build finds its state again, other settings do not, and a finished build leaves none."""
    found: list[tuple[str, bool]] = []

    def build(folder: Path, begun: Path, stop: bool) -> dict[str, Any]:
        found.append((begun.name, begun.is_file()))
        begun.write_text("state")
        if stop:
            raise KeyboardInterrupt
        for name in FILES:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("")

        return {}

    for steps in (1, 1, 2):
        with pytest.raises(KeyboardInterrupt):
            make_once(tmp_path, {"steps": steps}, partial(build, stop=True))

    make_once(tmp_path, {"steps": 1}, partial(build, stop=False))
    # the name of the state depends on the settings
    names = [name for name, _ in found]

    assert names[0] == names[1] == names[3] != names[2]
    assert [was_there for _, was_there in found] == [False, True, False, True]

    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"data", "target", "target_report.json"}


def test_joined_conversations_lose_none(tiny_target_dir: Path) -> None:
    """The last sequence may be short, and is there."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir / "target")
    conversations = []
    for i in range(5):
        question = {"from": "human", "value": f"What is {i}?"}
        conversations.append([question, {"from": "gpt", "value": "A number."}])
    joined = [*join_turns(conversations, tokenizer, 40)]
    assert len(joined) > 1
    assert [*chain.from_iterable(joined)] == [*chain.from_iterable(conversations)]


@pytest.mark.slow
@pytest.mark.long
def test_weights_and_data_depend_on_no_hash_seed_and_no_directory(tmp_path: Path) -> None:
    """Two processes with other hash seeds, in other folders, write the same bytes."""
    # sets and hashes of strings differ between these processes
    for seed in "12":
        (tmp_path / seed).mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", MAKE]
        subprocess.run(command, cwd=tmp_path / seed, env=environment, check=True)

    for file in FILES:
        first, second = (tmp_path / seed / "made" / file for seed in "12")
        assert first.read_bytes() == second.read_bytes()


def bigram_perplexity(
    seen: torch.Tensor,
    rows: torch.Tensor,
    vocabulary: int,
    discount: float = 0.75,
) -> float:
    """Return the perplexity of a bigram model with interpolated Kneser-Ney smoothing, fitted on `seen`.

    p(b | a) = (max(c(a b) - d, 0) + d * N(a .) * p(b)) / c(a), where p(b) is proportional to N(. b) + 1, c counts
    occurrences, and N counts different neighbours. After an unseen token it is p(b).
    """
    pair_ids = seen[:, :-1] * vocabulary + seen[:, 1:]
    pairs = torch.bincount(pair_ids.flatten(), minlength=vocabulary**2).view(vocabulary, vocabulary)
    occurrences = pairs.sum(1)
    num_followers = (pairs > 0).sum(1)
    num_predecessors = (pairs > 0).sum(0)
    unigram = (num_predecessors + 1) / (num_predecessors + 1).sum()
    # The tokens a and b of each pair that is judged.
    first = rows[:, :-1].flatten()
    second = rows[:, 1:].flatten()
    numerator = (pairs[first, second] - discount).clamp(min=0) + discount * num_followers[
        first
    ] * unigram[second]
    bigram = numerator / occurrences[first].clamp(min=1)
    likelihood = torch.where(occurrences[first] > 0, bigram, unigram[second])
    return math.exp(-likelihood.double().log().mean().item())


@pytest.mark.slow
@pytest.mark.long
def test_the_full_target_is_a_language_model(tmp_path: Path) -> None:
    """Trained with all steps, it predicts held-out text better than counts of two tokens do."""
    report = make_target(tmp_path)
    check_splits(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    seen, rows = (
        pack_conversations(read_split(tmp_path, split), tokenizer) for split in ("train", "heldout")
    )
    assert report["perplexity"] < bigram_perplexity(seen, rows, len(tokenizer))
