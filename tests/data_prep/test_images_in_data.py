"""Conversations with images: from records to tokens, masks and features."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset
from stub_servers import completion, serving
from transformers import AutoModelForImageTextToText

from data_prep import inspect_mask, regenerate
from data_prep.chats.images import MARK
from data_prep.chats.render import RenderedText
from data_prep.check_mask import faults
from data_prep.conversations import Tally, read_conversations
from data_prep.extract import main as extract
from data_prep.image_texts import ImageReader, as_text, for_server, with_images
from data_prep.read_once import open_cache
from data_prep.tokens import example_of, load_tokenizer, tokenize_each
from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.core.tree import chain_paths
from eagle.data.features import LiveFeatures
from eagle.data.store import FeatureStore
from eagle.drafters import DRAFTERS, settings_of
from eagle.recipe import Recipe
from eval import lossless, measure
from eval.replay import answer, replay
from recipes import train_eagle
from tests.seeing_folders import SPECIAL, make_model, make_processor, read_words, save_llava

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
SIZE = 16  # tokens of an image


@pytest.fixture(scope="module")
def sees(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llava."""
    return save_llava(tiny_target_dir / "target", tmp_path_factory.mktemp("sees"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three images."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(3):
        image = Image.new("RGB", (16 + 8 * number, 16), (200, 90 * number, 10))
        image.paste((0, 0, 255), (2, 2, 9, 5 + number))
        image.save(folder / f"{number}.png")
    return folder


def records(pictures: Path) -> list[dict[str, Any]]:
    """One image or two in each known layout, and a text without."""
    data = (pictures / "2.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    answer = {"role": "assistant", "content": "A box."}
    llava = [
        {"from": "human", "value": "<image>\nWhat is this?"},
        {"from": "gpt", "value": "A red box."},
    ]
    more = [{"from": "human", "value": "And <image> this?"}, {"from": "gpt", "value": "Another."}]
    part = {"type": "image_url", "image_url": {"url": "1.png"}}
    asked = {"role": "user", "content": [{"type": "text", "text": "What?"}, part]}
    return [
        {"id": "llava", "image": "0.png", "conversations": llava},
        {"id": "two", "images": ["0.png", "1.png"], "conversations": llava + more},
        {"id": "openai", "messages": [asked, answer]},
        {"id": "url", "messages": [{**asked, "content": [{"type": "image", "image": url}]}, answer]},
        {"id": "beside", "messages": [{"role": "user", "content": "What?", "images": ["2.png"]}, answer]},
        {"id": "unplaced", "image_path": "2.png", "image_id": 7, "question": "What is it?", "answer": "A box."},
        {"id": "open parts", "images": ["0.png"],
         "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hm?"}]}, answer]},
        {"id": "text", "conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Yes."}]},
    ]  # fmt: skip


def wrong(pictures: Path) -> list[tuple[dict[str, Any], str]]:
    """Records that give nothing, and the reason."""
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A box."}]
    parts = [
        {"role": "user", "content": "Draw."},
        {"role": "assistant", "content": [{"type": "image", "image": "0.png"}]},
    ]
    (pictures / "torn.png").write_bytes((pictures / "0.png").read_bytes()[:40])
    return [
        ({"image": "none.png", "conversations": turns}, "an image that is not there"),
        ({"image": "torn.png", "conversations": turns}, "the processor refuses"),
        ({"image": "https://one.org/a.png", "conversations": turns}, "an image on a server"),
        ({"image": ["0.png", "1.png"], "conversations": turns}, "2 images, and 1 places"),
        ({"messages": parts}, "an image in an answer"),
        ({"video": "a.mp4", "conversations": turns}, "video beside the text"),
        ({"image": 7, "conversations": turns}, "an image that is neither a path nor data: int"),
        ({"image": "a" * 300, "conversations": turns}, "an image that is not there"),
        (
            {"image": "data:image/png;base64,é", "conversations": turns},
            "an image whose data are no base64",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\U000f0000"}]}]},
            "a private character",
        ),
    ]


