"""Layout, caches, memory and time of a model on given devices."""
