"""Whether this peer may take part in its run: by what its home and its settings say, and by the organiser's list, which it then watches."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peerd.config.access import LIST_FILE, invitation_text, invitations_in, list_on_disk, packed, read_list, sign_invitation, unpacked
from peerd.config.atomic import replace_file
from peerd.config.organiser import KEY_FILE, load_key, public_bytes
from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.control.protocol import SCHEMA
from peerd.control.server import Say, Verb
from peerd.daemon.swarm_replies import access_info
from peerd.errors import BadMessageError, SignatureError, UsageError
from peerd.policy.swarm.access import NO_END
from peerd.swarm.access import RunAccess
from peerd.swarm.signed import SignedManifest
from peerd.table.record import PeerId
from peerd.unwritten import UNWRITTEN

LOOK_PERIOD_S = 30.0
INVITATION = "the invitation"


def access_for(settings: Settings, home: Home, me: PeerId, signed: SignedManifest) -> RunAccess:
    """The admission of a run, with the list and the invitation that this machine has. Raises UsageError for another peer's invitation."""
    by_invitation, kept_at = signed.manifest.swarm.access == "invited", home.access_list(signed.run)
    access = RunAccess(me, signed.run, signed.organiser_key, by_invitation=by_invitation, kept_at=kept_at)
    if (folder := organisers_folder(settings)) is not None:
        _trust_organiser(access, folder, me, signed)
    kept_invitation = home.invitation(signed.run)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for invitation in invitations_in(kept_invitation.read_text()):
            access.use(invitation)
    given = invitations_in(settings.invitation)
    if settings.invitation.strip() and not [each for each in given if access.use(each)]:
        remedy = f"send the organiser this peer's id, {me}, and use the answer"
        raise UsageError("the invitation is for another peer or another run, or it was changed", remedy)
    if access.invitation:
        with UNWRITTEN.trying(INVITATION, kept_invitation):
            replace_file(kept_invitation, invitation_text(access.invitation) + "\n", mode=0o600)
    return access


def organisers_folder(settings: Settings) -> Path | None:
    """The folder of the organiser's key, if this daemon belongs to the organiser."""
    if settings.organiser:
        return Path(settings.organiser)
    return Path(settings.run_file).parent if settings.run_file else None


def _trust_organiser(access: RunAccess, folder: Path, me: PeerId, signed: SignedManifest) -> None:
    """Invite this peer by the organiser's own key, and take the list beside it."""
    key = load_key(folder / KEY_FILE)
    if public_bytes(key) != signed.organiser_key:
        return
    access.use(sign_invitation(me, NO_END, signed.run, key))
    try:
        found = list_on_disk(folder / LIST_FILE, signed.run, signed.organiser_key)
    except BadMessageError as error:
        raise SignatureError(f"{folder / LIST_FILE}: {error.message}", "bring back a copy of it, or remove it") from None
    if found is not None:
        access.take(found[0])


async def watch(access: RunAccess) -> None:
    """Raise ShutOutError once this peer may not take part any more."""
    while True:
        access.check_own()
        await access.changed(LOOK_PERIOD_S)


class AccessVerb:
    """The control verb `access`: tells the list, and takes a newer one."""

    def __init__(self, access: RunAccess, signed: SignedManifest, settings: Settings, me: PeerId) -> None:
        self._access, self._signed, self._me = access, signed, me
        self._folder = organisers_folder(settings)

    def verbs(self) -> dict[str, Verb]:
        return {"access": self.access}

    async def access(self, request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        if "list" in request:
            self._take(request["list"])
        return {
            "schema": SCHEMA,
            "peer": self._me,
            "run": self._signed.run,
            "organiser": str(self._folder or ""),
            "list": packed(self._access.raw).hex(),
            **access_info(self._access),
        }

    def _take(self, told: object) -> None:
        try:
            raw = unpacked(bytes.fromhex(told) if isinstance(told, str) else b"")
            listed = read_list(raw, self._signed.run, self._signed.organiser_key)
        except (ValueError, BadMessageError) as error:
            raise SignatureError(f"the daemon does not take the list: {error}", "sign it with this run's own organiser.key") from None
        if self._me in listed.banned:
            raise UsageError(f"the list bans {self._me}, which is this daemon", "end it with `peerd leave` first, or leave it off the list")
        if not self._access.take(raw) and self._access.raw != raw:
            raise UsageError(f"the daemon has list {self._access.number} already", "make the change again: it builds on the newest list")
