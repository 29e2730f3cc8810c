"""What a message to a user has to look like, whatever it says."""

from __future__ import annotations

_JAXPR = (' let ', 'lambda ;', '{ ', 'pjit[', 'Traced<', 'Tracer', ' at 0x')


def assert_readable(text: str) -> None:
  """At most a dozen lines, none endless; no jaxpr, tracer or address in it."""
  lines = text.splitlines()
  assert len(lines) <= 12, text
  assert max(map(len, lines)) <= 480, text
  assert not [word for word in _JAXPR if word in text], text
