"""Real clusters whose servers are killed, paused and cut off under load: `make chaos`."""
