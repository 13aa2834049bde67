"""Tool calls: how families of models write them, how they are read from text that comes in pieces, and how a
grammar forces them."""
