"""The interpreter of schedules: one rank's actions in order, messages through in-order channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from trigrid.engine.comm import Channel, Comm, Pending
from trigrid.engine.recorder import COMPUTE
from trigrid.engine.units import Microbatch, Stage
from trigrid.schedule import Action, Kind, Schedule, channels, needs, receives, result, sends_to


class _Inbox:
    """Messages of one incoming channel: one receive is posted ahead, and those taken early wait here."""

    def __init__(self, channel: Channel, messages: Sequence[Action], make_buffer: Callable[[], Tensor]):
        self._channel = channel
        self._messages = list(reversed(messages))
        self._make_buffer = make_buffer
        self._taken: dict[Action, Tensor] = {}
        self._posted: tuple[Action, Pending] | None = None
        self._post()

    def _post(self) -> None:
        self._posted = None
        if self._messages:
            self._posted = (self._messages.pop(), self._channel.receive_start(self._make_buffer()))

    def take(self, message: Action) -> Tensor:
        while message not in self._taken:
            assert self._posted is not None, f"{message} is not among the messages of its channel"
            arrived, pending = self._posted
            self._taken[arrived] = pending.wait()
            self._post()
        return self._taken.pop(message)


class Pipeline:
    """Runs schedules over the stages that this rank holds, by stage number."""

    def __init__(self, stages: Mapping[int, Stage], comm: Comm, dtype: torch.dtype, device: torch.device):
        self._stages = stages
        self._comm = comm
        self._rank = comm.coord.pp
        self._dtype = dtype
        self._device = device
        self._loss_dtype = torch.promote_types(dtype, torch.float32)

    def run(self, schedule: Schedule, microbatches: Sequence[Microbatch], boundary: tuple[int, ...]) -> Tensor:
        """Run `schedule` and return the scaled loss summed over `microbatches`, zero where the last stage is elsewhere.

        boundary: shape of the activation between two stages.
        """
        mine = schedule.ranks[self._rank]
        training = any(action.kind is not Kind.FORWARD for action in mine)
        routes = channels(schedule)
        inboxes = {
            src: _Inbox(self._comm.channel(src, dst), messages, lambda: self._buffer(boundary))
            for (src, dst), messages in routes.items()
            if dst == self._rank
        }
        handed: dict[Action, Tensor] = {}
        losses: list[Tensor] = []
        for action in mine:
            self._comm.activity.act(action)
            if action.kind is Kind.WEIGHT:
                with self._recorded(action):
                    self._stages[action.stage].weight_backward(action.microbatch)
                continue
            if action.kind is Kind.FORWARD:
                self._stages[action.stage].forward_start()
            else:
                self._stages[action.stage].backward_start()
            x = self._input(schedule, action, inboxes, handed, microbatches)
            with self._recorded(action):
                y = self._act(action, x, microbatches, training)
            del x
            if (target := sends_to(schedule, action)) is not None:
                assert y is not None
                recorder, sent = self._comm.recorder, result(action)
                done = recorder.begin(f"P2P to {target}", *sent) if recorder else None
                self._comm.channel(self._rank, target).send(y, done)
            elif action.kind is Kind.FORWARD and action.stage == schedule.stages - 1:
                assert y is not None
                losses.append(y)
            elif action.kind is Kind.FORWARD or action.stage > 0:
                assert y is not None
                handed[result(action)] = y
            del y
        for src, dst in routes:
            if src == self._rank:
                self._comm.channel(src, dst).drain()
        zero = torch.zeros((), dtype=self._loss_dtype, device=self._device)
        return torch.stack(losses).sum() if losses else zero

    def _act(self, action: Action, x: Tensor, microbatches: Sequence[Microbatch], training: bool) -> Tensor | None:
        """Run an action that starts from `x`, and return what it hands on."""
        stage, m = self._stages[action.stage], action.microbatch
        if action.kind is Kind.FORWARD:
            return stage.forward(x, m, microbatches[m], training)
        if action.kind is Kind.INPUT:
            return stage.input_backward(x, m)
        return stage.backward(x, m)

    def _recorded(self, action: Action) -> AbstractContextManager[None]:
        recorder = self._comm.recorder
        return recorder.span(COMPUTE, *action) if recorder else nullcontext()

    def _input(
        self,
        schedule: Schedule,
        action: Action,
        inboxes: Mapping[int, _Inbox],
        handed: dict[Action, Tensor],
        microbatches: Sequence[Microbatch],
    ) -> Tensor:
        """What `action` starts from: a message, what another stage of this rank has handed over, the tokens, or one
        for the gradient of the loss."""
        message = receives(schedule, action)
        if message is not None:
            return inboxes[schedule.placement[message.stage]].take(message)
        if (need := needs(schedule, action)) is not None:
            return handed.pop(need)
        if action.kind is Kind.FORWARD:
            return microbatches[action.microbatch].tokens_SB
        return torch.ones((), dtype=self._loss_dtype, device=self._device)

    def _buffer(self, boundary: tuple[int, ...]) -> Tensor:
        return torch.empty(boundary, dtype=self._dtype, device=self._device)
