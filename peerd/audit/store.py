"""The convictions that a daemon knows, kept in its home with their evidence, and who stands: rule 20 (audit).

A restart forgets neither. Each conviction has a file of its own, which is written once: the case as it travels, and those that could vote
on it. What is read again is checked again, so a damaged file costs one conviction, of which the others tell.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from peerd.audit.cases import Cases, KnownCase
from peerd.config.atomic import replace_file
from peerd.errors import BadMessageError
from peerd.policy.step.verdicts import MOST_CASES, MOST_NOTED, StandingNote
from peerd.swarm.signed import has_signed
from peerd.table.record import PeerId
from peerd.unwritten import UNWRITTEN
from peerd.wire.receipts import packed_case, unpacked_case

CASES_KEPT = "the cases of audits"
SUFFIX = ".case"
STANDING_FILE = "standing.json"
MOST_FILE_BYTES = 1 << 20
"""More than a case with as many words as there may be takes, and than the notes of so many peers."""
LOG = structlog.get_logger()


class CaseStore:
    """The folder of one run. `read` blocks; `keep` is called on the event loop."""

    def __init__(self, folder: Path, cases: Cases) -> None:
        self.folder, self._cases = folder, cases
        self._written: dict[str, bytes] = {}
        self._writing = asyncio.Lock()

    def read(self) -> int:
        """Take what an earlier daemon has kept. Returns the number of convictions. What is damaged, or not signed, is left out."""
        for path in sorted(self.folder.glob(f"*{SUFFIX}"))[:MOST_CASES]:
            if (content := _content_of(path)) is not None and self._take(content):
                self._written[path.name] = content
            else:
                LOG.warning("a kept conviction cannot be used; the others tell of it", file=str(path))
        content = _content_of(self.folder / STANDING_FILE)
        if content is not None:
            self._cases.standing.restore(_notes_in(content))
        return len(self._cases.known)

    def _take(self, content: bytes) -> bool:
        run = self._cases.run
        try:
            document = json.loads(content)
            evidence = unpacked_case(base64.b64decode(document["case"], validate=True), run)
            voters = [PeerId(str(each)) for each in document["voters"]]
        except (ValueError, KeyError, TypeError, RecursionError, BadMessageError):
            return False
        return not evidence.why_unsigned(run, has_signed) and self._cases.restore(evidence, voters)

    async def keep(self) -> None:
        """Write what has changed, and delete the convictions that are forgotten. What the disk does not take is written the next time."""
        async with self._writing:
            files = {f"{known.item.id.hex()}{SUFFIX}": self._file_of(known) for known in self._cases.known.values() if known.losers}
            files[STANDING_FILE] = json.dumps(self._cases.standing.notes()).encode()
            changed = {name: content for name, content in files.items() if self._written.get(name) != content}
            gone = self._written.keys() - files.keys()
            if changed or gone:
                with UNWRITTEN.trying(CASES_KEPT, self.folder):
                    await asyncio.to_thread(self._write, changed, gone)
                    self._written = files

    def _file_of(self, known: KnownCase) -> bytes:
        case = base64.b64encode(packed_case(known.evidence, self._cases.run)).decode()
        return json.dumps({"case": case, "voters": sorted(known.voters)}).encode()

    def _write(self, changed: Mapping[str, bytes], gone: set[str]) -> None:
        for name, content in changed.items():
            replace_file(self.folder / name, content)
        for name in gone:
            (self.folder / name).unlink(missing_ok=True)


def _content_of(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
    except OSError:
        return None
    return content if len(content) <= MOST_FILE_BYTES else None


def _notes_in(content: bytes) -> list[StandingNote]:
    try:
        return [_note_in(each) for each in json.loads(content)[-MOST_NOTED:]]
    except (ValueError, TypeError, RecursionError):
        LOG.warning("the kept standing of mates cannot be used; they are newcomers to this peer")
        return []


def _note_in(told: Any) -> StandingNote:
    peer, clean_steps, is_founder, num_vain, paused_until, watched_until = told
    return PeerId(str(peer)), int(clean_steps), bool(is_founder), int(num_vain), int(paused_until), int(watched_until)
