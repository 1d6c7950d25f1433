"""What `model.generate` with a drafter does not serve is refused by its name, before anything is decoded."""

from __future__ import annotations

import copy
import inspect
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)

import eagle.transformers
from eagle.transformers.request import find_media
from tests.families import build, random_tokens
from tests.stock_generate import asked, model_of, seeing_call
from tests.transformers_generate.test_generate_options import Bans, Record
from tests.vision_families import VISION_FAMILIES

ONE = {"input_ids": torch.tensor([random_tokens(9, 1)])}


def generate(model: Any, **options: Any) -> Any:
    """Return what `model.generate` gives with a drafter."""
    with_drafter = eagle.transformers.generate_with("ngram")
    return model.generate(
        **{**asked(), **options},
        custom_generate=with_drafter,
    )


def assert_stock(model: Any, **options: Any) -> None:
    """Assert that tokens are those without a drafter."""
    stock = model.generate(**asked(), **options)
    assert torch.equal(generate(model, **options), stock)


BEAMS = {"num_beams": 2, "return_dict_in_generate": True}
IN_TIME = StoppingCriteriaList([MaxTimeCriteria(9.0)])
WATERMARK = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)
# options of a call, and a keyword of the message
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {
            "output_attentions": True,
            "return_dict_in_generate": True,
        },
        "output_attentions",
    ),
    (
        {
            "output_hidden_states": True,
            "return_dict_in_generate": True,
        },
        "output_hidden_states",
    ),
    ({"output_scores": True, **BEAMS}, "output_scores"),
    ({"output_logits": True, **BEAMS}, "output_logits"),
    ({"num_beams": 2, "do_sample": True}, "do_sample"),
    ({"num_beams": 2, "streamer": Record([])}, "streamer"),
    ({"num_beams": 2, "stopping_criteria": IN_TIME}, "MaxTimeCriteria"),
    ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
    ({"dola_layers": "high"}, "dola"),
    (
        {
            "num_beams": 4,
            "num_beam_groups": 2,
            "diversity_penalty": 1.0,
        },
        "num_beam_groups",
    ),
    ({"force_words_ids": [[3]], "num_beams": 2}, "force_words_ids"),
    ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
    ({"watermarking_config": WATERMARK}, "SynthIDText"),
    ({"logits_processor": LogitsProcessorList([Bans()])}, "Bans"),
    ({"prefix_allowed_tokens_fn": lambda row, text: [1]}, "PrefixConstrained"),
    ({"past_key_values": DynamicCache()}, "(past_key_values|cache) was passed"),
    ({"synced_gpus": True}, "synced_gpus"),
    ({"position_ids": torch.arange(3, 12)[None]}, "position_ids"),
    ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]])}, "within row 0"),
    ({"max_new_tokens": 300}, "256 positions"),
    # no callable sees it, so that it would be dropped in silence
    ({"assistant_model": build("llama")}, "assistant_model"),
]


@pytest.mark.parametrize(
    ("options", "keyword"),
    REFUSED,
    ids=lambda value: str(value)[:30],
)
def test_a_call_is_refused_by_name(options: dict[str, Any], keyword: str) -> None:
    """The message names the option to leave out."""
    with pytest.raises(ValueError, match=keyword):
        generate(model_of("llama"), **ONE, **options)


def test_embeddings_are_refused() -> None:
    """A drafter reads tokens."""
    model = model_of("llama")
    embedded = model.get_input_embeddings()(ONE["input_ids"])
    with pytest.raises(ValueError, match="inputs_embeds"):
        generate(model, inputs_embeds=embedded)


def test_token_types_are_refused_where_they_are_embedded() -> None:
    """GPT-2 adds an embedding for each type; a vision model takes type 0, which is text, for granted."""
    with pytest.raises(ValueError, match="token_type_ids"):
        generate(
            model_of("gpt2"),
            **ONE,
            token_type_ids=torch.zeros_like(ONE["input_ids"]),
        )
    model, inputs = seeing_call("gemma3", 0)
    types = torch.zeros_like(inputs["input_ids"])
    assert_stock(model, **{**inputs, "token_type_ids": types})


