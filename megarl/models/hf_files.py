"""A Hugging Face checkpoint folder: which tensors it holds, and any box of any of them without reading the rest."""

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from megarl import models

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SCORE = "score.weight"  # of a value head (models/heads.py)
SIDE_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json vocab.json merges.txt tokenizer.model "
    "added_tokens.json chat_template.jinja chat_template.json generation_config.json"
).split()
Box = tuple[tuple[int, int], ...]


def resolve(path: str) -> Path:
    """The folder of a checkpoint: a local one, or a hub name that is downloaded (or found in the local hub cache).

    Raises:
        ValueError: no such folder, and it is no hub name or the hub cannot be reached.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") != 1 or folder.parent.is_dir():
        raise ValueError(
            f"model folder {path} does not exist; give a folder with config.json and *.safetensors, or a hub name"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except Exception as error:  # the hub raises many kinds; each means the same to the user, who gets its message
        raise ValueError(
            f"{path} is neither a local folder nor a model that the Hugging Face hub gives ({type(error).__name__}: "
            f"{str(error).splitlines()[0]})"
        ) from error


def load_config(path: str) -> PretrainedConfig:
    """config.json of a checkpoint.

    Raises:
        ValueError: the folder or its config.json is missing or unreadable, or of a family that megarl does not know.
    """
    folder = resolve(path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {path} has no config.json; is it a Hugging Face checkpoint?")
    try:
        settings = json.loads((folder / "config.json").read_text())
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
        raise ValueError(f"config.json of model folder {path} cannot be read: {error}") from error
    models.get(str(settings.get("model_type")) if isinstance(settings, dict) else "")
    try:
        return AutoConfig.from_pretrained(folder)
    except (KeyError, ValueError, StrictDataclassError) as error:  # the last: a field of the wrong type
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise ValueError(f"config.json of model folder {path} is not right: {reason}") from error


def check_reward_model(path: str) -> None:
    """Raises ValueError for a checkpoint without a score head."""
    if SCORE not in Checkpoint(path).names:
        raise ValueError(
            f"reward model {path} has no {SCORE}: it is no sequence classifier. `megarl reward-model` makes one from a "
            "causal model"
        )


class Checkpoint:
    """The safetensors of a folder. Opening reads headers only; `read` touches only the bytes of the box."""

    def __init__(self, path: str):
        """Raises ValueError for a folder without safetensors, with a missing shard, or with a file cut short."""
        self.folder = resolve(path)
        self._file_of: dict[str, Path] = {}
        for file in self._files():
            self._open(file)
        self._handles = {}

    def _files(self) -> list[Path]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (json.JSONDecodeError, KeyError) as error:
                raise ValueError(
                    f"{index} is not a complete index: {error!r}; was the folder fully written?"
                ) from error
            missing = [name for name in named if not (self.folder / name).is_file()]
            if missing:
                raise ValueError(
                    f"model folder {self.folder} is incomplete: {INDEX} names {', '.join(missing)}, not there"
                )
            return [self.folder / name for name in named]
        if (self.folder / SINGLE).is_file():
            return [self.folder / SINGLE]
        found = sorted(p.name for p in self.folder.iterdir())
        raise ValueError(
            f"model folder {self.folder} has no {SINGLE} and no {INDEX}; it holds: {', '.join(found) or 'nothing'}"
        )

    def _open(self, file: Path) -> None:
        try:
            with safe_open(file, "pt") as handle:
                self._file_of.update(dict.fromkeys(handle.keys(), file))
        except (SafetensorError, OSError, struct.error) as error:
            raise ValueError(f"{file} is not a whole safetensors file ({error}); was it fully written?") from error

    @property
    def names(self) -> set[str]:
        """Every tensor of the checkpoint."""
        return set(self._file_of)

    def _slice(self, name: str):
        file = self._file_of[name]
        if file not in self._handles:
            self._handles[file] = safe_open(file, "pt")
        return self._handles[file].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The box ((start, stop), ...) of a tensor, in the file's dtype, on the CPU."""
        return self._slice(name)[tuple(slice(start, stop) for start, stop in box)]


def write_side_files(source: str, folder: Path, dtype: torch.dtype, changes: Mapping[str, Any]) -> None:
    """Copy what belongs to a checkpoint besides its tensors: config.json (with `dtype` and `changes`), tokenizer."""
    origin = resolve(source)
    config = json.loads((origin / "config.json").read_text())
    config.pop("torch_dtype", None)
    config |= {"dtype": str(dtype).removeprefix("torch."), **changes}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in SIDE_FILES:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)
