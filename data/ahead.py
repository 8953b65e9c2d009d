"""Call a function in threads, a few calls ahead of their use."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int | None, ahead: int
) -> Iterator[Result]:
    """Yield the result of each item in order, while threads work on the `ahead` items after it."""
    waiting = deque[Future[Result]]()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()
