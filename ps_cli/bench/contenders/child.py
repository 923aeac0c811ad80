"""Contenders: processes that do actions by name, over a pipe, a line at a time.

A child runs an entry of this room, a context manager of its actions, and sends one JSON object when
it is ready. Then it reads the name of an action from each line, does it, and answers with its
beginning and its end (on the machine's monotonic clock, which all children share) and its result.
A child ends when its standard input does. From its beginning, prints go to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from ps_cli.bench.instruments.shaped_link import within
from ps_core.errors import Internal, InvalidConfig, WaitExpired
from ps_runtime.launch.role_environment import role_environment
from ps_runtime.system.process_end import die_with_parent_if_asked

ANSWER_DEADLINE_S = 300.0
"""A contender moves 256 MB in seconds even on a busy machine, where importing torch takes long."""

_STOP_GRACE_S = 5.0
_TAIL_CHARACTERS = 2000

Actions = Mapping[str, Callable[[], object]]
"""The actions of a child, by name."""


@dataclass(frozen=True, slots=True)
class Done:
    """An action that a child did, and its result."""

    began_s: float
    ended_s: float
    result: Any

    @property
    def wall_s(self) -> float:
        return self.ended_s - self.began_s


@contextlib.contextmanager
def started(*commands: tuple[str, ...], namespace: str = "") -> Iterator[list[Child]]:
    """Children, each from its entry ("module:function" of this room) and its arguments, in a
    network namespace if one is named.

    All are started before the first is waited for, since they may need each other.

    Blocking: until all are ready.

    Raises:
        Internal: a child ended; the message has its last output.
        WaitExpired: a child was not ready in time.
    """
    with contextlib.ExitStack() as stack:
        children = []
        for command in commands:
            children.append(Child(*command, namespace=namespace))
            stack.callback(children[-1].stop)
        for child in children:
            child._line()
        yield children


class Child:
    """A process that does actions; its methods raise as `started`."""

    def __init__(self, entry: str, *arguments: str, namespace: str = "") -> None:
        self.name = entry.replace(":", " ")
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - `stop` closes it
        before = within(namespace) if namespace else ()
        self._process = subprocess.Popen(
            [*before, sys.executable, "-P", "-m", __name__, entry, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=role_environment(os.environ, {}),
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout
        self.pid = self._process.pid

    def tell(self, action: str) -> None:
        """Begin an action; `answer` waits for its end."""
        try:
            self._commands.write(action.encode() + b"\n")
        except BrokenPipeError as error:
            raise self._ended() from error

    def answer(self) -> Done:
        """Wait for the end of the first action that was not answered yet."""
        return Done(**self._line())

    def do(self, action: str) -> Done:
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
        self.resume()
        self._commands.close()
        for number in (signal.SIGINT, signal.SIGKILL):  # it is in an action, or still begins
            try:
                self._process.wait(_STOP_GRACE_S)
                break
            except subprocess.TimeoutExpired:
                self._process.send_signal(number)
        self._process.wait()
        self._answers.close()
        self._said.close()

    def _line(self) -> dict[str, Any]:
        if not select.select([self._answers], [], [], ANSWER_DEADLINE_S)[0]:
            raise WaitExpired(
                f"{self.name} did not answer within {ANSWER_DEADLINE_S:g} s{self._tail()}"
            )
        line = self._answers.readline()  # a child writes its lines whole
        if not line:
            raise self._ended()
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


def main() -> None:
    """`ENTRY ARGUMENTS...`: be a child."""
    entry, *arguments = sys.argv[1:]
    die_with_parent_if_asked(os.environ)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with pkgutil.resolve_name(f"{__package__}.{entry}")(*arguments) as actions:
        _obey(answers, actions)


def _obey(answers: TextIO, actions: Actions) -> None:
    print("{}", file=answers, flush=True)
    for name in map(str.strip, sys.stdin):
        if name not in actions:
            raise InvalidConfig(f"action is '{name}'; expected one of {', '.join(actions)}")
        began_s = time.perf_counter()
        result = actions[name]()
        done = {"began_s": began_s, "ended_s": time.perf_counter(), "result": result}
        print(json.dumps(done), file=answers, flush=True)


if __name__ == "__main__":
    main()
