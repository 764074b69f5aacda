"""The ``lcplan`` command: parses, calls, renders, exits. Exit 0 done or fits, 1 the answer is no, 2 bad input."""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module

import typer

from lcplan.errors import LcplanError

COMMANDS = {
    "estimate": "lcplan.cli.estimate",
    "recommend": "lcplan.cli.recommend",
    "run": "lcplan.cli.run",
    "watch": "lcplan.cli.watch",
    "check": "lcplan.cli.check",
    "doctor": "lcplan.cli.doctor",
    "list": "lcplan.cli.listing",
    "plot": "lcplan.cli.plot",
    "serve": "lcplan.cli.serve",
}
"""Command -> module with its ``command``; only the one that is called is imported."""
HELP = (
    "Does this model, at this length, with these levers, fit these GPUs; what dominates; what would make it fit. "
    "Then run it."
)


def build_app(names: list[str]) -> typer.Typer:
    """The command line with the commands of these names."""
    app = typer.Typer(
        name="lcplan", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, help=HELP
    )
    app.callback(help=HELP)(lambda: None)  # without it a single command would lose its name
    for name in names:
        app.command(name)(import_module(COMMANDS[name]).command)
    return app


def main(argv: list[str] | None = None) -> None:
    """Run the command line; every failure ends as one message on stderr and exit code 2."""
    arguments = sys.argv[1:] if argv is None else argv
    named = [arguments[0]] if arguments and arguments[0] in COMMANDS else list(COMMANDS)
    try:
        build_app(named)(args=arguments, prog_name="lcplan")
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
