"""Where the time of a run went: event streams made by hand, killed anywhere, and made up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.report.goodput import CAUSES, ENDED, FAILED, KILLED, OPEN, STOPPED, Account, account, account_of

Entry = dict[str, Any]


class Story:
    """Writes the two files of a run, with a clock that is told how far to go on."""

    def __init__(self, begin_s: float = 1000.0, log_every: int = 1, skew_s: float = 0.0) -> None:
        self.now, self.log_every, self.skew_s = begin_s, log_every, skew_s
        self.events: list[Entry] = []
        self.metrics: list[Entry] = []
        self.step = self.recorded = 0

    def event(self, kind: str, after_s: float = 0.0, launcher: bool = False, **values: Any) -> None:
        self.now += after_s
        self.events.append({"kind": kind, "time_s": self.now + (self.skew_s if launcher else 0.0), **values})

    def metric(self, kind: str, after_s: float = 0.0, **values: Any) -> None:
        self.now += after_s
        self.metrics.append({"kind": kind, "time_s": self.now, **values})

    def launch(self, step: int = 0, wait_s: float = 0.0, start_s: float = 20.0, restart: int = 0) -> None:
        self.event("launch", wait_s, launcher=True, world=4, restart=restart)
        self.event("start", start_s, step=step, resumed=bool(step), checkpoint=None, world=4)
        self.metric("start", 0.5)
        self.step = self.recorded = step
        self._window_s = 0.0

    def train(self, steps: int, step_s: float = 2.0, first_s: float | None = None) -> None:
        for number in range(steps):
            took_s = first_s if first_s is not None and number == 0 else step_s
            self.now += took_s
            self._window_s += took_s
            self.step += 1
            if self.step % self.log_every == 0:
                mean_s = self._window_s / (self.step - self.recorded)
                self.metric("step", step=self.step, step_s=mean_s)
                self.recorded, self._window_s = self.step, 0.0
            if first_s is not None and number == 0:
                self.event("first_step", step=self.step)

    def checkpoint(self, blocked_s: float = 1.0, write_s: float = 0.0) -> None:
        self.event("checkpoint_begin", step=self.step)
        self.now += blocked_s
        done = {"step": self.step, "seconds": blocked_s + write_s, "blocked_s": blocked_s, "bytes": 10}
        self.event("checkpoint", **done)

    def account(self) -> Account:
        return account(self.events, self.metrics, self.now + 5)


def seconds(found: Account) -> dict[str, float]:
    """Causes that took time."""
    assert list(found.seconds) == list(CAUSES)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s, abs=1e-6)
    return {cause: pytest.approx(value, abs=1e-5) for cause, value in found.seconds.items() if value}


@pytest.mark.parametrize("log_every", [1, 5])
def test_a_quiet_run(log_every: int) -> None:
    story = Story(log_every=log_every)
    story.launch()
    story.train(10, first_s=7.0)
    story.checkpoint(1.0, 4.0)
    story.train(10)
    story.event("end", 3.0, step=20)
    found = story.account()
    told = seconds(found)
    assert told["start-up"] == 20.5
    assert told["checkpoint"] == 1.0
    assert told["other"] == 3.0
    # The mean over five steps hides which of them took longer; the event of the first does not.
    assert told["first step"] == 5.0
    assert told["productive"] == 40.0
    assert (found.state, found.steps, found.launches, found.failures) == (ENDED, 20, 1, ())
    assert (found.stall_s, found.write_s, found.restart_s) == (1.0, 4.0, 27.5)
    assert found.median_step_s == pytest.approx(2.0)


@pytest.mark.parametrize("skew_s", [0.0, -1.5, 1.5])
def test_a_killed_rank(skew_s: float) -> None:
    """Steps 11 to 14 are done again; half a step more is lost with them. The launcher's clock may differ."""
    story = Story(skew_s=skew_s)
    story.launch()
    story.train(10, first_s=2.0)
    story.checkpoint(1.0)
    story.train(4)
    story.event(
        "failed", 1.0 + 0.25, launcher=True, rank=2, reason="rank 2 was killed", signal="SIGKILL", detected_s=0.25
    )
    story.launch(step=10, wait_s=3.0)
    story.train(10, first_s=6.0)
    story.event("end", step=20)
    found = story.account()
    told = seconds(found)
    assert told["productive"] == 40.0
    assert told["first step"] == 4.0
    assert told["checkpoint"] == 1.0
    if skew_s == 0:
        assert told["detection"] == 0.25
        assert told["redone"] == 8.0 + 1.0
        assert told["waiting"] == 3.0
        assert told["start-up"] == 41.0
    (failure,) = found.failures
    assert (failure.how, failure.rank, failure.lost_steps, failure.detected_s) == (FAILED, 2, 4, pytest.approx(0.25))
    assert found.restart_s == pytest.approx(26.5, abs=abs(skew_s) + 1e-6)


