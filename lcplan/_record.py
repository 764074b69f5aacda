"""The one pydantic base of every record: frozen, no unknown fields."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Immutable, and a misspelt field is an error; validators are built at first use, which keeps the start quick."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
