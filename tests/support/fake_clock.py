"""A clock whose time passes only where somebody sleeps, and that may oversleep as a busy machine does."""


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
