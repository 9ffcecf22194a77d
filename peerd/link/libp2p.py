"""The only module that imports hivemind: its libp2p client and its Kademlia DHT.

Importing the package itself would load all of it, with optimizers, averagers and SciPy (0.6 s of processor time and 46 MB in every
daemon). So an empty package takes its place in `sys.modules`, and the modules named here load unchanged.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


def _stand_in() -> Path:
    """Install the empty package unless the real one is loaded already. Returns hivemind's folder."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("hivemind is not installed; install peerd with its dependencies")
    locations = list(spec.submodule_search_locations)
    if "hivemind" not in sys.modules:
        package = ModuleType("hivemind")
        package.__path__ = locations
        package.__spec__ = ModuleSpec("hivemind", None, is_package=True)
        sys.modules["hivemind"] = package
    return Path(locations[0])


HIVEMIND = _stand_in()
P2PD = HIVEMIND / "hivemind_cli" / "p2pd"
"""The libp2p daemon that hivemind's wheel carries."""

from hivemind.dht import DHTNode  # noqa: E402 - after the empty package is installed
from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue  # noqa: E402
from hivemind.dht.validation import DHTRecord, RecordValidatorBase  # noqa: E402
from hivemind.p2p import P2P, PeerID  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402
from hivemind.utils.serializer import MSGPackSerializer  # noqa: E402
from hivemind.utils.timed_storage import get_dht_time  # noqa: E402

__all__ = [
    "DHTID",
    "P2P",
    "P2PD",
    "DHTLocalStorage",
    "DHTNode",
    "DHTRecord",
    "DictionaryDHTValue",
    "MSGPackSerializer",
    "Multiaddr",
    "PeerID",
    "RecordValidatorBase",
    "get_dht_time",
]
