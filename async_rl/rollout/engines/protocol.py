"""What a worker asks of an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from async_rl.weights.manifest import Manifest


@dataclass(frozen=True)
class Request:
    """One trajectory to sample. `seed` None leaves randomness to the engine; the torch engine draws the token at a
    place of a sequence from the seed and that place."""

    id: str
    prompt: list[int]
    max_tokens: int
    seed: int | None = None
    greedy: bool = False
    priority: int = 0
    """Of requests that wait, those with the lowest number go first."""


@dataclass(frozen=True)
class Delta:
    """Tokens sampled since the last one; the three lists are parallel.

    `logprobs` are under the distribution that sampled (nan where the engine gave none), `versions` are those of the
    weights that sampled. The last delta of a request has a `finish_reason` (`stop` or `length`) and `spans`, the
    engine's own record of its versions as (version, start, end) over the whole response.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str | None = None
    spans: list[tuple[int, int, int]] | None = None


class Engine(Protocol):
    """Lifecycle: start, then any number of generate and update in any interleaving, then stop.

    `update` applies a version at an engine-step boundary: running requests pause, keep their KV cache and go on with
    the new weights; none is aborted. Tokens sampled before it carry the old version, those after it the new one.
    """

    async def start(self) -> None: ...

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        """Raises `RequestRefused` for a request that can never succeed; any other error is the engine's own. To close
        the iterator ends the request."""
        ...

    async def update(self, manifest: Manifest) -> float:
        """Loads the published weights; returns the seconds for which generation stood still."""
        ...

    async def relabel(self, version: int) -> None:
        """The weights loaded are those of `version` too (a step that changed nothing)."""
        ...

    async def score(self, tokens: list[int]) -> list[float]:
        """Log-probs at temperature 1 of `tokens[1:]` under the weights loaded, each given all before it."""
        ...

    async def sleep(self) -> None:
        """Lets go of the devices' memory; no request runs until `wake`."""
        ...

    async def wake(self) -> None: ...

    async def stop(self) -> None: ...
