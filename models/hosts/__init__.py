"""Several machines run one model."""
