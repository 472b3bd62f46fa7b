"""What a job will need, in closed form.

setup.py     one layout with its batch as plain numbers
memory.py    bytes of each stage by category; beside.py: allocator, context, communicators; elements.py: of buckets
engine_memory.py  the same of this project's engine: units.py on a tape (tape.py, products.py, operations.py),
             alive.py in an action, turns.py over a schedule
compute.py   seconds of a unit's operations; network.py: of collectives, from where the ranks sit
step.py      seconds of a step, in closed form or with the schedule replayed
plan.py      the plan of a job; figures.py and explain.py: its figures and their formulas;
             notes.py: its warnings
space.py     every legal layout; bounds.py: what no replay can beat; search.py: the best of
             them, told by found.py; front.py: the best for less and less memory
around.py    each knob one notch away, and why; changes.py: what would fit
shape.py     a model by its size; layouts.py: jobs of candidates
validate.py  plans beside published measurements
stages.py    the stages of a pipeline: times and bytes; balance.py: how many layers each gets
simulate.py  a step played; stragglers.py: with slow ranks, jitter and failures
goodput.py   long runs with failures, in closed form; long_run.py: played
measured.py  a machine's own prices (`trigrid calibrate`); measured_file.py, measured_text.py
auto.py      the schedule made for a job; scheduled.py: the one that it runs; unnamed.py: plans with one without a name
traffic.py   every collective and message of the engine's step, counted
state.py     bytes of weights, gradients and optimizer on one rank

The folder itself can be called: `trigrid.plan(model, cluster, layout)`, see api.py.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trigrid.plan.plan import Plan


class _Callable(ModuleType):
    """A module that is also the function of its name: importing any file of it would hide a function beside it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Plan:
        from trigrid.plan.api import plan

        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
