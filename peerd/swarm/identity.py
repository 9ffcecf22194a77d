"""This daemon's identity: its Ed25519 key, the lock that keeps a second daemon from using it, and the small state that outlives it.

The key file has libp2p's format: a protobuf with the key type Ed25519 and 64 bytes, private then public.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from filelock import FileLock, Timeout

from peerd.config.atomic import replace_file
from peerd.config.paths import Home
from peerd.errors import DiskError, IdentityInUseError, SignatureError, disk_error
from peerd.link.peer_keys import peer_id_of
from peerd.peer_names import check_name
from peerd.table.record import PeerId, RunId
from peerd.unwritten import UNWRITTEN

_PRIVATE_PREFIX = bytes([0x08, 0x01, 0x12, 0x40])
SIGNATURE_BYTES = 64
MAX_PEERS = 64
LOCAL_STATE = "incarnation and peers met"
MAX_INCARNATION = 1 << 62


class Identity:
    """A private key and its peer id."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.peer: PeerId = peer_id_of(key.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Return the identity whose key is in `path`. On first use the key is created with mode 0600."""
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return cls._create(path)
        except OSError as error:
            raise disk_error(path, error, "choose a folder of your own with --home") from None
        if len(raw) != 68 or not raw.startswith(_PRIVATE_PREFIX):
            raise SignatureError(f"{path} is not an identity key", "move it away to get a new identity")
        return cls(Ed25519PrivateKey.from_private_bytes(raw[4:36]))

    @classmethod
    def _create(cls, path: Path) -> Identity:
        key = Ed25519PrivateKey.generate()
        raw = _PRIVATE_PREFIX + key.private_bytes_raw() + key.public_key().public_bytes_raw()
        replace_file(path, raw, mode=0o600)
        return cls(key)


LOOKS_TAKE_S = 0.2
"""How long a home's lock may seem taken while a command only looks whether it is."""


def lock_home(home: Home) -> FileLock:
    """Create the home if necessary, and hold its lock until the process ends."""
    try:
        home.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(home.lock, mode=0o600)
        lock.acquire(timeout=LOOKS_TAKE_S)
    except Timeout:
        raise IdentityInUseError(
            f"another daemon runs from {home.folder}", "stop it with `peerd leave`, or choose another folder with --home"
        ) from None
    except OSError as error:
        raise disk_error(home.folder, error, "choose a folder you can write to with --home") from None
    return lock


class LocalState:
    """What must outlive the daemon: the incarnation, rule T1 (order), and pinned organiser keys. Any thread may change it.

    The first change must reach the disk, so that a home that cannot be written is told at the start. If a later one cannot be
    written, the daemon goes on and tries again. An incarnation that is lost with the daemon is still in others' tables.
    """

    def __init__(self, home: Home) -> None:
        self._path = home.state
        self._guard = threading.Lock()
        """Held from a change until it is on disk, so that an older content never replaces a newer one."""
        self._has_written = False
        self._incarnation = 0
        self._organisers: dict[str, str] = {}
        self.run = ""
        """The run this home was last in, its packed manifest, the port it had, and peers it met there."""
        self.manifest: bytes | None = None
        self.port = 0
        self.peers: list[str] = []
        self.nickname = self.team = ""
        """What others see beside this peer's id."""
        self.unlisted = False
        """Whether this peer is to be named in no table of who computed how much."""
        self.start = ""
        self.data = ""
        """Paths on this machine of the state that the run begins from and of the run's text; empty if they are not here."""
        try:
            document = json.loads(self._path.read_text())
            self._incarnation = _count(document["incarnation"])
            self._organisers = {str(run): str(key) for run, key in document["organisers"].items()}
            self.nickname, self.team = (_name(document.get(name, "")) for name in ("nickname", "team"))
            self.unlisted = document.get("unlisted") is True
            last = document.get("last", {})
            self.run, self.port = str(last.get("run", "")), int(last.get("port", 0))
            self.manifest = bytes.fromhex(last["manifest"]) if "manifest" in last else None
            self.peers = [str(each) for each in last.get("peers", [])]
            self.start, self.data = str(last.get("start", "")), str(last.get("data", ""))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError):
            raise DiskError(f"{self._path} is damaged", "delete it; pinned organiser keys will be asked for anew") from None

    @property
    def incarnation(self) -> int:
        return self._incarnation

    def raise_incarnation(self, seen: int = 0) -> int:
        """max(stored, seen) + 1, on disk before it is used, if the disk takes it."""
        with self._guard:
            self._incarnation = max(self._incarnation, seen) + 1
            self._write()
            return self._incarnation

    def pin(self, run: RunId, organiser_key: bytes) -> bool:
        """Remember a run's organiser at the first join. Returns True if it was new; raises SignatureError if it is another one now."""
        with self._guard:
            known = self._organisers.get(run)
            if known is None:
                self._organisers[run] = organiser_key.hex()
                self._write()
                return True
        if known != organiser_key.hex():
            raise SignatureError(f"run {run} is signed by another organiser than the one pinned", "ask the organiser for the right address")
        return False

    def remember(self, run: RunId, manifest: bytes, port: int, start: str = "", data: str = "") -> None:
        """Remember the run that this home is in, to come back without an address, and the paths of its start state and its text here."""
        with self._guard:
            if run != self.run:
                self.peers, self.start, self.data = [], "", ""
            self.run, self.manifest, self.port = run, manifest, port
            self.start, self.data = start or self.start, data or self.data
            self._write()

    def remember_names(self, nickname: str | None, team: str | None, unlisted: bool | None = None) -> None:
        """Remember names, and whether it is to be named at all. None leaves what was before, and an empty name takes it away."""
        with self._guard:
            before = (self.nickname, self.team, self.unlisted)
            self.nickname = self.nickname if nickname is None else nickname
            self.team = self.team if team is None else team
            self.unlisted = self.unlisted if unlisted is None else unlisted
            if (self.nickname, self.team, self.unlisted) != before:
                self._write()

    def remember_peers(self, addresses: Sequence[str]) -> None:
        """Remember the addresses to ask when coming back, those met last first. Without new ones the old ones stay."""
        with self._guard:
            fresh = list(dict.fromkeys([*addresses, *self.peers]))[:MAX_PEERS]
            if fresh != self.peers or LOCAL_STATE in UNWRITTEN:
                self.peers = fresh
                self._write()

    def _write(self) -> None:
        last = {"run": self.run, "port": self.port, "peers": self.peers, "start": self.start, "data": self.data}
        if self.manifest is not None:
            last["manifest"] = self.manifest.hex()
        names = {name: told for name, told in (("nickname", self.nickname), ("team", self.team), ("unlisted", self.unlisted)) if told}
        document = json.dumps({"incarnation": self._incarnation, "organisers": self._organisers, "last": last, **names})
        if not self._has_written:
            replace_file(self._path, document)
            self._has_written = True
            return
        with UNWRITTEN.trying(LOCAL_STATE, self._path):
            replace_file(self._path, document)


def _name(value: object) -> str:
    name = str(value)
    check_name(name)
    return name


def _count(value: object) -> int:
    """Check that an incarnation is one that other peers accept in a record."""
    if type(value) is not int or not 0 <= value < MAX_INCARNATION:
        raise ValueError(f"not a number between 0 and {MAX_INCARNATION}")
    return value
