"""What a benchmark measures with: samples, a process's memory, the machine it runs on."""
