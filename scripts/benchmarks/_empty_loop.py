"""An event loop with nothing to do, which says by how much it is late: what a machine does to any loop, beside those of daemons.

It prints one line a second, the lag in seconds at each of `QUANTILES` over the last five minutes, and ends when its input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop

from peerd.daemon.watching.loop_lag import LoopLag


class Busy:
    is_idle = False


async def main() -> None:
    lag = LoopLag(Busy())
    task = asyncio.create_task(lag.run())
    ends = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    while not ends.done():
        await asyncio.sleep(1)
        print(json.dumps(lag.quantiles(time.monotonic())), flush=True)
    task.cancel()


if __name__ == "__main__":
    uvloop.run(main())
