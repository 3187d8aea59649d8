"""What routers of a live service predict by: the simulator's `Forecast`, filled with what workers and stores say."""

from math import inf
from pathlib import Path

from twofold.hardware.catalog import load_catalog
from twofold.instance import InstanceLoad
from twofold.performance.base import PerformanceModel
from twofold.scheduling.forecast import Forecast
from twofold.scheduling.prediction import Prediction
from twofold.scheduling.route import Route
from twofold.serving.config import ForecastConfig
from twofold.serving.host_stores import HostStores
from twofold.serving.measured_paths import MeasuredPaths
from twofold.serving.messages import BlocksChanged, StoreChanged, StoreFetch
from twofold.simulation.kinds import kinds_of
from twofold.simulation.seats import seats_of


class LiveForecast:
    """A worker finds what is in its engine's memory, and what is in the store of its host: the longer prefix of both.

    The cache that it shares with others, and that others fetch from, is that store, which is called as its host is.
    """

    def __init__(self, config: ForecastConfig, block_tokens: int, paths: MeasuredPaths) -> None:
        self._stores, self._paths = HostStores(), paths
        self._models = _models(config)
        self.forecast = Forecast(self._stores.index, block_tokens)

    # -- what happens -----------------------------------------------------------------------------------------------

    def joined(self, load: InstanceLoad, host: str) -> None:
        """A worker on `host` is there."""
        load.cache = host
        model = self._models.get(load.id) or next(iter(self._models.values()), None)
        self.forecast.join(load.id, LivePrediction(load.id, host, model, self._paths, self._stores))

    def lost(self, instance: str) -> None:
        """A worker is gone, and with it what it had in its engine's memory."""
        self.forecast.memories.lost(instance)

    def blocks_changed(self, message: BlocksChanged) -> None:
        """Blocks have come to the memory of a worker's engine, and gone."""
        self.forecast.memories.removed(message.instance, message.removed)
        self.forecast.memories.stored(message.instance, message.stored)

    def store_changed(self, message: StoreChanged) -> None:
        """Blocks have come to the store of a host, and gone."""
        self._stores.changed(message)

    def host_lost(self, host: str) -> None:
        """Nobody can reach a host any more: nothing is fetched from it."""
        self._stores.lost(host)

    # -- what follows -----------------------------------------------------------------------------------------------

    def fetch_of(self, route: Route) -> StoreFetch | None:
        """What the store of the host where a request is prefilled is to bring there; nothing from where it cannot."""
        fetch = route.fetch
        address = None if fetch is None else self._stores.address(fetch.source)
        if fetch is None or address is None:
            return None
        return StoreFetch(host=fetch.source, address=address, blocks=fetch.blocks)


class LivePrediction(Prediction):
    """Of one worker: its prefills by `model`, or by what it measured when it started.

    What its host's store has is taken to be there at once: to copy it within a host's memory is nothing beside
    computing it. From other stores it comes over the slowest link that was measured between its host and others.
    """

    def __init__(
        self,
        instance: str,
        host: str,
        model: PerformanceModel | None,
        paths: MeasuredPaths,
        stores: HostStores,
    ) -> None:
        self._instance, self._host = instance, host
        self._model, self._paths, self._stores = model, paths, stores

    def prefill_s(self, tokens: int, reused: int = 0) -> float:
        if self._model is None:
            return self._paths.prefill_s(self._instance, tokens - reused)
        return self._model.prefill_s(tokens - reused, tokens * tokens - reused * reused)

    def transfer_s(self, tokens: int) -> float:
        way = None if self._stores.address(self._host) is None else self._paths.into(self._host)
        return inf if way is None else way.serialized_s(tokens)


def _models(config: ForecastConfig) -> dict[str, PerformanceModel]:
    """By instance; another one, which joined from another host, is taken to be as fast as the first of these."""
    if config.cluster is None:
        return {}
    kinds = kinds_of(config.cluster, load_catalog([Path(file) for file in config.catalog]))
    return {seat.name: seat.kind.model for seat in seats_of(kinds)}
