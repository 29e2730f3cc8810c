"""The only file of the runtime that touches JAX's internals.

Workers import it, so it needs jax and numpy and nothing else. It knows jax 0.4.26; where a newer
JAX does a thing differently, both ways are tried here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
import numpy as np

Device = Any
Array = Any
Loaded = Any

# XLA's CPU client uses host memory in place, without a copy, if it is aligned to this.
ALIGNMENT = 64


def local_devices() -> list[Device]:
  """The devices of this process; starts the backend."""
  return list(jax.local_devices())


def is_cpu(device: Device) -> bool:
  """Whether its memory is this process's own."""
  return device.platform == 'cpu'


def compile_module(module: bytes, devices: Sequence[Device]) -> Loaded:
  """Compiles serialized StableHLO of a program.

  Args:
    module: MLIR bytecode, or a portable artifact of `jax.experimental.export`.
    devices: devices of this process that it runs on, as many as it was lowered for.

  Returns:
    The loaded executable.
  """
  # These are the options jax.jit itself compiles with, so that results are equal to its.
  from jax._src import compiler

  options = functools.partial(
      compiler.get_compile_options,
      num_replicas=1,
      num_partitions=len(devices),
      device_assignment=np.array([[device.id for device in devices]]),
  )
  client = devices[0].client
  if not hasattr(client, 'compile_and_load'):  # 0.4.26
    return client.compile(module, options(use_spmd_partitioning=len(devices) > 1))
  return client.compile_and_load(module, list(devices), options())


def executor(loaded: Loaded) -> Callable[[Sequence[Array]], list[Array]]:
  """A function that runs the executable on arrays of its device: all arguments -> all results."""
  if hasattr(loaded, 'execute'):
    return loaded.execute

  def execute(args: Sequence[Array]) -> list[Array]:
    results = loaded.execute_sharded(args).disassemble_into_single_device_arrays()
    return [result[0] for result in results]

  return execute


def sharded_executor(loaded: Loaded) -> Callable[[Sequence[Array]], list[list[Array]]]:
  """Like `executor`, on arrays of several devices: per result its array on each device."""

  def execute(args: Sequence[Array]) -> list[list[Array]]:
    return loaded.execute_sharded(args).disassemble_into_single_device_arrays()

  return execute


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Fresh host memory that a CPU device can use without copying it again."""
  dtype = np.dtype(dtype)
  nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
  raw = np.empty(nbytes + ALIGNMENT, np.uint8)
  offset = -raw.ctypes.data % ALIGNMENT
  return raw[offset : offset + nbytes].view(dtype).reshape(shape)


def adopt(array: np.ndarray, device: Device) -> Array:
  """Puts host memory on a device; the memory belongs to the result and must not change again."""
  if hasattr(device.client, 'buffer_from_pyval'):  # 0.4.26
    return device.client.buffer_from_pyval(array, device)
  from jaxlib import _jax

  aval = jax.core.ShapedArray(array.shape, array.dtype)
  sharding = jax.sharding.SingleDeviceSharding(device)
  # Without enable_x64, 64-bit values would be cut to 32 bits. Host memory is used in place.
  return _jax.batched_device_put(aval, sharding, [array], [device], enable_x64=True)


def to_device(array: np.ndarray, device: Device) -> Array:
  """Copies a host array to a device; the caller may change or drop it afterwards."""
  array = np.asarray(array)
  fresh = empty_aligned(array.shape, array.dtype)
  np.copyto(fresh, array)
  return adopt(fresh, device)


def copy_to(array: Array, device: Device) -> Array:
  """A copy of a device array on `device` that shares no memory with it, also on the same one."""
  if is_cpu(device):
    return to_device(np.asarray(array), device)
  if device in array.devices():
    return jax.numpy.array(array, copy=True)
  return jax.device_put(array, device)


def register_array_type(cls: type) -> None:
  """Makes JAX functions take instances of `cls`, which has shape, dtype and `__array__`."""
  from jax._src import core
  from jax._src import dtypes

  if not hasattr(dtypes, 'register_canonicalize_value_handler'):
    return  # 0.4.26 calls __jax_array__; newer versions do so in some functions only

  def aval(x: Any) -> Any:
    return jax.core.ShapedArray(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))

  core.pytype_aval_mappings[cls] = aval
  dtypes.register_canonicalize_value_handler(
      cls, lambda x: dtypes.canonicalize_value(np.asarray(x))
  )


def live_bytes(devices: Sequence[Device]) -> int:
  """Bytes of all arrays of this process on these devices."""
  wanted = set(devices)
  return sum(
      array.nbytes // max(1, len(array.devices()))
      for array in devices[0].client.live_arrays()
      for device in array.devices()
      if device in wanted
  )


def block(array: Array) -> None:
  """Waits until the array is computed; raises what its computation raised."""
  array.block_until_ready()
