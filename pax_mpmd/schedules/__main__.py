"""`python -m pax_mpmd.schedules`: the table of schedules, or `show` and one of them.

Without arguments it prints the table that stands in docs/schedules.md; for the other, see
`python -m pax_mpmd.schedules show --help`.
"""

import sys

from pax_mpmd.schedules import show
from pax_mpmd.schedules.summary import markdown_table

if __name__ == '__main__':
  if sys.argv[1:2] == ['show']:
    show.main(sys.argv[2:])
  elif sys.argv[1:]:
    sys.exit(__doc__)
  else:
    print(markdown_table(), end='')
