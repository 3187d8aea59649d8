"""Until when blocks are pinned."""

from twofold.kvcache.cache import Pins


def test_the_longest_of_several_counts():
    """A block that is pinned again for less stays as long as it was to."""
    pins = Pins()
    for until in (10.0, 30.0, 20.0):
        pins.pin(1, until)
    assert (pins.expired(29.0), len(pins)) == ([], 1)
    assert (pins.expired(30.0), len(pins)) == ([1], 0)


def test_who_is_first():
    """Whose time is up first, among those that are pinned now."""
    pins = Pins()
    for key, until in ((1, 30.0), (2, 20.0), (3, 10.0)):
        pins.pin(key, until)
    assert pins.first() == 3
    pins.pin(3, 40.0)
    pins.drop(2)
    assert pins.first() == 1
    pins.expired(40.0)
    assert pins.first() is None


def test_pinning_again_and_again_takes_no_more_memory():
    """Whatever a client asks for; and what was dropped and pinned again ends once."""
    pins = Pins()
    for number in range(1000):
        pins.pin(number % 7, float(number))
        if number % 3 == 0:
            pins.drop(number % 7)
    assert len(pins._ends) < 40
    left = len(pins)
    assert len(pins.expired(1000.0)) == left


def test_the_end_of_a_prompt_goes_before_its_beginning():
    """Where their time is up together."""
    pins = Pins()
    for key in (1, 2, 3):
        pins.pin(key, 10.0)
    assert pins.first() == 3
    assert pins.expired(10.0) == [3, 2, 1]
