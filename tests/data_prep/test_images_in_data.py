"""Conversations with images: from records to tokens, masks, features, heads and new answers."""

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

from data_prep import inspect_mask
from data_prep.chats.images import MARK
from data_prep.chats.render import RenderedText
from data_prep.check_mask import faults
from data_prep.conversations import Tally, read_conversations
from data_prep.extract import main as extract
from data_prep.image_texts import ImageReader, as_text, for_server, with_images
from data_prep.read_once import open_cache
from data_prep.regenerate import main as regenerate
from data_prep.tokens import example_of, load_tokenizer, tokenize_each
from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.core.examples import Example
from eagle.core.tree import chain_paths
from eagle.data.features import LiveFeatures
from eagle.data.store import FeatureStore
from eagle.drafters import DRAFTERS, settings_of
from eagle.recipe import Recipe
from eval import lossless, measure
from eval.replay import answer, replay
from recipes import train_eagle
from tests.data_prep.stub_servers import completion, read_records, serving, write_records
from tests.seeing_folders import SPECIAL, make_model, make_processor, read_words, save_llava

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
SIZE = 16  # tokens of an image
FEATURES = {"taps": [-1], "dtype": "float32"}
# one image or two in each known layout, and a text without; {url} stands for a data URL of 2.png
RECORDS = """
{"id": "llava", "image": "0.png", "conversations": [
  {"from": "human", "value": "<image>\\nWhat is this?"}, {"from": "gpt", "value": "A red box."}]}
{"id": "two", "images": ["0.png", "1.png"], "conversations": [
  {"from": "human", "value": "<image>\\nWhat is this?"}, {"from": "gpt", "value": "A red box."},
  {"from": "human", "value": "And <image> this?"}, {"from": "gpt", "value": "Another."}]}
{"id": "openai", "messages": [{"role": "user", "content": [
  {"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": "1.png"}}]},
  {"role": "assistant", "content": "A box."}]}
{"id": "url", "messages": [{"role": "user", "content": [{"type": "image", "image": "{url}"}]},
  {"role": "assistant", "content": "A box."}]}
{"id": "beside", "messages": [{"role": "user", "content": "What?", "images": ["2.png"]},
  {"role": "assistant", "content": "A box."}]}
{"id": "unplaced", "image_path": "2.png", "image_id": 7, "question": "What is it?", "answer": "A box."}
{"id": "open parts", "images": ["0.png"], "messages": [{"role": "user", "content": [
  {"type": "image"}, {"type": "text", "text": "Hm?"}]}, {"role": "assistant", "content": "A box."}]}
{"id": "text", "prompt": "Hello?", "completion": "Yes."}
"""
# by id: the question with a mark for each image, the answers, and the number of images
READ = {
    "llava": (f"{MARK}\nWhat is this?", "A red box.", 1),
    "two": (f"{MARK}\nWhat is this?And {MARK} this?", "A red box.Another.", 2),
    "openai": (f"What?{MARK}", "A box.", 1),
    "url": (MARK, "A box.", 1),
    "beside": (f"{MARK}What?", "A box.", 1),
    "unplaced": (f"{MARK}What is it?", "A box.", 1),
    "open parts": (f"{MARK}Hm?", "A box.", 1),
    "text": ("Hello?", "Yes.", 0),
}
# keys beside a question with one image, and why nothing can be learned from them
WRONG = [
    ('"image": "none.png"', "an image that is not there"),
    (f'"image": "{"a" * 300}"', "an image that is not there"),
    ('"image": "torn.png"', "the processor refuses"),
    ('"image": "https://one.org/a.png"', "an image on a server"),
    ('"image": ["0.png", "1.png"]', "2 images, and 1 places"),
    ('"image": 7', "an image that is neither a path nor data: int"),
    ('"image": "data:image/png;base64,é"', "an image whose data are no base64"),
    ('"video": "a.mp4"', "video beside the text"),
]
WRONG_MESSAGES = [
    ('{"role": "assistant", "content": [{"type": "image", "image": "0.png"}]}', "an image in an answer"),
    ('{"role": "bard", "content": [{"type": "image", "image": "1.png"}]}', "an image in an answer"),
    ('{"role": "assistant", "content": "Here.", "images": ["0.png"]}', "an image in an answer"),
    ('{"role": "user", "content": [{"type": "text", "text": "\U000f0000"}]}', "a private character"),
]  # fmt: skip