def test_the_whole_tree_killed_within_a_checkpoint() -> None:
    story = Story()
    story.launch()
    story.train(10, first_s=2.0)
    story.checkpoint()
    story.train(5)
    story.event("checkpoint_begin", step=15)
    story.launch(step=10, wait_s=600.0)
    story.train(2, first_s=2.0)
    found = story.account()
    told = seconds(found)
    assert told["waiting"] == 600.0
    assert told["redone"] == 10.0
    assert told["productive"] == 24.0
    assert [(failure.how, failure.lost_steps, failure.detected_s) for failure in found.failures] == [(KILLED, 5, None)]
    assert (found.state, found.unsaved_steps, found.steps, found.age_s) == (OPEN, 2, 12, pytest.approx(5.0))


def test_killed_before_the_first_step_twice() -> None:
    story = Story()
    story.launch()
    story.train(3, first_s=2.0)
    story.event("failed", launcher=True, rank=0, reason="r", signal=None, detected_s=0.0)
    story.event("launch", 2.0, launcher=True, restart=1)
    story.event("failed", 9.0, launcher=True, rank=1, reason="s", signal=None, detected_s=1.0)
    story.launch(restart=2, wait_s=2.0)
    story.train(3, first_s=2.0)
    story.event("end", step=3)
    found = story.account()
    assert [failure.lost_steps for failure in found.failures] == [3, 0]
    told = seconds(found)
    assert (told["redone"], told["productive"], told["waiting"], told["detection"]) == (6.0, 6.0, 4.0, 1.0)
    assert told["start-up"] == 20.5 + 8.0 + 20.5


def test_a_run_that_failed_for_good_has_what_its_checkpoints_have() -> None:
    story = Story()
    story.launch()
    story.train(10, first_s=2.0)
    story.checkpoint()
    story.train(4)
    story.event("failed", launcher=True, rank=0, reason="not finite", signal=None, detected_s=0.0)
    found = story.account()
    assert (found.state, found.steps, found.unsaved_steps) == (FAILED, 10, 0)
    assert found.failures[0].lost_steps == 4
    assert seconds(found)["redone"] == 8.0


def test_a_checkpoint_between_two_lines_keeps_its_steps() -> None:
    """A line every 10 steps, a checkpoint after 15, killed in step 19: four steps are lost, five are not."""
    story = Story(log_every=10)
    story.launch()
    story.train(15, first_s=2.0)
    story.checkpoint(1.0)
    story.train(3)
    story.event("failed", 1.0, launcher=True, rank=0, reason="r", signal=None, detected_s=0.0)
    story.launch(step=15, wait_s=1.0)
    story.train(5, first_s=2.0)
    story.event("end", step=20)
    told = seconds(story.account())
    assert told["productive"] == 40.0
    assert told["redone"] == 7.0
    assert told["checkpoint"] == 1.0


def test_a_checkpoint_that_failed_has_the_time_after_its_begin() -> None:
    story = Story()
    story.launch()
    story.train(5, first_s=2.0)
    story.event("checkpoint_begin", step=5)
    story.event("checkpoint_failed", 3.0, step=5, reason="No space left on device")
    story.train(5)
    found = story.account()
    assert seconds(found)["checkpoint"] == 3.0
    assert (found.checkpoints, found.unsaved_steps) == (0, 10)


def test_a_mean_over_steps_is_also_of_those_known_before() -> None:
    """A line after 10 steps, of which an event tells the first, 7 s; 6 s pass between two of them."""
    story = Story(log_every=10)
    story.launch()
    story.train(5, first_s=7.0)
    story.now += 6.0
    story.train(15)
    told = seconds(story.account())
    assert told["other"] == 6.0
    # The median is of what a line tells: the second ten steps.
    assert (told["first step"], told["productive"]) == (5.0, 40.0)


