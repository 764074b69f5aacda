"""Data that ships with the package: public model configs and GPUs, each with its source.

``models/<org>__<name>.json`` holds ``source``, ``config`` and ``aliases``: repositories whose config.json
differs in nothing that shapes the model (an instruction-tuned sibling with another end-of-text token).
``gpus.json`` holds the GPUs; ``hardware`` reads it.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

_DATA = files(__name__)
_SLASH = "__"


def model_ids() -> list[str]:
    """Hub ids of the catalog's models, sorted without case; aliases not included."""
    names = (entry.name for entry in _DATA.joinpath("models").iterdir())
    ids = (name.removesuffix(".json").replace(_SLASH, "/") for name in names if name.endswith(".json"))
    return sorted(ids, key=str.casefold)


def model_names() -> dict[str, tuple[str, str]]:
    """Every accepted spelling, lower case, to (its Hub id, the entry that describes it)."""
    names: dict[str, tuple[str, str]] = {}
    for entry in model_ids():
        for hub_id in (entry, *_model(entry).get("aliases", [])):
            for spelling in (hub_id, hub_id.rpartition("/")[2]):
                names[spelling.casefold()] = (hub_id, entry)
    return names


def model_config(id: str) -> dict[str, Any]:
    """The config.json of one of ``model_ids()``."""
    config: dict[str, Any] = json.loads(json.dumps(_model(id)["config"]))
    return config


def model_source(id: str) -> str:
    """Where the config of one of ``model_ids()`` is published."""
    return str(_model(id)["source"])


def gpu_ids() -> list[str]:
    """Ids of the catalog's GPUs, in the order of the file."""
    return list(_gpus())


def gpu_entry(id: str) -> dict[str, Any]:
    """The catalog's figures of one of ``gpu_ids()``."""
    return dict(_gpus()[id])


@cache
def _model(id: str) -> dict[str, Any]:
    path = _DATA / "models" / f"{id.replace('/', _SLASH)}.json"
    entry: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return entry


@cache
def _gpus() -> dict[str, dict[str, Any]]:
    text = _DATA.joinpath("gpus.json").read_text(encoding="utf-8")
    entries: dict[str, dict[str, Any]] = json.loads(text)
    return entries
