"""Settings of consistency as values: which there are, how they are written, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core import limits
from ps_core.consistency import Consistency, Mode, StalePolicy, moving, parsed
from ps_core.errors import InvalidConfig


@pytest.mark.parametrize(
    "text",
    [
        "bsp", "bsp:backup=2", "bsp:backup=1,grace=20ms", "ssp:0", "ssp:4",
        "ssp:2..8", "ssp:0..1", "ssp:2..8@5", "ssp:2..8@8", "asp", "asp:reject=8",
        "asp:damp=0.5", "asp:divide", "asp:compensate=0.04", "asp:compensate=2,adaptive",
    ],
)  # fmt: skip
def test_a_setting_is_read_as_it_is_written(text: str) -> None:
    assert str(parsed(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "consistency is ''; expected one of bsp, "),
        ("ssp", "consistency is 'ssp'"),
        ("ssp:x", "consistency is 'ssp:x'"),
        ("ssp:-1", "staleness is -1; expected 0 to"),
        ("ssp:8..2", "most is 2; expected above 8, the lowest that s may be"),
        ("ssp:4..4", "most is 4; expected above 4"),
        ("ssp:0..0", "most is 0; expected above 0"),
        ("ssp:-1..4", "staleness is -1; expected 0 to"),
        ("ssp:1..9999999", "most is 9999999; expected 0 to"),
        ("ssp:2..8@9", "staleness is 9; expected 2 to 8, the bounds"),
        ("ssp:2..8@1", "staleness is 1; expected 2 to 8, the bounds"),
        ("ssp:2..", "consistency is 'ssp:2..'; expected one of bsp"),
        ("ssp:..8", "consistency is 'ssp:..8'"),
        ("ssp:2..8@", "consistency is 'ssp:2..8@'"),
        ("ssp:4@5", "consistency is 'ssp:4@5'"),
        ("asp:2..8", "consistency is 'asp:2..8'"),
        ("bsp:backup=-1", "backup_workers is -1"),
        ("bsp:grace=5ms", "consistency is 'bsp:grace=5ms'"),
        ("bsp:backup=1,grace=99999999ms", "grace_ms is 99999999"),
        ("asp:damp=0", "alpha is 0.0; expected above 0"),
        ("asp:damp=nan", "alpha is nan"),
        ("asp:reject=-2", "bound is -2"),
        ("asp:reject=1,damp=2", "consistency is 'asp:reject=1,damp=2'"),
        ("asp:accept=1", "consistency is 'asp:accept=1'"),
        ("asp:divide=2", "consistency is 'asp:divide=2'"),
        ("asp:adaptive", "consistency is 'asp:adaptive'"),
        ("asp:damp=1,adaptive", "has adaptive; expected it with ASP and compensate only"),
        ("bsp,adaptive", "consistency is 'bsp,adaptive'"),
        ("bsp:backup=1,adaptive", "consistency is 'bsp:backup=1,adaptive'"),
        ("asp:compensate=-1", "strength is -1.0"),
        ("asp:compensate=1,adaptive=3", "consistency is 'asp:compensate=1,adaptive=3'"),
    ],
)
def test_a_wrong_setting_is_named(text: str, words: str) -> None:
    with pytest.raises(InvalidConfig) as failure:
        parsed(text)
    assert words in failure.value.message


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (Consistency(Mode.ASP, backup_workers=1), "expected it with BSP only"),
        (Consistency(Mode.BSP, staleness=1), "expected it with SSP only"),
        (Consistency(Mode.SSP, policy=StalePolicy.DIVIDE), "expected it with ASP only"),
        (Consistency(Mode.BSP, grace_ms=5), "expected it with BSP and backup workers only"),
        (Consistency(Mode.ASP, alpha=1.0), "expected it with ASP and damp only"),
        (Consistency(Mode.ASP, most=3), "has most; expected it with SSP only"),
        (Consistency(Mode.BSP, least=3), "has least; expected it with SSP only"),
        (Consistency(Mode.SSP, staleness=3, least=3), "most is 0; expected above 3"),
        (Consistency(Mode.SSP, most=3, least=-1), "least is -1; expected 0 to"),
    ],
)
def test_a_field_belongs_to_one_mode(setting: Consistency, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        setting.validated()


SSP_MOVING = Consistency(Mode.SSP, staleness=2, least=2, most=8)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("bsp", Consistency()),
        ("bsp:backup=2", Consistency(Mode.BSP, backup_workers=2)),
        ("bsp:backup=1,grace=20ms", Consistency(Mode.BSP, backup_workers=1, grace_ms=20)),
        ("ssp:4", Consistency(Mode.SSP, staleness=4)),
        ("ssp:2..8", SSP_MOVING),
        ("ssp:2..8@5", Consistency(Mode.SSP, staleness=5, least=2, most=8)),
        ("asp", Consistency(Mode.ASP)),
        ("asp:reject=8", Consistency(Mode.ASP, policy=StalePolicy.REJECT, bound=8)),
        ("asp:damp=0.5", Consistency(Mode.ASP, policy=StalePolicy.DAMP, alpha=0.5)),
        ("asp:divide", Consistency(Mode.ASP, policy=StalePolicy.DIVIDE)),
        (
            "asp:compensate=2,adaptive",
            Consistency(Mode.ASP, policy=StalePolicy.COMPENSATE, strength=2.0, adaptive=True),
        ),
        (" ASP:Divide\n", Consistency(Mode.ASP, policy=StalePolicy.DIVIDE)),
    ],
)
def test_a_text_says_one_setting(text: str, setting: Consistency) -> None:
    assert parsed(text) == setting == setting.validated()
    assert repr(setting) == repr(parsed(str(setting)))


MOST: dict[str, float] = {
    "backup_workers": limits.MAX_NODE_COUNT, "staleness": limits.MAX_STALENESS,
    "grace_ms": limits.MAX_GRACE_MS, "bound": limits.MAX_STALENESS,
    "alpha": limits.MAX_ALPHA, "strength": limits.MAX_ALPHA, "most": limits.MAX_STALENESS,
}  # fmt: skip
OWNERS = {
    "backup_workers": Consistency(),
    "grace_ms": Consistency(backup_workers=1),
    "staleness": Consistency(Mode.SSP),
    "most": SSP_MOVING,
    "bound": Consistency(Mode.ASP, policy=StalePolicy.REJECT),
    "alpha": Consistency(Mode.ASP, policy=StalePolicy.DAMP),
    "strength": Consistency(Mode.ASP, policy=StalePolicy.COMPENSATE),
}


def changed(field: str, value: float) -> Consistency:
    return replace(OWNERS[field], **{field: value})  # type: ignore[arg-type]  # what a test changes


@pytest.mark.parametrize("field", MOST)
def test_a_number_may_be_as_large_as_its_limit_and_no_larger(field: str) -> None:
    changed(field, MOST[field]).validated()
    with pytest.raises(InvalidConfig, match=f"{field} is"):
        changed(field, MOST[field] + 1).validated()


@pytest.mark.parametrize("field", ["backup_workers", "grace_ms", "staleness", "bound"])
def test_a_count_may_be_nothing_and_no_less(field: str) -> None:
    changed(field, 0).validated()
    with pytest.raises(InvalidConfig, match=f"{field} is -1; expected 0 to {MOST[field]}"):
        changed(field, -1).validated()


@pytest.mark.parametrize(
    ("setting", "field", "owner"),
    [
        (Consistency(Mode.SSP, grace_ms=5), "grace_ms", "BSP and backup workers"),
        (Consistency(Mode.ASP, staleness=1), "staleness", "SSP"),
        (Consistency(Mode.ASP, least=1), "least", "SSP"),
        (Consistency(Mode.BSP, policy=StalePolicy.DIVIDE), "policy", "ASP"),
        (Consistency(Mode.ASP, bound=1), "bound", "ASP and reject"),
        (Consistency(Mode.ASP, strength=1.0), "strength", "ASP and compensate"),
        (Consistency(Mode.ASP, adaptive=True), "adaptive", "ASP and compensate"),
    ],
)
def test_who_owns_a_field_is_said(setting: Consistency, field: str, owner: str) -> None:
    with pytest.raises(InvalidConfig, match=f"has {field}; expected it with {owner} only"):
        setting.validated()


@pytest.mark.parametrize("policy", [StalePolicy.DAMP, StalePolicy.COMPENSATE])
def test_a_policy_with_a_number_needs_one(policy: StalePolicy) -> None:
    with pytest.raises(InvalidConfig, match=r"is 0\.0; expected above 0"):
        Consistency(Mode.ASP, policy=policy).validated()


@pytest.mark.parametrize(("least", "most"), [(0, 1), (2, 8), (7, limits.MAX_STALENESS)])
def test_a_bound_that_moves_begins_at_its_lowest(least: int, most: int) -> None:
    setting = moving(least, most)
    assert (setting.mode, setting.staleness, setting.least) == (Mode.SSP, least, least)
    assert setting.most == most
    assert setting.moves
    assert replace(setting, staleness=most).validated().as_requested == setting


@pytest.mark.parametrize("staleness", [1, 9])
def test_a_bound_is_between_its_ends(staleness: int) -> None:
    """And at them."""
    for within in (2, 5, 8):
        assert replace(SSP_MOVING, staleness=within).validated().staleness == within
    with pytest.raises(InvalidConfig, match=f"staleness is {staleness}; expected 2 to 8"):
        replace(SSP_MOVING, staleness=staleness).validated()


def test_a_bound_that_is_fixed_does_not_move() -> None:
    fixed = Consistency(Mode.SSP, staleness=3)
    assert not fixed.moves
    assert fixed.as_requested == fixed
    with pytest.raises(InvalidConfig, match="most is 0; expected above 0"):
        moving(0, 0)


def test_what_is_no_gradient_is_taken_as_it_is_and_waited_for_as_before() -> None:
    for text in ("asp:reject=3", "asp:damp=2", "asp:compensate=1,adaptive"):
        assert parsed(text).without_policy() == Consistency(Mode.ASP)
    for text in ("bsp:backup=2,grace=7ms", "ssp:4", "ssp:2..8@5"):
        assert parsed(text).without_policy() == parsed(text)


@pytest.mark.parametrize(
    ("text", "scales"),
    [
        ("bsp", [1.0, 1.0, 1.0, 1.0]),
        ("asp:damp=0.5", [1.0, 1 / 1.5, 1 / 2, 1 / 2.5]),
        ("asp:divide", [1.0, 1.0, 1 / 2, 1 / 3]),
        ("asp:compensate=1", [1.0, 1.0, 1.0, 1.0]),
        ("asp:reject=1", [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_what_a_stale_push_is_multiplied_by(text: str, scales: list[float]) -> None:
    assert [parsed(text).scale(tau) for tau in range(4)] == scales


def test_what_is_staler_than_the_bound_is_turned_away() -> None:
    setting = parsed("asp:reject=2")
    assert [setting.rejects(tau) for tau in range(5)] == [False, False, False, True, True]
    assert not parsed("asp:damp=1").rejects(10)
