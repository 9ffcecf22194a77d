"""A paper daemon: it speaks the control protocol and pretends to train. For tests of the command line only.

It is started as `python paper_daemon.py SETTINGS_JSON`, in place of `python -m peerd.daemon`. The variable PAPER_DAEMON chooses a
misbehaviour: `fail` ends with an error before it is ready, `die` ends in step 2 if it serves stage 1, `deaf` never becomes ready, `slow`
logs what it does for three seconds before, `late` joins stage 1 only in step 4, `stubborn` ignores every request to end. `saves` has a
checkpoint, whose file tells how many daemons had it. `fail on DEVICE` fails only there, and `crash once on DEVICE` ends there once before
it is ready.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socketserver
import sys
import threading
import time
from pathlib import Path
from typing import Any

from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.link.run_folder import RunFolder, claim
from tests.cli.replies import counters, peer_info, peers_reply, run_info, status_reply

STEP_S = 0.1
MICROBATCHES = 16


class PaperDaemon:
    """A daemon whose step is a function of the time since the demo began, so that all daemons of a demo agree."""

    def __init__(self, settings: Settings, mood: str) -> None:
        self.settings = settings
        self.mood = mood
        self.peer = f"12D3KooW{'p' * 40}{os.getpid():08}"
        self.total = self._total_steps()
        self.began = time.time()
        self.folder: RunFolder | None = None
        """The lock of the run folder, held until this process ends, so that the next daemon removes the folder only then."""

    def _total_steps(self) -> int:
        if self.settings.run_file:
            import tomllib

            return int(tomllib.loads(Path(self.settings.run_file).read_text())["train"]["steps"])
        return int(self.settings.join.rpartition("-")[2])

    @property
    def join(self) -> str:
        return f"/ip4/127.0.0.1/tcp/1/p2p/{self.peer}#run-{self.total}"

    @property
    def step(self) -> int:
        return min(self.total, int((time.time() - self.began) / STEP_S))

    def answer(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        match request["verb"]:
            case "status":
                return [{"ok": self._status()}]
            case "peers":
                return [{"ok": peers_reply()}]
            case "history":
                return [{"ok": {"schema": 1, "steps": [self._finished(step) for step in range(request["since"], self.step)]}}]
            case "wait":
                return [{"ok": {"schema": 1, "step": self.step, "serving": True}}]
            case "leave":
                if self.mood != "stubborn":
                    threading.Timer(0.1, self.end).start()
                return [{"ok": {"schema": 1}}]
            case "export":
                (Path(request["folder"]) / "run.toml").write_text("# paper\n")
                reply = {"schema": 1, "step": self.step, "folder": request["folder"], "files": ["run.toml"], "num_parameters": 1000}
                return [{"progress": "fetching stage 0"}, {"ok": reply}]
        return [{"error": {"exit_code": 2, "message": f"unknown verb {request['verb']}", "remedy": ""}}]

    def _status(self) -> dict[str, Any]:
        stage = self.settings.stage
        held = self.step * MICROBATCHES // 2
        phase = "joining" if self.mood == "late" and stage == 1 and self.step < 4 else "accumulating"
        return dict(
            status_reply(
                join=self.join,
                pid=os.getpid(),
                run=run_info(steps=self.total),
                peer=peer_info(id=self.peer, stage=stage, step=self.step, phase=phase),
                counters=counters(accumulated_microbatches=held, boundary_crossings=held, boundary_bytes=held * 262144),
            )
        )

    def _finished(self, step: int) -> dict[str, Any]:
        return {"step": step, "loss": 5.0 / (1 + step), "tokens": 8192, "time_s": self.began + (step + 1) * STEP_S}

    def end(self) -> None:
        shutil.rmtree(Home(Path(self.settings.home)).run_folder, ignore_errors=True)
        if self.settings.ephemeral:
            shutil.rmtree(self.settings.home, ignore_errors=True)
        os._exit(0)


def save_checkpoint(settings: Settings) -> None:
    """One file of step 1, with a line for each daemon that found it in its home."""
    path = Home(Path(settings.home)).checkpoints("run") / f"{settings.stage}of2-1-00.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")


def serve(daemon: PaperDaemon) -> None:
    home = Home(Path(daemon.settings.home))
    daemon.folder = claim(home.run_folder)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for message in daemon.answer(json.loads(self.rfile.readline())):
                self.wfile.write(json.dumps(message).encode() + b"\n")

    server = socketserver.ThreadingUnixStreamServer(str(home.control_socket), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main() -> None:
    mood = os.environ.get("PAPER_DAEMON", "")
    settings = Settings.from_json(sys.argv[1])
    if settings.join_told:
        settings = settings.told(sys.stdin.readline())
        if not settings.join:
            sys.exit(130)
    daemon = PaperDaemon(settings, mood)
    if mood in ("fail", f"fail on {settings.device}"):
        print("2026-01-01 starting\npeerd: error: port 31337 is taken; choose another --port", file=sys.stderr)
        sys.exit(7)
    if mood == "deaf":
        time.sleep(60)
    for number in range(15 if mood == "slow" else 0):
        print(f"2026-01-01 preparing the data: {number} GB", file=sys.stderr, flush=True)
        time.sleep(0.2)
    if mood == "saves":
        save_checkpoint(settings)
    marker = Path(settings.home) / "crashed"
    if mood == f"crash once on {settings.device}" and not marker.exists():
        marker.parent.mkdir(parents=True)
        marker.touch()
        os._exit(10)
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, signal.SIG_IGN if mood == "stubborn" else lambda _number, _frame: daemon.end())
    serve(daemon)
    if os.environ.get("PEERD_READY") == "steps":
        print(json.dumps({"doing": "measuring the upload with 2 MB"}), flush=True)
    ready = {"schema": 1, "join": daemon.join, "peer": daemon.peer, "run": "9f2c" * 8, "pid": os.getpid(), "organiser": "ab" * 32}
    print(json.dumps(ready), flush=True)
    if mood == "die" and settings.stage == 1:
        while daemon.step < 2:
            time.sleep(0.02)
        print("peerd: error: the disk is full; free some space", file=sys.stderr)
        os._exit(10)
    if settings.follow_parent and mood != "stubborn":
        threading.Thread(target=follow, args=[daemon], daemon=True).start()
    while True:
        time.sleep(0.1)  # a signal that comes just before a call that blocks is looked at after it


def follow(daemon: PaperDaemon) -> None:
    """End once this daemon's parent is gone."""
    sys.stdin.read()
    daemon.end()


if __name__ == "__main__":
    main()
