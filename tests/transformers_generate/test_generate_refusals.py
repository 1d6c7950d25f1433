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
from tests.stock_generate import asked, left_padded, model_of, seeing_call
from tests.transformers_generate.test_generate_options import Bans, Record
from tests.vision_families import VISION_FAMILIES

ONE = {"input_ids": torch.tensor([random_tokens(9, 1)])}
OUTPUTS = {"return_dict_in_generate": True}
HOLES = {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]])}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "output_attentions": ({"output_attentions": True, **OUTPUTS}, "output_attentions is True"),
    "output_hidden_states": (
        {"output_hidden_states": True, **OUTPUTS},
        "output_hidden_states is True",
    ),
    "beam scores": (
        {"num_beams": 2, "output_scores": True, **OUTPUTS},
        "output_scores is not kept of beams",
    ),
    "beam logits": (
        {"num_beams": 2, "output_logits": True, **OUTPUTS},
        "output_logits is not kept of beams",
    ),
    "beam sampling": ({"num_beams": 2, "do_sample": True}, "num_beams with do_sample"),
    "beam streamer": ({"num_beams": 2, "streamer": Record([])}, "a streamer cannot follow beams"),
    "beam time": (
        {"num_beams": 2, "stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(9.0)])},
        "criteria MaxTimeCriteria cannot be followed by beams",
    ),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "contrastive": (
        {"penalty_alpha": 0.6, "top_k": 4},
        "penalty_alpha asks for contrastive search",
    ),
    "dola": ({"dola_layers": "high"}, "dola_layers asks for dola generation"),
    "groups": (
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
        "num_beam_groups asks for group",
    ),
    "constrained": ({"force_words_ids": [[3]], "num_beams": 2}, "constraints or force_words_ids"),
    "guidance": (
        {"guidance_scale": 1.5},
        "UnbatchedClassifierFreeGuidanceLogitsProcessor cannot be served",
    ),
    "synthid": (
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)},
        "SynthIDTextWatermarkLogitsProcessor cannot be served",
    ),
    "processor": (
        {"logits_processor": LogitsProcessorList([Bans()])},
        "processors Bans cannot be served",
    ),
    "function": (
        {"prefix_allowed_tokens_fn": lambda row, text: [1]},
        "PrefixConstrainedLogitsProcessor cannot be served",
    ),
    "past": ({"past_key_values": DynamicCache()}, "(past_key_values|cache) was passed"),
    "synced": ({"synced_gpus": True}, "synced_gpus is True"),
    "positions": ({"position_ids": torch.arange(3, 12)[None]}, "position_ids differ"),
    "holes": (HOLES, "attention_mask hides tokens within row 0"),
    "too long": ({"max_new_tokens": 300}, "exceed the model's 256 positions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_is_refused_by_name(name: str) -> None:
    """With a sentence that says what to leave out."""
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        model_of("llama").generate(
            **ONE,
            **{**asked(), **options},
            custom_generate=eagle.transformers.generate_with("ngram"),
        )


def test_an_assistant_is_refused() -> None:
    """It is handed to no callable, and would be dropped in silence."""
    with pytest.raises(ValueError, match="assistant_model drafts, too"):
        model_of("llama").generate(
            **ONE,
            **asked(),
            assistant_model=build("llama"),
            custom_generate=eagle.transformers.generate_with("ngram"),
        )


def test_embeddings_are_refused() -> None:
    """A drafter reads tokens."""
    model = model_of("llama")
    embedded = model.get_input_embeddings()(ONE["input_ids"])
    with pytest.raises(ValueError, match="inputs_embeds"):
        model.generate(
            inputs_embeds=embedded,
            **asked(),
            custom_generate=eagle.transformers.generate_with("ngram"),
        )


def test_token_types_are_refused_where_they_are_embedded() -> None:
    """GPT-2 adds a token's embedding for each type; a model that sees takes all text for granted."""
    types = {"token_type_ids": torch.zeros_like(ONE["input_ids"])}
    with pytest.raises(ValueError, match="token_type_ids is passed to the model's forward"):
        model_of("gpt2").generate(
            **ONE, **types, **asked(), custom_generate=eagle.transformers.generate_with("ngram")
        )
    model, inputs = seeing_call("gemma3", 0)
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    stock = model.generate(**inputs, **asked())
    ours = model.generate(
        **inputs, **asked(), custom_generate=eagle.transformers.generate_with("ngram")
    )
    assert torch.equal(ours, stock)


def test_an_encoder_decoder_is_refused() -> None:
    """Its decoder is no causal model of the prompt."""
    shape = {
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 96,
    }
    model = AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model("t5", **shape, decoder_start_token_id=0)
    )
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        model.generate(
            **ONE, max_new_tokens=4, custom_generate=eagle.transformers.generate_with("ngram")
        )


def test_images_are_served_to_one_prompt_alone() -> None:
    """The rows of several share one output of the processor."""
    model, inputs = seeing_call("llava", 2)
    stock = model.generate(**inputs, **asked())
    with_drafter = eagle.transformers.generate_with("ngram")
    assert torch.equal(model.generate(**inputs, **asked(), custom_generate=with_drafter), stock)
    with pytest.raises(ValueError, match="pixel_values belongs to 2 rows"):
        model.generate(**inputs, **asked(), num_beams=2, custom_generate=with_drafter)


ENCODER_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava layer": ("llava", {"vision_feature_layer": -1}),
    "llava layers": ("llava", {"vision_feature_layer": [-1]}),
    "internvl layer": ("internvl", {"vision_feature_layer": -2}),
    "lfm2 shapes": ("lfm2_vl", {}),  # its processor gives spatial_shapes
}


