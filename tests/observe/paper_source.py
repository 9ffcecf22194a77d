"""A paper source for the dashboard: a static swarm that records the requests."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

from peerd.observe.metrics import scraper
from peerd.observe.web.guard import Access
from peerd.observe.web.pages import dashboard

ME = "12D3KooWGRYZDHBembyGJQqQ6WgLqJWYNjnECJwGBnCg8vbCeo8F"
TOKEN = "5" * 48


class PaperSource:
    def __init__(self, num_stages: int = 2, num_peers: int = 3) -> None:
        self.acts: list[str] = []
        self.paused = False
        self.codes: set[str] = set()
        self.looks = 0
        self.reaches_s: list[float] = []
        self.num_stages = num_stages
        self.num_unknown = 0
        """Number of peers of each stage that this daemon has no record of."""
        self.loss: float | None = 4.5
        self.places: dict[str, list[float]] = {}
        """Where peers are in the network, as the page's stream says it."""
        self.ids = [ME, *(f"{ME[:-6]}{n:06}" for n in range(1, num_peers))]
        """Ids of the peers, which serve the stages in turn."""
        self.nicknames: dict[str, tuple[str, str]] = {}
        """What peers call themselves and their teams, by id."""
        self.event_peers = [ME]
        """Peers that joined, in order, before the page was opened."""
        self.health: list[dict[str, str]] = []
        self.name = "paper"
        self.local_batch = 0
        self.about: dict[str, str] = {}
        """What the organiser says of the run."""
        self.sample: dict[str, object] | None = None
        """How the model went on at the last evaluation."""
        self.outdated = False
        self.join = f"/ip4/203.0.113.7/tcp/31337/p2p/{ME}#{'a' * 32}"

    async def past(self, reach_s: float) -> Mapping[str, Any]:
        self.reaches_s.append(reach_s)
        run = {"id": "a" * 32, "name": self.name, "num_stages": self.num_stages, "microbatches_per_step": 16, "steps": 100}
        return {
            "run": {
                **run,
                "tokens_per_step": 8192,
                "boundary_bytes": 262144,
                "local_batch": self.local_batch,
                "local_steps_after": 0,
                "about": self.about,
            },
            "me": ME,
            "steps": [[step, 5.5 - step / 20, 1.8e9 + step] for step in range(20)],
            "evaluations": [[step, 5.6 - step / 20] for step in range(0, 20, 5)],
            "samples": [[1.8e9 + 2 * n, 5000.0, 1000, 900, [2] * self.num_stages, [3] * self.num_stages, 0] for n in range(30)],
            "reach_s": None,
            "spacing_s": 0.0,
            "churn": [[1.8e9 + 20, "joined", 2], [1.8e9 + 40, "gone", 1], [1.8e9 + 50, "moved", 1]],
            "events": [
                {"number": number, "time_s": 1.8e9, "kind": "joined", "peer": peer, "stage": 0, "text": ""}
                for number, peer in enumerate(self.event_peers, 1)
            ],
        }

    async def now(self, seen: Mapping[str, int]) -> Mapping[str, Any]:
        self.looks += 1
        row = ["accumulating", 20, 7, 2, 12.5, 40960, "CPU", 1, "direct", 0, 0]
        peers = [[peer, *row, self.places.get(peer), *self.nicknames.get(peer, ())] for peer in self.ids]
        numbers = {"step": 20, "missing": 9, "queue": 2, "throughput": 12.5}
        by_stage = [peers[stage :: self.num_stages] for stage in range(self.num_stages)]
        stages = [
            {"stage": stage, **numbers, "num_peers": len(known) + self.num_unknown, "peers": known} for stage, known in enumerate(by_stage)
        ]
        exact = ("duplicate_microbatches", "lost_microbatches", "inexact_steps")
        names = ("accumulated_microbatches", "own_updates", "bytes_sent", "bytes_received", *exact)
        own = {
            "join": self.join,
            "peer": {"stage": 0, "phase": "accumulating", "leaving": False, "queue": 2, "throughput": 12.5, "tokens": 40960, "step": 20},
            "counters": dict.fromkeys(names, 0),
            "decision": "working: 6 of 16 microbatches done",
            "rebalancing": "",
            "moves": 0,
            "health": self.health,
            "uptime_s": 4000.0,
            "paused": self.paused,
            "nice": 10,
            "pauses": ["while used", "on battery"],
            "texts": {"share": 0.1, "answering": False, "tokens": 1_234_567, "busy_s": 90.0},
        }
        moment = {
            "time_s": 1.8e9,
            "step": 20,
            "loss": self.loss,
            "evaluation": [20, 4.6],
            "tokens_per_second": 5120.0,
            "num_peers": len(self.ids),
            "outdated": self.outdated,
            "sample": self.sample,
        }
        return {**moment, "stages": stages, "own": own, "steps": [], "samples": [], "events": [], "seen": {"step": 20, "event": 1}}

    async def contributions(self) -> Mapping[str, Any]:
        row = {"peer": ME, "steps": 9, "microbatches": 80, "tokens": 40960, "reporter": ME}
        stage = {"stage": 0, "first_step": 0, "last_step": 9, "steps": 10, "peers": [row]}
        return {"schema": 1, "me": ME, "run": "paper", "num_stages": self.num_stages, "stages": [stage]}

    def join_address(self) -> str:
        return self.join

    async def leave(self) -> None:
        self.acts.append("leave")

    async def pause(self, yes: bool) -> None:
        self.paused = yes
        self.acts.append("pause" if yes else "resume")

    def take_code(self, code: str) -> bool:
        holds = code in self.codes
        self.codes.discard(code)
        return holds

    def metrics(self) -> bytes:
        return scraper(lambda: {"peerd_step": 20})()


@contextlib.asynccontextmanager
async def served(source: PaperSource, host: str = "127.0.0.1", port: int = 0, *, public: bool = False) -> AsyncIterator[int]:
    """Run the real server on a free port. Yields the port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    listener.setblocking(False)
    with contextlib.closing(listener):
        port = listener.getsockname()[1]
        async with dashboard(listener, source, Access(host=host, port=port, token=TOKEN, public=public)):
            yield port