def test_an_encoder_decoder_is_refused() -> None:
    """Its decoder is no causal model of the prompt."""
    config = AutoConfig.for_model(
        "t5",
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        vocab_size=96,
        decoder_start_token_id=0,
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        generate(AutoModelForSeq2SeqLM.from_config(config), **ONE)


# -- models that see --------------------------------------------------------------------------------------------------


def test_images_are_served_to_one_prompt_alone() -> None:
    """The rows of several would share one output of the image processor."""
    model, inputs = seeing_call("llava", 2)
    assert_stock(model, **inputs)
    with pytest.raises(ValueError, match="pixel_values belongs to 2 rows"):
        generate(model, **inputs, num_beams=2)


@pytest.mark.parametrize(
    ("family", "settings"),
    # the processor of the last one gives spatial_shapes
    [
        ("llava", {"vision_feature_layer": [-1]}),
        ("lfm2_vl", {}),
    ],
    ids=["llava", "lfm2_vl"],
)
def test_inputs_of_an_image_encoder_reach_it(family: str, settings: dict[str, Any]) -> None:
    """Some do not have "image" in their name."""
    model, inputs = seeing_call(family, 2)
    assert_stock(model, **inputs, **settings)
    if settings:
        changed = model.generate(**inputs, **settings, **asked())
        assert not torch.equal(changed, model.generate(**inputs, **asked()))


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_every_input_of_an_image_encoder_is_handed_on(family: str) -> None:
    """None is dropped in silence."""
    model, inputs = seeing_call(family, 1)
    # by the signature of transformers' own method
    names = set(inspect.signature(model.model.get_image_features).parameters) - {"kwargs"}
    assert names <= find_media(model, {**dict.fromkeys(names, 1), **inputs}).keys()


# -- models that someone has changed ----------------------------------------------------------------------------------


def test_soft_prompts_are_refused() -> None:
    """They are no tokens, and would be left out; the same model without them is served."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = copy.deepcopy(model_of("llama"))
    config = peft.PromptTuningConfig(
        num_virtual_tokens=3,
        task_type="CAUSAL_LM",
    )
    with pytest.raises(ValueError, match="learned states before the prompt"):
        generate(peft.get_peft_model(model, config).eval(), **ONE)
    assert_stock(model, **ONE)


def test_adapters_of_layers_are_served_through_peft() -> None:
    """Its `generate` puts a method of its own on the model, which is no reason to refuse."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    # random weights, so that the adapter changes the answer
    config = peft.LoraConfig(
        r=4,
        target_modules="all-linear",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    assert_stock(peft.get_peft_model(copy.deepcopy(model_of("llama")), config).eval(), **ONE)


def keep_last_four(
    model: Any,
    input_ids: torch.Tensor,
    **kwargs: Any,
) -> dict[str, Any]:
    """Let the model read the last four tokens alone."""
    return {"input_ids": input_ids[:, -4:], "use_cache": False}


def test_a_models_own_preparation_is_refused() -> None:
    """Whether it was put on the model or written in a subclass."""
    bound = copy.deepcopy(model_of("llama"))
    bound.prepare_inputs_for_generation = MethodType(keep_last_four, bound)
    subclass = copy.deepcopy(model_of("llama"))
    methods = {"prepare_inputs_for_generation": keep_last_four}
    subclass.__class__ = type("Own", (type(subclass),), methods)
    for model in (bound, subclass):
        with pytest.raises(ValueError, match="prepare_inputs_for_generation of its own"):
            generate(model, **ONE)


@pytest.mark.parametrize("changed", [None, "input_ids", "token_scores"])
def test_the_preparation_of_a_checkpoints_code_is_compared(changed: str | None) -> None:
    """Such code always has methods of its own, nearly all of which do what transformers does."""
    model = copy.deepcopy(model_of("llama"))
    stock_class = type(model)

    def prepare(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        made = stock_class.prepare_inputs_for_generation(
            self,
            input_ids,
            **kwargs,
        )
        if changed is not None:
            made[changed] = input_ids // 2
        return made

    # where transformers puts a checkpoint's code
    prepare.__module__ = "transformers_modules.some.modeling"
    methods = {"prepare_inputs_for_generation": prepare}
    model.__class__ = type("FromCode", (stock_class,), methods)
    if changed is None:
        assert_stock(model, **ONE)
        return
    with pytest.raises(ValueError, match=f"FromCode's checkpoint gives other {changed}"):
        generate(model, **ONE)


# -- wrong arguments of `generate_with` -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "keyword"),
    [
        ({"drafter": 3}, "got a int"),
        ({"drafter": "ngram", "stateless": ["Bans"]}, "stateless"),
        ({"drafter": "ngram", "seed": "now"}, "seed"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], keyword: str) -> None:
    """This happens before a model comes."""
    with pytest.raises(ValueError, match=keyword):
        eagle.transformers.generate_with(**arguments)


@pytest.mark.parametrize(
    ("drafter", "options", "keyword"),
    [
        ("ngram", {"sharpnes": 1}, "has no option"),
        ("no/such/head", {}, "no drafter"),
    ],
)
def test_a_drafters_options_are_refused_at_the_first_call(
    drafter: str,
    options: dict[str, Any],
    keyword: str,
) -> None:
    """They are checked as `load_drafter` checks them."""
    with_drafter = eagle.transformers.generate_with(drafter, **options)
    with pytest.raises(ValueError, match=keyword):
        model_of("llama").generate(
            **ONE,
            **asked(),
            custom_generate=with_drafter,
        )
