"""Which rotary scaling a target length needs.

transformers 5 keeps everything in ``rope_parameters`` and a dict passed to it replaces the whole dict, so all four keys
are always given: without ``rope_theta`` loading fails, without ``original_max_position_embeddings`` the config's
``max_position_embeddings`` is taken silently (Qwen3: 40,960 instead of 32,768).
"""

from __future__ import annotations

import re

from lcplan.errors import PlanError
from lcplan.ledger import RopeParameters
from lcplan.model_spec import ModelSpec

_YARN = re.compile(r"^yarn:([0-9]+(?:\.[0-9]+)?)$")


def resolve_rope(spec: ModelSpec, max_length: int, rope: str) -> RopeParameters | None:
    """Rotary parameters to load the model with, or None where the model's own are right.

    ``rope`` is ``auto`` (YaRN by target / pretrained length where the model does not reach), ``none``, ``yarn:FACTOR``.

    Raises:
        PlanError: for an unknown form, a factor of at most 1, or a model whose own scaling would be stacked on.
    """
    match = _YARN.match(rope)
    if rope not in ("auto", "none") and match is None:
        raise PlanError("bad-rope", f"--rope {rope!r} is not known. Use auto, none, or yarn:FACTOR such as yarn:32.")
    if rope == "none":
        return None
    scaled_already = spec.rope.rope_type != "default"
    reaches = max_length <= max(spec.pretrained_length, spec.max_position_embeddings if scaled_already else 0)
    if match is None and (reaches or max_length <= spec.max_position_embeddings):
        return None
    if scaled_already:
        raise PlanError(
            "rope-stacked",
            f"{spec.id} already scales its rotary embedding ({spec.rope.rope_type}, up to "
            f"{spec.max_position_embeddings:,} positions), and scaling is never stacked on scaling. Use --rope none "
            f"and a --max-length of at most {spec.max_position_embeddings:,}, or a model that does not scale yet.",
        )
    factor = float(match.group(1)) if match else max_length / spec.pretrained_length
    if factor <= 1.0:
        raise PlanError("bad-rope", f"--rope yarn:{factor:g} does not extend anything: the factor must exceed 1.")
    return RopeParameters(
        rope_type="yarn",
        factor=factor,
        rope_theta=spec.rope.rope_theta,
        original_max_position_embeddings=spec.pretrained_length,
    )


def position_limit(spec: ModelSpec, max_length: int, rope: RopeParameters | None) -> int:
    """``max_position_embeddings`` the job's config must carry."""
    return max(spec.max_position_embeddings, max_length) if rope else spec.max_position_embeddings
