"""A demo's daemon that may move from one stage to another; the demo's usual daemons stay."""

from __future__ import annotations

import sys
from dataclasses import replace

from peerd.config.settings import Settings
from peerd.daemon.__main__ import main

if __name__ == "__main__":
    sys.exit(main([replace(Settings.from_json(sys.argv[1]), stay=False).to_json()]))
