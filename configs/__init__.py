"""Presets, each runnable by name: `async-rl train NAME`."""
