"""A rank other than the first: a process that does what the first one says, and ends when that one is gone.

It has no run directory, no data and no callbacks, and prints nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from typing import Any, NoReturn

from toyexp import ToyexpError
from toyexp.base import place
from toyexp_torch.party import BEAT, WORD
from toyexp_torch.ranks import opened_as  # loads PyTorch: before the first sign of life, which may take long to come
from toyexp_torch.wire import Link, written

WORDS = 500  # characters of what an error says
LOST = ("gloo", "NCCL", "Connection", "store")  # in what torch says of a rank that is not there any more


def main(file: int) -> None:
    """The whole life of a process that the first rank has started; `file` is its end of their connection."""
    Follower(Link(socket.socket(fileno=file))).follow()


class Follower:
    """Takes part in one session after another until the first rank is gone; then its process ends, with it.

    It ends as it stands: nothing in it is worth a wait for threads, graphs or other ranks.
    """

    def __init__(self, link: Link):
        self._link = link
        self._session: Any = None

    def follow(self) -> NoReturn:
        """All of it. Its exit code is 0 where nothing was left half done."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the first rank ends a run, and may want to save it before
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        try:
            self._serve()
        except EOFError:
            self._end()
        except Exception as error:
            with contextlib.suppress(OSError):
                self._link.send(written(_told(error)))
                time.sleep(2 * WORD)  # to be asked how it ended, not whether
        os._exit(1)

    def _end(self) -> NoReturn:
        os._exit(0 if self._session is None else 1)

    def _beat(self) -> None:
        """Signs of life. The first one that nobody takes is the end, whatever the process waits for.

        So is a parent that is gone: a child of the first rank may hold what that one has left open.
        """
        parent = os.getppid()
        while parent == os.getppid():
            try:
                self._link.beat()
            except OSError:
                break
            time.sleep(BEAT)
        self._end()

    def _serve(self) -> None:
        while True:
            name, *arguments = self._link.receive()
            if name == "open":
                self._session = True  # half open
                self._session = opened_as(*arguments)
            elif name == "close":
                if self._session is not None:
                    self._session.do_close()
                self._session = None
            else:
                getattr(self._session, name)(*arguments)


def _told(error: Exception) -> dict[str, str | bool]:
    """An error as the first rank is told of it: in a line, in full, and whether another rank is likelier to blame."""
    words = " ".join(str(error).split())[:WORDS]
    line = words if isinstance(error, ToyexpError) else f"{type(error).__name__}: {words}{place(error)}"
    lost = any(word in str(error) for word in LOST)
    return {"failed": line, "trace": traceback.format_exc().rstrip(), "lost": lost}
