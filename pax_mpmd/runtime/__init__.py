"""Runs plans: an interpreter, channels between actors, actors as threads or as Ray processes."""
