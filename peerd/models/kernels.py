"""Where torch's compiler keeps its kernels. Peerd compiles none, but parts of torch that it uses load the compiler."""

from __future__ import annotations

import os

from peerd.config.paths import cache_folder


def keep_kernels_in_cache() -> None:
    """Before the compiler is loaded: it makes a folder in the temporary one, and leaves it there, unless told where."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "torchinductor"))
