"""Finds the config.json of a model: a path on disk, the catalog, or the Hugging Face Hub, in that order."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lcplan import catalog
from lcplan.errors import EnvironmentProblem, ModelError
from lcplan.model_spec import ModelSpec

MAX_CONFIG_BYTES = 10 * 10**6
"""No config.json comes near this; a file of weights named by mistake does."""
HUB_TIMEOUT_S = 10
_HUB_ID = re.compile(r"(?!\.)[\w.-]+/(?!\.)[\w.-]+(?<!\.json)")
"""``org/name``; not ``./name`` and not ``folder/config.json``, which were meant as paths."""


SpecReader = Callable[[Mapping[str, Any], str], ModelSpec]
"""From a config.json's content and the model's name to its spec."""


def load_model(name: str, *, trust_remote_code: bool = False, read: SpecReader = ModelSpec.from_config) -> ModelSpec:
    """The spec of a config.json or its folder, of a catalog id (matched without case), or of a Hub id.

    A catalog id or a path never needs the network. Nor does a name without a slash: where the catalog lacks
    it, it is refused. No code of a repository is ever run: with ``trust_remote_code`` a model that brings its
    own is refused, since the job would build that, and the formulas count transformers' own class. ``read`` makes the
    spec; the trace method has one that knows more architectures.
    """
    id, config = _find(name)
    spec = read(config, id)
    own_code = config.get("auto_map")
    if trust_remote_code and isinstance(own_code, dict) and "AutoModelForCausalLM" in own_code:
        raise ModelError(
            "remote-code",
            f"{id}: with trust_remote_code the job builds {own_code['AutoModelForCausalLM']!r:.120}, which "
            f"the formulas do not know. Leave it off: transformers has its own {spec.model_type}.",
        )
    return spec


def _find(name: str) -> tuple[str, dict[str, Any]]:
    known = catalog.model_names().get(name.casefold())
    path = _existing_path(name)
    # a job's own output folder may bear a model's bare name: only a folder with a config.json is meant
    if path is not None and not (known and path.is_dir() and not (path / "config.json").exists()):
        return name, _read_config_file(path)
    if known is not None:
        id, entry = known
        return id, catalog.model_config(entry)
    if _HUB_ID.fullmatch(name):
        return name, _download_config(name)
    raise ModelError(
        "unknown-model",
        f"Model {name!r:.200} is neither a file or folder here nor in the catalog. {_near_matches(name)}"
        "Give a path to a config.json, a catalog id (lcplan list models), or a Hub id such as Qwen/Qwen3-8B.",
    )


def _existing_path(name: str) -> Path | None:
    if not name.strip():
        return None
    path = Path(name)
    try:
        path = path.expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, no such home
        return None


def _read_config_file(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(
            "no-config",
            f"{path} holds no config.json. A model's folder has one: give the folder of a saved model, or a "
            "config.json itself.",
        )
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ModelError("unreadable-config", f"{file} cannot be read: {error.strerror}. Make it readable.") from error
    if len(content) > MAX_CONFIG_BYTES:
        raise ModelError(
            "bad-config",
            f"{file} is larger than {MAX_CONFIG_BYTES // 10**6} MB, so it is no config.json. "
            "Give the model's config.json, or the folder that holds it.",
        )
    return parse_config(content, str(file))


def parse_config(content: bytes, where: str) -> dict[str, Any]:
    """The JSON object in a config.json's bytes."""
    try:
        config = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(
            "bad-config",
            f"{where} is not JSON: {error}. Use the model's own config.json, whole and in UTF-8.",
        ) from error
    if not isinstance(config, dict):
        raise ModelError(
            "bad-config",
            f"{where} holds a JSON {type(config).__name__}. It must be an object of a model's settings: "
            "use the model's own config.json.",
        )
    return config


def _download_config(id: str) -> dict[str, Any]:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    near = _near_matches(id)
    try:
        # one request first: hf_hub_download alone repeats a failed one for 20 s
        get_hf_file_metadata(hf_hub_url(id, "config.json"), timeout=HUB_TIMEOUT_S)
        return _read_config_file(Path(hf_hub_download(id, "config.json")))
    except GatedRepoError as error:
        raise ModelError(
            "gated-model",
            f"{id} is gated on the Hugging Face Hub: its config.json needs an accepted licence. {near}"
            f"Accept it at https://huggingface.co/{id} and log in with hf auth login, or give a path to a "
            "config.json.",
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(
            "unknown-model",
            f"{id} is neither in the catalog nor on the Hugging Face Hub, or it is private. {near}"
            "Correct the id, log in with hf auth login, or give a path to a config.json.",
        ) from error
    except ModelError:
        raise
    except Exception as error:  # whatever the Hub client's HTTP library raises: it differs between releases
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise ModelError(
                "no-config",
                f"{id} has no config.json on the Hugging Face Hub, so it is no transformers model. {near}"
                "Give the id of a model that has one.",
            ) from error
        cached = try_to_load_from_cache(id, "config.json")
        if isinstance(cached, str):
            return _read_config_file(Path(cached))
        raise _unreachable(id, near, error) from error


def _unreachable(id: str, near: str, error: Exception) -> EnvironmentProblem:
    reason = (str(error).partition("\n")[0] or type(error).__name__).rstrip(".")
    return EnvironmentProblem(
        "hub-unreachable",
        f"{id} is not in the catalog, and the Hugging Face Hub did not give its config.json: {reason}. {near}"
        "A catalog id (lcplan list models) or a path to a config.json needs no network.",
    )


def _near_matches(name: str) -> str:
    names = catalog.model_names()
    found = difflib.get_close_matches(name.casefold(), names, n=6, cutoff=0.6)
    ids = list(dict.fromkeys(names[spelling][0] for spelling in found))[:3]
    return f"Near it in the catalog: {', '.join(ids)}. " if ids else ""
