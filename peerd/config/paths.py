"""Paths of a daemon's files: one home folder per identity, and a folder with a short path for its sockets."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

MAX_SOCKET_PATH_CHARS = 103
"""Capacity of sockaddr_un on macOS, without the terminating zero (Linux: 107)."""
MAX_SOCKET_NAME_CHARS = 63
"""The longest name in the run folder: the tunnel's `from-PEER.NUMBER`, with 52 characters of peer id and 5 digits."""
SHORT_PARENT = Path("/tmp")  # noqa: S108 - folders made in it have mode 0700 and their owner is checked
"""Parent of the run folders of homes whose path is too long for a socket."""
_DIGEST_BYTES = 8


class _Inside:
    """A path inside a home's folder, by its name there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, home: Home, _kind: type) -> Path:
        return home.folder / self._name


@dataclass(frozen=True, slots=True)
class Home:
    """Paths of the files of one identity. `folder` is absolute; this class creates nothing."""

    folder: Path
    identity = _Inside("identity.key")
    """The peer's private key, in libp2p's format."""
    lock = _Inside("lock")
    state = _Inside("state.json")
    """State kept between runs of the daemon: incarnation and pinned organiser keys."""
    limits = _Inside("limits.json")
    """The owner's limits, and whether the owner paused this peer."""
    usage = _Inside("usage.json")
    """Bytes sent and received today and this month, for quotas."""
    log = _Inside("daemon.log")
    """The log of a detached daemon."""
    averages = _Inside("averages")
    """The last averaged gradients, for peers that catch up."""
    copies = _Inside("copies")
    """Copies of states on their way, in files without names; nothing outlasts the daemon."""
    dashboard = _Inside("dashboard.json")
    """The dashboard's last port and its token; readable by this user only."""
    api_token = _Inside("api-token")
    """The token of `peerd serve-api`; readable by this user only."""
    devices = _Inside("devices.json")
    """The devices for which this home has a daemon each, if there are several."""

    def of_device(self, number: int) -> Home:
        """Return the home of the daemon for the device with this number: this one for the first, else a folder in it."""
        return Home(self.folder / "devices" / str(number)) if number else self

    @property
    def full_logs(self) -> tuple[Path, ...]:
        """Rotated logs, the newest first; older ones are deleted."""
        return tuple(self.log.with_name(f"{self.log.name}.{number}") for number in (1, 2))

    def checkpoints(self, run: str) -> Path:
        """Checkpoints of this peer's stage at the last steps of a run."""
        return self.folder / "checkpoints" / run

    @property
    def checkpoint_folders(self) -> list[Path]:
        """Those of all runs that this home was in."""
        return list((self.folder / "checkpoints").glob("*"))

    def access_list(self, run: str) -> Path:
        """The newest list of who may take part in a run that a daemon of this home has seen, signed by its organiser."""
        return self.folder / "access" / f"{run}.list"

    def audits(self, run: str) -> Path:
        """Convictions in a run that a daemon of this home knows, each with its evidence, and who stands."""
        return self.folder / "audits" / run

    def invitation(self, run: str) -> Path:
        """This peer's invitation to a run."""
        return self.folder / "access" / f"{run}.invitation"

    def history(self, run: str) -> Path:
        """The history of a run as this home's daemons saw it: steps, samples, events, contributions."""
        return self.folder / "history" / f"{run}.sqlite"

    @property
    def run_folder(self) -> Path:
        """Folder for sockets, removed when the daemon ends. It is under /tmp if the path in the home is too long for a socket."""
        inside = self.folder / "run"
        if len(str(inside)) + 1 + MAX_SOCKET_NAME_CHARS <= MAX_SOCKET_PATH_CHARS:
            return inside
        digest = hashlib.blake2b(str(self.folder).encode(), digest_size=_DIGEST_BYTES).hexdigest()
        return SHORT_PARENT / f"peerd-{os.getuid()}-{digest}"

    @property
    def control_socket(self) -> Path:
        return self.run_folder / "control.sock"


def short_run_folders() -> list[Path]:
    """Paths that are named like this user's run folders under /tmp. The caller checks their owner and whether they are in use."""
    prefix = f"peerd-{os.getuid()}-"
    with contextlib.suppress(OSError), os.scandir(SHORT_PARENT) as entries:
        return sorted(
            Path(entry) for entry in entries if entry.name.startswith(prefix) and len(entry.name) == len(prefix) + 2 * _DIGEST_BYTES
        )
    return []


def resolve_home(flag: str | None) -> Home:
    """The home named by the flag, else by PEERD_HOME, else the platform's state folder."""
    chosen = flag or os.environ.get("PEERD_HOME")
    if not chosen:
        from platformdirs import user_state_path

        return Home(user_state_path("peerd", appauthor=False).absolute())
    return Home(Path(chosen).expanduser().absolute())


def cache_folder() -> Path:
    """The folder of token files, shared by all daemons of this user."""
    from platformdirs import user_cache_path

    return user_cache_path("peerd", appauthor=False).absolute()
