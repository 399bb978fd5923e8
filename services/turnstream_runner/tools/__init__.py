"""Carries out the tools that a model asks for. What a tool is stands in `turnstream.agents`."""
