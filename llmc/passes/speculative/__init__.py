"""Passes that give a graph what drafting tokens needs."""
