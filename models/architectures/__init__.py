"""One file per architecture, named after `general.architecture`, and the decoder they share."""
