"""Contenders: processes that do actions by name, over a pipe, a line at a time.

A child sends one JSON object when it is ready. Then it reads the name of an action from each line,
does it, and answers with its beginning and its end (on the machine's monotonic clock, which all
children share) and its result. A child ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TextIO

from ps_core.errors import Internal, InvalidConfig, WaitExpired
from ps_runtime.launch.role_environment import role_environment
from ps_runtime.launch.shutdown import die_with_parent_if_asked

ANSWER_DEADLINE_S = 300.0
"""A contender moves 256 MB in seconds even on a busy machine, where importing torch takes long."""

_STOP_GRACE_S = 5.0
_TAIL_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Done:
    """An action that a child did, and its result."""

    began_s: float
    ended_s: float
    result: Any

    @property
    def wall_s(self) -> float:
        return self.ended_s - self.began_s


class Child:
    """A process that runs `module` and does actions. A context manager.

    Blocking: until the child is ready.

    Raises:
        Internal: the child ended; the message has its last output.
        WaitExpired: the child was not ready in time.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._begin(module, arguments)
        self._finish_start()

    @classmethod
    def start_all(cls, *commands: tuple[str, ...]) -> list[Child]:
        """Start children that need each other: all are started before the first is waited for."""
        children = []
        with contextlib.ExitStack() as undo:
            for module, *arguments in commands:
                child = cls.__new__(cls)
                child._begin(module, tuple(arguments))
                undo.callback(child.stop)
                children.append(child)
            for child in children:
                child._finish_start()
            undo.pop_all()
        return children

    def _begin(self, module: str, arguments: tuple[str, ...]) -> None:
        self.name = " ".join((module.rpartition(".")[2], *arguments[:1]))
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - `stop` closes it
        self._buffer = b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=role_environment(os.environ, {}),
        )

    def _finish_start(self) -> None:
        try:
            self.ready: dict[str, Any] = self._line()
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, action: str) -> None:
        """Begin an action; `answer` waits for its end.

        Raises:
            Internal: the child has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(action.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def answer(self) -> Done:
        """Wait for the end of the first action that was not answered yet.

        Raises:
            Internal: the child ended instead; the message has its last output.
            WaitExpired: the child did not answer in time.
        """
        answer = self._line()
        return Done(answer["began_s"], answer["ended_s"], answer["result"])

    def do(self, action: str) -> Done:
        """Begin an action, and wait for its end."""
        self.tell(action)
        return self.answer()

    def timed(self, action: str) -> Callable[[], float]:
        """A function that does an action which returns its seconds."""
        return lambda: float(self.do(action).result)

    def pause(self) -> None:
        """Stop the child where it is, so that it takes no time from others."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the child. Idempotent."""
        self.resume()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        end_s = time.monotonic() + ANSWER_DEADLINE_S
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([pipe], [], [], max(0.0, end_s - time.monotonic()))
            if not readable:
                raise WaitExpired(
                    f"{self.name} did not answer within {ANSWER_DEADLINE_S:g} s{self._tail()}"
                )
            received = os.read(pipe, 65536)
            if not received:
                raise self._ended()
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _ended(self) -> Internal:
        code = self._process.wait()
        return Internal(f"{self.name} ended with exit code {code}{self._tail()}")

    def _tail(self) -> str:
        self._said.seek(0)
        said = self._said.read().decode("utf-8", "replace").strip()
        return f"; it said:\n{said[-_TAIL_CHARACTERS:]}" if said else "; it said nothing"


def together(children: list[Child], action: str) -> float:
    """Do an action in all children at once; seconds from the first beginning to the last end."""
    for child in children:
        child.tell(action)
    done = [child.answer() for child in children]
    return max(one.ended_s for one in done) - min(one.began_s for one in done)


def open_answers() -> TextIO:
    """In a child: the stream of its answers. From now on, prints go to standard error."""
    die_with_parent_if_asked(os.environ)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def say(answers: TextIO, answer: Mapping[str, object]) -> None:
    """In a child: send one line."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def obey(answers: TextIO, actions: Mapping[str, Callable[[], object]]) -> None:
    """In a child: report that it is ready, and do actions until standard input ends.

    Raises:
        InvalidConfig: there is no such action.
    """
    say(answers, {})
    for line in sys.stdin:
        name = line.strip()
        action = actions.get(name)
        if action is None:
            raise InvalidConfig(f"action is '{name}'; expected one of {', '.join(actions)}")
        began_s = time.perf_counter()
        result = action()
        ended_s = time.perf_counter()
        say(answers, {"began_s": began_s, "ended_s": ended_s, "result": result})
