"""One line that follows from the numbers, whichever way they fall."""

from twofold.reporting.summary import Distribution, Summary

SAME = 0.05  # attainments closer than this are called equal


def verdict(split: tuple[str, Summary], colocated: tuple[str, Summary]) -> str:
    """Compare SLO attainment first, then say what each design does to TTFT and to the worst token gaps."""
    (split_name, one), (other_name, two) = split, colocated
    if not one.completed or not two.completed:
        return "No verdict: a design completed no request."
    ours, theirs = one.slo_attainment or 0.0, two.slo_attainment or 0.0
    if abs(ours - theirs) < SAME:
        judgement = f"{split_name} and {other_name} keep the SLO equally well ({ours:.0%} and {theirs:.0%})"
    else:
        better, worse = (split_name, other_name) if ours > theirs else (other_name, split_name)
        high, low = max(ours, theirs), min(ours, theirs)
        judgement = f"{better} keeps the SLO better than {worse} ({high:.0%} against {low:.0%})"
    return (
        f"Verdict: {judgement}; split has {_ratio(one.itl_s, two.itl_s)} the P99 gap between tokens "
        f"and {_ratio(one.ttft_s, two.ttft_s)} the P99 time to the first token."
    )


def _ratio(ours: Distribution | None, theirs: Distribution | None) -> str:
    if ours is None or theirs is None or theirs.p99 == 0:
        return "?×"
    return f"{ours.p99 / theirs.p99:.2f}×"
