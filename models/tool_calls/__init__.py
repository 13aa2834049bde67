"""Tool calls: how families of models write them, read from text that comes in pieces, and forced by a
grammar."""
