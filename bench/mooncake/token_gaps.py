"""Observer that measures TTFT and tail TBT of simulated requests."""

import math
from bisect import bisect_right
from heapq import nlargest

from twofold.cluster.timing import PS
from twofold.simulation.observers.base import IterationRun, Observer
from twofold.timeline import Moment, Timeline

_LONGEST = 0.1


class TokenGaps(Observer):
    """Observer that records TTFT and TBT of every completed request in seconds.

    TBT is the mean of the longest 10% of a request's gaps between tokens (Mooncake, FAST'25, section 5.1).
    """

    def __init__(self) -> None:
        self.latencies: list[tuple[float, float]] = []
        self._ends: dict[str, list[float]] = {}  # ends of decode iterations, by instance

    def run(self, run: IterationRun) -> None:
        if not run.decode_sequences:
            return
        # Correct for single-stage instances that give every running decode a token per iteration.
        ends = self._ends.setdefault(run.instance, [])
        each = (run.end_ps - run.start_ps) / run.iterations
        ends.extend((run.start_ps + each * number) / PS for number in range(1, run.iterations))
        ends.append(run.end_ps / PS)

    def ended(self, timeline: Timeline, now: float) -> None:
        ttft_s = timeline.ttft_s
        if timeline.complete and ttft_s is not None:
            self.latencies.append((ttft_s, self._tbt_s(timeline)))

    def share_within(self, ttft_s: float, tbt_s: float) -> float:
        """Return the share of completed requests within the bounds on TTFT and token gap; 0 if none completed."""
        kept = sum(ttft <= ttft_s and tbt <= tbt_s for ttft, tbt in self.latencies)
        return kept / len(self.latencies) if self.latencies else 0.0

    def _tbt_s(self, timeline: Timeline) -> float:
        if timeline.output_tokens < 2:
            return 0.0
        moments, ends = timeline.moments, self._ends[timeline.decode_instance or ""]
        start = bisect_right(ends, moments[Moment.DECODE_STARTED])
        stop = bisect_right(ends, moments[Moment.LAST_TOKEN])
        if stop - start != timeline.output_tokens - 1:
            raise RuntimeError(
                f"request {timeline.request.id} has {timeline.output_tokens} tokens, but there were "
                f"{stop - start} iterations of decodes while it decoded"
            )
        longest = max(1, math.ceil(_LONGEST * (stop - start)))
        before, gaps = moments[Moment.FIRST_TOKEN], []
        for end in ends[start:stop]:
            gaps.append(end - before)
            before = end
        return sum(nlargest(longest, gaps)) / longest
