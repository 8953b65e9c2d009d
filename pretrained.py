"""GPT-2's weights from Hugging Face: OpenAI's own, or any folder that transformers' `save_pretrained` wrote."""

from pathlib import Path
from typing import Any

from torch import Tensor

HUGGING_FACE = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}


def download(name: str) -> Path:
    """The folder of OpenAI's weights, gpt2 .. gpt2-xl, downloaded once. Raises OSError."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(HUGGING_FACE[name], allow_patterns=["config.json", "model.safetensors"]))
    except Exception as error:  # its HTTP library's, or its own
        raise OSError(f"{name} could not be downloaded from Hugging Face ({type(error).__name__}); "
                      f"give the folder of a copy instead") from None


def our_options(theirs: dict[str, Any]) -> dict[str, Any]:
    """transformers' config.json as fields of GPTConfig. Raises ValueError for what this project's model cannot be."""
    activations = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    unsupported = {
        "model_type": theirs.get("model_type") != "gpt2",
        "activation_function": str(theirs.get("activation_function", "gelu_new")) not in activations,
        "layer_norm_epsilon": theirs.get("layer_norm_epsilon", 1e-5) != 1e-5,
        "n_inner": theirs.get("n_inner") not in (None, 4 * theirs.get("n_embd", 768)),
        "scale_attn_weights": not theirs.get("scale_attn_weights", True),
        "scale_attn_by_inverse_layer_idx": bool(theirs.get("scale_attn_by_inverse_layer_idx")),
    }
    if wrong := [f"{name} {theirs.get(name)}" for name, is_wrong in unsupported.items() if is_wrong]:
        raise ValueError(f"not a GPT-2 that this project can load: {', '.join(wrong)}")
    return {
        "n_layer": theirs.get("n_layer", 12), "n_head": theirs.get("n_head", 12), "n_embd": theirs.get("n_embd", 768),
        "block_size": theirs.get("n_positions", 1024), "vocab_size": theirs.get("vocab_size", 50257), "bias": True,
        "norm": "layernorm", "activation": activations[theirs.get("activation_function", "gelu_new")],
        "tie_weights": theirs.get("tie_word_embeddings", True),
    }


def our_weights(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' weights under this project's names and in its shapes."""
    weights = {}
    for name, tensor in theirs.items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # the causal mask of older files
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            tensor = tensor.t().contiguous()  # transformers' Conv1D keeps (in, out), nn.Linear (out, in)
        weights[name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"] = tensor
    return weights
