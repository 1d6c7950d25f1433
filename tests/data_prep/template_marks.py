"""How the model of each published template ends an answer, read from the templates and written down by hand."""

from __future__ import annotations

EOS = "{eos}"  # stands for the tokenizer's own end token
# templates by their mark, as files below the folder of templates
MARKS = {
    EOS: (
        "its own, axolotl/alpaca, axolotl/metharme, axolotl/mistral_v2v3, "
        "axolotl/mistral_v7_tekken, chujiezheng_compact/alpaca, chujiezheng_compact/saiga, "
        "chujiezheng_compact/vicuna, handwritten/vicuna_v1.1_fastchat_exact, "
        "ik_llama.cpp/Mistral-Small-3.2-24B-Instruct-2506, "
        "ik_llama.cpp/mistralai-Mistral-Nemo-Instruct-2407, mistral.rs/mistral_nemo_tool_call"
    ),
    "<|im_end|>": (
        "axolotl/chatml, axolotl/phi_4, axolotl/qwen2_vl, axolotl/qwen3_5, "
        "chujiezheng_compact/chatml, ik_llama.cpp/Kimi-K2-Instruct, ik_llama.cpp/LFM2-8B-A1B, "
        "ik_llama.cpp/MiMo-VL, ik_llama.cpp/Qwen-QwQ-32B, ik_llama.cpp/Qwen-Qwen3-0.6B, "
        "ik_llama.cpp/Qwen3.5-4B, ik_llama.cpp/StepFun3.5-Flash, mistral.rs/smollm3"
    ),
    "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>": (
        "axolotl/command_a, axolotl/command_a_rag, axolotl/command_a_tool_use"
    ),
    "<｜end▁of▁sentence｜>": (
        "axolotl/deepseek_v3, ik_llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B, "
        "ik_llama.cpp/deepseek-ai-DeepSeek-V3.2, mistral.rs/deepseek_tool_call"
    ),
    "<|eot_id|>": (
        "axolotl/llama3, chujiezheng_compact/llama-3-instruct, "
        "ik_llama.cpp/meetkai-functionary-medium-v3.2, "
        "ik_llama.cpp/meta-llama-Llama-3.2-3B-Instruct"
    ),
    "<|end|>": (
        "axolotl/phi_3, chujiezheng_compact/phi-3, ik_llama.cpp/microsoft-Phi-3.5-mini-instruct"
    ),
    "<|end_of_text|>": (
        "chujiezheng_compact/granite-3.0-instruct, ik_llama.cpp/ibm-granite-granite-3.3-2B-Instruct"
    ),
    "<end_of_turn>": "axolotl/gemma, axolotl/gemma3n",
    "<turn|>": "axolotl/gemma4_unified, ik_llama.cpp/google-gemma-4-31B-it-interleaved",
    "[|endofturn|]": "axolotl/exaone4",
    "<|eot|>": "axolotl/llama4",
    "<|end_of_turn|>": "chujiezheng_compact/openchat-3.5",
    "<seed:eos>": "ik_llama.cpp/ByteDance-Seed-OSS",
    "<|message_sep|>": "ik_llama.cpp/GigaChat3.1-10B-A1.8B",
    "<|return|>": "ik_llama.cpp/openai-gpt-oss-120b",
    "\n<|end|>\n" + EOS: "ik_llama.cpp/unsloth-Apriel-1.5",
    # where another turn follows
    "\n<|end|>": "ik_llama.cpp/Apriel-1.6-15b-Thinker-fixed",
    "\n\n": "ik_llama.cpp/llama-cpp-rwkv-world",
    # the next turn's first token is their stop token, or nothing is
    "": "chujiezheng_compact/falcon-instruct, ik_llama.cpp/GLM-4.6, ik_llama.cpp/GLM-5.2",
}
MARK_OF: dict[str, str] = {}
for _mark, _names in MARKS.items():
    MARK_OF |= dict.fromkeys(_names.split(", "), _mark)


def hand_mark(template: str, eos: str) -> str | None:
    """Return the end mark of a template, given as its file; None if it is not in the list."""
    mark = MARK_OF.get(template.removesuffix(".jinja"))
    return None if mark is None else mark.replace(EOS, eos)