@pytest.fixture(scope="module")
def llava(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llava."""
    return save_llava(tiny_target_dir / "target", tmp_path_factory.mktemp("sees"))


@pytest.fixture(scope="module")
def target(llava: Path) -> Target:
    """That Llava as a target."""
    return Target.load(llava, dtype="float32")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three images."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(3):
        image = Image.new(
            "RGB",
            (16 + 8 * number, 16),
            (200, 90 * number, 10),
        )
        image.paste((0, 0, 255), (2, 2, 9, 5 + number))
        image.save(folder / f"{number}.png")
    return folder


def encode(path: Path) -> str:
    """Return the bytes of a file in base64."""
    return base64.b64encode(path.read_bytes()).decode()


@pytest.fixture(scope="module")
def records(pictures: Path) -> list[dict[str, Any]]:
    """The records above."""
    url = f"data:image/png;base64,{encode(pictures / '2.png')}"
    # a record may take several lines above
    lines = RECORDS.replace("{url}", url).strip().split("\n{")
    return [json.loads(line if line.startswith("{") else "{" + line) for line in lines]


def ask_about(image: Path, text: str = "\nWhat is this?") -> list[dict[str, Any]]:
    """Return the messages of a question about an image."""
    content = [{"type": "image", "image": str(image)}, {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


@pytest.fixture
def make_recipe(llava: Path, pictures: Path, tmp_path: Path) -> Any:
    """A function that writes and loads a recipe over records."""

    def make(lines: list[dict[str, Any]], **data: Any) -> Recipe:
        source = str(write_records(tmp_path / "data.jsonl", lines))
        paths = {
            "train": source,
            "cache": str(tmp_path / "cache"),
            "images": str(pictures),
        }
        recipe = {
            "target": {"path": str(llava), "dtype": "float32"},
            "data": {**paths, **data},
            "features": {"store": str(tmp_path / "store"), "dtype": "float32"},
            "drafter": {"kind": "eagle1"},
            "train": {"out": str(tmp_path / "out")},
            "eval": {
                "prompts": source,
                "count": 2,
                "max_new_tokens": 8,
            },
        }
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        return Recipe.load(tmp_path / "recipe.yaml")

    return make


def test_every_layout_is_read(records: list[dict[str, Any]], tmp_path: Path) -> None:
    """A mark stands where the image does; without being asked for, such records are dropped."""
    path = write_records(tmp_path / "data.jsonl", records)
    tally = Tally()
    read = {}
    for conversation in read_conversations(path, tally, images=True):
        texts = {"user": "", "assistant": ""}
        for turn in conversation.messages:
            texts[turn["role"]] += turn["content"]
        read[conversation.id] = (*texts.values(), len(conversation.images))
    assert read == READ
    assert tally.noted["images without a place in the text: shown before it"] == 1
    assert [conversation.id for conversation in read_conversations(path)] == ["text"]


def test_an_image_alone_is_a_question(tmp_path: Path) -> None:
    """Beside a turn without any text."""
    turns = [{"role": "user", "content": None, "images": ["2.png"]}]
    turns.append({"role": "assistant", "content": "A box."})
    path = write_records(tmp_path / "data.jsonl", [{"messages": turns}])
    (conversation,) = read_conversations(path, images=True)
    assert conversation.messages[0] == {"role": "user", "content": MARK}
    assert conversation.images == ("2.png",)


def test_tokens_and_masks_are_the_processors(
    make_recipe: Any,
    records: list[dict[str, Any]],
    target: Target,
    pictures: Path,
) -> None:
    """Tokens equal the untouched processor's, no image token is supervised, and answers are the records'."""
    cache = open_cache(make_recipe(records))
    image = target.model.config.image_token_index
    assert cache.tally.noted["images"] == 8
    assert cache.tally.noted["tokens of images"] == 8 * SIZE
    for example, (_, answers, count) in zip(
        cache,
        READ.values(),
        strict=True,
    ):
        is_image = example.tokens == image
        assert int(is_image.sum()) == count * SIZE
        assert not (example.loss_mask & is_image).any()
        learned = target.tokenizer.decode(example.tokens[example.loss_mask])
        assert learned.replace("</s>", "") == answers
    # the truth is transformers' own `generate`, or its processor
    prompt = target.chat(ask_about(pictures / "0.png"))
    assert cache[0].tokens[: len(prompt)].tolist() == prompt


def test_what_cannot_be_shown_is_dropped_with_its_reason(
    make_recipe: Any,
    records: list[dict[str, Any]],
    pictures: Path,
) -> None:
    """It is counted, and everything else is read."""
    # a file that begins as an image does
    (pictures / "torn.png").write_bytes((pictures / "0.png").read_bytes()[:40])
    lines = [f'{{"prompt": "<image>\\nWhat?", "completion": "b", {keys}}}' for keys, _ in WRONG]
    lines += [
        f'{{"messages": [{{"role": "user", "content": "Draw."}}, {turn}]}}'
        for turn, _ in WRONG_MESSAGES
    ]
    # good records after bad ones
    cache = open_cache(make_recipe([*map(json.loads, lines), *records]))
    assert len(cache) == 8
    assert cache.tally.dropped.total() == len(lines)
    for _, reason in WRONG + WRONG_MESSAGES:
        assert any(reason in dropped for dropped in cache.tally.dropped), reason
    short = open_cache(make_recipe(records[:2], max_length=30))
    assert "an image that max_length cuts off" in short.tally.dropped


@pytest.mark.slow
def test_stored_features_are_those_computed_in_training(
    make_recipe: Any,
    records: list[dict[str, Any]],
    target: Target,
    tmp_path: Path,
) -> None:
    """Stored states of images and texts equal live ones, which a test below compares with the model's."""
    cache = open_cache(make_recipe(records))
    extract([str(tmp_path / "recipe.yaml")])
    store = FeatureStore(tmp_path / "store")
    live = LiveFeatures(target, cache, store.identity)
    numbers = range(len(cache))
    for got, expected in zip(
        store.read(numbers),
        live.read(numbers),
        strict=True,
    ):
        torch.testing.assert_close(
            got.features,
            expected.features,
            equal_nan=True,
        )
        assert got.features is not None
        assert not got.features.isnan().all()


def test_an_image_that_changed_is_refused(
    make_recipe: Any,
    records: list[dict[str, Any]],
    target: Target,
    pictures: Path,
    tmp_path: Path,
) -> None:
    """When features are computed, the image is compared with the one that was read with the text."""
    # a copy, as other tests read the folder
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "0.png").write_bytes((pictures / "0.png").read_bytes())
    cache = open_cache(make_recipe(records[:1], images=str(mine)))
    live = LiveFeatures(target, cache, FEATURES)
    (mine / "0.png").write_bytes((pictures / "1.png").read_bytes())
    with pytest.raises(ValueError, match=r"0\.png is not the one that was there"):
        live.read([0])


