"""Success on unseen levels, transcripts, and playing by hand."""
