"""Pipeline schedules as data: one object that is planned, validated, drawn and run.

actions.py     Action, Schedule and the messages between ranks that follow from them
generators.py  the named schedules
validate.py    every action once, in a possible order, and no deadlock between channels
"""

from trigrid.schedule.actions import Action, Kind, Schedule, channels, receives, sends_to
from trigrid.schedule.generators import make_schedule
from trigrid.schedule.validate import validate

__all__ = ["Action", "Kind", "Schedule", "channels", "make_schedule", "receives", "sends_to", "validate"]
