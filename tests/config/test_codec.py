"""The pages and the comments of a run.toml agree with CODECS."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerd.config.codec import CODECS, EXAMPLES, FOR_AVERAGING, CodecSpec, parse_allowed, parse_averaged
from peerd.config.manifest import Manifest
from peerd.config.run_file import explained

PAGE = Path(__file__).resolve().parents[2] / "peerd" / "docs" / "organiser.md"


def row(spec: CodecSpec) -> str:
    """A codec's line in the page's table."""
    codec, length, side = parse_averaged(spec.example).most_exact, 1 << 20, 1 << 10
    share = codec.rank * 2 * side / length if codec.rank else codec.num_bytes(length) / (4 * length)
    error = f"{100 * spec.error:.3g} %" + (f" of the largest of {spec.block}" if spec.block else "")
    return f'| `"{spec.example}"` | {"1" if share == 1 else f"1/{1 / share:.3g}"} | {error} | {spec.remark} |'


def test_the_page_shows_each_codec_as_it_is() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin = lines.index("| codec | bytes | error of a value, at most | |") + 2
    assert lines[begin : begin + len(CODECS)] == [row(spec) for spec in CODECS]
    assert lines[begin + len(CODECS)].startswith('| `"auto"` |'), "and none besides"


def test_a_run_file_names_each_codec_where_it_may_be_used() -> None:
    wire = explained(Manifest()).partition("# How tensors travel")[2]
    everywhere, _, averaged = wire.partition("# Gradients that the peers of a stage average")
    assert [name for name in EXAMPLES if f'"{name}"' not in everywhere.partition("[wire]")[0]] == []
    assert [name for name in FOR_AVERAGING if f'"{name}"' not in averaged] == []


@pytest.mark.parametrize("spec", CODECS, ids=lambda spec: spec.name)
def test_each_codec_is_parsed_as_its_row_says(spec: CodecSpec) -> None:
    (codec,) = parse_averaged(spec.example).codecs
    assert (codec.spec, codec.is_lossy) == (spec, spec.error > 0)
    if spec.is_for_averaging:
        with pytest.raises(ValueError, match="is not a codec"):
            parse_allowed(spec.example)


def test_codecs_stand_from_the_most_exact_to_the_smallest() -> None:
    sizes = [parse_averaged(name).most_exact.num_bytes(1 << 20) for spec in CODECS for name in spec.auto]
    assert sizes == sorted(sizes, reverse=True)
