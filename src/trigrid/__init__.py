"""trigrid: plan, prove and run 3D-parallel training of large language models.

    trigrid.plan("llama3-8b", "h100", Layout(tp=8)).fits()
    trigrid.search("llama3-8b", "h100", gpus=64, global_batch=512).plan

Importing the package imports neither torch nor numpy; a name below is imported when it is first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

PUBLIC = {
    "plan": ("trigrid.plan", None),
    "search": ("trigrid.plan.api", "search"),
    "Plan": ("trigrid.plan.plan", "Plan"),
    "Cluster": ("trigrid.spec.cluster", "Cluster"),
    "Layout": ("trigrid.spec.layout", "Layout"),
    "ModelSpec": ("trigrid.spec.model", "ModelSpec"),
}


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where, what = PUBLIC[name]
    module = import_module(where)
    return module if what is None else getattr(module, what)


def __dir__() -> list[str]:
    return [*globals(), *PUBLIC]
