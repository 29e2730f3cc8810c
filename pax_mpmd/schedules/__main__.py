"""`python -m pax_mpmd.schedules` prints the table of schedules that stands in docs/schedules.md."""

from pax_mpmd.schedules.summary import markdown_table

if __name__ == '__main__':
  print(markdown_table(), end='')
