"""The OpenAI-compatible server: HTTP around the asyncio engine, a live page, replicas. Needs the extra `serve`."""
