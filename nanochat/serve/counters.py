"""What the server counts, in Prometheus's format at /metrics."""
import time

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6)


class Counters:
    CONTENT_TYPE = CONTENT_TYPE_LATEST

    def __init__(self, num_waiting):
        """num_waiting(): how many requests wait for the model."""
        registry = CollectorRegistry()
        self._registry = registry
        self.requests = Counter("nanochat_requests", "Requests", ["path", "status"], registry=registry)
        self.seconds = Histogram("nanochat_request_seconds", "Seconds until the end of a request's answer",
                                 ["path"], buckets=SECONDS, registry=registry)
        self._prompt = Counter("nanochat_prompt_tokens", "Tokens of prompts, read or known from the request before",
                               ["how"], registry=registry)
        self._generated = Counter("nanochat_generated_tokens", "Tokens generated", registry=registry)
        self._drafted = Counter("nanochat_drafted_tokens", "Tokens drafted from the prompt", ["accepted"],
                                registry=registry)
        Gauge("nanochat_waiting_requests", "Requests that wait for the model",
              registry=registry).set_function(num_waiting)

    def count(self, completion):
        timings = completion.timings
        self._prompt.labels("read").inc(timings.read_tokens)
        self._prompt.labels("known").inc(max(timings.prompt_tokens - timings.read_tokens, 0))
        self._generated.inc(completion.num_tokens)
        self._drafted.labels("yes").inc(timings.accepted_tokens)
        self._drafted.labels("no").inc(max(timings.drafted_tokens - timings.accepted_tokens, 0))

    def text(self):
        return generate_latest(self._registry)


class CountRequests:
    """ASGI middleware that counts the answers of the paths that exist, by status."""

    def __init__(self, app, counters):
        self.app = app
        self.counters = counters

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start = time.monotonic()
        statuses = []

        async def note_status(message):
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, note_status)
        finally:
            # The application has found the route by now. All other paths count as one, so that a client cannot make
            # labels without end by asking for paths.
            path = scope["route"].path if "route" in scope else "other"
            self.counters.requests.labels(path, statuses[0] if statuses else "none").inc()
            self.counters.seconds.labels(path).observe(time.monotonic() - start)
