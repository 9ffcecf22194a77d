"""A peer that answers shares its memory and its time among askers, within what its owner allows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.policy.inference.drafts import FIRST_DRAFTED, MOST_DRAFTED, Drafts
from peerd.policy.inference.left_out import CHANGE_S, FAILED_PAUSE_S, REFUSED_PAUSE_S, LeftOut
from peerd.policy.inference.paths import TextOffer, choose_path
from peerd.policy.inference.sessions import SessionId, SessionLimits, Sessions
from peerd.policy.inference.turns import BURST_S, DEBT_S, WINDOW_S, TimeShare, TokenRation, Turns, held_up_s
from peerd.table.record import PeerId

A, B = PeerId("a"), PeerId("b")
LIMITS = SessionLimits(most_bytes=100, most_each=2, most=5, unused_s=50.0)


def session(asker: str, number: int) -> SessionId:
    return PeerId(asker), bytes([number])


class Peer:
    """Sessions whose passes begin and end in any order."""

    def __init__(self) -> None:
        self.sessions, self.now_s, self.busy = Sessions(LIMITS), 0.0, dict[SessionId, int]()

    def act(self, what: str, asker: str, number: int, num_bytes: int, gap_s: float) -> None:
        self.now_s += gap_s
        key = session(asker, number)
        if what == "begin":
            if not self.sessions.begin(key, 3, num_bytes, self.now_s):
                self.busy[key] = num_bytes
        elif what == "end":
            for each in sorted(self.busy)[:1]:
                done_bytes = self.busy.pop(each)
                self.sessions.end_pass(each, done_bytes if number else None, self.now_s)
        elif key not in self.busy:
            self.sessions.end(key)
        assert not set(self.sessions.make_room(self.now_s)) & self.busy.keys()


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "begin", "end", "end", "drop"]),
            st.sampled_from("abcd"),
            st.integers(0, 3),
            st.integers(0, 110),
            st.sampled_from([0.0, 1.0, 30.0]),
        ),
        max_size=60,
    )
)
def test_sessions_never_take_more_than_their_bounds(acts: list[tuple[str, str, int, int, float]]) -> None:
    """Bounds of bytes, of sessions, and of each asker's; what is computed is never dropped; what is unused ends."""
    peer = Peer()
    for act in acts:
        peer.act(*act)
        assert peer.busy.keys() <= peer.sessions.ids
        assert peer.sessions.num_bytes <= LIMITS.most_bytes
        assert len(peer.sessions.ids) <= LIMITS.most
        askers = [asker for asker, _ in peer.sessions.ids]
        assert max(map(askers.count, askers), default=0) <= LIMITS.most_each
    for key in list(peer.busy):
        peer.sessions.end_pass(key, 1, peer.now_s)
    peer.sessions.make_room(peer.now_s + LIMITS.unused_s + 1)
    assert not peer.sessions.ids


def filled(*texts: tuple[SessionId, int]) -> Sessions:
    """Sessions that were used one after another, at 0, 1, 2 s."""
    sessions = Sessions(LIMITS)
    for now_s, (key, num_bytes) in enumerate(texts):
        assert sessions.begin(key, 3, num_bytes, now_s) == ""
        sessions.end_pass(key, num_bytes, now_s)
    return sessions


def test_who_holds_the_most_gives_up_first() -> None:
    """The asker whose texts are long loses its own, and not the short text that came before."""
    sessions = filled((session("b", 0), 10), (session("a", 0), 40), (session("a", 1), 45))
    assert sessions.begin(session("c", 0), 3, 20, 4.0) == ""
    assert sessions.make_room(4.0) == [session("a", 0)]
    assert sessions.num_bytes == 75


def test_a_third_text_of_one_asker_replaces_its_oldest() -> None:
    sessions = filled((session("a", 0), 1), (session("b", 0), 50), (session("a", 1), 1))
    assert sessions.begin(session("a", 2), 3, 1, 4.0) == ""
    assert sessions.make_room(4.0) == [session("a", 0)]


def test_texts_of_a_step_that_is_gone_end() -> None:
    sessions = filled((session("a", 0), 1), (session("b", 0), 1))
    assert sessions.step_of(session("a", 0)) == 3
    assert sessions.make_room(3.0, frozenset({3, 4})) == []
    assert len(sessions.make_room(3.0, frozenset({4}))) == 2
    assert sessions.step_of(session("a", 0)) is None


def test_refusals_say_why() -> None:
    sessions = Sessions(LIMITS)
    assert "longer than" in sessions.begin(session("a", 0), 3, 101, 0.0)
    assert sessions.begin(session("a", 0), 3, 60, 0.0) == ""
    assert "already" in sessions.begin(session("a", 0), 3, 60, 0.0)
    assert "memory for texts" in sessions.begin(session("b", 0), 3, 41, 0.0)
    assert sessions.begin(session("a", 1), 3, 1, 0.0) == ""
    assert "you have 2 texts" in sessions.begin(session("a", 2), 3, 1, 0.0)


