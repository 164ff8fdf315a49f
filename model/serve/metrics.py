"""Metrics of the server in Prometheus' text format."""

import bisect
import collections
import itertools

LATENCY_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300)  # upper bounds of the histogram's buckets


class Metrics:
    """Counters of requests and tokens, and a histogram of the latency of generated texts."""

    def __init__(self):
        self.requests = collections.Counter()  # (path, status)
        self.tokens = collections.Counter(prompt_tokens_total=0, completion_tokens_total=0)
        self.buckets, self.seconds = [0] * (len(LATENCY_SECONDS) + 1), 0.0

    def add_completion(self, usage, seconds):
        for name in ("prompt_tokens", "completion_tokens"):
            self.tokens[f"{name}_total"] += usage[name]
        self.seconds += seconds
        self.buckets[bisect.bisect_left(LATENCY_SECONDS, seconds)] += 1

    def to_text(self, gauges):
        """Return all metrics in the text format of Prometheus
        (https://prometheus.io/docs/instrumenting/exposition_formats). gauges: {name: value}."""
        lines = ["# TYPE irongpt_requests_total counter"]
        lines += [f'irongpt_requests_total{{path="{path}",status="{status}"}} {n}'
                  for (path, status), n in sorted(self.requests.items(), key=str)]
        for kind, values in (("counter", self.tokens), ("gauge", gauges)):
            for name, value in values.items():
                lines += [f"# TYPE irongpt_{name} {kind}", f"irongpt_{name} {value}"]
        name, counts = "irongpt_text_seconds", list(itertools.accumulate(self.buckets))
        lines += [f"# TYPE {name} histogram"]
        lines += [f'{name}_bucket{{le="{bound}"}} {n}'
                  for bound, n in zip((*LATENCY_SECONDS, "+Inf"), counts)]
        lines += [f"{name}_sum {self.seconds:.6f}", f"{name}_count {counts[-1]}", ""]
        return "\n".join(lines)
