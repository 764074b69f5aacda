"""``python -m lcplan``: the same as the ``lcplan`` command."""

from lcplan.cli.main import main

main()
