"""The version, for all layers to import."""

VERSION = "0.1.0"
