"""What an agent is, as data: its definition, its tools, and where definitions come from. Who carries it out is the
runner.

    from turnstream.agents import Agent, tool

    @tool(idempotent=True)
    def weather(city: str) -> str:
        "Today's weather in a city."
        ...

    support = Agent(name="support", model="openai:gpt-5-mini", instructions="Be brief.", tools=[weather])
"""

from turnstream.agents.check import check
from turnstream.agents.definition import Agent, define
from turnstream.agents.errors import AgentsError, Fault
from turnstream.agents.graph import Graph
from turnstream.agents.load import BUILT_IN, Agents, Source, load
from turnstream.agents.mcp import McpServer
from turnstream.agents.models import PARAMS, context_of, lookup, unsaid
from turnstream.agents.terms import Control, Limits, Params
from turnstream.agents.tool import Tool, ToolContext, ToolError, tool

__all__ = [
    "BUILT_IN",
    "PARAMS",
    "Agent",
    "Agents",
    "AgentsError",
    "Control",
    "Fault",
    "Graph",
    "Limits",
    "McpServer",
    "Params",
    "Source",
    "Tool",
    "ToolContext",
    "ToolError",
    "check",
    "context_of",
    "define",
    "load",
    "lookup",
    "tool",
    "unsaid",
]