def test_gone_on_with_from_an_older_checkpoint() -> None:
    """After `--resume` of step 5, the checkpoint of step 10 is not the run's any more."""
    story = Story()
    story.launch()
    for _ in range(2):
        story.train(5)
        story.checkpoint()
    story.event("preempted", step=10, checkpoint="c")
    story.launch(step=5)
    story.train(7)
    assert (story.account().steps, story.account().unsaved_steps) == (12, 7)
    story.event("failed", launcher=True, rank=0, reason="r", signal=None, detected_s=0.0)
    found = story.account()
    assert (found.steps, found.failures[0].lost_steps) == (5, 7)
    assert seconds(found)["productive"] == 10.0


def test_a_hung_rank() -> None:
    story = Story()
    story.launch()
    story.train(5, first_s=2.0)
    story.event("hung", 31.0, missing=[3], actions={}, stuck_s=30.0)
    story.event("failed", 0.5, launcher=True, rank=3, reason="hung", signal=None, detected_s=0.1)
    found = story.account()
    told = seconds(found)
    assert told["detection"] == 30.5
    assert found.detect_s == pytest.approx(30.5)


def test_preempted_and_gone_on_with() -> None:
    story = Story()
    story.launch()
    story.train(5, first_s=2.0)
    story.event("stop_asked", step=5, signal="SIGTERM")
    story.checkpoint(1.5)
    story.event("preempted", step=5, checkpoint="c")
    story.launch(step=5, wait_s=3600.0)
    story.train(5, first_s=2.0)
    story.event("preempted", step=10, checkpoint="c")
    found = story.account()
    assert (found.failures, found.state, found.steps) == ((), STOPPED, 10)
    told = seconds(found)
    assert "redone" not in told
    assert (told["waiting"], told["checkpoint"], told["productive"]) == (3600.0, 1.5, 20.0)


def test_a_rewind_and_a_skipped_update() -> None:
    story = Story()
    story.launch()
    story.train(10, first_s=2.0)
    story.checkpoint(1.0)
    story.train(4)
    story.event("spike", 2.0, step=15, loss=9.0, action="rewind", consumed=0)
    story.event("rewind", 5.0, from_step=15, to_step=10, skipped=[112, 128])
    story.step = story.recorded = 10
    story.train(5)
    story.event("not_finite", 0.0, step=16, loss=None, action="skip", consumed=0)
    story.train(5)
    story.event("end", step=20)
    found = story.account()
    told = seconds(found)
    assert (found.rewinds, found.rewound_steps, found.failures) == (1, 5, ())
    assert told["rewound"] == 4 * 2.0 + 2.0 + 5.0 + 2.0
    assert told["productive"] == 19 * 2.0


def test_validation_is_what_lies_between_two_steps() -> None:
    story = Story()
    story.launch()
    for _ in range(3):
        story.train(2, first_s=2.0 if story.step == 0 else None)
        story.metric("validation", 4.0, step=story.step, loss=1.0)
    story.event("end", step=6)
    told = seconds(story.account())
    assert (told["validation"], told["productive"]) == (12.0, 12.0)


def test_without_a_launcher_a_start_is_the_beginning() -> None:
    """One process, or another launcher: what came before its start is not known, after a kill it is waiting."""
    story = Story()
    story.launch()
    story.train(4, first_s=2.0)
    story.launch(step=2, start_s=30.0)
    story.train(4, first_s=2.0)
    alone = [event for event in story.events if event["kind"] != "launch"]
    found = account(alone, story.metrics, story.now)
    told = seconds(found)
    assert (told["waiting"], told["redone"], told["productive"], told["start-up"]) == (30.0, 4.0, 12.0, 1.0)
    assert found.restart_s is None


# Made up


