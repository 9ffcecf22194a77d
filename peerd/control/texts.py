"""What a daemon tells of the texts that its stage goes on with, and of those that its user asks the swarm for."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class TextsInfo(TypedDict):
    """The answers that this daemon computes for those who ask the model."""

    share: float  # of the time that the owner allows; 0: none
    steps: list[int]  # with whose parameters it goes on with texts
    texts: int  # that are kept
    waiting: int  # passes that wait for their turn
    bytes: int  # of the texts that are kept
    most_bytes: int
    copy_bytes: NotRequired[int]  # of the second copy of the parameters, which is of the evaluated step; 0: there is none
    tokens: int  # computed since the daemon began, prompts and replays included
    busy_s: float
    held_up_s: NotRequired[float]  # of busy_s, how long training waited
    answering: bool  # a pass has ended within the last 10 s
    asking: int  # texts that its own user asks for now


class TextHop(TypedDict):
    """What the calls to one stage took, in seconds."""

    calls: int
    took_s: float
    waited_s: float  # of took_s, until passes had their turn, as the peers say
    computed_s: float  # of took_s, the passes; the rest is the way there and back


class TextReply(TypedDict):
    """The end of an answer to `ask`. Before it comes a line of progress for each token, JSON: {"number", "token", "text"}."""

    schema: int
    text: str
    tokens: int
    reason: str  # length: as many as were asked for, or the context is full; stop: at a text at which the answer ends
    steps: list[int]  # with whose parameters it was computed, in this order
    peers: list[list[str]]  # by stage, those that have computed
    rerouted: int  # how often it went on over another path
    ways: NotRequired[int]  # ways through all stages: each takes a call to each, and gives the tokens of right guesses, and one more
    guessed: NotRequired[int]  # tokens that were guessed
    right: NotRequired[int]
    hops: NotRequired[list[TextHop]]  # by stage
    first_s: float  # until the first token
    took_s: float
    context: NotRequired[int]  # tokens that prompt and answer may have together
