"""A smaller plan: how fewer instances than were planned are split."""

from twofold.scheduling.split import Split


def smaller(planned: Split, left: int, running: Split) -> Split | None:
    """The split of `left` instances whose shares are nearest to the planned ones, with some for both phases.

    Of equals the one that is nearest to what runs, which moves least. None where there is not one for each phase.
    """
    splits = (Split(prefill, left - prefill) for prefill in range(1, left))

    def rank(split: Split) -> tuple[int, int]:
        # How far prefill's share is from the planned one, as a whole number: equals must be equal.
        distance = abs(split.prefill * planned.instances - planned.prefill * left)
        return distance, abs(split.prefill - running.prefill)

    return min(splits, key=rank, default=None)
