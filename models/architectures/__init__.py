"""One file per architecture, named after `general.architecture`, and their shared decoder."""
