"""A clock that advances only by sleeps and `pass_time`; each sleep ends `oversleep` picoseconds too late."""


class FakeClock:
    def __init__(self, now=0, oversleep=0):
        self.time = now
        self.oversleep = oversleep
        self.slept_until = []

    def now(self):
        return self.time

    def sleep_until(self, moment):
        self.slept_until.append(moment)
        if moment > self.time:
            self.time = moment + self.oversleep

    def pass_time(self, picoseconds):
        self.time += picoseconds
