"""Writes docs/traps.md: the table of codes, messages and fixes.

python tools/trap_table.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from lcplan.traps import table

FILE = Path(__file__).parent.parent / "docs" / "traps.md"
HEAD = """# Known traps

Mistakes that others have made with long sequences on this stack. *refused*: an error with that code, exit 2. *warned*:
a warning with that code. *safe*: it cannot happen in a plan or a generated job, and a test shows so. This file is
written by `python tools/trap_table.py`; a test holds it to the code.

"""


def main() -> int:
    """Write the file, or say whether it is current."""
    text = HEAD + table()
    if "--check" in sys.argv[1:]:
        return 0 if FILE.is_file() and FILE.read_text("utf-8") == text else 1
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
