"""What a run has written, for people: a page, a comparison, merged traces, a live view."""
