"""A local HTTP server that speaks OpenAI's completions protocol; what it says is the test's."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Answer = Callable[[str, web.Request], "str | web.Response | Awaitable[web.Response]"]  # (the prompt's text, request)


@asynccontextmanager
async def openai_server(answer: Answer):
    """`async with openai_server(answer) as url`: "http://127.0.0.1:PORT/v1"."""

    async def handle(request):
        body = await request.json()
        assert body["temperature"] == 0 and body["model"] and body["max_tokens"] > 0
        chat = request.path.endswith("/chat/completions")
        reply = answer(body["messages"][-1]["content"] if chat else body["prompt"], request)
        if asyncio.iscoroutine(reply):
            reply = await reply
        if isinstance(reply, web.Response):
            return reply
        said = {"message": {"role": "assistant", "content": reply}} if chat else {"text": reply}
        return web.json_response({"choices": [{"index": 0, "finish_reason": "stop"} | said]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    app.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
