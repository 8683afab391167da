"""The same conversations through other programs, where they are installed.

Each is given our weights as a Hugging Face folder and a `Conversation`, and sends the
whole history again in every turn, as agents written in Python around them do. None of
them is needed by anything else.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from ragen_jax.benchmarks.sampler import Conversation
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.io import hugging_face
from ragen_jax.models.parameters import Parameters
from ragen_jax.training.model import Model

# A conversation -> int32[B, T], the whole conversations, replies among them.
ConversationRunner = Callable[[Conversation], np.ndarray]
TRANSFORMERS, TUNIX = "transformers", "google-tunix"


def missing(config: ModelConfig) -> dict[str, str]:
    """Which peers cannot run a model of this shape here, and why, a sentence each."""
    found = {}
    if importlib.util.find_spec("torch") is None:
        found[TRANSFORMERS] = "unmeasured: its models need torch, which is not here"
    if importlib.util.find_spec("tunix") is None:
        found[TUNIX] = "unmeasured: it is not installed"
    elif config.rope_scaling is not None:
        found[TUNIX] = "unmeasured: it has no scaled rotary positions"
    return found


def model_folder(model: Model, actor: Parameters, new: Path) -> Path:
    """A folder with the model: its own, or a new one with the weights in it."""
    if not model.source.is_gguf:
        return model.source.path
    hugging_face.write_folder(
        new, model.config, jax.device_get(actor), model.tokenizer, model.dtype
    )
    return new


def transformers_runner(folder: Path, model: Model) -> tuple[ConversationRunner, str]:
    """transformers' `generate`, greedy, never ending early, and what it runs on.

    Args:
      folder: from `model_folder`.
      model: for the dtype of weights and computation.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, str(model.dtype)), local_files_only=True
    ).to(device)
    # Without an end-of-turn token, which would end rows early; what is not said here
    # would be taken from the folder's generation config.
    network.generation_config = transformers.GenerationConfig(
        do_sample=False, pad_token_id=0
    )

    @torch.inference_mode()
    def converse(conversation: Conversation) -> np.ndarray:
        history = torch.empty(
            (conversation.fed.shape[1], 0), dtype=torch.int64, device=device
        )
        for fed in conversation.fed:
            given = torch.tensor(fed, dtype=torch.int64, device=device)
            history = torch.cat([history, given], dim=1)
            history = network.generate(
                history,
                attention_mask=torch.ones_like(history),
                max_new_tokens=conversation.reply,
            )
        return history.cpu().numpy().astype(np.int32)

    where = f"{torch.get_num_threads()} threads" if device == "cpu" else "cuda"
    return converse, (
        f"transformers {transformers.__version__}, torch {torch.__version__}, {where}"
    )


class _Numbers:
    """A tokenizer, as Tunix wants one, of texts that are token ids already."""

    def encode(self, text: str) -> list[int]:
        return [int(part) for part in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> None:
        """Nothing stands in front of a text."""

    def eos_id(self) -> int:
        return -1  # Never sampled, so that no row ends early.

    def pad_id(self) -> int:
        return -1  # No row is padded: all are of one length.


def tunix_runner(folder: Path, model: Model) -> tuple[ConversationRunner, str]:
    """Tunix's sampler on the first device, greedy, never ending early.

    Its Llama (0.1.7) rotates by a theta of 1,000,000, whatever the config says: its
    tokens then differ from ours, its work does not.

    Args:
      folder: from `model_folder`.
      model: for the model's shape and dtype.
    """
    from tunix.generate import sampler

    config, family = model.config, model.config.family
    name = {"llama": "llama3"}.get(family, family)
    models, params = (
        importlib.import_module(f"tunix.models.{name}.{part}")
        for part in ("model", "params")
    )
    tied = "weight_tying" if family == "llama" else "use_tied_embedding"
    typed = (
        {} if family == "llama" else {"dtype": model.dtype, "param_dtype": model.dtype}
    )
    shape = models.ModelConfig(
        num_layers=config.layers,
        vocab_size=config.vocabulary,
        embed_dim=config.width,
        hidden_dim=config.mlp_width,
        num_heads=config.heads,
        head_dim=config.head_dim,
        num_kv_heads=config.kv_heads,
        rope_theta=config.rope_base,
        norm_eps=config.norm_epsilon,
        **{tied: config.tied},
        **typed,
    )
    mesh = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    loaded = params.create_model_from_safe_tensors(
        str(folder), shape, mesh, dtype=model.dtype
    )

    @functools.cache
    def sampler_of(length: int) -> sampler.Sampler:
        """With a cache of that length exactly, for all of it is attended to."""
        sizes = (length, config.layers, config.kv_heads, config.head_dim)
        return sampler.Sampler(loaded, _Numbers(), sampler.CacheConfig(*sizes))

    def converse(conversation: Conversation) -> np.ndarray:
        history = np.empty((conversation.fed.shape[1], 0), np.int32)
        for fed in conversation.fed:
            history = np.concatenate([history, fed], axis=1)
            length = history.shape[1]
            with mesh:
                said = sampler_of(length + conversation.reply)(
                    [" ".join(map(str, row)) for row in history.tolist()],
                    max_generation_steps=conversation.reply,
                    max_prompt_length=length,
                ).tokens
            history = np.concatenate([history, np.stack(said)], axis=1)
        return history

    return converse, f"{TUNIX} {importlib.metadata.version(TUNIX)}, one device"


OPEN = {TRANSFORMERS: transformers_runner, TUNIX: tunix_runner}
