"""Models by name: the catalogue that ships with the package, or a Hugging Face `config.json` of the user."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from trigrid.errors import Problem, Refused
from trigrid.spec.huggingface import model_from_config
from trigrid.spec.model import Experts, LatentAttention, ModelSpec, RopeScaling


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """A published model. parameters: the exact count of its logical parameters, tied ones once.

    aliases: other names under which `load_model` finds it.
    """

    spec: ModelSpec
    parameters: int
    source: str
    aliases: tuple[str, ...] = ()


def catalogue() -> dict[str, CatalogueEntry]:
    """Every model of the catalogue by name, family after family, as the files list them."""
    folder = files("trigrid.spec") / "catalogue"
    families = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return {
        name: _entry(name, fields)
        for file in families
        for name, fields in tomllib.loads(file.read_text(encoding="utf-8")).items()
    }


def load_model(name: str) -> ModelSpec:
    """The model called `name` in the catalogue. Raises Refused, with the closest names, where there is none."""
    models = _by_any_name()
    if name not in models:
        raise Refused([Problem("model", name, "no model of the catalogue has this name", _closest(name, models))])
    return models[name]


def resolve_model(text: str) -> ModelSpec:
    """The model that `text` means: a name of the catalogue, else the path of a `config.json` or of its folder.

    A folder that happens to be called like a model of the catalogue is reached as `./name`. Raises Refused.
    """
    models = _by_any_name()
    if text in models:
        return models[text]
    if os.path.exists(text):
        return model_from_config(text)
    # A name as Hugging Face writes it, `owner/model`, looks like a path: its last part is the hint.
    closest = _closest(text.rsplit("/", 1)[-1], models)
    reason = "neither a model of the catalogue nor an existing config.json, nor a folder holding one"
    raise Refused([Problem("model", text, reason, closest)])


def _entry(name: str, fields: dict[str, Any]) -> CatalogueEntry:
    parameters, source, aliases = fields.pop("parameters"), fields.pop("source"), fields.pop("aliases", ())
    for key, table in (("rope_scaling", RopeScaling), ("experts", Experts), ("latent", LatentAttention)):
        if key in fields:
            fields[key] = table(**fields[key])
    spec = ModelSpec(name=name, **fields)
    return CatalogueEntry(spec=spec, parameters=parameters, source=source, aliases=tuple(aliases))


@cache
def _by_any_name() -> dict[str, ModelSpec]:
    return {name: e.spec for key, e in catalogue().items() for name in (key, *e.aliases)}


def _closest(name: str, models: dict[str, ModelSpec]) -> tuple[str, ...]:
    """The names most like `name`; all of them where none is."""
    return tuple(get_close_matches(name.lower(), models)) or tuple(models)
