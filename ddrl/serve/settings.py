"""Settings of the server; each is an option of `python -m ddrl.serve`."""

from __future__ import annotations

from dataclasses import dataclass

from ddrl.core.fields import check_ranges, setting


@dataclass(frozen=True)
class ServeConfig:
    """Where it listens, what it refuses, and how often it looks after its files."""

    host: str = setting("127.0.0.1", "", "Address to listen on; whoever reaches it can use it.")
    port: int = setting(8700, "", "Port; 0: a free one, which the first line of output names.", ge=0, le=65535)
    max_body: int = setting(262_144, "B", "Largest body of a request; larger ones get 413.", ge=1024)
    max_policy: int = setting(67_108_864, "B", "Largest body of parameters sent to /v1/policy.", ge=1024)
    max_open: int = setting(256, "requests", "Requests whose bodies arrive at one time; further ones get 429.", ge=1)
    max_queue: int = setting(512, "requests", "Requests that wait at one time; further ones get 503.", ge=1)
    max_connections: int = setting(2048, "connections", "Open connections; further ones get 503.", ge=1)
    body_seconds: float = setting(10.0, "s", "Time that a body may take to arrive; then 408.", gt=0)
    end_seconds: float = setting(10.0, "s", "Time for accepted requests at the end.", gt=0)
    reload_period: float = setting(1.0, "s", "Time between looks for a newer policy in RUN; 0: when asked.", ge=0)
    state_period: float = setting(10.0, "s", "Time between two snapshots of the counters; 0: only at the end.", ge=0)
    day_seconds: float = setting(86400.0, "s", "Length of a day, for requests without a time.", gt=0)
    seed: int = setting(0, "", "Seed of the draws by rate and theta.", ge=0)

    def __post_init__(self) -> None:
        check_ranges("serve", self)
