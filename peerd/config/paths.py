"""Where a daemon's files live: one home folder per identity, and a short folder for its sockets."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

MAX_SOCKET_PATH_CHARS = 103
"""What sockaddr_un holds on macOS, less its final zero (Linux: 107)."""
MAX_SOCKET_NAME_CHARS = 63
"""The longest name in the run folder: the tunnel's `from-PEER.NUMBER`, with 52 characters of peer id and 5 digits."""


@dataclass(frozen=True, slots=True)
class Home:
    """The files of one identity. `folder` is absolute; nothing is created here."""

    folder: Path

    @property
    def identity(self) -> Path:
        """The peer's private key, as libp2p writes it."""
        return self.folder / "identity.key"

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def state(self) -> Path:
        """What outlives the daemon: incarnation and pinned organiser keys."""
        return self.folder / "state.json"

    @property
    def limits(self) -> Path:
        """What the owner allows, and whether this peer was told to pause."""
        return self.folder / "limits.json"

    @property
    def usage(self) -> Path:
        """Bytes moved today and this month, for quotas."""
        return self.folder / "usage.json"

    @property
    def log(self) -> Path:
        """Where a detached daemon writes its log."""
        return self.folder / "daemon.log"

    @property
    def full_logs(self) -> tuple[Path, ...]:
        """What the log becomes when it is full, the newest first; what is older is gone."""
        return tuple(self.log.with_name(f"{self.log.name}.{number}") for number in (1, 2))

    @property
    def averages(self) -> Path:
        """The last few averaged gradients, for peers that catch up."""
        return self.folder / "averages"

    def checkpoints(self, run: str) -> Path:
        """The last few steps of this peer's stage, by run."""
        return self.folder / "checkpoints" / run

    @property
    def dashboard(self) -> Path:
        """The dashboard's port of last time and its token; for this user's eyes only."""
        return self.folder / "dashboard.json"

    def history(self, run: str) -> Path:
        """What this home's daemons saw of a run: steps, samples, events, contributions."""
        return self.folder / "history" / f"{run}.sqlite"

    @property
    def run_folder(self) -> Path:
        """Sockets; removed when the daemon ends. Falls back to /tmp where the path would be too long for a socket."""
        inside = self.folder / "run"
        if len(str(inside)) + 1 + MAX_SOCKET_NAME_CHARS <= MAX_SOCKET_PATH_CHARS:
            return inside
        digest = hashlib.blake2b(str(self.folder).encode(), digest_size=8).hexdigest()
        return Path("/tmp") / f"peerd-{os.getuid()}-{digest}"  # noqa: S108 - created 0700 and checked by its owner

    @property
    def control_socket(self) -> Path:
        return self.run_folder / "control.sock"


def resolve_home(flag: str | None) -> Home:
    """Flag, then PEERD_HOME, then the platform's state folder."""
    chosen = flag or os.environ.get("PEERD_HOME")
    if not chosen:
        from platformdirs import user_state_path

        return Home(user_state_path("peerd", appauthor=False).absolute())
    return Home(Path(chosen).expanduser().absolute())


def cache_folder() -> Path:
    """Where token files are kept, shared by all daemons of this user."""
    from platformdirs import user_cache_path

    return user_cache_path("peerd", appauthor=False).absolute()
