"""Tables whose consistency changes again and again in the simulated cluster (S6).

Every promise of a setting holds for the clocks that it belongs to, whatever came before, and
nothing is lost, applied twice, or waited for without end.
"""

from __future__ import annotations

from collections import Counter

from tests.sim.scheduled import ScheduledSimulation


def test_every_clock_has_its_setting(sim_seeds: tuple[int, ...]) -> None:
    """G1, G3, G4 under settings that change while steps, promises and views are on their way."""
    total: Counter[str] = Counter()
    for seed in sim_seeds:
        simulation = ScheduledSimulation(seed, narrate=len(sim_seeds) == 1)
        try:
            total += simulation.run()
        except Exception:
            print("\n".join(simulation.world.transcript))
            print(f"SEED={seed}")
            raise
    print(f"\n{len(sim_seeds)} seeds with changes")
    print(", ".join(f"{name} {count}" for name, count in sorted(total.items())))
    if len(sim_seeds) >= 20:
        expected = {
            "proposed", "changed", "moved", "withdrawn", "rejected", "discarded", "scaled",
            "forgotten", "reads of bsp after a change", "reads of ssp after a change",
        }  # fmt: skip
        missing = expected - set(total)
        assert not missing, f"never happened: {missing}"
