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
    """Yield the result of each item in order, while threads work on the `ahead` items after it.

    An iterator that is given up does not wait for its threads: the garbage collector may end it
    while another thread starts, and joining threads then waits forever for a lock of its own.
    """
    waiting = deque[Future[Result]]()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