@settings(max_examples=60)
@given(st.floats(0.001, 1.0), st.lists(st.tuples(st.floats(0, 20), st.floats(0, 3), st.sampled_from([None, 0.0, 0.5, 1.0])), max_size=50))
def test_training_waits_in_no_span_of_time_for_more_than_the_share(share: float, asks: list[tuple[float, float, float | None]]) -> None:
    """Passes are counted from where they begin; the last one of a span may be of any length. The last number of each says from which part
    of the pass on work of training waits."""
    allowed, now_s, passes = TimeShare(share, 0.0), 0.0, list[tuple[float, float]]()
    for gap_s, length_s, part in asks:
        now_s += gap_s
        if allowed.wait_s(now_s, is_busy=part == 0.0) == 0:
            held_s = held_up_s(now_s, now_s + length_s, None if part is None else now_s + part * length_s)
            assert held_s == pytest.approx(length_s * (1 - (1 if part is None else part)))
            passes.append((now_s, held_s))
            now_s += length_s
            allowed.charge(held_s, now_s)
    for first, (begin_s, _) in enumerate(passes):
        for last in range(first, len(passes)):
            spent_s = sum(held_s for _, held_s in passes[first:last])
            assert spent_s <= share * (passes[last][0] - begin_s) + BURST_S + DEBT_S + 1e-6


def test_after_the_wait_that_is_told_the_next_pass_may_begin() -> None:
    allowed = TimeShare(0.02, 0.0)
    allowed.charge(3.0, 10.0)
    for is_busy, due_s in ((True, (3.0 - BURST_S) / 0.02), (False, (3.0 - BURST_S - DEBT_S) / 0.02)):
        wait_s = allowed.wait_s(10.0, is_busy=is_busy)
        assert wait_s == pytest.approx(due_s)
        assert allowed.wait_s(10.0 + due_s + 1e-6, is_busy=is_busy) == 0
        allowed = TimeShare(0.02, 0.0)
        allowed.charge(3.0, 10.0)
    allowed.set_share(0.0, 11.0)
    assert allowed.wait_s(1000.0, is_busy=False) is None
    allowed.set_share(1.0, 1000.0)
    assert allowed.wait_s(1003.0, is_busy=True) == 0


def test_what_is_computed_while_no_training_waits_is_free() -> None:
    allowed = TimeShare(0.02, 0.0)
    for now_s in range(1000):
        assert allowed.wait_s(now_s, is_busy=True) == 0
        allowed.charge(held_up_s(now_s, now_s + 0.9, None), now_s + 0.9)
    assert held_up_s(5.0, 7.0, 3.0) == 2.0  # the work of training was there before the pass
    assert held_up_s(5.0, 7.0, 6.5) == 0.5


@settings(max_examples=40)
@given(st.lists(st.floats(0.01, 1.0), min_size=20, max_size=60), st.integers(0, 10))
def test_two_who_always_wait_get_the_same_to_one_pass_each(lengths_s: list[float], alone: int) -> None:
    """However much the first had before the second came."""
    turns, had_s = Turns(), {A: 0.0, B: 0.0}
    for _ in range(alone):
        assert turns.next_of([A], 0.0) == A
        turns.took(A, 1.0)
    longest_s = max([*lengths_s, 1.0])
    for number, length_s in enumerate(lengths_s):
        chosen = turns.next_of([A, B], float(number))
        assert chosen is not None
        turns.took(chosen, length_s)
        had_s[chosen] += length_s
        assert abs(had_s[A] - had_s[B]) <= 2 * longest_s + 1e-9


def test_nobody_is_chosen_where_nobody_waits_and_those_long_gone_are_forgotten() -> None:
    turns = Turns()
    assert turns.next_of([], 0.0) is None
    for number in range(100):
        turns.next_of([PeerId(str(number))], 10_000.0 * number)
    assert len(turns._seen_s) <= 2


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from("abc"), st.integers(1, 60)), max_size=50))
def test_no_span_of_time_holds_more_tokens_than_the_ration(asks: list[tuple[float, str, int]]) -> None:
    """Of each asker at most 60 at once and 60 a minute; after the wait that is told they are granted; others do not count."""
    ration, now_s, granted = TokenRation(each=60), 0.0, list[tuple[float, str, int]]()
    for gap_s, asker, count in asks:
        now_s += gap_s
        wait_s = ration.take(PeerId(asker), count, now_s)
        if wait_s:
            assert 0 < wait_s <= WINDOW_S
            now_s += wait_s
            assert ration.take(PeerId(asker), count, now_s) == 0
        granted.append((now_s, asker, count))
        for begin_s, *_ in granted:
            had = sum(many for at_s, who, many in granted if at_s >= begin_s and who == asker)
            assert had <= 60 + 60 * (now_s - begin_s) / WINDOW_S + 0.1
    assert len(ration._until_s) <= 3


