"""A few threads that do not keep a process from ending."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import Context, ContextVar, copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

#: Whose work a context does, such as a tenant's; empty if it is nobody's in particular.
doing_for: ContextVar[str] = ContextVar("doing_for", default="")


def for_nobody() -> Context:
    """A copy of this context, for work that is not its client's alone."""
    context = copy_context()
    context.run(doing_for.set, "")
    return context


class _Work(NamedTuple):
    whose: str
    done: Future[Any]
    call: Callable[[], Any]


class DaemonThreads(Executor):
    """Like a ThreadPoolExecutor of at most `most` threads, but a process does not wait for them at its end: it abandons
    their work. Of the work of one client (:data:`doing_for`), at most `each` is done at once, and what is more waits
    without holding up others."""

    def __init__(self, most: int, name: str, each: int | None = None) -> None:
        self._most = most
        self._each = most if each is None else each
        self._name = name
        self._work: SimpleQueue[_Work] = SimpleQueue()
        self._lock = threading.RLock()
        self._idle = self._begun = 0
        #: Client → its work that is done or next, and what waits for that to end.
        self._at_once: Counter[str] = Counter()
        self._waiting: defaultdict[str, deque[_Work]] = defaultdict(deque)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in one of the threads; see :meth:`concurrent.futures.Executor.submit`."""
        done: Future[Any] = Future()
        work = _Work(doing_for.get(), done, partial(fn, *args, **kwargs))
        with self._lock:
            if work.whose and self._at_once[work.whose] >= self._each:
                self._waiting[work.whose].append(work)
                return done
            self._at_once[work.whose] += 1
            self._work.put(work)
            if self._idle:
                self._idle -= 1
            elif self._begun < self._most:
                self._begun += 1
                threading.Thread(target=self._run, name=f"{self._name}-{self._begun}", daemon=True).start()
        return done

    def has_room(self) -> bool:
        """Whether work of this context's client would begin now."""
        with self._lock:
            is_free = self._idle > 0 or self._begun < self._most
            return is_free and (not (whose := doing_for.get()) or self._at_once[whose] < self._each)

    def submit_if_room(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any] | None:
        """As :meth:`submit`, if the work begins now; otherwise None, and it is not done."""
        with self._lock:  # another thread may not take the room in between
            return self.submit(fn, *args) if self.has_room() else None

    def _run(self) -> None:
        while True:
            whose, done, call = self._work.get()
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(call())
                except BaseException as error:  # noqa: BLE001  (the caller gets it)
                    done.set_exception(error)
            del done, call  # otherwise they would keep their objects alive until the next work comes
            self._end(whose)

    def _end(self, whose: str) -> None:
        """Let the client's next work begin in its turn; without any, this thread is free."""
        with self._lock:
            if waiting := self._waiting.get(whose):
                self._work.put(waiting.popleft())
                return
            self._waiting.pop(whose, None)
            self._idle += 1
            self._at_once[whose] -= 1
            if not self._at_once[whose]:
                del self._at_once[whose]