def test_planted_faults_are_seen(
    make_recipe: Any,
    records: list[dict[str, Any]],
    target: Target,
    pictures: Path,
) -> None:
    """The states of another image differ, and a text that has lost its image is refused."""
    example = open_cache(make_recipe(records[:1]))[0]
    other = target.chat(ask_about(pictures / "1.png"))
    # the last tokens are text, whose states must know which image was shown
    right = (
        LiveFeatures(
            target,
            [example],
            FEATURES,
        )
        .read([0])[0]
        .features
    )
    assert right is not None
    pixels = {"pixel_values": other.media["pixel_values"]}
    wrong = target.features(
        example.tokens[None],
        (-1,),
        None,
        pixels,
    )[0]
    assert not torch.allclose(wrong[-4:], right[-4:], atol=1e-3)
    message = "stands for an image, and no image"
    with pytest.raises(ValueError, match=message):
        target.features(example.tokens[None], (-1,))
    with pytest.raises(ValueError, match=message):
        generate(target, load_drafter("none", target), list(other))


def test_a_head_is_trained_decoded_and_measured(
    make_recipe: Any,
    records: list[dict[str, Any]],
    target: Target,
    pictures: Path,
    tmp_path: Path,
) -> None:
    """Held-out prompts are decoded with their images, and the measured answers are the untouched model's."""
    make_recipe(records)
    path = str(tmp_path / "recipe.yaml")
    steps = ["train.max_steps=2", "train.batch_size=2", "train.validation=0.3", "train.decode=2"]
    train_eagle.main(
        [
            path,
            *steps,
            "features.store=null",
            "train.dtype=float32",
        ]
    )
    measure.main([path])
    answers = {}
    for line in read_records(tmp_path / "out/results.jsonl"):
        if line.get("conversation") == "llava" and "text" in line:
            answers[line["drafter"]] = line["text"]
    prompt = target.chat(ask_about(pictures / "0.png"))
    output = target.model.generate(
        torch.tensor([prompt]),
        pixel_values=prompt.media["pixel_values"],
        max_new_tokens=8,
        do_sample=False,
    )
    expected = target.tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)
    assert len(answers) > 1
    assert set(answers.values()) == {expected}
    # it raises an error if an answer is not the untouched model's
    lossless.main([path])


