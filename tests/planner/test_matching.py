"""Matchings and paths are as good as the best of all that there are."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from peerd.planner.matching import bottleneck_matching, open_path, path_length, quick_path

lengths = st.one_of(st.integers(0, 3).map(float), st.floats(0, 10))


@st.composite
def squares(draw: st.DrawFn, most: int) -> list[list[float]]:
    size = draw(st.integers(1, most))
    return [[draw(lengths) for _ in range(size)] for _ in range(size)]


@given(squares(5))
def test_no_matching_has_a_shorter_longest_edge(rows: list[list[float]]) -> None:
    found = bottleneck_matching(rows)
    count = range(len(rows))
    assert sorted(found.partners) == list(count)
    assert max(rows[row][found.partners[row]] for row in count) == found.longest
    assert found.longest == min(max(rows[row][order[row]] for row in count) for order in permutations(count))
    assert found.mean <= found.longest + 1e-12


@given(squares(6))
def test_no_path_over_all_points_is_shorter(rows: list[list[float]]) -> None:
    count = range(len(rows))
    symmetric = [[rows[max(a, b)][min(a, b)] for b in count] for a in count]
    length, order = open_path(symmetric)
    assert sorted(order) == list(count)
    assert length == path_length(symmetric, order)
    assert length <= min(path_length(symmetric, each) for each in permutations(count)) + 1e-9


def test_a_long_path_is_at_least_no_longer_than_the_one_it_starts_from() -> None:
    size = 20
    rows = [[float((a * 7 + b * 7) * abs(a - b) % 23) for b in range(size)] for a in range(size)]
    start = tuple(range(size))
    assert path_length(rows, quick_path(rows, start)) <= path_length(rows, start)
    assert sorted(open_path(rows)[1]) == list(start)


def test_points_on_a_line_are_visited_along_it() -> None:
    places = [float(each * 5 % 17) for each in range(17)]
    assert open_path([[abs(a - b) for b in places] for a in places])[0] == 16
