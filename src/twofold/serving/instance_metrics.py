"""Metrics of instances: what they say of themselves, and what is said of them."""

from twofold.instance import Role
from twofold.kvcache.watcher import Removal
from twofold.scheduling.instance import InstanceStatus
from twofold.serving.registry import Registry
from twofold.serving.snapshot import InstanceState

BLOCK_STATES = ("total", "free", "in_flight", "cached", "pinned")
REQUEST_STATES = ("waiting", "running", "arriving", "handing_off", "lease_queue", "swapped")
SWAP_STATES = ("total", "free")
ENGINE_TIER = "engine"  # the memory that an instance computes on


class InstanceMetrics:
    """What instances say of themselves, and what is said of them."""

    def __init__(self, registry: Registry) -> None:
        gauge, counter = registry.gauge, registry.counter
        self._usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", "instance")
        self._blocks = gauge("kv_cache_blocks", "KV blocks by state.", "instance", "state")
        self._requests = gauge("num_requests", "Requests on an instance by state.", "instance", "state")
        self._running = gauge("num_requests_running", "Requests that an instance has begun.", "instance")
        self._waiting = gauge("num_requests_waiting", "Prompts that wait on an instance.", "instance")
        self._leases = gauge("kv_leases", "Leases on blocks of an instance that KV comes to.", "instance")
        self._swap = gauge("swap_blocks", "Blocks of host memory to swap to, by state.", "instance", "state")
        self._swaps = counter("swaps", "Requests that were swapped out, each time.", "instance")
        self._moved = counter("swap_blocks_moved", "KV blocks that were swapped out and back.", "instance")
        self._queries = counter(
            "prefix_cache_queries",
            "Prompt tokens that were looked up in the KV cache of an instance.",
            "instance",
        )
        self._hits = counter(
            "prefix_cache_hits", "Prompt tokens of them that were there.", "instance", "tier"
        )
        self._evictions = counter(
            "prefix_cache_evictions",
            "KV blocks of prompts that were given up, by why.",
            "instance",
            "tier",
            "reason",
        )
        self._role = gauge("instance_role", "1 for the role that an instance plays now.", "instance", "role")
        self._state = gauge(
            "instance_state",
            "1 for the state of an instance; open and half-open are those of its circuit breaker.",
            "instance",
            "state",
        )
        self._moves = counter("role_moves", "Changes of role.", "instance", "from_role", "to_role")
        self._restarts = counter("worker_restarts", "Worker processes started again.", "instance")
        self._roles: dict[str, Role] = {}
        self._statuses: dict[str, InstanceStatus] = {}

    def status(self, instance: str, status: InstanceStatus) -> None:
        """The accounts of an instance as it last reported them."""
        before = self._statuses.get(instance)
        self._statuses[instance] = status
        if status.swap_blocks_total:
            was = (0, 0) if before is None else (before.swaps, before.swap_blocks_moved)
            self._swaps.labels(instance).inc(status.swaps - was[0])
            self._moved.labels(instance).inc(status.swap_blocks_moved - was[1])
        evicted = status.blocks_evicted - (0 if before is None else before.blocks_evicted)
        if evicted:
            self._evictions.labels(instance, ENGINE_TIER, Removal.CAPACITY.value).inc(evicted)

    def prefilled(self, instance: str, prompt_tokens: int, reused_tokens: int) -> None:
        """A prompt whose beginning was looked up is computed; so many of its tokens were there."""
        self._queries.labels(instance).inc(prompt_tokens)
        self._hits.labels(instance, ENGINE_TIER).inc(reused_tokens)

    def refresh(self) -> None:
        """Put the last reports into the gauges: they come after every iteration, and are rarely looked at."""
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

    def role(self, instance: str, role: Role) -> None:
        """An instance plays this role from now on."""
        before = self._roles.get(instance)
        if before is not None and before is not role:
            self._moves.labels(instance, before.value, role.value).inc()
        self._roles[instance] = role
        for each in Role:
            self._role.labels(instance, each.value).set(each is role)

    def state(self, instance: str, state: InstanceState) -> None:
        """Whether an instance takes work."""
        for each in InstanceState:
            self._state.labels(instance, each.value).set(each is state)

    def restarted(self, instance: str) -> None:
        """A new process takes the place of an instance."""
        self._restarts.labels(instance).inc()

    def remove(self, instance: str) -> None:
        """An instance is gone; it is `lost` until it comes back."""
        self._statuses.pop(instance, None)
        self.state(instance, InstanceState.LOST)