@pytest.mark.parametrize("name", ENCODER_SETTINGS)
def test_inputs_of_an_image_encoder_reach_it(name: str) -> None:
    """Those that no image is named in, too: `generate` itself hands them to no decoder."""
    family, settings = ENCODER_SETTINGS[name]
    model, inputs = seeing_call(family, 2)
    stock = model.generate(**inputs, **settings, **asked())
    with_drafter = eagle.transformers.generate_with("ngram")
    assert torch.equal(
        model.generate(**inputs, **settings, **asked(), custom_generate=with_drafter), stock
    )
    if settings:
        assert not torch.equal(stock, model.generate(**inputs, **asked()))


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_every_input_of_an_image_encoder_is_handed_on(family: str) -> None:
    """None is dropped in silence."""
    model, inputs = seeing_call(family, 1)
    known = set(inspect.signature(model.model.get_image_features).parameters) - {"kwargs"}
    assert known <= set(inspect.signature(type(model.model).forward).parameters)
    given = dict.fromkeys(known, 1) | inputs
    assert known <= find_media(model, given).keys()


SOFT_PROMPTS: dict[str, dict[str, Any]] = {
    "PromptTuningConfig": {},
    "PrefixTuningConfig": {},
    "PromptEncoderConfig": {"encoder_hidden_size": 16},
}


@pytest.mark.parametrize("kind", SOFT_PROMPTS)
def test_soft_prompts_are_refused(kind: str) -> None:
    """They are no tokens, and would be left out; the same model without them is served."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = copy.deepcopy(model_of("llama"))
    config = getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM", **SOFT_PROMPTS[kind])
    tuned = peft.get_peft_model(model, config).eval()
    with_drafter = eagle.transformers.generate_with("ngram")
    with pytest.raises(
        ValueError, match="puts learned states before the prompt: expected one that changes layers"
    ):
        tuned.generate(**ONE, **asked(), custom_generate=with_drafter)
    stock = model.generate(**ONE, **asked())
    assert torch.equal(model.generate(**ONE, **asked(), custom_generate=with_drafter), stock)


def test_adapters_of_layers_are_served_through_peft() -> None:
    """Whose `generate` puts a method of its own there, too."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(copy.deepcopy(model_of("llama")), config).eval()
    stock = adapted.generate(**ONE, **asked())
    with_drafter = eagle.transformers.generate_with("ngram")
    assert torch.equal(adapted.generate(**ONE, **asked(), custom_generate=with_drafter), stock)


def _forget_first(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
    """Read the last four tokens alone."""
    return {"input_ids": input_ids[:, -4:], "use_cache": False}


def test_a_models_own_preparation_is_refused() -> None:
    """Put on the model or written in a class of the user; the target by itself is served."""
    model = copy.deepcopy(model_of("llama"))
    own = type("Own", (type(model),), {"prepare_inputs_for_generation": _forget_first})
    bound = copy.deepcopy(model)
    bound.prepare_inputs_for_generation = MethodType(_forget_first, bound)
    model.__class__ = own
    for changed in (model, bound):
        with pytest.raises(ValueError, match="has a prepare_inputs_for_generation of its own"):
            changed.generate(
                **ONE, **asked(), custom_generate=eagle.transformers.generate_with("ngram")
            )


@pytest.mark.parametrize("prepares", ["as transformers", "other tokens", "an input more"])
def test_the_preparation_of_a_checkpoints_code_is_compared(prepares: str) -> None:
    """Its methods are its own as a matter of course, and nearly all do the same."""
    model = copy.deepcopy(model_of("llama"))
    stock = type(model)

    def prepare(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        made = stock.prepare_inputs_for_generation(self, input_ids, **kwargs)
        if prepares == "other tokens":
            made["input_ids"] = made["input_ids"] // 2
        if prepares == "an input more":
            made["token_scores"] = input_ids
        return made

    prepare.__module__ = "transformers_modules.some.modeling"
    model.__class__ = type("FromCode", (stock,), {"prepare_inputs_for_generation": prepare})
    call = {**ONE, **asked(), "custom_generate": eagle.transformers.generate_with("ngram")}
    if prepares == "as transformers":
        assert torch.equal(model.generate(**call), model_of("llama").generate(**ONE, **asked()))
        return
    wrong = {"other tokens": "input_ids", "an input more": "token_scores"}[prepares]
    with pytest.raises(
        ValueError, match=f"the code of FromCode's checkpoint gives other {wrong} to its forward"
    ):
        model.generate(**call)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drafter": 3}, "generate_with got a int"),
        ({"drafter": "ngram", "stateless": ["Bans"]}, "stateless holds 'Bans'"),
        ({"drafter": "ngram", "seed": "now"}, "seed is 'now'"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    """Before a model comes."""
    with pytest.raises(ValueError, match=message):
        eagle.transformers.generate_with(**arguments)


def test_wrong_options_of_a_drafter_are_refused_at_the_first_call() -> None:
    """As `load_drafter` refuses them."""
    for drafter, options, message in (
        ("ngram", {"sharpnes": 1}, "has no option"),
        ("no/such/head", {}, "no drafter"),
    ):
        with pytest.raises(ValueError, match=message):
            model_of("llama").generate(
                **left_padded((3, 4)),
                **asked(),
                custom_generate=eagle.transformers.generate_with(drafter, **options),
            )
