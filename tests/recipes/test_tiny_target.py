"""The embedded default: a real little chat model, made the same way every time, that engines can read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import islice
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
from recipes.tiny.make_target import (
    MODELS,
    make_once,
    make_target,
    new_model,
    pack_conversations,
    read_report,
)
from recipes.tiny.train_target import SAVE_EVERY, train
from recipes.tiny.train_tokenizer import END, SPECIAL

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


@pytest.fixture(scope="module")
def tokenizer(tiny_target_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_target_dir / "target")


@pytest.fixture(scope="module")
def pieces(tiny_target_dir: Path) -> SentencePieceProcessor:
    return SentencePieceProcessor(model_file=str(tiny_target_dir / "target" / "tokenizer.model"))


def records(folder: Path, split: str) -> list[dict[str, Any]]:
    """The lines of a data file."""
    return [
        json.loads(line) for line in (folder / "data" / f"{split}.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def texts(tiny_target_dir: Path) -> list[str]:
    return ODD + [
        turn["value"]
        for record in records(tiny_target_dir, "heldout")
        for turn in record["conversations"]
    ]


def test_decoding_gives_back_what_was_encoded(tokenizer: Any, texts: list[str]) -> None:
    assert [
        tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts
    ] == texts


def test_sentencepiece_and_transformers_agree_on_every_id(
    tokenizer: Any, pieces: SentencePieceProcessor, texts: list[str]
) -> None:
    assert pieces.encode(texts) == tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert pieces.decode(pieces.encode(texts)) == texts
    assert pieces.get_piece_size() == len(tokenizer)


def test_special_tokens_are_control_symbols_of_the_same_id(
    tokenizer: Any, pieces: SentencePieceProcessor
) -> None:
    for token in ["<s>", "</s>", "<pad>", *SPECIAL]:
        assert pieces.piece_to_id(token) == tokenizer.convert_tokens_to_ids(token)
        assert pieces.is_control(pieces.piece_to_id(token))
        assert tokenizer(token, add_special_tokens=False)["input_ids"] == [
            pieces.piece_to_id(token)
        ]
    assert (
        tokenizer.decode(tokenizer("<|user|>hi<|end|>")["input_ids"], skip_special_tokens=True)
        == "hi"
    )


def test_offsets_point_into_the_text(tokenizer: Any) -> None:
    text = "def  f(x):\n    return `x`"
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert "".join(text[first:last] for first, last in encoded["offset_mapping"]) == text


def test_the_template_marks_every_turn(tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}]
    asked = "<s><|system|>\nBe brief.<|end|>\n<|user|>\nHi?<|end|>\n<|assistant|>\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == asked
    answered = tokenizer.apply_chat_template(
        [*chat, {"role": "assistant", "content": "Yes."}], tokenize=False
    )
    assert answered == asked + "Yes.<|end|>\n"


def test_the_folder_says_what_engines_ask(tiny_target_dir: Path, tokenizer: Any) -> None:
    config = AutoConfig.from_pretrained(tiny_target_dir / "target")
    stops = GenerationConfig.from_pretrained(tiny_target_dir / "target").eos_token_id
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.vocab_size == len(tokenizer) >= 2048 <= config.max_position_embeddings
    assert (
        config.num_hidden_layers >= 10
        and config.head_dim % 32 == 0
        and not config.tie_word_embeddings
    )
    assert stops == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)]


def test_the_splits_share_no_module_and_no_address(tiny_target_dir: Path) -> None:
    train, heldout = (records(tiny_target_dir, split) for split in ("train", "heldout"))
    assert heldout and not {record["module"] for record in train} & {
        record["module"] for record in heldout
    }
    assert not re.search(r"\bat 0x[0-9a-fA-F]", json.dumps(train + heldout))


def test_parsing_keeps_what_is_public() -> None:
    box, opened = parse_source("shop._boxes", SOURCE.encode())
    assert (box.name, box.kind, opened.name, opened.kind) == (
        "shop.Box",
        "class",
        "shop.Box.open",
        "method",
    )
    assert extract_prose(box.docstring) == "Keep a value for `shop.Reader` to find."
    assert extract_prose(opened.docstring) == "Open the `box` and look at what is inside."
    assert (
        call_answer(box)
        == "```python\nBox(value, *, lid=None)\n```\nIt takes 2 arguments: `value` and `lid`."
    )
    assert "open(slowly=False, *keys)" in str(call_answer(opened))


def test_harvesting_imports_only_modules_written_in_c() -> None:
    loaded = set(sys.modules)
    assert sum(1 for _ in islice(docstring_conversations(False, set(), Counter()), 600)) == 600
    assert set(sys.modules) - loaded <= set(C_MODULES)


def test_a_finished_target_is_kept_and_an_unfinished_one_is_not(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    report = json.loads((tiny_target_dir / "target_report.json").read_text())
    settings = report["settings"]
    again = make_target(
        tiny_target_dir, settings["steps"], settings["seed"], settings["max_conversations"]
    )
    assert again == report
    assert read_report(tiny_target_dir, {**settings, "seed": settings["seed"] + 1}) is None
    (tmp_path / "target").mkdir()
    assert read_report(tmp_path, settings) is None


def test_half_of_a_hybrid_is_linear_attention(tokenizer: Any) -> None:
    """Every second layer; it has as many parameters as the Llama, to a twentieth, and generates text by itself."""
    llama, hybrid = (new_model(tokenizer, model).eval() for model in ("llama", "hybrid"))
    cache = hybrid.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=4, return_dict_in_generate=True
    ).past_key_values
    assert [hasattr(layer, "recurrent_states") for layer in cache.layers] == 5 * [True, False]
    assert hybrid.num_parameters() == pytest.approx(llama.num_parameters(), rel=0.05)
    assert hybrid.generation_config.to_dict() == llama.generation_config.to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MODELS)
def test_the_same_seed_gives_the_same_weights(
    architecture: str, tiny_target_dir: Path, tokenizer: Any, tmp_path: Path
) -> None:
    rows = pack_conversations(records(tiny_target_dir, "train"), tokenizer)

    def trained(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        model = new_model(tokenizer, architecture)
        train(model, rows, 3, seed, bf16=True, begun=tmp_path / "begun.pt")
        return model.state_dict()

    once, again, other = trained(0), trained(0), trained(1)
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert not torch.equal(once["lm_head.weight"], other["lm_head.weight"])


def test_a_training_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """Stopped at any step and begun again, the weights are those of a run that was not stopped."""
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(vocab_size=40, **sizes)
    rows = torch.randint(40, (10, 12), generator=torch.Generator().manual_seed(0))
    steps = 2 * SAVE_EVERY + 3

    def trained(begun: Path, stop: int | None = None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model, forwards = LlamaForCausalLM(config), iter(range(steps))

        def interrupt(*_: Any) -> None:
            if next(forwards) == stop:
                raise KeyboardInterrupt

        model.register_forward_pre_hook(interrupt)
        train(model, rows, steps, seed=0, bf16=False, begun=begun)
        return model.state_dict()

    whole = trained(tmp_path / "whole.pt")
    for stop in (3, SAVE_EVERY + 5, 2):  # of a run that the second leaves to the third
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "stopped.pt", stop)
    resumed = trained(tmp_path / "stopped.pt")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_state_of_a_stopped_build_is_kept_for_its_settings_alone(tmp_path: Path) -> None:
    """A build that is stopped finds its file again; other settings find none; what is published leaves none."""
    seen: list[tuple[str, bool]] = []

    def build(folder: Path, begun: Path, stop: bool) -> dict[str, Any]:
        seen.append((begun.name, begun.is_file()))
        begun.write_text("state")
        if stop:
            raise KeyboardInterrupt
        (folder / "target").mkdir()
        (folder / "data").mkdir()
        for split in ("train", "heldout"):
            (folder / "data" / f"{split}.jsonl").write_text("")
        return {}

    for settings in ({"steps": 1}, {"steps": 1}, {"steps": 2}):
        with pytest.raises(KeyboardInterrupt):
            make_once(tmp_path, settings, partial(build, stop=True))
    make_once(tmp_path, {"steps": 1}, partial(build, stop=False))
    assert [was_there for _, was_there in seen] == [False, True, False, True]
    assert seen[0][0] == seen[1][0] == seen[3][0] != seen[2][0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "data",
        "target",
        "target_report.json",
    ]


@pytest.mark.slow
@pytest.mark.long
def test_weights_and_data_depend_on_no_hash_seed_and_no_directory(tmp_path: Path) -> None:
    call = "from recipes.tiny.make_target import make_target; make_target('made', steps=3, max_conversations=1500)"
    for seed in "12":
        (tmp_path / seed).mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(
            [sys.executable, "-c", call], cwd=tmp_path / seed, env=environment, check=True
        )
    for file in (
        "target/model.safetensors",
        "target/tokenizer.model",
        "data/train.jsonl",
        "data/heldout.jsonl",
    ):
        assert (tmp_path / "1/made" / file).read_bytes() == (
            tmp_path / "2/made" / file
        ).read_bytes()


@pytest.mark.slow
@pytest.mark.long
def test_the_full_target_is_a_language_model(tmp_path: Path) -> None:
    report = make_target(tmp_path)
    print(
        json.dumps(
            {
                name: value
                for name, value in report.items()
                if name not in ("settings", "docstrings")
            }
        )
    )
    train, heldout = (records(tmp_path, split) for split in ("train", "heldout"))
    assert not {record["module"] for record in train} & {record["module"] for record in heldout}
    assert not re.search(r"\bat 0x[0-9a-fA-F]", json.dumps(train + heldout))
    assert report["perplexity"] < report["bigram_perplexity"]
