"""Watchers of a full run while it trains: its promise, its memory, its guards, its progress."""