def test_tokens_beyond_any_ration_are_refused_for_good() -> None:
    ration = TokenRation(each=60)
    for count in (0, 61):
        with pytest.raises(ValueError, match="at most 60 tokens"):
            ration.take(A, count, 0.0)


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 8), min_size=1, max_size=10))
def test_guesses_are_as_many_as_were_right_lately_and_one_more(tokens: list[int], mosts: list[int]) -> None:
    """Whatever comes of them: never more than are wanted, and each token that is counted as right is the one that was chosen."""
    drafts, known = Drafts(), [*tokens]
    limit = FIRST_DRAFTED
    for most in mosts:
        guessed = drafts.guess(known, most)
        assert len(guessed) in (0, min(most, limit))
        assert set(guessed) <= set(known)
        chosen = [*guessed[: len(guessed) // 2], 100 + len(known), *guessed[len(guessed) // 2 :]]
        right = drafts.judge(guessed, chosen)
        assert guessed[:right] == chosen[:right]
        assert right == len(guessed) // 2
        if guessed:
            limit = right + 1
        known += chosen[: right + 1]


def test_a_text_that_repeats_itself_is_guessed_right() -> None:
    drafts, known, due = Drafts(), [1, 2, 3, 1, 2], [3, 1, 2] * 20
    ways = 0
    while len(known) < 60:
        guessed, come = drafts.guess(known, 60), due[len(known) - 5 :]
        known += come[: drafts.judge(guessed, come) + 1]
        ways += 1
    assert ways == 1 + math.ceil((60 - 5 - FIRST_DRAFTED - 1) / (MOST_DRAFTED + 1))
    assert drafts.guess([], 8) == drafts.guess([5], 8) == []


OFFERED = st.lists(st.lists(st.sets(st.integers(0, 6), max_size=3), max_size=3), min_size=1, max_size=4)


@given(OFFERED, st.sampled_from([None, 0, 3]))
def test_a_text_stays_at_its_step_or_takes_the_newest_that_lasts(offered: list[list[set[int]]], present: int | None) -> None:
    offers = [[TextOffer(peer=PeerId(str(number)), steps=frozenset(each)) for number, each in enumerate(stage)] for stage in offered]
    found = choose_path(offers, lambda step: step % 3 == 0, present)
    common = {step for step in range(7) if all(any(step in offer.steps for offer in stage) for stage in offers)}
    if found is None:
        assert not common
        return
    lasting = [step for step in common if step % 3 == 0]
    assert found.step == (present if present in common else max(lasting or common))
    for peer, stage in zip(found.peers, offers, strict=True):
        assert next(found.step in offer.steps for offer in stage if offer.peer == peer)


def test_the_peer_that_answers_soonest_is_asked() -> None:
    steps = frozenset({1})
    near = TextOffer(peer=A, steps=steps, wait_s=2.0, round_trip_s=0.01)
    far = TextOffer(peer=B, steps=steps, round_trip_s=0.5)
    path = choose_path([[near, far]], lambda _step: False)
    assert path is not None
    assert path.peers == (B,)


def test_peers_are_left_out_for_as_long_as_they_say_or_by_what_befell_their_calls() -> None:
    left_out = LeftOut()
    assert not left_out.includes(A, 0.0)
    assert left_out.pause_s(0.0) == CHANGE_S
    for pause_s, told in (
        (REFUSED_PAUSE_S, {"refused": True}),
        (FAILED_PAUSE_S, {"refused": False}),
        (40.0, {"refused": True, "retry_after_s": 40.0}),
    ):
        left_out.note(A, 100.0, **told)
        assert left_out.includes(A, 100.0 + 0.99 * pause_s)
        assert not left_out.includes(A, 100.0 + 1.01 * pause_s)
        assert not left_out.includes(B, 100.0)


def test_where_no_peer_can_be_asked_the_asker_waits_for_the_first_that_can() -> None:
    left_out = LeftOut()
    left_out.note(A, 0.0, refused=True, retry_after_s=0.3)
    left_out.note(B, 0.0, refused=True, retry_after_s=30.0)
    assert left_out.pause_s(0.1) == pytest.approx(0.2)
    assert 0 < left_out.pause_s(0.2999999) <= 0.02
    assert left_out.pause_s(1.0) == CHANGE_S
