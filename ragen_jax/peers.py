"""The same conversations through other programs, where they are installed.

Each is given our weights as a Hugging Face folder and a `Talk`, and sends the whole
history again in every turn, as agents written in Python around them do. None of them
is needed by anything else.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from ragen_jax.loop import Run
from ragen_jax.models import hugging_face
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.parameters import Parameters
from ragen_jax.speed import Talk

# A Talk -> int32[B, T], the whole conversations, replies among them.
Speaker = Callable[[Talk], np.ndarray]
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


def model_folder(run: Run, actor: Parameters, new: Path) -> Path:
    """A folder with the run's model: its own, or a new one with the weights in it."""
    if not run.source.is_gguf:
        return run.source.path
    hugging_face.write_folder(
        new, run.config, jax.device_get(actor), run.tokenizer, run.dtype
    )
    return new


def transformers_speaker(folder: Path, run: Run) -> tuple[Speaker, str]:
    """transformers' `generate`, greedy, never ending early, and what it runs on.

    Args:
      folder: from `model_folder`.
      run: for the dtype of weights and computation.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, str(run.dtype)), local_files_only=True
    ).to(device)
    # Without an end-of-turn token, which would end rows early; what is not said here
    # would be taken from the folder's generation config.
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, pad_token_id=0
    )

    @torch.inference_mode()
    def speak(talk: Talk) -> np.ndarray:
        history = torch.empty((talk.fed.shape[1], 0), dtype=torch.int64, device=device)
        for fed in talk.fed:
            told = torch.tensor(fed, dtype=torch.int64, device=device)
            history = torch.cat([history, told], dim=1)
            history = model.generate(
                history,
                attention_mask=torch.ones_like(history),
                max_new_tokens=talk.reply,
            )
        return history.cpu().numpy().astype(np.int32)

    where = f"{torch.get_num_threads()} threads" if device == "cpu" else "cuda"
    return speak, (
        f"transformers {transformers.__version__}, torch {torch.__version__}, {where}"
    )


OPEN = {TRANSFORMERS: transformers_speaker}
