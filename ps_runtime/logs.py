"""Log lines: one per transition, never per message.

A line is ``time level role event=... key=value ...``; values with spaces, quotes or "=" are JSON
strings, so that a line can be split by any tool. Only the logger "pushpull" is touched: a worker
process belongs to its training script, which configures logging as it likes.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback

from ps_core.errors import InvalidConfig

LOGGER_NAME = "pushpull"
LEVELS = ("debug", "info", "warning", "error")
MAX_VALUE_CHARACTERS = 2_000
"""A value longer than this is cut: one bad request must not fill a disk."""

_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)')

_logger = logging.getLogger(LOGGER_NAME)


class _LineFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z info server event=...``; a traceback follows on its own lines."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = f"{stamp}.{int(record.msecs):03d}Z {record.levelname.lower()} {self._role}"
        line = f"{head} {record.getMessage()}"
        if record.exc_info:
            line += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return line


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever `sys.stderr` is at the time, so that a redirected stderr is respected."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure(role: str, level: str) -> None:
    """Send pushpull's log lines to stderr, as `role`; calling it again replaces the former setting.

    Args:
        role: what the lines name, such as "server" or "worker-3".
        level: one of `LEVELS`.

    Raises:
        InvalidConfig: there is no such level.
    """
    if level.lower() not in LEVELS:
        raise InvalidConfig(f"log level is '{level}'; expected one of {', '.join(LEVELS)}")
    for handler in [h for h in _logger.handlers if isinstance(h, _StderrHandler)]:
        _logger.removeHandler(handler)
    handler = _StderrHandler()
    handler.setFormatter(_LineFormatter(role))
    _logger.addHandler(handler)
    _logger.setLevel(level.upper())
    _logger.propagate = False


def line(event: str, fields: dict[str, object]) -> str:
    """The text of an event: ``event=... key=value ...``."""
    return " ".join([f"event={_quoted(event)}", *(f"{k}={_quoted(v)}" for k, v in fields.items())])


def fields_of(text: str) -> dict[str, str]:
    """What a line of `line` has, "event" included; nothing if it is none."""
    found: dict[str, str] = {}
    for name, value in _FIELD.findall(text):
        try:
            found[name] = json.loads(value) if value.startswith('"') else value
        except ValueError:
            found[name] = value
    return found if "event" in found else {}


def debug(event: str, **fields: object) -> None:
    """Log what only a developer wants to see."""
    if _logger.isEnabledFor(logging.DEBUG):
        _logger.debug("%s", line(event, fields))


def info(event: str, **fields: object) -> None:
    """Log a transition."""
    _logger.info("%s", line(event, fields))


def warning(event: str, **fields: object) -> None:
    """Log something that a person may want to act on."""
    _logger.warning("%s", line(event, fields))


def error(event: str, **fields: object) -> None:
    """Log a failure."""
    _logger.error("%s", line(event, fields))


def exception(event: str, failure: BaseException, **fields: object) -> None:
    """Log a failure that is a bug of ours, with its traceback."""
    _logger.error("%s", line(event, fields), exc_info=failure)


def _quoted(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if len(text) > MAX_VALUE_CHARACTERS:
        text = text[:MAX_VALUE_CHARACTERS] + "..."
    plain = bool(text) and text.isprintable() and not any(c in ' "=' for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)
