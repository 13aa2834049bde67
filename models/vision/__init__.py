"""Pictures as rows of a text model: the projector's file, preprocessing, and the encoder."""
