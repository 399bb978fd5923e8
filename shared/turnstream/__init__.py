"""Turnstream: event-sourced sessions and runs for AI agents, on NATS JetStream."""

__version__ = "0.1.0"