@st.composite
def stories(draw: st.DrawFn) -> Story:
    story = Story(log_every=draw(st.sampled_from([1, 3, 10])), skew_s=draw(st.sampled_from([0.0, -3.0, 40.0])))
    spans = st.floats(0.0, 50.0)
    saved = 0
    for number in range(draw(st.integers(1, 4))):
        story.launch(step=saved, wait_s=draw(spans), start_s=draw(spans), restart=number)
        story.train(draw(st.integers(0, 6)), draw(spans), draw(st.none() | spans))
        for what in draw(st.lists(st.sampled_from(["train", "save", "look", "back", "skip", "hang"]), max_size=6)):
            match what:
                case "train":
                    story.train(draw(st.integers(1, 12)), draw(spans))
                case "save":
                    story.checkpoint(draw(spans))
                    saved = story.step
                case "look":
                    story.metric("validation", draw(spans), step=story.step, loss=1.0)
                case "back":
                    story.event("rewind", draw(spans), from_step=story.step + 1, to_step=saved, skipped=[0, 8])
                    story.step = story.recorded = saved
                case "skip":
                    story.event("not_finite", step=story.step + 1, loss=None, action="skip", consumed=0)
                case "hang":
                    story.event("hung", draw(spans), missing=[1], actions={}, stuck_s=draw(spans))
        end = draw(st.sampled_from(["failed", "end", "preempted", None]))
        if end == "failed":
            story.event(
                end, draw(spans), launcher=True, rank=1, reason="x", signal=None, detected_s=draw(st.none() | spans)
            )
        elif end:
            story.event(end, draw(spans), step=story.step)
    return story


def kept_of(found: Account) -> None:
    assert list(found.seconds) == list(CAUSES)
    assert min(found.seconds.values()) >= 0
    # Each is a whole number of microseconds, so the sum has to be, too.
    assert sum(round(value * 1e6) for value in found.seconds.values()) == round(found.wall_s * 1e6)
    assert all(failure.lost_steps is None or failure.lost_steps >= 0 for failure in found.failures)


@settings(max_examples=150, deadline=None)
@given(stories(), st.data())
def test_nothing_remains_wherever_it_is_killed(story: Story, data: st.DataObject) -> None:
    """Also with either file cut at any line, and with the clock of one of them wrong."""
    kept_of(story.account())
    events = story.events[: data.draw(st.integers(1, len(story.events)))]
    metrics = story.metrics[: data.draw(st.integers(0, len(story.metrics)))]
    kept_of(account(events, metrics, 0.0))
    off = data.draw(st.floats(-100, 100))
    kept_of(account(events, [{**entry, "time_s": entry["time_s"] + off} for entry in metrics], 1e9))
    shuffled = data.draw(st.permutations(events))
    kept_of(account(shuffled, metrics, 0.0))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 9)), min_size=1, max_size=5), st.sampled_from([1, 4]))
def test_each_step_is_productive_once(lives: list[tuple[int, int]], log_every: int) -> None:
    """Whatever is killed where: steps of one second that all restarts together kept are as many seconds."""
    story, saved, done = Story(log_every=log_every), 0, 0
    for number, (after_save, before_save) in enumerate(lives):
        story.launch(step=saved, wait_s=1.0, restart=number)
        story.train(before_save, 1.0, 1.0)
        story.checkpoint(0.5)
        saved = story.step
        if number + 1 < len(lives):
            story.train(after_save, 1.0)
            story.event("failed", 0.25, launcher=True, rank=0, reason="x", signal=None, detected_s=0.0)
        done += after_save if number + 1 < len(lives) else 0
    story.event("end", step=story.step)
    found = story.account()
    told = seconds(found)
    assert told["productive"] == float(saved)
    assert told.get("redone", 0.0) == done + 0.25 * (len(lives) - 1)
    assert told["checkpoint"] == 0.5 * len(lives)
    lost = [failure.lost_steps for failure in found.failures]
    # Steps after the last line of metrics have left no word of themselves.
    ends = list(accumulate(before for _, before in lives))
    known = [max(0, (end + after) // log_every * log_every - end) for (after, _), end in zip(lives, ends, strict=True)]
    assert lost == known[:-1]


# Files


def write(folder: Path, story: Story) -> Iterator[Path]:
    for name, entries in (("events.jsonl", story.events), ("metrics.jsonl", story.metrics)):
        (folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        yield folder / name


def test_torn_lines_are_passed_over(tmp_path: Path) -> None:
    story = Story()
    story.launch()
    story.train(6, first_s=2.0)
    whole = story.account()
    for path in write(tmp_path, story):
        with path.open("a") as file:
            file.write('{"kind": "step", "time_s": 17')
    found = account_of(tmp_path, story.now + 5)
    assert found == whole


def test_a_folder_without_events_has_no_account(tmp_path: Path) -> None:
    assert account_of(tmp_path, 0.0) is None
    (tmp_path / "events.jsonl").write_text("")
    assert account_of(tmp_path, 0.0) is None
