"""All errors that peerd raises on purpose, and the exit code with which each ends a command.

PeerdError                    carries one line that says what is wrong and one that says what to do
|- UsageError                 a flag or argument that cannot be right
|- ManifestError              a run file or manifest that breaks a rule
|- SignatureError             a manifest or record that is not signed by the key it names
|- AddressError               an address that is not `multiaddr/p2p/PEER[#RUN-ID]`
|- UnreachableError           no peer answers at the address
|- PortTakenError             the port to listen on is in use
|- IdentityInUseError         another daemon runs from the same home or with the same identity
|- ClockError                 this machine's clock is too far from the swarm's
|- DiskError                  the disk is full or a folder cannot be written
|- NoDaemonError              no daemon runs from this home
|- TimedOutError              an awaited event did not happen in time
|- StageError                 unknown stage, or no stage fits this machine
|- LimitError                 the system lets this process have too little, such as open files
|- DivergedError              the run cannot go on: its loss or gradients are not finite
|- ShutOutError               the run's organiser lets this peer take no part
`- RemoteError                a remote call failed (raised by wire/; the subclasses tell what the caller can do)
   |- BadMessageError         the message is wrong: the sender's fault          INVALID_ARGUMENT
   |- WrongStateError         right message, wrong step or stage, or leaving    FAILED_PRECONDITION
   |- BlamelessError          the microbatch goes back to its trainer: nobody need be at fault
   |  |- NotFiniteError       values overflowed                                  OUT_OF_RANGE
   |  `- ChangedLabelsError   its labels are not those of the run's data         DATA_LOSS
   |- BusyError               no slot free: try elsewhere or later              RESOURCE_EXHAUSTED
   |  `- UnwelcomeError       the caller is banned, or is not invited            PERMISSION_DENIED
   `- PeerGoneError           dead or out of reach                              UNAVAILABLE
"""

from __future__ import annotations

import enum
import errno
import resource
from pathlib import Path
from typing import ClassVar


class ExitCode(enum.IntEnum):
    """Exit codes of peerd's commands; scripts and service units rely on these numbers."""

    OK = 0
    FAILURE = 1  # a bug or an unforeseen failure: please report it
    USAGE = 2
    MANIFEST = 3
    SIGNATURE = 4
    ADDRESS = 5
    UNREACHABLE = 6
    PORT_TAKEN = 7
    IDENTITY_IN_USE = 8
    CLOCK = 9
    DISK = 10
    NO_DAEMON = 11
    TIMED_OUT = 12
    STAGE = 13
    LIMIT = 14
    DIVERGED = 15
    SHUT_OUT = 16
    INTERRUPTED = 130


FOR_THE_USER_TO_MEND = frozenset(
    {ExitCode.USAGE, ExitCode.MANIFEST, ExitCode.SIGNATURE, ExitCode.ADDRESS, ExitCode.IDENTITY_IN_USE}
    | {ExitCode.STAGE, ExitCode.LIMIT, ExitCode.SHUT_OUT}
)
"""Errors that a restart cannot mend: a service that exits with one of these stays down."""


class PeerdError(Exception):
    """An error with one clear line on what is wrong, and a remedy."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILURE

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class UsageError(PeerdError):
    exit_code = ExitCode.USAGE


class ManifestError(PeerdError):
    exit_code = ExitCode.MANIFEST


class SignatureError(PeerdError):
    exit_code = ExitCode.SIGNATURE


class AddressError(PeerdError):
    exit_code = ExitCode.ADDRESS


class UnreachableError(PeerdError):
    exit_code = ExitCode.UNREACHABLE


class PortTakenError(PeerdError):
    exit_code = ExitCode.PORT_TAKEN


class IdentityInUseError(PeerdError):
    exit_code = ExitCode.IDENTITY_IN_USE


class ClockError(PeerdError):
    exit_code = ExitCode.CLOCK


class DiskError(PeerdError):
    exit_code = ExitCode.DISK


class NoDaemonError(PeerdError):
    exit_code = ExitCode.NO_DAEMON


class TimedOutError(PeerdError):
    exit_code = ExitCode.TIMED_OUT


class StageError(PeerdError):
    exit_code = ExitCode.STAGE


class LimitError(PeerdError):
    exit_code = ExitCode.LIMIT


class DivergedError(PeerdError):
    exit_code = ExitCode.DIVERGED


class ShutOutError(PeerdError):
    """The run's organiser has banned this peer, or has not invited it."""

    exit_code = ExitCode.SHUT_OUT


