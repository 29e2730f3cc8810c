"""The devices of one actor, which hold and compute its arrays together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import math
import threading

import jax
import numpy as np

from pax_mpmd.compile.program import Aval
from pax_mpmd.compile.program import Executable
from pax_mpmd.compile.program import Sharding
from pax_mpmd.runtime import xla

__all__ = ['ActorDevices']


class ActorDevices:
  """One device, or several that an array may be split over.

  Args:
    devices: of this process, in the order of the mesh.
  """

  def __init__(self, devices: Sequence[xla.Device]):
    self.devices = tuple(devices)
    self.is_cpu = xla.is_cpu(self.devices[0])
    self._named: dict[Sharding | None, jax.sharding.Sharding] = {}
    # Two programs that communicate must not start on the same devices in different orders.
    self._running = threading.Lock()

  def __len__(self) -> int:
    return len(self.devices)

  def sharding(self, aval: Aval) -> jax.sharding.Sharding:
    """An Aval's sharding on these devices."""
    named = self._named.get(aval.sharding)
    if named is None:
      named = self._named[aval.sharding] = self._make_sharding(aval.sharding)
    return named

  def _make_sharding(self, sharding: Sharding | None) -> jax.sharding.Sharding:
    devices = np.asarray(self.devices)
    if sharding is None:
      mesh = jax.sharding.Mesh(devices, ('devices',))
      return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    names, sizes = zip(*sharding.mesh)
    assert math.prod(sizes) == len(devices), (sharding, len(devices))
    mesh = jax.sharding.Mesh(devices.reshape(sizes), names)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*sharding.spec))

  def adopt(self, memory: np.ndarray, aval: Aval) -> xla.Array:
    """Puts a host array on the devices; the memory belongs to the result and must not change.

    Args:
      memory: the whole array, made by `xla.empty_aligned`.
      aval: what it is.
    """
    if len(self.devices) == 1:
      return xla.adopt(memory, self.devices[0])
    sharding = self.sharding(aval)
    taken: set[int] = set()  # parts of the memory that a device uses as they are
    parts = []
    for device, index in sharding.devices_indices_map(memory.shape).items():
      part = np.asarray(memory[index])
      address = part.ctypes.data
      in_place = part.flags.c_contiguous and address % xla.ALIGNMENT == 0 and address not in taken
      taken.add(address)
      parts.append(xla.adopt(part, device) if in_place else xla.to_device(part, device))
    return jax.make_array_from_single_device_arrays(memory.shape, sharding, parts)

  def to_device(self, array: np.ndarray, aval: Aval) -> xla.Array:
    """Copies a host array to the devices; the caller may change or drop it afterwards."""
    if len(self.devices) == 1:
      return xla.to_device(array, self.devices[0])
    array = np.asarray(array)
    fresh = xla.empty_aligned(array.shape, array.dtype)
    np.copyto(fresh, array)
    return self.adopt(fresh, aval)

  def copy(self, array: xla.Array) -> xla.Array:
    """A copy, on these devices, of an array on as many; they share no memory."""
    if len(self.devices) == 1:
      return xla.copy_to(array, self.devices[0])
    theirs = array.sharding
    mesh = jax.sharding.Mesh(
        np.asarray(self.devices).reshape(theirs.mesh.devices.shape), theirs.mesh.axis_names
    )
    sharding = jax.sharding.NamedSharding(mesh, theirs.spec)
    data = {shard.device: shard.data for shard in array.addressable_shards}
    parts = [
        xla.copy_to(data[source], target)
        for source, target in zip(theirs.mesh.devices.flat, self.devices)
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)

  def as_sharded(self, array: xla.Array, aval: Aval) -> xla.Array:
    """The array in the sharding of `aval`: itself, unless another step left it in another one."""
    if len(self.devices) == 1:
      return array
    sharding = self.sharding(aval)
    if array.sharding.is_equivalent_to(sharding, array.ndim):
      return array
    return jax.device_put(array, sharding)

  def compile(self, executable: Executable) -> Callable[[Sequence[xla.Array]], list[xla.Array]]:
    """Compiles a program.

    Returns:
      A function of all arguments, in the shardings of `executable.inputs`, to all results.
    """
    assert executable.num_devices == len(self.devices), (executable, len(self.devices))
    loaded = xla.compile_module(executable.module, self.devices)
    if len(self.devices) == 1:
      return xla.executor(loaded)
    run = xla.sharded_executor(loaded)
    results = [(aval.shape, self.sharding(aval)) for aval in executable.outputs]
    is_cpu = self.is_cpu

    def execute(args: Sequence[xla.Array]) -> list[xla.Array]:
      with self._running:
        arrays = [
            jax.make_array_from_single_device_arrays(shape, sharding, parts)
            for (shape, sharding), parts in zip(results, run(args))
        ]
        if is_cpu and arrays:
          # Devices of a CPU are threads that wait for each other: of several programs at a time
          # none might have all of its threads.
          xla.block(arrays[0])
      return arrays

    return execute
