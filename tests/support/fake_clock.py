"""A fake clock, which advances only by `sleep_until` and `pass_time`."""


class FakeClock:
    def __init__(self, now=0, oversleep=0):
        self.time = now
        self.oversleep = oversleep  # picoseconds by which each sleep is too long
        self.slept_until = []

    def now(self):
        return self.time

    def sleep_until(self, moment):
        self.slept_until.append(moment)
        if moment > self.time:
            self.time = moment + self.oversleep

    def pass_time(self, picoseconds):
        self.time += picoseconds
