"""Configuration of the environment. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct


class EnvironmentConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What answers the policy between its turns; without a name every response is one turn."""

    name: str | None = None
    """`calculator`, or `module:factory`, called as `factory(row, **params)`; see `environments/protocol.py`."""
    params: dict[str, Any] = {}
    """Keyword arguments of the factory."""
    template: str = "{text}"
    """How its answer is put into the context; for a chat model with the marks of a turn around it."""
    replayable: bool = True
    """Whether it answers the same to the same turns, so that another worker can go on in mid-episode. If not, a
    trajectory whose worker dies starts again."""
    turn_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Longest turn in tokens; a longer one goes to the environment as far as it is. None: as long as the response."""
    time_limit_s: Annotated[float, Meta(gt=0, lt=1e12)] = 60.0
    """Seconds after which an answer counts as failed, and the trajectory with it."""
