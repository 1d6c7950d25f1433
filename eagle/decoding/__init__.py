"""Generation: cycles of draft and verification, beams, and how long drafts should be."""
