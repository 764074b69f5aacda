"""What a shell completes: ids of the catalog, presets, items, and the values of closed sets.

Nothing is read before a shell asks. A word that matches nothing is left to the shell, which then offers files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Completer = Callable[[str], list[str]]


def _starting(incomplete: str, values: Iterable[str]) -> list[str]:
    return [value for value in values if value.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Ids of the catalog. As on the command line case does not matter, and the owner may be left out."""
    from lcplan import catalog

    ids = catalog.model_ids()
    names = [*ids, *(id.rpartition("/")[2] for id in ids)] if incomplete else ids
    typed = incomplete.casefold()
    # shells drop what does not begin as typed
    return [incomplete + name[len(incomplete) :] for name in names if name.casefold().startswith(typed)]


def gpus(incomplete: str) -> list[str]:
    """Ids of the catalog."""
    from lcplan import catalog

    return _starting(incomplete, catalog.gpu_ids())


def presets(incomplete: str) -> list[str]:
    """Names of the presets."""
    from lcplan.presets import list_presets

    return _starting(incomplete, list_presets())


def items(incomplete: str) -> list[str]:
    """Keys of every item that formulas have; a report has those of its plan."""
    from lcplan.estimators import deepspeed, formula  # noqa: F401  (they register the items)
    from lcplan.estimators._item import ITEMS

    return _starting(incomplete, sorted(ITEMS))


def one_of(*values: str) -> Completer:
    """A completer of a closed set."""

    def complete(incomplete: str) -> list[str]:
        return _starting(incomplete, values)

    return complete