def answer_request(target: Target, request: dict[str, Any]) -> dict[str, Any]:
    """Return a server's reply with the target's own answer."""
    prompt = target.chat(request["messages"])
    drafter = load_drafter("none", target)
    trace = generate(
        target,
        drafter,
        prompt,
        max_new_tokens=request["max_tokens"],
    )
    text = target.tokenizer.decode(trace.tokens, skip_special_tokens=True)
    return completion(text, trace.finish, prompt_tokens=len(prompt))


def test_answers_are_regenerated_with_their_images(
    make_recipe: Any,
    records: list[dict[str, Any]],
    target: Target,
    llava: Path,
    pictures: Path,
    tmp_path: Path,
) -> None:
    """Local and served answers are the model's own about each image, and new records name the same images."""
    recipe = make_recipe(records[:4])

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        return answer_request(target, request)

    written = []
    with serving(reply, str(llava)) as (url, _):
        for endpoint in ("null", url):
            out = tmp_path / f"new-{len(written)}.jsonl"
            section = {
                "source": recipe.data.train,
                "out": out,
                "endpoint": endpoint,
            }
            section |= {"max_new_tokens": 6, "keep_truncated": "true"}
            overrides = [f"regenerate.{key}={value}" for key, value in section.items()]
            regenerate([str(tmp_path / "recipe.yaml"), *overrides])
            written.append(read_records(out))
            conversations = read_conversations(out, images=True)
            assert [len(conversation.images) for conversation in conversations] == [1] * 4
    # a server answers as the target does here
    local, served = written
    assert [record["id"] for record in local] == ["llava", "two", "openai", "url"]
    assert [record["messages"] for record in local] == [record["messages"] for record in served]
    image = local[0]["messages"][0]["content"][0]
    assert image == {"type": "image", "image": "0.png"}
    request = {"messages": ask_about(pictures / "0.png"), "max_tokens": 6}
    text = reply(request)["choices"][0]["message"]["content"]
    assert [record["messages"][1]["content"] for record in local[:2]] == [text, text]


def test_a_server_gets_the_images_themselves(pictures: Path) -> None:
    """They are sent as data URLs, wherever they are stored."""
    image = str(pictures / "0.png")
    # a server cannot read the files of this machine
    (turn,) = for_server(with_images([{"role": "user", "content": f"{MARK}Hm?"}], [image]))
    url = f"data:image/png;base64,{encode(pictures / '0.png')}"
    assert turn["content"][0]["image_url"]["url"] == url
    assert turn["content"][1] == {"type": "text", "text": "Hm?"}
    # a record may hold base64 without a word of its kind
    bare = base64.b64encode(b"\x89PNG" + bytes(1000)).decode()
    assert as_text(bare, "folder") == f"data:image/png;base64,{bare}"


def test_the_inspector_shows_images(
    make_recipe: Any,
    records: list[dict[str, Any]],
    pictures: Path,
    tmp_path: Path,
) -> None:
    """The page shows the image and how many tokens stand for it; a supervised image token is a fault."""
    recipe = make_recipe(records)
    inspect_mask.main([str(tmp_path / "recipe.yaml"), "--html", str(tmp_path / "page.html")])
    # the image itself is part of the page
    page = (tmp_path / "page.html").read_text()
    assert encode(pictures / "0.png") in page
    assert f"&lt;image&gt; × {SIZE}" in page
    assert f"<td>noted: tokens of images</td><td>{8 * SIZE}</td>" in page
    tokenizer = load_tokenizer(recipe)
    conversation, (example,) = next(
        tokenize_each(
            recipe,
            tokenizer,
            Tally(),
        )
    )
    assert not faults(conversation, [example], tokenizer, recipe.data)
    is_image = example.tokens == tokenizer.convert_tokens_to_ids("<image>")
    planted = replace(example, loss_mask=example.loss_mask | is_image)
    assert faults(conversation, [planted], tokenizer, recipe.data)


def read_two_answers(
    processor: Any,
    words: Any,
    printed: str,
    pictures: Path,
) -> tuple[str, Any, Example]:
    """Return a conversation about three images as the template prints it and as it is shown, and its example."""
    text = (
        f"<|user|>{printed}What is it?<|assistant|>A box.</s>"
        f"<|user|>{printed} or {printed}\nhm?<|assistant|>No.</s>"
    )
    shown = ImageReader(processor, pictures).show(text, ["0.png", "1.png", "2.png"])
    spans = []
    for said in ("A box.</s>", "No.</s>"):
        start = text.index(said)
        spans.append((start, start + len(said)))
    example = example_of(
        RenderedText(text, spans, 3),
        shown,
        words,
        1000,
        set(),
    )
    assert example is not None
    assert words.decode(example.tokens[example.loss_mask]) == "A box.</s>No.</s>"
    return text, shown, example


