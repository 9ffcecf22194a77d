"""The QR code of a public page, drawn by the page's own script: the same modules as another encoder's."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "peerd" / "observe" / "web" / "assets" / "qr.js"
ADDRESS = "https://train.example.org"
MODULES = """1fde97f 1056141 174cd5d 175be5d 174435d 1041941 1fd557f 1c400 16ed64b 1b159a2 7ca190 17a484c 1df7ef7
20f7f1 c6ed16 12825f1 568fff 14115 1fd4d57 1051510 17485f9 175ebdf 175abd6 1042c54 1fd8cff"""
"""The rows of its code in hexadecimal: version 2, error correction M, as segno 1.6.6 draws it with padding after ISO/IEC 18004 7.4.10."""


def code_of(tmp_path: Path, text: str) -> list[list[bool]] | None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    module = tmp_path / "qr.mjs"
    module.write_text(SCRIPT.read_text())
    program = f"import({json.dumps(str(module))}).then(({{qr}}) => console.log(JSON.stringify(qr({json.dumps(text)}))))"
    found: list[list[bool]] | None = json.loads(subprocess.run([node, "-e", program], check=True, capture_output=True, timeout=60).stdout)
    return found


def test_an_address_has_the_modules_that_another_encoder_gives_it(tmp_path: Path) -> None:
    rows = code_of(tmp_path, ADDRESS)
    assert rows is not None
    assert " ".join(f"{int(''.join(str(int(dark)) for dark in row), 2):x}" for row in rows) == MODULES.replace("\n", " ")


def test_a_text_that_is_too_long_has_none(tmp_path: Path) -> None:
    assert len(code_of(tmp_path, "z" * 213) or ()) == 57
    assert code_of(tmp_path, "z" * 214) is None
