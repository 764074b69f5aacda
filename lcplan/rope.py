"""Which rotary scaling a target length needs.

transformers 5 keeps everything in ``rope_parameters`` and a dict passed to it replaces the whole dict, so all four keys
are always given: without ``rope_theta`` loading fails, without ``original_max_position_embeddings`` the config's
``max_position_embeddings`` is taken silently (Qwen3: 40,960 instead of 32,768).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lcplan.errors import PlanError
from lcplan.ledger import RopeParameters
from lcplan.model_spec import ModelSpec

_YARN = re.compile(r"^yarn:([0-9]+(?:\.[0-9]+)?)(?::([0-9]+))?$")
FORMS = "auto, none, yarn:FACTOR such as yarn:32, or yarn:FACTOR:ORIGINAL such as yarn:25.6:40960"


class Asked(NamedTuple):
    """What ``--rope`` asks for; both None under ``auto``."""

    factor: float | None
    original: int | None


def resolve_rope(spec: ModelSpec, max_length: int, rope: str) -> RopeParameters | None:
    """Rotary parameters to load the model with, or None where the model's own are right.

    ``rope`` is ``auto`` (YaRN by target / pretrained length where the model does not reach), ``none``, ``yarn:FACTOR``,
    or ``yarn:FACTOR:ORIGINAL`` for another original length than the pretrained one.

    Raises:
        PlanError: for an unknown form, a factor of at most 1 or one that does not cover the length, or a model whose
            own scaling would be stacked on.
    """
    asked = _parse(rope)
    if asked is None:
        return None
    reaches = max_length <= max(spec.pretrained_length, spec.max_position_embeddings)
    if asked.factor is None and reaches:
        return None
    if own := own_scaling(spec):
        raise PlanError(
            "rope-stacked",
            f"{spec.id} already scales its rotary embedding ({own}, up to "
            f"{spec.max_position_embeddings:,} positions), and scaling is never stacked on scaling. Use --rope none "
            f"and a --max-length of at most {spec.max_position_embeddings:,}, or a model that does not scale yet.",
        )
    original = asked.original or spec.pretrained_length
    factor = max_length / original if asked.factor is None else asked.factor
    if factor <= 1.0:
        raise PlanError("bad-rope", f"--rope yarn:{factor:g} does not extend anything: the factor must exceed 1.")
    if factor * original < max_length:
        raise PlanError(
            "rope-factor-too-small",
            f"--rope {rope}: {factor:g} x {original:,} original positions reach {int(factor * original):,}, and "
            f"--max-length is {max_length:,}. Use --rope yarn:{max_length / original:g}, or --rope auto.",
        )
    return RopeParameters(
        rope_type="yarn",
        factor=factor,
        rope_theta=spec.rope.rope_theta,
        original_max_position_embeddings=original,
    )


def own_scaling(spec: ModelSpec) -> str | None:
    """What the model itself does to reach beyond its pretrained length: a rope_type, or dual chunk attention."""
    if spec.config.get("dual_chunk_attention_config"):
        return "dual chunk attention"
    return None if spec.rope.rope_type == "default" else spec.rope.rope_type


def _parse(rope: str) -> Asked | None:
    """None under ``none``."""
    match = _YARN.match(rope)
    if rope not in ("auto", "none") and match is None:
        raise PlanError("bad-rope", f"--rope {rope!r} is not known. Use {FORMS}.")
    if rope == "none":
        return None
    if match is None:
        return Asked(None, None)
    original = int(match.group(2)) if match.group(2) else None
    if original == 0:
        raise PlanError("bad-rope", f"--rope {rope!r}: the original length must be positive. Use {FORMS}.")
    return Asked(float(match.group(1)), original)


def explain_rope(spec: ModelSpec, rope: RopeParameters | None, max_length: int) -> str:
    """Which original length is used, and why."""
    if rope is None:
        how = "scales already" if own_scaling(spec) else "needs no scaling"
        return f"{max_length:,} tokens are within the {spec.max_position_embeddings:,} of {spec.id}, which {how}."
    original = rope.original_max_position_embeddings
    text = f"{max_length:,} tokens, YaRN factor {rope.factor:g} over {original:,} original positions"
    if original == spec.pretrained_length != spec.max_position_embeddings:
        text += (
            f": {spec.id} was pretrained at {original:,}; its config says {spec.max_position_embeddings:,}, which "
            f"leaves room for an answer (--rope yarn:{max_length / spec.max_position_embeddings:g}:"
            f"{spec.max_position_embeddings} takes that instead)"
        )
    return text + "."


def longest_reach(spec: ModelSpec, rope: str, limit: int) -> int:
    """Longest max_length, up to ``limit``, that the rotary embedding allows.

    Raises:
        PlanError: for a form of ``rope`` that no length makes right.
    """
    asked = _parse(rope)
    if asked is None:
        return limit
    if own_scaling(spec):
        if asked.factor is not None:
            resolve_rope(spec, 1, rope)  # says that scaling is never stacked
        return min(limit, max(spec.pretrained_length, spec.max_position_embeddings))
    return limit if asked.factor is None else min(limit, int(asked.factor * (asked.original or spec.pretrained_length)))


def check_theta(spec: ModelSpec, rope_theta: float) -> None:
    """Refuse a rope_theta that is not the model's: scaling stretches positions, it does not change the base.

    Raises:
        PlanError: naming both values.
    """
    if rope_theta != spec.rope.rope_theta:
        raise PlanError(
            "rope-theta",
            f"rope_theta {rope_theta:g} is not that of {spec.id}, {spec.rope.rope_theta:g}: with another base the "
            f"weights see rotations they were not trained with. Use {spec.rope.rope_theta:g}, or leave it out.",
        )


def position_limit(spec: ModelSpec, max_length: int, rope: RopeParameters | None) -> int:
    """``max_position_embeddings`` the job's config must carry."""
    return max(spec.max_position_embeddings, max_length) if rope else spec.max_position_embeddings
