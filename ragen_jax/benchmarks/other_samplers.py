"""Other libraries' samplers on the same conversations, to compare speeds; all optional.

Each gets our weights as a Hugging Face folder. In every turn it is given the whole
history again, as usual for agents in Python, and prefills all of it.
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

# Takes a Conversation; returns int32[B, T], all of its tokens, replies included.
ConversationRunner = Callable[[Conversation], np.ndarray]
TRANSFORMERS, TUNIX = "transformers", "google-tunix"


def missing(config: ModelConfig) -> dict[str, str]:
    """By name, why a peer cannot run a model of this shape here."""
    found = {}
    if importlib.util.find_spec("torch") is None:
        found[TRANSFORMERS] = "unmeasured: its models need torch, which is not here"
    if importlib.util.find_spec("tunix") is None:
        found[TUNIX] = "unmeasured: it is not installed"
    elif config.rope_scaling is not None:
        found[TUNIX] = "unmeasured: it has no scaled rotary positions"
    return found


def model_folder(model: Model, actor: Parameters, new: Path) -> Path:
    """A Hugging Face folder with the model: its own, or a new one where it has none."""
    if model.source.whole_folder:
        return model.source.whole_folder
    hugging_face.write_folder(
        new, model.config, jax.device_get(actor), model.tokenizer, model.dtype
    )
    return new


def transformers_runner(folder: Path, model: Model) -> tuple[ConversationRunner, str]:
    """transformers' `generate`, greedy and without early ends.

    Args:
      folder: from `model_folder`.
      model: for the dtype of weights and computation.

    Returns:
      The function, and a line that says on what it runs.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, str(model.dtype)), local_files_only=True
    ).to(device)
    # Replaces the generation config of the folder, whose end-of-turn token would end
    # rows early.
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
    """A tokenizer with Tunix's interface for texts that are lists of token ids."""

    def encode(self, text: str) -> list[int]:
        return [int(part) for part in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> None:
        """No token is put in front of a text."""

    def eos_id(self) -> int:
        return -1  # Never sampled, so that no row ends early.

    def pad_id(self) -> int:
        return -1  # No row is padded: all are of one length.


def _tunix_model(folder: Path, model: Model, mesh: Mesh):
    """Tunix's own model object with the weights in a folder."""
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
    return params.create_model_from_safe_tensors(
        str(folder), shape, mesh, dtype=model.dtype
    )


def tunix_runner(folder: Path, model: Model) -> tuple[ConversationRunner, str]:
    """Tunix's sampler on the first device, greedy and without early ends.

    Its Llama (0.1.7) has a RoPE theta of 1,000,000 whatever the config says: then its
    tokens differ from ours, but the amount of work is the same.

    Args:
      folder: from `model_folder`.
      model: for the model's shape and dtype.

    Returns:
      The function, and a line that says on what it runs.
    """
    from tunix.generate import sampler

    config = model.config
    mesh = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    loaded = _tunix_model(folder, model, mesh)

    @functools.cache
    def sampler_of(length: int) -> sampler.Sampler:
        """A sampler with a cache of just this length: it attends to the whole cache."""
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