def make_recipe(
    folder: Path, sees: Path, pictures: Path, lines: list[dict[str, Any]], **data: Any
) -> Recipe:
    """A recipe over these records."""
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = {
        "train": str(folder / "data.jsonl"),
        "cache": str(folder / "cache"),
        "images": str(pictures),
        **data,
    }
    recipe = {
        "target": {"path": str(sees), "dtype": "float32"},
        "data": section,
        "features": {"store": str(folder / "store"), "dtype": "float32"},
        "drafter": {"kind": "eagle1"},
        "train": {"out": str(folder / "out")},
        "eval": {"prompts": str(folder / "data.jsonl"), "count": 2, "max_new_tokens": 8},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return Recipe.load(folder / "recipe.yaml")


def test_every_layout_is_read(pictures: Path, tmp_path: Path) -> None:
    """A mark stands where the image does, with its image beside; without being asked for, such records are dropped."""
    path, tally = tmp_path / "data.jsonl", Tally()
    path.write_text("".join(json.dumps(record) + "\n" for record in records(pictures)))
    read = {one.id: one for one in read_conversations(path, tally, images=True)}
    asked = {
        name: [turn["content"] for turn in one.messages if turn["role"] == "user"]
        for name, one in read.items()
    }
    assert asked == {
        "llava": [f"{MARK}\nWhat is this?"],
        "two": [f"{MARK}\nWhat is this?", f"And {MARK} this?"],
        "openai": [f"What?{MARK}"],
        "url": [MARK],
        "beside": [f"{MARK}What?"],
        "unplaced": [f"{MARK}What is it?"],
        "open parts": [f"{MARK}Hm?"],
        "text": ["Hello?"],
    }
    assert [len(one.images) for one in read.values()] == [1, 2, 1, 1, 1, 1, 1, 0]
    assert read["two"].images == ("0.png", "1.png")
    assert tally.noted["images without a place in the text: shown before it"] == 1
    assert [one.id for one in read_conversations(path)] == ["text"]


def test_tokens_and_masks_are_the_processors(sees: Path, pictures: Path, tmp_path: Path) -> None:
    """Tokens equal the untouched processor's, no image token is supervised, and answers are what the records say."""
    recipe = make_recipe(tmp_path, sees, pictures, records(pictures))
    cache, target = open_cache(recipe), Target.load(sees, dtype="float32")
    image = target.model.config.image_token_index
    answers = ["A red box.", "A red box.Another.", *["A box."] * 5, "Yes."]
    assert len(cache) == 8
    assert (cache.tally.noted["images"], cache.tally.noted["tokens of images"]) == (8, 8 * SIZE)
    for example, said, count in zip(cache, answers, (1, 2, 1, 1, 1, 1, 1, 0), strict=True):
        assert int((example.tokens == image).sum()) == count * SIZE
        assert not (example.loss_mask & (example.tokens == image)).any()
        assert (
            target.tokenizer.decode(example.tokens[example.loss_mask]).replace("</s>", "") == said
        )
    turns = [{"role": "user", "content": [{"type": "image", "image": str(pictures / "0.png")},
                                          {"type": "text", "text": "\nWhat is this?"}]}]  # fmt: skip
    prompt = target.chat(turns)
    assert cache[0].tokens[: len(prompt)].tolist() == prompt


def test_what_cannot_be_shown_is_dropped_with_its_reason(
    sees: Path, pictures: Path, tmp_path: Path
) -> None:
    """And counted; everything else is read."""
    cases = wrong(pictures)
    recipe = make_recipe(
        tmp_path, sees, pictures, [*(record for record, _ in cases), *records(pictures)]
    )
    cache = open_cache(recipe)
    assert len(cache) == 8
    assert sum(cache.tally.dropped.values()) == len(cases)
    for _, reason in cases:
        assert any(reason in dropped for dropped in cache.tally.dropped), (
            reason,
            cache.tally.dropped,
        )
    short = make_recipe(tmp_path, sees, pictures, records(pictures)[:2], max_length=30)
    assert "an image that max_length cuts off" in open_cache(short).tally.dropped


@pytest.mark.slow
def test_features_are_the_models_own(sees: Path, pictures: Path, tmp_path: Path) -> None:
    """Stored and live states equal the hidden states of the untouched model, given its own processor's output."""
    recipe = make_recipe(tmp_path, sees, pictures, records(pictures))
    extract([str(tmp_path / "recipe.yaml")])
    store, cache = FeatureStore(tmp_path / "store"), open_cache(recipe)
    target = Target.load(sees, dtype="float32")
    live = LiveFeatures(target, cache, store.identity)
    stock, processor = (
        AutoModelForImageTextToText.from_pretrained(sees, dtype=torch.float32),
        target.processor,
    )
    for number, example in enumerate(cache):
        if example.shown is None:
            continue
        images = [Image.open(path) for path, _ in example.shown.images]
        asked = processor(
            text=example.shown.text, images=images, return_tensors="pt", add_special_tokens=False
        )
        seen: list[torch.Tensor] = []
        hook = stock.lm_head.register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0][0])
        )
        with torch.no_grad():
            stock(**asked)
        hook.remove()
        end = int(example.loss_mask.nonzero()[-1]) + 1
        for features in (store.read([number])[0].features, live.read([number])[0].features):
            assert features is not None
            kept = ~features[:end, 0].isnan().any(-1)
            torch.testing.assert_close(features[:end, 0][kept], seen[0][:end][kept])
            assert kept.sum() > SIZE


