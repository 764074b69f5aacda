"""The one pydantic base of every record: frozen, no unknown fields."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Immutable, and a misspelt field is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )
