"""Answers from servers, checked."""