def test_an_image_that_changed_is_refused(sees: Path, pictures: Path, tmp_path: Path) -> None:
    """When features are computed; and where the folder's files differ in size, by the store's identity."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "0.png").write_bytes((pictures / "0.png").read_bytes())
    recipe = make_recipe(tmp_path, sees, mine, records(pictures)[:1])
    cache, target = open_cache(recipe), Target.load(sees, dtype="float32")
    live = LiveFeatures(target, cache, {"taps": [-1], "dtype": "float32"})
    (mine / "0.png").write_bytes((pictures / "1.png").read_bytes())
    with pytest.raises(ValueError, match=r"0\.png is not the one that was there"):
        live.read([0])


def test_planted_faults_are_seen(sees: Path, pictures: Path, tmp_path: Path) -> None:
    """The states of another image differ, and a text that has lost its image is refused."""
    recipe = make_recipe(tmp_path, sees, pictures, records(pictures)[:1])
    cache, target = open_cache(recipe), Target.load(sees, dtype="float32")
    example = cache[0]
    assert example.shown is not None
    other = target.chat(
        [{"role": "user", "content": [{"type": "image", "image": str(pictures / "1.png")}]}]
    )
    right = (
        LiveFeatures(target, [example], {"taps": [-1], "dtype": "float32"}).read([0])[0].features
    )
    wrong_image = target.features(
        example.tokens[None], (-1,), None, {"pixel_values": other.media["pixel_values"]}
    )[0]
    assert right is not None
    assert not torch.allclose(wrong_image[-4:], right[-4:], atol=1e-3)
    with pytest.raises(ValueError, match="stands for an image, and no image"):
        target.features(example.tokens[None], (-1,))


def run_recipe(folder: Path, *overrides: str) -> list[str]:
    """A recipe file with overrides."""
    return [str(folder / "recipe.yaml"), *overrides]


def test_a_head_is_trained_decoded_and_measured(sees: Path, pictures: Path, tmp_path: Path) -> None:
    """From records to a head, with held-out prompts that are decoded with their images, and answers about images."""
    make_recipe(tmp_path, sees, pictures, records(pictures))
    few = [
        "train.max_steps=2",
        "train.batch_size=2",
        "train.validation=0.3",
        "train.decode=2",
        "features.store=null",
    ]
    train_eagle.main(run_recipe(tmp_path, *few, "train.dtype=float32"))
    measure.main(run_recipe(tmp_path))
    lines = (tmp_path / "out/results.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines if '"text"' in line]
    target = Target.load(sees, dtype="float32")
    turns = [{"role": "user", "content": [{"type": "image", "image": str(pictures / "0.png")},
                                          {"type": "text", "text": "\nWhat is this?"}]}]  # fmt: skip
    with torch.no_grad():
        prompt = target.chat(turns)
        said = target.model.generate(
            torch.tensor([prompt]),
            pixel_values=prompt.media["pixel_values"],
            max_new_tokens=8,
            do_sample=False,
        )
    expected = target.tokenizer.decode(said[0, len(prompt) :], skip_special_tokens=True)
    mine = {
        line["drafter"]: line["text"] for line in answers if line.get("conversation") == "llava"
    }
    assert len(mine) > 1 and set(mine.values()) == {expected}
    lossless.main(run_recipe(tmp_path))  # an error if one answer is not the untouched model's


def test_answers_are_regenerated_with_their_images(
    sees: Path, pictures: Path, tmp_path: Path
) -> None:
    """They are the model's own about each image, here and by a server; the new records name the same images."""
    recipe = make_recipe(tmp_path, sees, pictures, records(pictures)[:4])
    target = Target.load(sees, dtype="float32")

    def answer(messages: list[dict[str, Any]], count: int) -> dict[str, Any]:
        prompt = target.chat(messages)
        trace = generate(target, load_drafter("none", target), prompt, max_new_tokens=count)
        text = target.tokenizer.decode(trace.tokens, skip_special_tokens=True)
        return completion(text, trace.finish, prompt_tokens=len(prompt))

    written = []
    with serving(lambda request: answer(request["messages"], request["max_tokens"]), str(sees)) as (
        url,
        _,
    ):
        for place in ("null", url):
            out = tmp_path / f"new-{len(written)}.jsonl"
            overrides = [
                f"regenerate.source={recipe.data.train}",
                f"regenerate.out={out}",
                f"regenerate.endpoint={place}",
            ]
            few = ["regenerate.max_new_tokens=6", "regenerate.keep_truncated=true"]
            regenerate.main(run_recipe(tmp_path, *overrides, *few))
            written.append([json.loads(line) for line in out.read_text().splitlines()])
            read = list(read_conversations(out, images=True))
            assert [len(one.images) for one in read] == [1, 1, 1, 1]
    assert [record["id"] for record in written[0]] == ["llava", "two", "openai", "url"]
    assert written[0][0]["messages"][0]["content"][0] == {"type": "image", "image": "0.png"}
    for here, served in zip(*written, strict=True):
        assert here["messages"] == served["messages"]
    first = [{"role": "user", "content": [{"type": "image", "image": str(pictures / "0.png")},
                                          {"type": "text", "text": "\nWhat is this?"}]}]  # fmt: skip
    text = answer(first, 6)["choices"][0]["message"]["content"]
    assert [record["messages"][1]["content"] for record in written[0][:2]] == [text, text]


