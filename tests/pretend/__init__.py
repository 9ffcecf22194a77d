"""A pretend accelerator: a device `pretend` (two of them) whose tensors lie in the processor's memory, but behave as if they did not.

It refuses what a GPU refuses: tensors of two devices in one operation, and numpy. It counts what is slow on a GPU: waits of the processor
for the device, and copies between the two. It has a fixed amount of memory, raises torch.OutOfMemoryError where that ends, and keeps what
was freed until its cache is emptied. Autograd, modules, optimizers and autocast work on it.

Importing this package adds the device to torch for the whole process.
"""

from tests.pretend.backend import register
from tests.pretend.meter import GB, METERS, NUM_DEVICES, Meter
from tests.pretend.tensor import PretendTensor

__all__ = ["GB", "METERS", "NUM_DEVICES", "Meter", "PretendTensor", "register"]

register()
