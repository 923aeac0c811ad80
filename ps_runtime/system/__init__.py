"""The machine that a process runs on: clock, disk, memory, processor; and the process's own end."""
