"""From requests to tokens: the scheduler, the caches of prefixes, the engine loop. It knows no protocol."""
