"""Images with text: patches, their positions, and samples that are packed from both."""
