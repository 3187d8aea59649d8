"""Telemetry of instances: Prometheus metrics, and state and time series for the dashboard."""

from collections import deque
from typing import Final

from twofold.instance import Role
from twofold.kvcache.cache import RemovalReason
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.telemetry.host import HostMeter, LoadSample
from twofold.serving.telemetry.latencies import BIN_S, HISTORY
from twofold.serving.telemetry.metrics import MetricRegistry
from twofold.serving.telemetry.snapshot import InstanceSeries, InstanceSnapshot, InstanceState, RoleSpan, ServiceLog

NO_STATUS: Final = InstanceStatus(0, 0, 0, 0, 0, 0, 0, 0)
INTERVAL_S = 1.0
SERIES_S = 300  # length of time series
BLOCK_STATES = ("total", "free", "in_flight", "cached", "pinned")
REQUEST_STATES = ("waiting", "running", "arriving", "handing_off", "lease_queue", "swapped")
SWAP_STATES = ("total", "free")
ENGINE_TIER = "engine"  # the memory of an instance's engine


class InstanceHistory:
    """Current state, role history and time series of one instance."""

    def __init__(self, role: Role) -> None:
        self.home = self.role = role
        self.state = InstanceState.STARTING
        self.restarts = 0
        self.roles: deque[RoleSpan] = deque(maxlen=64)
        self.batch = 0
        self._iterations = 0
        self._sequences = 0
        self._batches: deque[float] = deque(maxlen=SERIES_S)
        self._waiting: deque[int] = deque(maxlen=SERIES_S)
        self._kv_used: deque[float] = deque(maxlen=SERIES_S)

    def step(self, sequences: int) -> None:
        self.batch = sequences
        self._iterations += 1
        self._sequences += sequences

    def sample(self, status: InstanceStatus) -> None:
        """Append the past second's batch size, queue length and KV usage to the time series."""
        if self._iterations:
            self._batches.append(round(self._sequences / self._iterations, 2))
        else:  # an iteration may take longer than a second
            self._batches.append(self.batch if status.running else 0)
        self._iterations = self._sequences = 0
        self._waiting.append(status.waiting + status.lease_queue)
        used = 1 - status.blocks_free / status.blocks_total if status.blocks_total else 0.0
        self._kv_used.append(round(used, 4))

    def recent(self, seconds: int) -> list[float]:
        """Return the means of batch, waiting sequences and KV use over the last `seconds`."""
        series = (list(each)[-seconds:] for each in (self._batches, self._waiting, self._kv_used))
        return [sum(last) / max(1, len(last)) for last in series]

    def snapshot(self, name: str, status: InstanceStatus) -> InstanceSnapshot:
        return InstanceSnapshot(
            instance=name,
            role=self.role,
            home=self.home,
            state=self.state,
            status=status,
            batch=self.batch if status.running else 0,
            restarts=self.restarts,
            roles=tuple(self.roles),
            series=InstanceSeries(batch=list(self._batches), waiting=list(self._waiting), kv_used=list(self._kv_used)),
        )


