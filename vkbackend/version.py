"""The version of the package, in a file that lower layers can import."""

VERSION = "0.1.0"
