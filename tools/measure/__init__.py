"""What commands that measure share: clocks, turns, other programs, synthetic models."""
