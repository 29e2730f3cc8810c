"""One training run at a time in a job_log_dir."""

from __future__ import annotations

import fcntl
import os
import pathlib

from pax_mpmd import errors

__all__ = ['hold']

_NAME = '.mpmd_lock'
_held: list[int] = []


def hold(folder: os.PathLike) -> None:
  """Makes this process the only one that trains in a folder, until it ends.

  The lock is the kernel's, so nothing is left to be removed, however the process ends. Where the
  file system has no locks (object stores, some network file systems) nothing is checked.

  Raises:
    ConfigError: another process trains there.
  """
  if '://' in os.fspath(folder):
    return
  path = pathlib.Path(folder) / _NAME
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
  except OSError:
    return  # Pax will say what is wrong with the folder
  try:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    owner = os.read(fd, 100).decode(errors='replace').strip()
    os.close(fd)
    raise errors.ConfigError(
        f'--job_log_dir={folder}: another run trains in this folder already (process'
        f' {owner or "unknown"}). Two would delete each other\'s checkpoints. Wait for it, end it,'
        ' or give this one a job_log_dir of its own.'
    ) from error
  except OSError:
    os.close(fd)
    return
  os.ftruncate(fd, 0)
  os.write(fd, f'{os.getpid()} on {os.uname().nodename}\n'.encode())
  _held.append(fd)
