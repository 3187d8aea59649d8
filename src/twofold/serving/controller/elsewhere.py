"""Workers of other hosts, which come and go with these."""

import logging
from collections.abc import Iterable

from twofold.serving.controller.forecast import LiveForecast
from twofold.serving.controller.membership import Membership
from twofold.serving.controller.registry import WorkerRegistry
from twofold.serving.controller.remote import RemoteHosts
from twofold.serving.messages import HostAlive, HostFailed, HostJoins

log = logging.getLogger(__name__)


class RemoteWorkers:
    """What hosts say of themselves, as far as it is about their workers."""

    def __init__(
        self, hosts: RemoteHosts, fleet: WorkerRegistry, members: Membership, forecast: LiveForecast | None
    ) -> None:
        self._hosts, self._fleet, self._members, self._forecast = hosts, fleet, members, forecast

    def said(self, message: HostJoins | HostAlive | HostFailed, now: float) -> None:
        """A host joins, lives or leaves."""
        hosts = self._hosts
        if isinstance(message, HostJoins):
            joined = hosts.joins(message, now)
            self._dismiss(joined.gone)
            for instance, role in joined.workers.items():
                self._fleet.expect(instance, role)
        elif isinstance(message, HostFailed) or message.leaves:
            if isinstance(message, HostFailed):
                log.error("host %s: %s", message.host, message.reason)
            gone = hosts.leaves(message.host, message.life)
            if gone:
                self._out_of_reach(message.host)
            self._dismiss(gone)
        else:
            for instance in hosts.alive(message, now):
                self._members.exited(instance)

    def ended(self, instance: str) -> None:
        """The launcher says that what ran a worker on a host of its own has ended.

        As long as that host is heard, or may be alive, that proves nothing: the end of its workers is waited for.
        """
        host = self._hosts.host_of(instance)
        if host is None or not host.present:
            self._members.exited(instance)

    def look(self, now: float) -> None:
        """To be called every `ALIVE_S`: workers of a host that is silent must have ended at some time."""
        for instance in self._hosts.look(now, self._fleet.heard_s):
            host = self._hosts.host_of(instance)
            if host is not None:
                self._out_of_reach(host.name)
            self._members.exited(instance)

    def _out_of_reach(self, host: str) -> None:
        """What the store of a host has is of no use to others."""
        if self._forecast is not None:
            self._forecast.host_lost(host)

    def _dismiss(self, instances: Iterable[str]) -> None:
        """Workers that have ended, and will not be started again where they were."""
        for instance in instances:
            self._members.exited(instance)
            if instance not in self._hosts.own:
                self._fleet.dismiss(instance)
