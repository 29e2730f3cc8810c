"""Joining a Ray that runs already, and telling within seconds why that can't be done."""

from __future__ import annotations

import socket
from typing import Any

from pax_mpmd.errors import ConfigError

__all__ = ['check', 'join']

_TIMEOUT_S = 5.0
# How HTTP/2, and so gRPC, begins: the client's preface with an empty SETTINGS frame, which the
# server answers with one of its own (RFC 9113, section 3.4).
_PREFACE = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'
_FRAME_HEADER_BYTES = 9
_SETTINGS = 4


def check(address: str, source: str) -> str:
  """Finds out whether there is a Ray at an address; starts and joins nothing.

  Args:
    address: 'host:port', or 'auto' for the Ray that `ray start` has started on this host.
    source: where it comes from, for messages.

  Returns:
    host:port.

  Raises:
    ConfigError: there is none.
  """
  found = _this_hosts_address() if address == 'auto' else address
  problem = _problem(found) if found else 'no Ray was started on this host by `ray start`'
  if problem:
    raise _error(address, source, problem)
  return found


def join(address: str, source: str, **options: Any) -> None:
  """`ray.init` with the address of a running Ray.

  Args:
    address: see `check`.
    source: the same.
    **options: of `ray.init`.

  Raises:
    ConfigError: there is no Ray, or none that this process can use.
  """
  import ray

  found = check(address, source)
  try:
    ray.init(address=found, **options)
  except Exception as error:  # it raises many kinds
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    raise _error(address, source, f'it could not be joined: {" ".join(lines[:3])}') from error


def _error(address: str, source: str, problem: str) -> ConfigError:
  return ConfigError(
      f'{source}={address}: {problem}. It is the address, host:port, of a Ray that runs on this'
      ' host; start one with `ray start --head`, or leave it out, and a Ray is started and ended'
      ' with the run.'
  )


def _this_hosts_address() -> str | None:
  from ray._private import utils

  return utils.read_ray_address()


def _problem(address: str) -> str:
  """Why no Ray can be at an address. Asked first, since `ray.init` waits for minutes."""
  if '://' in address:
    return 'a Ray client (ray://) has no actors on its own host'
  host, _, port = address.rpartition(':')
  if not host or not port.isdigit():
    return 'this is not of the form host:port'
  try:
    with socket.create_connection((host.strip('[]'), int(port)), _TIMEOUT_S) as connection:
      connection.settimeout(_TIMEOUT_S)
      empty = bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
      connection.sendall(_PREFACE + empty)
      header = connection.recv(_FRAME_HEADER_BYTES)
  except (OSError, OverflowError) as error:
    return f'no Ray answers there ({error})'
  if len(header) < _FRAME_HEADER_BYTES or header[3] != _SETTINGS:
    return 'what answers there is not Ray'
  return ''
