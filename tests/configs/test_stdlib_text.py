"""The data set builder, on small made-up standard libraries."""

from __future__ import annotations

from pathlib import Path
import signal
import subprocess
import sys
import textwrap

import pytest

from configs import stdlib_text

REPOSITORY = Path(__file__).resolve().parents[2]


def make_stdlib(folder: Path, count: int = 40) -> dict[str, str]:
  """Writes `count` source files and returns {relative path: text}."""
  texts = {f'package{i % 3}/module{i}.py': f'"""Module {i}."""\n\nx = {i}\n' for i in range(count)}
  for path, text in texts.items():
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text, encoding='utf-8')
  return texts


def read(builder: stdlib_text.StdlibText) -> dict[str, dict[str, str]]:
  """Returns {split: {path: text}} of a built data set."""
  return {
      split: {
          example['path'].decode(): example['text'].decode()
          for example in builder.as_dataset(split=split).as_numpy_iterator()
      }
      for split in ('train', 'test')
  }


@pytest.fixture
def stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """A folder that `stdlib_text` takes for the standard library."""
  folder = tmp_path / 'lib'
  folder.mkdir()
  monkeypatch.setattr(stdlib_text, '_stdlib', lambda: folder)
  return folder


def start(stdlib: Path, root: Path, on_read: str) -> subprocess.Popen:
  """Starts a process that runs `on_read` before each file it reads, then prints 'built'."""
  code = f"""
      import pathlib, sys, time
      from configs import stdlib_text
      stdlib_text._stdlib = lambda: pathlib.Path({str(stdlib)!r})
      read_bytes, count = pathlib.Path.read_bytes, 0
      def slow(path):
        global count
        if path.suffix == '.py':
          count += 1
          {on_read}
        return read_bytes(path)
      pathlib.Path.read_bytes = slow
      stdlib_text.prepare(pathlib.Path({str(root)!r}))
      print('built', flush=True)
  """
  return subprocess.Popen(
      [sys.executable, '-c', textwrap.dedent(code)],
      cwd=REPOSITORY,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
  )


def test_holds_every_file_in_its_split(stdlib: Path, tmp_path: Path):
  """Each source file is in exactly the split of its path, with its exact text."""
  texts = make_stdlib(stdlib)
  texts['umlaut.py'] = '# Grüße\r\n\ty = "\\x00"\n'
  (stdlib / 'umlaut.py').write_bytes(texts['umlaut.py'].encode())

  splits = read(stdlib_text.prepare(tmp_path / 'data'))

  assert splits['train'] | splits['test'] == texts
  assert splits['test'] == {p: t for p, t in texts.items() if stdlib_text.split_of(p) == 'test'}
  assert splits['test'] and splits['train']


def test_leaves_out_what_is_no_source_of_the_library(stdlib: Path, tmp_path: Path):
  """Installed packages, caches, other encodings, empty and huge files are not read."""
  texts = make_stdlib(stdlib)
  for path in ('site-packages/a.py', 'x/dist-packages/b.py', '__pycache__/c.py', 'notes.txt'):
    (stdlib / path).parent.mkdir(parents=True, exist_ok=True)
    (stdlib / path).write_text('x = 1\n')
  (stdlib / 'latin.py').write_bytes('# Grüße\n'.encode('latin-1'))
  (stdlib / 'empty.py').touch()
  (stdlib / 'huge.py').write_bytes(b'#' * (stdlib_text.MAX_FILE_BYTES + 1))

  splits = read(stdlib_text.prepare(tmp_path / 'data'))

  assert splits['train'].keys() | splits['test'].keys() == texts.keys()


def test_split_takes_about_five_percent_and_never_changes():
  """The split is a fixed function of the path: these values must stay as they are."""
  share = sum(stdlib_text.split_of(f'lib/m{i}.py') == 'test' for i in range(20_000)) / 20_000
  assert 0.045 < share < 0.055
  moved = [p for p in ('abc.py', 'argparse.py', 'os.py', 'json/decoder.py', 'test/test__opcode.py')
           if stdlib_text.split_of(p) == 'test']
  assert moved == ['test/test__opcode.py']


def test_another_library_gets_a_data_set_of_its_own(stdlib: Path, tmp_path: Path):
  """A changed set of files is built anew instead of being served the old data."""
  make_stdlib(stdlib)
  first = stdlib_text.prepare(tmp_path / 'data')
  (stdlib / 'added.py').write_text('z = 3\n')
  second = stdlib_text.prepare(tmp_path / 'data')

  assert first.data_dir != second.data_dir
  assert 'added.py' not in read(first)['train'] | read(first)['test']
  assert 'added.py' in read(second)['train'] | read(second)['test']


def test_is_built_once(stdlib: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
  """The first call says that it builds and where; the second finds it and says nothing."""
  make_stdlib(stdlib)
  stdlib_text.prepare(tmp_path / 'data')
  said = capsys.readouterr().err
  assert 'building the data set from 40 files' in said and str(tmp_path / 'data') in said
  stdlib_text.prepare(tmp_path / 'data')
  assert capsys.readouterr().err == ''


def test_refuses_a_python_without_sources(stdlib: Path, tmp_path: Path):
  """The error names the folder and what to do."""
  with pytest.raises(FileNotFoundError, match=r'holds no \.py files.*Use one that has them'):
    stdlib_text.prepare(tmp_path / 'data')


def test_survives_being_killed_in_the_middle(stdlib: Path, tmp_path: Path):
  """After SIGKILL half-way the next call builds everything and leaves no fragments."""
  texts = make_stdlib(stdlib)
  root = tmp_path / 'data'
  process = start(
      stdlib,
      root,
      "print('reading', file=sys.stderr, flush=True) or time.sleep(60 * (count == 20))",
  )
  read_files = 0
  while read_files < 20:
    line = process.stderr.readline()
    assert line, 'it ended before it had read 20 files'
    read_files += line == 'reading\n'
  fragments = list(root.rglob('*incomplete*'))
  process.send_signal(signal.SIGKILL)
  process.communicate()
  assert fragments, 'the test has to kill it while it writes'

  splits = read(stdlib_text.prepare(root))

  assert splits['train'] | splits['test'] == texts
  assert not list(root.rglob('*incomplete*'))


def test_two_processes_at_once_build_it_once(stdlib: Path, tmp_path: Path):
  """Of two processes that need it at the same time, one builds and the other waits for it."""
  texts = make_stdlib(stdlib)
  root = tmp_path / 'data'
  processes = [start(stdlib, root, 'time.sleep(0.05)') for _ in range(2)]
  outputs = [process.communicate(timeout=60) for process in processes]

  assert [process.returncode for process in processes] == [0, 0], outputs
  assert [out.splitlines()[-1] for out, _ in outputs] == ['built', 'built']
  assert sum('building the data set from' in err for _, err in outputs) == 1
  splits = read(stdlib_text.prepare(root))
  assert splits['train'] | splits['test'] == texts
