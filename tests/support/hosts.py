"""Host profiles with round numbers, for simulations with known results."""

from twofold.hardware.specs import Model
from twofold.performance.profile import (
    ContentionFactors,
    GatewayTimes,
    IterationTimes,
    KvLink,
    MeasuredProfile,
    SharedHost,
)

MODEL = Model(
    name="small",
    layers=4,
    hidden_size=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    parameters=1e6,
    active_parameters=1e6,
    weight_bytes=4_000_000,
    kv_dtype_bytes=4,
    source="a test",
    date="2026-01-01",
)
# Every iteration takes 10 ms plus 1 ms per token.
TIMES = IterationTimes(
    base_s=0.010,
    bends=(0,),
    token_s=(0.001,),
    square_s=0.0,
    sequence_s=0.0,
    context_s=0.0,
    prefill_error=0.05,
    decode_error=0.04,
    iterations=50,
)
NO_FRONT = GatewayTimes(
    request_s=0.0, prompt_token_s=0.0, request_delay_s=0.0, step_s=0.0, token_s=0.0, step_delay_s=0.0
)

NONE = ContentionFactors()


def profile(*, cores=2, threads=1, front=NO_FRONT, prefill=NONE, decode=NONE, latency_s=0.0, sync_s=0.0):
    """Return a host profile, by default without gateway and link delays."""
    return MeasuredProfile(
        model=MODEL,
        engine="a test",
        times=TIMES,
        link=KvLink(bytes_per_s=1e15, latency_s=latency_s, sync_s=sync_s),
        host=SharedHost(cores=cores, threads=threads, front=front, prefill=prefill, decode=decode),
        kv_capacity_tokens=64_000,
        source="a test",
        date="2026-01-01",
    )
