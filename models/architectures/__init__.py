"""One file per architecture, named after `general.architecture`, and the decoder that all of them share."""