class InstanceTelemetry:
    """Metrics and history of all instances: load, KV cache, role and availability."""

    def __init__(self, registry: MetricRegistry, log: ServiceLog) -> None:
        gauge, counter = registry.gauge, registry.counter
        self._usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1.", "instance")
        self._blocks = gauge("kv_cache_blocks", "KV blocks by state.", "instance", "state")
        self._requests = gauge("num_requests", "Requests of an instance by state.", "instance", "state")
        self._running = gauge("num_requests_running", "Running requests of an instance.", "instance")
        self._waiting = gauge("num_requests_waiting", "Waiting prompts of an instance.", "instance")
        self._leases = gauge("kv_leases", "Leases on blocks for arriving KV.", "instance")
        self._swap = gauge("swap_blocks", "Swap blocks in host memory by state.", "instance", "state")
        self._swaps = counter("swaps", "Swap-outs of requests.", "instance")
        self._moved = counter("swap_blocks_moved", "KV blocks swapped out and in.", "instance")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "instance")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "instance", "tier")
        self._evictions = counter(
            "prefix_cache_evictions", "Evicted prefix blocks by reason.", "instance", "tier", "reason"
        )
        self._role = gauge("instance_role", "1 for the current role of an instance.", "instance", "role")
        self._state = gauge(
            "instance_state",
            "1 for the current state of an instance; open and half-open are states of its circuit breaker.",
            "instance",
            "state",
        )
        self._moves = counter("role_moves", "Changes of role.", "instance", "from_role", "to_role")
        self._restarts = counter("worker_restarts", "Restarts of worker processes.", "instance")
        self._log = log
        self._sampled = 0  # seconds in the series
        self._meter = HostMeter()
        self._samples: deque[LoadSample] = deque(maxlen=HISTORY)
        self._statuses: dict[str, InstanceStatus] = {}
        self._instances: dict[str, InstanceHistory] = {}  # those with a known role

    def role(self, instance: str, role: Role) -> None:
        """Record the current role of an instance."""
        for each in Role:
            self._role.labels(instance, each.value).set(each is role)
        known = self._find(instance)
        if known is None:
            known = self._instances[instance] = InstanceHistory(role)  # the first role is its configured role
        elif known.role is role:
            return
        else:
            self._moves.labels(instance, known.role.value, role.value).inc()
            self._log.event(f"{known.role.value} → {role.value}", instance)
        known.role = role
        known.roles.append(RoleSpan(role, self._log.clock()))

    def state(self, instance: str, state: InstanceState) -> None:
        """Record the current availability of an instance."""
        self._set_state(instance, state)
        known = self._find(instance)
        if known is None or known.state is state:
            return
        if known.state is not InstanceState.STARTING or state is not InstanceState.UP:
            self._log.event(state.value, instance)
        known.state = state
        if state is InstanceState.LOST:
            known.batch = 0

    def status(self, instance: str, status: InstanceStatus) -> None:
        self._fill()
        before = self._statuses.get(instance, NO_STATUS)
        self._statuses[instance] = status
        if status.swap_blocks_total:
            self._swaps.labels(instance).inc(status.swaps - before.swaps)
            self._moved.labels(instance).inc(status.swap_blocks_moved - before.swap_blocks_moved)
        evicted = status.blocks_evicted - before.blocks_evicted
        if evicted:
            self._evictions.labels(instance, ENGINE_TIER, RemovalReason.CAPACITY.value).inc(evicted)

    def step(self, instance: str, sequences: int) -> None:
        """Record an iteration that generated a token for each of `sequences` sequences."""
        known = self._find(instance)
        if known is not None:
            known.step(sequences)

    def prefilled(self, instance: str, prompt_tokens: int, reused_tokens: int) -> None:
        """Record a prefill: its prompt tokens, and the number of them found in the prefix cache."""
        self._queries.labels(instance).inc(prompt_tokens)
        self._hits.labels(instance, ENGINE_TIER).inc(reused_tokens)
        self._log.totals["prefix_queries"] += prompt_tokens
        self._log.totals["prefix_hits"] += reused_tokens

    def restarted(self, instance: str) -> None:
        self._restarts.labels(instance).inc()
        self._log.totals["restarts"] += 1
        self._log.event("restarted", instance)
        known = self._find(instance)
        if known is not None:
            known.restarts += 1
            known.state = InstanceState.STARTING
            self._set_state(instance, InstanceState.STARTING)

    def _set_state(self, instance: str, state: InstanceState) -> None:
        for each in InstanceState:
            self._state.labels(instance, each.value).set(each is state)

    def remove(self, instance: str) -> None:
        """Record that an instance was lost."""
        self.state(instance, InstanceState.LOST)
        self._statuses.pop(instance, None)

    def refresh(self) -> None:
        """Update all gauges. Call this before each Prometheus scrape."""
        accounts = (self._usage, self._blocks, self._requests, self._running, self._waiting, self._leases)
        for gauge in (*accounts, self._swap):
            gauge.clear()
        for instance, status in self._statuses.items():
            self._usage.labels(instance).set(1 - status.blocks_free / status.blocks_total)
            for state in BLOCK_STATES:
                self._blocks.labels(instance, state).set(getattr(status, f"blocks_{state}"))
            for state in REQUEST_STATES:
                self._requests.labels(instance, state).set(getattr(status, state))
            for state in SWAP_STATES if status.swap_blocks_total else ():
                self._swap.labels(instance, state).set(getattr(status, f"swap_blocks_{state}"))
            self._running.labels(instance).set(status.running)
            self._waiting.labels(instance).set(status.waiting)
            self._leases.labels(instance).set(status.arriving)

    def snapshot(self) -> tuple[InstanceSnapshot, ...]:
        """Return the state and history of all instances, ordered by name."""
        self._fill()
        named = sorted(self._instances.items())
        return tuple(known.snapshot(name, self._statuses.get(name, NO_STATUS)) for name, known in named)

    def samples(self) -> tuple[LoadSample, ...]:
        """Return samples of the pools and the host over the last hours, oldest first."""
        self._fill()
        return tuple(self._samples)

    def _find(self, instance: str) -> InstanceHistory | None:
        self._fill()
        return self._instances.get(instance)

    def _fill(self) -> None:
        # The state has not changed since the last call.
        passed = int((self._log.clock() - self._log.start_s) / INTERVAL_S) - self._sampled
        if passed <= 0:
            return
        self._sampled += passed
        for _ in range(min(passed, SERIES_S)):
            for name, known in self._instances.items():
                known.sample(self._statuses.get(name, NO_STATUS))
        number = self._sampled // int(BIN_S) - 1  # the last bin that is over
        if number >= 0 and (not self._samples or self._samples[-1].number < number):
            pools = {role: self._pool_means(role) for role in {known.role for known in self._instances.values()}}
            host = self._meter.sample()
            self._samples.append(LoadSample(number, pools, host.busy, round(host.memory_used / host.memory_total, 4)))

    def _pool_means(self, role: Role) -> tuple[float, float, float]:
        members = [known.recent(int(BIN_S)) for known in self._instances.values() if known.role is role]
        batch, waiting, kv_used = (sum(means) for means in zip(*members, strict=True))
        return round(batch / len(members), 2), round(waiting, 2), round(kv_used / len(members), 4)
