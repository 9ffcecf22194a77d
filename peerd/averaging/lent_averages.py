"""Averages that others read chunk by chunk: a reader, however slow, keeps none of them in memory or on disk."""

from __future__ import annotations

import weakref
from collections.abc import Collection

from peerd.table.record import NO_AVERAGE, AverageId
from peerd.wire.chunks import CutFile, digest_of
from peerd.wire.messages import Average


class LentFile(CutFile):
    """A file that its giver may move to the disk, or take back, while somebody reads it."""

    def __init__(self, step: int, average_id: AverageId, file: CutFile, checksum: bytes = b"") -> None:
        super().__init__((), file.num_bytes, file.chunk_bytes)
        self.step = step
        self.average_id = average_id
        """Of a tied weight's gradients the id of these."""
        self.checksum = checksum
        """The hash of all of it, where it is a tied weight's gradients."""
        self._lies_in: CutFile | None = file

    @property
    def is_stored(self) -> bool:  # type: ignore[override]
        file = self._lies_in
        return file is not None and file.is_stored

    @property
    def is_in_memory(self) -> bool:
        return self._lies_in is not None and len(self._lies_in.pieces) > 0

    def lies_in(self, file: CutFile | None) -> None:
        """It lies elsewhere, at the beginning of this file; None: it is taken back."""
        self._lies_in = file if file is None or file.num_bytes >= self.num_bytes else None

    def _read(self, start: int, num_bytes: int) -> bytes:
        file = self._lies_in
        if file is None:
            raise OSError("this average is not kept any more")
        return file._read(start, num_bytes)


class LentAverages:
    """What is lent now. Every method runs on the thread of the log (`KeptAverages`)."""

    def __init__(self) -> None:
        self._lent = weakref.WeakSet[LentFile]()
        self._tied = weakref.WeakValueDictionary[AverageId, LentFile]()

    def tied(self, wanted: AverageId) -> LentFile | None:
        """Gradients of a tied weight that somebody reads just now: all who ask for them share them."""
        return self._tied.get(wanted)

    def lend_tied(self, step: int, wanted: AverageId, file: CutFile) -> LentFile:
        lent = self._tied[wanted] = LentFile(step, wanted, file, digest_of(file.pieces))
        self._lent.add(lent)
        return lent

    @property
    def are_read(self) -> bool:
        return len(self._lent) > 0

    def lend(self, average: Average, file: CutFile) -> LentFile:
        lent = LentFile(average.roster.step, average.id, file)
        self._lent.add(lent)
        return lent

    def finished(self, step: int, stored: tuple[Average, CutFile] | None, logged: Collection[int]) -> None:
        """A step was finished. Its average lies in a file now, unless the disk has no room (`stored` is None).

        What others read of averages that are in no file is taken back with the next step, and what they read in files as soon as the file
        is not one of `logged` steps: their owner keeps neither any longer (hole 81).
        """
        average_id, file = (stored[0].id, stored[1]) if stored is not None else (NO_AVERAGE, None)
        for lent in list(self._lent):
            if lent.checksum:
                if lent.step < step and lent.step not in logged:
                    lent.lies_in(None)
            elif lent.is_in_memory:
                if lent.step < step:
                    lent.lies_in(None)
                elif lent.average_id == average_id:
                    lent.lies_in(file)
            elif lent.step not in logged:
                lent.lies_in(None)