def test_a_server_gets_the_images_themselves(sees: Path, pictures: Path, tmp_path: Path) -> None:
    """As data URLs, wherever they lie."""
    messages = with_images([{"role": "user", "content": f"{MARK}Hm?"}], [str(pictures / "0.png")])
    (turn,) = for_server(messages)
    url = turn["content"][0]["image_url"]["url"]
    assert (
        base64.b64decode(url.removeprefix("data:image/png;base64,"))
        == (pictures / "0.png").read_bytes()
    )
    assert turn["content"][1] == {"type": "text", "text": "Hm?"}
    bare = base64.b64encode(
        b"\x89PNG" + bytes(1000)
    ).decode()  # as a record may hold it, with no word of its kind
    assert as_text(bare, "folder") == f"data:image/png;base64,{bare}"


def test_the_inspector_shows_images(sees: Path, pictures: Path, tmp_path: Path) -> None:
    """The image itself, how many tokens stand for it, and no fault; a supervised image token is one."""
    recipe = make_recipe(tmp_path, sees, pictures, records(pictures))
    inspect_mask.main(run_recipe(tmp_path, "--html", str(tmp_path / "page.html")))
    page = (tmp_path / "page.html").read_text()
    shown = base64.b64encode((pictures / "0.png").read_bytes()).decode()
    assert shown in page and f"&lt;image&gt; × {SIZE}" in page
    assert f"<td>noted: tokens of images</td><td>{8 * SIZE}</td>" in page
    tokenizer = load_tokenizer(recipe)
    conversation, (example,) = next(tokenize_each(recipe, tokenizer, Tally()))
    assert not faults(conversation, [example], tokenizer, recipe.data)
    image = tokenizer.convert_tokens_to_ids("<image>")
    planted = replace(example, loss_mask=example.loss_mask | (example.tokens == image))
    assert faults(conversation, [planted], tokenizer, recipe.data)


