"""Log lines: one per transition, never per message.

A line is ``time level role event=... key=value ...``; a value with spaces, quotes or "=" is a JSON
string, so that any tool can split a line. In the format json, a line is an object with "time",
"level", "process", "event", the fields, and perhaps "traceback". Only the logger "pushpull" is
configured, because a training script configures the others as it likes.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
import traceback

from ps_core.errors import InvalidConfig

LOGGER_NAME = "pushpull"
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
MAX_VALUE_CHARACTERS = 2_000
"""A longer value is cut, so that one bad request does not fill a disk."""

_FIELDS = "pushpull_fields"
"""The attribute of a log record that has an event and its fields."""

_HEAD_WORDS = 3
"""Words of a line before its event: time, level, role."""

_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)')

_logger = logging.getLogger(LOGGER_NAME)


class _Formatter(logging.Formatter):
    """A line of text, which a traceback follows on its own lines, or a JSON object."""

    def __init__(self, role: str, line_format: str) -> None:
        super().__init__()
        self._role = role
        self._is_json = line_format == "json"

    def format(self, record: logging.LogRecord) -> str:
        time_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        time_text += f".{int(record.msecs):03d}Z"
        level, message, failure = record.levelname.lower(), record.getMessage(), ""
        if record.exc_info:
            failure = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        if not self._is_json:
            line = f"{time_text} {level} {self._role} {message}"
            return f"{line}\n{failure}" if failure else line
        said: dict[str, object] = {"time": time_text, "level": level, "process": self._role}
        fields = getattr(record, _FIELDS, None)
        said |= {"message": _cut(message)} if fields is None else fields
        if failure:
            said["traceback"] = failure
        return json.dumps(said, ensure_ascii=False)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the present `sys.stderr`, which may have been redirected since."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure(role: str, level: str, line_format: str = "text") -> None:
    """Send pushpull's log lines to stderr; another call replaces the settings.

    `role` is the name in each line, such as "server" or "worker-3". InvalidConfig if `level` is
    none of `LEVELS`, or `line_format` none of `FORMATS`.
    """
    if line_format not in FORMATS:
        raise InvalidConfig(f"log format is '{line_format}'; expected one of {', '.join(FORMATS)}")
    if level.lower() not in LEVELS:
        raise InvalidConfig(f"log level is '{level}'; expected one of {', '.join(LEVELS)}")
    for handler in [h for h in _logger.handlers if isinstance(h, _StderrHandler)]:
        _logger.removeHandler(handler)
    handler = _StderrHandler()
    handler.setFormatter(_Formatter(role, line_format))
    _logger.addHandler(handler)
    _logger.setLevel(level.upper())
    _logger.propagate = False


def line(event: str, fields: dict[str, object]) -> str:
    """The text of an event: ``event=... key=value ...``."""
    return " ".join([f"event={_quoted(event)}", *(f"{k}={_quoted(v)}" for k, v in fields.items())])


def fields_of(text: str) -> dict[str, str]:
    """The fields of a log line, "event" included; empty for another text."""
    if text.startswith("{"):
        return _json_fields(text)
    found: dict[str, str] = {}
    for name, value in _FIELD.findall(text):
        try:
            found[name] = json.loads(value) if value.startswith('"') else value
        except ValueError:
            found[name] = value
    return found if "event" in found else {}


def is_error(text: str) -> bool:
    """True for a log line of level "error"."""
    if text.startswith("{"):
        return _json_fields(text).get("level") == "error"
    head = text.split(" event=", 1)[0].split()
    return len(head) == _HEAD_WORDS and head[1] == "error"


def _json_fields(text: str) -> dict[str, str]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(found, dict) or "event" not in found:
        return {}
    return {str(name): str(value) for name, value in found.items()}


def _log(level: int, event: str, failure: BaseException | None = None, /, **fields: object) -> None:
    if _logger.isEnabledFor(level):
        said = {"event": event, **{name: _plain(value) for name, value in fields.items()}}
        _logger.log(level, "%s", line(event, fields), exc_info=failure, extra={_FIELDS: said})


def debug(event: str, **fields: object) -> None:
    _log(logging.DEBUG, event, **fields)


def info(event: str, **fields: object) -> None:
    _log(logging.INFO, event, **fields)


def warning(event: str, **fields: object) -> None:
    """Log something that a person may want to act on."""
    _log(logging.WARNING, event, **fields)


def error(event: str, **fields: object) -> None:
    _log(logging.ERROR, event, **fields)


def exception(event: str, failure: BaseException, **fields: object) -> None:
    """Log a failure that is a bug of ours, with its traceback."""
    _log(logging.ERROR, event, failure, **fields)


def _plain(value: object) -> object:
    """The value for JSON, in which a number stays a number."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else str(value)
    return _cut(str(value))


def _cut(text: str) -> str:
    return text[:MAX_VALUE_CHARACTERS] + "..." if len(text) > MAX_VALUE_CHARACTERS else text


def _quoted(value: object) -> str:
    text = _cut(f"{value:.3f}" if isinstance(value, float) else str(value))
    plain = bool(text) and text.isprintable() and not any(c in ' "=' for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)
