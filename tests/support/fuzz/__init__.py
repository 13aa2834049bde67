"""Seeded random hostile input for every parser, and the search for inputs that are handled badly."""
