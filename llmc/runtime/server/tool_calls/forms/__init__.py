"""One record a form of tool calls, by how a call is written."""
