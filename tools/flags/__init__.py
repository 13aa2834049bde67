"""Flags that several commands share, and the objects that commands build from flags."""