@pytest.mark.parametrize("name", SPECIAL)
def test_every_kind_of_processor_is_followed(
    name: str, tiny_target_dir: Path, pictures: Path
) -> None:
    """Answers behind grown images are found, and states equal those of the model given the processor's own output.

    Among them are tiles, texts that grow by more than tokens of images, positions that jump, and attention within an
    image to both sides.
    """
    words = read_words(tiny_target_dir / "target", name)
    model, processor = make_model(name, words), make_processor(name, words)
    printed = SPECIAL[name][0]
    text = f"<|user|>{printed}What is it?<|assistant|>A box.</s><|user|>{printed} or {printed}\nhm?<|assistant|>No.</s>"
    reader = ImageReader(processor, pictures)
    shown = reader.show(text, ["0.png", "1.png", "2.png"])
    start, other = text.index("A box"), text.index("No.")
    rendered = RenderedText(text, [(start, start + 10), (other, other + 7)], 3)
    example = example_of(rendered, shown, words, 1000, set())
    assert example is not None
    assert words.decode(example.tokens[example.loss_mask]) == "A box.</s>No.</s>"
    token = words.convert_tokens_to_ids(SPECIAL[name][2])
    assert not (example.tokens[example.loss_mask] == token).any()
    assert shown.image_tokens >= int((example.tokens == token).sum()) >= 3
    asked = processor(text=[text], images=[[Image.open(path) for path, _ in shown.shown.images]],
                      return_tensors="pt", add_special_tokens=False)  # fmt: skip
    assert example.tokens.tolist() == asked["input_ids"][0].tolist()
    with torch.no_grad():
        said = model(**asked, output_hidden_states=True)
    live = LiveFeatures(
        Target(model, words, processor), [example], {"taps": [0, 2, -1], "dtype": "float32"}
    )
    features = live.read([0])[0].features
    assert features is not None
    for place, layer in enumerate((0, 2)):
        torch.testing.assert_close(
            features[:, place], said.hidden_states[layer][0], atol=1e-5, rtol=1e-5
        )
    logits = model.get_output_embeddings()(features[:, -1])
    torch.testing.assert_close(logits, said.logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("decoded", [False, True])
def test_tables_hold_images_themselves(pictures: Path, tmp_path: Path, decoded: bool) -> None:
    """As bytes, or as the datasets library decodes them; the image that is read has the same pixels."""
    data = (pictures / "1.png").read_bytes()
    turns = [
        {"role": "user", "content": "<image>What?"},
        {"role": "assistant", "content": "A box."},
    ]
    table = Dataset.from_list([{"images": [{"bytes": data, "path": None}], "messages": turns}])
    if decoded:
        table = table.cast_column("images", [datasets.Image()])
    table.to_parquet(tmp_path / "data.parquet")
    (read,) = read_conversations(tmp_path / "data.parquet", images=True)
    assert [turn["content"] for turn in read.messages] == [f"{MARK}What?", "A box."]
    (image,) = read.images
    assert isinstance(image, bytes)
    with Image.open(io.BytesIO(image)) as got, Image.open(io.BytesIO(data)) as expected:
        assert got.tobytes() == expected.tobytes()


def test_replayed_answers_are_about_their_images(sees: Path, pictures: Path) -> None:
    """A replay along an answer has the cycles of decoding it; a text that has lost its images is refused."""
    target = Target.load(sees, dtype="float32")
    parts = [
        {"type": "image", "image": str(pictures / "0.png")},
        {"type": "text", "text": "What is it?"},
    ]
    prompt = target.chat([{"role": "user", "content": parts}])
    torch.manual_seed(0)
    head: Any = DRAFTERS["eagle1"].for_target(
        settings_of({"kind": "eagle1"}, ""), target.config, target.head
    )
    head.bind(target.head)
    budget = Budget.fixed(chain_paths(3))
    known = answer(target, head.taps, prompt, limit=12, sampling=Sampling(0.0))
    assert known.asked == prompt and known.asked.media.keys() == prompt.media.keys()
    replayed = [tree.tokens.tolist() for tree, _ in replay(target, head, known, budget)]
    trace = generate(target, head, prompt, budget=budget, max_new_tokens=12)
    assert replayed == [cycle.tree.tokens.tolist() for cycle in trace.cycles][: len(replayed)]
    assert len(replayed) > 3
    for lost in (
        lambda: generate(target, head, list(prompt)),
        lambda: target.features(torch.tensor([prompt]), (-1,)),
    ):
        with pytest.raises(ValueError, match="stands for an image, and no image"):
            lost()
