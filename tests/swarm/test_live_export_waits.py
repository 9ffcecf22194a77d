"""An export that cannot be yet: it waits for the stages, says for what, and gives up only when it is told to."""

from __future__ import annotations

import json
import threading
import time

import pytest

from peerd.errors import TimedOutError
from tests.swarm.daemons import Swarm, until
from tests.swarm.runs import assert_equals_reference, exported_steps, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]


def test_an_export_waits_for_the_stages_and_says_so_in_one_line() -> None:
    with Swarm(swarm_manifest(num_stages=2)) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=20)
        first.wait_until_serving()
        folder, said, replies = swarm.folder / "exported", list[str](), list[dict[str, object]]()
        with pytest.raises(TimedOutError, match="nobody serves stage 1"):
            first.request("export", folder=str(folder), timeout_s=0.5)

        def export() -> None:
            replies.append(first.request("export", folder=str(folder), on_progress=said.append))

        asking = threading.Thread(target=export, daemon=True)
        asking.start()
        began_s = time.monotonic()
        until(lambda: said and time.monotonic() - began_s > 2)
        assert (said, replies, folder.exists()) == (["waiting: nobody serves stage 1"], [], False)
        swarm.join(1, compute_stand_in_ms=20).wait_until_serving()
        asking.join(60)
        assert replies[0]["folder"] == str(folder), said
        assert_equals_reference(folder, swarm.manifest, exported_steps(folder), swarm.folder / "cache" / "peerd")
        assert json.dumps(said).count("nobody serves") == 1
