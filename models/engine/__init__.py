"""The engine: requests, the scheduler, answers, and the process it runs in."""
