"""Pipeline schedules as data: one object that is planned, validated, drawn and run.

actions.py     Action, Schedule and the messages between ranks that follow from them
programs.py    what each rank does in the named schedules, and what each promises
generators.py  the named schedules, written out
validate.py    every action once, in a possible order, and no deadlock between channels
replay.py      a schedule played with durations: spans, bubble, idle time
steady.py      schedules of many microbatches, replayed by their beginning and end
memory.py      what is in flight on each rank, at most and over time
files.py       schedules as CSV and JSON; times.py: durations as CSV
waits.py       what idle ranks wait for
lanes.py       one schedule played thousands of times at once
limits.py      what a rank may hold, and the least time that a step can take within it
auto.py        a schedule made for given times: listing.py proposes, exchange.py improves
"""

from trigrid.schedule.actions import Action, Kind, Schedule, channels, needs, receives, result, sends_to
from trigrid.schedule.files import read_schedule, write_schedule
from trigrid.schedule.generators import NAMES, forward_only, make_schedule
from trigrid.schedule.memory import (
    InFlight,
    bytes_over_time,
    in_flight,
    messages_alive,
    peak_bytes,
    rank_peak_bytes,
)
from trigrid.schedule.replay import Durations, Order, Span, Timeline, order_of, replay
from trigrid.schedule.steady import end_s, order_for
from trigrid.schedule.validate import validate

__all__ = [
    "NAMES",
    "Action",
    "Durations",
    "InFlight",
    "Kind",
    "Order",
    "Schedule",
    "Span",
    "Timeline",
    "bytes_over_time",
    "channels",
    "end_s",
    "forward_only",
    "in_flight",
    "make_schedule",
    "messages_alive",
    "needs",
    "order_for",
    "order_of",
    "peak_bytes",
    "rank_peak_bytes",
    "read_schedule",
    "receives",
    "replay",
    "result",
    "sends_to",
    "validate",
    "write_schedule",
]
