"""Network coordinates: how well they foretell round trips, and what those who lie about theirs can do."""

from __future__ import annotations

from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.swarm.coordinates import STALE, USUAL, NetworkPosition, predicted_s, seconds_of
from peerd.table.record import MAX_ERROR, MAX_HEIGHT, MAX_OFFSET, Coordinate, PeerId, PeerRecord
from tests.planner.networks import study

ANSWERS = 60
coordinates = st.builds(
    Coordinate,
    st.integers(-MAX_OFFSET, MAX_OFFSET),
    st.integers(-MAX_OFFSET, MAX_OFFSET),
    st.integers(0, MAX_HEIGHT),
    st.integers(0, MAX_ERROR),
)
answers = st.lists(st.tuples(st.integers(0, 5), st.floats(1e-5, 5.0), st.none() | coordinates), max_size=40)


class Network:
    """Peers that measure the round trips of DT-FM's eight cities, each to 16 partners as gossip has them."""

    def __init__(self, seed: int, num_liars: int = 0, jitter: float = 0.1) -> None:
        self.random, self.jitter = Random(seed), jitter
        delays = study(4).delay_s
        self.peers = range(len(delays))
        self.round_trips_s = [[delays[a][b] + delays[b][a] for b in self.peers] for a in self.peers]
        self.positions = [NetworkPosition(PeerId(f"peer{number}")) for number in self.peers]
        self.liars = frozenset(self.random.sample(self.peers, num_liars))
        self.partners = [self.random.sample([b for b in self.peers if b != a], 16) for a in self.peers]

    def run(self, num_answers: int = ANSWERS) -> float:
        """Returns how far predictions between honest peers are off, at the median."""
        for _ in range(num_answers):
            for one in self.random.sample(self.peers, len(self.peers)):
                other = self.random.choice(self.partners[one])
                took_s = self.round_trips_s[one][other] * (1 + self.random.expovariate(1 / self.jitter))
                self.positions[one].answered(PeerId(f"peer{other}"), took_s, self.said_by(other))
        honest = [each for each in self.peers if each not in self.liars]
        return median(
            abs(predicted_s(self.claim(one), self.claim(other)) / self.round_trips_s[one][other] - 1)
            for one in honest
            for other in honest
            if one < other
        )

    def said_by(self, peer: int) -> Coordinate | None:
        if peer in self.liars:
            return Coordinate(self.random.randint(-3000, 3000), self.random.randint(-3000, 3000), 5, 0)
        return self.positions[peer].coordinate

    def claim(self, peer: int) -> Coordinate:
        found = self.positions[peer].coordinate
        assert found is not None
        return found


def test_after_sixty_answers_half_of_all_round_trips_are_foretold_within_15_percent() -> None:
    assert max(Network(seed).run() for seed in range(5)) <= 0.15


def test_one_in_ten_who_lies_about_its_place_misleads_the_others_little() -> None:
    assert median(Network(seed, num_liars=6).run() for seed in range(5)) <= 0.2


def test_a_peer_that_was_measured_is_as_far_as_that_and_no_further_whatever_it_says() -> None:
    position, liar = NetworkPosition(PeerId("me")), PeerId("liar")
    for took_s in (0.3, 0.1, 0.2):
        position.answered(liar, took_s, Coordinate(MAX_OFFSET, 0, 0, 0))
    assert position.round_trip_s(PeerRecord(peer=liar, coordinate=Coordinate(0, 0, 0, 0))) == 0.1


def test_between_two_others_the_round_trip_is_within_what_was_measured_to_both() -> None:
    near, far = Coordinate(0, 0, 0, 0), Coordinate(9000, 0, 0, 0)
    assert predicted_s(near, far) == pytest.approx(0.9, rel=0.01)
    assert predicted_s(near, far, 0.01, None) == predicted_s(near, far)
    assert predicted_s(near, far, 0.01, 0.05) == pytest.approx(0.06)
    assert predicted_s(near, near, 0.01, 0.05) == pytest.approx(0.04)


def test_noise_changes_no_record_and_another_line_does() -> None:
    network = Network(0, jitter=0.02)
    network.run(100)
    position, partners = network.positions[0], network.partners[0]
    before, changes = position.coordinate, 0
    for _ in range(50):
        other = network.random.choice(partners)
        took_s = network.round_trips_s[0][other] * network.random.uniform(1, 1.02)
        position.answered(PeerId(f"peer{other}"), took_s, network.claim(other))
        changes += position.coordinate != before
        before = position.coordinate
    assert changes <= 3
    for _ in range(60):
        other = network.random.choice(partners)
        position.answered(PeerId(f"peer{other}"), network.round_trips_s[0][other] + 0.2, network.claim(other))
    for _ in range(10):
        for other in partners:
            position.answered(PeerId(f"peer{other}"), network.round_trips_s[0][other] + 0.2, network.claim(other))
    assert position.coordinate is not None
    assert before is not None
    off = [abs(predicted_s(position.coordinate, network.claim(each)) / (network.round_trips_s[0][each] + 0.2) - 1) for each in partners]
    assert median(off) <= 0.15 + STALE


@given(answers)
def test_whatever_is_answered_the_place_can_be_told(told: list[tuple[int, float, Coordinate | None]]) -> None:
    position = NetworkPosition(PeerId("me"))
    for number, took_s, coordinate in told:
        before = position.coordinate
        position.answered(PeerId(f"peer{number}"), took_s, coordinate)
        found = position.coordinate
        assert found is not None
        assert abs(found.x) <= MAX_OFFSET
        assert abs(found.y) <= MAX_OFFSET
        assert 0 < found.height <= MAX_HEIGHT
        assert 0 < found.error <= MAX_ERROR
        assert before is None or seconds_of(found)[3] > 0


@given(coordinates, st.floats(1e-3, 5.0))
def test_no_single_answer_moves_a_settled_peer_far(said: Coordinate, took_s: float) -> None:
    """At most by what the worst usual misfit moves it: a share of its error."""
    network = Network(0, jitter=0.0)
    network.positions = network.positions[:1]
    position = network.positions[0]
    settled = Coordinate(300, 0, 20, 50)
    for number in range(200):
        position.answered(PeerId(f"peer{number % 16}"), 0.034, settled)
    before, error = position.coordinate, position.error
    position.answered(PeerId("stranger"), took_s, said)
    after = position.coordinate
    assert before is not None
    assert after is not None
    moved_s = 1e-4 * max(abs(after.x - before.x), abs(after.y - before.y), abs(after.height - before.height))
    assert moved_s <= USUAL * error * max(took_s, 0.034) / 2 + STALE * 0.034 + 2e-4
