"""What could not be written is known until it could, and an OSError is told by its number."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from peerd.errors import DiskError, ExitCode, LimitError, PeerdError, disk_error, system_error
from peerd.unwritten import Unwritten

PLACE = Path("/home/of/a/peer")


def refuse(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, DiskError, "/home/of/a/peer: the disk is full; free some space"),
        (errno.EDQUOT, DiskError, "/home/of/a/peer: this user's disk quota is used up; free some space"),
        (errno.EROFS, DiskError, "the disk is read-only; make it writable"),
        (errno.EFBIG, DiskError, "grew past the size limit of this process; raise `ulimit -f`"),
        (errno.EIO, DiskError, "the disk fails to read or write; check the disk"),
        (errno.EMFILE, LimitError, "this process has as many files open as it may"),
        (errno.ENFILE, LimitError, "all processes of this machine have as many files open as they may"),
    ],
)
def test_an_error_of_the_system_is_told_by_its_number(number: int, kind: type[PeerdError], words: str) -> None:
    told = disk_error(PLACE, OSError(number, "said by the system"))
    assert type(told) is kind
    assert words in str(told)
    assert str(system_error(OSError(number, "said by the system"))) != "None"


def test_another_error_is_told_in_the_systems_words_and_is_no_trouble_of_the_machine() -> None:
    error = PermissionError(errno.EACCES, "Permission denied", "/a/file")
    assert str(disk_error(PLACE, error, "name another")) == "/a/file: Permission denied; name another"
    assert disk_error(PLACE, error).exit_code is ExitCode.DISK
    assert system_error(error) is None


def test_what_could_not_be_written_is_known_by_its_kind_until_it_was_written() -> None:
    unwritten = Unwritten()
    with unwritten.trying("history", PLACE):
        refuse(OSError(errno.ENOSPC, "full"))
    unwritten.note("checkpoints", DiskError("the folder is gone"))
    assert {kind: error.message for kind, error in unwritten.errors().items()} == {
        "history": "/home/of/a/peer: the disk is full",
        "checkpoints": "the folder is gone",
    }
    with unwritten.trying("history", PLACE):
        pass
    assert "history" not in unwritten
    assert "checkpoints" in unwritten


def test_an_error_that_is_not_the_disks_is_not_taken_for_it() -> None:
    unwritten = Unwritten()
    with pytest.raises(ValueError, match="a bug"), unwritten.trying("history", PLACE):
        refuse(ValueError("a bug"))
    assert unwritten.errors() == {}
