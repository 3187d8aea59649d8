"""The benchmark of scheduling decisions keeps a constant number of requests in the cluster."""

from bench.decision_cost import decisions_per_s, sample_requests


class Counted:
    """Stub of the cluster scheduler that counts requests."""

    def __init__(self):
        self.stages, self.most = {}, 0

    def place(self, request, _now):
        self.stages[request.id] = "arrived"
        self.most = max(self.most, len(self.stages))
        return object()

    def first_token(self, request_id, _now):
        assert self.stages[request_id] == "arrived"
        self.stages[request_id] = "prefilled"

    def handed_off(self, request_id, _started, _now):
        assert self.stages[request_id] == "prefilled"
        self.stages[request_id] = "handed off"

    def finished(self, request_id, _output_tokens, _now):
        assert self.stages.pop(request_id) == "handed off"


def test_the_oldest_request_leaves_before_the_next_arrives():
    """The cluster never holds more requests than configured."""
    cluster = Counted()
    assert decisions_per_s(cluster, 20, held=5) > 0
    assert cluster.most == 5
    assert list(cluster.stages) == [request.id for request in sample_requests(25)[20:]]
