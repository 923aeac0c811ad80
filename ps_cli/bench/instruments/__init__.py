"""Instruments of the benchmarks: samples, a process's memory, the machine."""
