"""The ``lcplan`` command: parses, calls, renders, exits. Exit 0 done or fits, 1 the answer is no, 2 bad input."""

from __future__ import annotations

import os
import sys
import traceback

import typer

from lcplan.cli import check, estimate, listing, recommend, run
from lcplan.errors import LcplanError

app = typer.Typer(
    name="lcplan",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Does this model, at this length, with these levers, fit these GPUs; what dominates; what would make it "
    "fit. Then run it.",
)
app.command("estimate")(estimate.command)
app.command("recommend")(recommend.command)
app.command("run")(run.command)
app.command("check")(check.command)
app.command("list")(listing.command)


def main(argv: list[str] | None = None) -> None:
    """Run the command line; every failure ends as one message on stderr and exit code 2."""
    try:
        app(args=argv)
    except LcplanError as error:
        _complain(f"error [{error.code}]: {error.message}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # the reader of stdout has gone; keep the interpreter's own flush from failing as well
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception:
        traceback.print_exc()
        _complain("error [internal]: this is a defect in lcplan; please report it with the lines above.")
        sys.exit(2)


def _complain(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
