"""The HTTP side: routes, streams, and errors in OpenAI's shape. No model here; see service.py and engine.py."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mst_serve.protocol import ApiError, ChatRequest, CompletionRequest, parse
from mst_serve.service import Answer, Service


def create_app(service: Service) -> FastAPI:
    """The server's ASGI application."""
    app = FastAPI(title="mst-serve", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)

    @app.get("/health")
    async def health() -> Response:
        alive, body = service.health()
        return JSONResponse(body, status_code=200 if alive else 503)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.card()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(service.card())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = parse(ChatRequest, await request.body())
        return await _respond(request, await service.chat(asked), bool(asked.stream))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = parse(CompletionRequest, await request.body())
        return await _respond(request, await service.complete(asked), bool(asked.stream))

    return app


async def _respond(request: Request, answer: Answer, stream: bool) -> Response:
    """Send an answer, whole or streamed. The answer's slots are freed when the client goes away."""
    if stream:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(_events(request, answer), media_type="text/event-stream", headers=headers)
    async with answer.watched(request.receive):
        return JSONResponse(await answer.whole())


async def _events(request: Request, answer: Answer) -> AsyncIterator[str]:
    async with answer.watched(request.receive):
        try:
            async for chunk in answer.chunks():
                yield _event(chunk)
        except ApiError as error:
            yield _event(error.body())
            return
        yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _error(error: ApiError) -> JSONResponse:
    headers = {"Retry-After": "1"} if error.status == HTTPStatus.TOO_MANY_REQUESTS else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _on_api_error(_: Request, error: Exception) -> Response:
    return _error(error) if isinstance(error, ApiError) else await _on_bug(_, error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    phrase = HTTPStatus(status).phrase.lower()
    answer = _error(ApiError(status, f"{request.method} {request.url.path}: {phrase}", code=phrase.replace(" ", "_")))
    if isinstance(error, HTTPException) and error.headers:
        answer.headers.update(error.headers)
    return answer


async def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_bug(_: Request, __: Exception) -> Response:
    """Starlette raises the exception again after this answer, so that it is logged."""
    return _error(ApiError(500, "internal error of the server", code="internal_error"))