class RemoteError(PeerdError):
    """A call to another peer failed; the subclass says what the caller can do."""


class BadMessageError(RemoteError):
    """The message breaks a rule of the protocol: its sender is at fault."""


class WrongStateError(RemoteError):
    """The callee is at another step or stage than the message needs."""


class OtherLineageError(WrongStateError):
    """What the callee gives was computed with parameters of another lineage than the caller's, though at its step."""


class UnbelievedError(WrongStateError):
    """What the callee gives proves nothing against it, and this peer takes it only once more mates hold it."""


class HopelessError(UnbelievedError):
    """More mates never come to hold what the callee gives."""


class BlamelessError(RemoteError):
    """A microbatch cannot be computed. Neither the peer that says so nor its caller need be at fault: the trainer tries another way."""


class NotFiniteError(BlamelessError):
    """A microbatch gives values that are not finite, or it came with such values."""


class ChangedLabelsError(BlamelessError):
    """The labels with which a microbatch came are not those of the run's data. A peer on the way may have changed them."""


class BusyError(RemoteError):
    """The callee has no free slot, or refuses this caller's calls for a while."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        """`retry_after_s`: the time for which the callee will keep refusing; 0: unknown."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnwelcomeError(BusyError):
    """The callee takes no calls of this caller: the run's organiser has banned it, or it has shown no invitation that holds."""


class PeerGoneError(RemoteError):
    """The callee is dead or out of reach."""


class UnansweredError(PeerGoneError):
    """No answer came within the time for it, and the connection did not break either."""


class UnheardError(PeerGoneError):
    """The callee was out of reach before it took the call, so no work was lost."""


def error_class_of(code: int) -> type[PeerdError]:
    """The error class for a child's exit code; PeerdError if there is none."""
    known: dict[int, type[PeerdError]] = {kind.exit_code: kind for kind in PeerdError.__subclasses__()}
    known[ExitCode.FAILURE] = PeerdError
    return known.get(code, PeerdError)


ERROR_PREFIX = "peerd: error: "
"""Begins the line on standard error with which an error ends a process."""
FULL = (errno.ENOSPC, errno.EDQUOT)
_MACHINES = (*FULL, errno.EROFS, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE)
"""Errors that tell of the machine, whatever the process was doing."""


def disk_error(place: Path, error: OSError, remedy: str = "check the folder and its permissions") -> PeerdError:
    """What an OSError says about a file or folder. `remedy` is what helps where the number alone does not tell."""
    match error.errno:
        case errno.ENOSPC:
            return DiskError(f"{place}: the disk is full", "free some space")
        case errno.EDQUOT:
            return DiskError(f"{place}: this user's disk quota is used up", "free some space")
        case errno.EROFS:
            return DiskError(f"{place}: the disk is read-only", "make it writable, or choose a folder on another disk")
        case errno.EFBIG:
            return DiskError(f"{place}: the file grew past the size limit of this process", "raise `ulimit -f`")
        case errno.EIO:
            return DiskError(f"{place}: the disk fails to read or write", "check the disk and its cable; move the folder to another disk")
        case errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return LimitError(f"this process has as many files open as it may: {limit}", "raise the limit with `ulimit -n`")
        case errno.ENFILE:
            return LimitError("all processes of this machine have as many files open as they may", "end some, or raise fs.file-max")
    return DiskError(f"{error.filename or place}: {error.strerror or error}", remedy)


def system_error(error: OSError) -> PeerdError | None:
    """The error that an OSError's number means wherever it was raised; None where an error of that number is a bug or the network's."""
    return disk_error(Path(error.filename or "standard output"), error) if error.errno in _MACHINES else None
