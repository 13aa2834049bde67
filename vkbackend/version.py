"""The version of the package, where a file below the package's face can read it."""

VERSION = "0.1.0"
