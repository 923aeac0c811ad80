"""The scheduler's journal: what it keeps so that its restart is no event (ADR 0019)."""
