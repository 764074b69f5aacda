"""Named jobs: model, plan, data and training in one YAML file each, under the names of records and flags."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, field_validator

from lcplan._record import Record
from lcplan.errors import InputError
from lcplan.job_options import DataSource, Device, Init, TokenizerSource, TrainingOptions
from lcplan.train_plan import TrainPlan


class Preset(Record):
    """One named job."""

    name: str
    description: str
    source: str
    """Where its numbers come from."""
    model: str
    """Catalog or Hub id; with ``config`` only a name."""
    config: dict[str, Any] | None = None
    """A whole config.json, for a model that is in no catalog."""
    init: Init = "pretrained"
    device: Device = "gpu"
    plan: dict[str, Any]
    """The fields of TrainPlan that the preset sets; the rest is resolved as if no flag were given."""
    data: DataSource
    tokenizer: TokenizerSource | None = None
    """None: the model's own, or one trained on the data for random weights."""
    training: TrainingOptions = Field(default_factory=TrainingOptions)

    @field_validator("plan")
    @classmethod
    def _plan_is_possible(cls, plan: dict[str, Any]) -> dict[str, Any]:
        return TrainPlan.model_validate(plan).model_dump(exclude_unset=True)


def list_presets() -> tuple[str, ...]:
    """Names of all presets."""
    return tuple(sorted(_preset_files()))


def load_preset(name: str) -> Preset:
    """The preset of that name."""
    found = _preset_files()
    if name not in found:
        raise InputError("unknown-preset", f"No preset is named {name!r}. There are: {', '.join(sorted(found))}.")
    return parse_preset(found[name], name=name)


def parse_preset(text: str, *, name: str) -> Preset:
    """A preset from YAML; an unknown or repeated key is an error."""
    try:
        content = yaml.load(text, Loader=UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise InputError("bad-preset", f"Preset {name!r} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise InputError("bad-preset", f"Preset {name!r} is not a mapping of settings.")
    try:
        return Preset.model_validate({"name": name, **content})
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise InputError("bad-preset", f"Preset {name!r} is wrong in {problems}.") from None


def _preset_files() -> dict[str, str]:
    """Texts by name: from the installed package, or from the source tree beside it."""
    installed = files("lcplan").joinpath("presets")
    root = installed if installed.is_dir() else Path(__file__).parent.parent / "presets"
    entries = [entry for entry in root.iterdir() if entry.name.endswith(".yaml")]
    return {entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8") for entry in entries}


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets a later key silently replace an earlier one; this does not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build one mapping; called by the loader."""
        seen: list[Any] = []  # a key may be a list, which the base class then refuses
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", key_node.start_mark
                )
            seen.append(key)
        return super().construct_mapping(node, deep=deep)
