"""Wrong settings of a server, as its log and its exit code have them."""

from __future__ import annotations

import pytest

from ps_runtime.system.process_end import REFUSED_EXIT_CODE
from ps_server.process import main


@pytest.mark.parametrize("wrong", ["--log-level=loud", "--log-format=xml"])
def test_a_wrong_form_of_the_log_is_refused_as_any_setting(
    wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("ERROR", logger="pushpull"), pytest.raises(SystemExit) as ended:
        main(["--scheduler=127.0.0.1:1", wrong])
    assert ended.value.code == REFUSED_EXIT_CODE
    assert wrong.partition("=")[2] in caplog.text
