"""Small GGUF files for tests, stored as llama.cpp's converter stores models."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers import models
from ragen_jax.errors import UserError
from ragen_jax.models.io import hugging_face

package = pytest.importorskip("gguf")

# As llama.cpp's converter names them (gguf-py/gguf/tensor_mapping.py).
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(
    path: Path, config, tensors: dict, *, kind="F32", kinds=(), **metadata
) -> Path:
    """A GGUF file.

    Args:
      kind, kinds: how matrices are stored, and, by their names, other tensors.
      metadata: further metadata, or None for those to leave out.
    """
    family = config.family
    usual = {
        f"{family}.block_count": config.layers,
        f"{family}.context_length": config.longest_context,
        f"{family}.embedding_length": config.width,
        f"{family}.feed_forward_length": config.mlp_width,
        f"{family}.attention.head_count": config.heads,
        f"{family}.attention.head_count_kv": config.kv_heads,
        f"{family}.attention.key_length": config.head_dim,
        f"{family}.rope.freq_base": config.rope_base,
        f"{family}.attention.layer_norm_rms_epsilon": config.norm_epsilon,
    }
    writer = package.GGUFWriter(path, family)
    for key, value in (usual | metadata).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, tensor in tensors.items():
        chosen = package.GGMLQuantizationType[dict(kinds).get(name, kind)]
        block, _ = package.GGML_QUANT_SIZES[chosen]
        if tensor.ndim == 1 or tensor.shape[-1] % block:
            chosen = package.GGMLQuantizationType.F32
        stored = package.quantize(tensor, chosen)
        writer.add_tensor(name, stored, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(folder: Path, config, weights) -> dict:
    """The tensors as llama.cpp's converter would store them."""
    tokenizer = models.make_tokenizer()
    hugging_face.write_folder(folder, config, weights, tokenizer)
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if config.family == "llama" and (".q_proj" in name or ".k_proj" in name):
            heads = config.heads if ".q_proj" in name else config.kv_heads
            # LlamaModel.permute in convert_hf_to_gguf.py.
            halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        found[name] = np.ascontiguousarray(tensor)
    return found


def refusal(call, *args) -> str:
    """The message of the UserError, which must be a single line."""
    with pytest.raises(UserError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)
