"""Tools of MCP servers (https://modelcontextprotocol.io): connections to the servers of agents, and what is called
there. What an agent says of its servers stands in `turnstream.agents`; how a call is carried out for a run, in
`turnstream_runner.tools`.

    endpoint    where a server is, with what the environment holds in its place
    child       a server that is a process of ours
    dialog      what is said to a server: the only module, with `child`, that knows the MCP library
    connection  one dialog from its beginning to its end
    servers     the connections of this runner: opened when needed, shared, closed when idle
    offer       which tools of its servers an attempt of a run has, and what the model is told of them
    tool        one tool of a server, as `Tools` calls it
    names       what a tool of a server is called by a model
    content     what a tool returned, as the text that the model sees

The library takes a second and 25 MB to load (2026-12-01), so it is loaded when a server is first needed, in a thread.
"""
