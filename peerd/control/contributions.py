"""What a daemon answers of who computed how much: the reply of the verb contributions."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class ContributionInfo(TypedDict):
    peer: str
    steps: int  # averages it took part in
    microbatches: int
    tokens: int
    reporter: str  # peer that counted; the peer itself only if no other peer has a count
    signed_tokens: NotRequired[int]  # of them those that the stage's members have signed; absent where nothing is signed yet
    week_tokens: NotRequired[int]  # and of these those of the last week


class AccountInfo(TypedDict):
    step: int  # what was computed before it is signed
    id: str  # hex
    signatures: int
    signers: int
    signed_s: float
    week_from_s: float  # 0: all that is counted is of the last week


class StageContributionsInfo(TypedDict):
    stage: int
    first_step: int
    last_step: int
    steps: int  # number of steps counted in that range
    peers: list[ContributionInfo]  # an empty id: peers that are not named, together
    account: NotRequired[AccountInfo]


class ContributionsReply(TypedDict):
    schema: int
    me: str
    run: str
    num_stages: int
    stages: list[StageContributionsInfo]  # stages of which a count exists
    names: NotRequired[dict[str, str]]  # of peers that are there and have told one, by id
    teams: NotRequired[dict[str, str]]
