"""Clock, disk, memory and processor: the machine that a process runs on."""