@pytest.mark.parametrize("name", SPECIAL)
def test_every_kind_of_processor_is_followed(
    name: str,
    tiny_target_dir: Path,
    pictures: Path,
) -> None:
    """Answers after images are found, and states equal those of the model given the processor's own output.

    Among the kinds are tiles, texts that grow by more than image tokens, positions that jump, and attention within an
    image to both sides.
    """
    words = read_words(tiny_target_dir / "target", name)
    model = make_model(name, words)
    processor = make_processor(name, words)
    printed, _, image_token = SPECIAL[name]
    text, shown, example = read_two_answers(
        processor,
        words,
        printed,
        pictures,
    )
    is_image = example.tokens == words.convert_tokens_to_ids(image_token)
    assert not example.loss_mask[is_image].any()
    assert shown.image_tokens >= int(is_image.sum()) >= 3
    # the truth: the model's own states, given the untouched processor's output
    images = [Image.open(path) for path, _ in shown.shown.images]
    inputs = processor(
        text=[text],
        images=[images],
        return_tensors="pt",
        add_special_tokens=False,
    )
    assert torch.equal(example.tokens, inputs["input_ids"][0])
    with torch.no_grad():
        output = model(**inputs, output_hidden_states=True)
    target = Target(model, words, processor)
    live = LiveFeatures(
        target,
        [example],
        {"taps": [0, 2, -1], "dtype": "float32"},
    )
    features = live.read([0])[0].features
    assert features is not None
    hidden = torch.stack([output.hidden_states[0][0], output.hidden_states[2][0]], dim=1)
    torch.testing.assert_close(
        features[:, :2],
        hidden,
        atol=1e-5,
        rtol=1e-5,
    )
    logits = model.get_output_embeddings()(features[:, -1])
    torch.testing.assert_close(
        logits,
        output.logits[0],
        atol=1e-4,
        rtol=1e-4,
    )


@pytest.mark.parametrize("is_decoded", [False, True])
def test_tables_hold_images_themselves(
    pictures: Path,
    tmp_path: Path,
    is_decoded: bool,
) -> None:
    """An image may be bytes, or as the datasets library decodes it; its pixels are the same."""
    data = (pictures / "1.png").read_bytes()
    messages = [
        {"role": "user", "content": "<image>What?"},
        {"role": "assistant", "content": "A box."},
    ]
    record = {"images": [{"bytes": data, "path": None}], "messages": messages}
    # the datasets library keeps an image as bytes and a path
    table = datasets.Dataset.from_list([record])
    if is_decoded:
        table = table.cast_column("images", [datasets.Image()])
    table.to_parquet(tmp_path / "data.parquet")
    (read,) = read_conversations(tmp_path / "data.parquet", images=True)
    assert [turn["content"] for turn in read.messages] == [f"{MARK}What?", "A box."]
    (image,) = read.images
    assert isinstance(image, bytes)
    with Image.open(io.BytesIO(image)) as got, Image.open(io.BytesIO(data)) as expected:
        assert got.tobytes() == expected.tobytes()


def test_replayed_answers_are_about_their_images(target: Target, pictures: Path) -> None:
    """A replay of an answer has the cycles of decoding it."""
    prompt = target.chat(ask_about(pictures / "0.png", "What is it?"))
    settings = settings_of({"kind": "eagle1"}, "")
    head: Any = DRAFTERS["eagle1"].for_target(
        settings,
        target.config,
        target.head,
    )
    head.bind(target.head)
    budget = Budget.fixed(chain_paths(3))
    # an untrained head, so that some drafts are rejected
    known = answer(
        target,
        head.taps,
        prompt,
        limit=12,
        sampling=Sampling(0.0),
    )
    assert known.asked == prompt
    assert known.asked.media.keys() == prompt.media.keys()
    replayed = [
        tree.tokens.tolist()
        for tree, _ in replay(
            target,
            head,
            known,
            budget,
        )
    ]
    trace = generate(
        target,
        head,
        prompt,
        budget=budget,
        max_new_tokens=12,
    )
    decoded = [cycle.tree.tokens.tolist() for cycle in trace.cycles]
    assert len(replayed) > 3
    assert replayed == decoded[: len(replayed)]
