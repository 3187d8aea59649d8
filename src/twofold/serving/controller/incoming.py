"""The controller's inbox: what workers, stores and hosts say, and who is told of it."""

import asyncio
import time

from twofold.serving.controller.elsewhere import Elsewhere
from twofold.serving.controller.members import Members
from twofold.serving.controller.progress import Progress
from twofold.serving.controller.requests import Requests
from twofold.serving.fleet import Fleet
from twofold.serving.live_forecast import LiveForecast
from twofold.serving.mailbox import Inbox
from twofold.serving.measured_paths import MeasuredPaths
from twofold.serving.messages import (
    Alive,
    BlocksChanged,
    HandoffReport,
    HostAlive,
    HostFailed,
    HostJoins,
    LeaseGranted,
    LinkMeasured,
    PrefillStarted,
    Registered,
    RequestFailed,
    Status,
    StepDone,
    StoreChanged,
    StoreStatus,
    ToController,
)
from twofold.serving.telemetry import Telemetry


class Incoming:
    """Reads messages in the event loop, in the order in which they came."""

    def __init__(
        self,
        inbox: Inbox[ToController],
        requests: Requests,
        progress: Progress,
        members: Members,
        elsewhere: Elsewhere | None,
        fleet: Fleet,
        telemetry: Telemetry,
        paths: MeasuredPaths,
        forecast: LiveForecast | None,
    ) -> None:
        self._inbox = inbox
        self._requests, self._progress, self._members, self._elsewhere = (
            requests,
            progress,
            members,
            elsewhere,
        )
        self._fleet, self._telemetry, self._paths = fleet, telemetry, paths
        self._forecast = forecast

    def start(self) -> None:
        """Begin to receive; to be called inside the running event loop."""
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self.drain)
        self.drain()

    def close(self) -> None:
        """Receive no more."""
        asyncio.get_running_loop().remove_reader(self._inbox.fileno())
        self._inbox.close()

    def drain(self) -> None:
        """Handle what has come."""
        for message in self._inbox.drain():
            self.handle(message)

    def handle(self, message: ToController) -> None:  # noqa: C901, PLR0912  (one flat match over the kinds of messages)
        """Tell whoever is concerned."""
        match message:
            case StepDone():
                self._members.status(message)
                self._progress.stepped(message)
            case Alive():
                self._fleet.heard(message, time.monotonic())
            case PrefillStarted(request_id=attempt_id):
                self._progress.prefill_started(attempt_id)
            case LeaseGranted(lease=lease):
                self._progress.leased(lease)
            case Status():
                self._members.status(message)
            case BlocksChanged():
                if self._forecast is not None and self._fleet.is_current(message.instance, message.epoch):
                    self._forecast.blocks_changed(message)
            case StoreChanged():
                if self._forecast is not None:
                    self._forecast.store_changed(message)
            case StoreStatus():
                self._telemetry.store(message)
            case HandoffReport():
                self._progress.handed_off(message)
            case RequestFailed(instance=instance, request_id=attempt_id, reason=reason):
                self._requests.replay(attempt_id, instance, reason)
                self._requests.place_waiting()
            case Registered():
                self._members.register(message)
            case LinkMeasured():
                self._paths.measured(message)
                self._telemetry.link(message, self._paths)
            case HostJoins() | HostAlive() | HostFailed():
                if self._elsewhere is not None:
                    self._elsewhere.said(message, time.monotonic())
