"""A data set that is on every machine: the source of Python's own standard library.

`StdlibText` is an ordinary TensorFlow Datasets builder; `prepare` builds it once for each Python
installation, into a cache. About 30 MB of text in 1,700 files, nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import fcntl
import hashlib
import io
import os
from pathlib import Path
import platform
import shutil
import sys
import sysconfig
import time
from typing import Any

import tensorflow_datasets as tfds

__all__ = ['data_root', 'DATA_VERSION', 'NAME', 'prepare', 'source_files', 'split_of', 'StdlibText']

DATA_DIR_VARIABLE = 'PAX_MPMD_DATA_DIR'
NAME = 'stdlib_text'
DATA_VERSION = '1.0.0'
TEST_PERCENT = 5
# Larger files are tables of generated data, not programs.
MAX_FILE_BYTES = 1 << 20
# Not part of the standard library although they may lie below it.
_FOREIGN_FOLDERS = frozenset({'__pycache__', 'dist-packages', 'site-packages'})


def data_root() -> Path:
  """Returns the folder of all built data sets: $PAX_MPMD_DATA_DIR or one in the user's cache."""
  chosen = os.environ.get(DATA_DIR_VARIABLE)
  if chosen:
    return Path(chosen).expanduser()
  cache = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  return Path(cache).expanduser() / 'pax_mpmd'


def source_files(stdlib: Path) -> list[tuple[str, int]]:
  """Lists the Python files below `stdlib` as sorted (relative path with '/', bytes)."""
  found = []
  for folder, folders, files in os.walk(stdlib):
    folders[:] = [name for name in folders if name not in _FOREIGN_FOLDERS]
    for name in files:
      path = Path(folder, name)
      if name.endswith('.py') and path.is_file():
        found.append((path.relative_to(stdlib).as_posix(), path.stat().st_size))
  return sorted(entry for entry in found if 0 < entry[1] <= MAX_FILE_BYTES)


def split_of(relative_path: str) -> str:
  """Returns 'test' for about TEST_PERCENT of all paths, 'train' for the others.

  It depends on the path alone, so a file stays in its split whatever else is installed.
  """
  digest = hashlib.sha256(relative_path.encode()).digest()
  return 'test' if int.from_bytes(digest[:8], 'big') % 100 < TEST_PERCENT else 'train'


class _LocalInfo(tfds.core.DatasetInfo):
  """The description of a data set that exists only here."""

  def initialize_from_bucket(self) -> None:
    """Does not ask TFDS's public bucket, which takes long on a machine without a network."""


class StdlibText(tfds.core.GeneratorBasedBuilder):
  """The Python standard library as text: one example for each source file."""

  VERSION = tfds.core.Version(DATA_VERSION)
  RELEASE_NOTES = {DATA_VERSION: 'First version.'}

  def _info(self) -> tfds.core.DatasetInfo:
    return _LocalInfo(
        builder=self,
        description='The source files of the Python standard library of this interpreter.',
        features=tfds.features.FeaturesDict({
            'path': tfds.features.Text(),
            'text': tfds.features.Text(),
        }),
    )

  def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
    del dl_manager  # Nothing is downloaded.
    stdlib = _stdlib()
    paths = [path for path, _ in source_files(stdlib)]
    return {
        split: self._generate_examples(stdlib, [p for p in paths if split_of(p) == split])
        for split in ('train', 'test')
    }

  def _generate_examples(
      self, stdlib: Path, paths: list[str]
  ) -> Iterator[tuple[str, dict[str, str]]]:
    for path in paths:
      # Files in other encodings are left out: their bytes would be noise to a byte-level model.
      with contextlib.suppress(UnicodeDecodeError):
        text = (stdlib / path).read_bytes().decode('utf-8')
        yield path, {'path': path, 'text': text}


def prepare(root: Path | None = None) -> StdlibText:
  """Returns the data set of the running Python, after building it where that isn't done yet.

  Processes that come at the same time wait for one of them to build; one that is killed in the
  middle leaves nothing that a later one would take for data.

  Args:
    root: where built data sets are kept; `data_root()` if None.

  Raises:
    FileNotFoundError: this Python comes without the sources of its standard library.
  """
  stdlib = _stdlib()
  files = source_files(stdlib)
  if not files:
    raise FileNotFoundError(
        f'{stdlib} holds no .py files, so there is nothing to train on: this Python was installed'
        ' without the sources of its standard library. Use one that has them.'
    )
  folder = (root or data_root()) / NAME / _fingerprint(files)
  # What is there is whole: TFDS renames a folder to its place once everything in it is written.
  if not (folder / NAME / DATA_VERSION).exists():
    folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder / '.lock'):
      if not (folder / NAME / DATA_VERSION).exists():
        _build(folder, stdlib, files)
  return StdlibText(data_dir=str(folder))


def _build(folder: Path, stdlib: Path, files: list[tuple[str, int]]) -> None:
  """Builds into `folder`, whose lock the caller holds."""
  megabytes = sum(size for _, size in files) / 1e6
  _say(f'building the data set from {len(files)} files ({megabytes:.0f} MB) of {stdlib} ...')
  start = time.monotonic()
  # Left by a process that was killed; nobody else builds here while we hold the lock.
  shutil.rmtree(folder / NAME, ignore_errors=True)
  builder = StdlibText(data_dir=str(folder))
  # TFDS would draw a dozen short-lived bars, and speak of downloading what is never downloaded.
  tfds.disable_progress_bar()
  with contextlib.redirect_stdout(io.StringIO()):
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False)
    )
  counts = ', '.join(f'{name}: {split.num_examples}' for name, split in builder.info.splits.items())
  _say(f'data set built in {time.monotonic() - start:.0f} s, kept in {folder} ({counts} files)')


def _stdlib() -> Path:
  return Path(sysconfig.get_paths()['stdlib'])


def _fingerprint(files: list[tuple[str, int]]) -> str:
  """Names the data set after the Python version and the files that it comes from."""
  digest = hashlib.sha256()
  for path, size in files:
    digest.update(f'{path}\0{size}\n'.encode())
  return f'python{platform.python_version()}-{digest.hexdigest()[:8]}'


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
  """Holds a lock that the operating system drops when the process ends, however it ends."""
  with open(path, 'w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      _say('another process is building the data set; waiting for it ...')
      fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _say(text: str) -> None:
  print(f'[data] {text}', file=sys.stderr, flush=True)
