"""Several machines run one model: how they are named, started, checked, led and followed."""
