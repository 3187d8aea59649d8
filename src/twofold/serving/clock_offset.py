"""What the monotonic clock of another host shows in terms of ours."""

# Two clocks drift apart, by tens of millionths as a rule: older measurements count less.
DRIFT = 1e-4


class ClockOffset:
    """From messages that tell when they were sent: each of them bounds the offset from above, the quickest the best.

    A moment that is translated is late by no more than the quickest message took, and never early.
    """

    def __init__(self, theirs_s: float, ours_s: float) -> None:
        """A message that was sent at `theirs_s` is here at `ours_s`."""
        self._offset_s = ours_s - theirs_s
        self._heard_s = ours_s

    def heard(self, theirs_s: float, ours_s: float) -> None:
        """Another."""
        drifted_s = self._offset_s + DRIFT * (ours_s - self._heard_s)
        self._offset_s = min(drifted_s, ours_s - theirs_s)
        self._heard_s = ours_s

    def ours(self, theirs_s: float) -> float:
        """A moment of their clock on ours."""
        return theirs_s + self._offset_s
